# SPDX-License-Identifier: Apache-2.0
"""Checks of completions: order, lengths, logprobs, draws, seeds. The worker holds the bench's teacher's weights."""

import math
from collections.abc import Callable
from typing import Any

import torch

from nemo_rl_core.protocols.generation import Completion
from nemo_rl_core.testing.conformance.bench import NUM_TOKENS, Bench, need
from nemo_rl_core.testing.conformance.teachers import distribution

__all__ = [
    "draws_differ_without_a_seed",
    "draws_follow_the_distribution",
    "greedy_is_the_most_likely_token",
    "logprobs_are_at_most_zero",
    "logprobs_equal",
    "results_are_in_the_order_of_the_requests",
    "seeds_reproduce_alone_and_in_any_batch",
    "tokens_and_logprobs_are_equally_many",
]

#: Requests of one token from which the frequencies are judged; more tell smaller faults apart.
_NUM_DRAWS = 512
#: Standard deviations; seeds are fixed, so a backend gives the same value each time.
_DRAWS_LIMIT = 4.5


def results_are_in_the_order_of_the_requests(bench: Bench) -> str:
    """Each result belongs to its request, also where lengths are mixed; no requests give no results."""
    need(bench.generate([]) == [], "no requests must give no completions")
    budgets = (7, 1, 4, 9, 2, 8, 3, 6)
    requests = [
        bench.request(1 + (5 * row) % 8, salt=row, max_new_tokens=budget, seed=row)
        for row, budget in enumerate(budgets)
    ]
    completions = bench.generate(requests)
    for row, (budget, completion) in enumerate(zip(budgets, completions, strict=True)):
        got = len(completion.token_ids)
        need(got == budget, f"request {row} of {len(budgets)} asked for {budget} tokens and got {got}")
    return bench.need_agreement(requests, completions)


def tokens_and_logprobs_are_equally_many(bench: Bench) -> str:
    """There are as many logprobs as tokens, at least one and at most what was asked for."""
    requests = [bench.request(1 + row, salt=row, max_new_tokens=1 + row) for row in range(6)]
    for row, (request, completion) in enumerate(zip(requests, bench.generate(requests), strict=True)):
        tokens, logprobs = len(completion.token_ids), len(completion.logprobs)
        need(tokens == logprobs, f"request {row}: {tokens} tokens need as many logprobs, got {logprobs}")
        limit = request.sampling.max_new_tokens
        need(1 <= tokens <= limit, f"request {row}: at most {limit} tokens were asked for, got {tokens}")
    return f"{len(requests)} completions"


def logprobs_are_at_most_zero(bench: Bench) -> str:
    """Each logprob is finite and no more than 0, also that of a token without an alternative."""
    rows: tuple[dict[str, Any], ...] = ({"temperature": 0.3}, {}, {"temperature": 2.0}, {"top_k": 1}, {"top_p": 1e-6})
    requests = [bench.request(3, salt=row, **sampling) for row, sampling in enumerate(rows)]
    values = [value for completion in bench.generate(requests) for value in completion.logprobs]
    wrong = [value for value in values if not (math.isfinite(value) and value <= 0)]
    need(not wrong, f"a logprob must be finite and at most 0, got {wrong[:3]} among {len(values)}")
    return f"{len(values)} logprobs, the least {min(values):.3g}"


def logprobs_equal(**sampling: Any) -> Callable[[Bench], str]:
    """Return the check that logprobs are those of the distribution that was drawn from, in a batch of mixed prompts.

    Args:
        sampling: Fields of `SamplingParams` that half of the batch has; the other half is plain.
    """

    def check(bench: Bench) -> str:
        rows = [sampling if row % 2 else {} for row in range(8)]
        requests = [bench.request(1 + 2 * (row % 4), salt=row, seed=row, **more) for row, more in enumerate(rows)]
        return bench.need_agreement(requests, bench.generate(requests))

    return check


