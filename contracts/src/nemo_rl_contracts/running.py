# SPDX-License-Identifier: Apache-2.0
"""Run our contract types as a configuration says, in one go: configuration, graph, contracts, outcome."""

import configparser
import enum
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grimp
from grimp.exceptions import NotATopLevelModule, SourceSyntaxError
from importlinter.api import read_configuration
from importlinter.domain.contract import InvalidContractOptions

from nemo_rl_contracts import contract_types
from nemo_rl_contracts.contract_types.base import NO_CACHE, FirewallContract, is_on, root_packages
from nemo_rl_contracts.errors import MisconfiguredError, NotCoveredError
from nemo_rl_contracts.graph_cache import distrust_if_changed
from nemo_rl_contracts.placing import (
    refuse_misplaced,
    refuse_unplaced_types,
    registered_types,
    require_plain_values,
)
from nemo_rl_contracts.sources import CACHE_FOLDER, package_folders, shown
from nemo_rl_contracts.violations import Violation

__all__ = [
    "GRAPH_CACHE",
    "OUR_TYPES",
    "Configuration",
    "ExitCode",
    "Outcome",
    "build_graph",
    "exit_code",
    "put_on_path",
    "read",
    "run",
]

#: Where import-linter keeps grimp's results, so that both commands share them.
GRAPH_CACHE = ".import_linter_cache"

#: Our contract types, by the name that a configuration gives them unless it registers them under another.
OUR_TYPES: Mapping[str, type[FirewallContract]] = {
    getattr(kind, "rule", "lock_closure"): kind
    for kind in (getattr(contract_types, name) for name in contract_types.__all__)
}


class ExitCode(enum.IntEnum):
    """What a command says to the shell."""

    KEPT = 0
    BROKEN = 1
    MISCONFIGURED = 2
    NOT_COVERED = 3


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a configuration file says, as far as it concerns us.

    Attributes:
        session: Its top level.
        contracts: Contracts of our types: (type, options).
        others: Number of contracts of other types, which `lint-imports` checks.
    """

    session: Mapping[str, Any]
    contracts: tuple[tuple[str, Mapping[str, Any]], ...]
    others: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one contract says.

    Attributes:
        name: Its name.
        rule: Its type.
        violations: What is broken.
        problems: Why it proves nothing.
        uncovered: What it could not see.
        notes: What else a reader should know.
    """

    name: str
    rule: str
    violations: tuple[Violation, ...] = ()
    problems: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> ExitCode:
        """What it says taken alone."""
        if self.problems:
            return ExitCode.MISCONFIGURED
        if self.violations:
            return ExitCode.NOT_COVERED if self.rule == contract_types.CoverageContract.rule else ExitCode.BROKEN
        return ExitCode.NOT_COVERED if self.uncovered else ExitCode.KEPT


def exit_code(outcomes: Iterable[Outcome]) -> ExitCode:
    """Return the code of several outcomes: what proves nothing comes before what is broken before what was not seen."""
    verdicts = {outcome.verdict for outcome in outcomes}
    order = (ExitCode.MISCONFIGURED, ExitCode.BROKEN, ExitCode.NOT_COVERED)
    return next((code for code in order if code in verdicts), ExitCode.KEPT)


def put_on_path(folder: Path) -> None:
    """Make packages importable that lie in a folder or in its `src`, before all others."""
    for path in (folder / "src", folder):
        if path.is_dir() and str(path) not in sys.path:
            sys.path.insert(0, str(path))


