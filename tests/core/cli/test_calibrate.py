# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl calibrate`` as a user calls it; what it does is tested beside ``calibrate_folder``."""

import json
import shlex
import subprocess
import sys

import pytest

from nemo_rl_core import guard
from nemo_rl_core.algorithms import offline_calibration
from nemo_rl_core.cli.app import main
from tests.core.algorithms.test_offline_calibration import save


@pytest.fixture(autouse=True)
def disarmed():
    """The command arms this process's guard, which other tests must not meet."""
    yield
    guard.disarm()


@pytest.fixture
def arguments(tmp_path):
    save(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "12?", "response": "345"}\n{"input_ids": [3, 4, 5]}\n')
    return [
        *("calibrate", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out")),
        *("--device", "cpu"),
    ]


def test_results_go_to_standard_output_and_progress_to_standard_error(arguments, tmp_path, capsys):
    options = ["--include-q", "--percentile", "90", "--margin", "1.5", "--max-tokens", "5", "--batch-tokens", "8"]
    assert main([*arguments, *options]) == 0
    out, err = capsys.readouterr()
    assert f"6 scales of 2 attention modules: {tmp_path / 'out'}" in out
    assert out.count("saturate") == 1  # what the percentile leaves out is one line
    assert f"vllm serve {tmp_path / 'out'} --kv-cache-dtype fp8" in out
    assert "2 sequences, 8 tokens, 1 cut" in err
    assert "calibrating: 8 of 8 tokens" in err
    record = json.loads((tmp_path / "out" / "kv_scales.json").read_text())
    assert (record["percentile"], record["margin"], record["include_q"]) == (90.0, 1.5, True)


@pytest.mark.parametrize(
    ("options", "line", "message"),
    [
        (["--margin", "0.5"], "{}", "margin must be between 1 and 1000, got 0.5"),
        (["--percentile", "0.999"], "{}", "percentile must be from 50 to 100, got 0.999; did you mean 99.9?"),
        (["--percentile", "49"], "{}", "percentile must be from 50 to 100, got 49.0: all values above it saturate"),
        ([], "{}", "line 3, has the keys []"),
        ([], "no json", "line 3, is no JSON"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, tmp_path, capsys, options, line, message):
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write(line)
    assert main([*arguments, *options]) == 2
    _, err = capsys.readouterr()
    assert err.startswith("nemo-rl calibrate: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_path_to_serve_can_be_pasted_into_a_shell(arguments, tmp_path, capsys):
    arguments[arguments.index("--out") + 1] = str(tmp_path / "my model's scales")
    assert main(arguments) == 0
    command = capsys.readouterr().out.splitlines()[-1].partition("serve it with: ")[2]
    assert shlex.split(command)[2] == str(tmp_path / "my model's scales")


def test_ctrl_c_is_exit_code_130_and_leaves_nothing(arguments, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(offline_calibration, "observe_sequences", interrupted)
    assert main(arguments) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "model"]


@pytest.mark.parametrize("number", ["0", "-3", "1.5", "many"])
def test_numbers_that_are_no_counts_are_refused_by_the_parser(arguments, number, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--batch-tokens", number])
    assert caught.value.code == 2
    assert "--batch-tokens" in capsys.readouterr().err


def test_it_loads_no_ray(arguments):
    code = f"import sys\nfrom nemo_rl_core.cli.app import main\nassert main({arguments!r}) == 0\nprint('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
