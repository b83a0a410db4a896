# SPDX-License-Identifier: Apache-2.0
"""When does an import run? The table of expected answers, and the kinds that it does not list."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_contracts import Form, FoundImport, Phase, find_imports

TABLE = json.loads((Path(__file__).parent / "import_phases.json").read_text())


def of_engine(source: str) -> list[FoundImport]:
    return [found for found in find_imports(source) if found.module.partition(".")[0] == "vllm"]


@pytest.mark.parametrize("row", TABLE, ids=[f"{row['id']} {row['title']}" for row in TABLE])
def test_each_row_of_the_table(row: dict[str, str | None]) -> None:
    """F4, F5, F11: phase and form of one spelling each."""
    found = of_engine(str(row["code"]))
    if row["phase"] is None:
        assert found == []
    else:
        assert [(entry.phase, entry.form) for entry in found] == [(row["phase"], row["form"])]


@pytest.mark.parametrize(
    ("source", "phase"),
    [
        ("from typing import TYPE_CHECKING as TC\nif TC:\n    import vllm", Phase.TYPING),
        ("import typing as t\nif t.TYPE_CHECKING:\n    import vllm", Phase.TYPING),
        ("from typing_extensions import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm", Phase.TYPING),
        ("from typing import *\nif TYPE_CHECKING:\n    import vllm", Phase.TYPING),
        ("TYPE_CHECKING = False\nif TYPE_CHECKING:\n    import vllm", Phase.TYPING),
        ("TYPE_CHECKING = True\nif TYPE_CHECKING:\n    import vllm", Phase.CONDITIONAL),
        ("from cfg import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm", Phase.CONDITIONAL),
        ("import cfg\nif cfg.TYPE_CHECKING:\n    import vllm", Phase.CONDITIONAL),
        ("import typing\nif typing.TYPE_CHECKING and x:\n    import vllm", Phase.TYPING),
        ("import typing\nif x and typing.TYPE_CHECKING:\n    import vllm", Phase.TYPING),
        ("import typing\nif typing.TYPE_CHECKING or x:\n    import vllm", Phase.CONDITIONAL),
        ("import typing\nif not typing.TYPE_CHECKING:\n    import vllm", Phase.EAGER),
        ("import typing\nif not typing.TYPE_CHECKING:\n    pass\nelse:\n    import vllm", Phase.TYPING),
        ("import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    import vllm", Phase.EAGER),
        ("import typing\nif typing.TYPE_CHECKING:\n    pass\nelif x:\n    import vllm", Phase.CONDITIONAL),
        ("import typing\nif typing.TYPE_CHECKING:\n    def f():\n        import vllm", Phase.TYPING),
    ],
)
def test_type_checking_is_the_one_of_typing_under_any_name(source: str, phase: Phase) -> None:
    """F5: else, elif and not are read; an unrelated object of that name is an ordinary condition."""
    assert [found.phase for found in of_engine(source)] == [phase]


@pytest.mark.parametrize(
    ("source", "phase"),
    [
        ("try:\n    pass\nexcept ImportError:\n    import vllm", Phase.CONDITIONAL),
        ("try:\n    pass\nexcept* OSError:\n    import vllm", Phase.CONDITIONAL),
        ("while x:\n    import vllm", Phase.EAGER),
        ("async def f():\n    async with a:\n        import vllm", Phase.LAZY),
        ("if x:\n    def f():\n        import vllm", Phase.LAZY),
        ("def f():\n    if x:\n        import vllm", Phase.LAZY),
        ("x = __import__('vllm') if y else None", Phase.CONDITIONAL),
        ("x = y and __import__('vllm')", Phase.CONDITIONAL),
        ("x = __import__('vllm') and y", Phase.EAGER),
        ("import typing\nx = typing.TYPE_CHECKING and __import__('vllm')", Phase.TYPING),
        ("class A(__import__('vllm').B): pass", Phase.EAGER),
        ("def f(x: __import__('vllm').LLM): pass", Phase.EAGER),
        ("def f() -> __import__('vllm').LLM: pass", Phase.EAGER),
        ("f = lambda x=__import__('vllm'): x", Phase.EAGER),
        ("async def f(*, x=__import__('vllm')): pass", Phase.EAGER),
        ("exec('def f():\\n    import vllm')", Phase.LAZY),
        ("def f():\n    exec('import vllm')", Phase.LAZY),
        ("eval('__import__(\"vllm\")')", Phase.EAGER),
        ("match x:\n    case 1:\n        pass\n    case _:\n        import vllm", Phase.CONDITIONAL),
        ("[__import__('vllm') for _ in range(1)]", Phase.EAGER),
    ],
)
def test_positions_beyond_the_table(source: str, phase: Phase) -> None:
    assert [found.phase for found in of_engine(source)] == [phase]


@pytest.mark.parametrize(
    "source",
    [
        "import importlib as il\nil.import_module('vllm.x')",
        "from importlib import import_module as load\nload(name='vllm')",
        "import builtins\nbuiltins.__import__('vllm')",
        "import pkgutil\npkgutil.resolve_name('vllm:LLM')",
        "from runpy import run_module\nrun_module('vllm')",
        "import pytest as p\np.importorskip(modname='vllm')",
    ],
)
def test_import_functions_are_known_under_any_name(source: str) -> None:
    assert [found.form for found in of_engine(source)] == [Form.DYNAMIC]


@pytest.mark.parametrize(
    "source",
    [
        "import importlib.util\nimportlib.util.find_spec('vllm')",
        "import importlib.util\nimportlib.util.resolve_name('vllm', None)",
        "import json\njson.load('vllm')",
        "import sys\nsys.modules['vllm']",
        "import importlib\nimportlib.import_module(name)",
        "exec('this is no Python: import vllm')",
        "FORBIDDEN = ('vllm',)",
        "from __future__ import annotations\ndef f(x: __import__('vllm').LLM): pass",
        "from . import vllm\nfrom .vllm import LLM",
    ],
)
def test_probes_data_and_neighbours_are_no_imports_of_it(source: str) -> None:
    """A probe is no import, and the forbid list of a guard is legal data."""
    assert of_engine(source) == []


@pytest.mark.parametrize(
    ("source", "guarded"),
    [
        ("try:\n    import vllm\nexcept ImportError:\n    pass", True),
        ("try:\n    import vllm\nexcept (OSError, ModuleNotFoundError):\n    pass", True),
        ("try:\n    import vllm\nexcept:\n    pass", True),
        ("try:\n    import vllm\nexcept KeyError:\n    pass", False),
        ("try:\n    import vllm\nfinally:\n    pass", False),
        ("try:\n    pass\nexcept ImportError:\n    import vllm", False),
        ("from contextlib import suppress\nwith suppress(ImportError):\n    import vllm", True),
        ("with open(x):\n    import vllm", False),
    ],
)
def test_a_guarded_import_is_marked_and_keeps_its_phase(source: str, guarded: bool) -> None:
    """F11: `try: import` loads the package where it is installed, so the phase stays and the word is added."""
    (found,) = of_engine(source)
    assert found.guarded is guarded
    assert found.phase is (Phase.CONDITIONAL if "pass\nexcept ImportError:\n    import" in source else Phase.EAGER)


@pytest.mark.parametrize(
    ("statement", "module", "is_package", "expected"),
    [
        ("from . import x", "a.b.c", False, "a.b"),
        ("from . import x", "a.b", True, "a.b"),
        ("from .x import y", "a.b.c", False, "a.b.x"),
        ("from ..x import y", "a.b.c", False, "a.x"),
        ("from ....x import y", "a.b.c", False, "....x"),
        ("from .x import y", "", False, ".x"),
        ("import importlib\nimportlib.import_module('.x', __package__)", "a.b.c", False, "a.b.x"),
        ("import importlib\nimportlib.import_module('..x', package='p.q')", "a.b.c", False, "p.x"),
        ("import importlib\nimportlib.import_module('.x', __name__)", "a.b", True, "a.b.x"),
    ],
)
def test_relative_names_are_resolved(statement: str, module: str, is_package: bool, expected: str) -> None:
    assert find_imports(statement, module=module, is_package=is_package)[-1].module == expected


def test_lines_and_names_are_those_of_the_statement() -> None:
    source = "\nimport a, b.c as d\n\nfrom e import (\n    f,\n    g as h,\n)\nfrom i import *\n"
    found = [(entry.lineno, entry.module, entry.names) for entry in find_imports(source)]
    assert found == [(2, "a", ()), (2, "b.c", ()), (4, "e", ("f", "g")), (8, "i", ("*",))]


def test_a_source_that_does_not_parse_is_an_error_and_not_silence() -> None:
    """On interpreters before 3.15 this is also what PEP 810's keyword gives."""
    with pytest.raises(SyntaxError):
        find_imports("import = 1")
    if sys.version_info < (3, 15):
        with pytest.raises(SyntaxError):
            find_imports("lazy import vllm")
    else:
        assert [found.phase for found in of_engine("lazy import vllm")] == [Phase.LAZY]


