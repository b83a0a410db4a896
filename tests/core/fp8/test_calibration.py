# SPDX-License-Identifier: Apache-2.0
"""FP8 calibration: what an observer keeps, against plain numpy-like arithmetic, cut and merged in every way."""

import math
import subprocess
import sys

import pytest
import torch

from nemo_rl_core.errors import DataError, ModelError, StateError
from nemo_rl_core.fp8.calibration import DEFAULT_MARGIN, ActivationObserver
from nemo_rl_core.fp8.histogram import RELATIVE_WIDTH
from nemo_rl_core.fp8.scale_names import convert_calibration_to_vllm_format

B, S, LAYERS = 6, 9, (0, 3)


def data_of(seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([9, 2, 5, 1, 7, 9])
    real = torch.arange(S)[None] < lengths[:, None]
    heads = {"q": 4, "k": 2, "v": 2}
    acts = {n: [torch.randn(B, h, S, 8, generator=g) * (n + 1) for h in heads.values()] for n in LAYERS}
    return real, acts


def observed(real, acts, rows=None, layers=LAYERS):
    observer = ActivationObserver()
    for part in rows or [list(range(len(real)))]:
        with observer.tokens(real[part]):
            for layer in layers:
                observer.observe(layer, *(x[part] for x in acts[layer]))
    return observer


def everything(observer, percentile=99.0):
    scales = observer.scales(percentile=percentile, include_q=True)
    return scales, observer.amax(), observer.rates(scales)


def real_values(real, x):
    return x.transpose(1, 2)[real].abs().flatten()


def test_a_scale_is_margin_times_the_largest_magnitude_over_448():
    real, acts = data_of()
    scales = observed(real, acts).scales(margin=1.5)
    for layer in LAYERS:
        for kind, x in zip("kv", acts[layer][1:], strict=True):
            assert scales[f"layer_{layer}"][f"{kind}_scale"] == 1.5 * real_values(real, x).max().item() / 448
    assert set(scales["layer_3"]) == {"k_scale", "v_scale"}
    assert DEFAULT_MARGIN == 2.0


def test_q_is_given_when_asked_for_and_the_result_converts_to_vllm_names():
    """Q14."""
    real, acts = data_of()
    flat = convert_calibration_to_vllm_format(observed(real, acts).scales(include_q=True))
    assert "model.layers.3.self_attn.attn.q_scale" in flat
    assert len(flat) == 6


@pytest.mark.parametrize("percentile", [0.5, 50, 90.0, 99.9])
def test_a_percentile_is_of_activations_and_at_most_a_bin_too_large(percentile):
    real, acts = data_of()
    scales = observed(real, acts).scales(percentile=percentile, margin=1)
    values = real_values(real, acts[3][1]).sort().values
    exact = values[math.ceil(percentile * len(values) / 100) - 1].item()
    got = scales["layer_3"]["k_scale"] * 448
    assert exact <= got * (1 + 1e-12)
    assert got <= exact * (1 + RELATIVE_WIDTH) * (1 + 1e-12)


@pytest.mark.parametrize(
    "rows",
    [[[0], [1], [2], [3], [4], [5]], [[5, 3, 1], [4, 2, 0]], [[0, 1, 2, 3], [4, 5]]],
    ids=["ones", "mixed", "4-2"],
)
def test_micro_batches_and_order_change_nothing(rows):
    real, acts = data_of()
    assert everything(observed(real, acts, rows)) == everything(observed(real, acts))


@pytest.mark.parametrize("value", [1e6, float("nan"), float("inf")])
def test_what_stands_on_padding_changes_nothing(value):
    real, acts = data_of()
    other = {n: [x.masked_fill(~real[:, None, :, None], value) for x in xs] for n, xs in acts.items()}
    assert everything(observed(real, other)) == everything(observed(real, acts))


def test_halves_of_the_rows_and_halves_of_the_layers_merge_to_the_whole():
    real, acts = data_of()
    by_rows = observed(real, acts, [[0, 1, 2]])
    by_rows.merge(observed(real, acts, [[3, 4, 5]]))
    by_layers = observed(real, acts, layers=(3,))
    by_layers.merge(observed(real, acts, layers=(0,)))
    assert everything(by_rows) == everything(by_layers) == everything(observed(real, acts))


def test_the_sum_of_packed_states_is_the_state_of_all_ranks():
    real, acts = data_of()
    ranks = [observed(real, acts, [[0, 1, 2]]), observed(real, acts, [[3, 4, 5]], layers=(0,))]
    ranks.append(observed(real, acts, [[3, 4, 5]], layers=(3,)))
    device = torch.device("cpu")
    packed = torch.stack([o.packed(LAYERS, rank=r, world_size=3, device=device) for r, o in enumerate(ranks)]).sum(0)
    whole = ActivationObserver.from_packed(packed, LAYERS, world_size=3)
    assert everything(whole) == everything(observed(real, acts))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_activation_that_is_not_finite_is_an_error_that_names_layer_and_kind(value):
    real, acts = data_of()
    acts[3][2][0, 0, 0, 0] = value
    with pytest.raises(ModelError, match="v in layer 3 are infinite or NaN"):
        observed(real, acts).scales()


def test_a_layer_without_tokens_or_with_zeros_alone_is_an_error_that_names_it():
    """Q15."""
    real, acts = data_of()
    with pytest.raises(ModelError, match="layer 0 saw no token"):
        observed(torch.zeros_like(real), acts).scales()
    acts[3][1].zero_()
    acts[3][0].zero_()
    # No scale of q is asked for, so zeros there are no reason to stop.
    with pytest.raises(ModelError, match="k in layer 3 are zero"):
        observed(real, acts).scales()
    with pytest.raises(ModelError, match="no attention layer was called"):
        ActivationObserver().scales()


def test_rates_tell_how_the_next_data_fares_under_earlier_scales():
    real, acts = data_of()
    scales = observed(real, acts).scales(margin=1)
    assert all(r["saturated"] == 0 for kinds in observed(real, acts).rates(scales).values() for r in kinds.values())
    larger = {n: [x * 4 for x in xs] for n, xs in acts.items()}
    rates = observed(real, larger).rates(scales)["layer_0"]["k"]
    values = real_values(real, larger[0][1])
    exact = (values > scales["layer_0"]["k_scale"] * 448).double().mean().item()
    assert exact > 0
    assert exact <= rates["saturated"] <= exact + 0.05
    small = observed(real, {n: [x * 1e-4 for x in xs] for n, xs in acts.items()}).rates(scales)
    assert small["layer_0"]["v"]["subnormal"] > 0.5
    with pytest.raises(DataError, match="no scales for 'layer_0'"):
        observed(real, acts).rates({"layer_3": scales["layer_3"]})


@pytest.mark.parametrize("bad", [{"percentile": 0}, {"percentile": 101}, {"margin": 0.9}, {"margin": float("nan")}])
def test_a_percentile_or_a_margin_out_of_range_is_refused(bad):
    with pytest.raises(DataError, match=f"{next(iter(bad))} must be"):
        observed(*data_of()).scales(**bad)


def test_a_call_without_known_tokens_or_with_other_shapes_is_refused():
    real, acts = data_of()
    observer = ActivationObserver()
    with pytest.raises(StateError, match="which tokens are real"):
        observer.observe(0, *acts[0])
    with observer.tokens(real[:, :4]), pytest.raises(ModelError, match="without a KV cache"):
        observer.observe(0, *acts[0])


def test_observing_on_the_cpu_loads_no_cuda_bindings():
    code = (
        "import sys, torch\nbefore = set(sys.modules)\nfrom nemo_rl_core.fp8.calibration import ActivationObserver\n"
        "observer, x = ActivationObserver(), torch.ones(1, 1, 1, 1)\n"
        "with observer.tokens(torch.ones(1, 1)):\n    observer.observe(0, x, x, x)\n"
        "print(sorted(m for m in set(sys.modules) - before if m.startswith('cuda')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
