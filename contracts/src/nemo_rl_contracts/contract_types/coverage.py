# SPDX-License-Identifier: Apache-2.0
"""``coverage``: every Python file below the root packages is one that the contracts see."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from grimp import ImportGraph

from nemo_rl_contracts.contract_types.base import FirewallContract, root_packages
from nemo_rl_contracts.contract_types.options import texts
from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.patterns import parse_reasoned
from nemo_rl_contracts.sources import Reader, Stray, find_sources, shown
from nemo_rl_contracts.violations import Violation, counted

__all__ = ["CoverageContract", "uncovered_files"]


class CoverageContract(FirewallContract):
    """A file on disk that is not in the graph is an error.

    Options:

    - ``exclude``: lines ``pattern  # reason``: files that are meant to be left out, as paths below the folder of the
      configuration (``*`` within a name, ``**`` across folders); one that leaves nothing out is an error.
    """

    rule = "coverage"

    exclude: list[str] = texts()

    def examine(self, graph: ImportGraph) -> list[Violation]:
        """Return one violation for each file that no contract can see; see the base class.

        Args:
            graph: The import graph.
        """
        patterns = [reasoned.entry for reasoned in parse_reasoned(self.exclude, option="exclude")]
        roots = root_packages(self.session_options)
        strays, compiled, total = uncovered_files(roots, graph.modules)
        kept, useless = _exclude(strays, patterns)
        if useless:
            raise MisconfiguredError(
                "\n".join(f"exclude lists {pattern!r}, which leaves no file out; take it out" for pattern in useless)
            )
        if compiled:
            self.note(
                f"{len(compiled)} compiled modules have no source to read, {shown(compiled[0].path)} among them",
                warn=True,
            )
        left_out = [stray for stray in strays if stray not in kept]
        self.note(counted(total, "file") + (f", {len(left_out)} of them left out on purpose" if left_out else ""))
        return [
            *_imported_all_the_same(roots, left_out, self.rule),
            *(
                Violation(
                    rule=self.rule,
                    message=f"{shown(stray.path)} is covered by no contract: {stray.reason}",
                    file=shown(stray.path),
                    line=1,
                    key=shown(stray.path),
                )
                for stray in kept
            ),
        ]


def _imported_all_the_same(roots: Sequence[str], left_out: Sequence[Stray], rule: str) -> Iterator[Violation]:
    """Yield a violation for each import of a file that was left out: what it imports is seen by nobody."""
    wanted = {stray.module: stray for stray in left_out if stray.module}
    if not wanted:
        return
    reader = Reader(file for root in roots for file in find_sources(root)[0])
    for module, file in sorted(reader.files.items()):
        # A file without the last part of such a name can't import it.
        source = reader.source(module)
        if not any(name.rpartition(".")[2].encode() in source for name in wanted):
            continue
        for found in reader.imports(module):
            names = {found.module, *(f"{found.module}.{name}" for name in found.names)}
            for name in sorted(names & wanted.keys()):
                yield Violation(
                    rule=rule,
                    message=f"{shown(wanted[name].path)} is left out by `exclude`, and {module} imports it ({found.phase})",
                    file=shown(file.path),
                    line=found.lineno,
                    key=f"{module} -> {name}",
                    advice="What is imported has to be seen: add the missing __init__.py, or take the import away.",
                )


def uncovered_files(roots: Iterable[str], modules: Iterable[str]) -> tuple[list[Stray], list[Stray], int]:
    """Compare the files below some packages with a graph.

    Args:
        roots: The root packages.
        modules: The modules of the graph.

    Returns:
        The Python files that are not in the graph, the compiled modules, and the number of Python files on disk.

    Raises:
        MisconfiguredError: If a package can't be found.
    """
    in_graph = frozenset(modules)
    missing: list[Stray] = []
    compiled: list[Stray] = []
    total = 0
    for root in roots:
        files, strays = find_sources(root)
        total += len(files) + sum(not stray.compiled for stray in strays)
        compiled += [stray for stray in strays if stray.compiled]
        missing += [stray for stray in strays if not stray.compiled]
        missing += [
            Stray(path=file.path, reason=f"the import graph has no module {file.module!r}")
            for file in files
            if file.module not in in_graph
        ]
    return sorted(missing, key=lambda stray: stray.path), compiled, total


def _exclude(strays: Sequence[Stray], patterns: Sequence[str]) -> tuple[list[Stray], list[str]]:
    """Return the strays that no pattern leaves out, and the patterns that leave nothing out."""
    used: set[str] = set()
    kept = []
    for stray in strays:
        hits = [pattern for pattern in patterns if _path_matches(shown(stray.path), pattern)]
        used.update(hits)
        if not hits:
            kept.append(stray)
    return kept, [pattern for pattern in patterns if pattern not in used]


def _path_matches(path: str, pattern: str) -> bool:
    """Tell whether a path fits a pattern; ``**`` stands for any number of folders."""
    return _parts_match(Path(path).parts, Path(pattern).parts)


def _parts_match(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_parts_match(parts[skip:], pattern[1:]) for skip in range(len(parts) + 1)) or len(pattern) == 1
    return bool(parts) and Path(parts[0]).match(pattern[0]) and _parts_match(parts[1:], pattern[1:])
