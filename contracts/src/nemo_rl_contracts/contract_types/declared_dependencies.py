# SPDX-License-Identifier: Apache-2.0
"""``declared_dependencies``: what a package imports, its distribution asks for."""

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from grimp import ImportGraph

from nemo_rl_contracts.chains import Edge, ImportMap, covers
from nemo_rl_contracts.contract_types.base import FirewallContract, read_import_map, root_packages, select_modules
from nemo_rl_contracts.contract_types.options import required_text, texts
from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.known_names import normalized, read_toml, requirement_name, requirements
from nemo_rl_contracts.patterns import AllowList, parse_pairs
from nemo_rl_contracts.phases import Phase
from nemo_rl_contracts.violations import Hop, Violation

__all__ = ["DeclaredDependenciesContract"]


class DeclaredDependenciesContract(FirewallContract):
    """Imports are covered by the distribution's own metadata; what an extra brings is imported where that is meant.

    Options:

    - ``package``: the root package that the distribution holds.
    - ``pyproject``: its ``pyproject.toml``, relative to the folder of the configuration.
    - ``extra_modules``: lines ``extra: module, module``: where the packages of an extra may be imported, each module with
      those below it. Elsewhere an import of them is a violation, whether it runs at once or never.
    - ``module_distributions``: lines ``module = distribution``, where the installed metadata does not say it.
    - ``allow``: lines ``importer -> imported  # reason``; one that lets nothing through is an error.

    Imports for type checkers only do not count. First-party root packages count as distributions of their own.
    """

    rule = "declared_dependencies"

    package: str = required_text()
    pyproject: str = required_text()
    extra_modules: list[str] = texts()
    module_distributions: list[str] = texts()
    allow: list[str] = texts()

    def examine(self, graph: ImportGraph) -> list[Violation]:
        """Return one violation for each import that the metadata does not cover; see the base class.

        Args:
            graph: The import graph.
        """
        imports = read_import_map(graph, self.session_options)
        declared = _Declared.read(Path(self.pyproject))
        mapped = parse_pairs(
            self.module_distributions, option="module_distributions", separator="=", example="yaml = pyyaml"
        )
        homes = self._homes(declared, imports)
        allow = AllowList(self.allow, internal=[self.package])
        owners = _Owners(mapped=mapped, installed=importlib.metadata.packages_distributions())
        violations = [
            violation
            for edge in _foreign_edges(imports, self.package)
            if (violation := _judge(edge, imports, declared, homes, owners)) and not allow.covers(edge, edge.imported)
        ]
        imports.reader.save()
        useless = [
            *allow.unused(),
            *(f"module_distributions maps {name!r}, which {self.package} does not import" for name in owners.unused()),
        ]
        if useless:
            raise MisconfiguredError("\n".join(useless))
        return violations

    def _homes(self, declared: "_Declared", imports: ImportMap) -> dict[str, list[str]]:
        """Return the modules in which the packages of each extra may be imported."""
        if self.package not in root_packages(self.session_options):
            raise MisconfiguredError(f"package {self.package!r} is none of the root packages")
        lines = parse_pairs(self.extra_modules, option="extra_modules", separator=":", example="plots: pkg.plots")
        for extra in lines:
            if normalized(extra) not in declared.extras:
                raise MisconfiguredError(
                    f"extra_modules names the extra {extra!r}; {self.pyproject} has "
                    f"{', '.join(sorted(declared.extras)) or 'none'}"
                )
        return {
            normalized(extra): select_modules(
                [name.strip() for name in names.split(",")], imports.modules, option="extra_modules"
            )
            for extra, names in lines.items()
        }


