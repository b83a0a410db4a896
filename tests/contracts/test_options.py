# SPDX-License-Identifier: Apache-2.0
"""A contract whose options name nothing proves nothing, so it says so and is never kept."""

import importlib.metadata
import re
from pathlib import Path

import grimp
import pytest
from importlinter.domain.contract import InvalidContractOptions

from tests.contracts.repository import TYPES, Repository

RULE = {"source_modules": ["pkg"], "forbidden_modules": ["json"]}
UNKNOWN = {"source_modules": ["pkg"], "forbidden_modules": ["vllm"]}


@pytest.fixture
def small(repository: Repository) -> Repository:
    return repository.package(
        {"core.py": "def f():\n    import json\n", "bridge.py": "import json\n", "adapter/x.py": ""}
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source_modules": ["pkg.cor"]}, "source_modules names 'pkg.cor'.* did you mean 'pkg.core'"),
        ({"source_modules": ["pkg.c*"]}, "source_modules names 'pkg.c\\*'"),
        ({"source_modules": [""]}, "source_modules is empty"),
        ({"exempt_modules": ["pkg.brigde"]}, "exempt_modules names 'pkg.brigde'.* 'pkg.bridge'"),
        ({"exempt_modules": ["pkg"]}, "takes every source module away"),
        ({"source_modules": ["pkg.core"], "exempt_modules": ["pkg.bridge"]}, "'pkg.bridge', which is no source module"),
        ({"forbidden_modules": ["pkg.adaptor"]}, "forbidden_modules names 'pkg.adaptor'.* 'pkg.adapter'"),
        ({"forbidden_modules": ["pkg"]}, "covers every source module"),
        ({"forbidden_modules": ["pytst"]}, "'pytst' is installed here.* Did you mean .*'pytest'"),
        ({"forbidden_modules": ["concurrent.futurs"]}, "has no module 'concurrent.futurs'"),
        ({"forbidden_modules": ["pytest.nothing"]}, "'pytest' is installed and has no module 'pytest.nothing'"),
        ({"forbidden_modules": ["json # why"]}, "takes names of modules; got 'json # why'"),
        ({"phases": ["eagre"]}, "a phase is one of eager, conditional, lazy, typing; got eagre"),
        ({"allow": ["pkg.bridge -> json"]}, "says why, in the form 'entry  # reason'; got 'pkg.bridge -> json'"),
        ({"allow": ["pkg.bridge -> json  #  "]}, "says why"),
        ({"allow": ["pkg.bridge  # why"]}, "'importer -> imported  # reason'; got 'pkg.bridge'"),
        ({"allow": ["pkg.bridge -> json  # a", "pkg.bridge -> json  # b"]}, "'pkg.bridge -> json' twice"),
        ({"allow": ["pkg.core -> json  # lazy, so no use here"]}, "'pkg.core -> json' of allow lets nothing through"),
        ({"allow": ["pkg.*.x -> json  # why"]}, "lets nothing through"),
        ({"module_distributions": ["json"]}, "module_distributions has the form .*; got 'json'"),
        ({"module_distributions": ["jsn = dist"]}, "maps 'jsn', which the contract does not name"),
        ({"accept_unknown": ["json"]}, "accept_unknown lists 'json', which is known here"),
        ({"accept_unknown": ["vllm"]}, "accept_unknown lists 'vllm', which the contract does not name"),
        ({"baseline": "none.json"}, "none.json is not there"),
    ],
)
def test_a_typing_error_in_an_option_is_told_with_the_way_out(options, words: str, small: Repository) -> None:
    """F8: of our own modules, of other people's, of phases and of lists."""
    problems = small.problems("import_phase", **{**RULE, **options})
    assert re.search(words, problems), problems


@pytest.mark.parametrize("kind", ["import_phase", "string_imports", "coverage"])
def test_an_option_that_no_type_reads_is_refused_by_every_release(kind: str, small: Repository) -> None:
    """Import-linter before 2.16 passes over it; here its own answer is one that a subclass of ours gives."""
    required = {} if kind == "coverage" else RULE
    try:
        problems = small.problems(kind, exlude=["x"], **required)
    except InvalidContractOptions as error:
        problems = str(error.errors)
    assert "exlude" in problems


