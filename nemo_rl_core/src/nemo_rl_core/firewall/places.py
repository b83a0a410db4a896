# SPDX-License-Identifier: Apache-2.0
"""Who asked: read from the places on a stack that the observer wrote down."""

import linecache
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.firewall.report import Ask

__all__ = ["Place", "asks_from", "split_dump", "traceback_lines"]

#: What ``faulthandler`` writes: a heading for each thread, then its calls, innermost first.
_HEADING = re.compile(r"^(?:Stack|Thread \S+|Current thread \S+).* \(most recent call first\):$")
_CALL = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@dataclass(frozen=True, kw_only=True)
class Place:
    """One call on a stack.

    Attributes:
        module: ``__name__`` of its code; "" where it is not known.
        function: Its function; ``<module>`` for code that runs because it is imported.
        file: Its file.
        line: The line, counted from 1.
    """

    module: str
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        parts = [self.module, "" if self.module and self.function == "<module>" else self.function]
        where = ".".join(filter(None, parts))
        source = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line} ({where})" + (f": {source}" if source else "")

    def is_plumbing(self, stdlib: str) -> bool:
        """Tell whether this code only passes an import on, as ``pickle`` and ``runpy`` do.

        Args:
            stdlib: Folder of the interpreter's standard library.
        """
        if self.file.startswith("<frozen "):
            return True
        is_installed = any(folder in self.file for folder in _INSTALLED)
        return self.file.startswith(stdlib + os.sep) and not is_installed


def _places(stack: Sequence[tuple[str, str, str, int]]) -> list[Place]:
    return [Place(module=module, function=function, file=file, line=line) for module, function, file, line in stack]


def traceback_lines(stack: Sequence[tuple[str, str, str, int]]) -> tuple[str, ...]:
    """Return the calls of a traceback as text, outermost first."""
    return tuple(str(place) for place in _places(stack))


def split_dump(output: str, *, own_file: str) -> tuple[str, tuple[str, ...]]:
    """Take the stack that ``faulthandler`` wrote into a process's output out of it.

    Args:
        output: All that the process printed.
        own_file: The observer's file, whose calls are left out.

    Returns:
        The output without it, and the calls, outermost first; of several stacks the last one.
    """
    rest: list[str] = []
    calls: list[Place] = []
    for line in output.splitlines():
        call = _CALL.match(line)
        if _HEADING.match(line):
            calls = []
        elif call is None:
            rest.append(line)
        elif call[1] != own_file and not call[1].startswith("<frozen "):
            calls.append(Place(module="", function=call[3], file=call[1], line=int(call[2])))
    return "\n".join(rest).strip(), tuple(str(place) for place in reversed(calls))


def asks_from(asks: Sequence[Mapping[str, Any]], loaded: Mapping[str, int], stdlib: str) -> tuple[Ask, ...]:
    """Turn what the observer wrote down into the first question for each forbidden name.

    A probe is no import, unless it loaded something: ``find_spec("a.b")`` imports ``a``.

    Args:
        asks: The first import and the first probe of each name.
        loaded: Forbidden name to the number of modules of it that were loaded.
        stdlib: Folder of the interpreter's standard library.
    """
    chosen: dict[str, Mapping[str, Any]] = {}
    for ask in sorted(asks, key=lambda ask: ask["is_probe"]):  # an import before a probe
        if not ask["is_probe"] or ask["rule"] in loaded:
            chosen.setdefault(ask["rule"], ask)
    return tuple(_ask(ask, stdlib) for ask in chosen.values())


def _ask(ask: Mapping[str, Any], stdlib: str) -> Ask:
    places = _places(ask["stack"])
    # Where everything is plumbing (a package of the standard library is audited) the innermost call asked.
    asker = next((place for place in reversed(places) if not place.is_plumbing(stdlib)), places[-1] if places else None)
    chain = [place.module for place in places if place.function == "<module>"]
    return Ask(
        rule=ask["rule"],
        module=ask["module"],
        importer=asker.module if asker else "?",
        file=asker.file if asker else "?",
        line=asker.line if asker else 0,
        stack=tuple(str(place) for place in places),
        chain=(*chain, ask["module"]),
    )
