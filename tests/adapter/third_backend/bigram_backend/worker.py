# SPDX-License-Identifier: Apache-2.0
"""A table of logits as a model, and a worker that samples from it; Python and a little torch, nothing else of core's.

The methods are small, so that a test can take one of them away.
"""

import math
import os
import random
import socket
import sys

import torch

from nemo_rl_core.data.tokenizers import build_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.protocols.generation import Completion
from nemo_rl_core.refit.digest import digests_of, set_digest
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.settings import RefitSettings


class Table:
    """The model, which is also what a refit loads into: logits [V, V] of the next token after each token."""

    def __init__(self, vocab, seed):
        stream = torch.Generator().manual_seed(seed)
        self.live = {
            "table": 2 * torch.randn(vocab, vocab, generator=stream),
            "bias": torch.randn(vocab, generator=stream),
        }

    def row(self, token):
        """Logits after a token."""
        return (self.live["table"][token] + self.live["bias"]).tolist()

    def manifest(self):
        return Manifest.from_tensors(self.live.items())

    def load(self, tensors):
        for name, tensor in tensors:
            self.live[name].copy_(tensor)

    def finish(self, version):
        """No cache."""

    def live_tensors(self):
        yield from self.live.items()


class BigramTeacher:
    """The same model on the train side."""

    def __init__(self, vocab, seed):
        self.model = Table(vocab, seed)

    def tensors(self):
        return list(self.model.live_tensors())

    def logits(self, ids):
        return torch.tensor([self.model.row(token) for token in ids])


class BigramWorker:
    """A GenerationWorker."""

    def __init__(self, settings, *, rank=0, world_size=1, local_rank=0, device="cpu"):
        self.limit = settings.model.max_total_sequence_length
        self.tokenizer = build_tokenizer(settings.tokenizer)
        self.model = Table(len(self.tokenizer), seed=-1 - rank)
        self.stream = random.Random(settings.seed * 7919 + rank)
        self.receiver = RefitReceiver(
            rank=rank + 1,
            num_receivers=world_size,
            settings=RefitSettings(**settings.refit),
            device_id=f"cpu:{socket.gethostname()}:{os.getpid()}:bigram-{rank}",
        )

    def generate(self, requests):
        version = self.receiver.require_valid()
        for index, request in enumerate(requests):
            if not 0 < len(request.prompt_ids) < self.limit:
                raise DataError(
                    f"request {index} has a prompt of {len(request.prompt_ids)} tokens; it takes 1 to {self.limit - 1}"
                )
        return [self.continued(request, version) for request in requests]

    def continued(self, request, version):
        sampling, tokens, logprobs, reason = request.sampling, [], [], "length"
        stream = self.stream_of(sampling)
        while len(tokens) < min(sampling.max_new_tokens, self.limit - len(request.prompt_ids)):
            token, logprob = self.draw([*request.prompt_ids, *tokens], sampling, stream)
            tokens.append(token)
            logprobs.append(logprob)
            if self.stops(tokens, sampling):
                reason = "stop"
                break
        return self.completion(tokens, logprobs, reason, version)

    def completion(self, tokens, logprobs, reason, version):
        return Completion(
            token_ids=tuple(tokens), logprobs=tuple(logprobs), finish_reason=reason, weight_version=version
        )

    def stream_of(self, sampling):
        return self.stream if sampling.seed is None else random.Random(sampling.seed)

    def draw(self, ids, sampling, stream):
        """One token after all these, and its logprob."""
        logprobs = self.logprobs(self.model.row(ids[-1]), sampling)
        if sampling.temperature == 0:
            token = max(logprobs, key=logprobs.__getitem__)
        else:
            (token,) = stream.choices(list(logprobs), [math.exp(value) for value in logprobs.values()])
        return token, logprobs[token]

    def logprobs(self, logits, sampling):
        """Logprobs by token of what can be drawn, the most likely one first."""
        if sampling.temperature == 0:
            return self.normal(dict(enumerate(logits)))  # nothing is drawn, so nothing is cut
        scores = self.normal({token: value / sampling.temperature for token, value in enumerate(logits)})
        if sampling.top_k:
            scores = self.normal(dict(list(scores.items())[: sampling.top_k]))
        kept, mass = {}, 0.0
        for token, value in scores.items():
            if sampling.top_p < 1 and mass >= sampling.top_p:
                break
            kept[token] = value
            mass += math.exp(value)
        return self.normal(kept)

    def normal(self, scores):
        total = math.log(sum(math.exp(value) for value in scores.values()))
        return {token: min(value - total, 0.0) for token, value in sorted(scores.items(), key=lambda item: -item[1])}

    def stops(self, tokens, sampling):
        if tokens[-1] in sampling.stop_token_ids:
            return True
        return bool(sampling.stop_strings) and any(s in self.tokenizer.decode(tokens) for s in sampling.stop_strings)

    def num_receiving_ranks(self):
        return 1

    def receive_weights(self, address):
        report = self.receiver.receive(address, self.model)
        return {
            "version": report.version,
            "bytes": report.num_bytes,
            "tensors": report.num_tensors,
            "seconds": report.seconds,
            "digest": report.digest,
        }

    def weights_digest(self):
        return set_digest(self.model.manifest(), digests_of(self.model.live_tensors()))

    def describe(self):
        return {
            "backend": "bigram",
            "engine_version": "bigram 0.3.0",
            "interpreter": sys.executable,
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
        }

    def shutdown(self):
        self.receiver.close()
