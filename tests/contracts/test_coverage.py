# SPDX-License-Identifier: Apache-2.0
"""`coverage`: a file on disk that no contract sees is an error."""

import os

import pytest

from tests.contracts.repository import Repository


def test_a_tree_of_packages_is_covered_and_its_files_are_counted(repository: Repository) -> None:
    repository.package({"a.py": "", "b/c.py": "", "with-dash.py": "", "data.txt": "", "__pycache__/x.py": ""})
    (repository.root / "pkg" / "__pycache__" / "__init__.py").unlink()
    check = repository.check("coverage")
    assert check.kept, check.metadata
    assert check.metadata["notes"] == ["5 files"]


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("pkg/quant/fp8.py", "the folder 'quant' has no __init__.py"),
        ("pkg/quant/deep/__init__.py", "the folder 'quant' has no __init__.py"),
        ("pkg/with-dash/a.py", "the folder 'with-dash' can't be written in an import"),
        ("pkg/a.b.py", "no module can have the name 'a.b'"),
        ("pkg/.hidden.py", "no module can have the name '.hidden'"),
        ("pkg/b.py", "the package of the same name beside it is imported instead"),
    ],
)
def test_a_file_that_nobody_sees_is_named_with_the_reason(file: str, reason: str, repository: Repository) -> None:
    """F2, U7."""
    repository.package({"a.py": "", "b/__init__.py": ""}).write({file: "import vllm\n"})
    (message,) = repository.messages("coverage")
    assert message.startswith(f"{file} is covered by no contract: {reason}")


def test_what_is_left_out_has_a_reason_and_exists(repository: Repository) -> None:
    repository.package({"a.py": ""}).write({"pkg/x/y/z.py": "", "pkg/x/w.py": ""})
    assert repository.messages("coverage", exclude=["pkg/x/**  # templates"]) == []
    assert repository.messages("coverage", exclude=["pkg/x/**/*.py  # templates"]) == []
    assert len(repository.messages("coverage", exclude=["pkg/*/*.py  # one level"])) == 1
    assert "says why" in repository.problems("coverage", exclude=["pkg/x/**"])
    assert "leaves no file out" in repository.problems("coverage", exclude=["pkg/x/**  # a", "pkg/b/*  # b"])


def test_every_root_package_and_every_portion_of_a_namespace_is_walked(repository: Repository, monkeypatch) -> None:
    repository.write({"one/ns/a/__init__.py": "", "two/ns/b/__init__.py": "", "two/ns/b/c/d.py": ""})
    repository.package({"e/f.py": ""})
    (repository.root / "pkg/e/__init__.py").unlink()
    for portion in ("one", "two"):
        monkeypatch.syspath_prepend(repository.root / portion)
    messages = repository.messages("coverage", roots=("pkg", "ns"))
    assert [message.split()[0] for message in messages] == ["pkg/e/f.py", "two/ns/b/c/d.py"]


def test_a_compiled_module_is_noted_since_it_has_no_source(repository: Repository) -> None:
    repository.package({"a.py": "", "fast.so": "", "old.pyc": ""})
    check = repository.check("coverage")
    assert check.kept
    assert check.metadata["notes"][0].startswith("2 compiled modules have no source to read")


def test_links_are_followed_once(repository: Repository) -> None:
    """grimp itself refuses a circle, so only a link beside is left to it."""
    repository.write({"elsewhere/__init__.py": "", "elsewhere/z.py": "", "elsewhere/no_init/q.py": ""})
    repository.package({"a.py": ""})
    (repository.root / "pkg" / "link").symlink_to(repository.root / "elsewhere")
    assert [message.split(" is ")[0] for message in repository.messages("coverage")] == ["elsewhere/no_init/q.py"]


def test_a_folder_that_cannot_be_looked_into_is_no_pass(repository: Repository) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    repository.package({"a.py": "", "b/c.py": ""})
    (repository.root / "pkg" / "b").chmod(0)
    try:
        assert not repository.check("coverage").kept
    finally:
        (repository.root / "pkg" / "b").chmod(0o755)


@pytest.mark.parametrize(
    "how", ["import pkg.ns.leaf", "from pkg.ns import leaf", "from .ns import leaf", "from pkg.ns.leaf import x"]
)
def test_a_file_that_is_left_out_and_imported_is_told(how: str, repository: Repository) -> None:
    """F2: what it imports would be seen by nobody."""
    repository.package({"a.py": how + "\n"}).write({"pkg/ns/leaf.py": "import vllm\n"})
    (message,) = repository.messages("coverage", exclude=["pkg/ns/**  # scripts"])
    assert message == "pkg/ns/leaf.py is left out by `exclude`, and pkg.a imports it (eager)"
    repository.write({"pkg/a.py": "x = 'pkg.ns.leaf'\n"})
    assert repository.messages("coverage", exclude=["pkg/ns/**  # scripts"]) == []
