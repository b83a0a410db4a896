# SPDX-License-Identifier: Apache-2.0
"""The reader of pickles that the wire's proof rests on: it finds what `pickle` itself would import, and nothing else."""

import array
import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import http
import importlib.metadata
import importlib.resources
import importlib.util
import io
import ipaddress
import json
import logging.config
import operator
import os
import pathlib
import pickle
import pickletools
import pkgutil
import pydoc
import re
import runpy
import signal
import subprocess
import sys
import time
import types
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
from nemo_rl_core.testing.wire import WireError, check_crossing, check_stream, crossings, globals_of, roots_of, table_of

COMPLETION = Completion(token_ids=(1, 2), logprobs=(-0.5, -0.25), finish_reason="stop", weight_version=3)


HERE = {"nemo_rl_core", __name__.partition(".")[0]}


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
    whole = globals_of(pickle.dumps(value, 4)) | globals_of(pickle.dumps(value, 5))
    assert frozenset().union(*(row.globals for row in crossings(value))) == whole


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
    words = (
        r"x\[0\] names builtins\.__import__, which is no plain value of the standard library and could load anything"
    )
    with pytest.raises(WireError, match=words):
        check_crossing([Loads()], "x")


class Calls:
    """Says to its reader: call this with that."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


ENTRY_POINT = importlib.metadata.EntryPoint("x", "json", "nobody")

#: Ways to make the reader load or run something that is only an argument, or only bytes.
DOORS = {
    "builtins.eval": Calls(eval, "1"),
    "importlib.import_module": Calls(importlib.import_module, "json"),
    "_frozen_importlib._gcd_import": Calls(importlib._bootstrap._gcd_import, "json"),
    "importlib.util.find_spec": Calls(importlib.util.find_spec, "json.tool"),
    "importlib.resources._common.files": Calls(importlib.resources.files, "json"),
    "importlib.metadata.EntryPoint": Calls(operator.methodcaller("load"), ENTRY_POINT),
    "operator.methodcaller": Calls(operator.methodcaller("load"), ENTRY_POINT),
    "operator.attrgetter": Calls(operator.attrgetter("real"), 1),
    "pydoc.safeimport": Calls(pydoc.safeimport, "json"),
    "logging.config._resolve": Calls(logging.config._resolve, "json"),
    "pkgutil.get_data": Calls(pkgutil.get_data, "json", "x"),
    "pkgutil.resolve_name": Calls(pkgutil.resolve_name, "json"),
    "runpy.run_module": Calls(runpy.run_module, "json"),
    "posix.system": Calls(os.system, "true"),
    "subprocess.run": Calls(subprocess.run, ["true"]),
    "subprocess.Popen": Calls(subprocess.Popen, ["true"]),
    "_pickle.loads": Calls(pickle.loads, pickle.dumps([], 0)),
    "functools.partial": functools.partial(int, "1"),
    "builtins.getattr": "text".upper,
    "builtins.len": len,
}


@pytest.mark.parametrize("door", DOORS)
def test_of_the_standard_library_only_plain_values_may_be_named(door):
    """Not a list of doors, which would never be complete: whatever is no plain value is one."""
    with pytest.raises(WireError, match=rf"x\['field'\](\.\w+)? names {re.escape(door)}, which is no plain value"):
        check_crossing({"plain": 1, "field": DOORS[door]}, "x")
    assert check_crossing(DOORS[door], allowed={door.partition(".")[0], "importlib", "operator", "builtins"})


def test_a_full_name_in_allowed_adds_that_one():
    assert check_crossing(re.compile("a"), allowed=["re._compile"])
    with pytest.raises(WireError, match=r"names re\._compile"):
        check_crossing(re.compile("a"), allowed=["re.compile", "_compile"])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_exceptions_and_enums_of_the_standard_library_pass(protocol):
    values = [
        *(
            1,
            1.5,
            1j,
            True,
            None,
            ...,
            NotImplemented,
            "a",
            b"a",
            bytearray(b"a"),
            (1,),
            [1],
            {1: 2},
            {1},
            frozenset({1}),
        ),
        *(range(2), slice(1), collections.OrderedDict(a=1), collections.Counter("a"), collections.deque([1])),
        *(collections.defaultdict(int, a=1), collections.ChainMap({}), collections.UserDict(), array.array("i", [1])),
        *(datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC), datetime.timedelta(1), decimal.Decimal(1)),
        *(fractions.Fraction(1, 2), pathlib.Path("a"), pathlib.PureWindowsPath("a"), uuid.UUID(int=1)),
        *(ipaddress.ip_network("10.0.0.0/8"), types.SimpleNamespace(a=1), time.gmtime(0), io.BytesIO(b"a")),
        *(KeyError("a"), OSError(2, "a"), ExceptionGroup("a", [ValueError()]), subprocess.CalledProcessError(1, "a")),
        *(json.JSONDecodeError("a", "b", 0), TimeoutError(), http.HTTPStatus.OK, signal.SIGTERM),
        *(torch.arange(3), torch.float32, numpy.arange(3), numpy.float32(1), numpy.array(["a", None], dtype=object)),
    ]
    for value in values:
        assert check_crossing(value, "x")
        if protocol >= 4:
            check_stream(pickle.dumps(value, protocol), "x")


class InNewProtocols:
    """Data for who asks for an old protocol, something of a package for Ray."""

    def __init__(self, protocols):
        self.protocols = protocols

    def __reduce_ex__(self, protocol):
        return (Version, ("1.0",)) if protocol in self.protocols else (dict, ())


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_any_protocol_needs_counts(protocol):
    """F50, U8: Python writes 4 or 5, Ray 5, torch.save 2."""
    with pytest.raises(WireError, match=r"x\[1\]\.inner needs 'packaging'"):
        check_crossing([types.SimpleNamespace(a=1), Outer(InNewProtocols({protocol}))], "x", allowed=HERE)
    assert roots_of(pickle.dumps(InNewProtocols({protocol}), protocol)) == {"packaging"}


class OnlyInNewProtocols:
    def __reduce_ex__(self, protocol):
        if protocol < 4:
            raise TypeError(protocol)
        return dict, ()


def test_what_an_old_protocol_cannot_write_is_no_fault():
    assert [row.roots for row in check_crossing(OnlyInNewProtocols(), "x")] == [{"builtins"}]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_bytes_that_hold_a_pickle_of_any_protocol_are_read(protocol):
    """Nobody carries them but to unpickle them."""
    inner = pickle.dumps(Version("1.0"), protocol)
    with pytest.raises(WireError, match=r"x\[0\] needs 'packaging'"):
        check_crossing([inner], "x")


def nested(depth, inmost):
    for _ in range(depth):
        inmost = [inmost]
    return inmost


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (nested(2000, 1), r"x\['a'\](\[0\])+\S* is a builtins\.list that is nested too deeply to be pickled"),
        (nested(100, COMPLETION), r"x\['a'\](\[0\])+\S* is nested more than 50 levels deep"),
        (nested(2000, COMPLETION), r"x\['a'\](\[0\])+\S* is a builtins\.list that is nested too deeply"),
    ],
)
def test_what_is_nested_too_deeply_is_an_error_that_names_the_field(value, words):
    with pytest.raises(WireError, match=rf"^{words}.*flat data") as caught:
        check_crossing({"plain": 1, "a": value}, "x")
    assert len(str(caught.value)) < 400
    assert check_crossing({"a": nested(40, COMPLETION)}, "x")
    assert check_crossing({"a": nested(100, 1)}, "x")


def test_pickles_inside_of_pickles_without_end_are_an_error():
    stream = pickle.dumps(1)
    for _ in range(1000):
        stream = pickle.dumps(stream)
    with pytest.raises(WireError, match="nested inside of pickles too deeply"):
        globals_of(stream)


def test_a_stream_of_somebody_elses_is_held_to_the_same_rule():
    assert {each.root for each in check_stream(pickle.dumps([COMPLETION]), "x")} == {"nemo_rl_core"}
    with pytest.raises(WireError, match=r"x needs 'packaging'.*before it leaves"):
        check_stream(pickle.dumps([Version("1.0")]), "x")
    with pytest.raises(WireError, match="a pickle is wanted"):
        check_stream(b"hello", "x")


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
