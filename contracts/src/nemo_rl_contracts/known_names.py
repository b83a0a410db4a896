# SPDX-License-Identifier: Apache-2.0
"""Whether a module of somebody else's exists as far as this project can know: installed, declared or locked.

A rule against a name that nobody has is kept forever, so a typo in it must not pass for a proof.
"""

import difflib
import importlib.machinery
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.installed import normalized, owners, requirements_of
from nemo_rl_contracts.patterns import parse_pairs

__all__ = ["KnownNames", "Requirement", "is_namespace", "normalized", "read_toml", "requirement_name", "requirements"]

#: Lock files that hold a list of packages with names, and the key of that list.
_LOCKS = {"uv.lock": "package", "poetry.lock": "package", "pdm.lock": "package", "pylock.toml": "packages"}
_REQUIREMENT = re.compile(
    r"\s*(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[(?P<extras>[^\]]*)\])?(?P<rest>.*)", re.DOTALL
)


def requirement_name(requirement: str) -> str:
    """Return the normalised name of the distribution that a requirement (PEP 508) asks for, "" of another text."""
    return Requirement.parse(requirement).name


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """What one line of requirements (PEP 508) asks for.

    Attributes:
        name: Normalised name of the distribution, "" of a text that is none.
        extras: Normalised names of the extras of it.
        marker: When it applies; "" for always.
    """

    name: str
    extras: tuple[str, ...] = ()
    marker: str = ""

    @classmethod
    def parse(cls, line: str) -> "Requirement":
        """Read a line."""
        match = _REQUIREMENT.match(line)
        if match is None:
            return cls(name="")
        # An address may hold a semicolon; before a marker it has a space then.
        separator = r"\s;" if "@" in match["rest"].partition(";")[0] else ";"
        marker = re.split(separator, match["rest"], maxsplit=1)[1:]
        extras = [normalized(extra.strip()) for extra in (match["extras"] or "").split(",") if extra.strip()]
        return cls(name=normalized(match["name"]), extras=tuple(extras), marker="".join(marker).strip())


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
            accept_unknown: Modules that are taken as they are; that one is installed here does not make it idle, since it
                may be missing elsewhere.

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
        self._unverified: set[str] = set()

    def require(self, module: str) -> None:
        """Check that a module of somebody else's exists.

        Args:
            module: Its full name; of a submodule the file is looked for where the package is installed.

        Raises:
            MisconfiguredError: If it is neither importable, declared nor locked, with near names; or if the distribution
                that is declared or locked is installed and brings other modules.
        """
        self._asked.add(module)
        if module in self._accepted:
            if self.is_written(module):
                raise MisconfiguredError(
                    f"accept_unknown lists {module!r}, which is known here without it: it is declared, locked or a part of "
                    f"Python; take it out"
                )
            return
        installed = self._importable(module)
        if installed:
            return
        brought: list[str] = []
        # A package that is installed without such a module is not saved by being declared; of a namespace another
        # distribution may bring the part. What is installed asks for is read last: that takes longer than all the rest.
        if installed is None or is_namespace(module.partition(".")[0]):
            for names in (self._written, self._asked_for):
                believed, others = self._vouchers(module, names)
                if believed:
                    self._unverified.add(module)
                    return
                brought += others
        raise MisconfiguredError(self._unknown(module, installed, brought))

    def _unknown(self, module: str, installed: bool | None, brought: list[str]) -> str:
        """Return why a module proves nothing, and the ways out."""
        top = module.partition(".")[0]
        what = (
            f"the package {top!r} is installed and has no module {module!r}"
            if installed is False
            else f"no module {module!r} is installed here, and no distribution of that name is declared or locked"
        )
        if brought:
            modules = _some(self._brings[brought[0]])
            return (
                f"the distribution {brought[0]!r} is installed and brings {modules}, and no module {module!r}, so the rule "
                f"would prove nothing. Name the module that is meant; if {module!r} is known nowhere yet, list it in "
                f"accept_unknown"
            )
        candidates = sorted({*self._written, *self._asked_for, *sys.modules, *self._owners})
        near = difflib.get_close_matches(top if installed is None else module, candidates, n=3, cutoff=0.75)
        near = [name for name in near if name != module]
        return (
            f"{what}, so the rule would prove nothing. "
            + (f"Did you mean {' or '.join(map(repr, near))}? " if near else "")
            + f"If its distribution has another name, add '{module} = DISTRIBUTION' to module_distributions; if it is "
            "known nowhere yet, list it in accept_unknown"
        )

    def is_written(self, module: str) -> bool:
        """Tell whether a module is known in every environment: part of Python, or declared or locked under its name."""
        return _is_standard(module) or bool(self._vouchers(module, self._written)[0])

    def notes(self) -> list[str]:
        """Return what a reader should know of the names that were asked about: those that nobody could look up."""
        if not self._unverified:
            return []
        return [
            f"not installed here, so only the name of a distribution that is declared or locked vouches for "
            f"{', '.join(sorted(self._unverified))}"
        ]

    def _vouchers(self, module: str, names: Set[str]) -> tuple[list[str], list[str]]:
        """Return those of some distributions that bring a module as far as their names say.

        Returns:
            Those that are to be believed, and those that are installed and bring other modules.
        """
        top = module.partition(".")[0]
        mapped = self._mapped.get(module, "") or self._mapped.get(top, "")
        spelled = {_squeezed(name) for name in (mapped, top, module) if name}
        believed: list[str] = []
        others: list[str] = []
        for name in sorted(name for name in names if _squeezed(name) in spelled):
            modules = self._brings.get(name)
            brings = modules is None or (top in modules and self._importable(module) is not False)
            (believed if brings else others).append(name)
        return believed, others

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
        if _is_standard(module):
            return True
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return None
        if spec is None or (spec.origin is None and top not in self._owners):
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

    @cached_property
    def _owners(self) -> Mapping[str, list[str]]:
        """Top-level modules to the distributions that bring them, of all that is installed."""
        return owners()

    @cached_property
    def _brings(self) -> Mapping[str, frozenset[str]]:
        """Normalised names of what is installed to the top-level modules that it brings."""
        found: dict[str, set[str]] = {}
        for top, distributions in self._owners.items():
            for name in distributions:
                found.setdefault(normalized(name), set()).add(top)
        return {name: frozenset(tops) for name, tops in found.items()}

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
        for root in self._roots:
            for owner in self._owners.get(root.partition(".")[0], []):
                names.add(normalized(owner))
                names |= {requirement_name(line) for line in requirements_of(owner)}
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


def _is_standard(module: str) -> bool:
    """Tell whether a module is a part of Python; some are there on other systems only, and `os.path` is no file."""
    top, _, rest = module.partition(".")
    return top in sys.stdlib_module_names and (not rest or module in sys.modules)


def is_namespace(top: str) -> bool:
    """Tell whether a package is spread over several folders, each of which may belong to another distribution."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is None and spec.submodule_search_locations is not None


def _some(modules: Iterable[str]) -> str:
    """Return names of modules, without those that nobody imports by hand where there are others."""
    names = sorted(modules)
    public = [name for name in names if not name.startswith("_") and "/" not in name] or names
    return ", ".join(public[:4])


def _squeezed(name: str) -> str:
    """Leave letters and digits only: `lm-format-enforcer` is imported as `lmformatenforcer`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
