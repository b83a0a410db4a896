# SPDX-License-Identifier: Apache-2.0
"""What the guard has seen: violations, attempts of third parties, and the error that refuses an import."""

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

__all__ = ["Attempt", "ForbiddenImportError", "Ledger", "Recorder", "Violation", "merge_reports"]


class ForbiddenImportError(ModuleNotFoundError):
    """An import that the role of this process forbids.

    It is a ``ModuleNotFoundError`` (an ``ImportError``), so that an honest fallback in a library takes its way.

    Attributes:
        role: Role of the process.
        module: Name that the import system asked for; of ``import a.b`` it asks for the parent ``a`` first.
        importer: ``file:line (module)`` of whoever asked.
        chain: Modules that were being imported, outermost first, the forbidden one last.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str = "",
        module: str = "",
        importer: str = "",
        chain: tuple[str, ...] = (),
    ) -> None:
        """Keep the message and the fields; all of them survive pickling."""
        super().__init__(message, name=module or None)
        self.role = role
        self.module = module
        self.importer = importer
        self.chain = chain


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A forbidden import by our own or the user's code, or a forbidden module that was loaded before arming.

    Attributes:
        kind: ``import`` or ``preloaded``.
        role: Role of the process.
        module: Full name of the forbidden module.
        importer: Name of the module that asked; for ``preloaded`` the loaded modules that hold a reference to it.
        file: File of the import statement, "" where unknown.
        line: Its line, counted from 1; 0 where unknown.
        chain: Modules that were being imported, outermost first, the forbidden one last.
        count: How often this happened.
    """

    kind: str
    role: str
    module: str
    importer: str
    file: str
    line: int
    chain: tuple[str, ...]
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A third party's import that was refused and stopped nothing by itself.

    Attributes:
        package: Top-level name of the package that asked.
        module: Full name of the forbidden module of the first attempt.
        importer: Module that asked first.
        file: File of that import statement.
        line: Its line, counted from 1.
        count: Attempts of this package in all.
    """

    package: str
    module: str
    importer: str
    file: str
    line: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """A snapshot of what the guard has seen in this process.

    Attributes:
        role: Role of the process; "" where the guard was never armed.
        violations: Different violations in the order in which they came up.
        attempts: Package to its attempts.
    """

    role: str = ""
    violations: tuple[Violation, ...] = ()
    attempts: Mapping[str, Attempt] = field(default_factory=lambda: MappingProxyType({}))

    def as_dicts(self) -> dict[str, Any]:
        """Return plain data (strings, numbers, lists, dicts) for JSON and for the way through Ray."""
        violations = [asdict(violation) | {"chain": list(violation.chain)} for violation in self.violations]
        attempts = [asdict(attempt) for attempt in self.attempts.values()]
        return {"role": self.role, "violations": violations, "attempts": attempts}


class Recorder:
    """Collects entries from any thread; equal ones are counted, so a loop of attempts does not grow it."""

    def __init__(self, role: str) -> None:
        """Start empty.

        Args:
            role: Role of the process.
        """
        self.role = role
        self._violations: dict[tuple[str, str, str, int], Violation] = {}
        self._attempts: dict[str, Attempt] = {}
        self._lock = threading.Lock()
        # A fork while another thread records would leave the child a lock that nobody opens.
        fresh_lock = weakref.WeakMethod(self._fresh_lock)
        os.register_at_fork(after_in_child=lambda: (method := fresh_lock()) and method())

    def _fresh_lock(self) -> None:
        self._lock = threading.Lock()

    def add_violation(self, violation: Violation) -> None:
        """Record a violation, or count it where the same one is known."""
        key = (violation.kind, violation.module, violation.file, violation.line)
        with self._lock:
            known = self._violations.get(key)
            self._violations[key] = replace(known, count=known.count + 1) if known else violation

    def add_attempt(self, attempt: Attempt) -> bool:
        """Record a third party's attempt; True if it is the first one of its package."""
        with self._lock:
            known = self._attempts.get(attempt.package)
            self._attempts[attempt.package] = replace(known, count=known.count + 1) if known else attempt
        return known is None

    def take_violations(self) -> tuple[Violation, ...]:
        """Return the violations so far and forget them; attempts stay."""
        with self._lock:
            taken = tuple(self._violations.values())
            self._violations.clear()
        return taken

    def adopt(self, other: "Recorder") -> None:
        """Take over what another recorder of this process holds: a change of role forgets nothing."""
        earlier = other.snapshot()
        for violation in earlier.violations:
            self._violations[violation.kind, violation.module, violation.file, violation.line] = violation
        self._attempts.update(earlier.attempts)

    def snapshot(self) -> Ledger:
        """Return what has been recorded so far."""
        with self._lock:
            return Ledger(
                role=self.role,
                violations=tuple(self._violations.values()),
                attempts=MappingProxyType(dict(self._attempts)),
            )


def merge_reports(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the ledgers of several processes.

    Args:
        reports: What ``Ledger.as_dicts`` gave in each.

    Returns:
        ``violations`` of all of them in order, and ``third_party_attempts``, the number by package.
    """
    violations, attempts = [], {}
    for ledger in reports:
        violations += ledger["violations"]
        for attempt in ledger["attempts"]:
            attempts[attempt["package"]] = attempts.get(attempt["package"], 0) + attempt["count"]
    return {"violations": violations, "third_party_attempts": attempts}
