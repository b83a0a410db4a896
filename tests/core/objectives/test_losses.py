# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.objectives.kl import kl_estimate
from nemo_rl_core.objectives.losses import LossSettings, LossTotals, clipped_pg_loss, mean_metrics

SETTINGS = [
    LossSettings(),
    LossSettings(token_level_loss=False),
    LossSettings(reference_policy_kl_penalty=0.3, reference_policy_kl_type="k2"),
    LossSettings(ratio_clip_c=3.0, ratio_clip_min=0.1, ratio_clip_max=0.3),
    LossSettings(use_importance_sampling_correction=True, truncated_importance_sampling_ratio=1.5),
]


def make_batch(seed, rows=5, width=7):
    g = torch.Generator().manual_seed(seed)

    def noise(scale):
        return -torch.rand(rows, width, generator=g, dtype=torch.float64) * scale

    mask = (torch.rand(rows, width, generator=g) < 0.6).double()
    mask[:, 0] = 0
    mask[0, 1] = 1
    batch = {
        "token_mask": mask,
        "sample_mask": torch.ones(rows, dtype=torch.float64),
        "advantages": torch.randn(rows, generator=g, dtype=torch.float64),
        "prev_logprobs": noise(2.0),
        "generation_logprobs": noise(2.0),
        "reference_policy_logprobs": noise(2.0),
    }
    return noise(2.0), batch


def by_hand(logprobs, batch, s):
    """The loss written down token by token in plain Python."""
    rows, width = logprobs.shape
    sequences = []
    for b in range(rows):
        terms = []
        for t in range(width):
            if not batch["token_mask"][b, t] * batch["sample_mask"][b]:
                continue
            lp, prev, gen, ref = (
                float(x[b, t])
                for x in (
                    logprobs,
                    batch["prev_logprobs"],
                    batch["generation_logprobs"],
                    batch["reference_policy_logprobs"],
                )
            )
            advantage = float(batch["advantages"][b])
            ratio = math.exp(lp - prev)
            clipped = min(max(ratio, 1 - s.ratio_clip_min), 1 + s.ratio_clip_max)
            term = max(-advantage * ratio, -advantage * clipped)
            if s.ratio_clip_c is not None and advantage < 0:
                term = min(term, -advantage * s.ratio_clip_c)
            if s.use_importance_sampling_correction:
                weight = math.exp(prev - gen)
                cap = s.truncated_importance_sampling_ratio
                term *= weight if cap is None else min(weight, cap)
            d = lp - ref
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[s.reference_policy_kl_type]
            terms.append(term + s.reference_policy_kl_penalty * kl)
        sequences.append(terms)
    if s.token_level_loss:
        flat = [x for terms in sequences for x in terms]
        return sum(flat) / len(flat)
    means = [sum(terms) / len(terms) for terms in sequences if terms]
    return sum(means) / len(means)


@pytest.mark.parametrize("loss_settings", SETTINGS)
def test_loss_is_that_of_the_definition(loss_settings):
    logprobs, batch = make_batch(0)
    totals = LossTotals.of(batch["token_mask"], batch["sample_mask"])
    loss, _ = clipped_pg_loss(logprobs, batch, loss_settings, totals)
    assert float(loss) == pytest.approx(by_hand(logprobs, batch, loss_settings), rel=1e-9)


