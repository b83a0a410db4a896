# SPDX-License-Identifier: Apache-2.0
"""From a checked config to the parts of a run: what each worker is told, and the loop with its handles."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl_core.algorithms.grpo import GRPO, StepLog
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.data.tokenizers import build_tokenizer
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.objectives.losses import LossSettings
from nemo_rl_core.policy.generation import Generation
from nemo_rl_core.policy.policy import Policy
from nemo_rl_core.policy.refit import Refitter
from nemo_rl_core.protocols.generation import SamplingParams
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_core.protocols.workers import WorkerGroup
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.rollout.prompts import EncodedPrompt, PromptSampler, encode_prompts
from nemo_rl_core.rollout.tasks import Task, load_task, prompts_of
from nemo_rl_core.workers.models import check_model, load_config
from nemo_rl_core.workers.optimizers import check_optimizer
from nemo_rl_core.workers.settings import BatchingSettings, OptimizerSettings, PolicySettings

__all__ = ["Ingredients", "assemble", "generation_settings", "policy_settings", "prepare"]


def model_settings(config: RunConfig) -> ModelSettings:
    """Return which model both sides build."""
    policy = config.policy
    return ModelSettings(
        folder=policy.model_name,
        hf_config=policy.hf_config,
        overrides=policy.hf_config_overrides,
        precision=policy.precision,
        max_total_sequence_length=policy.max_total_sequence_length,
        seed=config.grpo.seed,
    )


def tokenizer_settings(config: RunConfig) -> TokenizerSettings:
    """Return which tokenizer both sides build."""
    tokenizer = config.policy.tokenizer
    return TokenizerSettings(
        folder=config.policy.tokenizer_name,
        characters=tokenizer.characters,
        chat_template=tokenizer.chat_template,
    )


def policy_settings(config: RunConfig) -> PolicySettings:
    """Return what every train worker is told."""
    policy = config.policy
    scheduler, dynamic = policy.scheduler, policy.dynamic_batching
    return PolicySettings(
        model=model_settings(config),
        optimizer=OptimizerSettings(
            name=policy.optimizer.name,
            kwargs=policy.optimizer.kwargs,
            scheduler_name=scheduler.name if scheduler else None,
            scheduler_kwargs=scheduler.kwargs if scheduler else {},
            max_grad_norm=policy.max_grad_norm,
        ),
        batching=BatchingSettings(
            train_micro_batch_size=policy.train_micro_batch_size,
            logprob_batch_size=policy.logprob_batch_size,
            train_mb_tokens=dynamic.train_mb_tokens if dynamic.enabled else None,
            logprob_mb_tokens=dynamic.logprob_mb_tokens if dynamic.enabled else None,
            logprob_chunk_size=policy.logprob_chunk_size,
        ),
        temperature=config.generation.temperature,
        activation_checkpointing=policy.dtensor_cfg.activation_checkpointing,
        reference_model=config.needs_reference_model,
        collective_timeout_s=config.workers.call_timeout_s,
    )


def generation_settings(config: RunConfig, options: Mapping[str, Any]) -> GenerationSettings:
    """Return what every generation worker is told.

    Args:
        config: The whole config.
        options: The backend's own section, checked by its schema.
    """
    return GenerationSettings(
        model=model_settings(config),
        tokenizer=tokenizer_settings(config),
        seed=config.grpo.seed,
        refit=config.refit.model_dump(),
        options=dict(options),
    )


def loss_settings(config: RunConfig) -> LossSettings:
    """Return what is minimised."""
    return LossSettings(**config.loss_fn.model_dump())


def sampling_params(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """Return how a rollout completion is sampled."""
    generation = config.generation
    stop_ids = generation.stop_token_ids
    if stop_ids is None:
        stop_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        stop_token_ids=tuple(stop_ids),
        stop_strings=tuple(generation.stop_strings or ()),
    )


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What can be built, and found wrong, before any worker starts.

    Attributes:
        task: The task.
        tokenizer: The tokenizer.
        sampling: How a rollout completion is sampled.
        train: Prompts to train on, as tokens.
        heldout: Prompts of validation, as tokens.
    """

    task: Task
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    train: list[EncodedPrompt]
    heldout: list[EncodedPrompt]


def prepare(config: RunConfig) -> Ingredients:
    """Build what needs no worker.

    Raises:
        ConfigError: If the task cannot be built or has no prompts.
        ModelError: If the model's config or the tokenizer cannot be read.
        DataError: If a prompt does not fit, or the sampling parameters are out of range.
    """
    load_config(model_settings(config))
    check_optimizer(policy_settings(config).optimizer)
    task = load_task(config.data.task, config.data.task_kwargs)
    tokenizer = build_tokenizer(tokenizer_settings(config))
    check_model(model_settings(config), len(tokenizer))
    sampling = sampling_params(config, tokenizer)
    limit = config.policy.max_total_sequence_length
    train = encode_prompts(prompts_of(task, "train_prompts"), tokenizer, limit)
    if not train:
        raise ConfigError(f"data.task {config.data.task!r} has no prompts to train on")
    heldout = encode_prompts(prompts_of(task, "heldout_prompts"), tokenizer, limit)
    return Ingredients(task=task, tokenizer=tokenizer, sampling=sampling, train=train, heldout=heldout)


def assemble(
    config: RunConfig, ingredients: Ingredients, train_group: WorkerGroup, generation_group: WorkerGroup, log: StepLog
) -> GRPO:
    """Put the loop together over running workers, wherever they run."""
    policy, generation = Policy(train_group), Generation(generation_group)
    return GRPO(
        config=config,
        policy=policy,
        generation=generation,
        refitter=Refitter(policy, generation, RefitSettings(**config.refit.model_dump())),
        task=ingredients.task,
        tokenizer=ingredients.tokenizer,
        prompts=PromptSampler(ingredients.train, seed=config.grpo.seed),
        heldout=ingredients.heldout,
        sampling=ingredients.sampling,
        loss=loss_settings(config),
        log=log,
    )
