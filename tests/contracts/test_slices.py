# SPDX-License-Identifier: Apache-2.0
"""The few lines around an import say the same as the whole file, or nothing."""

import importlib.util
from pathlib import Path
from textwrap import dedent

import pytest

from nemo_rl_contracts import find_imports
from nemo_rl_contracts.slices import imports_at, lines_of
from nemo_rl_contracts.type_checking import is_usual

PACKAGES = ("hypothesis", "jinja2", "nemo_rl_contracts", "nemo_rl_core", "numpy", "pydantic", "rich")


def files_of(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return sorted(path for folder in spec.submodule_search_locations or () for path in Path(folder).rglob("*.py"))


def statements(source: bytes, line: int) -> list:
    return [one for one in find_imports(source, module="p.m") if one.lineno == line and one.form == "statement"]


@pytest.mark.parametrize("package", PACKAGES)
def test_on_real_files_both_agree_line_by_line(package: str) -> None:
    asked = told = 0
    for path in files_of(package):
        source = path.read_bytes()
        lines = lines_of(source)
        if lines is None or not is_usual(source):
            continue
        whole = [one for one in find_imports(source, module="p.m") if one.form == "statement"]
        for line in {one.lineno for one in whole}:
            part = imports_at(lines, line, module="p.m")
            asked += 1
            if part is not None:
                told += 1
                assert part == [one for one in whole if one.lineno == line], f"{path}:{line}"
    assert told > 0.9 * asked > 0


#: The line of `import vllm` in each of these looks as if it stood somewhere else.
TRICKS = [
    'if cond:\n    s = """\ndef f():\n    """\n    import vllm\n',
    'if cond:\n    s = """\ndef f():\n    """  # """\n    import vllm\n',
    "if cond:\n    s = '''\ndef f():\n    pass'''\n    import vllm\n",
    "def f():\n    x = [\nfoo,\n]\n    import vllm\n",
    "x = 1 \\\n+ 2\nimport vllm\n",
    "if cond: \\\n    import vllm\n",
    "try:\n    pass\nexcept ImportError:\n    pass\nelse:\n    import vllm\n",
    "try:\n    import vllm\nexcept ImportError:\n    pass\n",
    "@deco(\n1\n)\ndef f():\n    import vllm\n",
    "class A:\n    if x:\n        def f(self):\n            import vllm\n",
    "from contextlib import suppress as s\nwith s(ImportError):\n    import vllm\n",
    "import os; import vllm\n",
    "match x:\n    case 1:\n        import vllm\n",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import vllm\n",
    "from typing import TYPE_CHECKING\ndef f():\n    if not TYPE_CHECKING:\n        import vllm\n",
    "import typing\nif typing.TYPE_CHECKING:\n    import vllm\n",
    "async def f():\n    import vllm\n",
    "if a:\n    pass\nelif b:\n    import vllm\nelse:\n    pass\n",
    "for x in y:\n# comment\n    import vllm\n",
    "while x:\n\n    import vllm\n",
    "lambda: 0; import vllm\n",
    "def f(): import vllm\n",
    "\ufeffimport vllm\n",
]


@pytest.mark.parametrize("source", TRICKS)
def test_no_layout_is_taken_for_another(source: str) -> None:
    """None is an answer too: then the whole file is parsed."""
    raw = source.encode()
    line = next(number for number, text in enumerate(source.split("\n"), 1) if "import vllm" in text)
    lines = lines_of(raw)
    assert lines is not None
    part = imports_at(lines, line, module="p.m")
    assert part is None or part == statements(raw, line)


def test_line_ends_that_may_be_counted_in_another_way_are_left_to_the_parser() -> None:
    assert lines_of(b"import a\r\nimport vllm\r\n") is None
    assert lines_of(b"import a\x0c\nimport vllm\n") is None


def test_a_line_that_holds_no_import_has_no_answer() -> None:
    lines = (
        dedent("""\
        x = 1
        import vllm
        """)
        .encode()
        .split(b"\n")
    )
    assert imports_at(lines, 1) is None
    assert imports_at(lines, 99) is None
