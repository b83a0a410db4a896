# SPDX-License-Identifier: Apache-2.0
"""How the cluster is divided between training and generation."""

from dataclasses import dataclass

from nemo_rl_core.config.cluster import ClusterSection
from nemo_rl_core.config.generation import ResourcesSection
from nemo_rl_core.config.problems import Problem

__all__ = ["Placement", "check_placement", "plan_placement"]

_RESOURCES = "policy.generation.colocated.resources"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Worker slots of both sides. On one node both have ``nodes == 1`` and share it.

    Attributes:
        train_nodes: Nodes with train workers.
        train_slots_per_node: Train workers on each of them.
        generation_nodes: Nodes with generation workers.
        generation_slots_per_node: Slots for generation on each of them; a replica may take several.
    """

    train_nodes: int
    train_slots_per_node: int
    generation_nodes: int
    generation_slots_per_node: int

    @property
    def train_world_size(self) -> int:
        """Number of train workers."""
        return self.train_nodes * self.train_slots_per_node

    @property
    def generation_world_size(self) -> int:
        """Number of slots for generation."""
        return self.generation_nodes * self.generation_slots_per_node


def check_placement(cluster: ClusterSection, resources: ResourcesSection) -> list[Problem]:
    """Return what keeps the cluster from being divided; empty if nothing does."""
    return _check_one_node(cluster, resources) if cluster.num_nodes == 1 else _check_several(cluster, resources)


def plan_placement(cluster: ClusterSection, resources: ResourcesSection) -> Placement:
    """Divide the cluster.

    One node: generation takes ``resources.gpus_per_node`` slots and training the rest. Several nodes: generation takes
    ``resources.num_nodes`` whole nodes and training the rest.

    Raises:
        ValueError: If `check_placement` has something to say; the message says it.
    """
    if problems := check_placement(cluster, resources):
        raise ValueError("; ".join(map(str, problems)))
    if cluster.num_nodes == 1:
        generation = resources.gpus_per_node or 0
        return Placement(
            train_nodes=1,
            train_slots_per_node=cluster.gpus_per_node - generation,
            generation_nodes=1,
            generation_slots_per_node=generation,
        )
    nodes = resources.num_nodes or 0
    return Placement(
        train_nodes=cluster.num_nodes - nodes,
        train_slots_per_node=cluster.gpus_per_node,
        generation_nodes=nodes,
        generation_slots_per_node=cluster.gpus_per_node,
    )


def _check_one_node(cluster: ClusterSection, resources: ResourcesSection) -> list[Problem]:
    problems = []
    slots, total = resources.gpus_per_node, cluster.gpus_per_node
    if slots is None or slots >= total:
        rule = f"with one node it must leave at least one of the {total} slots (cluster.gpus_per_node) to training"
        way_out = f"set 1 to {total - 1}" if total > 1 else "raise cluster.gpus_per_node to 2 or more"
        problems.append(Problem(key=f"{_RESOURCES}.gpus_per_node", rule=rule, value=slots, way_out=way_out))
    if resources.num_nodes not in (None, 1):
        rule = "with one node (cluster.num_nodes) it must be null or 1"
        problems.append(Problem(key=f"{_RESOURCES}.num_nodes", rule=rule, value=resources.num_nodes))
    return problems


def _check_several(cluster: ClusterSection, resources: ResourcesSection) -> list[Problem]:
    problems = []
    if resources.num_nodes is None or resources.num_nodes >= cluster.num_nodes:
        rule = f"it must leave at least one of the {cluster.num_nodes} nodes (cluster.num_nodes) to training"
        way_out = f"set 1 to {cluster.num_nodes - 1}"
        problems.append(Problem(key=f"{_RESOURCES}.num_nodes", rule=rule, value=resources.num_nodes, way_out=way_out))
    if resources.gpus_per_node not in (None, cluster.gpus_per_node):
        rule = "with several nodes generation takes whole nodes: it must equal cluster.gpus_per_node"
        way_out = f"set {cluster.gpus_per_node} or null"
        key = f"{_RESOURCES}.gpus_per_node"
        problems.append(Problem(key=key, rule=rule, value=resources.gpus_per_node, way_out=way_out))
    return problems
