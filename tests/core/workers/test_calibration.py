# SPDX-License-Identifier: Apache-2.0
"""Calibration of real models through transformers' attention interface, and of the policy worker on ranks."""

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ModelError, StateError
from nemo_rl_core.fp8.calibration import ActivationObserver
from nemo_rl_core.fp8.calibration_result import CalibrationRequest, describe_hf_model
from nemo_rl_core.fp8.model_description import AttentionBlock, ModelDescription
from nemo_rl_core.policy.policy import Policy
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.calibration import add_up_observers, calibration_passes, observe_attention
from nemo_rl_core.workers.dtensor import DTensorPolicyWorker
from nemo_rl_core.workers.models import random_model
from nemo_rl_core.workers.settings import BatchingSettings, OptimizerSettings, PolicySettings
from tests.core.workers.ranks import run_on_ranks
from tests.core.workers.tiny import MODEL, VOCAB

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "qwen3": {},
    "gemma2": {"model_type": "gemma2", "sliding_window": 4, "query_pre_attn_scalar": 8},
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE},
}
#: The last two layers read the caches of the first two.
GEMMA3N = {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [64] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "sliding_window": 4,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 4,
    "architectures": ["Gemma3nForCausalLM"],
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
    "architectures": ["Gemma4ForCausalLM"],
}
SHARED = {"gemma3n": GEMMA3N, "gemma4": GEMMA4}
MLA = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
    "rope_interleave": True,
}
WIDTH = 10
OWNERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


def batch_of(rows=7, width=WIDTH):
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, WIDTH + 1, (rows,), generator=g)
    ids = torch.randint(3, VOCAB, (rows, WIDTH), generator=g) * (torch.arange(WIDTH)[None] < lengths[:, None])
    return BatchedDataDict(input_ids=torch.nn.functional.pad(ids, (0, width - WIDTH)), input_lengths=lengths)


def model_of(family="qwen3", attention="sdpa"):
    settings = ModelSettings(hf_config={**MODEL, **FAMILIES[family]}, max_total_sequence_length=32, seed=3)
    model = random_model(settings, torch.float32).eval()
    model.set_attn_implementation(attention)
    return model


def worker_of(rank=0, world_size=1, store=None, config=MODEL, **batching):
    settings = PolicySettings(
        model=ModelSettings(hf_config=config, max_total_sequence_length=32, seed=3),
        optimizer=OptimizerSettings(name="torch.optim.SGD", kwargs={"lr": 0.1}, max_grad_norm=None),
        batching=BatchingSettings(**{"train_micro_batch_size": 2, "logprob_batch_size": 3, **batching}),
    )
    return DTensorPolicyWorker(settings, rank=rank, world_size=world_size, store=store)


class Future:
    """Results that are there already."""

    def __init__(self, results):
        self.results = results

    def get_results(self, timeout_s=None):
        return self.results


class Shard:
    """Keeps the shards that a policy gives to its workers."""

    def __init__(self, world_size):
        self.world_size, self.data = world_size, []

    def run_all_workers_multiple_data(self, method, /, common_kwargs=None, **lists):
        self.method, self.kwargs, self.data = method, common_kwargs, lists["data"]
        return Future(["of rank 0", "of rank 1"])

    def run_all_workers_single_data(self, method, /, **kwargs):
        raise NotImplementedError(method)

    def shutdown(self):
        pass


def calibrated(worker, data, **kwargs):
    try:
        return worker.calibrate_qkv_fp8_scales(data, **kwargs)
    finally:
        worker.shutdown()


