# SPDX-License-Identifier: Apache-2.0
"""Run an audit: list the modules, start the observer in a clean interpreter, wait with deadlines, read the results."""

import ast
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.firewall import listing as listing_script
from nemo_rl_core.firewall import observer
from nemo_rl_core.firewall.listing import LISTING
from nemo_rl_core.firewall.observer import EVENTS, PLAN, output_of, result_of
from nemo_rl_core.firewall.places import asks_from, split_dump, traceback_lines
from nemo_rl_core.firewall.report import AuditReport, Failure, ForbiddenName, ModuleResult, ModuleState
from nemo_rl_core.guard.policy import FORBIDDEN_ROOTS, VARIABLES

__all__ = ["AuditRequest", "audit"]

_OLDEST = (3, 9)
#: Seconds for an interpreter to start, and for one to list a package.
_START_S, _LISTING_S = 60.0, 60.0
#: Seconds beyond a deadline after which the observer itself is held to hang.
_GRACE_S = 10.0
_POLL_S = 0.02
_OUTPUT_TAIL = 2000


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """What to audit.

    Attributes:
        package: An installed package or module, dotted or not; every module below it is imported.
        forbid: Modules that nobody may load; each covers everything below it.
        python: The interpreter whose environment is audited; None takes this one.
        timeout_s: Deadline of each module's import in seconds.
        jobs: Number of modules that are imported at the same time.

    Raises:
        ConfigError: If a value breaks a rule.
    """

    package: str
    forbid: tuple[str, ...]
    python: str | None = None
    timeout_s: float = 60.0
    jobs: int = 1

    def __post_init__(self) -> None:
        for what, name in (("PACKAGE", self.package), *(("--forbid", name) for name in self.forbid)):
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
    with tempfile.TemporaryDirectory(prefix="nemo-rl-audit-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "cwd").mkdir()  # what a module writes beside itself goes with the folder
        listing = _list(request, python, folder)
        modules, skipped = _split(request, listing)
        plan = {"timeout_s": [request.timeout_s], "jobs": [request.jobs], "package": [request.package]}
        lines = [f"{key} {value}" for key, values in plan.items() for value in values]
        lines += [f"forbid {name}" for name in request.forbid] + [f"module {name}" for name in modules]
        (folder / PLAN).write_text("\n".join(lines) + "\n", encoding="utf-8")
        watch = _Watch(request, folder, 1 + len(modules), progress)
        watch.run([python, *_flags(), observer.__file__, str(folder)])
        results = [
            watch.result(index, module, listing["stdlib"]) for index, module in enumerate([request.package, *modules])
        ]
        preloaded = watch.preloaded()
    return AuditReport(
        package=request.package,
        forbidden=tuple(_forbidden(name, listing) for name in request.forbid),
        python=listing["executable"],
        python_version=listing["version"],
        seconds=time.monotonic() - started,
        preloaded=preloaded,
        results=tuple(results),
        skipped=skipped,
    )


def _interpreter(python: str | None) -> str:
    if python is None:
        return sys.executable
    # Links stay as they are: the interpreter of a virtual environment is one.
    found = shutil.which(python) if os.sep not in python else os.path.abspath(Path(python).expanduser())  # noqa: PTH100
    if found is None or not os.access(found, os.X_OK) or Path(found).is_dir():
        raise ConfigError(f"--python takes the path of an interpreter, e.g. .venv/bin/python; got {python!r}")
    return found


def _flags() -> list[str]:
    # Unbuffered: what a module printed before it crashed is there to be read.
    return ["-I", "-u", *(["-B"] if sys.dont_write_bytecode else [])]


def _environment() -> dict[str, str]:
    """Return this process's variables without those that would arm the guard, which refuses what is to be seen."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES.values()}


def _list(request: AuditRequest, python: str, folder: Path) -> dict[str, Any]:
    """Ask the interpreter what the package consists of; nothing of it is imported."""
    command = [python, *_flags(), listing_script.__file__, str(folder), request.package, *request.forbid]
    try:
        done = subprocess.run(
            command,
            env=_environment(),
            cwd=folder / "cwd",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LISTING_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{python} did not list {request.package} within {_LISTING_S:g} s") from error
    except OSError as error:
        raise ConfigError(f"{python} cannot be run: {error}") from error
    answer = folder / LISTING
    if done.returncode or not answer.exists():
        raise ConfigError(
            f"{python} does not answer like a CPython from 3.9 on (exit code {done.returncode}): "
            f"{(done.stderr or done.stdout).strip()[-800:]}"
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


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the one that starts it dies (``PR_SET_PDEATHSIG`` of Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class _Watch:
    """Runs the observer and keeps what it has said."""

    def __init__(
        self, request: AuditRequest, folder: Path, total: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self._request = request
        self._folder = folder
        self._total = total
        self._progress = progress
        self._read = 0
        self._is_imported = False
        self._pids: dict[int, int] = {}
        self._ends: dict[int, tuple[bool, str]] = {}
        self._what_happened = ""

    def run(self, command: list[str]) -> None:
        """Run the observer to its end, or end it when it hangs; nothing that it started is left behind."""
        with (self._folder / output_of(0)).open("ab") as output:
            process = subprocess.Popen(
                command,
                env=_environment(),
                cwd=self._folder / "cwd",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        try:
            self._follow(process)
        finally:
            self._clean_up(process)

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            has_ended = process.poll() is not None  # before reading: the last events are there then
            if self._read_events():
                # The package's own import has nobody else to end it; the forks are the observer's to end.
                grace = _GRACE_S if self._is_imported else 0.0
                deadline = time.monotonic() + self._request.timeout_s + grace
            if has_ended:
                self._what_happened = f"the interpreter {_how_it_ended(str(process.returncode))}"
                return
            if time.monotonic() > deadline:
                process.send_signal(signal.SIGUSR1)  # it writes down where it is
                time.sleep(0.3)
                self._what_happened = f"the interpreter did not get on within {self._request.timeout_s:g} s"
                return
            time.sleep(_POLL_S)

    def _read_events(self) -> bool:
        """Take in what is new; True if there was something."""
        try:
            text = (self._folder / EVENTS).read_bytes()
        except FileNotFoundError:
            return False
        new = text[self._read : text.rfind(b"\n") + 1]
        self._read += len(new)
        for line in new.decode("ascii").splitlines():
            kind, *values = line.split()
            if kind == "imported":
                self._is_imported = True
            elif kind == "started":
                self._pids[int(values[0])] = int(values[1])
            elif kind == "ended":
                self._ends[int(values[0])] = (values[1] == "late", values[2])
        if new and self._progress is not None:
            self._progress(len(self._ends), self._total)
        return bool(new)

    def _clean_up(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()  # it ends its forks
        with contextlib.suppress(subprocess.TimeoutExpired):  # the package may have its own mind about the signal
            process.wait(timeout=2.0)
        self._read_events()
        left = [pid for index, pid in self._pids.items() if index not in self._ends]
        for pid in (process.pid, *left):
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # all of the group has ended
        process.wait()

    def preloaded(self) -> dict[str, int]:
        """Return the forbidden modules that were there before the first import."""
        answer = self._answer(0)
        return dict(answer["preloaded"]) if answer else {}

    def result(self, index: int, name: str, stdlib: str) -> ModuleResult:
        """Return what became of a module.

        Args:
            index: Its place in the plan; 0 is the package itself.
            name: Its name.
            stdlib: Folder of the audited interpreter's standard library.
        """
        answer = self._answer(index)
        is_late = self._ends.get(index, (False, ""))[0]
        if answer is None or is_late:
            state, text = self._without_answer(index, is_late)
            output, calls = split_dump(self._output(index), own_file=observer.__file__)
            failure = Failure(type="", text=text, traceback=calls, output=output[-_OUTPUT_TAIL:])
            return ModuleResult(name=name, state=state, failure=failure)
        failure = None
        if answer["error"] is not None:
            error = answer["error"]
            failure = Failure(
                type=error["type"],
                text=error["text"],
                traceback=traceback_lines(error["traceback"]),
                output=self._output(index)[-_OUTPUT_TAIL:].strip(),
            )
        return ModuleResult(
            name=name,
            state=ModuleState.IMPORTED if failure is None else ModuleState.FAILED,
            seconds=answer["seconds"],
            num_modules=answer["num_modules"],
            loaded=answer["loaded"],
            asks=asks_from(answer["asks"], answer["loaded"], stdlib),
            failure=failure,
        )

    def _without_answer(self, index: int, is_late: bool) -> tuple[ModuleState, str]:
        limit = f"{self._request.timeout_s:g} s"
        if is_late:
            return ModuleState.TIMED_OUT, f"the import did not end within {limit} and was ended"
        if index in self._ends:
            return ModuleState.FAILED, f"its process {_how_it_ended(self._ends[index][1])} before the import was done"
        if not self._is_imported and index == 0:
            state = ModuleState.TIMED_OUT if "did not get on" in self._what_happened else ModuleState.FAILED
            return state, f"{self._what_happened} while it imported the package"
        package = self._answer(0)
        if not self._is_imported or (package is not None and package["error"] is not None):
            return ModuleState.NOT_TRIED, f"{self._request.package} itself cannot be imported"
        return ModuleState.NOT_TRIED, f"{self._what_happened} before its turn"

    def _answer(self, index: int) -> dict[str, Any] | None:
        path = self._folder / result_of(index)
        if not path.exists():
            return None
        try:
            return ast.literal_eval(path.read_text(encoding="ascii"))
        except (SyntaxError, ValueError):
            return None  # its process was killed while it wrote

    def _output(self, index: int) -> str:
        try:
            data = (self._folder / output_of(index)).read_bytes()
        except FileNotFoundError:
            return ""
        return data.decode(errors="replace")


def _how_it_ended(code: str) -> str:
    """Put an exit code as ``observer`` gives it into words."""
    if not code.lstrip("-").isdigit():
        return "ended"
    number = int(code)
    if number >= 0:
        return f"ended with exit code {number}"
    try:
        return f"was ended by {signal.Signals(-number).name}"
    except ValueError:
        return f"was ended by signal {-number}"
