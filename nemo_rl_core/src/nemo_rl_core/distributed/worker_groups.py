# SPDX-License-Identifier: Apache-2.0
"""One group of workers on a virtual cluster: started together, called together, ended together.

This module alone makes actors. What it makes an actor of is always ``WorkerShell``, inside the interpreter of the
worker's environment; the worker class itself is a plain class that knows nothing of Ray.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_core import guard
from nemo_rl_core.distributed.dispatch import CallPlan, ShardedAxes, plan_multiple, plan_sharded
from nemo_rl_core.distributed.environments import (
    Environment,
    InterpreterReport,
    current_interpreter,
    require_compatible,
    resolve_environment,
)
from nemo_rl_core.distributed.futures import MultiWorkerFuture, PendingCall, WorkerRecord
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.distributed.nodes import ask_nodes
from nemo_rl_core.distributed.shell import RankSpec, WorkerShell
from nemo_rl_core.distributed.venvs import settle
from nemo_rl_core.distributed.virtual_cluster import Bundle, RayVirtualCluster
from nemo_rl_core.errors import StateError, WorkerError, WorkerTimeoutError

__all__ = ["RayWorkerBuilder", "RayWorkerGroup"]


class RayWorkerBuilder:
    """What to build on each rank: a class by its path, and constructor arguments.

    The driver never imports the class. Parameters named in ``shell.RANK_ARGUMENTS`` (``rank``, ``world_size``,
    ``local_rank``, ``node_rank``, ``store``, ``store_address``) are filled in on each rank if the class names them
    and ``kwargs`` does not.
    """

    def __init__(self, class_path: str, /, *args: Any, **kwargs: Any) -> None:
        """Keep path and arguments.

        Args:
            class_path: ``package.module:Class`` or ``package.module.Class``.
            *args: Positional constructor arguments, the same on every rank.
            **kwargs: Keyword arguments, the same on every rank.
        """
        self.class_path = class_path
        self.args = args
        self.kwargs = dict(kwargs)


class RayWorkerGroup:
    """Workers on all bundles of a cluster, one each, ready when the constructor returns.

    Ready means that every worker's constructor returned. Ranks follow the cluster's bundle order (node, device).
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        builder: RayWorkerBuilder,
        *,
        name_prefix: str,
        role: str,
        environment: Environment | str | None = None,
        env_vars: Mapping[str, str] | None = None,
        sharding: NamedSharding | None = None,
        process_group: bool | None = None,
        on_violation: str = "raise",
        allow: Sequence[str] = (),
        allow_importers: Sequence[str] = (),
        start_timeout_s: float = 600.0,
        call_timeout_s: float = 3600.0,
    ) -> None:
        """Start all workers and wait until they are ready; on any failure end them all.

        Args:
            cluster: Where they run.
            builder: What they are.
            name_prefix: Workers are called ``<name_prefix>-<rank>``.
            role: ``train``, ``rollout`` or ``generation``: which imports the guard refuses in them.
            environment: Environment, name or interpreter path; None looks the class up.
            env_vars: Variables of the worker processes; not changed.
            sharding: Names the axes of the ranks; needed by ``run_all_workers_sharded_data`` alone.
            process_group: Whether rank 0 keeps a ``TCPStore`` for torch process groups; None means for role ``train``.
            on_violation: What the guard does: ``raise``, ``record`` or ``exit``.
            allow: Top-level names that the guard lets through although the role forbids them.
            allow_importers: Modules whose own imports of forbidden names the guard lets through.
            start_timeout_s: Seconds until all constructors must have returned.
            call_timeout_s: Default limit of one call, in seconds.

        Raises:
            ClusterError: If the cluster lacks room, or an interpreter does not fit.
            EnvironmentLookupError: If nothing says which environment the class needs, or it is not built.
            WorkerError: If a worker failed to start: the first cause.
            WorkerTimeoutError: If workers were not ready in time; it names them.
            ValueError: If the sharding does not have the ranks of the cluster.
        """
        ranks = range(cluster.world_size())
        if sharding is not None and sorted(sharding.ranks) != list(ranks):
            raise ValueError(f"the sharding must hold the ranks 0 to {len(ranks) - 1} once each, got {sharding}")
        self.name_prefix = name_prefix
        self.role = role
        self.environment = settle(resolve_environment(builder.class_path, argument=environment))
        self.sharding = sharding
        self.call_timeout_s = call_timeout_s
        self._workers: tuple[WorkerRecord, ...] = ()
        self._process_group = role == "train" if process_group is None else process_group
        self._env_vars = {
            # User site and PYTHONPATH belong to whoever started Ray, not to the worker's environment.
            "PYTHONNOUSERSITE": "1",
            "PYTHONPATH": "",
            **(env_vars or {}),
            **guard.environment_for(
                role,
                on_violation=on_violation,
                allow=allow,
                allow_importers=allow_importers,
                lifted=self.environment.lifted,
            ),
        }
        try:
            self._start(cluster, builder, time.monotonic() + start_timeout_s)
        except WorkerTimeoutError as error:
            self._kill()
            # What was left of the limit when the last phase began is no number that the user knows.
            fields = {key: value for key, value in vars(error).items() if not key.startswith("__")}
            text = f"{name_prefix} was not ready within start_timeout_s={start_timeout_s:g} s: {error}"
            raise WorkerTimeoutError(text, **fields) from error
        except BaseException:  # also Ctrl-C: half a group must not keep its devices
            self._kill()
            raise

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @property
    def workers(self) -> tuple[WorkerRecord, ...]:
        """Name, rank, host, pid and actor handle of each worker, in rank order."""
        return self._workers

    def run_all_workers_single_data(self, method: str, /, **kwargs: Any) -> MultiWorkerFuture:
        """Call a method on every rank with the same arguments."""
        ranks = tuple(range(self.world_size))
        return self._run_plan(method, CallPlan(slices=((ranks, kwargs),), return_ranks=ranks))

    def run_single_worker_single_data(self, method: str, /, worker_idx: int, **kwargs: Any) -> MultiWorkerFuture:
        """Call a method on one rank; the result list has one element.

        Raises:
            IndexError: If there is no such rank.
        """
        if not 0 <= worker_idx < self.world_size:
            raise IndexError(f"{self.name_prefix} has the ranks 0 to {self.world_size - 1}, got {worker_idx}")
        return self._future(method, {worker_idx: kwargs})

    def run_all_workers_multiple_data(
        self, method: str, /, common_kwargs: Mapping[str, Any] | None = None, **lists: Sequence[Any]
    ) -> MultiWorkerFuture:
        """Call a method on every rank; rank r gets element r of each list.

        Raises:
            ValueError: If a list has not one element for each rank, or an argument is given twice.
        """
        return self._run_plan(method, plan_multiple(self.world_size, common_kwargs, lists))

    def run_all_workers_sharded_data(
        self,
        method: str,
        /,
        *,
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str] = (),
        output_is_replicated: Sequence[str] = (),
        common_kwargs: Mapping[str, Any] | None = None,
        **sharded: Any,
    ) -> MultiWorkerFuture:
        """Call a method with data cut along named axes.

        Args:
            method: Name of the method.
            in_sharded_axes: Each value in ``sharded`` is nested lists, indexed by the rank's coordinates on these axes.
            replicate_on_axes: Ranks that differ only here get the same slice.
            output_is_replicated: Only coordinate 0 of these axes gives results.
            common_kwargs: Arguments that are the same everywhere.
            **sharded: The data.

        Axes in neither of the first two are free: only their coordinate 0 is called.

        Raises:
            StateError: If the group has no sharding.
            ValueError: If an axis is unknown or in two places, or data does not have the axes' sizes.
        """
        if self.sharding is None:
            raise StateError(f"{self.name_prefix} was made without a sharding, so data cannot be cut along its axes")
        axes = ShardedAxes(
            sharded=tuple(in_sharded_axes),
            replicated=tuple(replicate_on_axes),
            output_replicated=tuple(output_is_replicated),
        )
        return self._run_plan(method, plan_sharded(self.sharding, axes, common_kwargs, sharded))

    def identities(self, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Return who each worker is (host, pid, interpreter, versions, ...), in rank order.

        Raises:
            WorkerError: If a worker does not answer.
        """
        return self._ask("identity", timeout_s)

    def firewall_reports(self, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Return the guard's ledger of each worker as plain data, in rank order.

        Raises:
            WorkerError: If a worker does not answer.
        """
        return self._ask("firewall_report", timeout_s)

    def shutdown(self, timeout_s: float = 30.0, cleanup_method: str | None = None) -> bool:
        """Let the workers clean up, then end their processes, whatever happened. Idempotent.

        Args:
            timeout_s: Seconds for the clean-up.
            cleanup_method: Method of the worker to call; None calls its ``shutdown`` where it has one.

        Returns:
            Whether every worker cleaned up in time; the processes are ended in any case.
        """
        if not self._workers or not ray.is_initialized():
            self._workers = ()
            return True
        calls = [
            PendingCall(ref=worker.actor.shutdown.remote(cleanup_method), worker=worker, phase="shutdown")
            for worker in self._workers
        ]
        try:
            MultiWorkerFuture(calls, return_ranks=None, timeout_s=timeout_s).get_results()
        except WorkerError:
            return False  # a worker that is dead or stuck cannot clean up; ending it is what is left
        finally:
            self._kill()
        return True

    close = shutdown

    def __enter__(self) -> "RayWorkerGroup":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _start(self, cluster: RayVirtualCluster, builder: RayWorkerBuilder, deadline: float) -> None:
        """Bring all workers to life, phase by phase."""
        bundles = cluster.get_bundles()
        if self.environment.python is not None:
            self._probe_nodes(bundles, self.environment.python, _left(deadline))
        specs = self._specs(bundles)
        self._workers = tuple(self._spawn(cluster, bundle, spec) for bundle, spec in zip(bundles, specs, strict=True))
        self._meet(self._ask("identity", _left(deadline), phase="spawn"))
        address = None
        if self._process_group:
            address = self._bind_store(deadline)
        args, kwargs = ray.put(builder.args), ray.put(builder.kwargs)  # once, however many ranks there are
        builds = [
            PendingCall(
                ref=worker.actor.build.remote(builder.class_path, args, kwargs, address, _left(deadline)),
                worker=worker,
                phase="start",
            )
            for worker in self._workers
        ]
        self._wait(builds, _left(deadline))

    def _bind_store(self, deadline: float) -> str:
        """Let rank 0 bind the store, while the other ranks import torch, and return its address."""
        owner, *others = self._workers
        calls = [PendingCall(ref=owner.actor.bind_store.remote(_left(deadline)), worker=owner, phase="rendezvous")]
        for worker in others:
            calls.append(PendingCall(ref=worker.actor.load_torch.remote(), worker=worker, phase="rendezvous"))
        return self._wait(calls, _left(deadline))[0]

    def _probe_nodes(self, bundles: Sequence[Bundle], python: str, timeout_s: float) -> None:
        """Run the environment's interpreter once on each node, before Ray starts a worker with it."""
        driver, name = current_interpreter(), self.environment.name
        for report in ask_nodes(bundles, python=python, timeout_s=timeout_s):
            require_compatible(report.interpreter, driver, environment=name, node=report.node_ip)

    def _specs(self, bundles: Sequence[Bundle]) -> list[RankSpec]:
        """Return each rank's place: nodes are numbered as they first appear, local ranks count within a node."""
        nodes: dict[str, int] = {}
        specs = []
        for rank, bundle in enumerate(bundles):
            local_rank = nodes.get(bundle.node_id, 0)
            nodes[bundle.node_id] = local_rank + 1
            specs.append(
                RankSpec(
                    worker=f"{self.name_prefix}-{rank}",
                    rank=rank,
                    world_size=len(bundles),
                    local_rank=local_rank,
                    node_rank=list(nodes).index(bundle.node_id),
                    node_id=bundle.node_id,
                    node_ip=bundle.node_ip,
                )
            )
        return specs

    def _spawn(self, cluster: RayVirtualCluster, bundle: Bundle, spec: RankSpec) -> WorkerRecord:
        """Start one shell in its bundle; the name is unique, so a second group never finds it taken."""
        runtime_env: dict[str, Any] = {"env_vars": dict(self._env_vars)}
        if self.environment.python is not None:
            runtime_env["py_executable"] = self.environment.python
        place = PlacementGroupSchedulingStrategy(
            placement_group=bundle.placement_group,
            placement_group_bundle_index=bundle.index,
            placement_group_capture_child_tasks=True,
        )
        actor = ray.remote(WorkerShell).options(
            name=f"{spec.worker}-{uuid.uuid4().hex[:12]}",
            num_cpus=cluster.slots_per_bundle,
            num_gpus=cluster.slots_per_bundle / cluster.max_colocated_worker_groups if cluster.use_gpus else 0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=place,
            runtime_env=runtime_env,
        )
        return WorkerRecord(name=spec.worker, rank=spec.rank, host=spec.node_ip, pid=0, actor=actor.remote(spec))

    def _meet(self, identities: Sequence[Mapping[str, Any]]) -> None:
        """Take over what the shells say of themselves, and refuse versions that do not fit."""
        driver = current_interpreter()
        self._workers = tuple(
            replace(worker, host=identity["host"], pid=identity["pid"])
            for worker, identity in zip(self._workers, identities, strict=True)
        )
        for identity in identities:
            report = InterpreterReport(
                python=identity["interpreter"],
                python_version=identity["python_version"],
                versions=identity["versions"],
            )
            require_compatible(report, driver, environment=self.environment.name, node=identity["host"])

    def _run_plan(self, method: str, plan: CallPlan) -> MultiWorkerFuture:
        """Start the calls of a plan; arguments that go to several ranks are stored once."""
        per_rank: dict[int, Any] = {}
        for ranks, kwargs in plan.slices:
            per_rank.update(dict.fromkeys(ranks, ray.put(kwargs) if len(ranks) > 1 else kwargs))
        return self._future(method, per_rank, plan.return_ranks)

    def _future(
        self, method: str, per_rank: Mapping[int, Any], return_ranks: Sequence[int] | None = None
    ) -> MultiWorkerFuture:
        """Start a call on the given ranks."""
        self._require_alive(method)
        calls = [
            PendingCall(
                ref=self._workers[rank].actor.call.remote(method, (), kwargs), worker=self._workers[rank], phase=method
            )
            for rank, kwargs in per_rank.items()
        ]
        return MultiWorkerFuture(calls, return_ranks=return_ranks, timeout_s=self.call_timeout_s)

    def _ask(self, shell_method: str, timeout_s: float, phase: str | None = None) -> list[Any]:
        """Call a method of every shell itself."""
        self._require_alive(shell_method)
        calls = [
            PendingCall(ref=getattr(worker.actor, shell_method).remote(), worker=worker, phase=phase or shell_method)
            for worker in self._workers
        ]
        return self._wait(calls, timeout_s)

    def _require_alive(self, method: str) -> None:
        """Raise ``StateError`` unless the workers can be called; without Ray a call would start another Ray."""
        if not self._workers or not ray.is_initialized():
            raise StateError(f"{self.name_prefix} is shut down, or Ray is; {method!r} cannot be called")

    def _wait(self, calls: Sequence[PendingCall], timeout_s: float) -> list[Any]:
        """Wait for calls of this group's start or of its shells."""
        return MultiWorkerFuture(calls, return_ranks=None, timeout_s=timeout_s).get_results()

    def _kill(self) -> None:
        """End all processes; names and devices are free again."""
        workers, self._workers = self._workers, ()
        if ray.is_initialized():
            for worker in workers:
                ray.kill(worker.actor, no_restart=True)


def _left(deadline: float) -> float:
    """Return the seconds until a deadline, at least 0."""
    return max(0.0, deadline - time.monotonic())
