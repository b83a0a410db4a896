# SPDX-License-Identifier: Apache-2.0
"""Runs all checks on one worker, in the order in which a worker lives."""

from collections.abc import Callable
from types import MappingProxyType

from nemo_rl_core.errors import text_of
from nemo_rl_core.testing.conformance import checks_of_ends as ends
from nemo_rl_core.testing.conformance import checks_of_life as life
from nemo_rl_core.testing.conformance import checks_of_samples as samples
from nemo_rl_core.testing.conformance import checks_of_weights as weights
from nemo_rl_core.testing.conformance.bench import Bench, Fault, Silence
from nemo_rl_core.testing.conformance.subject import Report, Result, Subject

__all__ = ["check_names", "run"]

#: Every check by its name. A worker is expensive, so all of them share one, and what a check does to the weights is what
#: the next one finds: nothing, the first teacher's, the second's, broken ones, the first's again, shut down.
_CHECKS: MappingProxyType[str, Callable[[Bench], str]] = MappingProxyType(
    {
        "it has the protocol's methods": life.it_has_the_protocols_methods,
        "it describes itself": life.it_describes_itself,
        "it has receiving ranks": life.it_has_receiving_ranks,
        "nothing is sampled before the first refit": weights.nothing_is_sampled_before_the_first_refit,
        "a refit is reported by both sides": weights.a_refit_is_reported_by_both_sides,
        "results are in the order of the requests": samples.results_are_in_the_order_of_the_requests,
        "tokens and logprobs are equally many": samples.tokens_and_logprobs_are_equally_many,
        "logprobs are at most 0": samples.logprobs_are_at_most_zero,
        "logprobs equal a teacher-forced pass": samples.logprobs_equal(),
        "logprobs are those after the temperature": samples.logprobs_equal(temperature=0.6),
        "logprobs are those after top-k": samples.logprobs_equal(top_k=3),
        "logprobs are those after top-p": samples.logprobs_equal(top_p=0.7),
        "logprobs are those after all three": samples.logprobs_equal(temperature=1.6, top_k=6, top_p=0.8),
        "draws follow the distribution": samples.draws_follow_the_distribution,
        "greedy is the most likely token": samples.greedy_is_the_most_likely_token,
        "seeds reproduce alone and in any batch": samples.seeds_reproduce_alone_and_in_any_batch,
        "draws differ without a seed": samples.draws_differ_without_a_seed,
        "stop ids end their own request": ends.stop_ids_end_their_own_request,
        "stop strings end their own request": ends.stop_strings_end_their_own_request,
        "cut-off completions say length": ends.cut_off_ones_say_length,
        "the context cuts off": ends.the_context_cuts_off,
        "prompts without room are refused": ends.prompts_without_room_are_refused,
        "results are plain data": life.results_are_plain_data,
        "versions are the last refit's": weights.versions_are_the_last_refits,
        "digests tell weights apart": weights.digests_tell_weights_apart,
        "no cache outlives a refit": weights.no_cache_outlives_a_refit,
        "a refused refit changes nothing": weights.a_refused_refit_changes_nothing,
        "nothing is sampled after a failed refit": weights.nothing_is_sampled_after_a_failed_refit,
        "a later refit heals": weights.a_later_refit_heals,
        "errors are plain data": life.errors_are_plain_data,
        "it closes twice and generates no more": life.it_closes_twice_and_generates_no_more,
    }
)


def check_names() -> tuple[str, ...]:
    """Return the names of all checks in their order, e.g. to make a test of each."""
    return tuple(_CHECKS)


def run(subject: Subject) -> Report:
    """Build a worker, run every check on it, and shut it down.

    A check that fails does not end the run. A call that does not return in time does: nothing more can be asked of that
    worker, so the checks that are left are reported as not run, which counts as failed.

    Raises:
        ModelError: If the subject's tokenizer cannot be built.
    """
    bench = Bench(subject)
    try:
        stopped = _build(bench)
        results = []
        for name, check in _CHECKS.items():
            result = Result(name=name, passed=False, words=f"not run: {stopped}") if stopped else None
            if result is None:
                result, stopped = _one(bench, name, check)
            results.append(result)
    finally:
        bench.close()
    return Report(results=tuple(results), described=bench.kept.get("described", {}))


def _build(bench: Bench) -> str:
    """Build the worker; returns why there is none, or nothing."""
    try:
        bench.build()
    except Silence as silence:
        return str(silence)
    except Exception as error:  # noqa: BLE001 - a backend's constructor may raise anything, and the report says what
        return f"the worker could not be built: {type(error).__name__}: {text_of(error)}"
    return ""


def _one(bench: Bench, name: str, check: Callable[[Bench], str]) -> tuple[Result, str]:
    """Run one check; returns its result, and why no other can follow, or nothing."""
    try:
        words = check(bench)
    except Fault as fault:
        return Result(name=name, passed=False, words=str(fault)), ""
    except Silence as silence:
        return Result(name=name, passed=False, words=str(silence)), f"in {name!r} {silence}"
    except Exception as error:  # noqa: BLE001 - a backend may raise anything, and the report says what
        return Result(name=name, passed=False, words=f"raised {type(error).__name__}: {text_of(error)}"), ""
    return Result(name=name, passed=True, words=words), ""
