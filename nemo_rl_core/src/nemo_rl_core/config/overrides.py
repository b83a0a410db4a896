# SPDX-License-Identifier: Apache-2.0
"""`key=value` overrides of a config, as given on a command line."""

from collections.abc import Iterable, Mapping
from typing import Any

from nemo_rl_core.config.problems import Problem
from nemo_rl_core.config.yaml_io import deep_merge, load_yaml
from nemo_rl_core.errors import ConfigError

__all__ = ["apply_overrides"]


def apply_overrides(config: Mapping[str, Any], overrides: Iterable[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Lay ``dotted.key=value`` overrides over a mapping, the later over the earlier.

    A value is YAML: ``a.b=3``, ``a.b=null``, ``a.b=[1, 2]``, ``a={b: c}``; a mapping is merged and anything else
    replaces, as between files. A key that is not in the file is set; whether it may be is the schema's business.
    The prefixes ``+`` and ``++`` that Hydra's users write mean the same.

    Args:
        config: The mapping; it is not altered.
        overrides: The overrides in order.

    Returns:
        The new mapping, and a problem for each override that could not be applied.
    """
    result = dict(config)
    problems: list[Problem] = []
    for override in overrides:
        parsed = _parse(override)
        if isinstance(parsed, Problem):
            problems.append(parsed)
            continue
        parts, value = parsed
        if (blocked := _scalar_on_the_way(result, parts)) is not None:
            problems.append(blocked)
            continue
        for part in reversed(parts):
            value = {part: value}
        result = deep_merge(result, value)
    return result, problems


def _parse(override: str) -> tuple[list[str], Any] | Problem:
    key, equals, text = override.partition("=")
    key = key.strip().removeprefix("+").removeprefix("+")
    if not equals:
        return Problem(key=f"override {override!r}", rule="an override must be key=value", way_out="write the value")
    if key.startswith("~"):
        return Problem(key=key, rule="a key cannot be deleted by an override", way_out=f"write {key[1:]}=null")
    parts = key.split(".")
    if not all(parts) or any(part != part.strip() for part in parts):
        return Problem(key=f"override {override!r}", rule="its key must be names joined by dots")
    if not text.strip():
        return Problem(key=key, rule="an override must have a value", way_out=f"write {key}=null or {key}='\"\"'")
    try:
        return parts, load_yaml(text, f"override {override!r}")
    except ConfigError as error:
        return Problem(key=key, rule=f"the value must be YAML ({error})", value=text)


def _scalar_on_the_way(config: Mapping[str, Any], parts: list[str]) -> Problem | None:
    """Find a value on the way to the key that has no keys of its own; null stands for an empty section."""
    value: Any = config
    for depth, part in enumerate(parts[:-1], 1):
        value = value.get(part)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            at = ".".join(parts[:depth])
            rule = f"cannot be set, because {at} is no mapping"
            return Problem(key=".".join(parts), rule=rule, value=value, way_out=f"set {at} as a whole")
    return None
