# SPDX-License-Identifier: Apache-2.0
"""Whether a module of somebody else's exists as far as this project can know: installed, declared or locked.

A rule against a name that nobody has is kept forever, so a typo in it must not pass for a proof.
"""

import difflib
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.patterns import parse_pairs

__all__ = ["KnownNames", "normalized", "read_toml", "requirement_name", "requirements"]

#: Lock files that hold a list of packages with names, and the key of that list.
_LOCKS = {"uv.lock": "package", "poetry.lock": "package", "pdm.lock": "package", "pylock.toml": "packages"}
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


def normalized(distribution: str) -> str:
    """Return the name of a distribution as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def requirement_name(requirement: str) -> str:
    """Return the normalised name of the distribution that a requirement (PEP 508) asks for, "" of another text."""
    match = _NAME.match(requirement)
    return normalized(match[1]) if match else ""


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        MisconfiguredError: If it can't be read or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MisconfiguredError(f"{path} can't be read: {error}") from error


def requirements(project: Mapping[str, Any], path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Return the requirements in a pyproject file's `project` table: those that always count, and those of each extra.

    Args:
        project: What the file holds.
        path: The file, for messages.

    Raises:
        MisconfiguredError: If one of them has another form than the standard asks for.
    """
    table = project.get("project", {})
    extras = table.get("optional-dependencies", {}) if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(extras, dict):
        raise MisconfiguredError(f"{path}: project or optional-dependencies is no table")
    base = table.get("dependencies", [])
    for name, lines in {"dependencies": base, **extras}.items():
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise MisconfiguredError(f"{path}: {name} is no list of requirements; got {lines!r}")
    return base, extras


class KnownNames:
    """What the project in a folder knows of other people's packages."""

    def __init__(
        self,
        folder: Path,
        *,
        roots: Iterable[str],
        module_distributions: Iterable[str] = (),
        accept_unknown: Iterable[str] = (),
    ) -> None:
        """Take the project.

        Args:
            folder: Where its ``pyproject.toml`` and lock are.
            roots: Its own root packages; their pyproject files are looked at too.
            module_distributions: Lines ``module = distribution``, where the two have different names.
            accept_unknown: Modules that are taken as they are.

        Raises:
            MisconfiguredError: If a line has another form.
        """
        self._folder = folder
        self._roots = tuple(roots)
        self._mapped = parse_pairs(
            module_distributions,
            option="module_distributions",
            separator="=",
            example="flashinfer = flashinfer-python",
        )
        self._accepted = frozenset(accept_unknown)
        self._asked: set[str] = set()

    def require(self, module: str) -> None:
        """Check that a module of somebody else's exists.

        Args:
            module: Its full name; of a submodule the file is looked for where the package is installed.

        Raises:
            MisconfiguredError: If it is neither importable, declared nor locked, with near names.
        """
        self._asked.add(module)
        top = module.partition(".")[0]
        spelled = {_squeezed(name) for name in (self._mapped.get(module, ""), self._mapped.get(top, ""), top) if name}
        installed = self._importable(module)
        if module in self._accepted:
            if installed or spelled & set(map(_squeezed, self._written)):
                raise MisconfiguredError(f"accept_unknown lists {module!r}, which is known here; take it out")
            return
        # A package that is installed without such a module is not saved by being declared.
        known = installed or (installed is None and self._is_declared(spelled))
        if known:
            return
        candidates = sorted(
            {*self._written, *self._asked_for, *sys.modules, *importlib.metadata.packages_distributions()}
        )
        near = difflib.get_close_matches(top if installed is None else module, candidates, n=3, cutoff=0.75)
        what = (
            f"the package {top!r} is installed and has no module {module!r}"
            if installed is False
            else f"no module {module!r} is installed here, and no distribution of that name is declared or locked"
        )
        raise MisconfiguredError(
            f"{what}, so the rule would prove nothing. "
            + (f"Did you mean {' or '.join(map(repr, near))}? " if near else "")
            + f"If its distribution has another name, add '{module} = DISTRIBUTION' to module_distributions; if it is "
            "known nowhere yet, list it in accept_unknown"
        )

    def unused(self) -> list[str]:
        """Return a sentence for each entry that nothing was asked of."""
        tops = {module.partition(".")[0] for module in self._asked}
        return [
            *(
                f"module_distributions maps {name!r}, which the contract does not name"
                for name in sorted(self._mapped)
                if name not in self._asked | tops
            ),
            *(
                f"accept_unknown lists {name!r}, which the contract does not name"
                for name in sorted(self._accepted)
                if name not in self._asked
            ),
        ]

    def _importable(self, module: str) -> bool | None:
        """Tell whether a module is installed; False where its package is and the module is not. Imports nothing."""
        top, *rest = module.split(".")
        if top in sys.stdlib_module_names and (not rest or module in sys.modules):
            return True  # some are there on other systems only, and `os.path` is no file of its own
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return None
        if spec is None or (spec.origin is None and top not in importlib.metadata.packages_distributions()):
            return None  # a bare folder of that name is no package
        name = top
        for part in rest:
            if spec.submodule_search_locations is None:
                return False
            name = f"{name}.{part}"
            spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
            if spec is None:
                return False
        return True

    def _is_declared(self, spelled: Set[str]) -> bool:
        # The metadata of what is installed is asked last: reading it takes longer than all the rest.
        return bool(spelled & set(map(_squeezed, self._written))) or bool(
            spelled & set(map(_squeezed, self._asked_for))
        )

    @cached_property
    def _written(self) -> frozenset[str]:
        """Normalised names of the distributions that this folder declares or locks."""
        names: set[str] = set()
        for path in self._projects():
            names |= _declared(path)
        for lock, key in _LOCKS.items():
            if (path := self._folder / lock).is_file():
                packages = read_toml(path).get(key, [])
                names |= {normalized(row["name"]) for row in packages if isinstance(row, dict) and "name" in row}
        return frozenset(names - {""})

    @cached_property
    def _asked_for(self) -> frozenset[str]:
        """Normalised names of the distributions that the installed root packages belong to, and ask for."""
        names: set[str] = set()
        owners = importlib.metadata.packages_distributions()
        for root in self._roots:
            for owner in owners.get(root.partition(".")[0], []):
                names.add(normalized(owner))
                names |= {requirement_name(line) for line in importlib.metadata.requires(owner) or []}
        return frozenset(names - {""})

    def _projects(self) -> list[Path]:
        """Return the pyproject files of this folder and of those right below it, as a workspace has them."""
        found = [self._folder / "pyproject.toml", *self._folder.glob("*/pyproject.toml")]
        return [path for path in found if path.is_file()]


def _declared(path: Path) -> set[str]:
    project = read_toml(path)
    base, extras = requirements(project, path)
    groups = project.get("dependency-groups", {})
    lines = [*base, *(line for extra in extras.values() for line in extra)]
    for group in groups.values() if isinstance(groups, dict) else ():
        lines += [line for line in group if isinstance(line, str)]  # a table includes another group, which is read too
    return {requirement_name(line) for line in lines}


def _squeezed(name: str) -> str:
    """Leave letters and digits only: `lm-format-enforcer` is imported as `lmformatenforcer`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
