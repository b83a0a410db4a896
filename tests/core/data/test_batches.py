# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.data.microbatches import plan_by_count, plan_by_tokens
from nemo_rl_core.errors import DataError


def batch_of(rows, width=3):
    return BatchedDataDict(
        ids=torch.arange(rows * width).view(rows, width),
        score=torch.arange(rows),
        text=[f"row {i}" for i in range(rows)],
    )


def same(a, b):
    return set(a) == set(b) and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
    )


@given(st.integers(1, 4), st.integers(1, 4))
def test_shards_joined_are_the_batch(shards, rows):
    batch = batch_of(shards * rows)
    assert same(BatchedDataDict.from_batches(batch.shard_by_batch_size(shards)), batch)


@given(st.permutations(range(6)))
def test_selecting_and_selecting_back_is_the_identity(order):
    batch = batch_of(6)
    back = [order.index(i) for i in range(6)]
    assert same(batch.select_indices(order).select_indices(back), batch)


def test_joining_pads_the_narrower_on_the_right_with_the_given_value():
    narrow, wide = BatchedDataDict(ids=torch.ones(1, 2)), BatchedDataDict(ids=torch.ones(1, 4))
    joined = BatchedDataDict.from_batches([narrow, wide], {"ids": 9})
    assert joined.tensor("ids").tolist() == [[1, 1, 9, 9], [1, 1, 1, 1]]


def test_uneven_columns_shards_and_missing_columns_are_refused():
    with pytest.raises(DataError, match="same number of rows"):
        BatchedDataDict(a=torch.zeros(2), b=[1])
    with pytest.raises(DataError, match="5 sequences cannot be cut into 2"):
        batch_of(5).shard_by_batch_size(2)
    with pytest.raises(DataError, match="same columns"):
        BatchedDataDict.from_batches([batch_of(2), BatchedDataDict(ids=torch.zeros(2, 3))])
    with pytest.raises(DataError, match=r"'nope', got missing; columns: \['ids', 'score', 'text'\]"):
        batch_of(2).tensor("nope")


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 60))
def test_a_token_plan_holds_each_row_once_and_keeps_the_budget(lengths, budget):
    plan = plan_by_tokens(lengths, budget)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[i] for i in part) <= budget for part in plan)


def test_a_row_longer_than_the_budget_is_refused_by_its_key():
    with pytest.raises(DataError, match=r"sequence 1 has 9 tokens.*train_mb_tokens"):
        plan_by_tokens([1, 9], 8)


@given(st.integers(0, 20), st.integers(1, 6))
def test_a_count_plan_holds_each_row_once_in_order(rows, size):
    plan = plan_by_count(rows, size)
    assert [i for part in plan for i in part] == list(range(rows))
    assert all(1 <= len(part) <= size for part in plan)
