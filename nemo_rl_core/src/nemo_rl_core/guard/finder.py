# SPDX-License-Identifier: Apache-2.0
"""The finder that refuses imports, and the list that keeps it first.

A finder can refuse an import by raising, but it can't answer a probe with "there is none": returning None only
passes the question to the next finder, which would find the package. So ``sys.meta_path`` becomes a list whose
iteration starts with the guard, wherever others insert theirs, and ends there when the guard has answered None.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, NoReturn

from nemo_rl_core.guard.frames import Asker, identify, is_asked_through, is_probe
from nemo_rl_core.guard.policy import Rule
from nemo_rl_core.guard.records import Attempt, ForbiddenImportError, Recorder, Violation

__all__ = ["CANARY", "EXIT_CODE", "CanaryError", "GuardFinder", "GuardedMetaPath", "end_process", "report"]

#: A name that no package has; asking for it proves that the guard is reached first.
CANARY = "_nemo_rl_guard_canary"

#: Exit status of a process that ``on_violation=exit`` ends (EX_CONFIG of sysexits.h).
EXIT_CODE = 78

#: The iteration of a list, also for its subclasses.
_iterate = list.__iter__


class CanaryError(ImportError):
    """The guard was reached by the self-test."""


def report(text: str) -> None:
    """Write one line to the process's standard error, whatever has become of ``sys.stderr``."""
    with contextlib.suppress(OSError):  # closed: then there is nobody to tell, and the ledger has it
        os.write(2, f"nemo-rl guard: {text}\n".encode(errors="backslashreplace"))


def end_process(text: str) -> NoReturn:
    """Say why, then end the process at once: no ``except``, no thread and no ``atexit`` can keep it alive."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # closed or absent: nothing to flush
    report(text)
    os._exit(EXIT_CODE)


class GuardFinder:
    """Refuses forbidden names and has no opinion on others.

    Attributes:
        policy: The rule.
        recorder: Where violations and attempts go.
        granted: Forbidden roots that an allowed importer has imported; code of theirs may import what is forbidden.
        hidden: Modules that are out of ``sys.modules`` because of this rule, by name; its end puts them back.
        is_closed: Whether it has ended.
    """

    def __init__(self, policy: Rule, recorder: Recorder, *, granted: Iterable[str] = ()) -> None:
        """Take the rule and the ledger's recorder.

        Args:
            policy: The rule.
            recorder: Where violations and attempts go.
            granted: What an earlier finder of this process let allowed importers have.
        """
        self.policy = policy
        self.recorder = recorder
        self.granted = frozenset(granted)
        self.hidden: dict[str, ModuleType] = {}
        self.is_closed = False
        self._roots = policy.roots | {CANARY}

    def close(self) -> None:
        """Have no opinion any more, also in a copy of ``sys.meta_path`` that somebody keeps."""
        self.is_closed = True
        self._roots = frozenset()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse an import of a forbidden name; answer a probe of it, and every other name, with None.

        Args:
            fullname: Full name of the module.
            path: The parent's ``__path__``; not used.
            target: Module of a reload; not used.

        Raises:
            ForbiddenImportError: If the name is forbidden and this is an import.
            ModuleNotFoundError: If the name is forbidden, this is a probe, and ``sys.meta_path`` was replaced, so
                that None would not be heard.
        """
        if fullname.partition(".")[0] not in self._roots:
            return None
        del path, target  # part of the finder protocol; the rule looks at the name alone
        __tracebackhide__ = True  # what pytest shows ends at the import statement
        if fullname == CANARY:
            raise CanaryError(fullname)
        frame = sys._getframe(1)
        if self.policy.allow_importers and self._may_pass(fullname, frame):
            return None
        if not is_probe(frame):
            self._refuse(fullname, identify(frame))
        meta_path = sys.meta_path
        if isinstance(meta_path, GuardedMetaPath):
            meta_path.end_here()
            return None
        raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    def _may_pass(self, fullname: str, frame: FrameType) -> bool:
        """Tell whether an allowed importer asks, or the engine that one has loaded; a probe of theirs sees the truth.

        A library asks on the engine's behalf while the engine is calling it. An allowed importer's own calls do not
        count so: it would let in whatever it happens to import.
        """
        asker = identify(frame)
        names = self.policy.allow_importers
        passes = (
            any(asker.module == name or asker.module.startswith(f"{name}.") for name in names)
            or asker.package in self.granted
            or (asker.is_third_party and is_asked_through(frame, self.granted))
        )
        if passes:
            self.granted |= {fullname.partition(".")[0]}
        return passes

    def _refuse(self, fullname: str, asker: Asker) -> NoReturn:
        __tracebackhide__ = True
        error = self._error(fullname, asker)
        if asker.is_third_party:
            attempt = Attempt(
                package=asker.package, module=fullname, importer=asker.module, file=asker.file, line=asker.line
            )
            if self.recorder.add_attempt(attempt) and self.policy.tells_attempts:
                report(
                    f"{asker.package} asked for {fullname} in this {self.policy.role} process and was told that it "
                    f"is absent ({asker.file}:{asker.line})"
                )
            raise error
        self.recorder.add_violation(
            Violation(
                kind="import",
                role=self.policy.role,
                module=fullname,
                importer=asker.module,
                file=asker.file,
                line=asker.line,
                chain=error.chain,
            )
        )
        if self.policy.on_violation == "exit":
            end_process(str(error))
        if self.policy.on_violation == "record":
            report(str(error))
        raise error

    def _error(self, fullname: str, asker: Asker) -> ForbiddenImportError:
        importer = f"{asker.file}:{asker.line} ({asker.module})"
        chain = (*asker.chain, fullname)
        rule = self.policy.rule_for(fullname.partition(".")[0])
        message = (
            f"import of {fullname!r} is refused: {rule}. Asked by {importer}; chain: {' -> '.join(chain)}. "
            f"Way out: {self.policy.way_out}"
        )
        return ForbiddenImportError(message, role=self.policy.role, module=fullname, importer=importer, chain=chain)