@pytest.mark.parametrize("kind", ["import_phase", "string_imports"])
@pytest.mark.parametrize("option", ["source_modules", "forbidden_modules"])
def test_an_empty_list_of_what_counts_is_refused(kind: str, option: str, small: Repository) -> None:
    assert option in small.problems(kind, **{**RULE, option: []})


@pytest.mark.parametrize(
    ("entry", "who"),
    [
        ("pkg.bridge -> json  # why", []),
        ("  pkg.bridge   ->   json   #   why  # and more", []),
        ("pkg.* -> json  # why", []),
        ("pkg.** -> **  # why", []),
        ("**.bridge -> json.decoder  # why", ["pkg.bridge"]),
    ],
)
def test_an_entry_lets_through_what_it_says(entry: str, who: list[str], repository: Repository) -> None:
    """An external name stands for what is below it."""
    repository.package({"bridge.py": "import json\nimport json.decoder\n"})
    messages = repository.messages("import_phase", allow=[entry], **RULE)
    assert [message.split()[4] for message in messages] == who


def test_a_name_that_is_only_declared_is_known(small: Repository) -> None:
    """F8: in a dependency, an extra or a group, of this project or of one right below it."""
    for place in (
        '[project]\nname = "p"\ndependencies = ["VLLM[x]>=1; sys_platform == \'linux\'"]',
        '[project]\nname = "p"\n[project.optional-dependencies]\nfast = ["vllm"]',
        '[dependency-groups]\ndev = ["vllm", {include-group = "x"}]',
    ):
        (small.root / "pyproject.toml").write_text(place)
        assert small.messages("import_phase", **UNKNOWN) == []
    (small.root / "pyproject.toml").rename(small.root / "adapter.toml")
    assert "vllm" in small.problems("import_phase", **UNKNOWN)
    small.write({"adapter/pyproject.toml": place})
    assert small.messages("import_phase", **UNKNOWN) == []


@pytest.mark.parametrize("lock", ["uv.lock", "poetry.lock", "pdm.lock", "pylock.toml"])
def test_a_name_that_is_only_locked_is_known(lock: str, small: Repository) -> None:
    """F8."""
    key = "packages" if lock == "pylock.toml" else "package"
    (small.root / lock).write_text(f'[[{key}]]\nname = "vllm"\nversion = "1"\n')
    assert small.messages("import_phase", **UNKNOWN) == []
    assert "'vlllm'" in small.problems("import_phase", source_modules=["pkg"], forbidden_modules=["vlllm"])


def test_a_name_that_is_only_installed_is_known_and_its_submodules_are_looked_up(small: Repository) -> None:
    for name in ("pytest", "_pytest.nodes", "os.path", "xml.etree.ElementTree", "winreg"):
        assert small.messages("import_phase", source_modules=["pkg"], forbidden_modules=[name]) == []


def test_a_package_whose_distribution_has_another_name_is_mapped(small: Repository) -> None:
    rule = {"source_modules": ["pkg"], "forbidden_modules": ["flashinfer"]}
    (small.root / "pyproject.toml").write_text('[project]\nname = "p"\ndependencies = ["flashinfer-python"]')
    assert "module_distributions" in small.problems("import_phase", **rule)
    assert small.messages("import_phase", module_distributions=["flashinfer = flashinfer_python"], **rule) == []
    assert "flashinfer" in small.problems("import_phase", module_distributions=["flashinfer = flashinfr"], **rule)


def test_a_name_that_differs_only_in_dashes_is_known_without_a_map(small: Repository) -> None:
    (small.root / "pyproject.toml").write_text('[project]\nname = "p"\ndependencies = ["lm-format-enforcer"]')
    assert small.messages("import_phase", source_modules=["pkg"], forbidden_modules=["lmformatenforcer"]) == []


