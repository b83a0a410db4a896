# SPDX-License-Identifier: Apache-2.0
"""The receiving half of a refit inside every rank of a vLLM engine; the generation worker calls it by collective RPC.

Every answer is a JSON text: plain data has to cross vLLM's own process boundaries, and an exception would arrive there
without its type and fields.
"""

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

from nemo_rl_core.errors import NemoRLError, RefitError, WeightsInvalidError
from nemo_rl_core.refit.digest import set_digest
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_vllm.live_weights import LiveWeights

__all__ = ["VllmInternalWorkerExtension"]


class VllmInternalWorkerExtension:
    """What ``worker_extension_cls`` adds to vLLM's worker; the names have a prefix that no worker of theirs uses."""

    def nemo_rl_prepare(self, settings: str) -> str:
        """Look at the live model and make the receiver.

        Args:
            settings: JSON with ``first_rank`` and ``num_ranks`` of this replica, ``num_receivers`` over all replicas,
                ``refit`` as arguments of ``RefitSettings``, ``owner``, the replica's name, ``kv_scales``, the live names of
                the scales that each refit brings, ``fp8_weights``, the modules whose weights come in FP8, and ``graphs``, whether the engine replays CUDA graphs.

        Returns:
            JSON with ``tensors``, the number of checkpoint tensors that the model is made of, and ``pid``, or an error.
        """
        worker: Any = self

        def prepare() -> dict[str, Any]:
            given = json.loads(settings)
            worker._nemo_rl_weights = LiveWeights(
                worker.get_model(),
                rank=worker.rank,
                num_ranks=given["num_ranks"],
                kv_scales=given["kv_scales"],
                fp8_weights=given["fp8_weights"],
                graphs=given["graphs"],
            )
            worker._nemo_rl_receiver = RefitReceiver(
                rank=given["first_rank"] + worker.rank,
                num_receivers=given["num_receivers"],
                settings=RefitSettings(**given["refit"]),
                device_id=f"{given['owner']}:{worker.rank}",
            )
            return {"tensors": len(worker._nemo_rl_weights.contents), "pid": os.getpid()}

        return _answer(prepare)

    def nemo_rl_receive(self, address: str, caches_dropped: bool) -> str:
        """Take part in one refit.

        Args:
            address: ``host:port`` of the sender's listener.
            caches_dropped: Whether the engine's prefix cache is empty and nothing runs that could fill it.

        Returns:
            JSON with ``version``, ``bytes``, ``tensors``, ``seconds`` and ``digest``, or an error.
        """
        worker: Any = self

        def receive() -> dict[str, Any]:
            worker._nemo_rl_weights.begin(caches_dropped=caches_dropped)
            report = worker._nemo_rl_receiver.receive(address, worker._nemo_rl_weights)
            return {
                "version": report.version,
                "bytes": report.num_bytes,
                "tensors": report.num_tensors,
                "seconds": report.seconds,
                "digest": report.digest,
            }

        return _answer(receive)

    def nemo_rl_version(self) -> str:
        """Return JSON with the ``version`` of the live weights, or the error that says why there is none."""
        worker: Any = self

        def version() -> dict[str, Any]:
            committed = worker._nemo_rl_receiver.require_valid()
            if worker._nemo_rl_weights.version != committed:
                raise WeightsInvalidError(
                    f"the refit to version {committed} was not finished in the engine, whose weights have version "
                    f"{worker._nemo_rl_weights.version}; refit again"
                )
            return {"version": committed}

        return _answer(version)

    def nemo_rl_invalidate(self, cause: str) -> str:
        """Refuse to generate until the next refit."""
        worker: Any = self

        def invalidate() -> dict[str, Any]:
            worker._nemo_rl_receiver.invalidate(cause)
            return {}

        return _answer(invalidate)

    def nemo_rl_weights_digest(self) -> str:
        """Return JSON with the ``digest`` of the live weights, in checkpoint names."""
        worker: Any = self

        def digest() -> dict[str, Any]:
            weights = worker._nemo_rl_weights
            return {"digest": set_digest(weights.contents, weights.live_digests())}

        return _answer(digest)

    def nemo_rl_close(self) -> str:
        """Drop the receiver's connections."""
        worker: Any = self

        def close() -> dict[str, Any]:
            worker._nemo_rl_receiver.close()
            return {}

        return _answer(close)


def _answer(act: Callable[[], dict[str, Any]]) -> str:
    """Run one call and put its result, or what it raised, into JSON."""
    try:
        return json.dumps(act())
    except Exception as error:  # noqa: BLE001 - a process boundary: whatever it is has to arrive as plain data
        fields = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        if isinstance(error, RefitError):
            fields |= {"cause": error.cause, "phase": error.phase, "culprit": error.culprit}
        return json.dumps({"error": fields, "ours": isinstance(error, NemoRLError)})
