# SPDX-License-Identifier: Apache-2.0
"""Which rank gets which arguments: pure functions over a sharding, no Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.distributed.named_sharding import NamedSharding

__all__ = ["CallPlan", "ShardedAxes", "plan_multiple", "plan_sharded"]


@dataclass(frozen=True, kw_only=True)
class ShardedAxes:
    """How the axes of a sharding take part in a call; axes in neither of the first two are free.

    Attributes:
        sharded: Data is nested lists, indexed by a rank's coordinates on these axes, outermost first.
        replicated: Ranks that differ only here get the same slice.
        output_replicated: Only coordinate 0 of these axes gives results.
    """

    sharded: tuple[str, ...]
    replicated: tuple[str, ...] = ()
    output_replicated: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """Who is called with what.

    Attributes:
        slices: Pairs of ranks and the keyword arguments that all of them get.
        return_ranks: Ranks whose results are wanted, ascending.
    """

    slices: tuple[tuple[tuple[int, ...], dict[str, Any]], ...]
    return_ranks: tuple[int, ...]


def plan_multiple(
    num_ranks: int, common_kwargs: Mapping[str, Any] | None, lists: Mapping[str, Sequence[Any]]
) -> CallPlan:
    """Give element r of each list to rank r.

    Raises:
        ValueError: If a list has not one element for each rank, or an argument is given twice.
    """
    common = _common(common_kwargs, lists)
    for name, values in lists.items():
        if len(values) != num_ranks:
            raise ValueError(f"{name!r} needs one element for each of {num_ranks} ranks, got {len(values)}")
    slices = tuple(
        ((rank,), {**common, **{name: values[rank] for name, values in lists.items()}}) for rank in range(num_ranks)
    )
    return CallPlan(slices=slices, return_ranks=tuple(range(num_ranks)))


def plan_sharded(
    sharding: NamedSharding, axes: ShardedAxes, common_kwargs: Mapping[str, Any] | None, data: Mapping[str, Any]
) -> CallPlan:
    """Cut data along named axes. Of a free axis only coordinate 0 is called.

    Raises:
        ValueError: If an axis is unknown or both cut and replicated, if data does not have the axes' sizes, or an
            argument is given twice.
    """
    common = _common(common_kwargs, data)
    for axis in (*axes.sharded, *axes.replicated, *axes.output_replicated):
        sharding.get_axis_index(axis)
    both = sorted(set(axes.sharded) & set(axes.replicated))
    if both:
        raise ValueError(f"an axis is either cut or replicated, not both: {both}")
    sizes = [sharding.get_axis_size(axis) for axis in axes.sharded]
    for name, value in data.items():
        _check_nesting(name, value, axes.sharded, sizes)
    free = [axis for axis in sharding.names if axis not in {*axes.sharded, *axes.replicated}]
    groups: dict[tuple[int, ...], list[int]] = {}
    returned = []
    for rank in sorted(sharding.ranks):
        coords = sharding.get_worker_coords(rank)
        if any(coords[axis] for axis in free):
            continue
        groups.setdefault(tuple(coords[axis] for axis in axes.sharded), []).append(rank)
        if not any(coords[axis] for axis in axes.output_replicated):
            returned.append(rank)
    slices = tuple(
        (tuple(ranks), {**common, **{name: _at(value, place) for name, value in data.items()}})
        for place, ranks in groups.items()
    )
    return CallPlan(slices=slices, return_ranks=tuple(returned))


def _common(common: Mapping[str, Any] | None, special: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common arguments, refusing one that is given twice."""
    twice = sorted(set(common or {}) & set(special))
    if twice:
        raise ValueError(f"arguments given both in common_kwargs and by name: {twice}")
    return dict(common or {})


def _check_nesting(name: str, value: Any, axes: Sequence[str], sizes: Sequence[int]) -> None:
    """Check that nested lists have the sizes of the axes that cut them."""
    if not sizes:
        return
    if not isinstance(value, (list, tuple)) or len(value) != sizes[0]:
        got = f"{len(value)} parts" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
        raise ValueError(f"{name!r} needs a list of {sizes[0]} parts along axis {axes[0]!r}, got {got}")
    for part in value:
        _check_nesting(name, part, axes[1:], sizes[1:])


def _at(value: Any, place: Sequence[int]) -> Any:
    """Return the part of nested lists at a place."""
    for index in place:
        value = value[index]
    return value
