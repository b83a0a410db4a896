# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl_core.errors import ModelError
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.checkpoint_names import CheckpointNames, live_tensors, wire_tensors
from nemo_rl_core.workers.model_sink import ModelSink
from nemo_rl_core.workers.models import check_model, random_model
from tests.core.workers.tiny import MODEL

_DENSE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}

#: Families whose models are built as their checkpoints are written, and those that fuse or rename something.
FAMILIES = {
    "qwen3": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "phi3": {},
    "gpt_neox": {},
    "qwen3_moe": {**_EXPERTS, "head_dim": 32},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_next": {**_EXPERTS, "head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "jamba": {"num_experts": 2},
    "granitemoe": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 32},
    "deepseek_v3": {**_DEEPSEEK, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "glm4_moe": {**_DEEPSEEK, "head_dim": 32},
}


def tiny(family):
    config = AutoConfig.for_model(family, **{**_DENSE, **FAMILIES[family]})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_travels_is_what_transformers_would_write_into_a_checkpoint(family, tmp_path):
    """R48, R49: Names, shapes and values; an engine's loader reads checkpoints, and fused experts are in none."""
    model = tiny(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    travels = dict(wire_tensors(model))
    assert travels.keys() == saved.keys()
    assert all(torch.equal(travels[name], saved[name]) for name in saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_takes_in_what_another_of_its_family_has_sent(family):
    sent, live = tiny(family), tiny(family)
    with torch.no_grad():
        for parameter in sent.parameters():
            parameter.add_(torch.randn(parameter.shape))
    sink = ModelSink(live)
    tensors = [(name, tensor.clone()) for name, tensor in wire_tensors(sent)]
    assert [spec.name for spec in sink.manifest().specs] == [name for name, _ in tensors]
    sink.load(tensors)
    for (name, expected), (_, found) in zip(live_tensors(sent), live_tensors(live), strict=True):
        assert torch.equal(expected, found), name
    for (name, expected), (_, found) in zip(tensors, sink.live_tensors(), strict=True):
        assert torch.equal(expected, found), name


def test_each_expert_travels_on_its_own():
    parts = dict(
        CheckpointNames(tiny("qwen3_moe")).parts("model.layers.1.mlp.experts.down_proj", torch.zeros(4, 64, 32))
    )
    assert list(parts) == [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(4)]
    assert {tuple(tensor.shape) for tensor in parts.values()} == {(64, 32)}


def test_a_family_whose_checkpoints_fuse_what_the_model_keeps_apart_is_refused_before_any_worker_starts():
    """Its projections are gathered one after another, and a checkpoint has them in one tensor."""
    settings = ModelSettings(hf_config={"model_type": "hrm_text"}, max_total_sequence_length=16)
    with pytest.raises(ModelError, match=r"HrmText.* cannot be trained yet: .*gqkv_proj"):
        check_model(settings, tokenizer_size=10)


def test_tied_weights_travel_once_and_rotary_tables_not_at_all():
    tied = random_model(ModelSettings(hf_config=MODEL, max_total_sequence_length=16), torch.float32)
    names = [name for name, _ in wire_tensors(tied)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert not any("inv_freq" in name for name in names)
    untied = random_model(
        ModelSettings(hf_config=MODEL | {"tie_word_embeddings": False}, max_total_sequence_length=16), torch.float32
    )
    assert "lm_head.weight" in [name for name, _ in wire_tensors(untied)]


def test_what_travels_is_given_one_by_one_and_afresh_each_time():
    model = random_model(ModelSettings(hf_config=MODEL, max_total_sequence_length=16), torch.float32)
    assert isinstance(wire_tensors(model), Iterator)
    assert len(list(wire_tensors(model))) == len(list(wire_tensors(model)))