def read(path: Path | None) -> Configuration:
    """Read a configuration of import-linter.

    Args:
        path: The file; None looks for the usual ones in the working directory.

    Raises:
        MisconfiguredError: If there is none, it has no contract of our types, or it holds something that nobody reads.
    """
    refuse_misplaced(path)
    try:
        raw = read_configuration(None if path is None else os.fspath(path))
    except FileNotFoundError as error:
        raise MisconfiguredError(
            f"{error} Run it where .importlinter or pyproject.toml lies, or give --config"
        ) from None
    except KeyError as error:
        raise MisconfiguredError(f"the configuration has no {error}") from error
    except (ValueError, OSError, configparser.Error) as error:
        raise MisconfiguredError(f"the configuration can't be read: {error}") from error
    registered, others = registered_types(raw["session_options"])
    refuse_unplaced_types(raw["contracts_options"], registered, others)
    contracts = [
        (registered[options["type"]], options) for options in raw["contracts_options"] if options["type"] in registered
    ]
    for _, options in contracts:
        require_plain_values(options)
    names = [str(options.get("name", "")) for _, options in contracts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MisconfiguredError(
            f"two contracts have the name {twice[0]!r}; a baseline and a reader tell them apart by it"
        )
    if not contracts:
        raise MisconfiguredError(
            f"the configuration has no contract of the types {', '.join(sorted(OUR_TYPES))}; `nemo-rl-contracts init` "
            f"writes one, and `lint-imports` checks the others"
        )
    return Configuration(
        session=raw["session_options"],
        contracts=tuple(contracts),
        others=len(raw["contracts_options"]) - len(contracts),
    )


def build_graph(
    roots: Iterable[str], *, exclude_type_checking: bool = False, cache_dir: str | None = GRAPH_CACHE
) -> grimp.ImportGraph:
    """Build the graph of some packages, external packages included.

    Args:
        roots: The packages.
        exclude_type_checking: Leave imports for type checkers out.
        cache_dir: Where results are kept between runs; None keeps nothing.

    Raises:
        MisconfiguredError: If a package can't be found, or nothing can be kept in `cache_dir`.
        NotCoveredError: If a file can't be parsed or decoded, is no ordinary file, or a link leads in a circle: there is no
            graph then.
    """
    roots = list(roots)
    for root in roots:
        for folder in package_folders(root):
            if folder.is_file():
                raise MisconfiguredError(f"{root!r} is a single file; an import graph takes packages")
            _require_plain_files(folder)
    if cache_dir is not None:
        _require_folder(Path(cache_dir))
        folders = [folder for root in roots for folder in package_folders(root)]
        distrust_if_changed(Path(cache_dir), folders, folder=Path(CACHE_FOLDER))
    try:
        return grimp.build_graph(
            *roots,
            include_external_packages=True,
            exclude_type_checking_imports=exclude_type_checking,
            cache_dir=cache_dir,
        )
    except SourceSyntaxError as error:
        raise NotCoveredError(f"{error}; repair it, since no import graph can be made without it") from error
    except UnicodeError as error:
        raise NotCoveredError(f"{error}; say its encoding in its first line, or save it as UTF-8") from error
    except OSError as error:
        raise NotCoveredError(f"{error}; repair or remove it, since no import graph can be made without it") from error
    except NotATopLevelModule as error:
        raise MisconfiguredError(
            f"one of {', '.join(roots)} is a part of a package; an import graph takes whole packages"
        ) from error
    except (ImportError, ValueError) as error:
        raise MisconfiguredError(
            f"{error}; a root package has to be installed, or lie in the working directory or in its src"
        ) from error


def _require_folder(cache_dir: Path) -> None:
    """Make the folder in which results are kept; grimp would fail in the middle."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MisconfiguredError(
            f"results are kept in a folder, and {cache_dir} can't be one: {error.strerror or error}. Give another "
            f"--cache-dir, or --no-cache"
        ) from error


def _require_plain_files(top: Path) -> None:
    """Refuse what grimp would follow without end, or wait for: links in a circle, pipes and devices."""
    waiting = [(top, frozenset({top.resolve()}))]
    while waiting:
        folder, above = waiting.pop()
        for path in sorted(folder.iterdir() if os.access(folder, os.R_OK) else ()):
            if path.is_dir():
                # Where a folder has another name than one can import, nobody follows it.
                real = path.resolve()
                if path.is_symlink() and real in above and path.name.isidentifier():
                    raise NotCoveredError(
                        f"{shown(path.parent)}/{path.name} is a link to a folder above it ({shown(real)}), so its modules "
                        f"have no end; take it out"
                    )
                if real not in above and path.name != "__pycache__":
                    waiting.append((path, above | {real}))
            elif path.suffix == ".py" and path.exists() and not path.is_file():
                raise NotCoveredError(
                    f"{shown(path)} is no ordinary file, so nothing can be said about it; take it out"
                )


def run(configuration: Configuration, *, cache_dir: str | None = GRAPH_CACHE) -> list[Outcome]:
    """Check every contract of our types.

    Where no `coverage` contract is configured, one without exclusions is added: what nobody sees must not pass in silence.

    Args:
        configuration: What to check.
        cache_dir: As ``build_graph``; None keeps nothing at all.

    Raises:
        MisconfiguredError: If the graph can't be built.
        NotCoveredError: As ``build_graph``.
    """
    session = {**configuration.session, NO_CACHE: cache_dir is None}
    graph = build_graph(
        root_packages(session),
        exclude_type_checking=is_on(session, "exclude_type_checking_imports"),
        cache_dir=cache_dir,
    )
    contracts = list(configuration.contracts)
    coverage = contract_types.CoverageContract.rule
    if coverage not in (rule for rule, _ in contracts):
        contracts.append((coverage, {"name": "Every file is covered (added: none is configured)", "type": coverage}))
    return [_outcome(rule, options, session, graph) for rule, options in contracts]


def _outcome(rule: str, options: Mapping[str, Any], session: Mapping[str, Any], graph: grimp.ImportGraph) -> Outcome:
    name = str(options.get("name", rule))
    try:
        contract = OUR_TYPES[rule](name=name, session_options=dict(session), contract_options=dict(options))
    except InvalidContractOptions as error:
        return Outcome(
            name=name, rule=rule, problems=tuple(f"{option}: {text}" for option, text in error.errors.items())
        )
    metadata = contract.check(graph, verbose=False).metadata
    return Outcome(
        name=name,
        rule=rule,
        violations=tuple(metadata["violations"]),
        problems=tuple(metadata["problems"]),
        uncovered=tuple(metadata["uncovered"]),
        notes=tuple(metadata["notes"]),
    )
