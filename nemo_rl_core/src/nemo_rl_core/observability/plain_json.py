# SPDX-License-Identifier: Apache-2.0
"""JSON that every parser reads: what is not finite becomes a string, and scalars of array libraries become numbers."""

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

__all__ = ["dump_json", "plain_value"]


def plain_value(value: Any, key: str) -> Any:
    """Return a value as JSON holds it.

    NaN and the infinities become the strings ``"nan"``, ``"inf"`` and ``"-inf"``: JSON has no such numbers, and null
    would not tell them from a value that was never measured. A scalar of numpy or torch becomes a Python number.

    Args:
        value: None, a truth value, a number, a string, a path, or a mapping or list of these.
        key: What to call the value in errors.

    Raises:
        TypeError: If the value is something else; the message names the key.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain_value(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, f"{key}[{index}]") for index, item in enumerate(value)]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return plain_value(value.item(), key)
    raise TypeError(
        f"{key} must be a number, a string, or a mapping or list of these, got {type(value).__name__}; "
        f"reduce an array to a scalar first"
    )


def dump_json(value: Any, key: str, *, indent: int | None = None) -> str:
    """Return a value as JSON text, NaN and infinities as strings (`plain_value`).

    Raises:
        TypeError: If JSON cannot hold the value; the message names the key.
    """
    return json.dumps(plain_value(value, key), allow_nan=False, ensure_ascii=False, indent=indent)
