# SPDX-License-Identifier: Apache-2.0
"""NamedSharding against brute force over an array."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.distributed.named_sharding import NamedSharding

AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")


@st.composite
def grids(draw) -> np.ndarray:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    count = int(np.prod(sizes))
    ids = draw(st.permutations(range(count)))
    return np.array(ids).reshape(sizes)


def names_of(grid: np.ndarray) -> list[str]:
    return list(AXES[: grid.ndim])


@given(grids())
def test_each_rank_has_the_coordinates_at_which_the_array_holds_it(grid):
    sharding = NamedSharding(grid, names_of(grid))
    for place, rank in np.ndenumerate(grid):
        coords = sharding.get_worker_coords(int(rank))
        assert tuple(coords.values()) == place
        assert list(coords) == names_of(grid)
        assert sharding.get_ranks(**coords) == rank
        assert sharding.get_ranks_by_coord(**coords) == [rank]


@given(grids(), st.data())
def test_partial_coordinates_select_what_array_indexing_selects(grid, data):
    names = names_of(grid)
    sharding = NamedSharding(grid.tolist(), names)
    fixed = data.draw(st.sets(st.sampled_from(names)))
    coords = {name: data.draw(st.integers(0, sharding.get_axis_size(name) - 1)) for name in fixed}
    index = tuple(coords.get(name, slice(None)) for name in names)
    assert sharding.get_ranks_by_coord(**coords) == sorted(np.ravel(grid[index]).tolist())
    selected = sharding.get_ranks(**coords)
    if isinstance(selected, NamedSharding):
        assert np.array_equal(np.array(selected.layout), grid[index])
        assert list(selected.names) == [name for name in names if name not in fixed]
    else:
        assert selected == grid[index]


@given(grids())
def test_it_survives_a_pickle_and_is_equal_only_to_the_same_grid_with_the_same_names(grid):
    sharding = NamedSharding(grid, names_of(grid))
    assert pickle.loads(pickle.dumps(sharding)) == sharding
    assert hash(pickle.loads(pickle.dumps(sharding))) == hash(sharding)
    assert sharding == NamedSharding(sharding.layout, sharding.names)
    assert sharding != NamedSharding(grid, [f"{name}_x" for name in names_of(grid)])
    if grid.size > 1:
        assert sharding != NamedSharding(np.flip(grid), names_of(grid))


def test_sizes_and_axes_are_those_of_the_layout():
    sharding = NamedSharding([[0, 1, 2], [3, 4, 5]], ["data_parallel", "tied"])
    assert dict(sharding.shape) == {"data_parallel": 2, "tied": 3}
    assert (sharding.ndim, sharding.size) == (2, 6)
    assert sharding.layout == ((0, 1, 2), (3, 4, 5))
    assert sharding.get_axis_index("tied") == 1
    assert sharding.get_axis_size("data_parallel") == 2
    assert "data_parallel=2, tied=3" in repr(sharding)


def test_it_cannot_be_changed():
    sharding = NamedSharding([0, 1], ["data_parallel"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        sharding.ranks = (1, 0)
    with pytest.raises(TypeError):
        sharding.shape["data_parallel"] = 3


@pytest.mark.parametrize(
    "outside",
    [
        lambda sharding: sharding.get_ranks(data_parallel=2, tied=0),
        lambda sharding: sharding.get_ranks(data_parallel=2),
        lambda sharding: sharding.get_ranks(data_parallel=-1),
        lambda sharding: sharding.get_ranks_by_coord(data_parallel=2),
        lambda sharding: sharding.get_ranks_by_coord(tied=-1),
        lambda sharding: sharding.get_worker_coords(6),
        lambda sharding: sharding.get_worker_coords(-1),
    ],
)
def test_everything_outside_the_grid_is_an_index_error(outside):
    with pytest.raises(IndexError):
        outside(NamedSharding([[0, 1, 2], [3, 4, 5]], ["data_parallel", "tied"]))


@pytest.mark.parametrize(
    ("layout", "names", "error", "said"),
    [
        ([0, 1, 1], ["a"], ValueError, "repeated: [1]"),
        ([[0, 1], [2]], ["a", "b"], ValueError, "full grid"),
        ([], ["a"], ValueError, "empty"),
        ([[0, 1]], ["a"], ValueError, "2 axes, 1 names"),
        ([[0, 1]], ["a", "a"], ValueError, "differ"),
        ([0, -1], ["a"], ValueError, "got -1"),
        ([0, True], ["a"], TypeError, "bool"),
        ([0.0], ["a"], TypeError, "float"),
        (3, [], TypeError, "nested lists"),
    ],
)
def test_a_layout_that_is_no_grid_of_distinct_ranks_is_refused(layout, names, error, said):
    with pytest.raises(error) as caught:
        NamedSharding(layout, names)
    assert said in str(caught.value)


def test_an_unknown_axis_is_refused_and_the_known_ones_are_named():
    sharding = NamedSharding([0, 1], ["data_parallel"])
    with pytest.raises(ValueError, match="data_parallel"):
        sharding.get_ranks(data_paralel=0)
    with pytest.raises(ValueError, match="data_parallel"):
        sharding.get_axis_size("tensor_parallel")
