# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_core.errors import ModelError
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.models import (
    LogprobModel,
    build_model,
    check_logprobs,
    check_model,
    load_config,
    random_model,
)
from tests.core.workers.tiny import MODEL, VOCAB

SMALL = {k: v for k, v in MODEL.items() if k not in ("model_type", "head_dim")}
FAMILIES = {
    "qwen3": MODEL,
    "llama, untied": SMALL | {"model_type": "llama", "tie_word_embeddings": False},
    "granite (logits_scaling)": SMALL | {"model_type": "granite", "logits_scaling": 4.0},
    "cohere (logit_scale)": SMALL | {"model_type": "cohere", "logit_scale": 0.25},
    "gemma2 (softcapping)": SMALL | {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 3.0},
    "qwen3_moe": SMALL
    | {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


def ids_of(rows=3, width=9):
    return torch.randint(0, VOCAB, (rows, width), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_logprobs_are_those_of_the_models_own_forward_pass(family, chunk):
    model = build_model(ModelSettings(hf_config=FAMILIES[family], max_total_sequence_length=16), torch.float32).eval()
    wrapped = LogprobModel(model, chunk=chunk, temperature=0.7)
    check_logprobs(wrapped)
    ids = ids_of()
    logits = model(input_ids=ids).logits[:, :-1].float() / 0.7
    expected = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    found = wrapped(ids)
    assert torch.equal(found[:, 0], torch.zeros(3))
    assert torch.allclose(found[:, 1:], expected, atol=1e-5)


def test_gradients_are_those_of_the_whole_logits():
    settings = ModelSettings(hf_config=MODEL, max_total_sequence_length=16)
    model = build_model(settings, torch.float32)
    ids = ids_of()
    LogprobModel(model, chunk=5, temperature=1.0)(ids).sum().backward()
    chunked = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, chunked[name], atol=1e-4), name


WEIGHT_T = (MODEL["hidden_size"], VOCAB)


class LargestVocabTensor(TorchDispatchMode):
    """Records the most elements of any result whose last axis is V, but for the head's own weight transposed."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.ndim
                and tensor.shape[-1] == VOCAB
                and tensor.shape != WEIGHT_T
            ):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_no_tensor_with_a_vocabulary_axis_is_larger_than_a_chunk():
    model = build_model(ModelSettings(hf_config=MODEL, max_total_sequence_length=64), torch.float32)
    with LargestVocabTensor() as seen:
        LogprobModel(model, chunk=6, temperature=1.0)(ids_of(8, 40)).sum().backward()
    assert 0 < seen.largest <= 6 * VOCAB
    with LargestVocabTensor() as whole:
        model(input_ids=ids_of(8, 40)).logits.log_softmax(-1)
    assert whole.largest == 8 * 40 * VOCAB


def test_a_family_that_scales_logits_in_an_unknown_way_is_refused():
    model = build_model(ModelSettings(hf_config=MODEL, max_total_sequence_length=16), torch.float32)
    plain = model.forward
    model.forward = lambda **kwargs: _scaled(plain(**kwargs))
    with pytest.raises(ModelError, match="not supported yet"):
        check_logprobs(LogprobModel(model, chunk=8, temperature=1.0))


def _scaled(output):
    output.logits = output.logits * 2
    return output


def test_random_weights_follow_the_seed_and_leave_the_global_stream_alone():
    settings = ModelSettings(hf_config=MODEL, max_total_sequence_length=16, seed=5)
    state = torch.random.get_rng_state()
    first, again = random_model(settings, torch.float32), random_model(settings, torch.float32)
    other = random_model(settings, torch.float32, seed_offset=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.model.embed_tokens.weight, again.model.embed_tokens.weight)
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_a_folder_round_trips_and_its_faults_are_named(tmp_path):
    settings = ModelSettings(hf_config=MODEL, max_total_sequence_length=16)
    model = random_model(settings, torch.float32)
    model.save_pretrained(tmp_path / "good")
    from_folder = ModelSettings(folder=str(tmp_path / "good"), max_total_sequence_length=16)
    loaded = build_model(from_folder, torch.float32)
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name

    model.config.save_pretrained(tmp_path / "no_weights")
    (tmp_path / "empty").mkdir()
    state = dict(model.state_dict())
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path / "partial", state_dict=state)
    faults = {
        "absent": "does not exist",
        "no_weights": "no weights could be loaded",
        "empty": "no HF config",
        "partial": "layers.1.mlp.up_proj",
    }
    for folder, message in faults.items():
        with pytest.raises(ModelError, match=message):
            build_model(ModelSettings(folder=str(tmp_path / folder), max_total_sequence_length=16), torch.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ModelSettings(), "exactly one"),
        (ModelSettings(folder="x", hf_config=MODEL), "exactly one"),
        (ModelSettings(hf_config={"model_type": "no_such"}), "model_type that transformers knows"),
        (ModelSettings(hf_config=MODEL, max_total_sequence_length=65), "context has 64"),
    ],
)
def test_impossible_models_are_refused(settings, message):
    with pytest.raises(ModelError, match=message):
        load_config(settings)


def test_kv_heads_that_do_not_divide_the_heads_are_refused_before_any_worker_starts():
    """U6: transformers builds such a model; its first forward pass would be the first to fail."""
    check_model(ModelSettings(hf_config=MODEL, max_total_sequence_length=16), VOCAB)
    given = ModelSettings(hf_config=MODEL, overrides={"num_key_value_heads": 3}, max_total_sequence_length=16)
    with pytest.raises(ModelError, match="multiple of num_key_value_heads, got 4 and 3"):
        check_model(given, VOCAB)


def test_a_policy_needs_a_positive_temperature():
    model = random_model(ModelSettings(hf_config=MODEL, max_total_sequence_length=16), torch.float32)
    with pytest.raises(ModelError, match=r"positive temperature, got 0\.0"):
        LogprobModel(model, chunk=4, temperature=0.0)
