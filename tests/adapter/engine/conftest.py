# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapter.engine.checkpoints import Checkpoint, make
from tests.adapter.engine.environment import NoEngineError, engine_python
from tests.adapter.engine.live import FreshEngines, LiveEngine, settings


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter with the engine; where there is none, CI fails and a developer is told."""
    try:
        return engine_python()
    except NoEngineError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"under CI the real engine has to run: {error}")
        pytest.skip(f"no engine here: {error}")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> list[Checkpoint]:
    """Three checkpoints of one model that share no tensor."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return [make(folder / str(seed), "qwen3", seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="session")
def pair(python, checkpoints) -> Iterator[tuple[LiveEngine, FreshEngines]]:
    """The live engine of this test session, and fresh ones beside it; both take a while, so they start together."""
    live = LiveEngine(python, settings("qwen3"), one_process=True)
    fresh = FreshEngines(python, checkpoints)
    yield live.ready(), fresh
    live.close()
    fresh.close()


@pytest.fixture(scope="session")
def fresh(pair) -> FreshEngines:
    return pair[1]


@pytest.fixture
def live(pair) -> Iterator[LiveEngine]:
    """The live engine, without any planted fault before and after a test."""
    live = pair[0]
    yield live
    live.heal()
