# SPDX-License-Identifier: Apache-2.0
"""Core's wheel in a fresh environment without any engine: it imports, answers, refits and trains."""

import json
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.packaging import proof
from tests.packaging.test_lock import FORBIDDEN_DISTRIBUTIONS
from tests.packaging.workshop import Venv, Wheel, words


def test_nothing_of_an_engine_and_nothing_of_the_adapter_is_installed(core_alone: Venv) -> None:
    """F58: the environment is what this whole file claims that it is."""
    code = (
        "import importlib.metadata as m, importlib.util as u, json, sys\n"
        f"roots = {sorted(proof.FORBIDDEN)!r}\n"
        "print(json.dumps([sorted(d.name.lower().replace('_', '-') for d in m.distributions()),"
        " [r for r in roots if u.find_spec(r)], sys.path]))"
    )
    done = core_alone.run("python", "-c", code)
    assert done.returncode == 0, words(done)
    installed, found, path = json.loads(done.stdout)
    assert {"nemo-rl-core", "torch", "ray", "transformers"} <= set(installed)
    assert not set(installed) & {*FORBIDDEN_DISTRIBUTIONS, "nemo-rl-vllm", "nemo-rl-contracts"}
    assert found == []
    assert not [entry for entry in path if "nemo_rl_core/src" in entry], path


def test_all_extras_but_the_forwarding_one_install_beside_core_without_an_engine(
    core_alone: Venv, wheels: dict[str, Wheel], locked_versions: Path, tmp_path: Path
) -> None:
    """F58: the extras are those of the wheel's metadata, so one that is added is installed here too."""
    core = wheels["nemo_rl_core"]
    extras = sorted(set(core.metadata.get_all("Provides-Extra")) - {"vllm"})
    assert "fsdp" in extras
    venv = core_alone.clone(tmp_path)
    venv.install("--constraint", str(locked_versions), f"nemo-rl-core[{','.join(extras)}] @ {core.path.as_uri()}")
    installed = {canonicalize_name(path.name.partition("-")[0]) for path in venv.site_packages.glob("*.dist-info")}
    assert {"nemo-rl-core", "nvidia-ml-py", "torch"} <= installed
    assert not installed & {*FORBIDDEN_DISTRIBUTIONS, "nemo-rl-vllm", "nemo-rl-contracts"}


@pytest.mark.parametrize("role", [None, "train"])
def test_every_module_imports_without_an_engine(core_alone: Venv, wheels: dict[str, Wheel], role: str | None) -> None:
    """U6, F30: with and without the guard."""
    imported = proof.every_module_imports(core_alone, role=role)
    files = [name for name in wheels["nemo_rl_core"].files if name.endswith(".py")]
    assert len(imported) == len(files) > 60


def test_no_import_statement_names_the_engine(core_alone: Venv) -> None:
    """F4: also in functions that nothing here calls."""
    assert proof.no_statement_names_the_engine(core_alone) > 300


def test_every_command_helps_without_an_engine(core_alone: Venv) -> None:
    """F31, U6: the commands are those of the parser, so a new one is covered."""
    commands = proof.every_command_helps(core_alone)
    assert [] in commands
    assert ["train"] in commands
    assert ["backends"] in commands


def test_the_missing_adapter_is_absent_and_named_with_its_pip_command(core_alone: Venv) -> None:
    """F30: a user without an engine is told what to install, and core's own backend works."""
    done = core_alone.run("nemo-rl", "backends", "--check", "--json")
    assert done.returncode == 0, words(done)
    states = {row["name"]: row for row in json.loads(done.stdout)}
    assert (states["torch"]["state"], states["torch"]["distribution"]) == ("available", "nemo-rl-core")
    assert states["vllm"]["state"] == "absent"
    assert 'pip install "nemo-rl-core[vllm]"' in states["vllm"]["reason"]


def test_a_refit_between_two_plain_processes_works_without_an_engine(core_alone: Venv) -> None:
    """U6: the refit is usable alone."""
    assert proof.a_refit_works(core_alone)["version"] == 7


def test_two_steps_train_without_an_engine(core_alone: Venv) -> None:
    """F31, U65: driver, Ray, train and generation worker, all with the interpreter of this environment."""
    summary = proof.two_steps_train(core_alone)
    for worker in summary["roles"]["train"] + summary["roles"]["generation"]:
        assert "vllm" not in worker["versions"]
        assert "nemo-rl-vllm" not in worker["versions"]
