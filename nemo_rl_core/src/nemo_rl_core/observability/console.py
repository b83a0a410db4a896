# SPDX-License-Identifier: Apache-2.0
"""A run on the console: a live table on a terminal, aligned lines elsewhere."""

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

__all__ = ["DEFAULT_COLUMNS", "Column", "RunConsole", "format_bytes", "format_value"]


def format_bytes(value: float) -> str:
    """Return a number of bytes with a decimal unit, e.g. ``1.50 MB``."""
    size = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the table.

    Attributes:
        title: Its heading.
        metric: Name of the metric that it shows.
        form: Formats a finite number.
        width: Least width in characters.
    """

    title: str
    metric: str
    form: Callable[[float], str]
    width: int

    def text(self, metrics: Mapping[str, Any]) -> str:
        """Return the cell: ``-`` where the step did not measure it, ``nan`` or ``inf`` where it is that."""
        value = metrics.get(self.metric)
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        number = float(value)
        return self.form(number) if math.isfinite(number) else str(number)


#: What a GRPO step reports, by the names that the loop logs.
DEFAULT_COLUMNS: tuple[Column, ...] = (
    Column(title="reward", metric="reward/mean", form="{:.3f}".format, width=7),
    Column(title="held-out", metric="validation/accuracy", form="{:.3f}".format, width=8),
    Column(title="loss", metric="train/loss", form="{:.4f}".format, width=8),
    Column(title="KL", metric="train/kl_penalty", form="{:.4f}".format, width=8),
    Column(title="mismatch", metric="train/token_mult_prob_error", form="{:.4f}".format, width=8),
    Column(title="tokens/s", metric="timing/tokens_per_second", form="{:,.0f}".format, width=9),
    Column(title="refit", metric="refit/seconds", form="{:.2f} s".format, width=8),
    Column(title="moved", metric="refit/bytes", form=format_bytes, width=9),
)

_STEP_WIDTH = 6


class _LastingConsole(Console):
    """A console that falls silent when nobody reads any more (``| head``); rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Send what is still to come to nowhere."""
        self.quiet = True
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


class RunConsole:
    """Shows the steps of a run as they come.

    On a terminal the last rows stand in one table that is redrawn with each step (no thread redraws it between).
    Elsewhere each step is one line, and the headings come again every ``header_every`` lines. Use it as a context
    manager: on a terminal the table is up until it ends.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        columns: Sequence[Column] = DEFAULT_COLUMNS,
        rows: int = 20,
        header_every: int = 20,
    ) -> None:
        """Choose the form by what the console is.

        Args:
            console: Where to write; None takes standard output.
            columns: Columns after the step's number.
            rows: Rows of the live table.
            header_every: Lines between two headings where there is no terminal.

        Raises:
            ValueError: If ``rows`` or ``header_every`` is less than 1.
        """
        if rows < 1 or header_every < 1:
            raise ValueError(f"rows and header_every must be at least 1, got {rows} and {header_every}")
        self._console = console or _LastingConsole()
        self._columns = tuple(columns)
        # What does not fit would be cropped at the bottom, where the newest steps are.
        fitting = max(3, self._console.height - 5) if self._console.is_terminal else rows
        self._rows: deque[tuple[str, ...]] = deque(maxlen=min(rows, fitting))
        self._header_every = header_every
        self._lines = 0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Put up the table if this is a terminal."""
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the table as it stands, also after an exception."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show one step.

        Args:
            step: Its number.
            metrics: Metric name to value; those without a column are left out.
        """
        row = (str(step), *(column.text(metrics) for column in self._columns))
        self._rows.append(row)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        if self._lines % self._header_every == 0:
            self._line(("step", *(column.title for column in self._columns)))
        self._line(row)
        self._lines += 1

    def note(self, text: str) -> None:
        """Print a line of text; on a terminal it scrolls above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def summary(self, title: str, values: Mapping[str, Any]) -> None:
        """Print named values below each other.

        Args:
            title: Heading.
            values: Name to value; a number is shown with four significant digits.
        """
        self.note(title)
        width = max(map(len, values), default=0)
        for name, value in values.items():
            self.note(f"  {name.ljust(width)}  {format_value(value)}")

    def _line(self, cells: Sequence[str]) -> None:
        widths = (_STEP_WIDTH, *(max(column.width, len(column.title)) for column in self._columns))
        self.note("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))

    def _table(self) -> Table:
        # Nine columns have to fit on a terminal of 80.
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for title in ("step", *(column.title for column in self._columns)):
            table.add_column(title, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table


def format_value(value: Any) -> str:
    """Return a value for a summary: integers with separators, other numbers with four significant digits."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
