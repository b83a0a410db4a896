# SPDX-License-Identifier: Apache-2.0
"""Experts in a live vLLM layer: opened for a load, repacked after it, and read back in the checkpoint's layout.

vLLM keeps all experts of a layer in two tensors, ``w13_weight`` (gate and up) and ``w2_weight`` (down), and repacks them
for its kernel after a load. The repacking only moves elements and adds zeros, so it is undone by asking where each
element went: the same step is run once on a layer whose elements are their own positions.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nemo_rl_vllm.layouts import Layout

__all__ = ["ExpertWeights", "expert_layouts", "is_expert_layer"]

#: Positions are written in digits of this base, which every floating type down to bfloat16 holds exactly.
_BASE = 256


def is_expert_layer(module: nn.Module) -> bool:
    """Say whether a module holds the routed experts of a layer."""
    return callable(getattr(module, "get_expert_mapping", None)) and hasattr(module, "w13_weight")


def expert_layouts(prefix: str, layer: Any) -> Iterator[tuple[str, str, int, Layout]]:
    """Yield the parts of an expert layer: gate, up and down of each expert.

    The ranks share the inner dimension of each expert: rows of gate and up, columns of down.

    Args:
        prefix: The layer's name in the live model.
        layer: The live layer.

    Yields:
        Checkpoint name of the module, ``w13`` or ``w2``, the expert, and where its weight lies in that expert's part.
    """
    moe = layer.moe_config
    rows, columns = int(moe.intermediate_size_per_partition), int(moe.hidden_dim)
    num_ranks, rank = int(moe.tp_size), int(moe.tp_rank)
    inner = slice(rank * rows, (rank + 1) * rows)
    all_rows = rows * num_ranks
    gate, up = (
        Layout(shape=(all_rows, columns), share=(inner,), place=(slice(start, start + rows),)) for start in (0, rows)
    )
    down = Layout(shape=(columns, all_rows), share=(slice(None), inner))
    where = {"w1": ("w13", gate), "w3": ("w13", up), "w2": ("w2", down)}
    # The live layer may lie one module deeper than the checkpoint's name says.
    stem = prefix.partition(".experts")[0]
    for _, name, expert, shard in layer.get_expert_mapping():
        tensor, layout = where[shard]
        yield f"{stem}.{name.removesuffix('.')}", tensor, expert, layout


class ExpertWeights:
    """The two tensors of one expert layer."""

    def __init__(self, prefix: str, layer: Any) -> None:
        """Find out how the engine has laid them out.

        Args:
            prefix: The layer's name in the live model.
            layer: The live layer.

        Raises:
            RuntimeError: If the layer's parts are not where this adapter looks for them, or repacking them does more
                than move elements.
        """
        self.prefix = prefix
        self.layer = layer
        try:
            moe = layer.moe_config
            self.num_experts = int(moe.num_local_experts)
            rows, columns = int(moe.intermediate_size_per_partition), int(moe.hidden_dim)
            kernel = layer.quant_method.moe_kernel
            experts = kernel.fused_experts if hasattr(kernel, "fused_experts") else kernel.impl.fused_experts
            self._repack = experts.process_weights_after_loading
        except AttributeError as error:
            raise RuntimeError(
                f"expert layer {prefix!r} ({type(layer).__name__}) is not built as this adapter expects: {error}"
            ) from error
        self._shapes = {
            "w13_weight": (self.num_experts, 2 * rows, columns),
            "w2_weight": (self.num_experts, columns, rows),
        }
        self._dtype: torch.dtype = layer.w13_weight.dtype
        self._is_open = False
        self._positions = self._trace()

    @property
    def dtype(self) -> str:
        """Name of the tensors' torch dtype without the prefix."""
        return str(self._dtype).removeprefix("torch.")

    def parts(self) -> Iterator[tuple[str, str, int, Layout]]:
        """Yield checkpoint name, live tensor, expert and layout of every tensor that the layer is made of."""
        for module, tensor, expert, layout in expert_layouts(self.prefix, self.layer):
            yield f"{module}.weight", f"{tensor}_weight", expert, layout

    def open(self) -> None:
        """Lay the tensors out as a checkpoint loads them; what they hold is lost."""
        if self._is_open:
            return
        for name, shape in self._shapes.items():
            parameter: Any = getattr(self.layer, name)
            if tuple(parameter.shape) != shape:
                parameter.data = torch.zeros(shape, dtype=self._dtype, device=parameter.device)
        self._is_open = True

    def close(self) -> None:
        """Repack them for the engine's kernel, once per opening: a second time would scramble them."""
        if self._is_open:
            self._repack(self.layer)
            self._is_open = False

    def read(self, tensor: str, expert: int) -> torch.Tensor:
        """Return this rank's share of one expert's part of a live tensor in the checkpoint's layout."""
        if self._is_open:
            raise RuntimeError(f"the engine's step after the load of {self.prefix!r} has not run; refit again")
        packed = getattr(self.layer, tensor).data[expert].reshape(-1)
        return packed[self._positions[tensor]].view(self._shapes[tensor][1:])

    def _trace(self) -> dict[str, torch.Tensor]:
        """Return, for each tensor, the place in the packed layout of each element of one expert."""
        count = max(shape[1] * shape[2] for shape in self._shapes.values())
        found: dict[str, torch.Tensor] = {}
        scale = 1
        while scale <= count:
            for name, digits in self._packed_digits(scale).items():
                found[name] = found.get(name, torch.zeros_like(digits)) + digits * scale
            scale *= _BASE
        places = {}
        for name, marks in found.items():
            size = self._shapes[name][1] * self._shapes[name][2]
            filled = marks.nonzero().reshape(-1)
            order = marks[filled].argsort()
            if marks[filled][order].tolist() != list(range(1, size + 1)):
                raise RuntimeError(
                    f"the engine's post-load step of {self.prefix}.{name} does more than move elements, so its weights "
                    "cannot be read back"
                )
            places[name] = filled[order]
        return places

    def _packed_digits(self, scale: int) -> dict[str, torch.Tensor]:
        """Run the post-load step on one expert whose elements are digits of their own positions, counted from 1."""
        probe: Any = copy.copy(self.layer)
        probe.__dict__["_parameters"] = dict(self.layer._parameters)
        for name, (_, rows, columns) in self._shapes.items():
            device = getattr(self.layer, name).device
            digits = torch.arange(1, rows * columns + 1, device=device).div(scale, rounding_mode="floor") % _BASE
            values = digits.view(1, rows, columns).to(self._dtype)
            probe._parameters[name] = nn.Parameter(values, requires_grad=False)
        self._repack(probe)
        return {name: getattr(probe, name).data.reshape(-1).long() for name in self._shapes}
