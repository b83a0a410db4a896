# SPDX-License-Identifier: Apache-2.0
"""`import_phase`: who reaches what, and when."""

import json
from pathlib import Path

import grimp
import pytest

from tests.contracts.repository import Repository

PHASES = json.loads((Path(__file__).parent / "import_phases.json").read_text())
EVERY = ("eager", "conditional", "lazy", "typing")
#: `vllm` need not be installed where the tests run.
VLLM = {"source_modules": ["pkg"], "forbidden_modules": ["vllm"], "accept_unknown": ["vllm"]}


def hops(repository: Repository, **options) -> list[list[str]]:
    """The chains of all violations, as text."""
    check = repository.check("import_phase", **options)
    assert not check.metadata["problems"], check.metadata["problems"]
    return [[str(hop) for hop in violation.hops] for violation in check.metadata["violations"]]


@pytest.mark.parametrize("row", PHASES, ids=[row["id"] for row in PHASES])
@pytest.mark.parametrize("typing", [True, False], ids=["whole graph", "graph without typing"])
def test_each_row_of_the_table_breaks_the_rule_of_its_phase_and_no_other(row, typing, repository: Repository) -> None:
    """F4, F5, F11: one module, one spelling, each phase asked by itself."""
    repository.package({"a.py": row["code"]})
    asked = EVERY if typing else EVERY[:3]
    broken = {phase for phase in asked if repository.messages("import_phase", typing=typing, phases=[phase], **VLLM)}
    assert broken == {row["phase"]} & set(asked)


def test_the_phase_typing_needs_a_graph_that_has_such_imports(repository: Repository) -> None:
    """F8: otherwise the rule would be kept whatever the files say."""
    repository.package({"a.py": "import typing\nif typing.TYPE_CHECKING:\n    import vllm\n"})
    phases = {"phases": ["eager", "typing"]}
    assert repository.messages("import_phase", **phases, **VLLM) == ["vllm is imported by pkg.a (typing)"]
    said = repository.problems("import_phase", typing=False, **phases, **VLLM)
    assert "exclude_type_checking_imports" in said


@pytest.mark.parametrize(
    "code",
    [
        "import ｖｌｌｍ\n",
        "from ｐｋｇ import ｂ\n",
        b"# coding: utf-7\n+AGkAbQBwAG8AcgB0- vllm\n",
        b"# coding: utf-7\nx = 1  # +AAo-import vllm\n",
        "# coding: latin-1\nx = 'é'\nimport vllm\n",
        b"\xef\xbb\xbfimport vllm\n",
        b"x = 1\rimport vllm\r",
    ],
)
def test_a_file_is_read_as_python_reads_it_or_is_not_covered(code: str | bytes, repository: Repository) -> None:
    """Other letters of the same meaning, and codings, are no way past the rule."""
    source = code.encode("latin-1" if "latin-1" in code else "utf-8") if isinstance(code, str) else code
    repository.package({"b.py": "import vllm\n"}).write({"pkg/a.py": source})
    try:
        check = repository.check("import_phase", **{**VLLM, "source_modules": ["pkg.a"]})
    except (UnicodeError, grimp.exceptions.SourceSyntaxError):
        return  # grimp refuses the file, and the commands say so
    assert check.metadata["uncovered"] or check.metadata["violations"]


def test_a_package_that_runs_on_the_way_to_a_module_is_in_the_chain(repository: Repository) -> None:
    """F1: the import linter's forbidden contract keeps this one."""
    repository.package({"a.py": "from pkg.b import c\n", "b/__init__.py": "import vllm\n", "b/c.py": ""})
    assert hops(repository, **{**VLLM, "source_modules": ["pkg.a"]}) == [
        [
            "pkg.a -> pkg.b (eager, runs as a package initialiser)  pkg/a.py:1",
            "pkg.b -> vllm (eager)  pkg/b/__init__.py:1",
        ]
    ]


def test_the_package_above_a_source_runs_too(repository: Repository) -> None:
    """F1: `import pkg.b.c` is enough to run what stands in `pkg/b/__init__.py`."""
    repository.package({"b/__init__.py": "import pkg.other\n", "b/c.py": "", "other.py": "\nimport vllm\n"})
    assert hops(repository, **{**VLLM, "source_modules": ["pkg.b.c"]}) == [
        [
            "pkg.b.c -> pkg.b (eager, runs as a package initialiser)",
            "pkg.b -> pkg.other (eager)  pkg/b/__init__.py:1",
            "pkg.other -> vllm (eager)  pkg/other.py:2",
        ]
    ]


