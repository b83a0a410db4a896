# SPDX-License-Identifier: Apache-2.0
"""How a driver talks to a group of workers, wherever they run."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["WorkerFuture", "WorkerGroup"]


class WorkerFuture(Protocol):
    """Results that are on their way."""

    def get_results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for all workers that were called and return their results in rank order.

        Args:
            timeout_s: Deadline in seconds; None takes the group's.

        Raises:
            WorkerError: If a worker failed; the first cause, with worker, rank and host.
            WorkerTimeoutError: If the deadline passed.
        """
        ...


class WorkerGroup(Protocol):
    """Workers of one class, numbered by rank. Calls are sent at once and awaited through the future."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        ...

    def run_all_workers_single_data(self, method: str, /, **kwargs: Any) -> WorkerFuture:
        """Call ``method`` with the same arguments on every worker."""
        ...

    def run_all_workers_multiple_data(
        self, method: str, /, common_kwargs: Mapping[str, Any] | None = None, **lists: Sequence[Any]
    ) -> WorkerFuture:
        """Call ``method`` with element r of each list on worker r; ``common_kwargs`` go to every one."""
        ...

    def shutdown(self) -> object:
        """Stop the workers; calling it twice is fine."""
        ...
