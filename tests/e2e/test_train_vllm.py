# SPDX-License-Identifier: Apache-2.0
"""The main job with a real engine in an environment of its own, built by the command that the error message names."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.observability.metrics_logger import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY, SMOLLM2 = EXAMPLES / "grpo_tiny.yaml", EXAMPLES / "smollm2"
BUILD_LIMIT_S, RUN_LIMIT_S = 1500, 900


def nemo_rl(*arguments: str, env: dict[str, str], limit_s: float) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "nemo_rl_core", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s, check=False)


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    """The variables of a site whose environments are built; kept between test runs, since it is gigabytes."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("NEMO_RL_")}
    env |= {"NEMO_RL_VENV_DIR": str(Path(tempfile.gettempdir()) / "nemo-rl-test-venvs"), "CUDA_VISIBLE_DEVICES": ""}
    done = nemo_rl("env", "build", "vllm-cpu", env=env, limit_s=BUILD_LIMIT_S)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return env


def trained(
    config: Path, folder: Path, *overrides: str, env: dict[str, str], limit_s: float = RUN_LIMIT_S
) -> list[dict[str, Any]]:
    """Train with the engine and return the rows of the metrics."""
    given = ("policy.generation.backend=vllm", f"run_dir={folder}", *overrides)
    done = nemo_rl("train", str(config), *given, env=env, limit_s=limit_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return read_metrics(folder)


@pytest.mark.full
@pytest.mark.timeout(BUILD_LIMIT_S + 60)
def test_the_built_environment_is_listed_with_the_engine_that_it_holds(site):
    """The engine's version is asked in its own interpreter; this process cannot even find it."""
    assert importlib.util.find_spec("vllm") is None
    done = nemo_rl("backends", "--check", "--json", env=site, limit_s=200)
    row = {row["name"]: row for row in json.loads(done.stdout)}["vllm"]
    python = nemo_rl("env", "path", "vllm-cpu", env=site, limit_s=60).stdout.strip()
    assert (row["engine_state"], row["engine"], row["interpreter"]) == ("available", "vllm-cpu 0.32.0", python)
    assert (row["environment"], row["environment_state"]) == ("vllm-cpu", "ready")


@pytest.mark.full
@pytest.mark.timeout(BUILD_LIMIT_S + RUN_LIMIT_S + 60)
def test_three_steps_train_with_the_engine_in_its_own_interpreter_and_the_driver_without_it(site, tmp_path):
    """U1, U8, U30, U40, U46, R1: two torches, one refit after each step, logprobs of both sides agree."""
    assert importlib.util.find_spec("vllm") is None
    rows = trained(TINY, tmp_path / "run", "grpo.max_num_steps=3", env=site)
    assert [row["generation/weight_version"] for row in rows] == [0, 0, 1, 2]
    assert all(row["train/token_mult_prob_error"] < 1.05 for row in rows[1:])
    assert len({row["refit/digest"] for row in rows}) == 4
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    print(f"workers up after {summary['startup_seconds']} s, all in {summary['seconds']} s")
    (train,), (generation,) = summary["roles"]["train"], summary["roles"]["generation"]
    assert (generation["backend"], generation["engine_version"]) == ("vllm", "vllm-cpu 0.32.0")
    assert Path(generation["interpreter"]).is_relative_to(site["NEMO_RL_VENV_DIR"])
    assert generation["versions"]["torch"].startswith("2.13.0")
    assert train["interpreter"] == summary["driver"]["interpreter"] == sys.executable
    assert not {"vllm", "vllm-cpu"} & set(train["versions"])
    assert train["versions"]["torch"] != generation["versions"]["torch"]
    assert summary["firewall"]["violations"] == []


@pytest.mark.full
@pytest.mark.timeout(BUILD_LIMIT_S + RUN_LIMIT_S + 60)
def test_two_replicas_of_the_engine_get_the_same_weights_and_keep_the_order_of_requests(site, tmp_path):
    """U50: Two engines on one machine. A completion that met another's prompt would show as a mismatch far above 1."""
    overrides = (
        "grpo.max_num_steps=3",
        *("cluster.gpus_per_node=3", "policy.generation.colocated.resources.gpus_per_node=2"),
    )
    rows = trained(TINY, tmp_path / "run", *overrides, env=site)
    assert [row["generation/weight_version"] for row in rows] == [0, 0, 1, 2]
    # A refit has ended when every replica has reported the digest that was sent, of its live weights.
    assert len({row["refit/digest"] for row in rows}) == 4
    assert None not in {row["refit/digest"] for row in rows}
    assert all(row["train/token_mult_prob_error"] < 1.01 for row in rows[1:])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    print(f"workers up after {summary['startup_seconds']} s, all in {summary['seconds']} s")
    replicas = summary["roles"]["generation"]
    assert [replica["worker"] for replica in replicas] == ["generation-0", "generation-1"]
    assert [replica["rank"] for replica in replicas] == [0, 1]
    assert {replica["engine_version"] for replica in replicas} == {"vllm-cpu 0.32.0"}
    assert len({replica["pid"] for replica in replicas}) == 2


@pytest.mark.full
@pytest.mark.timeout(BUILD_LIMIT_S + RUN_LIMIT_S + 60)
def test_a_replica_of_two_ranks_takes_two_slots_and_both_ranks_get_the_weights(site, tmp_path):
    """U30: one worker of two slots; a rank without the weights would show in the digest and in the mismatch."""
    overrides = (
        *("policy.generation.vllm_cfg={tensor_parallel_size: 2}", "grpo.max_num_steps=2"),
        *("cluster.gpus_per_node=3", "policy.generation.colocated.resources.gpus_per_node=2"),
    )
    rows = trained(TINY, tmp_path / "run", *overrides, env=site)
    assert [row["generation/weight_version"] for row in rows] == [0, 0, 1]
    assert all(row["train/token_mult_prob_error"] < 1.01 for row in rows[1:])
    assert len({row["refit/digest"] for row in rows}) == 3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    print(f"workers up after {summary['startup_seconds']} s, all in {summary['seconds']} s")
    assert len(summary["roles"]["generation"]) == 1


@pytest.mark.full
@pytest.mark.timeout(BUILD_LIMIT_S + RUN_LIMIT_S + 60)
def test_a_mixture_of_experts_trains_with_the_engine(site, tmp_path):
    """transformers keeps the experts of a layer in one tensor; the engine gets each of them on its own."""
    overrides = (
        *("policy.hf_config.model_type=qwen3_moe", "policy.hf_config.num_experts=4"),
        *("policy.hf_config.num_experts_per_tok=2", "policy.hf_config.moe_intermediate_size=128"),
        *("policy.generation.vllm_cfg.enforce_eager=true", "grpo.max_num_steps=3"),
    )
    rows = trained(TINY, tmp_path / "run", *overrides, env=site)
    assert [row["generation/weight_version"] for row in rows] == [0, 0, 1, 2]
    assert len({row["refit/digest"] for row in rows}) == 4
    assert all(row["train/token_mult_prob_error"] < 1.01 for row in rows[1:])


@pytest.mark.full
@pytest.mark.timeout(BUILD_LIMIT_S + 4 * RUN_LIMIT_S)
@pytest.mark.parametrize(
    ("overrides", "gap", "mismatch"),
    [
        (("policy.precision=float32", "policy.generation.parity=strict"), 1e-4, 1.0001),
        (("policy.precision=bfloat16",), 1.0, 1.04),
    ],
    ids=["strict", "bfloat16"],
)
def test_real_weights_train_with_the_engine_as_close_as_the_preset_says(site, tmp_path, overrides, gap, mismatch):
    """SmolLM2; the bounds of bfloat16 are what was measured and a little more: the rest is that model's own rounding."""
    subprocess.run([sys.executable, str(SMOLLM2 / "prepare.py")], check=True, timeout=900)
    given = (
        *(f"policy.model_name={SMOLLM2 / 'model'}", "grpo.max_num_steps=2", "grpo.val_period=0"),
        *("grpo.val_at_start=false", *overrides),
    )
    config, limit_s = SMOLLM2 / "grpo_arithmetic.yaml", 2 * RUN_LIMIT_S
    rows = trained(config, tmp_path / "run", *given, env=site, limit_s=limit_s)[1:]
    print([(row["train/logprob_gap_p999"], row["train/token_mult_prob_error"]) for row in rows])
    assert all(0 < row["train/logprob_gap_p999"] <= gap for row in rows)
    assert all(row["train/token_mult_prob_error"] < mismatch for row in rows)
    assert len({row["refit/digest"] for row in rows}) == 2


@pytest.mark.full
@pytest.mark.timeout(BUILD_LIMIT_S + RUN_LIMIT_S + 60)
@pytest.mark.parametrize(
    ("overrides", "ignored", "kv_cache", "counts"),
    [
        ((), "layers.3.mlp.down_proj", "auto", "27 modules are cast, 2 stay"),
        ((), "layers.0", "fp8", "21 modules are cast, 8 stay"),
        (
            (
                *("policy.hf_config.model_type=qwen3_moe", "policy.hf_config.num_experts=4"),
                *("policy.hf_config.num_experts_per_tok=2", "policy.hf_config.moe_intermediate_size=128"),
            ),
            "layers.3.mlp.experts",
            "auto",
            "52 modules are cast, 17 stay",
        ),
    ],
    ids=["dense", "with an FP8 KV cache", "experts"],
)
def test_an_engine_with_fp8_weights_trains(site, tmp_path, overrides, ignored, kv_cache, counts):
    """Q32, Q40: the train side casts, the engine computes with it; the experts of one layer stay, as they are told to."""
    stays = f"quantization_ignored_layer_kws: [{ignored}]"
    section = f"{{precision: fp8, kv_cache_dtype: {kv_cache}, enforce_eager: true, {stays}}}"
    given = ("policy.hf_config.head_dim=64", "policy.precision=bfloat16", f"policy.generation.vllm_cfg={section}")
    plan = nemo_rl(
        "train", str(TINY), "policy.generation.backend=vllm", *given, *overrides, "--dry-run", env=site, limit_s=200
    )
    assert counts in plan.stdout
    assert f"pattern '{ignored}' hit" in plan.stdout
    rows = trained(TINY, tmp_path / "run", *given, *overrides, "grpo.max_num_steps=2", env=site)
    assert [row["generation/weight_version"] for row in rows] == [0, 0, 1]
    assert len({row["refit/digest"] for row in rows}) == 3
    print([(row["refit/bytes"], row.get("train/token_mult_prob_error")) for row in rows])
    assert all(row["train/token_mult_prob_error"] < 1.05 for row in rows[1:])


@pytest.mark.full
@pytest.mark.timeout(BUILD_LIMIT_S + RUN_LIMIT_S + 60)
def test_an_fp8_kv_cache_gets_new_scales_with_every_refit_on_every_rank(site, tmp_path):
    """Q24, Q27: declared scales first, then calibrated ones; a rank without them would show in the digest."""
    overrides = (
        *("policy.generation.vllm_cfg={kv_cache_dtype: fp8, tensor_parallel_size: 2}", "grpo.max_num_steps=3"),
        *("cluster.gpus_per_node=3", "policy.generation.colocated.resources.gpus_per_node=2"),
        "policy.generation.kv_scales.initial=0.5",
    )
    plan = nemo_rl("train", str(TINY), "policy.generation.backend=vllm", *overrides, "--dry-run", env=site, limit_s=200)
    assert "FP8, scales of 4 attention modules with each refit" in plan.stdout
    rows = trained(TINY, tmp_path / "run", *overrides, env=site)
    assert [row["generation/weight_version"] for row in rows] == [0, 0, 1, 2]
    assert [row["kv_scales/calibrated"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert len({row["refit/digest"] for row in rows}) == 4
    assert len({row["refit/bytes"] for row in rows}) == 1, "the scales are part of the first refit too"
    assert all(row["train/token_mult_prob_error"] < 1.03 for row in rows[1:])
    # The margin of 2, less what one step of training moves; q, k and v of 4 layers.
    assert all(1.2 < row["kv_scales/headroom"] < 3.0 for row in rows[2:])
    assert all(row["kv_scales/saturated"] == 0.0 for row in rows[1:])
