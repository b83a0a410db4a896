# SPDX-License-Identifier: Apache-2.0
"""Sample completions, reward them, and lay them out for training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import DataError, RewardError
from nemo_rl_core.guard import ForbiddenImportError
from nemo_rl_core.protocols.generation import Completion, GenerationRequest, SamplingParams
from nemo_rl_core.rollout.prompts import EncodedPrompt
from nemo_rl_core.rollout.tasks import Task

__all__ = ["Generator", "Rollout", "accuracy", "collect", "training_batch"]


class Generator(Protocol):
    """What a rollout needs of a generation backend."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Continue each prompt once, in the order of the requests."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Completions of one step, B of them, with their rewards.

    Attributes:
        prompts: The prompt of each completion.
        group_ids: The sampler's group of each completion.
        completions: What was sampled.
        texts: Decoded completions, without special tokens.
        rewards: Reward of each completion; 0 where it failed.
        failures: Index and error of each reward that failed and was dropped.
    """

    prompts: tuple[EncodedPrompt, ...]
    group_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    rewards: tuple[float, ...]
    failures: tuple[tuple[int, str], ...] = ()

    @property
    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens over all completions."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def mean_reward(self) -> float:
        """Mean reward of the completions whose reward did not fail; NaN if all did."""
        failed = {index for index, _ in self.failures}
        kept = [reward for index, reward in enumerate(self.rewards) if index not in failed]
        return sum(kept) / len(kept) if kept else math.nan

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """The versions of the weights that sampled, each once, in ascending order."""
        return tuple(sorted({completion.weight_version for completion in self.completions}))

    @property
    def truncated_fraction(self) -> float:
        """Share of completions that were cut off at a limit."""
        return sum(c.finish_reason == "length" for c in self.completions) / len(self.completions)


def collect(
    generator: Generator,
    groups: Sequence[tuple[int, EncodedPrompt]],
    sampling: Sequence[SamplingParams],
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    on_reward_error: Literal["stop", "drop"] = "stop",
) -> Rollout:
    """Sample ``len(sampling)`` completions of each prompt and reward them.

    Args:
        generator: What samples.
        groups: Group id and prompt.
        sampling: Parameters of each completion of a group, G of them.
        task: What rewards.
        tokenizer: Decodes completions.
        on_reward_error: ``stop`` raises; ``drop`` leaves the sample out of baseline and loss, and counts it.

    Raises:
        RewardError: If a reward raised or is not finite, under ``stop``; it names task, sample and cause. Under ``drop``
            if every reward of the rollout failed.
        DataError: If the generator returns another number of completions than asked for.
    """
    pairs = [(group, prompt, params) for group, prompt in groups for params in sampling]
    requests = [GenerationRequest(prompt_ids=prompt.token_ids, sampling=params) for _, prompt, params in pairs]
    completions = generator.generate(requests)
    if len(completions) != len(requests):
        raise DataError(f"the backend returned {len(completions)} completions for {len(requests)} requests")
    texts = [str(tokenizer.decode(list(c.token_ids), skip_special_tokens=True)) for c in completions]
    rewards, failures = [], []
    for index, ((_, prompt, _), text) in enumerate(zip(pairs, texts, strict=True)):
        try:
            rewards.append(_reward(task, prompt, text, index))
        except RewardError as error:
            if on_reward_error == "stop":
                raise
            rewards.append(0.0)
            failures.append((index, str(error)))
    if len(failures) == len(pairs):
        raise RewardError(
            f"every reward of a rollout failed, so there is nothing to learn from; the first: {failures[0][1]}"
        )
    return Rollout(
        prompts=tuple(prompt for _, prompt, _ in pairs),
        group_ids=tuple(group for group, _, _ in pairs),
        completions=tuple(completions),
        texts=tuple(texts),
        rewards=tuple(rewards),
        failures=tuple(failures),
    )


def _reward(task: Task, prompt: EncodedPrompt, text: str, index: int) -> float:
    """Return one reward, or a ``RewardError`` that says where it went wrong."""
    where = f"the reward of task {task.name!r} failed for sample {index} (prompt {str(prompt.prompt)[:80]!r}, completion {text[:80]!r})"
    way_out = "fix the reward, or set data.on_reward_error=drop to train without such samples"
    try:
        reward = float(task.reward(prompt.prompt, text))
    except ForbiddenImportError:
        raise  # no failure of a reward but of the split, which on_reward_error must not hide
    except Exception as error:  # a reward is the user's code; whatever it raises is reported as such
        raise RewardError(f"{where}: {type(error).__name__}: {error}; {way_out}") from error
    if not math.isfinite(reward):
        raise RewardError(f"{where}: it is {reward}, and a reward must be finite; {way_out}")
    return reward


def accuracy(rollout: Rollout, task: Task) -> float:
    """Return the share of completions that the task counts as right.

    Raises:
        RewardError: If the task raises.
    """
    pairs = zip(rollout.prompts, rollout.texts, strict=True)
    return sum(_is_correct(task, prompt, text, i) for i, (prompt, text) in enumerate(pairs)) / len(rollout.texts)


def _is_correct(task: Task, prompt: EncodedPrompt, text: str, index: int) -> bool:
    """Ask the task, or raise a ``RewardError`` that says where it went wrong."""
    try:
        return task.is_correct(prompt.prompt, text)
    except Exception as error:  # the task is the user's code; whatever it raises is reported as such
        raise RewardError(
            f"is_correct() of task {task.name!r} failed for held-out sample {index} (prompt {str(prompt.prompt)[:80]!r}, "
            f"completion {text[:80]!r}): {type(error).__name__}: {error}"
        ) from error


def training_batch(rollout: Rollout, *, pad_id: int) -> BatchedDataDict:
    """Lay a rollout out as right-padded tensors; see ``nemo_rl_core.data`` for the columns.

    Advantages and the policy's own logprobs are added later.
    """
    lengths = [len(p.token_ids) + len(c.token_ids) for p, c in zip(rollout.prompts, rollout.completions, strict=True)]
    shape = (len(lengths), max(lengths))
    input_ids = torch.full(shape, pad_id, dtype=torch.long)
    token_mask, logprobs = torch.zeros(shape), torch.zeros(shape)
    for row, (prompt, completion) in enumerate(zip(rollout.prompts, rollout.completions, strict=True)):
        start, stop = len(prompt.token_ids), lengths[row]
        input_ids[row, :stop] = torch.tensor(prompt.token_ids + completion.token_ids)
        token_mask[row, start:stop] = 1.0
        logprobs[row, start:stop] = torch.tensor(completion.logprobs)
    sample_mask = torch.ones(len(lengths))
    sample_mask[[index for index, _ in rollout.failures]] = 0.0
    return BatchedDataDict(
        input_ids=input_ids,
        input_lengths=torch.tensor(lengths),
        token_mask=token_mask,
        sample_mask=sample_mask,
        generation_logprobs=logprobs,
        rewards=torch.tensor(rollout.rewards),
        group_ids=torch.tensor(rollout.group_ids),
    )
