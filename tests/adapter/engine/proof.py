# SPDX-License-Identifier: Apache-2.0
"""What is asked of a refit into a live engine, whichever family it is."""

from collections.abc import Mapping, Sequence

import torch

from nemo_rl_core.errors import RefitError, RefitRefusedError
from nemo_rl_core.refit.report import RefitReport
from tests.adapter.engine.checkpoints import Checkpoint, gap
from tests.adapter.engine.live import PROMPTS, LiveEngine, greedy

#: What a fresh engine made of each prompt: tokens and logprobs.
Fresh = Sequence[tuple[list[int], list[float]]]

#: Largest distance of a logprob from that of a fresh engine with the same kernels: batches are cut differently.
NEAR_FRESH = 5e-6
#: The same for an engine of two ranks beside one of one: a sum over a layer's width is made of two sums, in float32.
NEAR_FRESH_OF_ONE_RANK = 2e-5
#: Largest distance from transformers' own forward pass, in float32.
NEAR_HF = 1e-4


def three_refits(
    live: LiveEngine, fresh: Sequence[Fresh], checkpoints: Sequence[Checkpoint], *, near: float = NEAR_FRESH
) -> None:
    """Refit three times; after each, the live engine is as a fresh one, and no two of the three are alike."""
    outcomes = []
    for checkpoint, expected in zip(checkpoints, fresh, strict=True):
        sent, received = live.refit(checkpoint)
        assert isinstance(sent, RefitReport), sent
        assert received["version"] == sent.version == live.version
        assert received["tensors"] == len(checkpoint.tensors)
        assert [ack.digest for ack in sent.acks] == [sent.digest] * live.num_ranks
        assert live.call("weights_digest") == received["digest"] == sent.digest
        found = live.generate(greedy())
        for prompt, completion, (tokens, logprobs) in zip(PROMPTS, found, expected, strict=True):
            assert list(completion.token_ids) == tokens
            assert max(abs(a - b) for a, b in zip(completion.logprobs, logprobs, strict=True)) < near
            assert gap(checkpoint, prompt, completion) < NEAR_HF
            assert completion.weight_version == live.version
        outcomes.append((sent.digest, *(completion.token_ids for completion in found)))
    for each in zip(*outcomes, strict=True):
        assert len(set(each)) == len(checkpoints), "a refit that changes nothing must not pass for one that works"


def same_story(sent: object, received: object, cause: str) -> RefitError:
    """Both sides failed, and tell the same cause."""
    assert isinstance(sent, RefitError), sent
    assert isinstance(received, RefitError), received
    assert type(sent) is type(received)
    assert sent.cause == received.cause
    assert cause in sent.cause
    return received


def refused_before_the_first_byte(live: LiveEngine, tensors: Mapping[str, torch.Tensor], cause: str) -> None:
    """A refit of these tensors is refused on both sides, and what the engine holds stays as it is, and valid."""
    digest, version = live.call("weights_digest"), live.version
    error = same_story(*live.refit(tensors), cause)
    assert isinstance(error, RefitRefusedError)
    assert live.generate(greedy())[0].weight_version == version
    assert live.call("weights_digest") == digest
