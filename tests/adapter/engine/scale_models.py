# SPDX-License-Identifier: Apache-2.0
"""A tiny model of each family whose scale names are known, small enough for an engine on a CPU."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.core.fp8.families import CONFIGS, config_of

__all__ = ["ARGUMENTS", "NOT_RUN", "QUANTIZATION", "REMARKS", "TINY", "prompt_of", "write"]

VOCAB = 128
#: The kernel for CPUs takes heads that are multiples of 32.
_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
)
# The kernel for linear attention takes heads of 64 and more.
_LINEAR: Mapping[str, Any] = MappingProxyType(
    {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
)
_GEMMA_SHARED: Mapping[str, Any] = MappingProxyType(
    {
        **_SIZES,
        "sliding_window": 64,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16,
    }
)

_WITH_SECTIONS: Mapping[str, Any] = MappingProxyType(
    {**_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
)
_VISION: Mapping[str, Any] = MappingProxyType(
    {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64}
)
_CLIP: Mapping[str, Any] = MappingProxyType(
    {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
)

#: Architecture to what makes its configuration tiny; ``text_config`` and its like are completed by ``families.py``.
TINY: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "LlamaForCausalLM": _SIZES,
        "Phi3ForCausalLM": _SIZES,
        "GraniteForCausalLM": _SIZES,
        "Qwen2ForCausalLM": _SIZES,
        "Qwen3ForCausalLM": _SIZES,
        "Qwen3MoeForCausalLM": {**_SIZES, **_EXPERTS},
        "MixtralForCausalLM": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
        "Glm4MoeForCausalLM": {
            **_SIZES,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        "GemmaForCausalLM": _SIZES,
        "Gemma2ForCausalLM": {**_SIZES, "query_pre_attn_scalar": 32},
        "Gemma3ForCausalLM": {**_SIZES, "query_pre_attn_scalar": 32, "sliding_window": 64},
        "FalconH1ForCausalLM": {
            **_SIZES,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 2,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
        },
        "Gemma3nForCausalLM": {
            **_GEMMA_SHARED,
            "intermediate_size": [96] * 4,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
        "Gemma4ForCausalLM": _GEMMA_SHARED,
        "GptOssForCausalLM": {**_SIZES, **_EXPERTS, "sliding_window": 64},
        "NemotronHForCausalLM": {
            **_SIZES,
            # No kernel for CPUs takes its experts.
            "hybrid_override_pattern": "M*-M*-",
            "mamba_num_heads": 2,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
        },
        "Qwen3NextForCausalLM": {**_SIZES, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 32},
        "Qwen3_5ForConditionalGeneration": {
            "text_config": {**_SIZES, **_LINEAR},
            "vision_config": {**_VISION, "num_position_embeddings": 16},
        },
        "Qwen2_5_VLForConditionalGeneration": {
            "text_config": _WITH_SECTIONS,
            "vision_config": {**_VISION, "window_size": 28, "fullatt_block_indexes": [0]},
        },
        "Qwen3VLForConditionalGeneration": {
            "text_config": _WITH_SECTIONS,
            "vision_config": {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        "Gemma3ForConditionalGeneration": {
            "text_config": {**_SIZES, "query_pre_attn_scalar": 32},
            "vision_config": {**_CLIP, "vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
        "LlavaForConditionalGeneration": {
            "text_config": _SIZES,
            "vision_config": {**_CLIP, "model_type": "clip_vision_model"},
        },
        "Llama4ForConditionalGeneration": {
            "text_config": {**_SIZES, "num_local_experts": 4, "intermediate_size_mlp": 96},
            "vision_config": {**_CLIP, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        },
        "GPT2LMHeadModel": {
            "vocab_size": VOCAB,
            "n_embd": 64,
            "n_head": 2,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "FalconForCausalLM": {
            **{name: value for name, value in _SIZES.items() if name != "head_dim"},
            "new_decoder_architecture": True,
            "num_kv_heads": 1,
        },
        "BloomForCausalLM": {**_SIZES, "n_head": 2},
        "OPTForCausalLM": {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64},
        "WhisperForConditionalGeneration": {
            # The alphabet of bytes, and the mark that ends a text.
            "vocab_size": 257,
            "d_model": 64,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 256),
        },
        "DeepseekV3ForCausalLM": {
            **_SIZES,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            # The kernel for CPUs takes a latent of this size alone.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
        "JambaForCausalLM": {
            **_SIZES,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 4,
        },
    }
)

#: Architecture to more arguments of its engine.
ARGUMENTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **{name: {"language_model_only": True} for name, (_, values) in CONFIGS.items() if "text_config" in values},
        "WhisperForConditionalGeneration": {"skip_tokenizer_init": False, "max_num_batched_tokens": 2048},
    }
)

#: Quantisations in which weights stay as they are and the KV cache is FP8: the refit's, and three of checkpoints.
QUANTIZATION: Mapping[str, Mapping[str, Any] | None] = MappingProxyType(
    {
        "plain": None,
        "compressed-tensors": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": {
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "dynamic": False,
                "symmetric": True,
            },
        },
        # Weights would be FP8 too in these two, but for `scales_side.leave_weights_alone`.
        "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "modelopt": {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": [],
        },
    }
)

#: Architecture to why its engine is built here, but cannot run.
NOT_RUN: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV3ForCausalLM": "vLLM's MLA kernel for CPUs takes no FP8 cache",
        "JambaForCausalLM": "vLLM has no Mamba-1 kernel for CPUs",
    }
)

#: Architecture to what a reader of the table has to know.
REMARKS: Mapping[str, str] = MappingProxyType(
    {
        "Gemma3nForCausalLM": "layers 2 and 3 read the caches of 0 and 1, by scales of their own",
        "Gemma4ForCausalLM": "as Gemma 3n",
        "NemotronHForCausalLM": "without experts, for which vLLM has no kernel on a CPU",
        "FalconForCausalLM": "vLLM does not tell its attention the cache's type, so it stays plain but for such a load",
        "WhisperForConditionalGeneration": "with one second of sound",
    }
)


def prompt_of(architecture: str) -> dict[str, Any] | None:
    """Return a prompt in vLLM's form, two blocks of the KV cache and a bit; None where the model runs on no CPU."""
    if architecture in NOT_RUN:
        return None
    text = {"prompt_token_ids": [3 + k * k % 101 for k in range(75)]}
    if architecture != "WhisperForConditionalGeneration":
        return text
    wave = [(k * k % 199) / 199 - 0.5 for k in range(16000)]
    return {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": wave}}, "decoder_prompt": text}


def write(folder: Path, architecture: str, quantization: Mapping[str, Any] | None = None) -> Any:
    """Write a configuration for an engine; returns transformers' object without the quantisation."""
    usual = CONFIGS[architecture][1]
    tiny = {
        name: {**usual.get(name, {}), **value} if isinstance(value, Mapping) else value
        for name, value in TINY[architecture].items()
    }
    config = config_of(architecture, **tiny)
    values = config.to_dict()
    if quantization is not None:
        values["quantization_config"] = dict(quantization)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, default=str))
    if architecture == "WhisperForConditionalGeneration":
        _write_processor(folder)
    return config


def _write_processor(folder: Path) -> None:
    """Write what turns sound into features, without which vLLM runs no Whisper."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    WhisperProcessor(WhisperFeatureExtractor(), WhisperTokenizer(vocab=letters, merges=[])).save_pretrained(folder)