class Stage(ActivationObserver):
    """The observer of a pipeline stage: it sees the calls of its own layers alone."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def observe(self, layer, q, k, v):
        if layer == self.layer:
            super().observe(layer, q, k, v)


def seen_by(observer):
    """Run the same passes under an observer."""
    model = model_of()
    with observe_attention(model, observer):
        calibration_passes(lambda ids: model(ids, use_cache=False), batch_of(), [[0, 1, 2], [3, 4, 5, 6]], observer)
    return observer


def by_stages(observer):
    model = describe_hf_model(model_of().config, "Qwen3ForCausalLM")
    return CalibrationRequest(model=model, percentile=99).result(observer)


def on_rank(rank, world_size, store, shards):
    """Calibrate on rows of this rank, and then on all rows with one layer of it."""
    worker = worker_of(rank, world_size, store)
    try:
        rows = worker.calibrate_qkv_fp8_scales(shards[rank], include_q=True)
        return rows, add_up_observers(seen_by(Stage(rank)), torch.device("cpu"))
    finally:
        worker.shutdown()


@pytest.fixture(scope="module")
def group():
    """Two workers as the policy sees them, with the shards that it gave them."""
    group = Shard(2)
    assert Policy(group).calibrate_qkv_fp8_scales(batch_of()) == "of rank 0"
    return group


@pytest.fixture(scope="module")
def ranks(group):
    """What two ranks answer: rows of each, layers of each."""
    return run_on_ranks(on_rank, 2, group.data)


def assert_same(got, expected):
    # A product of other shapes may sum in another order; what is kept of its values is exact.
    assert got["layers"] == pytest.approx(expected["layers"], rel=1e-5)
    assert got["amax"].keys() == expected["amax"].keys()
    for owner, amax in expected["amax"].items():
        assert got["amax"][owner] == pytest.approx(amax, rel=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_bit_equal_and_each_layer_is_seen(family, attention):
    model, ids = model_of(family, attention), batch_of().tensor("input_ids")
    observer = ActivationObserver()
    with torch.no_grad():
        before = model(ids).logits
        with observe_attention(model, observer), observer.tokens(torch.ones_like(ids)):
            during = model(ids, use_cache=False).logits
        after = model(ids).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert observer.layers == (0, 1)
    assert model.config._attn_implementation == attention


def test_k_is_seen_after_norm_and_rotary_embedding_and_v_as_projected():
    model, ids = model_of(), batch_of(3).tensor("input_ids")
    observer = ActivationObserver()
    with torch.no_grad(), observe_attention(model, observer), observer.tokens(torch.ones_like(ids)):
        model(ids, use_cache=False)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    for layer in (0, 1):
        amax = observer.amax()[f"layer_{layer}"]
        assert amax["k"] == cache.layers[layer].keys.abs().max().item()
        assert amax["v"] == cache.layers[layer].values.abs().max().item()


def test_all_is_put_back_after_an_error():
    model, ids = model_of(), batch_of().tensor("input_ids")
    with pytest.raises(StateError, match="which tokens are real"), observe_attention(model, ActivationObserver()):
        model(ids)
    assert model.config._attn_implementation == "sdpa"
    assert "nemo_rl_calibration" not in ALL_ATTENTION_FUNCTIONS
    assert "nemo_rl_calibration" not in ALL_MASK_ATTENTION_FUNCTIONS


def test_a_second_calibration_and_another_attention_are_refused():
    model, other = model_of(), model_of()
    with observe_attention(model, ActivationObserver()):
        with pytest.raises(StateError, match="is being observed"), observe_attention(other, ActivationObserver()):
            pass
        assert model.config._attn_implementation == "nemo_rl_calibration"
    other.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ModelError, match="sdpa or eager"), observe_attention(other, ActivationObserver()):
        pass


def test_an_empty_micro_batch_counts_nothing():
    model, data = model_of(), batch_of(4)
    amounts = []
    for plan in ([[0, 1], [2, 3]], [[0, 1], [2, 3], []]):
        observer = ActivationObserver()
        with observe_attention(model, observer):
            calibration_passes(lambda ids: model(ids, use_cache=False), data, plan, observer)
        amounts.append((observer.scales(percentile=50), observer.rates(observer.scales(percentile=50))))
    assert amounts[0] == amounts[1]


def test_the_worker_answers_by_live_names_and_modules():
    result = calibrated(worker_of(), batch_of())
    assert set(result) == {"format", "percentile", "margin", "layers", "amax", "rates"}
    assert (result["format"], result["percentile"], result["margin"]) == ("fp8", 100.0, 2.0)
    assert list(result["layers"]) == [f"{owner}.{kind}" for owner in OWNERS for kind in ("k_scale", "v_scale")]
    for owner in OWNERS:
        assert set(result["amax"][owner]) == {"q", "k", "v"}
        for kind in "kv":
            exact = 2.0 * result["amax"][owner][kind] / 448
            assert exact <= result["layers"][f"{owner}.{kind}_scale"] <= exact * (1 + 2**-22)
            assert result["rates"][owner][kind]["saturated"] == 0


@pytest.mark.parametrize(
    ("batching", "width", "order"),
    [
        ({"logprob_batch_size": 1}, 10, range(7)),
        ({"logprob_mb_tokens": 20}, 10, range(7)),
        ({}, 17, range(7)),
        ({}, 10, (6, 2, 4, 0, 1, 5, 3)),
    ],
    ids=["micro-batch size", "micro-batches by tokens", "padding", "order"],
)
def test_micro_batches_padding_and_order_change_nothing(batching, width, order):
    expected = calibrated(worker_of(), batch_of(), include_q=True)
    assert f"{OWNERS[1]}.q_scale" in expected["layers"]
    batch = batch_of(width=width).select_indices(list(order))
    assert_same(calibrated(worker_of(**batching), batch, include_q=True), expected)


def test_two_ranks_give_what_one_gives_and_filling_rows_count_nothing(group, ranks):
    assert group.data[1]["input_lengths"][-1] == 0
    one = calibrated(worker_of(), batch_of(), include_q=True)
    rows = [rows for rows, _ in ranks]
    assert rows[0] == rows[1]
    assert_same(rows[0], one)
    assert rows[0]["rates"][OWNERS[1]]["k"]["saturated"] == 0


def test_two_ranks_that_see_one_layer_each_give_what_one_gives(ranks):
    """A pipeline split, simulated: layer numbers are global, and what the stages saw adds up exactly."""
    one = by_stages(seen_by(ActivationObserver()))
    assert [by_stages(seen) for _, seen in ranks] == [one, one]


def test_a_batch_under_earlier_scales_tells_how_far_the_policy_has_moved():
    worker = worker_of()
    try:
        before = worker.calibrate_qkv_fp8_scales(batch_of(), margin=1.0)
        same = worker.calibrate_qkv_fp8_scales(batch_of(), previous=before["layers"])
        assert all(rates["saturated"] == 0 for kinds in same["drift"].values() for rates in kinds.values())
        with torch.no_grad():
            for layer in worker._model.model.model.layers:
                layer.self_attn.v_proj.weight.mul_(4)
        moved = worker.calibrate_qkv_fp8_scales(batch_of(), previous=before["layers"])
        assert moved["drift"][OWNERS[0]]["v"]["saturated"] > 0.001
        assert moved["drift"][OWNERS[0]]["k"]["saturated"] == 0
        assert moved["rates"][OWNERS[0]]["v"]["saturated"] == 0
    finally:
        worker.shutdown()


@pytest.mark.parametrize("family", SHARED)
def test_a_layer_that_reads_anothers_cache_gets_its_k_and_v(family):
    """Q9."""
    config = {**MODEL, **SHARED[family]}
    result = calibrated(worker_of(config=config), batch_of(), include_q=True)
    layers = result["layers"]
    for reader, writer in ((2, 0), (3, 1)):
        for kind in ("k_scale", "v_scale"):
            names = [f"model.layers.{layer}.self_attn.attn.{kind}" for layer in (reader, writer)]
            assert layers[names[0]] == layers[names[1]]
        names = [f"model.layers.{layer}.self_attn.attn.q_scale" for layer in (reader, writer)]
        assert layers[names[0]] != layers[names[1]]


def refuse_passes(*args, **kwargs):
    pytest.fail("a pass ran")


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        ({**MODEL, "architectures": ["MyForCausalLM"]}, {}, "scale names of 'MyForCausalLM' were never tried"),
        ({**MODEL, **MLA}, {}, r"DeepseekV3ForCausalLM caches one latent .* keep this model's KV cache in bfloat16"),
        (MODEL, {"previous": {f"{OWNERS[0]}.k_scale": 1.0, f"{OWNERS[0]}.v_scale": 1.0}}, "2 missing, the first"),
    ],
    ids=["unknown architecture", "MLA", "incomplete previous scales"],
)
def test_what_has_no_answer_is_refused_before_any_pass(config, kwargs, message, monkeypatch):
    """Q7."""
    monkeypatch.setattr("nemo_rl_core.workers.dtensor.calibration_passes", refuse_passes)
    with pytest.raises(ValueError, match=message):
        calibrated(worker_of(config=config), batch_of(), **kwargs)


def test_an_unknown_architecture_is_calibrated_by_a_description():
    mine = ModelDescription(
        architecture="MyForCausalLM", blocks=(AttentionBlock(prefix="net.h", module="mix.attn", layers=(0, 1)),)
    )
    config = {**MODEL, "architectures": ["MyForCausalLM"]}
    result = calibrated(worker_of(config=config), batch_of(), model=mine)
    assert list(result["layers"]) == list(mine.names())


def test_a_policy_passes_previous_scales_and_a_description_on():
    group, mine = Shard(1), describe_hf_model(model_of().config, "Qwen3ForCausalLM")
    previous = dict.fromkeys(mine.names(), 0.5)
    Policy(group).calibrate_qkv_fp8_scales(batch_of(), previous=previous, model=mine)
    assert (group.kwargs["previous"], group.kwargs["model"]) == (previous, mine)
