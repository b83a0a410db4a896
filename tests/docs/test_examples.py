# SPDX-License-Identifier: Apache-2.0
"""Every config under examples/ is valid, and resolves to a plan where its model is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_core.config.load import dump_yaml, load_config
from tests.docs.pages import ROOT

CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.yaml"))


def test_there_are_examples() -> None:
    assert "examples/grpo_tiny.yaml" in CONFIGS


@pytest.mark.parametrize("path", CONFIGS)
def test_the_config_is_valid_and_survives_being_written(path: str, tmp_path: Path) -> None:
    config = load_config(ROOT / path)
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("path", CONFIGS)
def test_the_example_says_how_to_run_it(path: str) -> None:
    assert f"nemo-rl train {path}" in (ROOT / path).read_text()


@pytest.mark.parametrize("path", CONFIGS)
def test_the_plan_resolves(path: str) -> None:
    config = load_config(ROOT / path)
    model = config.policy.model_name
    if model is not None and not (ROOT / model).is_dir():
        pytest.skip(f"{path} needs the model folder {model}, which a script of its own makes")
    command = [sys.executable, "-m", "nemo_rl_core", "train", path, "--dry-run"]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for role, size in (("train", config.train_world_size), ("generation", config.generation_world_size)):
        assert f"{role} workers" in done.stdout
        assert f"{size} of nemo_rl_core.workers." in done.stdout
