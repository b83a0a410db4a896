# SPDX-License-Identifier: Apache-2.0
"""Who imports what and when, and the chains that lead from some modules to others.

grimp says who imports what. A file is parsed only where its answer can matter: when it stands on the way to a module
that somebody asks about, or when it holds words that grimp does not look at. What is added to grimp's edges:

- importing ``a.b.c`` runs ``a/__init__.py`` and ``a/b/__init__.py`` first;
- a literal given to a function that imports;
- ``from package import *``, which imports the modules that the package's ``__all__`` names;
- a name ``TYPE_CHECKING`` that is not the one of ``typing``: what stands below it may run.
"""

import bisect
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from grimp import ImportGraph

from nemo_rl_contracts.errors import NotCoveredError
from nemo_rl_contracts.phases import Form, FoundImport, Phase
from nemo_rl_contracts.sources import Reader, shown

__all__ = ["Chain", "Edge", "ImportMap", "ancestors", "covers", "find_chains", "find_reach"]

#: Number of modules up to which it is quicker to look at the files' bytes for each than to parse them all.
_FEW = 8


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One import of one module by another.

    Attributes:
        importer: The module whose file holds it.
        imported: What it imports: a module of the packages under check, or the name of an external one as written.
        names: What a ``from`` statement takes out of an external module; any of them may be a module.
        lineno: Line in the importer's file; 0 where a package's initialiser runs because a module below it is imported.
        phase: When it runs.
        form: How it is written.
        guarded: See ``FoundImport``.
        initialiser: True where ``imported`` runs as a package on the way to a module below it.
    """

    importer: str
    imported: str
    names: tuple[str, ...] = ()
    lineno: int
    phase: Phase
    form: Form = Form.STATEMENT
    guarded: bool = False
    initialiser: bool = False

    def loads(self, module: str) -> str:
        """Return the name under which this import loads a module or something below it, "" if it does not."""
        if covers(module, self.imported):
            return self.imported
        return next((full for name in self.names if covers(module, full := f"{self.imported}.{name}")), "")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A way from one module to another, hop by hop.

    Attributes:
        edges: The hops, from the start to the end; never empty.
        target: The name that the last hop loads.
    """

    edges: tuple[Edge, ...]
    target: str

    @property
    def phase(self) -> Phase:
        """The latest phase of its hops: a chain runs when its last part to run does."""
        return max((edge.phase for edge in self.edges), key=lambda phase: phase.rank)

    @property
    def source(self) -> str:
        """The module that it starts from."""
        return self.edges[0].importer

    @property
    def key(self) -> str:
        """What makes it the same chain tomorrow: where it leaves, where it ends, and when; no line numbers."""
        last = self.edges[-1]
        first = f"{self.source} -> " if len(self.edges) > 1 else ""
        return f"{first}{last.importer} -> {self.target} ({self.phase})"


def covers(module: str, name: str) -> bool:
    """Tell whether a name is a module or something below it."""
    return name == module or name.startswith(module + ".")


