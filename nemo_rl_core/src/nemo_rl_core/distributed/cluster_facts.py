# SPDX-License-Identifier: Apache-2.0
"""What the Ray cluster that this driver is connected to has."""

import ray

__all__ = ["has_gpus", "has_node_label"]


def has_gpus() -> bool:
    """Say whether any node has a GPU."""
    return ray.cluster_resources().get("GPU", 0) > 0


def has_node_label(key: str) -> bool:
    """Say whether any living node carries a label of that name."""
    return any(key in node.get("Labels", {}) for node in ray.nodes() if node["Alive"])
