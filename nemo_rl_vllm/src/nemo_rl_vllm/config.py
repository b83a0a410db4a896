# SPDX-License-Identifier: Apache-2.0
"""Schema of the config section ``policy.generation.vllm_cfg``; needs neither vLLM nor torch."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = ["VllmConfig", "fp8_kv_cache", "num_ranks"]


class VllmConfig(BaseModel):
    """The section ``vllm_cfg``, with the keys that NeMo-RL users know; an unknown key is an error.

    Attributes:
        tensor_parallel_size: Ranks that share each layer, at least 1.
        pipeline_parallel_size: Stages of layers, at least 1; more than one needs ``async_engine``.
        expert_parallel_size: Ranks that share the experts: 1, or a multiple of ``tensor_parallel_size``.
        gpu_memory_utilization: Share of a GPU's memory that the engine may use, in (0, 1].
        max_model_len: Longest prompt plus completion, in tokens; None takes the policy's
            ``max_total_sequence_length``.
        skip_tokenizer_init: Leave the tokenizer out of the engine, which then refuses stop strings; None loads it.
        async_engine: Use the asynchronous engine.
        load_format: How the engine gets its first weights: ``dummy`` waits for the first refit; None means ``dummy``
            in training and ``auto`` otherwise.
        precision: Precision of the engine's weights; ``auto`` is that of the policy.
        kv_cache_dtype: Type of the KV cache; an FP8 one gets its scales with each refit (``policy.generation.kv_scales``).
        enforce_eager: Switch CUDA graphs and compilation off.
        expose_http_server: Serve an OpenAI-style endpoint; needs ``async_engine``.
        http_server_serving_chat_kwargs: Keyword arguments for that endpoint's chat handler.
        tool_parser_plugin: Path of a tool parser for that endpoint.
        use_deep_gemm: Use DeepGEMM kernels for FP8.
        num_first_layers_in_bf16: Layers at the start that stay in bfloat16 under FP8.
        num_last_layers_in_bf16: Layers at the end that stay in bfloat16 under FP8.
        quantization_ignored_layer_kws: Patterns, each one or more whole components of module names, of what stays in
            bfloat16 under FP8.
        pow2_weight_scaling_factors: Round weight scales to powers of two under FP8.
        pow2_activation_scaling_factors: Round activation scales to powers of two under FP8.
        enable_vllm_metrics_logger: Log the engine's own metrics.
        vllm_metrics_logger_interval: Seconds between two such records.
        hf_overrides: Overrides of the model's Hugging Face config.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    expert_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    max_model_len: int | None = Field(default=None, ge=1)
    skip_tokenizer_init: bool | None = None
    async_engine: bool = False
    load_format: Literal["dummy", "auto", "safetensors"] | None = None
    precision: Literal["auto", "bfloat16", "float16", "float32", "fp8"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    enforce_eager: bool = False
    expose_http_server: bool = False
    http_server_serving_chat_kwargs: dict[str, Any] = Field(default_factory=dict)
    tool_parser_plugin: str | None = None
    use_deep_gemm: bool = False
    num_first_layers_in_bf16: int = Field(default=0, ge=0)
    num_last_layers_in_bf16: int = Field(default=0, ge=0)
    quantization_ignored_layer_kws: tuple[str, ...] = ()
    pow2_weight_scaling_factors: bool = False
    pow2_activation_scaling_factors: bool = False
    enable_vllm_metrics_logger: bool = False
    vllm_metrics_logger_interval: float = Field(default=0.5, gt=0.0)
    hf_overrides: dict[str, Any] = Field(default_factory=dict)

    @field_validator("quantization_ignored_layer_kws", mode="before")
    @classmethod
    def _check_list(cls, given: Any) -> Any:
        """Ask for a list in the words of a config, which has no tuples.

        Raises:
            ValueError: If it is anything else, or holds something that is no text.
        """
        if not isinstance(given, list | tuple) or not all(isinstance(pattern, str) for pattern in given):
            raise ValueError("must be a list of texts, such as [mlp.down_proj]")
        return given

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """Refuse combinations that the engine cannot run.

        Raises:
            ValueError: Names the keys, their values and the way out; pydantic turns it into its own error.
        """
        expert, tensor = self.expert_parallel_size, self.tensor_parallel_size
        if expert > 1 and expert % tensor != 0:
            raise ValueError(
                f"expert_parallel_size must be 1 or a multiple of tensor_parallel_size, got {expert} and {tensor}"
            )
        for key, needs_async in {
            "pipeline_parallel_size": self.pipeline_parallel_size > 1,
            "expose_http_server": self.expose_http_server,
        }.items():
            if needs_async and not self.async_engine:
                raise ValueError(f"{key}={getattr(self, key)!r} needs async_engine: true")
        only_fp8 = {
            "use_deep_gemm": self.use_deep_gemm,
            "num_first_layers_in_bf16": self.num_first_layers_in_bf16,
            "num_last_layers_in_bf16": self.num_last_layers_in_bf16,
            "quantization_ignored_layer_kws": self.quantization_ignored_layer_kws,
            "pow2_weight_scaling_factors": self.pow2_weight_scaling_factors,
            "pow2_activation_scaling_factors": self.pow2_activation_scaling_factors,
        }
        unused = [key for key, value in only_fp8.items() if value]
        if unused and self.precision != "fp8":
            raise ValueError(
                f"{', '.join(unused)} acts only with precision: fp8, got precision: {self.precision}; set it, or take "
                f"the key out"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine replica: tensor times pipeline."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def num_ranks(options: Mapping[str, Any]) -> int:
    """Return how many ranks one replica has, by the section as its schema returned it."""
    return VllmConfig.model_validate(dict(options)).num_ranks


def fp8_kv_cache(options: Mapping[str, Any]) -> bool:
    """Say whether the KV cache is FP8, by the section as its schema returned it."""
    return VllmConfig.model_validate(dict(options)).kv_cache_dtype != "auto"