def test_a_folder_without_an_initialiser_is_not_passed_over_in_silence(repository: Repository) -> None:
    """F2, U7: the file that nobody sees is what `coverage` names."""
    repository.package({"__init__.py": "import pkg.quant.fp8\n"})
    repository.write({"pkg/quant/fp8.py": "import vllm\n"})
    (message,) = repository.messages("coverage")
    assert "pkg/quant/fp8.py" in message
    assert "no __init__.py" in message


def test_an_allowed_lazy_bridge_leaves_the_eager_rule_alone(repository: Repository) -> None:
    """F4: one rule for each phase, the lazy one with its list."""
    repository.package({"bridge.py": "def f():\n    import vllm\n", "a.py": "import pkg.bridge\n"})
    assert repository.messages("import_phase", **VLLM) == []
    (message,) = repository.messages("import_phase", phases=["lazy"], **VLLM)
    assert message == "vllm is imported by pkg.bridge (lazy)"
    allow = ["pkg.bridge -> vllm  # the one place that talks to it"]
    assert repository.messages("import_phase", phases=["lazy"], allow=allow, **VLLM) == []


def test_a_lazy_hop_makes_the_whole_chain_lazy(repository: Repository) -> None:
    repository.package({"a.py": "def f():\n    import pkg.b\n", "b.py": "import vllm\n"})
    only_a = {**VLLM, "source_modules": ["pkg.a"]}
    assert repository.messages("import_phase", **only_a) == []
    assert hops(repository, phases=["lazy"], **only_a) == [
        ["pkg.a -> pkg.b (lazy)  pkg/a.py:2", "pkg.b -> vllm (eager)  pkg/b.py:1"]
    ]


@pytest.mark.parametrize("typing", [True, False])
@pytest.mark.parametrize(
    ("code", "phase"),
    [
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import json\nelse:\n    import vllm\n", "eager"),
        ("import typing\nif typing.TYPE_CHECKING:\n    pass\nelif x:\n    import vllm\n", "conditional"),
        ("import cfg\nif cfg.TYPE_CHECKING:\n    import vllm\n", "conditional"),
        (
            "from cfg import TYPE_CHECKING  # not typing.TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm\n",
            "conditional",
        ),
        ("from cfg import (\n    TYPE_CHECKING,\n)\nif TYPE_CHECKING:\n    import vllm\n", "conditional"),
        ("import cfg as typing\nif typing.TYPE_CHECKING:\n    import vllm\n", "conditional"),
        ("from cfg import *\nif TYPE_CHECKING:\n    import vllm\n", "conditional"),
        ("from typing import TYPE_CHECKING\nTYPE_CHECKING = x()\nif TYPE_CHECKING:\n    import vllm\n", "conditional"),
        (
            '"""\nfrom typing import TYPE_CHECKING\n"""\nfrom .c import TYPE_CHECKING\nif TYPE_CHECKING:\n  import vllm',
            "conditional",
        ),
    ],
)
def test_what_only_looks_like_a_typing_block_counts_in_either_graph(
    code, phase, typing, repository: Repository
) -> None:
    """F5: also where the graph was made without imports for type checkers."""
    repository.package({"a.py": code, "c.py": ""})
    assert repository.messages("import_phase", typing=typing, phases=[phase], **VLLM)


def test_a_new_sibling_is_under_the_rule_without_an_edit(repository: Repository) -> None:
    """F7: the source is the root, and what may is exempt."""
    repository.package({"adapter.py": "import vllm\n", "core.py": ""})
    rule = {**VLLM, "exempt_modules": ["pkg.adapter"]}
    assert repository.messages("import_phase", **rule) == []
    repository.package({"core2.py": "import vllm\n"})
    assert repository.messages("import_phase", **rule) == ["vllm is imported by pkg.core2 (eager)"]


def test_an_exempt_module_still_counts_as_a_step_of_others(repository: Repository) -> None:
    repository.package({"adapter.py": "import vllm\n", "core.py": "import pkg.adapter\n"})
    (message,) = repository.messages("import_phase", exempt_modules=["pkg.adapter"], **VLLM)
    assert message == "vllm is reached from pkg.core, by pkg.adapter (eager)"


