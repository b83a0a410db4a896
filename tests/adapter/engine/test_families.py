# SPDX-License-Identifier: Apache-2.0
"""Refits into live engines of other families, tied and untied: each equals a fresh engine."""

from collections.abc import Iterator

import pytest

from nemo_rl_core.refit.report import RefitReport
from tests.adapter.engine.checkpoints import FAMILIES, Checkpoint, make
from tests.adapter.engine.live import FreshEngines, LiveEngine, greedy, settings
from tests.adapter.engine.proof import same_story, three_refits

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


#: In the order in which one process goes through them.
DENSE = tuple(family for family in FAMILIES if family != "qwen3_moe")


def three(folder, family: str) -> list[Checkpoint]:
    return [make(folder / family / str(seed), family, seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def dense(python, tmp_path_factory) -> Iterator[tuple]:
    """One process with a live engine for one family after another, and one with fresh engines for all checkpoints."""
    folder = tmp_path_factory.mktemp("dense")
    checkpoints = {family: three(folder, family) for family in DENSE}
    live = LiveEngine(python, settings(DENSE[0]), one_process=True)
    fresh = FreshEngines(python, [checkpoint for group in checkpoints.values() for checkpoint in group])
    yield live.ready(), fresh, checkpoints
    live.close()
    fresh.close()


@pytest.mark.parametrize("family", DENSE)
def test_three_refits_each_equal_a_fresh_engine(dense, family):
    """R33, R38, U40: tied heads are sent once, biases with their weights."""
    live, fresh, checkpoints = dense
    live.restart(settings(family))
    at = 3 * DENSE.index(family)
    three_refits(live, fresh.completions()[at : at + 3], checkpoints[family])


@pytest.fixture(scope="module")
def experts(python, tmp_path_factory) -> Iterator[tuple]:
    """With vLLM's own processes, which the tests above leave out."""
    checkpoints = three(tmp_path_factory.mktemp("moe"), "qwen3_moe")
    live, fresh = LiveEngine(python, settings("qwen3_moe")), FreshEngines(python, checkpoints)
    yield live.ready(), fresh, checkpoints
    live.close()
    fresh.close()


def test_three_refits_of_experts_each_equal_a_fresh_engine(experts):
    """U38, U40: each expert's three tensors are sent, repacked by vLLM, and read back from the packed layout."""
    live, fresh, checkpoints = experts
    names = checkpoints[0].tensors
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    three_refits(live, fresh.completions(), checkpoints)


@pytest.mark.parametrize("fault", ["not_repacked", "repacked_twice", "swapped", "misplaced_expert"])
def test_a_fault_in_the_load_of_experts_fails_the_refit(experts, fault):
    """U38, R36: the step after the load is part of the transaction, and leaving it out shows in the digest."""
    live, _, checkpoints = experts
    live.refit(checkpoints[0])
    live.plant(fault)
    try:
        same_story(*live.refit(checkpoints[1]), "model.layers.")
    finally:
        live.heal()
    sent, _ = live.refit(checkpoints[2])
    assert isinstance(sent, RefitReport)
    assert live.generate(greedy())[0].weight_version == live.version


def test_a_missing_expert_is_refused_before_the_first_byte(experts):
    """U40, R36: counted by what the fused tensors are made of."""
    live, _, checkpoints = experts
    tensors = checkpoints[0].tensors
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    same_story(*live.refit(tensors), "'model.layers.0.mlp.experts.2.up_proj.weight' is expected and not sent")
