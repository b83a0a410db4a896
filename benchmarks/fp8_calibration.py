# SPDX-License-Identifier: Apache-2.0
"""What a calibration of FP8 KV scales adds to plain forward passes: JSON lines, ratios of one run on one device.

    python benchmarks/fp8_calibration.py [--rounds 8]

A round runs the same micro-batches plain and watched, in turns. `overhead` is the time that watching adds, divided by
that of the plain passes; the median of the rounds. The output head is left out of both: it would only make the share
look smaller. `to_result_ms` is what comes once, after all passes: histograms to the host, and the scales from them.
`by_torch` is `overhead` with torch's own operations in the place of the kernel. Without an NVIDIA GPU the model is tiny,
and the numbers say only that the script runs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.fp8 import histogram
from nemo_rl_core.fp8.calibration import ActivationObserver
from nemo_rl_core.fp8.calibration_result import CalibrationRequest, describe_hf_model
from nemo_rl_core.workers.calibration import calibration_passes, observe_attention

__all__ = ["measure"]

#: The shape of Qwen3-8B, with 8 of its 36 layers and few tokens: the layers are what is measured.
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
TINY = QWEN3_8B | {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
#: Rows and tokens of a micro-batch.
SHAPES = ((4, 2048), (16, 1024), (8, 2048), (4, 8192))
TINY_SHAPES = ((2, 64), (2, 256))
MICRO_BATCHES = 4


def batch_of(rows: int, tokens: int, device: str) -> tuple[BatchedDataDict, list[list[int]]]:
    """Return several micro-batches of random tokens; a tenth of the last half is padding, as in real batches."""
    generator = torch.Generator().manual_seed(0)
    total = rows * MICRO_BATCHES
    ids = torch.randint(0, QWEN3_8B["vocab_size"], (total, tokens), generator=generator)
    lengths = torch.randint(tokens * 9 // 10, tokens + 1, (total,), generator=generator)
    lengths[::rows] = tokens
    plan = [list(range(first, first + rows)) for first in range(0, total, rows)]
    return BatchedDataDict(input_ids=ids, input_lengths=lengths).to(device), plan


def seconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def by_torch() -> Generator[None]:
    """Count by torch's own operations."""
    kernel = histogram.add_activations
    histogram.add_activations = histogram.add_by_torch
    try:
        yield
    finally:
        histogram.add_activations = kernel


def one_shape(model: PreTrainedModel, rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    device = model.device.type
    batch, plan = batch_of(rows, tokens, device)
    request = CalibrationRequest(model=describe_hf_model(model.config, type(model).__name__), percentile=99.9)
    unused = ActivationObserver()

    def forward(ids: torch.Tensor) -> object:
        return model.get_decoder()(input_ids=ids, use_cache=False)

    def plain() -> None:
        calibration_passes(forward, batch, plan, unused)

    def watched() -> ActivationObserver:
        observer = ActivationObserver()
        with observe_attention(model, observer):
            calibration_passes(forward, batch, plan, observer)
        return observer

    def overheads(number: int) -> tuple[float, float]:
        """Return seconds of the plain passes, and the share that watching adds."""
        pairs = []
        for turn in range(number + 1):
            # In turns who is first: a device that gets slower while it warms up would be a cost of the second.
            order = (plain, watched) if turn % 2 else (watched, plain)
            took = {call: seconds(call, device) for call in order}
            pairs.append((took[plain], took[watched]))
        plains = statistics.median(p for p, _ in pairs[1:])
        return plains, statistics.median(w / p - 1 for p, w in pairs[1:])

    plain_s, overhead = overheads(rounds)
    observer = watched()
    row = {
        "micro-batch": [rows, tokens],
        "tokens": int(batch.tensor("input_lengths").sum()),
        "plain_ms": plain_s * 1e3,
        "overhead": overhead,
        "to_result_ms": seconds(lambda: request.result(observer), device) * 1e3,
    }
    with by_torch():
        row["by_torch"] = overheads(2)[1]
    return row


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return a row that says what was run, and one for each shape of micro-batches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = QWEN3_8B if device == "cuda" else TINY
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    what = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
        "dtype": "bfloat16",
    }
    shapes = SHAPES if device == "cuda" else TINY_SHAPES
    return [what, *(one_shape(model, *shape, rounds) for shape in shapes)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="overhead of a calibration over plain forward passes")
    parser.add_argument("--rounds", type=int, default=8)
    for each in measure(parser.parse_args().rounds):
        print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in each.items()}))
