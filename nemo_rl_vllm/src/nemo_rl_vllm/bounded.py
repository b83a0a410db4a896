# SPDX-License-Identifier: Apache-2.0
"""Calls into an engine that end: when the engine answers, when its process dies, or when a deadline passes."""

import multiprocessing
import threading
from collections.abc import Callable, Sequence
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
        self._lost = ""

    def started(self) -> None:
        """Note which children the engine has started; none where it runs in this process."""
        self._processes = [process for process in multiprocessing.active_children() if process not in self._before]

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

    def _died(self) -> str:
        for process in self._processes:
            if not process.is_alive():
                self._lost = f"process {process.name} (pid {process.pid}) ended with exit code {process.exitcode}"
        return self._lost

    def _check_alive(self) -> None:
        if self._died():
            raise EngineGoneError(f"{self._lost}; start a new worker")
