# SPDX-License-Identifier: Apache-2.0
"""What the train side and the generation side of a run with vLLM are made of, and how long each part takes.

    nemo-rl env build vllm-cpu
    python benchmarks/two_sides.py [--steps 3]

Prints one JSON line a figure: for each side the installed distributions, the top-level packages that its worker's module
has loaded, and the seconds of that import; then a run of the tiny example with each backend, its seconds by part, and the
ratio of the two. Compare figures of one run only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from nemo_rl_core.observability.metrics_logger import read_metrics

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo_tiny.yaml"
DEADLINE_S = 900

#: What each side's worker process imports, engine included.
MODULES = {"train": ["nemo_rl_core.workers.dtensor"], "generation": ["nemo_rl_vllm.worker", "vllm"]}

LOOK = """
import importlib, importlib.metadata, json, sys, time
started = time.monotonic()
for name in sys.argv[1:]:
    importlib.import_module(name)
seconds = time.monotonic() - started
owners = importlib.metadata.packages_distributions()
loaded = sorted({name.partition(".")[0] for name in list(sys.modules)} & owners.keys())
count = len({d.metadata["Name"].lower() for d in importlib.metadata.distributions()})
print(json.dumps({"distributions": count, "loaded": loaded, "seconds": round(seconds, 1)}))
"""


def look(side: str, python: str) -> dict:
    """Return what an interpreter holds, and what the worker of that side loads in it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", LOOK, *MODULES[side]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(backend: str, steps: int) -> dict:
    """Train the tiny example and return seconds by part: the median step where a part is of a step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nemo_rl_core", "train", str(EXAMPLE), f"run_dir={folder}/run"]
        command += [f"policy.generation.backend={backend}", f"grpo.max_num_steps={steps}", "grpo.val_period=0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        rows = [row for row in read_metrics(Path(folder, "run")) if row["step"] > 0]

    def median(name: str) -> float:
        return sorted(row[name] for row in rows)[len(rows) // 2]

    return {
        "workers_up": summary["startup_seconds"],
        "generation": median("timing/generation"),
        "refit": median("refit/seconds"),
        "train": median("timing/policy_training"),
        "mismatch": max(row["train/token_mult_prob_error"] for row in rows),
        "engine": summary["roles"]["generation"][0]["engine_version"],
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    path = [sys.executable, "-m", "nemo_rl_core", "env", "path", "vllm-cpu"]
    engine = subprocess.run(path, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    sides = {"train": look("train", sys.executable), "generation": look("generation", engine)}
    for side, found in sides.items():
        print(json.dumps({"side": side, **found, "num_loaded": len(found["loaded"])}), flush=True)
    both = [set(found["loaded"]) for found in sides.values()]
    print(json.dumps({"only_generation_loads": sorted(both[1] - both[0])}), flush=True)
    print(json.dumps({"ratio_import_seconds": round(sides["generation"]["seconds"] / sides["train"]["seconds"], 1)}))
    runs = {backend: run(backend, given.steps) for backend in ("torch", "vllm")}
    for backend, found in runs.items():
        print(json.dumps({"backend": backend, **found}), flush=True)
    ratios = {
        part: round(runs["vllm"][part] / runs["torch"][part], 2) for part in ("workers_up", "generation", "refit")
    }
    print(json.dumps({"ratio_vllm_to_torch": ratios}))


if __name__ == "__main__":
    main()
