# SPDX-License-Identifier: Apache-2.0
"""A live model for tests of refits: a dict of tensors that records what is done to it."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from nemo_rl_core.refit.manifest import Manifest

__all__ = ["DictSink"]


class DictSink:
    """A ``WeightSink`` over a dict of tensors.

    Attributes:
        tensors: The live tensors by name; ``load`` writes into them in place.
        version: Version of the last finish, or None.
        events: What happened, in order: ``("load", names)`` and ``("finish", version)``.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the live tensors; they are kept, not copied."""
        self.tensors = dict(tensors)
        self.version: int | None = None
        self.events: list[tuple[str, object]] = []

    @classmethod
    def poisoned(cls, manifest: Manifest) -> "DictSink":
        """Make a model of that manifest whose every byte is 0xA5, so that a tensor that is never loaded shows."""
        tensors = {}
        for spec in manifest.specs:
            flat = torch.full((spec.num_bytes,), 0xA5, dtype=torch.uint8)
            tensors[spec.name] = flat.view(spec.torch_dtype).view(spec.shape)
        return cls(tensors)

    def manifest(self) -> Manifest:
        """Describe the live tensors."""
        return Manifest.from_tensors(self.tensors.items())

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy into the live tensors.

        Raises:
            KeyError: If a name is not one of theirs.
        """
        self.events.append(("load", tuple(name for name, _ in tensors)))
        for name, tensor in tensors:
            self.tensors[name].copy_(tensor)

    def finish(self, version: int) -> None:
        """Note the version."""
        self.events.append(("finish", version))
        self.version = version

    def live_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the live tensors."""
        yield from self.tensors.items()
