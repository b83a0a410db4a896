# SPDX-License-Identifier: Apache-2.0
"""Keys that NeMo-RL knows and this project does not have, so that a config from there says what to change.

A value that means "off" is accepted and dropped; any other is refused, by name and with the way out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.problems import Problem

__all__ = ["UNSUPPORTED", "UnsupportedKey", "split_unsupported"]


@dataclass(frozen=True, kw_only=True)
class UnsupportedKey:
    """One such key.

    Attributes:
        key: Dotted key.
        way_out: What to do in its place.
        off: Values that ask for nothing, beside null, false, an empty mapping or list, and ``enabled: false``.
        switch: Dotted key of a switch; while it stands there as false or null, any value asks for nothing.
    """

    key: str
    way_out: str
    off: tuple[Any, ...] = ()
    switch: str | None = None

    def asks_for_nothing(self, value: Any, config: Mapping[str, Any]) -> bool:
        """Tell whether a value of this key leaves the feature off."""
        if value is None or value is False:
            return True
        if isinstance(value, Mapping | list) and not value:
            return True
        if isinstance(value, Mapping) and value.get("enabled") is False:
            return True
        if self.switch is not None:
            found, switch = _find(config, self.switch.split("."))
            return found and (switch is None or switch is False)
        return any(type(value) is type(off) and value == off for off in self.off)


_ONE_WORKER = "the train side is data parallel (FSDP2) only: set 1 or remove it"
_WORKER = "core's FSDP2 worker has no such option: remove it"
_OTHER_ALGORITHM = "the only algorithm is GRPO: remove the section"
_LOGGERS = "metrics go to metrics.jsonl and TensorBoard: remove it, or upload these files"
_TASKS = "name a task under data.task, with its settings in data.task_kwargs"


def _group(prefix: str, names: str, way_out: str, *off: Any, switch: str | None = None) -> tuple[UnsupportedKey, ...]:
    return tuple(
        UnsupportedKey(key=f"{prefix}.{name}" if prefix else name, way_out=way_out, off=off, switch=switch)
        for name in names.split()
    )


#: All of them; a key stands once.
UNSUPPORTED: tuple[UnsupportedKey, ...] = (
    *_group("policy.dtensor_cfg", "tensor_parallel_size context_parallel_size expert_parallel_size", _ONE_WORKER, 1),
    *_group(
        "policy.dtensor_cfg", "sequence_parallel custom_parallel_plan lora_cfg cpu_offload automodel_kwargs", _WORKER
    ),
    *_group("policy.dtensor_cfg", "clear_cache_every_n_steps checkpoint_engine", _WORKER),
    *_group("policy.dtensor_cfg", "_v2", "there is one FSDP2 worker and no second version of it: remove it"),
    *_group("policy.dtensor_cfg", "env_vars", "set variables on the nodes: a config file keeps no environment"),
    *_group("policy", "megatron_cfg", "Megatron is not supported: use policy.dtensor_cfg"),
    *_group("policy", "sequence_packing", "use policy.dynamic_batching, which bounds tokens without packing"),
    *_group("policy", "reward_model_cfg", "rewards come from a task's function: see data.task"),
    *_group("policy", "make_sequence_length_divisible_by", _ONE_WORKER, 1),
    *_group("policy", "offload_optimizer_for_logprob draft", _WORKER),
    *_group("policy", "refit_buffer_size_gb", "use refit.bucket_bytes"),
    *_group("policy.tokenizer", "chat_template_kwargs use_processor", "write them into policy.tokenizer.chat_template"),
    *_group("policy.dynamic_batching", "sequence_length_round", "micro-batches are cut exactly: remove it"),
    *_group("policy.generation", "vllm_kwargs", "engine settings belong to policy.generation.vllm_cfg"),
    *_group("policy.generation.vllm_cfg", "async_engine", "generation calls are synchronous: set false or remove it"),
    *_group(
        "policy.generation.vllm_cfg",
        "http_server_serving_chat_kwargs",
        "no HTTP server is started: remove it",
        switch="policy.generation.vllm_cfg.expose_http_server",
    ),
    *_group("policy.generation.vllm_cfg", "expose_http_server", "no HTTP server is started: set false or remove it"),
    *_group("loss_fn", "use_on_policy_kl_approximation sequence_level_importance_ratios", "remove it"),
    *_group("loss_fn", "force_on_policy_ratio disable_ppo_ratio", "remove it"),
    *_group(
        "loss_fn", "kl_input_clamp_value kl_output_clamp_value", "the KL term is not clamped: remove it or set null"
    ),
    *_group("grpo", "async_grpo", "rollouts and training take turns: set enabled: false or remove it"),
    *_group("grpo", "use_dynamic_sampling", "every group is trained on: set false or remove it"),
    *_group("grpo", "dynamic_sampling_max_gen_batches", "remove it", switch="grpo.use_dynamic_sampling"),
    *_group("grpo", "batch_multiplier", "raise grpo.num_prompts_per_step", 1, 1.0),
    *_group("grpo", "reward_shaping reward_scaling", "shape rewards inside the task's reward function"),
    *_group("grpo", "overlong_filtering", "give cut-off completions no reward in the task's reward function"),
    *_group("grpo", "max_rollout_turns", "rollouts have one turn: set 1 or remove it", 1),
    *_group("grpo", "max_num_epochs", "bound the run by grpo.max_num_steps", 1),
    *_group(
        "grpo", "val_batch_size", "held-out prompts are sent together: remove it; grpo.max_val_samples bounds them"
    ),
    *_group("grpo", "val_at_end", "set grpo.val_period to a divisor of grpo.max_num_steps"),
    *_group("grpo", "seq_logprob_error_threshold", "use grpo.max_token_mult_prob_error and grpo.on_mismatch"),
    *_group("grpo", "skip_reference_policy_logprobs_calculation", "set loss_fn.reference_policy_kl_penalty=0"),
    *_group("grpo", "adv_estimator calculate_advantages_on_gpu", "remove it"),
    *_group("data", "max_input_seq_length prompt_file system_prompt_file dataset_name shuffle num_workers", _TASKS),
    *_group("data", "train validation default val_dataset_name split_validation_size", _TASKS),
    *_group("", "checkpointing", "checkpoints are not written yet: set enabled: false or remove it"),
    *_group("", "dpo sft rm distillation ppo", _OTHER_ALGORITHM),
    *_group("env", "math code code_jaccard reward_model sliding_puzzle_game rag should_use_nemo_gym nemo_gym", _TASKS),
    *_group("logger", "log_dir", "use run_dir at the top level"),
    *_group("logger", "tensorboard_enabled", "use logger.tensorboard"),
    *_group("logger", "wandb_enabled swanlab_enabled mlflow_enabled monitor_gpus", _LOGGERS),
    *_group("logger", "wandb", _LOGGERS, switch="logger.wandb_enabled"),
    *_group("logger", "swanlab", _LOGGERS, switch="logger.swanlab_enabled"),
    *_group("logger", "mlflow", _LOGGERS, switch="logger.mlflow_enabled"),
    *_group("logger", "gpu_monitoring", _LOGGERS, switch="logger.monitor_gpus"),
    *_group("logger", "num_val_samples_to_print", "remove it", 0),
)


def split_unsupported(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Take NeMo-RL's unsupported keys out of a mapping.

    Args:
        config: A config as read; it is not altered.

    Returns:
        The mapping without these keys, and a problem for each that asks for something.
    """
    result = dict(config)
    problems: list[Problem] = []
    for entry in UNSUPPORTED:
        parts = entry.key.split(".")
        found, value = _find(config, parts)
        if not found:
            continue
        result = _without(result, parts)
        if not entry.asks_for_nothing(value, config):
            problems.append(
                Problem(key=entry.key, rule="NeMo-RL's key is not supported here", value=value, way_out=entry.way_out)
            )
    return result, problems


def _find(config: Mapping[str, Any], parts: list[str]) -> tuple[bool, Any]:
    value: Any = config
    for part in parts:
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _without(config: Mapping[str, Any], parts: list[str]) -> dict[str, Any]:
    first, *rest = parts
    if rest:
        return {**config, first: _without(config[first], rest)}
    return {key: value for key, value in config.items() if key != first}
