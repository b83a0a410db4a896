# SPDX-License-Identifier: Apache-2.0
"""Light imports are a promise: module sets of fresh interpreters, independent of the order of tests."""

import json
import subprocess
import sys

import pytest

HEAVY = ("grimp", "importlinter", "numpy", "pandas", "ray", "tensorboardX", "torch", "transformers", "vllm")


def loaded_after(code: str) -> set[str]:
    """Return the top-level names that a fresh interpreter holds after running the code."""
    code = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", ["torch", "ray", "transformers"])
def test_the_heavy_packages_are_there_to_be_loaded(name: str) -> None:
    """Control: absent packages would make every test below pass."""
    assert __import__("importlib.util").util.find_spec(name) is not None


@pytest.mark.parametrize(
    "code",
    [
        "import nemo_rl_core",
        "import nemo_rl_core.errors",
        "import nemo_rl_core.guard.hooks",
        "import nemo_rl_core.plugins",
        "import nemo_rl_core.protocols.generation",
        "import nemo_rl_core.config",
        "import nemo_rl_core.observability",
        "import nemo_rl_core.cli",
        "import nemo_rl_vllm",
        "from nemo_rl_core import plugins; plugins.discover(); plugins.discover('nemo_rl_core.actors')",
        "from nemo_rl_core import plugins; plugins.load('vllm', expected_protocol=1)",
    ],
)
def test_importing_it_loads_nothing_heavy(code: str) -> None:
    """U2, F12, F24, F46: the culprit is named by the module set itself."""
    assert loaded_after(code) & set(HEAVY) == set()


def test_listing_imports_neither_an_adapter_nor_anything_of_it() -> None:
    """F21, F46: discovery reads metadata; no plugin's package is imported."""
    assert "nemo_rl_vllm" not in loaded_after("from nemo_rl_core import plugins; plugins.discover()")


def test_core_itself_is_a_handful_of_modules() -> None:
    """U2: the package initialiser is empty but for the version."""
    code = "import sys; before = set(sys.modules); import nemo_rl_core; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['nemo_rl_core']"


def test_lazy_means_present_after_use() -> None:
    """The other half of the promise: what is absent after the import is there once it is used."""
    assert "importlib_metadata" not in loaded_after("import nemo_rl_core")
    assert "importlib_metadata" in loaded_after("from nemo_rl_core import plugins; plugins.discover()")
