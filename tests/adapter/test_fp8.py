# SPDX-License-Identifier: Apache-2.0
"""FP8 weights before an engine starts: which modules are cast, what the engine is told, and what cannot be."""

import json
import os
import pickle
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_core.algorithms.backends import ChosenBackend, choose_backend
from nemo_rl_core.algorithms.remote_backend import _describe
from nemo_rl_core.distributed.environments import current_interpreter
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.fp8 import blockwise
from nemo_rl_core.protocols.settings import Fp8Weights, GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_core.refit.manifest import TensorSpec
from nemo_rl_vllm import worker
from nemo_rl_vllm.config import VllmConfig
from nemo_rl_vllm.engine import EngineFolder, engine_arguments, failure
from nemo_rl_vllm.engine_plugin import FP8_WEIGHTS, KEEP_WEIGHTS
from nemo_rl_vllm.fp8 import BLOCK, fp8_weights, init_fp8
from nemo_rl_vllm.live_weights import _Part, _require_fp8

MODEL = ModelSettings(
    hf_config={"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2}, precision="bfloat16"
)
PARTS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
ATTENTION = {"q_proj": (512, 256), "k_proj": (256, 256), "v_proj": (256, 256), "o_proj": (256, 512)}
MLP = {"gate_proj": (512, 256), "up_proj": (512, 256), "down_proj": (256, 512)}


def shapes(attention=ATTENTION, mlp=MLP, layers=2) -> dict[str, tuple[int, int]]:
    """The matrices of a dense model."""
    found = {"model.embed_tokens": (40, 256)}
    for layer in range(layers):
        found |= {f"model.layers.{layer}.self_attn.{name}": shape for name, shape in attention.items()}
        found |= {f"model.layers.{layer}.mlp.{name}": shape for name, shape in mlp.items()}
    return found | {"lm_head": (40, 256)}


def settings(**options: object) -> GenerationSettings:
    return GenerationSettings(
        model=MODEL,
        tokenizer=TokenizerSettings(characters="01"),
        options=VllmConfig.model_validate({"precision": "fp8", **options}).model_dump(),
    )


def settle(found=None, **options: object) -> Fp8Weights:
    weights = fp8_weights(settings(**options), lambda: found or shapes())
    assert weights is not None
    return weights


def test_without_fp8_nothing_is_cast_and_no_model_is_built():
    def shapes():
        raise AssertionError("a model was built")

    assert fp8_weights(settings(precision="auto"), shapes) is None


def test_the_keys_of_nemo_rl_say_what_stays():
    """Q40, Q42: first and last layers, patterns with their hits, heads and embeddings always."""
    weights = settle(
        shapes(layers=4),
        num_first_layers_in_bf16=1,
        num_last_layers_in_bf16=1,
        quantization_ignored_layer_kws=("layers.1.mlp.down_proj",),
        pow2_weight_scaling_factors=True,
    )
    assert {name.split(".")[2] for name in weights.cast} == {"1", "2"}
    assert "model.layers.1.mlp.down_proj" in weights.ignored
    assert {"lm_head", "model.embed_tokens"} <= set(weights.ignored)
    assert set(weights.cast) | set(weights.ignored) == set(shapes(layers=4))
    assert weights.power_of_two
    assert "pattern 'layers.1.mlp.down_proj' hit 1" in weights.report


def test_a_pattern_that_hits_nothing_is_refused_with_the_key():
    """Q40: a name in nobody's checkpoint would leave a layer quantised."""
    with pytest.raises(ConfigError, match=r"vllm_cfg: quantization_ignored_layer_kws: 'linear_attn' hits no module"):
        settle(quantization_ignored_layer_kws=("linear_attn",))


def of_experts(**inner: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """The matrices of a model of two experts for each layer."""
    each = {**MLP, **inner}
    experts = {f"experts.{expert}.{name}": shape for expert in range(2) for name, shape in each.items()}
    return shapes(mlp={"gate": (2, 256), **experts})


def test_experts_are_cast_one_by_one_and_ignored_by_layers():
    """Q42, Q44: their router stays in any case; vLLM has the experts of a layer under one name."""
    assert len([name for name in settle(of_experts()).cast if ".experts." in name]) == 12
    weights = settle(of_experts(), quantization_ignored_layer_kws=("layers.1.mlp.experts",))
    arguments = init_fp8(weights, {}, device="cuda")
    assert sorted(arguments["hf_overrides"]["quantization_config"]["ignored_layers"]) == sorted(
        [
            *("lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"),
            *("model.layers.1.mlp.gate", "model.layers.1.mlp.experts"),
        ]
    )
    assert arguments["moe_backend"] == "triton", "the one that takes them as they lie in a checkpoint"


def test_no_kernel_for_experts_is_asked_for_where_there_are_none_in_fp8():
    """On a CPU the adapter's own is what vLLM finds."""
    assert "moe_backend" not in init_fp8(settle(), {}, device="cuda")
    assert "moe_backend" not in init_fp8(settle(of_experts()), {}, device="cpu")


@pytest.mark.parametrize(
    ("changed", "ranks", "words"),
    [
        (
            {"k_proj": (64, 256), "v_proj": (64, 256)},
            1,
            r"tensor_parallel_size=1 its 64 rows, .*k_proj' is \[64, 256\]; keep",
        ),
        (
            {"k_proj": (128, 256), "v_proj": (128, 256)},
            2,
            r"=2 64 rows of it .*k_proj' is \[128, 256\]; take fewer.*\[qkv_proj\]",
        ),
        ({"o_proj": (256, 384)}, 2, r"=2 192 columns of it .*o_proj' is \[256, 384\]; take fewer.*\[o_proj\]"),
        ({"experts.0.down_proj": (256, 192)}, 1, r"=1 its 192 columns, .*experts\.0\.down_proj' .*\[mlp\.experts\]"),
        ({"experts.1.up_proj": (256, 256)}, 4, r"=4 64 rows of it .*experts\.1\.up_proj' .*\[mlp\.experts\]"),
        ({"gate_proj": (320, 256)}, 4, r"=4 80 rows of it .*gate_proj' is \[320, 256\].*\[gate_up_proj\]"),
    ],
)
def test_a_share_that_ends_inside_a_block_is_refused_with_module_ranks_and_block(changed, ranks, words):
    """Q38: 64, 80 and 192 are those of the reports."""
    attention = {name: changed.get(name, shape) for name, shape in ATTENTION.items()}
    mlp = MLP | {name: shape for name, shape in changed.items() if name not in ATTENTION}
    with pytest.raises(ConfigError, match=rf"blocks of 128 x 128, .*{words}"):
        settle(shapes(attention, mlp), tensor_parallel_size=ranks)


def test_a_kv_head_that_two_ranks_hold_is_not_cut():
    """Four ranks and two KV heads of 128 rows: a rank holds a whole one."""
    assert len(settle(tensor_parallel_size=4).cast) == 14


def test_ragged_ends_where_nothing_follows_are_fine():
    found = shapes({**ATTENTION, "v_proj": (200, 256), "o_proj": (250, 510)}, {**MLP, "down_proj": (250, 500)})
    assert len(settle(found).cast) == 14


def test_the_engine_is_told_whole_names_and_the_users_overrides_stay():
    """Q32: both survive, whichever key they have."""
    weights = settle(quantization_ignored_layer_kws=("layers.1.self_attn",))
    arguments = init_fp8(weights, {"rope_scaling": None, "head_dtype": "float32"})
    quantization = arguments["hf_overrides"].pop("quantization_config")
    assert arguments == {"hf_overrides": {"rope_scaling": None, "head_dtype": "float32"}}
    assert quantization == {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "ignored_layers": [
            "model.embed_tokens",
            *(f"model.layers.1.self_attn.{name}" for name in ATTENTION),
            "lm_head",
        ],
    }
    json.dumps(quantization)  # it goes into a config.json


def test_two_words_on_the_quantisation_are_refused():
    """Q32: neither wins in silence."""
    with pytest.raises(ConfigError, match=r"hf_overrides\.quantization_config is for precision: fp8 to say"):
        init_fp8(settle(), {"quantization_config": {"quant_method": "awq"}})


@pytest.mark.parametrize("given", [settings(), settings(precision="auto")])
def test_an_engine_gets_fp8_with_the_list_or_neither(given, monkeypatch):
    """A worker that somebody builds without the driver: the list is not made up."""
    weights = settle()
    full = GenerationSettings(
        model=ModelSettings(hf_config={"model_type": "qwen3"}, precision="bfloat16"),
        tokenizer=TokenizerSettings(characters="01"),
        options=given.options,
        fp8_weights=None if given.options["precision"] == "fp8" else weights,
    )
    folder = EngineFolder(full)
    with pytest.raises(ConfigError, match="needs fp8_weights with it"):
        engine_arguments(full, folder, rank=0, device="cpu")
    folder.remove()


@pytest.mark.parametrize("weights", [None, Fp8Weights(cast=("a",))])
def test_the_switch_of_the_plugin_follows_each_engine_of_a_process(weights, monkeypatch):
    monkeypatch.setattr(os, "environ", {FP8_WEIGHTS: "left by another engine"})
    folder = EngineFolder(
        GenerationSettings(
            model=ModelSettings(hf_config={"model_type": "qwen3"}, precision="bfloat16"),
            tokenizer=TokenizerSettings(characters="01"),
            fp8_weights=weights,
        )
    )
    folder.set_environment("cpu")
    assert os.environ[FP8_WEIGHTS] == ("1" if weights else "0")
    assert os.environ[KEEP_WEIGHTS] == "1"
    folder.remove()
    assert {name: value for name, value in os.environ.items() if name.startswith("NEMO_RL_VLLM_")} == {
        FP8_WEIGHTS: "left by another engine"
    }


@pytest.mark.parametrize(("weights", "steps"), [(None, ["LLM"]), (Fp8Weights(cast=("a",)), ["kernels", "LLM"])])
def test_the_worker_has_the_kernels_before_it_builds_an_engine_of_fp8_weights(weights, steps, monkeypatch):
    """In its own process, or a fork of it, vLLM runs plugins no second time; nor at all where VLLM_PLUGINS leaves them out."""
    done: list[str] = []
    platform = SimpleNamespace(device_type="cpu", is_fp8_fnuz=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **_: done.append("LLM")))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setattr(worker, "keep_weights_loadable", lambda: done.append("kernels"))
    made = object.__new__(worker.VllmGenerationWorker)
    made.settings = replace(settings(precision="fp8" if weights else "auto"), fp8_weights=weights)
    made.rank, made.device, made._folder = 0, "cpu", SimpleNamespace(path="folder")
    made._start()
    assert done == steps


@pytest.mark.parametrize(("words", "is_told"), [("Failed to find a kernel that can implement it", True), ("no", False)])
def test_an_engine_without_kernels_names_the_plugin_that_brings_them(words, is_told):
    model = ModelSettings(hf_config={"model_type": "qwen3"}, precision="bfloat16")
    folder = EngineFolder(GenerationSettings(model=model, tokenizer=TokenizerSettings(characters="01")))
    told = str(failure(ValueError(words), "start", "vllm 0.32.0", folder))
    folder.remove()
    assert ("'nemo_rl_keep_weights'" in told and "VLLM_PLUGINS" in told) == is_told


WIDE = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def chosen(**options: object) -> ChosenBackend:
    """What the driver settles by the entry point of this backend."""
    model = ModelSettings(hf_config=WIDE, precision="bfloat16", max_total_sequence_length=8)
    given = GenerationSettings(model=model, tokenizer=TokenizerSettings(characters="01"))
    return choose_backend("vllm", {"vllm_cfg": options}, given)


def test_the_driver_settles_the_list_by_the_names_of_the_real_model():
    """Q40, Q44: before any worker starts; core knows neither the section nor its keys."""
    weights = chosen(precision="fp8", quantization_ignored_layer_kws=("layers.1",)).fp8_weights
    assert weights is not None
    assert weights.cast == tuple(f"model.layers.0.{part}" for part in PARTS)
    assert set(weights.ignored) == {"model.embed_tokens", *(f"model.layers.1.{part}" for part in PARTS)}
    assert chosen().fp8_weights is None


def test_a_generation_node_settles_it_for_a_driver_without_the_adapter():
    """Its answer crosses to the driver, which has core alone; the model's folder is the driver's, sent as files."""
    folder = "/a/folder/of/the/driver"
    given = GenerationSettings(
        model=ModelSettings(folder=folder, precision="bfloat16", max_total_sequence_length=8),
        tokenizer=TokenizerSettings(characters="01"),
        files={folder: {"config.json": json.dumps(WIDE).encode()}},
    )
    question = pickle.dumps(("vllm", {"vllm_cfg": {"precision": "fp8"}}, given))
    answer = _describe(current_interpreter().versions["nemo-rl-core"], question)
    weights = pickle.loads(answer["chosen"]).fp8_weights
    assert weights.cast == tuple(f"model.layers.{layer}.{part}" for layer in range(2) for part in PARTS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization_ignored_layer_kws": ["layers.2"]}, "'layers.2' hits no module"),
        ({"tensor_parallel_size": 2}, "64 columns of it .*down_proj|64 rows of it .*gate_proj"),
    ],
)
def test_what_does_not_fit_the_real_model_is_refused_before_any_worker_starts(options, words):
    """Q38, Q40."""
    with pytest.raises(ConfigError, match=words):
        chosen(precision="fp8", **options)


