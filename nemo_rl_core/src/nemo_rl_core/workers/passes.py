# SPDX-License-Identifier: Apache-2.0
"""Forward and backward passes over micro-batches that every rank makes equally many of."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.data.microbatches import plan_by_count, plan_by_tokens
from nemo_rl_core.objectives.losses import LossSettings, LossTotals, clipped_pg_loss, mean_metrics

__all__ = ["Plan", "backward_passes", "equal_plan", "global_totals", "logprob_passes"]

Plan = list[list[int]]


def equal_plan(lengths: Sequence[int], rows: int, max_tokens: int | None, group: dist.ProcessGroup) -> Plan:
    """Cut this rank's rows into micro-batches, as many as the rank with the most needs.

    A sharded model gathers weights in every pass, so a rank with fewer passes would leave the others waiting. It gets
    empty micro-batches, which run on a dummy row and add nothing.

    Args:
        lengths: Tokens of each row.
        rows: Rows of one micro-batch.
        max_tokens: Padded tokens of one micro-batch; replaces ``rows`` when given.
        group: The ranks that have to agree.
    """
    plan = plan_by_count(len(lengths), rows) if max_tokens is None else plan_by_tokens(lengths, max_tokens)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    most = torch.tensor(len(plan), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return plan + [[] for _ in range(int(most) - len(plan))]


def logprob_passes(model: Callable[[torch.Tensor], torch.Tensor], batch: BatchedDataDict, plan: Plan) -> torch.Tensor:
    """Return the model's logprobs float32 [B, S] on the CPU, 0 on padding."""
    ids_BS, lengths_B = batch.tensor("input_ids"), batch.tensor("input_lengths")
    result_BS = torch.zeros(ids_BS.shape, dtype=torch.float32)
    with torch.no_grad():
        for indices, part in _parts(batch, plan):
            logprobs = model(part.tensor("input_ids"))
            if indices:
                result_BS[indices, : logprobs.shape[1]] = logprobs.cpu()
    positions_S = torch.arange(ids_BS.shape[1])
    return torch.where(positions_S[None] < lengths_B.cpu()[:, None], result_BS, 0.0)


def backward_passes(
    model: Callable[[torch.Tensor], torch.Tensor],
    batch: BatchedDataDict,
    plan: Plan,
    loss: LossSettings,
    totals: LossTotals,
) -> dict[str, torch.Tensor]:
    """Add the gradient of the global batch's loss to the parameters; return this rank's share of the metrics.

    FSDP2 averages gradients over the ranks, while the shares of a loss add up; the factor makes up for it.
    """
    world_size = dist.get_world_size()
    shares = []
    for _, part in _parts(batch, plan):
        columns = {name: column for name, column in part.items() if isinstance(column, torch.Tensor)}
        value, metrics = clipped_pg_loss(model(columns["input_ids"]), columns, loss, totals)
        (value * world_size).backward()
        shares.append(metrics)
    return mean_metrics(shares)


def global_totals(batch: BatchedDataDict, device: torch.device) -> LossTotals:
    """Count tokens and sequences over all ranks."""
    local = LossTotals.of(batch.tensor("token_mask"), batch.tensor("sample_mask"))
    counts = torch.tensor([local.num_tokens, local.num_sequences], dtype=torch.float64, device=device)
    dist.all_reduce(counts)
    tokens, sequences = counts.tolist()
    return LossTotals(num_tokens=tokens, num_sequences=sequences)


def _parts(batch: BatchedDataDict, plan: Plan) -> Iterator[tuple[list[int], BatchedDataDict]]:
    """Yield the micro-batches, each only as wide as its longest row; an empty one holds a masked copy of row 0."""
    for indices in plan:
        part = batch.select_indices(indices or [0])
        width = int(part.tensor("input_lengths").max())
        for name, column in part.items():
            if isinstance(column, torch.Tensor) and column.ndim == 2:
                part[name] = column[:, :width]
        if not indices and "sample_mask" in part:
            part["sample_mask"] = torch.zeros_like(part.tensor("sample_mask"))
        yield indices, part
