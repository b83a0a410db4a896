# SPDX-License-Identifier: Apache-2.0
"""Sampling of one token for each row of a batch, with parameters and random stream of its own."""

from collections.abc import Sequence

import torch

from nemo_rl_core.protocols.generation import SamplingParams

__all__ = ["RowSampler", "sampling_logprobs"]


def sampling_logprobs(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor
) -> torch.Tensor:
    """Return the logprobs of the distribution that is sampled from.

    Order as engines do it: temperature, then top-k, then top-p on what is left. Ties at the k-th place are all kept;
    top-p keeps the smallest set of most likely tokens whose mass reaches p.

    Args:
        logits_BV: float [B, V].
        temperature_B: float [B]; a row with 0 will be decoded greedily, so it is neither scaled nor cut.
        top_k_B: int [B]; 0 switches it off.
        top_p_B: float [B]; 1 switches it off.

    Returns:
        float32 [B, V]; -inf for tokens that cannot be drawn.
    """
    greedy_B = temperature_B == 0
    top_k_B, top_p_B = top_k_B.masked_fill(greedy_B, 0), top_p_B.masked_fill(greedy_B, 1.0)
    scale_B = torch.where(greedy_B, 1.0, temperature_B)
    logits_BV = logits_BV.float() / scale_B[:, None]
    vocab = logits_BV.shape[1]
    if bool((top_k_B > 0).any()):
        k_B = torch.where(top_k_B > 0, top_k_B, vocab).clamp(max=vocab)
        threshold_B1 = logits_BV.sort(dim=1, descending=True).values.gather(1, (k_B - 1)[:, None])
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B1, float("-inf"))
    if bool((top_p_B < 1).any()):
        ordered_BV, order_BV = logits_BV.softmax(1).sort(dim=1, descending=True, stable=True)
        before_BV = ordered_BV.cumsum(1) - ordered_BV
        # A token stays if the mass before it has not reached p yet; the first one always does.
        drop_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1)
        drop_BV[:, 0] = False
        logits_BV = logits_BV.masked_fill(torch.zeros_like(drop_BV).scatter(1, order_BV, drop_BV), float("-inf"))
    return logits_BV.log_softmax(1)


class RowSampler:
    """Draws tokens for a batch of requests; rows can leave while the rest goes on.

    A request with a seed draws from a stream of its own, so that its tokens do not depend on what else is in the
    batch; requests without share the worker's stream.
    """

    def __init__(self, params: Sequence[SamplingParams], shared: torch.Generator, device: torch.device) -> None:
        """Take the parameters of each row.

        Args:
            params: One for each row.
            shared: CPU generator of rows without a seed.
            device: Where logits come from.
        """
        self._streams = [shared if p.seed is None else torch.Generator().manual_seed(p.seed) for p in params]
        self._temperature_B = torch.tensor([p.temperature for p in params], device=device)
        self._top_k_B = torch.tensor([p.top_k for p in params], device=device)
        self._top_p_B = torch.tensor([p.top_p for p in params], device=device)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        index = torch.tensor(rows, dtype=torch.long, device=self._temperature_B.device)
        self._streams = [self._streams[row] for row in rows]
        self._temperature_B, self._top_k_B, self._top_p_B = (
            values[index] for values in (self._temperature_B, self._top_k_B, self._top_p_B)
        )

    def draw(self, logits_BV: torch.Tensor) -> tuple[list[int], list[float]]:
        """Draw one token for each row.

        Returns:
            Token ids and their logprobs under the distribution they were drawn from. A greedy row (temperature 0)
            takes the most likely token and reports its logprob at temperature 1 without cuts, since that of a point
            mass says nothing.
        """
        logprobs_BV = sampling_logprobs(logits_BV, self._temperature_B, self._top_k_B, self._top_p_B)
        # A greedy row draws nothing, so that a validation does not move the stream of the rollouts after it.
        draws = [
            torch.rand(1, generator=stream, dtype=torch.float64)
            if temperature > 0
            else torch.zeros(1, dtype=torch.float64)
            for stream, temperature in zip(self._streams, self._temperature_B.tolist(), strict=True)
        ]
        uniform_B = torch.cat(draws)
        cumulative_BV = logprobs_BV.double().exp().cumsum(1)
        target_B1 = uniform_B.to(logits_BV.device)[:, None] * cumulative_BV[:, -1:]
        # The first token whose cumulative mass exceeds the target has mass of its own, so it can be drawn.
        drawn_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp(max=logits_BV.shape[1] - 1)
        tokens_B1 = torch.where((self._temperature_B > 0)[:, None], drawn_B1, logits_BV.argmax(1, keepdim=True))
        return tokens_B1.squeeze(1).tolist(), logprobs_BV.gather(1, tokens_B1).squeeze(1).tolist()