QWEN2_MOE = {"model_type": "qwen2_moe", "intermediate_size": 512, "shared_expert_intermediate_size": 192}
QWEN3_MOE = {"model_type": "qwen3_moe", "intermediate_size": 320, "mlp_only_layers": [0]}
FEW_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


@pytest.mark.parametrize(
    ("config", "ranks", "advice"),
    [
        (QWEN2_MOE, 1, ["shared_expert.gate_up_proj"]),
        (QWEN2_MOE, 2, ["shared_expert.gate_up_proj", "shared_expert.down_proj"]),
        (QWEN3_MOE, 1, ["mlp.gate_up_proj"]),
        (QWEN3_MOE, 2, ["mlp.gate_up_proj", "mlp.down_proj"]),
    ],
)
def test_the_way_out_of_a_cut_block_is_accepted_and_leaves_the_experts_cast(config, ranks, advice, monkeypatch):
    """What the message says is followed word by word."""
    shape = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    for key, value in {**shape, **FEW_EXPERTS, **config}.items():
        monkeypatch.setitem(WIDE, key, value)
    given = {
        "precision": "fp8",
        "tensor_parallel_size": ranks,
        "quantization_ignored_layer_kws": ["layers.1.self_attn"],
    }
    with pytest.raises(ConfigError) as refused:
        chosen(**given)
    told = re.search(r"quantization_ignored_layer_kws: \[(.*)\]", str(refused.value))
    assert told is not None
    given["quantization_ignored_layer_kws"] = told[1].split(", ")
    assert given["quantization_ignored_layer_kws"] == ["layers.1.self_attn", *advice]
    weights = chosen(**given).fp8_weights
    assert any(".experts." in name for name in weights.cast)
    assert not any(".experts." in name for name in weights.ignored)


