# SPDX-License-Identifier: Apache-2.0
"""The console: aligned lines in a file, a live table on a terminal."""

import io
import math
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl_core.observability.console import DEFAULT_COLUMNS, RunConsole, format_bytes, format_value

METRICS = {
    "reward/mean": 0.5,
    "validation/accuracy": 0.75,
    "train/loss": -0.01234,
    "train/kl_penalty": math.nan,
    "train/token_mult_prob_error": 1.0012,
    "timing/tokens_per_second": 12345.6,
    "refit/seconds": 0.157,
    "refit/bytes": 3_200_000,
    "something_else": 9,
}


def plain(**options: object) -> tuple[RunConsole, io.StringIO]:
    """A console that writes to a file."""
    file = io.StringIO()
    return RunConsole(Console(file=file), **options), file  # type: ignore[arg-type]


def test_a_step_is_one_aligned_line_where_there_is_no_terminal() -> None:
    console, file = plain()
    with console:
        console.step(1, METRICS)
        console.step(1234, {"reward/mean": 1.0, "validation/accuracy": None})
    header, first, second = file.getvalue().splitlines()
    assert header.split() == ["step", "reward", "held-out", "loss", "KL", "mismatch", "tokens/s", "refit", "moved"]
    assert first.split() == ["1", "0.500", "0.750", "-0.0123", "nan", "1.0012", "12,346", "0.16", "s", "3.20", "MB"]
    assert second.split() == ["1234", "1.000", "-", "-", "-", "-", "-", "-", "-"]
    assert len(header) == len(first) == len(second)
    assert "\x1b" not in file.getvalue()


def test_the_headings_come_again() -> None:
    console, file = plain(header_every=2)
    with console:
        for step in range(5):
            console.step(step, METRICS)
    kinds = ["head" if "reward" in line else "row" for line in file.getvalue().splitlines()]
    assert kinds == ["head", "row", "row", "head", "row", "row", "head", "row"]


def test_a_line_is_neither_wrapped_nor_cut_nor_read_as_markup() -> None:
    console, file = plain()
    text = "[bold]mismatch[/bold] " + "x" * 300
    console.note(text)
    assert file.getvalue() == text + "\n"


def test_a_terminal_shows_the_last_rows_in_a_table() -> None:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=120, color_system=None)
    with RunConsole(terminal, rows=3) as console:
        for step in range(100, 106):
            console.step(step, METRICS)
        console.note("a note")
    last = file.getvalue().rpartition("step ")[2]
    assert [step for step in range(100, 106) if f"{step} " in last] == [103, 104, 105]
    assert all(column.title in last for column in DEFAULT_COLUMNS)
    assert "a note" in file.getvalue()


def test_a_small_terminal_shows_every_column_whole_and_the_newest_steps() -> None:
    file = io.StringIO()
    large = METRICS | {"train/loss": -0.0123, "timing/tokens_per_second": 12345.0, "refit/bytes": 269030016}
    with RunConsole(Console(file=file, force_terminal=True, width=80, height=20, color_system=None)) as console:
        for step in range(100, 130):
            console.step(step, large)
    last = file.getvalue().rpartition("step ")[2]
    assert "…" not in last
    assert all(text in last for text in ("-0.0123", "12,345", "269.03 MB", "129 "))


def test_a_run_whose_reader_has_gone_goes_on() -> None:
    code = (
        "from nemo_rl_core.observability.console import RunConsole\n"
        "console = RunConsole()\n"
        "for step in range(20000): console.step(step, {'reward/mean': 0.5})\n"
        "open('reached', 'w').close()\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        pipe = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=folder)
        assert pipe.stdout is not None
        pipe.stdout.readline()
        pipe.stdout.close()
        assert pipe.wait(60) == 0
        assert (Path(folder) / "reached").exists()


def test_the_table_stays_and_the_terminal_is_usable_after_an_exception() -> None:
    file = io.StringIO()

    def run() -> None:
        with RunConsole(Console(file=file, force_terminal=True, width=120)) as console:
            console.step(7, METRICS)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run()
    assert "0.750" in file.getvalue()
    assert file.getvalue().rpartition("\x1b[?25")[2].startswith("h")  # the cursor is shown again


def test_a_real_terminal_gets_the_table_and_a_pipe_gets_lines() -> None:
    code = (
        "from nemo_rl_core.observability.console import RunConsole\n"
        "with RunConsole() as console: console.step(41, {'reward/mean': 0.5})"
    )
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        environment.pop(name, None)
    piped = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert piped.stdout.splitlines()[1].split()[:2] == ["41", "0.500"]
    main, side = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", code], stdout=side, check=True, timeout=60, env=environment)
        shown = os.read(main, 65536).decode()
    finally:
        os.close(side)
        os.close(main)
    assert "───" in shown
    assert "0.500" in shown


def test_a_summary_is_a_list_of_named_values() -> None:
    console, file = plain()
    console.summary(
        "done", {"steps": 12000, "reward": 0.98765, "stopped early": False, "best": None, "run": "results/x"}
    )
    assert file.getvalue().splitlines() == [
        "done",
        "  steps          12,000",
        "  reward         0.9877",
        "  stopped early  no",
        "  best           -",
        "  run            results/x",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (3_200_000, "3.20 MB"), (5e9, "5.00 GB"), (7e15, "7000.00 TB")],
)
def test_bytes_have_decimal_units(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(math.inf, "inf"), (1e-7, "1e-07"), (True, "yes"), (-5, "-5")])
def test_values_of_a_summary_are_short(value: object, text: str) -> None:
    assert format_value(value) == text


@pytest.mark.parametrize("options", [{"rows": 0}, {"header_every": 0}])
def test_a_table_has_at_least_one_row(options: dict) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plain(**options)
