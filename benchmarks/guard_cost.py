# SPDX-License-Identifier: Apache-2.0
"""What the guard adds to an import: JSON lines on standard output, one for each kind of import.

    python benchmarks/guard_cost.py

The variants take turns within each round, so that a machine that slows down slows all of them. The uncached import is
that of a module that a finder of this script makes from nothing: with a file behind it, reading the file would be all
that one sees. `any_finder` is a finder in front that has no opinion, which is the least that any guard can cost.
"""

import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from typing import Any

from nemo_rl_core import guard

__all__ = ["measure"]

ROUNDS = 41
IMPORTS = 2000
#: A name that no installed package has.
UNCACHED = "_guard_cost_module"


class EmptyFinder:
    """Answers one name with a module that has nothing in it."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == UNCACHED else None

    def create_module(self, *_: Any) -> None:
        return None

    def exec_module(self, *_: Any) -> None:
        return None


class NoOpinion:
    """The least that a finder can do."""

    def find_spec(self, *_: Any) -> None:
        return None


@contextlib.contextmanager
def in_front(finder: Any) -> Generator[None]:
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def cached() -> float:
    """Return ns per `import json` statement of a module that is loaded."""
    start = time.perf_counter_ns()
    for _ in range(IMPORTS):
        import json  # noqa: F401
    return (time.perf_counter_ns() - start) / IMPORTS


def uncached() -> float:
    """Return ns per import of a module that is not loaded."""
    modules = sys.modules
    start = time.perf_counter_ns()
    for _ in range(IMPORTS):
        __import__(UNCACHED)
        del modules[UNCACHED]
    return (time.perf_counter_ns() - start) / IMPORTS


def compare(what: str, run: Callable[[], float], rounds: int) -> dict[str, Any]:
    """Run the variants in turn and return one row, in ns."""
    variants: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "without": contextlib.nullcontext,
        "any_finder": lambda: in_front(NoOpinion()),
        "guard": lambda: guard.armed("train"),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            with variant():
                times[name].append(run())
    added = [with_guard - without for with_guard, without in zip(times["guard"], times["without"], strict=True)]
    row: dict[str, Any] = {"import": what, "unit": "ns"}
    for name, values in times.items():
        row |= {f"{name}_min": min(values), f"{name}_median": statistics.median(values)}
    row |= {
        "added_by_guard_min": row["guard_min"] - row["without_min"],
        "added_by_guard_median": statistics.median(added),
        "added_by_any_finder_min": row["any_finder_min"] - row["without_min"],
        "ratio_median": row["guard_median"] / row["without_median"],
    }
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


def measure(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return one row for cached imports and one for uncached ones, in ns per import.

    Args:
        rounds: How often each variant takes its turn.

    Raises:
        RuntimeError: If the process is armed already, so that there is no "without".
    """
    if guard.is_armed():
        raise RuntimeError("measure in a process that is not armed: NEMO_RL_ROLE must not be set")
    collects = gc.isenabled()
    gc.disable()
    try:
        with in_front(EmptyFinder()):
            return [compare("cached", cached, rounds), compare("uncached", uncached, rounds)]
    finally:
        if collects:
            gc.enable()


if __name__ == "__main__":
    for each in measure():
        print(json.dumps(each))
