# SPDX-License-Identifier: Apache-2.0
"""What the driver refuses before any worker starts, by the settings alone; needs neither vLLM nor torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings
from nemo_rl_vllm.config import VllmConfig

__all__ = ["check_quantization_config", "check_settings", "model_value"]

#: Keys that this adapter acts on; any other must have its default.
_USED = frozenset(
    {
        *("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "skip_tokenizer_init", "load_format"),
        *("precision", "enforce_eager", "hf_overrides", "kv_cache_dtype"),
        *("num_first_layers_in_bf16", "num_last_layers_in_bf16", "quantization_ignored_layer_kws"),
        *("pow2_weight_scaling_factors", "pow2_activation_scaling_factors", "use_deep_gemm"),
    }
)


def check_settings(settings: GenerationSettings) -> None:
    """Refuse what the engine could not run, or would run other than it is asked to.

    Args:
        settings: What every worker is told; ``options`` is the section ``vllm_cfg``, checked by its schema.

    Raises:
        ConfigError: Naming the key of the first value that cannot be used.
    """
    options, model = VllmConfig.model_validate(dict(settings.options)), settings.model
    for key, field in VllmConfig.model_fields.items():
        value = getattr(options, key)
        if key not in _USED and value != field.get_default(call_default_factory=True):
            raise ConfigError(f"policy.generation.vllm_cfg.{key}={value!r} is not there yet; take the key out")
    if options.load_format not in (None, "dummy"):
        raise ConfigError(
            "policy.generation.vllm_cfg.load_format must be dummy, since the weights come by refit, got "
            f"{options.load_format!r}"
        )
    if options.precision == "fp8":
        _check_fp8(options, model, settings.parity)
    elif options.precision not in ("auto", model.precision):
        raise ConfigError(
            "policy.generation.vllm_cfg.precision must be auto or that of the policy, whose weights the engine gets: got "
            f"{options.precision} and policy.precision={model.precision}"
        )
    if options.kv_cache_dtype != "auto" and settings.parity == "strict":
        raise ConfigError(
            "policy.generation.parity=strict is for logprobs as close as they get, which an FP8 KV cache is not: got "
            f"policy.generation.vllm_cfg.kv_cache_dtype={options.kv_cache_dtype!r}; take one of them out"
        )
    if "head_dtype" in options.hf_overrides:
        raise ConfigError(
            "policy.generation.vllm_cfg.hf_overrides.head_dtype is for policy.logits_precision to say, which both sides "
            f"follow; got {options.hf_overrides['head_dtype']!r}; take it out"
        )
    if options.precision != "fp8" and "quantization_config" in options.hf_overrides:
        raise ConfigError(
            "policy.generation.vllm_cfg.hf_overrides.quantization_config asks for a quantised engine, got "
            f"{options.hf_overrides['quantization_config']!r}: quantised checkpoints are not trained, and a refit brings plain "
            "weights; take it out, or set vllm_cfg.precision to fp8 for weights that each refit casts"
        )
    _check_overrides(options, model)
    _check_lengths(options, model)
    _check_parallel(options, model)


def _check_fp8(options: VllmConfig, model: ModelSettings, parity: str) -> None:
    """Refuse what FP8 weights cannot be had with."""
    section = "policy.generation.vllm_cfg"
    if parity == "strict":
        raise ConfigError(
            f"policy.generation.parity=strict and {section}.precision=fp8 exclude each other: strict is for logprobs as close "
            "as they get, in float32, which FP8 weights are not; take one of them out"
        )
    if model.precision != "bfloat16":
        raise ConfigError(
            f"{section}.precision=fp8 needs policy.precision: bfloat16, the type that the engine computes in round its FP8 "
            f"weights, got {model.precision}"
        )
    if options.pow2_activation_scaling_factors:
        raise ConfigError(
            f"{section}.pow2_activation_scaling_factors=True cannot be had: the kernels of vLLM that a refit can load "
            "have no such switch; take the key out"
        )
    if options.use_deep_gemm:
        raise ConfigError(
            f"{section}.use_deep_gemm=True is not there yet: DeepGEMM repacks weights and scales when they are loaded, where "
            "no refit reaches them; take the key out, and vLLM takes CUTLASS or Triton"
        )
    check_quantization_config(options.hf_overrides)


def check_quantization_config(hf_overrides: Mapping[str, Any]) -> None:
    """Refuse a second word on what ``precision: fp8`` says of the model's config."""
    if "quantization_config" in hf_overrides:
        raise ConfigError(
            "policy.generation.vllm_cfg.hf_overrides.quantization_config is for precision: fp8 to say, got "
            f"{hf_overrides['quantization_config']!r}; take it out, and name what is to stay in bfloat16 in "
            "quantization_ignored_layer_kws"
        )


