# SPDX-License-Identifier: Apache-2.0
"""Answers of several workers: waited for together, first failure wins, results by rank.

All that can go wrong comes out as one ``WorkerError`` that names worker, rank, host, phase and the remote cause.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, WorkerCrashedError

from nemo_rl_core import errors
from nemo_rl_core.errors import WorkerError, WorkerTimeoutError

__all__ = ["MultiWorkerFuture", "PendingCall", "WorkerRecord", "wait_all"]

#: Longest single wait inside a longer one, so that Ctrl-C is answered.
_SLICE_S = 1.0

#: After the first failure, how long others may still report. A killed peer makes its siblings fail within moments,
#: often before Ray has noticed the death; the death is the cause, so it is waited for.
_GRACE_S = 1.0

#: Characters of a remote text or traceback that a message repeats.
_SHOWN = 2000


@dataclass(frozen=True, kw_only=True)
class WorkerRecord:
    """The driver's knowledge of one worker.

    Attributes:
        name: Its name, e.g. ``policy-0``.
        rank: Its rank in the group.
        host: Host name, or the node's address while the worker has not answered yet.
        pid: Process id; 0 while it has not answered yet.
        actor: Ray's handle.
    """

    name: str
    rank: int
    host: str
    pid: int
    actor: Any

    def __str__(self) -> str:
        pid = f", pid {self.pid}" if self.pid else ""
        return f"{self.name} (rank {self.rank}, host {self.host}{pid})"


@dataclass(frozen=True, kw_only=True)
class PendingCall:
    """One answer that is waited for.

    Attributes:
        ref: Ray's reference to the outcome.
        worker: Who answers.
        phase: What it does: ``spawn``, ``rendezvous``, ``start`` or the method's name.
    """

    ref: Any
    worker: WorkerRecord
    phase: str


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """One failed call, before it is known which one came first."""

    call: PendingCall
    error: WorkerError
    died: bool
    at: float
    order: int


class MultiWorkerFuture:
    """Calls that run on several workers of one group."""

    def __init__(self, calls: Sequence[PendingCall], *, return_ranks: Sequence[int] | None, timeout_s: float) -> None:
        """Keep the calls.

        Args:
            calls: What was started.
            return_ranks: Ranks whose results are wanted; None wants all. The others are waited for all the same.
            timeout_s: Default of ``get_results``, in seconds.
        """
        self.calls = tuple(sorted(calls, key=lambda call: call.worker.rank))
        called = [call.worker.rank for call in self.calls]
        self.return_ranks = tuple(called if return_ranks is None else sorted(return_ranks))
        self.timeout_s = timeout_s

    @property
    def called_ranks(self) -> tuple[int, ...]:
        """Ranks that were called, ascending."""
        return tuple(call.worker.rank for call in self.calls)

    def get_results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for all calls and return the wanted results in rank order (``return_ranks`` says whose they are).

        Args:
            timeout_s: Seconds from now; None takes the group's limit.

        Raises:
            WorkerError: For the first failure; ``__cause__`` is the error itself where it is one of core's own.
                Calls that have not begun are cancelled.
            WorkerTimeoutError: If ranks have not answered in time; it names them.
        """
        return wait_all([self], self.timeout_s if timeout_s is None else timeout_s)[0]


def wait_all(futures: Sequence[MultiWorkerFuture], timeout_s: float) -> list[list[Any]]:
    """Wait for futures of any groups together; the first failure among all of them wins.

    Args:
        futures: What to wait for, e.g. the sending and the receiving side of a refit.
        timeout_s: Seconds from now, for all of them together.

    Returns:
        For each future its results, as ``MultiWorkerFuture.get_results``.

    Raises:
        WorkerError: As ``MultiWorkerFuture.get_results``.
        WorkerTimeoutError: As ``MultiWorkerFuture.get_results``.
    """
    values = _collect([call for future in futures for call in future.calls], timeout_s)
    return [
        [values[call.ref] for call in future.calls if call.worker.rank in set(future.return_ranks)]
        for future in futures
    ]


def _collect(calls: Sequence[PendingCall], timeout_s: float) -> dict[Any, Any]:
    """Return the value of each call by its reference, or raise for the first failure."""
    deadline = time.monotonic() + timeout_s
    pending = {call.ref: call for call in calls}
    values: dict[Any, Any] = {}
    failures: list[_Failure] = []
    while pending and time.monotonic() < deadline:
        span = min(_SLICE_S, max(0.0, deadline - time.monotonic()))
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=span)
        for ref in ready:
            outcome = _outcome(pending.pop(ref), max(1.0, deadline - time.monotonic()), len(failures))
            if isinstance(outcome, _Failure):
                if not failures:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                failures.append(outcome)
            else:
                values[ref] = outcome["value"]
    if failures:
        _cancel(pending.values())
        raise _first_cause(failures)
    if pending:
        _cancel(pending.values())
        raise _timeout(list(pending.values()), len(calls), timeout_s)
    return values