def at(name: str, rows: int, columns: int = 256) -> dict[str, tuple[int, int]]:
    return {f"model.layers.0.{name}": (rows, columns), "model.layers.0.ok.down_proj": (256, 512)}


@pytest.mark.parametrize(
    ("found", "ranks", "words"),
    [
        (at("self_attn.qkv_proj", 4 * 96 + 4 * 96), 1, r"parts of 384, 192, 192 rows .*\[qkv_proj\]"),
        (at("mlp.gate_up_proj", 640), 1, r"parts of 320, 320 rows .*\[gate_up_proj\]"),
        (at("mlp.gate_up_proj", 512), 4, r"64 rows of it .*take fewer"),
        (at("mlp.fc1", 320), 2, "160 rows of it"),
        (at("mlp.c_fc", 320), 2, "160 rows of it"),
        (at("self_attn.q_b_proj", 192), 2, "96 rows of it"),
        (at("self_attn.kv_b_proj", 192), 2, "96 rows of it"),
        (at("mlp.fc2", 256, 320), 2, "160 columns of it"),
        (at("mlp.c_proj", 256, 320), 2, "160 columns of it"),
        (at("self_attn.out_proj", 256, 320), 2, "160 columns of it"),
        (at("linear_attn.in_proj_z", 320), 2, "160 rows of it"),
        (at("linear_attn.in_proj_qkv", 320), 1, r"320 rows, .*\[in_proj_qkvz\]"),
        (at("self_attn.q_a_proj", 192), 1, r"192 rows, .*\[fused_qkv_a_proj\]"),
        (at("self_attn.dense", 320), 2, r"not known whether rows or columns .*take fewer ranks, or .*\[dense\]"),
    ],
)
def test_each_kind_of_layer_that_vllm_shares_out_or_fuses_is_checked(found, ranks, words):
    with pytest.raises(ConfigError, match=words):
        settle(found, tensor_parallel_size=ranks)


