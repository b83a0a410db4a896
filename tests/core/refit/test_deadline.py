# SPDX-License-Identifier: Apache-2.0
"""Silence, judged by a clock that the test moves."""

from nemo_rl_core.refit.deadline import Deadline, SilenceMeter


class HandClock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_a_counter_that_stands_still_for_the_limit_is_silent_and_one_that_moves_is_not():
    clock = HandClock()
    still, moving = SilenceMeter(2.0, clock), SilenceMeter(2.0, clock)
    verdicts = []
    for step in range(10):
        verdicts.append(still.is_silent(5))
        assert not moving.is_silent(step)
        clock.time += 0.25
    assert verdicts == [False] * 8 + [True] * 2


def test_a_judge_that_was_asleep_itself_does_not_hold_the_gap_against_others():
    clock = HandClock()
    meter = SilenceMeter(2.0, clock)
    assert not meter.is_silent(5)
    clock.time += 3600
    assert not meter.is_silent(5)
    assert not meter.is_silent(6)
    for _ in range(3):
        clock.time += 0.5
        assert not meter.is_silent(6)
    clock.time += 0.5
    assert meter.is_silent(6)


def test_a_deadline_without_time_has_passed():
    assert Deadline(0.0).expired
    assert not Deadline(1000.0).expired
