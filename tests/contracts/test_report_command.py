# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-contracts report` and `init`: a repository that has no contracts yet."""

import json
import sys

import pytest

from tests.contracts.repository import Repository


@pytest.fixture
def mixed(repository: Repository) -> Repository:
    """One import of each phase, and one by which the package itself loads it."""
    return repository.package(
        {
            "__init__.py": "from pkg import eager\n",
            "eager.py": "import pytest\n",
            "conditional.py": "if x:\n    import pytest\n",
            "lazy.py": "def f():\n    import pytest\n",
            "typing_only.py": "import typing\nif typing.TYPE_CHECKING:\n    import pytest\n",
            "by_name.py": "def f():\n    __import__('pytest')\n",
        }
    )


def test_chains_are_counted_by_phase(mixed: Repository, command) -> None:
    said = command("report", "pkg", "--forbid", "pytest")
    assert said.code == 0
    counts = "5 chains: 2 at import time (1 of them under a condition), 2 lazy, 1 for type checkers only"
    assert f"pytest: {counts}" in said.out
    assert "importing pkg is enough:\n        pkg -> pkg.eager (eager)  pkg/__init__.py:1\n" in said.out
    assert "pkg/lazy.py:2  pkg.lazy imports pytest\n" in said.out
    assert "pkg.by_name imports pytest, by a string" in said.out


def test_json_and_mermaid_say_the_same(mixed: Repository, command) -> None:
    document = json.loads(command("report", "pkg", "--forbid", "pytest", "--format", "json").out)
    (name,) = document["names"]
    assert document["modules"] == 6
    assert name["importing_the_package_loads_it"]
    assert sum(name["modules_by_phase"].values()) == 6  # the initialiser runs for each of them
    assert set(name["modules_by_phase"]) == {"eager"}
    assert sorted(chain["phase"] for chain in name["chains"]) == ["conditional", "eager", "lazy", "lazy", "typing"]
    assert command("report", "pkg", "--forbid", "pytest", "--format", "mermaid").out.startswith("flowchart LR\n")


def test_a_chain_from_the_top_names_the_earliest_phase_of_each_module(repository: Repository, command) -> None:
    repository.package(
        {"a.py": "import pytest\n", "b.py": "def f():\n    import pkg.a\n", "c.py": "import pkg.b\n", "d.py": ""}
    )
    said = command("report", "pkg", "--forbid", "pytest")
    assert "1 of 5 modules load it when they are imported" in said.out
    assert "2 of 5 modules load it when some function is called" in said.out
    assert "importing pkg alone does not load it" in said.out


@pytest.mark.parametrize("target", [".", "src", "src/lib", "./src/lib/"])
def test_a_path_may_be_the_package_its_source_folder_or_the_project(target, repository, command) -> None:
    repository.package({"a.py": "import pytest\n"}, name="src/lib").package({"t.py": ""}, name="tests")
    (repository.root / "src" / "__init__.py").unlink(missing_ok=True)
    said = command("report", target, "--forbid", "pytest")
    assert said.code == 0, said.err
    assert said.out.startswith("lib: 2 modules")
    assert "lib/a.py:1" in said.out


def test_an_installed_package_is_reported_on_by_its_name(repository: Repository, command) -> None:
    said = command("report", "packaging", "--forbid", "pytest", "--forbid", "json")
    assert said.code == 0
    assert "pytest: 0 chains" in said.out


def test_a_single_file_is_reported_on(repository: Repository, command) -> None:
    repository.write({"tool_x.py": "import pytest.x\n\n\ndef f():\n    __import__('rich')\n"})
    said = command("report", "tool_x.py", "--forbid", "pytest", "--forbid", "rich")
    assert said.code == 0, said.err
    assert "importing tool_x is enough" in said.out
    assert "tool_x.py:5  tool_x imports rich, by a string" in said.out
    repository.write({"tool_y.py": "import = 1\n"})
    assert command("report", "tool_y.py", "--forbid", "pytest").code == 3


@pytest.mark.parametrize(
    ("target", "name", "words"),
    [
        (".", "pytest", "found one, two. Name the one you mean"),
        ("one/sub", "pytest", "is a part of the package"),
        ("one/sub/x.py", "pytest", "is a part of the package"),
        ("one/notes.txt", "pytest", "is no Python file"),
        ("with-dash", "pytest", "can't be written in an import"),
        ("empty", "pytest", "found none"),
        ("nobody_has_this", "pytest", "there is no package 'nobody_has_this'"),
        ("no/such/folder", "pytest", "neither a folder nor the name"),
        ("", "pytest", "PATH is a package's folder or its name; got ''"),
        (" ", "pytest", "PATH is a package's folder or its name"),
        ("one", "pytst", "Did you mean 'pytest'"),
        ("one", "pytest.", "is the name of a module; got 'pytest.'"),
        ("one", "a b", "is the name of a module; got 'a b'"),
        ("one", "", "is the name of a module; got ''"),
        ("one", "one", "that the rest of it could be kept from"),
        ("one", "one.sub.y", "that the rest of it could be kept from"),
        ("sys", "pytest", "sys"),
    ],
)
def test_a_target_or_a_name_that_means_nothing_is_2(target, name, words, repository: Repository, command) -> None:
    """F8."""
    repository.package({"sub/x.py": "", "notes.txt": ""}, name="one").package({}, name="two")
    repository.package({"a.py": ""}, name="with-dash")
    (repository.root / "empty").mkdir()
    if target != ".":
        said = command("report", target, "--forbid", name)
    else:
        (repository.root / "with-dash" / "__init__.py").unlink()
        said = command("report", target, "--forbid", name)
    assert (said.code, said.out) == (2, "")
    assert words in said.err


