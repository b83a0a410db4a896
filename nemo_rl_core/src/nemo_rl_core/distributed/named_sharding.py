# SPDX-License-Identifier: Apache-2.0
"""Which rank sits where: an immutable grid of rank ids with named axes.

Pure Python on purpose: a plan of the driver and a test need neither Ray nor an array library to reason about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any

__all__ = ["NamedSharding"]


@dataclass(frozen=True, init=False, repr=False)
class NamedSharding:
    """Name the axes of a grid of rank ids.

    Example: four workers, two data-parallel replicas of two tensor-parallel ranks each::

        sharding = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
        sharding.get_worker_coords(3)               # {"data_parallel": 1, "tensor_parallel": 1}
        sharding.get_ranks_by_coord(data_parallel=1)  # [2, 3]
        sharding.get_ranks(data_parallel=1, tensor_parallel=0)  # 2

    Anything outside the grid (a coordinate, negative ones included, or a rank) is an ``IndexError``, in every
    method; an axis that does not exist is a ``ValueError``.

    Attributes:
        names: Axis names, outermost first.
        sizes: Number of coordinates of each axis, in the order of ``names``.
        ranks: All rank ids, row by row (the last axis varies fastest).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __init__(self, layout: Any, names: Sequence[str]) -> None:
        """Check and flatten the grid.

        Args:
            layout: Nested sequences of rank ids, or an array with ``tolist()``; at least one axis, none empty.
            names: One name for each axis, outermost first, all different.

        Raises:
            TypeError: If a leaf of the layout is not an integer.
            ValueError: If the layout is ragged or empty, ids repeat or are negative, or names do not fit.
        """
        nested = layout.tolist() if hasattr(layout, "tolist") else layout
        sizes, ranks = _flatten(nested)
        names = tuple(names)
        if len(names) != len(sizes):
            raise ValueError(f"a sharding needs one name for each axis: {len(sizes)} axes, {len(names)} names {names}")
        if len(set(names)) != len(names):
            raise ValueError(f"axis names must differ from each other, got {names}")
        if len(set(ranks)) != len(ranks):
            repeated = sorted({rank for rank in ranks if ranks.count(rank) > 1})
            raise ValueError(f"each rank id may stand once in the layout, repeated: {repeated}")
        if min(ranks) < 0:
            raise ValueError(f"rank ids count from 0, got {min(ranks)}")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "ranks", ranks)

    @property
    def shape(self) -> Mapping[str, int]:
        """Size of each axis by name, outermost first."""
        return MappingProxyType(dict(zip(self.names, self.sizes, strict=True)))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.sizes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def layout(self) -> tuple[Any, ...]:
        """The grid as nested tuples of rank ids."""
        return _nest(self.sizes, self.ranks)

    def get_axis_index(self, name: str) -> int:
        """Return the position of an axis.

        Raises:
            ValueError: If there is no axis of that name.
        """
        if name not in self.names:
            raise ValueError(f"there is no axis {name!r} in this sharding; its axes are {list(self.names)}")
        return self.names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Return the number of coordinates of an axis.

        Raises:
            ValueError: If there is no axis of that name.
        """
        return self.sizes[self.get_axis_index(name)]

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis.

        Raises:
            IndexError: If the rank is not in the grid.
        """
        if rank not in self.ranks:
            raise IndexError(f"rank {rank} is not in this sharding of {self.size} ranks {_preview(self.ranks)}")
        offset = self.ranks.index(rank)
        coords: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            offset, coords[name] = divmod(offset, size)
        return {name: coords[name] for name in self.names}

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return the ranks at the given coordinates, in ascending order; axes left out are free.

        Raises:
            IndexError: If a coordinate is outside its axis.
            ValueError: If there is no axis of a given name.
        """
        return sorted(self._select(coords))

    def get_ranks(self, **coords: int) -> "int | NamedSharding":
        """Return the one rank at full coordinates, or the sharding that is left over the free axes.

        Raises:
            IndexError: If a coordinate is outside its axis.
            ValueError: If there is no axis of a given name.
        """
        selected = self._select(coords)
        free = [(name, size) for name, size in zip(self.names, self.sizes, strict=True) if name not in coords]
        if not free:
            return selected[0]
        return NamedSharding(_nest(tuple(size for _, size in free), selected), [name for name, _ in free])

    def _select(self, coords: Mapping[str, int]) -> tuple[int, ...]:
        """Return the ranks at these coordinates in the grid's own order."""
        for name, coord in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= coord < size:
                raise IndexError(f"axis {name!r} has the coordinates 0 to {size - 1}, got {coord}")
        spans = [
            range(size) if name not in coords else (coords[name],)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return tuple(self.ranks[self._offset(position)] for position in product(*spans))

    def _offset(self, position: Sequence[int]) -> int:
        """Return where a full position stands in the flat order."""
        offset = 0
        for coord, size in zip(position, self.sizes, strict=True):
            offset = offset * size + coord
        return offset

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"NamedSharding({axes}; ranks {_preview(self.ranks)})"


def _preview(ranks: Sequence[int]) -> str:
    """Return a short text for many ids."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"[{shown}, ...]" if len(ranks) > 8 else f"[{shown}]"


def _flatten(nested: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and flat ranks of nested sequences."""
    if not isinstance(nested, (list, tuple)):
        raise TypeError(f"a sharding's layout is nested lists of rank ids, got {type(nested).__name__} {nested!r}")
    if not nested:
        raise ValueError("an axis of a sharding must hold at least one coordinate, got an empty list")
    if not isinstance(nested[0], (list, tuple)):
        for rank in nested:
            if not isinstance(rank, int) or isinstance(rank, bool):
                raise TypeError(f"a rank id must be an integer, got {type(rank).__name__} {rank!r}")
        return (len(nested),), tuple(nested)
    parts = [_flatten(part) for part in nested]
    if len({sizes for sizes, _ in parts}) != 1:
        raise ValueError(
            f"a sharding's layout must be a full grid, got parts of shapes {[sizes for sizes, _ in parts]}"
        )
    return (len(nested), *parts[0][0]), tuple(rank for _, ranks in parts for rank in ranks)


def _nest(sizes: Sequence[int], ranks: Sequence[int]) -> tuple[Any, ...]:
    """Return flat ranks as nested tuples."""
    if len(sizes) == 1:
        return tuple(ranks)
    step = prod(sizes[1:])
    return tuple(_nest(sizes[1:], ranks[start : start + step]) for start in range(0, len(ranks), step))
