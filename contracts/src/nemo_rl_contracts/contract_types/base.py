# SPDX-License-Identifier: Apache-2.0
"""What our contract types share: they report, and do not raise.

import-linter ends the whole run at an exception, and leaves the other contracts unchecked. So a contract that is
misconfigured, or whose files can't be read, comes back as broken with the reason; `nemo-rl-contracts check` tells the
three apart by its exit code.
"""

import abc
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields

from nemo_rl_contracts.chains import ImportMap, ancestors, covers
from nemo_rl_contracts.errors import MisconfiguredError, NotCoveredError
from nemo_rl_contracts.known_names import KnownNames
from nemo_rl_contracts.patterns import matches
from nemo_rl_contracts.sources import CACHE_FOLDER, Reader, find_sources
from nemo_rl_contracts.violations import Violation

__all__ = [
    "NO_CACHE",
    "FirewallContract",
    "is_on",
    "read_import_map",
    "root_packages",
    "select_forbidden",
    "select_modules",
]

#: Set in the session options by whoever wants nothing kept between runs; import-linter itself has no such option.
NO_CACHE = "nemo_rl_contracts_no_cache"

#: Options that import-linter reads itself.
_COMMON = frozenset({"id", "name", "type", "broken_contract_guidance"})


class FirewallContract(Contract):
    """A contract that says what it found as violations.

    Import-linter 2.14 looks for fields on the class of the contract itself, not on its bases: each type lists its own.
    """

    rule: str

    @abc.abstractmethod
    def examine(self, graph: ImportGraph) -> list[Violation]:
        """Return what is broken.

        Raises:
            MisconfiguredError: If the options prove nothing.
            NotCoveredError: If a file that matters can't be read.
        """

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Check the graph; see the base class.

        Args:
            graph: The import graph, external packages included.
            verbose: Ignored.
        """
        del verbose
        metadata: dict[str, Any] = {"violations": [], "problems": [], "uncovered": [], "notes": []}
        self._notes: list[str] = metadata["notes"]
        self._warnings: list[str] = []
        try:
            self._require_known_options()
            metadata["violations"] = self.examine(graph)
        except MisconfiguredError as error:
            metadata["problems"] = str(error).splitlines()
        except NotCoveredError as error:
            metadata["uncovered"] = str(error).splitlines()
        kept = not (metadata["violations"] or metadata["problems"] or metadata["uncovered"])
        # import-linter takes words in square brackets for styles; ours may be extras.
        warnings = [warning.replace("[", "\\[") for warning in self._warnings]
        return ContractCheck(kept=kept, metadata=metadata, warnings=warnings)

    def note(self, text: str, *, warn: bool = False) -> None:
        """Add something that a reader should know and that breaks nothing.

        Args:
            text: One line.
            warn: Whether it is something to be changed one day; `lint-imports` prints such lines as warnings.
        """
        self._notes.append(text)
        if warn:
            self._warnings.append(text)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print what was found; see the base class.

        Args:
            check: The result.
        """
        # Not import-linter's own output, which takes words in square brackets for colours and swallows them.
        for title, key in (("Misconfigured", "problems"), ("Not covered", "uncovered")):
            for text in check.metadata[key]:
                print(f"{title}: {text}")
        for violation in check.metadata["violations"]:
            place = f"{violation.file}:{violation.line}: " if violation.line else ""
            print(f"- {place}{violation.message}")
            for hop in violation.hops:
                print(f"    {hop}")
            if violation.advice:
                print(f"    {violation.advice}")
        print()

    def _require_known_options(self) -> None:
        """Refuse an option that no field reads; import-linter does so from 2.16 on."""
        known = {name for name in dir(type(self)) if isinstance(getattr(type(self), name), fields.Field)} | _COMMON
        for option in sorted(set(self.contract_options) - known):
            near = difflib.get_close_matches(option, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(known - _COMMON))}"
            raise MisconfiguredError(f"the contract type {self.rule!r} has no option {option!r}{hint}")


def root_packages(session_options: Mapping[str, Any]) -> list[str]:
    """Return the root packages of a configuration.

    Raises:
        MisconfiguredError: If it names none.
    """
    value = session_options.get("root_packages") or session_options.get("root_package") or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise MisconfiguredError(f"root_packages is a list of names of packages; got {value!r}")
    names = [name.strip() for name in names if name.strip()]
    if not names:
        raise MisconfiguredError("the configuration names no root_package; without one there is nothing to check")
    return names


