# SPDX-License-Identifier: Apache-2.0
"""Timers: sums by nested label on a clock that the test turns."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.observability.timers import Timer


class Clock:
    """A clock that goes on only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_ranges_nest_and_repeat() -> None:
    clock = Clock()
    timer = Timer(clock)
    for _ in range(2):
        with timer.time("refit"):
            clock.now += 1
            with timer.time("transfer"):
                clock.now += 10
    with timer.time("generation"):
        clock.now += 0.5
    assert timer.metrics() == {"timing/refit/transfer": 20.0, "timing/refit": 22.0, "timing/generation": 0.5}
    assert (timer.count("refit/transfer"), timer.count("transfer"), timer.seconds("refit")) == (2, 0, 22.0)


def test_an_exception_passes_through_and_the_range_still_ends() -> None:
    """U64: no range stays open behind an exception, whatever the depth."""
    clock = Clock()
    timer = Timer(clock)
    error = RuntimeError("boom")

    def nested() -> None:
        with timer.time("a"), timer.time("b"):
            clock.now += 3
            raise error

    with pytest.raises(RuntimeError) as caught:
        nested()
    assert caught.value is error
    with timer.time("c"):
        clock.now += 1
    assert timer.metrics() == {"timing/a/b": 3.0, "timing/a": 3.0, "timing/c": 1.0}


def test_it_decorates_and_keeps_the_name_of_the_function() -> None:
    """U64: a decorated function is still itself, and its range ends on an exception."""
    clock = Clock()
    timer = Timer(clock)

    @timer.time("work")
    def work(seconds: float) -> float:
        """Docstring."""
        clock.now += seconds
        if seconds > 5:
            raise ValueError(seconds)
        return seconds

    assert (work.__name__, work.__doc__) == ("work", "Docstring.")
    assert work(2) == 2
    with pytest.raises(ValueError, match="6"):
        work(6)
    assert timer.metrics() == {"timing/work": 8.0}


def test_reset_forgets_and_an_open_range_counts_in_full() -> None:
    clock = Clock()
    timer = Timer(clock)
    with timer.time("step"):
        clock.now += 1
        with timer.time("a"):
            clock.now += 1
        timer.reset()
        clock.now += 1
    assert timer.metrics() == {"timing/step": 3.0}


@pytest.mark.parametrize("label", ["", "/", "a/", "/a", "a//b"])
def test_a_label_has_no_empty_part(label: str) -> None:
    with pytest.raises(ValueError, match="label"), Timer().time(label):
        pass


def test_each_thread_has_its_own_nesting() -> None:
    clock = Clock()
    timer = Timer(clock)

    def other() -> None:
        with timer.time("other"):
            clock.now += 2

    with timer.time("main"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=30)
    assert timer.metrics() == {"timing/other": 2.0, "timing/main": 2.0}


TREES = st.recursive(
    st.integers(0, 9).map(lambda n: (n, [])),
    lambda inner: st.tuples(st.integers(0, 9), st.lists(st.tuples(st.sampled_from("ab"), inner), max_size=3)),
    max_leaves=8,
)


@given(tree=TREES)
def test_sums_equal_those_of_a_walk_through_the_tree(tree: tuple) -> None:
    clock = Clock()
    timer = Timer(clock)
    expected: dict[str, float] = {}

    def run(label: str, path: str, node: tuple) -> float:
        own, children = node
        with timer.time(label):
            clock.now += own
            total = own + sum(run(name, f"{path}/{name}", child) for name, child in children)
        expected[f"timing/{path}"] = expected.get(f"timing/{path}", 0) + total
        return total

    run("root", "root", tree)
    assert timer.metrics() == expected
