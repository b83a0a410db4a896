# SPDX-License-Identifier: Apache-2.0
"""What a generation backend is: requests in, completions out, weights by refit.

These are plain data and Protocols. A completion holds Python numbers and strings only, so nothing that crosses
from a generation worker needs the engine, or torch, to be unpickled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from nemo_rl_core.errors import DataError

__all__ = ["PROTOCOL_NUMBER", "BackendSpec", "Completion", "GenerationRequest", "GenerationWorker", "SamplingParams"]

#: Rises when a change of these types breaks older adapters.
PROTOCOL_NUMBER = 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_new_tokens: At most this many tokens are sampled, at least 1.
        temperature: Logits are divided by it; 0 means greedy.
        top_p: Nucleus mass in (0, 1]; 1 switches it off.
        top_k: Number of most likely tokens kept; 0 switches it off.
        stop_token_ids: Sampling ends after one of these tokens, which is part of the completion.
        stop_strings: Sampling ends after the token that completes one of these strings in the decoded completion.
        seed: Seed of this request alone; None draws from the worker's own stream.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            DataError: If a field is out of its range; the message names field and value.
        """
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature < float("inf"), "finite and not negative"),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "not negative (0 switches it off)"),
            "stop_token_ids": (all(token >= 0 for token in self.stop_token_ids), "not negative"),
            "stop_strings": ("" not in self.stop_strings, "free of empty strings"),
        }
        for field, (holds, rule) in rules.items():
            if not holds:
                raise DataError(f"sampling parameter {field} must be {rule}, got {getattr(self, field)!r}")


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt to be continued once.

    Attributes:
        prompt_ids: Token ids of the prompt, at least one.
        sampling: How to sample.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What was sampled for one request.

    Attributes:
        token_ids: Sampled token ids, the stop token included; N of them.
        logprobs: Natural-log probability of each sampled token under the distribution that it was drawn from
            (after temperature, top-k and top-p); N of them. A greedy request, which draws nothing, reports that of
            temperature 1 without cuts.
        finish_reason: ``stop`` after a stop id or string, ``length`` when cut off.
        weight_version: Version of the weights that sampled it, as the worker itself knows it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    weight_version: int


@runtime_checkable
class GenerationWorker(Protocol):
    """One replica of a generation engine, as an adapter implements it.

    Every result is plain data; an engine's exception leaves as ``GenerationError``.
    """

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Continue each prompt once; results are in the order of the requests.

        Raises:
            WeightsInvalidError: If no refit has completed since the weights became invalid.
            GenerationError: If the engine failed.
        """
        ...

    def num_receiving_ranks(self) -> int:
        """Return how many ranks of this replica take part in a refit (1, or the engine's tensor parallel size)."""
        ...

    def receive_weights(self, address: str) -> Mapping[str, Any]:
        """Take part in one refit with every rank of this replica.

        Receiving ranks are counted from 1 over all replicas, in the order of the replicas; rank 0 is the sender.

        Args:
            address: ``host:port`` of the sender's listener.

        Returns:
            The report as plain data: ``version``, ``bytes``, ``tensors``, ``seconds``, ``digest``.

        Raises:
            RefitError: If the refit failed.
        """
        ...

    def weights_digest(self) -> str:
        """Return the digest of the live weights."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Return ``backend``, ``engine_version``, ``interpreter``, ``host`` and ``pid`` of this worker."""
        ...

    def shutdown(self) -> None:
        """Free what the engine holds; calling it twice is fine."""
        ...


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """What an entry point of the group ``nemo_rl_core.generation`` names.

    Attributes:
        name: Name of the backend, as in ``policy.generation.backend``.
        protocol: The ``PROTOCOL_NUMBER`` that it was written for.
        environment: Name of the environment its workers run in.
        cpu_environment: Name of the environment its workers run in on a machine without a GPU, where that is another
            one; "" for the same.
        worker_class: ``module:Class`` of a ``GenerationWorker``; imported inside the worker only.
        config_section: Key under ``policy.generation`` that belongs to it, e.g. ``vllm_cfg``.
        config_schema: ``module:Class`` of the pydantic model that validates that section; imported only when the
            backend is chosen.
        settings_check: ``module:function`` that takes the ``GenerationSettings`` and raises ``ConfigError`` for what the
            engine could not run; called in the driver, so its module is light. "" for no such check.
        num_ranks: ``module:function`` that takes the checked options of the section and returns how many ranks one
            replica has, each on a slot of its own; called in the driver like ``settings_check``. "" for one.
        fp8_kv_cache: ``module:function`` that takes the checked options of the section and says whether the KV cache is
            FP8, so that each refit brings its scales; called in the driver like ``settings_check``. "" for never.
        fp8_weights: ``module:function`` that takes the ``GenerationSettings`` and a function that returns the shapes of the
            model's matrices by module name, as in a checkpoint; it returns the ``Fp8Weights`` that the engine is to compute
            with, or None for the model's precision, and raises ``ConfigError`` where the engine could not; called in the
            driver like ``settings_check``. "" for never.
        engine: Name of the engine's distribution, or "" where core itself is the engine.
        engine_range: PEP 440 specifier of the engine versions that the adapter supports.
        install_hint: The pip command that brings what is missing.
    """

    name: str
    protocol: int
    environment: str
    worker_class: str
    config_section: str
    config_schema: str
    cpu_environment: str = ""
    settings_check: str = ""
    num_ranks: str = ""
    fp8_kv_cache: str = ""
    fp8_weights: str = ""
    engine: str = ""
    engine_range: str = ""
    install_hint: str = ""
