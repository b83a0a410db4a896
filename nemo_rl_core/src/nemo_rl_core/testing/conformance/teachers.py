# SPDX-License-Identifier: Apache-2.0
"""Models that judge a backend: the forward pass of transformers, and the distribution that a request is drawn from."""

import math
from collections.abc import Sequence

import torch

from nemo_rl_core.protocols.generation import SamplingParams
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.checkpoint_names import live_tensors, wire_tensors
from nemo_rl_core.workers.models import random_model
from nemo_rl_core.workers.output_head import compute_head_in_float32
from nemo_rl_core.workers.sampling import sampling_logprobs

__all__ = ["HfTeacher", "distribution", "logprob_gaps"]

#: Where a token stands on the very edge of the nucleus, rounding decides whether it is in; either is right.
_TOP_P_SLACK = 1e-4


class HfTeacher:
    """A transformers model with random weights, of which every tensor differs from seed to seed; a ``Teacher``."""

    def __init__(self, settings: ModelSettings, *, seed: int) -> None:
        """Build the model on the CPU, in the compute type of the settings.

        Args:
            settings: Which architecture; weights of a folder are not read.
            seed: Of the weights.

        Raises:
            ModelError: If it cannot be built.
        """
        dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
        self._model = random_model(settings, dtype).eval().requires_grad_(False)
        if settings.float32_head:
            compute_head_in_float32(self._model)
        stream = torch.Generator().manual_seed(seed)
        for _, tensor in live_tensors(self._model):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=stream)
                # Norms and biases stay near their start; logits get a spread of about 2, so that draws are no foregone
                # conclusion and no token is as likely as another.
                fresh = tensor + 0.2 * noise if tensor.ndim < 2 else noise * 2 / tensor.shape[-1] ** 0.5
                tensor.copy_(fresh)

    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return parameters and persistent buffers under the names that a checkpoint has for them."""
        return list(wire_tensors(self._model))

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return float32 [S, V] of one plain forward pass."""
        return self._model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def distribution(logits_NV: torch.Tensor, sampling: SamplingParams, *, top_p: float | None = None) -> torch.Tensor:
    """Return the logprobs float32 [N, V] of what a request draws from; a greedy one is scored at temperature 1.

    Args:
        logits_NV: float [N, V].
        sampling: The request's.
        top_p: Replaces the request's own.
    """
    rows = logits_NV.shape[0]
    return sampling_logprobs(
        logits_NV,
        torch.full((rows,), sampling.temperature),
        torch.full((rows,), sampling.top_k),
        torch.full((rows,), sampling.top_p if top_p is None else top_p),
    )


def logprob_gaps(
    logits_NV: torch.Tensor, sampling: SamplingParams, tokens: Sequence[int], logprobs: Sequence[float]
) -> list[float]:
    """Return how far each logprob is from the right one, in nats; infinite where the token could not be drawn.

    Args:
        logits_NV: float [N, V], the teacher's before each token.
        sampling: The request's.
        tokens: N of them.
        logprobs: N of them.
    """
    cuts = [sampling.top_p]
    if sampling.top_p < 1:
        cuts += [max(sampling.top_p - _TOP_P_SLACK, 1e-9), min(sampling.top_p + _TOP_P_SLACK, 1.0)]
    ids_N1 = torch.tensor(list(tokens))[:, None]
    given_N = torch.tensor(list(logprobs), dtype=torch.float64)
    right = [distribution(logits_NV, sampling, top_p=p).gather(1, ids_N1)[:, 0].double() for p in cuts]
    gaps_N = torch.stack([(given_N - right_N).abs() for right_N in right]).amin(0)
    return gaps_N.nan_to_num(nan=math.inf, posinf=math.inf).tolist()
