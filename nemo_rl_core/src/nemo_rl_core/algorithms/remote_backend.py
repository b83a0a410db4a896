# SPDX-License-Identifier: Apache-2.0
"""What a driver without a backend's package asks of the generation nodes of a cluster: the backend's description."""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_rl_core import errors
from nemo_rl_core.algorithms.backends import ChosenBackend
from nemo_rl_core.distributed.cluster_facts import nodes_of_role
from nemo_rl_core.distributed.environments import current_interpreter
from nemo_rl_core.distributed.nodes import call_on_nodes
from nemo_rl_core.distributed.ray_runtime import start_ray
from nemo_rl_core.errors import BackendError, ClusterError, NemoRLError
from nemo_rl_core.protocols.settings import GenerationSettings

__all__ = ["ask_for_backend"]

#: Seconds that a node gets to load the description, which is light.
_ASK_TIMEOUT_S = 60.0


def ask_for_backend(
    name: str,
    sections: Mapping[str, Any],
    settings: GenerationSettings,
    *,
    address: str,
    missing: BackendError,
) -> ChosenBackend:
    """Let the generation nodes load the backend and check the config; no worker starts.

    Args:
        name: Name of the backend.
        sections: The backends' own sections of the config.
        settings: What every generation worker is told, but for ``options``.
        address: ``host:port`` of the cluster, which is attached to and left again.
        missing: Why the driver itself does not have it.

    Raises:
        ClusterError: If the cluster cannot be joined, no node generates, or a node does not answer or has another core.
        BackendError: If no generation node can use it; in the words of the first that was asked.
        ConfigError: If the config does not fit.
    """
    core = current_interpreter().versions.get("nemo-rl-core")
    # Pickled here: a node with another core must be able to take the call and say so.
    payload = pickle.dumps((name, dict(sections), settings))
    with start_ray(num_cpus=0, address=address):
        nodes = nodes_of_role("generation")
        if not nodes:
            raise ClusterError(f"{missing} The cluster at {address} has no node with the label role=generation to ask")
        answers = call_on_nodes(_describe, nodes, (core, payload), timeout_s=_ASK_TIMEOUT_S)
    failures: list[NemoRLError] = []
    for node_id, answer in answers.items():
        node = nodes[node_id]
        if "chosen" in answer:
            return replace(pickle.loads(answer["chosen"]), node=node)
        if answer["core"] != core:
            raise ClusterError(
                f"nemo-rl-core must be the same in all interpreters of one cluster: node {node} has "
                f"{answer['core'] or 'none'}, the driver has {core}; install the driver's version there: "
                f"pip install nemo-rl-core=={core}"
            )
        kind = getattr(errors, answer["type"]) if answer["type"] in errors.__all__ else BackendError
        failures.append(kind(f"on node {node}: {answer['text']}"))
    raise failures[0]


def _describe(core: str | None, payload: bytes) -> dict[str, Any]:
    """Run on a node, by value: load the backend where the node's core is the driver's."""
    import pickle
    from importlib import metadata

    try:
        own = metadata.version("nemo-rl-core")
    except metadata.PackageNotFoundError:
        own = None
    if own != core:
        return {"core": own}
    from nemo_rl_core.algorithms.backends import choose_backend
    from nemo_rl_core.errors import NemoRLError

    try:
        return {"core": own, "chosen": pickle.dumps(choose_backend(*pickle.loads(payload)))}
    except NemoRLError as error:
        return {"core": own, "type": type(error).__name__, "text": str(error)}
