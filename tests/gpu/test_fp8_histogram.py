# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel of the calibration's histograms, count for count against torch's own operations on the same GPU."""

import warnings

import pytest
import torch

from nemo_rl_core.fp8 import histogram
from nemo_rl_core.fp8.calibration import ActivationObserver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and this machine has none"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def empty():
    return torch.zeros(histogram.NUM_BINS, dtype=torch.int64, device="cuda"), torch.zeros(1, device="cuda")


def by_both(x, real):
    """Counts and amax by the kernel and by torch; a warning would say that the kernel was not used."""
    kernel = histogram._kernel()
    assert kernel is not None
    assert kernel.fits(x)
    results = []
    for add in (histogram.add_activations, histogram.add_by_torch):
        counts, amax = empty()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            add(x, real, counts, amax)
        results.append((counts, amax))
    return results


def assert_same(x, real):
    (counts, amax), (expected, expected_amax) = by_both(x, real)
    assert torch.equal(counts, expected)
    assert torch.equal(amax, expected_amax)
    assert int(counts.sum()) == int(real.sum()) * x.shape[1] * x.shape[3]


def real_of(size, tokens):
    lengths = torch.arange(1, size + 1, device="cuda") * tokens // size
    return torch.arange(tokens, device="cuda")[None] < lengths[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (3, 4, 33, 8), (2, 8, 129, 128), (4, 5, 300, 80)])
def test_it_counts_as_torch_does(shape, dtype):
    torch.manual_seed(0)
    # Magnitudes over the whole range of a float16, below its normal numbers too.
    x = torch.randn(shape, device="cuda") * 2.0 ** torch.randint(-24, 13, shape, device="cuda")
    assert_same(x.to(dtype), real_of(shape[0], shape[2]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_counts_views_as_attention_gets_them(dtype):
    torch.manual_seed(0)
    whole = torch.randn(2, 64, 24, 64, device="cuda").to(dtype)
    fused = whole.transpose(1, 2)
    for x in (fused, fused[:, 3:11], fused[:, ::2], fused[..., 3:40], fused[:, :1].expand(2, 5, 64, 64)):
        assert_same(x, real_of(2, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_counts_every_magnitude_of_a_dtype(dtype):
    bits = torch.arange(2**16, dtype=torch.int32, device="cuda")
    x = (bits << 16).view(torch.float32).to(dtype) if dtype == torch.float32 else bits.short().view(dtype)
    finite = torch.where(x.isfinite(), x, 0)
    assert_same(finite.view(1, 8, 64, 128), torch.ones(1, 64, dtype=torch.bool, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_counts_on_real_tokens_and_not_on_padding(dtype, value):
    x = torch.ones(2, 2, 8, 16, device="cuda", dtype=dtype)
    x[0, 1, 7, 3] = value
    real = torch.ones(2, 8, dtype=torch.bool, device="cuda")
    (counts, amax), _ = by_both(x, real)
    assert histogram.non_finite(counts) == 1
    assert not amax.isfinite().all()
    real[0, 7] = False
    assert_same(x, real)


def test_calls_add_up_beyond_32_bits_and_to_the_largest_magnitude():
    x = torch.full((1, 1, 4, 8), 2.0, device="cuda")
    real = torch.ones(1, 4, dtype=torch.bool, device="cuda")
    counts, amax = empty()
    counts += 2**32 - 1
    for value in (1.0, 3.0, 2.0):
        histogram.add_activations(x * value, real, counts, amax)
    assert amax.item() == 6.0
    assert int(counts.sum()) == histogram.NUM_BINS * (2**32 - 1) + 3 * 32


def test_what_the_kernel_does_not_take_goes_to_torch():
    kernel = histogram._kernel()
    real = torch.ones(2, 8, dtype=torch.bool, device="cuda")
    for x in (torch.randn(2, 2, 8, 4, device="cuda").double(), torch.randn(2, 2, 4, 8, device="cuda").transpose(2, 3)):
        assert not kernel.fits(x)
        counts, amax = empty()
        histogram.add_activations(x, real, counts, amax)
        assert int(counts.sum()) == x.numel()


def test_an_observer_never_waits_for_the_device():
    observer, x = ActivationObserver(), torch.randn(2, 4, 8, 16, device="cuda", dtype=torch.bfloat16)
    real = torch.ones(2, 8, dtype=torch.bool, device="cuda")
    with observer.tokens(real):
        observer.observe(0, x, x, x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            observer.observe(0, x, x, x)
            observer.observe(1, x, x, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert int(observer._counts[0].sum()) == 2 * 3 * x.numel()


def test_rows_of_several_microbatches_and_both_ways_give_the_same_scales():
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, heads, 65, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    real = real_of(4, 65)
    results = []
    for device, parts in (("cuda", [[0, 1, 2, 3]]), ("cuda", [[3], [0, 2], [1]]), ("cpu", [[0, 1, 2, 3]])):
        observer = ActivationObserver()
        for rows in parts:
            with observer.tokens(real[rows].to(device)):
                observer.observe(5, *(x[rows].to(device) for x in (q, k, v)))
        scales = observer.scales(percentile=99.9, include_q=True)
        results.append((scales, observer.amax(), observer.rates(scales)))
    assert results[0] == results[1] == results[2]