class GuardedMetaPath(list[Any]):
    """``sys.meta_path`` while armed: the guards are asked first, and may end the question.

    It stores them as its first elements too, so a plain copy of it still refuses imports.
    """

    __slots__ = ("_begun", "_first", "_later", "guards", "previous")

    def __init__(self, guards: tuple[GuardFinder, ...], others: Iterable[Any], *, previous: list[Any]) -> None:
        """Put the guards before the other finders.

        Args:
            guards: The guards, first asked first.
            others: The finders that were there, in order.
            previous: The list to put back when the last guard goes.
        """
        super().__init__([*guards, *(finder for finder in others if not isinstance(finder, GuardFinder))])
        self.guards = guards
        self.previous = previous
        self._first = guards[0]
        self._later = list(guards[1:])
        # The iterator that each thread has begun last: a guard is asked right after that, with nothing in between.
        self._begun = threading.local()

    def with_guards(self, guards: tuple[GuardFinder, ...]) -> "GuardedMetaPath":
        """Return the same path with other guards.

        Args:
            guards: The guards, first asked first.
        """
        path = GuardedMetaPath(guards, self.plain(), previous=self.previous)
        # A thread may be in the middle of a question to this list and hear the answer through the new one.
        path._begun = self._begun
        return path

    def end_here(self) -> None:
        """Let the iteration that this thread has begun last end after the guard that is being asked."""
        begun = self._begun.__dict__.pop("iterator", None)
        if begun is not None:
            for _ in begun:  # a list's iterator that has come to its end stays there
                pass

    def __iter__(self) -> Iterator[Any]:
        # Every uncached import pays for this, hence the iterator of a list, without a step of Python for each finder,
        # and the slots. A generator that looks for its end cost half a microsecond more.
        self._begun.iterator = iterator = _iterate(self)
        try:
            if self[0] is self._first and (not self._later or self[1 : len(self.guards)] == self._later):
                return iterator
        except IndexError:
            pass  # somebody has emptied it
        self._begun.iterator = iterator = iter([*self.guards, *self.plain()])
        return iterator

    def plain(self) -> list[Any]:
        """Return the other finders in their order."""
        return [finder for finder in _iterate(self) if not isinstance(finder, GuardFinder)]
