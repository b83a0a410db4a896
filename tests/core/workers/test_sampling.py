# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.protocols.generation import SamplingParams
from nemo_rl_core.workers.sampling import RowSampler, sampling_logprobs


def by_hand(logits, temperature, top_k, top_p):
    """The distribution, in plain Python: temperature, then top-k, then top-p."""
    values = [x / temperature for x in logits]
    if top_k:
        threshold = sorted(values, reverse=True)[min(top_k, len(values)) - 1]
        values = [v if v >= threshold else -math.inf for v in values]
    weights = [math.exp(v - max(values)) for v in values]
    probs = [w / sum(weights) for w in weights]
    if top_p < 1:
        mass, kept = 0.0, set()
        for i in sorted(range(len(probs)), key=lambda i: -probs[i]):
            if mass >= top_p:
                break
            kept.add(i)
            mass += probs[i]
        probs = [p if i in kept else 0.0 for i, p in enumerate(probs)]
    return [p / sum(probs) for p in probs]


@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True),
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    st.integers(0, 14),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)
def test_the_distribution_is_that_of_the_definition(logits, temperature, top_k, top_p):
    logits = [x / 8 for x in logits]
    found = sampling_logprobs(
        torch.tensor([logits]), torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p])
    )
    expected = by_hand(logits, temperature, top_k, top_p)
    # Where cumulated mass meets p to the last bit, float32 and float64 may part; such inputs say nothing.
    running = sorted(by_hand(logits, temperature, top_k, 1.0), reverse=True)
    if any(abs(sum(running[: i + 1]) - top_p) < 1e-5 for i in range(len(running))) and top_p < 1:
        return
    assert found[0].exp().tolist() == pytest.approx(expected, abs=1e-5)


def test_rows_with_different_parameters_do_not_touch_each_other():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    t, k, p = torch.tensor([1.0, 0.3, 2.0, 1.0]), torch.tensor([0, 2, 0, 4]), torch.tensor([1.0, 1.0, 0.6, 0.8])
    together = sampling_logprobs(logits, t, k, p)
    for i in range(4):
        alone = sampling_logprobs(logits[i : i + 1], t[i : i + 1], k[i : i + 1], p[i : i + 1])
        assert torch.equal(together[i : i + 1], alone)


def draws(params, logits, count, seed=0):
    sampler = RowSampler([params] * count, torch.Generator().manual_seed(seed), torch.device("cpu"))
    return sampler.draw(logits.expand(count, -1))


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    tokens, _ = draws(SamplingParams(max_new_tokens=1, temperature=0.7), logits, 40_000)
    expected = torch.softmax(logits / 0.7, 0)
    observed = torch.bincount(torch.tensor(tokens), minlength=4) / 40_000
    # Four standard errors of a share near one half are 0.01; the seed is fixed, so this cannot flicker.
    assert torch.allclose(observed, expected, atol=0.01)


@given(st.integers(0, 50))
@settings(max_examples=25)
def test_a_token_that_was_cut_is_never_drawn_and_the_logprob_is_that_of_the_drawn_token(seed):
    """U46: looked up by token id."""
    logits = torch.tensor([5.0, 4.0, -2.0, 1.0, 0.0])
    params = SamplingParams(max_new_tokens=1, top_k=2)
    tokens, logprobs = draws(params, logits, 64, seed)
    expected = by_hand(logits.tolist(), 1.0, 2, 1.0)
    assert set(tokens) <= {0, 1}
    assert logprobs == pytest.approx([math.log(expected[t]) for t in tokens], abs=1e-5)


def test_greedy_takes_the_most_likely_and_reports_its_logprob_at_temperature_one():
    logits = torch.tensor([0.0, 3.0, 1.0])
    tokens, logprobs = draws(SamplingParams(max_new_tokens=1, temperature=0.0), logits, 3)
    assert tokens == [1, 1, 1]
    whole = [math.log(by_hand([0.0, 3.0, 1.0], 1.0, 0, 1.0)[1])] * 3
    assert logprobs == pytest.approx(whole, abs=1e-6)
    for cut in ({"top_k": 2}, {"top_p": 0.5}):
        tokens, logprobs = draws(SamplingParams(max_new_tokens=1, temperature=0.0, **cut), logits, 3)
        assert (tokens, logprobs) == ([1, 1, 1], pytest.approx(whole, abs=1e-6))


def test_a_seeded_row_draws_the_same_whatever_else_is_in_the_batch():
    logits = torch.randn(20, generator=torch.Generator().manual_seed(4))
    seeded = SamplingParams(max_new_tokens=1, seed=11)
    other = SamplingParams(max_new_tokens=1)

    def sequence(params, row, steps=30, shared_seed=0):
        sampler = RowSampler(params, torch.Generator().manual_seed(shared_seed), torch.device("cpu"))
        return [sampler.draw(logits.expand(len(params), -1))[0][row] for _ in range(steps)]

    alone = sequence([seeded], 0)
    assert sequence([other, seeded, other], 1, shared_seed=5) == alone
    assert len(set(alone)) > 3
