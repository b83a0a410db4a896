# SPDX-License-Identifier: Apache-2.0
"""Group-relative advantages."""

import torch

from nemo_rl_core.errors import DataError

__all__ = ["group_advantages"]

#: Added to the standard deviation; keeps a group of nearly equal rewards from blowing up.
STD_FLOOR = 1e-6


def group_advantages(
    rewards_B: torch.Tensor,
    group_ids_B: torch.Tensor,
    *,
    valid_B: torch.Tensor | None = None,
    normalize: bool = True,
    leave_one_out: bool = False,
) -> torch.Tensor:
    """Return how much better each completion did than its group.

    Groups are those of the sampler: two groups with the same prompt text stay two groups.

    Args:
        rewards_B: float [B], reward of each completion.
        group_ids_B: int [B], the sampler's group of each completion.
        valid_B: bool [B]; a completion that is not valid (its reward failed, say) counts in no baseline and gets 0.
        normalize: Divide by the group's sample standard deviation (GRPO, arXiv:2402.03300, with ddof 1).
        leave_one_out: The baseline of a completion is the mean of the *others* (RLOO, arXiv:2402.14740).

    Returns:
        float32 [B]. A group with equal rewards, or with fewer than two valid completions, gets 0.

    Raises:
        DataError: If shapes differ or a valid reward is not finite.

    Example:
        >>> group_advantages(torch.tensor([1., 0., 5., 5.]), torch.tensor([7, 7, 3, 3]), normalize=False)
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    valid_B = torch.ones_like(rewards_B, dtype=torch.bool) if valid_B is None else valid_B.bool()
    if not rewards_B.shape == group_ids_B.shape == valid_B.shape:
        shapes = [tuple(t.shape) for t in (rewards_B, group_ids_B, valid_B)]
        raise DataError(f"rewards, group ids and validity need one shape [B], got {shapes}")
    rewards_B = rewards_B.double()
    if not torch.isfinite(rewards_B[valid_B]).all():
        rows = (valid_B & ~torch.isfinite(rewards_B)).nonzero().flatten().tolist()
        raise DataError(f"rewards must be finite, got {rewards_B[rows].tolist()} at samples {rows}")
    rewards_B = torch.where(valid_B, rewards_B, 0.0)
    _, group_B = group_ids_B.unique(return_inverse=True)
    num_groups = int(group_B.max()) + 1 if group_B.numel() else 0

    def group_sum(values_B: torch.Tensor) -> torch.Tensor:
        return rewards_B.new_zeros(num_groups).index_add_(0, group_B, values_B * valid_B)[group_B]

    count_B = group_sum(torch.ones_like(rewards_B))
    mean_B = group_sum(rewards_B) / count_B.clamp(min=1)
    deviation_B = rewards_B - mean_B
    # r - mean of the others = (r - mean of all) * n / (n - 1)
    scale_B = count_B / (count_B - 1).clamp(min=1) if leave_one_out else torch.ones_like(count_B)
    advantages_B = deviation_B * scale_B
    if normalize:
        std_B = (group_sum(deviation_B**2) / (count_B - 1).clamp(min=1)).sqrt()
        advantages_B = advantages_B / (std_B + STD_FLOOR)
    return torch.where(valid_B & (count_B > 1), advantages_B, 0.0).float()
