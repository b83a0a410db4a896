# SPDX-License-Identifier: Apache-2.0
"""Which plugins are installed and in which state, read from metadata alone: listing imports nothing."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import nemo_rl_core
from nemo_rl_core.errors import (
    BackendAbsentError,
    BackendBlockedError,
    BackendBrokenError,
    BackendDuplicateError,
    BackendError,
    BackendIncompatibleError,
)

__all__ = [
    "BLOCKED_VARIABLE",
    "CORE_DISTRIBUTION",
    "GENERATION_GROUP",
    "KNOWN_ADAPTERS",
    "Plugin",
    "PluginState",
    "discover",
    "error_for",
    "scan",
]

#: Entry points of generation backends.
GENERATION_GROUP = "nemo_rl_core.generation"

#: Name of core's own distribution, as adapters require it.
CORE_DISTRIBUTION = "nemo-rl-core"

#: Comma-separated plugin names that are switched off; ``*`` switches off everything that is not core's own.
BLOCKED_VARIABLE = "NEMO_RL_PLUGINS_BLOCKED"

#: Adapters that we publish, by group and name, with the command that installs each.
KNOWN_ADAPTERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {GENERATION_GROUP: MappingProxyType({"vllm": 'pip install "nemo-rl-core[vllm]"'})}
)


class PluginState(StrEnum):
    """What can be said about a plugin; `broken` and a wrong protocol may show up only when it is loaded."""

    AVAILABLE = "available"
    ABSENT = "absent"
    INCOMPATIBLE = "incompatible"
    BROKEN = "broken"
    BLOCKED = "blocked"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One plugin name of a group.

    Attributes:
        name: Name of the entry point.
        value: What it points to, ``module:attribute``; "" where absent.
        distribution: Name of the distribution that brings it; of a duplicate all of them, comma-separated; "" where
            absent.
        version: Version of that distribution; of a duplicate all of them in the same order.
        state: What is known without importing it.
        reason: Why it is not available, with the way out; "" where it is.
    """

    name: str
    value: str
    distribution: str
    version: str
    state: PluginState
    reason: str = ""


_ERRORS: Mapping[PluginState, type[BackendError]] = MappingProxyType(
    {
        PluginState.ABSENT: BackendAbsentError,
        PluginState.INCOMPATIBLE: BackendIncompatibleError,
        PluginState.BROKEN: BackendBrokenError,
        PluginState.BLOCKED: BackendBlockedError,
        PluginState.DUPLICATE: BackendDuplicateError,
    }
)


def error_for(plugin: Plugin) -> BackendError:
    """Return the error that says why a plugin can't be used.

    Args:
        plugin: A plugin in any state but ``available``.
    """
    return _ERRORS[plugin.state](plugin.reason)


def discover(
    group: str = GENERATION_GROUP, *, blocked: Iterable[str] = (), strict: bool = False
) -> Mapping[str, Plugin]:
    """List the plugins of a group with their states, from one scan of the installed metadata.

    Args:
        group: Entry point group.
        blocked: Names to switch off besides those in ``NEMO_RL_PLUGINS_BLOCKED``, which is read now.
        strict: Raise if any plugin is incompatible, broken or a duplicate, instead of listing it so.

    Returns:
        Name to plugin, sorted by name; adapters that we publish and that are not installed are ``absent``.

    Raises:
        BackendIncompatibleError: In strict mode; like the next two it names every failing plugin, and its type is
            that of the first one by name.
        BackendBrokenError: In strict mode.
        BackendDuplicateError: In strict mode.
    """
    plugins, _ = scan(group, blocked=blocked)
    failing = [
        plugin
        for plugin in plugins.values()
        if plugin.state in (PluginState.INCOMPATIBLE, PluginState.BROKEN, PluginState.DUPLICATE)
    ]
    if strict and failing:
        raise _ERRORS[failing[0].state]("; ".join(plugin.reason for plugin in failing))
    return plugins


def scan(
    group: str, *, blocked: Iterable[str] = ()
) -> tuple[Mapping[str, Plugin], Mapping[str, importlib_metadata.EntryPoint]]:
    """Scan the metadata once; return the plugins, and the entry points of those that are not absent.

    Args:
        group: Entry point group.
        blocked: Names to switch off besides those in ``NEMO_RL_PLUGINS_BLOCKED``.
    """
    found: dict[str, list[importlib_metadata.EntryPoint]] = {}
    for entry_point in _entry_points(group):
        found.setdefault(entry_point.name, []).append(entry_point)
    switched_off = frozenset(blocked) | frozenset(
        name.strip() for name in os.environ.get(BLOCKED_VARIABLE, "").split(",") if name.strip()
    )
    plugins = {name: _judge(name, entry_points, switched_off) for name, entry_points in found.items()}
    for name, command in KNOWN_ADAPTERS.get(group, {}).items():
        plugins.setdefault(name, _absent(name, command))
    return (
        MappingProxyType(dict(sorted(plugins.items()))),
        {name: next(filter(_distribution, eps), eps[0]) for name, eps in found.items()},
    )


