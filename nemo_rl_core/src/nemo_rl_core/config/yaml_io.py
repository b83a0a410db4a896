# SPDX-License-Identifier: Apache-2.0
"""YAML with the types of version 1.2, and `defaults:` inheritance between files.

PyYAML reads version 1.1, where ``5e-6`` is a string, ``no`` a truth value, ``010`` eight and ``1:30`` ninety. Here
only ``true`` and ``false`` are truth values, ``5e-6`` is a number, and a key that stands twice in a mapping is an error.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_core.errors import ConfigError

__all__ = ["deep_merge", "dump_yaml_mapping", "load_yaml", "load_yaml_file"]

_MAX_DEPTH = 64
_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", "<<", "<"),
)


class _Loader(yaml.SafeLoader):
    """Reads YAML with the scalar types of version 1.2."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012 - PyYAML's own protocol; filled once below and never after


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either version of YAML would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write shared values out, so that the file reads without anchors."""
        del data
        return True


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes these line breaks of version 1.1 as they stand, and reads them back as plain line feeds.
    style = '"' if set(text) & set("\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if text[:2] in {"0o", "0x"}:
        return int(text, 0)
    try:
        return int(text.replace("_", ""), 10)
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower().replace("_", "")
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"a key must be a string, got {key!r}; put it in quotes", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} stands twice in one mapping; keep one", key_node.start_mark
            )
        seen.add(key)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


for _tag, _pattern, _first in _SCALARS:
    _compiled = re.compile(rf"^(?:{_pattern})$")
    _characters = ["" if character == "\0" else character for character in _first]
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _compiled, _characters)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _compiled, _characters)
_Dumper.add_representer(str, _represent_str)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def load_yaml(text: str, source: str) -> Any:
    """Read one YAML document.

    Args:
        text: The document.
        source: What to call it in errors.

    Raises:
        ConfigError: If it is no YAML, holds a tag, a key twice, a key that is no string, or itself.
    """
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{source}{where}: {what}") from error
    except RecursionError:
        raise _too_deep(source) from None
    _require_depth(value, source)
    return value


def load_yaml_file(path: str | Path) -> dict[str, Any]:
    """Read a YAML file and what it inherits from.

    The top-level key ``defaults`` names one file or a list of files, relative to the file that names them. Later
    files win over earlier ones, and the file itself wins over all of them (`deep_merge`).

    Args:
        path: The file.

    Returns:
        The merged mapping, without ``defaults``.

    Raises:
        ConfigError: If a file is missing, unreadable, no mapping, or inherits from itself over any number of files.
    """
    return _load_file(Path(path), ())


def _load_file(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    resolved = path.resolve()
    if resolved in chain:
        circle = " -> ".join(str(step) for step in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(f"a config must not inherit from itself, got {circle}; remove one `defaults`")
    value = load_yaml(_read_text(path, chain), str(path))
    mapping = {} if value is None else value
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}: a config must be a mapping, got {type(mapping).__name__}")
    merged: dict[str, Any] = {}
    for name in _parents(mapping.pop("defaults", None), path):
        merged = deep_merge(merged, _load_file(path.parent / name, (*chain, resolved)))
    return deep_merge(merged, mapping)


def _read_text(path: Path, chain: tuple[Path, ...]) -> str:
    named_by = f", which {chain[-1]} names under `defaults` (paths are relative to that file)" if chain else ""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}{named_by}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path}{named_by} cannot be read: {error}") from error


def _parents(defaults: Any, path: Path) -> list[str]:
    names = [] if defaults is None else defaults if isinstance(defaults, list) else [defaults]
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{path}: `defaults` must be a path or a list of paths, got {name!r}")
    return names


def deep_merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``change`` laid over it; neither is altered.

    Where both have a mapping, the mappings are merged; anything else, a list or null too, replaces what was there.
    """
    merged = dict(base)
    for key, value in change.items():
        below = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = deep_merge(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def dump_yaml_mapping(mapping: Mapping[str, Any]) -> str:
    """Return a mapping of plain values as YAML that `load_yaml` reads back equal."""
    return yaml.dump(_plain(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _require_depth(value: Any, source: str, depth: int = 0) -> None:
    """Refuse nesting that everything after this would have to recurse through."""
    if depth > _MAX_DEPTH:
        raise _too_deep(source)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_depth(item, source, depth + 1)


def _too_deep(source: str) -> ConfigError:
    return ConfigError(f"{source}: values may be nested {_MAX_DEPTH} levels deep at most")
