# SPDX-License-Identifier: Apache-2.0
"""Refits into a live vLLM engine: each equals a fresh engine, and each planted fault is caught before the first token."""

import pytest
import torch

from nemo_rl_core.errors import WeightsInvalidError
from nemo_rl_core.refit.report import RefitReport
from tests.adapter.engine.live import greedy
from tests.adapter.engine.proof import refused_before_the_first_byte, same_story, three_refits

pytestmark = pytest.mark.timeout(600)


def works(live, checkpoint) -> str:
    """Refit without a fault; returns the digest."""
    live.heal()
    sent, received = live.refit(checkpoint)
    assert isinstance(sent, RefitReport), sent
    assert received["version"] == live.version == live.generate(greedy())[0].weight_version
    return sent.digest


def refuses_to_generate(live, cause: str) -> None:
    with pytest.raises(WeightsInvalidError, match="refit") as caught:
        live.generate(greedy())
    assert cause in str(caught.value)


def test_no_token_is_drawn_from_the_weights_that_the_engine_starts_with(live):
    """R37, U40: ``load_format=dummy`` leaves random weights behind."""
    assert isinstance(live.before_any_refit, WeightsInvalidError)
    assert "no refit has completed yet" in str(live.before_any_refit)


def test_three_refits_each_equal_a_fresh_engine_that_loaded_the_same_checkpoint(live, fresh, checkpoints):
    """R33, R38, U40: every tensor differs each time; tokens, logprobs and the digest read back are compared."""
    three_refits(live, fresh.completions(), checkpoints)


def test_a_prompt_that_was_cached_is_computed_anew_after_a_refit(live, fresh, checkpoints):
    """R41, U48: the same long prompts twice before the refit, so that the prefix cache is warm, and once after it."""
    works(live, checkpoints[0])
    before = [live.generate(greedy()) for _ in range(2)]
    assert [c.token_ids for c in before[0]] == [c.token_ids for c in before[1]]
    live.refit(checkpoints[1])
    after = live.generate(greedy())
    assert [list(c.token_ids) for c in after] == [tokens for tokens, _ in fresh.completions()[1]]
    assert all(old.token_ids != new.token_ids for old, new in zip(before[0], after, strict=True))


def renamed(tensors):
    tensors["model.layers.0.self_attn.query.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")


def dropped(tensors):
    del tensors["model.layers.1.self_attn.k_norm.weight"]


def surplus(tensors):
    tensors["model.layers.2.input_layernorm.weight"] = torch.ones(64)


def another_dtype(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()


def another_shape(tensors):
    tensors["model.embed_tokens.weight"] = torch.zeros(64, 64)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (renamed, "'model.layers.0.self_attn.q_proj.weight' is expected and not sent"),
        (dropped, "'model.layers.1.self_attn.k_norm.weight' is expected and not sent"),
        (surplus, "'model.layers.2.input_layernorm.weight' is sent and not expected"),
        (another_dtype, "'lm_head.weight' has dtype float32 and is sent as bfloat16"),
        (another_shape, "'model.embed_tokens.weight' has shape [40, 64] and is sent with [64, 64]"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_does_not_fit_the_live_model_is_refused_before_the_first_byte(live, checkpoints, change, cause):
    """R36, U40: counted by what fused layers are made of, without the rows that vLLM pads; the old weights stay valid."""
    works(live, checkpoints[0])
    tensors = checkpoints[1].tensors
    change(tensors)
    refused_before_the_first_byte(live, tensors, cause)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("swapped", "first differing tensor: 'model.layers.0.self_attn.k_proj.weight'"),
        ("stale", "first differing tensor: "),
        ("halved", "first differing tensor: 'model.norm.weight'"),
        ("rounded", "first differing tensor: 'model.layers.1.mlp.up_proj.weight'"),
        ("forgotten", "vLLM's loader did not take 'model.layers.1.mlp.down_proj.weight'"),
        ("broken", "MemoryError: no room for this bucket"),
    ],
)
def test_a_load_that_went_wrong_in_the_engine_fails_the_refit_on_both_sides(live, checkpoints, fault, cause):
    """R33, R36, U30, U38: caught before the first token; the engine refuses until a full refit has completed."""
    works(live, checkpoints[0])
    live.plant(fault)
    error = same_story(*live.refit(checkpoints[1]), cause)
    assert "generation rank 1" in error.culprit
    refuses_to_generate(live, error.cause)
    works(live, checkpoints[2])


def test_a_refit_that_never_set_the_version_is_not_generated_with(live, checkpoints):
    """U40: the acknowledgement alone does not make weights valid."""
    works(live, checkpoints[0])
    live.plant("unfinished")
    live.refit(checkpoints[1])
    refuses_to_generate(live, "was not finished in the engine")
    works(live, checkpoints[2])


def test_a_prefix_cache_that_cannot_be_emptied_stops_the_refit_before_the_first_byte(live, checkpoints):
    """R41: both sides hear of it, and the old weights stay."""
    works(live, checkpoints[0])
    version = live.version
    live.call("keep_the_cache_warm", True)
    try:
        same_story(*live.refit(checkpoints[1]), "prefix cache")
    finally:
        live.call("keep_the_cache_warm", False)
    assert live.generate(greedy())[0].weight_version == version
    works(live, checkpoints[1])


def test_the_digest_is_read_from_the_live_weights_and_not_remembered(live, checkpoints):
    """R33: one element changed by a thousandth after a refit that was fine."""
    digest = works(live, checkpoints[0])
    assert live.call("weights_digest") == digest
    live.plant("corrupt")
    assert live.call("weights_digest") != digest
    assert works(live, checkpoints[0]) == digest


def test_a_refit_without_a_sender_ends_with_an_error_and_the_weights_stay(live, checkpoints):
    """Nobody listens at that address: no byte was moved, so nothing is lost."""
    works(live, checkpoints[0])
    version = live.version
    address = live.sender.address.rpartition(":")[0] + ":1"
    with pytest.raises(Exception, match="sender") as caught:
        live.call("receive_weights", address)
    assert type(caught.value).__name__ == "RefitPeerLostError"
    assert live.generate(greedy())[0].weight_version == version