@pytest.mark.parametrize(
    ("found", "ranks"),
    [
        (at("self_attn.qkv_proj", 8 * 128), 1),
        (at("mlp.gate_up_proj", 512), 2),
        (at("mlp.c_fc", 320, 320), 1),
        (at("self_attn.dense", 512, 512), 2),
        (at("self_attn.dense", 320, 320), 1),
        (at("self_attn.q_a_proj", 128, 320), 2),
        (at("self_attn.kv_a_proj_with_mqa", 192), 2),
    ],
)
def test_what_cuts_no_block_passes(found, ranks):
    assert len(settle(found, tensor_parallel_size=ranks).cast) == 2


def test_the_fused_parts_of_phi_3_may_end_inside_a_block_where_the_scales_still_follow_one_another():
    """Parts of 384, 96 and 96 rows: three blocks and one for each, which is what the whole layer has."""
    model = replace(MODEL, hf_config={**MODEL.hf_config, "num_key_value_heads": 1})
    given = replace(settings(), model=model)
    assert len(fp8_weights(given, lambda: at("self_attn.qkv_proj", 576)).cast) == 2


def test_fewer_ranks_are_advised_only_where_they_help():
    found = shapes({**ATTENTION, "k_proj": (64, 256), "v_proj": (64, 256)})
    with pytest.raises(ConfigError, match=r"\[64, 256\]; keep it"):
        settle(found, tensor_parallel_size=2)


