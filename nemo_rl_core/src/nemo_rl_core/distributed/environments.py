# SPDX-License-Identifier: Apache-2.0
"""Which interpreter a worker runs with: names, the registry, one rule of precedence, and a probe.

An environment is an explicit field of a worker's spec. Its name says what is installed (``fsdp``, ``vllm``), its
kind says where the interpreter comes from. This module does not import Ray: the probe also runs inside it.
"""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Final, Literal

from nemo_rl_core.distributed.probing import REPORTED_DISTRIBUTIONS, SHELL_IMPORTS, probe_questions, run_probe
from nemo_rl_core.errors import ClusterError, ConfigError, EnvironmentLookupError

__all__ = [
    "ACTOR_ENTRY_POINT_GROUP",
    "ACTOR_ENVIRONMENT_REGISTRY",
    "ENVIRONMENT_ENTRY_POINT_GROUP",
    "PY_EXECUTABLES",
    "Environment",
    "InterpreterReport",
    "current_interpreter",
    "known_actors",
    "place_of",
    "probe_interpreter",
    "read_answer",
    "require_compatible",
    "resolve_environment",
]

#: Entry points of this group name a mapping {actor class path: environment name}, or a callable that returns one.
ACTOR_ENTRY_POINT_GROUP: Final = "nemo_rl_core.actors"

#: Entry points of this group name an ``EnvironmentRecipe`` each; the entry point's name is that of the environment.
ENVIRONMENT_ENTRY_POINT_GROUP: Final = "nemo_rl_core.environments"

_SYSTEM_SWITCH = "NEMO_RL_PY_EXECUTABLES_SYSTEM"
_PATH_VARIABLE = "NEMO_RL_PY_EXECUTABLE_"


class PY_EXECUTABLES:  # noqa: N801 -- the name that NeMo-RL users know
    """Names of the known environments.

    ``+`` composes: ``fsdp+vllm`` is the train environment with the engine in it.
    """

    SYSTEM: Final = "system"
    BASE: Final = "base"
    FSDP: Final = "fsdp"
    AUTOMODEL: Final = "automodel"
    MCORE: Final = "mcore"
    VLLM: Final = "vllm"


#: Environments that are the node's own interpreter, whoever declares what.
_NODES_OWN = frozenset({PY_EXECUTABLES.SYSTEM, PY_EXECUTABLES.BASE, PY_EXECUTABLES.FSDP})


#: Core's own actors. Others add theirs by an entry point of the group ``nemo_rl_core.actors`` or by argument.
ACTOR_ENVIRONMENT_REGISTRY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "nemo_rl_core.workers.dtensor.DTensorPolicyWorker": PY_EXECUTABLES.FSDP,
        "nemo_rl_core.workers.torch_generation.TorchGenerationWorker": PY_EXECUTABLES.BASE,
    }
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The interpreter and packages that a worker runs with.

    Attributes:
        name: What is installed, e.g. ``fsdp``; parts are joined by ``+``.
        kind: ``node``: the interpreter that the node's own Ray runs with. ``interpreter``: the one at ``python``.
            ``requirements``: the one that ``nemo-rl env build`` made for the recipe of that name; ``venvs.settle``
            finds it.
        python: Absolute path of the interpreter on the worker's node; only for the kind ``interpreter``.
    """

    name: str
    kind: Literal["node", "interpreter", "requirements"] = "node"
    python: str | None = None

    def __post_init__(self) -> None:
        """Check that kind and path go together.

        Raises:
            ConfigError: If they do not, or the path is relative.
        """
        if not self.name or not all(self.parts):
            raise ConfigError(f"an environment needs a name such as 'fsdp' or 'fsdp+vllm', got {self.name!r}")
        if (self.kind == "interpreter") != (self.python is not None):
            raise ConfigError(f"environment {self.name!r}: `python` goes with kind 'interpreter', and only with it")
        if self.python is not None and not PurePath(self.python).is_absolute():
            raise ConfigError(
                f"environment {self.name!r}: the interpreter's path must be absolute, since the worker starts in "
                f"another folder on another node; got {self.python!r}"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """Names that this environment is composed of."""
        return tuple(self.name.split("+"))

    @property
    def lifted(self) -> tuple[str, ...]:
        """Engines composed into this environment, for which the guard's rule is lifted, visibly."""
        return tuple(part for part in self.parts[1:] if part == PY_EXECUTABLES.VLLM)


