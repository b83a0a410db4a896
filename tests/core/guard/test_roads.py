# SPDX-License-Identifier: Apache-2.0
"""How the guard gets into processes that others start: variables, the .pth line, spawn, fork, Ray's hook."""

import json
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from hypothesis import given

from nemo_rl_core import guard
from nemo_rl_core.guard.hooks import RAY_HOOK
from nemo_rl_core.guard.policy import policy_from_environment
from tests.core.guard.conftest import PTH, SOURCE, Sandbox
from tests.strategies import guard_policies

DISTRIBUTION = SOURCE.parent

TRY = """
try:
    import vllm
    result = "loaded"
except ImportError as error:
    result = type(error).__name__
"""


@given(guard_policies())
def test_a_policy_survives_the_way_through_the_environment(policy: guard.Policy) -> None:
    settings = {field: getattr(policy, field) for field in ("role", "on_violation", "allow", "lifted", "forbid")}
    assert policy_from_environment(guard.environment_for(**settings)) == policy


def test_no_role_means_no_guard() -> None:
    assert guard.arm_from_environment({}) is False
    assert guard.arm_from_environment({"NEMO_RL_ROLE": "", "NEMO_RL_FIREWALL": "exit"}) is False
    assert guard.current_policy() is None


def test_the_pth_arms_an_interpreter_with_a_role_and_leaves_others_alone(sandbox: Sandbox, installed: str) -> None:
    code = f"{TRY}\nanswer([result, sorted(name for name in sys.modules if name.startswith('nemo_rl_core'))])"
    armed, _ = sandbox.run(code, python=installed, env=guard.environment_for("train")).answer
    assert armed == "ForbiddenImportError"
    assert sandbox.run(code, python=installed).answer == ["loaded", []]
    lifted = guard.environment_for("train", lifted=("vllm",))
    assert sandbox.run(code, python=installed, env=lifted).answer[0] == "loaded"


