# SPDX-License-Identifier: Apache-2.0
"""Where core and the adapter came from wheels that are gone, a built environment still gets the very same code."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.packaging.workshop import Venv, Wheel, words


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_engines_environment_is_built_from_an_installation_without_a_checkout(
    core_alone: Venv, wheels: dict[str, Wheel], tmp_path: Path
) -> None:
    """U6, U10, R3: nothing of our own is asked from an index, and no folder of the repository is named."""
    venv = core_alone.clone(tmp_path)
    adapter = tmp_path / wheels["nemo_rl_vllm"].path.name
    shutil.copy(wheels["nemo_rl_vllm"].path, adapter)
    venv.install("--no-deps", str(adapter))
    adapter.unlink()
    # uv's settings, certificates and cache are the site's; what is Python's own is not passed on.
    theirs = ("NEMO_RL_", "PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    env["NEMO_RL_VENV_DIR"] = str(tmp_path / "venvs")
    # By module: a clone's scripts still name the interpreter of the first environment.
    nemo_rl = ("python", "-m", "nemo_rl_core")
    done = venv.run(*nemo_rl, "env", "build", "vllm-cpu", env=env, timeout_s=1500.0)
    assert done.returncode == 0, words(done)
    done = venv.run(*nemo_rl, "backends", "--check", "--json", env=env)
    row = {row["name"]: row for row in json.loads(done.stdout)}["vllm"]
    assert (row["engine_state"], row["engine"]) == ("available", "vllm-cpu 0.32.0"), row
    folder = Path(row["interpreter"]).parents[1]
    (site,) = folder.glob("lib/python3.*/site-packages")
    for package in ("nemo_rl_core", "nemo_rl_vllm"):
        sources = {name for name in wheels[package].files if name.startswith(f"{package}/")}
        assert sources
        assert {name for name in sources if not (site / name).is_file()} == set()
    assert (site / "nemo_rl_core_guard.pth").is_file()
    assert not list(site.glob("_editable_impl_*"))
