# SPDX-License-Identifier: Apache-2.0
"""All keys of the config with type, default and meaning, read from the schema."""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from nemo_rl_core.config.base import Section
from nemo_rl_core.config.problems import UNSET, show_value
from nemo_rl_core.config.run import RunConfig

__all__ = ["KeyInfo", "render_table", "schema_keys"]

_NAMES = {int: "integer", float: "number", bool: "true or false", str: "string", dict: "mapping", tuple: "list"}


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """One key of the schema.

    Attributes:
        key: Dotted key.
        kind: Its type in words.
        default: Its default, or ``UNSET`` where the key is required.
        meaning: What it does.
        is_section: Whether it has keys of its own.
    """

    key: str
    kind: str
    default: Any
    meaning: str
    is_section: bool


def schema_keys() -> tuple[KeyInfo, ...]:
    """Return every key, sections included, in the order of the schema."""
    return tuple(_walk(RunConfig, ""))


def render_table(section: str) -> str:
    """Return the keys under one top-level key as a Markdown table; ``""`` gives the keys that belong to no section.

    A section that may be null has a row of its own.
    """
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for info in schema_keys():
        head, dot, _ = info.key.partition(".")
        belongs = head == section if section else not dot
        if belongs and not (info.is_section and (info.default is not None)):
            default = "required" if info.default is UNSET else f"`{show_value(info.default)}`"
            rows.append(f"| `{info.key}` | {info.kind} | {default} | {info.meaning} |")
    return "\n".join(rows)


def _walk(model: type[Section], prefix: str) -> Iterator[KeyInfo]:
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        key = f"{prefix}{name}"
        yield KeyInfo(
            key=key,
            kind="mapping" + (" or null" if _allows_null(field.annotation) else "")
            if section
            else _kind(field.annotation),
            default=_default(field),
            meaning=field.description or (section.__doc__ or "").partition("\n")[0]
            if section
            else field.description or "",
            is_section=section is not None,
        )
        if section is not None:
            yield from _walk(section, f"{key}.")


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return UNSET
    return field.get_default(call_default_factory=True, validated_data={})


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type, without wrappers."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    return (annotation,)


def _allows_null(annotation: Any) -> bool:
    return type(None) in _members(annotation)


def _section_of(annotation: Any) -> type[Section] | None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, Section):
            return member
    return None


def _kind(annotation: Any) -> str:
    words = []
    for member in _members(annotation):
        if member is type(None):
            words.append("null")
        elif get_origin(member) is Literal:
            words.extend(f"`{choice}`" for choice in get_args(member))
        else:
            words.append(_NAMES[get_origin(member) or member])
    return " or ".join(words)
