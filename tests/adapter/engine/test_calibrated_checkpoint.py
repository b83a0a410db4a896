# SPDX-License-Identifier: Apache-2.0
"""A folder of ``nemo-rl calibrate`` in stock vLLM: the scales are live, bit for bit, and they are what keeps it right."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_core.algorithms.offline_calibration import CalibrationJob, calibrate_folder
from tests.adapter.engine.checkpoints import make

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

#: Values are this many times those of the usual tiny model, and the output projection makes up for it: at a scale of
#: 1.0 most of them lie above 448.
LARGER = 1000.0
PROMPT = [3 + (k * k * 7 + k) % 37 for k in range(200)]


def model_with_large_values(folder: Path) -> Path:
    make(folder, "qwen3", 1)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("v_proj.weight"):
            tensors[name] *= LARGER
        elif name.endswith("o_proj.weight"):
            tensors[name] /= LARGER
    save_file(
        {name: x.to(torch.bfloat16) for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder


def under_the_fp8_config(model: Path, folder: Path) -> Path:
    """The same model under vLLM's Fp8 config, which keeps scales in bfloat16; its kernels for weights need AMX."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    linear = [
        *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    fp8 = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{n}.{name}" for n in (0, 1) for name in linear)],
    }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    return folder


@pytest.fixture(scope="module")
def served(python, tmp_path_factory):
    """Two forms of a model, calibrated with q, and what stock vLLM does with them and with the model itself.

    Returns the sidecars, ``fp8`` and ``auto`` of the same, and by the same names, ``at 1.0`` and ``without`` the engines.
    """
    folder = tmp_path_factory.mktemp("calibrated")
    model = model_with_large_values(folder / "model")
    (folder / "data.jsonl").write_text(json.dumps({"input_ids": PROMPT}))
    records = {}
    for name, source in {"fp8": model, "Fp8 config": under_the_fp8_config(model, folder / "fp8 model")}.items():
        job = CalibrationJob(
            model=source, data=folder / "data.jsonl", out=folder / name, include_q=True, margin=1.5, device="cpu"
        )
        records[name] = calibrate_folder(job, print)
    records["auto"] = records["fp8"]
    engines = {
        "fp8": (folder / "fp8", "fp8"),
        "auto": (folder / "fp8", "auto"),
        "Fp8 config": (folder / "Fp8 config", "fp8"),
        "at 1.0": (model, "fp8"),
        "without": (model, "auto"),
    }
    given = {"engines": [(str(path), dtype) for path, dtype in engines.values()], "prompt": PROMPT}
    side = Path(__file__).with_name("calibrated_side.py")
    # Neither the adapter's switch nor this repository's sources: the engine as everybody has it.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NEMO_RL_", "PYTHONPATH"))}
    done = subprocess.run(
        [str(python), str(side), json.dumps(given)],
        env={**env, "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return records, dict(zip(engines, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", ["fp8", "auto", "Fp8 config"])
def test_the_live_scales_are_those_of_the_sidecar_bit_for_bit(served, name):
    """Q4, Q24: loaded is asked of the engine, for every module; and the folder says itself that its cache is FP8."""
    records, engines = served
    assert records[name]["kept_as"] == ("bfloat16" if name == "Fp8 config" else "float32")
    found = engines[name]["scales"].items()
    live = {f"{owner}.{kind}": values for owner, kinds in found for kind, values in kinds.items()}
    assert live == {name: [scale, scale] for name, scale in records[name]["layers"].items()}
    assert len(live) == 6


def test_without_them_the_engine_runs_at_one(served):
    """Control: the model itself has no scales."""
    _, engines = served
    assert {
        value for kinds in engines["at 1.0"]["scales"].values() for values in kinds.values() for value in values
    } == {1.0}


def test_logprobs_are_near_those_without_fp8_and_far_from_those_at_one(served):
    records, engines = served
    assert all(amax["v"] > 448 for amax in records["fp8"]["amax"].values())
    logprobs = {name: torch.tensor(engine["logprobs"]) for name, engine in engines.items()}
    assert torch.equal(logprobs["fp8"], logprobs["auto"])
    apart = {name: (logprobs[name] - logprobs["without"]).abs().mean().item() for name in engines}
    print("mean distance of logprobs from those without FP8:", apart)
    # Less mantissa in k and v, which a random model magnifies.
    assert 0 < apart["fp8"] < 0.25
    assert 0 < apart["Fp8 config"] < 0.25
    assert apart["at 1.0"] > 1
