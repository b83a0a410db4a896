# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of the FP8 blockwise cast: one pass over the weights, one launch for many.

Only ``fp8.blockwise`` imports this module, and only when it has a weight on an NVIDIA GPU: triton is no dependency.

A program casts one block of 128 x 128: it reads the block once, keeps it in registers, takes its amax, and writes
values and scale. That is 3 bytes moved for each bfloat16 value, and the memory's bandwidth is the limit. The amax is
taken of the bits as integers, which order the magnitudes of floats, put infinities above all numbers and NaNs above
infinities; a float maximum would lose a NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["Job", "cast"]

# Vector loads and stores of 16 bytes need rows and addresses that are multiples of this many elements, or bytes.
_ALIGNMENT = 16
# A thread then holds 128 values of 16 bits, or 64 of 32; measured on an H200, where 8 warps for 16 bits were 5 to 13 %
# slower and a limit on registers slower still.
_NUM_WARPS = {2: 4, 4: 8}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One weight to cast and where the result goes; all on one device.

    Attributes:
        source: ``[N, K]`` or ``[E, N, K]``, bfloat16, float16 or float32, with stride 1 in K.
        values: float8_e4m3fn of the same shape, contiguous; written.
        scales: float32, one for each block, contiguous; written.
    """

    source: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Programs that this weight takes."""
        return self.scales.numel()

    @property
    def whole(self) -> bool:
        """Whether all blocks are whole, so that nothing needs a mask."""
        return self.source.shape[-1] % 128 == 0 and self.source.shape[-2] % 128 == 0

    @property
    def aligned(self) -> bool:
        """Whether rows can be read and written 16 bytes at a time."""
        steps = (self.source.shape[-1], *self.source.stride()[:-1], self.source.data_ptr(), self.values.data_ptr())
        return all(step % _ALIGNMENT == 0 for step in steps)

    @property
    def arguments(self) -> tuple[int, ...]:
        """N, K, stride of an expert and stride of a row, in elements."""
        stride = self.source.stride()
        return (*self.source.shape[-2:], stride[0] if len(stride) == 3 else 0, stride[-2])


def cast(jobs: Sequence[Job], *, power_of_two: bool) -> torch.Tensor:
    """Start the cast of all jobs: one launch for each combination of dtype, alignment and raggedness.

    Nothing waits for the device.

    Args:
        jobs: At least one, all on one device.
        power_of_two: Round scales up to powers of two.

    Returns:
        int32 ``[len(jobs)]`` on the device, 1 where a source holds a value that is not finite.
    """
    device = jobs[0].source.device
    flags = torch.zeros(len(jobs), dtype=torch.int32, device=device)
    groups: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
    for index, job in enumerate(jobs):
        groups.setdefault((job.source.dtype, job.aligned, job.whole), []).append(index)
    one: Any = _one  # what jit returns takes launch options that its type does not know
    with torch.cuda.device(device):
        for (dtype, aligned, whole), indices in groups.items():
            options = {"POWER_OF_TWO": power_of_two, "WHOLE": whole, "num_warps": _NUM_WARPS[dtype.itemsize]}
            if len(indices) == 1:
                job, flag = jobs[indices[0]], flags[indices[0] :]
                one[(job.num_blocks,)](job.source, job.values, job.scales, flag, *job.arguments, **options)
            else:
                _launch_group(jobs, indices, flags, {**options, "ALIGNED": aligned})
    return flags


def _launch_group(jobs: Sequence[Job], indices: Sequence[int], flags: torch.Tensor, options: dict[str, Any]) -> None:
    """Cast several weights of one dtype in one launch."""
    rows, first = [], 0
    for index in indices:
        job = jobs[index]
        addresses = (job.source.data_ptr(), job.values.data_ptr(), job.scales.data_ptr())
        rows.append((*addresses, *job.arguments, first, index))
        first += job.num_blocks
    # Pinned, so that the copy does not wait for what the device still has to do.
    table = torch.tensor(rows, dtype=torch.int64).pin_memory().to(flags.device, non_blocking=True)
    steps = (len(rows) - 1).bit_length()
    # The first source and values go along for their dtypes; the addresses are in the table.
    like = jobs[indices[0]]
    many: Any = _many
    many[(first,)](like.source, like.values, table, flags, len(rows), steps, FIELDS=len(rows[0]), **options)


