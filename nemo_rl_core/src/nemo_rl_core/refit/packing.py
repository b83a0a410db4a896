# SPDX-License-Identifier: Apache-2.0
"""Tensors to buckets of bytes and back, by one cut rule that both sides compute from manifest and size.

The rule: tensors go in manifest order. A tensor starts at the next multiple of 16 bytes of the current bucket
(so that its bytes can be viewed in its dtype). If it does not fit there but fits into an empty bucket, a new
bucket begins; if it is larger than a bucket, it begins a new one and is cut into pieces of the full size.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from nemo_rl_core.refit.manifest import Manifest, TensorSpec

__all__ = ["ALIGNMENT_BYTES", "Bucket", "Packer", "Piece", "Unpacker", "byte_view", "cut"]

#: Offsets inside a bucket are multiples of it; no torch dtype is wider.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some bytes of one tensor in one bucket.

    Attributes:
        tensor: Index of the tensor in the manifest.
        tensor_offset: First byte of the piece within the tensor.
        bucket_offset: First byte of the piece within the bucket.
        num_bytes: Length of the piece; 0 for an empty tensor.
        is_last: Whether the tensor is complete with this piece.
    """

    tensor: int
    tensor_offset: int
    bucket_offset: int
    num_bytes: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What one broadcast carries.

    Attributes:
        pieces: The pieces in order; gaps between them are alignment.
        num_bytes: Bytes on the wire, up to the end of the last piece; may be 0 where all pieces are empty.
    """

    pieces: tuple[Piece, ...]
    num_bytes: int


def cut(manifest: Manifest, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut a manifest into buckets.

    Args:
        manifest: What is to be moved.
        bucket_bytes: Size that no bucket exceeds, at least 1.

    Returns:
        The buckets in order. Each byte of each tensor is in exactly one piece, and every tensor, even an empty one,
        has exactly one last piece.

    Raises:
        ValueError: If ``bucket_bytes`` is below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket holds at least 1 byte, got bucket_bytes={bucket_bytes}")
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    end = 0

    def close() -> None:
        nonlocal end
        if pieces:
            buckets.append(Bucket(pieces=tuple(pieces), num_bytes=end))
            pieces.clear()
            end = 0

    for index, spec in enumerate(manifest.specs):
        left = spec.num_bytes
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if start + left > bucket_bytes:
            close()
            start = 0
        offset = 0
        while True:
            size = min(left, bucket_bytes - start)
            is_last = size == left
            pieces.append(
                Piece(tensor=index, tensor_offset=offset, bucket_offset=start, num_bytes=size, is_last=is_last)
            )
            end, offset, left = start + size, offset + size, left - size
            if is_last:
                break
            close()
            start = 0
    close()
    return tuple(buckets)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the dense bytes of a tensor as a flat uint8 tensor; copies only where the layout forces it."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # With 0 or 1 elements torch calls any stride contiguous, and then refuses to view it in another dtype.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


class Packer:
    """Fills buckets from a stream of tensors and checks the stream against the manifest while it goes."""

    def __init__(self, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the source; nothing is read before the first bucket.

        Args:
            manifest: What the receivers were told.
            tensors: Pairs of name and tensor, in the manifest's order.
        """
        self._manifest = manifest
        self._source: Iterator[tuple[str, torch.Tensor]] = iter(tensors)
        self._bytes: torch.Tensor | None = None

    def fill(
        self, bucket: Bucket, buffer: torch.Tensor, seen: Callable[[TensorSpec, torch.Tensor], None] | None = None
    ) -> None:
        """Copy one bucket's pieces into a buffer.

        Args:
            bucket: The next bucket of the cut.
            buffer: uint8, at least ``bucket.num_bytes`` long.
            seen: Called with spec and flat uint8 bytes of each tensor that begins in this bucket, before the source
                is asked for the next (which may reuse its memory); for a digest.

        Raises:
            ValueError: If the source ends early or yields another name, shape or dtype than the manifest says.
        """
        for piece in bucket.pieces:
            if piece.tensor_offset == 0:
                self._bytes = self._next(piece.tensor)
                if seen is not None:
                    seen(self._manifest.specs[piece.tensor], self._bytes)
            assert self._bytes is not None
            source = self._bytes[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
            buffer[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].copy_(source)

    def finish(self) -> None:
        """Check that the source has ended too.

        Raises:
            ValueError: If it yields one more tensor.
        """
        extra = next(self._source, None)
        if extra is not None:
            raise ValueError(
                f"the tensors must be those of the manifest, got {extra[0]!r} after all {len(self._manifest)} of them"
            )

    def _next(self, index: int) -> torch.Tensor:
        expected = self._manifest.specs[index]
        item = next(self._source, None)
        if item is None:
            raise ValueError(
                f"the tensors must be those of the manifest, but they ended after {index} of {len(self._manifest)}; "
                f"next is {expected.name!r}"
            )
        found = TensorSpec.of(*item)
        if found != expected:
            raise ValueError(
                f"the tensors must be those of the manifest in its order: entry {index} is "
                f"{expected.name!r} {expected}, got {found.name!r} {found}"
            )
        return byte_view(item[1])


class Unpacker:
    """Makes complete tensors from buckets; tensors larger than a bucket are put together in a buffer of their own."""

    def __init__(self, manifest: Manifest, *, device: torch.device | str = "cpu") -> None:
        """Take the plan's manifest and the device on which large tensors are assembled."""
        self._manifest = manifest
        self._device = device
        self._partial: torch.Tensor | None = None

    def read(self, bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that are complete with this bucket.

        Args:
            bucket: The next bucket of the cut.
            buffer: uint8, at least ``bucket.num_bytes`` long.

        Returns:
            Names and tensors in manifest order. They may be views of the buffer: use them before it is filled again.
        """
        complete: list[tuple[str, torch.Tensor]] = []
        for piece in bucket.pieces:
            spec = self._manifest.specs[piece.tensor]
            source = buffer[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
            if not (piece.tensor_offset == 0 and piece.is_last):
                source = self._gather(spec, piece, source)
            if piece.is_last:
                complete.append((spec.name, source.view(spec.torch_dtype).view(spec.shape)))
        return complete

    def _gather(self, spec: TensorSpec, piece: Piece, source: torch.Tensor) -> torch.Tensor:
        if piece.tensor_offset == 0:
            self._partial = torch.empty(spec.num_bytes, dtype=torch.uint8, device=self._device)
        assert self._partial is not None
        self._partial[piece.tensor_offset : piece.tensor_offset + piece.num_bytes].copy_(source)
        return self._partial