def ancestors(module: str) -> list[str]:
    """Return the packages above a module, the top one first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


@dataclass(frozen=True)
class ImportMap:
    """The imports of some packages.

    Attributes:
        graph: grimp's graph of them, external packages included.
        reader: Their files.
        base: Folder that paths are shown relative to; None for the working directory.
        unread: Takes a sentence for each file that can't be parsed; None makes such a file an error.
    """

    graph: ImportGraph
    reader: Reader
    base: Path | None = None
    unread: list[str] | None = None
    _edges: dict[str, tuple[Edge, ...]] = field(default_factory=dict, repr=False)
    _asked: set[str] = field(default_factory=set, repr=False)
    _edges_at: dict[tuple[str, int], list[Edge]] = field(default_factory=dict, repr=False)

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules of the packages, external ones left out."""
        return frozenset(name for name in self.graph.modules if not self.graph.is_module_squashed(name))

    @cached_property
    def unseen(self) -> frozenset[str]:
        """The modules that may import something that grimp does not see."""
        return self._odd | frozenset(
            module for module in self.reader.files.keys() & self.modules if self.reader.marks(module).may_call
        )

    @cached_property
    def _odd(self) -> frozenset[str]:
        """The modules whose statements may do something else than grimp takes them for."""
        return frozenset(
            module for module in self.reader.files.keys() & self.modules if self.reader.marks(module).is_odd
        )

    def edges(self, module: str) -> tuple[Edge, ...]:
        """Return the imports of one module, with the packages that run on the way.

        Raises:
            NotCoveredError: If its file can't be read or parsed, and `unread` does not take it.
        """
        if module not in self._edges:
            try:
                found = self.reader.imports(module) if module in self.reader.files else []
                self._edges[module] = tuple(edge for one in found for edge in self._edges_of(module, one))
            except NotCoveredError as error:
                if self.unread is None:
                    raise
                self.unread.append(str(error))
                self._edges[module] = ()
        return self._edges[module]

    def edges_to(self, module: str) -> Iterator[tuple[str, Sequence[Edge]]]:
        """Yield each module that may import a module or something below it, with the imports by which it may do so.

        There may be others among these imports. Where grimp knows the lines, the rest of the importer's file is not
        parsed.

        Raises:
            NotCoveredError: As ``edges``.
        """
        nodes: dict[str, list[str]] = defaultdict(list)
        for node in self._related(module, self._sorted_nodes):
            for importer in self.graph.find_modules_that_directly_import(node):
                nodes[importer].append(node)
        for importer in self._unseen_importers(module):
            nodes[importer] = []
        for importer in sorted(nodes):
            yield importer, self._edges_to_nodes(importer, nodes[importer])

    def importers(self, module: str) -> set[str]:
        """Return the modules that may import a module or something below it.

        Raises:
            NotCoveredError: As ``edges``.
        """
        return {importer for importer, _ in self.edges_to(module)}

    def _unseen_importers(self, module: str) -> set[str]:
        """Return the modules that may import a module in a way that grimp does not see."""
        self._asked.add(module)
        if len(self._asked) > _FEW:
            # Who asks about many modules is better served by all answers at once.
            return {one for name in self._related(module, self._sorted_unseen) for one in self._importers_unseen[name]}
        return {*self._odd, *(one for one in self.unseen if self.reader.may_name(one, module))}

    def _edges_to_nodes(self, importer: str, nodes: Sequence[str]) -> Sequence[Edge]:
        """Return the edges of the lines on which grimp has seen an importer import some nodes, or all of its edges."""
        if importer in self._edges or importer in self.unseen or importer not in self.reader.files:
            return self.edges(importer)
        lines = {
            details["line_number"]
            for node in nodes
            for details in self.graph.get_import_details(importer=importer, imported=node)
        }
        found: list[Edge] = []
        for line in sorted(lines):
            if (importer, line) not in self._edges_at:
                parts = self.reader.imports_at(importer, line)
                if parts is None:
                    return self.edges(importer)
                self._edges_at[importer, line] = [edge for part in parts for edge in self._edges_of(importer, part)]
            found += self._edges_at[importer, line]
        return found

    def _related(self, module: str, names: Sequence[str]) -> list[str]:
        """Pick from sorted names a module, what is below it, and of an external one also what is above it."""
        # "/" is the character after ".", so this range holds the names that begin with the module's name and a dot.
        below = names[bisect.bisect_left(names, f"{module}.") : bisect.bisect_left(names, f"{module}/")]
        above = [module] if module in self.modules else [*ancestors(module), module]
        return [*below, *(name for name in above if _holds(names, name))]

    @cached_property
    def _sorted_nodes(self) -> list[str]:
        return sorted(self.graph.modules)

    @cached_property
    def _importers_unseen(self) -> Mapping[str, set[str]]:
        """What grimp may not have seen: a name to the modules that import it."""
        found: dict[str, set[str]] = defaultdict(set)
        for module in self.unseen:
            for edge in self.edges(module):
                found[edge.imported].add(module)
        return found

    @cached_property
    def _sorted_unseen(self) -> list[str]:
        return sorted(self._importers_unseen)

    def path(self, module: str) -> str:
        """Return the file of a module as people see it, "" if it has none."""
        file = self.reader.files.get(module)
        return shown(file.path, self.base) if file else ""

    def _edges_of(self, module: str, found: FoundImport) -> Iterator[Edge]:
        """Yield the edges that one import of a module comes to."""
        if found.module.startswith("."):
            return  # its package is unknown or it goes above the top: Python would refuse it too
        for imported, names, phase in self._targets(found):
            common = {"importer": module, "phase": phase, "guarded": found.guarded}
            if imported != module:
                yield Edge(**common, imported=imported, names=names, lineno=found.lineno, form=found.form)
            if imported in self.modules:
                for package in ancestors(imported):
                    if package in self.modules and not covers(package, module):
                        yield Edge(**common, imported=package, lineno=found.lineno, form=found.form, initialiser=True)

    def _targets(self, found: FoundImport) -> Iterator[tuple[str, tuple[str, ...], Phase]]:
        """Turn what is written into modules: `from a import b` is `a.b` where that is a module, else `a`."""
        if not self._is_internal(found.module):
            yield found.module, tuple(name for name in found.names if name != "*"), found.phase
            return
        written = dict.fromkeys([f"{found.module}.{name}" for name in found.names] or [found.module], found.phase)
        if found.names == ("*",) and found.module in self.reader.files:
            for name, is_sure in self.reader.exported(found.module).items():
                phase = found.phase if is_sure else found.phase.then(Phase.CONDITIONAL)
                written[f"{found.module}.{name}"] = phase
        known: dict[str, Phase] = {}
        for target, phase in written.items():
            # A name that is no module is an attribute, or is made at run time: then its package is what is imported.
            hit = next((name for name in [target, *reversed(ancestors(target))] if name in self.modules), "")
            known[hit] = min(phase, known.get(hit, phase), key=lambda one: one.rank)
        for target in sorted(known.keys() - {""}):
            yield target, (), known[target]

    def _is_internal(self, name: str) -> bool:
        return name in self.modules or any(package in self.modules for package in ancestors(name))


