# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl backends``: which generation backends there are, with which engine, where, and in what state."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nemo_rl_core import plugins
from nemo_rl_core.algorithms.engine import ask_interpreter, backend_environment, check_engine, find_engine
from nemo_rl_core.config.cluster import EnvSection
from nemo_rl_core.distributed.environments import (
    Environment,
    InterpreterReport,
    current_interpreter,
    require_compatible,
)
from nemo_rl_core.distributed.venvs import VenvState, settle, venv_of
from nemo_rl_core.errors import BackendAbsentError, BackendError, EnvironmentLookupError, NemoRLError
from nemo_rl_core.plugins import Plugin, PluginState
from nemo_rl_core.protocols.generation import PROTOCOL_NUMBER, BackendSpec

__all__ = ["describe", "run"]

_PROBE_TIMEOUT_S = 120.0
_CHILD_TIMEOUT_S = 180.0


def run(options: argparse.Namespace) -> int:
    """Print what is known of each backend."""
    found = plugins.discover()
    with ThreadPoolExecutor(max_workers=4) as pool:
        rows = list(pool.map(lambda plugin: _ask_child(plugin, deep=options.check), found.values()))
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print("\n".join(_lines(row)))
    return 0


def describe(name: str, *, deep: bool) -> None:
    """Print what is known of one installed backend as JSON; run in a process of its own."""
    plugin = plugins.check(name, expected_protocol=PROTOCOL_NUMBER)
    row = _plain_row(plugin)
    if plugin.state is PluginState.AVAILABLE:
        spec = plugins.load(name, expected_protocol=PROTOCOL_NUMBER)
        if isinstance(spec, BackendSpec):
            _fill_in(row, spec, deep=deep)
        else:
            kind = type(spec).__name__
            row |= {"state": "broken", "reason": f"backend {name!r} must name a BackendSpec, got {kind}"}
    print("\n" + json.dumps(row))


def _ask_child(plugin: Plugin, *, deep: bool) -> dict[str, Any]:
    """Ask a process of its own about a backend: listing loads no plugin here, and none can end or hang the listing."""
    if plugin.state is not PluginState.AVAILABLE:
        return _plain_row(plugin)
    code = (
        "import json, sys; path, name, deep = json.loads(sys.argv[1]); sys.path[:] = path\n"
        "from nemo_rl_core.cli.backends import describe; describe(name, deep=deep)\n"
    )
    command = [sys.executable, "-c", code, json.dumps([sys.path, plugin.name, deep])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return _broken(plugin, f"did not end within {_CHILD_TIMEOUT_S:g} s")
    try:
        return json.loads(done.stdout.strip().rpartition("\n")[2])
    except json.JSONDecodeError:
        lines = done.stderr.strip().splitlines() or [""]
        return _broken(plugin, f"ended with {done.returncode} and no answer: {lines[-1]}")


def _broken(plugin: Plugin, how: str) -> dict[str, Any]:
    """Return what can be said where the child process does not answer."""
    source = f"{plugin.name!r} of {plugin.distribution} {plugin.version}"
    reason = f"the process that loads the description of {source} {how}"
    return _plain_row(plugin) | {"state": PluginState.BROKEN.value, "reason": reason}


def _plain_row(plugin: Plugin) -> dict[str, Any]:
    """Return what the metadata says."""
    return {
        "name": plugin.name,
        "state": plugin.state.value,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "engine": None,
        "engine_state": None,
        "engine_range": None,
        "environment": None,
        "environment_state": None,
        "interpreter": None,
        "reason": plugin.reason,
    }


def _fill_in(row: dict[str, Any], spec: BackendSpec, *, deep: bool) -> None:
    """Add engine and environment, as its interpreter tells them; what does not fit becomes the engine's state.

    The state of the backend itself is that of the adapter: it may be there while its engine is not.
    """
    row["engine_range"] = spec.engine_range or None
    try:
        environment = backend_environment(EnvSection(), spec, _device, None)
        row |= {"environment": environment.name, "environment_state": _state(environment)}
        environment = settle(environment)
        report = ask_interpreter(spec, environment, deadline_s=_PROBE_TIMEOUT_S, deep=deep)
        row |= {"interpreter": report.python, "engine": _engine(spec, report)}
        if environment.python is not None:
            require_compatible(report, current_interpreter(), environment=environment.name)
        check_engine(spec, report, environment)
        row["engine_state"] = PluginState.AVAILABLE.value
    except (BackendAbsentError, EnvironmentLookupError) as error:
        row |= {"engine_state": PluginState.ABSENT.value, "reason": str(error)}
    except BackendError as error:
        row |= {"engine_state": PluginState.INCOMPATIBLE.value, "reason": str(error)}
    except NemoRLError as error:
        row |= {"engine_state": PluginState.BROKEN.value, "reason": str(error)}


def _engine(spec: BackendSpec, report: InterpreterReport) -> str | None:
    """Return name and version of the engine; where core itself is the engine, that of torch."""
    if not spec.engine:
        return f"torch {report.versions['torch']}" if "torch" in report.versions else None
    engine = find_engine(spec, report)
    return f"{engine.distribution} {engine.version}" if engine else None


def _device() -> str:
    """Return the kind of machine that this is."""
    import torch  # lazily: only where the backend tells the kinds apart and nobody has named an interpreter

    return "cuda" if torch.cuda.is_available() else "cpu"


def _state(environment: Environment) -> str:
    """Say where an environment's interpreter comes from, of a built one in what state it is."""
    if environment.kind == "requirements":
        return venv_of(environment.name).state.value
    return {"node": "the node's own", "interpreter": VenvState.READY.value}[environment.kind]


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    source = f"{row['distribution']} {row['version']}".strip() or "-"
    where = "-" if row["environment"] is None else f"{row['environment']} ({row['environment_state']})"
    engine = " ".join(filter(None, (row["engine"], row["engine_state"]))) or "-"
    yield f"{row['name']:12} {row['state']:13} {source:24} engine {engine:28} environment {where}".rstrip()
    if row["reason"]:
        yield f"  {row['reason']}"
