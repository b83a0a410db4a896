# SPDX-License-Identifier: Apache-2.0
"""Building wheels and virtual environments, and running programs there as a user would."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import pytest

import nemo_rl_core

#: The repository's root.
ROOT = Path(nemo_rl_core.__file__).parents[3]

#: Folder of each distribution, and the package that it brings.
PROJECTS: Mapping[str, str] = {
    "nemo_rl_core": "nemo_rl_core",
    "nemo_rl_vllm": "nemo_rl_vllm",
    "contracts": "nemo_rl_contracts",
}

_NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*.pyc", "dist", "build", "*.egg-info")


def uv(*arguments: str, cwd: Path = ROOT) -> str:
    """Run uv and return what it prints; a failure fails the test with uv's own words."""
    program = shutil.which("uv")
    if program is None:
        pytest.fail("these tests build real wheels and need `uv` on the PATH; install it (pip install uv)")
    # What a surrounding `uv run` or an active environment says must not reach this one.
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        [program, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"uv {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}"
    return done.stdout


def copy_sources(folder: Path) -> Path:
    """Copy the three projects, so that what a wheel is compared with is what it was built from."""
    for project in PROJECTS:
        shutil.copytree(ROOT / project, folder / project, ignore=_NOT_SOURCE)
    # hatchling leaves out what it says, so a pattern that hits a package has to hit it here too.
    shutil.copy(ROOT / ".gitignore", folder)
    return folder


def build_wheel(project: Path, folder: Path) -> "Wheel":
    """Build the wheel of a project."""
    uv("build", "--wheel", "--quiet", str(project), "--out-dir", str(folder))
    package = PROJECTS[project.name]
    (path,) = folder.glob(f"{package}-*.whl")
    return Wheel(path)


@dataclass(frozen=True)
class Wheel:
    """A built wheel."""

    path: Path

    @property
    def files(self) -> set[str]:
        """Paths of everything in it."""
        with zipfile.ZipFile(self.path) as archive:
            return set(archive.namelist())

    def read(self, suffix: str) -> str:
        """Return the text of the one file whose path ends so."""
        with zipfile.ZipFile(self.path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(suffix)]
            return archive.read(name).decode()

    @property
    def metadata(self) -> Message:
        """Its METADATA."""
        return email.message_from_string(self.read(".dist-info/METADATA"))


@dataclass(frozen=True)
class Venv:
    """A virtual environment in which programs run as a user's would: outside the repository, with a bare environment."""

    folder: Path
    workdir: Path

    @classmethod
    def create(cls, folder: Path) -> "Venv":
        """Make an empty one with the Python of these tests."""
        uv("venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
        return cls._in(folder)

    @classmethod
    def _in(cls, folder: Path) -> "Venv":
        (folder / "work").mkdir()
        (folder / "home").mkdir()
        return cls(folder=folder / "venv", workdir=folder / "work")

    def clone(self, folder: Path) -> "Venv":
        """Return a second one with the same packages, hard-linked; installing there leaves this one as it is."""
        shutil.copytree(self.folder, folder / "venv", symlinks=True, copy_function=os.link)
        return self._in(folder)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where its packages are."""
        (site,) = (self.folder / "lib").glob("python3.*/site-packages")
        return site

    def install(self, *requirements: str) -> None:
        """Install packages or wheels; the arguments are those of ``uv pip install``."""
        uv("pip", "install", "--quiet", "--python", str(self.python), *requirements)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that a program gets: nothing of this process's own, PYTHONPATH least of all."""
        return {
            "PATH": os.pathsep.join([str(self.python.parent), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(self.workdir.parent / "home"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            **(extra or {}),
        }

    def run(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment in its work folder; the first argument is its name in ``bin``."""
        program, *rest = map(str, arguments)
        return subprocess.run(
            [str(self.python.parent / program), *rest],
            cwd=self.workdir,
            env=self.environment(env),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start the interpreter without waiting for it."""
        return subprocess.Popen(
            [str(self.python), *map(str, arguments)],
            cwd=self.workdir,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def words(done: subprocess.CompletedProcess[str]) -> str:
    """Return all that a program said, for the message of an assertion."""
    return f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"


def names(requirements: Sequence[str]) -> set[str]:
    """Return the distributions that lines of the form ``name==version ; marker`` name."""
    found = set()
    for line in requirements:
        name = line.partition("==")[0].strip().lower().replace("_", "-")
        if name and not name.startswith(("#", "-")):
            found.add(name)
    return found
