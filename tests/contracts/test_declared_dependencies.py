# SPDX-License-Identifier: Apache-2.0
"""`declared_dependencies`: what is imported is asked for, and what an extra brings stays where the extra is meant."""

from pathlib import Path

import pytest

from tests.contracts.repository import Repository

RULE = {"package": "pkg", "pyproject": "pyproject.toml"}
PROJECT = """
    [project]
    name = "My.Pkg"
    dependencies = ["Torch>=2; python_version > '3'", "PyYAML"]

    [project.optional-dependencies]
    vllm = ["vllm==0.11"]
    Plot_Things = ["matplotlib", "shared"]
    all = ["my-pkg[vllm,plot-things]", "shared"]
    """


@pytest.fixture
def project(repository: Repository) -> Repository:
    return repository.write({"pyproject.toml": PROJECT}).package({"a.py": "import torch.nn\nimport json, os.path\n"})


def test_dependencies_the_package_itself_and_the_standard_library_are_covered(project: Repository) -> None:
    """`yaml` comes from `pyyaml`, as the installed metadata says."""
    project.package({"b.py": "import yaml\nfrom pkg import a\nfrom . import c\nimport my_pkg\n", "c.py": ""})
    assert project.messages("declared_dependencies", **RULE) == []


def test_what_is_not_asked_for_is_named(project: Repository) -> None:
    project.package({"b.py": "\n\ndef f():\n    import numpy.linalg\n", "c.py": "__import__('rich')\n"})
    found = project.check("declared_dependencies", **RULE).metadata["violations"]
    assert [(each.file, each.line) for each in found] == [("pkg/b.py", 4), ("pkg/c.py", 1)]
    assert found[0].message == "pkg.b imports numpy.linalg, which the distribution 'my-pkg' does not ask for (lazy)"
    assert "module_distributions" in found[0].advice


def test_what_an_extra_brings_is_for_the_modules_of_that_extra(project: Repository) -> None:
    """F10: extras are no ordinary dependencies, eager or lazy, guarded or not."""
    project.package(
        {
            "x.py": "try:\n    import vllm\nexcept ImportError:\n    pass\n",
            "gen/worker.py": "def f():\n    import vllm.config\n",
        }
    )
    first, second = project.messages("declared_dependencies", **RULE)
    assert first.startswith("pkg.gen.worker imports vllm.config, which only the extra 'vllm' brings")
    assert "no module is listed for that extra" in first
    assert second.endswith("(eager, guarded)")
    (left,) = project.messages("declared_dependencies", extra_modules=["vllm: pkg.gen"], **RULE)
    assert left.startswith("pkg.x imports vllm, which only the extra 'vllm' brings; that extra is for pkg.gen")
    assert project.messages("declared_dependencies", extra_modules=["vllm: pkg.gen, pkg.x"], **RULE) == []


def test_a_package_of_two_extras_is_fine_where_either_is_meant(project: Repository) -> None:
    project.package({"p.py": "import matplotlib\nimport shared\n", "q.py": "import shared\n"})
    homes = ["plot-things: pkg.p", "all: pkg.q"]
    assert project.messages("declared_dependencies", extra_modules=homes, **RULE) == []


def test_imports_for_type_checkers_do_not_count(project: Repository) -> None:
    project.package({"b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm\n"})
    assert project.messages("declared_dependencies", **RULE) == []


def test_another_root_package_is_a_distribution_of_its_own(project: Repository) -> None:
    project.package({"x.py": ""}, name="other_lib").package({"b.py": "import other_lib.x\n"})
    (message,) = project.messages("declared_dependencies", roots=("pkg", "other_lib"), **RULE)
    assert "imports other_lib.x" in message
    project.write({"pyproject.toml": '[project]\nname = "pkg"\ndependencies = ["torch", "Other.Lib"]\n'})
    assert project.messages("declared_dependencies", roots=("pkg", "other_lib"), **RULE) == []


def test_a_name_that_nobody_can_guess_is_mapped(project: Repository) -> None:
    project.package({"b.py": "import attr_of_torch.x\n"})
    assert len(project.messages("declared_dependencies", **RULE)) == 1
    mapped = {"module_distributions": ["attr_of_torch = torch"]}
    assert project.messages("declared_dependencies", **mapped, **RULE) == []
    project.package({"b.py": ""})
    assert "which pkg does not import" in project.problems("declared_dependencies", **mapped, **RULE)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[project]\nname = "pkg"\ndynamic = ["dependencies"]', "computes its dependencies"),
        ('[project]\nname = "pkg"\ndynamic = ["optional-dependencies"]', "computes its optional-dependencies"),
        ('[tool.poetry]\nname = "pkg"', "no \\[project\\] table"),
        ("[project]\nversion = '1'", "no \\[project\\] table with a name"),
        ("[project", "can't be read"),
        ('[project]\nname = "pkg"\ndependencies = "torch"', "is no list"),
        ('[project]\nname = "pkg"\noptional-dependencies = ["torch"]', "is no table"),
        ("[project]\nname = 1", "table with a name"),
    ],
)
def test_metadata_that_cannot_be_read_is_refused(toml: str, words: str, project: Repository) -> None:
    (project.root / "pyproject.toml").write_text(toml)
    with pytest.raises(AssertionError, match=words):
        project.messages("declared_dependencies", **RULE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pyproject": "other.toml"}, "other.toml can't be read"),
        ({"package": "pgk"}, "'pgk' is none of the root packages"),
        ({"extra_modules": ["vlm: pkg.a"]}, "the extra 'vlm'; pyproject.toml has all, plot-things, vllm"),
        ({"extra_modules": ["vllm: pkg.b"]}, "extra_modules names 'pkg.b'"),
        ({"extra_modules": ["vllm"]}, "the form"),
        ({"allow": ["pkg.a -> torch"]}, "says why"),
        ({"allow": ["pkg.a -> torch  # asked for anyway"]}, "lets nothing through"),
    ],
)
def test_a_typing_error_in_an_option_is_told(options, words: str, project: Repository) -> None:
    assert words in project.problems("declared_dependencies", **{**RULE, **options})


