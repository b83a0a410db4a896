# SPDX-License-Identifier: Apache-2.0
"""A refit that sends FP8 weights: pairs on the wire, one list for sender and engine, the same bits from any sharding."""

import threading
from dataclasses import replace

import pytest
import torch

from nemo_rl_core.errors import ModelError, RefitError
from nemo_rl_core.fp8.blockwise import cast_many, pairs_of
from nemo_rl_core.protocols.settings import Fp8Weights, ModelSettings
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.testing.refit import DictSink
from nemo_rl_core.workers.dtensor import DTensorPolicyWorker
from nemo_rl_core.workers.fp8_weights import matrix_shapes
from nemo_rl_core.workers.settings import PolicySettings
from tests.core.workers.ranks import run_on_ranks
from tests.core.workers.tiny import MODEL

REFIT = RefitSettings(bucket_bytes=20_000, rendezvous_timeout_s=40.0, transfer_timeout_s=40.0, silence_timeout_s=20.0)
#: A width of one block and a part, so that edges count.
WIDE = {**MODEL, "hidden_size": 160, "intermediate_size": 192}
PLAIN = PolicySettings(
    model=ModelSettings(hf_config=WIDE, precision="bfloat16", max_total_sequence_length=32, seed=3),
    collective_timeout_s=30.0,
)
CAST = ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj")


def fp8(*modules: str, **more) -> PolicySettings:
    return replace(PLAIN, fp8_weights=Fp8Weights(cast=modules or CAST, **more))


def refit(worker: DTensorPolicyWorker, rank: int = 0):
    """Send once to a receiver beside rank 0; returns what arrived, what the sender says, and what the receiver says."""
    address = worker.open_refit_listener(1, REFIT, "127.0.0.1")
    sink, received = DictSink.poisoned(worker._source.manifest()), []

    def receive() -> None:
        try:
            received.append(
                RefitReceiver(rank=1, num_receivers=1, settings=REFIT, device_id="other").receive(address, sink)
            )
        except RefitError as error:
            received.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    if rank == 0:
        thread.start()
    try:
        sent = worker.send_weights(1)
    finally:
        if rank == 0:
            thread.join(60)
    return dict(sink.live_tensors()), sent, received


@pytest.fixture
def worker(request):
    made = DTensorPolicyWorker(request.param)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    """What a refit sends where nothing is cast."""
    made = DTensorPolicyWorker(PLAIN)
    tensors, _, _ = refit(made)
    made.shutdown()
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("worker", [fp8(), fp8(power_of_two=True)], ids=["any scale", "powers of two"], indirect=True)
def test_a_cast_weight_travels_with_its_scales_right_after_it_and_the_rest_as_before(worker, plain):
    """Q35: manifest and values by the one list; the digest is that of what was sent."""
    tensors, sent, (received,) = refit(worker)
    names = list(tensors)
    assert [name for name in names if name in plain] == list(plain)
    for module in CAST:
        assert names.index(f"{module}.weight_scale_inv") == names.index(f"{module}.weight") + 1
    power_of_two = worker.settings.fp8_weights.power_of_two
    expected = cast_many({module: plain[f"{module}.weight"] for module in CAST}, power_of_two=power_of_two)
    for name, tensor in tensors.items():
        wanted = expected.get(name, plain.get(name))
        assert tensor.dtype == wanted.dtype, name
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), name
    assert set(pairs_of(tensors)) == set(CAST)
    assert sent["digest"] == received.digest == worker.weights_digest()


def digest_of(rank, world_size, store):
    """Refit from one of several ranks; returns what the digest says before and after."""
    made = DTensorPolicyWorker(fp8(), rank=rank, world_size=world_size, store=store)
    _, sent, _ = refit(made, rank)
    digest = made.weights_digest()
    made.shutdown()
    return sent["digest"], digest


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("worker", [fp8()], indirect=True)
def test_two_ranks_send_the_bits_that_one_sends(worker):
    """Q30: a block is cast whole, after it has been gathered."""
    alone = worker.weights_digest()
    assert run_on_ranks(digest_of, 2) == [(alone, alone)] * 2


@pytest.mark.parametrize("worker", [fp8()], indirect=True)
def test_a_weight_that_is_not_finite_ends_the_refit_on_both_sides_by_its_name(worker):
    with torch.no_grad():
        live = dict(worker._model.named_parameters())["model.model.layers.0.mlp.down_proj.weight"]
        live.to_local()[1, 2] = float("nan")
    with pytest.raises(RefitError, match=r"'model\.layers\.0\.mlp\.down_proj' has an infinity or a NaN"):
        refit(worker)


def test_a_list_that_was_settled_for_another_model_is_refused_at_once():
    """Q44: a name that is not there would be cast nowhere, and the engine would wait for it."""
    with pytest.raises(
        ModelError, match=r"'model\.layers\.7\.mlp\.up_proj' is to be cast to FP8 \(1 such modules\), but"
    ):
        DTensorPolicyWorker(fp8(*CAST, "model.layers.7.mlp.up_proj"))
    DTensorPolicyWorker(fp8()).shutdown()  # the process group is free again


def test_matrices_have_the_names_and_shapes_of_a_checkpoint_and_experts_their_ids():
    """Q44: transformers fuses the experts of a layer into tensors without ``.weight``."""
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    config = {**MODEL, **experts, "model_type": "qwen3_moe", "tie_word_embeddings": False}
    shapes = matrix_shapes(ModelSettings(hf_config=config, max_total_sequence_length=32))
    assert shapes["model.layers.1.mlp.experts.2.gate_proj"] == (48, 32)
    assert shapes["model.layers.1.mlp.experts.2.down_proj"] == (32, 48)
    assert shapes["model.layers.0.mlp.gate"] == (3, 32)
    assert shapes["model.layers.0.self_attn.k_proj"] == (16, 32)
    assert {"lm_head", "model.embed_tokens"} <= set(shapes)
    assert not any("norm" in name for name in shapes)


def test_experts_in_one_tensor_come_with_three_dimensions():
    """What no refit casts is told, so that a backend can refuse it."""
    config = {**MODEL, "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2}
    shapes = matrix_shapes(ModelSettings(hf_config=config, max_total_sequence_length=32))
    stacks = {name.rpartition(".")[2] for name, shape in shapes.items() if len(shape) == 3}
    assert stacks == {"input_linear", "output_linear"}


def test_a_config_of_which_no_model_can_be_built_is_one_error():
    with pytest.raises(ModelError, match="no model can be built from this config"):
        matrix_shapes(ModelSettings(hf_config={**MODEL, "hidden_act": "no such thing"}, max_total_sequence_length=32))
