# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a model's attention: from a configuration or by hand, complete, and refused where a fact is missing."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.errors import ModelError, ScaleNameError
from nemo_rl_core.fp8.model_description import AttentionBlock, ModelDescription
from nemo_rl_core.fp8.model_families import SUPPORTED_ARCHITECTURES, describe_model
from nemo_rl_core.fp8.scale_names import convert_calibration_to_vllm_format, convert_vllm_format_to_calibration
from tests.core.fp8.families import CONFIGS, config_of, description_of

TABLE = Path(__file__).parent / "kv_scale_live_names.csv"
#: Labels of the table where they are not the architecture with something cut off.
LABELS = {
    "Llama": ["LlamaForCausalLM"],
    "Phi3": ["Phi3ForCausalLM"],
    "Granite": ["GraniteForCausalLM"],
    "Qwen2": ["Qwen2ForCausalLM"],
    "Qwen3": ["Qwen3ForCausalLM"],
    "Qwen3-MoE": ["Qwen3MoeForCausalLM"],
    "Mixtral": ["MixtralForCausalLM"],
    "GLM4-MoE": ["Glm4MoeForCausalLM"],
    "Gemma/2/3 text": ["GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"],
    "Falcon-H1": ["FalconH1ForCausalLM"],
    "Gemma3n text": ["Gemma3nForCausalLM"],
    "Gemma4 text": ["Gemma4ForCausalLM"],
    "GPT-OSS": ["GptOssForCausalLM"],
    "Nemotron-H": ["NemotronHForCausalLM"],
    "Qwen3-Next": ["Qwen3NextForCausalLM"],
    "Qwen3.5 (conditional-generation class)": ["Qwen3_5ForConditionalGeneration"],
    "Qwen2.5-VL": ["Qwen2_5_VLForConditionalGeneration"],
    "Qwen3-VL": ["Qwen3VLForConditionalGeneration"],
    "Gemma3-MM": ["Gemma3ForConditionalGeneration"],
    "Llava": ["LlavaForConditionalGeneration"],
    "Llama4-MM": ["Llama4ForConditionalGeneration"],
    "GPT-2": ["GPT2LMHeadModel"],
    "Falcon": ["FalconForCausalLM"],
    "Bloom": ["BloomForCausalLM"],
    "OPT": ["OPTForCausalLM"],
    "Whisper": ["WhisperForConditionalGeneration"],
    "DeepSeek-V3 (MLA) with quantization=modelopt": ["DeepseekV3ForCausalLM"],
}
#: No names of their own: no parameters exist, or every family has these.
WITHOUT = {
    "DeepSeek-V3 (MLA) with quantization=fp8": ["DeepseekV3ForCausalLM"],
    "Jamba": ["JambaForCausalLM"],
    "any, with compressed-tensors kv_cache_scheme": [],
}


def block(**changes: Any) -> AttentionBlock:
    return AttentionBlock(**{"prefix": "model.layers", "module": "self_attn.attn", "layers": (0, 1, 2, 3), **changes})


def described(*blocks: AttentionBlock) -> ModelDescription:
    return ModelDescription(architecture="MyForCausalLM", blocks=blocks)


def result_of(layers: tuple[int, ...], *, q: bool = False) -> dict[str, dict[str, float]]:
    """Different values everywhere, none of them exact in bfloat16."""
    kinds = ("q_scale", "k_scale", "v_scale") if q else ("k_scale", "v_scale")
    return {f"layer_{layer}": {kind: 0.0123456 + layer + n / 10 for n, kind in enumerate(kinds)} for layer in layers}


def live_patterns() -> dict[str, list[str]]:
    """Return the table: family to owners with N for the layer."""
    found: dict[str, list[str]] = {}
    patterns: list[str] = []
    for row in csv.DictReader(TABLE.open(encoding="utf-8")):
        text = row["live_parameter_names_vllm_0.32"].replace("…encoder_attn", "model.decoder.layers.N.encoder_attn")
        if text != "same":
            patterns = re.findall(r"[a-z_.]+\.N\.[a-z_]+(?:\.[a-z_]+)*(?=\.[*{])", text)
        families = [row["family"]] if row["family"] in {*LABELS, *WITHOUT} else row["family"].split(", ")
        for family in families:
            found[family] = patterns
    return found


