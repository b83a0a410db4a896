# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization (arXiv:2402.03300): the loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl_core.algorithms.kv_scales import KvScales
from nemo_rl_core.algorithms.mismatch import MismatchAlarm, logprob_gap
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.objectives.advantages import group_advantages
from nemo_rl_core.objectives.losses import LossSettings
from nemo_rl_core.observability.timers import Timer
from nemo_rl_core.policy.generation import Generation
from nemo_rl_core.policy.policy import Policy
from nemo_rl_core.policy.refit import RefitOutcome, Refitter
from nemo_rl_core.protocols.generation import SamplingParams
from nemo_rl_core.rollout.collect import Rollout, accuracy, collect, training_batch
from nemo_rl_core.rollout.prompts import EncodedPrompt, PromptSampler
from nemo_rl_core.rollout.tasks import Task

__all__ = ["GRPO", "StepLog"]

#: Receives a step's number and its metrics.
StepLog = Callable[[int, Mapping[str, Any]], None]


@dataclass(kw_only=True)
class GRPO:
    """The parts of a run. ``train`` is the loop; the other methods are its sentences.

    Attributes:
        config: The whole config.
        policy: Handle on the train workers.
        generation: Handle on the generation workers.
        refitter: Moves weights from the one to the other.
        task: What rewards completions.
        tokenizer: Decodes them.
        prompts: Says which prompts come next.
        heldout: Prompts of validation.
        sampling: How one rollout completion is sampled, but for its seed.
        loss: What is minimised.
        log: Receives every step's metrics.
        kv_scales: Scales of the engine's KV cache; None where it is not FP8.
    """

    config: RunConfig
    policy: Policy
    generation: Generation
    refitter: Refitter
    task: Task
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSampler
    heldout: list[EncodedPrompt]
    sampling: SamplingParams
    loss: LossSettings
    log: StepLog
    kv_scales: KvScales | None = None
    alarm: MismatchAlarm = field(init=False)

    def __post_init__(self) -> None:
        """Set the alarm's bound."""
        grpo = self.config.grpo
        self.alarm = MismatchAlarm(bound=grpo.max_token_mult_prob_error, action=grpo.on_mismatch)

    def train(self) -> None:
        """Train for ``grpo.max_num_steps`` steps; step 0 records where the untrained policy stands."""
        timer = Timer()
        refit = self.refit(timer)
        self.log(0, self.starting_point(timer) | _refit_metrics(refit) | timer.metrics())
        for step in range(1, self.config.grpo.max_num_steps + 1):
            timer = Timer()
            rollout = self.roll_out(timer)
            batch = self.prepare(rollout, timer)
            trained = self.optimize(batch, timer)
            calibrated = self.calibrate(batch, step, timer)
            refit = self.refit(timer)
            validation = self.validate(timer) if self._validates_at(step) else {}
            trained["logprob_gap_p999"] = logprob_gap(batch)
            metrics = _rollout_metrics(rollout) | _train_metrics(trained) | _refit_metrics(refit) | validation
            self.log(step, metrics | calibrated | _timing(rollout, timer))
            self.alarm.check(step, trained["token_mult_prob_error"], rollout.weight_versions)

    def roll_out(self, timer: Timer) -> Rollout:
        """Sample a group of completions for each of the next prompts and reward them."""
        grpo = self.config.grpo
        with timer.time("generation"):
            return collect(
                self.generation,
                self.prompts.take(grpo.num_prompts_per_step),
                [self.sampling] * grpo.num_generations_per_prompt,
                self.task,
                self.tokenizer,
                on_reward_error=self.config.data.on_reward_error,
            )

    def prepare(self, rollout: Rollout, timer: Timer) -> BatchedDataDict:
        """Add advantages and the logprobs of policy and reference to the sampled sequences."""
        grpo = self.config.grpo
        batch = training_batch(rollout, pad_id=self.tokenizer.pad_token_id)
        batch["advantages"] = group_advantages(
            batch.tensor("rewards"),
            batch.tensor("group_ids"),
            valid_B=batch.tensor("sample_mask") > 0,
            normalize=grpo.normalize_rewards,
            leave_one_out=grpo.use_leave_one_out_baseline,
        )
        with timer.time("policy_and_reference_logprobs"):
            batch["prev_logprobs"] = self.policy.get_logprobs(batch)
            if self.loss.reference_policy_kl_penalty:
                batch["reference_policy_logprobs"] = self.policy.get_reference_policy_logprobs(batch)
        return batch

    def optimize(self, batch: BatchedDataDict, timer: Timer) -> dict[str, float]:
        """Take the optimizer steps of one rollout."""
        with timer.time("policy_training"):
            return self.policy.train(batch, self.loss, global_batch_size=self.config.policy.train_global_batch_size)

    def calibrate(self, batch: BatchedDataDict, step: int, timer: Timer) -> dict[str, float]:
        """Calibrate the scales of an FP8 KV cache under the new weights, on what they were trained on."""
        if self.kv_scales is None:
            return {}
        if not self.kv_scales.is_due(step):
            return _scale_metrics(self.kv_scales.status())
        with timer.time("kv_scale_calibration"):
            return _scale_metrics(self.kv_scales.calibrate(self.policy, batch))

    def refit(self, timer: Timer) -> RefitOutcome:
        """Move the policy's weights into the generation workers, and the scales of an FP8 KV cache with them."""
        with timer.time("refit"):
            if self.kv_scales is None:
                return self.refitter.refit()
            outcome = self.refitter.refit(self.kv_scales.current)
            self.kv_scales.arrived()
            return outcome

    def validate(self, timer: Timer) -> dict[str, float]:
        """Decode the held-out prompts greedily and count what is right."""
        greedy = SamplingParams(
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=0.0,
            stop_token_ids=self.sampling.stop_token_ids,
            stop_strings=self.sampling.stop_strings,
        )
        groups = list(enumerate(self.heldout[: self.config.grpo.max_val_samples]))
        if not groups:
            return {}
        with timer.time("validation"):
            rollout = collect(
                self.generation,
                groups,
                [greedy],
                self.task,
                self.tokenizer,
                on_reward_error=self.config.data.on_reward_error,
            )
        return {"validation/accuracy": accuracy(rollout, self.task), "validation/reward": rollout.mean_reward}

    def starting_point(self, timer: Timer) -> dict[str, Any]:
        """Sample as a training step would, and validate, without training."""
        validation = self.validate(timer) if self.config.grpo.val_at_start else {}
        scales = _scale_metrics(self.kv_scales.status()) if self.kv_scales else {}
        return _rollout_metrics(self.roll_out(timer)) | validation | scales

    def _validates_at(self, step: int) -> bool:
        grpo = self.config.grpo
        if grpo.val_period == 0:
            return False
        return step % grpo.val_period == 0 or step == grpo.max_num_steps


