# SPDX-License-Identifier: Apache-2.0
"""What the reader of a pickle has to import, field by field: for tests that nothing of an engine crosses from a worker.

A result that holds one object of an engine can only be unpickled where that engine is installed. `check_crossing` finds
the field; `crossings` lists all of them. A stream is read opcode by opcode and never loaded, so neither the engine nor
anything that the stream names has to be there. Standard library only.
"""

import _compat_pickle  # the renaming of Python 2's modules that `pickle` itself does for protocols 0 to 2
import copyreg
import pickle
import pickletools
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, NamedTuple, cast

from nemo_rl_core.errors import NemoRLError, text_of

__all__ = [
    "ALLOWED_ROOTS",
    "Crossing",
    "Global",
    "WireError",
    "check_crossing",
    "crossings",
    "globals_of",
    "roots_of",
    "table_of",
]

#: Packages that every side has, beside the standard library.
ALLOWED_ROOTS: Final = frozenset({"nemo_rl_core", "torch", "numpy"})

#: Functions of the standard library that import or run whatever their argument says. What they load is not in the
#: stream as a name, so a stream that calls one can need anything.
_OPEN_DOORS: Final = frozenset(
    {
        "builtins.__import__",
        "builtins.eval",
        "builtins.exec",
        "importlib.__import__",
        "importlib.import_module",
        "pkgutil.resolve_name",
        "pydoc.locate",
        "runpy.run_module",
        "runpy.run_path",
    }
)

