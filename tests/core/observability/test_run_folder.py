# SPDX-License-Identifier: Apache-2.0
"""The run's folder: new by default, never mixed with another run's, files whole or absent."""

import json
import math
import re
from pathlib import Path

import pytest

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.observability.run_folder import RunFolder


@pytest.mark.parametrize(
    ("config_name", "folder"),
    [
        ("grpo.yaml", "grpo"),
        ("examples/configs/grpo-cpu.yml", "grpo-cpu"),
        ("grpo", "grpo"),
        ("a b/..", "run"),
        ("ü (1).yaml", "_1_"),
        ("", "run"),
        ("v1.5.yaml", "v1.5"),
    ],
)
def test_the_default_folder_is_named_by_config_and_time(tmp_path: Path, config_name: str, folder: str) -> None:
    run = RunFolder.create(None, config_name, root=tmp_path)
    assert run.path.parent == tmp_path / folder
    assert re.fullmatch(r"\d{8}-\d{6}", run.path.name)
    assert run.path.is_dir()


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    paths = {RunFolder.create(None, "a", root=tmp_path).path for _ in range(5)}
    assert len(paths) == 5


def test_a_named_folder_must_be_new_or_empty_unless_it_may_be_reused(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "x" / "y", "a")
    assert run.path == tmp_path / "x" / "y"
    assert RunFolder.create(str(run.path), "a") == run
    run.write_config("a: 1\n")
    with pytest.raises(ConfigError, match=r"run_dir must be new or empty.*'config\.yaml'"):
        RunFolder.create(run.path, "a")
    assert RunFolder.create(run.path, "a", reuse=True) == run


def test_a_file_in_the_way_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="must be a folder"):
        RunFolder.create(tmp_path / "file", "a")
    with pytest.raises(ConfigError, match="set run_dir"):
        RunFolder.create(None, "a", root=tmp_path / "file")


def test_config_and_summary_are_written_whole_and_leave_nothing_beside_them(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "a")
    run.write_config("a: ü\n")
    run.write_summary({"reward": 1.0})
    run.write_summary({"reward": math.nan, "steps": 3, "path": run.path})
    assert run.config_path.read_text(encoding="utf-8") == "a: ü\n"
    assert json.loads(run.summary_path.read_text()) == {"reward": "nan", "steps": 3, "path": str(run.path)}
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "summary.json"]


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "a")
    run.write_summary({"reward": 1.0})
    with pytest.raises(TypeError, match=r"summary\.bad"):
        run.write_summary({"reward": 2.0, "bad": object()})
    assert json.loads(run.summary_path.read_text()) == {"reward": 1.0}
    # A text that fails while it is written: half of it must not replace the old file.
    with pytest.raises(UnicodeEncodeError):
        run.write_config("a" * 100_000 + "\ud800")
    assert sorted(path.name for path in run.path.iterdir()) == ["summary.json"]
