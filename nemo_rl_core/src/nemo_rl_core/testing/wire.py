# SPDX-License-Identifier: Apache-2.0
"""What the reader of a pickle has to import, field by field: for tests that nothing of an engine crosses from a worker.

A result that holds one object of an engine can only be unpickled where that engine is installed. `check_crossing` finds
the field; `crossings` lists all of them. A stream is read opcode by opcode and never loaded, so neither the engine nor
anything that the stream names has to be there. Standard library only.
"""

import _compat_pickle  # the renaming of Python 2's modules that `pickle` itself does for protocols 0 to 2
import copyreg
import enum
import pickle
import pickletools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from nemo_rl_core.errors import NemoRLError, text_of

__all__ = [
    "ALLOWED_ROOTS",
    "Crossing",
    "Global",
    "WireError",
    "check_crossing",
    "check_stream",
    "crossings",
    "globals_of",
    "roots_of",
    "table_of",
]

#: Packages that every side has, beside the standard library.
ALLOWED_ROOTS: Final = frozenset({"nemo_rl_core", "torch", "numpy"})

#: What a pickle may name of the standard library, by module: types of plain values, and the functions that pickle itself
#: needs to make one. All else is an error. A list of what is forbidden would never be complete: `importlib`, `runpy`,
#: `subprocess`, `pydoc`, `logging.config`, entry points, `pickle.loads` and dozens more load or run what their argument
#: says, and that is no name in the stream. Exceptions and enums are added by `_is_plain`.
_PLAIN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "builtins": "Ellipsis NotImplemented bool bytearray bytes complex dict float frozenset int list object range set "
        "slice str tuple",
        "_codecs": "encode",  # how old protocols write bytes; it finds codecs of the standard library only
        "_io": "BytesIO StringIO",
        "array": "_array_reconstructor array",
        "collections": "ChainMap Counter OrderedDict UserDict UserList UserString defaultdict deque",
        "copyreg": "__newobj__ __newobj_ex__ _reconstructor",
        "datetime": "date datetime time timedelta timezone",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "ipaddress": "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network",
        "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
        "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
        "time": "struct_time",
        "types": "SimpleNamespace",
        "uuid": "UUID",
    }
)

#: Protocols of which a result is looked at. Python's own default is 4 or 5, Ray writes 5, torch.save 2.
_PROTOCOLS: Final = range(2, pickle.HIGHEST_PROTOCOL + 1)
#: From here on Python writes a protocol without being asked, and names classes directly.
_DIRECT: Final = 4
#: Levels of dataclasses, dicts, lists and so on that are followed.
_DEEPEST: Final = 50
_SHOWN: Final = 120

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
    except RecursionError as error:
        raise WireError("pickles are nested inside of pickles too deeply to be read; carry plain data") from error
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
    # Protocols 0 and 1 have no mark at the front; what names something in them has a line, and a dot at its end.
    is_old = data[-1:] == b"." and b"\n" in data and data[:1] != b"\x80"
    # Several may stand in a row, with raw numbers after the last one.
    while is_old or (len(data) > 2 and data[0] == 0x80 and data[1] <= pickle.HIGHEST_PROTOCOL):
        try:
            more, end = _read(data)
        except (ValueError, IndexError, KeyError):
            break
        found |= more
        data, is_old = data[end:], False
    return found


def crossings(value: Any, name: str = "value") -> tuple[Crossing, ...]:
    """List what a value's pickle needs, by field: of dataclasses, named tuples, dicts, sequences, sets and exceptions.

    A part that is plain through and through is one entry, whatever it holds.

    It is written in protocols 2 to the highest, and what any of them names counts: a class may write itself differently
    in each.

    Args:
        value: What crosses.
        name: What the paths begin with, e.g. ``generate()``.

    Raises:
        WireError: If a part can't be pickled at all, or is nested too deeply; the message names it.
    """
    try:
        return tuple(_walk(value, name, {}))
    except RecursionError as error:
        raise WireError(f"{name} is nested too deeply to be followed; let the worker return flat data") from error


def _walk(value: Any, path: str, above: dict[int, frozenset[Global]]) -> Iterator[Crossing]:
    """Yield a value's own entry and those of its parts; ``above`` is what the values that hold it need, by their id."""
    if len(above) > _DEEPEST:
        raise WireError(
            f"{_shown(path)} is nested more than {_DEEPEST} levels deep; let the worker return flat data, such as a list "
            f"of core's own dataclasses"
        )
    needed = _needs(value, path)
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