def _holds(names: Sequence[str], name: str) -> bool:
    """Tell whether sorted names hold a name."""
    place = bisect.bisect_left(names, name)
    return place < len(names) and names[place] == name


def find_chains(
    imports: ImportMap,
    *,
    sources: Collection[str],
    forbidden: Sequence[str],
    phases: Collection[Phase],
    is_allowed: Callable[[Edge, str], bool] | None = None,
) -> list[Chain]:
    """Find how some modules reach others in the given phases.

    One chain is returned for each import that ends at a forbidden module and for each import by which the sources are
    left on the way there, the shortest: every cause once, not every module that suffers from it.

    Args:
        imports: The imports.
        sources: Modules to start from. Importing one runs the packages above it too.
        forbidden: Modules that must not be reached; each stands for what is below it.
        phases: Phases that count; the phase of a chain is the latest of its hops.
        is_allowed: Says of an import and the name that it loads whether it is to be left out; None leaves nothing out.

    Returns:
        The chains, ordered by source and target.

    Raises:
        NotCoveredError: If a file on the way can't be read or parsed.
    """
    latest = max((phase.rank for phase in phases), default=-1)
    starts = frozenset(sources) | {package for module in sources for package in ancestors(module)}
    starts = frozenset(name for name in starts if not any(covers(target, name) for target in forbidden))
    search = _Search(imports=imports, starts=starts, latest=latest, is_allowed=is_allowed)
    chains = [
        chain
        for target in forbidden
        for edge, name in search.ends(target, forbidden)
        for chain in search.back_from(edge, name)
        if chain.phase in phases
    ]
    unique = {(chain.key, chain.edges[-1].lineno): chain for chain in reversed(chains)}
    return sorted(unique.values(), key=lambda chain: (chain.source, chain.target, chain.edges[-1].lineno))


