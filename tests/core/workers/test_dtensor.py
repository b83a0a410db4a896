# SPDX-License-Identifier: Apache-2.0
"""The FSDP2 policy worker on one rank and on two, against plain torch."""

import pytest
import torch
import torch.distributed as dist

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError, StateError
from nemo_rl_core.objectives.losses import LossSettings, LossTotals, clipped_pg_loss
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.workers.checkpoint_names import live_tensors, wire_tensors
from nemo_rl_core.workers.dtensor import DTensorPolicyWorker
from nemo_rl_core.workers.models import LogprobModel, build_model, random_model
from nemo_rl_core.workers.output_head import compute_head_in_float32
from nemo_rl_core.workers.settings import BatchingSettings, OptimizerSettings, PolicySettings
from tests.core.workers.ranks import run_on_ranks
from tests.core.workers.tiny import MODEL, VOCAB

LR = 0.05


def settings_of(**changes):
    values = {
        "model": ModelSettings(hf_config=MODEL, max_total_sequence_length=32, seed=3),
        "optimizer": OptimizerSettings(name="torch.optim.SGD", kwargs={"lr": LR}, max_grad_norm=None),
        "batching": BatchingSettings(train_micro_batch_size=2, logprob_batch_size=3, logprob_chunk_size=11),
        "reference_model": True,
    }
    return PolicySettings(**(values | changes))


def batch_of(rows=8, width=10, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, width + 1, (rows,), generator=g)
    lengths[0] = width
    inside = torch.arange(width)[None] < lengths[:, None]
    ids = torch.randint(3, VOCAB, (rows, width), generator=g) * inside
    mask = (inside & (torch.arange(width)[None] >= 3)).float()
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=torch.ones(rows),
        advantages=torch.randn(rows, generator=g),
        prev_logprobs=-torch.rand(rows, width, generator=g) * 3,
        generation_logprobs=-torch.rand(rows, width, generator=g) * 3,
    )


class Plain:
    """The same step with the whole batch at once, no sharding, no micro-batches, no chunks."""

    def __init__(self, settings):
        self.model = build_model(settings.model, torch.float32)
        self.wrapped = LogprobModel(self.model, chunk=10_000, temperature=settings.temperature)

    def logprobs(self, batch):
        inside = torch.arange(batch["input_ids"].shape[1])[None] < batch["input_lengths"][:, None]
        return torch.where(inside, self.wrapped(batch["input_ids"]), 0.0)

    def step(self, batch, loss, max_norm=float("inf")):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        totals = LossTotals.of(batch["token_mask"], batch["sample_mask"])
        value, _ = clipped_pg_loss(self.wrapped(batch["input_ids"]), batch, loss, totals)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        optimizer.step()
        return value.item(), norm.item()


@pytest.fixture
def make_worker():
    workers = []

    def make(**changes):
        workers.append(DTensorPolicyWorker(settings_of(**changes)))
        return workers[-1]

    yield make
    for worker in workers:
        worker.shutdown()


def weights_of(worker):
    from nemo_rl_core.workers.sharding import full_tensors

    return {name: t.clone() for name, t in full_tensors(live_tensors(worker._model.model), torch.float32)}


def assert_same_weights(found, model, atol=1e-5):
    for name, tensor in live_tensors(model):
        assert torch.allclose(found[name], tensor.detach(), atol=atol), name


BATCHINGS = [
    BatchingSettings(train_micro_batch_size=8, logprob_batch_size=8),
    BatchingSettings(train_micro_batch_size=3, logprob_batch_size=1, logprob_chunk_size=4),
    BatchingSettings(train_mb_tokens=21, logprob_mb_tokens=12),
]


@pytest.mark.parametrize("batching", BATCHINGS)
def test_logprobs_and_one_step_are_those_of_plain_torch_however_the_batch_is_cut(make_worker, batching):
    worker, plain, batch = make_worker(batching=batching), Plain(settings_of()), batch_of()
    assert torch.allclose(worker.get_logprobs(batch), plain.logprobs(batch), atol=1e-5)
    metrics = worker.train(batch, LossSettings())
    loss, norm = plain.step(batch, LossSettings())
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["lr"] == LR
    assert metrics["num_tokens"] == float(batch["token_mask"].sum())
    assert_same_weights(weights_of(worker), plain.model)


def test_activation_checkpointing_changes_memory_and_nothing_else(make_worker):
    worker, plain, batch = make_worker(activation_checkpointing=True), Plain(settings_of()), batch_of()
    worker.train(batch, LossSettings())
    plain.step(batch, LossSettings())
    assert_same_weights(weights_of(worker), plain.model)


NOISY = {
    "opt with dropout": {
        "model_type": "opt",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.5,
        "init_std": 0.5,
    },
    "mixtral with router jitter": {
        "model_type": "mixtral",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "max_position_embeddings": 64,
        "router_jitter_noise": 0.5,
        "initializer_range": 0.5,
    },
}