@triton.jit
def _block(x, q, scale, flag, rows, columns, stride, K, POWER_OF_TWO: tl.constexpr, WHOLE: tl.constexpr):
    """Cast one block. ``x``, ``q``: its first element; ``rows``, ``columns``: what is left from there to the edges."""
    r = tl.arange(0, 128)[:, None]
    c = tl.arange(0, 128)[None, :]
    if WHOLE:
        values = tl.load(x + (r * stride + c))
    else:
        inside = (r < rows) & (c < columns)
        values = tl.load(x + (r * stride + c), mask=inside, other=0.0)
    # As wide as the weight's own dtype: 16-bit values take half the registers until the amax is known.
    if values.dtype.primitive_bitwidth == 16:
        magnitudes = values.to(tl.int16, bitcast=True) & 0x7FFF
        # tl.max gives 32 bits.
        top = tl.cast(tl.max(tl.max(magnitudes, axis=1), axis=0), tl.int16)
    else:
        magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        top = tl.max(tl.max(magnitudes, axis=1), axis=0)
    top = tl.cast(top, values.dtype, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    # 0x38D1B717 is 1e-4, 0x7F800000 infinity. Division is spelled out: `/` is only nearly rounded.
    amax = tl.maximum(top, 0x38D1B717).to(tl.float32, bitcast=True)
    result = tl.div_rn(amax, 448.0)
    if POWER_OF_TWO:
        bits = result.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, 1), 254)
        result = tl.where(top < 0x7F800000, (exponent << 23).to(tl.float32, bitcast=True), result)
    # The conversion rounds to nearest even and saturates.
    cast_values = (values.to(tl.float32) * tl.div_rn(1.0, result)).to(tl.float8e4nv)
    if WHOLE:
        tl.store(q + (r * K + c), cast_values)
    else:
        tl.store(q + (r * K + c), cast_values, mask=inside)  # pyrefly: ignore[unbound-name] - WHOLE is a constant
    tl.store(scale, result)
    tl.store(flag, 1, mask=top >= 0x7F800000)


@triton.jit
def _one(x, q, scales, flag, N, K, stride_e, stride_n, POWER_OF_TWO: tl.constexpr, WHOLE: tl.constexpr):
    """Cast one weight; a program is a block, blocks of a row side by side."""
    block = tl.program_id(0)
    across = tl.cdiv(K, 128)
    per_expert = tl.cdiv(N, 128) * across
    expert = (block // per_expert).to(tl.int64)
    row = (block % per_expert // across).to(tl.int64) * 128
    column = block % across * 128
    x += expert * stride_e + row * stride_n + column
    q += (expert * N + row) * K + column
    _block(x, q, scales + block, flag, N - row, K - column, stride_n, K, POWER_OF_TWO, WHOLE)


@triton.jit(do_not_specialize=["count", "steps"])
def _many(
    like_x,
    like_q,
    table,
    flags,
    count,
    steps,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Cast many weights; ``table`` has a row for each, and a program finds its own by bisection of the first blocks.

    An array with the row of each program was tried on an H200, and was slower.
    """
    program = tl.program_id(0)
    which = 0
    for step in range(steps):
        middle = which + (1 << (steps - 1 - step))
        first = tl.load(table + middle * FIELDS + 7, mask=middle < count, other=0x7FFFFFFF)
        which = tl.where(first <= program, middle, which)
    entry = table + which * FIELDS
    x = tl.load(entry).to(like_x.dtype)
    q = tl.load(entry + 1).to(like_q.dtype)
    scales = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    N = tl.load(entry + 3).to(tl.int32)
    K = tl.load(entry + 4).to(tl.int32)
    stride_e = tl.load(entry + 5)
    stride_n = tl.load(entry + 6).to(tl.int32)
    block = (program - tl.load(entry + 7)).to(tl.int32)
    if ALIGNED:
        K = tl.multiple_of(K, 16)
        stride_e = tl.multiple_of(stride_e, 16)
        stride_n = tl.multiple_of(stride_n, 16)
        x = tl.multiple_of(x, 16)
        q = tl.multiple_of(q, 16)
    across = tl.cdiv(K, 128)
    per_expert = tl.cdiv(N, 128) * across
    expert = (block // per_expert).to(tl.int64)
    row = (block % per_expert // across).to(tl.int64) * 128
    column = block % across * 128
    x += expert * stride_e + row * stride_n + column
    q += (expert * N + row) * K + column
    flag = flags + tl.load(entry + 8)
    _block(x, q, scales + block, flag, N - row, K - column, stride_n, K, POWER_OF_TWO, WHOLE)
