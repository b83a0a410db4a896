# SPDX-License-Identifier: Apache-2.0
"""FP8 KV scales of each family in a live engine: expected, live and loaded names are the same, and each value arrives.

Each scale is changed alone, by the refit's road (set in the live model) and by a checkpoint's (loaded by vLLM), and
everything else has to stay. The kernels for CPUs read k and v and never q, so q arrives there without any effect.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_core.errors import ScaleNameError
from nemo_rl_core.fp8.checkpoint_keys import ScaleConfig, fate_of_key
from nemo_rl_core.fp8.model_families import describe_model
from nemo_rl_core.fp8.scale_rounding import ScaleDtype
from tests.adapter.engine.checkpoints import make
from tests.adapter.engine.scale_models import NOT_RUN, QUANTIZATION, TINY
from tests.adapter.engine.scale_runs import ScaleRuns, scale_of, table
from tests.adapter.engine.scales_side import BASE, CHANGED
from tests.core.fp8.families import CONFIGS

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

#: Scales reach these by the refit's road alone.
ONLY_SET = ("DeepseekV3ForCausalLM", "JambaForCausalLM")
#: vLLM 0.32 does not pass the type of the cache on to the attention of these, but for a compressed-tensors config.
CACHE_STAYS = ("FalconForCausalLM",)
SET = [name for name in TINY if name not in CACHE_STAYS]
LOADED = [name for name in TINY if name not in ONLY_SET]


@pytest.fixture(scope="module")
def runs(python: Path) -> Iterator[ScaleRuns]:
    found = ScaleRuns(python)
    yield found
    found.close()


def float32(value: float) -> float:
    import torch

    return torch.tensor(value).item()


def test_every_known_family_is_here() -> None:
    assert set(TINY) == set(CONFIGS)


@pytest.mark.parametrize("architecture", SET)
def test_expected_and_live_scales_are_the_same(runs: ScaleRuns, architecture: str) -> None:
    """Q1, Q2, Q3: the description has exactly the modules of the live model that have a cache."""
    model, live = runs.model(architecture), runs.by_set(architecture)
    assert sorted(live["owners"]) == sorted(model.owners())
    assert sorted(live["names"]) == sorted(model.names(include_q=True))
    assert live["refused"] is None
    assert set(live["at_start"].values()) == {1.0}


@pytest.mark.parametrize("architecture", CACHE_STAYS)
def test_an_engine_without_an_fp8_cache_is_refused_before_the_refit(runs: ScaleRuns, architecture: str) -> None:
    """Nothing is sent that nobody would read."""
    live = runs.by_set(architecture)
    assert live["owners"] == []
    assert "has 0 attention modules with an FP8 KV cache" in live["refused"]


@pytest.mark.parametrize("architecture", SET)
def test_a_scale_that_is_set_arrives_in_all_its_copies_and_nowhere_else(runs: ScaleRuns, architecture: str) -> None:
    """Q4: one layer and one kind at a time, by the refit's road."""
    live = runs.by_set(architecture)
    assert set(live["changes"]) == set(runs.model(architecture).names(include_q=True))
    for name, change in live["changes"].items():
        assert change["read"] == float32(CHANGED), name
        assert {scale_of(copy) for copy in change["moved"]} == {name}
        assert set(change["moved"].values()) == {float32(CHANGED)}
        # The buffer and its float; k and v have one for the host beside them.
        assert len(change["moved"]) == (2 if name.endswith("q_scale") else 3), change["moved"]


@pytest.mark.parametrize("architecture", [name for name in SET if name not in NOT_RUN])
def test_the_logits_react_to_each_k_and_v_and_to_no_q(runs: ScaleRuns, architecture: str) -> None:
    """What is set is what the kernel reads; on a CPU it has no use for q."""
    live = runs.by_set(architecture)
    assert live["finite"]
    assert live["steady"], "equal scales gave other logprobs, so a difference below would mean nothing"
    assert {name: change["reacts"] for name, change in live["changes"].items()} == {
        name: not name.endswith(".q_scale") for name in live["names"]
    }


@pytest.mark.parametrize("architecture", LOADED)
def test_expected_and_loaded_scales_are_the_same(runs: ScaleRuns, architecture: str) -> None:
    """Q5, Q6: the names for a checkpoint are those of the live model's parameters, and its loader takes them all."""
    model, live = runs.model(architecture), runs.by_load(architecture)
    expected = sorted(model.checkpoint_names(include_q=True))
    assert {live["cache"][owner] for owner in model.owners()} == {"fp8"}
    assert sorted(live["parameters"]) == expected
    assert live["error"] is None
    assert live["loaded"] == expected
    arrived = {copy: value for copy, value in live["live"].items() if scale_of(copy) in expected}
    assert {scale_of(copy) for copy in arrived} == set(expected)
    assert set(arrived.values()) == {float32(BASE)}


@pytest.mark.parametrize("architecture", LOADED)
def test_a_scale_that_is_loaded_arrives_in_all_its_copies_and_nowhere_else(runs: ScaleRuns, architecture: str) -> None:
    """Q4: one layer and one kind at a time, by the road of a checkpoint."""
    live = runs.by_load(architecture)
    assert set(live["changes"]) == set(runs.model(architecture).names(include_q=True))
    for name, change in live["changes"].items():
        assert {scale_of(copy) for copy in change["moved"]} == {name}
        assert set(change["moved"].values()) == {float32(CHANGED)}
        assert change["reacts"] == (not name.endswith(".q_scale")), name


