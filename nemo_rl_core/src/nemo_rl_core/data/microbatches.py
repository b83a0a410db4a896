# SPDX-License-Identifier: Apache-2.0
"""Cut a batch into micro-batches, by count or by token budget: pure functions of the lengths."""

from collections.abc import Sequence

from nemo_rl_core.errors import DataError

__all__ = ["plan_by_count", "plan_by_tokens"]


def plan_by_count(num_rows: int, rows: int) -> list[list[int]]:
    """Return consecutive row indices, at most ``rows`` in each micro-batch.

    Example:
        >>> plan_by_count(5, 2)
        [[0, 1], [2, 3], [4]]
    """
    if rows < 1:
        raise DataError(f"a micro-batch needs at least 1 row, got {rows}")
    return [list(range(start, min(start + rows, num_rows))) for start in range(0, num_rows, rows)]


def plan_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group rows of similar length so that rows x longest row stays within ``max_tokens``.

    Rows are taken from the longest to the shortest, so a micro-batch is as wide as its first row and padding is
    small. Every row stands in exactly one micro-batch.

    Args:
        lengths: Tokens of each row.
        max_tokens: Budget of padded tokens for one micro-batch.

    Returns:
        Row indices of each micro-batch.

    Raises:
        DataError: If one row alone is longer than the budget.

    Example:
        >>> plan_by_tokens([2, 8, 3, 4], 8)
        [[1], [3, 2], [0]]
    """
    plan: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[row]
        if length > max_tokens:
            raise DataError(
                f"sequence {row} has {length} tokens, more than the budget of {max_tokens} for a micro-batch; raise "
                "policy.dynamic_batching.train_mb_tokens (or logprob_mb_tokens) to at least the longest sequence"
            )
        if plan and (len(plan[-1]) + 1) * width <= max_tokens:
            plan[-1].append(row)
        else:
            plan.append([row])
            width = length
    return plan