def test_a_name_that_only_a_string_imports_is_known(repository: Repository, command) -> None:
    repository.package({"a.py": "__import__('engine_nobody_has.core')\n"})
    assert (
        "engine_nobody_has: 1 chain: 1 at import time" in command("report", "pkg", "--forbid", "engine_nobody_has").out
    )


def test_files_that_are_not_seen_are_3(mixed: Repository, command) -> None:
    mixed.write({"pkg/sub/x.py": "import pytest\n"})
    said = command("report", "pkg", "--forbid", "pytest")
    assert said.code == 3
    assert "Not covered: 1 file\n    pkg/sub/x.py: the folder 'sub' has no __init__.py" in said.out


def test_a_baseline_of_a_report_holds_what_runs_at_import_and_may_only_shrink(mixed: Repository, command) -> None:
    rule = ("report", "pkg", "--forbid", "pytest")
    file = mixed.root / "known.json"
    assert command(*rule, "--baseline", "known.json").code == 2
    assert command(*rule, "--write-baseline", "known.json").code == 0
    first = file.read_text()
    assert json.loads(first)["known"] == {
        "pkg: pytest": ["pkg.conditional -> pytest (conditional)", "pkg.eager -> pytest (eager)"]
    }
    assert command(*rule, "--write-baseline", "known.json").code == 2
    assert command(*rule, "--baseline", "known.json").code == 0
    mixed.package({"new.py": "\nimport pytest\n", "conditional.py": "def f():\n    import pytest\n"})
    assert command(*rule, "--baseline", "known.json").code == 2
    assert command(*rule, "--shrink-baseline", "known.json").code == 0
    assert json.loads(file.read_text())["known"] == {"pkg: pytest": ["pkg.eager -> pytest (eager)"]}
    said = command(*rule, "--baseline", "known.json")
    assert said.code == 1
    assert "new: pkg/new.py:2: pkg.new imports pytest" in said.err
    assert command("report", "pkg", "--forbid", "json", "--baseline", "known.json").code == 2


@pytest.mark.parametrize("baseline", [True, False])
def test_what_init_writes_passes_a_check_and_lint_imports_reads_it(baseline, mixed: Repository, command) -> None:
    forbidden = "pytest" if baseline else "rich"
    said = command("init", "pkg", "--forbid", forbidden)
    assert said.code == 0, said.err
    assert (mixed.root / "import-baseline.json").exists() is baseline
    assert command("check").code == 0
    done = mixed.run("-c", "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout
    mixed.package({"new.py": f"import {forbidden}\n"})
    assert command("check").code == 1


def test_init_overwrites_nothing(mixed: Repository, command) -> None:
    for name in (".importlinter", "import-baseline.json"):
        (mixed.root / name).write_text("mine")
        said = command("init", "pkg", "--forbid", "pytest")
        assert said.code == 2
        assert f"{name} is there already" in said.err
        assert (mixed.root / name).read_text() == "mine"
        (mixed.root / name).unlink()
    assert command("init", "pkg", "--forbid", "pytst").code == 2
    assert not (mixed.root / ".importlinter").exists()


def test_a_file_that_cannot_be_written_is_2_and_leaves_nothing_behind(mixed: Repository, command) -> None:
    before = sorted(mixed.root.iterdir())
    for options in (["--config", "no/folder/x.ini"], ["--baseline", "no/folder/x.json"]):
        said = command("init", "pkg", "--forbid", "pytest", *options)
        assert said.code == 2
        assert "can't be written" in said.err
        assert sorted(mixed.root.iterdir()) == before
    said = command("report", "pkg", "--forbid", "pytest", "--no-cache", "--write-baseline", "no/folder/x.json")
    assert said.code == 2
    assert "can't be written" in said.err


def test_init_takes_names_that_are_imported_and_known_nowhere(repository: Repository, command) -> None:
    """The names of one rule may depend on each other, and need not be installed here."""
    repository.package({"engine.py": "import engine_nobody_has\n", "a.py": "import pkg.engine\n"})
    assert command("init", "pkg", "--forbid", "engine_nobody_has", "--forbid", "pkg.engine").code == 0
    said = command("check")
    assert said.code == 0, said.out


def test_init_refuses_a_package_that_a_check_would_not_find(repository: Repository, command) -> None:
    repository.package({"a.py": ""}, name="python/lib")
    (repository.root / "python" / "__init__.py").unlink(missing_ok=True)
    said = command("init", "python/lib", "--forbid", "pytest")
    assert said.code == 2
    assert "install the package" in said.err
    assert not (repository.root / ".importlinter").exists()


def test_init_works_in_the_src_layout(repository: Repository, command, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(repository.root)])
    repository.package({"a.py": "import pytest\n"}, name="src/lib")
    (repository.root / "src" / "__init__.py").unlink(missing_ok=True)
    assert command("init", ".", "--forbid", "pytest", "--config", "rules.ini", "--baseline", "b.json").code == 0
    said = command("check", "--config", "rules.ini")
    assert said.code == 0, said.out


