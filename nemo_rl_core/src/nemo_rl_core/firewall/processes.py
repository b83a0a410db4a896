# SPDX-License-Identifier: Apache-2.0
"""Processes in the audited interpreter, their folder, and how nothing of either outlives the audit."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.firewall import keeper as keeper_script
from nemo_rl_core.firewall.keeper import DONE
from nemo_rl_core.firewall.observer import EVENTS
from nemo_rl_core.guard.policy import VARIABLES

__all__ = ["Workplace", "end_group", "workplace"]

#: Seconds for the keeper to end when there is nothing left for it to do.
_KEEPER_S = 10.0


class Workplace:
    """A folder of an audit, and the processes that work there."""

    def __init__(self, folder: Path, keeper: subprocess.Popen[str]) -> None:
        """Take both over.

        Args:
            folder: An empty folder.
            keeper: The process that clears up where this one is killed.
        """
        self.folder = folder
        self._keeper = keeper
        (folder / "cwd").mkdir()  # what a module writes beside itself goes with the folder

    def start(self, python: str, *arguments: str, output: str) -> subprocess.Popen[bytes]:
        """Start an isolated interpreter in a session of its own, which the keeper ends if nobody else does.

        Args:
            python: Path of the interpreter.
            arguments: A script and what it gets.
            output: Name of the file in the folder for what it prints.

        Raises:
            OSError: If it can't be run.
        """
        with (self.folder / output).open("ab") as file:
            # Unbuffered: what a module printed before it crashed is there to be read.
            process = subprocess.Popen(
                [python, "-I", "-u", *(["-B"] if sys.dont_write_bytecode else []), *arguments],
                env=_environment(),
                cwd=self.folder / "cwd",
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._tell(str(process.pid))
        return process

    def output(self, name: str) -> str:
        """Return what was printed into a file of the folder; "" where there is none."""
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return ""
        return data.decode(errors="replace")

    def close(self) -> None:
        """Remove the folder and let the keeper go."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._tell(DONE)
        with contextlib.suppress(BrokenPipeError):
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
        try:
            self._keeper.wait(timeout=_KEEPER_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _tell(self, line: str) -> None:
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody ended the keeper: the audit goes on without it
            self._keeper.stdin.write(line + "\n")
            self._keeper.stdin.flush()


@contextmanager
def workplace() -> Generator[Workplace]:
    """Make a folder for an audit, which is gone at the end, also where this process is killed.

    Raises:
        ConfigError: If no folder for temporary files can be written to.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="nemo-rl-audit-"))
    except OSError as error:
        raise ConfigError(f"an audit needs a folder for temporary files (TMPDIR names one): {error}") from error
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", keeper_script.__file__, str(folder), str(folder / EVENTS)],
        cwd=folder.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    made = Workplace(folder, keeper)
    try:
        yield made
    finally:
        made.close()


def _environment() -> dict[str, str]:
    """Return this process's variables without those that would arm the guard, which refuses what is to be seen."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES.values()}


def end_group(pid: int) -> None:
    """End a process that leads a group, and the group; one that has ended already is nobody's loss."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
