# SPDX-License-Identifier: Apache-2.0
"""The FP8 blockwise cast against the rule written out in numpy, block by block; tests/gpu has the kernel."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.blockwise import (
    BLOCK,
    BlockwiseWeight,
    cast_blockwise,
    cast_many,
    dequantise,
    pairs_of,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EDGES = [(1, 1), (127, 129), (128, 128), (129, 1), (1, 129), (257, 385), (3, 130, 5), (2, 1, 1), (1, 128, 256)]


def e4m3_magnitudes() -> np.ndarray:
    """The 127 magnitudes of e4m3fn by their byte: four bits of exponent with bias 7, three of mantissa."""
    return np.array(
        [(byte & 7) * 2.0**-9 if byte < 8 else (8 + (byte & 7)) * 2.0 ** ((byte >> 3) - 10) for byte in range(127)]
    )


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Bytes of the nearest e4m3 values, ties to even, saturating."""
    magnitudes = e4m3_magnitudes()
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    exact = np.abs(values.astype(np.float64))
    index = np.searchsorted(middles, exact, side="left")
    tie = (index < len(middles)) & (exact == middles[np.minimum(index, len(middles) - 1)]) & (index % 2 == 1)
    return (index + tie).astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 7)


def by_the_rule(weight: torch.Tensor, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """DeepGEMM's rule for one matrix, in numpy's float32, one block after the other."""
    x = weight.float().numpy()
    rows, columns = x.shape
    values = np.zeros(x.shape, np.uint8)
    scales = np.zeros((math.ceil(rows / 128), math.ceil(columns / 128)), np.float32)
    for i, j in np.ndindex(*scales.shape):
        place = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        scale = max(np.abs(x[place]).max(), np.float32(1e-4)) / np.float32(448)
        if power_of_two:
            fraction, exponent = math.frexp(scale)
            scale = np.float32(math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent))
        scales[i, j] = scale
        values[place] = to_e4m3(x[place] * (np.float32(1) / scale))
    return values, scales


def assert_by_the_rule(weight: torch.Tensor, power_of_two: bool) -> None:
    cast = cast_blockwise(weight, power_of_two=power_of_two)
    assert cast.weight.shape == weight.shape
    assert cast.weight.is_contiguous()
    assert cast.weight_scale_inv.is_contiguous()
    experts = weight if weight.ndim == 3 else weight[None]
    values = cast.weight.view(torch.uint8).reshape(experts.shape).numpy()
    scales = cast.weight_scale_inv.reshape(len(experts), *cast.weight_scale_inv.shape[-2:]).numpy()
    for i, expert in enumerate(experts):
        expected_values, expected_scales = by_the_rule(expert, power_of_two)
        assert np.array_equal(scales[i], expected_scales)
        assert np.array_equal(values[i], expected_values)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def finite_bfloat16() -> torch.Tensor:
    """All finite bfloat16 values that are not negative, ascending."""
    return torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EDGES)
