# SPDX-License-Identifier: Apache-2.0
"""FP8 scales of the KV cache over a run: declared, calibrated on what was trained on, and in every refit or in none."""

import contextlib
import math

import pytest
import torch

from nemo_rl_core.algorithms.assemble import assemble, generation_settings, policy_settings, prepare
from nemo_rl_core.algorithms.kv_scales import KvScales, describe_attention
from nemo_rl_core.config.generation import KvScalesSection
from nemo_rl_core.errors import ModelError, ScaleNameError
from nemo_rl_core.observability.timers import Timer
from nemo_rl_core.policy.local import LocalWorkerGroup
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.refit.manifest import Manifest, TensorSpec
from nemo_rl_core.workers.dtensor import DTensorPolicyWorker
from nemo_rl_core.workers.torch_generation import TorchGenerationWorker
from tests.core.algorithms.local_run import small_config

OWNERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
KV = [f"{owner}.{kind}_scale" for owner in OWNERS for kind in "kv"]
QKV = [f"{owner}.{kind}_scale" for owner in OWNERS for kind in "qkv"]


class SinkWithScales:
    """A live model that keeps the scales that each refit brings beside its weights."""

    def __init__(self, inner, names):
        self.inner = inner
        self.scales = {name: torch.full((), -1.0) for name in names}
        self.history = []

    def manifest(self):
        specs = [TensorSpec(name=name, shape=(), dtype="float32") for name in self.scales]
        return Manifest((*self.inner.manifest().specs, *specs))

    def load(self, tensors):
        for name, tensor in tensors:
            if name in self.scales:
                self.scales[name].copy_(tensor)
            else:
                self.inner.load([(name, tensor)])

    def finish(self, version):
        self.inner.finish(version)
        self.history.append({name: scale.item() for name, scale in self.scales.items()})

    def live_tensors(self):
        yield from self.inner.live_tensors()
        yield from self.scales.items()


class WorkerWithScales(TorchGenerationWorker):
    """A replica whose KV cache wants scales."""

    def __init__(self, settings, **keywords):
        super().__init__(settings, **keywords)
        self._sink = SinkWithScales(self._sink, settings.kv_scales)


@contextlib.contextmanager
def run_with_scales(config):
    """Yield the loop, the list of its steps, and the live sink."""
    steps = []
    attention = describe_attention(policy_settings(config).model, config.generation.kv_scales)
    worker = WorkerWithScales(generation_settings(config, {}, None, attention))
    policy = LocalWorkerGroup([DTensorPolicyWorker(policy_settings(config))], name_prefix="policy")
    generation = LocalWorkerGroup([worker], name_prefix="generation")

    def log(step, metrics):
        steps.append((step, dict(metrics)))

    try:
        grpo = assemble(config, prepare(config), policy, generation, log, attention=attention)
        yield grpo, steps, worker._sink
    finally:
        policy.shutdown()
        generation.shutdown()


def in_float32(value):
    return torch.tensor(value, dtype=torch.float32).item()


def test_the_first_refit_brings_what_was_declared_and_every_later_one_what_was_calibrated():
    config = small_config(policy__generation__kv_scales={"initial": 0.75, "margin": 3.0})
    with run_with_scales(config) as (grpo, steps, sink):
        grpo.train()
        assert list(sink.scales) == QKV
        assert sink.history[0] == dict.fromkeys(QKV, 0.75)
        assert sink.history[-1] == {name: in_float32(value) for name, value in grpo.kv_scales.current.items()}
        assert len({tuple(scales.values()) for scales in sink.history}) == 4, "new weights, new scales"
        # The data of step 3 is at a third of what its own scales can hold: no more and no less.
        batch = grpo.prepare(grpo.roll_out(Timer()), Timer())
        again = grpo.policy.calibrate_qkv_fp8_scales(batch, margin=3.0, include_q=True)
        assert list(again["layers"]) == QKV
    assert [m["kv_scales/calibrated"] for _, m in steps] == [0.0, 1.0, 1.0, 1.0]
    assert "kv_scales/headroom" not in steps[0][1]
    for _, metrics in steps[2:]:
        # One step of training moves the activations a little; the margin of 3 is about what is left.
        assert 2.0 < metrics["kv_scales/headroom"] < 3.5
        assert metrics["kv_scales/saturated"] == 0.0
        assert metrics["kv_scales/smallest"] <= metrics["kv_scales/largest"]
        assert metrics["timing/kv_scale_calibration"] > 0


@pytest.mark.filterwarnings("ignore:.*did not fit the FP8 scales")
def test_drift_is_told_for_the_scales_that_the_batch_was_sampled_under():
    """Declared scales that are far too small: all that the cache held was saturated, and the metric says so."""
    config = small_config(policy__generation__kv_scales={"initial": 1e-6, "include_q": False}, grpo__max_num_steps=2)
    with run_with_scales(config) as (grpo, steps, sink):
        grpo.train()
        assert list(sink.scales) == KV
    assert steps[1][1]["kv_scales/saturated"] > 0.99
    assert steps[1][1]["kv_scales/headroom"] < 0.01
    assert steps[2][1]["kv_scales/saturated"] == 0.0


def test_between_two_calibrations_the_scales_stay():
    config = small_config(policy__generation__kv_scales={"calibration_period": 2})
    with run_with_scales(config) as (grpo, steps, sink):
        grpo.train()
        _, first, second, third = sink.history
        assert first == second != third
    for name in ("kv_scales/saturated", "timing/kv_scale_calibration"):
        assert [name in metrics for _, metrics in steps] == [False, True, False, True]