def _check_overrides(options: VllmConfig, model: ModelSettings) -> None:
    """Refuse an engine of another model than the policy's: of other shapes, or of other sums over the same weights.

    The first would be found at the first refit only, a minute later, and the second (``rope_theta``) not at all but as
    mismatch.
    """
    values = _model_values(model)
    if values is None:
        return
    for key, value in options.hf_overrides.items():
        if values.get(key) != value:
            told = f"has {values[key]!r}" if key in values else "does not say"
            raise ConfigError(
                f"policy.generation.vllm_cfg.hf_overrides.{key}={value!r} would make the engine's model another one than the "
                f"policy's, whose config {told}; set it in policy.hf_config_overrides, which both sides follow"
            )


def _check_lengths(options: VllmConfig, model: ModelSettings) -> None:
    """Hold the engine's context between what the policy asks for and what the model has."""
    limit = options.max_model_len
    if limit is None:
        return
    if limit < model.max_total_sequence_length:
        raise ConfigError(
            "policy.generation.vllm_cfg.max_model_len must be at least policy.max_total_sequence_length, got "
            f"{limit} and {model.max_total_sequence_length}; raise it, or leave it out"
        )
    positions = model_value(model, "max_position_embeddings")
    if positions is not None and limit > positions:
        raise ConfigError(
            f"policy.generation.vllm_cfg.max_model_len is {limit}, but the model has {positions} positions; lower it"
        )


def _check_parallel(options: VllmConfig, model: ModelSettings) -> None:
    """Ask that the engine's ranks can share the model out; vLLM pads the vocabulary by itself."""
    ranks = options.tensor_parallel_size
    key = f"policy.generation.vllm_cfg.tensor_parallel_size={ranks}"
    heads = model_value(model, "num_attention_heads")
    if heads is not None and heads % ranks:
        raise ConfigError(f"{key} does not divide the model's {heads} attention heads; take a divisor of it")
    kv_heads = model_value(model, "num_key_value_heads")
    if kv_heads is not None and kv_heads % ranks and ranks % kv_heads:
        raise ConfigError(
            f"{key} neither divides the model's {kv_heads} KV heads nor is a multiple of them; take a divisor or a multiple"
        )
    # The dense width of a model of experts may be that of no layer.
    experts = model_value(model, "moe_intermediate_size")
    width_key = "intermediate_size" if experts is None else "moe_intermediate_size"
    width = model_value(model, width_key)
    if width is not None and width % ranks:
        raise ConfigError(f"{key} does not divide the model's {width_key} of {width}; take a divisor of it")


def model_value(model: ModelSettings, key: str) -> int | None:
    """Return a number of the model's config, or of its nested text config; None where it does not say."""
    values = _model_values(model)
    if values is None:
        return None
    nested = values.get("text_config")
    found = values.get(key, nested.get(key) if isinstance(nested, Mapping) else None)
    return found if isinstance(found, int) else None


def _model_values(model: ModelSettings) -> dict[str, Any] | None:
    """Return what the policy says of the model's config; None where it cannot be read."""
    values: Mapping[str, Any] = model.hf_config or {}
    if model.folder is not None:
        try:
            values = json.loads((Path(model.folder) / "config.json").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError):
            return None  # core refuses such a folder in its own words
    return {**values, **model.overrides}
