# SPDX-License-Identifier: Apache-2.0
"""What a repository without contracts would say: when a package reaches others, and by which imports."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grimp import ImportGraph

from nemo_rl_contracts.chains import Chain, ImportMap, covers, find_chains, find_reach
from nemo_rl_contracts.contract_types.coverage import uncovered_files
from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.formats import mermaid_of
from nemo_rl_contracts.known_names import KnownNames
from nemo_rl_contracts.phases import Phase
from nemo_rl_contracts.running import build_graph, put_on_path
from nemo_rl_contracts.sources import Reader, find_sources, package_folders, shown
from nemo_rl_contracts.violations import Hop, Violation, counted, hops_of

__all__ = ["NameReport", "Report", "locate", "report", "unknown_names"]

_WHEN = {
    Phase.EAGER: "load it when they are imported",
    Phase.CONDITIONAL: "may load it when they are imported, under a condition",
    Phase.LAZY: "load it when some function is called",
}


@dataclass(frozen=True, kw_only=True)
class NameReport:
    """How a package reaches one name.

    Attributes:
        name: The name.
        causes: One violation for each import of it, the earliest phase first.
        reached: Module to the earliest phase in which the name is loaded because of it.
        from_top: The chain by which importing the package itself loads it; empty where that does not.
        phases: Phase of each of `causes`.
    """

    name: str
    causes: tuple[Violation, ...]
    phases: tuple[Phase, ...]
    reached: dict[str, Phase]
    from_top: tuple[Hop, ...]

    def count(self, *phases: Phase) -> int:
        """Return the number of imports in some phases."""
        return sum(phase in phases for phase in self.phases)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found in one package.

    Attributes:
        package: Its name.
        num_modules: Number of modules that were looked at.
        uncovered: A sentence for each file that was not.
        num_compiled: Number of compiled modules; they have no source to read.
        names: One report for each name that was asked about.
    """

    package: str
    num_modules: int
    uncovered: tuple[str, ...]
    num_compiled: int
    names: tuple[NameReport, ...]

    def violations(self) -> list[Violation]:
        """Return what a baseline holds: every import that runs, or may run, when the package is imported."""
        return [
            cause
            for name in self.names
            for cause, phase in zip(name.causes, name.phases, strict=True)
            if phase in (Phase.EAGER, Phase.CONDITIONAL)
        ]

    def as_text(self) -> str:
        """Return it for people."""
        lines = [f"{self.package}: {counted(self.num_modules, 'module')}"]
        if self.num_compiled:
            lines[0] += f", and {self.num_compiled} compiled without a source to read"
        if self.uncovered:
            lines.append(f"Not covered: {counted(len(self.uncovered), 'file')}")
            lines += [f"    {text}" for text in self.uncovered[:10]]
            lines += [f"    and {len(self.uncovered) - 10} more"] if len(self.uncovered) > 10 else []
        for name in self.names:
            lines += ["", *self._about(name)]
        return "\n".join(lines)

    def _about(self, name: NameReport) -> list[str]:
        at_import = name.count(Phase.EAGER, Phase.CONDITIONAL)
        maybe = name.count(Phase.CONDITIONAL)
        lines = [
            f"{name.name}: {counted(len(name.causes), 'chain')}: {at_import} at import time"
            + (f" ({maybe} of them under a condition)" if maybe else "")
            + f", {name.count(Phase.LAZY)} lazy, {name.count(Phase.TYPING)} for type checkers only"
        ]
        reached = Counter(name.reached.values())
        for phase in _WHEN:  # what only type checkers follow loads nothing
            if reached[phase]:
                lines.append(f"    {reached[phase]} of {self.num_modules} modules {_WHEN[phase]}")
        if name.from_top:
            lines += [f"    importing {self.package} is enough:", *(f"        {hop}" for hop in name.from_top)]
        elif name.causes:
            lines.append(f"    importing {self.package} alone does not load it")
        for phase in Phase:
            found = [cause for cause, own in zip(name.causes, name.phases, strict=True) if own is phase]
            if found:
                lines.append(f"  {phase}:")
                lines += [f"    {cause.file}:{cause.line}  {cause.message}" for cause in found]
        return lines

    def as_json(self) -> str:
        """Return one JSON document."""
        document = {
            "schema": 1,
            "package": self.package,
            "modules": self.num_modules,
            "uncovered": list(self.uncovered),
            "compiled": self.num_compiled,
            "names": [
                {
                    "name": name.name,
                    "importing_the_package_loads_it": bool(name.from_top),
                    "modules_by_phase": dict(Counter(phase.value for phase in name.reached.values())),
                    "chains": [
                        {
                            "phase": phase.value,
                            "message": cause.message,
                            "file": cause.file,
                            "line": cause.line,
                            "key": cause.key,
                        }
                        for cause, phase in zip(name.causes, name.phases, strict=True)
                    ],
                }
                for name in self.names
            ],
        }
        return json.dumps(document, indent=2, ensure_ascii=False)

    def as_mermaid(self) -> str:
        """Return a Mermaid flowchart of what runs at import, and of the way there from the package itself."""
        hops = [hop for name in self.names for hop in name.from_top]
        hops += [hop for cause in self.violations() for hop in cause.hops]
        return mermaid_of(hops)


