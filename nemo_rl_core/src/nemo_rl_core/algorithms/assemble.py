# SPDX-License-Identifier: Apache-2.0
"""From a checked config to the parts of a run: what each worker is told, and the loop with its handles."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl_core.algorithms.grpo import GRPO, StepLog
from nemo_rl_core.algorithms.kv_scales import KvScales
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.data.folders import local_folders, read_folder
from nemo_rl_core.data.tokenizers import build_tokenizer
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.fp8.model_description import ModelDescription
from nemo_rl_core.objectives.losses import LossSettings
from nemo_rl_core.policy.generation import Generation
from nemo_rl_core.policy.policy import Policy
from nemo_rl_core.policy.refit import Refitter
from nemo_rl_core.protocols.generation import SamplingParams
from nemo_rl_core.protocols.settings import Fp8Weights, GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_core.protocols.workers import WorkerGroup
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.rollout.prompts import EncodedPrompt, PromptSampler, encode_prompts
from nemo_rl_core.rollout.tasks import Task, load_task, prompts_of
from nemo_rl_core.workers.models import check_model, load_config
from nemo_rl_core.workers.optimizers import check_optimizer
from nemo_rl_core.workers.settings import BatchingSettings, OptimizerSettings, PolicySettings

__all__ = ["Ingredients", "assemble", "generation_settings", "policy_settings", "prepare", "sent_files"]


def _absolute(folder: str | None) -> str | None:
    """Return a folder as a worker, which starts somewhere else, may name it."""
    return None if folder is None else str(Path(folder).absolute())


def model_settings(config: RunConfig) -> ModelSettings:
    """Return which model both sides build."""
    policy = config.policy
    return ModelSettings(
        folder=_absolute(policy.model_name),
        hf_config=policy.hf_config,
        overrides=policy.hf_config_overrides,
        precision=policy.precision,
        logits_precision=policy.logits_precision,
        max_total_sequence_length=policy.max_total_sequence_length,
        seed=config.grpo.seed,
    )


def tokenizer_settings(config: RunConfig) -> TokenizerSettings:
    """Return which tokenizer both sides build."""
    tokenizer = config.policy.tokenizer
    return TokenizerSettings(
        folder=_absolute(config.policy.tokenizer_name),
        characters=tokenizer.characters,
        chat_template=tokenizer.chat_template,
    )


def policy_settings(config: RunConfig, fp8_weights: Fp8Weights | None = None) -> PolicySettings:
    """Return what every train worker is told; ``fp8_weights`` says what it sends in FP8."""
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
        fp8_weights=fp8_weights,
        collective_timeout_s=config.workers.call_timeout_s,
    )


def sent_files(config: RunConfig) -> dict[str, dict[str, bytes]]:
    """Return what generation workers need of the driver's folders: folder to file name to contents.

    Raises:
        ModelError: If a folder cannot be read, or its config and tokenizer are too large to be sent.
    """
    folders = (model_settings(config).folder, tokenizer_settings(config).folder)
    return {folder: read_folder(folder) for folder in dict.fromkeys(folders) if folder is not None}


def generation_settings(
    config: RunConfig,
    options: Mapping[str, Any],
    files: Mapping[str, Mapping[str, bytes]] | None = None,
    attention: ModelDescription | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> GenerationSettings:
    """Return what every generation worker is told.

    Args:
        config: The whole config.
        options: The backend's own section, checked by its schema.
        files: What `sent_files` read; None where the worker has the driver's folders.
        attention: Which modules get FP8 scales with each refit; None where the KV cache is not FP8.
        fp8_weights: Which weights come in FP8; None for none.
    """
    include_q = config.generation.kv_scales.include_q
    return GenerationSettings(
        model=model_settings(config),
        tokenizer=tokenizer_settings(config),
        seed=config.grpo.seed,
        refit=config.refit.model_dump(),
        options=dict(options),
        parity=config.generation.parity,
        kv_scales=attention.names(include_q=include_q) if attention else (),
        fp8_weights=fp8_weights,
        files=files or {},
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
        files: What generation workers need of the driver's folders, as `sent_files` returns it.
    """

    task: Task
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    train: list[EncodedPrompt]
    heldout: list[EncodedPrompt]
    files: Mapping[str, Mapping[str, bytes]]


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
    files = sent_files(config)
    _check_files(config, files, len(tokenizer))
    sampling = sampling_params(config, tokenizer)
    limit = config.policy.max_total_sequence_length
    train = encode_prompts(prompts_of(task, "train_prompts"), tokenizer, limit)
    if not train:
        raise ConfigError(f"data.task {config.data.task!r} has no prompts to train on")
    heldout = encode_prompts(prompts_of(task, "heldout_prompts"), tokenizer, limit)
    return Ingredients(task=task, tokenizer=tokenizer, sampling=sampling, train=train, heldout=heldout, files=files)


def _check_files(config: RunConfig, files: Mapping[str, Mapping[str, bytes]], tokenizer_size: int) -> None:
    """Build the tokenizer from what is sent, as a generation worker will."""
    if tokenizer_settings(config).folder is None:
        return
    with local_folders(generation_settings(config, {}, files)) as local:
        try:
            found = len(build_tokenizer(local.tokenizer))
        except ModelError as error:
            raise ModelError(
                f"the tokenizer in {tokenizer_settings(config).folder!r} needs a file that is not sent to generation "
                f"workers: {error}; save it anew with transformers' save_pretrained"
            ) from error
    if found != tokenizer_size:
        raise ModelError(
            f"the tokenizer in {tokenizer_settings(config).folder!r} has {tokenizer_size} token ids, and {found} when it "
            "is built from the files that are sent to generation workers; save it anew with transformers' save_pretrained"
        )


def assemble(
    config: RunConfig,
    ingredients: Ingredients,
    train_group: WorkerGroup,
    generation_group: WorkerGroup,
    log: StepLog,
    *,
    attention: ModelDescription | None = None,
) -> GRPO:
    """Put the loop together over running workers, wherever they run.

    Args:
        config: The whole config.
        ingredients: What `prepare` built.
        train_group: The train workers.
        generation_group: The generation workers.
        log: Receives every step's metrics.
        attention: Which modules get FP8 scales with each refit, as the generation workers were told; None for none.
    """
    policy, generation = Policy(train_group), Generation(generation_group)
    return GRPO(
        config=config,
        policy=policy,
        generation=generation,
        refitter=Refitter(
            policy,
            generation,
            RefitSettings(**config.refit.model_dump()),
            attention=attention,
            include_q=config.generation.kv_scales.include_q,
        ),
        kv_scales=KvScales(attention, config.generation.kv_scales) if attention else None,
        task=ingredients.task,
        tokenizer=ingredients.tokenizer,
        prompts=PromptSampler(ingredients.train, seed=config.grpo.seed),
        heldout=ingredients.heldout,
        sampling=ingredients.sampling,
        loss=loss_settings(config),
        log=log,
    )
