# SPDX-License-Identifier: Apache-2.0
"""The contracts in .importlinter, run on a copy of the tree: green as it is, red for every seeded offence."""

import configparser
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grimp
import pytest

import nemo_rl_contracts
import nemo_rl_core
import nemo_rl_vllm
from nemo_rl_core.guard import FORBIDDEN_ROOTS

ROOT = Path(nemo_rl_core.__file__).parents[3]
PACKAGES = (nemo_rl_core, nemo_rl_vllm, nemo_rl_contracts)

#: Read from disk, so that a subpackage that is added tomorrow is seeded too.
SUBPACKAGES = sorted(path.parent.name for path in Path(nemo_rl_core.__file__).parent.glob("*/__init__.py"))

FORMS = {
    "at the top": "import {name}\n",
    "in a function": "def late():\n    import {name}\n",
    "in a try": "try:\n    import {name}\nexcept ImportError:\n    pass\n",
    "beside TYPE_CHECKING": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import {name}\n"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What lint-imports said."""

    returncode: int
    text: str

    @property
    def broken(self) -> list[str]:
        """Names of the broken contracts."""
        return [line.partition(" BROKEN")[0] for line in self.text.splitlines() if " BROKEN" in line]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the three source trees and of the contracts."""
    for package in PACKAGES:
        source = Path(package.__file__).parent
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def lint(tree: Path, *contracts: str) -> Verdict:
    """Run the linter of this environment on a copy; PYTHONPATH puts the copy before the installed packages."""
    # Without a terminal width rich folds long module names.
    env = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "400"}
    only = [argument for contract in contracts for argument in ("--contract", contract)]
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache", *only],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Verdict(returncode=done.returncode, text=done.stdout + done.stderr)


def seed(tree: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + text)


def test_the_tree_as_it_is_keeps_every_contract(tree: Path) -> None:
    """Control: the copy without seeds is green, so a red below comes from the seed."""
    verdict = lint(tree)
    assert verdict.returncode == 0, verdict.text
    assert verdict.broken == []


@pytest.mark.parametrize("name", ["vllm", "nemo_rl_vllm"])
@pytest.mark.parametrize("form", FORMS)
def test_the_engine_and_the_adapter_are_found_in_every_subpackage(tree: Path, form: str, name: str) -> None:
    """F4, F11, F12: one seed in each subpackage of core; the report names every one of them with its line."""
    assert len(SUBPACKAGES) > 10
    seeds = {f"nemo_rl_core/{part}/seeded.py": FORMS[form].format(name=name) for part in SUBPACKAGES}
    seed(tree, seeds)
    verdict = lint(tree, "engine")
    assert verdict.returncode == 1
    assert len(verdict.broken) == 1
    line = next(number for number, text in enumerate(FORMS[form].splitlines(), 1) if "{name}" in text)
    missing = [part for part in SUBPACKAGES if f"nemo_rl_core.{part}.seeded" not in verdict.text]
    assert missing == [], verdict.text
    assert f"(l.{line})" in verdict.text


def test_an_import_for_typing_alone_is_kept(tree: Path) -> None:
    """F5: a name for annotations is no dependency."""
    seed(tree, {"nemo_rl_core/data/seeded.py": "import typing\nif typing.TYPE_CHECKING:\n    from vllm import LLM\n"})
    assert lint(tree, "engine").returncode == 0


OFFENCES: dict[str, tuple[str, dict[str, str], str]] = {
    "a lower layer imports a higher one": (
        "layers",
        {"nemo_rl_core/guard/seeded.py": "import nemo_rl_core.errors\n"},
        "nemo_rl_core.guard.seeded -> nemo_rl_core.errors",
    ),
    "two independent layers meet": (
        "layers",
        {"nemo_rl_core/fp8/seeded.py": "import nemo_rl_core.data\n"},
        "nemo_rl_core.fp8.seeded -> nemo_rl_core.data",
    ),
    "a subpackage that no layer names": ("layers", {"nemo_rl_core/newcomer/__init__.py": ""}, "newcomer"),
    "testing is imported by core": (
        "layers",
        {"nemo_rl_core/cli/seeded.py": "import nemo_rl_core.testing\n"},
        "nemo_rl_core.cli.seeded -> nemo_rl_core.testing",
    ),
    "firewall is imported by another than cli": (
        "layers",
        {
            "nemo_rl_core/firewall/__init__.py": "",
            "nemo_rl_core/algorithms/seeded.py": "def f():\n    import nemo_rl_core.firewall\n",
        },
        "nemo_rl_core.algorithms.seeded -> nemo_rl_core.firewall",
    ),
    "the engine reaches core through a helper": (
        "engine",
        {"nemo_rl_core/data/seeded.py": "import xgrammar\n", "nemo_rl_core/rollout/__init__.py": "import flashinfer\n"},
        "nemo_rl_core.data.seeded -> xgrammar",
    ),
    "the light plugin module reaches torch through another": (
        "adapter-light",
        {
            "nemo_rl_vllm/seeded.py": "import torch\n",
            "nemo_rl_vllm/plugin.py": "\nfrom nemo_rl_vllm import seeded\n",
        },
        "nemo_rl_vllm.seeded -> torch",
    ),
    "the adapter's initialiser imports the engine": (
        "adapter-init",
        {"nemo_rl_vllm/__init__.py": "\nimport vllm\n"},
        "nemo_rl_vllm -> vllm",
    ),
    "the adapter imports a part that is not for adapters": (
        "adapter-core",
        {"nemo_rl_vllm/seeded.py": "import nemo_rl_core.policy\n"},
        "nemo_rl_vllm.seeded -> nemo_rl_core.policy",
    ),
    "the adapter imports a part that was added later": (
        "adapter-core",
        {"nemo_rl_vllm/seeded.py": "import nemo_rl_core.newcomer\n", "nemo_rl_core/newcomer/__init__.py": ""},
        "nemo_rl_vllm.seeded -> nemo_rl_core.newcomer",
    ),
    "ray outside distributed and cli": (
        "ray",
        {"nemo_rl_core/algorithms/seeded.py": "def f():\n    import ray\n"},
        "nemo_rl_core.algorithms.seeded -> ray",
    ),
    "pydantic in a part that others use alone": (
        "usable-alone",
        {"nemo_rl_core/refit/seeded.py": "import pydantic\n"},
        "nemo_rl_core.refit.seeded -> pydantic",
    ),
    "a worker imports the schema": (
        "worker-schema",
        {"nemo_rl_core/workers/seeded.py": "import nemo_rl_core.workers.torch_config\n"},
        "nemo_rl_core.workers.seeded -> nemo_rl_core.workers.torch_config",
    ),
    "torch in the config": (
        "torch-free",
        {"nemo_rl_core/config/seeded.py": "import torch\n"},
        "nemo_rl_core.config.seeded -> torch",
    ),
    "a dependency in the guard": (
        "guard",
        {"nemo_rl_core/guard/seeded.py": "import packaging\n"},
        "nemo_rl_core.guard.seeded -> packaging",
    ),
    "two siblings import each other": (
        "acyclic",
        {
            "nemo_rl_core/guard/seeded.py": "import nemo_rl_core.guard.seeded2\n",
            "nemo_rl_core/guard/seeded2.py": "import nemo_rl_core.guard.seeded\n",
        },
        "seeded2",
    ),
    "the contracts package imports core": (
        "contracts",
        {"nemo_rl_contracts/seeded.py": "import nemo_rl_core.errors\n"},
        "nemo_rl_contracts.seeded -> nemo_rl_core.errors",
    ),
}


@pytest.mark.parametrize("offence", OFFENCES)
def test_each_contract_turns_red_and_names_the_offender(tree: Path, offence: str) -> None:
    """F7: also for what is added later, without editing a list."""
    contract, files, words = OFFENCES[offence]
    seed(tree, files)
    verdict = lint(tree, contract)
    assert verdict.returncode == 1, verdict.text
    assert len(verdict.broken) == 1, verdict.text
    assert words in verdict.text


def test_every_file_on_disk_is_in_the_graph_that_the_contracts_see() -> None:
    """F2, U7: a folder without `__init__.py` would be left out in silence."""
    graph = grimp.build_graph(*(package.__name__ for package in PACKAGES), cache_dir=None)
    for package in PACKAGES:
        folder = Path(package.__file__).parent
        files = {path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py")}
        on_disk = {".".join(path.parts).removesuffix(".__init__") for path in files}
        assert on_disk - graph.modules == set()


def test_every_contract_has_an_offence_that_turns_it_red() -> None:
    """A contract that is added without one would be a promise that nobody has seen fail."""
    contracts = {name.rpartition(":")[2] for name in _sections() if name.startswith("importlinter:contract:")}
    assert contracts == {contract for contract, _, _ in OFFENCES.values()}


def test_the_forbid_list_is_the_guards_table() -> None:
    """One meaning, one place: the static and the run-time rule forbid the same roots."""
    listed = set(_sections()["importlinter:contract:engine"]["forbidden_modules"].split())
    assert listed - {"nemo_rl_vllm"} == FORBIDDEN_ROOTS["train"] == FORBIDDEN_ROOTS["driver"]


def _sections() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read_string((ROOT / ".importlinter").read_text())
    return parser
