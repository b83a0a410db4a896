# SPDX-License-Identifier: Apache-2.0
"""Digests that change with any bit, name, shape or dtype, and say which tensor differs first."""

import ctypes
import hashlib
from collections.abc import Iterable, Mapping

import torch

from nemo_rl_core.refit.manifest import Manifest, TensorSpec
from nemo_rl_core.refit.packing import byte_view

__all__ = ["digest_of_bytes", "digests_of", "first_difference", "set_digest", "tensor_digest"]


def digest_of_bytes(spec: TensorSpec, flat: torch.Tensor) -> str:
    """Digest one tensor whose bytes are already at hand.

    Args:
        spec: Name, shape and dtype.
        flat: Its dense bytes, flat uint8, on any device.

    Returns:
        SHA-256 as hex over name, dtype, shape and bytes.
    """
    head = f"{spec.name}\0{spec.dtype}\0{','.join(map(str, spec.shape))}\0".encode()
    state = hashlib.sha256(len(head).to_bytes(8, "little") + head)
    if flat.numel():
        host = flat.cpu().contiguous()
        # torch has no buffer protocol and numpy is no requirement of ours; `host` outlives the view.
        state.update(memoryview((ctypes.c_ubyte * host.numel()).from_address(host.data_ptr())))
    return state.hexdigest()


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """Digest one live tensor: SHA-256 as hex over name, dtype, shape and bytes; strides do not matter.

    Raises:
        ValueError: If the tensor has no plain bytes.
    """
    return digest_of_bytes(TensorSpec.of(name, tensor), byte_view(tensor))


def digests_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Digest live tensors by name.

    Raises:
        ValueError: If a name occurs twice or a tensor has no plain bytes.
    """
    found: dict[str, str] = {}
    for name, tensor in tensors:
        if name in found:
            raise ValueError(f"each live tensor has its own name, but {name!r} occurs twice")
        found[name] = tensor_digest(name, tensor)
    return found


def set_digest(manifest: Manifest, digests: Mapping[str, str]) -> str:
    """Combine the tensors' digests, in the manifest's order.

    Args:
        manifest: Order and names.
        digests: Digest of each of those tensors.

    Returns:
        SHA-256 as hex.

    Raises:
        ValueError: If the names are not those of the manifest.
    """
    wrong = [name for name in manifest.by_name if name not in digests]
    wrong += [name for name in digests if name not in manifest.by_name]
    if wrong:
        raise ValueError(
            f"live tensors must have the manifest's names, but {wrong[0]!r} is on one side only "
            f"({len(wrong)} such names): live_tensors must give every tensor in its wire layout"
        )
    return hashlib.sha256("\n".join(digests[spec.name] for spec in manifest.specs).encode()).hexdigest()


def first_difference(manifest: Manifest, sent: Mapping[str, str], live: Mapping[str, str]) -> str | None:
    """Return the name of the first tensor, in the manifest's order, whose digests differ, or None."""
    return next((spec.name for spec in manifest.specs if sent.get(spec.name) != live.get(spec.name)), None)