def test_experts_in_one_tensor_are_refused():
    """No pattern would reach what vLLM calls them."""
    with pytest.raises(
        ConfigError, match=r"cannot be had for this model yet: .*input_linear', \[4, 512, 256\]\), .* auto"
    ):
        settle({**shapes(), "model.layers.0.moe.input_linear": (4, 512, 256)})


def test_malformed_patterns_are_told_with_the_section():
    for patterns in (("re:.*",), ("mlp", "mlp")):
        with pytest.raises(ConfigError, match=r"policy\.generation\.vllm_cfg: quantization_ignored_layer_kws holds"):
            settle(quantization_ignored_layer_kws=patterns)


@pytest.mark.parametrize(
    ("live", "sent", "words"),
    [
        (["a", "experts.0.w"], ["a"], r"'experts\.0\.w' is FP8 in the engine, .* cannot be refitted .*to auto$"),
        (["a"], ["a", "b"], r"'b' is cast to FP8 by the sender, .*quantization_ignored_layer_kws"),
    ],
)
def test_a_pattern_is_advised_only_where_one_can_hit(live, sent, words):
    spec = TensorSpec(name="", shape=(1,), dtype="float8_e4m3fn")
    parts = {f"{name}.weight": _Part(spec=spec, parameter=name, share=(), read=lambda: torch.zeros(1)) for name in live}
    with pytest.raises(RuntimeError, match=words):
        _require_fp8(parts, sent)


def test_the_block_is_that_of_the_cast():
    assert BLOCK == blockwise.BLOCK
