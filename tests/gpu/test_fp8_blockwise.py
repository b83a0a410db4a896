# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of the FP8 cast, bit for bit against torch's own operations on the same GPU.

tests/core/fp8/test_blockwise.py holds the torch reference to the rule in numpy. Here the rule stands once more, for a
billion values, in the plainest torch; the reference is compared besides.
"""

import math
import warnings

import pytest
import torch

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.blockwise import cast_blockwise, cast_many

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and this machine has none"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (127, 129), (128, 128), (256, 384), (129, 16), (300, 513), (144, 272), (3, 200, 272), (2, 256, 128)]


def by_the_rule(x, power_of_two):
    """DeepGEMM's rule for whole blocks: amax, floor, quotient, product, conversion."""
    rows, columns = x.shape
    blocks = x.view(rows // 128, 128, columns // 128, 128)
    amax = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    # A tensor, because eager CUDA divides by a number by multiplying with its reciprocal.
    scale = amax / torch.tensor(448.0, device=x.device)
    if power_of_two:
        bits = scale.view(torch.int32)
        exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()
        scale = (exponent.clamp(1, 254) << 23).view(torch.float32)
    values = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn)
    return values.view(x.shape), scale.view(rows // 128, columns // 128)


def same(a, b):
    """Whether two tensors have the same bits."""
    width = {1: torch.uint8, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.view(width), b.view(width))


def assert_kernel_is_reference(weight, power_of_two):
    kernel = cast_blockwise(weight, power_of_two=power_of_two, backend="triton")
    reference = cast_blockwise(weight, power_of_two=power_of_two, backend="torch")
    assert same(kernel.weight_scale_inv, reference.weight_scale_inv)
    assert same(kernel.weight, reference.weight)
    return kernel


def of_many_magnitudes(rows, columns, seed):
    """Normal values, each block times its own power of two from 2^-30 to 2^30 and a factor near one."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=g, device="cuda", dtype=torch.float32)
    factor = torch.rand(rows // 128, columns // 128, generator=g, device="cuda") * 60 - 30
    x.view(rows // 128, 128, columns // 128, 128).mul_(torch.exp2(factor)[:, None, :, None])
    return x


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_billion_values_are_those_of_the_rule_and_of_the_reference(power_of_two):
    total = 0
    for seed in range(8):
        dtype = torch.bfloat16 if seed < 6 else torch.float32
        weight = of_many_magnitudes(32768, 4096, seed).to(dtype)
        kernel = assert_kernel_is_reference(weight, power_of_two)
        values, scales = by_the_rule(weight, power_of_two)
        assert same(kernel.weight_scale_inv, scales)
        assert same(kernel.weight, values)
        total += weight.numel()
    assert total > 10**9


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_edges_are_those_of_the_reference(shape, dtype, power_of_two):
    torch.manual_seed(0)
    assert_kernel_is_reference((torch.randn(shape, device="cuda") * 3).to(dtype), power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_finite_value_of_16_bits_in_blocks_of_its_neighbours_and_in_mixed_ones(dtype, power_of_two):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    values = values[values.isfinite()].cuda()
    ascending = values[values.float().sort().indices]
    mixed = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0)).cuda()]
    for each in (ascending, mixed):
        for width in (1, 16, 120):
            rows = each[: len(each) // width * width].view(-1, width)
            assert_kernel_is_reference(rows, power_of_two)
    # Each as the largest of its own block.
    assert_kernel_is_reference(ascending[:, None, None], power_of_two)


def test_the_middles_between_e4m3_values_round_to_nearest_even():
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (grid[:-1] + grid[1:]) / 2
    line = torch.cat([grid, middles, torch.nextafter(middles, grid[1:]), torch.nextafter(middles, grid[:-1])])
    line = torch.cat([line, -line]).cuda()
    for start in range(0, len(line), 127):
        row = torch.cat([torch.full((1,), 448.0, device="cuda"), line[start : start + 127]])[None]
        cast = assert_kernel_is_reference(row, False)
        assert cast.weight_scale_inv.item() == 1.0
    assert same(cast_blockwise(grid[None].cuda()).weight.cpu(), grid[None].to(torch.float8_e4m3fn))


def test_scales_next_to_powers_of_two_go_up_where_they_are_above():
    powers = torch.exp2(torch.arange(-18, 110, dtype=torch.float32, device="cuda")) * 448
    for toward in (0.0, math.inf):
        beside = torch.nextafter(powers, torch.full_like(powers, toward))
        for weight in (powers, beside, torch.nextafter(beside, torch.full_like(powers, toward))):
            assert_kernel_is_reference(weight[:, None, None], True)


@pytest.mark.parametrize("shape", [(384, 272), (512, 512)], ids=["ragged", "whole"])
@pytest.mark.parametrize(
    "view",
    [lambda w: w.t(), lambda w: w[::2], lambda w: w[:, 1:], lambda w: w[:, ::2], lambda w: w[:1].expand(200, -1)],
)
def test_strides_are_those_of_the_reference(view, shape):
    torch.manual_seed(0)
    assert_kernel_is_reference(view(torch.randn(shape, device="cuda", dtype=torch.bfloat16)), False)


def mixed_weights():
    """Two dtypes; whole, ragged and misaligned; views; experts."""
    torch.manual_seed(1)
    shapes = [(256, 256), (128, 384), (100, 100), (130, 144), (384, 128), (64, 48), (2, 256, 128), (3, 77, 13), (1, 1)]
    weights = {}
    for dtype in (torch.bfloat16, torch.float32):
        for shape in shapes:
            weights[f"{dtype}.{shape}"] = torch.randn(shape, device="cuda").to(dtype)
        weights[f"{dtype}.view"] = torch.randn(300, 272, device="cuda").to(dtype)[7:, 16:]
        weights[f"{dtype}.odd view"] = torch.randn(300, 272, device="cuda").to(dtype)[7:, 3:]
        weights[f"{dtype}.transposed"] = torch.randn(300, 272, device="cuda").to(dtype).t()
        weights[f"{dtype}.whole view"] = torch.randn(300, 272, device="cuda").to(dtype)[:256:2, 16:]
    weights["on the cpu"] = torch.randn(40, 40)
    return weights


@pytest.mark.parametrize("power_of_two", [False, True])
def test_many_weights_in_one_call_are_those_of_each_alone(power_of_two):
    weights = mixed_weights()
    wire = cast_many(weights, power_of_two=power_of_two)
    assert list(wire) == [f"{n}.{part}" for n in weights for part in ("weight", "weight_scale_inv")]
    for name, weight in weights.items():
        alone = cast_blockwise(weight, power_of_two=power_of_two, backend="torch")
        assert same(wire[f"{name}.weight"], alone.weight), name
        assert same(wire[f"{name}.weight_scale_inv"], alone.weight_scale_inv), name
        assert wire[f"{name}.weight"].device == weight.device


@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 300])
def test_any_number_of_weights_finds_its_blocks(count):
    torch.manual_seed(count)
    weights = {str(i): torch.randn(128 * (1 + i % 3), 128, device="cuda") * 2.0 ** (i % 20) for i in range(count)}
    wire = cast_many(weights)
    for name, weight in weights.items():
        alone = cast_blockwise(weight, backend="torch")
        assert same(wire[f"{name}.weight"], alone.weight)
        assert same(wire[f"{name}.weight_scale_inv"], alone.weight_scale_inv)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("shape", [(256, 256), (2, 130, 300)])
def test_a_value_that_is_not_finite_is_an_error_with_its_weight(shape, value, power_of_two):
    for name in mixed_weights():
        weights = mixed_weights()
        weights[name] = torch.ones(shape, device="cuda")
        weights[name].view(-1)[-1] = value
        with pytest.raises(ModelError, match=r"has an infinity or a NaN in 1 of its \d+ blocks") as caught:
            cast_many(weights, power_of_two=power_of_two)
        assert repr(name) in str(caught.value)


def test_the_host_waits_for_the_device_once():
    weights = {str(i): torch.randn(256, 256, device="cuda") for i in range(40)}
    cast_many(weights)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            cast_many(weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in told if "called a synchronizing" in str(each.message)]) == 1


def test_a_weight_of_more_than_two_to_the_31_values_is_cast_to_its_end():
    weight = torch.zeros(258, 4096, 2048, device="cuda", dtype=torch.bfloat16)
    assert weight.numel() > 2**31
    torch.manual_seed(0)
    weight[-1] = torch.randn(4096, 2048, device="cuda")
    for cast in (cast_blockwise(weight), cast_many_alone(weight)):
        last = cast_blockwise(weight[-1], backend="torch")
        assert same(cast.weight[-1], last.weight)
        assert same(cast.weight_scale_inv[-1], last.weight_scale_inv)
        assert not cast.weight[-2].view(torch.uint8).any()


def cast_many_alone(weight):
    """The weight by way of the grouped launch, which begins at two."""
    from nemo_rl_core.fp8.blockwise import pairs_of

    return pairs_of(cast_many({"small": weight[-1], "large": weight}))["large"]
