# SPDX-License-Identifier: Apache-2.0
"""Metrics on disk: one JSON object a step, and TensorBoard events."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nemo_rl_core.errors import DataError, StateError
from nemo_rl_core.observability.plain_json import dump_json, plain_value

__all__ = ["METRICS_FILE", "MetricsLogger", "read_metrics"]

#: Name of the metrics file in a run's folder.
METRICS_FILE = "metrics.jsonl"
_NOT_FINITE = {"nan", "inf", "-inf"}
_EVENTS_FLUSH_S = 5
_OWN_KEYS = ("step", "time_s")


class MetricsLogger:
    """Writes the metrics of a run to its folder.

    ``metrics.jsonl`` gets one line a step: ``step``, ``time_s`` (seconds since the epoch), then the metrics as given.
    A line is complete on disk before `log` returns. NaN and infinities are the strings ``"nan"``, ``"inf"`` and
    ``"-inf"``; `read_metrics` turns them back. Numbers go to TensorBoard too, strings and nested values do not; its
    files follow within some seconds, and are complete after `close`.

    Not thread-safe: one caller logs.
    """

    def __init__(self, run_dir: str | Path, tensorboard: bool = True, *, append: bool = False) -> None:
        """Open the files; the folder is made if need be.

        Args:
            run_dir: The run's folder.
            tensorboard: Whether to write event files into its subfolder ``tensorboard``. Only then is the library
                imported.
            append: Whether to go on with a metrics file that is there.

        Raises:
            StateError: If there is a metrics file and ``append`` is false.
        """
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS_FILE
        try:
            self._file = self._path.open("a" if append else "x", encoding="utf-8")
        except FileExistsError:
            raise StateError(
                f"a run must not mix its metrics with those of another, and {self._path} is there; "
                f"choose another run_dir, or pass append=True"
            ) from None
        self._last_step: int | None = None
        self._events: Any = None
        if tensorboard:
            # Here and not above: the library imports numpy, and torch where it is installed.
            from tensorboardX import FileWriter

            self._events = FileWriter(str(folder / "tensorboard"), flush_secs=_EVENTS_FLUSH_S)

    @property
    def path(self) -> Path:
        """Path of ``metrics.jsonl``."""
        return self._path

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write all metrics of one step.

        Args:
            step: Number of the step, greater than that of the call before.
            metrics: Name to number, string, or 0-d array; merge what belongs to one step into one call.

        Raises:
            StateError: If the logger is closed, or the step is not greater than the last one.
            ValueError: If a metric is called ``step`` or ``time_s``.
            TypeError: If a value is neither a number nor plain data; the message names it.
        """
        if self._file.closed:
            raise StateError(f"metrics of step {step} came after close(); log before")
        if self._last_step is not None and step <= self._last_step:
            raise StateError(
                f"steps must increase, got {step} after {self._last_step}; merge the metrics of one step into one call"
            )
        if taken := [name for name in _OWN_KEYS if name in metrics]:
            raise ValueError(f"a metric must not be called {taken[0]!r}: the logger writes that itself")
        values = {name: plain_value(value, f"metric {name!r}") for name, value in metrics.items()}
        line = dump_json({"step": step, "time_s": round(time.time(), 3), **values}, "metrics")
        self._file.write(line + "\n")
        self._file.flush()
        self._last_step = step
        if self._events is not None:
            self._events.add_summary(_event_summary(values), step)

    def close(self) -> None:
        """Close the files; calling it twice is fine."""
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> Self:
        """Return the logger itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the files, also after an exception."""
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics file; ``"nan"``, ``"inf"`` and ``"-inf"`` become floats again.

    A last line without its end is left out: the process died while it wrote.

    Args:
        path: A ``metrics.jsonl``, or the folder that holds it.

    Raises:
        FileNotFoundError: If there is none.
        DataError: If a complete line is no JSON object; the message names its number.
    """
    file = Path(path)
    if file.is_dir():
        file /= METRICS_FILE
    *complete, _torn = file.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(complete, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}, line {number}: a line must be a JSON object, got {line[:80]!r}") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}, line {number}: a line must be a JSON object, got {line[:80]!r}")
        rows.append({key: float(value) if _is_not_finite(value) else value for key, value in row.items()})
    return rows


def _event_summary(values: Mapping[str, Any]) -> Any:
    """Return the numbers among plain values as a TensorBoard summary."""
    from tensorboardX.proto import summary_pb2

    summary: Any = summary_pb2  # its classes are made at import, which type checkers do not see
    numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
    value = [summary.Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
    return summary.Summary(value=value)


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, str) and value in _NOT_FINITE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or _is_not_finite(value)
