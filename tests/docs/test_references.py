# SPDX-License-Identifier: Apache-2.0
"""What the docs point to exists: pages, files, tests, names."""

import importlib
import re

import pytest

from nemo_rl_core.distributed.environments import ACTOR_ENTRY_POINT_GROUP
from nemo_rl_core.plugins import GENERATION_GROUP
from tests.docs.pages import ROOT, pages

LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
FILE = re.compile(
    r"`((?:tests|docs|examples|benchmarks|contracts|nemo_rl_core|nemo_rl_vllm|\.ci)/[\w./-]+?)(?:::(\w+))?`"
)
NAME = re.compile(r"`(nemo_rl_core(?:\.\w+)+)`")
#: Dotted names that are no Python names.
GROUPS = {"nemo_rl_core.environments", GENERATION_GROUP, ACTOR_ENTRY_POINT_GROUP}
#: Made by a script, in a checkout where it was run.
MADE = ("examples/smollm2/model",)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    targets = [t for t in LINK.findall(text_of(page)) if not t.startswith(("http://", "https://", "mailto:"))]
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


@pytest.mark.parametrize("page", pages())
def test_files_and_tests_that_are_named_exist(page: str) -> None:
    lost = []
    for path, test in FILE.findall(text_of(page)):
        if path.startswith(MADE):
            continue
        file = ROOT / path
        if not file.exists() or (test and f"def {test}(" not in file.read_text(encoding="utf-8")):
            lost.append(f"{path}::{test}" if test else path)
    assert lost == []


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if not hasattr(target, attribute):
                return False
            target = getattr(target, attribute)
        return True
    return False


@pytest.mark.parametrize("page", pages())
def test_python_names_that_are_mentioned_exist(page: str) -> None:
    names = set(NAME.findall(text_of(page))) - GROUPS
    assert [name for name in sorted(names) if not resolves(name)] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, queue = set(), ["README.md"]
    while queue:
        page = queue.pop()
        if page in reached:
            continue
        reached.add(page)
        for target in LINK.findall(text_of(page)):
            path = ((ROOT / page).parent / target).resolve()
            if path.suffix == ".md" and path.is_relative_to(ROOT) and path.exists():
                queue.append(path.relative_to(ROOT).as_posix())
    assert sorted(set(pages()) - reached) == []


def test_the_checks_trip() -> None:
    assert LINK.findall("see [this](nowhere.md#part)") == ["nowhere.md"]
    assert FILE.findall("`tests/x.py::test_y`") == [("tests/x.py", "test_y")]
    assert resolves("nemo_rl_core.refit.sender.RefitSender.send")
    assert not resolves("nemo_rl_core.refit.sender.RefitSender.sent")
    assert not resolves("nemo_rl_core.refitt")
