# SPDX-License-Identifier: Apache-2.0
"""Load one plugin, or say exactly why not. Nothing is registered anywhere, so there is nothing to roll back."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import importlib_metadata

from nemo_rl_core.errors import (
    BackendBrokenError,
    BackendError,
    BackendIncompatibleError,
    UnknownBackendError,
    text_of,
)
from nemo_rl_core.plugins.discovery import GENERATION_GROUP, Plugin, PluginState, error_for, scan

__all__ = ["CollectedItems", "check", "collect_mappings", "load"]


def load(
    name: str,
    *,
    group: str = GENERATION_GROUP,
    expected_protocol: int | None = None,
    blocked: Iterable[str] = (),
) -> Any:
    """Import and return the object that one plugin names; no other plugin of the group is touched.

    Args:
        name: Name of the plugin.
        group: Entry point group.
        expected_protocol: The object's ``protocol`` must equal it; None does not ask.
        blocked: Names to switch off besides those in ``NEMO_RL_PLUGINS_BLOCKED``.

    Returns:
        The object.

    Raises:
        UnknownBackendError: If no plugin has that name; lists the installed ones and the nearest.
        BackendAbsentError: If it is an adapter of ours that is not installed; names the command that installs it.
        BackendBlockedError: If it is switched off.
        BackendDuplicateError: If two distributions register it; names both.
        BackendIncompatibleError: If its distribution requires another core (checked before anything is imported), or
            it speaks another protocol.
        BackendBrokenError: If it fails to load; ``__cause__`` is the real reason.
    """
    plugins, entry_points = scan(group, blocked=blocked)
    if name not in plugins:
        raise _unknown(name, group, plugins)
    return _load(plugins[name], entry_points, expected_protocol)


def check(
    name: str,
    *,
    group: str = GENERATION_GROUP,
    expected_protocol: int | None = None,
    blocked: Iterable[str] = (),
) -> Plugin:
    """Load one plugin and return it with the state that this shows, errors as its reason: the deep check.

    Args:
        name: Name of the plugin.
        group: As ``load``.
        expected_protocol: As ``load``.
        blocked: As ``load``.

    Raises:
        UnknownBackendError: If no plugin has that name.
    """
    plugins, entry_points = scan(group, blocked=blocked)
    if name not in plugins:
        raise _unknown(name, group, plugins)
    plugin = plugins[name]
    if plugin.state is not PluginState.AVAILABLE:
        return plugin
    try:
        _load(plugin, entry_points, expected_protocol)
    except BackendBrokenError as error:
        return replace(plugin, state=PluginState.BROKEN, reason=str(error))
    except BackendIncompatibleError as error:
        return replace(plugin, state=PluginState.INCOMPATIBLE, reason=str(error))
    return plugin


@dataclass(frozen=True, kw_only=True)
class CollectedItems:
    """What the plugins of a group contribute.

    Attributes:
        items: Key to value, over all plugins that could be used as a whole.
        sources: Key to the name of the plugin that brought it.
        failures: Name of each plugin that contributed nothing to the error that says why.
    """

    items: Mapping[str, str]
    sources: Mapping[str, str]
    failures: Mapping[str, BackendError]


def collect_mappings(group: str, *, blocked: Iterable[str] = (), strict: bool = False) -> CollectedItems:
    """Merge the mappings that the plugins of a group name; a plugin counts with all of its items or with none.

    An entry point names a mapping of strings to strings, or a callable without arguments that returns one.

    Args:
        group: Entry point group, e.g. ``nemo_rl_core.actors`` (class path of an actor to its environment).
        blocked: Names to switch off besides those in ``NEMO_RL_PLUGINS_BLOCKED``.
        strict: Raise the first failure instead of collecting it; a blocked plugin is no failure.

    Raises:
        BackendError: In strict mode, the subclass that fits; a plugin that fails to load or raises when called is
            ``BackendBrokenError`` with the cause, one that claims a key of another is ``BackendDuplicateError``.
    """
    plugins, entry_points = scan(group, blocked=blocked)
    items: dict[str, str] = {}
    sources: dict[str, str] = {}
    failures: dict[str, BackendError] = {}
    for name, plugin in plugins.items():
        try:
            contributed = _mapping_of(plugin, _load(plugin, entry_points, None))
            _refuse_taken_keys(plugin, contributed, sources)
        except BackendError as error:
            if strict and plugin.state is not PluginState.BLOCKED:
                raise
            failures[name] = error
            continue
        items.update(contributed)
        sources.update(dict.fromkeys(contributed, name))
    return CollectedItems(
        items=MappingProxyType(items), sources=MappingProxyType(sources), failures=MappingProxyType(failures)
    )


def _unknown(name: str, group: str, plugins: Mapping[str, Plugin]) -> UnknownBackendError:
    installed = [known for known, plugin in plugins.items() if plugin.state is not PluginState.ABSENT]
    near = difflib.get_close_matches(name, plugins, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UnknownBackendError(
        f"no plugin {name!r} is installed in group {group}; installed: {', '.join(installed) or 'none'}.{hint}"
    )


def _load(
    plugin: Plugin, entry_points: Mapping[str, importlib_metadata.EntryPoint], expected_protocol: int | None
) -> Any:
    if plugin.state is not PluginState.AVAILABLE:
        raise error_for(plugin)
    try:
        loaded = entry_points[plugin.name].load()
    except (Exception, SystemExit) as cause:
        raise _broken(plugin, f"fails to load from {plugin.value}", cause) from cause
    if expected_protocol is not None:
        _check_protocol(plugin, loaded, expected_protocol)
    return loaded


def _broken(plugin: Plugin, what: str, cause: BaseException) -> BackendBrokenError:
    return BackendBrokenError(
        f"plugin {plugin.name!r} of {plugin.distribution} {plugin.version} is installed and {what}: "
        f"{type(cause).__name__}: {text_of(cause)}"
    )


def _check_protocol(plugin: Plugin, loaded: object, expected: int) -> None:
    try:
        actual = getattr(loaded, "protocol", None)
    except Exception as cause:  # a property of the plugin's may raise anything
        raise _broken(plugin, "raises when it is asked for its protocol", cause) from cause
    if actual != expected:
        speaks = "names no protocol number" if actual is None else f"speaks protocol {actual!r}"
        raise BackendIncompatibleError(
            f"plugin {plugin.name!r} of {plugin.distribution} {plugin.version} {speaks}, this core speaks {expected}; "
            f"install a release of {plugin.distribution} that was made for this core"
        )


def _mapping_of(plugin: Plugin, loaded: Any) -> dict[str, str]:
    try:
        given = loaded() if callable(loaded) and not isinstance(loaded, Mapping) else loaded
        items = dict(given.items()) if isinstance(given, Mapping) else None
    except (Exception, SystemExit) as cause:
        raise _broken(plugin, f"raises when {plugin.value} is asked for its items", cause) from cause
    who = f"plugin {plugin.name!r} of {plugin.distribution} {plugin.version}"
    if items is None:
        raise BackendBrokenError(f"{who} must give a mapping of strings to strings, got {type(given).__name__}")
    for pair in items.items():
        if not all(isinstance(part, str) for part in pair):
            raise BackendBrokenError(f"{who} must map strings to strings, got {pair!r}")
    return items


def _refuse_taken_keys(plugin: Plugin, contributed: Mapping[str, str], sources: Mapping[str, str]) -> None:
    taken = sorted(set(contributed) & set(sources))
    if taken:
        duplicate = replace(
            plugin,
            state=PluginState.DUPLICATE,
            reason=f"plugins {sources[taken[0]]!r} and {plugin.name!r} both give {taken[0]!r}; remove one of them",
        )
        raise error_for(duplicate)
