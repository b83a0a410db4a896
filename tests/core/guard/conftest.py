# SPDX-License-Identifier: Apache-2.0
"""A fake engine that would import fine, so that a guard test proves something, and fresh interpreters to try it in."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import nemo_rl_core

SOURCE = Path(nemo_rl_core.__file__).parents[1]
PTH = SOURCE.parent / "nemo_rl_core_guard.pth"

ENGINE = {
    "vllm/__init__.py": 'import os\nos.environ["ENGINE_LOADED"] = "1"\nclass LLM:\n    pass\n',
    "vllm/config.py": "VALUE = 1\n",
    "vllm/__main__.py": 'print("engine ran")\n',
    "flashinfer.py": "VALUE = 1\n",
    "innocent.py": "VALUE = 1\n",
}

#: What is pip-installed beside us: a library with an honest fallback, one that only knows ModuleNotFoundError, a prober.
LIBRARIES = {
    "honest.py": "try:\n    import vllm\nexcept ImportError:\n    vllm = None\n",
    "narrow.py": "try:\n    from vllm import LLM\nexcept ModuleNotFoundError:\n    LLM = None\n",
    "prober.py": 'from importlib.util import find_spec\nHAS = find_spec("vllm") is not None\n',
    "careless.py": "import vllm\n",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a fresh interpreter did."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def answer(self) -> Any:
        """The last line of its output, as JSON; the code calls `answer(...)`."""
        assert self.returncode == 0, self.stderr
        return json.loads(self.stdout.splitlines()[-1])


PRELUDE = "import json, os, sys\ndef answer(value): print(json.dumps(value))\n"


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A folder with a fake engine and libraries, and interpreters that see them."""

    root: Path

    @property
    def site(self) -> Path:
        return self.root / "lib" / "site-packages"

    def write(self, files: Mapping[str, str], *, under: Path | None = None) -> None:
        for name, text in files.items():
            path = (under or self.root / "user") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def run(
        self,
        code: str = "",
        *,
        arguments: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> Outcome:
        """Run a script (or `arguments`) in a fresh interpreter without the caller's NEMO_RL variables."""
        script = self.root / "user" / "script.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(PRELUDE + code)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("NEMO_RL_")}
        paths = [SOURCE, self.root / "user", self.site, self.root / "engine"]
        clean["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        clean["PYTHONDONTWRITEBYTECODE"] = "1"
        done = subprocess.run(
            [python, *(arguments or (str(script),))],
            env={**clean, **(env or {})},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Outcome(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    box = Sandbox(root=tmp_path)
    box.write(ENGINE, under=tmp_path / "engine")
    box.write(LIBRARIES, under=box.site)
    return box


@pytest.fixture
def installed(sandbox: Sandbox) -> str:
    """An interpreter in whose site-packages core and its .pth lie, as after `pip install` without dependencies."""
    folder = sandbox.root / "venv"
    venv.create(folder, symlinks=True, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (site / PTH.name).write_bytes(PTH.read_bytes())
    (site / "nemo_rl_core").symlink_to(SOURCE / "nemo_rl_core")
    return str(folder / "bin" / "python")