def _entry_points(group: str) -> Iterator[importlib_metadata.EntryPoint]:
    """Yield the entry points of a group, distribution by distribution.

    A file that cannot be read, of whatever package, must not hide the plugins of all others; where it speaks of this
    group, a warning says so.
    """
    for dist in importlib_metadata.distributions():
        try:
            yield from dist.entry_points.select(group=group)
        except Exception as error:  # noqa: BLE001 - foreign metadata; the parser raises what it happens to meet
            if group in _raw_entry_points(dist):
                where = dist.locate_file("")
                warnings.warn(
                    f"entry points of a package in {where} cannot be read, so its plugins are missing: {error}",
                    stacklevel=2,
                )


def _raw_entry_points(dist: Any) -> str:
    try:
        return dist.read_text("entry_points.txt") or ""
    except (OSError, UnicodeError):
        return ""


def _absent(name: str, command: str) -> Plugin:
    reason = f"the adapter for {name!r} is not installed in this interpreter; install it: {command}"
    return Plugin(name=name, value="", distribution="", version="", state=PluginState.ABSENT, reason=reason)


def _distribution(entry_point: importlib_metadata.EntryPoint) -> tuple[str, str] | None:
    """Return name and version of the distribution that brings it; None if its metadata is gone."""
    dist = entry_point.dist
    if dist is None:
        return None
    try:
        name, version = dist.name, dist.version
    except Exception:  # noqa: BLE001 - missing after an interrupted uninstall, or garbage; either way it is unusable
        return None
    return (name, version) if name else None


def _judge(name: str, entry_points: list[importlib_metadata.EntryPoint], switched_off: frozenset[str]) -> Plugin:
    sources: dict[str, tuple[str, str]] = {}
    valid: list[importlib_metadata.EntryPoint] = []
    for entry_point in entry_points:
        source = _distribution(entry_point)
        if source is not None:
            sources[canonicalize_name(source[0])] = source
            valid.append(entry_point)
    sources = dict(sorted(sources.items()))
    state, reason = _state(name, valid, sources, switched_off) if valid else _left_over(name, entry_points[0])
    return Plugin(
        name=name,
        value=(valid or entry_points)[0].value,
        distribution=", ".join(dist for dist, _ in sources.values()),
        version=", ".join(version for _, version in sources.values()),
        state=state,
        reason=reason,
    )


def _left_over(name: str, entry_point: importlib_metadata.EntryPoint) -> tuple[PluginState, str]:
    where = entry_point.dist.locate_file("") if entry_point.dist is not None else "sys.path"
    return PluginState.BROKEN, (
        f"plugin {name!r} is registered in {where} by a distribution whose METADATA is missing or cannot be read, as "
        f"after an interrupted uninstall; reinstall it, or remove its .dist-info folder"
    )


def _state(
    name: str,
    entry_points: list[importlib_metadata.EntryPoint],
    sources: Mapping[str, tuple[str, str]],
    switched_off: frozenset[str],
) -> tuple[PluginState, str]:
    described = " and ".join(f"{dist} {version}" for dist, version in sources.values())
    is_core = set(sources) == {CORE_DISTRIBUTION}
    if name in switched_off or ("*" in switched_off and not is_core):
        return PluginState.BLOCKED, (
            f"plugin {name!r} of {described} is switched off, by argument or by {BLOCKED_VARIABLE}; take the name out "
            f"there to use it"
        )
    if len(sources) > 1:
        return PluginState.DUPLICATE, f"{described} both register {name!r}; uninstall one of them"
    values = {entry_point.value for entry_point in entry_points}
    if len(values) > 1:
        return PluginState.DUPLICATE, f"{described} registers {name!r} twice: {', '.join(sorted(values))}; keep one"
    incompatible = _version_conflict(entry_points[0])
    if incompatible:
        return PluginState.INCOMPATIBLE, f"plugin {name!r} of {described} {incompatible}"
    if not importlib_metadata.EntryPoint.pattern.match(entry_points[0].value):
        return PluginState.BROKEN, (
            f"plugin {name!r} of {described} points to {entry_points[0].value!r}, which is not module:attribute; its "
            f"author has to correct the entry point"
        )
    return PluginState.AVAILABLE, ""


def _version_conflict(entry_point: importlib_metadata.EntryPoint) -> str:
    """Say which requirement on core does not admit the running core; "" where all of them do."""
    dist = entry_point.dist
    for text in (dist.requires or []) if dist is not None else []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # not one that pip would have accepted, and none that we can judge
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) != CORE_DISTRIBUTION or not applies:
            continue
        if not requirement.specifier.contains(nemo_rl_core.__version__, prereleases=True):
            return (
                f"requires {CORE_DISTRIBUTION}{requirement.specifier}, this is {CORE_DISTRIBUTION} "
                f"{nemo_rl_core.__version__}; install matching versions of both"
            )
    return ""
