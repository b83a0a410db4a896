# SPDX-License-Identifier: Apache-2.0
"""How close the logprobs of a real engine come to those of the train side, by precision and preset.

    python examples/smollm2/prepare.py
    python benchmarks/parity.py [--backend vllm] [--steps 2]

Trains SmolLM2 with `nemo-rl train`, the engine in its own environment, once as the example stands (bfloat16) and once
under `policy.generation.parity: strict`. Prints one JSON line a setting: the 99.9th percentile of |difference| in nats
and the mean ratio of probabilities (the mismatch), the worst step of each, and how many tokens were compared. Seconds
are those of the loop, by part.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from nemo_rl_core.observability.metrics_logger import read_metrics

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2"
DEADLINE_S = 1800

#: What each setting changes in the example. Under a preset the precision is left to it.
SETTINGS = {
    "default bfloat16": ["policy.precision=bfloat16"],
    "default float32": ["policy.precision=float32"],
    "strict": ["policy.generation.parity=strict", "policy.precision=float32"],
}


def run(backend: str, steps: int, overrides: list[str], folder: Path) -> list[dict]:
    """Train and return the rows of the steps that compared something."""
    command = [sys.executable, "-m", "nemo_rl_core", "train", str(EXAMPLE / "grpo_arithmetic.yaml")]
    command += [f"policy.model_name={EXAMPLE / 'model'}", f"policy.generation.backend={backend}", f"run_dir={folder}"]
    command += [f"grpo.max_num_steps={steps}", "grpo.val_period=0", "grpo.val_at_start=false", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return [row for row in read_metrics(folder) if row["step"] > 0]


def figure(setting: str, backend: str, rows: list[dict]) -> dict:
    """Return what is printed of one setting."""
    parts = ("generation", "policy_and_reference_logprobs", "policy_training", "refit")
    return {
        "setting": setting,
        "backend": backend,
        "steps": len(rows),
        "tokens": int(sum(row["train/num_tokens"] for row in rows)),
        "logprob_gap_p999": max(row["train/logprob_gap_p999"] for row in rows),
        "token_mult_prob_error": max(row["train/token_mult_prob_error"] for row in rows),
        "seconds": {part: round(sum(row[f"timing/{part}"] for row in rows), 2) for part in parts},
    }


def main() -> None:
    """Run each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="vllm")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    given = parser.parse_args()
    for setting in given.settings:
        with tempfile.TemporaryDirectory() as folder:
            rows = run(given.backend, given.steps, SETTINGS[setting], Path(folder) / "run")
        print(json.dumps(figure(setting, given.backend, rows)), flush=True)


if __name__ == "__main__":
    main()
