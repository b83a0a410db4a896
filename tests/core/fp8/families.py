# SPDX-License-Identifier: Apache-2.0
"""A tiny configuration for each architecture whose scale names are known."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nemo_rl_core.fp8.model_description import ModelDescription
from nemo_rl_core.fp8.model_families import describe_model

__all__ = ["CONFIGS", "config_of", "description_of"]

_FOUR: Mapping[str, Any] = MappingProxyType({"num_hidden_layers": 4})
_HYBRID: Mapping[str, Any] = MappingProxyType(
    {"num_hidden_layers": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
)
_SHARED: Mapping[str, Any] = MappingProxyType(
    {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    }
)

#: Architecture to the class of its configuration, and what is not default there.
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "LlamaForCausalLM": ("LlamaConfig", _FOUR),
        "Phi3ForCausalLM": ("Phi3Config", _FOUR),
        "GraniteForCausalLM": ("GraniteConfig", _FOUR),
        "Qwen2ForCausalLM": ("Qwen2Config", _FOUR),
        "Qwen3ForCausalLM": ("Qwen3Config", _FOUR),
        "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", _FOUR),
        "MixtralForCausalLM": ("MixtralConfig", _FOUR),
        "Glm4MoeForCausalLM": ("Glm4MoeConfig", _FOUR),
        "GemmaForCausalLM": ("GemmaConfig", _FOUR),
        "Gemma2ForCausalLM": ("Gemma2Config", _FOUR),
        "Gemma3ForCausalLM": ("Gemma3TextConfig", _FOUR),
        "FalconH1ForCausalLM": ("FalconH1Config", _FOUR),
        "Gemma3nForCausalLM": ("Gemma3nTextConfig", {**_SHARED, "activation_sparsity_pattern": [0.0] * 4}),
        "Gemma4ForCausalLM": ("Gemma4TextConfig", _SHARED),
        "GptOssForCausalLM": ("GptOssConfig", _FOUR),
        "NemotronHForCausalLM": ("NemotronHConfig", {"hybrid_override_pattern": "M*-EM*"}),
        "Qwen3NextForCausalLM": ("Qwen3NextConfig", {**_HYBRID, "layer_types": _HYBRID["layer_types"] * 2}),
        "Qwen3_5ForConditionalGeneration": (
            "Qwen3_5Config",
            {"text_config": {**_HYBRID, "layer_types": _HYBRID["layer_types"] * 2}},
        ),
        "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLConfig", {"text_config": dict(_FOUR)}),
        "Qwen3VLForConditionalGeneration": ("Qwen3VLConfig", {"text_config": dict(_FOUR)}),
        "Gemma3ForConditionalGeneration": ("Gemma3Config", {"text_config": dict(_FOUR)}),
        "LlavaForConditionalGeneration": ("LlavaConfig", {"text_config": {"model_type": "llama", **_FOUR}}),
        "Llama4ForConditionalGeneration": ("Llama4Config", {"text_config": dict(_FOUR)}),
        "GPT2LMHeadModel": ("GPT2Config", {"n_layer": 4}),
        "FalconForCausalLM": ("FalconConfig", _FOUR),
        "BloomForCausalLM": ("BloomConfig", {"n_layer": 4}),
        "OPTForCausalLM": ("OPTConfig", _FOUR),
        "WhisperForConditionalGeneration": ("WhisperConfig", {"decoder_layers": 4, "encoder_layers": 2}),
        "DeepseekV3ForCausalLM": ("DeepseekV3Config", _FOUR),
        "JambaForCausalLM": (
            "JambaConfig",
            {"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2},
        ),
    }
)


def config_of(architecture: str, **changes: Any) -> Any:
    """Return the configuration as transformers makes it."""
    import transformers

    name, values = CONFIGS[architecture]
    return getattr(transformers, name)(**{**values, **changes, "architectures": [architecture]})


@functools.cache
def description_of(architecture: str) -> ModelDescription:
    return describe_model(config_of(architecture))
