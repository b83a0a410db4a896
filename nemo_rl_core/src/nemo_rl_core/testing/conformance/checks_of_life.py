# SPDX-License-Identifier: Apache-2.0
"""Checks of a worker's life: what it is, what leaves it, and how it ends."""

import pickle
from collections.abc import Callable
from typing import Any

from nemo_rl_core.errors import DataError, NemoRLError
from nemo_rl_core.protocols.generation import GenerationWorker
from nemo_rl_core.testing.conformance.bench import Bench, need
from nemo_rl_core.testing.wire import WireError, check_crossing

__all__ = [
    "errors_are_plain_data",
    "it_closes_twice_and_generates_no_more",
    "it_describes_itself",
    "it_has_receiving_ranks",
    "it_has_the_protocols_methods",
    "results_are_plain_data",
]

_DESCRIBED = ("backend", "engine_version", "host", "interpreter", "pid")
#: What a reader of a result has: core. Not even torch is needed for numbers and strings.
_ALLOWED = frozenset({"nemo_rl_core"})


def it_has_the_protocols_methods(bench: Bench) -> str:
    """The worker has every method of `GenerationWorker`."""
    lacking = [
        name
        for name, value in vars(GenerationWorker).items()
        if not name.startswith("_") and callable(value) and not callable(getattr(bench.worker, name, None))
    ]
    need(not lacking, f"a GenerationWorker has the methods {', '.join(lacking)}, which {bench.worker!r} lacks")
    return type(bench.worker).__name__


def it_describes_itself(bench: Bench) -> str:
    """``describe`` gives five facts and more, all of them strings that are not empty."""
    said = bench.call("describe")
    lacking = [key for key in _DESCRIBED if key not in said]
    need(not lacking, f"describe must have {', '.join(lacking)}, got {sorted(said)}")
    wrong = {key: value for key, value in said.items() if not (isinstance(value, str) and value)}
    need(not wrong, f"what describe gives must be strings that are not empty, got {wrong}")
    need(said["pid"].isdigit(), f"describe's pid must be a process id, got {said['pid']!r}")
    bench.kept["described"] = dict(said)
    return f"{said['backend']}: {said['engine_version']}"


def it_has_receiving_ranks(bench: Bench) -> str:
    """At least one rank takes part in a refit, and the number stays the same."""
    count = bench.call("num_receiving_ranks")
    need(type(count) is int and count >= 1, f"num_receiving_ranks must be an integer from 1 on, got {count!r}")
    again = bench.call("num_receiving_ranks")
    need(again == count, f"num_receiving_ranks must not change, got {count} and then {again}")
    return str(count)


def results_are_plain_data(bench: Bench) -> str:
    """What any method returns can be unpickled with core alone, and a completion holds numbers and strings of Python."""
    requests = [bench.request(2), bench.request(4, temperature=0.0)]
    completions = bench.generate(requests)
    results = {
        "generate()": completions,
        "receive_weights()": bench.kept.get("refit report"),
        "weights_digest()": bench.call("weights_digest"),
        "num_receiving_ranks()": bench.call("num_receiving_ranks"),
        "describe()": bench.call("describe"),
    }
    need(results["receive_weights()"] is not None, "no refit has been reported yet")
    count = sum(len(_crossing(value, name)) for name, value in results.items())
    for completion in completions:
        fields = {"token_ids": int, "logprobs": float}
        for field, kind in fields.items():
            values = getattr(completion, field)
            need(type(values) is tuple, f"{field} must be a tuple, got {type(values).__name__}")
            wrong = {type(value).__name__ for value in values if type(value) is not kind}
            need(not wrong, f"{field} must hold Python's {kind.__name__}, got {', '.join(sorted(wrong))}")
        need(type(completion.weight_version) is int, f"weight_version must be int, got {completion.weight_version!r}")
    return f"{count} parts of {len(results)} results need core alone"


def errors_are_plain_data(bench: Bench) -> str:
    """What a worker raised in the checks before can be unpickled with core alone, and says something then."""
    need(bool(bench.errors), "no check before this one has got an error to look at")
    for error in bench.errors:
        _crossing(error, type(error).__name__)
        again = pickle.loads(pickle.dumps(error))
        need(str(again) == str(error) != "", f"a {type(error).__name__} must keep its text, {error}, got {again}")
    return ", ".join(sorted({type(error).__name__ for error in bench.errors}))


def it_closes_twice_and_generates_no_more(bench: Bench) -> str:
    """``shutdown`` may be called twice; ``generate`` then raises one of core's errors and does not hang."""
    for call in ("first", "second"):
        _run(f"the {call} shutdown", lambda: bench.call("shutdown"))
    error = bench.error_of(NemoRLError, "generate", [bench.request(2)])
    need(not isinstance(error, DataError), f"generate after shutdown must not blame the request, got {error!r}")
    _crossing(error, type(error).__name__)
    return f"generate after shutdown raises {type(error).__name__}"


def _run(what: str, act: Callable[[], Any]) -> None:
    value = act()
    need(value is None, f"{what} must return nothing, got {value!r}")


def _crossing(value: Any, name: str) -> tuple[Any, ...]:
    try:
        return check_crossing(value, name, allowed=_ALLOWED)
    except WireError as error:
        need(False, str(error))
        raise
