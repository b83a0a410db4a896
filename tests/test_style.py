# SPDX-License-Identifier: Apache-2.0
"""The repository's own rules, on every file that is there: each check is shown to trip on a seeded offence too."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPDX = "# SPDX-License-Identifier: Apache-2.0"
LONGEST_FUNCTION = 80
LONGEST_MODULE = 449

#: Files whose format has a line comment that begins with #.
WITH_SPDX = {".py", ".pyi", ".yaml", ".yml", ".toml", ".sh"}
#: Sources of the three distributions.
SOURCES = ("nemo_rl_core/src", "nemo_rl_vllm/src", "contracts/src")
#: Written by a tool: the lock names its registry in every line.
GENERATED = {"uv.lock"}

# Spelled with a group behind the first slash, so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.~>-])/(?:root|work|Users|home/[a-z])[/\w]")
REGISTRY = re.compile(r"https?://[^\s\"')>]*(?:pypi|pythonhosted|artifactory|jfrog|nexus|/simple\b)", re.IGNORECASE)


def ignored_folders() -> list[str]:
    """Folders that .gitignore names, and git's own."""
    lines = (ROOT / ".gitignore").read_text().splitlines()
    return [".git", *(line.rstrip("/") for line in lines if line.endswith("/"))]


def files() -> Iterator[Path]:
    """Every file that belongs to the repository, relative to its root."""
    ignored = ignored_folders()
    for folder, names, here in os.walk(ROOT):
        relative = Path(folder).relative_to(ROOT)
        names[:] = sorted(
            name
            for name in names
            if name not in ignored
            and (relative / name).as_posix() not in ignored
            and not any("*" in pattern and Path(name).match(pattern) for pattern in ignored)
        )
        yield from (relative / name for name in sorted(here))


def text_of(path: Path) -> str | None:
    """The text of a file, None where it is not text."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def lacks_licence_line(text: str) -> bool:
    # A script's first line is its interpreter, and the licence comes next.
    lines = text.splitlines()
    return SPDX not in (lines[1:2] if lines and lines[0].startswith("#!") else lines[:1])


def long_functions(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > LONGEST_FUNCTION:
                found.append(f"{node.name} ({length} lines)")
    return found


def has_all(tree: ast.Module) -> bool:
    targets: list[ast.expr] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def defines_something(tree: ast.Module) -> bool:
    """A package initialiser that holds only its docstring has no name to list."""
    return any(not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in tree.body)


def modules() -> list[Path]:
    return [path for path in files() if path.suffix == ".py" and path.as_posix().startswith(SOURCES)]


def test_the_walk_finds_what_it_is_meant_to_find():
    found = {path.as_posix() for path in files()}
    assert {"README.md", "uv.lock", ".ci/run", "tests/test_style.py", "nemo_rl_core/pyproject.toml"} <= found
    assert not any(path.startswith((".venv/", ".git/", "results/")) for path in found)
    assert len(modules()) > 80


def test_every_source_file_begins_with_the_licence_line():
    sources = [path for path in files() if path.suffix in WITH_SPDX or path.as_posix() in (".ci/run", ".ci/check")]
    assert [path.as_posix() for path in sources if lacks_licence_line(text_of(path) or "")] == []


def test_every_module_says_what_is_public():
    trees = {path.as_posix(): ast.parse(text_of(path) or "") for path in modules()}
    assert [path for path, tree in trees.items() if defines_something(tree) and not has_all(tree)] == []


def test_no_function_and_no_module_is_too_long():
    long = []
    for path in modules():
        text = text_of(path) or ""
        long += [f"{path.as_posix()}: {name}" for name in long_functions(ast.parse(text))]
        if (length := len(text.splitlines())) > LONGEST_MODULE:
            long.append(f"{path.as_posix()}: {length} lines")
    assert long == []


def test_no_file_holds_a_path_of_somebodys_machine_or_a_registry_address():
    found = []
    for path in files():
        text = text_of(path) if path.as_posix() not in GENERATED else None
        for number, line in enumerate((text or "").splitlines(), 1):
            found += [f"{path.as_posix()}:{number}: {m.group()}" for m in MACHINE_PATH.finditer(line)]
            found += [f"{path.as_posix()}:{number}: {m.group()}" for m in REGISTRY.finditer(line)]
    assert found == []


def test_every_test_file_lies_in_a_package():
    homes = {path.parent for path in files() if path.suffix == ".py" and path.parts[0] == "tests"}
    lacking = [home.as_posix() for home in homes if not (ROOT / home / "__init__.py").is_file()]
    assert lacking == []


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("config = '/ro" + "ot/model'", MACHINE_PATH),
        ("cd /ho" + "me/alice/repo", MACHINE_PATH),
        ("index-url = https://py" + "pi.org/simple", REGISTRY),
        ("https://mirror.example/api/sim" + "ple/", REGISTRY),
    ],
)
def test_the_patterns_trip(line: str, pattern: re.Pattern[str]):
    assert pattern.search(line)


@pytest.mark.parametrize("line", ["tests/Users/file", "https://example.org/home", "~/Users/x", "nemo_rl_core/workers/"])
def test_the_patterns_leave_other_paths_alone(line: str):
    assert not MACHINE_PATH.search(line)
    assert not REGISTRY.search(line)


def test_the_checks_trip():
    assert lacks_licence_line("import os\n")
    assert lacks_licence_line("#!/bin/sh\necho\n")
    assert not lacks_licence_line(f"#!/bin/sh\n{SPDX}\n")
    body = "\n".join("    x = 1" for _ in range(LONGEST_FUNCTION))
    assert long_functions(ast.parse(f"def f():\n{body}\n")) == [f"f ({LONGEST_FUNCTION + 1} lines)"]
    assert not has_all(ast.parse("x = 1"))
    assert has_all(ast.parse("__all__: list[str] = []"))
    assert not defines_something(ast.parse('"""Only words."""'))
