# SPDX-License-Identifier: Apache-2.0
"""The receiving end of a refit for a HF model: a ``WeightSink``."""

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.workers.checkpoint_names import CheckpointNames, live_tensors

__all__ = ["ModelSink"]


class ModelSink:
    """Copies tensors into a live model's parameters and buffers, by their names in a checkpoint."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Look the live tensors up once; their storage never moves.

        Raises:
            ModelError: If a tensor of a checkpoint has no place of its own in the model.
        """
        names = CheckpointNames(model)
        self._live = dict(part for name, live in live_tensors(model) for part in names.views(name, live.detach()))

    def manifest(self) -> Manifest:
        """Return what the live model expects."""
        return Manifest.from_tensors(self._live.items())

    @torch.no_grad()
    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy complete tensors into place."""
        for name, tensor in tensors:
            self._live[name].copy_(tensor)

    def finish(self, version: int) -> None:
        """Nothing to repack, and no cache outlives a call of ``generate``."""

    def live_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the live tensors for the digest."""
        yield from self._live.items()
