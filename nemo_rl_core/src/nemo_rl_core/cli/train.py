# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl train``: from a config file to a run folder."""

import argparse
import contextlib
import os
import socket
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core import guard
from nemo_rl_core.cli.interrupts import terminate_like_interrupt
from nemo_rl_core.config.load import dump_yaml, load_config
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.observability.console import RunConsole, format_bytes
from nemo_rl_core.observability.metrics_logger import MetricsLogger
from nemo_rl_core.observability.run_folder import RunFolder

if TYPE_CHECKING:
    from nemo_rl_core.algorithms.assemble import Ingredients
    from nemo_rl_core.algorithms.launch import Fleet
    from nemo_rl_core.algorithms.plan import RunPlan

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Train, or print the plan under ``--dry-run``."""
    started = time.monotonic()
    config = load_config(options.config, options.overrides)
    # Before torch, transformers or a task of the user's is imported: from here on the driver is guarded.
    guard.arm(
        "driver",
        on_violation=config.firewall.on_violation,
        allow=config.firewall.allow,
        allow_importers=config.firewall.allow_importers,
    )
    from nemo_rl_core.algorithms.assemble import prepare
    from nemo_rl_core.algorithms.plan import describe_plan, make_plan

    plan = make_plan(config)
    ingredients = prepare(config)
    console = RunConsole()
    if options.dry_run:
        sizes = {
            "prompts": f"{len(ingredients.train)} to train on, {len(ingredients.heldout)} held out",
            "steps": f"{config.grpo.max_num_steps} of {config.rollout_batch_size} completions",
        }
        console.summary(f"plan of {options.config} (nothing was started)", {**dict(describe_plan(plan)), **sizes})
        return 0
    folder = RunFolder.create(config.run_dir, options.config)
    folder.write_config(dump_yaml(config))
    console.note(f"run folder: {folder.path}")
    if plan.chosen.fp8_weights is not None:
        console.note(plan.chosen.fp8_weights.report)
    record = _Record(config, folder, started)
    _train(config, plan, ingredients, record, console)
    return 0


def _train(
    config: RunConfig, plan: "RunPlan", ingredients: "Ingredients", record: "_Record", console: RunConsole
) -> None:
    """Bring the workers up, run the loop, and leave a whole run folder whatever happens."""
    from nemo_rl_core.algorithms.assemble import assemble
    from nemo_rl_core.algorithms.launch import launch

    with (
        terminate_like_interrupt(),
        record.summary_at_the_end(console),
        MetricsLogger(record.folder.path, config.logger.tensorboard) as logger,
    ):
        console.note("starting Ray and the workers ...")
        with launch(config, plan, ingredients.files) as fleet:
            record.workers_are_up(fleet)

            def log(step: int, metrics: Mapping[str, Any]) -> None:
                record.worker_ledgers = fleet.firewall_reports()
                metrics = {**metrics, "firewall/violations": len(record.firewall()["violations"])}
                logger.log(step, metrics)
                record.step(step, metrics)
                console.step(step, metrics)

            grpo = assemble(config, ingredients, fleet.train, fleet.generation, log, attention=plan.attention)
            if plan.attention is not None:
                initial = config.generation.kv_scales.initial
                console.note(f"the KV cache is FP8; until the first calibration, in step 1, every scale is {initial:g}")
            with console:
                grpo.train()
            record.worker_ledgers = fleet.firewall_reports()


class _Record:
    """What ``summary.json`` will say."""

    def __init__(self, config: RunConfig, folder: RunFolder, started: float) -> None:
        self.folder = folder
        #: What the guard has seen in each worker, as of the last step.
        self.worker_ledgers: list[dict[str, Any]] = []
        self._config = config
        self._started = started
        self._roles: dict[str, Any] = {}
        self._startup_s: float | None = None
        self._first: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._steps = 0

    def workers_are_up(self, fleet: "Fleet") -> None:
        """Keep who the workers are, and write it down: while a run goes on its summary says ``running``."""
        self._roles = fleet.roles()
        self._startup_s = time.monotonic() - self._started
        self.folder.write_summary(self._summary("running", None))

    def firewall(self) -> dict[str, Any]:
        """Return what the guard has seen in the driver, as of now, and in the workers."""
        return guard.merge_reports([guard.ledger().as_dicts(), *self.worker_ledgers])

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the first and the last value of each metric."""
        self._first = {**metrics, **self._first}
        self._last = {**self._last, **metrics}
        self._steps = step

    @contextlib.contextmanager
    def summary_at_the_end(self, console: RunConsole) -> Generator[None]:
        """Write and print the summary when the block ends, also by an error or Ctrl-C."""
        status, error_text = "completed", None
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as end:
            # SystemExit: while Ray starts, a SIGTERM meets Ray's own handler.
            status = "interrupted"
            raise KeyboardInterrupt from end
        except BaseException as error:
            status, error_text = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            summary = self._summary(status, error_text)
            self.folder.write_summary(summary)
            console.summary(f"{status} after {self._steps} steps", self._lines(summary))

    def _summary(self, status: str, error: str | None) -> dict[str, Any]:
        return {
            "status": status,
            "error": error,
            "steps": self._steps,
            "seconds": round(time.monotonic() - self._started, 2),
            "startup_seconds": None if self._startup_s is None else round(self._startup_s, 2),
            "backend": self._config.generation.backend,
            "first": self._first,
            "last": self._last,
            "driver": {"interpreter": sys.executable, "host": socket.gethostname(), "pid": os.getpid()},
            "roles": self._roles,
            "firewall": self.firewall(),
        }

    def _lines(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        def change(name: str) -> str:
            first, last = self._first.get(name), self._last.get(name)
            return "-" if first is None or last is None else f"{first:.3f} -> {last:.3f}"

        moved = self._last.get("refit/bytes")
        firewall = summary["firewall"]
        attempts = firewall["third_party_attempts"]
        return {
            "reward": change("reward/mean"),
            "held-out accuracy": change("validation/accuracy"),
            "mismatch": self._last.get("train/token_mult_prob_error"),
            "weight version": self._last.get("refit/version"),
            "refit": "-" if moved is None else f"{format_bytes(moved)} in {self._last['refit/seconds']:.2f} s",
            "firewall violations": len(firewall["violations"]),
            "third-party attempts": ", ".join(f"{name} ({n})" for name, n in attempts.items()) or "none",
            "seconds": f"{summary['seconds']} (workers up after {summary['startup_seconds']})",
            "run folder": str(Path(self.folder.path)),
        }