def test_every_family_of_the_table_is_one_that_is_known() -> None:
    families = live_patterns()
    assert set(families) == {*LABELS, *WITHOUT}
    known = {name for names in (*LABELS.values(), *WITHOUT.values()) for name in names}
    assert known == set(SUPPORTED_ARCHITECTURES) == set(CONFIGS)


@pytest.mark.parametrize("label", LABELS)
def test_the_owners_are_those_of_the_table(label: str) -> None:
    """Q1, Q2, Q3, Q6, Q8: every family's live names, and only for layers that have attention."""
    patterns = live_patterns()[label]
    assert patterns
    for architecture in LABELS[label]:
        model = description_of(architecture)
        owners = [
            pattern.replace(".N.", f".{layer}.")
            for pattern, part in zip(patterns, model.blocks, strict=True)
            for layer in part.layers
        ]
        assert list(model.owners()) == owners
        assert list(model.names()) == [f"{owner}.{kind}_scale" for owner in owners for kind in "kv"]
        assert list(model.names(include_q=True)) == [f"{owner}.{kind}_scale" for owner in owners for kind in "qkv"]


@pytest.mark.parametrize("label", [label for label, names in WITHOUT.items() if names])
def test_where_the_engine_loads_no_scales_a_checkpoint_is_refused_in_one_line(label: str) -> None:
    """Q7: set directly or refused, and never 1.0 without a word."""
    assert live_patterns()[label] == []
    model = description_of(WITHOUT[label][0])
    assert model.names()
    with pytest.raises(ScaleNameError, match=r"run at 1\.0; set the buffers") as caught:
        model.checkpoint_names()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("label", [label for label in LABELS if "MLA" not in label])
def test_elsewhere_a_checkpoint_holds_all_names(label: str) -> None:
    for architecture in LABELS[label]:
        model = description_of(architecture)
        assert model.checkpoint_names(include_q=True) == model.names(include_q=True)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_config_json_gives_what_its_object_gives(architecture: str) -> None:
    config = config_of(architecture)
    plain = json.loads(json.dumps(config.to_dict(), default=str))
    assert describe_model(plain) == describe_model(config)
    del plain["architectures"]
    with pytest.raises(ModelError, match="architectures must name one class"):
        describe_model(plain)
    assert describe_model(plain, architecture=architecture) == describe_model(config)


def test_a_hybrid_model_has_scales_for_its_attention_layers_alone() -> None:
    """Q2: the count is that of the full-attention layers."""
    assert description_of("Qwen3NextForCausalLM").blocks[0].layers == (3, 7)
    assert description_of("NemotronHForCausalLM").blocks[0].layers == (1, 5)
    assert description_of("JambaForCausalLM").blocks[0].layers == (2, 6)
    terse = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 7}
    assert describe_model({**terse, "full_attention_interval": 3}).blocks[0].layers == (2, 5)
    with pytest.raises(ModelError, match=r"full_attention_interval is missing; .*AutoConfig"):
        describe_model(terse)
    pattern = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
    assert describe_model({**pattern, "hybrid_override_pattern": "*M-E*"}).blocks[0].layers == (0, 4)
    old = ["mamba", "attention", "moe"]
    assert describe_model({**pattern, "layers_block_type": old}).blocks[0].layers == (1,)


