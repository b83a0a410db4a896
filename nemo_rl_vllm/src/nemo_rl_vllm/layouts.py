# SPDX-License-Identifier: Apache-2.0
"""Where checkpoint tensors lie in the parameters of a live vLLM layer, whole or shared out over the engine's ranks.

A checkpoint tensor goes to every rank whole, and vLLM's loader takes this rank's share. What that share has to be is
worked out here from the layer's sizes alone, not asked of the loader, so that a loader that takes another one is found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Layout", "block_layout", "fused_layouts", "plain_layout", "vocabulary_layout"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One checkpoint tensor and where it lies.

    Attributes:
        shape: Full shape in the checkpoint.
        share: Index into the full tensor: the part that this rank holds. ``()`` is all of it.
        place: Index into the live parameter: where that part lies. ``()`` is all of it.
    """

    shape: tuple[int, ...]
    share: tuple[slice, ...] = ()
    place: tuple[slice, ...] = ()

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of the part that this rank holds."""
        given = dict(enumerate(self.share))
        return tuple(len(range(*given.get(axis, slice(None)).indices(size))) for axis, size in enumerate(self.shape))


def plain_layout(name: str, parameter: torch.Tensor, module: Any) -> Layout:
    """Return the layout of a parameter that holds one checkpoint tensor.

    Args:
        name: The live parameter's name, for messages.
        parameter: The live parameter, [output, input] or [output] where the layer is a linear one.
        module: Its layer.

    Raises:
        RuntimeError: If a linear layer's sizes do not explain the parameter's.
    """
    live = tuple(parameter.shape)
    if not all(hasattr(module, key) for key in ("output_size", "input_size", "tp_size", "tp_rank")):
        return Layout(shape=live)
    num_ranks, rank = int(module.tp_size), int(module.tp_rank)
    full = (int(module.output_size), int(module.input_size))[: len(live)]
    fused = len(getattr(module, "output_sizes", ())) > 1
    if len(full) != len(live) or any(a not in (b, b * num_ranks) for a, b in zip(full, live, strict=True)):
        raise RuntimeError(
            f"{name!r} has shape {list(live)}, which is neither all nor one of {num_ranks} shares of {list(full)}; a refit "
            "cannot load such a layer yet"
        )
    if fused and num_ranks > 1:
        raise RuntimeError(
            f"{name!r} is one tensor in the checkpoint and several in the engine; a refit cannot share it out yet: set "
            "vllm_cfg.tensor_parallel_size to 1"
        )
    share = tuple(_range(rank, size) if size != whole else slice(None) for whole, size in zip(full, live, strict=True))
    return Layout(shape=full, share=share)


def fused_layouts(name: str, parameter: torch.Tensor, module: Any, shards: Sequence[Any]) -> list[Layout]:
    """Return the layouts of the checkpoint tensors that a fused linear layer holds below one another.

    Args:
        name: The live parameter's name, for messages.
        parameter: The live parameter, [sum of the shares' rows, input] or [sum of the shares' rows].
        module: Its layer: q, k and v, or parts that are all shared out alike.
        shards: vLLM's id of each part, in the order in which they lie.

    Raises:
        RuntimeError: If the layer's sizes do not explain the parameter's.
    """
    num_rows, *rest = parameter.shape
    parts = _attention_rows(module) if hasattr(module, "total_num_kv_heads") else _equal_rows(module)
    if len(parts) != len(shards) or sum(size for _, _, size in parts) != num_rows:
        raise RuntimeError(
            f"fused layer {name!r} has {num_rows} rows, which are not those of its parts {list(shards)} with {parts}"
        )
    layouts, start = [], 0
    for whole, index, size in parts:
        place = (slice(start, start + size),)
        layouts.append(Layout(shape=(whole, *rest), share=(_range(index, size),), place=place))
        start += size
    return layouts


def vocabulary_layout(parameter: torch.Tensor, module: Any) -> Layout:
    """Return the layout of an embedding or a head, [vocabulary, width] or [vocabulary].

    vLLM pads the vocabulary, so the last ranks may hold few rows or none; rows of padding belong to no checkpoint.
    """
    rows = module.shard_indices
    start, stop = int(rows.org_vocab_start_index), int(rows.org_vocab_end_index)
    shape = (int(module.org_vocab_size), *parameter.shape[1:])
    return Layout(shape=shape, share=(slice(start, stop),), place=(slice(0, stop - start),))


def block_layout(name: str, weight: Layout, block: int) -> Layout:
    """Return the layout of the scales of an FP8 weight, one for each block, from that of the weight.

    Args:
        name: The live weight's name, for messages.
        weight: The weight's layout, of two dimensions.
        block: Rows and columns of a block.

    Raises:
        RuntimeError: If a share begins or ends inside a block of the full weight, or inside one of the live parameter.
    """
    rows, columns = weight.shape

    def in_blocks(part: slice, size: int | None) -> slice:
        if part == slice(None):
            return part
        if part.start % block or (part.stop % block and part.stop != size):
            raise RuntimeError(
                f"a share of {name!r} lies at {part.start} to {part.stop}, which are no edges of blocks of {block} x {block}, "
                "so it has no scales of its own; take fewer ranks, or keep the layer in bfloat16 with "
                "vllm_cfg.quantization_ignored_layer_kws"
            )
        return slice(part.start // block, -(-part.stop // block))

    return Layout(
        shape=(-(-rows // block), -(-columns // block)),
        share=tuple(in_blocks(part, size) for part, size in zip(weight.share, weight.shape, strict=False)),
        # The last part of a fused layer may end inside a block; then no other begins there.
        place=tuple(in_blocks(part, part.stop) for part in weight.place),
    )


def _attention_rows(module: Any) -> list[tuple[int, int, int]]:
    """Return, for q, k and v, all rows, the index of this rank's share, and its rows.

    With fewer KV heads than ranks, neighbours hold the same one.
    """
    rank, width = int(module.tp_rank), int(module.head_size)
    value_width = int(getattr(module, "v_head_size", width))
    kv_rank = rank // int(module.num_kv_head_replicas)
    num_kv, all_kv = int(module.num_kv_heads), int(module.total_num_kv_heads)
    return [
        (int(module.total_num_heads) * width, rank, int(module.num_heads) * width),
        (all_kv * width, kv_rank, num_kv * width),
        (all_kv * value_width, kv_rank, num_kv * value_width),
    ]


def _equal_rows(module: Any) -> list[tuple[int, int, int]]:
    """Return the same for parts that each rank holds an equal share of."""
    num_ranks, rank = int(module.tp_size), int(module.tp_rank)
    return [(int(size), rank, int(size) // num_ranks) for size in getattr(module, "output_sizes", ())]


def _range(index: int, size: int) -> slice:
    return slice(index * size, (index + 1) * size)
