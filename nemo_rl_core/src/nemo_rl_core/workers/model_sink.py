# SPDX-License-Identifier: Apache-2.0
"""The receiving end of a refit for a HF model: a ``WeightSink``."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.workers.models import wire_tensors

__all__ = ["ModelSink"]


class ModelSink:
    """Copies tensors into a live model's parameters and buffers, by name."""

    def __init__(self, model: nn.Module) -> None:
        """Look the live tensors up once; their storage never moves."""
        self._live = dict(wire_tensors(model))

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
