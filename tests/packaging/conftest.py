# SPDX-License-Identifier: Apache-2.0
"""Wheels and environments of this folder: built once."""

from pathlib import Path

import pytest

from tests.packaging.workshop import PROJECTS, Venv, Wheel, build_wheel, copy_sources, uv


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> Path:
    """A copy of the three projects, as they were when the wheels were built."""
    return copy_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def wheels(sources, tmp_path_factory) -> dict[str, Wheel]:
    """The wheel of each package."""
    folder = tmp_path_factory.mktemp("wheels")
    return {package: build_wheel(sources / project, folder) for project, package in PROJECTS.items()}


@pytest.fixture(scope="session")
def locked_versions(tmp_path_factory) -> Path:
    """Constraints: what the lock says for core, so that a release of tomorrow does not change these tests."""
    path = tmp_path_factory.mktemp("lock") / "constraints.txt"
    uv(
        *("export", "--quiet", "--frozen", "--package", "nemo-rl-core", "--extra", "fsdp", "--no-dev"),
        *("--no-hashes", "--no-emit-project", "--output-file", str(path)),
    )
    return path


@pytest.fixture(scope="session")
def core_alone(wheels, locked_versions, tmp_path_factory) -> Venv:
    """A fresh environment into which core's wheel was installed, and what it requires, and nothing else."""
    venv = Venv.create(tmp_path_factory.mktemp("core_alone"))
    venv.install("--constraint", str(locked_versions), str(wheels["nemo_rl_core"].path))
    return venv
