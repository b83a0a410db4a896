# SPDX-License-Identifier: Apache-2.0
"""Fakes of a generation backend."""

from collections.abc import Sequence

from nemo_rl_core.protocols.generation import Completion, GenerationRequest

__all__ = ["ScriptedGenerator"]


class ScriptedGenerator:
    """Answers with prepared token ids, in order, whatever it is asked.

    Attributes:
        requests: All requests it got.
    """

    def __init__(self, token_ids: Sequence[tuple[int, ...]], *, weight_version: int = 0) -> None:
        """Take the answers."""
        self._token_ids = list(token_ids)
        self._weight_version = weight_version
        self.requests: list[GenerationRequest] = []

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return the next prepared answers, fewer if there are no more; each logprob is -0.5."""
        self.requests += requests
        taken, self._token_ids = self._token_ids[: len(requests)], self._token_ids[len(requests) :]
        return [
            Completion(
                token_ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="length", weight_version=self._weight_version
            )
            for ids in taken
        ]
