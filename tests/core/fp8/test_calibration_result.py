# SPDX-License-Identifier: Apache-2.0
"""FP8 calibration: from what was seen to scales by live names, and what is refused on the way."""

import pytest
import torch

from nemo_rl_core.errors import DataError, ModelError, ScaleNameError
from nemo_rl_core.fp8.calibration import ActivationObserver
from nemo_rl_core.fp8.calibration_result import CalibrationRequest
from nemo_rl_core.fp8.model_description import AttentionBlock, ModelDescription
from tests.core.fp8.families import description_of


def model_of(layers=(0, 3), **block):
    return ModelDescription(
        architecture="MyForCausalLM", blocks=(AttentionBlock(prefix="h", module="attn.attn", layers=layers, **block),)
    )


def seen_of(layers=(0, 3), scale=1.0, same_as=None):
    """What an observer keeps of random q, k and v; ``same_as`` gives a layer another's k and v."""
    observer = ActivationObserver()
    kv = {}
    with observer.tokens(torch.ones(2, 5)):
        for layer in layers:
            g = torch.Generator().manual_seed(layer)
            q, k, v = (torch.randn(2, 2, 5, 8, generator=g) * scale for _ in range(3))
            kv[layer] = kv[(same_as or {}).get(layer, layer)] if layer in (same_as or {}) else (k, v)
            observer.observe(layer, q, *kv[layer])
    return observer


@pytest.mark.parametrize("include_q", [False, True])
def test_the_names_are_exactly_those_of_the_description(include_q):
    """Q14: q where it is asked for, for every layer."""
    model = model_of()
    result = CalibrationRequest(model=model, include_q=include_q).result(seen_of())
    assert tuple(result["layers"]) == model.names(include_q=include_q)
    assert tuple(result["amax"]) == tuple(result["rates"]) == model.owners()
    assert set(result["rates"]["h.0.attn.attn"]) == ({"q", "k", "v"} if include_q else {"k", "v"})


@pytest.mark.parametrize(("kept_as", "step"), [("float32", 2**-23), ("bfloat16", 2**-7)])
def test_scales_are_what_the_engine_keeps_and_never_below_the_calibrated_ones(kept_as, step):
    result = CalibrationRequest(model=model_of(), margin=1.5, kept_as=kept_as).result(seen_of())
    for owner, amax in result["amax"].items():
        for kind in "kv":
            scale, exact = result["layers"][f"{owner}.{kind}_scale"], 1.5 * amax[kind] / 448
            assert exact <= scale <= exact * (1 + step)
            assert torch.tensor(scale, dtype=getattr(torch, kept_as)).item() == scale


def test_rates_are_of_the_new_scales_and_drift_of_the_previous_ones():
    previous = CalibrationRequest(model=model_of(), margin=1).result(seen_of())
    assert "drift" not in previous
    moved = CalibrationRequest(model=model_of(), margin=1, previous=previous["layers"]).result(seen_of(scale=3.0))
    for owner in model_of().owners():
        for kind in "kv":
            assert moved["rates"][owner][kind]["saturated"] == 0
            assert 0 < moved["drift"][owner][kind]["saturated"] < 1
            assert previous["rates"][owner][kind]["saturated"] == 0


def test_a_reader_has_the_writers_k_and_v_and_a_q_of_its_own():
    """Q9."""
    model = model_of((0, 3), shares=((3, 0),))
    layers = CalibrationRequest(model=model, include_q=True).result(seen_of(same_as={3: 0}))["layers"]
    assert layers["h.3.attn.attn.k_scale"] == layers["h.0.attn.attn.k_scale"]
    assert layers["h.3.attn.attn.q_scale"] != layers["h.0.attn.attn.q_scale"]


def test_a_reader_that_computes_keys_of_its_own_is_another_model():
    with pytest.raises(ModelError, match=r"'h\.3\.attn\.attn' reads the KV cache of layer 0 .* other keys"):
        CalibrationRequest(model=model_of((0, 3), shares=((3, 0),))).result(seen_of())


def test_a_layer_that_no_pass_reached_is_named():
    with pytest.raises(ModelError, match=r"no pass reached 'h\.3\.attn\.attn' \(1 of 2 layers"):
        CalibrationRequest(model=model_of()).result(seen_of((0,)))
    with pytest.raises(ModelError, match="no attention layer was called"):
        CalibrationRequest(model=model_of()).result(ActivationObserver())


def test_a_call_of_a_layer_that_the_description_lacks_is_named():
    with pytest.raises(ModelError, match=r"layer 5 called attention, but .* only the layers \[0, 3\]"):
        CalibrationRequest(model=model_of()).result(seen_of((0, 3, 5)))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"percentile": 0}, DataError, "percentile must be"),
        ({"margin": 0.5}, DataError, "margin must be"),
        ({"previous": {"h.0.attn.attn.k_scale": 1.0}}, ScaleNameError, "given scales .* 3 missing"),
        ({"previous": dict.fromkeys(model_of().names(), 0.0)}, ScaleNameError, "must be positive"),
        ({"model": description_of("DeepseekV3ForCausalLM")}, ModelError, r"\(MLA\), .* in bfloat16"),
        ({"model": description_of("WhisperForConditionalGeneration")}, ModelError, "2 attention modules with a cache"),
    ],
    ids=["percentile", "margin", "incomplete", "zero", "MLA", "two caches"],
)
def test_a_request_that_no_pass_could_answer_is_refused_when_it_is_made(kwargs, error, message):
    """Q7."""
    with pytest.raises(error, match=message):
        CalibrationRequest(**{"model": model_of(), **kwargs})
