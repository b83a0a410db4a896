# SPDX-License-Identifier: Apache-2.0
"""The phase of an import statement whose line is known, from the statement around it and without the rest of the file.

Parsing a whole file for one line of it takes longer than all else. A top-level statement begins at the left margin and
ends before the next one, so a few lines mostly do. Where the text leaves any doubt the answer is None, and the whole
file is to be parsed.
"""

import re
from collections.abc import Sequence

from nemo_rl_contracts.found import Form, FoundImport
from nemo_rl_contracts.phases import find_imports

__all__ = ["imports_at", "lines_of"]

#: What can stand at the left margin within a statement: blank, indented, a comment, a closing bracket, a further clause.
_WITHIN = re.compile(rb"\s|$|#|[)\]}]|(?:else|elif|except|finally)\b")
_BLOCK = re.compile(rb"(?:async[ \t]+)?(?:def|class|if|try|for|while|with|match)\b")
_PREAMBLE = b"import typing; from typing import TYPE_CHECKING\n"


def lines_of(source: bytes) -> Sequence[bytes] | None:
    """Return the lines of a file, None where it has line ends that Python may count in another way."""
    return None if b"\r" in source or b"\f" in source else source.split(b"\n")


def imports_at(
    lines: Sequence[bytes], lineno: int, *, module: str = "", is_package: bool = False
) -> list[FoundImport] | None:
    """Return what the import statement on a line imports, None where the whole file has to be parsed to tell.

    Args:
        lines: The file's lines. Every ``TYPE_CHECKING`` in it is the flag of typing; see ``type_checking.is_usual``.
        lineno: Line of a statement that is known to be an import, counted from 1.
        module: See ``find_imports``.
        is_package: See ``find_imports``.
    """
    own = lineno - 1
    if not 0 <= own < len(lines):
        return None
    first = own
    while first > 0 and _WITHIN.match(lines[first]):
        first -= 1
    if first != own and not _BLOCK.match(lines[first]):
        return None
    last = own + 1
    while last < len(lines) and _WITHIN.match(lines[last]):
        last += 1
    before = b"\n".join(lines[:first])
    # A line at the left margin may lie within a text of several lines, or go on with the line above.
    if before.count(b'"""') % 2 or before.count(b"'''") % 2 or before.endswith(b"\\"):
        return None
    part = b"\n".join(lines[first:last]) + b"\n"
    if b"with" in part and (b"suppress" in before or b"suppress" in part):
        return None  # `contextlib.suppress` may have another name here
    shift = first
    if b"TYPE_CHECKING" in part:
        part, shift = _PREAMBLE + part, first - 1
    try:
        found = find_imports(part, module=module, is_package=is_package)
    except SyntaxError:
        return None
    here = [one for one in found if one.lineno + shift == lineno and one.form is Form.STATEMENT]
    return [_moved(one, lineno) for one in here] or None


def _moved(found: FoundImport, lineno: int) -> FoundImport:
    return FoundImport(
        module=found.module,
        names=found.names,
        lineno=lineno,
        phase=found.phase,
        form=found.form,
        guarded=found.guarded,
    )
