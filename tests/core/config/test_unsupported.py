# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's keys that are not ours: off is accepted, on is refused by name."""

import pytest

from nemo_rl_core.config.reference import schema_keys
from nemo_rl_core.config.unsupported import UNSUPPORTED
from tests.core.config.test_load import problems_of, small

OFF_IN_A_NEMO_RL_FILE = [
    "policy.dtensor_cfg={_v2: false, cpu_offload: false, sequence_parallel: false, tensor_parallel_size: 1}",
    "policy.dtensor_cfg={context_parallel_size: 1, custom_parallel_plan: null, lora_cfg: {enabled: false, dim: 8}}",
    "policy.dtensor_cfg={automodel_kwargs: {}, env_vars: {}, clear_cache_every_n_steps: null}",
    "policy.megatron_cfg={enabled: false, converter_type: x, optimizer: {lr: 1e-3}}",
    "policy.sequence_packing={enabled: false, train_mb_tokens: 3}",
    "policy.reward_model_cfg={enabled: false, reward_model_type: bradley_terry}",
    "policy.generation.vllm_kwargs={}",
    "policy.make_sequence_length_divisible_by=1",
    "grpo={async_grpo: {enabled: false, max_trajectory_age_steps: 1}, use_dynamic_sampling: false}",
    "grpo={use_dynamic_sampling: false, dynamic_sampling_max_gen_batches: 10, batch_multiplier: 1, overlong_filtering: false}",
    "grpo={reward_shaping: {enabled: false, overlong_buffer_length: 3}, reward_scaling: {enabled: false}}",
    "grpo={max_rollout_turns: 1, seq_logprob_error_threshold: null}",
    "loss_fn={use_on_policy_kl_approximation: false, sequence_level_importance_ratios: false}",
    "checkpointing={enabled: false, checkpoint_dir: x, save_period: 10}",
    "dpo=null",
    "sft={}",
    "logger={wandb_enabled: false, wandb: {project: a}, monitor_gpus: false, gpu_monitoring: {flush_interval: 1}}",
]


@pytest.mark.parametrize("override", OFF_IN_A_NEMO_RL_FILE)
def test_a_value_that_means_off_is_accepted_and_dropped(override: str) -> None:
    assert small(override) == small()


def test_all_of_them_together_leave_the_config_as_it_was() -> None:
    assert small(*OFF_IN_A_NEMO_RL_FILE) == small()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.tensor_parallel_size"),
        ("policy.dtensor_cfg.tensor_parallel_size='1'", "policy.dtensor_cfg.tensor_parallel_size"),
        ("policy.dtensor_cfg.tensor_parallel_size=true", "policy.dtensor_cfg.tensor_parallel_size"),
        ("policy.dtensor_cfg.context_parallel_size=4", "policy.dtensor_cfg.context_parallel_size"),
        ("policy.dtensor_cfg.sequence_parallel=true", "policy.dtensor_cfg.sequence_parallel"),
        ("policy.dtensor_cfg.lora_cfg={dim: 8}", "policy.dtensor_cfg.lora_cfg"),
        ("policy.dtensor_cfg._v2=true", "policy.dtensor_cfg._v2"),
        ("policy.dtensor_cfg.custom_parallel_plan=my.plan", "policy.dtensor_cfg.custom_parallel_plan"),
        ("policy.dtensor_cfg.cpu_offload=true", "policy.dtensor_cfg.cpu_offload"),
        ("policy.dtensor_cfg.automodel_kwargs={a: 1}", "policy.dtensor_cfg.automodel_kwargs"),
        ("policy.dtensor_cfg.env_vars={TOKEN: x}", "policy.dtensor_cfg.env_vars"),
        ("policy.megatron_cfg.enabled=true", "policy.megatron_cfg"),
        ("policy.megatron_cfg={optimizer: {}}", "policy.megatron_cfg"),
        ("policy.sequence_packing.enabled=true", "policy.sequence_packing"),
        ("policy.reward_model_cfg.enabled=true", "policy.reward_model_cfg"),
        ("policy.generation.vllm_cfg.async_engine=true", "policy.generation.vllm_cfg.async_engine"),
        ("policy.generation.vllm_kwargs={a: 1}", "policy.generation.vllm_kwargs"),
        ("grpo.async_grpo.enabled=true", "grpo.async_grpo"),
        ("grpo.use_dynamic_sampling=true", "grpo.use_dynamic_sampling"),
        ("grpo.dynamic_sampling_max_gen_batches=3", "grpo.dynamic_sampling_max_gen_batches"),
        ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping"),
        ("grpo.overlong_filtering=true", "grpo.overlong_filtering"),
        ("grpo.max_rollout_turns=2", "grpo.max_rollout_turns"),
        ("grpo.batch_multiplier=1.5", "grpo.batch_multiplier"),
        ("checkpointing.enabled=true", "checkpointing"),
        ("checkpointing.save_period=10", "checkpointing"),
        ("dpo={reference_policy_kl_penalty: 0.05}", "dpo"),
        ("sft.max_num_steps=3", "sft"),
        ("logger.wandb_enabled=true", "logger.wandb_enabled"),
        ("logger.wandb={project: a}", "logger.wandb"),
        ("env.math.num_workers=8", "env.math"),
    ],
)
def test_a_value_that_asks_for_it_is_refused_by_name_with_a_way_out(override: str, key: str) -> None:
    text = problems_of(override)
    assert f"{key}: NeMo-RL's key is not supported here" in text
    assert "unknown key" not in text
    assert text.rpartition("; ")[2]


def test_an_off_switch_of_the_engine_is_taken_out_of_the_section_that_the_backend_sees() -> None:
    config = small("policy.generation.vllm_cfg={async_engine: false, tensor_parallel_size: 2}")
    assert config.generation.backend_section("vllm_cfg") == {"tensor_parallel_size": 2}


def test_both_train_backends_at_once_is_an_error_about_the_one_that_is_not_there() -> None:
    """U62: with both enabled, neither wins silently."""
    text = problems_of("policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=true")
    assert "policy.megatron_cfg: NeMo-RL's key is not supported here" in text
    assert "use policy.dtensor_cfg" in text


def test_the_table_names_each_key_once_and_none_of_ours() -> None:
    keys = [entry.key for entry in UNSUPPORTED]
    assert len(set(keys)) == len(keys)
    assert not set(keys) & {info.key for info in schema_keys()}
    assert all(entry.way_out for entry in UNSUPPORTED)
