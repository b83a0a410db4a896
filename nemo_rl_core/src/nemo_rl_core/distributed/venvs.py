# SPDX-License-Identifier: Apache-2.0
"""Virtual environments that we build: what one holds, where it lies, and when it counts as ready.

A folder is named after the environment and a key, the hash of everything that it holds. Only a stamp, written last,
makes it ready; without one it is half-built, whatever else lies in it. `venv_builder` makes them.
"""

import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement

from nemo_rl_core import plugins
from nemo_rl_core.distributed.build_lock import LockOwner, lock_owner
from nemo_rl_core.distributed.environments import (
    ENVIRONMENT_ENTRY_POINT_GROUP,
    Environment,
    current_interpreter,
)
from nemo_rl_core.distributed.own_sources import OwnSource, own_source
from nemo_rl_core.errors import ConfigError, EnvironmentBuildError, EnvironmentLookupError, UnknownBackendError
from nemo_rl_core.protocols.environments import EnvironmentRecipe

__all__ = [
    "FOLDER_VARIABLE",
    "STAMP",
    "Venv",
    "VenvContents",
    "VenvState",
    "contents_of",
    "installed_packages",
    "load_recipe",
    "settle",
    "venv_of",
    "venv_root",
]

#: Where built environments lie; without it below the user's cache.
FOLDER_VARIABLE: Final = "NEMO_RL_VENV_DIR"

#: Name of the file that makes a folder ready.
STAMP: Final = "nemo_rl_environment.json"

#: Rises when the meaning of a key or a stamp changes.
_FORMAT = 1

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_KEY_LENGTH = 12


@dataclass(frozen=True, kw_only=True)
class VenvContents:
    """Everything that decides what an environment holds.

    Attributes:
        name: Name of the environment: small letters, digits, ``.``, ``_`` and ``-``.
        requirements: PEP 508 requirements.
        overrides: Requirements that replace what any package asks for.
        sources: Distributions that go in from the driver's own sources.
        python: Implementation and version, e.g. ``CPython 3.11.7``; that of the running interpreter.
        platform: E.g. ``linux-x86_64``.
    """

    name: str
    requirements: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    sources: tuple[OwnSource, ...] = ()
    python: str = field(default_factory=lambda: f"{platform.python_implementation()} {platform.python_version()}")
    platform: str = field(default_factory=sysconfig.get_platform)

    def __post_init__(self) -> None:
        """Check the name and each requirement.

        Raises:
            ConfigError: If one is malformed.
        """
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"the name of an environment that is built is a folder's name of small letters, digits, '.', '_' and "
                f"'-', got {self.name!r}"
            )
        for text in (*self.requirements, *self.overrides):
            try:
                Requirement(text)
            except InvalidRequirement as error:
                raise ConfigError(
                    f"environment {self.name!r}: {text!r} is no requirement such as 'torch==2.13.0': {error}"
                ) from error

    @property
    def key(self) -> str:
        """Hash of all of it; the order of requirements does not count."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:_KEY_LENGTH]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, as the stamp keeps it."""
        return {
            "format": _FORMAT,
            "name": self.name,
            "requirements": sorted(self.requirements),
            "overrides": sorted(self.overrides),
            "sources": {source.distribution: f"{source.version} {source.identity}" for source in self.sources},
            "python": self.python,
            "platform": self.platform,
        }


class VenvState(StrEnum):
    """What can be said of an environment's folder without running anything in it."""

    READY = "ready"
    ABSENT = "not built"
    BUILDING = "being built"
    HALF_BUILT = "half-built"
    STALE = "out of date"


