# SPDX-License-Identifier: Apache-2.0
"""The hook of `.pre-commit-hooks.yaml`, used as another repository would: pre-commit clones, installs and runs it."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.mutations.harness import copy_tree
from tests.packaging.workshop import ROOT, Wheel, build_wheel, uv

#: A project of source alone, in the src layout and not installed, with one rule of ours.
CONTRACT = """
[importlinter]
root_package = shop
include_external_packages = True
contract_types =
    import_phase: nemo_rl_contracts.contract_types.ImportPhaseContract

[importlinter:contract:engine]
name = The shop opens without an engine
type = import_phase
source_modules =
    shop
forbidden_modules =
    vllm
phases =
    eager
    conditional
"""

#: The engine is declared and installed nowhere, neither here nor in the hook's own environment.
PROJECT = """
[project]
name = "shop"
version = "1"

[project.optional-dependencies]
engine = ["vllm"]
"""

CONFIG = """
repos:
  - repo: {url}
    rev: v0
    hooks:
      - id: nemo-rl-contracts-check
"""


def git(folder: Path, *arguments: str) -> None:
    """Run git in a folder of a test, with an author and without anybody's settings."""
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main")
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", *who, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def commit(folder: Path) -> None:
    git(folder, "init", "--quiet")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", "snapshot")


def test_the_root_builds_the_contracts_package_and_nothing_else(tmp_path: Path) -> None:
    """What `pip install .` at the root brings is the wheel of nemo-rl-contracts, file by file."""
    tree = tmp_path / "tree"
    tree.mkdir()
    copy_tree(tree)
    uv("build", "--wheel", "--quiet", str(tree), "--out-dir", str(tmp_path / "wheels"))
    (path,) = (tmp_path / "wheels").glob("*.whl")
    root, ours = Wheel(path), build_wheel(tree / "contracts", tmp_path / "ours")
    assert root.files == ours.files
    assert root.metadata["Name"] == ours.metadata["Name"] == "nemo-rl-contracts"
    assert root.metadata.get_all("Requires-Dist") == ours.metadata.get_all("Requires-Dist")


def test_the_root_asks_for_the_same_build_tool_and_is_no_package() -> None:
    """One meaning, one place would be better; two that a test compares is what the format allows."""
    root, contracts = (tomllib.loads((ROOT / f / "pyproject.toml").read_text()) for f in (".", "contracts"))
    assert root["build-system"]["requires"] == contracts["build-system"]["requires"]
    assert "project" not in root


@pytest.mark.full
@pytest.mark.timeout(600)
def test_another_repository_uses_the_hook_and_a_broken_import_turns_it_red(tmp_path: Path) -> None:
    """F12: real clone, real install, no part of this environment: green, then red with file and line, then green."""
    workspace, project = tmp_path / "workspace", tmp_path / "project"
    workspace.mkdir()
    copy_tree(workspace)
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", workspace)
    commit(workspace)
    git(workspace, "tag", "v0")
    package = project / "src" / "shop"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "till.py").write_text("def count():\n    import vllm\n\n    return vllm.LLM\n")
    (project / "pyproject.toml").write_text(PROJECT)
    (project / ".importlinter").write_text(CONTRACT)
    (project / ".pre-commit-config.yaml").write_text(CONFIG.format(url=workspace))
    commit(project)

    def run() -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "NEMO_RL_ROLE")}
        env |= {"PRE_COMMIT_HOME": str(tmp_path / "home"), "COLUMNS": "200"}
        command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--verbose"]
        return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=300, check=False)

    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed" in done.stdout
    (package / "till.py").write_text("import vllm\n\n\ndef count():\n    return vllm.LLM\n")
    done = run()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Failed" in done.stdout
    assert "exit code: 1" in done.stdout
    assert "shop/till.py:1" in done.stdout
    assert "shop.till" in done.stdout
    git(project, "checkout", "--quiet", "src/shop/till.py")
    assert run().returncode == 0
    (environment,) = (tmp_path / "home").glob("repo*/py_env-*")
    installed = {
        path.name.partition("-")[0].lower() for path in environment.glob("lib/python3*/site-packages/*.dist-info")
    }
    assert "nemo_rl_contracts" in installed
    assert not installed & {"torch", "ray", "nemo_rl_core", "nemo_rl_vllm"}
