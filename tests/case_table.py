# SPDX-License-Identifier: Apache-2.0
"""The table of case ids in tests/README.md, made from the docstrings of the tests.

python -m tests.case_table      # writes the table anew
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parent
README = TESTS / "README.md"
BEGIN, END = "<!-- cases: begin -->", "<!-- cases: end -->"
CASE_ID = re.compile(r"\b[URFQ]\d{1,3}\b")


def covered() -> dict[str, list[str]]:
    """Case id to the tests whose docstring names it, as ``file::test``; ids in the order of the table."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                place = f"{path.relative_to(TESTS).as_posix()}::{node.name}"
                for case in dict.fromkeys(CASE_ID.findall(ast.get_docstring(node) or "")):
                    found[case].append(place)
    return {case: found[case] for case in sorted(found, key=lambda case: ("URFQ".index(case[0]), int(case[1:])))}


def table() -> str:
    """The table as it has to stand in the README."""
    lines = ["| case | tests |", "|---|---|"]
    for case, places in covered().items():
        by_file: dict[str, list[str]] = defaultdict(list)
        for place in places:
            file, _, name = place.partition("::")
            by_file[file].append(name)
        cells = [f"`tests/{file}`: " + ", ".join(f"`{name}`" for name in names) for file, names in by_file.items()]
        lines.append(f"| {case} | {'; '.join(cells)} |")
    return "\n".join(lines)


def table_in(text: str) -> str:
    """The table that stands between the two marks of a README.

    Raises:
        ValueError: If a mark is missing.
    """
    _, begin, rest = text.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the table of cases stands between {BEGIN} and {END}, and one of them is missing")
    return inside.strip()


def main() -> None:
    """Write the table into the README."""
    text = README.read_text(encoding="utf-8")
    old = table_in(text)
    README.write_text(text.replace(old, table()) if old else text.replace(BEGIN, f"{BEGIN}\n{table()}"), "utf-8")


if __name__ == "__main__":
    main()