@dataclass(frozen=True, kw_only=True)
class Venv:
    """The folder of one environment with given contents.

    Attributes:
        root: Folder of all built environments.
        contents: What it holds, or is to hold.
    """

    root: Path
    contents: VenvContents

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.root / f"{self.contents.name}-{self.contents.key}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def lock(self) -> Path:
        """The lock of whoever builds or removes it."""
        return self.root / f"{self.folder.name}.lock"

    @property
    def log(self) -> Path:
        """What the last builder printed."""
        return self.root / f"{self.folder.name}.log"

    @property
    def builder(self) -> LockOwner | None:
        """Who builds or removes it now, None if nobody does."""
        return lock_owner(self.lock)

    @property
    def stamp(self) -> Mapping[str, Any] | None:
        """What the stamp says; None where there is none that is whole, is for these contents, or has its interpreter."""
        try:
            read = json.loads((self.folder / STAMP).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
            return None
        # A base interpreter that was uninstalled leaves a dangling link.
        is_whole = isinstance(read, dict) and read.get("contents") == self.contents.as_dict() and self.python.exists()
        return read if is_whole else None

    @property
    def state(self) -> VenvState:
        """Whether it can be used."""
        if self.stamp is not None:
            return VenvState.READY
        if self.builder is not None:
            return VenvState.BUILDING
        if self.folder.exists():
            return VenvState.HALF_BUILT
        return VenvState.STALE if any(self.others()) else VenvState.ABSENT

    def others(self) -> Iterator[Path]:
        """Yield the folders of the same environment with other contents."""
        folders = re.compile(rf"{re.escape(self.contents.name)}-[0-9a-f]{{{_KEY_LENGTH}}}")
        if self.root.is_dir():
            for path in sorted(self.root.iterdir()):
                if path != self.folder and path.is_dir() and folders.fullmatch(path.name):
                    yield path

    def ready_python(self) -> Path:
        """Return the interpreter of a ready environment.

        Raises:
            EnvironmentLookupError: If it is not ready; one line with the command that builds it.
        """
        state, name = self.state, self.contents.name
        if state is VenvState.READY:
            return self.python
        why = {
            VenvState.ABSENT: f"is not built on {platform.node()}",
            VenvState.BUILDING: f"is being built by {self.builder}; wait for it, and if that fails",
            VenvState.HALF_BUILT: f"is half-built: {self.folder} has no stamp of these contents",
            VenvState.STALE: f"is out of date: it was built for {self._changes()}",
        }[state]
        raise EnvironmentLookupError(f"environment {name!r} {why}: run `nemo-rl env build {name}`")

    def _changes(self) -> str:
        """Say what differs between this and what was built, for people."""
        wanted = self.contents.as_dict()
        for other in self.others():
            try:
                built = json.loads((other / STAMP).read_text(encoding="utf-8"))["contents"]
            except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
                continue  # not ready either, so nothing can be said of it
            changed = [key for key in wanted if built.get(key) != wanted[key]]
            return f"other {' and '.join(changed)}" if changed else "something else"
        return "something else"


def venv_root(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of all built environments: ``NEMO_RL_VENV_DIR``, else ``nemo_rl/venvs`` below the user's cache.

    Args:
        environ: Variables to read; None reads ``os.environ`` now.

    Raises:
        ConfigError: If the variable is no absolute path, or lies in site-packages.
    """
    environ = os.environ if environ is None else environ
    given = environ.get(FOLDER_VARIABLE)
    if not given:
        cache = environ.get("XDG_CACHE_HOME")
        return (Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache") / "nemo_rl" / "venvs"
    root = Path(given).expanduser()
    if not root.is_absolute() or root.is_relative_to(sysconfig.get_path("purelib")):
        raise ConfigError(
            f"{FOLDER_VARIABLE} must be an absolute path outside of site-packages, got {given!r}; environments are "
            "gigabytes, so take a local disk with room"
        )
    return root


def load_recipe(name: str) -> EnvironmentRecipe:
    """Load the one recipe of that name; other plugins stay where they are.

    Raises:
        EnvironmentLookupError: If nobody declares it; the declared ones are named.
        BackendError: If the plugin that declares it cannot be used; the subclass says why.
        ConfigError: If what it declares is no recipe.
    """
    try:
        recipe = plugins.load(name, group=ENVIRONMENT_ENTRY_POINT_GROUP)
    except UnknownBackendError as error:
        known = ", ".join(plugins.discover(ENVIRONMENT_ENTRY_POINT_GROUP)) or "none"
        raise EnvironmentLookupError(
            f"no installed package declares how to build an environment {name!r}; declared: {known}. An adapter "
            f"declares one by an entry point of the group {ENVIRONMENT_ENTRY_POINT_GROUP!r}"
        ) from error
    if not isinstance(recipe, EnvironmentRecipe):
        raise ConfigError(
            f"the entry point of environment {name!r} must name an EnvironmentRecipe, got {type(recipe).__name__}"
        )
    return recipe


def contents_of(name: str, recipe: EnvironmentRecipe) -> VenvContents:
    """Return what a recipe's environment holds for this driver: its requirements, the driver's Ray, and our own code.

    Raises:
        ConfigError: If a requirement is malformed.
        EnvironmentBuildError: If a distribution that goes in is not installed here, or damaged.
    """
    ray = current_interpreter().versions.get("ray")
    if ray is None:
        raise EnvironmentBuildError(
            f"environment {name!r} needs the driver's own Ray version, and this interpreter ({sys.executable}) has no ray"
        )
    return VenvContents(
        name=name,
        requirements=(*recipe.requirements, f"ray=={ray}"),
        overrides=recipe.overrides,
        sources=tuple(own_source(distribution) for distribution in recipe.distributions),
    )


def venv_of(name: str, *, root: Path | None = None) -> Venv:
    """Return where the environment of that name lies, ready or not.

    Args:
        name: Name of a declared environment.
        root: Folder of all built environments; None asks ``venv_root``.

    Raises:
        EnvironmentLookupError: As ``load_recipe``; that and ``contents_of`` say what else can be raised.
    """
    return Venv(root=root or venv_root(), contents=contents_of(name, load_recipe(name)))


def settle(environment: Environment) -> Environment:
    """Return an environment whose interpreter is known: of the kind ``requirements`` the built one.

    Raises:
        EnvironmentLookupError: If it is not ready; one line with the command that builds it.
    """
    if environment.kind != "requirements":
        return environment
    python = venv_of(environment.name).ready_python()
    return Environment(name=environment.name, kind="interpreter", python=str(python))


def installed_packages(folder: Path) -> dict[str, str]:
    """Return name to version of what lies in an environment's folder."""
    sites = [str(path) for path in folder.glob("lib/python*/site-packages")]
    found = importlib_metadata.distributions(path=sites)
    return dict(sorted((dist.metadata["Name"], dist.version) for dist in found))
