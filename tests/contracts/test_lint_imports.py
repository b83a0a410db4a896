# SPDX-License-Identifier: Apache-2.0
"""All contract types under real `lint-imports`: of the installed release, and of both ends of the range that is allowed."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.repository import Repository
from tests.packaging.workshop import ROOT, uv

HEAD = """
[importlinter]
root_package = pkg
include_external_packages = True
contract_types =
    coverage: nemo_rl_contracts.contract_types.CoverageContract
    declared_dependencies: nemo_rl_contracts.contract_types.DeclaredDependenciesContract
    import_phase: nemo_rl_contracts.contract_types.ImportPhaseContract
    string_imports: nemo_rl_contracts.contract_types.StringImportsContract

[importlinter:contract:cover]
name = files
type = coverage

[importlinter:contract:declared]
name = declared
type = declared_dependencies
package = pkg
pyproject = pyproject.toml
extra_modules =
    fast: pkg.fast, pkg.slow

[importlinter:contract:phase]
name = phase
type = import_phase
source_modules = pkg
forbidden_modules =
    engine
phases =
    eager
    conditional
as_packages = True
allow =
    pkg.fast -> engine  # the one place; with a # in it

[importlinter:contract:strings]
name = strings
type = string_imports
source_modules =
    pkg
forbidden_modules =
    engine
"""
CLEAN = {
    "fast.py": "import engine\n",
    "slow.py": "def f():\n    import engine\n",
    "a.py": "import json\n",
}
PROJECT = '[project]\nname = "pkg"\n[project.optional-dependencies]\nfast = ["engine"]\n'

LINT = "import sys; from importlinter.cli import lint_imports_command as command; sys.exit(command())"


@pytest.fixture(scope="module", params=["installed", "2.14", "2.17"])
def python(request, tmp_path_factory) -> Path:
    """The interpreter of an environment with one release of the linter and this tree's contracts."""
    if request.param == "installed":
        return Path(sys.executable)
    folder = tmp_path_factory.mktemp("linter") / "venv"
    uv("venv", "--quiet", "--python", sys.executable, str(folder))
    python = folder / "bin" / "python"
    release = f"import-linter=={request.param}"
    uv("pip", "install", "--quiet", "--python", str(python), release, "-e", str(ROOT / "contracts"))
    return python


@pytest.fixture
def lint(python: Path, repository: Repository) -> Callable[[str], tuple[int, str]]:
    repository.package(CLEAN).write({"pyproject.toml": PROJECT})

    def run(configuration: str) -> tuple[int, str]:
        (repository.root / ".importlinter").write_text(configuration)
        # Without a terminal width the console folds long lines.
        environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "400"}
        done = subprocess.run(
            [python, "-c", LINT, "--no-cache"],
            cwd=repository.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_kept_contracts_are_kept(lint) -> None:
    code, text = lint(HEAD)
    assert code == 0, text
    assert "4 kept, 0 broken" in text


def test_broken_contracts_print_what_their_own_command_prints(lint, repository: Repository) -> None:
    """F12; words in square brackets are not taken for colours."""
    repository.package({"b.py": "import pkg.c\n", "c.py": "try:\n    import engine\nexcept ImportError:\n    pass\n"})
    repository.write({"pkg/[red]x.y.py": "", "pkg/d.py": "def f():\n    __import__('engine.core')\n"})
    code, text = lint(HEAD)
    assert code == 1
    assert "0 kept, 4 broken" in text
    for line in (
        "- pkg/[red]x.y.py:1: pkg/[red]x.y.py is covered by no contract: no module can have the name '[red]x.y'",
        "- pkg/c.py:2: engine is imported by pkg.c (eager, guarded)",
        "    pkg.c -> engine (eager, guarded)  pkg/c.py:2",
        "- pkg/d.py:2: pkg.d imports engine.core by a string (lazy)",
        "- pkg/c.py:2: pkg.c imports engine, which only the extra 'fast' brings; that extra is for pkg.fast, pkg.slow",
    ):
        assert re.search(rf"^{re.escape(line)}", text, re.MULTILINE), text


def test_one_that_proves_nothing_does_not_keep_the_others_from_being_checked(lint, repository: Repository) -> None:
    repository.package({"b.py": "__import__('engine')\n"})
    code, text = lint(
        HEAD.replace("    engine\nphases", "    engin\nphases").replace("fast: pkg.fast", "fats: pkg.fast")
    )
    assert code == 1
    assert "1 kept, 3 broken" in text
    assert "Misconfigured: no module 'engin' is installed here" in text
    assert "Did you mean 'engine'" in text
    assert "Misconfigured: extra_modules names the extra 'fats'; pyproject.toml has fast" in text
    assert "pkg.b imports engine by a string" in text


def test_an_option_that_is_spelled_wrong_is_an_error_in_every_release(lint) -> None:
    code, text = lint(HEAD.replace("allow =", "alow ="))
    assert code == 1
    assert "alow" in text


def test_a_known_violation_is_a_warning_and_a_stale_one_is_broken(lint, repository: Repository) -> None:
    repository.package({"b.py": "\n\nimport engine\n"})
    repository.write({"known.json": '{"schema": 1, "known": {"phase": ["pkg.b -> engine (eager)"]}}'})
    options = HEAD.replace("as_packages = True", "baseline = known.json").replace("pkg.fast, pkg.slow", "pkg")
    code, text = lint(options)
    assert code == 0, text
    assert "1 known violation in known.json" in text
    repository.package({"b.py": ""})
    code, text = lint(options)
    assert code == 1
    assert "'pkg.b -> engine (eager)' stands in known.json and is no longer true" in text
