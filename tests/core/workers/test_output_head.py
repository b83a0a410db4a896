# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from nemo_rl_core.errors import ModelError
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.models import check_model, random_model
from nemo_rl_core.workers.output_head import compute_head_in_float32
from tests.core.workers.tiny import MODEL, VOCAB

#: One value that bfloat16 has and one that it rounds: 16 + 1/16.
LARGE = 16.0


def model_of(**changes):
    settings = ModelSettings(hf_config=MODEL | changes, max_total_sequence_length=16, precision="bfloat16")
    return random_model(settings, torch.bfloat16)


def test_logits_come_in_float32_where_bfloat16_would_round_them():
    model = model_of(tie_word_embeddings=False)
    head = model.get_output_embeddings()
    hidden = torch.zeros(1, 1, head.in_features, dtype=torch.bfloat16)
    hidden[..., 0], hidden[..., 1] = LARGE, 1 / 16
    with torch.no_grad():
        head.weight.zero_()
        head.weight[:, :2] = 1.0
    assert head(hidden)[0, 0, 0].item() == LARGE
    compute_head_in_float32(model)
    logits = head(hidden)
    assert (logits.dtype, logits.shape) == (torch.float32, (1, 1, VOCAB))
    assert logits[0, 0, 0].item() == LARGE + 1 / 16


@pytest.mark.parametrize("bias", [False, True])
def test_its_gradients_are_those_of_a_float32_head_but_for_rounding(bias):
    torch.manual_seed(0)
    model = model_of(tie_word_embeddings=False)
    model.set_output_embeddings(nn.Linear(32, VOCAB, bias=bias, dtype=torch.bfloat16))
    compute_head_in_float32(model)
    head = model.get_output_embeddings()
    plain = nn.Linear(32, VOCAB, bias=bias)
    plain.load_state_dict({name: tensor.float() for name, tensor in head.state_dict().items()})
    hidden = torch.randn(2, 7, 32, dtype=torch.bfloat16)
    ours, theirs = hidden.clone().requires_grad_(), hidden.float().requires_grad_()
    weights = torch.randn(2, 7, VOCAB)
    (head(ours).log_softmax(-1) * weights).sum().backward()
    (plain(theirs).log_softmax(-1) * weights).sum().backward()
    assert torch.allclose(head(ours), plain(theirs), atol=1e-6)
    for found, expected in [(ours, theirs), *zip(head.parameters(), plain.parameters(), strict=True)]:
        assert found.grad.dtype == torch.bfloat16
        assert torch.allclose(found.grad.float(), expected.grad, rtol=0.02, atol=0.02)


def test_a_model_that_computes_in_float32_has_its_head_as_it_was():
    assert not ModelSettings(precision="float32").float32_head
    assert not ModelSettings(precision="bfloat16", logits_precision="model").float32_head
    assert ModelSettings(precision="bfloat16").float32_head
    model = model_of()
    plain = model(torch.tensor([[3, 4, 5]])).logits
    compute_head_in_float32(model)
    assert torch.allclose(plain.float(), model(torch.tensor([[3, 4, 5]])).logits, atol=0.1)


def test_a_head_that_is_no_linear_layer_is_refused_with_the_way_out():
    model = model_of()
    model.set_output_embeddings(nn.Sequential(nn.Linear(32, VOCAB)))
    with pytest.raises(ModelError, match=r"is a Sequential.*policy\.logits_precision=model"):
        compute_head_in_float32(model)


@pytest.mark.parametrize("logits_precision", ["float32", "model"])
def test_either_precision_of_the_logits_passes_the_check_before_any_worker_starts(logits_precision):
    settings = ModelSettings(
        hf_config=MODEL, max_total_sequence_length=16, precision="bfloat16", logits_precision=logits_precision
    )
    check_model(settings, VOCAB)