def is_on(session_options: Mapping[str, Any], option: str) -> bool:
    """Tell whether a yes-or-no option at the top of a configuration says yes."""
    return str(session_options.get(option, "")).strip().lower() == "true"


def read_import_map(
    graph: ImportGraph, session_options: Mapping[str, Any], *, import_functions: Iterable[str] = ()
) -> ImportMap:
    """Put grimp's graph and the files on disk together.

    Args:
        graph: The graph of the root packages.
        session_options: The configuration that the graph was made from.
        import_functions: Further functions that import; see ``find_imports``.

    Raises:
        MisconfiguredError: If the graph has no external packages, or a root package can't be found.
    """
    if not is_on(session_options, "include_external_packages"):
        raise MisconfiguredError(
            "without 'include_external_packages = True' at the top of the configuration no import of another package is "
            "seen; add that line"
        )
    files = [file for root in root_packages(session_options) for file in find_sources(root)[0]]
    folder = None if session_options.get(NO_CACHE) else Path(CACHE_FOLDER)
    functions = list(import_functions)
    imports = ImportMap(graph, Reader(files, cache_folder=folder, import_functions=functions))
    _require_functions(functions, imports)
    return imports


def _require_functions(functions: Iterable[str], imports: ImportMap) -> None:
    """Refuse the name of an import function that nobody defines or calls: nothing would be read by it."""
    for function in functions:
        module, _, name = function.rpartition(".")
        if not module or not all(part.isidentifier() for part in function.split(".")):
            raise MisconfiguredError(f"import_functions takes full names like 'package.module.load'; got {function!r}")
        # Of our own, the part behind the module (a function, or a class) has to stand in the module.
        owner = next((above for above in reversed(ancestors(function)) if above in imports.modules), "")
        if owner in imports.reader.files:
            part = function.removeprefix(f"{owner}.").partition(".")[0]
            word, sources = part, [imports.reader.source(owner)]
        else:
            word, sources = name, [imports.reader.source(file) for file in imports.reader.files]
        if not any(re.search(rb"(?<!\w)%b(?!\w)" % word.encode(), source) for source in sources):
            raise MisconfiguredError(f"import_functions names {function!r}, which no file under check defines or calls")


def select_modules(
    expressions: Iterable[str], modules: Iterable[str], *, option: str, as_packages: bool = True
) -> list[str]:
    """Return the modules that expressions mean.

    Args:
        expressions: Module names, with ``*`` for one part and ``**`` for one or more.
        modules: The modules under check.
        option: Name of the option, for messages.
        as_packages: Whether a module stands for those below it.

    Raises:
        MisconfiguredError: If an expression means no module.
    """
    modules = sorted(modules)
    found: set[str] = set()
    for expression in expressions:
        hits = {module for module in modules if matches(expression, module)}
        if as_packages:
            hits |= {module for module in modules for hit in set(hits) if covers(hit, module)}
        if not hits:
            near = difflib.get_close_matches(expression, modules, n=3, cutoff=0.7)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise MisconfiguredError(
                f"{option} names {expression!r}, which no module under check has as its name{hint}"
            )
        found |= hits
    return sorted(found)


def select_forbidden(
    names: Iterable[str], modules: Iterable[str], *, roots: Iterable[str], known: KnownNames
) -> list[str]:
    """Resolve forbidden names: our own by the modules under check, others by what is known of them.

    Args:
        names: What the configuration lists.
        modules: The modules under check.
        roots: The root packages.
        known: What the project knows of other people's packages.

    Raises:
        MisconfiguredError: If there is none, or one is no name, or is known nowhere.
    """
    names, modules, roots = list(names), list(modules), list(roots)
    if not names:
        raise MisconfiguredError("forbidden_modules is empty, so nothing would count")
    found: set[str] = set()
    for name in names:
        if any(covers(root, name) for root in roots):
            found.update(select_modules([name], modules, option="forbidden_modules", as_packages=False))
        elif not all(part.isidentifier() for part in name.split(".")):
            raise MisconfiguredError(f"forbidden_modules takes names of modules; got {name!r}")
        else:
            known.require(name)
            found.add(name)
    return sorted(found)
