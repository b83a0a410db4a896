# SPDX-License-Identifier: Apache-2.0
"""Run an audit: list the modules, start the observer in a clean interpreter, wait with deadlines, read the results."""

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.firewall import listing as listing_script
from nemo_rl_core.firewall import observer
from nemo_rl_core.firewall.listing import LISTING
from nemo_rl_core.firewall.observer import PLAN, output_of
from nemo_rl_core.firewall.processes import Workplace, end_group, workplace
from nemo_rl_core.firewall.report import AuditReport, ForbiddenName, ModuleResult
from nemo_rl_core.firewall.watch import Course, Watch
from nemo_rl_core.guard.policy import FORBIDDEN_ROOTS

__all__ = ["AuditRequest", "audit"]

_OLDEST = (3, 9)
#: Seconds for an interpreter to start and list a package.
_LISTING_S = 60.0
_LISTING_OUTPUT = "output-listing"


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """What to audit.

    Attributes:
        package: An installed package or module, dotted or not; every module below it is imported.
        forbid: Modules that nobody may load; each covers everything below it.
        python: The interpreter whose environment is audited; None takes this one.
        timeout_s: Deadline of each module's import in seconds.
        jobs: Number of modules that are imported at the same time.
        preload: Imported before the package, once for all of its modules: what is heavy and needed by many.

    Raises:
        ConfigError: If a value breaks a rule.
    """

    package: str
    forbid: tuple[str, ...]
    python: str | None = None
    timeout_s: float = 60.0
    jobs: int = 1
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = [("PACKAGE", self.package), *(("--forbid", name) for name in self.forbid)]
        for what, name in (*named, *(("--preload", name) for name in self.preload)):
            if not name or not all(part.isidentifier() for part in name.split(".")):
                raise ConfigError(
                    f"{what} takes the name that an import statement has, e.g. vllm or transformers.models; "
                    f"got {name!r}"
                )
        if not self.forbid:
            raise ConfigError("an audit needs at least one forbidden name: --forbid NAME")
        for name in self.forbid:
            if _covers(name, self.package):
                raise ConfigError(
                    f"{self.package} itself is covered by --forbid {name}, so every import would count; "
                    f"audit a package outside it"
                )
            for preload in self.preload:
                if _covers(name, preload):
                    raise ConfigError(
                        f"--preload {preload} is covered by --forbid {name}, so it would be loaded in every process "
                        f"whoever asks; preload something else"
                    )
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"--timeout is a positive number of seconds; got {self.timeout_s}")
        if self.jobs < 1:
            raise ConfigError(f"--jobs is at least 1; got {self.jobs}")


def _covers(forbidden: str, name: str) -> bool:
    return name == forbidden or name.startswith(forbidden + ".")


def audit(request: AuditRequest, progress: Callable[[int, int], None] | None = None) -> AuditReport:
    """Import the package and each module below it, each in a process of its own, and see who loads what.

    The interpreter runs isolated (``-I``): neither the current directory, nor ``PYTHONPATH``, nor the user's own
    site-packages are looked at, only what is installed in its environment. The guard is not armed in it.

    Args:
        request: What to audit.
        progress: Called with the number of modules done and of all of them.

    Raises:
        ConfigError: If the interpreter or the package is not there.
    """
    started = time.monotonic()
    python = _interpreter(request.python)
    with workplace() as place:
        listing = _list(request, python, place)
        modules, skipped = _split(request, listing)
        _write_plan(request, modules, place.folder / PLAN)
        course = Course(
            package=request.package,
            preload=request.preload,
            total=1 + len(modules),
            timeout_s=request.timeout_s,
            progress=progress,
        )
        watch = Watch(course, place, listing["stdlib"])
        watch.follow(place.start(python, observer.__file__, str(place.folder), output=output_of(0)))
        preloads = watch.preloads()
        if preloads and preloads[-1].failure is not None:
            raise ConfigError(_why_not_preloaded(preloads[-1], listing))
        results = [watch.result(index, module) for index, module in enumerate([request.package, *modules])]
        preloaded = watch.preloaded()
    return AuditReport(
        package=request.package,
        forbidden=tuple(_forbidden(name, listing) for name in request.forbid),
        python=listing["executable"],
        python_version=listing["version"],
        seconds=time.monotonic() - started,
        preloaded=preloaded,
        preloads=preloads,
        results=tuple(results),
        skipped=skipped,
    )


