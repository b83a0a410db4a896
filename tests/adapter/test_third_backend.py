# SPDX-License-Identifier: Apache-2.0
"""A backend that somebody else distributes: its wheel is installed, and core finds, checks and accepts it as it is."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_rl_core.testing.conformance import check_names
from tests.packaging.workshop import uv

SOURCE = Path(__file__).parent / "third_backend"
SUITE = ("-m", "nemo_rl_core.testing.conformance")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder into which the backend's wheel was installed, and nothing else."""
    folder = tmp_path_factory.mktemp("third")
    # Without what a tool may have left there, which would get into the wheel or stand in its way.
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "dist", "build"))
    uv("build", "--wheel", "--quiet", str(folder / "source"), "--out-dir", str(folder / "dist"))
    (wheel,) = (folder / "dist").glob("*.whl")
    uv("pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site"), str(wheel))
    return folder / "site"


def run(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the interpreter of these tests with the installed wheel, in a folder where nothing of this repository lies."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NEMO_RL_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def listed(done: subprocess.CompletedProcess[str]) -> Sequence[dict[str, str]]:
    """Return the rows of ``nemo-rl backends --json``."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_wheel_brings_its_own_package_and_nothing_of_ours(site: Path) -> None:
    assert {path.name for path in site.iterdir() if path.is_dir() and "." not in path.name} - {"bin"} == {
        "bigram_backend"
    }


def test_core_lists_it_by_its_entry_point_alone(site: Path, tmp_path: Path) -> None:
    """U5: name, distribution and version are the backend's own."""
    rows = listed(run(site, "-m", "nemo_rl_core", "backends", "--check", "--json", cwd=tmp_path))
    (row,) = (row for row in rows if row["name"] == "bigram")
    assert (row["state"], row["distribution"], row["version"]) == ("available", "bigram-backend", "0.3.0")


def test_it_passes_the_conformance_suite_without_a_change_in_core(site: Path, tmp_path: Path) -> None:
    done = run(site, *SUITE, "bigram_backend.conformance:subject", cwd=tmp_path)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    *rows, last = done.stdout.splitlines()
    assert last == f"{len(check_names())} of {len(check_names())} checks passed"
    assert [row for row in rows if not row.startswith("ok ")] == []
    assert "bigram: bigram 0.3.0" in done.stdout


def test_the_command_fails_where_a_check_does(site: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from dataclasses import replace\n"
        "from bigram_backend.conformance import subject as sound\n"
        "from bigram_backend.worker import BigramWorker\n"
        "class Broken(BigramWorker):\n"
        "    def describe(self):\n"
        "        return {}\n"
        "def subject():\n"
        "    good = sound()\n"
        "    return replace(good, make_worker=lambda: Broken(good.settings))\n"
    )
    done = run(site, *SUITE, "broken:subject", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1
    assert "describe must have backend, engine_version, host, interpreter, pid, got []" in failed[0]
