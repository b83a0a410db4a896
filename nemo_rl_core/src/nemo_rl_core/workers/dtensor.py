# SPDX-License-Identifier: Apache-2.0
"""The FSDP2 policy worker: one rank of a HF causal LM that is trained and whose weights are sent out."""

import contextlib
import datetime
from collections.abc import Generator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import StateError
from nemo_rl_core.fp8.calibration import DEFAULT_MARGIN, ActivationObserver
from nemo_rl_core.fp8.calibration_result import CalibrationRequest, describe_hf_model
from nemo_rl_core.fp8.model_description import ModelDescription
from nemo_rl_core.objectives.losses import LossSettings
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.workers.calibration import add_up_observers, calibration_passes, observe_attention
from nemo_rl_core.workers.checkpoint_names import CheckpointNames
from nemo_rl_core.workers.devices import describe_worker, device_identity
from nemo_rl_core.workers.models import LogprobModel, build_model, check_logprobs, empty_model, load_config
from nemo_rl_core.workers.optimizers import build_optimizer
from nemo_rl_core.workers.output_head import compute_head_in_float32
from nemo_rl_core.workers.passes import backward_passes, equal_plan, global_totals, logprob_passes
from nemo_rl_core.workers.settings import PolicySettings
from nemo_rl_core.workers.sharding import checkpoint_layers, shard_model, spread_weights
from nemo_rl_core.workers.weight_source import WeightSource

__all__ = ["DTensorPolicyWorker"]


