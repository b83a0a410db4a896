# SPDX-License-Identifier: Apache-2.0
"""What one refit moves: names, shapes and dtypes in order, comparable both ways."""

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["Manifest", "TensorSpec"]

_NUM_NEAR_NAMES = 2


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"this torch ({torch.__version__}) has no dtype {name!r}: both sides need a torch that knows the dtype"
        )
    return dtype


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor as it lies on the wire.

    Attributes:
        name: Its name, the same on both sides.
        shape: Its shape; ``()`` for a scalar.
        dtype: Name of its torch dtype without the prefix, e.g. ``bfloat16``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorSpec":
        """Describe a live tensor.

        Raises:
            ValueError: If the tensor has no plain bytes: sparse, on the meta device, or sharded.
        """
        problem = None
        if hasattr(tensor, "full_tensor"):
            problem = "is sharded (DTensor); gather it with full_tensor() first"
        elif tensor.layout != torch.strided:
            problem = f"has layout {tensor.layout}; only strided tensors have plain bytes"
        elif tensor.is_meta:
            problem = "is on the meta device and holds no data"
        if problem:
            raise ValueError(f"a refit moves plain dense tensors, but {name!r} {problem}")
        return cls(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as an object.

        Raises:
            ValueError: If this torch does not know it.
        """
        return _dtype_named(self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its dense contents."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """The ordered tensors of one refit.

    Attributes:
        specs: One entry per name, in the order in which the bytes are sent.
    """

    specs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        """Check names.

        Raises:
            ValueError: If a name occurs twice.
        """
        seen: set[str] = set()
        for spec in self.specs:
            if spec.name in seen:
                raise ValueError(f"a manifest names each tensor once, but {spec.name!r} occurs twice")
            seen.add(spec.name)

    @classmethod
    def from_tensors(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> "Manifest":
        """Describe live tensors, in their order; tied tensors count once per name.

        Raises:
            ValueError: If a name occurs twice or a tensor has no plain bytes.
        """
        return cls(tuple(TensorSpec.of(name, tensor) for name, tensor in tensors))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: If the text is not such a document.
        """
        try:
            rows = json.loads(text)
            specs = tuple(TensorSpec(name=n, shape=tuple(s), dtype=d) for n, s, d in rows)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"a manifest is a JSON list of [name, shape, dtype], got {text[:80]!r}: regenerate it with to_json"
            ) from error
        return cls(specs)

    def to_json(self) -> str:
        """Write it as a JSON list of ``[name, shape, dtype]``, in order."""
        return json.dumps([[s.name, list(s.shape), s.dtype] for s in self.specs], separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the ordered contents, as hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """The same entries by name."""
        return {spec.name: spec for spec in self.specs}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def differences(self, expected: "Manifest") -> tuple[str, ...]:
        """Compare what is sent (this) with what the live model expects, both ways; the order does not matter.

        Args:
            expected: Manifest of the receiving model.

        Returns:
            One sentence per tensor that differs, empty where both hold the same tensors: missing and unexpected
            names (each with the nearest unmatched name of the other side), shapes, dtypes.
        """
        missing = [name for name in expected.by_name if name not in self.by_name]
        unexpected = [name for name in self.by_name if name not in expected.by_name]
        found = [f"{name!r} is expected and not sent{_near(name, unexpected)}" for name in missing]
        found += [f"{name!r} is sent and not expected{_near(name, missing)}" for name in unexpected]
        for name, sent in self.by_name.items():
            live = expected.by_name.get(name)
            if live is not None and sent.shape != live.shape:
                found.append(f"{name!r} has shape {list(live.shape)} and is sent with {list(sent.shape)}")
            if live is not None and sent.dtype != live.dtype:
                found.append(f"{name!r} has dtype {live.dtype} and is sent as {sent.dtype}")
        return tuple(found)


def _near(name: str, others: list[str]) -> str:
    # Only unmatched names are candidates, which keeps this cheap for the usual few differences.
    near = difflib.get_close_matches(name, others[:500], n=_NUM_NEAR_NAMES, cutoff=0.6)
    return f" (nearest: {', '.join(map(repr, near))})" if near else ""
