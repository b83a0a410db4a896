# SPDX-License-Identifier: Apache-2.0
"""A `uv.lock` read: what a distribution brings, in which version, and by which chain."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.lock_markers import may_apply
from nemo_rl_contracts.locks import Closure, Distribution, LockError, closure_of, main, normalise, read_lock
from tests.packaging.workshop import ROOT, uv

OURS = read_lock(ROOT / "uv.lock")

#: Two extras that exclude each other, two forks of `torch`, a chain to `engine`, a cycle, and a platform marker.
LOCK = """
version = 1
revision = 3
requires-python = ">=3.11"

[[package]]
name = "core"
version = "1.0"
source = { editable = "core" }
dependencies = [
    { name = "torch", version = "1", marker = "extra != 'extra-4-core-new'" },
    { name = "torch", version = "2", marker = "extra == 'extra-4-core-new'" },
    { name = "windows-only", marker = "sys_platform == 'win32'" },
]

[package.optional-dependencies]
new = [{ name = "tool", extra = ["fast"] }]
old = [{ name = "middle" }]

[package.metadata]
provides-extras = ["new", "old", "nothing"]

[[package]]
name = "engine"
version = "0.3"
source = { registry = "https://example.org/index" }

[[package]]
name = "lonely"
version = "1.0"
source = { virtual = "lonely" }

[[package]]
name = "middle"
version = "5"
source = { registry = "https://example.org/index" }
dependencies = [{ name = "engine" }, { name = "middle-2" }]

[[package]]
name = "middle-2"
version = "6"
source = { registry = "https://example.org/index" }
dependencies = [{ name = "engine" }, { name = "middle" }]

[[package]]
name = "tool"
version = "7"
source = { registry = "https://example.org/index" }

[package.optional-dependencies]
fast = [{ name = "engine" }]

[[package]]
name = "torch"
version = "1"
source = { registry = "https://example.org/index" }

[[package]]
name = "torch"
version = "2"
source = { registry = "https://example.org/index" }
dependencies = [{ name = "torch-2-only" }]

[[package]]
name = "torch-2-only"
version = "1"
source = { registry = "https://example.org/index" }

