# SPDX-License-Identifier: Apache-2.0
"""Rules between keys: each trips, and says which keys it is about."""

import pytest

from tests.core.config.test_load import problems_of, small

RESOURCES = "policy.generation.colocated.resources"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["policy.model_name=null"], "policy.model_name: one of it and policy.hf_config must be set"),
        (["policy.hf_config={model_type: qwen3}"], "exactly one of policy.model_name and policy.hf_config"),
        (
            ["policy.model_name=null", "policy.hf_config={a: 1}", "policy.tokenizer.name=x"],
            "policy.hf_config.model_type",
        ),
        (["policy.model_name=null", "policy.hf_config={model_type: qwen3}"], "policy.tokenizer.name: is required"),
        (["policy.tokenizer={name: x, characters: abc}"], "policy.tokenizer.characters: excludes"),
        (
            ["policy.tokenizer.characters=aba"],
            "policy.tokenizer.characters: must hold at least one character, and each once",
        ),
        (["policy.tokenizer.characters=''"], "policy.tokenizer.characters: must hold at least one"),
        (["policy.optimizer.kwargs.lr='5e-6'"], "policy.optimizer.kwargs.lr: must be a number, not a string"),
        (["policy.optimizer.kwargs.betas=['0.9', 0.99]"], "policy.optimizer.kwargs.betas[0]: must be a number"),
        (["policy.scheduler={name: a.B, kwargs: {x: '3'}}"], "policy.scheduler.kwargs.x: must be a number"),
        (["policy.dtensor_cfg.enabled=false"], "policy.dtensor_cfg.enabled: must be true"),
        (["policy.dynamic_batching.enabled=true"], "policy.dynamic_batching.train_mb_tokens: must hold one sequence"),
        (
            ["policy.dynamic_batching={enabled: true, train_mb_tokens: 512, logprob_mb_tokens: 511}"],
            "policy.dynamic_batching.logprob_mb_tokens: must hold one sequence of policy.max_total_sequence_length = 512",
        ),
        (["policy.generation=null"], "policy.generation: is required: GRPO samples completions"),
        (["policy.generation.top_p=0.99"], "cannot reproduce a cut distribution"),
        (["policy.generation.top_k=1"], "cannot reproduce a cut distribution"),
        (["policy.precision=bfloat16", "policy.generation.parity=strict"], "policy.precision: must be float32 with"),
        (["policy.generation.parity=tight"], "policy.generation.parity"),
        (["policy.generation.max_new_tokens=512"], "must leave room for a prompt"),
        (["policy.generation.temperature=0"], "policy.generation.temperature: must be greater than 0"),
        (["policy.generation.colocated.enabled=true"], "policy.generation.colocated.enabled: must be false"),
        ([f"{RESOURCES}.gpus_per_node=null"], f"{RESOURCES}.gpus_per_node: with one node it must leave at least one"),
        ([f"{RESOURCES}.gpus_per_node=3"], "set 1 to 2"),
        (["cluster.gpus_per_node=1"], "raise cluster.gpus_per_node"),
        ([f"{RESOURCES}.num_nodes=2"], f"{RESOURCES}.num_nodes: with one node"),
        (["cluster.num_nodes=3"], f"{RESOURCES}.num_nodes: it must leave at least one of the 3 nodes"),
        (["cluster.num_nodes=3", f"{RESOURCES}.num_nodes=3"], "set 1 to 2"),
        (["cluster.num_nodes=3", f"{RESOURCES}.num_nodes=1"], f"{RESOURCES}.gpus_per_node: with several nodes"),
        (["policy.train_global_batch_size=60"], "must divide the rollout of grpo.num_prompts_per_step"),
        (["policy.train_global_batch_size=128"], "16 x 4 = 64 sequences, got 128"),
        (["cluster.gpus_per_node=4"], "must be a multiple of the number of train workers, 3"),
        (["policy.train_micro_batch_size=5"], "must divide a train worker's share of the batch, 16"),
        (["grpo.max_val_samples=0"], "grpo.max_val_samples: must be at least 1 to validate"),
        (["loss_fn.truncated_importance_sampling_ratio=2"], "use_importance_sampling_correction, which is off"),
        (["refit.silence_timeout_s=700"], "must not exceed refit.transfer_timeout_s"),
    ],
)
def test_an_impossible_combination_is_refused(overrides: list[str], says: str) -> None:
    assert says in problems_of(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.model_name=null", "policy.hf_config={model_type: qwen3}", "policy.tokenizer.characters=0123+="],
        ["policy.tokenizer.characters=abc"],
        ["policy.optimizer.name=my.Optimizer", "policy.optimizer.kwargs={mode: fast}"],
        [
            "policy.dynamic_batching={enabled: true, train_mb_tokens: 512, logprob_mb_tokens: 512}",
            "policy.train_micro_batch_size=5",
        ],
        ["policy.generation.top_p=1", "policy.generation.top_k=null"],
        ["policy.generation.max_new_tokens=511"],
        [f"{RESOURCES}.num_nodes=1"],
        [f"{RESOURCES}.gpus_per_node=2"],
        ["cluster.num_nodes=3", f"{RESOURCES}={{num_nodes: 1, gpus_per_node: 2}}", "cluster.gpus_per_node=2"],
        ["policy.train_global_batch_size=64"],
        ["grpo.max_val_samples=0", "grpo.val_period=0", "grpo.val_at_start=false"],
        ["loss_fn={use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 2}"],
        ["refit.silence_timeout_s=120"],
    ],
)
def test_the_nearest_possible_combination_is_accepted(overrides: list[str]) -> None:
    small(*overrides)


def test_a_broken_key_does_not_bring_follow_up_problems_about_its_default() -> None:
    # The default of 512 would not divide this rollout, but the user never wrote it.
    text = problems_of("policy.train_global_batch_size='32'")
    assert "problems" not in text
    text = problems_of("policy.train_global_batch_size=null", "policy.max_total_sequence_length=''")
    assert "has 2 problems" in text
    # 600 would not fit into the default of 512; it does into what was meant.
    text = problems_of("policy.max_total_sequence_length='1024'", "policy.generation.max_new_tokens=600")
    assert "problems" not in text


def test_strict_parity_computes_in_float32_without_being_told() -> None:
    assert small("policy.generation.parity=strict").policy.precision == "float32"
    assert small("policy.generation.parity=strict", "policy.precision=float32").policy.precision == "float32"
    assert small("policy.generation.parity=default").policy.precision == "bfloat16"
    assert small().generation.parity == "default"
