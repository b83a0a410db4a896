# SPDX-License-Identifier: Apache-2.0
"""Bring the workers of a plan up on Ray, and down again whatever happens."""

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rl_core.algorithms.assemble import generation_settings, policy_settings
from nemo_rl_core.algorithms.node_checks import check_nodes
from nemo_rl_core.algorithms.plan import RolePlan, RunPlan
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.distributed.cluster_facts import has_gpus, has_node_label
from nemo_rl_core.distributed.ray_runtime import start_ray
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl_core.errors import NemoRLError

__all__ = ["Fleet", "launch"]

OBJECT_STORE_BYTES = 256 * 2**20
SHUTDOWN_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The workers of a run.

    Attributes:
        train: The train workers.
        generation: The generation workers.
    """

    train: RayWorkerGroup
    generation: RayWorkerGroup

    def roles(self) -> dict[str, list[dict[str, Any]]]:
        """Return what ``summary.json`` says of each worker: backend, engine version, interpreter, host, ..."""
        told = {
            "train": self.train.run_all_workers_single_data("describe").get_results(),
            "generation": self.generation.run_all_workers_single_data("describe").get_results(),
        }
        known = {"train": self.train.identities(), "generation": self.generation.identities()}
        return {role: [{**k, **t} for k, t in zip(known[role], told[role], strict=True)] for role in told}

    def firewall_reports(self) -> list[dict[str, Any]]:
        """Return the guard's ledger of every worker as plain data."""
        return [report for group in (self.train, self.generation) for report in group.firewall_reports()]


@contextlib.contextmanager
def launch(
    config: RunConfig, plan: RunPlan, files: Mapping[str, Mapping[str, bytes]] | None = None
) -> Generator[Fleet]:
    """Start Ray or attach to it, reserve room, start both kinds of workers at the same time, and end them all.

    The nodes of a cluster that is attached to are asked before any worker starts; on one machine the plan has done it.

    Args:
        config: The whole config.
        plan: What is to run.
        files: Config and tokenizer for the generation workers, as `assemble.sent_files` read them.

    Raises:
        ClusterError: If Ray or room is missing, or a node's interpreter does not fit.
        BackendError: If a generation node's engine or adapter does not fit.
        ModelError: If a train node lacks the model's folder.
        WorkerError: If a worker did not come up; the first cause.
    """
    slots = plan.train.num_slots + plan.generation.num_slots
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(
            start_ray(
                num_cpus=slots,
                address=plan.address,
                on_violation=config.firewall.on_violation,
                allow=config.firewall.allow,
                allow_importers=config.firewall.allow_importers,
                local_options={"object_store_memory": OBJECT_STORE_BYTES * slots, "logging_level": "ERROR"},
            )
        )
        device = _device(plan)
        env_vars = {"TQDM_DISABLE": "1", **(_thread_variables(slots) if runtime.is_local else {})}
        roles = [
            (plan.train, policy_settings(config, plan.chosen.fp8_weights)),
            (
                plan.generation,
                generation_settings(config, plan.options, files, plan.attention, plan.chosen.fp8_weights),
            ),
        ]
        clusters = [_reserve(stack, config, role, device) for role, _ in roles]
        if not runtime.is_local:
            check_nodes(config, plan, *(cluster.get_bundles() for cluster in clusters))
        starts = [
            _starter(config, role, RayWorkerBuilder(role.worker_class, settings, device=device), cluster, env_vars)
            for (role, settings), cluster in zip(roles, clusters, strict=True)
        ]
        train, generation = _start_all(stack, starts, on_interrupt=runtime.close)
        yield Fleet(train=train, generation=generation)


def _reserve(
    stack: contextlib.ExitStack, config: RunConfig, role: RolePlan, device: Literal["cpu", "cuda"]
) -> RayVirtualCluster:
    """Reserve a role's room; ``stack`` gives it back."""
    cluster = RayVirtualCluster(
        role.bundles_per_node,
        use_gpus=device == "cuda",
        slots_per_bundle=role.slots_per_worker,
        name=role.role,
        label_selector=_label_selector(role),
        timeout_s=config.workers.start_timeout_s,
    )
    stack.callback(cluster.shutdown)
    cluster.get_bundles()
    return cluster


def _starter(
    config: RunConfig,
    role: RolePlan,
    builder: RayWorkerBuilder,
    cluster: RayVirtualCluster,
    env_vars: dict[str, str],
) -> Callable[[contextlib.ExitStack], RayWorkerGroup]:
    """Return what starts a role's workers on its reserved room."""

    def start(stack: contextlib.ExitStack) -> RayWorkerGroup:
        group = RayWorkerGroup(
            cluster,
            builder,
            name_prefix={"train": "policy", "generation": "generation"}[role.role],
            role=role.role,
            environment=role.environment,
            env_vars=env_vars,
            on_violation=config.firewall.on_violation,
            allow=config.firewall.allow,
            allow_importers=config.firewall.allow_importers,
            start_timeout_s=config.workers.start_timeout_s,
            call_timeout_s=config.workers.call_timeout_s,
        )
        stack.callback(group.shutdown, timeout_s=SHUTDOWN_TIMEOUT_S)
        return group

    return start


def _start_all(
    stack: contextlib.ExitStack,
    starts: list[Callable[[contextlib.ExitStack], RayWorkerGroup]],
    on_interrupt: Callable[[], None],
) -> list[RayWorkerGroup]:
    """Start all groups in threads of their own; what has started when one fails is ended by ``stack``.

    Args:
        stack: Ends what has started.
        starts: Each starts one group.
        on_interrupt: Called on Ctrl-C, to make calls that wait for a constructor fail at once.
    """
    pool = ThreadPoolExecutor(len(starts), thread_name_prefix="start")
    futures = [pool.submit(start, stack) for start in starts]
    try:
        errors = [error for future in futures if (error := future.exception()) is not None]
    except BaseException:
        on_interrupt()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if errors:
        raise next((error for error in errors if isinstance(error, NemoRLError)), errors[0])
    return [future.result() for future in futures]


def _device(plan: RunPlan) -> Literal["cpu", "cuda"]:
    """Settle ``auto`` by what the cluster has."""
    if plan.device != "auto":
        return plan.device
    return "cuda" if has_gpus() else "cpu"


def _label_selector(role: RolePlan) -> dict[str, str]:
    """Ask for the node label ``role`` where the cluster's nodes carry it."""
    return {"role": role.node_label} if has_node_label("role") else {}


def _thread_variables(slots: int) -> dict[str, str]:
    """Share this machine's cores among the workers, unless the user has decided."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // slots))}
