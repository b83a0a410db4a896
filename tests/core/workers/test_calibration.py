# SPDX-License-Identifier: Apache-2.0
"""Calibration of real models through transformers' attention interface, and of the policy worker on ranks."""

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ModelError, StateError
from nemo_rl_core.fp8.calibration import ActivationObserver
from nemo_rl_core.policy.policy import Policy
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.calibration import calibration_passes, observe_attention
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
WIDTH = 10


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


def worker_of(rank=0, world_size=1, store=None, **batching):
    settings = PolicySettings(
        model=ModelSettings(hf_config=MODEL, max_total_sequence_length=32, seed=3),
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


def on_rank(rank, world_size, store, shards):
    return calibrated(worker_of(rank, world_size, store), shards[rank], include_q=True)


def assert_same(got, expected):
    assert got["layers"].keys() == expected["layers"].keys()
    for layer, scales in expected["layers"].items():
        # A product of other shapes may sum in another order; what is kept of its values is exact.
        assert got["layers"][layer] == pytest.approx(scales, rel=1e-5)
        assert got["amax"][layer] == pytest.approx(expected["amax"][layer], rel=1e-5)


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


def test_the_worker_gives_the_same_with_other_micro_batches_and_more_padding():
    expected = calibrated(worker_of(), batch_of(), include_q=True)
    assert expected["format"] == "fp8"
    assert (expected["percentile"], expected["margin"]) == (100.0, 2.0)
    assert set(expected["layers"]["layer_0"]) == {"q_scale", "k_scale", "v_scale"}
    for batching, width in (({"logprob_batch_size": 1}, 10), ({"logprob_mb_tokens": 20}, 10), ({}, 17)):
        assert_same(calibrated(worker_of(**batching), batch_of(width=width), include_q=True), expected)


def test_two_ranks_give_what_one_gives_and_filling_rows_count_nothing():
    group = Shard(2)
    assert Policy(group).calibrate_qkv_fp8_scales(batch_of()) == "of rank 0"
    assert group.data[1]["input_lengths"][-1] == 0
    one = calibrated(worker_of(), batch_of(), include_q=True)
    two = run_on_ranks(on_rank, 2, group.data)
    assert two[0] == two[1]
    assert_same(two[0], one)
    assert two[0]["rates"]["layer_1"]["k"]["saturated"] == 0
