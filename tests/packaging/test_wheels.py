# SPDX-License-Identifier: Apache-2.0
"""What is in the three wheels, what they require, and what their entry points name."""

import configparser
import importlib
import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.test_lock import FORBIDDEN_DISTRIBUTIONS
from tests.packaging.workshop import PROJECTS, ROOT, Venv, Wheel, words

PACKAGES = sorted(PROJECTS.values())
FOLDER_OF = {package: project for project, package in PROJECTS.items()}
#: Beside a package's own files and metadata a wheel holds only these.
EXTRA_FILES = {"nemo_rl_core": {"nemo_rl_core_guard.pth"}, "nemo_rl_vllm": set(), "nemo_rl_contracts": set()}


def requirements(wheel: Wheel) -> list[Requirement]:
    return [Requirement(text) for text in wheel.metadata.get_all("Requires-Dist") or []]


def extra_of(requirement: Requirement, wheel: Wheel) -> str | None:
    """Return the extra that a requirement belongs to, None where it is unconditional."""
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return None
    extras = wheel.metadata.get_all("Provides-Extra") or []
    (extra,) = [extra for extra in extras if requirement.marker.evaluate({"extra": extra})]
    return extra


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_every_file_of_its_tree_and_nothing_else(
    wheels: dict[str, Wheel], sources: Path, package: str
) -> None:
    """U7: a folder that the builder overlooks, or a stray one that it takes along, shows here."""
    top = sources / FOLDER_OF[package] / "src"
    on_disk = {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()}
    in_wheel = {name for name in wheels[package].files if ".dist-info/" not in name}
    assert in_wheel == on_disk | EXTRA_FILES[package]
    assert f"{package}/py.typed" in in_wheel


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_a_package_has_an_initialiser(sources: Path, package: str) -> None:
    """U7: an implicit namespace package is invisible to package finders and linters."""
    top = sources / FOLDER_OF[package] / "src" / package
    folders = {path.parent for path in top.rglob("*.py")}
    assert len(folders) >= 1
    assert [str(folder.relative_to(top)) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_neither_core_nor_any_extra_but_the_forwarding_one_requires_an_engine(wheels: dict[str, Wheel]) -> None:
    """F58: also under names that a resolver reads as the same one."""
    core = wheels["nemo_rl_core"]
    by_extra = {}
    for requirement in requirements(core):
        by_extra.setdefault(extra_of(requirement, core), set()).add(canonicalize_name(requirement.name))
    assert set(by_extra) >= {None, "fsdp", "vllm"}
    assert by_extra.pop("vllm") == {"nemo-rl-vllm"}
    for extra, required in by_extra.items():
        assert not required & (FORBIDDEN_DISTRIBUTIONS | {"nemo-rl-vllm", "nemo-rl-contracts"}), extra


def test_the_forwarding_extra_asks_for_the_adapter_of_the_same_version_with_its_engine(
    wheels: dict[str, Wheel],
) -> None:
    """U5: two statements of one version can't drift apart."""
    core = wheels["nemo_rl_core"]
    (forward,) = [requirement for requirement in requirements(core) if extra_of(requirement, core) == "vllm"]
    assert (forward.name, forward.extras) == ("nemo-rl-vllm", {"engine"})
    assert str(forward.specifier) == f"=={core.metadata['Version']}"
    adapter = wheels["nemo_rl_vllm"]
    assert adapter.metadata["Version"] == core.metadata["Version"]
    assert "engine" in (adapter.metadata.get_all("Provides-Extra") or [])
    (back,) = [r for r in requirements(adapter) if r.name == "nemo-rl-core"]
    assert str(back.specifier) == f"=={core.metadata['Version']}"
    assert extra_of(back, adapter) is None


@pytest.mark.parametrize("package", PACKAGES)
def test_project_file_wheel_and_package_name_one_version(wheels: dict[str, Wheel], sources: Path, package: str) -> None:
    """U5: what `--version` prints is what pip installed."""
    project = tomllib.loads((sources / FOLDER_OF[package] / "pyproject.toml").read_text())["project"]
    assert wheels[package].metadata["Version"] == project["version"]
    assert importlib.import_module(package).__version__ == project["version"]


def test_the_engine_is_required_once_in_the_whole_workspace(wheels: dict[str, Wheel]) -> None:
    """U5: in the adapter's extra `engine`, as a range, and nowhere else."""
    places = [
        (package, extra_of(requirement, wheel), bool(str(requirement.specifier)))
        for package, wheel in wheels.items()
        for requirement in requirements(wheel)
        if canonicalize_name(requirement.name) in FORBIDDEN_DISTRIBUTIONS
    ]
    assert places == [("nemo_rl_vllm", "engine", True)]
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    development = {canonicalize_name(Requirement(text).name) for texts in groups.values() for text in texts}
    assert not development & FORBIDDEN_DISTRIBUTIONS


def test_the_contracts_package_requires_only_the_linters(wheels: dict[str, Wheel]) -> None:
    assert {requirement.name for requirement in requirements(wheels["nemo_rl_contracts"])} == {"grimp", "import-linter"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_wheel_asks_for_python_3_11_and_carries_its_licence(wheels: dict[str, Wheel], package: str) -> None:
    wheel = wheels[package]
    assert wheel.metadata["Requires-Python"] == ">=3.11"
    assert "Apache License" in wheel.read("LICENSE")


def test_the_path_file_is_one_line_that_only_acts_where_a_role_is_named(wheels: dict[str, Wheel]) -> None:
    """`site` executes it at every start of every interpreter of the environment."""
    (line,) = wheels["nemo_rl_core"].read("nemo_rl_core_guard.pth").splitlines()
    assert line.startswith("import os; ")
    assert '"NEMO_RL_ROLE" in os.environ and' in line


def test_every_entry_point_of_core_names_something_that_is_there(wheels: dict[str, Wheel], core_alone: Venv) -> None:
    """U6: a script that points nowhere installs without a word."""
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(wheels["nemo_rl_core"].read("entry_points.txt"))
    values = [value for section in parser.sections() for value in parser[section].values()]
    assert "nemo_rl_core.cli.app:main" in values
    code = f"import pkgutil\nprint([type(pkgutil.resolve_name(v)).__name__ for v in {values!r}])"
    done = core_alone.run("python", "-c", code)
    assert done.returncode == 0, words(done)


def test_the_adapter_beside_core_is_available_though_there_is_no_engine(
    wheels: dict[str, Wheel], core_alone: Venv, tmp_path: Path
) -> None:
    """U5, F46: the backend is found by its metadata, and loading its light module needs no engine."""
    both = core_alone.clone(tmp_path)
    both.install("--no-deps", str(wheels["nemo_rl_vllm"].path))
    # By module: a clone's scripts still name the interpreter of the first environment.
    done = both.run("python", "-m", "nemo_rl_core", "backends", "--check", "--json")
    assert done.returncode == 0, words(done)
    states = {row["name"]: (row["state"], row["distribution"]) for row in json.loads(done.stdout)}
    assert states == {"torch": ("available", "nemo-rl-core"), "vllm": ("available", "nemo-rl-vllm")}


def test_the_adapter_requires_core_and_what_core_requires_unless_its_engine_is_asked_for(
    wheels: dict[str, Wheel],
) -> None:
    """F54: nothing that has to be built, so a site without the engine's tools installs it all the same."""
    core, adapter = wheels["nemo_rl_core"], wheels["nemo_rl_vllm"]
    hard = {canonicalize_name(r.name) for r in requirements(adapter) if extra_of(r, adapter) is None}
    of_core = {canonicalize_name(r.name) for r in requirements(core) if extra_of(r, core) is None}
    assert "nemo-rl-core" in hard
    assert hard - {"nemo-rl-core"} <= of_core


@pytest.fixture(scope="module")
def contracts_alone(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """A fresh environment with nothing but the wheel of the contracts package and what it requires."""
    venv = Venv.create(tmp_path_factory.mktemp("contracts_alone"))
    venv.install(str(wheels["nemo_rl_contracts"].path))
    return venv


def test_the_contracts_package_imports_in_an_environment_of_its_own(
    wheels: dict[str, Wheel], contracts_alone: Venv
) -> None:
    """Other projects use it in CI, without torch, ray or core."""
    wheel = wheels["nemo_rl_contracts"]
    modules = sorted(
        name[:-3].replace("/", ".").removesuffix(".__init__") for name in wheel.files if name.endswith(".py")
    )
    code = (
        f"import importlib, importlib.util\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        "print([n for n in ('torch', 'ray', 'nemo_rl_core') if importlib.util.find_spec(n)])"
    )
    done = contracts_alone.run("python", "-c", code)
    assert done.returncode == 0, words(done)
    assert done.stdout.strip() == "[]"


def test_the_contracts_package_brings_at_most_20_megabytes(contracts_alone: Venv) -> None:
    """F54: it is installed in other people's CI; a size, not a time."""
    sizes = {
        entry.name: sum(path.stat().st_size for path in ([entry] if entry.is_file() else entry.rglob("*")))
        for entry in contracts_alone.site_packages.iterdir()
    }
    total = sum(sizes.values())
    print(f"installed: {total / 1e6:.1f} MB in {len(sizes)} entries")
    assert {"nemo_rl_contracts", "grimp", "importlinter"} <= set(sizes)
    assert 0 < total <= 20e6, sorted(sizes.items(), key=lambda item: -item[1])[:5]
