# SPDX-License-Identifier: Apache-2.0
"""The adapter's light half: its description and its config schema, without vLLM and without torch."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from pydantic import ValidationError

import nemo_rl_core
import nemo_rl_vllm
from nemo_rl_core import plugins
from nemo_rl_core.protocols.generation import PROTOCOL_NUMBER, BackendSpec
from nemo_rl_vllm.checks import check_settings
from nemo_rl_vllm.config import VllmConfig
from nemo_rl_vllm.plugin import BACKEND, ENGINE, engine_range

PROJECT = tomllib.loads((Path(nemo_rl_vllm.__file__).parents[2] / "pyproject.toml").read_text())["project"]
CORE = tomllib.loads((Path(nemo_rl_core.__file__).parents[2] / "pyproject.toml").read_text())["project"]

LIGHT = ("checks", "config", "environments", "fp8", "plugin")


@pytest.mark.parametrize("module", ["nemo_rl_vllm", *(f"nemo_rl_vllm.{name}" for name in LIGHT)])
def test_a_light_module_loads_where_the_engine_and_torch_cannot(module: str) -> None:
    """F46: blocked by None, so that a handled attempt would show as well as a plain one."""
    code = (
        "import sys, json\n"
        "heavy = ('vllm', 'torch', 'ray', 'transformers', 'numpy')\n"
        "sys.modules.update(dict.fromkeys(heavy))\n"
        f"import {module}\n"
        "print(json.dumps([name for name, value in sys.modules.items() if value and name.split('.')[0] in heavy]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_core_finds_this_backend_by_its_entry_point() -> None:
    found = plugins.load("vllm", expected_protocol=PROTOCOL_NUMBER)
    assert found is BACKEND
    assert isinstance(found, BackendSpec)
    plugin = plugins.discover()["vllm"]
    assert (plugin.distribution, plugin.version, plugin.state) == (
        "nemo-rl-vllm",
        nemo_rl_vllm.__version__,
        "available",
    )


def test_the_engines_range_is_the_one_of_the_extra() -> None:
    """U5: the version range stands once, in the adapter's metadata."""
    (declared,) = (Requirement(text) for text in PROJECT["optional-dependencies"]["engine"])
    assert declared.name == ENGINE
    assert SpecifierSet(engine_range()) == declared.specifier == SpecifierSet(BACKEND.engine_range)


def test_the_adapter_and_core_carry_one_version() -> None:
    """U5: the forwarding extra, the adapter's requirement and both packages agree."""
    version = nemo_rl_vllm.__version__
    assert version == PROJECT["version"] == CORE["version"] == nemo_rl_core.__version__
    assert f"nemo-rl-core=={version}" in PROJECT["dependencies"]
    assert CORE["optional-dependencies"]["vllm"] == [f"nemo-rl-vllm[engine]=={version}"]


def test_the_backend_names_its_own_schema() -> None:
    module, _, name = BACKEND.config_schema.partition(":")
    assert (module, name) == (VllmConfig.__module__, VllmConfig.__qualname__)
    assert BACKEND.config_section == "vllm_cfg"
    assert BACKEND.settings_check == f"{check_settings.__module__}:{check_settings.__qualname__}"


def test_the_keys_that_users_know_are_accepted() -> None:
    section = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "expert_parallel_size": 1,
        "gpu_memory_utilization": 0.6,
        "max_model_len": 512,
        "skip_tokenizer_init": True,
        "async_engine": True,
        "load_format": "dummy",
        "precision": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "enforce_eager": True,
        "expose_http_server": True,
        "http_server_serving_chat_kwargs": {"enable_auto_tools": True},
        "tool_parser_plugin": "parser.py",
        "use_deep_gemm": True,
        "num_first_layers_in_bf16": 1,
        "num_last_layers_in_bf16": 2,
        "quantization_ignored_layer_kws": ["router"],
        "pow2_weight_scaling_factors": True,
        "pow2_activation_scaling_factors": False,
        "enable_vllm_metrics_logger": True,
        "vllm_metrics_logger_interval": 1.0,
        "hf_overrides": {"rope_scaling": None},
    }
    config = VllmConfig.model_validate(section)
    assert set(section) == set(VllmConfig.model_fields)
    assert config.model_dump(mode="json") == section
    assert config.num_ranks == 2


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"tensor_paralel_size": 2}, "tensor_paralel_size"),
        ({"tensor_parallel_size": 0}, "greater than or equal to 1"),
        ({"gpu_memory_utilization": 1.5}, "less than or equal to 1"),
        ({"gpu_memory_utilization": 0.0}, "greater than 0"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"precision": "int4"}, "precision"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 needs async_engine: true"),
        ({"expose_http_server": True}, "needs async_engine: true"),
        ({"tensor_parallel_size": 4, "expert_parallel_size": 6}, "multiple of tensor_parallel_size, got 6 and 4"),
        ({"use_deep_gemm": True}, "use_deep_gemm acts only with precision: fp8, got precision: auto"),
        ({"num_last_layers_in_bf16": 1, "precision": "bfloat16"}, "num_last_layers_in_bf16 acts only"),
    ],
)
def test_a_wrong_section_is_refused_by_name(section: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        VllmConfig.model_validate(section)


@given(tensor=st.integers(1, 64), expert=st.integers(1, 256))
def test_expert_parallel_is_one_or_a_multiple_of_tensor_parallel(tensor: int, expert: int) -> None:
    section = {"tensor_parallel_size": tensor, "expert_parallel_size": expert}
    if expert == 1 or expert % tensor == 0:
        assert VllmConfig.model_validate(section).expert_parallel_size == expert
    else:
        with pytest.raises(ValidationError):
            VllmConfig.model_validate(section)
