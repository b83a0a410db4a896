# SPDX-License-Identifier: Apache-2.0
"""The `policy` section: model, tokenizer, batches, optimizer."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from nemo_rl_core.config.base import RawMapping, Section
from nemo_rl_core.config.generation import GenerationSection

__all__ = [
    "DTensorSection",
    "DynamicBatchingSection",
    "OptimizerSection",
    "PolicySection",
    "SchedulerSection",
    "TokenizerSection",
]


class TokenizerSection(Section):
    """Where token ids come from."""

    name: str | None = Field(default=None, description="Local Hugging Face tokenizer folder; null takes `model_name`.")
    characters: str | None = Field(
        default=None, description="Alphabet of a built-in character tokenizer, for tiny models; excludes `name`."
    )
    chat_template: str | None = Field(default=None, description="Jinja chat template; null takes the tokenizer's own.")


class OptimizerSection(Section):
    """Which optimizer trains the policy."""

    name: str = Field(default="torch.optim.AdamW", description="Dotted path of the optimizer class.")
    kwargs: RawMapping = Field(
        default_factory=lambda: {"lr": 5.0e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1.0e-8},
        description="Keyword arguments of the optimizer.",
    )


class SchedulerSection(Section):
    """How the learning rate changes."""

    name: str = Field(description="Dotted path of the scheduler class, e.g. `torch.optim.lr_scheduler.LinearLR`.")
    kwargs: RawMapping = Field(default_factory=dict, description="Keyword arguments of the scheduler.")


class DTensorSection(Section):
    """The FSDP2 worker."""

    enabled: bool = Field(default=True, description="Must be true: it is the only train worker so far.")
    activation_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, more time."
    )


class DynamicBatchingSection(Section):
    """Micro-batches of about equal token counts in place of equal sequence counts."""

    enabled: bool = Field(default=False, description="Whether micro-batches are cut by tokens.")
    train_mb_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of a train micro-batch, padding included."
    )
    logprob_mb_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of a logprob micro-batch, padding included."
    )


class PolicySection(Section):
    """The model that is trained and how."""

    model_name: str | None = Field(
        default=None, description="Local Hugging Face model folder; exactly one of `model_name` and `hf_config`."
    )
    hf_config: RawMapping | None = Field(
        default=None, description="Hugging Face config with `model_type`: a model with random weights."
    )
    hf_config_overrides: RawMapping = Field(default_factory=dict, description="Changes to the model's config.")
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection)
    train_global_batch_size: int = Field(
        default=512, ge=1, description="Sequences of one optimizer step over all train workers; divides the rollout."
    )
    train_micro_batch_size: int = Field(
        default=4, ge=1, description="Sequences of one forward and backward pass of a train worker."
    )
    logprob_batch_size: int = Field(default=4, ge=1, description="Sequences of one logprob pass of a train worker.")
    logprob_chunk_size: int = Field(
        default=1024, ge=1, description="Tokens of one chunk of the projection to the vocabulary; bounds its memory."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="bfloat16",
        description="Compute type of both sides; master weights are float32 always. Left out, it is `float32` where "
        "`policy.generation.parity` is `strict`.",
    )
    logits_precision: Literal["float32", "model"] = Field(
        default="float32",
        description="Type in which the output head computes the logits on both sides; `model` is that of `precision`. A "
        "logit of 20 in bfloat16 is a multiple of 1/8.",
    )
    max_total_sequence_length: int = Field(default=512, ge=2, description="Tokens of prompt and completion together.")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="Gradient norm bound; null does not clip.")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    scheduler: SchedulerSection | None = Field(
        default=None, description="Learning rate scheduler; null keeps it constant."
    )
    dtensor_cfg: DTensorSection = Field(default_factory=DTensorSection)
    dynamic_batching: DynamicBatchingSection = Field(default_factory=DynamicBatchingSection)
    generation: GenerationSection | None = Field(default=None, description="Generation side; required for GRPO.")

    @model_validator(mode="before")
    @classmethod
    def _strict_parity_computes_in_float32(cls, given: Any) -> Any:
        generation = given.get("generation") if isinstance(given, Mapping) else None
        strict = isinstance(generation, Mapping) and generation.get("parity") == "strict"
        return {"precision": "float32", **given} if strict else given

    @property
    def tokenizer_name(self) -> str | None:
        """Folder of the tokenizer; None with a character tokenizer."""
        return None if self.tokenizer.characters is not None else self.tokenizer.name or self.model_name
