# SPDX-License-Identifier: Apache-2.0
"""Which rank gets what, checked rank by rank against the meaning of the axes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.distributed.dispatch import ShardedAxes, plan_multiple, plan_sharded
from nemo_rl_core.distributed.named_sharding import NamedSharding

SHARDING = NamedSharding([[[0, 4], [1, 5]], [[2, 6], [3, 7]]], ["pp", "dp", "tp"])


def arguments_of(plan) -> dict[int, dict]:
    return {rank: kwargs for ranks, kwargs in plan.slices for rank in ranks}


@given(st.permutations(["pp", "dp", "tp"]), st.lists(st.sampled_from("scf"), min_size=3, max_size=3), st.data())
def test_each_called_rank_gets_the_slice_at_its_own_coordinates(order, uses, data):
    sharded = tuple(axis for axis, use in zip(order, uses, strict=True) if use == "s")
    replicated = tuple(axis for axis, use in zip(order, uses, strict=True) if use == "c")
    free = [axis for axis, use in zip(order, uses, strict=True) if use == "f"]
    output = tuple(data.draw(st.sets(st.sampled_from(order))))

    def nested(axes: tuple[str, ...], place: tuple[int, ...] = ()) -> object:
        return [nested(axes[1:], (*place, index)) for index in range(2)] if axes else place

    plan = plan_sharded(
        SHARDING,
        ShardedAxes(sharded=sharded, replicated=replicated, output_replicated=output),
        {"step": 3},
        {"batch": nested(sharded)},
    )
    called = arguments_of(plan)
    coords = {rank: SHARDING.get_worker_coords(rank) for rank in range(8)}
    assert set(called) == {rank for rank in range(8) if not any(coords[rank][axis] for axis in free)}
    for rank, kwargs in called.items():
        assert kwargs == {"step": 3, "batch": tuple(coords[rank][axis] for axis in sharded)}
    assert list(plan.return_ranks) == sorted(rank for rank in called if not any(coords[rank][axis] for axis in output))


def test_ranks_with_the_same_slice_share_one_copy_of_it():
    plan = plan_sharded(SHARDING, ShardedAxes(sharded=("dp",), replicated=("pp", "tp")), None, {"batch": ["a", "b"]})
    assert sorted(ranks for ranks, _ in plan.slices) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_multiple_data_gives_element_r_to_rank_r():
    plan = plan_multiple(3, {"step": 1}, {"x": [10, 11, 12]})
    assert arguments_of(plan) == {rank: {"step": 1, "x": 10 + rank} for rank in range(3)}


@pytest.mark.parametrize(
    ("axes", "common", "data", "said"),
    [
        (ShardedAxes(sharded=("dp",), replicated=("dp",)), None, {"x": [1, 2]}, "not both: ['dp']"),
        (ShardedAxes(sharded=("data",)), None, {"x": [1, 2]}, "no axis 'data'"),
        (ShardedAxes(sharded=("dp",), output_replicated=("tensor",)), None, {"x": [1, 2]}, "no axis 'tensor'"),
        (ShardedAxes(sharded=("dp",)), None, {"x": [1, 2, 3]}, "2 parts along axis 'dp', got 3"),
        (ShardedAxes(sharded=("dp", "tp")), None, {"x": [[1, 2], [3]]}, "2 parts along axis 'tp', got 1"),
        (ShardedAxes(sharded=("dp",)), None, {"x": 5}, "got a int"),
        (ShardedAxes(sharded=("dp",)), {"x": 1}, {"x": [1, 2]}, "given both"),
    ],
)
def test_a_call_that_does_not_fit_the_axes_is_refused(axes, common, data, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the text is checked below
        plan_sharded(SHARDING, axes, common, data)
    assert said in str(caught.value)


def test_lists_of_another_length_than_the_group_are_refused():
    with pytest.raises(ValueError, match="each of 3 ranks, got 2"):
        plan_multiple(3, None, {"x": [1, 2]})
    with pytest.raises(ValueError, match="given both"):
        plan_multiple(1, {"x": 1}, {"x": [1]})
