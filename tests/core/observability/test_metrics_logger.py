# SPDX-License-Identifier: Apache-2.0
"""Metrics on disk: one line a step, complete at once, and readable by every JSON parser."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.errors import DataError, StateError
from nemo_rl_core.observability.metrics_logger import MetricsLogger, read_metrics
from nemo_rl_core.observability.plain_json import dump_json


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines as a strict JSON parser sees them, without the time."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert all(isinstance(row.pop("time_s"), float) for row in rows)
    return rows


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """The scalars of the event files: records of length, check sum, protocol buffer, check sum."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in folder.glob("events.out.tfevents.*"):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
    return found


def test_each_step_is_one_line_that_is_complete_when_log_returns(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(0, {"loss": 0.5, "phase": "warm-up"})
        assert lines(logger.path) == [{"step": 0, "loss": 0.5, "phase": "warm-up"}]
        logger.log(3, {"loss": 0.25, "tokens": 7, "flag": True, "nothing": None})
        assert lines(logger.path)[1] == {"step": 3, "loss": 0.25, "tokens": 7, "flag": True, "nothing": None}


def test_what_is_not_finite_is_an_explicit_string_and_reads_back_as_a_number(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32("nan")})
        assert lines(logger.path) == [{"step": 1, "a": "nan", "b": "inf", "c": "-inf", "d": "nan"}]
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["a"])
    assert row["b"] == math.inf
    assert row["c"] == -math.inf


def test_scalars_of_numpy_and_torch_are_numbers_and_arrays_are_refused_by_name(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {"a": np.float32(0.5), "b": torch.tensor(3), "c": np.int64(4), "d": torch.tensor(0.5)})
        assert lines(logger.path) == [{"step": 1, "a": 0.5, "b": 3, "c": 4, "d": 0.5}]
        for bad in (np.zeros(2), torch.zeros(1), object(), {1, 2}):
            with pytest.raises(TypeError, match="'weight'"):
                logger.log(2, {"weight": bad})
        logger.log(2, {"after": 1})
        assert len(lines(logger.path)) == 2


def test_numbers_go_to_tensorboard_too(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        logger.log(1, {"loss": 0.5, "note": "text", "timing/refit": 2})
        logger.log(2, {"loss": math.inf, "nested": {"a": 1}})
    expected = {("loss", 1): 0.5, ("timing/refit", 1): 2.0, ("loss", 2): math.inf}
    assert scalars(tmp_path / "tensorboard") == expected


def test_without_tensorboard_there_are_no_event_files_and_the_library_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom nemo_rl_core.observability.metrics_logger import MetricsLogger\n"
        "import nemo_rl_core.observability.console, nemo_rl_core.observability.timers\n"
        "import nemo_rl_core.observability.run_folder\n"
        "MetricsLogger('run', tensorboard=False).log(1, {'a': 1})\n"
        "print(sorted({'torch', 'tensorboardX', 'numpy', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("step", [1, 0])
def test_a_step_is_logged_once(tmp_path: Path, step: int) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {})
        with pytest.raises(StateError, match=f"got {step} after 1"):
            logger.log(step, {})


def test_names_that_the_logger_writes_itself_are_refused(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as logger, pytest.raises(ValueError, match="'step'"):
        logger.log(1, {"step": 3})


def test_after_close_nothing_is_logged_and_closing_again_is_fine(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    logger.close()
    logger.close()
    with pytest.raises(StateError, match="close"):
        logger.log(1, {})


def test_files_are_closed_when_the_block_raises(tmp_path: Path) -> None:
    with pytest.raises(KeyError), MetricsLogger(tmp_path, tensorboard=False) as logger:
        raise KeyError("x")
    with pytest.raises(StateError):
        logger.log(1, {})


def test_two_runs_do_not_mix_unless_asked_to(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {})
    with pytest.raises(StateError, match="another run_dir"):
        MetricsLogger(tmp_path, tensorboard=False)
    with MetricsLogger(tmp_path, tensorboard=False, append=True) as logger:
        logger.log(2, {})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_torn_last_line_is_left_out_and_a_broken_one_in_between_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="line 1"):
        read_metrics(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(value=VALUES)
def test_everything_that_is_written_is_strict_json_on_one_line(value: Any) -> None:
    text = dump_json({"value": value}, "value")
    assert "\n" not in text
    assert json.loads(text, parse_constant=pytest.fail) is not None
