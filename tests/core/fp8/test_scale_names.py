# SPDX-License-Identifier: Apache-2.0
"""Scale names: injective, total, invertible, and loud about everything malformed."""

import dataclasses
import math
import pickle
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_rl_core.errors import ScaleNameError
from nemo_rl_core.fp8.scale_names import (
    LLAMA_LIKE,
    AttentionNaming,
    ScaleKey,
    convert_calibration_to_vllm_format,
    convert_vllm_format_to_calibration,
    get_vllm_qkv_scale_names,
    parse_vllm_scale_name,
)
from tests.strategies import attention_namings, calibration_results, scale_values

KINDS = ("q_scale", "k_scale", "v_scale")


def good(**scales: object) -> dict:
    """One layer's result, with changes."""
    return {"k_scale": 0.5, "v_scale": 0.25, **scales}


def test_the_three_names_are_those_that_nemo_rl_users_know() -> None:
    assert get_vllm_qkv_scale_names(7) == {
        "q_scale": "model.layers.7.self_attn.attn.q_scale",
        "k_scale": "model.layers.7.self_attn.k_scale",
        "v_scale": "model.layers.7.self_attn.v_scale",
    }


def test_a_calibration_result_becomes_a_flat_dict() -> None:
    result = {"layer_10": good(q_scale=0.125), "layer_2": good()}
    flat = convert_calibration_to_vllm_format(result)
    assert list(flat.items()) == [
        ("model.layers.2.self_attn.k_scale", 0.5),
        ("model.layers.2.self_attn.v_scale", 0.25),
        ("model.layers.10.self_attn.attn.q_scale", 0.125),
        ("model.layers.10.self_attn.k_scale", 0.5),
        ("model.layers.10.self_attn.v_scale", 0.25),
    ]


@pytest.mark.parametrize(
    ("naming", "live"),
    [
        (
            AttentionNaming(prefix="transformer.h", attention="attn", live_names=True),
            "transformer.h.0.attn.attn.k_scale",
        ),
        (AttentionNaming(attention="attn", live_names=True), "model.layers.0.attn.attn.k_scale"),
        (AttentionNaming(attention="mixer", live_names=True), "model.layers.0.mixer.attn.k_scale"),
        (
            AttentionNaming(prefix="language_model.model.layers", live_names=True),
            "language_model.model.layers.0.self_attn.attn.k_scale",
        ),
        (
            AttentionNaming(inner="mla_attn.mla_attn", live_names=True),
            "model.layers.0.self_attn.mla_attn.mla_attn.k_scale",
        ),
    ],
)
def test_live_names_are_those_of_the_table(naming: AttentionNaming, live: str) -> None:
    """Q3, Q6: families differ in data, and the live name is a fixed point."""
    assert naming.name(0, "k_scale") == live
    assert parse_vllm_scale_name(live, naming) == ScaleKey(layer=0, kind="k_scale")


@given(naming=attention_namings(layers=st.none()), layers=st.lists(st.integers(0, 10**6), unique=True, max_size=8))
def test_names_are_injective_over_layers_and_kinds(naming: AttentionNaming, layers: list[int]) -> None:
    names = [naming.name(layer, kind) for layer in layers for kind in KINDS]
    assert len(set(names)) == len(names)


@given(naming=attention_namings(), data=st.data())
def test_parsing_inverts_naming(naming: AttentionNaming, data: st.DataObject) -> None:
    layer = data.draw(st.sampled_from(naming.layers) if naming.layers else st.integers(0, 999_999_999))
    for kind, name in get_vllm_qkv_scale_names(layer, naming).items():
        assert parse_vllm_scale_name(name, naming) == ScaleKey(layer=layer, kind=kind)


@given(naming=attention_namings(), data=st.data())
def test_conversion_is_total_and_round_trips(naming: AttentionNaming, data: st.DataObject) -> None:
    result = data.draw(calibration_results(layers=naming.layers))
    flat = convert_calibration_to_vllm_format(result, naming)
    expected = {
        naming.name(int(key.removeprefix("layer_")), kind): value
        for key, scales in result.items()
        for kind, value in scales.items()
    }
    assert flat == expected
    assert convert_vllm_format_to_calibration(flat, naming) == result


@given(result=calibration_results(), data=st.data())
def test_the_order_of_layers_and_names_does_not_matter(result: dict, data: st.DataObject) -> None:
    flat = convert_calibration_to_vllm_format(result)
    shuffled = {key: result[key] for key in data.draw(st.permutations(sorted(result)))}
    assert list(convert_calibration_to_vllm_format(shuffled).items()) == list(flat.items())
    mixed = {name: flat[name] for name in data.draw(st.permutations(sorted(flat)))}
    assert convert_vllm_format_to_calibration(mixed) == result


