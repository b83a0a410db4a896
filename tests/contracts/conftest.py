# SPDX-License-Identifier: Apache-2.0
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.console import Said, console
from tests.contracts.repository import Repository


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return Repository(root=tmp_path)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The command `nemo-rl-contracts`, called in this process."""
    return console(capsys)
