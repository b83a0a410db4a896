# SPDX-License-Identifier: Apache-2.0
"""FSDP2 over a process group: wrapping, loading from rank 0, gathering."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from nemo_rl_core.workers.models import LogprobModel

__all__ = ["full_tensors", "shard_model", "spread_weights"]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks: the children of the decoder's longest module list."""
    lists = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


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


def full_tensors(tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor whole and in the type that travels; a collective call for every shard.

    Floating-point tensors are cast to ``dtype`` *before* they are gathered, which halves the bytes for bfloat16.
    """
    for name, tensor in tensors:
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
