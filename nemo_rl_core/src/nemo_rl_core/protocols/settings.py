# SPDX-License-Identifier: Apache-2.0
"""What any worker is told about model and tokenizer, and what a generation worker's constructor takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Fp8Weights", "GenerationSettings", "ModelSettings", "Precision", "TokenizerSettings"]

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, from a local HF folder or from a config with random weights.

    Attributes:
        folder: Local HF folder with weights; None for random weights.
        hf_config: HF config values with ``model_type``, for random weights; None with a folder.
        overrides: Values that replace those of the HF config.
        precision: Compute type. The policy keeps float32 master weights either way.
        logits_precision: Type in which the output head computes the logits: ``float32``, or ``model`` for the compute type.
        max_total_sequence_length: Longest sequence S in tokens, prompt and completion together.
        seed: Seed of random weights.
        attn_implementation: transformers' name of the attention; None for its default.
    """

    folder: str | None = None
    hf_config: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision = "float32"
    logits_precision: Literal["float32", "model"] = "float32"
    max_total_sequence_length: int = 512
    seed: int = 1
    attn_implementation: str | None = None

    @property
    def float32_head(self) -> bool:
        """Whether the output head computes in float32 under a model that computes in less."""
        return self.logits_precision == "float32" and self.precision != "float32"


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Which tokenizer; exactly one of the two.

    Attributes:
        folder: Local HF folder.
        characters: Alphabet of a character tokenizer.
        chat_template: Jinja template that replaces the folder's own.
    """

    folder: str | None = None
    characters: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fp8Weights:
    """Which weights travel in FP8: settled once, before any worker starts, and followed by sender and engine.

    Attributes:
        cast: Modules, by their names in a checkpoint, whose ``weight`` travels as e4m3 with ``weight_scale_inv`` beside it,
            one scale for each block of 128 x 128.
        ignored: The other modules with a matrix, each with the reason why it stays in the model's precision.
        power_of_two: Round scales up to powers of two.
        report: What a log says of it, one line or more.
    """

    cast: tuple[str, ...]
    ignored: Mapping[str, str] = field(default_factory=dict)
    power_of_two: bool = False
    report: str = ""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """What every generation worker is told, whatever its backend.

    A backend's worker class is built as ``WorkerClass(settings, rank=..., world_size=..., local_rank=..., device=...)``,
    one for each replica.

    Attributes:
        model: Which model; its weights come by refit, so a folder gives only the config.
        tokenizer: Which tokenizer, needed for stop strings.
        seed: Seed of requests that bring none.
        refit: Arguments of ``refit.settings.RefitSettings``.
        options: The backend's own section of the config, checked by its schema.
        parity: ``strict`` asks for logprobs as close as possible to those of one plain forward pass: whatever the engine
            does to be fast and changes them is to be off. The model's precision is float32 then.
        kv_scales: Live names of the FP8 scales that each refit brings beside the weights; empty without an FP8 KV cache.
        fp8_weights: Which weights come in FP8; None where all come in the model's precision.
        files: Config and tokenizer of the folders that ``model`` and ``tokenizer`` name: folder to file name to contents.
            With them a worker's node needs no such folder; ``data.folders.local_folders`` makes private ones.
    """

    model: ModelSettings
    tokenizer: TokenizerSettings
    seed: int = 1
    refit: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    parity: Literal["default", "strict"] = "default"
    kv_scales: tuple[str, ...] = ()
    fp8_weights: Fp8Weights | None = None
    files: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict, repr=False)
