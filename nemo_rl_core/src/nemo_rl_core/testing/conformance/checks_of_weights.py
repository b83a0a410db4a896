# SPDX-License-Identifier: Apache-2.0
"""Checks of refits: what a worker holds, which version it says, and when it must refuse. They run in this order."""

import math

from nemo_rl_core.errors import RefitError, RefitRefusedError, WeightsInvalidError
from nemo_rl_core.protocols.generation import Completion, GenerationRequest
from nemo_rl_core.testing.conformance.bench import Bench, need

__all__ = [
    "a_later_refit_heals",
    "a_refit_is_reported_by_both_sides",
    "a_refused_refit_changes_nothing",
    "digests_tell_weights_apart",
    "no_cache_outlives_a_refit",
    "nothing_is_sampled_after_a_failed_refit",
    "nothing_is_sampled_before_the_first_refit",
    "versions_are_the_last_refits",
]

#: Versions of the refits, in order; the first is not 0, which a worker might have by chance.
_FIRST, _SECOND, _REFUSED, _FAILED, _LAST = 3, 4, 5, 6, 8


def nothing_is_sampled_before_the_first_refit(bench: Bench) -> str:
    """``generate`` refuses while no refit has completed, greedy requests too."""
    for temperature in (1.0, 0.0):
        bench.error_of(WeightsInvalidError, "generate", [bench.request(2, temperature=temperature)])
    return "refused"


def a_refit_is_reported_by_both_sides(bench: Bench) -> str:
    """The worker's report says the version, bytes, tensors and digest that the sender reports."""
    sent, received = bench.refit(bench.subject.teachers[0], _FIRST)
    bench.kept["refit report"] = received
    wanted = {
        "version": sent.version,
        "bytes": sent.num_bytes,
        "tensors": sent.num_tensors,
        "digest": sent.digest,
    }
    lacking = sorted({*wanted, "seconds"} - set(received))
    need(not lacking, f"the report of receive_weights must have {', '.join(lacking)}, got {sorted(received)}")
    for key, value in wanted.items():
        need(
            received[key] == value,
            f"the report of receive_weights must say what was sent, {key}={value!r}, got {received[key]!r}",
        )
    seconds = received["seconds"]
    good = isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0
    need(good, f"the report's seconds must be a number from 0 on, got {seconds!r}")
    return f"version {sent.version}, {sent.num_bytes} bytes in {sent.num_tensors} tensors"


def digests_tell_weights_apart(bench: Bench) -> str:
    """``weights_digest`` is the digest of what was sent, and another one after other weights."""
    first = _need_digest(bench)
    bench.kept["before"] = _samples(bench)[1]
    bench.refit(bench.subject.teachers[1], _SECOND)
    second = _need_digest(bench)
    need(first != second, f"other weights must have another digest, got {first} twice")
    return f"{first[:12]} and {second[:12]}"


def no_cache_outlives_a_refit(bench: Bench) -> str:
    """Prompts that were continued with old weights, also a long one, are continued with the new ones alone."""
    need("before" in bench.kept, "nothing was generated before the second refit, so there is nothing to compare with")
    old, (requests, completions) = bench.kept["before"], _samples(bench)
    words = bench.need_agreement(requests, completions)
    for request, before, now in zip(requests, old, completions, strict=True):
        need(
            before.logprobs != now.logprobs,
            f"weights that all changed must change the logprobs after a prompt of {len(request.prompt_ids)} tokens",
        )
    return f"{words}; prompts up to {len(requests[-1].prompt_ids)} tokens"


def versions_are_the_last_refits(bench: Bench) -> str:
    """Each completion carries the version of the last refit that completed; so versions never fall."""
    requests = [bench.request(2), bench.request(5, temperature=0.0)]
    seen = [completion.weight_version for completion in bench.generate(requests)]
    need(seen == [bench.version] * 2, f"completions must carry version {bench.version} of the last refit, got {seen}")
    return f"version {bench.version}"


def a_refused_refit_changes_nothing(bench: Bench) -> str:
    """Weights that do not fit are refused by name before the first byte; the old ones stay and can be used."""
    _need_digest(bench)
    sent, received = bench.unfitting_refit(bench.subject.teachers[0], _REFUSED)
    for side, outcome in (("the sender", sent), ("receive_weights", received)):
        need(
            isinstance(outcome, RefitRefusedError),
            f"{side} must raise RefitRefusedError for a tensor that the model has not, got {outcome!r}",
        )
        need(
            "tensor.that.no.model.has" in str(outcome), f"{side} must name the tensor that does not fit, got {outcome}"
        )
    _need_digest(bench)
    return versions_are_the_last_refits(bench)


def nothing_is_sampled_after_a_failed_refit(bench: Bench) -> str:
    """A sender that fails after its last tensor leaves weights that must not be used; both sides hear why."""
    sent, received = bench.broken_refit(bench.subject.teachers[0], _FAILED)
    for side, outcome in (("the sender", sent), ("receive_weights", received)):
        need(isinstance(outcome, RefitError), f"{side} must raise RefitError for a broken refit, got {outcome!r}")
        need("fails on purpose" in str(outcome), f"{side} must tell the first cause, got {outcome}")
    for temperature in (1.0, 0.0):
        bench.error_of(WeightsInvalidError, "generate", [bench.request(2, temperature=temperature)])
    return "refused"


def a_later_refit_heals(bench: Bench) -> str:
    """After a failure the next refit works and gives exactly its own weights."""
    teacher = bench.subject.teachers[0]
    bench.refit(teacher, _LAST)
    _need_digest(bench)
    requests, completions = _samples(bench)
    words = bench.need_agreement(requests, completions)
    return f"{versions_are_the_last_refits(bench)}, {words}"


def _need_digest(bench: Bench) -> str:
    """Return the live digest, which has to be that of the last refit that completed."""
    need(bench.version is not None, "no refit has completed yet")
    live = bench.call("weights_digest")
    need(
        live == bench.digest,
        f"weights_digest must be that of the weights sent as version {bench.version}, {bench.digest}; got {live!r}",
    )
    return live


def _samples(bench: Bench) -> tuple[list[GenerationRequest], list[Completion]]:
    """Return greedy completions after a short, a middling and a long prompt, in this order."""
    lengths = (2, bench.context // 2, bench.context - 4)
    requests = [bench.request(length, temperature=0.0, max_new_tokens=4) for length in lengths]
    return requests, bench.generate(requests)
