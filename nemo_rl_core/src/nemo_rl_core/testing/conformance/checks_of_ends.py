# SPDX-License-Identifier: Apache-2.0
"""Checks of how completions end: stop ids, stop strings, lengths, the context; and of prompts that cannot be continued."""

from dataclasses import replace
from typing import Any

from nemo_rl_core.errors import DataError
from nemo_rl_core.protocols.generation import Completion, GenerationRequest, SamplingParams
from nemo_rl_core.testing.conformance.bench import NUM_TOKENS, Bench, Fault, need

__all__ = [
    "cut_off_ones_say_length",
    "prompts_without_room_are_refused",
    "stop_ids_end_their_own_request",
    "stop_strings_end_their_own_request",
    "the_context_cuts_off",
]

_NUM_SEEDS = 16


def stop_ids_end_their_own_request(bench: Bench) -> str:
    """A completion ends with the first stop id of its own request, which is part of it."""
    for free, whole in _free_runs(bench):
        tokens = whole.token_ids
        # Not the first token, and one that did not come before.
        at = next((i for i in range(2, NUM_TOKENS - 2) if tokens[i] not in tokens[:i]), None)
        if at is not None:
            return _stops(bench, free, whole, {"stop_token_ids": (tokens[at],)}, at + 1)
    raise Fault(f"none of {_NUM_SEEDS} free completions has a token to stop at; take a model that repeats itself less")


def stop_strings_end_their_own_request(bench: Bench) -> str:
    """A completion ends with the token that completes a stop string of its own request; the string may span tokens."""
    special = set(bench.tokenizer.all_special_ids)
    for free, whole in _free_runs(bench):
        tokens = whole.token_ids
        for i in range(1, NUM_TOKENS - 3):
            stop = str(bench.tokenizer.decode(list(tokens[i : i + 2])))
            if special & set(tokens[: i + 2]) or len(stop) < 2 or not stop.strip() or "\ufffd" in stop:
                continue
            texts = [str(bench.tokenizer.decode(list(tokens[:length]))) for length in range(1, NUM_TOKENS + 1)]
            length = next((n for n, text in enumerate(texts, 1) if stop in text), None)
            if length == i + 2:
                return _stops(bench, free, whole, {"stop_strings": (stop,)}, length)
    raise Fault(
        f"none of {_NUM_SEEDS} free completions has two plain tokens in a row whose text is new; take a model that "
        "repeats itself less"
    )


def cut_off_ones_say_length(bench: Bench) -> str:
    """A completion that was cut off has all the tokens that were asked for and says so."""
    requests = [bench.request(2, salt=row, max_new_tokens=1 + 3 * row) for row in range(4)]
    for row, (request, completion) in enumerate(zip(requests, bench.generate(requests), strict=True)):
        asked, got = request.sampling.max_new_tokens, len(completion.token_ids)
        need(
            (got, completion.finish_reason) == (asked, "length"),
            f"request {row} has no stop, so it must end with 'length' after {asked} tokens; it ended with "
            f"{completion.finish_reason!r} after {got}",
        )
    return f"{len(requests)} completions"


def the_context_cuts_off(bench: Bench) -> str:
    """Prompt and completion together never exceed the context; what does not fit is cut off."""
    request = bench.request(bench.context - 3, seed=1)
    completion = bench.one(request)
    got = (len(completion.token_ids), completion.finish_reason)
    need(
        got == (3, "length"),
        f"a prompt of {bench.context - 3} tokens in a context of {bench.context} leaves room for 3, ended by 'length'; "
        f"got {got[0]} and {got[1]!r}",
    )
    return bench.need_agreement([request], [completion])


def prompts_without_room_are_refused(bench: Bench) -> str:
    """An empty prompt, and one that fills the context, are a ``DataError`` for the whole call; the next call works."""
    good, params = bench.request(3, seed=1), SamplingParams(max_new_tokens=2)
    before = bench.one(good).token_ids
    for length in (0, bench.context, bench.context + 5):
        bad = GenerationRequest(prompt_ids=bench.prompt(length), sampling=params)
        bench.error_of(DataError, "generate", [good, bad])
        got = bench.one(good).token_ids
        need(got == before, f"after a refused prompt a request with a seed must give {before} as before, got {got}")
    return f"prompts of 0, {bench.context} and {bench.context + 5} tokens are refused"


def _free_runs(bench: Bench) -> list[tuple[GenerationRequest, Completion]]:
    """Return completions without a stop, each of its own seed."""
    requests = [bench.request(3, salt=seed % 4, seed=seed) for seed in range(_NUM_SEEDS)]
    completions = bench.generate(requests)
    full = [len(completion.token_ids) == NUM_TOKENS for completion in completions]
    need(all(full), f"{full.count(False)} of {len(full)} requests without a stop ended before {NUM_TOKENS} tokens")
    return list(zip(requests, completions, strict=True))


def _stops(bench: Bench, free: GenerationRequest, whole: Completion, stop: dict[str, Any], length: int) -> str:
    """Repeat a free request with a stop between two free ones, and with just as many tokens as the stop needs."""
    stopped = replace(free, sampling=replace(free.sampling, **stop))
    at_the_limit = replace(free, sampling=replace(stopped.sampling, max_new_tokens=length))
    first, result, last, limited = bench.generate([free, stopped, free, at_the_limit])
    for other in (first, last):
        need(
            other.token_ids == whole.token_ids and other.finish_reason == "length",
            f"a request without a stop must give all {NUM_TOKENS} tokens beside one that stops, got "
            f"{len(other.token_ids)} and {other.finish_reason!r}",
        )
    for got in (result, limited):
        need(
            got.token_ids == whole.token_ids[:length],
            f"{stop} must end {whole.token_ids} after {length} tokens, the last one included; got {got.token_ids}",
        )
        need(got.finish_reason == "stop", f"a completion that {stop} ended must say 'stop', got {got.finish_reason!r}")
    return f"{stop} ends after {length} of {NUM_TOKENS} tokens"
