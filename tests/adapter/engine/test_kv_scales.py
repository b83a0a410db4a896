# SPDX-License-Identifier: Apache-2.0
"""FP8 scales of the KV cache in a refit: in one transaction with the weights, or not at all."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nemo_rl_core.errors import WeightsInvalidError
from nemo_rl_core.refit.report import RefitReport
from tests.adapter.engine.live import LiveEngine, greedy, settings
from tests.adapter.engine.proof import refused_before_the_first_byte, same_story

pytestmark = pytest.mark.timeout(600)

OWNERS = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
NAMES = tuple(f"{owner}.{kind}_scale" for owner in OWNERS for kind in "qkv")
#: Values of a healthy cache here lie between 0.02 and 10, so that neither saturates at 0.05 x 448 nor at 1.0 x 448.
HEALTHY = {name: 0.05 + 0.01 * index for index, name in enumerate(NAMES)}
#: Everything above 448 / 2000 saturates.
SATURATING = dict.fromkeys(NAMES, 1 / 2000)


@pytest.fixture(scope="module")
def engine(python) -> Iterator[LiveEngine]:
    given = replace(settings("qwen3", kv_cache_dtype="fp8_e4m3"), kv_scales=NAMES)
    live = LiveEngine(python, given, one_process=True)
    try:
        yield live.ready()
    finally:
        live.close()


@pytest.fixture
def live(engine) -> Iterator[LiveEngine]:
    yield engine
    engine.heal()


def payload(checkpoint, scales):
    """The tensors of a refit: weights, then scales."""
    return checkpoint.tensors | {name: torch.tensor(value) for name, value in scales.items()}


def works(live, checkpoint, scales) -> str:
    """Refit without a fault; returns the digest."""
    live.heal()
    sent, received = live.refit(payload(checkpoint, scales))
    assert isinstance(sent, RefitReport), sent
    assert received["version"] == live.version == live.generate(greedy())[0].weight_version
    return sent.digest


def told(live):
    """What each prompt is continued with."""
    return [(c.token_ids, c.logprobs) for c in live.generate(greedy())]


def scales_of(live) -> dict[str, float]:
    (scales,) = live.plant("kv_scales")
    return scales


def test_scales_arrive_with_the_weights_and_the_cache_of_the_old_ones_is_not_read(live, checkpoints):
    """Q17, Q24, Q27: the same long prompts, cached under other scales before; then everything as at first."""
    digest = works(live, checkpoints[0], HEALTHY)
    assert scales_of(live) == {name: torch.tensor(value).item() for name, value in HEALTHY.items()}
    first, again = told(live), told(live)
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in again]

    assert works(live, checkpoints[0], SATURATING) != digest, "the digest covers the scales"
    assert set(scales_of(live).values()) == {torch.tensor(1 / 2000).item()}
    saturated = told(live)
    assert all(new[1] != old[1] for new, old in zip(saturated, first, strict=True))

    assert works(live, checkpoints[0], HEALTHY) == digest
    assert told(live) == first


def without_one(tensors):
    del tensors[NAMES[4]]


def without_q(tensors):
    for name in NAMES:
        if name.endswith(".q_scale"):
            del tensors[name]


def of_another_layer(tensors):
    tensors["model.layers.2.self_attn.attn.k_scale"] = torch.tensor(1.0)


def under_the_short_name(tensors):
    tensors["model.layers.0.self_attn.k_scale"] = tensors.pop(NAMES[1])


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (without_one, f"'{NAMES[4]}' is expected and not sent"),
        (without_q, f"'{NAMES[0]}' is expected and not sent"),
        (of_another_layer, "'model.layers.2.self_attn.attn.k_scale' is sent and not expected"),
        (under_the_short_name, "'model.layers.0.self_attn.k_scale' is sent and not expected"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_set_that_is_not_the_engines_is_refused_before_the_first_byte(live, checkpoints, change, cause):
    """Q4, Q14: the old weights and scales stay, and stay valid."""
    works(live, checkpoints[0], HEALTHY)
    tensors = payload(checkpoints[1], SATURATING)
    change(tensors)
    refused_before_the_first_byte(live, tensors, cause)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("float_forgotten", f"different values of scale '{NAMES[0]}'"),
        ("scale_dropped", f"scale '{NAMES[1]}' is not live as it was sent (1 such)"),
        ("scales_swapped", f"scale '{NAMES[1]}' is not live as it was sent (2 such)"),
    ],
)
def test_a_scale_that_did_not_get_where_it_belongs_fails_the_refit_on_both_sides(live, checkpoints, fault, cause):
    """Q20, Q21, Q24: delivered and right are two things; the engine refuses until a full refit has completed."""
    works(live, checkpoints[0], HEALTHY)
    live.plant(fault)
    doubled = {name: 2 * value for name, value in HEALTHY.items()}
    error = same_story(*live.refit(payload(checkpoints[1], doubled)), cause)
    with pytest.raises(WeightsInvalidError, match="refit"):
        live.generate(greedy())
    assert "generation rank 1" in error.culprit
    works(live, checkpoints[2], HEALTHY)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_what_is_no_scale_is_refused_by_the_engines_side_too(live, checkpoints, value):
    """Q19: the train side refuses it first; a sender that does not must not get it into the engine."""
    works(live, checkpoints[0], HEALTHY)
    same_story(*live.refit(payload(checkpoints[0], HEALTHY | {NAMES[2]: value})), "must be a positive finite number")
    works(live, checkpoints[0], HEALTHY)