@pytest.mark.parametrize("kind", ["import_phase", "string_imports"])
@pytest.mark.parametrize(
    ("distribution", "module", "brings"),
    [("PyYAML", "pyyaml", "yaml"), ("import-linter", "import_linter", "importlinter"), ("jinja2", "Jinja2", "jinja2")],
)
def test_the_name_of_an_installed_distribution_is_no_module(kind, distribution, module, brings, small) -> None:
    """F8: what is installed says what it brings, so that a rule against another name would be kept forever."""
    (small.root / "pyproject.toml").write_text(f'[project]\nname = "p"\ndependencies = ["{distribution}"]')
    rule = {"source_modules": ["pkg"], "forbidden_modules": [module]}
    assert f"is installed and brings {brings}, and no module '{module}'" in small.problems(kind, **rule)
    mapped = {"module_distributions": [f"{module} = {distribution}"]}
    assert f"brings {brings}" in small.problems(kind, **rule, **mapped)
    assert small.messages(kind, **{**rule, "forbidden_modules": [brings]}) == []


def test_a_name_is_accepted_where_it_is_installed_and_where_it_is_not(small: Repository) -> None:
    """One configuration fits both: only what is written in the project makes the entry idle."""
    for name in ("rich", "yaml", "engine_nobody_has"):
        rule = {"source_modules": ["pkg"], "forbidden_modules": [name], "accept_unknown": [name]}
        assert small.messages("import_phase", **rule) == []
    rule = {"source_modules": ["pkg"], "forbidden_modules": ["rich"], "accept_unknown": ["rich"]}
    (small.root / "pyproject.toml").write_text('[project]\nname = "p"\ndependencies = ["rich"]')
    assert "accept_unknown lists 'rich', which is known here" in small.problems("import_phase", **rule)


def test_a_part_of_a_namespace_may_be_brought_by_a_distribution_that_is_not_installed(small: Repository) -> None:
    small.write({"cloudy/auth/__init__.py": ""})
    info = small.root / "cloudy_auth-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cloudy-auth\nVersion: 1\n")
    (info / "RECORD").write_text("cloudy/auth/__init__.py,,\n")
    (small.root / "pyproject.toml").write_text('[project]\nname = "p"\ndependencies = ["cloudy-auth", "cloudy-store"]')

    def rule(name: str) -> dict:
        return {"source_modules": ["pkg"], "forbidden_modules": [name]}

    assert small.messages("import_phase", **rule("cloudy.auth")) == []
    assert small.messages("import_phase", **rule("cloudy.store")) == []
    assert "has no module 'cloudy.stroe'" in small.problems("import_phase", **rule("cloudy.stroe"))
    assert "cloudy.auht" in small.problems(
        "import_phase", module_distributions=["cloudy.auht = cloudy-auth"], **rule("cloudy.auht")
    )


def test_a_bare_folder_of_that_name_is_no_installed_package(small: Repository) -> None:
    """F25: the working directory is on the path, and holds an empty `vllm`."""
    (small.root / "vllm").mkdir()
    (small.root / "vllm" / "notes.txt").touch()
    assert "no module 'vllm' is installed" in small.problems("import_phase", **UNKNOWN)


def test_what_an_installed_distribution_of_ours_asks_for_is_known(repository: Repository, monkeypatch) -> None:
    repository.package({"a.py": ""})
    info = Path(repository.root / "our_dist-1.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our-dist\nVersion: 1\nRequires-Dist: vllm>=1\n")
    (info / "top_level.txt").write_text("pkg\n")
    assert "pkg" in importlib.metadata.packages_distributions()
    assert repository.messages("import_phase", **UNKNOWN) == []


def test_without_external_packages_in_the_graph_nothing_is_proven(small: Repository) -> None:

    graph = grimp.build_graph("pkg", cache_dir=None)
    contract = TYPES["import_phase"](name="x", session_options={"root_package": "pkg"}, contract_options=RULE)
    (problem,) = contract.check(graph, verbose=False).metadata["problems"]
    assert "include_external_packages = True" in problem
