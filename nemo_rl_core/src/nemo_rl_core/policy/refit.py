# SPDX-License-Identifier: Apache-2.0
"""A refit as the driver sees it: both sides started together, both awaited, the first cause raised."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.errors import NemoRLError, RefitError, ScaleNameError, WorkerError
from nemo_rl_core.fp8.model_description import ModelDescription
from nemo_rl_core.policy.generation import Generation
from nemo_rl_core.policy.policy import Policy
from nemo_rl_core.refit.settings import RefitSettings

__all__ = ["RefitOutcome", "Refitter"]

#: Seconds beyond the protocol's own deadlines before the driver gives a side up.
SLACK_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RefitOutcome:
    """What a completed refit did.

    Attributes:
        version: The version that the generation workers report now.
        num_bytes: Bytes of one copy of the weights.
        seconds: Wall time on the driver.
        digest: Digest of the weights, the same on both sides; None if digests are off.
    """

    version: int
    num_bytes: int
    seconds: float
    digest: str | None


class Refitter:
    """Moves the policy's weights into the generation workers, each time under the next version."""

    def __init__(
        self,
        policy: Policy,
        generation: Generation,
        settings: RefitSettings,
        *,
        attention: ModelDescription | None = None,
        include_q: bool = True,
    ) -> None:
        """Open the listener on train rank 0.

        Args:
            policy: The train side.
            generation: The generation side.
            settings: Sizes and deadlines.
            attention: Which live modules have FP8 scales; None where the engine's KV cache is not FP8.
            include_q: Whether the engine was told that q has scales too.
        """
        self._policy, self._generation, self._settings = policy, generation, settings
        self._attention, self._include_q = attention, include_q
        self._address = policy.open_refit_listener(generation.num_receiving_ranks(), settings)
        self._next_version = 0

    @property
    def next_version(self) -> int:
        """The version that the next refit will give."""
        return self._next_version

    def refit(self, kv_scales: Mapping[str, float] | None = None) -> RefitOutcome:
        """Run one refit to its end on both sides.

        A version is never given twice, also when its refit has failed.

        Args:
            kv_scales: Scales of an FP8 KV cache by live name: k and v, or q, k and v, of every attention module.

        Raises:
            ScaleNameError: If the scales are not exactly the engine's, or one is no scale; nothing has been sent then.
            RefitError: If it failed; the message is the first cause. The next call starts afresh.
        """
        self._check_scales(kv_scales)
        version, self._next_version = self._next_version, self._next_version + 1
        started = time.monotonic()
        sending = self._policy.start_sending(version, kv_scales)
        receiving = self._generation.start_receiving(self._address)
        deadline_s = self._settings.rendezvous_timeout_s + self._settings.transfer_timeout_s + SLACK_S
        received, receiver_error = _outcome(receiving.get_results, deadline_s)
        if receiver_error is not None and _is_death(receiver_error):
            # The train side would wait for a rank that never comes until its own deadline; nobody has to wait for that.
            raise receiver_error
        sent, sender_error = _outcome(sending.get_results, deadline_s)
        errors = [error for error in (receiver_error, sender_error) if error is not None]
        if errors:
            raise _first_cause(errors)
        assert sent is not None
        assert received is not None
        _check(version, sent[0], received)
        return RefitOutcome(
            version=version,
            num_bytes=sent[0]["num_bytes"],
            seconds=time.monotonic() - started,
            digest=sent[0]["digest"],
        )

    def _check_scales(self, kv_scales: Mapping[str, float] | None) -> None:
        if self._attention is not None:
            # Left out, they would stay those of other weights, or 1.0: vLLM takes both without a word.
            self._attention.require(kv_scales or {}, what="given", include_q=self._include_q)
            self._attention.from_vllm(kv_scales or {})
        elif kv_scales:
            raise ScaleNameError(
                f"the engine's KV cache is not FP8, so it takes no scales, got {len(kv_scales)}, the first "
                f"{next(iter(kv_scales))!r}; set policy.generation.vllm_cfg.kv_cache_dtype, or leave them out"
            )


def _outcome(
    get_results: Callable[[float | None], list[Any]], timeout_s: float
) -> tuple[list[Any] | None, NemoRLError | None]:
    """Wait for one side; its error is a value, so that the other side is awaited too."""
    try:
        return get_results(timeout_s), None
    except NemoRLError as error:
        return None, error


def _first_cause(errors: list[NemoRLError]) -> NemoRLError:
    """Return the error to raise: a dead worker before the refit errors that its death caused."""
    return next(filter(_is_death, errors), errors[0])


def _is_death(error: NemoRLError) -> bool:
    """Say whether a worker is gone, as opposed to one that reports how the refit failed."""
    return isinstance(error, WorkerError) and "Refit" not in error.cause_type


def _check(version: int, sent: dict[str, Any], received: list[dict[str, Any]]) -> None:
    """Raise unless every replica reports the version, the bytes and the digest that were sent."""
    for replica, report in enumerate(received):
        for key, expected in (("version", version), ("bytes", sent["num_bytes"]), ("digest", sent["digest"])):
            if report[key] != expected:
                raise RefitError(
                    f"replica {replica} reports {key} {report[key]!r} after a refit that sent {expected!r}",
                    cause=f"{key} differs",
                    phase="finish",
                    culprit=f"generation replica {replica}",
                )
