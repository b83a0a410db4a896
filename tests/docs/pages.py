# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation, cut into code blocks.

A block may carry marks on the lines right before its fence:

``<!-- not run: reason -->``  it is shown and not run
``<!-- file: name.py -->``    it is written to that file of the page's folder, for the blocks after it
``<!-- output -->``           it is what the block before it prints; lines with ``...`` and numbers may differ
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"<!-- (not run|file|output)(?:: (.+))? -->\s*$")
#: Nothing but the environment is prepared by these; the tests have one already.
PREPARATIONS = ("pip install uv && ", "uv run ")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block.

    Attributes:
        page: The page, relative to the root.
        line: Number of the fence's line.
        language: What stands after the fence; "" where nothing does.
        text: What is inside.
        marks: Mark to what it says; "" where it says nothing.
    """

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        return "not run" not in self.marks

    @property
    def commands(self) -> list[str]:
        """The commands of a bash block, without comments and without what prepares the environment."""
        lines = self.text.replace("\\\n", " ").splitlines()
        commands = [re.sub(r"\s+# .*", "", line).strip() for line in lines]
        return [stripped(command) for command in commands if command and not command.startswith("#")]


def stripped(command: str) -> str:
    for preparation in PREPARATIONS:
        command = command.removeprefix(preparation)
    return command


def pages() -> list[str]:
    """Every page, relative to the root."""
    folders = (".", "nemo_rl_core", "nemo_rl_vllm", "contracts", "benchmarks", "tests")
    found = [path for folder in folders for path in (ROOT / folder).glob("*.md")]
    found += [path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks(page: str, text: str | None = None) -> Iterator[Block]:
    """Cut a page into its blocks."""
    lines = ((ROOT / page).read_text(encoding="utf-8") if text is None else text).splitlines()
    marks: dict[str, str] = {}
    start: int | None = None
    for index, line in enumerate(lines):
        if start is not None:
            if line.strip() == "```":
                language = lines[start].strip().removeprefix("```")
                inside = "\n".join(lines[start + 1 : index]) + "\n"
                yield Block(page=page, line=start + 1, language=language, text=inside, marks=marks)
                start, marks = None, {}
        elif line.strip().startswith("```"):
            start = index
        elif found := MARK.match(line.strip()):
            marks = {**marks, found[1]: found[2] or ""}
        elif line.strip():
            marks = {}
    if start is not None:
        raise ValueError(f"{page}:{start + 1}: this block has no end")


def all_blocks() -> list[Block]:
    """The blocks of all pages."""
    return [block for page in pages() for block in blocks(page)]