@given(result=calibration_results())
def test_q_is_passed_on_where_given_and_never_invented(result: dict) -> None:
    """Q14: absent is not 1.0."""
    flat = convert_calibration_to_vllm_format(result)
    with_q = {key for key, scales in result.items() if "q_scale" in scales}
    assert {n for n in flat if n.endswith("q_scale")} == {
        get_vllm_qkv_scale_names(int(key.removeprefix("layer_")))["q_scale"] for key in with_q
    }


MALFORMED_KEYS = st.one_of(
    st.integers(-(10**6), -1).map(lambda n: f"layer_{n}"),
    st.tuples(st.integers(1, 5), st.integers(0, 999)).map(lambda t: f"layer_{'0' * t[0]}{t[1]}"),
    st.text(alphabet="17٠١２３", min_size=1, max_size=5).filter(lambda d: not d.isascii()).map("layer_{}".format),
    st.sampled_from(["layer_", "layer", "Layer_1", "layer_1 ", " layer_1", "layer_1\n", "layer_+1", "layer_1.0", "1"]),
    st.sampled_from(["layer_" + "9" * 5000, "layer_1e3", "model.layers.1.self_attn", "layer-1", "layer_1_000", ""]),
    st.integers(),
    st.none(),
)


# A pattern for "digits" takes those of other scripts too, and `int` reads them.
@example(key="layer_1٠", rest={})
@given(key=MALFORMED_KEYS, rest=calibration_results())
def test_a_malformed_layer_key_is_refused_by_name(key: object, rest: dict) -> None:
    with pytest.raises(ScaleNameError) as caught:
        convert_calibration_to_vllm_format({**rest, key: good()})
    assert repr(key) in str(caught.value)


@pytest.mark.parametrize("order", [("layer_1", "layer_01"), ("layer_01", "layer_1")])
def test_two_spellings_of_one_layer_are_a_double_whichever_comes_first(order: tuple[str, str]) -> None:
    with pytest.raises(ScaleNameError, match=r"'layer_01' .* doubles 'layer_1'"):
        convert_calibration_to_vllm_format({key: good() for key in order})


BAD_SCALES = st.one_of(
    st.floats(max_value=0.0),
    st.sampled_from([math.nan, math.inf, 0.0, -0.0, 1e-60, 1e60, 10**400, Fraction(1, 10**400), 0, -3]),
    st.booleans(),
    st.sampled_from([np.True_, np.float32("nan"), np.array([0.5])]),
    st.sampled_from([None, "0.5", b"1", 1 + 0j, [0.5]]),
)


@given(kind=st.sampled_from(KINDS), bad=BAD_SCALES, layer=st.integers(0, 999))
def test_an_impossible_scale_is_refused_with_layer_and_kind(kind: str, bad: object, layer: int) -> None:
    """U39, Q18, Q19: zero, NaN and inf stop here and not inside the engine."""
    with pytest.raises(ScaleNameError, match=rf"'layer_{layer}\.{kind}'"):
        convert_calibration_to_vllm_format({f"layer_{layer}": good(**{kind: bad})})
    names = get_vllm_qkv_scale_names(layer)
    flat = {names["k_scale"]: 1.0, names["v_scale"]: 1.0, names[kind]: bad}
    with pytest.raises(ScaleNameError) as caught:
        convert_vllm_format_to_calibration(flat)
    assert repr(names[kind]) in str(caught.value)


@given(value=scale_values())
def test_numbers_of_numpy_become_plain_floats(value: float) -> None:
    flat = convert_calibration_to_vllm_format({"layer_0": good(k_scale=np.float32(value))})
    assert {type(scale) for scale in flat.values()} == {float}


@pytest.mark.parametrize("missing", ["k_scale", "v_scale"])
def test_k_and_v_are_required(missing: str) -> None:
    scales = good(q_scale=0.5)
    del scales[missing]
    with pytest.raises(ScaleNameError, match=rf"'layer_4' lacks '{missing}'"):
        convert_calibration_to_vllm_format({"layer_4": scales})
    flat = {get_vllm_qkv_scale_names(4)[kind]: value for kind, value in scales.items()}
    with pytest.raises(ScaleNameError, match=rf"self_attn\.{missing}' is missing"):
        convert_vllm_format_to_calibration(flat)


