# SPDX-License-Identifier: Apache-2.0
"""What a user gets who has no lock: the wheels, an index, and whatever resolves on that day."""

import json
import os
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from nemo_rl_contracts.locks import Distribution, closure_of, read_lock
from tests.packaging import proof
from tests.packaging.test_lock import FORBIDDEN_DISTRIBUTIONS
from tests.packaging.workshop import ROOT, Venv, Wheel, uv, words


def locked_torch(text: str) -> Version:
    (torch,) = closure_of(read_lock(ROOT / "uv.lock"), Distribution.parse(text)).versions("torch")
    return Version(torch.version)


@pytest.fixture(scope="module")
def newest(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """Core's wheel and the newest of everything that it allows; no lock, no constraint."""
    venv = Venv.create(tmp_path_factory.mktemp("newest"))
    venv.install("--upgrade", str(wheels["nemo_rl_core"].path))
    return venv


@pytest.fixture(scope="module")
def versions(newest: Venv) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.name.lower().replace('_', '-'): d.version for d in m.distributions()}))"
    )
    done = newest.run("python", "-c", code)
    assert done.returncode == 0, words(done)
    return json.loads(done.stdout)


@pytest.mark.full
def test_the_newest_torch_that_resolves_is_not_older_than_the_locked_one(versions: dict[str, str]) -> None:
    """F58, F59: no engine's pin holds it back, and none comes along."""
    print("outside the lock:", ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "ray")))
    assert Version(versions["torch"]) >= locked_torch("nemo-rl-core[fsdp]")
    assert not set(versions) & {*FORBIDDEN_DISTRIBUTIONS, "nemo-rl-vllm", "nemo-rl-contracts"}


@pytest.mark.full
@pytest.mark.parametrize("role", [None, "train"])
def test_every_module_imports_with_the_newest_of_everything(newest: Venv, role: str | None) -> None:
    """U6, F30: with and without the guard."""
    assert len(proof.every_module_imports(newest, role=role)) > 60


@pytest.mark.full
def test_every_command_helps_and_a_refit_works_with_the_newest_of_everything(newest: Venv) -> None:
    """F31, U6."""
    assert ["train"] in proof.every_command_helps(newest)
    assert proof.a_refit_works(newest)["version"] == 7


@pytest.mark.full
def test_two_steps_train_with_the_newest_of_everything(newest: Venv) -> None:
    """F31, U6: driver, Ray, train and generation worker."""
    proof.two_steps_train(newest)


def test_both_extras_together_resolve_by_uv(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    """U5, F58: on one machine the trainer takes the engine's torch; the extras may not exclude each other there."""
    uv("venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv"))
    planned = uv(
        *(
            "pip",
            "compile",
            "--quiet",
            "--no-header",
            "--no-annotate",
            "--python",
            str(tmp_path / "venv" / "bin" / "python"),
        ),
        *("--find-links", str(wheels["nemo_rl_core"].path.parent), str(_both(tmp_path))),
    )
    found = dict(line.split("==") for line in planned.splitlines() if "==" in line)
    assert {"nemo-rl-core", "nemo-rl-vllm", "vllm", "nvidia-ml-py", "torch"} <= set(found)


def _both(folder: Path) -> Path:
    path = folder / "requirements.in"
    path.write_text("nemo-rl-core[fsdp,vllm]\n")
    return path


@pytest.mark.full
@pytest.mark.timeout(600)
def test_both_extras_together_resolve_by_pip(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    """U5, U6, F58: the command of the user guide, by pip itself; it reads metadata and installs nothing."""
    uv("venv", "--quiet", "--seed", "--python", sys.executable, str(tmp_path / "venv"))
    venv = Venv(folder=tmp_path / "venv", workdir=tmp_path)
    options = ["--dry-run", "--quiet", "--ignore-installed", "--report", "report.json"]
    folder = str(wheels["nemo_rl_core"].path.parent)
    # This machine's settings for pip, an index or a certificate, are the user's to have.
    own = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = venv.run(
        *("python", "-m", "pip", "install", *options, "--find-links", folder, "nemo-rl-core[fsdp,vllm]"),
        env=own,
        timeout_s=500,
    )
    assert done.returncode == 0, words(done)
    items = json.loads((tmp_path / "report.json").read_text())["install"]
    found = {item["metadata"]["name"].lower().replace("_", "-"): item for item in items}
    print("pip would install", len(found), "distributions, torch", found["torch"]["metadata"]["version"])
    for name in ("nemo-rl-core", "nemo-rl-vllm"):
        assert found[name]["download_info"]["url"].startswith("file:"), "the wheel of this tree is the one that counts"
    assert {"vllm", "nvidia-ml-py"} <= set(found)
