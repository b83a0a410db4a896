# SPDX-License-Identifier: Apache-2.0
"""One import as it is found in a source file: what, where, when and how."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Form", "FoundImport", "Phase"]


class Phase(StrEnum):
    """When an import runs."""

    EAGER = "eager"
    CONDITIONAL = "conditional"
    LAZY = "lazy"
    TYPING = "typing"

    @property
    def rank(self) -> int:
        """Position in the order eager, conditional, lazy, typing."""
        return _RANKS[self]

    @classmethod
    def of(cls, rank: int) -> "Phase":
        """Return the phase of a rank."""
        return list(cls)[rank]

    def then(self, other: "Phase") -> "Phase":
        """Return the phase of something of phase `other` below something of this one: the later of the two."""
        return self if self.rank >= other.rank else other


_RANKS = {phase: rank for rank, phase in enumerate(Phase)}


class Form(StrEnum):
    """How an import is written: a statement, or a literal given to a function that imports."""

    STATEMENT = "statement"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, kw_only=True)
class FoundImport:
    """One import.

    Attributes:
        module: Absolute name of the module; of ``from a import b`` it is ``a``, since only the file system can tell
            whether ``a.b`` is a module. It keeps its leading dots where the package that they start from is unknown.
        names: What a ``from`` statement takes out of it, ``("*",)`` for a star; empty for other forms.
        lineno: Line of the statement or call, counted from 1.
        phase: When it runs.
        form: How it is written.
        guarded: True inside a ``try`` that handles ImportError, or under ``contextlib.suppress`` of it: the import may
            fail, but it runs.
    """

    module: str
    names: tuple[str, ...] = ()
    lineno: int
    phase: Phase
    form: Form
    guarded: bool = False