@pytest.mark.parametrize("kind", ["prob_scale", "kv_scale", "K_scale", "k_zero_point", "", None, 3])
def test_other_kinds_are_refused(kind: object) -> None:
    with pytest.raises(ScaleNameError) as caught:
        convert_calibration_to_vllm_format({"layer_0": {**good(), kind: 1.0}})
    assert repr(kind) in str(caught.value)
    assert "'layer_0'" in str(caught.value)
    with pytest.raises(ScaleNameError, match="kind"):
        LLAMA_LIKE.name(0, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [-1, True, False, 1.0, "1", None, 10**9])
def test_a_layer_number_that_is_none_is_refused(layer: object) -> None:
    with pytest.raises(ScaleNameError) as caught:
        get_vllm_qkv_scale_names(layer)  # type: ignore[arg-type]
    assert repr(layer) in str(caught.value)


@given(naming=attention_namings(layers=st.just((3, 7, 11))), extra=st.integers(0, 10).filter(lambda n: n not in (3, 7)))
def test_layers_without_attention_and_missing_layers_are_refused(naming: AttentionNaming, extra: int) -> None:
    """Q2: a hybrid model has scales for its attention layers, all of them and no others."""
    full = {f"layer_{layer}": good() for layer in (3, 7, 11)}
    assert len(convert_calibration_to_vllm_format(full, naming)) == 6
    with pytest.raises(ScaleNameError, match=f"'layer_{extra}' names layer {extra}, which has no attention"):
        convert_calibration_to_vllm_format({**full, f"layer_{extra}": good()}, naming)
    del full["layer_7"]
    with pytest.raises(ScaleNameError, match="no scales for layer_7"):
        convert_calibration_to_vllm_format(full, naming)
    flat = convert_calibration_to_vllm_format(full, dataclasses.replace(naming, layers=None))
    with pytest.raises(ScaleNameError, match="no scales for layer_7"):
        convert_vllm_format_to_calibration(flat, naming)
    with pytest.raises(ScaleNameError, match="no attention"):
        get_vllm_qkv_scale_names(extra, naming)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.attn.k_scale",  # another spelling of k
        "model.layers.0.self_attn.q_scale",
        "model.layers.00.self_attn.k_scale",
        "model.layers.-1.self_attn.k_scale",
        "model.layers.٣.self_attn.k_scale",
        "model.layers.0.self_attn.qkv_proj.k_scale",
        "model.layers.0.self_attn.k_proj.k_scale",
        "model.layers.0.self_attn.prob_scale",
        "model.layers.0.self_attn.k_scale\n",
        "modelxlayers.0.self_attn.k_scale",
        "xmodel.layers.0.self_attn.k_scale",
        "transformer.h.0.attn.attn.k_scale",
        "",
        None,
        3,
    ],
)
def test_a_foreign_name_is_refused_by_name(name: object) -> None:
    with pytest.raises(ScaleNameError) as caught:
        parse_vllm_scale_name(name)  # type: ignore[arg-type]
    assert repr(name) in str(caught.value)
    with pytest.raises(ScaleNameError):
        convert_vllm_format_to_calibration({name: 1.0})  # type: ignore[dict-item]


@pytest.mark.parametrize("field", ["prefix", "attention", "inner"])
@pytest.mark.parametrize("value", ["", "a..b", ".a", "a.", "a b", "layérs", None, "model.layers.{}"])
def test_a_description_with_a_malformed_path_is_refused(field: str, value: object) -> None:
    with pytest.raises(ScaleNameError, match=field):
        AttentionNaming(**{field: value})  # type: ignore[arg-type]


def test_a_description_lists_each_layer_once_in_order() -> None:
    assert AttentionNaming(layers=(7, 3)).layers == (3, 7)
    with pytest.raises(ScaleNameError, match="3 stands there twice"):
        AttentionNaming(layers=(3, 7, 3))
    with pytest.raises(ScaleNameError, match="-1"):
        AttentionNaming(layers=(-1,))


@pytest.mark.parametrize("value", [None, [], "layer_0", {"layer_0": [1.0]}, {"layers": {"layer_0": good()}}])
def test_what_is_no_calibration_result_is_refused(value: object) -> None:
    with pytest.raises(ScaleNameError):
        convert_calibration_to_vllm_format(value)  # type: ignore[arg-type]


def test_the_error_crosses_a_process_boundary() -> None:
    with pytest.raises(ScaleNameError) as caught:
        get_vllm_qkv_scale_names(-1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_importing_the_names_brings_neither_torch_nor_numpy() -> None:
    code = "import sys, nemo_rl_core.fp8.scale_names; print({'torch', 'numpy', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
