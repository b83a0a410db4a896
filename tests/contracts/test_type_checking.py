# SPDX-License-Identifier: Apache-2.0
"""A block under TYPE_CHECKING never runs, unless the name is another one than that of typing."""

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_contracts import find_imports
from nemo_rl_contracts.type_checking import is_usual
from tests.contracts.repository import Repository

FLAG = "from typing import TYPE_CHECKING\n"
BLOCK = "if TYPE_CHECKING:\n    import vllm\n"

#: Source in which the import below `TYPE_CHECKING` runs, or may run.
RUNS = {
    "set to another value": "TYPE_CHECKING = False\nTYPE_CHECKING = True\n" + BLOCK,
    "set again in a try": "TYPE_CHECKING = False\ntry:\n    TYPE_CHECKING = True\nexcept OSError:\n    pass\n" + BLOCK,
    "a loop variable": FLAG + "for TYPE_CHECKING in [1]:\n    pass\n" + BLOCK,
    "a walrus": FLAG + "print(TYPE_CHECKING := 1)\n" + BLOCK,
    "with": FLAG + "import contextlib\nwith contextlib.nullcontext(1) as TYPE_CHECKING:\n    pass\n" + BLOCK,
    "a tuple": FLAG + "TYPE_CHECKING, x = 1, 2\n" + BLOCK,
    "in place": FLAG + "TYPE_CHECKING |= True\n" + BLOCK,
    "a function": FLAG + "def TYPE_CHECKING():\n    pass\n" + BLOCK,
    "a class": FLAG + "class TYPE_CHECKING:\n    pass\n" + BLOCK,
    "a match": FLAG + "match 1:\n    case TYPE_CHECKING:\n        pass\n" + BLOCK,
    "a star after it": FLAG + "from flags import *\n" + BLOCK,
    "a star alone": "from flags import *\n" + BLOCK,
    "a parameter": FLAG + "def f(TYPE_CHECKING=1):\n    if TYPE_CHECKING:\n        import vllm\nf()\n",
    "the module's attribute": "import typing\ntyping.TYPE_CHECKING = True\nif typing.TYPE_CHECKING:\n    import vllm\n",
    "by its name": "import typing\nsetattr(typing, 'TYPE_CHECKING', True)\nif typing.TYPE_CHECKING:\n    import vllm\n",
    "a class of the module's name": "import typing\nclass typing:\n    TYPE_CHECKING = 1\nif typing.TYPE_CHECKING:\n    import vllm\n",
    "another module": "import flags as typing\nif typing.TYPE_CHECKING:\n    import vllm\n",
    "two on a line": "from typing import List; from flags import TYPE_CHECKING\n" + BLOCK,
}
#: Source in which it does not run.
NEVER = {
    "plain": FLAG + BLOCK,
    "with others": "from typing import Any, TYPE_CHECKING, List\n" + BLOCK,
    "in parentheses": "from typing import (\n    Any,\n    TYPE_CHECKING,\n)\n" + BLOCK,
    "the idiom": "TYPE_CHECKING = False\n" + BLOCK,
    "the module": "import typing\nif typing.TYPE_CHECKING:\n    import vllm\n",
    "the module under another name": "import typing as t\nif t.TYPE_CHECKING:\n    import vllm\n",
    "under another name": "from typing import TYPE_CHECKING as TC\nif TC:\n    import vllm\n",
    "a star before it": "from flags import *\n" + FLAG + BLOCK,
    "a star of typing": "from typing import *\nfrom typing import TYPE_CHECKING\n" + BLOCK,
    "in a function": "def f():\n    from typing import TYPE_CHECKING\n    if TYPE_CHECKING:\n        import vllm\nf()\n",
}


def loads(source: str, folder: Path) -> bool:
    """Run the source and say whether `vllm` is loaded."""
    (folder / "flags.py").write_text("TYPE_CHECKING = True\n")
    (folder / "vllm.py").write_text("")
    (folder / "a.py").write_text(source)
    code = "import sys, a; sys.exit(3 if 'vllm' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, timeout=60, capture_output=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    return done.returncode == 3


def phases(source: str) -> set[str]:
    return {found.phase.value for found in find_imports(source) if found.module == "vllm"}


@pytest.mark.parametrize("case", RUNS)
def test_another_flag_is_an_ordinary_condition(case: str, tmp_path: Path) -> None:
    """F5: each of these loads the package; the answer may be no other than that it may run."""
    assert loads(RUNS[case], tmp_path)
    assert phases(RUNS[case]) <= {"conditional", "lazy"}
    assert phases(RUNS[case])
    assert not is_usual(RUNS[case].encode())


@pytest.mark.parametrize("case", NEVER)
def test_typings_flag_takes_a_block_away_however_it_came_in(case: str, tmp_path: Path) -> None:
    """F5."""
    assert not loads(NEVER[case], tmp_path)
    assert phases(NEVER[case]) == {"typing"}


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("typing", [True, False], ids=["whole graph", "graph without typing"])
def test_a_contract_sees_it_also_where_grimp_leaves_the_block_out(
    case: str, typing: bool, repository: Repository
) -> None:
    repository.package({"a.py": RUNS[case]})
    options = {"source_modules": ["pkg"], "forbidden_modules": ["vllm"], "accept_unknown": ["vllm"]}
    every = ["eager", "conditional", "lazy"]
    assert len(repository.messages("import_phase", typing=typing, phases=every, **options)) == 1


@pytest.mark.parametrize("how", ["from . import typing", "from pkg import typing", "from pkg import (\n    typing,\n)"])
def test_a_module_of_ones_own_called_typing_is_not_the_one(how: str, repository: Repository) -> None:
    repository.package(
        {"typing.py": "TYPE_CHECKING = True\n", "a.py": f"{how}\nif typing.TYPE_CHECKING:\n    import vllm\n"}
    )
    options = {"source_modules": ["pkg"], "forbidden_modules": ["vllm"], "accept_unknown": ["vllm"]}
    messages = repository.messages("import_phase", typing=False, **options)
    assert messages == ["vllm is imported by pkg.a (conditional)"]