def _write_plan(request: AuditRequest, modules: Sequence[str], path: Path) -> None:
    lines = [f"timeout_s {request.timeout_s}", f"jobs {request.jobs}", f"package {request.package}"]
    lines += [f"forbid {name}" for name in request.forbid]
    lines += [f"preload {name}" for name in request.preload]
    lines += [f"module {name}" for name in modules]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _interpreter(python: str | None) -> str:
    if python is None:
        return sys.executable
    try:
        # Links stay as they are: the interpreter of a virtual environment is one.
        found = shutil.which(python) if os.sep not in python else os.path.abspath(Path(python).expanduser())  # noqa: PTH100
    except (OSError, RuntimeError):  # the current directory is gone, or ~name is nobody's
        found = None
    if found is None or not os.access(found, os.X_OK) or Path(found).is_dir():
        raise ConfigError(f"--python takes the path of an interpreter, e.g. .venv/bin/python; got {python!r}")
    return found


def _list(request: AuditRequest, python: str, place: Workplace) -> dict[str, Any]:
    """Ask the interpreter what the package consists of; nothing of it is imported."""
    arguments = [listing_script.__file__, str(place.folder), request.package, *request.forbid]
    try:
        process = place.start(python, *arguments, output=_LISTING_OUTPUT)
    except OSError as error:
        raise ConfigError(f"{python} cannot be run: {error}") from error
    try:
        code = process.wait(timeout=_LISTING_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{python} did not list {request.package} within {_LISTING_S:g} s") from error
    finally:
        end_group(process.pid)  # with what a .pth file of that environment may have started
        process.wait()
    answer = place.folder / LISTING
    if code or not answer.exists():
        raise ConfigError(
            f"{python} does not answer like a CPython from 3.9 on (exit code {code}): "
            f"{place.output(_LISTING_OUTPUT).strip()[-800:]}"
        )
    listing = ast.literal_eval(answer.read_text(encoding="ascii"))
    if tuple(map(int, listing["version"].split(".")[:2])) < _OLDEST:
        raise ConfigError(f"an audit needs a CPython from 3.9 on; {python} is {listing['version']}")
    if listing["problem"]:
        raise ConfigError(_why_not(python, listing))
    return listing


def _why_not(python: str, listing: Mapping[str, Any]) -> str:
    """Say why there is nothing to audit."""
    missing = listing["missing"]
    if listing["problem"] == "empty":
        return (
            f"{missing!r} is a folder without a module in {python}, which is no installed package "
            f"(left behind by an uninstall?); install it there, or name another package"
        )
    beside = listing["siblings"] or listing["top_level"]
    near = get_close_matches(missing, beside, n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    if Path(missing).is_dir():
        hint += f" The folder {missing!r} in the current directory is no installed package."
    return (
        f"{missing!r} is not installed in {python}.{hint} Only what is installed is audited, not the current "
        f"directory or PYTHONPATH: install it there, or name another interpreter with --python"
    )


def _why_not_preloaded(result: ModuleResult, listing: Mapping[str, Any]) -> str:
    """Say what became of a preload that failed."""
    failure = result.failure
    assert failure is not None
    root = result.name.partition(".")[0]
    near = () if root in listing["top_level"] else get_close_matches(root, listing["top_level"], n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    where = f" at {failure.traceback[-1]}" if failure.traceback else ""
    printed = f"; it printed: {failure.output[-300:]}" if failure.output and not failure.type else ""
    return (
        f"--preload {result.name} cannot be imported, and nothing was audited: {failure}{where}{printed}.{hint} "
        f"Preload something else, or nothing: it only saves time"
    )


def _split(request: AuditRequest, listing: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return the modules to import below the package, and those to skip with the reason."""
    skipped = dict(listing["skipped"])
    modules = []
    for name in listing["modules"]:
        if any(_covers(forbidden, name) for forbidden in request.forbid):
            skipped[name] = "it is forbidden itself"
        else:
            modules.append(name)
    return modules, dict(sorted(skipped.items()))


def _forbidden(name: str, listing: Mapping[str, Any]) -> ForbiddenName:
    is_installed = listing["installed"][name]
    root = name.partition(".")[0]
    is_known = is_installed or any(root in roots for roots in FORBIDDEN_ROOTS.values())
    near = () if is_known else tuple(get_close_matches(root, listing["top_level"], n=3, cutoff=0.8))
    return ForbiddenName(name=name, is_installed=is_installed, near=near)
