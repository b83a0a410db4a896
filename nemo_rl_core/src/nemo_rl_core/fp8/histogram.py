# SPDX-License-Identifier: Apache-2.0
"""Histograms of magnitudes that add up exactly, whatever the order, the batches and the ranks.

A bin holds the float32 values that share their exponent and the first 5 bits of their mantissa, so a bin is at most
1/32 of its lower edge wide (below the smallest normal float32 the bins are as wide as just above it). Counts are
integers: two histograms of parts add up to the histogram of the whole, bit for bit.
"""

import functools
import importlib
import math
import warnings
from fractions import Fraction
from types import ModuleType

import torch

from nemo_rl_core.errors import DataError

__all__ = [
    "NUM_BINS",
    "RELATIVE_WIDTH",
    "add_activations",
    "add_by_torch",
    "bin_of",
    "count_above",
    "count_below",
    "non_finite",
    "percentile_of",
]

_MANTISSA_BITS = 5
_SHIFT = 23 - _MANTISSA_BITS
#: Bins of one histogram; those from the exponent 255 on hold infinities and NaN.
NUM_BINS = 256 << _MANTISSA_BITS
_FIRST_NON_FINITE = 255 << _MANTISSA_BITS
#: A percentile is at most this much of its value too large, and never too small.
RELATIVE_WIDTH = 2.0**-_MANTISSA_BITS


def add_activations(x: torch.Tensor, real_BS: torch.Tensor, counts: torch.Tensor, amax: torch.Tensor) -> None:
    """Add the magnitudes of an attention input to a histogram; nothing waits for the device.

    Args:
        x: [B, heads, S, head size].
        real_BS: bool [B, S], contiguous; tokens that are not real are left out.
        counts: int64 [NUM_BINS], contiguous; is added to.
        amax: float32 [1], the largest magnitude so far; is raised. NaN counts as the largest.
    """
    kernel = _kernel() if x.is_cuda else None
    if kernel is not None and kernel.fits(x):
        try:
            kernel.add_activations(x, real_BS, counts, amax, num_bins=NUM_BINS, shift=_SHIFT)
        except kernel.KernelError as error:
            # Python shows a warning of one place once.
            warnings.warn(
                f"{error}; torch's own operations count, and a pass takes three times as long",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            return
    add_by_torch(x, real_BS, counts, amax)


def add_by_torch(x: torch.Tensor, real_BS: torch.Tensor, counts: torch.Tensor, amax: torch.Tensor) -> None:
    """Do the same by torch's own operations, on any device: the reference of the kernel."""
    inside = real_BS[:, None, :, None].expand_as(x)
    # Where and not a product: padding may hold NaN. Not by indexing: that would wait for the device.
    magnitudes = torch.where(inside, x.float().abs(), 0.0)
    amax.copy_(torch.maximum(amax, magnitudes.max()))
    counts.index_add_(0, bin_of(magnitudes.contiguous()).flatten(), inside.flatten().long())


@functools.cache
def _kernel() -> ModuleType | None:
    """Return the module of the kernel, None where torch is for other GPUs or has come without NVIDIA's bindings."""
    if torch.version.hip is not None:
        return None
    try:
        return importlib.import_module("nemo_rl_core.fp8.histogram_cuda")
    except ImportError:
        return None


def bin_of(magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the bin of each value, int64 of the same shape; values must be float32 and not negative."""
    return (magnitudes.view(torch.int32) >> _SHIFT).long()


def non_finite(counts: torch.Tensor) -> int:
    """Return how many values were infinite or NaN."""
    return int(counts[_FIRST_NON_FINITE:].sum())


def percentile_of(counts: torch.Tensor, percentile: float, amax: float) -> float:
    """Return the percentile by nearest rank, as the upper edge of its bin and at most ``amax``.

    Args:
        counts: int64 [NUM_BINS] on the CPU, with at least one value and none that is not finite.
        percentile: Above 0 and at most 100; 100 is ``amax`` itself.
        amax: The largest value.

    Raises:
        DataError: If the percentile is another number.
    """
    if isinstance(percentile, bool) or not 0 < percentile <= 100:
        raise DataError(
            f"a percentile must be above 0 and at most 100, got {percentile!r}; 100 takes the largest value"
        )
    total = int(counts.sum())
    # In fractions: 99.9 / 100 x n in floats may be just above a whole number.
    rank = math.ceil(Fraction(str(float(percentile))) * total / 100)
    index = int(torch.searchsorted(counts.cumsum(0), rank))
    return min(_upper_edges()[index].item(), amax) if percentile < 100 else amax


def count_above(counts: torch.Tensor, limit: float, amax: float) -> int:
    """Return how many values may lie above ``limit``: those of every bin that reaches above it, so never too few."""
    return 0 if amax <= limit else int(counts[_upper_edges() > limit].sum())


def count_below(counts: torch.Tensor, limit: float) -> int:
    """Return how many values may lie below ``limit``, zeros left out with the rest of the lowest bin; never too few."""
    lower = _upper_edges().roll(1)
    lower[0] = 0.0
    inside = lower < limit
    inside[0] = False
    return int(counts[inside].sum())


def _upper_edges() -> torch.Tensor:
    """Return float32 [NUM_BINS], the first value beyond each bin; infinity from the last finite bin on."""
    edges = (torch.arange(1, NUM_BINS + 1) << _SHIFT).clamp(max=255 << 23)
    return edges.to(torch.int32).view(torch.float32)
