# SPDX-License-Identifier: Apache-2.0
"""The plugin at work on this project: what must do without torch, held to it in the process that also has it loaded."""

from pathlib import Path

import pytest

from nemo_rl_core import plugins
from nemo_rl_core.config.load import load_config
from nemo_rl_core.config.reference import schema_keys

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_tiny.yaml"


@pytest.fixture(autouse=True)
def without_torch(forbid_imports):
    # The fixture and not the mark: in an environment that was set up before the plugin came, only these tests fail.
    forbid_imports("ray", "torch", "transformers")
    return forbid_imports


@pytest.mark.parametrize("override", ["grpo.seed=2", "policy.dynamic_batching.enabled=false"])
def test_a_config_is_read_and_checked_without_torch(override: str) -> None:
    """U2: also by what its rules import inside their functions, which no list of modules after an import shows."""
    assert load_config(EXAMPLE, [override]).grpo.max_num_steps > 0


def test_the_reference_of_all_keys_is_made_without_torch() -> None:
    assert len(list(schema_keys())) > 50


def test_backends_are_listed_without_loading_one() -> None:
    """F24, F46: the state of each, from metadata alone."""
    assert {"torch", "vllm"} <= set(plugins.discover())


def test_they_are_refused_here(forbid_imports) -> None:
    """Control: otherwise everything above would pass in any case."""
    with pytest.raises(ModuleNotFoundError, match=r"test_own_use\.py::test_they_are_refused_here must not import"):
        __import__("torch")
    assert [violation.module for violation in forbid_imports.pop_violations()] == ["torch"]
