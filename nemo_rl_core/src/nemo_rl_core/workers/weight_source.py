# SPDX-License-Identifier: Apache-2.0
"""The train side of a refit: all ranks gather, rank 0 sends."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl_core.errors import NemoRLError, RefitError, StateError
from nemo_rl_core.fp8.scale_names import checked_scale
from nemo_rl_core.protocols.settings import Fp8Weights, Precision
from nemo_rl_core.refit.digest import digests_of, set_digest
from nemo_rl_core.refit.manifest import Manifest, TensorSpec
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.workers.checkpoint_names import CheckpointNames, live_tensors
from nemo_rl_core.workers.fp8_weights import Fp8Caster
from nemo_rl_core.workers.sharding import full_tensors, wire_dtype

__all__ = ["WeightSource"]


class WeightSource:
    """Sends a sharded model's weights, in its compute type, under the names of a checkpoint.

    Only rank 0 talks to the receivers. The others wait for its word before they start to gather, and rank 0 gathers to
    the end even when the transfer has failed: no rank is ever left alone in a collective.
    """

    def __init__(
        self,
        model: nn.Module,
        names: CheckpointNames,
        precision: Precision,
        *,
        rank: int,
        device_id: str,
        fp8_weights: Fp8Weights | None = None,
    ) -> None:
        """Describe what will be sent; nothing is opened yet.

        Args:
            model: The live model.
            names: What its tensors are called in a checkpoint.
            precision: Its compute type.
            rank: This rank of the train ranks.
            device_id: Who this rank is, for receivers on the same device.
            fp8_weights: Which weights travel in FP8; None for none.

        Raises:
            ModelError: If the model lacks one of those.
        """
        self._names = names
        self._caster = Fp8Caster(fp8_weights)
        self._device_id = device_id
        self._model = model
        self._dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self._rank = rank
        self._sender: RefitSender | None = None
        #: Scales of the KV cache of the last refit, by live name.
        self._kv_scales: dict[str, float] = {}
        self._caster.require(frozenset(spec.name for spec in self._plain_specs()))

    def listen(self, num_receivers: int, settings: RefitSettings, host: str | None) -> str | None:
        """Open rank 0's listener once; return its address there and None elsewhere."""
        if self._rank != 0:
            return None
        if self._sender is None:
            self._sender = RefitSender(
                num_receivers=num_receivers, settings=settings, host=host, device_id=self._device_id
            )
        return self._sender.address

    def manifest(self) -> Manifest:
        """Return what a refit moves: the weights, and the scales of the last refit."""
        weights = [spec for plain in self._plain_specs() for spec in self._caster.specs(plain)]
        return Manifest((*weights, *(TensorSpec(name=name, shape=(), dtype="float32") for name in self._kv_scales)))

    def send(self, version: int, kv_scales: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Take part in one refit; return its report as plain data.

        Args:
            version: Version that the weights get.
            kv_scales: Scales of an FP8 KV cache by live name; they travel after the weights, as float32 scalars.

        Raises:
            ScaleNameError: If a scale is not positive and finite in float32; nothing is sent then.
            RefitError: On every rank, with the same cause.
            StateError: If rank 0 has no listener.
        """
        self._kv_scales = {name: checked_scale(name, value) for name, value in (kv_scales or {}).items()}
        outcome = self._rank_zero_says(lambda: self._open(version))
        if isinstance(outcome, NemoRLError):
            raise outcome
        gathered = self._gathered()
        outcome = self._rank_zero_says(lambda: self._transfer(gathered), meanwhile=lambda: _drain(gathered))
        if isinstance(outcome, NemoRLError):
            raise outcome
        return outcome

    def digest(self) -> str:
        """Return the digest of the gathered weights; every rank takes part."""
        return set_digest(self.manifest(), digests_of(self._as_sent(self._gathered())))

    def close(self) -> None:
        """Close the listener; calling it twice is fine."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _plain_specs(self) -> Iterator[TensorSpec]:
        """Yield what a refit moves where nothing is cast."""
        for name, tensor in live_tensors(self._model):
            dtype = _dtype_name(wire_dtype(tensor, self._dtype))
            for part, shape in self._names.parts(name, torch.empty(tensor.shape, device="meta")):
                yield TensorSpec(name=part, shape=tuple(shape.shape), dtype=dtype)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        return full_tensors(live_tensors(self._model), self._dtype)

    def _as_sent(self, gathered: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Bring gathered tensors into a checkpoint's form, each when it is asked for: whoever drops them need not.

        The scales of the KV cache come after them.
        """
        for name, tensor in gathered:
            for part, value in self._names.parts(name, tensor):
                yield from self._caster.tensors(part, value)
        for name, scale in self._kv_scales.items():
            yield name, torch.tensor(scale, dtype=torch.float32)

    def _open(self, version: int) -> None:
        if self._sender is None:
            raise StateError("send_weights was called before open_refit_listener")
        self._sender.open(self.manifest(), version)

    def _transfer(self, gathered: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        assert self._sender is not None
        try:
            return asdict(self._sender.transfer(self._as_sent(gathered)))
        finally:
            _drain(gathered)

    def _rank_zero_says(self, act: Any, meanwhile: Any = None) -> Any:
        """Run ``act`` on rank 0 and ``meanwhile`` elsewhere; return rank 0's result or error on every rank."""
        box: list[Any] = [None]
        if self._rank == 0:
            try:
                box[0] = act()
            except NemoRLError as error:
                box[0] = error
            except (RuntimeError, OSError, ValueError) as error:
                # Torch's own errors too have to reach the other ranks, or they would wait for a word that never comes.
                box[0] = RefitError(f"{type(error).__name__}: {error}", cause=str(error))
        elif meanwhile is not None:
            meanwhile()
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]


def _drain(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Gather what is left, and drop it."""
    for _ in tensors:
        pass


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