def _needs(value: Any, path: str) -> frozenset[Global]:
    """Return what any protocol names for a value.

    Raises:
        WireError: If a protocol that is written unasked can't take it; the message names the smallest such part.
    """
    found = set[Global]()
    for protocol in reversed(_PROTOCOLS):
        try:
            stream = pickle.dumps(value, protocol)
        except Exception as error:  # whatever a foreign class raises here, the reader never gets the value
            if protocol < _DIRECT:
                continue  # they can't write everything
            raise _why_not_picklable(value, path, protocol, error) from error
        named = globals_of(stream)
        if protocol < _DIRECT:
            # They write nested classes, and bytes, by detours that nobody's class asks for; so only a new package counts.
            known = {each.root for each in found} | sys.stdlib_module_names
            named = {each for each in named if each.root not in known}
        found |= named
    return frozenset(found)


def _why_not_picklable(value: Any, path: str, protocol: int, error: Exception) -> WireError:
    where, part = _not_picklable(value, path, protocol, frozenset())
    kind = f"{_shown(where)} is a {type(part).__module__}.{type(part).__qualname__}"
    if isinstance(error, RecursionError):
        return WireError(f"{kind} that is nested too deeply to be pickled; let the worker return flat data")
    return WireError(f"{kind} and can't be pickled ({text_of(error)}); let the worker return plain data")


def _not_picklable(value: Any, path: str, protocol: int, above: frozenset[int]) -> tuple[str, Any]:
    """Return the path and value of the smallest part that can't be pickled; the value itself where its parts can."""
    for step, part in _parts(value) if id(value) not in above and len(above) < _DEEPEST else ():
        try:
            pickle.dumps(part, protocol)
        except Exception:  # noqa: BLE001 - of any kind, as above; the part that raises it is what is looked for
            return _not_picklable(part, path + step, protocol, above | {id(value)})
    return path, value


def _shown(path: str) -> str:
    return path if len(path) <= _SHOWN else f"{path[:_SHOWN]}..."


def check_crossing(
    value: Any, name: str = "value", *, allowed: Collection[str] = ALLOWED_ROOTS
) -> tuple[Crossing, ...]:
    """Check that everything in a value can be unpickled with the allowed packages and plain values of Python's own.

    Of the standard library a pickle may name types of plain values (numbers, text, containers, times, paths, ...),
    exceptions and enums, and nothing else: its functions can load or run whatever their argument says.

    Args:
        value: What crosses.
        name: What the paths begin with, e.g. ``generate()``.
        allowed: Top-level packages that every reader has, and of which anything may be named; or one full name.

    Returns:
        Every entry, as `crossings` returns them; never none.

    Raises:
        WireError: If a field needs something else, or can't be pickled; the message names each such field.
    """
    rows = crossings(value, name)
    _check(rows, allowed)
    return rows


def check_stream(stream: bytes, name: str = "value", *, allowed: Collection[str] = ALLOWED_ROOTS) -> frozenset[Global]:
    """Check a pickle that somebody else has written (`ray.cloudpickle`, say) by the rule of `check_crossing`.

    Args:
        stream: One pickle; buffers that travel beside it are raw numbers and need nothing.
        name: What it is, for the message.
        allowed: As for `check_crossing`.

    Returns:
        What it names.

    Raises:
        WireError: If it needs something else, or is no pickle.
    """
    row = Crossing(path=name, kind="pickle", globals=globals_of(stream))
    _check((row,), allowed)
    return row.globals


def _check(rows: Iterable[Crossing], allowed: Collection[str]) -> None:
    faults = [fault for row in rows for fault in _faults(row, allowed)]
    if faults:
        known = ", ".join([*sorted(allowed), "plain values of the standard library"])
        raise WireError(
            f"what crosses from a worker needs nothing but {known} to be unpickled; "
            + "; ".join(faults)
            + "; turn it into numbers, strings, lists, dicts or core's own dataclasses before it leaves the worker"
        )


def _faults(row: Crossing, allowed: Collection[str]) -> Iterator[str]:
    for found in sorted(row.globals):
        if found.root in allowed or str(found) in allowed:
            continue
        if found.root not in sys.stdlib_module_names:
            yield f"{row.path} needs {found.root!r} ({found})"
        elif not _is_plain(found):
            yield f"{row.path} names {found}, which is no plain value of the standard library and could load anything"


def _is_plain(found: Global) -> bool:
    """Tell whether a name of the standard library is on the list, or is an exception or an enum.

    Those two are too many to list. Whoever has one in his hand has its module loaded, so nothing is imported here.
    """
    if found.name in _PLAIN.get(found.module, "").split():
        return True
    value = getattr(sys.modules.get(found.module), "__dict__", {}).get(found.name)
    if isinstance(value, type):
        return issubclass(value, BaseException | enum.Enum)
    return isinstance(value, enum.Enum)


def table_of(rows: Iterable[Crossing]) -> str:
    """Return entries as a table of path, type and packages; ``-`` where plain builtins suffice."""
    lines = [("field", "type", "needs")]
    lines += [(row.path, row.kind, ", ".join(sorted(row.roots)) or "-") for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(f"{path.ljust(widths[0])}  {kind.ljust(widths[1])}  {needs}" for path, kind, needs in lines)
