# SPDX-License-Identifier: Apache-2.0
"""Asking nodes: one real node here; nodes of other interpreters are in tests/e2e/test_two_kinds_of_nodes.py."""

import sys

import pytest

from nemo_rl_core.distributed.cluster_facts import nodes_of_role
from nemo_rl_core.distributed.environments import current_interpreter
from nemo_rl_core.distributed.nodes import ask_nodes, call_on_nodes
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import ClusterError


def _add(one: int, two: int) -> int:
    return one + two


def _role_and_loaded_modules(names: list[str]) -> tuple[str | None, list[str]]:
    import os
    import sys

    return os.environ.get("NEMO_RL_ROLE"), [name for name in names if name in sys.modules]


def _break(what: str) -> None:
    raise KeyError(what)


def _sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


@pytest.fixture(scope="module")
def bundles(local_ray):
    with RayVirtualCluster([2], use_gpus=False, name="asked") as cluster:
        yield cluster.get_bundles()


def test_a_node_is_asked_once_and_tells_versions_modules_and_folders(bundles, tmp_path):
    (report,) = ask_nodes(
        bundles,
        modules=["json", "no_such_module"],
        distributions=["pytest"],
        folders=[str(tmp_path), str(tmp_path / "absent")],
        timeout_s=60.0,
    )
    assert report.node_ip == bundles[0].node_ip
    assert report.interpreter.python == sys.executable
    assert report.interpreter.versions["nemo-rl-core"] == current_interpreter().versions["nemo-rl-core"]
    assert report.interpreter.versions["pytest"] == pytest.__version__
    assert report.interpreter.modules == {"json": True, "no_such_module": False}
    assert report.interpreter.failed_imports == {}
    assert report.missing_folders == (str(tmp_path / "absent"),)


def test_a_node_without_the_interpreter_that_is_asked_for_is_named(bundles, tmp_path):
    with pytest.raises(ClusterError, match=r"cannot start on node .*does not exist"):
        ask_nodes(bundles, python=str(tmp_path / "python"), timeout_s=60.0)


def test_a_call_needs_nothing_of_ours_on_the_node(bundles):
    """The function travels by value: neither its module nor core is imported for it."""
    nodes = nodes_of_role("train")
    assert list(nodes.values()) == [bundles[0].node_ip]
    assert call_on_nodes(_add, nodes, (2, 3), timeout_s=60.0) == dict.fromkeys(nodes, 5)
    (answer,) = call_on_nodes(_role_and_loaded_modules, nodes, ([__name__],), timeout_s=60.0).values()
    assert answer == ("rollout", [])


def test_a_call_that_fails_names_the_node_and_the_cause(bundles):
    with pytest.raises(ClusterError, match=rf"node {bundles[0].node_ip} cannot be asked .*no such thing"):
        call_on_nodes(_break, nodes_of_role("train"), ("no such thing",), timeout_s=60.0)


def test_a_node_that_does_not_answer_is_named_at_the_deadline(bundles):
    with pytest.raises(ClusterError, match=rf"node {bundles[0].node_ip} did not say within 3 s"):
        call_on_nodes(_sleep, nodes_of_role("train"), (600.0,), timeout_s=1.0, spawn_s=2.0)


def test_nodes_of_a_role_that_no_label_names_are_none(local_ray):
    assert nodes_of_role("generation") == {}