def without(name):
    return lambda scales: {key: value for key, value in scales.items() if key != name}


def test_a_policy_that_has_outgrown_its_scales_is_told():
    config = small_config(policy__generation__kv_scales={"initial": 1e-6}, grpo__max_num_steps=1)
    with run_with_scales(config) as (grpo, _, _), pytest.warns(UserWarning, match=r"100.00% of .* raise .*margin"):
        grpo.train()


def test_drift_is_told_for_what_is_live_also_after_a_refit_that_failed():
    config = small_config()
    with run_with_scales(config) as (grpo, _, _):
        grpo.refit(Timer())
        batch = grpo.prepare(grpo.roll_out(Timer()), Timer())
        first = grpo.kv_scales.calibrate(grpo.policy, batch)
        # No refit has brought the new scales: the engine still has the declared ones.
        assert grpo.kv_scales.calibrate(grpo.policy, batch)["headroom"] == first["headroom"] > 20
        grpo.refit(Timer())
        assert grpo.kv_scales.calibrate(grpo.policy, batch)["headroom"] == pytest.approx(2.0, rel=1e-5)


def test_before_any_refit_there_is_no_drift_to_tell():
    with run_with_scales(small_config()) as (grpo, _, _):
        grpo.refitter.refit(grpo.kv_scales.current)
        batch = grpo.prepare(grpo.roll_out(Timer()), Timer())
        assert "headroom" not in grpo.kv_scales.calibrate(grpo.policy, batch)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: None, "got 0"),
        (lambda scales: {name: value for name, value in scales.items() if "q_scale" not in name}, "2 missing"),
        (without(QKV[4]), f"1 missing, the first '{QKV[4]}'"),
        (without(QKV[0]), f"1 missing, the first '{QKV[0]}'"),
        (lambda scales: scales | {"model.layers.7.self_attn.attn.k_scale": 1.0}, "1 that this model does not have"),
        (lambda scales: scales | {QKV[1]: 0.0}, "must be positive and finite"),
        (lambda scales: scales | {QKV[1]: -0.5}, "must be positive and finite"),
        (lambda scales: scales | {QKV[1]: math.nan}, "must be positive and finite"),
        (lambda scales: scales | {QKV[2]: math.inf}, "must be positive and finite"),
        (lambda scales: scales | {QKV[2]: 1e-60}, "must be positive and finite"),
    ],
)
def test_a_set_that_is_not_whole_is_refused_on_the_train_side_before_anything_starts(change, said):
    """Q4, Q14, Q19, Q27: neither side is asked, no version is used up, and the next refit works."""
    with run_with_scales(small_config()) as (grpo, _, sink):
        grpo.refit(Timer())
        history = list(sink.history)
        with pytest.raises(ScaleNameError, match=said):
            grpo.refitter.refit(change(dict(grpo.kv_scales.current)))
        assert sink.history == history
        assert grpo.refit(Timer()).version == 1


def test_scales_for_an_engine_that_keeps_no_fp8_are_refused_and_not_dropped():
    with run_with_scales(small_config()) as (grpo, _, _):
        grpo.refitter._attention = None
        with pytest.raises(ScaleNameError, match="not FP8, so it takes no scales, got 6"):
            grpo.refitter.refit(grpo.kv_scales.current)


def test_the_sender_itself_refuses_what_is_no_scale_and_its_digest_covers_what_it_sent():
    """A caller of the worker alone has no description that could be checked."""
    with run_with_scales(small_config()) as (grpo, _, _):
        worker = grpo.policy._group._workers[0]
        with pytest.raises(ScaleNameError, match=r"'x.k_scale' must be positive and finite"):
            worker.send_weights(0, kv_scales={"x.k_scale": float("nan")})
        grpo.refit(Timer())
        digest = grpo.policy.weights_digest()
        assert grpo.generation.weights_digests() == [digest]
        grpo.kv_scales.current[QKV[0]] *= 2
        grpo.refit(Timer())
        assert grpo.generation.weights_digests() == [grpo.policy.weights_digest()] != [digest]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "gpt_neox"}, "GPTNeoXForCausalLM"),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 2}, "caches one latent"),
    ],
)
def test_a_model_whose_cache_cannot_be_calibrated_is_refused_before_any_worker_starts(values, said):
    """Q7, Q8: never 1.0 without a word."""
    with pytest.raises(ModelError, match=said):
        describe_attention(ModelSettings(hf_config=values), KvScalesSection())


def test_the_declared_scale_is_there_for_q_only_where_q_is_asked_for():
    attention = describe_attention(
        ModelSettings(hf_config={"model_type": "qwen3", "num_hidden_layers": 2}), KvScalesSection()
    )
    assert list(KvScales(attention, KvScalesSection(include_q=False)).current) == KV
    assert list(KvScales(attention, KvScalesSection(initial=2.0)).current) == QKV


def test_a_scale_of_q_that_the_engine_was_not_told_of_is_refused_on_the_train_side():
    config = small_config(policy__generation__kv_scales={"include_q": False})
    with run_with_scales(config) as (grpo, _, _):
        with pytest.raises(ScaleNameError, match="2 that this model does not have"):
            grpo.refitter.refit(grpo.kv_scales.current | {name: 1.0 for name in QKV if "q_scale" in name})
        assert grpo.refit(Timer()).version == 0