@pytest.mark.parametrize("architecture", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_layers_that_share_a_cache_have_scales_of_their_own(architecture: str) -> None:
    """Q9: four layers, two of which read, and sixteen live parameters (prob among them)."""
    part = description_of(architecture).blocks[0]
    assert part.shares == ((2, 0), (3, 1))
    assert part.cache_layers == (0, 1)
    assert len(part.names(include_q=True)) == 12


def test_gemma_4_shares_with_the_last_layer_of_the_same_kind() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": kinds,
    }
    assert describe_model(config).blocks[0].shares == ((3, 0), (4, 2))
    alone = {**config, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2}
    with pytest.raises(ModelError, match=r"layer 3 \(full_attention\) shares a cache, and none of the first 3"):
        describe_model(alone)
    with pytest.raises(ModelError, match="must leave a layer with a cache, got 5 of 5"):
        describe_model({**config, "num_kv_shared_layers": 5})


def test_a_gemma_3n_that_engine_and_trainer_read_differently_is_refused() -> None:
    config = config_of("Gemma3nForCausalLM").to_dict()
    config["layer_types"] = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    with pytest.raises(ModelError, match=r"layer 2 reads the cache of layer 0 in transformers and of layer 1 in vLLM"):
        describe_model(config)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Qwen3NextForCausalLM", {"hidden_size": 32, "vocab_size": 64, "num_experts": 2, "moe_intermediate_size": 8}),
        ("NemotronHForCausalLM", {"hidden_size": 32, "vocab_size": 64}),
        ("JambaForCausalLM", {"hidden_size": 32, "vocab_size": 64}),
        ("Qwen3ForCausalLM", {"hidden_size": 32, "vocab_size": 64}),
        ("OPTForCausalLM", {"hidden_size": 32, "vocab_size": 64, "num_attention_heads": 4, "word_embed_proj_dim": 32}),
    ],
)
def test_the_layers_are_those_in_which_transformers_builds_attention(architecture: str, changes: dict) -> None:
    """An oracle that is not ours: the modules of a model without memory."""
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, architecture)(config_of(architecture, **changes))
    layers = {
        int(found[1])
        for name, module in model.named_modules()
        if (found := re.search(r"layers\.([0-9]+)\.[a-z_]+$", name)) and type(module).__name__.endswith("Attention")
    }
    assert layers == set(describe_model(model.config).blocks[0].layers)


@pytest.mark.parametrize("architecture", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_transformers_does_not_build_keys_for_the_layers_that_share(architecture: str) -> None:
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, architecture)(config_of(architecture))
    part = describe_model(model.config).blocks[0]
    blocks = {layer: model.get_submodule(f"model.layers.{layer}.self_attn") for layer in part.layers}
    assert {layer for layer, module in blocks.items() if module.is_kv_shared_layer} == {r for r, _ in part.shares}
    if architecture == "Gemma3nForCausalLM":
        assert {(r, blocks[r].kv_shared_layer_index) for r, _ in part.shares} == set(part.shares)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            r"'MistralForCausalLM' were never tried \(the nearest is M.*by hand",
        ),
        ({"architectures": ["Qwen3_5ForCausalLM"]}, "never tried"),
        ({"architectures": [None]}, "never tried"),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "must name one class"),
        ({"architectures": "LlamaForCausalLM"}, "must name one class"),
        ({"model_type": "mistral"}, "was tried with model_type 'llama', got 'mistral'.*by hand"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; .*AutoConfig.*by hand"),
        ({"num_hidden_layers": 0}, "at least 1, got 0"),
        ({"num_hidden_layers": True}, "got True"),
        ({"num_hidden_layers": 4.0}, r"got 4\.0"),
        ({"num_hidden_layers": "4"}, "got '4'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "'linear_attention', but this family"),
        ({"layer_types": ["full_attention"] * 3 + ["retention"]}, "kind of layer 'retention'; known are"),
        ({"layer_types": [["full_attention"]] * 4}, r"kind of layer \['full_attention'\]"),
        ({"layer_types": "full_attention"}, "must be a list"),
    ],
)
def test_a_configuration_that_leaves_something_open_is_refused(changes: dict, message: str) -> None:
    good = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4}
    assert describe_model(good).blocks[0].layers == (0, 1, 2, 3)
    with pytest.raises(ModelError, match=message):
        describe_model({**good, **changes})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*X"}, "got 'M\\*X'"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MM*M"}, "4 entries for 3 layers|disagree"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MM*"}, "disagree on the layers"),
        ("NemotronHForCausalLM", {"layers_block_type": None, "layer_types": None}, "are missing; .*AutoConfig"),
        ("NemotronHForCausalLM", {"layers_block_type": ["mamba"] * 3}, "none of its layers has attention"),
        ("Qwen3NextForCausalLM", {"layer_types": ["linear_attention"] * 3}, "3 entries for 8 layers"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("LlavaForConditionalGeneration", {"text_config": None}, "text_config is missing"),
        (
            "LlavaForConditionalGeneration",
            {"text_config": {"model_type": "opt"}},
            "text model of type llama, got 'opt'",
        ),
        (
            "LlavaForConditionalGeneration",
            {"text_config": {"model_type": "llama"}},
            r"text_config\.num_hidden_layers is",
        ),
        ("LlavaForConditionalGeneration", {"text_config": 3}, "text_config must be a configuration"),
        ("JambaForCausalLM", {"attn_layer_offset": 4}, "none of its layers has attention"),
        ("Gemma4ForCausalLM", {"layer_types": None}, "layer_types is missing"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": -1}, "at least 0, got -1"),
    ],
)
def test_what_decides_in_a_family_has_to_be_there(architecture: str, changes: dict, message: str) -> None:
    good = config_of(architecture).to_dict()
    if architecture == "NemotronHForCausalLM":
        good = {key: good[key] for key in ("architectures", "model_type")}
        good["layers_block_type"] = ["mamba", "full_attention", "moe"]
        describe_model(good)
    with pytest.raises(ModelError, match=message):
        describe_model({**good, **changes})


