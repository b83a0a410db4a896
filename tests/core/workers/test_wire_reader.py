# SPDX-License-Identifier: Apache-2.0
"""The reader of pickles that the wire's proof rests on: it finds what `pickle` itself would import, and nothing else."""

import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import pickletools
import pkgutil
import sys
import uuid
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from nemo_rl_core.errors import RefitTimeoutError
from nemo_rl_core.protocols.generation import Completion
from nemo_rl_core.testing.wire import WireError, check_crossing, crossings, globals_of, roots_of, table_of

COMPLETION = Completion(token_ids=(1, 2), logprobs=(-0.5, -0.25), finish_reason="stop", weight_version=3)


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Outer:
    inner: object
    children: list = field(default_factory=list)

    @dataclass
    class Nested:
        value: object


Pair = collections.namedtuple("Pair", ["left", "right"])


class Recorder(pickle.Unpickler):
    """The oracle: keeps every object that `pickle` itself looks up."""

    def __init__(self, stream):
        super().__init__(io.BytesIO(stream))
        self.found = []

    def find_class(self, module, name):
        self.found.append(super().find_class(module, name))
        return self.found[-1]


def looked_up(stream):
    recorder = Recorder(stream)
    recorder.load()
    return {id(found): found for found in recorder.found}


def resolved(stream):
    found = [pkgutil.resolve_name(f"{each.module}:{each.name}") for each in globals_of(stream)]
    return {id(each): each for each in found}


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(
        [
            COMPLETION,
            Colour.RED,
            Outer.Nested,  # a class by reference, with a dotted name
            Outer.Nested(1),
            Pair(1, "b"),
            complex(1, 2),
            collections.OrderedDict(a=1),
            collections.Counter("aab"),
            collections.deque([1], maxlen=3),
            collections.defaultdict(list, a=[1]),
            datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC),
            decimal.Decimal("1.5"),
            fractions.Fraction(1, 3),
            pathlib.PurePosixPath("a/b"),
            uuid.UUID(int=5),
            range(3),
            slice(1, 2),
            len,
            Exception("x"),
            RefitTimeoutError("nobody came", cause="rank 3 missing", phase="handshake"),
            Version("1.0"),
            numpy.float32(1.5),
            numpy.arange(3),
            torch.float32,
            torch.Size([2]),
        ]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.tuples(children, children),
        st.dictionaries(st.text(max_size=3), children, max_size=3),
        st.builds(Outer, children, st.lists(children, max_size=2)),
        # The same object twice is what makes a pickler use its memo.
        children.map(lambda value: [value, value]),
    ),
    max_leaves=12,
)


@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL), st.booleans())
def test_it_finds_what_pickle_looks_up_and_nothing_else(value, protocol, optimised):
    try:
        stream = pickle.dumps(value, protocol)
    except (TypeError, pickle.PicklingError):
        return  # the oldest protocols can't write everything
    if optimised:
        stream = pickletools.optimize(stream)
    assert set(resolved(stream)) == set(looked_up(stream))


def test_strings_from_the_memo_name_modules_too():
    """A second class of one module: its module's name is fetched, not written."""
    stream = pickle.dumps([Outer, Outer.Nested, Colour])
    assert stream.count(b"test_wire_reader") == 1
    assert {str(found).rpartition("test_wire_reader.")[2] for found in globals_of(stream)} == {
        *("Outer", "Outer.Nested", "Colour"),
    }


OLD = {
    "GLOBAL": b"cpackaging.version\nVersion\n.",
    "INST": b"(ipackaging.version\nVersion\n.",
    "STACK_GLOBAL, twice the same string": b"\x8c\tpackaging\x94\x8c\x01V0h\x00\x8c\x07Version\x93.",
    "STACK_GLOBAL, by PUT and GET": b"Vpackaging\np7\n0g7\nVVersion\n\x93.",
    "STACK_GLOBAL, by DUP": b"\x8c\tpackaging2\x93.",
    "a mark that is popped": b"(\x8c\x01a\x8c\x01b1cpackaging.version\nVersion\n.",
    "a mark that POP takes": b"(0cpackaging.version\nVersion\n.",
    "an old string": b"U\tpackagingU\x07Version\x93.",
}


@pytest.mark.parametrize("form", OLD)
def test_every_opcode_that_names_something_is_read(form):
    assert roots_of(OLD[form]) == {"packaging"}


def test_the_names_of_python_2_are_those_of_today():
    """Protocols below 3 write them; `copy_reg` would be a foreign package."""
    assert b"copy_reg" in pickle.dumps(Outer(1), 1)
    assert roots_of(pickle.dumps(Outer(1), 1)) == {"copyreg", "builtins", __name__.partition(".")[0]}
    assert b"__builtin__\nxrange" in pickle.dumps(range(3), 2)
    assert {str(found) for found in globals_of(pickle.dumps(range(3), 2))} == {"builtins.range"}


@pytest.mark.parametrize("code", [0x7F, 0x7F01, 0x7F0102])
def test_an_extension_code_is_looked_up(code):
    """Also after `pickle` has cached it, from when on it asks for no class any more."""
    copyreg.add_extension("packaging.version", "Version", code)
    try:
        stream = pickle.dumps(Version("1.0"))
        assert b"packaging" not in stream
        assert looked_up(stream)
        assert roots_of(stream) >= {"packaging"}
        assert roots_of(stream) >= {"packaging"}
    finally:
        copyreg.remove_extension("packaging.version", "Version", code)
    with pytest.raises(WireError, match=f"extension code {code}"):
        roots_of(stream)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_inside_a_pickle_is_read(protocol):
    inner = pickle.dumps(Version("1.0"))
    assert "packaging" in roots_of(pickle.dumps({"state": [inner, bytearray(inner)]}, protocol))
    assert "packaging" in roots_of(pickle.dumps(pickle.dumps({"state": inner}), protocol))
    # Several in a row with raw numbers behind them: so torch writes a storage.
    assert "packaging" in roots_of(pickle.dumps(pickle.dumps(1) + inner + b"\x00\x01\x02", protocol))


