# SPDX-License-Identifier: Apache-2.0
"""What policy workers are told, as plain dataclasses: they cross to another process and need no pydantic there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_core.protocols.settings import Fp8Weights, ModelSettings

__all__ = ["BatchingSettings", "OptimizerSettings", "PolicySettings"]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Optimizer and schedule by dotted path.

    Attributes:
        name: Class path, e.g. ``torch.optim.AdamW``.
        kwargs: Its arguments, ``lr`` among them.
        scheduler_name: Class path of a ``torch.optim.lr_scheduler``; None for a constant rate.
        scheduler_kwargs: Its arguments.
        max_grad_norm: Gradients are scaled down to this norm; None for no clipping.
    """

    name: str = "torch.optim.AdamW"
    kwargs: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-6})
    scheduler_name: str | None = None
    scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_grad_norm: float | None = 1.0


@dataclass(frozen=True, kw_only=True)
class BatchingSettings:
    """How a batch is cut.

    Attributes:
        train_micro_batch_size: Sequences of one forward and backward pass.
        logprob_batch_size: Sequences of one forward pass.
        train_mb_tokens: Padded tokens of one training pass; replaces the count when given.
        logprob_mb_tokens: Padded tokens of one forward pass; replaces the count when given.
        logprob_chunk_size: Positions whose logits exist at one time: T x V float32 is the largest such tensor.
    """

    train_micro_batch_size: int = 8
    logprob_batch_size: int = 16
    train_mb_tokens: int | None = None
    logprob_mb_tokens: int | None = None
    logprob_chunk_size: int = 1024


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Everything that a policy worker is told.

    Attributes:
        model: Which model.
        optimizer: How it is trained.
        batching: How batches are cut.
        temperature: Of the sampling distribution whose logprobs are wanted.
        activation_checkpointing: Recompute each layer's activations in the backward pass.
        reference_model: Keep a copy of the initial weights as the reference policy.
        fp8_weights: Which weights a refit sends in FP8; None for none.
        collective_timeout_s: Deadline of each collective among the train ranks, in seconds.
    """

    model: ModelSettings
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    temperature: float = 1.0
    activation_checkpointing: bool = False
    reference_model: bool = False
    fp8_weights: Fp8Weights | None = None
    collective_timeout_s: float = 300.0
