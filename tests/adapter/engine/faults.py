# SPDX-License-Identifier: Apache-2.0
"""Faults that are planted in a live engine's worker; each function runs there, by collective RPC."""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def heal(worker: Any) -> None:
    """Take every planted fault away."""
    for name in ("load", "finish"):
        vars(worker._nemo_rl_weights).pop(name, None)
    vars(worker.get_model()).pop("load_weights", None)
    for experts in _experts(worker):
        vars(experts).pop("close", None)
    vars(worker._nemo_rl_weights._scales).pop("set", None)


def on_rank(worker: Any, rank: int, fault: str) -> None:
    """Plant a fault in one rank of the engine only."""
    if worker.rank == rank:
        globals()[fault](worker)


def pid(worker: Any) -> int:
    """Return the rank's process id; no fault."""
    return os.getpid()


def keeps_prefixes(worker: Any) -> bool:
    """Say whether the engine has a prefix cache; no fault."""
    return worker.vllm_config.cache_config.enable_prefix_caching


def kv_scales(worker: Any) -> dict[str, float]:
    """Return the live scales of the KV cache; no fault."""
    scales = worker._nemo_rl_weights._scales
    return {name: scales.get(name) for name in scales.names()}


def slow(worker: Any) -> None:
    """Let each step of a generation take a while."""
    model = worker.get_model()
    forward = model.forward

    def wait_first(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(0.2)
        return forward(*arguments, **keywords)

    model.forward = wait_first


def out_of_memory(worker: Any) -> None:
    """Leave the process hardly more memory than it has, and let the model ask for a workspace of 2 GiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    model = worker.get_model()
    forward = model.forward

    def with_a_workspace(*arguments: Any, **keywords: Any) -> Any:
        torch.empty(2**31, dtype=torch.uint8)
        return forward(*arguments, **keywords)

    model.forward = with_a_workspace


def lying(worker: Any) -> None:
    """Let the model's loader pass over one tensor and say that it took it."""
    model = worker.get_model()
    load, name = model.load_weights, "model.layers.1.mlp.down_proj.weight"
    model.load_weights = lambda pairs: load((n, t) for n, t in pairs if n != name) | {name}


def other_share(worker: Any) -> None:
    """Let the model's loader take the other one's share of one tensor."""
    model = worker.get_model()
    load, layer = model.load_weights, model.get_submodule("model.layers.0.mlp.down_proj")

    def load_the_others(pairs: Any) -> Any:
        for holder in (layer, layer.weight):
            holder.tp_rank = 1 - worker.rank
        try:
            return load(pairs)
        finally:
            for holder in (layer, layer.weight):
                holder.tp_rank = worker.rank

    model.load_weights = load_the_others


def swapped(worker: Any) -> None:
    """Load two tensors of one shape into each other's place."""
    first, second = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    other = {first: second, second: first}
    _load(worker, lambda name, tensor: (other.get(name, name), tensor))


def stale(worker: Any) -> None:
    """Leave a whole bucket out and say that it was loaded."""
    weights, seen = worker._nemo_rl_weights, []
    load = weights.load

    def skip_the_second(tensors: Any) -> None:
        seen.append(tensors)
        if len(seen) == 2:
            weights._arrived += [name for name, _ in tensors]
        else:
            load(tensors)

    weights.load = skip_the_second


def halved(worker: Any) -> None:
    """Load one norm at half its scale."""
    _load(worker, lambda name, tensor: (name, tensor / 2 if name == "model.norm.weight" else tensor))


def rounded(worker: Any) -> None:
    """Load one tensor through a smaller type."""
    _load(worker, lambda name, t: (name, t.bfloat16().float() if name == "model.layers.1.mlp.up_proj.weight" else t))


def forgotten(worker: Any) -> None:
    """Let the model's loader pass over one tensor without a word."""
    model = worker.get_model()
    load = model.load_weights
    model.load_weights = lambda pairs: load((n, t) for n, t in pairs if n != "model.layers.1.mlp.down_proj.weight")


def misplaced_expert(worker: Any) -> None:
    """Put one expert's tensor into another expert's place."""
    first, second = (f"model.layers.0.mlp.experts.{expert}.gate_proj.weight" for expert in (1, 2))
    _load(worker, lambda name, tensor: (second if name == first else name, tensor))


def broken(worker: Any) -> None:
    """Fail in the middle of a load."""

    def load(tensors: Any) -> None:
        raise MemoryError("no room for this bucket")

    worker._nemo_rl_weights.load = load


def unfinished(worker: Any) -> None:
    """Never set the version."""
    worker._nemo_rl_weights.finish = lambda _: None


def not_repacked(worker: Any) -> None:
    """Leave out the step after the load of experts."""
    for experts in _experts(worker):
        experts.close = lambda: None


def repacked_twice(worker: Any) -> None:
    """Run the step after the load of experts once more, on what it has packed already."""
    for experts in _experts(worker):
        close = experts.close

        def twice(experts: Any = experts, close: Callable[[], None] = close) -> None:
            close()
            experts._repack(experts.layer)

        experts.close = twice


def corrupt(worker: Any) -> None:
    """Change one live element, after a refit that was fine."""
    with torch.no_grad():
        worker.get_model().get_parameter("model.layers.1.self_attn.o_proj.weight").view(-1)[7] += 1e-3


def fp8_layers(worker: Any) -> dict[str, str]:
    """Return each linear layer's type and kernel, by live name; no fault."""
    found = {}
    for name, module in worker.get_model().named_modules():
        if hasattr(module, "weight") and hasattr(module, "quant_method"):
            kernel = getattr(module.quant_method, "fp8_linear", None)
            found[name] = f"{module.weight.dtype} {type(kernel).__name__}"
    return found


def scale_doubled(worker: Any) -> None:
    """Let the model's loader take one scale of an FP8 weight twice as large as it is."""
    model, wrong = worker.get_model(), "model.layers.0.self_attn.k_proj.weight_scale_inv"
    load = model.load_weights
    model.load_weights = lambda pairs: load((n, t * 2 if n == wrong else t) for n, t in pairs)


def misplaced_expert_scale(worker: Any) -> None:
    """Load the scales of one expert's gate in the place of another's."""
    model = worker.get_model()
    load = model.load_weights
    first, second = (f"model.layers.0.mlp.experts.{expert}.gate_proj.weight_scale_inv" for expert in (1, 2))
    other = {first: second, second: first}
    model.load_weights = lambda pairs: load((other.get(n, n), t) for n, t in pairs)


def scales_forgotten(worker: Any) -> None:
    """Let the model's loader pass over all scales of FP8 weights."""
    model = worker.get_model()
    load = model.load_weights
    model.load_weights = lambda pairs: load((n, t) for n, t in pairs if not n.endswith("weight_scale_inv"))


def scale_corrupt(worker: Any) -> None:
    """Change one live scale of an FP8 weight, after a refit that was fine."""
    with torch.no_grad():
        worker.get_model().get_parameter("model.layers.1.self_attn.o_proj.weight_scale_inv").view(-1)[1] *= 1.001


def float_forgotten(worker: Any) -> None:
    """Set each scale's buffer and not the Python float that this engine's kernels read."""
    scales = worker._nemo_rl_weights._scales

    def set_the_buffer(name: str, value: float) -> None:
        module, kind = scales._find(name)
        getattr(module, f"_{kind}").fill_(value)

    scales.set = set_the_buffer


def scale_dropped(worker: Any) -> None:
    """Leave the first layer's k_scale as it was."""
    scales = worker._nemo_rl_weights._scales
    take = scales.set
    scales.set = lambda name, value: None if name == "model.layers.0.self_attn.attn.k_scale" else take(name, value)


def scales_swapped(worker: Any) -> None:
    """Give the first layer's k the scale of its v."""
    scales = worker._nemo_rl_weights._scales
    take, k, v = scales.set, "model.layers.0.self_attn.attn.k_scale", "model.layers.0.self_attn.attn.v_scale"
    other = {k: v, v: k}
    scales.set = lambda name, value: take(other.get(name, name), value)


def _load(worker: Any, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> None:
    weights = worker._nemo_rl_weights
    load = weights.load
    weights.load = lambda tensors: load([change(name, tensor) for name, tensor in tensors])


def _experts(worker: Any) -> list[Any]:
    found = {id(part.experts): part.experts for part in worker._nemo_rl_weights._parts.values()}
    return [experts for experts in found.values() if experts is not None]
