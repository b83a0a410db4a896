# SPDX-License-Identifier: Apache-2.0
"""Rounding of scales: never down, never further than the next number, and nothing left for the engine to round."""

import itertools
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.errors import ScaleNameError
from nemo_rl_core.fp8.scale_rounding import round_up_scale

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST_BF16 = struct.unpack("<f", struct.pack("<I", 0x7F7F0000))[0]


def positive_bf16() -> list[float]:
    """Every positive finite bfloat16, ascending."""
    return [struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in range(1, 0x7F80)]


def test_every_bfloat16_and_its_neighbours_round_as_they_should() -> None:
    """All 32639 of them: the number stays, what is above it goes to the next, what is below it comes up to it."""
    numbers = positive_bf16()
    assert numbers[0] == 2.0**-133
    assert numbers[-1] == LARGEST_BF16
    for number, following in itertools.pairwise(numbers):
        assert round_up_scale(number) == number
        assert round_up_scale(math.nextafter(number, math.inf)) == following
        assert round_up_scale(math.nextafter(number, 0.0)) == number
        assert round_up_scale((number + following) / 2) == following
        assert round_up_scale(math.nextafter(following, 0.0)) == following
    assert round_up_scale(5e-324) == numbers[0]


def test_every_float16_and_its_neighbours_round_as_they_should() -> None:
    numbers = [struct.unpack("<e", struct.pack("<H", bits))[0] for bits in range(1, 0x7C00)]
    for number, following in itertools.pairwise(numbers):
        assert round_up_scale(number, "float16") == number
        assert round_up_scale(math.nextafter(number, math.inf), "float16") == following
        assert round_up_scale(math.nextafter(following, 0.0), "float16") == following


@pytest.mark.parametrize("dtype", DTYPES)
@given(value=st.floats(1e-7, 6e4))
def test_what_the_engine_keeps_is_not_below_the_calibrated_value(dtype: str, value: float) -> None:
    """The engine's own rounding changes nothing any more, and one number lower would be too low."""
    rounded = round_up_scale(value, dtype)  # type: ignore[arg-type]
    assert Fraction(rounded) >= Fraction(value)
    kept = torch.tensor([rounded], dtype=torch.float32).to(DTYPES[dtype])
    assert kept.item() == rounded
    below = torch.nextafter(kept, torch.zeros_like(kept))
    assert below.item() < value


def test_rounding_to_nearest_would_have_gone_down() -> None:
    assert torch.tensor(0.0123456).to(torch.bfloat16).item() == 0.0123291015625
    assert round_up_scale(0.0123456) == 0.01239013671875


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, -math.inf, True, "1", None, 1j])
def test_what_is_no_scale_is_refused(value: object) -> None:
    with pytest.raises(ScaleNameError, match="positive and finite"):
        round_up_scale(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (math.nextafter(LARGEST_BF16, math.inf), "bfloat16"),
        (3.4e38, "bfloat16"),
        (1e300, "bfloat16"),
        (Fraction(10**400), "bfloat16"),
        (3.5e38, "float32"),
        (65504.1, "float16"),
        (7e4, "float16"),
    ],
)
def test_a_scale_beyond_the_largest_number_is_refused_and_not_infinite(value: float, dtype: str) -> None:
    with pytest.raises(ScaleNameError, match=f"{dtype} has no number at or above"):
        round_up_scale(value, dtype)  # type: ignore[arg-type]


def test_the_largest_numbers_are_kept() -> None:
    assert round_up_scale(LARGEST_BF16) == LARGEST_BF16
    assert round_up_scale(65504.0, "float16") == 65504.0
    assert round_up_scale(np.float32(0.5)) == 0.5  # type: ignore[arg-type]


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ScaleNameError, match="kept as one of float32, bfloat16, float16, got 'float8'"):
        round_up_scale(1.0, "float8")  # type: ignore[arg-type]
