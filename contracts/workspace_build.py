# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001 -- one module that the root names, no package
"""Build backend of the workspace's root: it builds nemo-rl-contracts, the project beside this file.

The root is a workspace and no package. pre-commit, however, knows one way to install a hook from a repository, which is
``pip install .`` at its root; so the root's pyproject.toml names this module, and what gets installed is the one
distribution that other repositories use from here. Every hook of PEP 517 goes to that project's own backend.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hatchling import build as project

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]


@contextmanager
def _inside_the_project() -> Iterator[None]:
    """Stand in the project's folder, which is what its backend builds. Frontends give absolute paths for the results."""
    before = Path.cwd()
    os.chdir(Path(__file__).parent)
    try:
        yield
    finally:
        os.chdir(before)


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return what a wheel needs to be built, beside the ``requires`` of the root."""
    with _inside_the_project():
        return project.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_sdist(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return what a source distribution needs to be built."""
    with _inside_the_project():
        return project.get_requires_for_build_sdist(config_settings)


def get_requires_for_build_editable(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return what an editable install needs."""
    with _inside_the_project():
        return project.get_requires_for_build_editable(config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel of nemo-rl-contracts and return its file name."""
    with _inside_the_project():
        return project.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Mapping[str, Any] | None = None) -> str:
    """Build the source distribution of nemo-rl-contracts and return its file name."""
    with _inside_the_project():
        return project.build_sdist(sdist_directory, config_settings)


def build_editable(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build an editable wheel of nemo-rl-contracts and return its file name."""
    with _inside_the_project():
        return project.build_editable(wheel_directory, config_settings, metadata_directory)