@pytest.mark.parametrize("architecture", ONLY_SET)
def test_where_the_engine_would_run_at_one_a_checkpoint_is_refused(runs: ScaleRuns, architecture: str) -> None:
    """Q7: the refusal is needed: whatever the loader says, every scale of the FP8 cache stays 1.0."""
    model = runs.model(architecture)
    with pytest.raises(ScaleNameError, match=r"run at 1\.0; set the buffers"):
        model.checkpoint_names()
    live = runs.by_load(architecture)
    assert {live["cache"][owner] for owner in model.owners()} == {"fp8"}
    assert live["parameters"] == []
    assert set(live["loaded"]).isdisjoint(model.names(include_q=True))
    assert {live["live"][f"{owner}._{kind}_scale"] for owner in model.owners() for kind in "qkv"} == {1.0}


@pytest.mark.parametrize("config", ["fp8", "modelopt", "compressed-tensors"])
def test_no_scale_of_a_checkpoint_is_live_below_the_calibrated_one(
    runs: ScaleRuns, tmp_path: Path, config: str
) -> None:
    """Two configs keep scales in the model's dtype: what is rounded up before arrives, what is not goes down there."""
    import torch
    from safetensors.torch import save_file

    checkpoint = make(tmp_path, "qwen3", 1)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**values, "quantization_config": dict(QUANTIZATION[config] or {})})
    )
    model = describe_model(values)
    kinds = ("q_scale", "k_scale", "v_scale")
    calibrated = {
        f"layer_{layer}": {kind: 0.0123456 * (1 + layer) + 0.00345678 * n for n, kind in enumerate(kinds)}
        for layer in model.blocks[0].layers
    }

    def live(kept_as: ScaleDtype) -> tuple[dict[str, float], dict[str, float]]:
        sent = model.to_vllm(calibrated, kept_as=kept_as)
        tensors = {name: torch.tensor(value) for name, value in sent.items()}
        save_file({**checkpoint.tensors, **tensors}, tmp_path / "with_scales.safetensors", {"format": "pt"})
        (tmp_path / "with_scales.safetensors").replace(tmp_path / "model.safetensors")
        found = runs.loaded(tmp_path)
        for name in sent:
            assert len({value for copy, value in found.items() if scale_of(copy) == name}) == 1, name
        return sent, {scale_of(copy): value for copy, value in found.items() if scale_of(copy) in sent}

    exact = model.to_vllm(calibrated)
    if config == "compressed-tensors":
        sent, found = live("float32")
        assert found == sent == exact
        return
    sent, found = live("bfloat16")
    assert found == sent
    assert all(found[name] >= exact[name] for name in exact)
    _, unrounded = live("float32")
    assert any(unrounded[name] < exact[name] for name in exact)


def test_the_table_in_the_docs_is_what_the_engines_say(runs: ScaleRuns) -> None:
    page = Path(__file__).parents[3] / "docs" / "fp8-scales.md"
    assert table(runs) in page.read_text(encoding="utf-8"), "make it anew: python -m tests.adapter.engine.scale_runs"


#: How checkpoints spell the path to a scale, before and after the layer's number.
PREFIXES = ("model.layers", "backbone.layers", "model.language_model.layers", "model.decoder.layers", "transformer.h")
BLOCKS = ("self_attn", "attn", "mixer", "self_attention", "encoder_attn", "self_attn.mla_attn")
LEAVES = (
    *("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "prob_output_scale", "k_zero_point", "q.scale"),
    *("k_cache.scale", "v_cache.scale", "q_proj.q_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.v_scale"),
    *("q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale", "qkv_proj.k_scale", "qkqkv_proj.v_scale"),
    *("kv_b_proj.k_scale", "attn.q_scale", "attn.k_scale", "attn.v_scale", "attn.kv_scale", "attn.prob_scale"),
    *("attn._k_scale", "mla_attn.q_scale", "mla_attn.k_scale", "mla_attn.v_scale", "mla_attn.prob_scale"),
)


def known_keys(runs: ScaleRuns, architecture: str, config: ScaleConfig) -> list[str]:
    """Return every spelling that ``fate_of_key`` knows, for one layer with attention and one without."""
    model = runs.model(architecture)
    present = model.blocks[0].layers[-1]
    absent = next(layer for layer in range(99) if layer not in model.blocks[0].layers)
    keys = [
        f"{prefix}.{layer}.{block}.{leaf}"
        for prefix in dict.fromkeys((*PREFIXES, model.blocks[0].prefix))
        for layer in (present, absent)
        for block in BLOCKS
        for leaf in LEAVES
    ]
    return [key for key in keys if fate_of_key(key, model, config=config).fate != "unknown"]


@pytest.mark.parametrize("config", ["fp8", "modelopt", "compressed-tensors"])
@pytest.mark.parametrize("architecture", TINY)
def test_every_spelling_of_a_key_has_the_fate_that_is_told(
    runs: ScaleRuns, architecture: str, config: ScaleConfig
) -> None:
    """Q1, Q4, Q5, Q6, Q11: what is said before a load is what the engine does with the key."""
    model, keys = runs.model(architecture), known_keys(runs, architecture, config)
    assert keys
    said = {key: fate_of_key(key, model, config=config) for key in keys}
    done = runs.fates(architecture, config, keys)
    assert {key: fate for key, (fate, _) in done.items()} == {key: fate.fate for key, fate in said.items()}
    loaded = {key: target for key, (fate, target) in done.items() if fate == "loads"}
    assert loaded == {key: fate.target for key, fate in said.items() if fate.target is not None}
