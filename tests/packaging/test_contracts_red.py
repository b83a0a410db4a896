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

import pytest

import nemo_rl_contracts
import nemo_rl_core
import nemo_rl_vllm
from nemo_rl_core.guard import FORBIDDEN_ROOTS
from tests.packaging.test_lock import FORBIDDEN_DISTRIBUTIONS

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


#: Folder of the sources of each package.
SOURCES = {Path(package.__file__).parent.name: Path(package.__file__).parents[1] for package in PACKAGES}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the workspace as far as the contracts read it."""
    ignored = shutil.ignore_patterns("__pycache__")
    for source in SOURCES.values():
        project = source.parent
        shutil.copytree(source, tmp_path / source.relative_to(ROOT), ignore=ignored)
        shutil.copy(project / "pyproject.toml", tmp_path / project.relative_to(ROOT))
    for name in (".importlinter", "uv.lock"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def lint(tree: Path, *contracts: str) -> Verdict:
    """Run the linter of this environment on a copy; PYTHONPATH puts the copy before the installed packages."""
    paths = [str(tree / source.relative_to(ROOT)) for source in SOURCES.values()]
    # Without a terminal width rich folds long module names.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "400"}
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
    """Add text to files; a path begins with the name of a package, or is one of the workspace."""
    for name, text in files.items():
        source = SOURCES.get(Path(name).parts[0]) if name.endswith(".py") else None
        path = (tree / source.relative_to(ROOT) if source else tree) / name
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
    places = [f"nemo_rl_core/src/nemo_rl_core/{part}/seeded.py:{line}: " for part in SUBPACKAGES]
    assert [place for place in places if place not in verdict.text] == [], verdict.text


def test_an_import_for_typing_alone_is_kept(tree: Path) -> None:
    """F5: a name for annotations is no dependency, neither on the engine nor on a higher layer."""
    names = "    from vllm import LLM\n    from nemo_rl_core.policy import policy\n"
    seed(tree, {"nemo_rl_core/data/seeded.py": f"import typing\nif typing.TYPE_CHECKING:\n{names}"})
    assert lint(tree, "engine", "layers").returncode == 0


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
    "the engine is given to a function that imports": (
        "engine",
        {"nemo_rl_core/data/seeded.py": "import importlib\n\ndef f():\n    importlib.import_module('vllm.config')\n"},
        "nemo_rl_core.data.seeded -> vllm.config (lazy, by a function)",
    ),
    "the adapter is named to a function that imports": (
        "engine-by-name",
        {"nemo_rl_core/data/seeded.py": "import pkgutil\nX = pkgutil.resolve_name('nemo_rl_vllm.plugin:BACKEND')\n"},
        "nemo_rl_core.data.seeded imports nemo_rl_vllm.plugin by a string",
    ),
    "a folder that no linter looks into": (
        "coverage",
        {"nemo_rl_core/hidden/seeded.py": "import vllm\n"},
        "hidden/seeded.py is covered by no contract",
    ),
    "core imports what it does not ask for": (
        "core-declares",
        {"nemo_rl_core/data/seeded.py": "import pandas\n"},
        "which the distribution 'nemo-rl-core' does not ask for",
    ),
    "core imports at its base what an extra brings": (
        "core-declares",
        {"nemo_rl_core/data/seeded.py": "def f():\n    import pynvml\n"},
        "which only the extra 'fsdp' brings",
    ),
    "the adapter imports what it does not ask for": (
        "adapter-declares",
        {"nemo_rl_vllm/seeded.py": "import yaml\n"},
        "which the distribution 'nemo-rl-vllm' does not ask for",
    ),
    "the contracts package imports what it does not ask for": (
        "contracts-declares",
        {"nemo_rl_contracts/seeded.py": "import yaml\n"},
        "which the distribution 'nemo-rl-contracts' does not ask for",
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


def test_an_engine_in_the_lock_of_the_train_side_is_named_with_its_chain(tree: Path) -> None:
    """F54, F58: no source file says it; a dependency of a dependency does."""
    lock = tree / "uv.lock"
    package = '[[package]]\nname = "rich"\n'
    assert lock.read_text().count(package) == 1
    before, _, after = lock.read_text().partition(package)
    head, dependencies, tail = after.partition("dependencies = [\n")
    lock.write_text(f'{before}{package}{head}{dependencies}    {{ name = "xgrammar" }},\n{tail}')
    verdict = lint(tree, "engine-in-the-lock")
    assert verdict.returncode == 1
    assert "nemo-rl-core -> rich" in verdict.text
    assert "-> xgrammar" in verdict.text


def test_every_contract_has_an_offence_that_turns_it_red() -> None:
    """A contract that is added without one would be a promise that nobody has seen fail."""
    contracts = {name.rpartition(":")[2] for name in _sections() if name.startswith("importlinter:contract:")}
    # The offence against the lock is no file of source; its test stands by itself.
    assert contracts == {contract for contract, _, _ in OFFENCES.values()} | {"engine-in-the-lock"}


def test_every_exception_has_its_reason_beside_it() -> None:
    """An exception without a reason outlives whoever made it."""
    lines = (ROOT / ".importlinter").read_text().splitlines()
    found = 0
    for number, line in enumerate(lines):
        option = line.partition("=")[0].strip()
        if option in ("ignore_imports", "unmatched_ignore_imports_alerting", "accept_unknown"):
            assert lines[number - 1].startswith("# "), f"line {number + 1}: {line}"
            found += 1
        # `allow` and `exclude` refuse an entry without one; see tests/contracts.
    assert found > 4


def test_the_forbid_list_is_the_guards_table() -> None:
    """One meaning, one place: the static and the run-time rule forbid the same roots."""
    for contract in ("engine", "engine-by-name"):
        listed = set(_sections()[f"importlinter:contract:{contract}"]["forbidden_modules"].split())
        assert listed - {"nemo_rl_vllm"} == FORBIDDEN_ROOTS["train"] == FORBIDDEN_ROOTS["driver"]
        assert FORBIDDEN_ROOTS["rollout"] == FORBIDDEN_ROOTS["train"]


def test_the_forbidden_distributions_are_those_of_the_guards_table() -> None:
    """The lock speaks of distributions, the guard of import names; both mean the same."""
    listed = set(_sections()["importlinter:contract:engine-in-the-lock"]["forbidden_distributions"].split())
    assert listed == FORBIDDEN_DISTRIBUTIONS | {"nemo-rl-vllm", "nemo-rl-contracts"}


def _sections() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read_string((ROOT / ".importlinter").read_text())
    return parser