def draws_follow_the_distribution(bench: Bench) -> str:
    """Tokens are drawn as often as their logprobs say, at two temperatures and with a cut.

    A backend that draws from another distribution than the one it reports has right logprobs of wrong tokens. The mean
    logprob of many draws is compared with its expectation, which the teacher gives.
    """
    words = []
    rows: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.5}, {"top_k": max(2, bench.vocab // 3)})
    for sampling in rows:
        request = bench.request(4, max_new_tokens=1, **sampling)
        requests = [bench.request(4, max_new_tokens=1, seed=seed, **sampling) for seed in range(_NUM_DRAWS)]
        tokens = [completion.token_ids[0] for completion in bench.generate(requests)]
        assert bench.teacher is not None
        logits_1V = bench.teacher.logits(request.prompt_ids)[-1:]
        logprobs_V = distribution(logits_1V, request.sampling)[0].double()
        mass_V = logprobs_V.exp()
        finite_V = torch.where(mass_V > 0, logprobs_V, 0.0)
        mean = float((mass_V * finite_V).sum())
        deviation = float((mass_V * (finite_V - mean) ** 2).sum().sqrt())
        need(deviation > 1e-3, "the teacher gives all tokens one probability, so draws say nothing; take another model")
        drawn = sum(float(logprobs_V[token]) for token in tokens) / len(tokens)
        off = abs(drawn - mean) / (deviation / len(tokens) ** 0.5)
        need(
            off <= _DRAWS_LIMIT,
            f"the mean logprob of {len(tokens)} draws must be {mean:.3f} and is {drawn:.3f}, {off:.1f} standard errors "
            f"away ({request.sampling})",
        )
        words.append(f"{off:.1f}")
    return f"mean logprobs of {_NUM_DRAWS} draws are {', '.join(words)} standard errors from their expectations"


def greedy_is_the_most_likely_token(bench: Bench) -> str:
    """Temperature 0 takes the most likely token each time, cuts or not; its logprob is at temperature 1 without cuts."""
    requests = [
        bench.request(2 + row, salt=row, temperature=0.0, **more)
        for row, more in enumerate(({}, {"seed": 1}, {"top_k": 2}, {"top_p": 0.5}))
    ]
    completions = bench.generate(requests)
    for row, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        logprobs_NV = bench.teacher_logits(request, completion).log_softmax(1)
        taken_N = logprobs_NV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        short = float((logprobs_NV.amax(1) - taken_N).max())
        need(
            short <= 2 * bench.subject.tolerance,
            f"request {row} is greedy and got a token that is {short:.3g} nats less likely than the best one",
        )
    again = bench.generate(requests)
    same = [a.token_ids == b.token_ids for a, b in zip(completions, again, strict=True)]
    need(all(same), f"greedy requests must give the same tokens twice, and {same.count(False)} of {len(same)} differ")
    return bench.need_agreement(requests, completions)


def seeds_reproduce_alone_and_in_any_batch(bench: Bench) -> str:
    """A request with a seed gives the same tokens alone and at any place in a batch; another seed gives others."""
    seeded = bench.request(3, salt=1, seed=42)
    others = [bench.request(1 + row, salt=row, max_new_tokens=1 + 2 * row) for row in range(5)]
    alone = bench.one(seeded).token_ids
    places = {
        "alone a second time": bench.one(seeded),
        "as the last of a batch": bench.generate([*others, seeded])[-1],
        "as the first of a batch": bench.generate([seeded, *others])[0],
        "in the middle of a batch": bench.generate([*others[3:], seeded, *others[:3]])[2],
    }
    for place, completion in places.items():
        got = completion.token_ids
        need(got == alone, f"a request with seed 42 gave {alone} alone and {got} {place}")
    seeds = bench.generate([bench.request(3, salt=1, seed=seed) for seed in range(8)])
    need(_num_kinds(seeds) > 1, f"8 seeds of one prompt must not all give {seeds[0].token_ids}")
    return f"{len(places) + 1} times the same {len(alone)} tokens"


def draws_differ_without_a_seed(bench: Bench) -> str:
    """Without a seed equal requests differ, within a call and from call to call."""
    requests = [bench.request(3, salt=1)] * 8
    first, second = bench.generate(requests), bench.generate(requests)
    need(_num_kinds(first) > 1, f"8 equal requests without a seed must not all give {first[0].token_ids}")
    same = [c.token_ids for c in first] == [c.token_ids for c in second]
    need(not same, "a second call without seeds must not repeat the first one's tokens")
    return f"{_num_kinds(first + second)} different completions of {NUM_TOKENS} tokens in 16"


def _num_kinds(completions: list[Completion]) -> int:
    return len({tuple(completion.token_ids) for completion in completions})
