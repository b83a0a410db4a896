# SPDX-License-Identifier: Apache-2.0
"""Generation workers that are wrong in one way each, with the checks that have to find it."""

import random
from dataclasses import replace

import torch

from nemo_rl_core.errors import DataError, RefitError, RefitRefusedError, WeightsInvalidError
from tests.adapter.third_backend.bigram_backend.worker import BigramWorker

_METHODS = "it has the protocol's methods"
_DESCRIBES = "it describes itself"
_RANKS = "it has receiving ranks"
_ORDER = "results are in the order of the requests"
_MANY = "tokens and logprobs are equally many"
_ZERO = "logprobs are at most 0"
_PLAIN = "logprobs equal a teacher-forced pass"
_TEMPERATURE = "logprobs are those after the temperature"
_TOP_K = "logprobs are those after top-k"
_TOP_P = "logprobs are those after top-p"
_ALL_THREE = "logprobs are those after all three"
_DRAWS = "draws follow the distribution"
_GREEDY = "greedy is the most likely token"
_SEEDS = "seeds reproduce alone and in any batch"
_UNSEEDED = "draws differ without a seed"
_IDS = "stop ids end their own request"
_STRINGS = "stop strings end their own request"
_LENGTH = "cut-off completions say length"
_CONTEXT = "the context cuts off"
_ROOM = "prompts without room are refused"
_DATA = "results are plain data"
_ERRORS = "errors are plain data"
_BEFORE = "nothing is sampled before the first refit"
_REPORT = "a refit is reported by both sides"
_VERSIONS = "versions are the last refit's"
_DIGESTS = "digests tell weights apart"
_CACHE = "no cache outlives a refit"
_REFUSED = "a refused refit changes nothing"
_FAILED = "nothing is sampled after a failed refit"
_HEALS = "a later refit heals"
_CLOSES = "it closes twice and generates no more"


class ByLength(BigramWorker):
    """Returns results sorted by the prompt's length, as engines batch them."""

    def generate(self, requests):
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        return super().generate([requests[i] for i in order])


class Reversed(BigramWorker):
    def generate(self, requests):
        return super().generate(requests)[::-1]


class LosesOne(BigramWorker):
    """Drops the last completion of a large batch."""

    def generate(self, requests):
        return super().generate(requests)[:500]


class ForgetsALogprob(BigramWorker):
    """Has no logprob for the last token of a long completion."""

    def completion(self, tokens, logprobs, reason, version):
        return super().completion(tokens, logprobs[:5], reason, version)


class OneTokenMore(BigramWorker):
    def continued(self, request, version):
        sampling = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens + 1)
        return super().continued(replace(request, sampling=sampling), version)


class Positive(BigramWorker):
    """Rounding pushes logprobs of sure tokens above 0."""

    def normal(self, scores):
        return {token: value + 1e-6 for token, value in super().normal(scores).items()}


class RawLogprobs(BigramWorker):
    """Reports logprobs before temperature and cuts, as engines do by default."""

    def draw(self, ids, sampling, stream):
        token, _ = super().draw(ids, sampling, stream)
        plain = replace(sampling, temperature=1.0, top_k=0, top_p=1.0)
        return token, self.logprobs(self.model.row(ids[-1]), plain)[token]


class NoTemperature(BigramWorker):
    def logprobs(self, logits, sampling):
        return super().logprobs(logits, replace(sampling, temperature=float(sampling.temperature > 0)))


class NoTopK(BigramWorker):
    def logprobs(self, logits, sampling):
        return super().logprobs(logits, replace(sampling, top_k=0))


class NoTopP(BigramWorker):
    def logprobs(self, logits, sampling):
        return super().logprobs(logits, replace(sampling, top_p=1.0))


class Rounded(BigramWorker):
    """Keeps logprobs in half precision."""

    def completion(self, tokens, logprobs, reason, version):
        return super().completion(tokens, [torch.tensor(v).bfloat16().item() for v in logprobs], reason, version)


class OfTheBestToken(BigramWorker):
    """Reports the logprob of the most likely token, not of the sampled one."""

    def draw(self, ids, sampling, stream):
        token, _ = super().draw(ids, sampling, stream)
        return token, max(self.logprobs(self.model.row(ids[-1]), sampling).values())


