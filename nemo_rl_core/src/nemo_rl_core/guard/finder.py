# SPDX-License-Identifier: Apache-2.0
"""The finder that refuses imports, and the list that keeps it first.

A finder can refuse an import by raising, but it can't answer a probe with "there is none": returning None only
passes the question to the next finder, which would find the package. So ``sys.meta_path`` becomes a list whose
iteration starts with the guard, wherever others insert theirs, and ends there when the guard has answered None.
"""

import contextlib
import itertools
import os
import sys
from _thread import get_ident as _get_ident
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from nemo_rl_core.guard.frames import Asker, identify, is_probe
from nemo_rl_core.guard.policy import Policy
from nemo_rl_core.guard.records import Attempt, ForbiddenImportError, Recorder, Violation

__all__ = ["CANARY", "EXIT_CODE", "CanaryError", "GuardFinder", "GuardedMetaPath", "end_process", "report"]

#: A name that no package has; asking for it proves that the guard is reached first.
CANARY = "_nemo_rl_guard_canary"

#: Exit status of a process that ``on_violation=exit`` ends (EX_CONFIG of sysexits.h).
EXIT_CODE = 78


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
    """

    def __init__(self, policy: Policy, recorder: Recorder) -> None:
        """Take the rule and the ledger's recorder.

        Args:
            policy: The rule.
            recorder: Where violations and attempts go.
        """
        self.policy = policy
        self.recorder = recorder
        self._roots = policy.roots | {CANARY}

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
        if fullname == CANARY:
            raise CanaryError(fullname)
        frame = sys._getframe(1)
        if not is_probe(frame):
            self._refuse(fullname, identify(frame))
        meta_path = sys.meta_path
        if isinstance(meta_path, GuardedMetaPath):
            meta_path.end_here()
            return None
        raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    def _refuse(self, fullname: str, asker: Asker) -> NoReturn:
        error = self._error(fullname, asker)
        if asker.is_third_party:
            attempt = Attempt(
                package=asker.package, module=fullname, importer=asker.module, file=asker.file, line=asker.line
            )
            if self.recorder.add_attempt(attempt):
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
        message = (
            f"import of {fullname!r} is refused: {self.policy.rule_for(fullname.partition('.')[0])}. Asked by {importer}; chain: {' -> '.join(chain)}. "
            f"Way out: do it in a generation worker and pass plain data, or put it under TYPE_CHECKING; where the "
            f"environment brings the engine into this role on purpose (fsdp+vllm), lift the rule there: "
            f"NEMO_RL_FIREWALL_LIFTED=<engine>"
        )
        return ForbiddenImportError(message, role=self.policy.role, module=fullname, importer=importer, chain=chain)


class GuardedMetaPath(list[Any]):
    """``sys.meta_path`` while armed: the guard is asked first, and may end the question.

    It stores the guard as its first element too, so a plain copy of it still refuses imports.
    """

    def __init__(self, guard: GuardFinder, others: Iterable[Any]) -> None:
        """Put the guard before the other finders.

        Args:
            guard: The guard.
            others: The finders that were there, in order.
        """
        super().__init__([guard, *(finder for finder in others if not isinstance(finder, GuardFinder))])
        self.guard = guard
        self._first = (guard,)
        # One entry a thread: the question and the answer are in the same thread, with nothing between them.
        self._ended: set[int] = set()

    def end_here(self) -> None:
        """Let the iteration that this thread is in end after the guard."""
        self._ended.add(_get_ident())

    def __iter__(self) -> Iterator[Any]:
        # Every uncached import pays for this: the chain walks the second part without a step of Python for each finder.
        return itertools.chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Iterable[Any]]:
        ended = self._ended
        if ended:
            ended.discard(_get_ident())  # left by somebody who called the guard without iterating
        yield self._first
        if ended and _get_ident() in ended:
            ended.discard(_get_ident())
            return
        yield self.plain()

    def plain(self) -> list[Any]:
        """Return the other finders in their order."""
        if self and self[0] is self.guard:
            return self[1:]
        return [finder for finder in super().__iter__() if finder is not self.guard]