@pytest.mark.parametrize("family", NOISY)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_models_that_add_noise_while_training_add_none_here(make_worker, family, checkpointing):
    model = ModelSettings(hf_config=NOISY[family], max_total_sequence_length=32, seed=3)
    worker = make_worker(model=model, activation_checkpointing=checkpointing)
    batch = batch_of()
    plain = Plain(settings_of(model=model))
    plain.model.eval()
    assert torch.allclose(worker.get_logprobs(batch), plain.logprobs(batch), atol=1e-4)
    worker.train(batch, LossSettings())
    plain.step(batch, LossSettings())
    assert_same_weights(weights_of(worker), plain.model, atol=1e-4)


def test_gradients_are_clipped_to_the_norm_that_is_asked_for(make_worker):
    optimizer = OptimizerSettings(name="torch.optim.SGD", kwargs={"lr": LR}, max_grad_norm=0.01)
    worker, plain, batch = make_worker(optimizer=optimizer), Plain(settings_of()), batch_of()
    assert worker.train(batch, LossSettings())["grad_norm"] > 0.01
    plain.step(batch, LossSettings(), max_norm=0.01)
    assert_same_weights(weights_of(worker), plain.model)


def test_the_reference_policy_stays_what_the_policy_was_at_the_start(make_worker):
    worker, batch = make_worker(), batch_of()
    at_start = worker.get_logprobs(batch)
    worker.train(batch, LossSettings())
    after = worker.get_logprobs(batch)
    assert torch.equal(worker.get_reference_policy_logprobs(batch), at_start)
    assert not torch.allclose(after, at_start, atol=1e-3)
    assert torch.equal(worker.get_logprobs(batch), after)


def test_a_constructor_that_fails_leaves_the_process_group_free_for_the_next_one(make_worker):
    optimizer = OptimizerSettings(name="torch.optim.SGD", kwargs={"lr": -1.0})
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"policy\.optimizer\.kwargs do not fit"):
            make_worker(optimizer=optimizer)
    make_worker()


LONGROPE = {
    "model_type": "phi3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    },
}


def test_a_model_whose_buffers_share_a_tensor_can_be_built(make_worker):
    worker = make_worker(model=ModelSettings(hf_config=LONGROPE, max_total_sequence_length=32, seed=3))
    plain = Plain(settings_of(model=ModelSettings(hf_config=LONGROPE, max_total_sequence_length=32, seed=3)))
    assert torch.allclose(worker.get_logprobs(batch_of()), plain.logprobs(batch_of()), atol=1e-5)


def test_buffers_travel_in_their_own_type_and_parameters_in_the_compute_type(make_worker):
    glm = {
        "model_type": "glm4_moe",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 64,
    }
    settings = ModelSettings(hf_config=glm, max_total_sequence_length=32, seed=3, precision="bfloat16")
    sent = make_worker(model=settings)._weights().manifest()
    expected = Manifest.from_tensors(wire_tensors(random_model(settings, torch.bfloat16)))
    assert "float32" in {spec.dtype for spec in expected.specs}
    assert sent.differences(expected) == ()


def test_without_a_reference_policy_asking_for_it_says_how_to_get_one(make_worker):
    """U53."""
    with pytest.raises(StateError, match="reference_policy_kl_penalty above 0"):
        make_worker(reference_model=False).get_reference_policy_logprobs(batch_of())


def test_a_gradient_that_is_not_finite_stops_the_step_and_leaves_the_weights(make_worker):
    worker, batch = make_worker(), batch_of()
    before = worker.weights_digest()
    batch["advantages"][1] = float("nan")
    with pytest.raises(StateError, match=r"gradient norm is nan.*weights are as before"):
        worker.train(batch, LossSettings())
    assert worker.weights_digest() == before
    batch["advantages"][1] = 1.0
    worker.train(batch, LossSettings())
    assert worker.weights_digest() != before


def test_a_schedule_moves_the_learning_rate(make_worker):
    optimizer = OptimizerSettings(
        name="torch.optim.SGD",
        kwargs={"lr": LR},
        scheduler_name="torch.optim.lr_scheduler.StepLR",
        scheduler_kwargs={"step_size": 1, "gamma": 0.5},
    )
    worker, batch = make_worker(optimizer=optimizer), batch_of()
    rates = [worker.train(batch, LossSettings())["lr"] for _ in range(3)]
    assert rates == pytest.approx([LR, LR / 2, LR / 4])


