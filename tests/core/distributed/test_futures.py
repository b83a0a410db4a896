# SPDX-License-Identifier: Apache-2.0
"""Which of several failures is the first cause."""

import os
import pickle
import signal

import pytest
import ray

from nemo_rl_core.distributed.futures import MultiWorkerFuture, PendingCall, WorkerRecord
from nemo_rl_core.errors import WorkerError


class Victim:
    """Ends its own process."""

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def described(rank: int, at: float) -> dict:
    return {
        "failure": {
            "phase": "train",
            "type": "RuntimeError",
            "text": "connection closed by peer",
            "traceback": "...",
            "rank": rank,
            "worker": f"policy-{rank}",
            "host": "h",
            "pid": 7,
            "time": at,
            "core_error": None,
        }
    }


def call(rank: int, ref, actor=None) -> PendingCall:
    worker = WorkerRecord(name=f"policy-{rank}", rank=rank, host="h", pid=7, actor=actor)
    return PendingCall(ref=ref, worker=worker, phase="train")


def test_a_death_is_the_cause_also_where_a_peers_error_arrives_before_it(local_ray):
    """U26: the peer's broken connection is a consequence."""
    actor = ray.remote(num_cpus=0)(Victim).remote()
    ray.get(actor.__ray_ready__.remote(), timeout=60)
    calls = [call(0, ray.put(described(0, at=0.0))), call(1, actor.die.remote(), actor)]
    with pytest.raises(WorkerError) as caught:
        MultiWorkerFuture(calls, return_ranks=None, timeout_s=30.0).get_results()
    assert caught.value.rank == 1
    assert "died" in str(caught.value)
    assert any("connection closed by peer" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("times", "earliest"), [([3.0, 1.0, 2.0], 1), ([1.0, 2.0, 3.0], 0), ([2.0, 3.0, 1.0], 2)])
def test_among_errors_the_earliest_in_time_is_the_cause_whatever_order_they_arrive_in(local_ray, times, earliest):
    calls = [call(rank, ray.put(described(rank, at))) for rank, at in enumerate(times)]
    with pytest.raises(WorkerError) as caught:
        MultiWorkerFuture(calls, return_ranks=None, timeout_s=30.0).get_results()
    assert caught.value.rank == earliest
    assert len([note for note in caught.value.__notes__ if note.startswith("also failed")]) == 2
    assert pickle.loads(pickle.dumps(caught.value)).rank == earliest
