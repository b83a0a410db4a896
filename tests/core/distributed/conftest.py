# SPDX-License-Identifier: Apache-2.0
"""One small Ray for this folder, and folders whose modules only workers can import."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from nemo_rl_core.distributed.ray_runtime import RayRuntime, start_ray

#: Logical devices: Ray counts them without any hardware, which is enough to see how they are ordered.
NUM_GPUS = 4
NUM_CPUS = 12


@pytest.fixture(scope="package")
def local_ray():
    """A Ray of our own: twelve slots, four logical GPUs, a node label."""
    options = {
        "num_gpus": NUM_GPUS,
        "labels": {"role": "train"},
        "object_store_memory": 80_000_000,
        "log_to_driver": False,
    }
    before = os.environ.get("RAY_ADDRESS")
    os.environ.pop("RAY_ADDRESS", None)
    with start_ray(num_cpus=NUM_CPUS, local_options=options) as runtime:
        assert isinstance(runtime, RayRuntime)
        yield runtime
    if before is not None:
        os.environ["RAY_ADDRESS"] = before


@pytest.fixture(scope="session")
def only_workers_see(tmp_path_factory) -> Path:
    """A folder with a `vllm` that imports fine, and worker modules that the driver can't import."""
    folder = tmp_path_factory.mktemp("only_workers_see")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("__version__ = '0.0.fake'\n")
    (folder / "sneaky_worker.py").write_text(
        "import vllm\n\n\nclass SneakyWorker:\n    def version(self):\n        return vllm.__version__\n"
    )
    (folder / "foreign_worker.py").write_text(
        "from nemo_rl_core.errors import GenerationError\n\n\n"
        "class EngineDeadError(Exception):\n"
        "    def __init__(self, code, *, engine):\n"
        "        super().__init__(f'engine {engine} ended with {code}')\n\n\n"
        "class AdapterError(GenerationError):\n    pass\n\n\n"
        "class Foreign:\n    pass\n\n\n"
        "class ForeignWorker:\n"
        "    def fail(self):\n        raise EngineDeadError(9, engine='x')\n\n"
        "    def fail_as_adapter(self):\n        raise AdapterError('no memory', type_name='x.OutOfMemory')\n\n"
        "    def give(self):\n        return Foreign()\n\n"
        "    def ok(self):\n        return 1\n"
    )
    return folder


@pytest.fixture(scope="session")
def other_interpreter(tmp_path_factory) -> Path:
    """The interpreter of another venv that sees the same packages."""
    python = _bare_venv(tmp_path_factory.mktemp("other"))
    site = Path(sysconfig.get_path("purelib", vars={"base": str(python.parent.parent)}))
    site.mkdir(parents=True, exist_ok=True)
    (site / "shared.pth").write_text("\n".join(entry for entry in sys.path if entry and Path(entry).is_dir()))
    return python


@pytest.fixture(scope="session")
def interpreter_without_core(tmp_path_factory) -> Path:
    """The interpreter of an empty venv."""
    return _bare_venv(tmp_path_factory.mktemp("bare"))


def _bare_venv(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return folder / "bin" / "python"
