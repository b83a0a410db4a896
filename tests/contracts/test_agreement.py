# SPDX-License-Identifier: Apache-2.0
"""What is said of an import by its position, compared with what a clean interpreter does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "agreement.py"
OURS = ("nemo_rl_contracts", "nemo_rl_core", "nemo_rl_vllm")
#: Small enough for every run; docs/firewall-agreement.md has the heavy ones.
PUBLIC = ("jinja2", "packaging", "rich")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *OURS, *PUBLIC], capture_output=True, text=True, timeout=240, check=True
    )
    return {row["package"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("package", OURS)
def test_of_our_packages_every_edge_is_predicted_and_every_prediction_runs(package: str, rows: dict[str, dict]) -> None:
    """F12, F31: no difference at all, neither in the edges nor in what the package alone loads."""
    row = rows[package]
    assert row["not_importable"] == 0
    shares = {row[key] for key in ("recall", "recall_eager", "recall_with_calls", "precision")}
    assert shares == {1.0 if row["edges_seen"] else None}
    assert row["closure_missed"] == row["closure_idle"] == []


def test_the_comparison_is_not_empty(rows: dict[str, dict]) -> None:
    assert rows["nemo_rl_core"]["edges_seen"] > 200
    assert rows["nemo_rl_contracts"]["edges_seen"] > 50


@pytest.mark.parametrize("package", PUBLIC)
def test_of_public_packages_none_is_missed_and_each_difference_has_a_cause(package: str, rows: dict[str, dict]) -> None:
    row = rows[package]
    assert row["recall"] == 1.0
    assert row["recall_eager"] > 0.9
    assert row["precision"] >= 0.98
    for _, cause in [*row["idle"], *row["calls"], *row["closure_missed"], *row["closure_idle"]]:
        assert cause
