# SPDX-License-Identifier: Apache-2.0
"""What the engine does with each spelling of a scale key, row by row of the table of observations."""

import csv
from pathlib import Path

import pytest

from nemo_rl_core.errors import ScaleNameError
from nemo_rl_core.fp8.checkpoint_keys import fate_of_key
from tests.core.fp8.families import CONFIGS, description_of

TABLE = Path(__file__).parent / "kv_scale_names.csv"

STANDARD = (
    *("LlamaForCausalLM", "Phi3ForCausalLM", "GraniteForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM"),
)
GLM = ("Glm4MoeForCausalLM",)
STANDARD_BUT_GLM = tuple(name for name in STANDARD if name not in GLM)
OSS, NEMOTRON, GPT2 = ("GptOssForCausalLM",), ("NemotronHForCausalLM",), ("GPT2LMHeadModel",)
QWEN3_5, NEXT = ("Qwen3_5ForConditionalGeneration",), ("Qwen3NextForCausalLM",)
VISION = ("Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration")
OLD_PREFIX = ("Qwen2_5_VLForConditionalGeneration", "Llama4ForConditionalGeneration")
MLA, WHISPER, OPT = ("DeepseekV3ForCausalLM",), ("WhisperForConditionalGeneration",), ("OPTForCausalLM",)
STACKED = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "FalconH1ForCausalLM")
SHARED, BLOOM = ("Gemma3nForCausalLM", "Gemma4ForCausalLM"), ("BloomForCausalLM",)
FALCON, JAMBA = ("FalconForCausalLM",), ("JambaForCausalLM",)
FP8, MODELOPT, TENSORS = "fp8", "modelopt", "compressed-tensors"
A, LIVE = "model.layers.0.self_attn", "model.layers.0.self_attn.attn"
ALL = (FP8, MODELOPT, TENSORS)

