# SPDX-License-Identifier: Apache-2.0
"""FSDP2 over a process group: wrapping, loading from rank 0, gathering."""

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from nemo_rl_core.workers.models import LogprobModel

__all__ = ["checkpoint_layers", "full_tensors", "shard_model", "spread_weights", "wire_dtype"]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks: the children of the decoder's longest module list."""
    lists = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute each decoder layer in the backward pass instead of keeping its activations.

    transformers' own switch works in training mode only, and the policy stays in evaluation mode. FSDP2's hooks lie
    around ``forward``, so a layer's weights are gathered again before it is recomputed.
    """
    for layer in decoder_layers(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def shard_model(wrapped: LogprobModel, mesh: DeviceMesh, precision: str) -> None:
    """Shard each decoder layer and the rest over ``mesh``, with float32 master weights.

    Gradients are reduced in float32 whatever the compute type is.
    """
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        policy = MixedPrecisionPolicy()
    for layer in decoder_layers(wrapped.model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # FSDP2 would leave the root whole, in its compute type, after a pass without a backward pass; whoever reads the
    # parameters then (refit, reference policy) must find float32 shards.
    fully_shard(wrapped, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


@torch.no_grad()
def spread_weights(wrapped: nn.Module, source: dict[str, torch.Tensor], mesh: DeviceMesh, device: torch.device) -> None:
    """Fill a sharded module from rank 0's full tensors, one at a time.

    Args:
        wrapped: Sharded; on the meta device everywhere.
        source: On rank 0 every parameter and buffer by name, on any device; elsewhere empty.
        mesh: One-dimensional mesh over the train ranks.
        device: Where the shards shall live.
    """
    group = mesh.get_group()
    is_source = dist.get_rank(group) == 0
    wrapped.to_empty(device=device)
    for name, parameter in wrapped.named_parameters():
        assert isinstance(parameter, DTensor)
        full = (
            source[name].to(device, parameter.dtype)
            if is_source
            else torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        )
        shard = distribute_tensor(full, mesh, parameter.placements, src_data_rank=0)
        parameter.to_local().copy_(shard.to_local())
    for name, buffer in wrapped.named_buffers():
        if is_source:
            buffer.copy_(source[name].to(device))
        dist.broadcast(buffer, group_src=0, group=group)


def wire_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a refit sends a parameter or buffer of a model that computes in ``dtype``."""
    return dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype


def full_tensors(tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor whole and in the type that travels; a collective call for every shard.

    Floating-point parameters are cast to ``dtype`` *before* they are gathered, which halves the bytes for bfloat16.
    Buffers travel as they are: a model that computes in bfloat16 keeps some of them in float32 (a router's bias, say).
    """
    for name, tensor in tensors:
        wanted = wire_dtype(tensor, dtype)
        tensor = tensor.detach().to(wanted)
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