def test_init_tells_of_files_that_are_not_seen(mixed: Repository, command) -> None:
    mixed.write({"pkg/sub/x.py": ""})
    said = command("init", "pkg", "--forbid", "pytest")
    assert said.code == 3
    assert "not covered: pkg/sub/x.py" in said.out
    assert command("check").code == 3


def test_a_part_of_a_namespace_has_its_whole_name(repository: Repository, command, monkeypatch) -> None:
    """By its path as by its name; where the folder above may be one of sources, nothing is guessed."""
    repository.write({"src/shopns/core/__init__.py": "import pytest\n", "loose/lib/__init__.py": "import pytest\n"})
    for target in ("src/shopns/core", "src/shopns/core/", "shopns.core"):
        monkeypatch.setattr(sys, "path", list(sys.path))
        said = command("report", target, "--forbid", "pytest")
        assert said.code == 0, said.err
        assert said.out.startswith("shopns.core: 1 module")
    said = command("report", "loose/lib", "--forbid", "pytest")
    assert said.code == 2
    assert "loose/lib may be loose.lib, a part of a namespace package, or lib with loose as its folder" in said.err
    assert command("report", "loose.lib", "--forbid", "pytest").out.startswith("loose.lib: 1 module")
    repository.write({"loose/pyproject.toml": ""})
    assert command("report", "loose/lib", "--forbid", "pytest").out.startswith("lib: 1 module")


def test_a_name_is_looked_for_where_a_check_looks(repository: Repository, command, monkeypatch) -> None:
    repository.write({"src/shop/__init__.py": "import pytest\n"})
    bare = [folder for folder in sys.path if folder != str(repository.root)]
    for arguments in (("report", "shop"), ("init", "shop")):
        monkeypatch.setattr(sys, "path", list(bare))
        said = command(*arguments, "--forbid", "pytest")
        assert said.code == 0, said.err
    monkeypatch.setattr(sys, "path", list(bare))
    assert command("check").code == 0


def test_a_name_that_is_given_twice_is_refused(mixed: Repository, command) -> None:
    for subcommand in ("report", "init"):
        said = command(subcommand, "pkg", "--forbid", "pytest", "--forbid", "rich", "--forbid", "pytest")
        assert said.code == 2
        assert "--forbid names 'pytest' twice" in said.err


def test_a_section_that_is_not_there_is_not_shrunk(mixed: Repository, command) -> None:
    command("report", "pkg", "--forbid", "pytest", "--write-baseline", "known.json")
    before = (mixed.root / "known.json").read_text()
    said = command("report", "pkg", "--forbid", "json", "--shrink-baseline", "known.json")
    assert said.code == 2
    assert "has no section 'pkg: json'; it has pkg: pytest" in said.err
    assert (mixed.root / "known.json").read_text() == before


def test_what_a_picture_cannot_show_is_said_beside_it(mixed: Repository, command) -> None:
    mixed.write({"pkg/sub/x.py": ""})
    said = command("report", "pkg", "--forbid", "pytest", "--format", "mermaid")
    assert said.code == 3
    assert "not covered: pkg/sub/x.py" in said.err


def test_what_init_writes_fits_an_environment_with_the_package_and_one_without(repository, command) -> None:
    """As a workflow that installs nothing but this tool."""
    repository.package({"a.py": "def f():\n    import extra_thing\n"})
    repository.write({"lib/extra_thing/__init__.py": ""})
    here = "import sys; sys.path.append('lib'); from nemo_rl_contracts.cli.app import main; sys.exit(main())"
    for first, second in ((True, False), (False, True)):
        (repository.root / ".importlinter").unlink(missing_ok=True)
        init = ["init", "pkg", "--forbid", "extra_thing"]
        done = repository.run("-c", here, *init) if first else repository.run("-m", "nemo_rl_contracts", *init)
        assert done.returncode == 0, done.stderr
        done = repository.run("-c", here, "check") if second else repository.run("-m", "nemo_rl_contracts", "check")
        assert done.returncode == 0, done.stdout + done.stderr


def test_init_lists_what_is_neither_declared_nor_locked(repository: Repository, command) -> None:
    repository.write({"pyproject.toml": '[project]\nname = "p"\ndependencies = ["rich"]\n'}).package({"a.py": ""})
    assert command("init", "pkg", "--forbid", "rich", "--forbid", "pytest", "--forbid", "json").code == 0
    text = (repository.root / ".importlinter").read_text()
    assert text.partition("accept_unknown =")[2].split() == ["pytest"]
