# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl env``: list, build, find and remove the environments that workers run in."""

import argparse
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from nemo_rl_core import plugins
from nemo_rl_core.distributed.environments import ENVIRONMENT_ENTRY_POINT_GROUP
from nemo_rl_core.distributed.venv_builder import BuildOptions, build_venv, remove_venv, worker_probe
from nemo_rl_core.distributed.venvs import load_recipe, venv_of
from nemo_rl_core.errors import NemoRLError

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Do what the action says."""
    return _ACTIONS[options.action](options)


def _list(options: argparse.Namespace) -> int:
    rows = [_row(plugin) for plugin in plugins.discover(ENVIRONMENT_ENTRY_POINT_GROUP).values()]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(
            "no installed package declares an environment; an adapter does, by an entry point of the group "
            f"{ENVIRONMENT_ENTRY_POINT_GROUP!r}"
        )
    for row in rows:
        print(f"{row['name']:12} {row['state']:12} {row['distribution']:24} {row['python'] or row['reason']}".rstrip())
    return 0


def _row(plugin: plugins.Plugin) -> dict[str, Any]:
    """Say what is known of one environment; one that is broken does not hide the others."""
    row = {
        "name": plugin.name,
        "state": plugin.state.value,
        "distribution": f"{plugin.distribution} {plugin.version}",
        "python": None,
        "packages": None,
        "reason": plugin.reason,
    }
    if plugin.state is not plugins.PluginState.AVAILABLE:
        return row
    try:
        venv = venv_of(plugin.name)
        row["state"] = venv.state.value
        if (stamp := venv.stamp) is not None:
            return row | {"python": str(venv.python), "packages": len(stamp["packages"])}
        venv.ready_python()
    except LookupError as error:
        return row | {"reason": str(error)}
    except NemoRLError as error:
        return row | {"state": "broken", "reason": str(error)}
    return row


def _build(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.name)
    venv = venv_of(options.name)
    how = BuildOptions(timeout_s=options.timeout, rebuild=options.rebuild, tell=_say)
    stamp = build_venv(venv, worker_probe(recipe), how)
    _say(f"ready: {options.name}, {len(stamp['packages'])} packages, built in {stamp['seconds']} s")
    for other in venv.others():
        _say(f"  out of date, and still there: {other}")
    _say(f"  {venv.python}")
    return 0


def _path(options: argparse.Namespace) -> int:
    print(venv_of(options.name).ready_python())
    return 0


def _remove(options: argparse.Namespace) -> int:
    if not remove_venv(venv_of(options.name), tell=_say):
        _say(f"nothing was built of {options.name!r}")
    return 0


def _say(line: str) -> None:
    # At once, also into a pipe: an installation takes minutes.
    print(line, flush=True)


_ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {"list": _list, "build": _build, "path": _path, "remove": _remove}
)