class DrawsSharper(BigramWorker):
    """Draws from another distribution than the one it reports: right logprobs of wrong tokens."""

    def draw(self, ids, sampling, stream):
        if sampling.temperature == 0:
            return super().draw(ids, sampling, stream)
        right = self.logprobs(self.model.row(ids[-1]), sampling)
        token, _ = super().draw(ids, replace(sampling, temperature=sampling.temperature * 0.8), stream)
        return token, right[token]


class GreedyDraws(BigramWorker):
    def draw(self, ids, sampling, stream):
        warm = replace(sampling, temperature=sampling.temperature or 1.0)
        return super().draw(ids, warm, stream)


class GreedyIsSure(BigramWorker):
    """Says 0 for greedy tokens, which tells nothing about the model."""

    def draw(self, ids, sampling, stream):
        token, logprob = super().draw(ids, sampling, stream)
        return token, logprob if sampling.temperature else 0.0


class NoSeeds(BigramWorker):
    def stream_of(self, sampling):
        return self.stream


class SeedsByPlace(BigramWorker):
    """Mixes the place in the batch into the seed."""

    def generate(self, requests):
        self.places = iter(range(len(requests)))
        return super().generate(requests)

    def stream_of(self, sampling):
        place = next(self.places)
        return self.stream if sampling.seed is None else random.Random(sampling.seed + 100 * place)


class OneSeed(BigramWorker):
    """Takes the same stream for every request that has a seed."""

    def stream_of(self, sampling):
        return self.stream if sampling.seed is None else random.Random(5)


class AlwaysSeeded(BigramWorker):
    def stream_of(self, sampling):
        return random.Random(sampling.seed or 0)


class SeededCalls(BigramWorker):
    """Begins its own stream anew with every call."""

    def generate(self, requests):
        self.stream = random.Random(1)
        return super().generate(requests)


class StopIsCutOff(BigramWorker):
    """Leaves the stop token out, as text generation does."""

    def completion(self, tokens, logprobs, reason, version):
        if reason == "stop":
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        return super().completion(tokens, logprobs, reason, version)


class SharedStops(BigramWorker):
    """Uses the stops of one request for the whole batch."""

    def generate(self, requests):
        self.ids = tuple(i for r in requests for i in r.sampling.stop_token_ids)
        self.texts = tuple(s for r in requests for s in r.sampling.stop_strings)
        return super().generate(requests)

    def stops(self, tokens, sampling):
        return super().stops(tokens, replace(sampling, stop_token_ids=self.ids, stop_strings=self.texts))


class NoStopIds(BigramWorker):
    def stops(self, tokens, sampling):
        return super().stops(tokens, replace(sampling, stop_token_ids=()))


class NoStopStrings(BigramWorker):
    def stops(self, tokens, sampling):
        return super().stops(tokens, replace(sampling, stop_strings=()))


class StopStringOfOneToken(BigramWorker):
    """Looks for a stop string in each token by itself."""

    def stops(self, tokens, sampling):
        return super().stops(tokens[-1:], sampling)


class EndsAtItsOwnToken(BigramWorker):
    """Has an end-of-sequence token of its own, which nobody asked for."""

    def stops(self, tokens, sampling):
        return tokens[-1] == 1 or super().stops(tokens, sampling)


class LimitComesFirst(BigramWorker):
    """Says length where a stop was the last token that was allowed."""

    def completion(self, tokens, logprobs, reason, version):
        return super().completion(tokens, logprobs, "length" if len(tokens) == 3 else reason, version)


class AlwaysStop(BigramWorker):
    def completion(self, tokens, logprobs, reason, version):
        return super().completion(tokens, logprobs, "stop", version)


class NoContext(BigramWorker):
    """Generates beyond the context."""

    def continued(self, request, version):
        limit, self.limit = self.limit, 10_000
        try:
            return super().continued(request, version)
        finally:
            self.limit = limit


class CutsPrompts(BigramWorker):
    """Cuts a prompt that is too long instead of refusing it."""

    def generate(self, requests):
        return super().generate([replace(r, prompt_ids=r.prompt_ids[-self.limit + 1 :]) for r in requests])


class OtherError(BigramWorker):
    """Refuses a prompt with an error that callers do not look for."""

    def generate(self, requests):
        try:
            return super().generate(requests)
        except DataError as error:
            raise ValueError(str(error)) from error


