# SPDX-License-Identifier: Apache-2.0
"""The driver's handle on the train workers."""

from collections.abc import Mapping
from typing import Any

import torch

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import DataError, StateError
from nemo_rl_core.fp8.calibration import DEFAULT_MARGIN, check_calibration
from nemo_rl_core.fp8.model_description import ModelDescription
from nemo_rl_core.objectives.losses import LossSettings
from nemo_rl_core.protocols.workers import WorkerFuture, WorkerGroup
from nemo_rl_core.refit.settings import RefitSettings

__all__ = ["Policy"]

#: Columns that a logprob pass needs; nothing else is sent.
LOGPROB_COLUMNS = ("input_ids", "input_lengths")


class Policy:
    """Trains and scores a batch over all train ranks; rows are sharded over them and come back in order."""

    def __init__(self, group: WorkerGroup) -> None:
        """Take the workers, each a data-parallel rank."""
        self._group = group

    @property
    def world_size(self) -> int:
        """Number of train ranks."""
        return self._group.world_size

    def get_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """Return logprobs float32 [B, S] under the policy; column 0 and padding are 0."""
        return self._score("get_logprobs", batch)

    def get_reference_policy_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """Return the same under the reference policy."""
        return self._score("get_reference_policy_logprobs", batch)

    def train(
        self, batch: BatchedDataDict, loss: LossSettings, *, global_batch_size: int | None = None
    ) -> dict[str, float]:
        """Take one optimizer step for each global batch, in row order.

        Args:
            batch: Training batch; see ``nemo_rl_core.data``.
            loss: What is minimised.
            global_batch_size: Sequences of one optimizer step; None takes the whole batch.

        Returns:
            Metrics, averaged over the optimizer steps.

        Raises:
            DataError: If B is no multiple of the global batch size.
        """
        size = batch.size if global_batch_size is None else global_batch_size
        if size < 1 or batch.size % size:
            raise DataError(f"a batch of {batch.size} sequences cannot be cut into global batches of {size}")
        columns = BatchedDataDict({name: c for name, c in batch.items() if isinstance(c, torch.Tensor)})
        steps = []
        for part in columns.iter_slices(size):
            shards = part.shard_by_batch_size(self.world_size)
            future = self._group.run_all_workers_multiple_data("train", data=shards, common_kwargs={"loss": loss})
            steps.append(future.get_results()[0])
        return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}

    def calibrate_qkv_fp8_scales(
        self,
        batch: BatchedDataDict,
        *,
        percentile: float = 100.0,
        margin: float = DEFAULT_MARGIN,
        include_q: bool = False,
        previous: Mapping[str, float] | None = None,
        model: ModelDescription | None = None,
    ) -> dict[str, Any]:
        """Calibrate the FP8 scales of the KV cache, and of queries if asked for, on a batch's real tokens.

        Args:
            batch: ``input_ids`` [B, S] and ``input_lengths`` [B]; take prompts with responses.
            percentile: Of the magnitudes of all activations of a layer and kind; 100 is their maximum.
            margin: Headroom over it, from 1.
            include_q: Give ``q_scale`` too, which vLLM reads where its kernel quantises queries (NVIDIA GPUs).
            previous: Live name to the scale that the engine had while it generated the batch, as ``layers`` of the
                calibration before: the result then says how the batch fares under them.
            model: Which live modules have scales, for an architecture that ``describe_model`` does not know.

        Returns:
            ``format`` ("fp8"), ``percentile``, ``margin``; ``layers``: name in the live engine, such as
            ``model.layers.3.self_attn.attn.k_scale``, to scale, exactly ``ModelDescription.names``; ``amax``: live
            module to the largest magnitudes of q, k and v; ``rates``: live module to kind to the shares of
            ``saturated`` and ``subnormal`` values of this batch; with ``previous`` also ``drift``: the same under the
            previous scales.

        Raises:
            DataError: If the batch is empty, or percentile or margin is out of range.
            WorkerError: If the architecture is not known, its cache holds a latent (MLA), ``previous`` has other names,
                or a layer was not reached, saw no token or has activations that are not finite; the cause says which.
        """
        check_calibration(percentile, margin)
        if not batch.size:
            raise DataError("calibration needs at least one sequence, got an empty batch")
        filled = self._filled(batch)
        # Rows that fill up have no tokens, so that nothing is counted twice.
        lengths = filled.tensor("input_lengths").clone()
        lengths[batch.size :] = 0
        filled["input_lengths"] = lengths
        kwargs = {
            "percentile": percentile,
            "margin": margin,
            "include_q": include_q,
            "previous": previous,
            "model": model,
        }
        shards = filled.shard_by_batch_size(self.world_size)
        future = self._group.run_all_workers_multiple_data(
            "calibrate_qkv_fp8_scales", data=shards, common_kwargs=kwargs
        )
        return future.get_results()[0]

    def open_refit_listener(self, num_receivers: int, settings: RefitSettings) -> str:
        """Let train rank 0 listen for receivers; return its ``host:port``."""
        future = self._group.run_all_workers_single_data(
            "open_refit_listener", num_receivers=num_receivers, settings=settings
        )
        address = future.get_results()[0]
        if address is None:
            raise StateError("train rank 0 gave no refit address")
        return address

    def start_sending(self, version: int, kv_scales: Mapping[str, float] | None = None) -> WorkerFuture:
        """Start a refit on every train rank; the future's results are the sender's report.

        Args:
            version: Version that the weights get.
            kv_scales: Scales of an FP8 KV cache by live name.
        """
        return self._group.run_all_workers_single_data("send_weights", version=version, kv_scales=kv_scales)

    def weights_digest(self) -> str:
        """Return the digest of the weights as a refit would send them."""
        return self._group.run_all_workers_single_data("weights_digest").get_results()[0]

    def describe(self) -> list[dict[str, Any]]:
        """Return what ``summary.json`` says of each train rank."""
        return self._group.run_all_workers_single_data("describe").get_results()

    def shutdown(self) -> None:
        """Stop the workers; calling it twice is fine."""
        self._group.shutdown()

    def _score(self, method: str, batch: BatchedDataDict) -> torch.Tensor:
        """Run a logprob pass."""
        shards = self._filled(batch).shard_by_batch_size(self.world_size)
        results = self._group.run_all_workers_multiple_data(method, data=shards).get_results()
        return torch.cat(results)[: batch.size]

    def _filled(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return what a forward pass needs of a batch, filled up with copies of its last row to a multiple of the ranks."""
        columns = BatchedDataDict({name: batch[name] for name in LOGPROB_COLUMNS})
        rows = list(range(columns.size)) + [columns.size - 1] * (-columns.size % self.world_size)
        return columns.select_indices(rows)