@pytest.mark.parametrize("config", [None, 3, "LlamaForCausalLM", [], object(), dict])
def test_what_is_no_configuration_is_refused(config: object) -> None:
    with pytest.raises(ModelError, match="must be a configuration of transformers"):
        describe_model(config, architecture="LlamaForCausalLM")


def test_an_architecture_that_contradicts_the_configuration_is_refused() -> None:
    with pytest.raises(ModelError, match="the configuration names"):
        describe_model(config_of("Qwen2ForCausalLM"), architecture="LlamaForCausalLM")


def test_an_old_qwen_vl_configuration_has_its_text_fields_at_the_top() -> None:
    flat = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "num_hidden_layers": 2}
    assert describe_model(flat).owners() == tuple(
        f"language_model.model.layers.{layer}.self_attn.attn" for layer in (0, 1)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix": "model.layers.{}"}, "prefix must be a dotted"),
        ({"module": ""}, "module must be a dotted"),
        ({"module": "self_attn.attn\n"}, "module must be a dotted"),
        ({"layers": ()}, "at least one layer"),
        ({"layers": None}, "at least one layer"),
        ({"layers": (1, 1)}, "stands there twice"),
        ({"layers": (-1,)}, "-1"),
        ({"layers": (True,)}, "truth value"),
        ({"cache": "paged"}, "cache must be one of kv, latent"),
        ({"delivery": None}, "delivery must be one of load, set"),
        ({"shares": ((9, 0),)}, "must be layers of the block"),
        ({"shares": ((3, 9),)}, "must be layers of the block"),
        ({"shares": ((3.0, 0),)}, "must be layers of the block"),
        ({"shares": ((0, 3),)}, "reads the cache of an earlier one"),
        ({"shares": ((3, 3),)}, "reads the cache of an earlier one"),
        ({"shares": ((3, 2), (2, 0))}, "layer 2 has no cache either"),
        ({"shares": ((3, 0), (3, 1))}, "layer 3 stands there twice"),
        ({"shares": ((3, 0, 1),)}, "must be pairs"),
        ({"shares": 3}, "must be pairs"),
    ],
)
def test_a_description_by_hand_is_checked(changes: dict, message: str) -> None:
    with pytest.raises(ScaleNameError, match=message):
        block(**changes)


