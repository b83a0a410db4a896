# SPDX-License-Identifier: Apache-2.0
"""From files and overrides to a checked config, and back to YAML."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nemo_rl_core.config.base import Section
from nemo_rl_core.config.explain import explain, nearest_key, unknown_key
from nemo_rl_core.config.overrides import apply_overrides
from nemo_rl_core.config.problems import Problem, config_error
from nemo_rl_core.config.rules import check_rules
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.config.unsupported import split_unsupported
from nemo_rl_core.config.yaml_io import dump_yaml_mapping, load_yaml_file

__all__ = ["config_from_mapping", "dump_yaml", "load_config"]

_FREE_TEXT = ("policy.tokenizer.chat_template", "data.task_kwargs")


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a config file with what it inherits from, lay overrides over it, and check it.

    Args:
        path: A YAML file; its top-level ``defaults`` names files to inherit from, relative to it.
        overrides: ``dotted.key=value``, values in YAML; the later wins.

    Raises:
        ConfigError: Listing every problem with key, rule, value and way out.
    """
    mapping, problems = apply_overrides(load_yaml_file(path), overrides)
    return _checked(mapping, str(path), problems)


def config_from_mapping(mapping: Mapping[str, Any], source: str = "config") -> RunConfig:
    """Check a mapping that is already read.

    Args:
        mapping: Top-level key to section, of plain values; it is not altered.
        source: What to call it in errors.

    Raises:
        ConfigError: Listing every problem with key, rule, value and way out.
    """
    return _checked(mapping, source, [])


def dump_yaml(config: RunConfig) -> str:
    """Return the whole config, defaults included, as YAML that `load_config` reads back equal."""
    return dump_yaml_mapping(config.model_dump())


def _checked(mapping: Mapping[str, Any], source: str, problems: list[Problem]) -> RunConfig:
    """Collect problems section by section, so that all of them are known before the first is raised."""
    supported, refused = split_unsupported(mapping)
    problems = [*problems, *refused, *_interpolations("", mapping)]
    problems.extend(unknown_key(name, value) for name, value in supported.items() if name not in RunConfig.model_fields)
    sections: dict[str, Any] = {}
    for name, kind in _section_kinds():
        # A section that is not there has the problems of an empty one: its required keys.
        raw = supported.get(name, {})
        try:
            sections[name] = kind.model_validate(raw)
        except ValidationError as error:
            found = explain(error, name)
            problems.extend(found)
            problems.extend(_what_rules_say_of_the_rest(name, kind, raw, error, found))
    problems.extend(check_rules(sections))
    if not problems:
        try:
            return RunConfig.model_validate(supported | sections)
        except ValidationError as error:
            problems = explain(error, "")
    raise config_error(source, problems)


def _section_kinds() -> Iterator[tuple[str, type[Section]]]:
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield name, field.annotation


def _what_rules_say_of_the_rest(
    name: str, kind: type[Section], raw: Any, error: ValidationError, found: list[Problem]
) -> list[Problem]:
    """Apply the rules to a broken section without its broken keys.

    A problem that speaks of a broken key is left out: it would be about a default, not about what the user wrote.
    """
    repaired = raw
    for item in error.errors(include_url=False):
        # Where a key is missing, what lacks it goes.
        location = item["loc"][:-1] if item["type"] == "missing" else item["loc"]
        repaired = _without(repaired, location)
        if repaired is None:
            return []
    try:
        section = kind.model_validate(repaired)
    except ValidationError:
        return []
    broken = {problem.key for problem in found} | {near for problem in found if (near := nearest_key(problem.key))}
    return [p for p in check_rules({name: section}) if not any(key in str(p) for key in broken)]


def _without(value: Any, location: tuple[int | str, ...]) -> Any:
    """Return a mapping without one key at any depth; None where that is not possible."""
    if not location or not isinstance(value, Mapping):
        return None
    first, *rest = location
    if first not in value:
        return value
    if rest and (below := _without(value[first], tuple(rest))) is not None:
        return {**value, first: below}
    return {key: item for key, item in value.items() if key != first}


def _interpolations(key: str, value: Any) -> Iterator[Problem]:
    """Find OmegaConf's ``${...}``, which would otherwise go on as a plain string; templates may hold it."""
    if key in _FREE_TEXT:
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _interpolations(f"{key}.{name}" if key else str(name), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _interpolations(f"{key}[{index}]", item)
    elif isinstance(value, str) and "${" in value:
        yield Problem(key=key, rule="must not hold ${...}", value=value, way_out="write the value itself")
