# SPDX-License-Identifier: Apache-2.0
"""What FP8 scales do to real weights: SmolLM2's logprobs under an FP8 cache against those under a bfloat16 cache.

Prints a table; `pytest -s -m full` on this file makes it again.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.data.tokenizers import build_tokenizer
from nemo_rl_core.fp8.model_families import describe_model
from nemo_rl_core.policy.local import LocalWorkerGroup
from nemo_rl_core.policy.policy import Policy
from nemo_rl_core.protocols.generation import GenerationRequest, SamplingParams
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_core.refit.report import RefitReport
from nemo_rl_core.workers.dtensor import DTensorPolicyWorker
from nemo_rl_core.workers.settings import BatchingSettings, PolicySettings
from tests.adapter.engine.live import REFIT, LiveEngine

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"
FOLDER = EXAMPLE / "model"
QUESTIONS = (
    *("What is 17 + 25?", "Name three rivers of Europe and say where they end.", "How does a steam engine work?"),
    *("Write a short letter to a friend about the sea.", "What is the difference between a frog and a toad?"),
    *(
        "Explain what a prime number is, with examples.",
        "List five things to pack for a hike.",
        "Who was Ada Lovelace?",
    ),
)
NUM_TOKENS = 160


@dataclass(frozen=True)
class Texts:
    """Prompts with the responses that the engine sampled, as token ids."""

    calibration: list[list[int]]
    held_out: list[list[int]]


def settings(**options) -> GenerationSettings:
    return GenerationSettings(
        model=ModelSettings(folder=str(FOLDER), precision="bfloat16", max_total_sequence_length=512),
        tokenizer=TokenizerSettings(folder=str(FOLDER)),
        refit=REFIT | {"bucket_bytes": 64_000_000},
        options={"enforce_eager": True, **options},
    )


@pytest.fixture(scope="module")
def live(python) -> Iterator[LiveEngine]:
    if not FOLDER.is_dir():
        subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True, timeout=900)
    engine = LiveEngine(python, settings(), one_process=True)
    try:
        engine.ready()
        yield engine
    finally:
        engine.close()


def refit(live, scales=None) -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    sent, _ = live.refit(tensors | {name: torch.tensor(value) for name, value in (scales or {}).items()})
    assert isinstance(sent, RefitReport), sent


def sample(live) -> Texts:
    """Let the engine answer, so that the cache holds prompts and responses as in a run; half is for calibration."""
    tokenizer = build_tokenizer(TokenizerSettings(folder=str(FOLDER)))
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in QUESTIONS
    ]
    prompts = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    params = [SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.7, seed=seed) for seed in range(len(prompts))]
    requests = [GenerationRequest(prompt_ids=p, sampling=s) for p, s in zip(prompts, params, strict=True)]
    completions = live.generate(requests)
    rows = [[*prompt, *completion.token_ids] for prompt, completion in zip(prompts, completions, strict=True)]
    return Texts(calibration=rows[::2], held_out=rows[1::2])


def calibrated(rows) -> dict[str, float]:
    """Return the scales of a policy on these rows, through its public method."""
    width = max(map(len, rows))
    batch = BatchedDataDict(
        {
            "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            "input_lengths": torch.tensor([len(row) for row in rows]),
        }
    )
    model = ModelSettings(folder=str(FOLDER), precision="bfloat16", max_total_sequence_length=512)
    worker = DTensorPolicyWorker(PolicySettings(model=model, batching=BatchingSettings(logprob_batch_size=2)))
    group = LocalWorkerGroup([worker])
    try:
        return Policy(group).calibrate_qkv_fp8_scales(batch, include_q=True)["layers"]
    finally:
        group.shutdown()


def test_calibrated_scales_keep_the_logprobs_and_a_quarter_of_them_does_not(live):
    refit(live)
    texts = sample(live)
    reference = live.call("prompt_logprobs", texts.held_out)
    assert reference == live.call("prompt_logprobs", texts.held_out), "or the gap below would be noise"
    scales = calibrated(texts.calibration)
    attention = describe_model(AutoConfig.from_pretrained(FOLDER))
    live.restart(replace(settings(kv_cache_dtype="fp8_e4m3"), kv_scales=attention.names(include_q=True)))

    def gap(values: dict[str, float]) -> tuple[float, float]:
        refit(live, values)
        found = live.call("prompt_logprobs", texts.held_out)
        gaps = torch.tensor(
            [abs(a - b) for x, y in zip(reference, found, strict=True) for a, b in zip(x, y, strict=True)]
        )
        return gaps.mean().item(), gaps.quantile(0.99).item()

    tried = {
        "calibrated (margin 2)": scales,
        "calibrated again": scales,
        "8 times": {name: 8 * value for name, value in scales.items()},
        "1.0": dict.fromkeys(scales, 1.0),
        "half": {name: value / 2 for name, value in scales.items()},
        "a quarter": {name: value / 4 for name, value in scales.items()},
        "an eighth": {name: value / 8 for name, value in scales.items()},
    }
    found = {what: gap(values) for what, values in tried.items()}
    print(f"\n| scales | mean gap | 99th percentile | ({sum(map(len, reference))} tokens)\n|---|---|---|")
    for what, (mean, high) in found.items():
        print(f"| {what} | {mean:.4f} | {high:.3f} |")
    print(f"calibrated scales from {min(scales.values()):.4f} to {max(scales.values()):.4f}")
    best = found["calibrated (margin 2)"][0]
    assert 0 < best < 0.25
    # Headroom is free: nothing saturates at half of a margin of 2, and e4m3 keeps its precision over a wide range.
    assert found["half"][0] < 1.5 * best
    assert found["8 times"][0] < 1.5 * best
    assert found["a quarter"][0] > 2 * best
    assert found["an eighth"][0] > found["a quarter"][0]
