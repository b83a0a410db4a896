# SPDX-License-Identifier: Apache-2.0
"""A lock that names its owner: one builder for a folder, and whoever waits can say for whom.

The kernel holds the lock (``flock``) and lets it go when its owner ends, however it ends, so no marker of a killed
builder is ever waited for. What stands in the file is for people.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_rl_core.errors import EnvironmentBuildError

__all__ = ["LockOwner", "build_lock", "lock_owner"]

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class LockOwner:
    """Who holds a lock.

    Attributes:
        pid: Its process.
        host: Its host.
        since: When it took the lock, e.g. ``2026-12-01 12:00:00``.
    """

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        """Return it for a message."""
        return f"process {self.pid} on {self.host} since {self.since}"


@contextlib.contextmanager
def build_lock(path: Path, *, deadline_s: float, on_wait: Callable[[str], None]) -> Generator[None]:
    """Hold a lock while the block runs.

    Args:
        path: The lock's file; made where it is missing, and kept, since taking it away could give two owners.
        deadline_s: Seconds to wait for another owner.
        on_wait: Called once with a line of text if somebody else has the lock.

    Raises:
        EnvironmentBuildError: If another owner keeps it until the deadline, the folder cannot be written, or the file
            system knows no locks.
    """
    deadline = time.monotonic() + deadline_s
    told = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a+")
    except OSError as error:
        raise EnvironmentBuildError(
            f"{path.parent} cannot be written ({error}); set NEMO_RL_VENV_DIR to a folder of yours"
        ) from error
    with opened as file:
        while not _take(file.fileno(), path):
            owner = _owner(path) or "a process that has not given its name yet"
            if not told:
                on_wait(f"waiting for {owner}, which holds {path.name}")
                told = True
            if time.monotonic() >= deadline:
                raise EnvironmentBuildError(
                    f"{path} was not free within {deadline_s:g} s: {owner} holds it. Wait for it, or end it if it "
                    "hangs; the lock is free as soon as it has ended"
                )
            time.sleep(_POLL_S)
        file.truncate(0)
        owner = LockOwner(pid=os.getpid(), host=socket.gethostname(), since=time.strftime("%Y-%m-%d %H:%M:%S"))
        file.write(json.dumps(asdict(owner)))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def lock_owner(path: Path) -> LockOwner | None:
    """Return who holds a lock now, None if nobody does."""
    try:
        with path.open() as file:
            return None if _take(file.fileno(), path) else _owner(path) or LockOwner(pid=0, host="?", since="?")
    except FileNotFoundError:
        return None


def _take(descriptor: int, path: Path) -> bool:
    """Try to take the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise EnvironmentBuildError(
            f"{path} cannot be locked ({error}); set NEMO_RL_VENV_DIR to a folder on a file system with locks"
        ) from error
    return True


def _owner(path: Path) -> LockOwner | None:
    """Read who wrote its name; None while there is nothing whole to read."""
    try:
        return LockOwner(**json.loads(path.read_text()))
    except (json.JSONDecodeError, TypeError):
        return None
