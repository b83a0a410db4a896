# SPDX-License-Identifier: Apache-2.0
"""Finite waits, and silence told apart from having been asleep oneself."""

import time
from collections.abc import Callable

__all__ = ["Deadline", "RunningClock", "SilenceMeter"]


class Deadline:
    """A point in time after which nobody waits."""

    def __init__(self, seconds: float) -> None:
        """Start now; it passes after ``seconds``."""
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether it has passed."""
        return self.remaining_s == 0.0


class RunningClock:
    """Counts the time during which its own process ran.

    A process that was stopped (SIGSTOP, a suspended machine) finds on waking that everybody looks silent. No step
    between two readings counts for more than ``max_step_s``, so a long gap is not held against the others.
    """

    def __init__(self, max_step_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Start at 0; ``now`` gives the time in seconds."""
        self._max_step_s = max_step_s
        self._now = now
        self._last = now()
        self._elapsed = 0.0
        #: Longest time between two readings, in seconds.
        self.longest_gap_s = 0.0

    def read(self) -> float:
        """Return the seconds that this process is known to have run since the start."""
        now = self._now()
        gap = now - self._last
        self._last = now
        self.longest_gap_s = max(self.longest_gap_s, gap)
        self._elapsed += min(gap, self._max_step_s)
        return self._elapsed


class SilenceMeter:
    """Says when a counter that a live peer keeps raising has stood still too long."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Take the limit in seconds; ``now`` gives the time in seconds."""
        self.limit_s = limit_s
        self._clock = RunningClock(limit_s / 4, now)
        self._since = 0.0
        self._counter: int | None = None

    def is_silent(self, counter: int) -> bool:
        """Take a reading of the peer's counter; True once it has not changed for the limit."""
        now = self._clock.read()
        if counter != self._counter:
            self._counter = counter
            self._since = now
        return now - self._since >= self.limit_s