@dataclass(frozen=True, kw_only=True)
class _Declared:
    """What a distribution asks for, by normalised name."""

    name: str
    base: frozenset[str]
    extras: Mapping[str, frozenset[str]]

    @classmethod
    def read(cls, path: Path) -> "_Declared":
        document = read_toml(path)
        base, extras = requirements(document, path)
        project = document.get("project", {})
        if not isinstance(project.get("name"), str):
            raise MisconfiguredError(f"{path} has no [project] table with a name; only such metadata can be checked")
        for dynamic in ("dependencies", "optional-dependencies"):
            if dynamic in project.get("dynamic", []):
                raise MisconfiguredError(f"{path} computes its {dynamic} when it is built, so they can't be read there")
        return cls(
            name=normalized(project["name"]),
            base=_names(base),
            extras={normalized(extra): _names(lines) for extra, lines in extras.items()},
        )


def _names(lines: list[str]) -> frozenset[str]:
    return frozenset(map(requirement_name, lines))


class _Owners:
    """Which distributions bring a module."""

    def __init__(self, *, mapped: Mapping[str, str], installed: Mapping[str, list[str]]) -> None:
        self._mapped = mapped
        self._installed = installed
        self._used: set[str] = set()

    def of(self, module: str) -> frozenset[str]:
        """Return the normalised names of the distributions that may bring a module."""
        for name in self._mapped:
            if covers(name, module):
                self._used.add(name)
                return frozenset({normalized(self._mapped[name])})
        top = module.partition(".")[0]
        return frozenset({normalized(top), *map(normalized, self._installed.get(top, []))})

    def unused(self) -> list[str]:
        return sorted(set(self._mapped) - self._used)


def _foreign_edges(imports: ImportMap, package: str) -> Iterator[Edge]:
    """Yield the imports of other people's packages, and of the other root packages, in the order of files and lines."""
    for module in sorted(imports.modules):
        if not covers(package, module) or not _is_foreign_importer(imports, module, package):
            continue
        for edge in imports.edges(module):
            top = edge.imported.partition(".")[0]
            foreign = not covers(package, edge.imported) and top not in sys.stdlib_module_names
            if foreign and edge.phase is not Phase.TYPING and not edge.initialiser:
                yield edge


def _is_foreign_importer(imports: ImportMap, module: str, package: str) -> bool:
    """Tell whether a module imports anything beyond its package and the standard library, so that it need be parsed."""
    if module in imports.unseen:
        return True
    return any(
        not covers(package, name) and name.partition(".")[0] not in sys.stdlib_module_names
        for name in imports.graph.find_modules_directly_imported_by(module)
    )


def _judge(
    edge: Edge, imports: ImportMap, declared: _Declared, homes: Mapping[str, list[str]], owners: _Owners
) -> Violation | None:
    """Return what is wrong with an import, None if it is covered."""
    names = owners.of(edge.imported)
    if names & (declared.base | {declared.name}):
        return None
    extras = sorted(extra for extra, wanted in declared.extras.items() if names & wanted)
    if any(edge.importer in homes.get(extra, ()) for extra in extras):
        return None
    if extras:
        allowed = [module for extra in extras for module in homes.get(extra, ())]
        message = f"{edge.importer} imports {edge.imported}, which only the extra {extras[0]!r} brings; " + (
            f"that extra is for {', '.join(allowed[:3])}" if allowed else "no module is listed for that extra"
        )
        advice = "Move the use to a module of that extra, list the module in `extra_modules`, or depend on it always."
    else:
        message = f"{edge.importer} imports {edge.imported}, which the distribution {declared.name!r} does not ask for"
        advice = "Add it to its dependencies; if the distribution has another name, say so in `module_distributions`."
    return Violation(
        rule=DeclaredDependenciesContract.rule,
        message=f"{message} ({edge.phase}{', guarded' if edge.guarded else ''})",
        file=imports.path(edge.importer),
        line=edge.lineno,
        hops=(
            Hop(
                importer=edge.importer,
                imported=edge.imported,
                file=imports.path(edge.importer),
                line=edge.lineno,
                phase=edge.phase.value,
            ),
        ),
        key=f"{edge.importer} -> {edge.imported}",
        advice=advice,
    )
