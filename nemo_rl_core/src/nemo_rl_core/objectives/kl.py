# SPDX-License-Identifier: Apache-2.0
"""Estimators of KL(policy || reference) from the logprobs of sampled tokens (Schulman, "Approximating KL")."""

from typing import Literal

import torch

from nemo_rl_core.errors import ConfigError

__all__ = ["KLKind", "kl_estimate"]

KLKind = Literal["k1", "k2", "k3"]

#: |log ratio| is capped before it is exponentiated; e^20 is far past anything a healthy run shows.
LOG_RATIO_CAP = 20.0


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, kind: KLKind = "k3") -> torch.Tensor:
    """Estimate the KL divergence at each token.

    With d = logprobs - reference_logprobs: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, its gradient is
    that of the KL), k3 = exp(-d) - 1 + d (unbiased, never negative).

    Args:
        logprobs: Under the policy, any shape; gradients flow through it.
        reference_logprobs: Under the reference, same shape; taken as constant.
        kind: The estimator.

    Returns:
        Same shape, in nats.

    Raises:
        ConfigError: If ``kind`` is none of the three.
    """
    difference = (logprobs - reference_logprobs.detach()).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    match kind:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference**2
        case "k3":
            return torch.exp(-difference) - 1 + difference
    raise ConfigError(f"loss_fn.reference_policy_kl_type must be k1, k2 or k3, got {kind!r}")
