# SPDX-License-Identifier: Apache-2.0
"""Workers of torch's DataLoader, which torch starts: by fork they inherit the guard, otherwise the .pth arms them."""

import os
import sysconfig

import pytest

from nemo_rl_core import guard
from tests.core.guard.conftest import SOURCE, Sandbox

DATASET = """
import os
from nemo_rl_core import guard

class Rows:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 1:
            import vllm
        try:
            import vllm
            return [os.getpid(), "loaded", 0]
        except ImportError as error:
            return [os.getpid(), type(error).__name__, len(guard.ledger().violations)]
"""

SCRIPT = """
import dataset
from nemo_rl_core import guard
from torch.utils.data import DataLoader

if __name__ == "__main__":
    rows, error = [], None
    loader = DataLoader(dataset.Rows(), batch_size=None, num_workers=1, multiprocessing_context=sys.argv[1], timeout=50)
    try:
        rows.extend(loader)
    except guard.ForbiddenImportError as caught:
        error = str(caught)
    answer([[[row[0] == os.getpid(), *row[1:]] for row in rows], error])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.full)])
def test_workers_of_a_data_loader_are_armed_however_they_start(sandbox: Sandbox, installed: str, method: str) -> None:
    """F22: and the refusal reaches the loop that reads the loader, as itself and with the importer."""
    sandbox.write({"dataset.py": DATASET})
    # torch comes from this environment; the interpreter's own is bare but for core and its .pth.
    paths = [SOURCE, sandbox.root / "user", sandbox.root / "engine", sysconfig.get_path("purelib")]
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    script = sandbox.root / "user" / "script.py"
    run = {"arguments": (str(script), method), "python": installed}
    armed = sandbox.run(SCRIPT, env=env | guard.environment_for("train"), **run)
    rows, error = armed.answer
    assert rows == [[False, "ForbiddenImportError", 1]]
    assert "a train process must not import 'vllm'" in error
    assert "dataset.py:11 (dataset)" in error
    if method == "fork":  # control: the engine would load
        assert sandbox.run(SCRIPT, env=env, **run).answer == [[[False, "loaded", 0]] * 2, None]
