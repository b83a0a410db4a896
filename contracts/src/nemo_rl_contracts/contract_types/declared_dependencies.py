# SPDX-License-Identifier: Apache-2.0
"""``declared_dependencies``: what a package imports, its distribution asks for."""

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from grimp import ImportGraph

from nemo_rl_contracts import installed
from nemo_rl_contracts.chains import Edge, ImportMap, covers
from nemo_rl_contracts.contract_types.base import FirewallContract, read_import_map, root_packages, select_modules
from nemo_rl_contracts.contract_types.options import required_text, texts
from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.known_names import Requirement, is_namespace, normalized, read_toml, requirements
from nemo_rl_contracts.lock_markers import may_apply_on_this_python
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

    Imports for type checkers only do not count. First-party root packages count as distributions of their own. A
    requirement whose marker is false for the Python that runs here does not cover an import that runs on each Python:
    eager, and not guarded. Markers about platforms are taken as true, since a module may be for that platform only. Of a
    namespace package that is installed, the files of the distributions say which of them brings a part.
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
        owners = _Owners(mapped=mapped, installed=installed.owners())
        judge = _Judge(imports=imports, declared=declared, homes=homes)
        violations = [
            violation
            for edge in _foreign_edges(imports, self.package)
            for module, names in owners.of_edge(edge)
            if (violation := judge.of(edge, module, names)) and not allow.covers(edge, module)
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
class _Asked:
    """What one list of requirements asks for, by normalised name.

    Attributes:
        here: What may apply on the Python that runs here.
        elsewhere: What applies on other versions of Python only.
        through: Of both, what is asked for through another extra of the distribution itself.
    """

    here: frozenset[str]
    elsewhere: frozenset[str]
    through: frozenset[str] = frozenset()

    def covers(self, names: frozenset[str], *, always: bool) -> bool:
        """Tell whether an import of one of some distributions is asked for; `always` if it runs on each Python."""
        return bool(names & (self.here if always else self.here | self.elsewhere))


@dataclass(frozen=True, kw_only=True)
class _Declared:
    """What a distribution asks for."""

    name: str
    base: _Asked
    extras: Mapping[str, _Asked]

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
        name = normalized(project["name"])
        parsed = {normalized(extra): list(map(Requirement.parse, lines)) for extra, lines in extras.items()}
        return cls(
            name=name,
            base=_asked(list(map(Requirement.parse, base)), parsed, name=name, path=path),
            extras={extra: _asked(lines, parsed, name=name, path=path) for extra, lines in parsed.items()},
        )


def _asked(lines: list[Requirement], extras: Mapping[str, list[Requirement]], *, name: str, path: Path) -> _Asked:
    """Sort requirements, with those of the distribution's own extras that they ask for."""
    here: set[str] = set()
    elsewhere: set[str] = set()
    direct = {line.name for line in lines}
    seen: set[tuple[str, bool]] = set()
    waiting = [(line, True) for line in lines]
    while waiting:
        line, applies = waiting.pop()
        applies = applies and may_apply_on_this_python(line.marker)
        (here if applies else elsewhere).add(line.name)
        for extra in line.extras if line.name == name else ():
            if extra not in extras:
                raise MisconfiguredError(f"{path} asks for its own extra {extra!r}, which it does not have")
            if (extra, applies) not in seen:
                seen.add((extra, applies))
                waiting += [(below, applies) for below in extras[extra]]
    return _Asked(here=frozenset(here), elsewhere=frozenset(elsewhere), through=frozenset((here | elsewhere) - direct))


class _Owners:
    """Which distributions bring a module."""

    def __init__(self, *, mapped: Mapping[str, str], installed: Mapping[str, list[str]]) -> None:
        self._mapped = mapped
        self._installed = installed
        self._used: set[str] = set()
        self._files: dict[str, frozenset[str]] = {}

    def of(self, module: str) -> frozenset[str]:
        """Return the normalised names of the distributions that may bring a module."""
        for name in self._mapped:
            if covers(name, module):
                self._used.add(name)
                return frozenset({normalized(self._mapped[name])})
        top, *rest = module.split(".")
        installed = self._installed.get(top, [])
        if rest and installed and is_namespace(top):
            # Each part of a namespace belongs to the distribution that has its files; the top says nothing.
            holders = {name for name in installed if self._holds(name, module)}
            spelled = {"-".join(module.split(".")[:length]) for length in range(2, len(rest) + 2)}
            return frozenset(map(normalized, holders or spelled))
        return frozenset({normalized(top), *map(normalized, installed)})

    def of_edge(self, edge: Edge) -> list[tuple[str, frozenset[str]]]:
        """Return what an import loads, each with the distributions that may bring it."""
        top = edge.imported.partition(".")[0]
        folder = f"{edge.imported.replace('.', '/')}/__init__"
        if (
            edge.names
            and is_namespace(top)
            and not any(folder in self._files_of(name) for name in self._installed.get(top, []))
            and not any(covers(name, edge.imported) for name in self._mapped)
        ):
            # A namespace has no names of its own: `from google import auth` loads `google.auth`.
            return [(name, self.of(name)) for name in (f"{edge.imported}.{part}" for part in edge.names)]
        return [(edge.imported, self.of(edge.imported))]

    def _holds(self, distribution: str, module: str) -> bool:
        """Tell whether an installed distribution has a module, or a package above it that is no namespace."""
        files = self._files_of(distribution)
        if not files:
            return True  # it was installed without a list, so nothing speaks against it
        path = module.replace(".", "/")
        above = itertools.accumulate(path.split("/"), "{}/{}".format)
        return path in files or any(f"{part}/__init__" in files for part in above)

    def _files_of(self, distribution: str) -> frozenset[str]:
        """Return the files of an installed distribution without their suffixes, and their folders."""
        if distribution not in self._files:
            found: set[str] = set()
            for file in installed.files_of(distribution):
                found.add("/".join((*file.parts[:-1], file.name.partition(".")[0])))
                found.update("/".join(file.parts[:length]) for length in range(1, len(file.parts)))
            self._files[distribution] = frozenset(found)
        return self._files[distribution]

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


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """Says what is wrong with an import."""

    imports: ImportMap
    declared: _Declared
    homes: Mapping[str, list[str]]

    def of(self, edge: Edge, module: str, names: frozenset[str]) -> Violation | None:
        """Return what is wrong with an import, None if it is covered.

        Args:
            edge: The import.
            module: What it loads.
            names: The distributions that may bring that.
        """
        declared, homes = self.declared, self.homes
        # One that is guarded, under a condition or in a function may be meant for the Python that needs it.
        always = edge.phase is Phase.EAGER and not edge.guarded
        if declared.name in names or declared.base.covers(names, always=always):
            return None
        extras = [extra for extra, asked in declared.extras.items() if asked.covers(names, always=always)]
        if any(edge.importer in homes.get(extra, ()) for extra in extras):
            return None
        extras.sort(key=lambda extra: (bool(names & declared.extras[extra].through), extra))
        if extras:
            allowed = [home for extra in extras for home in homes.get(extra, ())]
            message = f"{edge.importer} imports {module}, which only the extra {extras[0]!r} brings; " + (
                f"that extra is for {', '.join(allowed[:3])}" if allowed else "no module is listed for that extra"
            )
            advice = (
                "Move the use to a module of that extra, list the module in `extra_modules`, or depend on it always."
            )
        elif declared.base.covers(names, always=False):
            message = (
                f"{edge.importer} imports {module}, which {declared.name!r} asks for on other versions of Python only"
            )
            advice = "Import it under the condition that its marker has, or widen the marker."
        else:
            message = f"{edge.importer} imports {module}, which the distribution {declared.name!r} does not ask for"
            advice = (
                "Add it to its dependencies; if the distribution has another name, say so in `module_distributions`."
            )
        file = self.imports.path(edge.importer)
        hop = Hop(importer=edge.importer, imported=module, file=file, line=edge.lineno, phase=edge.phase.value)
        return Violation(
            rule=DeclaredDependenciesContract.rule,
            message=f"{message} ({edge.phase}{', guarded' if edge.guarded else ''})",
            file=file,
            line=edge.lineno,
            hops=(hop,),
            key=f"{edge.importer} -> {module}",
            advice=advice,
        )