#: Row of the table to its observations: families, key, configs, fate, and the target where it loads.
ROWS: dict[int, list[tuple]] = {
    1: [(STANDARD, f"{A}.{kind}_scale", ALL, "loads", f"{LIVE}.{kind}_scale") for kind in "kv"],
    2: [(STANDARD, f"{A}.q_scale", ALL, "loads", f"{LIVE}.q_scale")],
    3: [(STANDARD, f"{LIVE}.q_scale", ALL, "loads", f"{LIVE}.q_scale")],
    4: [(STANDARD, f"{LIVE}.{kind}_scale", ALL, "loads", f"{LIVE}.{kind}_scale") for kind in "kv"],
    5: [(STANDARD, f"{A}.{kind}_proj.{kind}_scale", ALL, "loads", f"{LIVE}.{kind}_scale") for kind in "kv"],
    6: [(STANDARD, f"{A}.k_proj.v_scale", ALL, "loads", f"{LIVE}.v_scale")],
    7: [(STANDARD, f"{A}.q_proj.q_scale", ALL, "refused", None)],
    8: [
        *((STANDARD, f"{A}.{kind}_proj.output_scale", (FP8,), "loads", f"{LIVE}.{kind}_scale") for kind in "qkv"),
        (("Qwen3ForCausalLM",), f"{A}.k_proj.output_scale", (MODELOPT, TENSORS), "refused", None),
        (("LlamaForCausalLM",), f"{A}.k_proj.output_scale", (MODELOPT, TENSORS), "unknown", None),
    ],
    9: [
        (STANDARD, f"{A}.qkv_proj.k_scale", ALL, "loads", f"{LIVE}.k_scale"),
        (STANDARD, f"{A}.qkqkv_proj.v_scale", ALL, "loads", f"{LIVE}.v_scale"),
    ],
    10: [(STANDARD, f"{A}.kv_scale", ALL, "loads", f"{LIVE}.k_scale")],
    # Only the mapper was run for this row; the whole loader goes on to raise.
    11: [(STANDARD, f"{LIVE}.kv_scale", ALL, "refused", None)],
    12: [(STANDARD, f"{A}.prob_scale", ALL, "refused", None)],
    13: [
        (STANDARD, f"{LIVE}.prob_scale", (FP8, MODELOPT), "loads", f"{LIVE}.prob_scale"),
        (STANDARD, f"{LIVE}.prob_scale", (TENSORS,), "refused", None),
    ],
    14: [
        (STANDARD, f"{A}.prob_output_scale", (FP8,), "loads", f"{LIVE}.prob_scale"),
        (STANDARD, f"{A}.prob_output_scale", (MODELOPT,), "refused", None),
    ],
    15: [
        (STANDARD, f"{A}.q.scale", ALL, "loads", f"{LIVE}.q_scale"),
        (STANDARD, f"{A}.k_cache.scale", ALL, "loads", f"{LIVE}.k_scale"),
        (STANDARD, f"{A}.v_cache.scale", ALL, "loads", f"{LIVE}.v_scale"),
    ],
    16: [
        (STANDARD_BUT_GLM, f"{A}.k_zero_point", (FP8, TENSORS), "dropped", None),
        (GLM, f"{A}.k_zero_point", (FP8,), "refused", None),
        (GLM, f"{A}.k_zero_point", (TENSORS,), "dropped", None),
    ],
    17: [(STANDARD, f"{LIVE}._k_scale", ALL, "stale", None)],
    18: [
        (STANDARD_BUT_GLM, "model.layers.9.self_attn.k_scale", ALL, "refused", None),
        (GLM, "model.layers.9.self_attn.k_scale", ALL, "unknown", None),
    ],
    19: [
        (OSS, f"{A}.k_scale", ALL, "loads", "model.layers.0.attn.attn.k_scale"),
        (OSS, f"{A}.attn.q_scale", ALL, "loads", "model.layers.0.attn.attn.q_scale"),
        (OSS, f"{A}.k_proj.k_scale", ALL, "loads", "model.layers.0.attn.attn.k_scale"),
        (OSS, f"{A}.k_proj.output_scale", (FP8,), "loads", "model.layers.0.attn.attn.k_scale"),
    ],
    20: [
        (OSS, "model.layers.9.self_attn.k_scale", ALL, "dropped", None),
        (OSS, f"{A}.prob_scale", ALL, "dropped", None),
        (OSS, f"{A}.prob_output_scale", ALL, "dropped", None),
        (OSS, f"{A}.attn._k_scale", ALL, "dropped", None),
    ],
    22: [
        (NEMOTRON, "backbone.layers.1.mixer.k_scale", ALL, "loads", "model.layers.1.mixer.attn.k_scale"),
        (NEMOTRON, "backbone.layers.1.mixer.q_scale", ALL, "loads", "model.layers.1.mixer.attn.q_scale"),
        (NEMOTRON, "backbone.layers.1.mixer.k_proj.k_scale", ALL, "loads", "model.layers.1.mixer.attn.k_scale"),
        (NEMOTRON, "model.layers.1.mixer.k_scale", ALL, "loads", "model.layers.1.mixer.attn.k_scale"),
    ],
    24: [
        *((NEMOTRON, f"model.layers.{n}.self_attn.k_scale", ALL, "refused", None) for n in (0, 1)),
        (NEMOTRON, "model.layers.1.mixer.qkv_proj.k_scale", ALL, "refused", None),
    ],
    25: [
        (STACKED, f"{A}.k_proj.output_scale", (FP8,), "refused", None),
        ((*OPT, *WHISPER), "model.decoder.layers.0.self_attn.k_proj.output_scale", (FP8,), "refused", None),
        (NEMOTRON, "model.layers.1.mixer.k_proj.output_scale", (FP8,), "refused", None),
    ],
    26: [(GPT2, "transformer.h.0.attn.k_scale", ALL, "refused", None)],
    27: [(GPT2, "transformer.h.0.attn.attn.k_scale", ALL, "loads", "transformer.h.0.attn.attn.k_scale")],
    28: [
        (families, f"{path}.{form}k_scale", configs, fate, f"{path}.attn.k_scale" if fate == "loads" else None)
        for path in ("transformer.h.0.self_attention",)
        for form in ("", "attn.")
        for families, configs, fate in (
            (BLOOM, ALL, "loads"),
            (FALCON, (TENSORS,), "loads"),
            # The key is taken, and the cache is not FP8.
            (FALCON, (FP8, MODELOPT), "dropped"),
        )
    ],
    29: [
        (
            (*OPT, *WHISPER),
            "model.decoder.layers.0.self_attn.k_scale",
            ALL,
            "loads",
            "model.decoder.layers.0.self_attn.attn.k_scale",
        ),
        (
            WHISPER,
            "model.decoder.layers.0.encoder_attn.k_scale",
            ALL,
            "loads",
            "model.decoder.layers.0.encoder_attn.attn.k_scale",
        ),
        (WHISPER, "model.decoder.layers.0.encoder_attn.k_proj.k_scale", ALL, "refused", None),
    ],
    30: [
        *(
            (MLA, f"{A}.{form}", (MODELOPT, TENSORS), "dropped", None)
            for form in (
                *("k_scale", "k_proj.k_scale", "attn.k_scale", "kv_b_proj.k_scale", "kv_scale"),
                "mla_attn.mla_attn.k_scale",
            )
        ),
        (MLA, f"{A}.mla_attn.mla_attn.prob_scale", (MODELOPT,), "loads", f"{A}.mla_attn.mla_attn.prob_scale"),
    ],
    31: [
        *((MLA, f"{A}.{form}k_scale", (FP8,), "dropped", None) for form in ("", "attn.", "mla_attn.mla_attn.")),
        *((MLA, f"{A}.{form}prob_scale", (FP8, TENSORS), "refused", None) for form in ("", "mla_attn.mla_attn.")),
    ],
    32: [
        (VISION, "model.language_model.layers.0.self_attn.k_scale", ALL, "loads", f"language_model.{LIVE}.k_scale"),
        (
            QWEN3_5,
            "model.language_model.layers.3.self_attn.k_scale",
            ALL,
            "loads",
            "language_model.model.layers.3.self_attn.attn.k_scale",
        ),
    ],
    33: [
        (VISION, f"{A}.k_scale", ALL, "refused", None),
        (QWEN3_5, "model.layers.3.self_attn.k_scale", ALL, "refused", None),
    ],
    34: [(OLD_PREFIX, f"{A}.k_scale", ALL, "loads", f"language_model.{LIVE}.k_scale")],
    35: [
        (NEXT, f"{A}.k_scale", ALL, "refused", None),
        (QWEN3_5, "model.language_model.layers.0.self_attn.k_scale", ALL, "refused", None),
        (QWEN3_5, f"language_model.{A}.k_scale", ALL, "refused", None),
    ],
    36: [(SHARED, "model.layers.2.self_attn.k_scale", ALL, "loads", "model.layers.2.self_attn.attn.k_scale")],
}
#: About a release that the adapter does not take, and about all families (a test of its own).
ELSEWHERE = {21, 23, 37}
CASES = [pytest.param(seen, id=f"{row}-{seen[1]}") for row, observations in ROWS.items() for seen in observations]


