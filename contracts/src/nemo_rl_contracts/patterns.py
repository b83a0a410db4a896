# SPDX-License-Identifier: Apache-2.0
"""Entries of contracts that let something through: each with its reason, and none without effect."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_rl_contracts.chains import Edge, covers
from nemo_rl_contracts.errors import MisconfiguredError

__all__ = ["AllowList", "Reasoned", "matches", "parse_pairs", "parse_reasoned"]


@dataclass(frozen=True, kw_only=True)
class Reasoned:
    """One entry with the reason that stands behind its ``#``."""

    entry: str
    reason: str


def parse_reasoned(lines: Iterable[str], *, option: str) -> list[Reasoned]:
    """Split lines of the form ``entry  # reason``.

    Args:
        lines: The lines.
        option: Name of the option, for messages.

    Raises:
        MisconfiguredError: If a line has no reason, or an entry stands twice.
    """
    found: dict[str, Reasoned] = {}
    for line in lines:
        entry, _, reason = (part.strip() for part in line.partition("#"))
        if not entry or not reason:
            raise MisconfiguredError(
                f"every entry of {option} says why, in the form 'entry  # reason'; got {line.strip()!r}"
            )
        if entry in found:
            raise MisconfiguredError(f"{option} has the entry {entry!r} twice")
        found[entry] = Reasoned(entry=entry, reason=reason)
    return list(found.values())


def parse_pairs(lines: Iterable[str], *, option: str, separator: str, example: str) -> dict[str, str]:
    """Split lines of the form ``key<separator>value``.

    Args:
        lines: The lines.
        option: Name of the option, for messages.
        separator: What stands between the two.
        example: A line as it should be, for messages.

    Raises:
        MisconfiguredError: If a line has another form, or a key stands twice.
    """
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = (part.strip() for part in line.partition(separator))
        if not key or not value:
            raise MisconfiguredError(f"a line of {option} has the form {example!r}; got {line.strip()!r}")
        if key in found:
            raise MisconfiguredError(f"{option} has {key!r} twice")
        found[key] = value
    return found


def matches(pattern: str, module: str) -> bool:
    """Tell whether a module is meant by a pattern: ``*`` stands for one part of a name, ``**`` for one or more."""
    parts = {"*": r"[^.]+", "**": r"[^.]+(?:\.[^.]+)*"}
    return re.fullmatch(r"\.".join(parts.get(part, re.escape(part)) for part in pattern.split(".")), module) is not None


class AllowList:
    """Imports that a contract lets through, and whether each entry was of use.

    An entry is ``importer -> imported  # reason``. An external name stands for what is below it too.
    """

    def __init__(self, lines: Iterable[str], *, internal: Sequence[str], option: str = "allow") -> None:
        """Parse the entries.

        Args:
            lines: One entry each.
            internal: Root packages under check.
            option: Name of the option, for messages.

        Raises:
            MisconfiguredError: If a line is no entry, or has no reason.
        """
        self._option = option
        self._internal = tuple(internal)
        self._entries: dict[str, tuple[str, str]] = {}
        self._used: set[str] = set()
        for reasoned in parse_reasoned(lines, option=option):
            importer, _, imported = (part.strip() for part in reasoned.entry.partition("->"))
            if not importer or not imported:
                raise MisconfiguredError(
                    f"an entry of {option} has the form 'importer -> imported  # reason'; got {reasoned.entry!r}"
                )
            self._entries[reasoned.entry] = (importer, imported)

    def covers(self, edge: Edge, name: str) -> bool:
        """Tell whether an import of this name is let through, and remember that the entry was of use."""
        hit = False
        for entry, (importer, imported) in self._entries.items():
            external = not any(covers(root, name) for root in self._internal)
            if matches(importer, edge.importer) and (matches(imported, name) or (external and covers(imported, name))):
                self._used.add(entry)
                hit = True
        return hit

    def unused(self) -> list[str]:
        """Return a sentence for each entry that let nothing through; to be asked when the check is done."""
        return [
            f"the entry {entry!r} of {self._option} lets nothing through; take it out"
            for entry in self._entries
            if entry not in self._used
        ]
