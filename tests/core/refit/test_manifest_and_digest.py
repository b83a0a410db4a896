# SPDX-License-Identifier: Apache-2.0
"""Manifests compare both ways; digests change with any bit, name, shape or dtype."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nemo_rl_core.refit.digest import digests_of, first_difference, set_digest, tensor_digest
from nemo_rl_core.refit.manifest import Manifest, TensorSpec
from tests.strategies import named_tensors


@given(tensors=named_tensors())
def test_a_manifest_survives_json_and_equals_itself(tensors):
    manifest = Manifest.from_tensors(tensors)
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.digest == manifest.digest
    assert again.differences(manifest) == ()


@given(tensors=named_tensors(min_size=2), seed=st.randoms(use_true_random=False))
def test_the_order_is_the_senders_choice(tensors, seed):
    manifest = Manifest.from_tensors(tensors)
    specs = list(manifest.specs)
    seed.shuffle(specs)
    shuffled = Manifest(tuple(specs))
    assert shuffled.differences(manifest) == manifest.differences(shuffled) == ()
    assert (shuffled.digest == manifest.digest) == (shuffled == manifest)


@given(tensors=named_tensors(min_size=1), data=st.data())
def test_each_difference_is_found_from_both_sides(tensors, data):
    """U40, R46, R47."""
    manifest = Manifest.from_tensors(tensors)
    index = data.draw(st.integers(0, len(tensors) - 1))
    old = manifest.specs[index]
    changes = {
        "name": TensorSpec(name=old.name + "_x", shape=old.shape, dtype=old.dtype),
        "shape": TensorSpec(name=old.name, shape=(*old.shape, 1), dtype=old.dtype),
        "dtype": TensorSpec(name=old.name, shape=old.shape, dtype="complex128"),
    }
    kind = data.draw(st.sampled_from([*changes, "drop"]))
    new = (changes[kind],) if kind != "drop" else ()
    assume(all(spec.name not in manifest.by_name or spec.name == old.name for spec in new))
    other = Manifest(manifest.specs[:index] + new + manifest.specs[index + 1 :])
    assert other.digest != manifest.digest
    for found in (manifest.differences(other), other.differences(manifest)):
        assert found
        assert all(repr(old.name) in text or repr(old.name + "_x") in text for text in found)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, 2).to_sparse(), "layout"),
        (torch.zeros(2, device="meta"), "meta device"),
    ],
)
def test_a_tensor_without_plain_bytes_is_refused_by_name(tensor, reason):
    with pytest.raises(ValueError, match=f"'w' .*{reason}"):
        Manifest.from_tensors([("w", tensor)])


def test_a_name_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match="'w' occurs twice"):
        Manifest.from_tensors([("w", torch.zeros(1)), ("w", torch.zeros(1))])


def test_text_that_is_no_manifest_is_refused():
    with pytest.raises(ValueError, match="JSON list"):
        Manifest.from_json('{"a": 1}')


@given(tensors=named_tensors(min_size=1), data=st.data())
def test_any_flipped_bit_changes_its_tensors_digest_and_is_named(tensors, data):
    manifest = Manifest.from_tensors(tensors)
    candidates = [i for i, spec in enumerate(manifest.specs) if spec.num_bytes]
    assume(candidates)
    index = data.draw(st.sampled_from(candidates))
    name, tensor = tensors[index]
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    bit = data.draw(st.integers(0, 8 * flat.numel() - 1))
    flat[bit // 8] ^= 1 << (bit % 8)
    changed = [*tensors[:index], (name, flat.view(tensor.dtype).view(tensor.shape)), *tensors[index + 1 :]]
    sent, live = digests_of(tensors), digests_of(changed)
    assert first_difference(manifest, sent, live) == name
    assert set_digest(manifest, sent) != set_digest(manifest, live)


def test_name_shape_and_dtype_are_part_of_the_digest_and_strides_are_not():
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert tensor_digest("a", tensor) == tensor_digest("a", tensor.t().contiguous().t())
    variants = {
        tensor_digest("a", tensor),
        tensor_digest("b", tensor),
        tensor_digest("a", tensor.reshape(3, 2)),
        tensor_digest("a", tensor.reshape(6)),
        tensor_digest("a", tensor.view(torch.float32)),
    }
    assert len(variants) == 5


def test_live_tensors_that_are_not_the_manifests_are_an_error():
    """R52: a tensor that the engine does not show cannot pass."""
    tensors = [("a", torch.zeros(1)), ("b", torch.zeros(1))]
    manifest = Manifest.from_tensors(tensors)
    with pytest.raises(ValueError, match="'b' is on one side only"):
        set_digest(manifest, digests_of(tensors[:1]))
    with pytest.raises(ValueError, match="'c' is on one side only"):
        set_digest(manifest, digests_of([*tensors, ("c", torch.zeros(1))]))
    with pytest.raises(ValueError, match="'a' occurs twice"):
        digests_of([tensors[0], tensors[0]])
