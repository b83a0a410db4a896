# SPDX-License-Identifier: Apache-2.0
"""A dict of columns with one row for each sequence."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nemo_rl_core.errors import DataError

__all__ = ["BatchedDataDict"]

Column = torch.Tensor | list[Any]


class BatchedDataDict(dict[str, Column]):
    """Tensors ``[B, ...]`` and lists of length B under names, all with the same B.

    Example:
        >>> batch = BatchedDataDict(input_ids=torch.zeros(4, 7, dtype=torch.long), prompt=["a", "b", "c", "d"])
        >>> batch.size
        4
        >>> [shard.size for shard in batch.shard_by_batch_size(2)]
        [2, 2]
    """

    def __init__(self, columns: Mapping[str, Column] | None = None, /, **more: Column) -> None:
        """Take the columns and check them.

        Raises:
            DataError: If two columns have different lengths.
        """
        super().__init__({**(columns or {}), **more})
        self.check()

    def check(self) -> None:
        """Raise ``DataError`` unless all columns have the same first dimension."""
        sizes = {name: len(column) for name, column in self.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"all columns of a batch need the same number of rows, got {sizes}")

    @property
    def size(self) -> int:
        """Number of sequences B; 0 without columns."""
        return len(next(iter(self.values()))) if self else 0

    def tensor(self, name: str) -> torch.Tensor:
        """Return the column ``name``, which has to be a tensor.

        Raises:
            DataError: If the column is missing or no tensor; the message lists the columns there are.
        """
        column = self.get(name)
        if not isinstance(column, torch.Tensor):
            found = "missing" if column is None else type(column).__name__
            raise DataError(f"the batch needs a tensor column {name!r}, got {found}; columns: {sorted(self)}")
        return column

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> "BatchedDataDict":
        """Return the rows ``indices`` in that order; a row may be taken more than once."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        return BatchedDataDict(
            {
                name: column[rows.to(column.device)]
                if isinstance(column, torch.Tensor)
                else [column[i] for i in rows.tolist()]
                for name, column in self.items()
            }
        )

    def slice(self, start: int, stop: int) -> "BatchedDataDict":
        """Return rows ``start`` to ``stop``, tensors as views."""
        return BatchedDataDict({name: column[start:stop] for name, column in self.items()})

    def shard_by_batch_size(self, shards: int) -> list["BatchedDataDict"]:
        """Cut the batch into ``shards`` equal parts in row order.

        Raises:
            DataError: If B is not a multiple of ``shards``.
        """
        if shards < 1 or self.size % shards:
            raise DataError(f"a batch of {self.size} sequences cannot be cut into {shards} equal shards")
        rows = self.size // shards
        return [self.slice(i * rows, (i + 1) * rows) for i in range(shards)]

    def iter_slices(self, rows: int) -> Iterator["BatchedDataDict"]:
        """Yield consecutive parts of at most ``rows`` rows."""
        for start in range(0, self.size, rows):
            yield self.slice(start, min(start + rows, self.size))

    def to(self, device: torch.device | str) -> "BatchedDataDict":
        """Return the batch with its tensors on ``device``."""
        return BatchedDataDict(
            {name: column.to(device) if isinstance(column, torch.Tensor) else column for name, column in self.items()}
        )

    @classmethod
    def from_batches(
        cls, batches: Sequence["BatchedDataDict"], pad_values: Mapping[str, float] | None = None
    ) -> "BatchedDataDict":
        """Join batches row-wise; 2-D tensors of different width are padded on the right.

        Args:
            batches: At least one batch; all with the same columns.
            pad_values: Value that fills a column's padding, 0 where none is given.

        Raises:
            DataError: If there is no batch or the columns differ.
        """
        if not batches:
            raise DataError("from_batches needs at least one batch")
        names = set(batches[0])
        if any(set(batch) != names for batch in batches):
            raise DataError(f"batches to be joined need the same columns, got {[sorted(b) for b in batches]}")
        joined: dict[str, Column] = {}
        for name in batches[0]:
            columns = [batch[name] for batch in batches]
            if all(isinstance(column, torch.Tensor) for column in columns):
                joined[name] = _join(
                    [c for c in columns if isinstance(c, torch.Tensor)], (pad_values or {}).get(name, 0)
                )
            else:
                joined[name] = [item for column in columns for item in column]
        return cls(joined)


def _join(columns: list[torch.Tensor], pad_value: float) -> torch.Tensor:
    """Concatenate ``[B_i]`` or ``[B_i, S_i]`` tensors, padded on the right to the widest."""
    if columns[0].ndim == 1:
        return torch.cat(columns)
    width = max(column.shape[1] for column in columns)
    return torch.cat(
        [torch.nn.functional.pad(column, (0, width - column.shape[1]), value=pad_value) for column in columns]
    )