def locate(target: str) -> tuple[str, list[Path]]:
    """Find the package that a path or a name means, and put it on the import path.

    Args:
        target: A package's folder, a folder that holds exactly one package (or whose ``src`` does), a single module's
            file, or the name of an installed package.

    Returns:
        The package's name, and the folders that it consists of.

    Raises:
        MisconfiguredError: If there is none, or more than one.
    """
    if not target.strip():
        raise MisconfiguredError("PATH is a package's folder or its name; got ''. The working directory is '.'")
    path = Path(target)
    if not path.exists():
        if all(part.isidentifier() for part in target.split(".")):
            put_on_path(Path.cwd())
            return target, package_folders(target)
        raise MisconfiguredError(f"{target!r} is neither a folder nor the name of an installed package")
    path = path.resolve()
    if path.is_file() or (path / "__init__.py").is_file():
        package = path
    else:
        found = [
            folder
            for place in (path, path / "src")
            for folder in sorted(place.glob("*/__init__.py"))
            if folder.parent.name not in ("tests", "test", "docs", "examples")
        ]
        if len(found) != 1:
            names = ", ".join(shown(init.parent) for init in found) or "none"
            raise MisconfiguredError(
                f"{target} should hold one package, or be one; found {names}. Name the one you mean"
            )
        package = found[0].parent
    if package.is_file() and package.suffix != ".py":
        raise MisconfiguredError(f"{target} is no Python file")
    name = package.stem if package.is_file() else package.name
    while (package.parent / "__init__.py").is_file():  # a part of a package: its name has all of it
        package = package.parent
        name = f"{package.name}.{name}"
    if not all(part.isidentifier() for part in name.split(".")):
        raise MisconfiguredError(f"{target}: {name!r} can't be written in an import, so nothing can import it")
    if "." in name:
        raise MisconfiguredError(f"{target} is a part of the package {package}; report on the whole of it")
    above = _namespace_of(package, target)
    root = package.parents[len(above)]
    name = ".".join((*above, name))
    sys.path.insert(0, str(root))
    folders = package_folders(name)
    if not any(folder.resolve() == package for folder in folders):
        raise MisconfiguredError(
            f"the import path gives {name!r} from {folders[0] if folders else 'elsewhere'} and not from {package}; it is "
            f"loaded already, since this command uses it itself. Give its name instead to report on that copy"
        )
    return name, folders


def _namespace_of(package: Path, target: str) -> tuple[str, ...]:
    """Return the names of the namespace packages above a package, as far as the import path shows them.

    Raises:
        MisconfiguredError: If the folder above may be one, or may be a folder of sources.
    """
    here = Path.cwd().resolve()
    entries = {Path(folder or ".").resolve() for folder in sys.path} | {here, here / "src"}
    above: list[str] = []
    for folder in package.parents:
        if folder in entries:
            # What lies right in the working directory may be either.
            if above and folder == here:
                name = ".".join((*above, package.stem))
                raise MisconfiguredError(
                    f"{target} may be {name}, a part of a namespace package, or {package.stem} with "
                    f"{shown(package.parent)} as its folder of sources. Give the name {name!r} for the first, and run it "
                    f"in {shown(package.parent)} for the second"
                )
            return tuple(above)
        is_project = any((folder / name).exists() for name in ("pyproject.toml", "setup.py", "setup.cfg", ".git"))
        if is_project or folder.name in ("src", "lib", "python") or not folder.name.isidentifier():
            return ()
        above.insert(0, folder.name)
    return ()


