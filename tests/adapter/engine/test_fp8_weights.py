# SPDX-License-Identifier: Apache-2.0
"""FP8 weights in a refit: the live engine is as a fresh one that loads the same FP8 checkpoint, and no half gets in."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from nemo_rl_core.errors import GenerationError, WeightsInvalidError
from nemo_rl_core.refit.report import RefitReport
from tests.adapter.engine.checkpoints import gap
from tests.adapter.engine.fp8_models import (
    EXPERTS,
    IGNORED,
    IGNORED_EXPERTS,
    MODEL,
    Fp8Checkpoint,
    fp8_settings,
    make_fp8,
    settled,
)
from tests.adapter.engine.live import PROMPTS, FreshEngines, LiveEngine, greedy
from tests.adapter.engine.proof import refused_before_the_first_byte, same_story

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

GIVEN = fp8_settings()
#: Largest distance of a logprob from that of a fresh engine with the same kernel; it was 0.
NEAR_FRESH = 1e-5
#: From transformers in float32, with the values that the FP8 weights stand for: what bfloat16 activations cost (0.04).
NEAR_ROUNDED = 0.1
#: From the same with the weights before the cast: what FP8 costs models of random weights (0.21 to 0.49).
NEAR_PLAIN = 0.6


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Fp8Checkpoint]:
    folder = tmp_path_factory.mktemp("fp8")
    return [make_fp8(folder / str(seed), seed, GIVEN) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def pair(python, checkpoints) -> Iterator[tuple[LiveEngine, FreshEngines]]:
    """One process for the live engine, and one for fresh ones with the same kernel."""
    live = LiveEngine(python, GIVEN, one_process=True)
    variables = {"NEMO_RL_VLLM_FP8_WEIGHTS": "1"}
    fresh = FreshEngines(python, [each.cast for each in checkpoints], dtype="bfloat16", variables=variables)
    yield live.ready(), fresh
    live.close()
    fresh.close()


@pytest.fixture
def live(pair) -> Iterator[LiveEngine]:
    yield pair[0]
    pair[0].heal()


def works(live, checkpoint) -> str:
    """Refit without a fault; returns the digest."""
    live.heal()
    sent, received = live.refit(checkpoint.cast)
    assert isinstance(sent, RefitReport), sent
    assert received["version"] == live.version == live.generate(greedy())[0].weight_version
    assert received["digest"] == sent.digest == live.call("weights_digest")
    return sent.digest


def outcomes_of(live, checkpoints) -> list[tuple]:
    """Refit with each checkpoint; logprobs are those of what its FP8 weights stand for, in FP8's distance of bfloat16."""
    outcomes = []
    for checkpoint in checkpoints:
        digest = works(live, checkpoint)
        found = live.generate(greedy())
        rounded, plain = (
            max(gap(folder, prompt, completion) for prompt, completion in zip(PROMPTS, found, strict=True))
            for folder in (checkpoint.rounded, checkpoint.plain)
        )
        print(f"from what FP8 stands for: {rounded:.4f}, from bfloat16: {plain:.4f}")
        # The first is smaller than the second, or the engine would compute with weights that were never cast.
        assert rounded < min(NEAR_ROUNDED, plain)
        assert plain < NEAR_PLAIN
        outcomes.append((digest, found))
    for digests_or_tokens in zip(*((digest, *(c.token_ids for c in found)) for digest, found in outcomes), strict=True):
        assert len(set(digests_or_tokens)) == len(checkpoints), (
            "a refit that changes nothing must not pass for one that works"
        )
    return outcomes


def test_three_refits_each_equal_a_fresh_engine_that_loaded_the_same_fp8_checkpoint(live, pair, checkpoints):
    """Q28, Q33, Q35: from dummy weights; with them the scales of fused layers, whose blocks lie below one another."""
    for (_, found), expected in zip(outcomes_of(live, checkpoints), pair[1].completions(), strict=True):
        for completion, (tokens, logprobs) in zip(found, expected, strict=True):
            assert list(completion.token_ids) == tokens
            assert max(abs(a - b) for a, b in zip(completion.logprobs, logprobs, strict=True)) < NEAR_FRESH


def test_what_is_ignored_stays_in_bfloat16_and_all_else_is_fp8(live):
    """Q40, Q42: the engine's own layers, by name; the kernel is the one that packs nothing."""
    (layers,) = live.plant("fp8_layers")
    fused = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    linear = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in fused}
    stays = {"lm_head", "model.embed_tokens", f"model.{IGNORED}"}
    assert set(layers) == linear | stays
    assert {layers[name] for name in linear - stays} == {"torch.float8_e4m3fn KeepingCpuKernel"}
    assert {layers[name] for name in stays} == {"torch.bfloat16 NoneType"}


def without_scales(tensors):
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def without_weight(tensors):
    del tensors["model.layers.0.mlp.up_proj.weight"]


def not_cast(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].bfloat16()


def packed(tensors):
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = torch.zeros(tensors[name].shape[0], 1, dtype=torch.int32)


