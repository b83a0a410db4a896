# SPDX-License-Identifier: Apache-2.0
"""Calls into an engine that end: when the engine answers, when its process dies, or when a deadline passes."""

import multiprocessing
import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from nemo_rl_core.refit.deadline import Deadline

__all__ = ["EngineGoneError", "EngineProcesses", "EngineSilentError"]

_POLL_S = 0.05
#: A dying engine may still say why, and its own words are better than its exit code.
_LAST_WORDS_S = 5.0


class EngineGoneError(RuntimeError):
    """A process of the engine has ended."""


class EngineSilentError(TimeoutError):
    """The engine did not answer in time."""


class EngineProcesses:
    """The processes that an engine started; vLLM itself waits without end for one that has died."""

    def __init__(self) -> None:
        """Note which children were there before; make it before the engine."""
        self._before = set(multiprocessing.active_children())
        self._processes: Sequence[BaseProcess] = ()
        self._ranks: dict[int, int] = {}  # by process id
        #: Closing it ends the thread that waits for the end of a rank; -1 where there is none.
        self._end_of_watch = -1
        self._lost = ""
        self._lost_rank = -1

    def started(self) -> None:
        """Note which children the engine has started; none where it runs in this process."""
        self._processes = [process for process in multiprocessing.active_children() if process not in self._before]

    def watch(self, pids: Mapping[int, int]) -> None:
        """Watch the processes of the engine's ranks too, which may be children of its own children.

        Args:
            pids: Process id of each rank; this process itself is left out.

        Raises:
            EngineGoneError: If one has ended already.
        """
        self._ranks = {pid: rank for rank, pid in pids.items() if pid != os.getpid()}
        if not self._ranks or not hasattr(os, "pidfd_open"):
            return  # without it, as outside of Linux, the engine's own word on its ranks is all there is
        descriptors = {}
        for pid in self._ranks:
            try:
                descriptors[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                self._lose(f"engine rank {self._ranks[pid]} (pid {pid}) has ended", pid)
        closed, self._end_of_watch = os.pipe()
        # A thread, because the engine ends its other ranks after the first: a later look would not tell which it was.
        arguments = (descriptors, closed)
        threading.Thread(target=self._await_first, args=arguments, name="engine-watch", daemon=True).start()
        self._check_alive()

    def close(self) -> None:
        """Watch nothing any more; calling it twice is fine."""
        self._processes = ()
        end, self._end_of_watch = self._end_of_watch, -1
        if end >= 0:
            os.close(end)

    @property
    def lost(self) -> tuple[str, int]:
        """What of the engine has ended, and the rank whose process it was, or -1; "" while it lives."""
        return self._died(), self._lost_rank

    def call(self, act: Callable[[], Any], *, limit_s: float | None = None) -> Any:
        """Run ``act`` on a thread of its own, which is left behind where the engine never answers.

        Args:
            act: The call; whatever it raises is raised here.
            limit_s: Seconds until it must have ended, or None for as long as the engine lives.

        Raises:
            EngineGoneError: If a process of the engine has ended, now or in an earlier call.
            EngineSilentError: If the limit has passed; no later call is made.
        """
        self._check_alive()
        results: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(act())
            except BaseException as error:  # noqa: BLE001 - it is raised again, in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=run, name="engine-call", daemon=True)
        thread.start()
        deadline = Deadline(limit_s) if limit_s is not None else None
        while thread.is_alive():
            thread.join(_POLL_S)
            if self._died():
                thread.join(_LAST_WORDS_S)
                break
            if deadline is not None and deadline.expired:
                self._lost = f"the engine did not answer within {deadline.seconds:.0f} s"
                raise EngineSilentError(self._lost)
        if errors:
            raise errors[0]
        if results:
            return results[0]
        self._check_alive()
        raise EngineGoneError("the engine's call ended without a result")

    def _await_first(self, descriptors: Mapping[int, int], closed: int) -> None:
        """Wait until the first of some processes ends, or until the watch does."""
        poll = select.poll()
        for descriptor in (*descriptors, closed):
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll()]
        if closed not in ready:
            pid = descriptors[ready[0]]
            self._lose(f"engine rank {self._ranks[pid]} (pid {pid}) has ended", pid)
        for descriptor in (*descriptors, closed):
            os.close(descriptor)

    def _lose(self, words: str, pid: int | None) -> None:
        """Note the first loss; what ends after it is its consequence."""
        if not self._lost:
            self._lost, self._lost_rank = words, self._ranks.get(pid or 0, -1)

    def _died(self) -> str:
        for process in self._processes:
            if not process.is_alive():
                words = f"process {process.name} (pid {process.pid}) ended with exit code {process.exitcode}"
                rank = self._ranks.get(process.pid or 0, -1)
                self._lose(f"engine rank {rank}, {words}" if rank >= 0 else words, process.pid)
        return self._lost

    def _check_alive(self) -> None:
        if self._died():
            raise EngineGoneError(f"{self._lost}; start a new worker")
