# SPDX-License-Identifier: Apache-2.0
"""What a run is going to be, resolved before anything starts: roles, workers, environments, backend."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from nemo_rl_core.algorithms.assemble import generation_settings, model_settings, sent_files
from nemo_rl_core.algorithms.backends import ChosenBackend, choose_backend
from nemo_rl_core.algorithms.engine import (
    ask_interpreter,
    backend_environment,
    check_engine,
    find_engine,
    worker_environment,
)
from nemo_rl_core.algorithms.kv_scales import describe_attention
from nemo_rl_core.algorithms.remote_backend import ask_for_backend
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.distributed.environments import (
    Environment,
    current_interpreter,
    probe_interpreter,
    require_compatible,
)
from nemo_rl_core.distributed.venvs import settle
from nemo_rl_core.errors import BackendAbsentError, ConfigError, UnknownBackendError
from nemo_rl_core.fp8.model_description import ModelDescription
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
        slots_per_worker: Slots that each of them takes: as many as it has ranks of its own.
        environment: What they run with.
        node_label: Value of the node label ``role`` that is asked for where the cluster's nodes carry it.
    """

    role: Literal["train", "generation"]
    worker_class: str
    bundles_per_node: tuple[int, ...]
    environment: Environment
    node_label: str
    slots_per_worker: int = 1

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return sum(self.bundles_per_node)

    @property
    def num_slots(self) -> int:
        """Number of slots that they take together."""
        return self.world_size * self.slots_per_worker


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The whole run.

    Attributes:
        train: The train workers.
        generation: The generation workers.
        chosen: The generation backend, and its own section of the config, checked.
        engine: Name and version of its engine, asked in the workers' interpreter; None where the nodes of a cluster will
            be asked, or core itself is the engine.
        device: ``cpu``, ``cuda``, or ``auto`` where only the cluster can tell.
        address: The Ray cluster that will be attached to; None for a local one.
        attention: Which modules of the engine get FP8 scales with each refit; None where its KV cache is not FP8.
    """

    train: RolePlan
    generation: RolePlan
    chosen: ChosenBackend
    engine: str | None
    device: Literal["auto", "cpu", "cuda"]
    address: str | None
    attention: ModelDescription | None = None

    @property
    def backend(self) -> BackendSpec:
        """The generation backend."""
        return self.chosen.spec

    @property
    def options(self) -> Mapping[str, Any]:
        """Its own section of the config, checked."""
        return self.chosen.options


def make_plan(config: RunConfig) -> RunPlan:
    """Resolve a config.

    Raises:
        BackendError: If the backend cannot be used; the subclass says why.
        ConfigError: If its section does not fit, the engine could not run what is asked for, or its ranks do not fit
            into the slots.
        ModelError: If the KV cache is to be FP8 and the model's attention is not known or cannot be calibrated.
        EnvironmentLookupError: If an interpreter does not exist, or an environment is not built.
        ClusterError: If an interpreter does not fit the driver's.
    """
    address = os.environ.get("RAY_ADDRESS") or None
    chosen = _choose(config, address)
    spec, ranks = chosen.spec, chosen.num_ranks
    attention = None
    if chosen.fp8_kv_cache:
        attention = describe_attention(model_settings(config), config.generation.kv_scales)
    placement = config.placement
    replicas_per_node = _replicas(placement.generation_slots_per_node, ranks, spec, config)
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
        bundles_per_node=(replicas_per_node,) * placement.generation_nodes,
        slots_per_worker=ranks,
        environment=settle(backend_environment(config.env, spec, lambda: device, address)),
        node_label="generation",
    )
    engine = None
    if address is None:
        # On a cluster the nodes that will run them are asked instead, when it is known which they are.
        _check_interpreter(train.environment)
        engine = _check_backend(spec, generation.environment)
    return RunPlan(
        train=train,
        generation=generation,
        chosen=chosen,
        engine=engine,
        device=device,
        address=address,
        attention=attention,
    )


def describe_plan(plan: RunPlan) -> list[tuple[str, str]]:
    """Return the plan as named lines, for ``--dry-run``."""
    backend = plan.backend
    engine = f", engine {plan.engine or backend.engine} of {backend.engine_range}" if backend.engine else ""
    node = f" on node {plan.chosen.node}" if plan.chosen.node else ""
    lines = [
        ("ray", f"attach to {plan.address}" if plan.address else "start a local one"),
        ("device", plan.device),
        ("backend", f"{backend.name} (available{node}, protocol {backend.protocol}{engine})"),
        ("backend options", ", ".join(f"{key}={value}" for key, value in plan.options.items()) or "none"),
    ]
    if plan.attention is not None:
        lines.append(("kv cache", f"FP8, scales of {len(plan.attention.owners())} attention modules with each refit"))
    if plan.chosen.fp8_weights is not None:
        report = plan.chosen.fp8_weights.report.splitlines()
        lines.append(("fp8 weights", "; ".join(line.strip() for line in report)))
    for role in (plan.train, plan.generation):
        where = role.environment.python or "the node's own interpreter"
        nodes = " + ".join(str(count * role.slots_per_worker) for count in role.bundles_per_node)
        lines += [
            (f"{role.role} workers", f"{role.world_size} of {role.worker_class} on {nodes} slots"),
            (f"{role.role} environment", f"{role.environment.name} ({where})"),
        ]
    return lines


def _choose(config: RunConfig, address: str | None) -> ChosenBackend:
    """Let the backend's package check the config: the driver's own, or that of the generation nodes of a cluster."""
    name, sections = config.generation.backend, config.generation.model_extra or {}
    settings = generation_settings(config, {})
    try:
        return choose_backend(name, sections, settings)
    except (UnknownBackendError, BackendAbsentError) as missing:
        if address is None:
            raise
        # A train node has core alone, and the driver may run there: whoever runs the workers knows the backend.
        settings = replace(settings, files=sent_files(config))
        return ask_for_backend(name, sections, settings, address=address, missing=missing)


def _replicas(slots: int, ranks: int, spec: BackendSpec, config: RunConfig) -> int:
    """Return how many replicas of a backend fit on a generation node, of which none may stay half filled.

    Raises:
        ConfigError: If the ranks of a replica do not divide the slots.
    """
    if slots % ranks == 0:
        return slots // ranks
    one_node = config.cluster.num_nodes == 1
    key = "policy.generation.colocated.resources.gpus_per_node" if one_node else "cluster.gpus_per_node"
    rule = "does not divide" if ranks < slots else "is more than"
    raise ConfigError(
        f"a replica of backend {spec.name!r} has {ranks} ranks (policy.generation.{spec.config_section}), each on a slot "
        f"of one node: that {rule} the {slots} generation slots of a node ({key}={slots}); set {key} to a multiple of "
        f"{ranks}, or give a replica fewer ranks"
    )


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
