# SPDX-License-Identifier: Apache-2.0
"""Asking the nodes of a cluster what they have, before a worker starts there."""

import builtins
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl_core.distributed.environments import InterpreterReport, current_interpreter, read_answer
from nemo_rl_core.distributed.probing import SHELL_IMPORTS, probe_questions, run_probe
from nemo_rl_core.distributed.virtual_cluster import Bundle
from nemo_rl_core.errors import ClusterError, EnvironmentLookupError

__all__ = ["SPAWN_S", "NodeReport", "ask_nodes", "call_on_nodes"]

#: Ray's own variable for the job's setup hook. Empty, it keeps the hook out of a task: on a node without core the hook
#: could not be imported, and instead of an answer there would be a worker that died.
_NO_HOOK: Final = {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": ""}

#: Seconds that Ray gets to start a process on a node, besides what the call itself may take.
SPAWN_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What one node says.

    Attributes:
        node_ip: Its address, as its peers reach it.
        interpreter: The interpreter that workers will run with there.
        missing_folders: Those of the folders asked for that it does not have.
    """

    node_ip: str
    interpreter: InterpreterReport
    missing_folders: tuple[str, ...] = ()


def ask_nodes(
    bundles: Iterable[Bundle],
    *,
    python: str | None = None,
    modules: Sequence[str] = (),
    distributions: Sequence[str] = (),
    folders: Sequence[str] = (),
    timeout_s: float,
) -> list[NodeReport]:
    """Run the workers' interpreter once on each node that has a bundle, all at the same time.

    Args:
        bundles: Reserved places.
        python: Path of the interpreter on those nodes; None for the one that each node's own Ray runs with.
        modules: Modules to look for there, without importing them.
        distributions: Distributions whose versions are reported besides those that always are.
        folders: Folders to look for there.
        timeout_s: Seconds until a run is given up.

    Raises:
        ClusterError: If a node has no interpreter at that path, does not answer in time, or with what is no answer; the
            message names it.
    """
    nodes = {bundle.node_id: bundle.node_ip for bundle in bundles}
    questions = probe_questions(modules, SHELL_IMPORTS, distributions, folders)
    answers = call_on_nodes(run_probe, nodes, (python, questions, timeout_s), timeout_s=timeout_s)
    reports = []
    for node_id, answer in answers.items():
        try:
            interpreter = read_answer(answer)
        except (ClusterError, EnvironmentLookupError) as error:
            raise ClusterError(f"workers cannot start on node {nodes[node_id]}: {error}") from error
        missing = tuple(answer["missing_folders"])
        reports.append(NodeReport(node_ip=nodes[node_id], interpreter=interpreter, missing_folders=missing))
    return reports


def call_on_nodes(
    function: FunctionType,
    nodes: Mapping[str, str],
    arguments: Sequence[Any],
    *,
    timeout_s: float,
    spawn_s: float = SPAWN_S,
) -> dict[str, Any]:
    """Call a function in each node's own interpreter, all at the same time.

    The function travels by value, so the node needs no core. It must use nothing of its module, import what it needs
    itself, and return plain data.

    Args:
        function: A function of a module's top level.
        nodes: Ray's id of each node to its address.
        arguments: The same on every node.
        timeout_s: Seconds that the call itself may take.
        spawn_s: Seconds that Ray gets besides, to start a process on each node.

    Returns:
        Id of each node to the result.

    Raises:
        ClusterError: If a node does not answer in time, or the call fails there; the message names it.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(_by_value(function))
    refs = {}
    for node_id in nodes:
        place = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        options = task.options(scheduling_strategy=place, runtime_env={"env_vars": dict(_NO_HOOK)})
        refs[node_id] = options.remote(*arguments)
    allowed_s = timeout_s + spawn_s
    deadline = time.monotonic() + allowed_s
    return {node_id: _result(ref, nodes[node_id], deadline, allowed_s) for node_id, ref in refs.items()}


def _result(ref: Any, node_ip: str, deadline: float, allowed_s: float) -> Any:
    """Wait for one node's answer, until a deadline that is that of all nodes."""
    core = current_interpreter().versions.get("nemo-rl-core", "<version>")
    try:
        return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    except RayTaskError as error:
        raise ClusterError(f"node {node_ip} cannot be asked what it has: {error.cause}") from error
    except GetTimeoutError as error:
        ray.cancel(ref, force=True)
        raise ClusterError(
            f"node {node_ip} did not say within {allowed_s:g} s what it has; is it overloaded, or out of reach?"
        ) from error
    except RayError as error:
        raise ClusterError(
            f"node {node_ip} cannot run a process for this driver: {error}. Is nemo-rl-core missing there? "
            f"(pip install nemo-rl-core=={core})"
        ) from error


def _by_value(function: FunctionType) -> FunctionType:
    """Return a copy that Ray sends as code, and not as the name of something that the node would have to import."""
    copy = FunctionType(function.__code__, {"__builtins__": builtins}, function.__name__, function.__defaults__)
    copy.__module__ = "__main__"
    return copy
