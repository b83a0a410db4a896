# SPDX-License-Identifier: Apache-2.0
"""GRPO in one process, without Ray, on a model that takes milliseconds a step."""

import contextlib

from nemo_rl_core.algorithms.assemble import assemble, generation_settings, policy_settings, prepare
from nemo_rl_core.config.load import config_from_mapping
from nemo_rl_core.policy.local import LocalWorkerGroup
from nemo_rl_core.rollout.largest_digit import LargestDigit
from nemo_rl_core.workers.dtensor import DTensorPolicyWorker
from nemo_rl_core.workers.torch_generation import TorchGenerationWorker


class HighDigits(LargestDigit):
    """A dense reward, so that every step has a gradient: the mean of the sampled digits."""

    name = "high_digits"

    def reward(self, prompt, completion):
        digits = [int(c) for c in completion if c.isdigit()]
        return sum(digits) / 30

    def is_correct(self, prompt, completion):
        return completion.startswith("9")


def small_config(**changes):
    """A config of a tiny run; dotted keys replace values."""
    config = {
        "policy": {
            "hf_config": {
                "model_type": "qwen3",
                "vocab_size": 14,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 16,
                "tie_word_embeddings": True,
            },
            "tokenizer": {"characters": "0123456789?"},
            "precision": "float32",
            "max_total_sequence_length": 12,
            "train_global_batch_size": 32,
            "train_micro_batch_size": 16,
            "logprob_batch_size": 32,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.003, "weight_decay": 0.0}},
            "generation": {
                "backend": "torch",
                "max_new_tokens": 3,
                "colocated": {"enabled": False, "resources": {"gpus_per_node": 1}},
            },
        },
        "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": 3, "val_period": 2},
        "loss_fn": {"reference_policy_kl_penalty": 0.01},
        "data": {"task": f"{__name__}:HighDigits"},
        "cluster": {"num_nodes": 1, "gpus_per_node": 2, "device": "cpu"},
        "refit": {"digest": True},
    }
    for key, value in changes.items():
        section = config
        *path, last = key.split("__")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return config_from_mapping(config)


@contextlib.contextmanager
def local_run(config, num_replicas=1):
    """Yield the loop and the list that its steps are logged to."""
    steps = []
    policy = LocalWorkerGroup([DTensorPolicyWorker(policy_settings(config))], name_prefix="policy")
    workers = [
        TorchGenerationWorker(generation_settings(config, {}), rank=r, world_size=num_replicas)
        for r in range(num_replicas)
    ]
    generation = LocalWorkerGroup(workers, name_prefix="generation")
    try:
        yield (
            assemble(config, prepare(config), policy, generation, lambda step, m: steps.append((step, dict(m)))),
            steps,
        )
    finally:
        policy.shutdown()
        generation.shutdown()
