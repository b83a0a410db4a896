# SPDX-License-Identifier: Apache-2.0
"""The second net under a refit: an alarm when train and generation side disagree about the sampled tokens."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import StateError

__all__ = ["MismatchAlarm", "logprob_gap"]

#: Share of the sampled tokens whose logprobs lie at least as close as the gap that is reported.
_GAP_SHARE = 0.999


def logprob_gap(batch: BatchedDataDict) -> float:
    """Return the 99.9th percentile of |logprob_train - logprob_generation| over the sampled tokens that count, in nats.

    A mean hides a few tokens that are far off; this shows them.

    Args:
        batch: ``token_mask`` [B, S], ``sample_mask`` [B], ``prev_logprobs`` [B, S] and ``generation_logprobs`` [B, S].

    Returns:
        The smallest gap that 99.9 % of the tokens do not exceed; 0 where no token counts.
    """
    keep_BS = batch.tensor("token_mask") * batch.tensor("sample_mask")[:, None] > 0
    gaps_N = (batch.tensor("prev_logprobs") - batch.tensor("generation_logprobs"))[keep_BS].abs()
    if not len(gaps_N):
        return 0.0
    return float(gaps_N.kthvalue(math.ceil(_GAP_SHARE * len(gaps_N))).values)


@dataclass(frozen=True, kw_only=True)
class MismatchAlarm:
    """Watches ``token_mult_prob_error``, the mean over sampled tokens of exp(|logprob_train - logprob_generation|).

    Version and digest are the first net; at a learning rate of 1e-6 a stale refit would not show here.

    Attributes:
        bound: Values above it raise the alarm; None switches it off.
        action: ``warn`` or ``stop``.
    """

    bound: float | None
    action: Literal["warn", "stop"] = "warn"

    def check(self, step: int, value: float, weight_versions: Sequence[int]) -> bool:
        """Return whether the alarm was raised.

        Raises:
            StateError: If it was, under ``stop``.
        """
        if self.bound is None or (math.isfinite(value) and value <= self.bound):
            return False
        text = (
            f"step {step}: train/token_mult_prob_error is {value:.4g}, above the bound of {self.bound}; the samples came "
            f"from weights of version {list(weight_versions)}. Train and generation side do not hold the same weights, or "
            "compute them differently (precision, temperature)"
        )
        if self.action == "stop":
            raise StateError(f"{text}. grpo.on_mismatch=warn goes on all the same")
        warnings.warn(text, stacklevel=2)
        return True
