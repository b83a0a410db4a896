# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel of the calibration's histograms: one pass over the activations, counted in shared memory.

Only ``fp8.histogram`` imports this module, and only when it has activations on an NVIDIA GPU: ``cuda.bindings`` is no
dependency, torch brings it on Linux, with the compiler (NVRTC) that makes the kernel at its first use.

It is CUDA C++ and no Triton since Triton has no counters in shared memory. On an H200 (16,384 tokens of 48 heads of
128) counters in global memory took 0.80 to 1.6 ms, ``tl.histogram`` with 1,024 bins instead of 8,192 took 1.2 ms, and
counters in shared memory 0.10 ms, which is the time to read the activations and little more.
"""

import ctypes
import functools
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

__all__ = ["KernelError", "add_activations", "fits"]

_THREADS = 1024
#: Bytes of one load.
_VECTOR_BYTES = 16
# How a dtype's bits become the float32 bits of its magnitude.
_MAGNITUDE_BITS = {
    torch.bfloat16: "(unsigned)(word & 0x7FFF) << 16",
    torch.float16: "half_bits(word) & 0x7FFFFFFF",
    torch.float32: "word & 0x7FFFFFFF",
}
_SOURCE = """
__device__ unsigned half_bits(unsigned short word) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(word));
  return __float_as_uint(value);
}

struct alignas(sizeof(WORD) * VECTOR) Words { WORD at[VECTOR]; };

// An item is VECTOR neighbours of one head of one token; items of a token are neighbours.
extern "C" __global__ void add_activations(
    const WORD* x, const unsigned char* real_BS, unsigned long long* counts, int* amax,
    long long stride_b, long long stride_h, long long stride_s, int heads, int tokens, int items_of_head, int items) {
  __shared__ unsigned bins[NUM_BINS];
  __shared__ unsigned top;
  for (int i = threadIdx.x; i < NUM_BINS; i += blockDim.x) bins[i] = 0;
  if (threadIdx.x == 0) top = 0;
  __syncthreads();

  unsigned largest = 0;
  for (long long item = blockIdx.x * (long long)blockDim.x + threadIdx.x; item < items;
       item += (long long)gridDim.x * blockDim.x) {
    int row = (int)item / items_of_head, column = (int)item % items_of_head;
    int token = row / heads, head = row % heads;
    if (!real_BS[token]) continue;
    const WORD* start = x + token / tokens * stride_b + head * stride_h + token % tokens * stride_s;
    Words words = reinterpret_cast<const Words*>(start)[column];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
      WORD word = words.at[i];
      unsigned bits = MAGNITUDE_BITS;
      largest = max(largest, bits);
      atomicAdd(&bins[bits >> SHIFT], 1u);
    }
  }
  atomicMax(&top, largest);
  __syncthreads();

  for (int i = threadIdx.x; i < NUM_BINS; i += blockDim.x)
    if (bins[i]) atomicAdd(&counts[i], (unsigned long long)bins[i]);
  // Bits of magnitudes ascend as their values do, as signed numbers too, and NaN is above all.
  if (threadIdx.x == 0) atomicMax(amax, (int)top);
}
"""
_TYPES = (*[ctypes.c_void_p] * 4, *[ctypes.c_longlong] * 3, *[ctypes.c_int] * 4)


class KernelError(RuntimeError):
    """The kernel could not be made or started on this machine."""


def fits(x: torch.Tensor) -> bool:
    """Return whether the kernel takes this tensor, [B, heads, S, head size]."""
    return (
        type(x) is torch.Tensor
        and x.dtype in _MAGNITUDE_BITS
        and (x.stride(-1) == 1 or x.shape[-1] == 1)
        and 0 < x.numel() < 2**31
    )


def add_activations(
    x: torch.Tensor, real_BS: torch.Tensor, counts: torch.Tensor, amax: torch.Tensor, *, num_bins: int, shift: int
) -> None:
    """Add activations of real tokens to a histogram of their magnitudes; nothing waits for the device.

    Args:
        x: [B, heads, S, head size] on an NVIDIA GPU, one that ``fits``.
        real_BS: bool [B, S], contiguous.
        counts: int64 [num_bins], contiguous; is added to.
        amax: float32 [1], a magnitude; is raised.
        num_bins: Number of bins.
        shift: A magnitude's bin is its float32 bits without the lowest ``shift``.

    Raises:
        KernelError: If the kernel could not be made or started.
    """
    size, heads, tokens, width = x.shape
    vector = _VECTOR_BYTES // x.element_size()
    if width % vector or any(n % vector for n in x.stride()[:-1]) or x.data_ptr() % _VECTOR_BYTES:
        vector = 1
    items = size * heads * tokens * (width // vector)
    tensors = (x.data_ptr(), real_BS.data_ptr(), counts.data_ptr(), amax.data_ptr())
    values = (*tensors, *x.stride()[:-1], heads, tokens, width // vector, items)
    with torch.cuda.device(x.device):
        kernel, num_processors = _kernel(x.device.index, x.dtype, vector, num_bins, shift)
        # Two blocks of 1,024 threads and 32 KiB are what a processor holds.
        blocks = min(2 * num_processors, -(-items // _THREADS))
        stream = torch.cuda.current_stream().cuda_stream
        _done(driver.cuLaunchKernel(kernel, blocks, 1, 1, _THREADS, 1, 1, 0, stream, (values, _TYPES), 0))


@functools.cache
def _kernel(device: int, dtype: torch.dtype, vector: int, num_bins: int, shift: int) -> tuple[Any, int]:
    """Return the kernel for one kind of tensor on the current device, and the device's number of processors."""
    properties = torch.cuda.get_device_properties(device)
    names = {
        "WORD": "unsigned" if dtype.itemsize == 4 else "unsigned short",
        "VECTOR": vector,
        "NUM_BINS": num_bins,
        "SHIFT": shift,
        "MAGNITUDE_BITS": f"({_MAGNITUDE_BITS[dtype]})",
    }
    options = [f"--gpu-architecture=sm_{properties.major}{properties.minor}"]
    options += [f"-D{name}={value}" for name, value in names.items()]
    program = _done(nvrtc.nvrtcCreateProgram(_SOURCE.encode(), b"histogram.cu", 0, [], []))
    try:
        compiled = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if compiled[0]:
            log = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
            _done(nvrtc.nvrtcGetProgramLog(program, log))
            raise KernelError(f"NVRTC did not compile the histogram for {options[0]}: {log.decode(errors='replace')}")
        code = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))
        _done(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    # Never unloaded: it is small, and the process may calibrate again.
    module = _done(driver.cuModuleLoadData(code))
    return _done(driver.cuModuleGetFunction(module, b"add_activations")), properties.multi_processor_count


def _done(answer: tuple[Any, ...]) -> Any:
    """Return what a call gave beside its status."""
    status, *rest = answer
    if status:
        raise KernelError(f"a call of CUDA for the histogram failed: {status}")
    return rest[0] if rest else None