[[package]]
name = "windows-only"
version = "1"
source = { registry = "https://example.org/index" }
"""


@pytest.fixture
def lock_file(tmp_path: Path) -> Path:
    path = tmp_path / "uv.lock"
    path.write_text(LOCK)
    return path


def bring(path: Path, text: str) -> Closure:
    return closure_of(read_lock(path), Distribution.parse(text))


@pytest.mark.parametrize("distribution", OURS.members(), ids=str)
def test_a_closure_is_what_uv_exports_name_by_name_and_version_by_version(distribution: Distribution) -> None:
    """F58: of every project of this workspace, without an extra and with each; uv itself is the oracle."""
    extras = [argument for extra in distribution.extras for argument in ("--extra", extra)]
    exported = uv(
        *("export", "--quiet", "--frozen", "--package", distribution.name, *extras),
        *("--no-dev", "--no-hashes", "--no-annotate", "--no-emit-workspace"),
    )
    theirs = set(re.findall(r"^([\w.-]+)==(\S+)", exported, re.MULTILINE))
    closure = closure_of(OURS, distribution)
    assert {(package.name, package.version) for package in closure.packages if not package.member} == theirs
    assert len(theirs) > 5


def test_every_extra_of_this_workspace_is_found_in_the_lock() -> None:
    found = {str(distribution) for distribution in OURS.members()}
    assert found >= {"nemo-rl-core", "nemo-rl-core[fsdp]", "nemo-rl-core[vllm]", "nemo-rl-vllm[engine]"}


def test_a_fork_of_another_extra_is_left_out_and_a_platform_is_not(lock_file: Path) -> None:
    """F58, F59: the engine's torch is not in the trainer's closure; what only Windows needs is."""
    assert bring(lock_file, "core").names == {"torch", "windows-only"}
    assert [package.version for package in bring(lock_file, "core").versions("torch")] == ["1"]
    new = bring(lock_file, "core[new]")
    assert [package.version for package in new.versions("torch")] == ["2"]
    assert "torch-2-only" in new.names


def test_an_extra_that_is_asked_for_on_the_way_chooses_its_fork(lock_file: Path) -> None:
    """F58: uv marks the fork by the extra, whoever asks for it."""
    lock_file.write_text(
        LOCK
        + '\n[[package]]\nname = "user"\nversion = "1"\nsource = { editable = "user" }\n'
        + 'dependencies = [{ name = "core", extra = ["new"] }]\n'
    )
    assert [package.version for package in bring(lock_file, "user").versions("torch")] == ["2"]


def test_the_chain_is_a_shortest_one_and_shows_the_extras_that_are_asked_for(lock_file: Path) -> None:
    old, new = bring(lock_file, "core[old]"), bring(lock_file, "core[new]")
    (engine,) = old.versions("engine")
    assert old.chain(engine) == ("core[old]", "middle 5", "engine 0.3")
    assert new.chain(engine) == ("core[new]", "tool[fast] 7", "engine 0.3")
    both = bring(lock_file, "core[old, new]")
    assert str(both.distribution) == "core[new,old]"
    assert len(both.chain(engine)) == 3


def test_an_entry_knows_its_line(lock_file: Path) -> None:
    (engine,) = bring(lock_file, "core[old]").versions("engine")
    assert engine.line is not None
    assert LOCK.splitlines()[engine.line] == 'name = "engine"'  # the header's line, counted from 1, is the one before


def test_every_entry_of_our_own_lock_knows_its_line() -> None:
    lines = OURS.path.read_text().splitlines()
    assert all(package.line and lines[package.line - 1] == "[[package]]" for package in OURS.packages)


def test_an_extra_that_requires_nothing_is_an_extra(lock_file: Path) -> None:
    assert bring(lock_file, "core[nothing]").names == bring(lock_file, "core").names


@pytest.mark.parametrize("text", ["My_Pkg", "my.pkg", "MY--PKG"])
def test_names_are_compared_as_installers_do(text: str) -> None:
    assert normalise(text) == "my-pkg"


@pytest.mark.parametrize("text", ["", "a b", "-a", "a==1", "é"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(LockError, match="letters, digits"):
        normalise(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kore", "'kore' is not in .*; near names: core"),
        ("zzz", "'zzz' is not in .*; lock it, or take it out"),
        ("core[nwe]", "'core' has no extra 'nwe' in .*; its extras there: new, nothing, old"),
        ("engine[x]", "it has none there"),
        ("lonely", "lonely brings nothing in .*; leave it out"),
        ("core[new", "written as name or name"),
        ("core[new]==1", "written as name or name"),
    ],
)
def test_a_request_that_the_lock_cannot_answer_is_refused(lock_file: Path, text: str, words: str) -> None:
    """F58: an empty answer would pass for a clean one."""
    with pytest.raises(LockError, match=words):
        bring(lock_file, text)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("version = 2\npackage = []\n", "format version 2, and only version 1 is known"),
        ("[project]\nname = 'x'\n", r"not a lock of uv: .* got the keys \['project'\]"),
        ("{}", "not TOML"),
        ("version = 1\n[[package]]\nversion = '1'\n", r"uv.lock:2 has a \[\[package\]\] that is not one of uv's"),
        ("version = 1\npackage = [1]\n", r"uv.lock:\? has a \[\[package\]\]"),
        ("version = 1\npackage = []\n", r"holds no \[\[package\]\]"),
        ("version = true\n[[package]]\nname = 'x'\n", "not a lock of uv"),
        ("version = 1\n[[package]]\nname = 'x'\nversion = 1\n", "1 is no text"),
        ("version = 1\n[[package]]\nname = 'x'\ndependencies = [{ name = 'y', marker = 4 }]\n", "4 is no text"),
        ("version = 1\n[[package]]\nname = 'x'\ndependencies = [{ name = 'y', extra = 'ab' }]\n", "'ab' is no list"),
        ("version = 1\n[[package]]\nname = 'x'\nmetadata.provides-extras = 'ab'\n", "'ab' is no list"),
    ],
)
def test_a_file_that_is_no_lock_of_a_known_format_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "uv.lock").write_text(content)
    with pytest.raises(LockError, match=words):
        read_lock(tmp_path / "uv.lock")


def test_a_missing_lock_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LockError, match=r"there is no lock at .*uv lock"):
        read_lock(tmp_path / "uv.lock")
    with pytest.raises(LockError, match="can't be read"):
        read_lock(tmp_path)


def test_a_requirement_without_an_entry_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "uv.lock"
    path.write_text('version = 1\n[[package]]\nname = "a"\nversion = "1"\ndependencies = [{ name = "gone" }]\n')
    with pytest.raises(LockError, match="requires gone and has no such entry"):
        bring(path, "a")


@pytest.mark.parametrize(
    ("marker", "chosen", "holds"),
    [
        ("", set(), True),
        ("python_full_version < '3.12' and sys_platform == 'linux'", set(), True),
        ("extra == 'extra-1-a-x'", set(), False),
        ("extra == 'extra-1-a-x'", {"extra-1-a-x"}, True),
        ("extra != 'extra-1-a-x'", {"extra-1-a-x"}, False),
        ("sys_platform == 'linux' and extra == 'group-1-a-dev'", set(), False),
        ("extra == 'project-1-a' or extra == 'extra-1-a-x'", {"project-1-a"}, True),
        # `and` binds closer than `or`, and parentheses closer still.
        ("extra == 'extra-1-a-x' or extra == 'extra-1-a-y' and extra == 'extra-1-a-z'", {"extra-1-a-x"}, True),
        ("(extra == 'extra-1-a-x' or extra == 'extra-1-a-y') and extra == 'extra-1-a-z'", {"extra-1-a-x"}, False),
        ("(sys_platform == 'x' and (extra == 'extra-1-a-x'))", {"extra-1-a-x"}, True),
        ("'linux' in sys_platform and platform_machine not in 'a b' and extra != 'extra-1-a-x'", set(), True),
        # An extra in another spelling is not one of uv's forks, so it may apply.
        ("extra == 'fast'", set(), True),
    ],
)
def test_a_marker_is_false_only_by_a_fork_that_is_not_chosen(marker: str, chosen: set[str], holds: bool) -> None:
    assert may_apply(marker, chosen) is holds


@pytest.mark.parametrize("marker", ["extra ==", "(extra == 'a'", "extra == 'a')", "a == 'b' 'c'", "and or", "; x"])
def test_a_marker_that_cannot_be_read_is_refused(marker: str) -> None:
    with pytest.raises(MisconfiguredError, match="a marker can't be read"):
        may_apply(marker, set())


def test_the_command_prints_a_table_and_the_chains(lock_file: Path, capsys) -> None:
    assert main([str(lock_file), "core", "core[new]", "--show", "Torch", "--show", "engine"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "distribution  brings  torch  engine",
        "core               2  1      -",
        "core[new]          5  2      0.3",
    ]
    assert main([str(lock_file), "core[old]", "--forbid", "engine"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "core[old] -> middle 5 -> engine 0.3"
    assert main([str(lock_file), "core", "--forbid", "engine"]) == 0
    assert "engine" not in capsys.readouterr().out
    for request in (["kore"], ["core", "--forbid", "engin"], ["core", "--show", "torhc"]):
        assert main([str(lock_file), *request]) == 2
        assert "near names: " in capsys.readouterr().err


def test_a_project_that_brings_nothing_is_a_row_unless_it_was_asked_for(lock_file: Path, capsys) -> None:
    assert main([str(lock_file)]) == 0
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert rows["lonely"] == "0"
    assert rows["core"] == "2"
    assert main([str(lock_file), "lonely"]) == 2
    assert "brings nothing" in capsys.readouterr().err


def test_a_lock_without_a_project_of_its_own_says_nothing_by_itself(tmp_path: Path, capsys) -> None:
    (tmp_path / "uv.lock").write_text('version = 1\n[[package]]\nname = "a"\nversion = "1"\n')
    assert main([str(tmp_path / "uv.lock")]) == 2
    assert "has no project of its own" in capsys.readouterr().err


def test_the_command_takes_every_project_and_extra_by_itself() -> None:
    """The form that the pages show; an extra that is added to a project is in the table without editing anything."""
    command = [sys.executable, "-m", "nemo_rl_contracts.locks", "uv.lock", "--show", "torch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert set(rows) == {"distribution", *map(str, OURS.members())}
    assert rows["nemo-rl-core[fsdp]"][1] != rows["nemo-rl-core[vllm]"][1]
    assert done.stderr == ""
