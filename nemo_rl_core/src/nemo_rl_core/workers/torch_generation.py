# SPDX-License-Identifier: Apache-2.0
"""The torch generation worker: batched decoding of a HF model with a KV cache, weights by refit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl_core.data.folders import local_folders
from nemo_rl_core.data.tokenizers import build_tokenizer
from nemo_rl_core.errors import DataError, GenerationError, ModelError
from nemo_rl_core.protocols.generation import Completion, GenerationRequest, SamplingParams
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings
from nemo_rl_core.refit.digest import digests_of, set_digest
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.workers.devices import describe_worker, device_identity
from nemo_rl_core.workers.model_sink import ModelSink
from nemo_rl_core.workers.models import random_model
from nemo_rl_core.workers.output_head import compute_head_in_float32
from nemo_rl_core.workers.sampling import RowSampler

__all__ = ["TorchGenerationWorker"]

#: Random weights of a generation worker come from another seed than the policy's, so that they cannot pass for
#: refitted ones.
DUMMY_SEED_OFFSET = 1_000_003

#: Requests decoded at one time, unless ``torch_cfg`` says otherwise.
DEFAULT_MAX_BATCH_SIZE = 512


class TorchGenerationWorker:
    """One replica of the torch backend; a ``GenerationWorker``."""

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        """Build the model with random weights, which no request gets to see.

        Args:
            settings: What to build.
            rank: Index of this replica.
            world_size: Number of replicas.
            local_rank: Index on its node; with CUDA the device's index.
            device: ``cpu`` or ``cuda``.

        Raises:
            ModelError: If the model cannot be built.
        """
        self.settings = settings
        self.rank, self.world_size = rank, world_size
        self.device = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
        with local_folders(settings) as local:
            self._model = _build(local.model, self.device)
            self._tokenizer = build_tokenizer(local.tokenizer)
        self._max_batch_size = int(settings.options.get("max_batch_size", DEFAULT_MAX_BATCH_SIZE))
        self._stream = torch.Generator().manual_seed(settings.seed * 7919 + rank)
        self._sink = ModelSink(self._model)
        self._receiver = RefitReceiver(
            rank=rank + 1,
            num_receivers=world_size,
            settings=RefitSettings(**settings.refit),
            device_id=device_identity(self.device, f"generation-{rank}"),
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Continue each prompt once, in the order of the requests.

        Raises:
            WeightsInvalidError: If no refit has completed since the weights became invalid.
            DataError: If a prompt leaves no room in the context.
            GenerationError: If the model failed.
        """
        version = self._receiver.require_valid()
        for index, request in enumerate(requests):
            self._check(index, request)
        completions: list[Completion] = []
        for start in range(0, len(requests), self._max_batch_size):
            batch = requests[start : start + self._max_batch_size]
            try:
                rows = self._decode(batch)
            except Exception as error:  # the engine's boundary: whatever it is leaves as plain data
                raise GenerationError(
                    f"generation failed: {type(error).__name__}: {error}", type_name=type(error).__qualname__
                ) from error
            completions += [row.completion(version) for row in rows]
        return completions

    def num_receiving_ranks(self) -> int:
        """Return 1: a replica is one process."""
        return 1

    def receive_weights(self, address: str) -> Mapping[str, Any]:
        """Take part in one refit; see ``GenerationWorker``."""
        report = self._receiver.receive(address, self._sink)
        return {
            "version": report.version,
            "bytes": report.num_bytes,
            "tensors": report.num_tensors,
            "seconds": report.seconds,
            "digest": report.digest,
        }

    def weights_digest(self) -> str:
        """Return the digest of the live weights."""
        return set_digest(self._sink.manifest(), digests_of(self._sink.live_tensors()))

    def describe(self) -> Mapping[str, str]:
        """Return what ``summary.json`` says of this worker."""
        return describe_worker("torch", self.device)

    def shutdown(self) -> None:
        """Close the receiver; calling it twice is fine."""
        self._receiver.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _check(self, index: int, request: GenerationRequest) -> None:
        limit = self.settings.model.max_total_sequence_length
        if not request.prompt_ids:
            raise DataError(f"request {index} has an empty prompt; a prompt needs at least one token")
        if len(request.prompt_ids) >= limit:
            raise DataError(
                f"request {index} has a prompt of {len(request.prompt_ids)} tokens, which leaves no room in a context of "
                f"{limit}; shorten the prompt or raise policy.max_total_sequence_length"
            )

    @torch.inference_mode()
    def _decode(self, requests: Sequence[GenerationRequest]) -> list["_Row"]:
        """Decode one batch to its end; finished rows leave the batch at once."""
        rows = [_Row.of(request, self.settings.model.max_total_sequence_length) for request in requests]
        sampler = RowSampler([r.sampling for r in requests], self._stream, self.device)
        live = list(rows)
        ids, mask = self._left_pad(requests)
        cache = DynamicCache(config=self._model.config)
        while live:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            logits = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            tokens, logprobs = sampler.draw(logits)
            for row, token, logprob in zip(live, tokens, logprobs, strict=True):
                row.append(token, logprob, self._tokenizer)
            kept = [i for i, row in enumerate(live) if row.finish_reason is None]
            if len(kept) < len(live) and kept:
                index = torch.tensor(kept, device=self.device)
                cache.batch_select_indices(index)
                mask = mask[index]
                sampler.keep(kept)
            live = [live[i] for i in kept]
            ids = torch.tensor([[row.tokens[-1]] for row in live], device=self.device)
            mask = torch.nn.functional.pad(mask[: len(live)], (0, 1), value=1)
        return rows

    def _left_pad(self, requests: Sequence[GenerationRequest]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask [B, S], padded on the left so that every row's next token stands in one column."""
        width = max(len(r.prompt_ids) for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros(len(requests), width, dtype=torch.long)
        for i, request in enumerate(requests):
            ids[i, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[i, width - len(request.prompt_ids) :] = 1
        return ids.to(self.device), mask.to(self.device)


@dataclass(kw_only=True)
class _Row:
    """A request while it is decoded."""

    sampling: SamplingParams
    budget: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None

    @classmethod
    def of(cls, request: GenerationRequest, context: int) -> "_Row":
        budget = min(request.sampling.max_new_tokens, context - len(request.prompt_ids))
        return cls(sampling=request.sampling, budget=budget)

    def append(self, token: int, logprob: float, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take a token and find out whether it ends the row."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.sampling.stop_token_ids or self._ends_with_stop_string(tokenizer):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.budget:
            self.finish_reason = "length"

    def _ends_with_stop_string(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Say whether the last token completed a stop string.

        Only the tail is decoded: a token is at least one byte, so the string lies in as many tokens as it has bytes. A
        few more keep a character that is cut at the tail's start out of it.
        """
        if not self.sampling.stop_strings:
            return False
        tail = max(len(stop.encode()) for stop in self.sampling.stop_strings) + 8
        text = tokenizer.decode(self.tokens[-tail:])
        return any(stop in text for stop in self.sampling.stop_strings)

    def completion(self, version: int) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            weight_version=version,
        )


def _build(settings: ModelSettings, device: torch.device) -> PreTrainedModel:
    """Build the architecture in its compute type; random weights, in eval mode."""
    dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
    model: Any = random_model(settings, dtype, seed_offset=DUMMY_SEED_OFFSET)
    model.config.use_cache = True
    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers if not _can_shrink(layer)}
    if kinds:
        raise ModelError(
            f"the torch backend cannot decode {type(model).__name__}: its cache holds {', '.join(sorted(kinds))}, from "
            "which finished sequences cannot be taken out; choose another backend"
        )
    if settings.float32_head:
        compute_head_in_float32(model)
    return model.to(device).eval().requires_grad_(False)


def _can_shrink(cache_layer: object) -> bool:
    return hasattr(cache_layer, "batch_select_indices")