class Scalars(BigramWorker):
    """Gives tensors where numbers are wanted: they compare equal."""

    def completion(self, tokens, logprobs, reason, version):
        return super().completion(tokens, [torch.tensor(v, dtype=torch.float64) for v in logprobs], reason, version)


class Lists(BigramWorker):
    def completion(self, tokens, logprobs, reason, version):
        return replace(super().completion(tokens, logprobs, reason, version), token_ids=list(tokens))


class EngineError(DataError):
    """Of a module that a reader may not have."""


class OwnErrors(BigramWorker):
    """Lets an error of its own out."""

    def generate(self, requests):
        try:
            return super().generate(requests)
        except DataError as error:
            raise EngineError(str(error)) from error


class Eager(BigramWorker):
    """Generates with its random weights."""

    def generate(self, requests):
        try:
            return super().generate(requests)
        except WeightsInvalidError:
            return [self.continued(request, 0) for request in requests]


class GeneratesAfterAFailure(BigramWorker):
    """Goes on with whatever arrived when a refit failed."""

    failed = False

    def receive_weights(self, address):
        try:
            report = super().receive_weights(address)
        except RefitError as error:
            self.failed = not isinstance(error, RefitRefusedError)
            raise
        self.failed = False
        return report

    def generate(self, requests):
        if self.failed:
            return [self.continued(request, 0) for request in requests]
        return super().generate(requests)


class SwallowsFailures(BigramWorker):
    """Reports a refit that failed as one that worked."""

    def receive_weights(self, address):
        try:
            return super().receive_weights(address)
        except RefitRefusedError:
            raise
        except RefitError:
            return {"version": 0, "bytes": 0, "tensors": 0, "seconds": 0.0, "digest": ""}


class RefusalsInvalidate(BigramWorker):
    """Throws its weights away when it refuses others."""

    def receive_weights(self, address):
        try:
            return super().receive_weights(address)
        except RefitRefusedError as error:
            self.receiver.invalidate(str(error))
            raise


class StaleModel(BigramWorker):
    """Samples with a copy of the weights that the first refit brought: the load did not reach it."""

    copy = None

    def generate(self, requests):
        self.receiver.require_valid()
        live = self.model.live
        if self.copy is None:
            self.copy = {name: tensor.clone() for name, tensor in live.items()}
        self.model.live = self.copy
        try:
            return super().generate(requests)
        finally:
            self.model.live = live


