# SPDX-License-Identifier: Apache-2.0
"""When does an import run? The table of expected answers, and the kinds that it does not list."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nemo_rl_contracts
from nemo_rl_contracts import Form, FoundImport, Phase, find_imports
from nemo_rl_contracts.phases import may_import_dynamically

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


#: A block with a hole for what stands in it, to the phase of what stands there.
BLOCKS = {
    "class A:\n{}": Phase.EAGER,
    "with open(x) as y:\n{}": Phase.EAGER,
    "for _ in x:\n{}": Phase.EAGER,
    "for _ in x:\n    pass\nelse:\n{}": Phase.EAGER,
    "while x:\n{}": Phase.EAGER,
    "try:\n{}\nexcept ImportError:\n    pass": Phase.EAGER,
    "try:\n{}\nexcept OSError:\n    pass": Phase.EAGER,
    "try:\n    pass\nexcept OSError:\n    pass\nelse:\n{}": Phase.EAGER,
    "try:\n    pass\nfinally:\n{}": Phase.EAGER,
    "try:\n    pass\nexcept ImportError:\n{}": Phase.CONDITIONAL,
    "if x:\n{}": Phase.CONDITIONAL,
    "if x:\n    pass\nelif y:\n{}": Phase.CONDITIONAL,
    "if x:\n    pass\nelse:\n{}": Phase.CONDITIONAL,
    "match x:\n    case 1:\n        pass\n    case _:\n    {}": Phase.CONDITIONAL,
    "def f(x: int = 1) -> int:\n{}": Phase.LAZY,
    "async def f():\n{}": Phase.LAZY,
    "if TYPE_CHECKING:\n{}": Phase.TYPING,
    "if not TYPE_CHECKING:\n    pass\nelse:\n{}": Phase.TYPING,
    "if TYPE_CHECKING or x:\n{}": Phase.CONDITIONAL,
    "if x and TYPE_CHECKING:\n{}": Phase.TYPING,
    "if not TYPE_CHECKING:\n{}": Phase.EAGER,
    "if TYPE_CHECKING:\n    pass\nelse:\n{}": Phase.EAGER,
}
GUARD = "try:\n{}\nexcept ImportError:\n    pass"
SPELLINGS = {
    "import vllm": Form.STATEMENT,
    "from vllm.a import b": Form.STATEMENT,
    "__import__('vllm')": Form.DYNAMIC,
    "x = [f'{__import__(name=f\"vllm.{y}\")}']": Form.DYNAMIC,
    "exec('import vllm')": Form.DYNAMIC,
}


@given(st.lists(st.sampled_from(sorted(BLOCKS)), max_size=7), st.sampled_from(sorted(SPELLINGS)))
def test_the_latest_phase_of_all_blocks_around_an_import_counts(blocks: list[str], spelling: str) -> None:
    """F4, F5, F11: whatever the nesting; the oracle composes the phases of the blocks, the innermost first."""
    source = spelling
    for block in blocks:
        indent = "        " if block.startswith("match") else "    "
        source = block.replace("    {}" if block.startswith("match") else "{}", "{}").format(
            "\n".join(indent + line for line in source.splitlines())
        )
    phase = max((BLOCKS[block] for block in blocks), key=list(Phase).index, default=Phase.EAGER)
    # A `try` helps what it runs, not what a function defined in it runs later.
    inside = next((place for place, block in enumerate(blocks) if BLOCKS[block] is Phase.LAZY), len(blocks))
    (found,) = of_engine("from typing import TYPE_CHECKING\n" + source)
    assert (found.phase, found.form, found.guarded) == (phase, SPELLINGS[spelling], GUARD in blocks[:inside])
    assert "vllm" in ("\n" + source).splitlines()[found.lineno - 1]


CALLEES = {"exec": "'import vllm'", "eval": "'__import__(\"vllm\")'", "__import__": "'vllm'", "load": "'vllm'"}


@given(
    callee=st.sampled_from(sorted(CALLEES)),
    wide=st.sets(st.integers(0, 9)),
    parentheses=st.integers(0, 3),
    gaps=st.lists(st.sampled_from(["", " ", "\t", "\f", "\\\n", "# a word\n", "\n", "\r\n"]), min_size=2, max_size=4),
    coding=st.sampled_from(["", "# coding: utf-8\n", "# coding: latin-1\n", "#!x\n# vim: set fileencoding=utf-7 :\n"]),
)
def test_the_cheap_look_never_misses_a_call_that_imports(callee, wide, parentheses, gaps, coding) -> None:
    """Names in other letters of the same meaning, gaps, comments and codings that Python takes."""
    letters = [
        chr(ord(c) + 0xFEE0) if n in wide and c.isalpha() and "lat" not in coding else c for n, c in enumerate(callee)
    ]
    name = "(" * parentheses + "".join(letters) + ")" * parentheses
    text = f"from importlib import import_module as load\nx = ({gaps[0]}{name}{''.join(gaps[1:])}({CALLEES[callee]}))\n"
    encoding = "utf-7" if "utf-7" in coding else "latin-1" if "latin" in coding else "utf-8"
    source = coding.encode() + text.encode(encoding)
    if any(found.form is Form.DYNAMIC for found in find_imports(source)):
        assert may_import_dynamically(source)
    assert [found.module for found in find_imports(source)] == ["importlib", "vllm"]


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from importlib import *\nimport_module('vllm')", "vllm"),
        ("import importlib\nload = importlib.import_module\nload('vllm')", "vllm"),
        ("exec('from importlib import import_module as i\\ni(\"vllm\")')", "vllm"),
        ("eval(' __import__(\"vllm\")')", "vllm"),
        ("import importlib\nimportlib.import_module('vl' + 'lm')", "vllm"),
        ("import importlib\nimportlib.import_module(f'vllm.{x}.y')", "vllm"),
        ("import importlib\nimportlib.import_module('vllm.' + x)", "vllm"),
        ("import importlib\nimportlib.import_module('vllm.%s' % x)", "vllm"),
        ("import importlib\nimportlib.import_module('vllm.{}'.format(x))", "vllm"),
        ("import importlib\nNAME = 'vl' 'lm'\nimportlib.import_module(NAME)", "vllm"),
        ("import importlib\nNAME = 'vllm'\nimportlib.import_module(f'{NAME}.worker')", "vllm.worker"),
        ("import importlib.util\nimportlib.util.find_spec('vllm.worker')", "vllm"),
        ("import importlib.util\nimportlib.util.find_spec('.x', 'vllm.worker')", "vllm.worker"),
        ("from importlib import resources\nresources.files('vllm')", "vllm"),
        ("import importlib.resources as r\nr.read_text('vllm.data', 'a.txt')", "vllm.data"),
        ("import pkgutil\npkgutil.get_data('vllm', 'a.txt')", "vllm"),
        ("def f():\n    class A:\n        x: __import__('vllm')", "vllm"),
    ],
)
def test_names_that_are_written_out_in_pieces_are_read(source: str, module: str) -> None:
    (found,) = of_engine(source)
    assert (found.module, found.form) == (module, Form.DYNAMIC)


@pytest.mark.parametrize(
    "source",
    [
        "from typing import TYPE_CHECKING\nTYPE_CHECKING = True\nif TYPE_CHECKING:\n    import vllm",
        "try:\n    from typing import TYPE_CHECKING\nexcept ImportError:\n    from cfg import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import vllm",
        "from .cfg import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm",
        "from cfg import *\nif TYPE_CHECKING:\n    import vllm",
    ],
)
def test_a_name_that_may_be_another_than_that_of_typing_is_a_condition(source: str) -> None:
    """F5: the careful reading wins."""
    assert [found.phase for found in of_engine(source)] == [Phase.CONDITIONAL]


@pytest.mark.parametrize(
    "call",
    [
        "from pkg.util import load\nload('vllm')",
        "from .util import load as l\nl('vllm')",
        "from . import util\nutil.load('vllm')",
    ],
)
def test_functions_that_a_configuration_names_are_known_however_they_are_reached(call: str) -> None:
    found = find_imports(call, module="pkg.a", import_functions=["pkg.util.load"])
    assert [each.module for each in found if each.form is Form.DYNAMIC] == ["vllm"]
    own = find_imports("def load(name): ...\nload('vllm')", module="pkg.util", import_functions=["pkg.util.load"])
    assert [each.module for each in own] == ["vllm"]


def test_annotations_run_unless_the_future_says_otherwise() -> None:
    source = "def f(x: __import__('vllm').LLM): pass\ny: __import__('vllm').LLM"
    eager = [Phase.EAGER] * 2 if sys.version_info < (3, 14) else []
    assert [found.phase for found in of_engine(source)] == eager
    assert of_engine(f"from __future__ import annotations\n{source}") == []


@pytest.mark.parametrize(
    ("source", "lineno"),
    [
        (b"\xef\xbb\xbfimport vllm\n", 1),
        ("# coding: latin-1\nx = '\xe9'\nimport vllm\n".encode("latin-1"), 3),
        (b"# coding: utf-7\n+AF8AXw-import+AF8AXw-('vllm')\n", 2),
        (b"x = 1\r\nimport vllm\r\n", 2),
        (b"x = 1\rimport vllm\r", 2),
        ("\ufeffimport vllm", 1),
        ("éà = 1\nimport vllm", 2),
    ],
)
def test_marks_encodings_and_line_ends_are_read_as_python_does(source: str | bytes, lineno: int) -> None:
    assert [found.lineno for found in find_imports(source)] == [lineno]


@pytest.mark.parametrize(
    "source",
    [b"import vllm\x00", "import vllm\x00", b"x = '\xe9'\nimport vllm", b"# coding: nonsense\nimport vllm", "(" * 300],
)
def test_what_python_refuses_is_a_syntax_error_and_nothing_else(source: str | bytes) -> None:
    with pytest.raises(SyntaxError):
        find_imports(source)


def test_a_long_chain_of_elif_is_no_problem() -> None:
    source = "if a:\n    pass\n" + "".join(f"elif a{n}:\n    import vllm\n" for n in range(1000))
    assert len(of_engine(source)) == 1000


@pytest.mark.parametrize(
    "expression", [" + ".join(["'a'"] * 5000), "not " * 5000 + "x", "x" + ".y" * 5000, "x" + "()" * 5000]
)
def test_a_huge_expression_is_read_or_refused_as_the_interpreter_does(expression: str) -> None:
    """Python up to 3.12 can't run such a file either."""
    source = f"__import__({expression})\nif {expression}:\n    import vllm\n"
    try:
        ast.parse(source)
    except RecursionError:
        with pytest.raises(SyntaxError, match="nested too deeply"):
            find_imports(source)
    else:
        assert [found.phase for found in of_engine(source)] == [Phase.CONDITIONAL]


