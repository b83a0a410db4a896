# SPDX-License-Identifier: Apache-2.0
"""Mutations as patch files: read them, apply them to a copy of the tree, and run the check that must turn red there."""

import os
import shlex
import shutil
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import nemo_rl_core

#: The repository's root.
ROOT = Path(nemo_rl_core.__file__).parents[3]

FOLDER = Path(__file__).parent

#: What a check may read. Not the patches themselves, nor anything that tools leave behind.
_COPIED = (
    ".gitignore",
    ".importlinter",
    ".pre-commit-hooks.yaml",
    "README.md",
    "pyproject.toml",
    "uv.lock",
    "contracts",
    "docs",
    "examples",
    "nemo_rl_core",
    "nemo_rl_vllm",
    "tests",
)
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.patch", ".*_cache", ".hypothesis", "dist", "build")

_SOURCES = ("nemo_rl_core/src", "nemo_rl_vllm/src", "contracts/src")

#: Prints where the three packages are imported from.
_WHERE = (
    "import nemo_rl_contracts, nemo_rl_core, nemo_rl_vllm\n"
    "for package in (nemo_rl_contracts, nemo_rl_core, nemo_rl_vllm): print(package.__file__)"
)
_LINT = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"

#: Seconds that a check may take; a mutation that takes a deadline away would otherwise hang the run.
LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """What has to notice a mutation.

    Attributes:
        tool: ``pytest`` or ``lint-imports``.
        targets: Node ids, or names of contracts.
    """

    tool: str
    targets: tuple[str, ...]

    def arguments(self, *, all_failures: bool) -> list[str]:
        """Return what the interpreter gets; without ``all_failures`` a run of pytest ends at the first one."""
        if self.tool == "lint-imports":
            only = [argument for contract in self.targets for argument in ("--contract", contract)]
            return ["-c", _LINT, "--no-cache", *only]
        # The mark of the project's own settings would leave slow tests out, which may be the ones that are named.
        options = ["-q", "-rfE", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-m", "full or not full"]
        options += [] if all_failures else ["-x"]
        # A random example that finds a mutation today and misses it tomorrow would be worth nothing.
        return ["-m", "pytest", *options, "--hypothesis-seed=0", *self.targets]


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One patch file.

    Attributes:
        path: The file.
        guards: What the mutated lines guard, in words.
        red: What turns red without them.
    """

    path: Path
    guards: str
    red: Check


def all_patches() -> list[Path]:
    """Return every patch file, sorted by name."""
    return sorted(FOLDER.glob("*.patch"))


def read(path: Path) -> Mutation:
    """Read a patch file's header.

    Raises:
        ValueError: If one of its two lines is missing or names no known tool.
    """
    header = {}
    for line in path.read_text().splitlines():
        if not line.startswith("# "):
            break
        key, separator, value = line[2:].partition(": ")
        if separator and value.strip():
            header[key] = value.strip()
    if set(header) != {"guards", "red"}:
        raise ValueError(f"{path.name} must begin with '# guards: ...' and '# red: ...', got {sorted(header)}")
    tool, *targets = shlex.split(header["red"])
    if tool not in ("pytest", "lint-imports") or not targets:
        raise ValueError(f"{path.name}: '# red:' names pytest or lint-imports and what it runs, got {header['red']!r}")
    return Mutation(path=path, guards=header["guards"], red=Check(tool=tool, targets=tuple(targets)))


def copy_tree(folder: Path) -> Path:
    """Copy what the checks read; nothing links back."""
    # Entries that name a path, like a model that an example has built: too large to copy hundreds of times.
    lines = (ROOT / ".gitignore").read_text().splitlines()
    built = {ROOT / line.strip("/") for line in lines if "/" in line.strip("/")}

    def left_out(parent: str, names: list[str]) -> set[str]:
        return _LEFT_OUT(parent, names) | {name for name in names if Path(parent, name) in built}

    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=left_out)
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def apply(patch: Path, tree: Path, *, dry_run: bool = False) -> subprocess.CompletedProcess[str]:
    """Apply a patch to a copy of the tree."""
    # Without the ceiling, git would take a repository above for the target and skip every file without a word.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    # One line of context on each side is enough: a change nearby should not make a patch stale.
    command = ["git", "apply", "-C1", *(["--check"] if dry_run else []), str(patch)]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=60, check=False)


def interpreter(tree: Path) -> Path:
    """Return the interpreter of an environment that has this one's packages and the tree's code, and make it once.

    A variable like PYTHONPATH would not do: tests clear it, and so does core where it starts workers. An editable
    install is a path file in this environment, and path files of a folder that is itself named by one are not read.
    """
    folder = tree / ".venv"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, symlinks=True, with_pip=False)
        site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))
        packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        lines = [*(str(tree / source) for source in _SOURCES), *sorted(packages)]
        (site / "copy.pth").write_text("\n".join(lines) + "\n")
        shutil.copy(tree / "nemo_rl_core" / "nemo_rl_core_guard.pth", site)  # as the install does
    return python


def run(
    check: Check, tree: Path, *, limit_s: float = LIMIT_S, all_failures: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a check in a copy of the tree, with the copy's code."""
    return _run(check.arguments(all_failures=all_failures), tree, limit_s)


def imported_from(tree: Path) -> list[Path]:
    """Return the files from which a check in this tree imports the three packages."""
    done = _run(["-c", _WHERE], tree, 60.0)
    return [Path(line) for line in done.stdout.splitlines()]


def _run(arguments: list[str], tree: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    theirs = ("NEMO_RL_", "PYTEST_", "PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    return subprocess.run(
        [str(interpreter(tree)), *arguments],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )


def noticed(check: Check, done: subprocess.CompletedProcess[str]) -> bool:
    """Tell whether the check failed as a check: an assertion or a broken contract, no error on the way to it."""
    if check.tool == "lint-imports":
        return done.returncode == 1 and " BROKEN" in done.stdout
    return done.returncode == 1 and any(line.startswith("FAILED ") for line in done.stdout.splitlines())