class WarmCache(BigramWorker):
    """Keeps the first draws of long prompts over a refit, as a prefix cache does."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.cache = {}

    def draw(self, ids, sampling, stream):
        if len(ids) < 40 or sampling.temperature:
            return super().draw(ids, sampling, stream)
        if tuple(ids) not in self.cache:
            self.cache[tuple(ids)] = super().draw(ids, sampling, stream)
        return self.cache[tuple(ids)]


class CountsForItself(BigramWorker):
    """Numbers its refits by itself."""

    count = 0

    def receive_weights(self, address):
        report = super().receive_weights(address)
        self.count += 1
        return report

    def completion(self, tokens, logprobs, reason, version):
        return super().completion(tokens, logprobs, reason, self.count)


class StaleVersion(BigramWorker):
    """Says the version of its first refit for ever."""

    first = None

    def completion(self, tokens, logprobs, reason, version):
        self.first = self.first or version
        return super().completion(tokens, logprobs, reason, self.first)


class OneDigest(BigramWorker):
    """Remembers the digest of its first refit instead of reading the live weights."""

    first = None

    def weights_digest(self):
        self.first = self.first or super().weights_digest()
        return self.first


class NoDigest(BigramWorker):
    def receive_weights(self, address):
        report = super().receive_weights(address)
        del report["digest"]
        return report


class WrongCount(BigramWorker):
    def receive_weights(self, address):
        return {**super().receive_weights(address), "bytes": 1}


class NoRanks(BigramWorker):
    """Answers whether it has ranks, not how many."""

    def num_receiving_ranks(self):
        return True


class NoDigestMethod(BigramWorker):
    weights_digest = None


class Nameless(BigramWorker):
    def describe(self):
        return {key: value for key, value in super().describe().items() if key != "engine_version"}


class NumberedPid(BigramWorker):
    def describe(self):
        return {**super().describe(), "pid": 17}


class ClosesOnce(BigramWorker):
    def shutdown(self):
        super().shutdown()
        del self.receiver


class LivesOn(BigramWorker):
    """Goes on generating after its end."""

    def shutdown(self):
        """Frees nothing."""


#: Each worker with the checks that must not pass; every other one must.
FAULTS = {
    ByLength: {_ORDER, _PLAIN, _TEMPERATURE, _TOP_K, _TOP_P, _ALL_THREE, _SEEDS},
    Reversed: {
        _ORDER,
        _MANY,
        _PLAIN,
        _TEMPERATURE,
        _TOP_K,
        _TOP_P,
        _ALL_THREE,
        _GREEDY,
        _SEEDS,
        _IDS,
        _STRINGS,
        _LENGTH,
        _CACHE,
        _HEALS,
    },
    LosesOne: {_DRAWS},
    ForgetsALogprob: {_ORDER, _MANY, _PLAIN, _TEMPERATURE, _TOP_K, _TOP_P, _ALL_THREE, _GREEDY},
    OneTokenMore: {_ORDER, _MANY, _IDS, _STRINGS, _LENGTH},
    Positive: {_ZERO},
    RawLogprobs: {_TEMPERATURE, _TOP_K, _TOP_P, _ALL_THREE},
    NoTemperature: {_TEMPERATURE, _ALL_THREE, _DRAWS},
    NoTopK: {_TOP_K, _ALL_THREE, _DRAWS},
    NoTopP: {_TOP_P, _ALL_THREE},
    Rounded: {_ORDER, _PLAIN, _TEMPERATURE, _TOP_K, _TOP_P, _ALL_THREE, _GREEDY, _CONTEXT, _CACHE, _HEALS},
    OfTheBestToken: {_ORDER, _PLAIN, _TEMPERATURE, _TOP_K, _TOP_P, _ALL_THREE, _CONTEXT},
    DrawsSharper: {_DRAWS},
    GreedyDraws: {_GREEDY},
    GreedyIsSure: {_GREEDY, _CACHE, _HEALS},
    NoSeeds: {_SEEDS, _IDS, _STRINGS, _ROOM},
    SeedsByPlace: {_SEEDS, _IDS, _STRINGS},
    OneSeed: {_DRAWS, _SEEDS},
    AlwaysSeeded: {_UNSEEDED},
    SeededCalls: {_UNSEEDED},
    StopIsCutOff: {_IDS, _STRINGS},
    SharedStops: {_IDS, _STRINGS},
    NoStopIds: {_IDS},
    NoStopStrings: {_STRINGS},
    StopStringOfOneToken: {_STRINGS},
    EndsAtItsOwnToken: {_IDS, _STRINGS},
    LimitComesFirst: {_IDS, _STRINGS},
    AlwaysStop: {_IDS, _STRINGS, _LENGTH, _CONTEXT},
    NoContext: {_CONTEXT},
    CutsPrompts: {_ROOM},
    OtherError: {_ROOM},
    Scalars: {_DATA},
    Lists: {_DATA},
    OwnErrors: {_ERRORS},
    Eager: {_BEFORE, _FAILED, _CLOSES},
    GeneratesAfterAFailure: {_FAILED},
    SwallowsFailures: {_FAILED},
    RefusalsInvalidate: {_REFUSED},
    StaleModel: {_CACHE},
    WarmCache: {_CACHE},
    CountsForItself: {_VERSIONS, _REFUSED, _HEALS},
    StaleVersion: {_REFUSED, _HEALS},
    OneDigest: {_DIGESTS, _REFUSED},
    NoDigest: {_REPORT},
    WrongCount: {_REPORT},
    NoRanks: {_RANKS},
    Nameless: {_DESCRIBES},
    NumberedPid: {_DESCRIBES},
    ClosesOnce: {_CLOSES},
    LivesOn: {_CLOSES},
    NoDigestMethod: {_METHODS, _DIGESTS, _CACHE, _DATA, _REFUSED, _HEALS},
}

#: Those that another one stands for in the fast tier.
SLOW_TIER = {
    *(Reversed, LosesOne, OneTokenMore, Rounded, OfTheBestToken, GreedyIsSure, NoSeeds, OneSeed, AlwaysSeeded),
    *(NoStopStrings, StopStringOfOneToken, EndsAtItsOwnToken, LimitComesFirst, OtherError, Lists, StaleVersion),
    *(NoDigest, Nameless, ClosesOnce),
}
