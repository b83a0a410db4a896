# SPDX-License-Identifier: Apache-2.0
"""The names under which weights travel: those of a checkpoint, which both sides know.

transformers may build a model otherwise than its checkpoints are written: it fuses the experts of a layer into two
parameters, say, or renames a module. How to undo that is its own knowledge, the one that ``save_pretrained`` uses.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl_core.errors import ModelError

__all__ = ["CheckpointNames", "live_tensors", "wire_tensors"]


def live_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter once under the name that it has in the model, then the persistent buffers.

    Tied parameters come once, under their first name; non-persistent buffers (rotary tables) follow from the config.
    """
    yield from model.named_parameters(remove_duplicate=True)
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{module_name}.{name}" if module_name else name), buffer


def wire_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a refit moves of a model that is not sharded: its live tensors as a checkpoint has them."""
    names = CheckpointNames(model)
    for name, tensor in live_tensors(model):
        yield from names.parts(name, tensor.detach())


class CheckpointNames:
    """What each live tensor of a model is called in a checkpoint, and into which tensors it is cut there."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Ask transformers, with tensors that hold no data.

        Args:
            model: The model, not sharded: sharding changes the classes that transformers looks for. It may be empty.

        Raises:
            ModelError: If a checkpoint tensor is made of several live ones, or a live tensor is not cut up exactly.
        """
        self._model = model
        self._cuts: dict[tuple[str, tuple[int, ...]], list[tuple[tuple[int, ...], tuple[int, ...], int]]] = {}
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in live_tensors(model)}
        # Each live tensor travels as soon as it is gathered, so each must be converted on its own.
        alone = {name: revert_weight_conversion(model, {name: tensor}) for name, tensor in shapes.items()}
        together = {name: tensor.shape for name, tensor in revert_weight_conversion(model, dict(shapes)).items()}
        for name, parts in alone.items():
            differs = {part for part, tensor in parts.items() if together.get(part) != tensor.shape}
            if differs or sum(tensor.numel() for tensor in parts.values()) != shapes[name].numel():
                raise ModelError(
                    f"{type(model).__name__} cannot be trained yet: a checkpoint holds {name!r} in a form that it cannot be "
                    f"brought into on its own ({sorted(differs or parts)[0]!r})"
                )
        #: Live names of those that a checkpoint has under the same name and in one piece.
        self._same = frozenset(name for name, parts in alone.items() if list(parts) == [name])

    def parts(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Return a live tensor as a checkpoint has it.

        Args:
            name: Its live name.
            tensor: Its value, whole; on the meta device for names and shapes alone.

        Returns:
            Checkpoint names and tensors, always in the same order; they may be copies.
        """
        return [(name, tensor)] if name in self._same else revert_weight_conversion(self._model, {name: tensor}).items()

    def views(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same as ``parts``, as views into ``tensor``: writing to them writes to the model.

        Args:
            name: Its live name.
            tensor: The live tensor, contiguous.

        Raises:
            ModelError: If a part does not lie at regular distances in the live tensor.
        """
        if name in self._same:
            yield name, tensor
            return
        parts = dict(self.parts(name, torch.empty_like(tensor, device="meta")))
        # The same for every layer, and each costs a pass over a tensor of this size.
        key = re.sub(r"\d+", "*", name), tuple(tensor.shape)
        if key not in self._cuts:
            self._cuts[key] = self._trace(name, tensor)
        for part, (shape, strides, start) in zip(parts, self._cuts[key], strict=True):
            yield part, torch.as_strided(tensor, shape, strides, start + tensor.storage_offset())

    def _trace(self, name: str, tensor: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Return shape, strides and start of each part, found by converting a tensor of its own positions."""
        kind = torch.int32 if tensor.numel() < 2**31 else torch.int64
        positions = torch.arange(tensor.numel(), dtype=kind).view(tensor.shape)
        found = []
        for part, places in self.parts(name, positions):
            start = int(places.flatten()[0])
            strides = tuple(
                int(places.select(axis, 1).flatten()[0]) - start if size > 1 else 1
                for axis, size in enumerate(places.shape)
            )
            if not torch.equal(places, torch.as_strided(positions, places.shape, strides, start)):
                raise ModelError(f"{type(self._model).__name__} cannot be refitted: {part!r} is no view of {name!r}")
            found.append((tuple(places.shape), strides, start))
        return found
