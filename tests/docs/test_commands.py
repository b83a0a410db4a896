# SPDX-License-Identifier: Apache-2.0
"""Every command, script and config in the docs is run, or says on the line before it why it is not.

Each page is worked through from top to bottom in a folder of its own, which holds `examples`, `.ci` and `.importlinter`
as the repository does, and `run.yaml`, which is the tiny example. Pages of docs/design show pieces of code beside the
text; those are parsed and not run.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.load import config_from_mapping
from nemo_rl_core.config.yaml_io import deep_merge, load_yaml, load_yaml_file
from tests.docs.pages import ROOT, Block, all_blocks, blocks, pages

pytestmark = pytest.mark.timeout(600)

COMMAND_TIMEOUT_S = 400
LANGUAGES = {"", "bash", "python", "yaml", "text", "toml", "json", "ini", "mermaid"}
#: What a bash block may hold when it is run.
ALLOWED = ("nemo-rl ", "nemo-rl-contracts ", "python ", "lint-imports", ".ci/check lint", "rm .importlinter")
#: The one page that trains; a run takes half a minute.
TRAINS = "README.md"
SHORT = "grpo.max_num_steps=2"


def is_design(page: str) -> bool:
    return page.startswith("docs/design/")


def trains(command: str) -> bool:
    return " train " in command and not {"--dry-run", "--help"} & set(command.split())


def working_pages() -> list[str]:
    """Pages with something to run."""
    languages = ("bash", "python")
    return [
        page
        for page in pages()
        if any(b.is_run and b.language in languages for b in blocks(page)) and not is_design(page)
    ]


def make_workshop(folder: Path) -> Path:
    for name in ("examples", ".ci", ".importlinter", "uv.lock"):
        (folder / name).symlink_to(ROOT / name)
    for project in ("nemo_rl_core", "nemo_rl_vllm", "contracts"):  # contracts compare imports with their metadata
        (folder / project).mkdir()
        (folder / project / "pyproject.toml").symlink_to(ROOT / project / "pyproject.toml")
    shutil.copy(ROOT / "examples/grpo_tiny.yaml", folder / "run.yaml")
    return folder


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one command as a reader would, in the environment of these tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NEMO_RL_", "RAY_"))}
    env |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}",
        "UV_NO_SYNC": "1",  # .ci/check goes through uv, and a test must not change the environment it runs in
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )


def work_through(block: Block, folder: Path) -> str:
    """Run one block and return what it printed."""
    if "file" in block.marks:
        path = folder / block.marks["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        return ""
    if block.language == "python":
        script = folder / f"block_{block.line}.py"
        script.write_text(block.text, encoding="utf-8")
        return done_well(block, [sys.executable, script.name], folder)
    printed = ""
    for command in block.commands if block.language == "bash" else []:
        assert command.startswith(ALLOWED), (
            f"{block.place}: {command!r} is none of {ALLOWED}; write `<!-- not run: reason -->` before the block"
        )
        shortened = f"{command} {SHORT}" if trains(command) else command
        printed += done_well(block, ["bash", "-c", shortened], folder)
    return printed


def done_well(block: Block, command: list[str], folder: Path) -> str:
    done = run(command, folder)
    assert done.returncode == 0, f"{block.place}: {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def alike(line: str) -> str:
    """A line without what changes from run to run: numbers and spacing."""
    return " ".join(re.sub(r"-?\d[\d.,]*", "0", line).split())


def missing_lines(shown: str, printed: str) -> list[str]:
    there = {alike(line) for line in printed.splitlines()}
    return [line for line in shown.splitlines() if line.strip() and "..." not in line and alike(line) not in there]


@pytest.mark.parametrize("page", working_pages())
def test_every_block_of_the_page_does_what_the_page_says(page: str, tmp_path: Path) -> None:
    folder = make_workshop(tmp_path)
    printed = ""
    for block in blocks(page):
        if not block.is_run:
            continue
        if "output" in block.marks:
            assert missing_lines(block.text, printed) == [], (
                f"{block.place}: the page shows what was not printed:\n{printed}"
            )
        elif block.language in ("bash", "python") or "file" in block.marks:
            printed = work_through(block, folder)
    if page == TRAINS:
        check_metrics_page(folder)


def check_metrics_page(folder: Path) -> None:
    """docs/run-folder.md lists exactly the metrics that the run of the README has logged, and its files."""
    (run_folder,) = (folder / "results" / "grpo_tiny").iterdir()
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    logged = {name for row in rows for name in row}
    text = (ROOT / "docs/run-folder.md").read_text()
    metrics = text.partition("## Metrics")[2].partition("## Summary")[0]
    listed = set(re.findall(r"^\| `([a-z_]+(?:/[a-z_0-9]+)?)` \|", metrics, re.MULTILINE))
    assert listed == logged
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "tensorboard"):
        assert (run_folder / name).exists()
        assert f"`{name}`" in text
    summary = json.loads((run_folder / "summary.json").read_text())
    assert set(re.findall(r"^- `([a-z_]+)`:", text, re.MULTILINE)) == set(summary)
    assert summary["firewall"]["violations"] == []


def test_only_the_readme_trains() -> None:
    """Another training run in the docs would cost half a minute each time the tests run."""
    training = {b.page for b in all_blocks() if b.language == "bash" and b.is_run for c in b.commands if trains(c)}
    assert training == {TRAINS}


def test_what_is_not_run_says_why_and_is_counted() -> None:
    not_run = [block for block in all_blocks() if not block.is_run]
    assert [block.place for block in not_run if len(block.marks["not run"]) < 10] == []
    told = re.search(r"(\d+) blocks are not run", (ROOT / "docs/what-is-not-tested.md").read_text())
    assert told is not None
    assert int(told[1]) == len(not_run), [block.place for block in not_run]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert [b.place for b in all_blocks() if b.language not in LANGUAGES] == []
    # Without a language a command would escape; design pages draw diagrams so.
    assert [b.place for b in all_blocks() if not b.language and not is_design(b.page)] == []


@pytest.mark.parametrize("block", [b for b in all_blocks() if b.language == "python"], ids=lambda b: b.place)
def test_python_blocks_parse(block: Block) -> None:
    ast.parse(block.text)


def with_the_tiny_run(block: Block) -> dict[str, Any]:
    """Lay a YAML block over the tiny example, which gives what the block leaves out."""
    base = load_yaml_file(ROOT / "examples/grpo_tiny.yaml")
    shown = load_yaml(block.text, block.place)
    shown.pop("defaults", None)
    if (shown.get("policy") or {}).get("model_name"):
        base["policy"] = {k: v for k, v in base["policy"].items() if k not in ("hf_config", "tokenizer")}
    return deep_merge(base, shown)


@pytest.mark.parametrize("block", [b for b in all_blocks() if b.language == "yaml" and b.is_run], ids=lambda b: b.place)
def test_yaml_blocks_are_accepted(block: Block) -> None:
    config_from_mapping(with_the_tiny_run(block), block.place)


# -- the checks themselves ---------------------------------------------------------------------------------------


def one(text: str) -> Block:
    (block,) = blocks("page.md", text)
    return block


def test_a_command_outside_the_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not run: reason"):
        work_through(one("```bash\nrm -rf build\n```\n"), tmp_path)


def test_a_failing_block_is_red_and_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:3.*\n.*ZeroDivisionError|(?s:page\.md:3.*ZeroDivisionError)"):
        work_through(one("words\n\n```python\n1 / 0\n```\n"), tmp_path)


def test_marks_hold_for_the_next_block_only() -> None:
    text = "<!-- not run: it is long -->\n```bash\nx\n```\n```bash\ny\n```\n<!-- output -->\nwords\n```text\nz\n```\n"
    first, second, third = blocks("page.md", text)
    assert first.marks == {"not run": "it is long"}
    assert second.marks == third.marks == {}


def test_commands_are_read_without_comments_and_preparation() -> None:
    block = one(
        "```bash\n# first\npip install uv && uv run nemo-rl train \\\n    a.yaml  # trains\nuv run pytest\n```\n"
    )
    assert [" ".join(command.split()) for command in block.commands] == ["nemo-rl train a.yaml", "pytest"]


def test_output_that_was_not_printed_is_found() -> None:
    assert missing_lines("step  reward\n  1   0.5\n...\n", "step reward\n2 0.25\n") == []
    assert missing_lines("version 2\nblocks 3\n", "version 7\n") == ["blocks 3"]


def test_a_yaml_block_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown key"):
        config_from_mapping(with_the_tiny_run(one("```yaml\ngrpo: {num_steps: 3}\n```\n")))
