# SPDX-License-Identifier: Apache-2.0
"""Rounding of scales to what an engine keeps, always upwards.

vLLM's ``Fp8Config`` and ModelOpt config keep loaded scales in the model's dtype, usually bfloat16: rounding to nearest
moves a scale by up to 0.39 %, half of all scales downwards. A scale that is too small saturates the largest values; one
that is too large by this much costs nothing that can be measured. So a scale is rounded up here, before it is sent:
the engine's own rounding then has nothing left to do. A compressed-tensors config and the live buffers keep float32.
"""

import math
import numbers
import struct
from typing import Literal, get_args

from nemo_rl_core.errors import ScaleNameError

__all__ = ["ScaleDtype", "round_up_scale"]

#: Dtypes in which engines keep scales.
ScaleDtype = Literal["float32", "bfloat16", "float16"]


def round_up_scale(value: float, dtype: ScaleDtype = "bfloat16") -> float:
    """Return the smallest number of ``dtype`` that is not below ``value``.

    ``round_up_scale(0.0123456)`` is 0.01239013671875, where rounding to nearest gives 0.0123291015625.

    Args:
        value: A scale, positive and finite.
        dtype: What the engine keeps.

    Raises:
        ScaleNameError: If the value is no positive finite number, the dtype is another, or its largest number is below
            the value.
    """
    if dtype not in get_args(ScaleDtype):
        raise ScaleNameError(f"a scale is kept as one of {', '.join(get_args(ScaleDtype))}, got {dtype!r}")
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < math.inf:
        raise ScaleNameError(
            f"a scale must be a positive and finite number, got {value!r}; round what a calibration gave"
        )
    rounded = _up_in_16_bits(value) if dtype == "float16" else _up_in_32_bits(value, 16 if dtype == "bfloat16" else 0)
    if math.isinf(rounded):
        raise ScaleNameError(
            f"{dtype} has no number at or above the scale {value!r}; a scale of this size means that the calibration "
            f"saw broken activations"
        )
    return rounded


def _up_in_32_bits(value: float, dropped: int) -> float:
    """Round up to a float32 whose lowest ``dropped`` bits are zero; for positive numbers bits ascend as numbers do."""
    try:
        bits = struct.unpack("<I", struct.pack("<f", float(value)))[0]
    except OverflowError:
        return math.inf
    if struct.unpack("<f", struct.pack("<I", bits))[0] < value:
        bits += 1
    bits = -(-bits >> dropped) << dropped
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _up_in_16_bits(value: float) -> float:
    try:
        bits = struct.unpack("<H", struct.pack("<e", float(value)))[0]
    except OverflowError:
        return math.inf
    if struct.unpack("<e", struct.pack("<H", bits))[0] < value:
        bits += 1
    return struct.unpack("<e", struct.pack("<H", bits))[0]
