# SPDX-License-Identifier: Apache-2.0
"""The driver's handle on the generation workers, whatever their backend is."""

from collections.abc import Sequence
from typing import Any

from nemo_rl_core.protocols.generation import Completion, GenerationRequest
from nemo_rl_core.protocols.workers import WorkerFuture, WorkerGroup

__all__ = ["Generation"]


class Generation:
    """Spreads requests over the replicas of a backend and puts the completions back in order."""

    def __init__(self, group: WorkerGroup) -> None:
        """Take the workers, each a replica."""
        self._group = group

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self._group.world_size

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Continue each prompt once; results are in the order of the requests."""
        replicas = self.num_replicas
        # Dealt out like cards: completions of one group, alike in length, do not all meet on one replica.
        hands = [list(requests[replica::replicas]) for replica in range(replicas)]
        results = self._group.run_all_workers_multiple_data("generate", requests=hands).get_results()
        completions: list[Completion | None] = [None] * len(requests)
        for replica, hand in enumerate(results):
            completions[replica::replicas] = hand
        return [completion for completion in completions if completion is not None]

    def num_receiving_ranks(self) -> int:
        """Return how many ranks take part in a refit over all replicas."""
        return sum(self._group.run_all_workers_single_data("num_receiving_ranks").get_results())

    def start_receiving(self, address: str) -> WorkerFuture:
        """Start a refit on every replica; the future's results are the receivers' reports."""
        return self._group.run_all_workers_single_data("receive_weights", address=address)

    def weights_digests(self) -> list[str]:
        """Return the digest of the live weights of each replica."""
        return self._group.run_all_workers_single_data("weights_digest").get_results()

    def describe(self) -> list[dict[str, Any]]:
        """Return what ``summary.json`` says of each replica."""
        return self._group.run_all_workers_single_data("describe").get_results()

    def shutdown(self) -> None:
        """Stop the workers; calling it twice is fine."""
        self._group.shutdown()