@dataclass(frozen=True, kw_only=True)
class InterpreterReport:
    """What is known of an interpreter after it was run.

    Attributes:
        python: Path of the interpreter.
        python_version: Its version, e.g. ``3.11.7``.
        versions: Installed version of each reported distribution; absent ones are left out.
        modules: For each module asked for, whether it can be found (a probe, no import).
        failed_imports: For each module that was to be imported and failed: the reason.
        damaged: For each of the distributions whose files are gone: the first that is.
    """

    python: str
    python_version: str
    versions: Mapping[str, str]
    modules: Mapping[str, bool] = field(default_factory=dict)
    failed_imports: Mapping[str, str] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def python_minor(self) -> str:
        """Major and minor version, e.g. ``3.11``."""
        return ".".join(self.python_version.split(".")[:2])


def known_actors() -> dict[str, str]:
    """Return class path to environment name: core's own actors and those that entry points add.

    Core's own entries can't be changed by a plugin. A fresh dict is returned.
    """
    from nemo_rl_core.plugins import collect_mappings  # lazily: a look-up by argument needs no metadata scan

    return {**collect_mappings(ACTOR_ENTRY_POINT_GROUP).items, **ACTOR_ENVIRONMENT_REGISTRY}


def resolve_environment(
    class_path: str,
    *,
    argument: Environment | str | None = None,
    config: Environment | str | None = None,
    environ: Mapping[str, str] | None = None,
    registry: Mapping[str, str] | None = None,
) -> Environment:
    """Decide the environment of an actor class. This is the one place that knows the precedence.

    ``argument`` over ``config`` over ``NEMO_RL_PY_EXECUTABLE_<NAME>`` over ``NEMO_RL_PY_EXECUTABLES_SYSTEM=1`` (every
    entry, no exception) over the registry. An explicit *name* picks the environment; the variable of that name then
    still says where its interpreter is. An explicit path is taken as it is.

    Args:
        class_path: ``package.module.Class`` or ``package.module:Class``.
        argument: An environment, its name, or an absolute interpreter path, as the caller gives it.
        config: The same from the config.
        environ: Variables to read; None reads ``os.environ`` now.
        registry: Class path to environment name; None takes ``known_actors()``.

    Raises:
        EnvironmentLookupError: If nothing says which environment the class needs; near names are listed.
        ConfigError: If a value is malformed.
    """
    environ = os.environ if environ is None else environ
    explicit = argument if argument is not None else config
    if isinstance(explicit, Environment):
        return explicit
    if explicit is not None:
        return _named(explicit, environ)
    dotted = class_path.replace(":", ".")
    if registry is None:
        # Core's own actors need no scan of the installed distributions.
        registry = ACTOR_ENVIRONMENT_REGISTRY if dotted in ACTOR_ENVIRONMENT_REGISTRY else known_actors()
    name = registry.get(dotted)
    override = None if name is None else environ.get(_path_variable(name))
    if name is not None and override:
        return _named(name, environ)
    if _system_wide(environ):
        return Environment(name=PY_EXECUTABLES.SYSTEM)
    if name is None:
        raise _unregistered(dotted, registry)
    return _named(name, environ)


def _path_variable(name: str) -> str:
    """Return the variable that names the interpreter of an environment."""
    return _PATH_VARIABLE + name.upper().replace("+", "_").replace("-", "_")


def _named(value: str, environ: Mapping[str, str]) -> Environment:
    """Return the environment for a name or an interpreter path."""
    if os.sep in value:
        return Environment(name=PurePath(value).name, kind="interpreter", python=value)
    path = environ.get(_path_variable(value))
    if path:
        return Environment(name=value, kind="interpreter", python=path)
    return Environment(name=value, kind="requirements" if _is_declared(value) else "node")


def _is_declared(name: str) -> bool:
    """Say whether somebody declares how to build an environment of that name; metadata alone is read."""
    if name in _NODES_OWN:
        return False  # the scan of all installed metadata is saved
    from nemo_rl_core.plugins import discover  # lazily, as in known_actors

    return name in discover(ENVIRONMENT_ENTRY_POINT_GROUP)


def _system_wide(environ: Mapping[str, str]) -> bool:
    """Return whether every actor is to run with its node's own interpreter."""
    value = environ.get(_SYSTEM_SWITCH, "").strip().lower()
    if value in {"1", "true", "yes"}:
        return True
    if value in {"", "0", "false", "no"}:
        return False
    raise ConfigError(f"{_SYSTEM_SWITCH} must be 1 or 0, got {value!r}")


def _unregistered(wanted: str, registered: Mapping[str, str]) -> EnvironmentLookupError:
    """Return the error for a class that nobody registered."""
    by_class_name = {path.rpartition(".")[2]: path for path in registered}
    near = get_close_matches(wanted, registered, n=3, cutoff=0.6)
    near += [by_class_name[name] for name in get_close_matches(wanted.rpartition(".")[2], by_class_name, n=3)]
    hint = f" Near names: {', '.join(dict.fromkeys(near))}." if near else ""
    return EnvironmentLookupError(
        f"no environment is registered for the actor class {wanted!r}.{hint} Give one "
        f"(environment='base', or an absolute interpreter path), or register the class by an entry point in the group "
        f"{ACTOR_ENTRY_POINT_GROUP!r} whose value is a mapping {{class path: environment name}}; "
        f"{_SYSTEM_SWITCH}=1 runs every actor with its node's own interpreter.{_broken_plugins()}"
    )


