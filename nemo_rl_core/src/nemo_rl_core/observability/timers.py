# SPDX-License-Identifier: Apache-2.0
"""Where a step's time went."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["Timer"]


class Timer:
    """Sums wall-clock seconds by label; labels nest.

    Inside ``with timer.time("refit")``, the range ``with timer.time("transfer")`` is labelled ``refit/transfer``. A
    range that is entered again adds to its sum. An exception passes through, and the range still ends. The context
    manager also serves as a decorator: ``@timer.time("generation")``.

    Threads may share a timer: each has its own nesting, the sums are common.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start with no sums.

        Args:
            clock: Returns seconds, never going back.
        """
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._open = threading.local()

    @contextmanager
    def time(self, label: str) -> Generator[None, None, None]:
        """Measure one range.

        Args:
            label: Not empty; a slash nests as a nested range does.

        Raises:
            ValueError: If the label is empty or has an empty part.
        """
        if not all(label.split("/")):
            raise ValueError(f"a timer label must be names joined by slashes, got {label!r}")
        stack: list[str] = self._open.__dict__.setdefault("labels", [])
        stack.append(f"{stack[-1]}/{label}" if stack else label)
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            full = stack.pop()
            with self._lock:
                self._seconds[full] = self._seconds.get(full, 0.0) + seconds
                self._counts[full] = self._counts.get(full, 0) + 1

    def seconds(self, label: str) -> float:
        """Return the sum of the ended ranges of one full label; 0 if there is none."""
        with self._lock:
            return self._seconds.get(label, 0.0)

    def count(self, label: str) -> int:
        """Return how many ranges of one full label have ended."""
        with self._lock:
            return self._counts.get(label, 0)

    def metrics(self) -> dict[str, float]:
        """Return ``timing/<label>`` to seconds over all ended ranges since the last `reset`."""
        with self._lock:
            return {f"timing/{label}": seconds for label, seconds in self._seconds.items()}

    def reset(self) -> None:
        """Forget all sums; open ranges go on and count in full when they end."""
        with self._lock:
            self._seconds.clear()
            self._counts.clear()