def test_zero_importers_are_a_pass(repository: Repository) -> None:
    """F8: a rule that holds is no error."""
    repository.package({"a.py": "import json\n"})
    assert repository.messages("import_phase", **VLLM) == []


def test_a_guarded_import_counts_and_is_called_so(repository: Repository) -> None:
    """F11: it runs where the package is installed."""
    repository.package({"a.py": "try:\n    import vllm\nexcept ImportError:\n    vllm = None\n"})
    assert repository.messages("import_phase", **VLLM) == ["vllm is imported by pkg.a (eager, guarded)"]


def test_an_eager_import_below_lazy_ones_is_named_with_the_way_out(repository: Repository) -> None:
    """F12: file and line, and the lazy form to use."""
    repository.package({"a.py": "def f():\n    import vllm\n\n\ndef g():\n    import vllm.x\n\n\nimport vllm\n"})
    (violation,) = repository.check("import_phase", **VLLM).metadata["violations"]
    assert (violation.file, violation.line) == ("pkg/a.py", 9)
    assert "inside the function that needs it" in violation.advice


def test_a_chain_through_another_root_package_is_followed(repository: Repository) -> None:
    repository.package({"a.py": "from lib.b import c\n"})
    repository.package({"b.py": "import vllm\n"}, name="lib")
    chains = hops(repository, roots=("pkg", "lib"), **VLLM)
    assert chains == [["pkg.a -> lib.b (eager)  pkg/a.py:1", "lib.b -> vllm (eager)  lib/b.py:1"]]


def test_cycles_and_relative_imports_of_every_level_are_followed(repository: Repository) -> None:
    repository.package(
        {
            "x/y/a.py": "from . import b\n",
            "x/y/b.py": "from .. import c\nfrom .a import f\n",
            "x/c.py": "from ..d import e\nfrom .y import a\n",
            "d/__init__.py": "from .f import e\n",
            "d/f.py": "from ..x.y import a, g\n",
            "x/y/g.py": "import vllm\n",
        }
    )
    (chain,) = hops(repository, **{**VLLM, "source_modules": ["pkg.x.y.a"]})
    assert [hop.split(" (")[0] for hop in chain] == [
        "pkg.x.y.a -> pkg.x.y.b",
        "pkg.x.y.b -> pkg.x.c",
        "pkg.x.c -> pkg.d",
        "pkg.d -> pkg.d.f",
        "pkg.d.f -> pkg.x.y.g",
        "pkg.x.y.g -> vllm",
    ]


def test_a_package_that_hands_on_a_submodule_is_followed(repository: Repository) -> None:
    repository.package(
        {"a.py": "from pkg import api\n", "__init__.py": "from pkg.impl import api\n", "impl/api.py": "import vllm\n"}
    )
    assert [chain[-1] for chain in hops(repository, **{**VLLM, "source_modules": ["pkg.a"]})] == [
        "pkg.impl.api -> vllm (eager)  pkg/impl/api.py:1"
    ]


@pytest.mark.parametrize(
    ("exported", "phase"),
    [
        ("__all__ = ['impl', 'x']", "eager"),
        ("__all__ = []\n__all__ += ('impl',)", "eager"),
        ("__all__ = x + ['impl']", "conditional"),
        ("__all__ = set(x) - {'impl'}", "conditional"),
    ],
)
def test_a_star_takes_the_modules_that_are_exported(exported: str, phase: str, repository: Repository) -> None:
    """Python imports a submodule that `__all__` names, grimp has no edge for it; a computed list may name it or not."""
    repository.package(
        {"a.py": "from pkg.api import *\n", "api/__init__.py": exported + "\n", "api/impl.py": "import vllm\n"}
    )
    (chain,) = hops(repository, **{**VLLM, "source_modules": ["pkg.a"]})
    assert chain[0] == f"pkg.a -> pkg.api.impl ({phase})  pkg/a.py:1"
    repository.package({"api/__init__.py": "__all__ = ['other']\n"})
    assert hops(repository, **{**VLLM, "source_modules": ["pkg.a"]}) == []


def test_a_long_chain_of_modules_is_no_problem(repository: Repository) -> None:
    count = 1500
    files = {f"m{n}.py": f"import pkg.m{n + 1}\n" for n in range(count)}
    repository.package({**files, f"m{count}.py": "import vllm\n"})
    (chain,) = hops(repository, **{**VLLM, "source_modules": ["pkg.m0"]})
    assert len(chain) == count + 1