def _broken_plugins() -> str:
    """Return which plugins failed to contribute: the class that is missing may be theirs."""
    from nemo_rl_core.plugins import collect_mappings  # lazily, as in known_actors

    failures = collect_mappings(ACTOR_ENTRY_POINT_GROUP).failures
    return "".join(f" The plugin {name!r} contributed nothing: {error}." for name, error in failures.items())


def current_interpreter(distributions: Sequence[str] = ()) -> InterpreterReport:
    """Describe the interpreter that runs this code, from metadata alone: nothing is imported.

    Args:
        distributions: Distributions whose versions are reported besides those that always are.
    """
    versions = {}
    for name in (*REPORTED_DISTRIBUTIONS, *distributions):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return InterpreterReport(python=sys.executable, python_version=platform.python_version(), versions=versions)


def probe_interpreter(
    python: str | Path,
    *,
    deadline_s: float,
    modules: Sequence[str] = (),
    imports: Sequence[str] = SHELL_IMPORTS,
    distributions: Sequence[str] = (),
) -> InterpreterReport:
    """Run an interpreter and report what it is, so that a bad one is an error once and never a start loop.

    User site and ``PYTHONPATH`` stay out of the run, as they stay out of the workers.

    Args:
        python: Path of the interpreter on this node.
        deadline_s: Seconds until the probe is given up.
        modules: Modules to look for, without importing them.
        imports: Modules to import for real. A distribution may be present and broken.
        distributions: Distributions whose versions are reported besides those that always are.

    Raises:
        EnvironmentLookupError: If the path is no executable file.
        ClusterError: If the run fails, says nothing that can be read, or passes its deadline.
    """
    return read_answer(run_probe(str(python), probe_questions(modules, imports, distributions), deadline_s))


def read_answer(answer: Mapping[str, Any]) -> InterpreterReport:
    """Return the report that `run_probe` brought.

    Raises:
        EnvironmentLookupError: If there was no interpreter at the path.
        ClusterError: If it could not be run or read.
    """
    if "absent" in answer:
        raise EnvironmentLookupError(answer["absent"])
    if "failed" in answer:
        raise ClusterError(answer["failed"])
    return InterpreterReport(python=answer["python"], **answer["facts"])


def place_of(report: InterpreterReport, environment: str, node: str = "") -> str:
    """Return an interpreter in words: environment, path, and the node where that is another machine."""
    return f"environment {environment!r} ({report.python}{f' on node {node}' if node else ''})"


def require_compatible(
    report: InterpreterReport, driver: InterpreterReport, *, environment: str, node: str = ""
) -> None:
    """Check that a worker's interpreter can live in one Ray cluster with the driver's.

    Python's minor version, Ray and core must be the same; torch may differ.

    Args:
        report: The worker's interpreter.
        driver: The driver's.
        environment: Name of the worker's environment.
        node: Address of its node, where it was asked there; "" for this machine.

    Raises:
        ClusterError: If one differs, is missing or damaged; the message names both sides.
    """
    where = place_of(report, environment, node)
    if report.damaged:
        gone = "; ".join(f"{name} {report.versions[name]} lacks {file}" for name, file in report.damaged.items())
        raise ClusterError(
            f"{where} is damaged: {gone}; install it anew there (an environment that was built: nemo-rl env remove "
            f"{environment}, then nemo-rl env build {environment})"
        )
    if "nemo-rl-core" not in report.versions:
        raise ClusterError(
            f"{where} has no nemo-rl-core, so its workers could not be guarded or started; install the driver's "
            f"version there: pip install nemo-rl-core=={driver.versions.get('nemo-rl-core', '<version>')}"
        )
    pairs = {
        "Python": (report.python_minor, driver.python_minor),
        "ray": (report.versions.get("ray"), driver.versions.get("ray")),
        "nemo-rl-core": (report.versions["nemo-rl-core"], driver.versions.get("nemo-rl-core")),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            way_out = f"make the environment anew with Python {ours}"
            if name != "Python":
                way_out = f"install the driver's version there: pip install {name}=={ours or '<version>'}"
            raise ClusterError(
                f"{name} must be the same in all interpreters of one cluster: {where} has {theirs or 'none'}, "
                f"the driver ({driver.python}) has {ours or 'none'}; {way_out}"
            )
    if report.failed_imports:
        reasons = "; ".join(f"import {name}: {reason}" for name, reason in report.failed_imports.items())
        raise ClusterError(f"{where} cannot start a worker: {reasons}")
