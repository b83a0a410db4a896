# SPDX-License-Identifier: Apache-2.0
"""What an audit has found: one result for each module, and the verdict over all of them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

__all__ = [
    "SCHEMA",
    "Ask",
    "AuditReport",
    "Failure",
    "Finding",
    "ForbiddenName",
    "ModuleResult",
    "ModuleState",
    "Verdict",
]

#: Version of the JSON form; it changes when a key changes its meaning or goes.
SCHEMA = 1


class Verdict(Enum):
    """What the audit says; the value is what stands in JSON."""

    CLEAN = "clean"
    FOUND = "found"
    NOT_PROVEN = "not proven"

    @property
    def exit_code(self) -> int:
        """The same numbers as ``nemo-rl-contracts``; 2 is an audit that could not be made."""
        return {Verdict.CLEAN: 0, Verdict.FOUND: 1, Verdict.NOT_PROVEN: 3}[self]


class ModuleState(Enum):
    """How the import of one module ended."""

    IMPORTED = "imported"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, kw_only=True)
class ForbiddenName:
    """A name that nobody may load.

    Attributes:
        name: A module; it covers everything below it.
        is_installed: Whether its top-level package is there in the audited interpreter.
        near: Installed names that are spelled alike, where it is not installed and no known engine: perhaps a typo.
    """

    name: str
    is_installed: bool
    near: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The first time that somebody asked for a forbidden name.

    Attributes:
        rule: The forbidden name.
        module: What was asked for: the name, or a module below it.
        importer: ``__name__`` of the asking code.
        file: Its file.
        line: The line that asked, counted from 1; 0 where it is not known.
        stack: The calls that led there, outermost first, each as ``file:line (module.function): source``.
        chain: The modules that were being imported, outermost first, what was asked for last.
    """

    rule: str
    module: str
    importer: str
    file: str
    line: int
    stack: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a module was not imported.

    Attributes:
        type: Name of the exception's type; "" where the process ended without one.
        text: The cause.
        traceback: Its last calls, outermost first, in the form of ``Ask.stack``.
        output: The end of what the module printed.
    """

    type: str
    text: str
    traceback: tuple[str, ...] = ()
    output: str = ""

    def __str__(self) -> str:
        return f"{self.type}: {self.text}" if self.type else self.text


@dataclass(frozen=True, kw_only=True)
class ModuleResult:
    """One module, imported in a process of its own.

    Attributes:
        name: Its full name; the first result is that of the package itself.
        state: How the import ended.
        seconds: What the import took beyond that of the preloads and the package; None where it did not end.
        num_modules: How many modules it loaded beyond those; None where it did not end.
        loaded: Forbidden name to the number of modules of it that were loaded.
        asks: The first question for each forbidden name.
        failure: Why it was not imported; None where it was.
    """

    name: str
    state: ModuleState
    seconds: float | None = None
    num_modules: int | None = None
    loaded: Mapping[str, int] = field(default_factory=dict)
    asks: tuple[Ask, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One place that asked first, and the modules whose import leads there.

    Attributes:
        ask: The question, as the first of the modules put it.
        is_loaded: True if the forbidden name was loaded in one of them, False if each attempt failed.
        modules: Names of the modules.
        preloads: Names of the preloads whose import leads there.
    """

    ask: Ask
    is_loaded: bool
    modules: tuple[str, ...]
    preloads: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The whole audit.

    Attributes:
        package: What was audited.
        forbidden: The names that nobody may load.
        python: Path of the audited interpreter.
        python_version: Its version.
        seconds: How long the audit took.
        preloaded: Forbidden name to the number of modules of it that were there before the first import.
        results: The package itself, then each module below it by name.
        skipped: Modules that were not imported on purpose, with the reason.
        preloads: What was imported before the package, in this order; each counts what it adds to those before it.
    """

    package: str
    forbidden: tuple[ForbiddenName, ...]
    python: str
    python_version: str
    seconds: float
    preloaded: Mapping[str, int]
    results: tuple[ModuleResult, ...]
    skipped: Mapping[str, str]
    preloads: tuple[ModuleResult, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Found by one module is found; clean needs every module."""
        if self.preloaded or any(result.loaded or result.asks for result in (*self.preloads, *self.results)):
            return Verdict.FOUND
        return Verdict.NOT_PROVEN if self.failed else Verdict.CLEAN

    @property
    def failed(self) -> tuple[ModuleResult, ...]:
        """The modules that were not imported and should have been."""
        return tuple(result for result in self.results if result.state is not ModuleState.IMPORTED)

    @property
    def package_result(self) -> ModuleResult:
        """The package itself, whose import is part of every other one."""
        return self.results[0]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Each place that asked first: those that a preload leads to, then those with the most modules."""
        groups: dict[tuple[str, str, int], tuple[Ask, list[ModuleResult], list[ModuleResult]]] = {}
        for number, result in enumerate((*self.preloads, *self.results)):
            for ask in self._asks_of(result):
                _, preloads, results = groups.setdefault((ask.rule, ask.file, ask.line), (ask, [], []))
                (preloads if number < len(self.preloads) else results).append(result)
        findings = [
            Finding(
                ask=ask,
                is_loaded=any(ask.rule in result.loaded for result in (*preloads, *results)),
                modules=tuple(result.name for result in results),
                preloads=tuple(result.name for result in preloads),
            )
            for ask, preloads, results in groups.values()
        ]
        return tuple(sorted(findings, key=lambda finding: (not finding.preloads, -len(finding.modules))))

    def _asks_of(self, result: ModuleResult) -> Iterator[Ask]:
        yield from result.asks
        for rule in result.loaded:
            if all(ask.rule != rule for ask in result.asks):
                # Loaded past the finders, e.g. from a file by its path.
                yield Ask(rule=rule, module=rule, importer="?", file="?", line=0)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "schema": SCHEMA,
            "package": self.package,
            "forbid": [asdict(name) for name in self.forbidden],
            "python": {"executable": self.python, "version": self.python_version},
            "verdict": self.verdict.value,
            "exit_code": self.verdict.exit_code,
            "seconds": round(self.seconds, 3),
            "preloaded": dict(self.preloaded),
            "findings": [
                asdict(finding.ask)
                | {"is_loaded": finding.is_loaded, "modules": finding.modules, "preloads": finding.preloads}
                for finding in self.findings
            ],
            "preloads": [asdict(result) | {"state": result.state.value} for result in self.preloads],
            "modules": [asdict(result) | {"state": result.state.value} for result in self.results],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped.items()],
        }