def find_reach(imports: ImportMap, forbidden: str) -> dict[str, Phase]:
    """Say of each module when a forbidden one is loaded because of it.

    Args:
        imports: The imports.
        forbidden: The module, with what is below it.

    Returns:
        Module to the earliest phase of any chain; modules from which there is none are left out.

    Raises:
        NotCoveredError: If a file on the way can't be read or parsed.
    """
    search = _Search(imports=imports, starts=frozenset(), latest=Phase.TYPING.rank, is_allowed=None)
    below: dict[str, list[str]] = defaultdict(list)
    for module in imports.modules:
        for package in ancestors(module)[-1:]:
            below[package].append(module)
    reached: dict[str, Phase] = {}
    heap = [(edge.phase.rank, edge.importer) for edge, _ in search.ends(forbidden, [forbidden])]
    heapq.heapify(heap)
    while heap:
        rank, module = heapq.heappop(heap)
        if module in reached:
            continue
        reached[module] = Phase.of(rank)
        for child in below[module]:  # importing what is below a package runs the package
            heapq.heappush(heap, (rank, child))
        for edge in search.importing(module):
            if edge.importer not in reached:
                heapq.heappush(heap, (max(rank, edge.phase.rank), edge.importer))
    return reached


@dataclass(frozen=True, kw_only=True)
class _Search:
    """A search backwards from what must not be reached, so that only files on the way are parsed."""

    imports: ImportMap
    starts: frozenset[str]
    latest: int
    is_allowed: Callable[[Edge, str], bool] | None

    def ends(self, target: str, forbidden: Sequence[str]) -> Iterator[tuple[Edge, str]]:
        """Yield the imports that load a forbidden module, with the name that they load."""
        for importer, edges in self.imports.edges_to(target):
            if any(covers(name, importer) for name in forbidden):
                continue
            for edge in edges:
                name = edge.loads(target)
                # The statement is the cause; that it runs initialisers above its target adds nothing.
                if name and not edge.initialiser and self._counts(edge, name):
                    yield edge, name

    def back_from(self, last: Edge, target: str) -> Iterator[Chain]:
        """Yield the chains that end with an import, one for each import by which the sources are left."""
        if last.importer in self.starts:
            yield Chain(edges=(last,), target=target)
            return
        order = itertools.count()
        heap: list[tuple[int, int, int, tuple[Edge, ...]]] = [(last.phase.rank, 1, next(order), (last,))]
        seen: set[tuple[str, int]] = set()
        left: set[tuple[str, str]] = set()
        while heap:
            rank, length, _, edges = heapq.heappop(heap)
            module = edges[0].importer
            if (module, rank) in seen:
                continue
            seen.add((module, rank))
            for edge in self.importing(module):
                if edge.importer in self.starts:
                    if (edge.importer, edge.imported) not in left:
                        left.add((edge.importer, edge.imported))
                        yield Chain(edges=(edge, *edges), target=target)
                elif (edge.importer, (worse := max(rank, edge.phase.rank))) not in seen:
                    heapq.heappush(heap, (worse, length + 1, next(order), (edge, *edges)))

    def importing(self, module: str) -> list[Edge]:
        """Return the imports of a module by others, in the order of phases and names."""
        found = [
            edge
            for _, edges in self.imports.edges_to(module)
            for edge in edges
            if edge.imported == module and self._counts(edge, module)
        ]
        return sorted(found, key=lambda edge: (edge.phase.rank, edge.importer, edge.lineno))

    def _counts(self, edge: Edge, name: str) -> bool:
        # Whoever lets imports through keeps count of what was of use, so the phase is asked first.
        return edge.phase.rank <= self.latest and not (self.is_allowed is not None and self.is_allowed(edge, name))