def test_values_and_scales_are_those_of_the_rule(shape, dtype, power_of_two):
    assert_by_the_rule(normal(*shape, dtype=dtype), power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_of_all_magnitudes_are_those_of_the_rule(power_of_two):
    """From where all is below the floor to the largest bfloat16 values; zeros of both signs among them."""
    exponents = torch.arange(-140, 126, 7, dtype=torch.float32)
    weight = normal(len(exponents), 40, 150) * torch.exp2(exponents)[:, None, None]
    weight[:, 3] = 0.0
    weight[:, 4] = -0.0
    assert_by_the_rule(weight.clamp(-3e38, 3e38).to(torch.bfloat16), power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_every_bfloat16_value_as_the_largest_of_a_block(power_of_two):
    """One block for each value, with a value beside it that underflows or rounds."""
    top = finite_bfloat16()
    blocks = torch.stack([top, -top * 0.37], dim=-1)[:, None, :]
    cast = cast_blockwise(blocks, power_of_two=power_of_two)
    amax = np.maximum(top.float().numpy(), np.float32(1e-4))
    scales = amax / np.float32(448)
    if power_of_two:
        fractions, exponents = np.frexp(scales)
        scales = np.ldexp(np.float32(1), np.where(fractions == 0.5, exponents - 1, exponents))
    assert np.array_equal(cast.weight_scale_inv.flatten().numpy(), scales)
    expected = to_e4m3(blocks.float().numpy() * (np.float32(1) / scales)[:, None, None])
    assert np.array_equal(cast.weight.view(torch.uint8).numpy(), expected)


def test_just_above_a_power_of_two_the_exponent_goes_up_and_nothing_saturates():
    """A ceil(log2(x)) in float32 is off by one there, and the largest value saturates."""
    powers = torch.exp2(torch.arange(-20, 100, dtype=torch.float32))
    for factor, exponent_up in ((1.0, 0), (1.0 + 2.0**-22, 1), (1.0 - 2.0**-23, 0)):
        # amax / 448 is exactly the power times the factor, or the float32 beside it.
        weight = (powers * 448 * factor)[:, None, None]
        scale = cast_blockwise(weight, power_of_two=True).weight_scale_inv.flatten()
        assert torch.equal(scale, powers * 2**exponent_up)
        assert (weight.flatten() / scale <= 448).all()


def test_all_e4m3_values_and_the_middles_between_them_round_to_nearest_even():
    """With a 448 in the block the scale is 1, so that the conversion is all that happens."""
    magnitudes = torch.from_numpy(e4m3_magnitudes()).float()
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    one_up, one_down = (torch.nextafter(middles, torch.tensor(end)) for end in (1e9, 0.0))
    line = torch.cat([magnitudes, middles, one_up, one_down, torch.tensor([2.0**-140, 0.0])])
    weight = torch.stack([line, -line])
    for start in range(0, weight.shape[1], 127):
        part = torch.cat([torch.full((2, 1), 448.0), weight[:, start : start + 127]], dim=1)
        cast = cast_blockwise(part)
        assert cast.weight_scale_inv.flatten().tolist() == [1.0]
        assert np.array_equal(cast.weight.view(torch.uint8).numpy(), to_e4m3(part.numpy()))


def test_a_zero_block_keeps_its_signs_and_has_the_floors_scale():
    weight = torch.tensor([[0.0, -0.0]])
    cast = cast_blockwise(weight)
    assert cast.weight.view(torch.uint8).tolist() == [[0, 128]]
    assert cast.weight_scale_inv.item() == np.float32(1e-4) / np.float32(448)
    assert torch.equal(dequantise(cast), weight)


def test_what_lies_outside_a_ragged_block_counts_as_zero():
    """A last element that is large changes its own block's scale and no other (NeMo-RL pads with the last element)."""
    small = torch.full((200, 130), 0.01)
    large = small.clone()
    large[-1, -1] = 100.0
    before, after = cast_blockwise(small), cast_blockwise(large)
    assert before.weight_scale_inv.unique().tolist() == [np.float32(0.01) / np.float32(448)]
    differs = before.weight_scale_inv != after.weight_scale_inv
    assert differs.tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_dequantised_values_are_within_one_rounding(power_of_two):
    weight = normal(300, 260)
    cast = cast_blockwise(weight, power_of_two=power_of_two)
    scale = cast.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:300, :260]
    error = (dequantise(cast) - weight).abs()
    assert (error <= torch.maximum(weight.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)).all()
    assert dequantise(cast, torch.bfloat16).dtype == torch.bfloat16


def test_casting_again_what_was_cast_to_powers_of_two_changes_nothing():
    """A consumer that makes powers of two itself then finds its work done."""
    weight = normal(256, 256)
    once = cast_blockwise(weight, power_of_two=True)
    twice = cast_blockwise(dequantise(once), power_of_two=True)
    assert torch.equal(dequantise(once), dequantise(twice))


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.t(),
        lambda w: w[::2],
        lambda w: w[:, ::3],
        lambda w: w[5:200, 7:140],
        lambda w: w[:1].expand(150, -1),
        lambda w: w.reshape(2, 150, 260).transpose(0, 1),
    ],
    ids=["transposed", "every other row", "every third column", "a part", "expanded", "experts inside"],
)
def test_strides_do_not_matter_and_the_weight_is_not_changed(view):
    whole = normal(300, 260)
    kept = whole.clone()
    weight = view(whole)
    assert not weight.is_contiguous()
    cast, plain = cast_blockwise(weight), cast_blockwise(weight.clone(memory_format=torch.contiguous_format))
    assert torch.equal(cast.weight.view(torch.uint8), plain.weight.view(torch.uint8))
    assert torch.equal(cast.weight_scale_inv, plain.weight_scale_inv)
    assert cast.weight.is_contiguous()
    assert torch.equal(whole, kept)


def test_a_parameter_is_cast_without_a_gradient():
    cast = cast_blockwise(torch.nn.Parameter(normal(4, 4)))
    assert not cast.weight.requires_grad
    assert not cast.weight_scale_inv.requires_grad


def test_experts_are_cast_as_each_alone():
    weight = normal(3, 200, 140, dtype=torch.bfloat16)
    cast = cast_blockwise(weight)
    assert cast.weight_scale_inv.shape == (3, 2, 2)
    for i in range(3):
        alone = cast_blockwise(weight[i])
        assert torch.equal(cast.weight[i].view(torch.uint8), alone.weight.view(torch.uint8))
        assert torch.equal(cast.weight_scale_inv[i], alone.weight_scale_inv)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_is_an_error_with_its_weight_and_block(value, dtype, power_of_two):
    weights = {"a": normal(4, 4), "b.proj": normal(2, 130, 300, dtype=dtype), "c": normal(4, 4)}
    weights["b.proj"][1, 129, 299] = value
    with pytest.raises(ModelError, match=r"'b\.proj' .* 1 of its 12 blocks, first in block \[1, 1, 2\] .* of expert 1"):
        cast_many(weights, power_of_two=power_of_two)


