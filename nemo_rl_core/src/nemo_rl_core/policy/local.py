# SPDX-License-Identifier: Apache-2.0
"""A worker group inside this process: the same calls as on a cluster, without Ray."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from nemo_rl_core.errors import WorkerError, WorkerTimeoutError

__all__ = ["LocalWorkerGroup"]


class LocalWorkerGroup:
    """Worker objects, each with a thread of its own, so that sender and receiver of a refit can run together."""

    def __init__(self, workers: Sequence[Any], *, name_prefix: str = "local", call_timeout_s: float = 600.0) -> None:
        """Take ready-made workers.

        Args:
            workers: The objects, in rank order.
            name_prefix: Name of the group in errors.
            call_timeout_s: Deadline of a call, in seconds.
        """
        self._workers = list(workers)
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"{name_prefix}-{i}") for i in range(len(workers))]
        self._name_prefix = name_prefix
        self._call_timeout_s = call_timeout_s

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def run_all_workers_single_data(self, method: str, /, **kwargs: Any) -> "_LocalFuture":
        """Call ``method`` with the same arguments on every worker."""
        return self._submit(method, [kwargs] * self.world_size)

    def run_all_workers_multiple_data(
        self, method: str, /, common_kwargs: Mapping[str, Any] | None = None, **lists: Sequence[Any]
    ) -> "_LocalFuture":
        """Call ``method`` with element r of each list on worker r.

        Raises:
            WorkerError: If a list does not have one element for each worker.
        """
        for name, values in lists.items():
            if len(values) != self.world_size:
                raise WorkerError(
                    f"{method}: {name} needs one element for each of {self.world_size} workers, got {len(values)}"
                )
        calls = [{**(common_kwargs or {}), **{n: v[r] for n, v in lists.items()}} for r in range(self.world_size)]
        return self._submit(method, calls)

    def shutdown(self) -> None:
        """Shut the workers down; calling it twice is fine."""
        workers, self._workers = self._workers, []
        for worker, thread in zip(workers, self._threads, strict=False):
            thread.submit(worker.shutdown).result(timeout=self._call_timeout_s)
            thread.shutdown()

    def _submit(self, method: str, calls: list[dict[str, Any]]) -> "_LocalFuture":
        futures = [
            thread.submit(getattr(worker, method), **kwargs)
            for worker, thread, kwargs in zip(self._workers, self._threads, calls, strict=True)
        ]
        return _LocalFuture(futures, method, self._name_prefix, self._call_timeout_s)


class _LocalFuture:
    """Results of one call on every worker of a ``LocalWorkerGroup``."""

    def __init__(self, futures: list["Future[Any]"], method: str, name_prefix: str, timeout_s: float) -> None:
        self._futures, self._method, self._name_prefix, self._timeout_s = futures, method, name_prefix, timeout_s

    def get_results(self, timeout_s: float | None = None) -> list[Any]:
        """Return the results in rank order; see ``WorkerFuture``."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        results = []
        for rank, future in enumerate(self._futures):
            try:
                results.append(future.result(timeout=timeout_s))
            except FutureTimeoutError as error:
                raise WorkerTimeoutError(
                    f"{self._name_prefix}-{rank} did not finish {self._method} within {timeout_s} s",
                    worker=f"{self._name_prefix}-{rank}",
                    rank=rank,
                    phase=self._method,
                ) from error
        return results
