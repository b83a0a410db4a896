# SPDX-License-Identifier: Apache-2.0
"""pytest loads the plugin in every environment that has core, so it must weigh nothing."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import nemo_rl_core
from tests.core.guard.conftest import SOURCE

PLUGIN = "nemo_rl_core.testing.forbid_imports"
LOADED = "print(json.dumps(sorted(name for name in sys.modules if name.startswith('nemo_rl_core'))))"


def fresh(code: str, *options: str) -> list[str]:
    run = [sys.executable, *options, "-c", f"import json, sys\n{code}\n{LOADED}"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_loading_it_loads_nothing_else_of_core() -> None:
    """F24, F46: nor anything heavy; the guard comes in with the first name that is forbidden, pytest when it calls."""
    found = fresh(f"import {PLUGIN}\nassert not {{'torch', 'ray', 'numpy', 'pydantic', 'pytest'}} & set(sys.modules)")
    assert found == ["nemo_rl_core", "nemo_rl_core.testing", PLUGIN]


def test_it_imports_where_pytest_is_not_installed() -> None:
    """U6: core doesn't depend on pytest, and each of its modules imports in an environment that has core alone."""
    assert PLUGIN in fresh(f"sys.path.append({str(SOURCE)!r})\nimport {PLUGIN}", "-S", "-I")


@pytest.mark.parametrize("mark", ["", "@pytest.mark.forbid_imports('heavy')\n"])
def test_a_whole_run_of_pytest_with_it_loads_the_guard_if_something_is_forbidden(tmp_path: Path, mark: str) -> None:
    expected = {"guard"} if mark else set()
    (tmp_path / "test_a.py").write_text(
        f"import sys\nimport pytest\n\n{mark}def test_a():\n"
        "    assert not {'torch', 'ray', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "    core = {name for name in sys.modules if name.startswith('nemo_rl_core.')}\n"
        f"    others = core - {{'nemo_rl_core.testing', '{PLUGIN}'}}\n"
        f"    assert {{name.split('.')[1] for name in others}} == {expected}\n"
    )
    run = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", str(tmp_path)]
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(run, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pytest_finds_it_by_its_entry_point() -> None:
    """F45: under the name that `-p no:forbid_imports` takes."""
    (entry,) = importlib.metadata.entry_points(group="pytest11", name="forbid_imports")
    assert (entry.value, entry.dist.name) == (PLUGIN, "nemo-rl-core")


def test_pytest_is_told_not_to_warn_where_the_guard_has_loaded_core_before_it() -> None:
    """Otherwise `NEMO_RL_ROLE=train pytest -W error` ends before the first test, where core is installed as a wheel."""
    assert "PYTEST_DONT_REWRITE" in (nemo_rl_core.__doc__ or "")