def test_several_weights_that_are_not_finite_are_counted():
    weights = {name: torch.full((2, 2), math.nan) for name in ("x", "y", "z")}
    with pytest.raises(ModelError, match=r"'x' .* the same holds for 2 more, among them 'y'"):
        cast_many(weights)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.zeros(4), r"must have the shape \[N, K\].*got \[4\]"),
        (torch.zeros(2, 2, 2, 2), r"must have the shape"),
        (torch.zeros(()), r"must have the shape"),
        (torch.zeros(0, 4), r"is empty, \[0, 4\]"),
        (torch.zeros(2, 4, 0), r"is empty"),
        (torch.zeros(2, 2, dtype=torch.float64), r"one of bfloat16, float16, float32, got float64"),
        (torch.zeros(2, 2, dtype=torch.int8), r"got int8"),
        (torch.zeros(2, 2).to(torch.float8_e4m3fn), r"got float8_e4m3fn; cast from the master weights"),
        (torch.zeros(2, 2, device="meta"), r"on meta; load it first"),
        (torch.zeros(2, 2).to_sparse(), r"dense tensor"),
        ([[1.0]], r"plain torch\.Tensor, got list"),
    ],
    ids=lambda each: None if isinstance(each, str) else "weight",
)
def test_what_has_no_blocks_is_refused_by_name(weight, words):
    with pytest.raises(ModelError, match=rf"'m\.proj'.*{words}"):
        cast_many({"good": torch.ones(2, 2), "m.proj": weight})


def test_a_tensor_subclass_is_told_to_be_gathered():
    class Sharded(torch.Tensor):
        pass

    with pytest.raises(ModelError, match=r"got Sharded; of a sharded tensor, gather it first \(full_tensor\(\)\)"):
        cast_blockwise(torch.ones(2, 2).as_subclass(Sharded))


def test_the_backend_is_checked_and_triton_is_refused_where_it_cannot_run():
    with pytest.raises(ModelError, match="backend must be one of auto, torch, triton, got 'cuda'"):
        cast_blockwise(torch.ones(2, 2), backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="'weight' is float32 \\[2, 2\\] on cpu; backend 'auto' takes torch there"):
        cast_blockwise(torch.ones(2, 2), backend="triton")
    assert torch.equal(
        dequantise(cast_blockwise(torch.ones(2, 2), backend="torch")), dequantise(cast_blockwise(torch.ones(2, 2)))
    )


def test_on_the_wire_a_weight_and_its_scales_stand_together_in_the_order_given():
    """Q35."""
    weights = {"b.down_proj": normal(130, 4), "a.up_proj": normal(2, 4, 4)}
    wire = cast_many(weights)
    assert list(wire) == [f"{n}.{part}" for n in weights for part in ("weight", "weight_scale_inv")]
    pairs = pairs_of({**wire, "a.norm.weight": torch.ones(3)})
    assert list(pairs) == list(weights)
    for name, weight in weights.items():
        alone = cast_blockwise(weight)
        assert torch.equal(pairs[name].weight.view(torch.uint8), alone.weight.view(torch.uint8))
        assert torch.equal(pairs[name].weight_scale_inv, alone.weight_scale_inv)
    assert cast_many({}) == {}


@pytest.mark.parametrize("half", ["weight", "weight_scale_inv"])
def test_half_of_a_pair_is_refused(half):
    """Q35: an engine computes with whatever its buffer held."""
    wire = cast_many({"a.proj": normal(4, 4)})
    del wire[f"a.proj.{half}"]
    with pytest.raises(ModelError, match=r"a\.proj"):
        pairs_of(wire)


def test_a_weight_under_another_name_is_no_pair():
    """Q44: grouped experts without the suffix."""
    cast = cast_blockwise(normal(2, 4, 4))
    with pytest.raises(ModelError, match=r"'mlp\.experts\.gate_up_proj' is FP8 and has no scales beside it"):
        pairs_of({"mlp.experts.gate_up_proj": cast.weight})


def test_scales_that_a_kernel_packed_are_refused():
    """Q31, Q37: the wire has one float32 scale for each block."""
    wire = cast_many({"a.proj": normal(256, 512)})
    wire["a.proj.weight_scale_inv"] = torch.zeros(256, 1, dtype=torch.int32)
    with pytest.raises(ModelError, match=r"'a\.proj': .* float32 \[2, 4\].*got int32 \[256, 1\]"):
        pairs_of(wire)


def test_a_pair_of_another_dtype_is_refused():
    with pytest.raises(ModelError, match="must be float8_e4m3fn with 2 or 3 dimensions, got float32"):
        BlockwiseWeight(weight=torch.zeros(4, 4), weight_scale_inv=torch.ones(1, 1))


@pytest.mark.parametrize("name", ["a.weight", "a.weight_scale_inv"])
def test_names_of_parameters_are_refused_with_the_modules_name(name):
    with pytest.raises(ModelError, match=f"got '{name}'; pass 'a'"):
        cast_many({name: torch.ones(2, 2)})


def test_importing_and_casting_on_the_cpu_loads_no_triton():
    code = (
        "import sys, torch\nbefore = set(sys.modules)\nfrom nemo_rl_core.fp8.blockwise import cast_blockwise\n"
        "cast_blockwise(torch.ones(2, 2))\nprint(sorted(m for m in set(sys.modules) - before if 'triton' in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