def _rollout_metrics(rollout: Rollout) -> dict[str, Any]:
    rewards_B = torch.tensor(rollout.rewards)
    groups = torch.tensor(rollout.group_ids).unique(return_inverse=True)[1]
    per_group = [rewards_B[groups == g] for g in range(int(groups.max()) + 1)]
    # By equality, not by a standard deviation of 0: seven times 0.1 has one of 1e-8 in float32.
    equal = [bool((rewards_G == rewards_G[0]).all()) for rewards_G in per_group]
    return {
        "reward/mean": rollout.mean_reward,
        "reward/std": float(rewards_B.std()),
        "reward/zero_std_fraction": sum(equal) / len(equal),
        "reward/num_failures": len(rollout.failures),
        "generation/mean_length": rollout.num_sampled_tokens / len(rollout.completions),
        "generation/truncated_fraction": rollout.truncated_fraction,
        "generation/weight_version": rollout.weight_versions[-1],
    }


def _train_metrics(trained: Mapping[str, float]) -> dict[str, float]:
    return {f"train/{name}": value for name, value in trained.items()}


def _scale_metrics(scales: Mapping[str, float]) -> dict[str, float]:
    return {f"kv_scales/{name}": value for name, value in scales.items()}


def _refit_metrics(refit: RefitOutcome) -> dict[str, Any]:
    return {
        "refit/seconds": refit.seconds,
        "refit/bytes": refit.num_bytes,
        "refit/version": refit.version,
        "refit/digest": refit.digest,
    }


def _timing(rollout: Rollout, timer: Timer) -> dict[str, float]:
    """Return seconds of each part, of the step, and sampled tokens per second of the step without validation."""
    seconds = timer.metrics()
    busy_s = sum(seconds.values()) - seconds.get("timing/validation", 0.0)
    rate = rollout.num_sampled_tokens / busy_s
    return seconds | {"timing/total_step_time": sum(seconds.values()), "timing/tokens_per_second": rate}