def test_blocks_with_the_same_names_and_no_blocks_are_refused() -> None:
    with pytest.raises(ScaleNameError, match="whose names differ"):
        described(block(), block(layers=(3,)))
    with pytest.raises(ScaleNameError, match="whose names differ"):
        described()


@pytest.mark.parametrize("layer", [4, -1, True, 1.0, "1", None])
def test_a_layer_without_attention_has_no_owner(layer: object) -> None:
    assert block().owner(1) == "model.layers.1.self_attn.attn"
    with pytest.raises(ScaleNameError, match="the layers are"):
        block().owner(layer)  # type: ignore[arg-type]


@pytest.mark.parametrize("q", [False, True])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_calibration_goes_to_vllm_and_back(architecture: str, q: bool) -> None:
    """Q9, Q14: exactly the expected names, readers with the writer's values, q where it was given."""
    model = description_of(architecture)
    parts = {}
    for part in model.blocks:
        parts[part.pattern] = result_of(part.layers, q=q)
        for reader, writer in part.shares:
            for kind in ("k_scale", "v_scale"):
                parts[part.pattern][f"layer_{reader}"][kind] = parts[part.pattern][f"layer_{writer}"][kind]
        for scales in parts[part.pattern].values() if part.cache == "latent" else ():
            scales["v_scale"] = scales["k_scale"]
    results = parts if len(parts) > 1 else parts[model.blocks[0].pattern]
    flat = model.to_vllm(results)
    assert tuple(flat) == model.names(include_q=q)
    back = model.from_vllm(flat)
    assert model.to_vllm(back) == flat
    for part in model.blocks if architecture != "JambaForCausalLM" else ():
        own = {name: flat[name] for name in part.names(include_q=q)}
        grouped = back if len(parts) == 1 else back[part.pattern]
        assert convert_vllm_format_to_calibration(own, part.naming) == grouped
        assert convert_calibration_to_vllm_format(grouped, part.naming) == own
        assert convert_calibration_to_vllm_format(parts[part.pattern], part.naming) == pytest.approx(own, rel=1e-6)


def test_an_attention_module_without_a_block_around_it_has_no_naming() -> None:
    with pytest.raises(ScaleNameError, match="use ModelDescription"):
        _ = block(module="attn").naming


def test_a_reader_may_leave_out_what_is_the_writers() -> None:
    """Q9: what arrives at a reader is the writer's scale, and its own q."""
    model = described(block(shares=((2, 0), (3, 1))))
    results = result_of((0, 1, 2, 3), q=True)
    for layer in (2, 3):
        results[f"layer_{layer}"] = {"q_scale": 7.0 + layer}
    flat = model.to_vllm(results)
    for reader, writer in ((2, 0), (3, 1)):
        for kind in ("k_scale", "v_scale"):
            own = flat[f"model.layers.{reader}.self_attn.attn.{kind}"]
            assert own == flat[f"model.layers.{writer}.self_attn.attn.{kind}"]
        assert flat[f"model.layers.{reader}.self_attn.attn.q_scale"] == 7.0 + reader
    assert tuple(model.to_vllm(result_of((0, 1)))) == model.names()
    with pytest.raises(ScaleNameError, match=r"'layer_2.v_scale' is 9.0, but layer 2 reads the cache that layer 0"):
        model.to_vllm({**result_of((0, 1)), "layer_2": {"v_scale": 9.0}})


def test_q_is_there_for_all_layers_or_for_none() -> None:
    """Q13, Q14: one layer without q would run at 1.0 among calibrated ones."""
    results = result_of((0, 1, 2, 3), q=True)
    del results["layer_2"]["q_scale"]
    with pytest.raises(ScaleNameError, match=r"1 missing, the first 'model\.layers\.2\.self_attn\.attn\.q_scale'"):
        described(block()).to_vllm(results)