class DTensorPolicyWorker:
    """One train rank. A plain class: it can be built in a test, with or without a launcher.

    Each method is called on every rank, since the model is sharded over all of them; results that are the same
    everywhere come from every rank.
    """

    def __init__(
        self,
        settings: PolicySettings,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        device: Literal["cpu", "cuda"] = "cpu",
        store: dist.Store | None = None,
        store_address: str | None = None,
    ) -> None:
        """Build this rank's shard.

        Args:
            settings: Model, optimizer and batching.
            rank: This rank.
            world_size: Number of train ranks.
            local_rank: Index of this rank on its node; with CUDA the device's index.
            device: ``cpu`` (gloo) or ``cuda`` (NCCL).
            store: The live rendezvous store; rank 0 owns it.
            store_address: ``host:port`` of that store, for the ranks that do not own it.

        Raises:
            ModelError: If the model cannot be built, or lacks a weight that is to be sent in FP8.
            StateError: If there is more than one rank and no store.
        """
        self.settings = settings
        self.rank, self.world_size = rank, world_size
        self.device = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
        self._timeout = datetime.timedelta(seconds=settings.collective_timeout_s)
        self._source: WeightSource | None = None
        self._join(store, store_address)
        try:
            self._mesh = init_device_mesh(device, (world_size,))
            self._model = self._build()
            self._optimizer, self._scheduler = self._build_optimizer()
            self._reference = self._copy_shards() if settings.reference_model else None
            self._source = WeightSource(
                self._model.model,
                CheckpointNames(empty_model(settings.model)),
                settings.model.precision,
                rank=rank,
                device_id=device_identity(self.device, f"train-{rank}"),
                fp8_weights=settings.fp8_weights,
            )
        except BaseException:
            self.shutdown()  # or the next worker of this process would find the process group taken
            raise

    # -- what the loop calls -------------------------------------------------------------------------------------

    def get_logprobs(self, data: BatchedDataDict) -> torch.Tensor:
        """Return logprobs of this rank's rows under the policy, float32 [B, S] on the CPU, 0 on padding."""
        batching = self.settings.batching
        data = data.to(self.device)
        lengths = data.tensor("input_lengths").tolist()
        plan = equal_plan(lengths, batching.logprob_batch_size, batching.logprob_mb_tokens, self._mesh.get_group())
        return logprob_passes(self._model, data, plan)

    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> torch.Tensor:
        """Return the same under the reference policy, whose weights are swapped in meanwhile.

        Raises:
            StateError: If the worker was built without a reference policy.
        """
        with self._reference_weights():
            return self.get_logprobs(data)

    def train(self, data: BatchedDataDict, loss: LossSettings) -> dict[str, float]:
        """Take one optimizer step on a global batch, of which ``data`` is this rank's part.

        Returns:
            Metrics of the global batch, the same on every rank: ``loss``, ``grad_norm``, ``lr``, ``num_tokens`` and
            those of the loss function.

        Raises:
            StateError: If the gradient is not finite; the weights are then left as they were.
        """
        batching = self.settings.batching
        data = data.to(self.device)
        totals = global_totals(data, self.device)
        lengths = data.tensor("input_lengths").tolist()
        plan = equal_plan(lengths, batching.train_micro_batch_size, batching.train_mb_tokens, self._mesh.get_group())
        self._optimizer.zero_grad(set_to_none=True)
        shares = backward_passes(self._model, data, plan, loss, totals)
        grad_norm = self._clip_gradients()
        if not torch.isfinite(torch.tensor(grad_norm)):
            self._optimizer.zero_grad(set_to_none=True)
            raise StateError(
                f"the gradient norm is {grad_norm}; the step was not taken and the weights are as before. Look at the "
                "loss's inputs (rewards, logprobs) or lower the learning rate"
            )
        lr = self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return {**self._add_up(shares), "grad_norm": grad_norm, "lr": float(lr), "num_tokens": totals.num_tokens}

    def calibrate_qkv_fp8_scales(
        self,
        data: BatchedDataDict,
        *,
        percentile: float = 100.0,
        margin: float = DEFAULT_MARGIN,
        include_q: bool = False,
        previous: Mapping[str, float] | None = None,
        model: ModelDescription | None = None,
    ) -> dict[str, Any]:
        """Calibrate FP8 scales on this rank's rows; see ``Policy.calibrate_qkv_fp8_scales``.

        Returns:
            The result over all ranks, the same on each.
        """
        # What is wrong with it is wrong on every rank, so none waits for another.
        request = CalibrationRequest(
            model=model or describe_hf_model(load_config(self.settings.model), type(self._model.model).__name__),
            percentile=percentile,
            margin=margin,
            include_q=include_q,
            previous=previous,
        )
        batching = self.settings.batching
        data = data.to(self.device)
        lengths = data.tensor("input_lengths").tolist()
        plan = equal_plan(lengths, batching.logprob_batch_size, batching.logprob_mb_tokens, self._mesh.get_group())
        observer = ActivationObserver()
        with observe_attention(self._model.model, observer):
            calibration_passes(self._model, data, plan, observer)
        return request.result(add_up_observers(observer, self.device))

    # -- refit ---------------------------------------------------------------------------------------------------

    def open_refit_listener(self, num_receivers: int, settings: RefitSettings, host: str | None = None) -> str | None:
        """Start listening for receivers on rank 0; later calls return the same address.

        Returns:
            ``host:port`` on rank 0, None elsewhere.
        """
        return self._weights().listen(num_receivers, settings, host)

    def send_weights(self, version: int, kv_scales: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Send the weights as ``version`` to every receiver; all ranks gather, rank 0 sends.

        Args:
            version: Version that they get.
            kv_scales: Scales of an FP8 KV cache by live name, which travel in the same refit.

        Returns:
            The sender's report as plain data, the same on every rank.

        Raises:
            RefitError: If the refit failed, on every rank with the same cause.
            ScaleNameError: If a scale is not positive and finite.
        """
        return self._weights().send(version, kv_scales)

    def weights_digest(self) -> str:
        """Return the digest of the weights as a refit would send them."""
        return self._weights().digest()

    # -- life ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, str]:
        """Return what ``summary.json`` says of a train worker."""
        return describe_worker("fsdp2", self.device)

    def shutdown(self) -> None:
        """Close the listener and leave the process group; calling it twice is fine."""
        if self._source is not None:
            self._source.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _weights(self) -> WeightSource:
        assert self._source is not None
        return self._source

    # -- inside --------------------------------------------------------------------------------------------------

    def _join(self, store: dist.Store | None, store_address: str | None) -> None:
        """Join the train ranks' process group on a store whose port its owner has bound."""
        if store is None and store_address is not None:
            host, _, port = store_address.rpartition(":")
            store = dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
        if store is None:
            if self.world_size > 1:
                raise StateError(f"{self.world_size} train ranks need a store or its address, got neither")
            store = dist.HashStore()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.PrefixStore("train", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=self._timeout,
        )

    def _build(self) -> LogprobModel:
        """Build the full model on rank 0 alone, shard an empty one everywhere, and spread the weights."""
        settings = self.settings
        source: dict[str, torch.Tensor] = {}
        if self.rank == 0:
            whole = self._wrap(build_model(settings.model, torch.float32))
            check_logprobs(whole)
            # With duplicates: two names of one tensor here (LongRoPE's tables) may be two tensors in the empty model.
            source = {**dict(whole.named_parameters()), **dict(whole.named_buffers(remove_duplicate=False))}
        wrapped = self._wrap(empty_model(settings.model))
        if settings.model.float32_head:
            compute_head_in_float32(wrapped.model)
        if settings.activation_checkpointing:
            checkpoint_layers(wrapped.model)
        shard_model(wrapped, self._mesh, settings.model.precision)
        spread_weights(wrapped, source, self._mesh, self.device)
        # Evaluation mode also while training: the ratio of two policies must not hold the noise of dropout or of a
        # router's jitter, which models switch on in many ways and all by this one flag.
        return wrapped.eval()

    def _wrap(self, model: Any) -> LogprobModel:
        chunk = self.settings.batching.logprob_chunk_size
        return LogprobModel(model, chunk=chunk, temperature=self.settings.temperature)

    def _build_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        return build_optimizer(self.settings.optimizer, self._model.parameters())

    def _clip_gradients(self) -> float:
        """Scale gradients down to the allowed norm; return the norm before that."""
        limit = self.settings.optimizer.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), float("inf") if limit is None else limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _add_up(self, shares: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Sum each metric's shares over the ranks."""
        names = sorted(shares)
        values = torch.stack([shares[name].double() for name in names]).to(self.device)
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    def _copy_shards(self) -> dict[str, torch.Tensor]:
        """Copy this rank's shards to the CPU, where a reference policy takes no device memory."""
        return {name: _local(p).detach().cpu().clone() for name, p in self._model.named_parameters()}

    @contextlib.contextmanager
    def _reference_weights(self) -> Generator[None]:
        if self._reference is None:
            raise StateError(
                "there is no reference policy; set loss_fn.reference_policy_kl_penalty above 0 to keep one"
            )
        policy = self._copy_shards()
        self._load_shards(self._reference)
        try:
            yield
        finally:
            self._load_shards(policy)

    @torch.no_grad()
    def _load_shards(self, shards: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            _local(parameter).copy_(shards[name])


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
