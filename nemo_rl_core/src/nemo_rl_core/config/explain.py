# SPDX-License-Identifier: Apache-2.0
"""Pydantic's errors in our words: key, rule, value, way out."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from nemo_rl_core.config.problems import UNSET, Problem, show_value
from nemo_rl_core.config.reference import KeyInfo, schema_keys

__all__ = ["explain", "nearest_key", "unknown_key"]

_RULES: dict[str, str] = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "finite_number": "must be finite",
    "string_too_short": "must not be empty",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be {expected}",
}
_TRUE, _FALSE = {"yes", "on", "y", "true"}, {"no", "off", "n", "false"}


def explain(error: ValidationError, prefix: str) -> list[Problem]:
    """Return one problem for each of pydantic's errors.

    Args:
        error: What validation of one section raised.
        prefix: Dotted key of that section.
    """
    known = {info.key: info for info in schema_keys()}
    problems = []
    for item in error.errors(include_url=False):
        key = _dotted((prefix, *item["loc"]))
        if item["type"] == "missing":
            problems.append(_missing_key(key, known))
        elif item["type"] == "extra_forbidden":
            problems.append(unknown_key(key, item["input"]))
        else:
            problems.append(_broken_type(key, item, known.get(key)))
    return problems


def _missing_key(key: str, known: Mapping[str, KeyInfo]) -> Problem:
    """Return the problem of a required key that is not there; the way out is its meaning."""
    info = known.get(key)
    return Problem(key=key, rule="is required", way_out=f"it is: {info.meaning}" if info and info.meaning else "")


def unknown_key(key: str, value: Any = UNSET) -> Problem:
    """Return the problem of a key that no section has, with the nearest one that there is."""
    near = nearest_key(key)
    parent, _, _ = key.rpartition(".")
    siblings = [info.key for info in schema_keys() if info.key.rpartition(".")[0] == parent]
    way_out = f"did you mean {near}?" if near else f"the keys there are {', '.join(siblings)}" if siblings else ""
    return Problem(key=key, rule="unknown key", value=value, way_out=way_out)


def nearest_key(key: str) -> str | None:
    """Return the known key that was probably meant, or None.

    A key of the same section with a similar name comes first, then the same name elsewhere, then a similar whole key.
    """
    keys = [info.key for info in schema_keys()]
    parent, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    if near := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7):
        return siblings[near[0]]
    if same := [k for k in keys if k.rpartition(".")[2] == leaf]:
        return same[0]
    near = difflib.get_close_matches(leaf, siblings, n=1) or difflib.get_close_matches(key, keys, n=1, cutoff=0.8)
    return siblings.get(near[0], near[0]) if near else None


def _broken_type(key: str, item: Mapping[str, Any], info: KeyInfo | None) -> Problem:
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    template = _RULES.get(kind)
    rule = template.format_map(context) if template else item["msg"][0].lower() + item["msg"][1:]
    if info is not None and " or null" in info.kind and kind.endswith("_type"):
        rule += ", or null"
    hint = _hint(kind, value)
    if not hint and info is not None:
        hint = f"its default is {show_value(info.default)}" if info.default is not UNSET and not info.is_section else ""
    return Problem(key=key, rule=rule, value=value, way_out=hint)


def _hint(kind: str, value: Any) -> str:
    """Say how to write what was probably meant."""
    if kind in {"int_type", "float_type"} and isinstance(value, str) and _is_number(value):
        return "write it without quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return f"write {'true' if value.lower() in _TRUE else 'false'}"
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "put it in quotes"
    if kind == "tuple_type":
        return f"write [{show_value(value)}]" if isinstance(value, str | int | float) else ""
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _dotted(location: Iterable[str | int]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
