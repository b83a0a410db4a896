# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks, each a process, over a real store on a port that rank 0's owner bound."""

import datetime
import io
import multiprocessing
import traceback
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 120


def _child(function, rank, world_size, address, args, pipe):
    torch.set_num_threads(1)
    host, port = address
    store = dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=DEADLINE_S))
    try:
        # As bytes: a tensor sent as such is fetched later from a process that may have ended by then.
        buffer = io.BytesIO()
        torch.save(function(rank, world_size, store, *args), buffer)
        pipe.send((None, buffer.getvalue()))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise


def run_on_ranks(function: Any, world_size: int, *args: Any) -> list[Any]:
    """Return ``function(rank, world_size, store, *args)`` of every rank; a failure or a missed deadline fails the test."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    children = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_child, args=(function, rank, world_size, ("127.0.0.1", store.port), args, theirs), daemon=True
        )
        process.start()
        children.append((process, ours))
    results = []
    try:
        for rank, (_, pipe) in enumerate(children):
            assert pipe.poll(DEADLINE_S), f"rank {rank} did not answer within {DEADLINE_S} s"
            error, result = pipe.recv()
            assert error is None, f"rank {rank}:\n{error}"
            results.append(torch.load(io.BytesIO(result), weights_only=False))
    finally:
        for process, _ in children:
            process.join(10)
            if process.is_alive():
                process.kill()
    return results
