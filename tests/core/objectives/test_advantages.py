# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.errors import DataError
from nemo_rl_core.objectives.advantages import STD_FLOOR, group_advantages

groups = st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=1, max_size=4)


def flat(group_rewards):
    rewards = [r for group in group_rewards for r in group]
    ids = [i for i, group in enumerate(group_rewards) for _ in group]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids)


def by_hand(group, normalize, leave_one_out):
    """The definition, one completion at a time."""
    if len(group) < 2:
        return [0.0] * len(group)
    mean = sum(group) / len(group)
    std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
    result = []
    for i, reward in enumerate(group):
        others = group[:i] + group[i + 1 :]
        baseline = sum(others) / len(others) if leave_one_out else mean
        result.append((reward - baseline) / (std + STD_FLOOR if normalize else 1.0))
    return result


@given(groups, st.booleans(), st.booleans())
def test_advantages_are_those_of_the_definition(group_rewards, normalize, leave_one_out):
    rewards, ids = flat(group_rewards)
    expected = [a for group in group_rewards for a in by_hand(group, normalize, leave_one_out)]
    found = group_advantages(rewards, ids, normalize=normalize, leave_one_out=leave_one_out)
    # The floor under the standard deviation amplifies rounding of equal rewards, so compare in absolute terms there.
    assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@given(groups, st.randoms(use_true_random=False))
def test_order_of_the_samples_does_not_matter(group_rewards, rng):
    rewards, ids = flat(group_rewards)
    order = list(range(len(rewards)))
    rng.shuffle(order)
    straight = group_advantages(rewards, ids)
    shuffled = group_advantages(rewards[order], ids[order])
    assert torch.allclose(straight[order], shuffled, atol=1e-4)


def test_the_same_prompt_drawn_twice_forms_two_groups():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    split = group_advantages(rewards, torch.tensor([5, 5, 9, 9]), normalize=False)
    merged = group_advantages(rewards, torch.tensor([5, 5, 5, 5]), normalize=False)
    assert split.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert merged.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_a_dropped_sample_counts_in_no_baseline():
    rewards = torch.tensor([1.0, 0.0, float("nan")])
    valid = torch.tensor([True, True, False])
    found = group_advantages(rewards, torch.zeros(3, dtype=torch.long), valid_B=valid, normalize=False)
    assert found.tolist() == [0.5, -0.5, 0.0]


def test_a_reward_that_is_not_finite_is_refused_with_its_row():
    with pytest.raises(DataError, match=r"finite.*\[1\]"):
        group_advantages(torch.tensor([1.0, float("inf")]), torch.zeros(2, dtype=torch.long))


def test_shapes_must_agree():
    with pytest.raises(DataError, match=r"one shape \[B\]"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))