def test_bytes_that_only_look_like_a_pickle_need_nothing():
    for data in (b"\x80", b"\x80\x04", b"\x80\x05abc", b"\x80\xff\x00\x00", pickle.dumps([1])[:-1]):
        assert roots_of(pickle.dumps(data)) == set()


def test_a_tensor_needs_torch_inside_and_out():
    found = globals_of(pickle.dumps(torch.arange(3)))
    assert {each.root for each in found} == {"torch", "collections"}
    assert "torch.storage._load_from_bytes" in {str(each) for each in found}


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b"", "a pickle is wanted"),
        (b"hello", "a pickle is wanted"),
        (pickle.dumps([1, 2])[:-1], "a pickle is wanted"),
        (b"h\x05.", "a pickle is wanted"),  # the memo has no such item
        (b"0.", "a pickle is wanted"),  # nothing to pop
        (pickle.dumps(1) + b"more", "4 bytes follow"),
        (b"\x8c\x09packaging\x8c\x07Version\x86\x8c\x01b\x93.", "computes the name"),
    ],
)
def test_what_cannot_be_followed_is_refused(stream, words):
    with pytest.raises(WireError, match=words):
        globals_of(stream)


def test_every_field_is_listed_with_what_it_needs():
    value = {"a": [COMPLETION], "b": Outer(Version("1.0"), [numpy.arange(2)])}
    rows = {row.path: row.roots for row in crossings(value, "generate()")}
    here = __name__.partition(".")[0]
    assert rows["generate()['a'][0]"] == {"nemo_rl_core"}
    assert rows["generate()['a'][0].logprobs"] == frozenset()
    assert rows["generate()['b']"] == {here}
    assert rows["generate()['b'].inner"] == {"packaging"}
    assert "numpy" in rows["generate()['b'].children[0]"]
    whole = roots_of(pickle.dumps(value))
    assert frozenset().union(*rows.values()) == whole


@given(VALUES)
def test_the_fields_together_need_what_the_whole_needs(value):
    assert frozenset().union(*(row.globals for row in crossings(value))) == globals_of(pickle.dumps(value))


def test_the_table_says_field_type_and_packages():
    assert table_of(crossings([COMPLETION, 1], "x")).splitlines() == [
        "field                type        needs",
        "x[0]                 Completion  nemo_rl_core",
        "x[0].token_ids       tuple       -",
        "x[0].logprobs        tuple       -",
        "x[0].finish_reason   str         -",
        "x[0].weight_version  int         -",
        "x[1]                 int         -",
    ]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([COMPLETION, Version("1.0")], r"x\[1\]"),
        ({"report": {"version": Version("1.0")}}, r"x\['report'\]\['version'\]"),
        ({Version("1.0"): 1}, r"x\[<Version\('1.0'\)> as key\]"),
        (Pair(1, Version("1.0")), r"x\.right"),
        (ValueError("a", Version("1.0")), r"x\.args\[1\]"),
        (frozenset({Version("1.0")}), r"x\{<Version\('1.0'\)>\}"),
        (pickle.dumps(Version("1.0")), "x"),
    ],
)
def test_a_foreign_object_is_named_by_its_field(value, path):
    """F50: whatever it is part of."""
    allowed = {"nemo_rl_core", __name__.partition(".")[0]}
    with pytest.raises(WireError, match=rf"{path} needs 'packaging' \(packaging\.version\.Version\).*before it leaves"):
        check_crossing(value, "x", allowed=allowed)


def test_all_foreign_fields_are_named_at_once():
    with pytest.raises(WireError, match=r"x\[0\] needs 'packaging'.*x\[2\] needs 'packaging'"):
        check_crossing([Version("1.0"), 1, Version("2.0")], "x")


def test_a_field_that_cannot_be_pickled_is_named():
    """F51: found here, not by a driver that waits for the result."""
    for value, path in (({"a": [1, (n for n in [])]}, r"x\['a'\]\[1\]"), (COMPLETION.__class__.__dict__, "x")):
        with pytest.raises(WireError, match=rf"^{path} is a builtins\.\w+ and can't be pickled"):
            check_crossing(value, "x")


class Loads:
    """Says to its reader: import whatever this string says."""

    def __reduce__(self):
        return __import__, ("json",)


def test_a_call_that_can_load_anything_is_refused_though_it_is_the_standard_librarys():
    with pytest.raises(WireError, match=r"x\[0\] calls builtins\.__import__ when it is read, which can load anything"):
        check_crossing([Loads()], "x")


def test_a_value_that_holds_itself_is_followed_once():
    value = Outer(Version("1.0"))
    value.children.append(value)
    assert [row.path for row in crossings(value, "x") if "packaging" in row.roots] == ["x.inner"]


def test_reading_loads_nothing(tmp_path, monkeypatch):
    """The engine need not be there where the check runs."""
    (tmp_path / "engine_of_nobody.py").write_text("class Output:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import engine_of_nobody

    stream = pickle.dumps(engine_of_nobody.Output())
    del sys.modules["engine_of_nobody"]
    assert "engine_of_nobody" in roots_of(stream)
    assert "engine_of_nobody" not in sys.modules