_TEXT: Final = frozenset(
    {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"}
)
_BYTES: Final = frozenset({"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"})
_MEMO_WRITES: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_MEMO_READS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
#: A value on the reader's stack of which nothing has to be known.
_OTHER: Final = object()


class WireError(NemoRLError, TypeError):
    """Something crosses from a worker that not every side can unpickle; the message names the field."""


class Global(NamedTuple):
    """A class or function that a reader imports.

    Attributes:
        module: Its module.
        name: Its name in there, dotted where it is nested.
    """

    module: str
    name: str

    @property
    def root(self) -> str:
        """The top-level package."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One place in what crosses.

    Attributes:
        path: Where, e.g. ``generate()[0].logprobs``.
        kind: Name of the type of the value there.
        globals: What its pickle names and the pickles of its own parts don't; empty for plain builtins.
    """

    path: str
    kind: str
    globals: frozenset[Global]

    @property
    def roots(self) -> frozenset[str]:
        """Top-level packages that are needed here."""
        return frozenset(found.root for found in self.globals)


def roots_of(stream: bytes) -> frozenset[str]:
    """Return the top-level packages that reading a pickle imports; ``builtins`` is one of them where it is named.

    Raises:
        WireError: If the bytes are not one whole pickle, or name something in a way that can't be followed.
    """
    return frozenset(found.root for found in globals_of(stream))


def globals_of(stream: bytes) -> frozenset[Global]:
    """Return every class and function that a pickle of any protocol names, also in pickles inside of it.

    Source: the opcodes as `pickletools` documents them; the stack is followed as `pickletools.dis` does it.

    Raises:
        WireError: If the bytes are not one whole pickle, or name something in a way that can't be followed.
    """
    try:
        found, end = _read(stream)
    except (ValueError, IndexError, KeyError) as error:
        raise WireError(f"a pickle is wanted, and these {len(stream)} bytes are none: {error!r}") from error
    if end != len(stream):
        raise WireError(f"one pickle is wanted, and {len(stream) - end} bytes follow it; look at each pickle by itself")
    return frozenset(found)


def _read(stream: bytes) -> tuple[set[Global], int]:
    """Return what the first pickle of a stream names, and where that pickle ends.

    Raises:
        ValueError: If it is not a pickle; also IndexError and KeyError, for a stack or a memo that lacks an item.
    """
    found: set[Global] = set()
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    protocol, position = 0, 0
    # From bytes each opcode has its position, and an argument where it has to have one.
    opcodes = cast("Iterator[tuple[pickletools.OpcodeInfo, Any, int]]", pickletools.genops(stream))
    for opcode, argument, position in opcodes:
        name = opcode.name
        if name == "PROTO":
            protocol = argument
        elif name in ("GLOBAL", "INST"):
            module, _, attribute = argument.partition(" ")
            found.add(_renamed(module, attribute, protocol))
        elif name == "STACK_GLOBAL":
            found.add(_from_stack(stack, position))
        elif name.startswith("EXT"):
            found.add(_registered(argument))
        if name in _MEMO_WRITES:
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
            continue
        pushed: list[Any] = [_OTHER] * len(opcode.stack_after)
        if name in _TEXT or name in _BYTES:
            pushed = [argument]
            found |= _inside(argument)
        elif name in _MEMO_READS:
            pushed = [memo[argument]]
        elif name == "DUP":
            pushed = [stack[-1]] * 2
        elif name == "MARK":
            pushed = [pickletools.markobject]
        _pop(stack, opcode)
        stack += pushed
    return found, position + 1


def _pop(stack: list[Any], opcode: pickletools.OpcodeInfo) -> None:
    """Take off the stack what an opcode takes; with a mark among it, everything down to the topmost mark."""
    mark = pickletools.markobject
    count = len(opcode.stack_before)
    if mark in opcode.stack_before or (opcode.name == "POP" and stack[-1] is mark):
        while stack.pop() is not mark:
            pass
        count = opcode.stack_before.index(mark) if mark in opcode.stack_before else 0
    for _ in range(count):
        stack.pop()


def _from_stack(stack: Sequence[Any], position: int) -> Global:
    module, name = stack[-2:]
    if not isinstance(module, str) or not isinstance(name, str):
        raise WireError(
            f"a pickle computes the name of what it imports (byte {position}), so what it needs can't be told; "
            "let the worker return plain data"
        )
    return Global(module, name)


def _renamed(module: str, name: str, protocol: int) -> Global:
    """Return a global under its name of today; protocols 0 to 2 write those of Python 2."""
    if protocol < 3:
        if (module, name) in _compat_pickle.NAME_MAPPING:
            module, name = _compat_pickle.NAME_MAPPING[module, name]
        elif module in _compat_pickle.IMPORT_MAPPING:
            module = _compat_pickle.IMPORT_MAPPING[module]
    return Global(module, name)


def _registered(code: int) -> Global:
    registry: dict[int, tuple[str, str]] = copyreg._inverted_registry  # type: ignore[attr-defined]
    if code not in registry:
        raise WireError(
            f"a pickle names something by the extension code {code}, which is not registered in this process"
        )
    return Global(*registry[code])


def _inside(value: str | bytes | bytearray) -> set[Global]:
    """Return what pickles need that are carried as bytes: torch's storages are, and anything that pickles twice.

    Protocols 0 to 2 write bytes as text of code points below 256. What is no pickle after all needs nothing.
    """
    if isinstance(value, str):
        if not value.startswith("\x80"):
            return set()
        try:
            value = value.encode("latin-1")
        except UnicodeEncodeError:
            return set()
    data, found = bytes(value), set()
    # Several may stand in a row, with raw numbers after the last one.
    while len(data) > 2 and data[0] == 0x80 and data[1] <= pickle.HIGHEST_PROTOCOL:
        try:
            more, end = _read(data)
        except (ValueError, IndexError, KeyError):
            break
        found |= more
        data = data[end:]
    return found


def crossings(value: Any, name: str = "value") -> tuple[Crossing, ...]:
    """List what a value's pickle needs, by field: of dataclasses, named tuples, dicts, sequences, sets and exceptions.

    A part that is plain through and through is one entry, whatever it holds.

    Args:
        value: What crosses.
        name: What the paths begin with, e.g. ``generate()``.

    Raises:
        WireError: If a part can't be pickled at all; the message names it.
    """
    return tuple(_walk(value, name, {}))


def _walk(value: Any, path: str, above: dict[int, frozenset[Global]]) -> Iterator[Crossing]:
    """Yield a value's own entry and those of its parts; ``above`` is what the values that hold it need, by their id."""
    needed = globals_of(_dumps(value, path))
    inside = above | {id(value): needed}
    parts = list(_parts(value)) if needed else []
    # What holds itself is listed where it was met first.
    rows = [row for step, part in parts if id(part) not in inside for row in _walk(part, path + step, inside)]
    below = frozenset[Global]().union(*(row.globals for row in rows), *(inside.get(id(part), ()) for _, part in parts))
    own = needed - below | (needed & {Global(type(value).__module__, type(value).__qualname__)})
    if own or not parts:
        yield Crossing(path=path, kind=type(value).__qualname__, globals=own)
    yield from rows


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with what is added to the path."""
    if is_dataclass(value) and not isinstance(value, type):
        yield from (
            (f".{field.name}", getattr(value, field.name)) for field in fields(value) if hasattr(value, field.name)
        )
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{field}", getattr(value, field)) for field in value._fields)
    elif isinstance(value, dict):
        yield from ((f"[{key!r} as key]", key) for key in value if not isinstance(key, str | int | float | bytes))
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f"{{{part!r}}}", part) for part in value)
    elif isinstance(value, BaseException):
        yield from ((f".args[{index}]", part) for index, part in enumerate(value.args))
        yield from ((f".{key}", part) for key, part in vars(value).items())


def _dumps(value: Any, path: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        # Whatever a foreign class raises here, the reader never gets the value.
        where, part = _not_picklable(value, path, frozenset())
        raise WireError(
            f"{where} is a {type(part).__module__}.{type(part).__qualname__} and can't be pickled ({text_of(error)}); "
            "let the worker return plain data"
        ) from error


def _not_picklable(value: Any, path: str, above: frozenset[int]) -> tuple[str, Any]:
    """Return the path and value of the smallest part that can't be pickled; the value itself where its parts can."""
    for step, part in _parts(value) if id(value) not in above else ():
        try:
            pickle.dumps(part)
        except Exception:  # noqa: BLE001 - of any kind, as above; the part that raises it is what is looked for
            return _not_picklable(part, path + step, above | {id(value)})
    return path, value


def check_crossing(
    value: Any, name: str = "value", *, allowed: Collection[str] = ALLOWED_ROOTS
) -> tuple[Crossing, ...]:
    """Check that everything in a value can be unpickled with the allowed packages and the standard library.

    Args:
        value: What crosses.
        name: What the paths begin with, e.g. ``generate()``.
        allowed: Top-level packages that every reader has, beside the standard library.

    Returns:
        Every entry, as `crossings` returns them; never none.

    Raises:
        WireError: If a field needs something else, or can't be pickled; the message names each such field.
    """
    rows = crossings(value, name)
    faults = [fault for row in rows for fault in _faults(row, allowed)]
    if faults:
        known = ", ".join([*sorted(allowed), "the standard library"])
        raise WireError(
            f"what crosses from a worker needs nothing but {known} to be unpickled; "
            + "; ".join(faults)
            + "; turn it into numbers, strings, lists, dicts or core's own dataclasses before it leaves the worker"
        )
    return rows


def _faults(row: Crossing, allowed: Collection[str]) -> Iterator[str]:
    for found in sorted(row.globals):
        if str(found) in _OPEN_DOORS:
            yield f"{row.path} calls {found} when it is read, which can load anything"
        elif found.root not in allowed and found.root not in sys.stdlib_module_names:
            yield f"{row.path} needs {found.root!r} ({found})"


def table_of(rows: Iterable[Crossing]) -> str:
    """Return entries as a table of path, type and packages; ``-`` where plain builtins suffice."""
    lines = [("field", "type", "needs")]
    lines += [(row.path, row.kind, ", ".join(sorted(row.roots)) or "-") for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(f"{path.ljust(widths[0])}  {kind.ljust(widths[1])}  {needs}" for path, kind, needs in lines)
