# SPDX-License-Identifier: Apache-2.0
"""The clipped policy-gradient loss as a pure function that returns the loss and its metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl_core.objectives.kl import LOG_RATIO_CAP, KLKind, kl_estimate

__all__ = ["LossSettings", "LossTotals", "clipped_pg_loss", "mean_metrics"]


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What the loss does.

    Attributes:
        reference_policy_kl_penalty: Weight of the KL to the reference policy; 0 switches it off.
        reference_policy_kl_type: Estimator of that KL.
        ratio_clip_min: The probability ratio is clipped below 1 - this.
        ratio_clip_max: The probability ratio is clipped above 1 + this.
        ratio_clip_c: For negative advantages the loss is capped at -c x advantage (dual clip); None switches it off.
        token_level_loss: True: mean over all tokens; False: mean over sequences of the mean over their tokens.
        use_importance_sampling_correction: Weigh each token by exp(prev - generation logprob), which corrects for
            differences between the train and the generation side.
        truncated_importance_sampling_ratio: Cap of that weight; None for no cap.
    """

    reference_policy_kl_penalty: float = 0.0
    reference_policy_kl_type: KLKind = "k3"
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    token_level_loss: bool = True
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class LossTotals:
    """What the sums of a global batch are divided by, over all micro-batches and ranks.

    Attributes:
        num_tokens: Number of counted tokens.
        num_sequences: Number of sequences with at least one counted token.
    """

    num_tokens: float
    num_sequences: float

    @classmethod
    def of(cls, token_mask_BS: torch.Tensor, sample_mask_B: torch.Tensor) -> "LossTotals":
        """Count a batch."""
        mask_BS = token_mask_BS * sample_mask_B[:, None]
        return cls(num_tokens=float(mask_BS.sum()), num_sequences=float((mask_BS.sum(1) > 0).sum()))


def clipped_pg_loss(
    logprobs_BS: torch.Tensor, batch: Mapping[str, torch.Tensor], settings: LossSettings, totals: LossTotals
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return this micro-batch's share of the loss and of each metric.

    Shares add up: the sum over the micro-batches and ranks of a global batch is the loss of that batch, however it
    was cut. Masked positions are set to 0 *before* any ``exp``, so they add neither value, gradient nor NaN.

    Args:
        logprobs_BS: Under the current policy [B, S]; column 0 is not used.
        batch: ``token_mask`` [B, S], ``sample_mask`` [B], ``advantages`` [B], ``prev_logprobs`` [B, S],
            ``generation_logprobs`` [B, S], and with a KL penalty ``reference_policy_logprobs`` [B, S].
        settings: What the loss does.
        totals: Counts of the global batch.

    Returns:
        The loss, a scalar with gradient, and shares of metrics without gradient.
    """
    mask_BS = batch["token_mask"] * batch["sample_mask"][:, None]
    keep_BS = mask_BS > 0
    prev_BS, generation_BS = batch["prev_logprobs"], batch["generation_logprobs"]
    weight_BS = mask_BS * _weights(mask_BS, settings, totals)

    def total(values_BS: torch.Tensor) -> torch.Tensor:
        return torch.where(keep_BS, values_BS, 0.0).mul(weight_BS).sum()

    log_ratio_BS = _log_ratio(logprobs_BS, prev_BS, keep_BS)
    ratio_BS = log_ratio_BS.exp()
    clipped_BS = ratio_BS.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max)
    advantages_BS = batch["advantages"][:, None].expand_as(ratio_BS)
    policy_loss_BS = torch.maximum(-advantages_BS * ratio_BS, -advantages_BS * clipped_BS)
    if settings.ratio_clip_c is not None:
        capped_BS = torch.minimum(policy_loss_BS, -advantages_BS * settings.ratio_clip_c)
        policy_loss_BS = torch.where(advantages_BS < 0, capped_BS, policy_loss_BS)

    correction_BS = _log_ratio(prev_BS, generation_BS, keep_BS).exp().detach()
    if settings.use_importance_sampling_correction:
        cap = settings.truncated_importance_sampling_ratio
        policy_loss_BS = policy_loss_BS * (correction_BS if cap is None else correction_BS.clamp(max=cap))
    loss = total(policy_loss_BS)

    metrics: dict[str, torch.Tensor] = {}
    if settings.reference_policy_kl_penalty:
        reference_BS = torch.where(keep_BS, batch["reference_policy_logprobs"], 0.0)
        kl = total(kl_estimate(torch.where(keep_BS, logprobs_BS, 0.0), reference_BS, settings.reference_policy_kl_type))
        loss = loss + settings.reference_policy_kl_penalty * kl
        metrics["kl_penalty"] = kl

    token_BS = mask_BS / max(totals.num_tokens, 1.0)
    mismatch_BS = _log_ratio(prev_BS, generation_BS, keep_BS)
    metrics |= {
        "loss": loss,
        "probs_ratio": (ratio_BS * token_BS).sum(),
        "clip_fraction": ((ratio_BS != clipped_BS) * token_BS).sum(),
        "token_mult_prob_error": (mismatch_BS.abs().exp() * token_BS).sum(),
        "gen_kl_error": (kl_estimate(-mismatch_BS, torch.zeros_like(mismatch_BS)) * token_BS).sum(),
        "sampling_importance_ratio": (correction_BS * token_BS).sum(),
        "approx_entropy": (-torch.where(keep_BS, logprobs_BS, 0.0) * token_BS).sum(),
    }
    return loss, {name: value.detach() for name, value in metrics.items()}


def mean_metrics(shares: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Add up the shares of the micro-batches of one global batch."""
    names = {name for share in shares for name in share}
    return {name: torch.stack([share[name].float() for share in shares if name in share]).sum() for name in names}


def _log_ratio(a_BS: torch.Tensor, b_BS: torch.Tensor, keep_BS: torch.Tensor) -> torch.Tensor:
    """Return a - b where kept and 0 elsewhere, capped so that its ``exp`` stays finite."""
    difference_BS = torch.where(keep_BS, a_BS, 0.0) - torch.where(keep_BS, b_BS, 0.0)
    return difference_BS.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)


def _weights(mask_BS: torch.Tensor, settings: LossSettings, totals: LossTotals) -> torch.Tensor:
    """Return what each token's term is multiplied by, so that a plain sum is the wanted mean."""
    if settings.token_level_loss:
        return torch.full_like(mask_BS, 1.0 / max(totals.num_tokens, 1.0))
    per_sequence_B1 = mask_BS.sum(1, keepdim=True).clamp(min=1.0)
    return (1.0 / (per_sequence_B1 * max(totals.num_sequences, 1.0))).expand_as(mask_BS)
