# SPDX-License-Identifier: Apache-2.0
"""The packaging promise as four checks of an environment: imports, commands, a refit, a training.

The tests run them where core is installed alone, and again where an engine was smuggled into it. Each check fails
with an AssertionError that holds what the environment's own programs said.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from nemo_rl_contracts.phases import FoundImport, Phase, find_imports
from nemo_rl_core.guard import FORBIDDEN_ROOTS
from tests.packaging.workshop import ROOT, Venv, words

#: What a train process must not import, and the adapter, which core must not know.
FORBIDDEN = FORBIDDEN_ROOTS["train"] | {"nemo_rl_vllm"}

REFIT_SCRIPT = Path(__file__).with_name("refit_script.py")

# The modules come from the wheel's own record: a folder without an initialiser is in it, and in no package walk.
_IMPORT_ALL = """
import importlib, importlib.metadata, json, sys
names = [
    str(file)[:-3].replace("/", ".").removesuffix(".__init__")
    for file in importlib.metadata.files("nemo-rl-core")
    if str(file).startswith("nemo_rl_core/") and file.suffix == ".py"
]
failures = {}
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
from nemo_rl_core import guard
print(json.dumps({
    "names": names,
    "failures": failures,
    "file": sys.modules["nemo_rl_core"].__file__,
    "roots": sorted({name.partition(".")[0] for name in sys.modules}),
    "ledger": guard.ledger().as_dicts(),
}))
"""

# argparse keeps subcommands in actions; asking it is the one way to see a command that nobody has listed.
_LIST_COMMANDS = """
import argparse, json
from nemo_rl_core.cli import app

class Captured(BaseException):
    pass

def capture(parser, *_):
    raise Captured(parser)

def walk(parser, path):
    found = [path]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found += walk(below, [*path, name])
    return found

argparse.ArgumentParser.parse_known_args = capture  # parse_args goes through it
try:
    app.main([])
except Captured as captured:
    print(json.dumps(walk(captured.args[0], [])))
"""


def every_module_imports(venv: Venv, *, role: str | None = None) -> list[str]:
    """Import each module of the installed core in one interpreter; return their names.

    Args:
        venv: Where.
        role: With a role the guard is armed from the interpreter's start on.
    """
    done = venv.run("python", "-c", _IMPORT_ALL, env={"NEMO_RL_ROLE": role} if role else None)
    assert done.returncode == 0, words(done)
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(venv.folder), found["file"]
    assert found["failures"] == {}, json.dumps(found["failures"], indent=1)
    assert not FORBIDDEN & set(found["roots"]), sorted(FORBIDDEN & set(found["roots"]))
    assert found["ledger"]["role"] == (role or "")
    assert found["ledger"]["violations"] == []
    return found["names"]


def no_statement_names_the_engine(venv: Venv) -> int:
    """Read every import of the installed core, also of functions that nobody calls; return how many there are."""
    package = venv.site_packages / "nemo_rl_core"
    offences, total = [], 0
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(venv.site_packages).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found = find_imports(path.read_text(), module=module, is_package=is_package)
        total += len(found)
        offences += [f"{module}:{each.lineno} imports {each.module} ({each.phase})" for each in found if _forbids(each)]
    assert offences == [], "\n".join(offences)
    return total


def _forbids(found: FoundImport) -> bool:
    return found.phase is not Phase.TYPING and found.module.partition(".")[0] in FORBIDDEN


def every_command_helps(venv: Venv) -> list[list[str]]:
    """Run each command with ``--help``, by both roads; return the commands."""
    listed = venv.run("python", "-c", _LIST_COMMANDS)
    assert listed.returncode == 0, words(listed)
    commands = json.loads(listed.stdout.splitlines()[-1])
    for command in commands:
        done = venv.run("nemo-rl", *command, "--help")
        assert done.returncode == 0, words(done)
        assert done.stdout.startswith(" ".join(["usage: nemo-rl", *command])), words(done)
    version = venv.run("python", "-m", "nemo_rl_core", "--version")
    assert version.returncode == 0, words(version)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", version.stdout.strip()), words(version)
    return commands


def a_refit_works(venv: Venv) -> dict[str, Any]:
    """Move weights between two plain processes of the environment; return what the receiver reports."""
    script = Path(shutil.copy(REFIT_SCRIPT, venv.workdir))
    sender = venv.start(script, "send")
    receiver = None
    try:
        assert sender.stdout is not None
        address = sender.stdout.readline().strip()  # ends with the process, whose own deadlines are finite
        assert re.fullmatch(r".+:\d+", address), address + sender.communicate(timeout=60)[1]
        receiver = venv.start(script, "receive", address)
        received, receiver_errors = receiver.communicate(timeout=120)
        sent, sender_errors = sender.communicate(timeout=120)
    finally:
        for process in (sender, receiver):
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate()
    assert (sender.returncode, receiver.returncode) == (0, 0), sender_errors + receiver_errors
    report, theirs = json.loads(received), json.loads(sent)
    assert report["digest"] == theirs["digest"]
    assert report["wrong"] == []
    assert report["version"] == theirs["version"]
    return report


def two_steps_train(venv: Venv) -> dict[str, Any]:
    """Train two steps with the example's config, copied out of the repository; return the summary."""
    shutil.copy(ROOT / "examples" / "grpo_tiny.yaml", venv.workdir)
    run_dir = venv.workdir / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    done = venv.run(
        *("nemo-rl", "train", "grpo_tiny.yaml", "grpo.max_num_steps=2", f"run_dir={run_dir}"), timeout_s=240
    )
    assert done.returncode == 0, words(done)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["refit/version"] for row in rows] == [0, 1, 2]
    assert len({row["refit/digest"] for row in rows}) == 3, "a step that leaves the weights as they were is no step"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    assert summary["firewall"]["violations"] == []
    workers = [worker for workers in summary["roles"].values() for worker in workers]
    assert set(summary["roles"]) >= {"train", "generation"}
    for worker in workers:
        assert Path(worker["interpreter"]).parent == venv.python.parent, worker
    return summary
