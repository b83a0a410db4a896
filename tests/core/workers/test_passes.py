# SPDX-License-Identifier: Apache-2.0
"""Every rank makes equally many passes, whatever its rows are."""

import pytest
import torch.distributed as dist

from nemo_rl_core.workers.passes import equal_plan
from tests.core.workers.ranks import run_on_ranks

#: Rank 0 needs one micro-batch, rank 1 three.
LENGTHS = ([5, 4], [5, 4, 3, 2, 6])


def planned(rank, world_size, store, max_tokens):
    dist.init_process_group("gloo", store=dist.PrefixStore("plan", store), rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    plan = equal_plan(LENGTHS[rank], 2, max_tokens, dist.group.WORLD)
    dist.destroy_process_group()
    return plan


@pytest.mark.parametrize("max_tokens", [None, 10])
def test_ranks_with_fewer_micro_batches_get_empty_ones_at_the_end(max_tokens):
    """A rank that made fewer passes would leave the others waiting in a gather."""
    few, many = run_on_ranks(planned, 2, max_tokens)
    assert len(few) == len(many) == 3
    assert few[1:] == [[], []]
    for plan, lengths in zip((few, many), LENGTHS, strict=True):
        assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(many)
