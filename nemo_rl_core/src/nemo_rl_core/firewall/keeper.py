# SPDX-License-Identifier: Apache-2.0
"""Clears away after an audit that is killed: ``python -I -S keeper.py FOLDER EVENTS``.

A process that gets SIGKILL can't clear up itself, and what it started may ignore a polite end. So each audit has this
small process beside it, in a session of its own. It reads from a pipe what was started, and the end of that pipe is
the end of the audit, however it came. ``done`` before it says that there is nothing left to do.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["DONE", "main"]

#: The line that says that the audit has cleared up itself.
DONE = "done"

#: Seconds for processes that were killed to let go of the folder.
_REMOVE_S = 5.0


def main(arguments: list[str]) -> None:
    """Run as a script.

    Args:
        arguments: The audit's folder, and the file in which the observer notes its forks.
    """
    folder, events = map(Path, arguments)
    started = []
    for line in sys.stdin:
        if line.strip() == DONE:
            return
        started.append(int(line))
    _kill(started)  # the observer first, so that no fork begins after the list is read
    _kill(_forks(events))
    deadline = time.monotonic() + _REMOVE_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


def _forks(events: Path) -> list[int]:
    """Return the forks that have begun and not ended."""
    running: dict[str, int] = {}
    text = events.read_text(encoding="ascii") if events.exists() else ""
    for line in text.splitlines():
        kind, *values = line.split()
        if kind == "started":
            running[values[0]] = int(values[1])
        elif kind == "ended":
            running.pop(values[0], None)
    return list(running.values())


def _kill(pids: Iterable[int]) -> None:
    """End each process with its group."""
    for pid in pids:
        for send in (os.killpg, os.kill):
            try:
                send(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # it has ended, or it has not become a group yet


if __name__ == "__main__":
    main(sys.argv[1:])
