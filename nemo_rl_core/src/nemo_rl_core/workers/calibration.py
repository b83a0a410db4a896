# SPDX-License-Identifier: Apache-2.0
"""Calibration passes of a train worker: watch a HF model's attention, and add up over the ranks."""

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ModelError, StateError
from nemo_rl_core.fp8.calibration import ActivationObserver
from nemo_rl_core.workers.passes import Plan

__all__ = ["add_up_observers", "calibration_passes", "observe_attention"]

_NAME = "nemo_rl_calibration"
# Others look at the name of the implementation to choose a kernel, and would not know ours.
_CAN_DELEGATE = ("sdpa", "eager")


@contextlib.contextmanager
def observe_attention(model: PreTrainedModel, observer: ActivationObserver) -> Generator[None]:
    """Hand q, k and v of every attention call to ``observer``; what the model computes stays the same, bit for bit.

    Works through transformers' attention interface, so it needs to know no model family. All is as before afterwards,
    also after an error.

    Args:
        model: The HF model; its layers may be sharded.
        observer: What is told; it needs to know the real tokens of each pass (``observer.tokens``).

    Raises:
        ModelError: If the model's attention is neither sdpa nor eager, or can't be set.
        StateError: If a model of this process is being observed.
    """
    previous = _implementation_of(model)
    if _NAME in ALL_ATTENTION_FUNCTIONS:
        raise StateError("a model of this process is being observed; end that calibration first")

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any):
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise ModelError(f"{type(module).__name__} has no layer_idx, so its scales would have no name")
        observer.observe(layer, query, key, value)
        return _function_of(module, previous)(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[previous])
    try:
        model.set_attn_implementation(_NAME)
        if _implementations(model) != {_NAME}:
            raise ModelError(f"{type(model).__name__} does not take its attention from transformers' interface")
        yield
    finally:
        model.set_attn_implementation(previous)
        # The interface has no way to take a registered function back.
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(_NAME, None)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(_NAME, None)


@torch.no_grad()
def calibration_passes(
    forward: Callable[[torch.Tensor], object], batch: BatchedDataDict, plan: Plan, observer: ActivationObserver
) -> None:
    """Run the micro-batches of a plan and tell the observer which tokens are real; an empty one has none."""
    for indices in plan:
        part = batch.select_indices(indices or [0])
        lengths_B = part.tensor("input_lengths")
        # At least one column, since a row that only fills up a shard has no token.
        ids_BS = part.tensor("input_ids")[:, : max(1, int(lengths_B.max()))]
        real_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device)[None] < lengths_B[:, None]
        with observer.tokens(real_BS if indices else torch.zeros_like(real_BS)):
            forward(ids_BS)


def add_up_observers(observer: ActivationObserver, device: torch.device) -> ActivationObserver:
    """Return the observer of all train ranks, the same on each; one sum carries counts and magnitudes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, observer.layers)
    layers = sorted({layer for part in found for layer in part})
    if not layers:
        return observer
    packed = observer.packed(layers, rank=rank, world_size=world_size, device=device)
    dist.all_reduce(packed)
    return ActivationObserver.from_packed(packed, layers, world_size=world_size)


def _implementations(model: PreTrainedModel) -> set[str | None]:
    return {m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)}


def _implementation_of(model: PreTrainedModel) -> str:
    found = _implementations(model)
    name = next(iter(found))
    if len(found) != 1 or name not in _CAN_DELEGATE:
        raise ModelError(
            f"calibration needs one attention implementation of {' or '.join(_CAN_DELEGATE)} in the whole model, got "
            f"{sorted(map(str, found))}; build the model with attn_implementation='sdpa'"
        )
    return name


def _function_of(module: Any, name: str) -> Callable[..., Any]:
    """Return what the module would have called: eager attention is a function of the module's own file."""
    home = sys.modules[type(module).__module__]
    if name == "eager":
        return home.eager_attention_forward
    return getattr(home, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)[name]