@pytest.mark.parametrize("loss_settings", SETTINGS)
@given(cuts=st.sets(st.integers(1, 4)), seed=st.integers(0, 5))
@settings(max_examples=20)
def test_shares_of_micro_batches_add_up_to_the_whole(loss_settings, cuts, seed):
    """Gradient and metrics are independent of how a global batch is cut."""
    logprobs, batch = make_batch(seed)
    totals = LossTotals.of(batch["token_mask"], batch["sample_mask"])
    whole = logprobs.clone().requires_grad_()
    loss, metrics = clipped_pg_loss(whole, batch, loss_settings, totals)
    loss.backward()
    edges = [0, *sorted(cuts), len(logprobs)]
    parts = logprobs.clone().requires_grad_()
    shares = []
    for start, stop in itertools.pairwise(edges):
        piece = {name: column[start:stop] for name, column in batch.items()}
        share, share_metrics = clipped_pg_loss(parts[start:stop], piece, loss_settings, totals)
        share.backward()
        shares.append(share_metrics)
    assert torch.allclose(whole.grad, parts.grad)
    for name, value in mean_metrics(shares).items():
        assert float(value) == pytest.approx(float(metrics[name]), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("column", ["logprobs", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"])
def test_masked_positions_add_neither_value_nor_gradient_nor_nan(poison, column):
    """U54."""
    loss_settings = LossSettings(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)
    logprobs, batch = make_batch(1)
    totals = LossTotals.of(batch["token_mask"], batch["sample_mask"])
    clean = logprobs.clone().requires_grad_()
    clean_loss, _ = clipped_pg_loss(clean, batch, loss_settings, totals)
    clean_loss.backward()
    masked = batch["token_mask"] == 0
    batch = {name: value.clone() for name, value in batch.items()}
    dirty = logprobs.clone()
    (dirty if column == "logprobs" else batch[column])[masked] = poison
    dirty.requires_grad_()
    loss, metrics = clipped_pg_loss(dirty, batch, loss_settings, totals)
    loss.backward()
    assert loss.item() == clean_loss.item()
    assert torch.equal(dirty.grad, clean.grad)
    assert all(math.isfinite(v) for v in metrics.values())


def test_a_sample_that_is_masked_out_changes_nothing_but_the_counts():
    logprobs, batch = make_batch(2)
    batch["sample_mask"][3] = 0
    totals = LossTotals.of(batch["token_mask"], batch["sample_mask"])
    loss, _ = clipped_pg_loss(logprobs, batch, LossSettings(), totals)
    rest = [0, 1, 2, 4]
    smaller = {name: value[rest] for name, value in batch.items()}
    expected, _ = clipped_pg_loss(logprobs[rest], smaller, LossSettings(), totals)
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)


def test_at_the_old_policy_the_gradient_is_minus_advantage_over_tokens():
    """The policy gradient theorem at ratio 1; a sign error in ratio or advantage shows here."""
    _, batch = make_batch(3)
    logprobs = batch["prev_logprobs"].clone().requires_grad_()
    totals = LossTotals.of(batch["token_mask"], batch["sample_mask"])
    loss, _ = clipped_pg_loss(logprobs, batch, LossSettings(), totals)
    loss.backward()
    expected = -batch["advantages"][:, None] * batch["token_mask"] / totals.num_tokens
    assert torch.allclose(logprobs.grad, expected)


def test_token_mult_prob_error_is_its_definition():
    logprobs, batch = make_batch(4)
    totals = LossTotals.of(batch["token_mask"], batch["sample_mask"])
    _, metrics = clipped_pg_loss(logprobs, batch, LossSettings(), totals)
    kept = batch["token_mask"] > 0
    gap = (batch["prev_logprobs"] - batch["generation_logprobs"])[kept]
    assert float(metrics["token_mult_prob_error"]) == pytest.approx(float(gap.abs().exp().mean()), rel=1e-6)


def test_kl_estimators_agree_with_the_exact_divergence_in_the_mean():
    """Over the whole support, weighted by the policy, k1 and k3 give the exact KL (U55)."""
    g = torch.Generator().manual_seed(0)
    p = torch.randn(50, generator=g, dtype=torch.float64).log_softmax(0)
    q = torch.randn(50, generator=g, dtype=torch.float64).log_softmax(0)
    exact = float((p.exp() * (p - q)).sum())
    for kind in ("k1", "k3"):
        assert float((p.exp() * kl_estimate(p, q, kind)).sum()) == pytest.approx(exact, rel=1e-9)


def test_gradient_of_k2_is_that_of_the_kl_while_that_of_k1_vanishes_in_the_mean():
    """U55: E[grad k2] is the gradient of the KL; E[grad k1] is zero."""
    g = torch.Generator().manual_seed(1)
    theta = torch.randn(20, generator=g, dtype=torch.float64).requires_grad_()
    q = torch.randn(20, generator=g, dtype=torch.float64).log_softmax(0)
    p = theta.log_softmax(0)
    exact = torch.autograd.grad((p.exp() * (p - q)).sum(), theta, retain_graph=True)[0]
    weights = p.exp().detach()
    of_k2 = torch.autograd.grad((weights * kl_estimate(p, q, "k2")).sum(), theta, retain_graph=True)[0]
    of_k1 = torch.autograd.grad((weights * kl_estimate(p, q, "k1")).sum(), theta)[0]
    assert torch.allclose(of_k2, exact)
    assert torch.allclose(of_k1, torch.zeros_like(of_k1), atol=1e-12)
