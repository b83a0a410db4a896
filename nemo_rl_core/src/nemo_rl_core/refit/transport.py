# SPDX-License-Identifier: Apache-2.0
"""The broadcast of buckets over gloo, on a group that is built for one refit and thrown away after it."""

import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import BroadcastOptions

__all__ = ["GlooGroup"]

_REAP_POLL_S = 0.05


class GlooGroup:
    """Rank 0 broadcasts, all others receive. Needs no ``init_process_group``."""

    def __init__(
        self,
        *,
        store: Store,
        prefix: str,
        rank: int,
        size: int,
        local_host: str,
        connect_timeout_s: float,
        transfer_timeout_s: float,
    ) -> None:
        """Connect to all other ranks; blocks, so call it where blocking is bounded.

        Args:
            store: Connection to the sender's store.
            prefix: Prefix of keys that nobody has used before.
            rank: This rank; 0 is the sender.
            size: Number of ranks, the sender included.
            local_host: Address of this machine that the others can reach.
            connect_timeout_s: Seconds within which all ranks have to be connected.
            transfer_timeout_s: Seconds after which gloo itself gives up a broadcast that was abandoned here.

        Raises:
            RuntimeError: If gloo cannot connect.
        """
        limit = timedelta(seconds=connect_timeout_s)
        gloo: Any = ProcessGroupGloo  # its stubs leave out the options, by which alone a device can be chosen
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=local_host)]
        options._timeout = limit
        options._threads = 2
        self._group: Any = gloo(PrefixStore(prefix, store), rank, size, options)
        self._broadcast = BroadcastOptions()
        self._broadcast.rootRank = 0
        self._broadcast.timeout = timedelta(seconds=transfer_timeout_s)
        self._pending: list[tuple[Any, torch.Tensor]] = []

    def broadcast(self, buffer: torch.Tensor) -> Any:
        """Start a broadcast of a uint8 buffer and return its work: poll ``is_completed``, then ``wait``."""
        work = self._group.broadcast([buffer], self._broadcast)
        self._pending = [(w, b) for w, b in self._pending if not w.is_completed()]
        self._pending.append((work, buffer))
        return work

    def close(self) -> None:
        """Give the group up; returns at once.

        gloo's destructor waits, holding the interpreter lock, for broadcasts under way: with a stopped peer that is
        until gloo's own timeout. A daemon thread keeps group and buffers alive until then.
        """
        group, pending = self._group, self._pending
        self._group, self._pending = None, []
        if group is None or all(work.is_completed() for work, _ in pending):
            return
        threading.Thread(target=_reap, args=([group], pending), name="refit-gloo-reaper", daemon=True).start()
        del group


def _reap(group: list[Any], pending: list[tuple[Any, torch.Tensor]]) -> None:
    group[0].abort()  # ends what is queued; what is on the wire ends with its connection or its timeout
    while not all(work.is_completed() for work, _ in pending):
        time.sleep(_REAP_POLL_S)
    pending.clear()
    group.clear()