def _outcome(call: PendingCall, timeout_s: float, order: int) -> dict[str, Any] | _Failure:
    """Return the outcome of a call that is ready, or why it failed."""
    try:
        outcome = ray.get(call.ref, timeout=timeout_s)
    except RayError as error:
        died = isinstance(error, (RayActorError, WorkerCrashedError))
        return _Failure(call=call, error=_ray_failure(call, error, died), died=died, at=time.time(), order=order)
    if "failure" not in outcome:
        return outcome
    failure = outcome["failure"]
    return _Failure(call=call, error=_remote_failure(call, failure), died=False, at=failure["time"], order=order)


def _remote_failure(call: PendingCall, failure: Mapping[str, Any]) -> WorkerError:
    """Return the error for an exception that the shell described."""
    worker = f"{failure['worker']} (rank {failure['rank']}, host {failure['host']}, pid {failure['pid']})"
    error = WorkerError(
        f"{worker} failed in phase {failure['phase']!r}: {failure['type']}: {failure['text']}",
        worker=failure["worker"],
        rank=failure["rank"],
        host=failure["host"],
        phase=failure["phase"],
        cause_type=failure["type"],
        remote_traceback=failure["traceback"],
    )
    error.__cause__ = _rebuild(failure["core_error"], failure["text"])
    error.add_note(f"Remote traceback of {call.worker.name}:\n{failure['traceback'].strip()[-_SHOWN:]}")
    return error


def _rebuild(described: Mapping[str, Any] | None, text: str) -> errors.NemoRLError | None:
    """Return core's own error again from its description; None for foreign ones."""
    if described is None:
        return None
    error = getattr(errors, described["name"])(text)
    vars(error).update(described["fields"])
    return error


def _ray_failure(call: PendingCall, error: Exception, died: bool) -> WorkerError:
    """Return the error for what Ray reports: a death, or arguments and results that do not cross."""
    text = str(error).strip()
    # What a task raised outside the shell's own boundary, e.g. while its result was pickled.
    cause = error.cause if isinstance(error, RayTaskError) else error
    what = "died" if died else "gave no readable answer"
    hint = ""
    if died and call.phase == "spawn":
        hint = " The process ended before core's shell ran: is nemo-rl-core installed in its interpreter?"
    return WorkerError(
        f"{call.worker} {what} in phase {call.phase!r}: {type(cause).__name__}: {_brief(str(cause))}{hint}",
        worker=call.worker.name,
        rank=call.worker.rank,
        host=call.worker.host,
        phase=call.phase,
        cause_type=type(cause).__name__,
        remote_traceback=text,
    )


def _brief(text: str) -> str:
    """Return the telling part of Ray's text, on one line; the whole of it stays in ``remote_traceback``."""
    _, found, reason = text.partition("The actor is dead because")
    telling = (found + reason).partition("Some common causes")[0] if found else text
    return " ".join(telling.split())[:_SHOWN]


def _first_cause(failures: Sequence[_Failure]) -> WorkerError:
    """Return the first cause: a death explains the errors of the peers, else the earliest in time.

    The others are named in a note.
    """
    first, *others = sorted(failures, key=lambda failure: (not failure.died, failure.at, failure.order))
    for other in others:
        first.error.add_note(f"also failed: {str(other.error)[:300]}")
    return first.error


def _timeout(missing: Sequence[PendingCall], total: int, timeout_s: float) -> WorkerTimeoutError:
    """Return the error that names who has not answered."""
    missing = sorted(missing, key=lambda call: (call.worker.name, call.worker.rank))
    first = missing[0]
    names = ", ".join(f"{call.worker} in phase {call.phase!r}" for call in missing)
    return WorkerTimeoutError(
        f"{len(missing)} of {total} calls were not answered within {timeout_s:g} s: {names}",
        worker=first.worker.name,
        rank=first.worker.rank,
        host=first.worker.host,
        phase=first.phase,
        cause_type="TimeoutError",
    )


def _cancel(calls: Any) -> None:
    """Cancel what has not begun. A call that runs cannot be interrupted; it ends with its worker."""
    for call in calls:
        ray.cancel(call.ref)