def test_a_broken_install_does_not_break_the_start_of_the_interpreter(sandbox: Sandbox, installed: str) -> None:
    """Core half removed, its .pth left behind: the interpreter starts, and says what it could not do."""
    site = Path(installed).parents[1]
    (link,) = site.glob("lib/python*/site-packages/nemo_rl_core")
    link.unlink()
    code = f"import os, sys\nsys.path.append({str(sandbox.root / 'engine')!r})\n{TRY}\nprint(result)"
    run = [installed, "-c", code]
    quiet = subprocess.run(run, env={}, capture_output=True, text=True, timeout=60, check=False)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "loaded\n", "")
    env = {"NEMO_RL_ROLE": "train"}
    loud = subprocess.run(run, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (loud.returncode, loud.stdout) == (0, "loaded\n")
    assert "nemo_rl_core_guard.pth" in loud.stderr


def test_a_role_that_the_table_does_not_know_ends_the_start(sandbox: Sandbox, installed: str) -> None:
    """Going on unguarded because of a typo would be the silent way."""
    outcome = sandbox.run("answer(1)", python=installed, env={"NEMO_RL_ROLE": "trian"})
    assert outcome.returncode == 1
    assert "got 'trian'" in outcome.stderr


def test_the_pth_ends_a_start_that_has_the_engine_loaded(sandbox: Sandbox, installed: str) -> None:
    """F15: another .pth was faster; `site` would have printed an exception and gone on."""
    (link,) = Path(installed).parents[1].glob("lib/python*/site-packages/nemo_rl_core")
    (link.parent / "aaa.pth").write_text("import vllm\n")
    outcome = sandbox.run("answer(1)", python=installed, env=guard.environment_for("train"))
    assert outcome.returncode == 1
    assert "loaded before the guard was armed" in outcome.stderr


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_are_armed(sandbox: Sandbox, installed: str, method: str) -> None:
    """fork inherits; spawn and forkserver start interpreters, which the .pth arms."""
    sandbox.write({"child.py": f"def work(queue):\n{TRY.replace(chr(10), chr(10) + '    ')}\n    queue.put(result)\n"})
    code = f"""
import multiprocessing, child
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    process = context.Process(target=child.work, args=(queue,))
    process.start()
    got = queue.get(timeout=30)
    process.join(30)
    answer(got)
"""
    env = guard.environment_for("rollout")
    assert sandbox.run(code, python=installed, env=env).answer == "ForbiddenImportError"
    assert sandbox.run(code, python=installed).answer == "loaded"


def test_a_fork_inherits_a_guard_that_a_call_armed_and_keeps_its_own_ledger(sandbox: Sandbox) -> None:
    code = f"""
from nemo_rl_core import guard
guard.arm("train")
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    {TRY.replace(chr(10), chr(10) + "    ")}
    os.write(write, json.dumps([result, len(guard.ledger().violations)]).encode())
    os._exit(0)
os.waitpid(pid, 0)
answer([json.loads(os.read(read, 1000)), len(guard.ledger().violations)])
"""
    assert sandbox.run(code).answer == [["ForbiddenImportError", 1], 0]


def test_rays_hook_is_a_string_that_arms_from_the_environment(sandbox: Sandbox) -> None:
    """F57: resolved as Ray does, by module and attribute; twice is fine; without a role it does nothing."""
    code = f"""
import importlib
module, _, name = {RAY_HOOK!r}.rpartition(".")
hook = getattr(importlib.import_module(module), name)
hook(); hook()
{TRY}
answer(result)
"""
    # The role comes after the start of the interpreter, so that nothing but the hook can have armed it.
    role = f"os.environ.update({guard.environment_for('train')!r})\n"
    assert sandbox.run(role + code).answer == "ForbiddenImportError"
    assert sandbox.run(code).answer == "loaded"


def test_a_child_that_is_forked_while_a_thread_records_can_record(sandbox: Sandbox) -> None:
    """The child has a copy of the lock, and of the threads none that would open it."""
    code = """
import signal
from nemo_rl_core.guard.records import Recorder
recorder = Recorder("train")
with recorder._lock:
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        recorder.snapshot()
        os._exit(0)
answer(os.waitpid(pid, 0)[1])
"""
    assert sandbox.run(code).answer == 0


def test_the_guard_needs_the_standard_library_alone(sandbox: Sandbox) -> None:
    """Imported with -S -I, where no installed package can be seen."""
    code = (
        f"import sys; sys.path.append({str(SOURCE)!r}); import nemo_rl_core.guard.hooks; import json; "
        "known = sys.stdlib_module_names | {'nemo_rl_core', '__main__'}; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules} - known)))"
    )
    run = [sys.executable, "-S", "-I", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert [name for name in json.loads(done.stdout) if not name.startswith("_")] == []


def test_the_pth_is_one_line_and_goes_to_the_root_of_the_wheel() -> None:
    (line,) = PTH.read_text().splitlines()
    assert line.startswith("import ")
    build = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["force-include"] == {PTH.name: PTH.name}


@pytest.mark.full
@pytest.mark.skipif(shutil.which("uv") is None, reason="builds a wheel with uv")
def test_the_built_wheel_and_an_editable_install_carry_the_pth(sandbox: Sandbox) -> None:
    """The build backend's own word, and an interpreter that it was installed into."""
    out = sandbox.root / "dist"
    subprocess.run(["uv", "build", "--wheel", "-o", str(out), str(DISTRIBUTION)], check=True, timeout=300)
    (wheel,) = out.glob("*.whl")
    assert zipfile.ZipFile(wheel).read(PTH.name) == PTH.read_bytes()
    for name, what in {"wheel": [str(wheel)], "editable": ["-e", str(DISTRIBUTION)]}.items():
        folder = sandbox.root / name
        venv.create(folder, symlinks=True, with_pip=False)
        python = str(folder / "bin" / "python")
        run = ["uv", "pip", "install", "--python", python, "--no-deps", *what]
        subprocess.run(run, check=True, timeout=300)
        code = f"{TRY}\nanswer([result, 'nemo_rl_core.guard' in sys.modules])"
        got = sandbox.run(code, python=python, env=guard.environment_for("train")).answer
        assert got == ["ForbiddenImportError", True]