def test_every_row_of_the_table_is_a_case() -> None:
    assert {int(row["row"]) for row in csv.DictReader(TABLE.open(encoding="utf-8"))} == {*ROWS, *ELSEWHERE}


@pytest.mark.parametrize("seen", CASES)
def test_a_key_has_the_fate_that_was_observed(seen: tuple) -> None:
    """Q1, Q4, Q5, Q6, Q8, Q11: what loads, what is dropped without a word, and what ends the load."""
    families, key, configs, fate, target = seen
    for architecture in families:
        for config in configs:
            found = fate_of_key(key, description_of(architecture), config=config)
            assert (found.fate, found.target) == (fate, target), (architecture, config)
            assert found.why


@pytest.mark.parametrize("form", ["attn.k_scale", "self_attn.v_scale", "self_attn.attn.q_scale"])
def test_jamba_takes_no_scale_under_any_name(form: str) -> None:
    """Q7: its attention is built without the config that makes scale parameters."""
    for config in ALL:
        assert fate_of_key(f"model.layers.2.{form}", description_of(*JAMBA), config=config).fate == "refused"


@pytest.mark.parametrize("architecture", [name for name in CONFIGS if name not in (*MLA, *JAMBA)])
def test_a_live_name_loads_as_it_is(architecture: str) -> None:
    """Q6: row 37, the names that we send are fixed points of the loader."""
    model = description_of(architecture)
    for name in model.checkpoint_names(include_q=True):
        found = fate_of_key(name, model, config=TENSORS)
        assert (found.fate, found.target) == ("loads", name)


@pytest.mark.parametrize(
    ("architecture", "fates"),
    [
        *((name, {"loads"}) for name in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM", *OSS)),
        ("Qwen2_5_VLForConditionalGeneration", {"loads"}),
        (*NEXT, {"loads", "refused"}),
        *(
            (name, {"refused"})
            for name in (*NEMOTRON, "Qwen3VLForConditionalGeneration", *GPT2, "FalconForCausalLM", *OPT)
        ),
        (*MLA, {"dropped"}),
    ],
)
def test_the_three_names_of_nemo_rl_load_in_some_families_only(architecture: str, fates: set[str]) -> None:
    model = description_of(architecture)
    found = {
        (layer, fate_of_key(f"model.layers.{layer}.self_attn.{form}_scale", model).fate)
        for layer in range(max(model.blocks[0].layers) + 1)
        for form in ("attn.q", "k", "v")
    }
    assert {fate for _, fate in found} == fates
    if architecture == "Qwen3NextForCausalLM":
        assert {layer for layer, fate in found if fate == "loads"} == set(model.blocks[0].layers)


@pytest.mark.parametrize("key", ["model.layers.0.self_attn.k_scales", "model.layers.0.mlp.k_scale", "h.0.attn.k_scale"])
def test_what_was_never_tried_is_unknown_and_not_taken_for_good(key: str) -> None:
    found = fate_of_key(key, description_of("LlamaForCausalLM"))
    assert found.fate == "unknown"
    assert "send the live name" in found.why


@pytest.mark.parametrize(
    "key", ["", "k_scale", "model.layers.00.self_attn.k_scale", "model.layers.٣.a.k_scale", None, 3]
)
def test_a_key_without_a_layer_is_refused(key: object) -> None:
    with pytest.raises(ScaleNameError, match="a scale key is"):
        fate_of_key(key, description_of("LlamaForCausalLM"))  # type: ignore[arg-type]


def test_another_config_is_refused() -> None:
    with pytest.raises(ScaleNameError, match="config must be one of fp8, modelopt, compressed-tensors, got 'quark'"):
        fate_of_key("model.layers.0.self_attn.k_scale", description_of("LlamaForCausalLM"), config="quark")  # type: ignore[arg-type]