#: Source to the phase of its import, for interpreters that are newer than the oldest one that is supported.
NEWER = {
    "type X = __import__('vllm').LLM": ((3, 12), "lazy"),
    "def f[T: __import__('vllm').LLM](x: T): pass": ((3, 12), "lazy"),
    "class A[T: __import__('vllm').LLM]: pass": ((3, 12), "lazy"),
    'f\'{__import__("vllm")!r:{"x"}}\'': ((3, 11), "eager"),
    "f'{f'{__import__('vllm')}'}'": ((3, 12), "eager"),
    "__import__(" + "+".join(["'v'"] * 5000) + ")\nimport vllm": ((3, 13), "eager"),
    "lazy import vllm": ((3, 15), "lazy"),
}


def interpreter(version: str) -> Path | None:
    """An installed interpreter of a version, on the path or where pyenv keeps them."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    places = [shutil.which(f"python{version}"), *root.glob(f"versions/{version}.*/bin/python")]
    for place in filter(None, places):
        # A shim of pyenv is there for versions that are not chosen, and fails.
        done = subprocess.run([place, "-c", ""], capture_output=True, timeout=60, check=False)
        if done.returncode == 0:
            return Path(place)
    return None


def test_the_syntax_of_a_later_python_is_refused_before_it() -> None:
    """A `type` statement is a syntax error to 3.11, and so is PEP 810's keyword before 3.15."""
    for source, (since, phase) in NEWER.items():
        if sys.version_info < since:
            with pytest.raises(SyntaxError):
                find_imports(source)
        else:
            assert [found.phase for found in of_engine(source)] == [phase]


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14", "3.15"])
def test_a_later_python_reads_its_own_syntax(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} is installed here")
    wanted = {text: phase for text, (since, phase) in NEWER.items() if since <= tuple(map(int, version.split(".")))}
    code = (
        "import json, sys; from nemo_rl_contracts import find_imports\n"
        "found = [[e.phase for e in find_imports(text) if e.module == 'vllm'] for text in json.load(sys.stdin)]\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [python, "-c", code],
        input=json.dumps(list(wanted)),
        env={"PYTHONPATH": str(Path(nemo_rl_contracts.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == [[phase] for phase in wanted.values()]


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


@pytest.mark.parametrize(
    ("call", "module", "names"),
    [
        ("__import__('heavy', globals(), locals(), [], 1)", "pkg.heavy", ()),
        ("__import__('', globals(), level=1, fromlist=['heavy'])", "pkg", ("heavy",)),
        ("__import__('pkg', fromlist=('heavy', 'x'))", "pkg", ("heavy", "x")),
        ("importlib.import_module(f'{__package__}.heavy')", "pkg.heavy", ()),
        ("importlib.import_module(__name__ + '.heavy')", "pkg.a.heavy", ()),
        ("exec(compile('import vllm', 'x', 'exec'))", "vllm", ()),
        ("il.import_module('vllm')", "vllm", ()),
        ("importlib.resources.path('vllm', 'x')", "vllm", ()),
    ],
)
def test_other_ways_to_say_the_same(call: str, module: str, names: tuple[str, ...]) -> None:
    source = f"import importlib\nil = importlib\n{call}\n"
    (found,) = [one for one in find_imports(source, module="pkg.a") if one.form == "dynamic"]
    assert (found.module, found.names, found.phase) == (module, names, "eager")
