# SPDX-License-Identifier: Apache-2.0
"""What a contract found, as data that every output format can show."""

from dataclasses import dataclass

from nemo_rl_contracts.chains import Chain, Edge, ImportMap

__all__ = ["Hop", "Violation", "counted", "hops_of"]


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One step of a chain.

    Attributes:
        importer: Where it starts.
        imported: Where it leads.
        file: The importer's file, relative to the working directory; "" where there is none.
        line: Line of the import, from 1; 0 where no single line is the cause.
        phase: When it runs, "" where that has no meaning.
        note: What else there is to say about it, as a few words.
    """

    importer: str
    imported: str
    file: str = ""
    line: int = 0
    phase: str = ""
    note: str = ""

    def __str__(self) -> str:
        """Return it as one line, with the place first looked for last."""
        place = f"{self.file}:{self.line}" if self.line else self.file
        words = ", ".join(filter(None, (self.phase, self.note)))
        return (
            f"{self.importer} -> {self.imported}" + (f" ({words})" if words else "") + (f"  {place}" if place else "")
        )


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One way in which a contract is broken.

    Attributes:
        rule: The contract type.
        message: What is wrong, as one line.
        file: The file to look at first; "" where there is none.
        line: The line in it, from 1; 0 where no single line is the cause.
        hops: The chain that leads there; empty where there is no chain.
        key: What makes it the same violation tomorrow, whatever lines have moved; baselines hold keys.
        advice: The way out, as a sentence; "" where the message says it.
    """

    rule: str
    message: str
    file: str = ""
    line: int = 0
    hops: tuple[Hop, ...] = ()
    key: str = ""
    advice: str = ""


def hops_of(chain: Chain, imports: ImportMap) -> tuple[Hop, ...]:
    """Turn a chain of imports into hops with files."""
    return tuple(
        Hop(
            importer=edge.importer,
            imported=chain.target if edge is chain.edges[-1] else edge.imported,
            file=imports.path(edge.importer),
            line=edge.lineno,
            phase=edge.phase.value,
            note=_note(edge),
        )
        for edge in chain.edges
    )


def _note(edge: Edge) -> str:
    notes = [
        "runs as a package initialiser" if edge.initialiser else "",
        "guarded" if edge.guarded else "",
        "by a function" if edge.form == "dynamic" else "",
    ]
    return ", ".join(filter(None, notes))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 file``, ``2 files``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
