# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["deptry==0.25.1", "import-linter==2.17", "nemo-rl-contracts", "pytest-archon==0.0.7", "ruff", "tach==0.35.3"]
#
# [tool.uv.sources]
# nemo-rl-contracts = { path = "../contracts" }
# ///
"""Ask import-linter, pytest-archon, ruff, tach, deptry and nemo-rl-contracts about the same module sources.

    uv run --script benchmarks/neighbours.py

The sources are the rows of `tests/contracts/import_phases.json`: one module each, one way to touch `vllm`. Prints a
Markdown table: `x` where a tool reports the module, `-` where it does not; ours says when the import runs. The tools are
installed by uv into an environment of their own, at the versions above.
"""

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_rl_contracts import find_imports

ROWS = json.loads((Path(__file__).parents[1] / "tests" / "contracts" / "import_phases.json").read_text())
BIN = Path(sys.executable).parent
NAME = "vllm"


def write(folder: Path) -> None:
    """Write one module for each row, and what the tools want to find beside them."""
    package = folder / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    for row in ROWS:
        (package / f"{row['id'].lower()}.py").write_text(row["code"])
    (folder / "pyproject.toml").write_text('[project]\nname = "pkg"\nversion = "1"\ndependencies = []\n')
    (folder / "tach.toml").write_text(
        'source_roots = ["."]\nexact = false\n[[modules]]\npath = "pkg"\ndepends_on = []\n'
    )
    contracts = [
        f"[importlinter:contract:{row['id']}]\nname = {row['id']}\ntype = forbidden\n"
        f"source_modules = pkg.{row['id'].lower()}\nforbidden_modules = {NAME}\n"
        for row in ROWS
    ]
    head = (
        "[importlinter]\nroot_package = pkg\ninclude_external_packages = True\nexclude_type_checking_imports = True\n"
    )
    (folder / ".importlinter").write_text("\n".join([head, *contracts]))


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def modules_in(lines: list[str]) -> set[str]:
    """Return the rows whose file is named in lines that name the package too."""
    lines = [line for line in lines if re.search(rf"\b{NAME}\b", line)]
    return {row["id"] for row in ROWS for line in lines if f"{row['id'].lower()}.py" in line}


def import_linter(folder: Path) -> set[str]:
    lines = run(folder, "lint-imports", "--no-cache").stdout.splitlines()
    return {row["id"] for row in ROWS if f"{row['id']} BROKEN" in lines}


def ruff(folder: Path) -> set[str]:
    setting = f'lint.flake8-tidy-imports.banned-module-level-imports=["{NAME}"]'
    done = run(
        folder, "ruff", "check", "--isolated", "--select", "TID253", "--config", setting, "--output-format", "json", "."
    )
    files = {Path(found["filename"]).stem for found in json.loads(done.stdout)}
    return {row["id"] for row in ROWS if row["id"].lower() in files}


def tach(folder: Path) -> set[str]:
    done = run(folder, "tach", "check-external")
    return modules_in((done.stdout + done.stderr).splitlines())


def deptry(folder: Path) -> set[str]:
    run(folder, "deptry", ".", "--json-output", "deptry.json")
    found = json.loads((folder / "deptry.json").read_text())
    files = {Path(one["location"]["file"]).stem for one in found if one["module"] == NAME}
    return {row["id"] for row in ROWS if row["id"].lower() in files}


def archon(folder: Path, *, only_toplevel: bool) -> set[str]:
    from pytest_archon import archrule, failure

    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    reported = set()
    for row in ROWS:
        rule = archrule(row["id"]).match(f"pkg.{row['id'].lower()}").should_not_import(NAME, f"{NAME}.*")
        rule.check("pkg", only_toplevel_imports=only_toplevel, skip_type_checking=True)
        # It keeps failures for its pytest plugin, which would raise them.
        if any(failed.path for failed in failure.pop_failures()):
            reported.add(row["id"])
    return reported


TOOLS: Mapping[str, tuple[str, Callable[[Path], set[str]]]] = {
    "import-linter `forbidden`": ("import-linter", import_linter),
    "pytest-archon": ("pytest-archon", lambda folder: archon(folder, only_toplevel=False)),
    "pytest-archon, top level only": ("pytest-archon", lambda folder: archon(folder, only_toplevel=True)),
    "ruff TID253": ("ruff", ruff),
    "tach": ("tach", tach),
    "deptry": ("deptry", deptry),
}


def ours(row: Mapping[str, str]) -> str:
    found = [one for one in find_imports(row["code"]) if one.module.partition(".")[0] == NAME]
    return ", ".join(f"{one.phase}, {one.form}" + (", guarded" if one.guarded else "") for one in found) or "-"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        said = {tool: ask(folder) for tool, (_, ask) in TOOLS.items()}
    versions = {distribution: importlib.metadata.version(distribution) for distribution, _ in TOOLS.values()}
    print(", ".join(f"{distribution} {version}" for distribution, version in sorted(versions.items())))
    print()
    print("| | row | " + " | ".join(TOOLS) + " | nemo-rl-contracts |")
    print("|---" * (len(TOOLS) + 3) + "|")
    for row in ROWS:
        marks = " | ".join("x" if row["id"] in said[tool] else "-" for tool in TOOLS)
        print(f"| {row['id']} | {row['title']} | {marks} | {ours(row)} |")


if __name__ == "__main__":
    main()
