# SPDX-License-Identifier: Apache-2.0
"""Loading: valid configs round trip, and every problem is named with its key."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_rl_core.config.load import config_from_mapping, dump_yaml, load_config
from nemo_rl_core.config.overrides import apply_overrides
from nemo_rl_core.config.reference import schema_keys
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.config.unsupported import UNSUPPORTED
from nemo_rl_core.config.yaml_io import deep_merge, load_yaml
from nemo_rl_core.errors import ConfigError
from tests.strategies import run_config_mappings, yaml_values

SMALL = """
policy:
  model_name: /models/a
  train_global_batch_size: 32
  optimizer: {kwargs: {lr: 5e-6}}
  generation:
    backend: torch
    colocated: {resources: {gpus_per_node: 1}}
grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 4}
data: {task: addition}
cluster: {gpus_per_node: 3}
"""


def small(*overrides: str) -> RunConfig:
    """The small config with overrides."""
    mapping, problems = apply_overrides(load_yaml(SMALL, "small"), overrides)
    assert not problems
    return config_from_mapping(mapping, "small")


def problems_of(*overrides: str) -> str:
    """The text of the error that these overrides bring about."""
    with pytest.raises(ConfigError) as caught:
        small(*overrides)
    return str(caught.value)


def test_derived_sizes_follow_from_the_keys() -> None:
    config = small()
    assert config.train_world_size == 2
    assert config.generation_world_size == 1
    assert config.rollout_batch_size == 64
    assert config.optimizer_steps_per_rollout == 2
    assert config.train_batch_size_per_worker == 16
    assert config.needs_reference_model
    assert config.policy.tokenizer_name == "/models/a"
    assert config.policy.optimizer.kwargs == {"lr": 5e-6}


def test_several_nodes_are_divided_by_whole_nodes() -> None:
    nodes = ("cluster.num_nodes=4", "cluster.gpus_per_node=2", "policy.train_global_batch_size=48")
    split = "policy.generation.colocated.resources={num_nodes: 1, gpus_per_node: null}"
    config = small(*nodes, split, "grpo.num_prompts_per_step=12")
    assert (config.placement.train_nodes, config.placement.train_slots_per_node) == (3, 2)
    assert (config.train_world_size, config.generation_world_size) == (6, 2)


@given(mapping=run_config_mappings())
def test_a_valid_config_loads_and_its_dump_loads_equal(mapping: dict[str, Any]) -> None:
    config = config_from_mapping(mapping)
    assert config_from_mapping(load_yaml(dump_yaml(config), "dump")) == config
    assert config.train_batch_size_per_worker * config.train_world_size == config.policy.train_global_batch_size
    assert config.optimizer_steps_per_rollout * config.policy.train_global_batch_size == config.rollout_batch_size
    slots = config.cluster.num_nodes * config.cluster.gpus_per_node
    assert config.train_world_size + config.generation_world_size == slots
    assert min(config.train_world_size, config.generation_world_size) >= 1


def test_a_file_with_inheritance_and_overrides_round_trips(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(SMALL)
    (tmp_path / "run.yaml").write_text("defaults: base.yaml\ngrpo: {seed: 7}\nrun_dir: results/x\n")
    config = load_config(tmp_path / "run.yaml", ["loss_fn.ratio_clip_c=3", "policy.optimizer.kwargs.lr=1e-3"])
    assert config.grpo.seed == 7
    assert config.grpo.num_prompts_per_step == 16
    assert config.loss_fn.ratio_clip_c == 3.0
    assert config.policy.optimizer.kwargs == {"lr": 1e-3}
    (tmp_path / "dump.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "dump.yaml") == config


def test_all_problems_are_listed_at_once_each_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SMALL)
    overrides = [
        "policy.train_micro_batch_size='4'",
        "policy.generation.top_p=0.9",
        "policy.generation.temprature=1",
        "grpo.num_generations_per_prompt=1",
        "loss_fn=null",
        "data={task: null, tsak: 3}",
        "policy.megatron_cfg.enabled=true",
        "refit.silence_timeout_s=1e9",
        "nonsense",
        "what=3",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml", overrides)
    text = str(caught.value)
    assert "run.yaml has 11 problems" in text
    for key in (
        "policy.train_micro_batch_size",
        "policy.generation.top_p",
        "policy.generation.temprature",
        "grpo.num_generations_per_prompt",
        "loss_fn",
        "data.task",
        "data.tsak",
        "policy.megatron_cfg",
        "refit.silence_timeout_s",
        "override 'nonsense'",
        "what",
    ):
        assert f". {key}:" in text


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("grpo.seed='1'", 'must be an integer, got "1"; write it without quotes'),
        ("grpo.seed=1e3", "must be an integer, got 1000.0; write 1000"),
        ("grpo.seed=true", "must be an integer, got true"),
        ("grpo.seed=null", "must be an integer, got null"),
        ("grpo.seed=-1", "must be at least 0, got -1"),
        ("loss_fn.ratio_clip_c=1", "must be greater than 1, got 1"),
        ("loss_fn.ratio_clip_c=x", 'must be a number, or null, got "x"'),
        ("loss_fn.ratio_clip_min=.nan", "loss_fn.ratio_clip_min"),
        ("refit.transfer_timeout_s=.inf", "must be finite"),
        ("logger.tensorboard=yes", 'must be true or false, got "yes"; write true'),
        ("logger.tensorboard=1", "must be true or false, got 1"),
        ("policy.precision=bf16", "must be 'float32' or 'bfloat16', got \"bf16\""),
        ("data.task=3", "must be a string, got 3; put it in quotes"),
        ("data.task=''", "must not be empty"),
        ("policy.generation.stop_token_ids=3", "must be a list, or null, got 3; write [3]"),
        ("policy.generation.stop_token_ids=[1, a]", "policy.generation.stop_token_ids[1]: must be an integer"),
        ("policy.scheduler={}", "policy.scheduler.name: is required"),
        ("policy.tokenizer=null", "policy.tokenizer: must be a mapping, got null"),
        ("policy.generation.backend=null", "policy.generation.backend: must be a string, got null"),
        ("env.py_executables={fsdp: 3}", "env.py_executables.fsdp: must be a string"),
        ("run_dir=3", "run_dir: must be a string, or null, got 3; put it in quotes"),
        ("policy.tokenizer.name=${policy.model_name}", "must not hold ${...}"),
    ],
)
def test_a_wrong_type_or_range_says_key_rule_value_and_way_out(override: str, says: str) -> None:
    text = problems_of(override)
    assert says in text
    assert override.partition("=")[0] in text


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("policy.dtensor_config.enabled=true", "policy.dtensor_cfg"),
        ("grpo.val_priod=3", "grpo.val_period"),
        ("policy.temperature=1", "policy.generation.temperature"),
        ("seed=3", "grpo.seed"),
        ("polcy.model_name=x", "policy"),
        ("policy.generation.maxnew_tokens=3", "policy.generation.max_new_tokens"),
        ("policy.generation.colocated.resources.gpu_per_node=3", "policy.generation.colocated.resources.gpus_per_node"),
    ],
)
def test_an_unknown_key_names_the_nearest_that_exists(override: str, near: str) -> None:
    """U62: `dtensor_config` for `dtensor_cfg` is an error with the right name in it."""
    text = problems_of(override)
    assert "unknown key" in text
    assert f"did you mean {near}?" in text


def test_a_key_like_no_other_lists_the_keys_of_its_section() -> None:
    text = problems_of("logger.zzz=1")
    assert "logger.zzz: unknown key, got 1; the keys there are logger.tensorboard" in text


def test_missing_sections_are_named_down_to_the_required_key() -> None:
    """U57: what is missing is said in the words of its own section."""
    with pytest.raises(ConfigError) as caught:
        config_from_mapping({})
    text = str(caught.value)
    assert "data.task: is required" in text
    assert "policy.model_name: one of it and policy.hf_config must be set" in text
    assert "policy.generation: is required" in text


def test_the_sections_of_other_backends_are_left_alone() -> None:
    config = small("policy.generation.vllm_cfg={tensor_parallel_size: many}", "policy.generation.torch_cfg=null")
    assert config.generation.backend_section("vllm_cfg") == {"tensor_parallel_size": "many"}
    assert config.generation.backend_section("torch_cfg") == {}
    assert config.generation.backend_section("absent_cfg") == {}
    assert "must be a mapping, or null" in problems_of("policy.generation.vllm_cfg=3")


PATHS = [tuple(info.key.split(".")) for info in schema_keys()]
FOREIGN = [tuple(entry.key.split(".")) for entry in UNSUPPORTED]


@given(mapping=run_config_mappings(), changes=st.lists(st.tuples(st.sampled_from(PATHS + FOREIGN), yaml_values())))
def test_whatever_stands_at_a_key_it_loads_or_is_a_config_error(mapping: dict, changes: list) -> None:
    for path, value in changes:
        for part in reversed(path):
            value = {part: value}
        mapping = deep_merge(mapping, value)
    try:
        config = config_from_mapping(mapping)
    except ConfigError:
        return
    assert config_from_mapping(load_yaml(dump_yaml(config), "dump")) == config


def test_a_config_crosses_a_process_boundary() -> None:
    config = small("policy.generation.vllm_cfg={a: 1}")
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        small().grpo.seed = 3  # type: ignore[misc]


def test_a_config_that_is_built_directly_obeys_the_same_rules() -> None:
    plain = small().model_dump()
    assert RunConfig.model_validate(plain) == small()
    plain["policy"]["generation"]["top_p"] = 0.5
    with pytest.raises(ValidationError, match="top_p: must be 1"):
        RunConfig.model_validate(plain)


def test_loading_has_no_side_effects_and_brings_no_heavy_library(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SMALL)
    code = (
        "import os, sys\nbefore = dict(os.environ)\nfrom nemo_rl_core.config.load import load_config\n"
        "load_config('run.yaml')\nassert dict(os.environ) == before\n"
        "print(sorted({'torch', 'ray', 'numpy', 'transformers', 'vllm', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
