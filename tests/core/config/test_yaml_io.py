# SPDX-License-Identifier: Apache-2.0
"""YAML: the types of version 1.2, inheritance, and a dump that reads back equal."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.config.yaml_io import deep_merge, dump_yaml_mapping, load_yaml, load_yaml_file
from nemo_rl_core.errors import ConfigError
from tests.strategies import yaml_values


def write(folder: Path, **files: str) -> Path:
    """Write files `name` to `name.yaml`; return the path of `main.yaml`."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / "main.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-6", 5e-6),
        ("5E6", 5e6),
        ("1e5", 1e5),
        ("-1.5e+3", -1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", float("-inf")),
        ("3", 3),
        ("-3", -3),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("1_000", 1000),
        ("true", True),
        ("false", False),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'5e-6'", "5e-6"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        ("[1e-3, a]", [1e-3, "a"]),
    ],
)
def test_scalars_have_the_types_of_yaml_1_2(text: str, value: Any) -> None:
    read = load_yaml(text, "test")
    assert read == value
    assert type(read) is type(value)


@given(value=st.dictionaries(st.text("abc", min_size=1, max_size=3), yaml_values(), max_size=4))
def test_what_is_dumped_reads_back_equal(value: dict[str, Any]) -> None:
    text = dump_yaml_mapping(value)
    assert typed(load_yaml(text, "test")) == typed(value)


@given(text=st.sampled_from(["no", "5e-6", "010", "1:30", "0o7", "2026-01-01", "~", "=", "1_0"]))
def test_a_string_that_another_yaml_reads_as_a_number_is_quoted(text: str) -> None:
    assert yaml.safe_load(dump_yaml_mapping({"a": text})) == {"a": text}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\na: 2", "line 2.*'a' stands twice"),
        ("a: {b: 1, b: 1}", "'b' stands twice"),
        ("1: a", "must be a string, got 1"),
        ("true: a", "must be a string, got True"),
        ("a: [1", "line 1"),
        ("a: !!python/object/apply:os.system [ls]", "python"),
        ("a: &x [*x]", "recursive"),
        ("a: &x {b: *x}", "recursive"),
        ("a: " + "[" * 100 + "]" * 100, "64 levels"),
        ("a: " + "[" * 9000, "64 levels"),
        ("a: 1\n---\nb: 2", "line 2"),
        ("[a]: 1", "must be a string|unhashable"),
    ],
)
def test_what_no_config_can_hold_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"file.yaml.*{why}"):
        load_yaml(text, "file.yaml")


def test_later_files_win_and_the_file_itself_wins_over_all(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yaml").write_text("defaults: ../root.yaml\nx: {a: a, list: [1, 2]}")
    main = write(
        tmp_path,
        root="x: {root: root, a: root, main: root, gone: {deep: 1}}",
        b="x: {b: b, a: b, list: [3]}",
        main="defaults: [sub/a.yaml, b.yaml]\nx: {main: main, gone: null}",
    )
    assert load_yaml_file(main) == {
        "x": {"root": "root", "a": "b", "main": "main", "gone": None, "list": [3], "b": "b"}
    }


def test_two_files_may_share_an_ancestor(tmp_path: Path) -> None:
    files = {"root": "x: 1", "a": "defaults: root.yaml", "b": "defaults: root.yaml\ny: 2"}
    main = write(tmp_path, **files, main="defaults: [a.yaml, b.yaml]")
    assert load_yaml_file(main) == {"x": 1, "y": 2}


def test_a_circle_is_an_error_that_shows_it(tmp_path: Path) -> None:
    main = write(tmp_path, main="defaults: a.yaml", a="defaults: b.yaml", b="defaults: ./a.yaml")
    with pytest.raises(ConfigError, match=r"inherit from itself.*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_yaml_file(main)
    with pytest.raises(ConfigError, match="inherit from itself"):
        load_yaml_file(write(tmp_path, main="defaults: main.yaml"))


def test_a_missing_parent_names_the_file_that_wants_it(tmp_path: Path) -> None:
    main = write(tmp_path, main="defaults: nowhere.yaml")
    with pytest.raises(ConfigError, match=r"no config file .*nowhere\.yaml, which .*main\.yaml names"):
        load_yaml_file(main)
    with pytest.raises(ConfigError, match=r"no config file .*absent\.yaml$"):
        load_yaml_file(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("text", "why"),
    [("- a", "must be a mapping, got list"), ("defaults: 3", "got 3"), ("defaults: [null]", "got None"), ("3", "int")],
)
def test_what_is_no_config_file_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_yaml_file(write(tmp_path, main=text))


def test_an_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "main.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml_file(tmp_path / "main.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml_file(tmp_path)


def test_an_empty_file_is_an_empty_config(tmp_path: Path) -> None:
    assert load_yaml_file(write(tmp_path, main="# nothing\n")) == {}


MAPPINGS = st.dictionaries(st.text("ab", min_size=1, max_size=2), yaml_values(), max_size=4)


@given(a=MAPPINGS, b=MAPPINGS, c=MAPPINGS)
def test_merging_keeps_its_inputs_and_lets_the_change_win(a: dict, b: dict, c: dict) -> None:
    before = repr((a, b, c))
    merged = deep_merge(a, b)
    assert repr((a, b, c)) == before
    assert typed(deep_merge(merged, b)) == typed(merged)
    assert typed(deep_merge({}, a)) == typed(a)
    assert merged.keys() == a.keys() | b.keys()
    for key, value in b.items():
        if not isinstance(value, dict):
            assert typed(merged[key]) == typed(value)


def typed(value: Any) -> Any:
    """Make 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return type(value).__name__, value
