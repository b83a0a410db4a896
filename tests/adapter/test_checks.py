# SPDX-License-Identifier: Apache-2.0
"""Settings that the engine could not run are refused in the driver, with key, value and way out."""

import json

import pytest

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_vllm.checks import check_settings
from nemo_rl_vllm.config import VllmConfig

TINY = {"model_type": "qwen3", "num_attention_heads": 4, "max_position_embeddings": 16}


def settings(model: ModelSettings | None = None, parity: str = "default", **options: object) -> GenerationSettings:
    return GenerationSettings(
        parity=parity,
        model=model or ModelSettings(hf_config=TINY, precision="float32", max_total_sequence_length=8),
        tokenizer=TokenizerSettings(characters="01"),
        options=VllmConfig.model_validate(options).model_dump(),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "float32", "load_format": "dummy"},
        {"precision": "float32", "kv_cache_dtype": "fp8_e4m3"},
        {"max_model_len": 16, "tensor_parallel_size": 2},
        {"hf_overrides": {"num_attention_heads": 4, "rope_scaling": None}},
    ],
)
def test_settings_that_the_engine_can_run_pass(options):
    check_settings(settings(**options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "bfloat16"}, r"vllm_cfg\.precision must be auto .* bfloat16 and policy\.precision=float32"),
        ({"max_model_len": 7}, r"vllm_cfg\.max_model_len must be at least .* 7 and 8"),
        ({"max_model_len": 17}, r"vllm_cfg\.max_model_len is 17, but the model has 16"),
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size=3 does not divide the model's 4"),
        ({"load_format": "safetensors"}, r"load_format must be dummy"),
        ({"enable_vllm_metrics_logger": True}, r"enable_vllm_metrics_logger=True is not there yet"),
        ({"expert_parallel_size": 2}, r"expert_parallel_size=2 is not there yet"),
        (
            {"hf_overrides": {"quantization_config": {"quant_method": "fp8"}}},
            r"quantization_config asks .*: quantised checkpoints are not trained, .* take it out",
        ),
        (
            {"hf_overrides": {"hidden_size": 256}},
            r"hf_overrides\.hidden_size=256 .* does not say; .*hf_config_overrides",
        ),
        ({"hf_overrides": {"num_attention_heads": 2}}, r"hf_overrides\.num_attention_heads=2 .* whose config has 4;"),
        (
            {"hf_overrides": {"rope_theta": 1e6}},
            r"hf_overrides\.rope_theta=1000000\.0 .* another one than the policy's",
        ),
    ],
)
def test_settings_that_it_cannot_run_are_refused_with_the_key(options, words):
    with pytest.raises(ConfigError, match=words):
        check_settings(settings(**options))


BF16 = ModelSettings(hf_config=TINY, precision="bfloat16", max_total_sequence_length=8)


def test_fp8_with_each_key_that_there_is_passes():
    keys = {"num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 1, "pow2_weight_scaling_factors": True}
    check_settings(settings(BF16, precision="fp8", quantization_ignored_layer_kws=("mlp.experts",), **keys))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (None, {}, r"vllm_cfg\.precision=fp8 needs policy\.precision: bfloat16, .* got float32"),
        (BF16, {"use_deep_gemm": True}, r"use_deep_gemm=True is not there yet: .* take the key out"),
        (BF16, {"pow2_activation_scaling_factors": True}, r"pow2_activation_scaling_factors=True cannot be had"),
        (BF16, {"hf_overrides": {"quantization_config": {}}}, r"quantization_config is for precision: fp8 to say"),
    ],
)
def test_fp8_that_cannot_be_had_is_refused_with_the_key(model, options, words):
    """Q32: a quantisation of the user's own does not win, and does not lose in silence."""
    with pytest.raises(ConfigError, match=words):
        check_settings(settings(model, precision="fp8", **options))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_strict_parity_and_fp8_weights_exclude_each_other(precision):
    """Not one error for each of the two precisions that they ask for."""
    model = ModelSettings(hf_config=TINY, precision=precision, max_total_sequence_length=8)
    with pytest.raises(ConfigError, match=r"parity=strict and .*precision=fp8 exclude each other"):
        check_settings(settings(model, parity="strict", precision="fp8"))


@pytest.mark.parametrize("given", ["mlp.experts", None, [1], {"mlp.experts": True}])
def test_patterns_that_are_no_list_of_texts_are_told_so(given):
    with pytest.raises(ValueError, match=r"quantization_ignored_layer_kws\n.*must be a list of texts, such as"):
        settings(BF16, precision="fp8", quantization_ignored_layer_kws=given)


def test_a_model_folder_is_read_and_a_nested_text_config_counts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": TINY}))
    folder = ModelSettings(folder=str(tmp_path), max_total_sequence_length=8)
    with pytest.raises(ConfigError, match="16 positions"):
        check_settings(settings(folder, max_model_len=32))
    (tmp_path / "config.json").write_text("{")
    check_settings(settings(folder, max_model_len=32))  # core refuses the folder in its own words
