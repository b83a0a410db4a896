# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.core.firewall.installation import Installation


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """With an engine that would leave a mark when it is imported."""
    made = Installation.make(tmp_path / "venv")
    made.write(
        {
            "engine/__init__.py": "",
            "engine/config.py": "",
            "engine/models/__init__.py": "",
            "engine/models/llama.py": "",
        }
    )
    return made
