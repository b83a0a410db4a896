# SPDX-License-Identifier: Apache-2.0
"""What a run is going to be, resolved before anything starts: roles, workers, environments, backend."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nemo_rl_core.algorithms.assemble import generation_settings
from nemo_rl_core.algorithms.backends import check_settings, chosen_backend, validated_options
from nemo_rl_core.algorithms.engine import (
    ask_interpreter,
    backend_environment,
    check_engine,
    find_engine,
    worker_environment,
)
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.distributed.environments import (
    Environment,
    current_interpreter,
    probe_interpreter,
    require_compatible,
)
from nemo_rl_core.distributed.venvs import settle
from nemo_rl_core.protocols.generation import BackendSpec

__all__ = ["POLICY_WORKER", "RolePlan", "RunPlan", "describe_plan", "make_plan"]

POLICY_WORKER = "nemo_rl_core.workers.dtensor:DTensorPolicyWorker"
PROBE_TIMEOUT_S = 120.0


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
        engine: Name and version of its engine, asked in the workers' interpreter; None where the nodes of a cluster will
            be asked, or core itself is the engine.
        options: Its own section of the config, checked.
        device: ``cpu``, ``cuda``, or ``auto`` where only the cluster can tell.
        address: The Ray cluster that will be attached to; None for a local one.
    """

    train: RolePlan
    generation: RolePlan
    backend: BackendSpec
    engine: str | None
    options: Mapping[str, Any]
    device: Literal["auto", "cpu", "cuda"]
    address: str | None


def make_plan(config: RunConfig) -> RunPlan:
    """Resolve a config.

    Raises:
        BackendError: If the backend cannot be used; the subclass says why.
        ConfigError: If its section does not fit, or the engine could not run what is asked for.
        EnvironmentLookupError: If an interpreter does not exist, or an environment is not built.
        ClusterError: If an interpreter does not fit the driver's.
    """
    spec = chosen_backend(config)
    options = validated_options(config, spec)
    check_settings(spec, generation_settings(config, options))
    placement = config.placement
    address = os.environ.get("RAY_ADDRESS") or None
    device = _device(config, address)
    train = RolePlan(
        role="train",
        worker_class=POLICY_WORKER,
        bundles_per_node=(placement.train_slots_per_node,) * placement.train_nodes,
        environment=settle(worker_environment(config.env, POLICY_WORKER, {})),
        node_label="train",
    )
    generation = RolePlan(
        role="generation",
        worker_class=spec.worker_class,
        bundles_per_node=(placement.generation_slots_per_node,) * placement.generation_nodes,
        environment=settle(backend_environment(config.env, spec, lambda: device, address)),
        node_label="generation",
    )
    engine = None
    if address is None:
        # On a cluster the nodes that will run them are asked instead, when the workers start.
        _check_interpreter(train.environment)
        engine = _check_backend(spec, generation.environment)
    return RunPlan(
        train=train,
        generation=generation,
        backend=spec,
        engine=engine,
        options=options,
        device=device,
        address=address,
    )


def describe_plan(plan: RunPlan) -> list[tuple[str, str]]:
    """Return the plan as named lines, for ``--dry-run``."""
    backend = plan.backend
    engine = f", engine {plan.engine or backend.engine} of {backend.engine_range}" if backend.engine else ""
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


def _check_interpreter(environment: Environment) -> None:
    """Run an explicit interpreter once and compare it with the driver's."""
    if environment.python is not None:
        report = probe_interpreter(environment.python, deadline_s=PROBE_TIMEOUT_S)
        require_compatible(report, current_interpreter(), environment=environment.name)


def _check_backend(spec: BackendSpec, environment: Environment) -> str | None:
    """Run the generation workers' interpreter once, look for what they need, and return the engine's name and version."""
    report = ask_interpreter(spec, environment, deadline_s=PROBE_TIMEOUT_S, deep=True)
    if environment.python is not None:
        require_compatible(report, current_interpreter(), environment=environment.name)
    check_engine(spec, report, environment)
    engine = find_engine(spec, report)
    return f"{engine.distribution} {engine.version}" if engine else None


def _device(config: RunConfig, address: str | None) -> Literal["auto", "cpu", "cuda"]:
    if config.cluster.device != "auto" or address is not None:
        return config.cluster.device
    return "cuda" if torch.cuda.is_available() else "cpu"
