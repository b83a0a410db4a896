# SPDX-License-Identifier: Apache-2.0
"""Build a virtual environment with uv: aside, then moved into place, tried out, and stamped last."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nemo_rl_core.distributed.build_lock import build_lock
from nemo_rl_core.distributed.environments import (
    InterpreterReport,
    current_interpreter,
    probe_interpreter,
    require_compatible,
)
from nemo_rl_core.distributed.own_sources import pack_wheel
from nemo_rl_core.distributed.venvs import STAMP, Venv, VenvState, installed_packages
from nemo_rl_core.errors import EnvironmentBuildError, NemoRLError
from nemo_rl_core.protocols.environments import EnvironmentRecipe

__all__ = ["BuildOptions", "build_venv", "remove_venv", "worker_probe"]

PROBE_TIMEOUT_S: Final = 300.0
_LOG_LINES = 15
_END_S = 10.0

#: Variables that would put packages into the environment, or take them out, without being part of its key. uv's
#: others pass: the index, its offline mode, its cache, certificates and proxies are the site's business.
_NOT_PASSED = (
    "CONDA_PREFIX",
    "PYTHONHOME",
    "PYTHONPATH",
    "UV_CONSTRAINT",
    "UV_EXCLUDE",
    "UV_OVERRIDE",
    "UV_PRERELEASE",
    "UV_PROJECT",
    "UV_PYTHON",
    "UV_RESOLUTION",
    "UV_SYSTEM_PYTHON",
    "UV_WORKING_DIR",
    "VIRTUAL_ENV",
)


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How to build.

    Attributes:
        timeout_s: Seconds that the wait for another builder may take, and again that uv may take.
        rebuild: Build also where a ready one is there.
        tell: Gets lines of progress.
    """

    timeout_s: float = 1800.0
    rebuild: bool = False
    tell: Callable[[str], None] = print


def worker_probe(recipe: EnvironmentRecipe) -> Callable[[Path], InterpreterReport]:
    """Return the trial of an environment of workers: it imports what it must, and fits the driver's cluster."""

    def probe(python: Path) -> InterpreterReport:
        imports = (*recipe.imports, "nemo_rl_core.distributed.shell")
        report = probe_interpreter(python, deadline_s=PROBE_TIMEOUT_S, imports=imports)
        require_compatible(report, current_interpreter(), environment=str(python.parent.parent))
        return report

    return probe


def build_venv(
    venv: Venv, probe: Callable[[Path], InterpreterReport], options: BuildOptions | None = None
) -> Mapping[str, Any]:
    """Make an environment ready, or find it ready; one builder at a time.

    Args:
        venv: Where it lies and what it is to hold.
        probe: Tries the finished interpreter out; raises if it does not serve.
        options: How to build.

    Returns:
        What the stamp says: ``contents``, ``packages``, ``versions``, ``seconds`` and so on.

    Raises:
        EnvironmentBuildError: If uv is missing, fails, or passes the deadline (the end of its log is in the message),
            if the finished environment does not serve, or if another builder did not end in time.
    """
    options = options or BuildOptions()
    if (stamp := venv.stamp) is not None and not options.rebuild:
        return stamp
    uv = _uv()
    with build_lock(venv.lock, deadline_s=options.timeout_s, on_wait=options.tell):
        if (stamp := venv.stamp) is not None and not options.rebuild:
            options.tell("another builder has made it")
            return stamp
        started = time.monotonic()
        _clear(venv, options)
        with _work_folder(venv) as work:
            _fill(venv, work, uv, options)
            (work / "venv").rename(venv.folder)
        try:
            options.tell("trying it out")
            report = _tried(venv, probe)
            _write_stamp(venv, report, time.monotonic() - started)
        except BaseException:  # also Ctrl-C: without a stamp it is of no use to anybody
            shutil.rmtree(venv.folder, ignore_errors=True)
            raise
    stamp = venv.stamp
    if stamp is None:
        raise EnvironmentBuildError(
            f"{venv.folder} was built, and its stamp is gone again; who else removes files there?"
        )
    return stamp


def remove_venv(venv: Venv, *, tell: Callable[[str], None] = print) -> int:
    """Remove an environment with all its versions, half-built ones and logs, and return how many folders there were.

    Raises:
        EnvironmentBuildError: If one is being built.
    """
    removed = 0
    for folder in [venv.folder, *venv.others()]:
        with build_lock(folder.with_name(f"{folder.name}.lock"), deadline_s=1.0, on_wait=tell):
            folder.with_name(f"{folder.name}.log").unlink(missing_ok=True)
            if folder.exists():
                _remove(folder)
                tell(f"removed {folder}")
                removed += 1
    return removed


