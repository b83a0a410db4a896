# SPDX-License-Identifier: Apache-2.0
"""Refits into engines of two ranks, each of which holds its share: as one rank would be, and a fault on either is caught."""

from collections.abc import Iterator

import pytest

from nemo_rl_core.errors import GenerationError, WeightsInvalidError
from nemo_rl_core.refit.report import RefitReport
from tests.adapter.engine.checkpoints import make
from tests.adapter.engine.live import FreshEngines, LiveEngine, greedy, settings
from tests.adapter.engine.proof import NEAR_FRESH_OF_ONE_RANK, same_story, three_refits

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

#: One KV head for each rank; a tied head; one KV head on both ranks, with biases; experts.
SHARED = ("qwen3", "qwen3_tied", "qwen2", "qwen3_moe")


def of_two_ranks(family: str):
    return settings(family, tensor_parallel_size=2)


@pytest.fixture(scope="module")
def process(python, tmp_path_factory) -> Iterator[tuple]:
    """One process that has an engine of two ranks for one family after another; fresh engines of one rank beside it."""
    folder = tmp_path_factory.mktemp("shared")
    checkpoints = {family: [make(folder / family / str(seed), family, seed) for seed in (1, 2, 3)] for family in SHARED}
    live = LiveEngine(python, of_two_ranks(SHARED[0]), one_process=True)
    fresh = FreshEngines(python, [checkpoint for group in checkpoints.values() for checkpoint in group])
    yield live.ready(), fresh, checkpoints
    live.close()
    fresh.close()


@pytest.fixture(scope="module")
def running() -> list[str]:
    """The family whose engine runs; the process starts with the first."""
    return [SHARED[0]]


@pytest.fixture
def engine(request, process, running) -> Iterator[tuple]:
    """The live engine of a family, without any fault before and after; the family's checkpoints."""
    live, fresh, checkpoints = process
    family = request.param
    if family != running[0]:
        live.restart(of_two_ranks(family))
        running[0] = family
    yield live, checkpoints[family], lambda: fresh.completions()[3 * SHARED.index(family) :][:3]
    live.heal()


def works(live, checkpoint) -> None:
    live.heal()
    sent, received = live.refit(checkpoint)
    assert isinstance(sent, RefitReport), sent
    assert sent.digest == received["digest"] == live.call("weights_digest")
    assert live.generate(greedy())[0].weight_version == live.version


@pytest.mark.parametrize("engine", SHARED, indirect=True)
def test_three_refits_of_two_ranks_each_equal_a_fresh_engine_of_one(engine):
    """R33, R38, U40: both ranks acknowledge the digest of the whole that was sent, and tokens are those of one rank."""
    live, checkpoints, fresh = engine
    assert isinstance(live.before_any_refit, WeightsInvalidError)
    three_refits(live, fresh(), checkpoints, near=NEAR_FRESH_OF_ONE_RANK)
    assert live.call("num_receiving_ranks") == 2


FIRST_DOWN, DOWN = (f"'model.layers.{layer}.mlp.down_proj.weight'" for layer in (0, 1))


@pytest.mark.parametrize(
    ("engine", "fault", "rank", "cause"),
    [
        ("qwen3_moe", "not_repacked", 1, "step after the load of 'model.layers.0.mlp.experts"),
        ("qwen3_moe", "repacked_twice", 1, "RuntimeError: "),  # of the engine's own step, which pads here
        ("qwen3_moe", "misplaced_expert", 0, "'model.layers.0.mlp.experts."),
        ("qwen3", "lying", 0, f"rank 0 of the engine's 2 does not hold its share of {DOWN}"),
        ("qwen3", "lying", 1, f"rank 1 of the engine's 2 does not hold its share of {DOWN}"),
        ("qwen3", "forgotten", 1, f"vLLM's loader did not take {DOWN}"),
        ("qwen3", "other_share", 1, f"rank 1 of the engine's 2 does not hold its share of {FIRST_DOWN}"),
        ("qwen3", "other_share", None, f"does not hold its share of {FIRST_DOWN}"),
        ("qwen3", "swapped", 1, "first differing tensor: 'model.layers.0.self_attn.k_proj.weight'"),
        ("qwen3", "broken", 1, "MemoryError: no room for this bucket"),
    ],
    indirect=["engine"],
    ids=lambda value: str(value) if value is None or " " not in str(value) else "",
)
def test_a_load_that_went_wrong_on_one_rank_fails_the_refit_on_all(engine, fault, rank, cause):
    """R33, R36, U30, U38: no collective is needed to see it, and no rank generates with what the others hold."""
    live, checkpoints, _ = engine
    works(live, checkpoints[0])
    live.plant(fault, rank=rank)
    error = same_story(*live.refit(checkpoints[1]), cause)
    if rank is not None:
        assert f"generation rank {1 + rank}" in error.culprit
    with pytest.raises(WeightsInvalidError) as caught:
        live.generate(greedy())
    assert error.cause in str(caught.value)
    works(live, checkpoints[2])


@pytest.mark.parametrize("engine", ["qwen3"], indirect=True)
def test_a_version_that_one_rank_has_not_set_is_not_generated_with(engine):
    """U40: the other rank has finished the same refit."""
    live, checkpoints, _ = engine
    works(live, checkpoints[0])
    live.plant("unfinished", rank=1)
    live.refit(checkpoints[1])
    with pytest.raises(WeightsInvalidError, match="was not finished in the engine"):
        live.generate(greedy())
    works(live, checkpoints[2])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("engine", ["qwen3"], indirect=True)
def test_an_element_that_changes_later_on_one_rank_is_seen_and_named(engine, rank):
    """R33: what is live is read again, not remembered."""
    live, checkpoints, _ = engine
    works(live, checkpoints[0])
    live.plant("corrupt", rank=rank)
    with pytest.raises(
        GenerationError, match=r"does not hold its share of 'model\.layers\.1\.self_attn\.o_proj"
    ) as caught:
        live.call("weights_digest")
    assert (caught.value.rank, caught.value.phase) == (rank, "weights_digest")
    works(live, checkpoints[1])


@pytest.mark.parametrize("engine", ["qwen3"], indirect=True)
def test_a_share_in_place_of_the_whole_is_refused_before_the_first_byte(engine):
    """U40, R36: the manifest has the checkpoint's shapes, whatever each rank holds of them."""
    live, checkpoints, _ = engine
    works(live, checkpoints[0])
    version = live.version
    tensors = checkpoints[1].tensors
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:32].contiguous()
    same_story(*live.refit(tensors), "'model.embed_tokens.weight' has shape [40, 64] and is sent with [32, 64]")
    assert live.generate(greedy())[0].weight_version == version
