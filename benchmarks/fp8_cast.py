# SPDX-License-Identifier: Apache-2.0
"""The FP8 blockwise cast on one NVIDIA GPU: JSON lines with ratios to the copy bandwidth of the same device and run.

    python benchmarks/fp8_cast.py [--repeats 7]

Bandwidth is bytes read and written over time. A cast of a bfloat16 value moves 3 bytes and a copy of it 4, so a cast
that is as good as a copy takes three quarters of its time. `of_copy` divides by the faster of two ways to run
`dst.copy_(src)` at the same shape, `of_best_copy` by the best copy of this run at any size. Each measurement goes round
several sets of tensors, so that no cache helps, and is the median of the repeats.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nemo_rl_core.fp8.blockwise import BlockwiseWeight, cast_blockwise, cast_many
from nemo_rl_core.fp8.blockwise_triton import Job, cast

__all__ = ["measure"]

SHAPES = ((32768, 8192), (14336, 4096))
CALLS = 24
#: Cycles for which the device is kept busy while the host prepares what is timed: about 20 ms.
HEAD_START = 40_000_000
#: The linears of a layer of Qwen3-8B, which has 36 layers: hidden 4096, 32 query and 8 KV heads of 128, MLP 12288.
LAYER_8B = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (12288, 4096),
    "mlp.up_proj": (12288, 4096),
    "mlp.down_proj": (4096, 12288),
}
LAYERS_8B = 36

Calls = Sequence[Callable[[], object]]


def on_stream(calls: Calls, repeats: int, count: int = CALLS) -> float:
    """Return seconds per call, queued behind a kernel that gives the host a head start."""
    for call in calls:
        call()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)
        start.record()
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / count)
    return statistics.median(seconds)


def in_graph(calls: Calls, repeats: int) -> float:
    """Return seconds per call of a captured graph of many."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), CALLS):
            call()
    graph.replay()
    return on_stream([graph.replay], repeats, 1) / CALLS


def moved(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def job_of(source: torch.Tensor) -> Job:
    rows, columns = source.shape
    values = torch.empty(source.shape, dtype=torch.float8_e4m3fn, device="cuda")
    return Job(source=source, values=values, scales=torch.empty(math.ceil(rows / 128), columns // 128, device="cuda"))


def deep_gemm_eager(x: torch.Tensor) -> BlockwiseWeight:
    """DeepGEMM's rule in the plainest torch, padding included: what a trainer without a kernel runs."""
    rows, columns = x.shape
    padded = x.new_zeros(math.ceil(rows / 128) * 128, math.ceil(columns / 128) * 128)
    padded[:rows, :columns] = x
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    values = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn).view_as(padded)[:rows, :columns].contiguous()
    return BlockwiseWeight(weight=values, weight_scale_inv=scale.view(blocks.shape[0], blocks.shape[2]))


def torchao_kernel() -> tuple[Callable[[torch.Tensor], Any] | None, str]:
    """Return torchao's kernel and its version, or None and why not."""
    try:
        import torchao
        from torchao.prototype.blockwise_fp8_training.kernels import triton_fp8_blockwise_weight_quant_rhs
    except ImportError as error:
        return None, f"{type(error).__name__}: {error}"
    return triton_fp8_blockwise_weight_quant_rhs, torchao.__version__


def copy_bandwidth(sources: Sequence[torch.Tensor], repeats: int) -> dict[str, float]:
    """Return GB/s of both ways to run a copy."""
    copies = [torch.empty_like(source) for source in sources]
    calls = [lambda s=s, d=d: d.copy_(s) for s, d in zip(sources, copies, strict=True)]
    total = 2 * sources[0].nbytes
    return {"stream": total / on_stream(calls, repeats) / 1e9, "graph": total / in_graph(calls, repeats) / 1e9}


def one_shape(shape: tuple[int, int], repeats: int) -> list[dict[str, Any]]:
    sets = max(3, math.ceil(5e8 / (2 * math.prod(shape))))
    sources = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    jobs = [job_of(source) for source in sources]
    total = moved(jobs[0].source, jobs[0].values, jobs[0].scales)
    copies = copy_bandwidth(sources, repeats)
    copy = max(copies.values())
    rows: list[dict[str, Any]] = [{"what": "copy", "shape": shape, "gb_s": copy, **copies}]
    ours = 0.0
    for power_of_two in (False, True):
        seconds = in_graph([lambda j=j, p=power_of_two: cast([j], power_of_two=p) for j in jobs], repeats)
        ours = ours or seconds
        gb_s = total / seconds / 1e9
        rows.append(
            {"what": "cast", "shape": shape, "power_of_two": power_of_two, "gb_s": gb_s, "of_copy": gb_s / copy}
        )
    for what, eager in (
        ("eager, DeepGEMM's rule", deep_gemm_eager),
        ("eager, our reference", lambda x: cast_blockwise(x, backend="torch")),
    ):
        seconds = on_stream([lambda e=eager: e(sources[0])], 3, 1)
        rows.append(
            {"what": what, "shape": shape, "gb_s": total / seconds / 1e9, "kernel_times_faster": seconds / ours}
        )
    kernel, version = torchao_kernel()
    if kernel is None:
        rows.append({"what": "torchao", "shape": shape, "absent": version})
    else:
        seconds = in_graph([lambda s=s: kernel(s, 128) for s in sources], repeats)
        gb_s = total / seconds / 1e9
        rows.append(
            {"what": "torchao", "version": version, "shape": shape, "gb_s": gb_s, "of_copy": gb_s / copy}
            | {"our_times_faster": seconds / ours}
        )
    return rows


def all_linears(repeats: int) -> dict[str, Any]:
    """All linears of an 8B model: the one launch, and the whole call with its allocations and its check."""
    weights = {
        f"model.layers.{layer}.{name}": torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
        for layer in range(LAYERS_8B)
        for name, shape in LAYER_8B.items()
    }
    jobs = [job_of(weight) for weight in weights.values()]
    total = sum(moved(job.source, job.values, job.scales) for job in jobs)
    launch = on_stream([lambda: cast(jobs, power_of_two=False)], repeats, 1)
    jobs.clear()
    calls = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        cast_many(weights)
        calls.append(time.perf_counter() - start)
    call = statistics.median(calls[1:])
    return {
        "what": "all linears of Qwen3-8B, one call",
        "weights": len(weights),
        "parameters": sum(weight.numel() for weight in weights.values()),
        "launch_ms": launch * 1e3,
        "call_ms": call * 1e3,
        "gb_s": total / launch / 1e9,
        "gb_s_of_call": total / call / 1e9,
    }


def measure(repeats: int) -> list[dict[str, Any]]:
    """Return the rows, each with its ratio to the best copy of this run."""
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        rows += one_shape(shape, repeats)
    rows.append(all_linears(repeats))
    best = max(row["gb_s"] for row in rows if row["what"] == "copy")
    for row in rows:
        if "gb_s" in row:
            row["of_best_copy"] = row["gb_s"] / best
        if "gb_s_of_call" in row:
            row["call_of_best_copy"] = row["gb_s_of_call"] / best
    device = {"what": "device", "name": torch.cuda.get_device_name(), "torch": torch.__version__}
    return [device, *rows]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="ratios of the FP8 cast to the copy bandwidth of this GPU")
    parser.add_argument("--repeats", type=int, default=7)
    for each in measure(parser.parse_args().repeats):
        print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in each.items()}))