@given(data=st.data(), q=st.booleans())
def test_a_set_that_lacks_a_name_or_has_one_more_is_refused(data: st.DataObject, q: bool) -> None:
    """Q4, Q24: expected and given are equal, in both directions."""
    model = described(block(shares=((2, 0),)))
    own_q = {"layer_2": {"q_scale": 1.0}} if q else {}
    flat = model.to_vllm({**result_of((0, 1, 3), q=q), **own_q})
    lost = data.draw(st.sets(st.sampled_from(model.names()), min_size=1, max_size=3))
    with pytest.raises(ScaleNameError) as caught:
        model.from_vllm({name: value for name, value in flat.items() if name not in lost})
    assert repr(next(name for name in model.names() if name in lost)) in str(caught.value)
    with pytest.raises(ScaleNameError, match=r"does not have, the first 'model\.layers\.9"):
        model.from_vllm({**flat, "model.layers.9.self_attn.attn.k_scale": 1.0})


def test_names_that_are_live_are_compared_in_both_directions() -> None:
    model = described(block())
    model.require(reversed(model.names()), what="live")
    with pytest.raises(ScaleNameError, match=r"the live scales .* exactly its 8 names \(k and v\), got 12: 4 that"):
        model.require(model.names(include_q=True), what="live")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), True, "0.5", None])
def test_an_impossible_scale_is_refused_with_its_layer(bad: object) -> None:
    """Q18, Q19."""
    model = described(block(shares=((3, 1),)))
    results: Any = result_of((0, 1, 2))
    results["layer_1"]["v_scale"] = bad
    with pytest.raises(ScaleNameError, match=r"'layer_[13]\.v_scale'"):
        model.to_vllm(results)
    flat: Any = model.to_vllm(result_of((0, 1, 2)))
    flat["model.layers.2.self_attn.attn.k_scale"] = bad
    with pytest.raises(ScaleNameError, match=r"'layer_2\.k_scale'"):
        model.from_vllm(flat)


@pytest.mark.parametrize("results", [None, [], {"layers": {}}, {"layer_0": None}, {}])
def test_what_is_no_calibration_result_is_refused(results: Any) -> None:
    with pytest.raises(ScaleNameError):
        described(block(shares=((2, 0),))).to_vllm(results)
    with pytest.raises(ScaleNameError):
        described(block()).from_vllm(results)


def test_two_blocks_in_a_layer_need_two_results() -> None:
    model = description_of("WhisperForConditionalGeneration")
    with pytest.raises(ScaleNameError, match=r"2 attention blocks in a layer.*encoder_attn\.attn.*got \['layer_0'"):
        model.to_vllm(result_of((0, 1, 2, 3)))


def test_a_latent_has_one_scale() -> None:
    """Q7, Q8: k and v that were measured on the unpacked heads are not the cached latent's."""
    model = description_of("DeepseekV3ForCausalLM")
    with pytest.raises(ScaleNameError, match=r"layer 0 caches one latent \(MLA\)"):
        model.to_vllm(result_of((0, 1, 2, 3)))


def test_values_are_never_below_the_calibrated_ones() -> None:
    model = described(block())
    results = result_of((0, 1, 2, 3), q=True)
    for kept_as in ("float32", "bfloat16", "float16"):
        flat = model.to_vllm(results, kept_as=kept_as)
        pairs = [
            (scales[kind], flat[f"model.layers.{key.removeprefix('layer_')}.self_attn.attn.{kind}"])
            for key, scales in results.items()
            for kind in scales
        ]
        assert all(before <= after <= before * 1.01 for before, after in pairs)


def test_describing_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from nemo_rl_core.fp8.model_families import describe_model;"
        "describe_model({'architectures': ['OPTForCausalLM'], 'model_type': 'opt', 'num_hidden_layers': 2});"
        "import nemo_rl_core.fp8.checkpoint_keys;"
        "print({'torch', 'numpy', 'transformers', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