def test_an_allowed_import_has_a_reason(project: Repository) -> None:
    project.package({"b.py": "import numpy\n"})
    assert project.messages("declared_dependencies", allow=["pkg.b -> numpy  # optional"], **RULE) == []


def install(root: Path, name: str, files: tuple[str, ...]) -> None:
    """Write a distribution as an installer leaves it."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    info = root / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("import cloudy.auth.keys\n", []),
        ("from cloudy import auth\n", []),
        ("from cloudy.auth import keys\n", []),
        ("import cloudy.store\n", ["cloudy.store"]),
        ("from cloudy import auth, store\n", ["cloudy.store"]),
        ("from cloudy.api import beta\n", []),
        ("from cloudy.api import gamma\n", ["cloudy.api.gamma"]),
        ("import cloudy.nobody\n", ["cloudy.nobody"]),
    ],
)
def test_of_a_namespace_the_files_say_who_brings_which_part(code: str, missing: list[str], project: Repository) -> None:
    """The top of the name belongs to all of them."""
    install(project.root, "cloudy-auth", ("cloudy/auth/__init__.py", "cloudy/auth/keys.py", "cloudy/api/beta.py"))
    install(project.root, "cloudy-store", ("cloudy/store/__init__.py", "cloudy/api/gamma.py"))
    project.write({"pyproject.toml": '[project]\nname = "pkg"\ndependencies = ["torch", "cloudy-auth"]\n'})
    project.package({"b.py": code})
    assert [message.split()[2].rstrip(",") for message in project.messages("declared_dependencies", **RULE)] == missing


def test_a_part_of_a_namespace_that_is_not_installed_goes_by_its_whole_name(project: Repository) -> None:
    install(project.root, "cloudy-auth", ("cloudy/auth/__init__.py",))
    project.write({"pyproject.toml": '[project]\nname = "pkg"\ndependencies = ["torch", "cloudy-store"]\n'})
    project.package({"b.py": "import cloudy.store.x\n"})
    assert project.messages("declared_dependencies", **RULE) == []


@pytest.mark.parametrize(
    ("marker", "code", "covered"),
    [
        ("python_version < '3'", "import numpy\n", False),
        ("python_version < '3'", "try:\n    import numpy\nexcept ImportError:\n    pass\n", True),
        ("python_version < '3'", "import sys\nif sys.version_info < (3,):\n    import numpy\n", True),
        ("python_version < '3'", "def f():\n    import numpy\n", True),
        ("python_version < '3' and sys_platform == 'win32'", "import numpy\n", False),
        ("python_version < '3' or sys_platform == 'nowhere'", "import numpy\n", True),
        ("sys_platform == 'nowhere'", "import numpy\n", True),
        ("python_version >= '3.10'", "import numpy\n", True),
        ("'3.10' <= python_version", "import numpy\n", True),
        ("python_full_version == '2.*'", "import numpy\n", False),
        ("python_version ~= '3.0'", "import numpy\n", True),
        ("extra == 'x'", "import numpy\n", True),
    ],
)
def test_a_requirement_for_another_python_covers_no_import_that_runs_here(marker, code, covered, project) -> None:
    """F10: a platform is another thing: a module may be for that platform only."""
    project.write({"pyproject.toml": f'[project]\nname = "pkg"\ndependencies = ["torch", "numpy>=1; {marker}"]\n'})
    project.package({"b.py": code})
    found = project.messages("declared_dependencies", **RULE)
    assert (found == []) is covered
    assert all("which 'pkg' asks for on other versions of Python only" in message for message in found)


def test_a_marker_that_cannot_be_read_is_told(project: Repository) -> None:
    project.write({"pyproject.toml": '[project]\nname = "pkg"\ndependencies = ["numpy; python_version <"]\n'})
    assert "a marker can't be read" in project.problems("declared_dependencies", **RULE)


def test_an_extra_brings_what_the_extras_bring_that_it_asks_for(project: Repository) -> None:
    """F10: `all` asks for the distribution's own other extras."""
    project.package({"x.py": "import matplotlib\nimport vllm\n"})
    assert project.messages("declared_dependencies", extra_modules=["all: pkg.x"], **RULE) == []
    (left,) = project.messages("declared_dependencies", extra_modules=["plot-things: pkg.x"], **RULE)
    assert "which only the extra 'vllm' brings" in left
    text = PROJECT.replace("my-pkg[vllm,plot-things]", "my-pkg[vlm]")
    project.write({"pyproject.toml": text})
    assert "asks for its own extra 'vlm', which it does not have" in project.problems("declared_dependencies", **RULE)
