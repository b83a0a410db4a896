# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl calibrate``: a checkpoint with FP8 KV scales, from a model and a file of texts."""

import argparse
import shlex
import sys
from pathlib import Path

from nemo_rl_core import guard
from nemo_rl_core.cli.interrupts import terminate_like_interrupt

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Calibrate, and print where the result is and what to look at in it."""
    # Before torch and transformers are imported: the model's side needs no engine.
    guard.arm("train")
    with terminate_like_interrupt():
        from nemo_rl_core.algorithms.offline_calibration import CalibrationJob, calibrate_folder
        from nemo_rl_core.fp8.calibration_report import things_to_look_at

        job = CalibrationJob(
            model=Path(options.model),
            data=Path(options.data),
            out=Path(options.out),
            percentile=options.percentile,
            margin=options.margin,
            include_q=options.include_q,
            max_tokens=options.max_tokens,
            batch_tokens=options.batch_tokens,
            device=options.device,
        )
        record = calibrate_folder(job, _say)
    for remark in things_to_look_at(record, record["data"]["tokens"]):
        print(f"look at {remark}")
    print(f"{len(record['layers'])} scales of {len(record['rates'])} attention modules: {job.out}")
    served = shlex.quote(str(job.out))
    print(f"read {job.out / 'report.md'}; serve it with: vllm serve {served} --kv-cache-dtype fp8")
    return 0


def _say(line: str) -> None:
    # At once, also into a pipe: passes take minutes.
    print(line, file=sys.stderr, flush=True)
