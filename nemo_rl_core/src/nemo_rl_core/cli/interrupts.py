# SPDX-License-Identifier: Apache-2.0
"""What a command does when it is told to end."""

import contextlib
import signal
from collections.abc import Generator

__all__ = ["terminate_like_interrupt"]


@contextlib.contextmanager
def terminate_like_interrupt() -> Generator[None]:
    """Treat SIGTERM, which schedulers send, as Ctrl-C: what was begun is cleaned up."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
