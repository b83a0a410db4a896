# SPDX-License-Identifier: Apache-2.0
"""The cut rule, packing and unpacking, as properties over arbitrary tensors and bucket sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.packing import ALIGNMENT_BYTES, Packer, Unpacker, cut
from tests.strategies import named_tensors


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


@given(tensors=named_tensors(), bucket_bytes=st.integers(1, 200))
def test_each_byte_is_in_exactly_one_piece_in_order_and_no_bucket_is_too_large(tensors, bucket_bytes):
    """U33, U37."""
    manifest = Manifest.from_tensors(tensors)
    buckets = cut(manifest, bucket_bytes)
    covered = []
    finished = []
    for bucket in buckets:
        assert bucket.num_bytes <= bucket_bytes
        end = 0
        for piece in bucket.pieces:
            assert piece.bucket_offset >= end
            assert piece.bucket_offset % ALIGNMENT_BYTES == 0
            end = piece.bucket_offset + piece.num_bytes
            covered += [(piece.tensor, piece.tensor_offset + i) for i in range(piece.num_bytes)]
            finished += [piece.tensor] * piece.is_last
        assert end == bucket.num_bytes
    assert covered == [(i, j) for i, spec in enumerate(manifest.specs) for j in range(spec.num_bytes)]
    assert finished == list(range(len(manifest)))


@given(tensors=named_tensors(), bucket_bytes=st.integers(1, 200))
def test_only_a_tensor_larger_than_a_bucket_is_cut(tensors, bucket_bytes):
    manifest = Manifest.from_tensors(tensors)
    for bucket in cut(manifest, bucket_bytes):
        for piece in bucket.pieces:
            whole = piece.tensor_offset == 0 and piece.is_last
            assert whole == (manifest.specs[piece.tensor].num_bytes <= bucket_bytes)


@given(tensors=named_tensors(), bucket_bytes=st.integers(1, 200))
def test_what_is_packed_comes_out_bit_for_bit(tensors, bucket_bytes):
    """U34: any dtype, 0-d, empty, non-contiguous, through two buffers that are reused."""
    manifest = Manifest.from_tensors(tensors)
    packer, unpacker = Packer(manifest, tensors), Unpacker(manifest)
    buffers = [torch.full((bucket_bytes,), 0xA5, dtype=torch.uint8) for _ in range(2)]
    came_out = []
    for index, bucket in enumerate(cut(manifest, bucket_bytes)):
        packer.fill(bucket, buffers[index % 2])
        came_out += [(name, tensor.clone()) for name, tensor in unpacker.read(bucket, buffers[index % 2])]
    packer.finish()
    assert [name for name, _ in came_out] == [name for name, _ in tensors]
    for (_, sent), (_, got) in zip(tensors, came_out, strict=True):
        assert (got.shape, got.dtype) == (sent.shape, sent.dtype)
        assert torch.equal(dense_bytes(got), dense_bytes(sent))


@settings(max_examples=30)
@given(tensors=named_tensors(min_size=1))
def test_a_source_that_is_not_the_manifest_is_an_error_that_names_the_tensor(tensors):
    manifest = Manifest.from_tensors(tensors)
    (bucket,) = cut(manifest, 2**20)
    buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    name, last = tensors[-1]
    with pytest.raises(ValueError, match="ended after"):
        Packer(manifest, tensors[:-1]).fill(bucket, buffer)
    with pytest.raises(ValueError, match="got 'other'"):
        Packer(manifest, [*tensors[:-1], ("other", last)]).fill(bucket, buffer)
    with pytest.raises(ValueError, match="in its order"):
        Packer(manifest, [*tensors[:-1], (name, last[None])]).fill(bucket, buffer)
    packer = Packer(manifest, [*tensors, ("extra", last)])
    packer.fill(bucket, buffer)
    with pytest.raises(ValueError, match="got 'extra' after all"):
        packer.finish()


def test_a_source_may_reuse_one_buffer_for_all_its_tensors():
    manifest = Manifest.from_tensors([(f"t{i}", torch.zeros(4)) for i in range(3)])
    scratch = torch.zeros(4)
    seen = []

    def source():
        for i in range(3):
            scratch.fill_(float(i))
            yield f"t{i}", scratch

    (bucket,) = cut(manifest, 1024)
    buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    Packer(manifest, source()).fill(bucket, buffer, lambda _, flat: seen.append(flat.view(torch.float32)[0].item()))
    assert seen == [0.0, 1.0, 2.0]
    assert [tensor[0].item() for _, tensor in Unpacker(manifest).read(bucket, buffer)] == [0.0, 1.0, 2.0]


def test_a_bucket_without_room_is_refused():
    with pytest.raises(ValueError, match="at least 1 byte, got bucket_bytes=0"):
        cut(Manifest(()), 0)