def report(
    target: str, names: Sequence[str], *, cache_dir: str | None = None, reader_cache: Path | None = None
) -> Report:
    """Report on a package.

    Args:
        target: See ``locate``.
        names: What must not be reached, each with what is below it.
        cache_dir: Where grimp keeps results; None keeps nothing.
        reader_cache: Where we keep results; None keeps nothing.

    Raises:
        MisconfiguredError: If the package can't be found, or a name is one that nobody imports or knows.
        NotCoveredError: If a file can't be parsed at all.
    """
    package, folders = locate(target)
    base = folders[0].parent
    unread: list[str] = []
    reader = Reader(find_sources(package)[0], cache_folder=reader_cache)
    graph = _graph_of_file(package, reader) if folders[0].is_file() else build_graph([package], cache_dir=cache_dir)
    imports = ImportMap(graph, reader, base=base, unread=unread)
    found = tuple(_report_name(imports, package, name) for name in names)
    imports.reader.save()
    strays, compiled, _ = uncovered_files([package], graph.modules)
    return Report(
        package=package,
        num_modules=len(imports.modules),
        uncovered=(*(f"{shown(stray.path, base)}: {stray.reason}" for stray in strays), *unread),
        num_compiled=len(compiled),
        names=found,
    )


def _graph_of_file(module: str, reader: Reader) -> ImportGraph:
    """Make the graph of a single module; grimp takes packages only."""
    graph = ImportGraph()
    graph.add_module(module)
    for found in reader.imports(module):
        top = found.module.partition(".")[0]
        if top and top != module:
            graph.add_module(top, is_squashed=True)
            graph.add_import(importer=module, imported=top, line_number=found.lineno, line_contents="")
    return graph


def unknown_names(package: str, names: Sequence[str]) -> list[str]:
    """Return those of some names that an environment may not know where they are not installed: neither declared nor locked.

    Args:
        package: The package that is not to reach them.
        names: The names.

    Raises:
        MisconfiguredError: If a name is one that nobody imports or knows.
        NotCoveredError: As ``report``.
    """
    imports = ImportMap(build_graph([package], cache_dir=None), Reader(find_sources(package)[0]))
    known = KnownNames(Path.cwd(), roots=[package])
    found = []
    for name in names:
        if covers(package, name):
            continue
        if not imports.importers(name):
            known.require(name)
        if not known.is_written(name):
            found.append(name)
    return found


def _report_name(imports: ImportMap, package: str, name: str) -> NameReport:
    if not all(part.isidentifier() for part in name.split(".")):
        raise MisconfiguredError(f"what must not be reached is the name of a module; got {name!r}")
    if covers(package, name):
        if name not in imports.modules or name == package:
            raise MisconfiguredError(f"{name!r} is no module of {package!r} that the rest of it could be kept from")
    elif not imports.importers(name):
        KnownNames(Path.cwd(), roots=[package]).require(name)
    sources = [module for module in imports.modules if not covers(name, module)]
    chains = find_chains(imports, sources=sources, forbidden=[name], phases=list(Phase))
    chains.sort(key=lambda chain: (chain.phase.rank, chain.source, chain.edges[-1].lineno))
    top = find_chains(imports, sources=[package], forbidden=[name], phases=[Phase.EAGER, Phase.CONDITIONAL])
    shortest = min(top, key=lambda chain: (chain.phase.rank, len(chain.edges)), default=None)
    return NameReport(
        name=name,
        causes=tuple(_cause(chain, imports) for chain in chains),
        phases=tuple(chain.phase for chain in chains),
        reached=find_reach(imports, name),
        from_top=hops_of(shortest, imports) if shortest else (),
    )


def _cause(chain: Chain, imports: ImportMap) -> Violation:
    last = chain.edges[-1]
    by = ", by a string" if last.form == "dynamic" else ""
    return Violation(
        rule="report",
        message=f"{last.importer} imports {chain.target}{by}{', guarded' if last.guarded else ''}",
        file=imports.path(last.importer),
        line=last.lineno,
        hops=hops_of(chain, imports),
        key=chain.key,
    )
