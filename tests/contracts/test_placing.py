# SPDX-License-Identifier: Apache-2.0
"""A configuration holds nothing that nobody reads: sections, keys, types and values that are written wrongly are refused."""

import pytest

from tests.contracts.repository import Repository

INI = """
[importlinter]
root_package = pkg
include_external_packages = True

[importlinter:contract:files]
name = All files
type = coverage
"""
TOML = """
[tool.importlinter]
root_package = "pkg"
include_external_packages = true

[[tool.importlinter.contracts]]
name = "All files"
type = "coverage"
"""
RULE = "name = No engine\nsource_modules = pkg\nforbidden_modules = vllm\naccept_unknown = vllm\n"


@pytest.fixture
def small(repository: Repository) -> Repository:
    """A package that breaks the rule, if somebody reads the rule."""
    return repository.package({"a.py": "import vllm\n"})


@pytest.mark.parametrize(
    ("addition", "words"),
    [
        (f"[import-linter:contract:a]\ntype = import_phase\n{RULE}", "the section [import-linter:contract:a]"),
        (f"[importlinter.contract.a]\ntype = import_phase\n{RULE}", "the section [importlinter.contract.a]"),
        (f"[contract:a]\ntype = import_phase\n{RULE}", "[importlinter:contract:ID]"),
        (f"[importlinter:contract:a]\n{RULE}", "the contract 'No engine' has no type"),
        (f"[importlinter:contract:a]\ntype = phases\n{RULE}", "no contract type is called 'phases'"),
        (f"[importlinter:contract:a]\ntype = imp\n{RULE}", "no contract type is called 'imp'"),
        ("[importlinter:contract:a]\ntype = layers\nlayers = pkg\n", "the contract 'a' has no name"),
    ],
)
def test_a_contract_that_nobody_would_check_is_2(addition: str, words: str, small: Repository, command) -> None:
    assert command("check", "--config", "none.ini").code == 2
    small.write({".importlinter": INI + addition})
    said = command("check")
    assert (said.code, said.out) == (2, "")
    assert words in said.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "imp: nemo_rl_contracts.contract_types.ImportPhaseContact",
            "did you mean 'nemo_rl_contracts.contract_types.Imp",
        ),
        ("imp: nemo_rl_contracts.contract_typs.ImportPhaseContract", "there is no such type"),
        ("imp: nemo_rl_contract.contract_types.ImportPhaseContract", "there is no such type"),
        ("import_phase: nemo_rl_contracts.contract_types.CoverageContract", "the name of another type of ours"),
        ("import_phase: pkg.rules.MyContract", "the name of another type of ours"),
        ("layers: nemo_rl_contracts.contract_types.ImportPhaseContract", "a type of import-linter"),
        ("nemo_rl_contracts.contract_types.ImportPhaseContract", "the form 'name: package.module.Class'"),
    ],
)
def test_a_type_that_is_registered_wrongly_is_2(line: str, words: str, small: Repository, command) -> None:
    rule = f"[importlinter:contract:a]\ntype = {line.partition(':')[0]}\n{RULE}"
    top = INI.replace("root_package", f"contract_types =\n    {line}\nroot_package")
    small.write({".importlinter": top + rule})
    said = command("check")
    assert said.code == 2
    assert words in said.err


def test_a_type_of_somebody_else_is_left_to_lint_imports(small: Repository, command) -> None:
    top = INI.replace("root_package", "contract_types =\n    mine: pkg.rules.MyContract\nroot_package")
    small.write({".importlinter": top + "[importlinter:contract:a]\nname = a\ntype = mine\n"})
    assert "1 contracts of other types" in command("check").out


def test_a_type_may_be_named_by_its_own_module(small: Repository, command) -> None:
    line = "imp: nemo_rl_contracts.contract_types.import_phase.ImportPhaseContract"
    top = INI.replace("root_package", f"contract_types =\n    {line}\nroot_package")
    small.write({".importlinter": f"{top}[importlinter:contract:a]\ntype = imp\n{RULE}"})
    assert command("check").code == 1


def test_sections_of_other_tools_are_their_own_business(small: Repository, command) -> None:
    small.write({"setup.cfg": f"{INI}[flake8]\nmax-line-length = 120\n[tool:contract]\nx = 1\n"})
    assert command("check").code == 0
    small.write({"setup.cfg": f"{INI}[import-linter:contract:a]\ntype = import_phase\n{RULE}"})
    assert command("check").code == 2


CONTRACT = 'type = "import_phase"\nname = "x"\nsource_modules = ["pkg"]\nforbidden_modules = ["vllm"]\n'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("", f"[[tool.importlinter.contract]]\n{CONTRACT}"), "nobody reads 'contract' at the top"),
        (("", f"[[tool.import-linter.contracts]]\n{CONTRACT}"), "nobody reads [tool.import-linter]"),
        (("", f"[[importlinter.contracts]]\n{CONTRACT}"), "nobody reads [importlinter]"),
        (("", f"[[tool.importlinter.rules]]\n{CONTRACT}"), "nobody reads 'rules' at the top"),
        (('root_package = "pkg"', 'root_packges = ["pkg"]'), "did you mean 'root_packages'"),
        (('root_package = "pkg"', "root_package = 1"), "root_package is one text; got 1"),
        (('root_package = "pkg"', 'root_package = ["pkg"]'), "root_package is one text; got ['pkg']"),
        (('root_package = "pkg"', "root_packages = [1]"), "root_packages is a list of texts; got [1]"),
        (("[[tool.importlinter.contracts]]", "[tool.importlinter.contracts]"), "contracts are tables"),
        (("", CONTRACT.replace('["vllm"]', "[1]")), "forbidden_modules of the contract 'x' takes"),
        (("", CONTRACT.replace('["pkg"]', '[["pkg"]]')), "source_modules of the contract 'x' takes"),
        (("", CONTRACT.replace('["pkg"]', "{ a = 1 }")), "source_modules of the contract 'x' takes"),
        (("", f"{CONTRACT}as_packages = 0\n"), "as_packages of the contract 'x' takes a text, true or false"),
        (("", CONTRACT.replace('"import_phase"', "1")), "has no type"),
        (("", CONTRACT.replace('"x"', "1")), "has no name"),
    ],
)
def test_a_value_that_no_option_takes_is_2(change: tuple[str, str], words: str, small: Repository, command) -> None:
    text = TOML.replace(*change) if change[0] else TOML + (change[1] if change[1].startswith("[") else "")
    if not change[0] and not change[1].startswith("["):
        text = f"{TOML}\n[[tool.importlinter.contracts]]\n{change[1]}"
    small.write({"pyproject.toml": text})
    said = command("check")
    assert (said.code, said.out) == (2, "")
    assert words in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("top", ['contracts = ["x"]', "contracts = 1"])
def test_contracts_that_are_no_tables_are_2(top: str, small: Repository, command) -> None:
    small.write({"pyproject.toml": f'[tool.importlinter]\nroot_package = "pkg"\n{top}\n'})
    said = command("check")
    assert said.code == 2
    assert "contracts are tables [[tool.importlinter.contracts]]" in said.err
    small.write({"pyproject.toml": "[tool]\nimportlinter = 1\n"})
    assert "tool.importlinter is a table; got 1" in command("check").err