def test_bfloat16_computes_in_bfloat16_over_float32_master_weights(make_worker):
    worker = make_worker(
        model=ModelSettings(hf_config=MODEL, max_total_sequence_length=32, seed=3, precision="bfloat16")
    )
    batch = batch_of()
    assert {p.dtype for p in worker._model.parameters()} == {torch.float32}
    half = random_model(settings_of().model, torch.bfloat16)
    compute_head_in_float32(half)
    for (_, live), (_, master) in zip(live_tensors(half), weights_of(worker).items(), strict=True):
        live.data.copy_(master)
    inside = torch.arange(10)[None] < batch["input_lengths"][:, None]
    expected = LogprobModel(half, chunk=10_000, temperature=1.0)(batch["input_ids"])
    assert torch.allclose(worker.get_logprobs(batch), torch.where(inside, expected, 0.0), atol=1e-3)
    worker.train(batch, LossSettings())
    assert {t.dtype for t in weights_of(worker).values()} == {torch.float32}
    manifest = worker._weights().manifest()
    assert {spec.dtype for spec in manifest.specs} == {"bfloat16"}


def two_rank_step(rank, world_size, store, batching):
    """Run on each rank: logprobs, a step and a digest."""
    worker = DTensorPolicyWorker(settings_of(batching=batching), rank=rank, world_size=world_size, store=store)
    shard = batch_of().shard_by_batch_size(world_size)[rank]
    logprobs = worker.get_logprobs(shard)
    assert torch.equal(worker.get_reference_policy_logprobs(shard), logprobs)
    assert {p.dtype for p in worker._model.parameters()} == {torch.float32}
    metrics = worker.train(shard, LossSettings())
    assert torch.equal(worker.get_reference_policy_logprobs(shard), logprobs)
    weights = weights_of(worker)
    digest = worker.weights_digest()
    shards = [p.to_local().numel() for p in worker._model.parameters()]
    total = sum(p.numel() for p in worker._model.parameters())
    worker.shutdown()
    return logprobs, metrics, weights, digest, sum(shards) / total


@pytest.mark.parametrize("batching", BATCHINGS[1:])
def test_two_ranks_agree_with_plain_torch_and_hold_half_the_weights_each(batching):
    (first, metrics, weights, digest, share), (second, others, _, other_digest, _) = run_on_ranks(
        two_rank_step, 2, batching
    )
    plain, batch = Plain(settings_of()), batch_of()
    assert torch.allclose(torch.cat([first, second]), plain.logprobs(batch), atol=1e-5)
    loss, norm = plain.step(batch, LossSettings())
    assert metrics == others
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert digest == other_digest
    assert_same_weights(weights, plain.model)
    assert share == pytest.approx(0.5, abs=0.05)


MIXTURE = {
    **{key: value for key, value in MODEL.items() if key != "intermediate_size"},
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def two_rank_mixture(rank, world_size, store):
    """Run on each rank: what is sent of a sharded mixture of experts after a step, and the manifest of it."""
    model = ModelSettings(hf_config=MIXTURE, max_total_sequence_length=32, seed=3)
    worker = DTensorPolicyWorker(settings_of(model=model), rank=rank, world_size=world_size, store=store)
    worker.train(batch_of().shard_by_batch_size(world_size)[rank], LossSettings())
    source = worker._weights()
    sent = [(name, tensor.clone()) for name, tensor in source._as_sent(source._gathered())]
    answer = sent, source.manifest().to_json(), worker.weights_digest()
    worker.shutdown()
    return answer


def test_a_sharded_mixture_of_experts_travels_as_one_tensor_for_each_expert():
    """R49: transformers keeps the experts of a layer in one tensor, which FSDP2 cuts; an engine's loader knows neither."""
    (sent, manifest, digest), (others, other_manifest, other_digest) = run_on_ranks(two_rank_mixture, 2)
    plain = Plain(settings_of(model=ModelSettings(hf_config=MIXTURE, max_total_sequence_length=32, seed=3)))
    plain.step(batch_of(), LossSettings())
    assert (manifest, digest) == (other_manifest, other_digest)
    assert Manifest.from_json(manifest) == Manifest.from_tensors(sent) == Manifest.from_tensors(others)
    expected = dict(wire_tensors(plain.model))
    assert [name for name, _ in sent] == list(expected)
    assert sum(".experts.3." in name for name in expected) == 3 * MIXTURE["num_hidden_layers"]
    for name, tensor in sent:
        assert torch.allclose(tensor, expected[name], atol=1e-5), name


def test_several_ranks_without_a_store_are_refused():
    with pytest.raises(StateError, match="2 train ranks need a store"):
        DTensorPolicyWorker(settings_of(), rank=0, world_size=2)


def test_one_rank_is_its_own_rendezvous_and_shuts_down_twice():
    worker = DTensorPolicyWorker(settings_of(), store=dist.HashStore())
    assert worker.describe()["backend"] == "fsdp2"
    worker.shutdown()
    worker.shutdown()
