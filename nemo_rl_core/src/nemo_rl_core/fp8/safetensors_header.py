# SPDX-License-Identifier: Apache-2.0
"""What a safetensors file says it holds, read without its tensors."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from nemo_rl_core.errors import ModelError

__all__ = ["TensorEntry", "read_header"]

# The header names the tensors; the longest ones known have a few MB.
_LONGEST_HEADER = 2**28


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of a file.

    Attributes:
        dtype: As safetensors calls it, e.g. ``BF16`` or ``F8_E4M3``.
        num_bytes: What it takes in the file.
    """

    dtype: str
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file by name.

    Raises:
        ModelError: If the file can't be read, has no such header, or another length than its header says.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            text = file.read(length) if 0 < length < _LONGEST_HEADER else b""
        size = path.stat().st_size
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error.strerror}; fetch or save the model again") from error
    header = _object(text)
    if header is None:
        raise ModelError(f"{str(path)!r} is no safetensors file: it has no header; fetch or save the model again")
    entries, ends = {}, [0]
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not _are_offsets(offsets) or not isinstance(entry.get("dtype"), str):
            raise ModelError(
                f"{str(path)!r} is no whole safetensors file: the entry of {name[:80]!r} must have 'dtype' and two "
                f"'data_offsets', got {str(entry)[:80]}; fetch or save the model again"
            )
        entries[name] = TensorEntry(dtype=entry["dtype"], num_bytes=offsets[1] - offsets[0])
        ends.append(offsets[1])
    if size != (expected := 8 + length + max(ends)):
        raise ModelError(
            f"{str(path)!r} has {size:,} bytes, and its header speaks of {expected:,}; it was cut, or written in part: "
            f"fetch or save the model again"
        )
    return entries


def _object(text: bytes) -> Mapping[str, Any] | None:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) else None


def _are_offsets(offsets: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(isinstance(at, int) and not isinstance(at, bool) for at in offsets)
        and 0 <= offsets[0] <= offsets[1]
    )
