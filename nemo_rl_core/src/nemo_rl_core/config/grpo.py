# SPDX-License-Identifier: Apache-2.0
"""The sections `grpo`, `loss_fn` and `data`."""

from typing import Literal

from pydantic import Field

from nemo_rl_core.config.base import RawMapping, Section

__all__ = ["DataSection", "GrpoSection", "LossSection"]


class GrpoSection(Section):
    """The loop."""

    seed: int = Field(default=1, ge=0, lt=2**32, description="Seed of weights, prompts and sampling.")
    num_prompts_per_step: int = Field(default=32, ge=1, description="Prompts of one rollout.")
    num_generations_per_prompt: int = Field(default=16, ge=2, description="Completions of a prompt: the group size.")
    max_num_steps: int = Field(default=100, ge=1, description="Rollouts until the run ends.")
    normalize_rewards: bool = Field(default=True, description="Divide advantages by the group's standard deviation.")
    use_leave_one_out_baseline: bool = Field(
        default=True, description="A sample's baseline is the mean of the others of its group."
    )
    val_period: int = Field(default=10, ge=0, description="Steps between validations; 0 switches them off.")
    val_at_start: bool = Field(default=True, description="Validate before the first step too.")
    max_val_samples: int = Field(default=256, ge=0, description="Held-out prompts of one validation at most.")
    max_token_mult_prob_error: float | None = Field(
        default=1.05,
        gt=1,
        description="Alarm bound of the mismatch of train and generation logprobs; null is no alarm.",
    )
    on_mismatch: Literal["warn", "stop"] = Field(default="warn", description="What the alarm does.")


class LossSection(Section):
    """The clipped policy gradient loss."""

    reference_policy_kl_penalty: float = Field(
        default=0.01, ge=0, description="Weight of the KL term; 0 keeps no reference model."
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field(default="k3", description="Estimator of the KL term.")
    ratio_clip_min: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped below 1 minus this.")
    ratio_clip_max: float = Field(default=0.2, gt=0, description="The ratio is clipped above 1 plus this.")
    ratio_clip_c: float | None = Field(
        default=None, gt=1, description="Dual clip: bound of the loss at negative advantages; null is off."
    )
    token_level_loss: bool = Field(default=True, description="Mean over tokens; false: mean over sequences of means.")
    use_importance_sampling_correction: bool = Field(
        default=False, description="Weight tokens by train over generation probability."
    )
    truncated_importance_sampling_ratio: float | None = Field(
        default=None, gt=0, description="Cap of these weights; null is no cap."
    )


class DataSection(Section):
    """What is trained on."""

    task: str = Field(min_length=1, description="Name of a built-in task, or dotted path of one's own.")
    task_kwargs: RawMapping = Field(default_factory=dict, description="Keyword arguments of the task.")
    on_reward_error: Literal["stop", "drop"] = Field(
        default="stop", description="When a reward function raises: stop the run, or leave that sample out."
    )