def cast_though_ignored(tensors):
    name = f"model.{IGNORED}.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (without_scales, "'model.layers.0.mlp.up_proj.weight_scale_inv' is expected and not sent"),
        (without_weight, "'model.layers.0.mlp.up_proj.weight' is expected and not sent"),
        (not_cast, "'model.layers.0.mlp.up_proj.weight' has dtype float8_e4m3fn and is sent as bfloat16"),
        (packed, "'model.layers.0.mlp.up_proj.weight_scale_inv' has shape [4, 2] and is sent with [4, 1]"),
        (cast_though_ignored, f"'model.{IGNORED}.weight' has dtype bfloat16 and is sent as float8_e4m3fn"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_half_of_a_pair_and_another_form_are_refused_before_the_first_byte(live, checkpoints, change, cause):
    """Q35, Q37: the old weights stay valid."""
    works(live, checkpoints[0])
    tensors = checkpoints[1].cast.tensors
    change(tensors)
    refused_before_the_first_byte(live, tensors, cause)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("scale_doubled", "first differing tensor: 'model.layers.0.self_attn.k_proj.weight_scale_inv'"),
        ("swapped", "first differing tensor: 'model.layers.0.self_attn.k_proj.weight'"),
        ("scales_forgotten", "vLLM's loader did not take 'model.layers."),
    ],
)
def test_a_load_that_went_wrong_fails_the_refit_on_both_sides(live, checkpoints, fault, cause):
    """Q35: one scale that is wrong, values without their scales; caught before the first token."""
    works(live, checkpoints[0])
    live.plant(fault)
    error = same_story(*live.refit(checkpoints[1].cast), cause)
    with pytest.raises(WeightsInvalidError) as caught:
        live.generate(greedy())
    assert error.cause in str(caught.value)
    works(live, checkpoints[2])


def test_the_digest_is_read_from_the_live_scales(live, checkpoints):
    """Q31: in a checkpoint's form, which no kernel has packed."""
    digest = works(live, checkpoints[0])
    live.plant("scale_corrupt")
    assert live.call("weights_digest") != digest
    assert works(live, checkpoints[0]) == digest


def casts_less(weights):
    return replace(weights, cast=weights.cast[1:])


def casts_more(weights):
    return replace(weights, cast=(*weights.cast, f"model.{IGNORED}"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (casts_less, "'model.layers.0.self_attn.q_proj' is FP8 in the engine, and the sender does not cast it"),
        (casts_more, f"'model.{IGNORED}' is cast to FP8 by the sender, and not FP8 in the engine"),
    ],
)
def test_an_engine_that_casts_other_modules_than_the_sender_does_not_start(pair, change: Callable, words):
    """Q42: at the start, a minute before the first refit would find it."""
    live, _ = pair
    with pytest.raises(GenerationError) as caught:
        live.restart(replace(GIVEN, fp8_weights=change(settled(GIVEN))))
    assert words in str(caught.value)
    live.call("start", GIVEN, limit_s=480.0, rank=0, world_size=1, device="cpu")


@pytest.fixture(scope="module")
def experts(python, tmp_path_factory) -> Iterator[tuple]:
    """A model of which the experts of one layer are FP8 and those of the other are not."""
    given, folder = fp8_settings(EXPERTS, IGNORED_EXPERTS), tmp_path_factory.mktemp("fp8_experts")
    checkpoints = [make_fp8(folder / str(seed), seed, given) for seed in (1, 2, 3)]
    live = LiveEngine(python, given, one_process=True)
    variables = {"NEMO_RL_VLLM_FP8_WEIGHTS": "1"}
    fresh = FreshEngines(python, [each.cast for each in checkpoints], dtype="bfloat16", variables=variables)
    yield live.ready(), fresh, checkpoints
    live.close()
    fresh.close()


def test_three_refits_of_fp8_experts_each_equal_a_fresh_engine(experts):
    """Q36, Q44: each expert's values and scales by its id; the layer that is ignored is repacked as ever."""
    live, fresh, checkpoints = experts
    names = checkpoints[0].cast.tensors
    assert names["model.layers.0.mlp.experts.3.down_proj.weight_scale_inv"].shape == (2, 2)
    assert names["model.layers.1.mlp.experts.3.down_proj.weight"].dtype == torch.bfloat16
    for (_, found), expected in zip(outcomes_of(live, checkpoints), fresh.completions(), strict=True):
        for completion, (tokens, logprobs) in zip(found, expected, strict=True):
            assert list(completion.token_ids) == tokens
            assert max(abs(a - b) for a, b in zip(completion.logprobs, logprobs, strict=True)) < NEAR_FRESH


def test_an_experts_scale_that_is_wrong_fails_the_refit(experts):
    """Q35: in the place of another expert's."""
    live, _, checkpoints = experts
    works(live, checkpoints[0])
    live.plant("misplaced_expert_scale")
    try:
        same_story(*live.refit(checkpoints[1].cast), "'model.layers.0.mlp.experts.1.gate_proj.weight_scale_inv'")
    finally:
        live.heal()
    works(live, checkpoints[2])


@pytest.mark.parametrize(
    ("config", "ignored", "module"),
    [
        (MODEL, IGNORED, "self_attn.k_proj"),
        (EXPERTS, IGNORED_EXPERTS, "mlp.experts.1.gate_proj"),
    ],
    ids=["dense", "experts"],
)
def test_two_ranks_hold_their_shares_of_values_and_scales(python, tmp_path, config, ignored, module):
    """Q30, Q38: rows of q, k, v, gate and up, columns of the others, in whole blocks.

    Their sums are rounded to bfloat16 otherwise than those of one rank, so the tokens may be others.
    """
    given = fp8_settings(config, ignored, tensor_parallel_size=2)
    live = LiveEngine(python, given, one_process=True)
    try:
        checkpoints = [make_fp8(tmp_path / str(seed), seed, given) for seed in (1, 2)]
        outcomes_of(live.ready(), checkpoints)
        live.plant("scale_doubled" if config is MODEL else "misplaced_expert_scale", rank=1)
        wrong = f"'model.layers.0.{module}.weight_scale_inv'"
        same_story(*live.refit(checkpoints[0].cast), f"rank 1 of the engine's 2 does not hold its share of {wrong}")
    finally:
        live.close()