WRAPPERS = {
    "class A:\n": Phase.EAGER,
    "with open(x):\n": Phase.EAGER,
    "for _ in x:\n": Phase.EAGER,
    "if x:\n": Phase.CONDITIONAL,
    "def f():\n": Phase.LAZY,
    "async def f():\n": Phase.LAZY,
    "import typing\nif typing.TYPE_CHECKING:\n": Phase.TYPING,
}


@given(st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=6))
def test_nesting_takes_the_latest_phase(wrappers: list[str]) -> None:
    """Whatever the order of nesting: typing beats lazy beats conditional beats eager."""
    source = "import vllm"
    for wrapper in wrappers:
        source = wrapper + "\n".join("    " + line for line in source.splitlines())
    expected = max((WRAPPERS[wrapper] for wrapper in wrappers), key=list(Phase).index, default=Phase.EAGER)
    assert [found.phase for found in of_engine(source)] == [expected]


def test_every_import_statement_of_real_files_is_found_once() -> None:
    """Oracle: a plain walk over the same trees, for some of the standard library's larger modules."""
    for module in (ast, json, subprocess, st):
        source = Path(module.__file__).read_text()
        plain = [
            (node.lineno, alias.name if isinstance(node, ast.Import) else None)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in (node.names if isinstance(node, ast.Import) else node.names[:1])
        ]
        found = [
            (entry.lineno, None if entry.names else entry.module)
            for entry in find_imports(source)
            if entry.form is Form.STATEMENT
        ]
        assert sorted(found, key=str) == sorted(plain, key=str)


def test_the_package_loads_neither_core_torch_nor_ray() -> None:
    code = "import sys, nemo_rl_contracts.phases; print(sorted({'nemo_rl_core', 'torch', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