def test_every_cause_is_told_once_and_not_everyone_who_suffers(repository: Repository) -> None:
    repository.package({"a.py": "import vllm\n", **{f"u{n}.py": "import pkg.a\n" for n in range(20)}})
    assert repository.messages("import_phase", **VLLM) == ["vllm is imported by pkg.a (eager)"]


def test_a_submodule_of_an_external_package_can_be_forbidden(repository: Repository) -> None:
    repository.package(
        {
            "a.py": "from pytest import models\n",
            "b.py": "import _pytest.nodes as n\n",
            "c.py": "from _pytest import nodes\n",
            "d.py": "import _pytest\n",
            "e.py": "from _pytest.nodes import Item\n",
            "f.py": "__import__('_pytest.nodes')\n",
            "g.py": "from _pytest import *\n",
        }
    )
    messages = repository.messages("import_phase", source_modules=["pkg"], forbidden_modules=["_pytest.nodes"])
    assert [message.split()[4] for message in messages] == ["pkg.b", "pkg.c", "pkg.e", "pkg.f"]


def test_sources_can_be_single_modules_and_patterns(repository: Repository) -> None:
    repository.package(
        {"a.py": "import vllm\n", "b/__init__.py": "", "b/c.py": "import vllm\n", "b/d/e.py": "import vllm\n"}
    )

    def who(*sources: str, **options: str) -> list[str]:
        return [
            text.split()[4]
            for text in repository.messages("import_phase", **{**VLLM, "source_modules": list(sources), **options})
        ]

    assert who("pkg") == ["pkg.a", "pkg.b.c", "pkg.b.d.e"]
    assert who("pkg", as_packages="False") == []
    assert who("pkg.b", as_packages="False") == []
    assert who("pkg.*", as_packages="False") == ["pkg.a"]
    assert who("pkg.b.*") == ["pkg.b.c", "pkg.b.d.e"]
    assert who("pkg.**", as_packages="False") == ["pkg.a", "pkg.b.c", "pkg.b.d.e"]


def test_names_in_other_alphabets_are_names(repository: Repository) -> None:
    repository.package({"größe.py": "import pkg.数\n", "数.py": "import vllm\n"})
    assert hops(repository, **{**VLLM, "source_modules": ["pkg.größe"]}) == [
        ["pkg.größe -> pkg.数 (eager)  pkg/größe.py:1", "pkg.数 -> vllm (eager)  pkg/数.py:1"]
    ]


def test_a_module_is_found_behind_a_link_and_beside_a_package_of_its_name(repository: Repository) -> None:
    repository.write({"elsewhere/z.py": "import vllm\n", "elsewhere/__init__.py": ""})
    repository.package({"a.py": "import vllm\n", "a/__init__.py": "import json\n", "with-dash.py": "import vllm\n"})
    (repository.root / "pkg" / "link").symlink_to(repository.root / "elsewhere")
    messages = repository.messages("import_phase", **VLLM)
    assert [text.split()[4] for text in messages] == ["pkg.link.z", "pkg.with-dash"]


def test_the_portions_of_a_namespace_are_checked_together(repository: Repository, monkeypatch) -> None:
    repository.write({"one/ns/a/x.py": "import ns.b.y\n", "one/ns/a/__init__.py": "", "two/ns/b/y.py": "import vllm\n"})
    repository.write({"two/ns/b/__init__.py": ""})
    for portion in ("one", "two"):
        monkeypatch.syspath_prepend(repository.root / portion)
    chains = hops(repository, roots=("ns",), **{**VLLM, "source_modules": ["ns.a"]})
    assert chains == [["ns.a.x -> ns.b.y (eager)  one/ns/a/x.py:1", "ns.b.y -> vllm (eager)  two/ns/b/y.py:1"]]


def test_a_file_that_cannot_be_read_on_the_way_is_not_covered(repository: Repository) -> None:
    repository.package({"a.py": "import pkg.b\n", "b.py": "import vllm\nx = " + "+".join(["1"] * 5000) + "\n"})
    check = repository.check("import_phase", **VLLM)
    # A Python that can parse it says what it finds.
    assert not check.kept
    if check.metadata["uncovered"]:
        assert "pkg/b.py" in check.metadata["uncovered"][0]
