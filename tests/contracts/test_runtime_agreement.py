# SPDX-License-Identifier: Apache-2.0
"""What is eager by the files is loaded by the interpreter, and nothing else: whole packages, made up and imported."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import grimp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_contracts.chains import ImportMap, find_chains, find_reach
from nemo_rl_contracts.phases import Phase
from nemo_rl_contracts.sources import Reader, find_sources

PACKAGES = ["made", "made.p", "made.p.q", "made.r"]
MODULES = [*PACKAGES, "made.a", "made.b", "made.p.c", "made.p.d", "made.p.q.e", "made.r.f", "made.r.g"]
STATEMENTS = [
    "import {full}",
    "import {full} as z",
    "from {above} import {last}",
    "from {full} import *",
    "from {full} import name_of_nothing",
    "__import__({full!r})",
    "exec('import {full}')",
    "import importlib.util; importlib.util.find_spec('{full}.nothing')",
    "from {dots}{rest} import name_of_nothing",
]
#: Each leaves its statement where it may fail: in a circle Python refuses some.
BLOCKS = [
    "try:\n    {}\nexcept Exception:\n    pass",
    "try:\n    {}\nexcept Exception:\n    pass",
    "for _ in (1,):\n    try:\n        {}\n    except Exception:\n        pass",
    "import typing as t\nif not t.TYPE_CHECKING:\n    try:\n        {}\n    except Exception:\n        pass",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\nelse:\n    pass",
    "class Body:\n    try:\n        {}\n    except Exception:\n        pass",
    "def function():\n    {}",
]
TELL = """
import json, os, sys
for module in json.loads(sys.argv[1]):
    if os.fork() == 0:
        __import__(module)
        os.write(1, f"{module} {'engine' in sys.modules}\\n".encode())
        os._exit(0)
    os.wait()
"""


@st.composite
def sources(draw: st.DrawFn, module: str) -> str:
    """The text of one module."""
    lines = []
    if module in PACKAGES and draw(st.booleans()):
        below = [name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == module]
        lines.append(f"__all__ = {draw(st.lists(st.sampled_from(below), unique=True))!r}")
    for _ in range(draw(st.integers(0, 3))):
        full = draw(st.sampled_from([*MODULES[1:], "engine", "engine"]))
        statement = draw(st.sampled_from(STATEMENTS))
        if full == "engine" and "above" in statement + "dots" * ("dots" in statement):
            statement = STATEMENTS[0]
        package = module if module in PACKAGES else module.rpartition(".")[0]
        text = statement.format(
            full=full,
            above=full.rpartition(".")[0],
            last=full.rpartition(".")[2],
            dots="." * len(package.split(".")),
            rest=full.removeprefix("made."),
        )
        # Python takes a star only where no function or class is around it.
        lines.append(draw(st.sampled_from(BLOCKS[:5] if "*" in text else BLOCKS)).format(text))
    return "\n".join([*lines, ""])


@settings(max_examples=30)
@given(st.fixed_dictionaries({module: sources(module) for module in MODULES}), st.booleans())
def test_the_files_and_the_interpreter_say_the_same_of_every_module(texts: dict[str, str], typing: bool) -> None:
    """F1, F5: initialisers, circles, stars, relative and dynamic imports, with the graph of either kind."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        for module, text in texts.items():
            file = (
                Path(name, *module.split("."), "__init__.py")
                if module in PACKAGES
                else Path(name, *module.split(".")).with_suffix(".py")
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        Path(name, "engine.py").touch()
        patch.syspath_prepend(name)
        graph = grimp.build_graph(
            "made", include_external_packages=True, exclude_type_checking_imports=typing, cache_dir=None
        )
        imports = ImportMap(graph, Reader(find_sources("made")[0]))
        chains = {
            module: find_chains(imports, sources=[module], forbidden=["engine"], phases=[Phase.EAGER])
            for module in MODULES
        }
        reach = find_reach(imports, "engine")
        done = subprocess.run(
            [sys.executable, "-S", "-B", "-c", TELL, json.dumps(MODULES)],
            env={"PYTHONPATH": name},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    loaded = {module: answer == "True" for module, answer in map(str.split, done.stdout.splitlines())}
    assert {module: bool(found) for module, found in chains.items()} == loaded
    assert {module: reach.get(module) is Phase.EAGER for module in MODULES} == loaded
