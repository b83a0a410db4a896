# SPDX-License-Identifier: Apache-2.0
"""Overrides: dotted keys, YAML values, and a clear word about everything else."""

from typing import Any

import pytest
from hypothesis import given

from nemo_rl_core.config.overrides import apply_overrides
from nemo_rl_core.config.yaml_io import dump_yaml_mapping
from tests.strategies import yaml_values

BASE = {"a": {"b": 1, "c": {"d": [1, 2]}}, "e": None, "f": "text"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["a.b=2"], {**BASE, "a": {"b": 2, "c": {"d": [1, 2]}}}),
        (["a.b=null"], {**BASE, "a": {"b": None, "c": {"d": [1, 2]}}}),
        (["a.b=5e-6"], {**BASE, "a": {"b": 5e-6, "c": {"d": [1, 2]}}}),
        (["a.c.d=[3]"], {**BASE, "a": {"b": 1, "c": {"d": [3]}}}),
        (["a={b: 3, x: y}"], {**BASE, "a": {"b": 3, "x": "y", "c": {"d": [1, 2]}}}),
        (["a.b=1", "a.b=2"], {**BASE, "a": {"b": 2, "c": {"d": [1, 2]}}}),
        (["e.x.y=1"], {**BASE, "e": {"x": {"y": 1}}}),
        (["f=a=b"], {**BASE, "f": "a=b"}),
        (["f='3'"], {**BASE, "f": "3"}),
        (["f=''"], {**BASE, "f": ""}),
        (["new.key=true"], {**BASE, "new": {"key": True}}),
        (["+new.key=1", "++f=2"], {**BASE, "new": {"key": 1}, "f": 2}),
        ([], BASE),
    ],
)
def test_overrides_are_laid_over_in_order(overrides: list[str], expected: dict[str, Any]) -> None:
    before = repr(BASE)
    result, problems = apply_overrides(BASE, overrides)
    assert problems == []
    assert result == expected
    assert repr(BASE) == before


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("a.b", "must be key=value"),
        ("=3", "names joined by dots"),
        ("a..b=3", "names joined by dots"),
        ("a. b=3", "names joined by dots"),
        ("a.b=", "write a.b=null"),
        ("~a.b=1", "write a.b=null"),
        ("a.b=[1", "must be YAML"),
        ("a.b={x: 1, x: 2}", "stands twice"),
        ("f.x=1", "because f is no mapping"),
        ("a.c.d.0=1", "because a.c.d is no mapping"),
    ],
)
def test_an_override_that_cannot_be_applied_is_a_problem_and_the_others_still_apply(override: str, says: str) -> None:
    result, problems = apply_overrides(BASE, [override, "e=1"])
    assert len(problems) == 1
    assert says in str(problems[0])
    assert result == {**BASE, "e": 1}


@given(value=yaml_values())
def test_any_value_that_yaml_can_write_can_be_set(value: Any) -> None:
    text = dump_yaml_mapping({"k": value}).partition(":")[2]
    result, problems = apply_overrides({}, [f"x.y={text}"]) if text.strip() else ({"x": {"y": value}}, [])
    assert problems == []
    if value != {}:
        assert result == {"x": {"y": value}}
