# SPDX-License-Identifier: Apache-2.0
"""What the Ray cluster that this driver is connected to has."""

import ray

__all__ = ["has_gpus", "has_node_label", "nodes_of_role"]


def has_gpus() -> bool:
    """Say whether any node has a GPU."""
    return ray.cluster_resources().get("GPU", 0) > 0


def has_node_label(key: str) -> bool:
    """Say whether any living node carries a label of that name."""
    return any(key in node.get("Labels", {}) for node in ray.nodes() if node["Alive"])


def nodes_of_role(role: str) -> dict[str, str]:
    """Return the living nodes with the label ``role=<role>``, or all where none carries such a label: Ray's id to address."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if has_node_label("role"):
        nodes = [node for node in nodes if node.get("Labels", {}).get("role") == role]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