def _uv() -> str:
    """Return uv's path: the one on the PATH, else the one beside this interpreter, which `pip install uv` put there."""
    found = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if found is None:
        raise EnvironmentBuildError("environments are built with uv, which is not on the PATH; run `pip install uv`")
    return found


def _clear(venv: Venv, options: BuildOptions) -> None:
    """Remove what an earlier builder of the same contents left; we hold its lock, so nobody works on it."""
    if venv.folder.exists():
        options.tell(f"removing {'the ready' if venv.state is VenvState.READY else 'a half-built'} {venv.folder}")
        _remove(venv.folder)
    for left in venv.root.glob(f".{venv.folder.name}.*"):
        shutil.rmtree(left, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a folder so that it never looks ready while it is half gone."""
    (folder / STAMP).unlink(missing_ok=True)
    shutil.rmtree(folder)


@contextlib.contextmanager
def _work_folder(venv: Venv) -> Generator[Path]:
    """Give a folder beside the final one, on the same file system, and take it away again."""
    work = Path(tempfile.mkdtemp(prefix=f".{venv.folder.name}.", dir=venv.root))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fill(venv: Venv, work: Path, uv: str, options: BuildOptions) -> None:
    """Make the environment in the work folder."""
    contents = venv.contents
    lines = list(contents.requirements)
    for source in contents.sources:
        if source.folder is not None:
            lines.append(f"-e {source.folder.as_uri()}")
        else:
            lines.append(f"{source.distribution} @ {pack_wheel(source.distribution, work).as_uri()}")
    (work / "requirements.txt").write_text("\n".join([*lines, ""]))
    (work / "overrides.txt").write_text("\n".join([*contents.overrides, ""]))
    deadline = time.monotonic() + options.timeout_s
    venv.log.write_text("")
    options.tell(f"building {venv.folder}")
    # Relocatable: console scripts would otherwise name the work folder.
    make = ["venv", "--relocatable", "--no-project", "--python", sys.executable, "venv"]
    _run([uv, *make], venv, work, deadline)
    options.tell(f"installing {', '.join([*contents.requirements, *(s.distribution for s in contents.sources)])}")
    options.tell(f"  log: {venv.log}")
    install = ["pip", "install", "--python", str(work / "venv" / "bin" / "python")]
    files = ["--requirements", "requirements.txt", "--overrides", "overrides.txt"]
    _run([uv, *install, *files], venv, work, deadline)


def _run(command: Sequence[str], venv: Venv, work: Path, deadline: float) -> None:
    """Run uv with its words in the log; a group of its own, so that none of its children outlives the deadline."""
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
    environ |= {"PYTHONNOUSERSITE": "1", "NO_COLOR": "1"}
    with venv.log.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        process = subprocess.Popen(
            command,
            # Its own folder: a project file of wherever the user happens to be must not have a say.
            cwd=work,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            _end(process)
            raise _failed(venv, "did not end within its deadline; a longer one is given by --timeout") from error
        except BaseException:  # Ctrl-C: uv is in a session of its own and does not get it
            _end(process)
            raise
    if code != 0:
        raise _failed(venv, f"ended with {code}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)


def _failed(venv: Venv, how: str) -> EnvironmentBuildError:
    lines = venv.log.read_text(errors="replace").splitlines()
    return EnvironmentBuildError(
        f"environment {venv.contents.name!r} could not be built: uv {how}. The end of {venv.log}:\n"
        + "\n".join(f"  {line}" for line in lines[-_LOG_LINES:])
    )


def _tried(venv: Venv, probe: Callable[[Path], InterpreterReport]) -> InterpreterReport:
    try:
        return probe(venv.python)
    except NemoRLError as error:
        raise EnvironmentBuildError(
            f"environment {venv.contents.name!r} was built and does not serve, so it was removed again: {error}. "
            f"What was installed stands in {venv.log}"
        ) from error


def _write_stamp(venv: Venv, report: InterpreterReport, seconds: float) -> None:
    """Write the stamp in one step, after everything else."""
    stamp = {
        "contents": venv.contents.as_dict(),
        "python_version": report.python_version,
        "versions": dict(report.versions),
        "packages": installed_packages(venv.folder),
        "host": socket.gethostname(),
        "built": time.strftime("%Y-%m-%d %H:%M:%S"),
        "seconds": round(seconds, 1),
    }
    aside = venv.folder / f"{STAMP}.new"
    with aside.open("w", encoding="utf-8") as file:
        json.dump(stamp, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(venv.folder / STAMP)
