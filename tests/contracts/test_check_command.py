# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-contracts check`: exit codes, formats, configurations, baselines."""

import json
import os
import re
import subprocess
import sys
import urllib.parse
from textwrap import dedent

import pytest

from tests.contracts.repository import Repository

SESSION = """
[importlinter]
root_package = pkg
include_external_packages = True
"""
RULE = """
[importlinter:contract:rule]
name = No engine: 100%%, really
type = import_phase
source_modules = pkg
forbidden_modules = vllm
accept_unknown = vllm
"""
COVERAGE = """
[importlinter:contract:files]
name = All files
type = coverage
"""


@pytest.fixture
def broken(repository: Repository) -> Repository:
    """A configuration whose rule is broken by a chain of two hops."""
    repository.package({"a.py": "import pkg.b\n", "b.py": "\nimport vllm\n"})
    options = RULE.replace("source_modules = pkg", "source_modules = pkg.a")
    return repository.write({".importlinter": SESSION + options + COVERAGE})


def test_kept_is_0(repository: Repository, command) -> None:
    repository.package({"a.py": "import json\n"}).write({".importlinter": SESSION + RULE + COVERAGE})
    said = command("check")
    assert (said.code, said.err) == (0, "")
    assert "2 of 2 contracts kept." in said.out


def test_broken_is_1_and_the_chain_is_printed(broken: Repository, command) -> None:
    """F12."""
    said = command("check")
    assert said.code == 1
    assert "- pkg/b.py:2: vllm is reached from pkg.a, by pkg.b (eager)" in said.out
    assert "    pkg.a -> pkg.b (eager)  pkg/a.py:1\n    pkg.b -> vllm (eager)  pkg/b.py:2\n" in said.out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("forbidden_modules = vllm\naccept_unknown = vllm", "forbidden_modules = pytst"), "Did you mean"),
        (("source_modules = pkg", "source_modules = pgk"), "source_modules names 'pgk'"),
        (("type = import_phase", "type = import_phases"), "did you mean 'import_phase'"),
        (("accept_unknown", "accept_unknwon"), "accept_unknwon"),
        (("source_modules = pkg\n", ""), "source_modules: This is a required field"),
        (("root_package = pkg", "root_package = nowhere"), "nowhere"),
        (("root_package = pkg", "root_package = os"), "no package with source files"),
        (("root_package = pkg\n", ""), "root_package"),
        (("include_external_packages = True", ""), "include_external_packages = True"),
        (("type = import_phase", "type = layers"), "no contract of the types"),
    ],
)
def test_what_proves_nothing_is_2(change: tuple[str, str], words: str, repository: Repository, command) -> None:
    repository.package({"a.py": "import json\n"}).write({".importlinter": (SESSION + RULE).replace(*change)})
    said = command("check")
    assert said.code == 2
    assert words in said.out + said.err


def test_a_folder_without_a_configuration_is_2(repository: Repository, command) -> None:
    said = command("check")
    assert said.code == 2
    assert "--config" in said.err
    assert command("check", "--config", "none.ini").code == 2


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pkg/c.py": "import = 1\n"}, "pkg/c.py"),
        ({"pkg/c.py": b"x = '\xe9'\n"}, "c.py"),
        ({"pkg/sub/c.py": "import vllm\n"}, "pkg/sub/c.py is covered by no contract"),
    ],
)
def test_what_was_not_seen_is_3_also_without_a_coverage_contract(files, words, repository: Repository, command) -> None:
    """F2: a contract of that type is added where none is configured."""
    repository.package({"a.py": ""}).write({".importlinter": SESSION + RULE, **files})
    said = command("check")
    assert said.code == 3
    assert words in said.out + said.err


@pytest.mark.parametrize(
    ("code", "since"),
    [
        ("type X = int\nimport importlib\nimportlib.import_module('vllm')\n", (3, 12)),
        ("def f[T]():\n    import vllm\n", (3, 12)),
        ("lazy import vllm\n", (3, 15)),
    ],
)
def test_the_syntax_of_a_later_python_is_3_and_not_a_pass(code, since, repository: Repository, command) -> None:
    """Whether it is grimp that can't read the file or this interpreter."""
    if sys.version_info >= since:
        pytest.skip("this interpreter knows the syntax")
    repository.package({"a.py": "", "b.py": code}).write({".importlinter": SESSION + RULE})
    said = command("check")
    assert said.code == 3, said
    assert "b.py" in said.out + said.err


@pytest.mark.parametrize("code", ["type X = int\nimport vllm\n", "f'{f'{1}'}'\nimport vllm\n"])
def test_a_later_syntax_elsewhere_in_the_file_hides_no_import(code, repository: Repository, command) -> None:
    """grimp reads the file on every Python, and the statement around the import is plain."""
    repository.package({"a.py": "", "b.py": code}).write({".importlinter": SESSION + RULE})
    said = command("check")
    assert said.code == 1, said
    assert "pkg/b.py:2: vllm is imported by pkg.b (eager)" in said.out


def test_a_link_to_nothing_is_3(repository: Repository, command) -> None:
    repository.package({"a.py": ""}).write({".importlinter": SESSION + RULE})
    (repository.root / "pkg" / "b.py").symlink_to("nowhere.py")
    said = command("check")
    assert said.code == 3
    assert "b.py" in said.err


def test_what_proves_nothing_comes_before_broken_before_not_seen(broken: Repository, command) -> None:
    broken.write({"pkg/sub/c.py": ""})
    assert command("check").code == 1
    text = (broken.root / ".importlinter").read_text()
    (broken.root / ".importlinter").write_text(text + "exclude = pkg/nothing/*  # gone\n")
    said = command("check")
    assert said.code == 2
    assert "BROKEN" in said.out
    assert "MISCONFIGURED" in said.out


@pytest.mark.parametrize("place", [".importlinter", "setup.cfg", "pyproject.toml", "ci/rules.ini", "ci/rules.toml"])
def test_every_place_of_a_configuration_is_read(place: str, repository: Repository, command) -> None:
    toml = """
    [tool.importlinter]
    root_packages = ["pkg"]
    include_external_packages = true
    exclude_type_checking_imports = true

    [[tool.importlinter.contracts]]
    name = "rule"
    type = "import_phase"
    source_modules = ["pkg"]
    forbidden_modules = ["vllm"]
    accept_unknown = ["vllm"]
    as_packages = true
    phases = ["lazy"]
    allow = ["pkg.b -> vllm  # a reason"]
    """
    ini = SESSION + RULE + "phases = lazy\nallow =\n    pkg.b -> vllm  # a reason\n"
    repository.package({"a.py": "def f():\n    import vllm\n", "b.py": "def f():\n    import vllm\n"})
    repository.write({place: dedent(toml) if place.endswith("toml") else ini})
    said = command("check", *(["--config", place] if "/" in place else []))
    assert said.code == 1, said
    assert "pkg/a.py:2" in said.out
    assert "pkg/b.py" not in said.out


def test_contracts_of_other_types_are_left_to_lint_imports(broken: Repository, command) -> None:
    other = "[importlinter:contract:x]\nname = x\ntype = layers\nlayers = pkg\n"
    text = (broken.root / ".importlinter").read_text()
    (broken.root / ".importlinter").write_text(text + other)
    assert "1 contracts of other types are for lint-imports." in command("check").out


def test_a_type_may_be_registered_under_another_name(repository: Repository, command) -> None:
    types = "contract_types =\n    my_phase: nemo_rl_contracts.contract_types.ImportPhaseContract\n"
    repository.package({"a.py": "import vllm\n"})
    repository.write({".importlinter": SESSION + types + RULE.replace("type = import_phase", "type = my_phase")})
    assert command("check").code == 1


def test_the_src_layout_is_found(repository: Repository, command, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(repository.root)])
    repository.package({"a.py": "import vllm\n"}, name="src/pkg").write({".importlinter": SESSION + RULE})
    (repository.root / "src" / "__init__.py").unlink(missing_ok=True)
    said = command("check")
    assert said.code == 1
    assert "src/pkg/a.py:1" in said.out


def test_json_holds_verdicts_and_chains(broken: Repository, command) -> None:
    said = command("check", "--format", "json")
    document = json.loads(said.out)
    assert (document["schema"], document["exit_code"], document["verdict"]) == (1, said.code, "broken")
    rule, coverage = document["contracts"]
    assert (rule["type"], rule["verdict"], coverage["verdict"]) == ("import_phase", "broken", "kept")
    (violation,) = rule["violations"]
    assert (violation["file"], violation["line"]) == ("pkg/b.py", 2)
    assert violation["key"] == "pkg.a -> pkg.b -> vllm (eager)"
    assert [(hop["importer"], hop["imported"], hop["phase"], hop["line"]) for hop in violation["chain"]] == [
        ("pkg.a", "pkg.b", "eager", 1),
        ("pkg.b", "vllm", "eager", 2),
    ]


def places(node: object) -> list[dict]:
    """Every physical location in a SARIF log."""
    if isinstance(node, list):
        return [place for part in node for place in places(part)]
    if isinstance(node, dict):
        own = [node["physicalLocation"]] if "physicalLocation" in node else []
        return own + [place for part in node.values() for place in places(part)]
    return []


def test_two_contracts_of_one_name_are_refused(broken: Repository, command) -> None:
    """A baseline has a section for each name, so two of them would settle each other's violations."""
    text = (broken.root / ".importlinter").read_text()
    (broken.root / ".importlinter").write_text(text + COVERAGE.replace(":files", ":others"))
    said = command("check")
    assert said.code == 2
    assert "two contracts have the name 'All files'" in said.err


def test_sarif_has_what_its_schema_requires(broken: Repository, command) -> None:
    """2.1.0, sections 3.13 to 3.37: required properties, their types, and links between them."""
    broken.write({"pkg/with space/c d.py": ""})
    text = (broken.root / ".importlinter").read_text()
    stale = (
        COVERAGE.replace(":files", ":others").replace("All files", "Others") + "exclude = pkg/gone/*  # nothing there\n"
    )
    (broken.root / ".importlinter").write_text(text + stale)
    log = json.loads(command("check", "--format", "sarif").out)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert isinstance(run["tool"]["driver"]["name"], str)
    assert len(set(rules)) == len(rules)
    assert len(run["results"]) == 3  # a chain, a file, and an option
    for result in run["results"]:
        assert result["message"]["text"]
        assert result["ruleId"] in rules
        assert result["level"] in ("none", "note", "warning", "error")
    for place in places(run["results"]):
        uri = place["artifactLocation"]["uri"]
        assert " " not in uri
        assert (broken.root / urllib.parse.unquote(uri)).is_file()
        assert place.get("region", {"startLine": 1})["startLine"] >= 1
    (steps,) = [
        flow["locations"]
        for result in run["results"]
        for code in result.get("codeFlows", ())
        for flow in code["threadFlows"]
    ]
    assert len(steps) == 2
    prints = [result["partialFingerprints"]["key/v1"] for result in run["results"] if "partialFingerprints" in result]
    assert len(prints) == len(set(prints)) == 2


def test_github_annotations_are_escaped_and_name_file_and_line(broken: Repository, command) -> None:
    said = command("check", "--format", "github")
    (line,) = [line for line in said.out.splitlines() if line.startswith("::error")]
    title = "No engine%3A 100%25%2C really"
    assert line.startswith(
        f"::error file=pkg/b.py,line=2,title={title}::vllm is reached from pkg.a, by pkg.b (eager)%0A"
    )
    broken.write({"pkg/a:b,c/x.py": ""})
    said = command("check", "--format", "github")
    assert "::error file=pkg/a%3Ab%2Cc/x.py,line=1," in said.out
    assert all(line.startswith("::error ") or line.endswith("contracts kept.") for line in said.out.splitlines())


def test_mermaid_draws_each_hop_once(broken: Repository, command) -> None:
    lines = command("check", "--format", "mermaid").out.splitlines()
    assert lines[0] == "flowchart LR"
    names = dict(re.findall(r'(m\d+)\["(.*)"\]', "\n".join(lines)))
    assert sorted(names.values()) == ["pkg.a", "pkg.b", "vllm"]
    edges = re.findall(r'(m\d+) -->\|"(.*)"\| (m\d+)', "\n".join(lines))
    assert [(names[a], label, names[b]) for a, label, b in edges] == [
        ("pkg.a", "eager, line 1", "pkg.b"),
        ("pkg.b", "eager, line 2", "vllm"),
    ]


BASELINE = RULE + "baseline = known.json\n"
NAME = "No engine: 100%, really"


def known(repository: Repository) -> list[str]:
    return json.loads((repository.root / "known.json").read_text())["known"][NAME]


@pytest.fixture
def baselined(repository: Repository) -> Repository:
    keys = ["pkg.a -> vllm (eager)", "pkg.gone -> vllm (eager)"]
    repository.package({"a.py": "\n\nimport vllm\n"})
    return repository.write(
        {
            ".importlinter": SESSION + BASELINE,
            "known.json": json.dumps({"schema": 1, "known": {NAME: keys, "z": ["q"]}}),
        }
    )


def test_a_stale_entry_of_a_baseline_is_2_until_it_is_taken_out(baselined: Repository, command) -> None:
    said = command("check")
    assert said.code == 2
    assert "'pkg.gone -> vllm (eager)' stands in known.json and is no longer true" in said.out
    assert command("check", "--shrink-baseline").code == 0
    assert known(baselined) == ["pkg.a -> vllm (eager)"]
    assert json.loads((baselined.root / "known.json").read_text())["known"]["z"] == ["q"]
    said = command("check")
    assert said.code == 0
    assert "1 known violation in known.json" in said.out


def test_a_baseline_never_grows(baselined: Repository, command) -> None:
    baselined.package({"b.py": "import vllm\n"})
    for _ in range(2):
        said = command("check", "--shrink-baseline")
        assert said.code == 1
        assert "pkg.b" in said.out
        assert known(baselined) == ["pkg.a -> vllm (eager)"]


def test_a_known_import_that_moves_earlier_is_new(baselined: Repository, command) -> None:
    """Lazy before, eager now: another line of the list."""
    baselined.package({"a.py": "if x:\n    import vllm\n"})
    command("check", "--shrink-baseline")
    assert known(baselined) == []
    assert command("check").code == 1


def test_a_contract_that_cannot_judge_takes_nothing_out(baselined: Repository, command) -> None:
    text = (baselined.root / ".importlinter").read_text()
    (baselined.root / ".importlinter").write_text(text.replace("source_modules = pkg", "source_modules = pgk"))
    assert command("check", "--shrink-baseline").code == 2
    assert len(known(baselined)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"schema": 2, "known": {}}',
        '{"schema": 1}',
        '{"schema": 1, "known": {"a": "b"}}',
        '{"schema": 1, "known": {}}',
    ],
)
def test_a_baseline_that_is_none_is_2(text: str, baselined: Repository, command) -> None:
    (baselined.root / "known.json").write_text(text)
    for options in ([], ["--shrink-baseline"]):
        said = command("check", *options)
        assert said.code == 2
        assert "known.json" in said.out + said.err
    assert (baselined.root / "known.json").read_text() == text


def test_without_a_baseline_there_is_none_to_shrink(repository: Repository, command) -> None:
    repository.package({"a.py": ""}).write({".importlinter": SESSION + RULE})
    said = command("check", "--shrink-baseline")
    assert said.code == 2
    assert "no contract has a baseline" in said.err


def test_a_reader_that_goes_away_gets_no_traceback(broken: Repository) -> None:
    """As in `nemo-rl-contracts check | head -1`."""
    command = [sys.executable, "-m", "nemo_rl_contracts", "check", "--no-cache"]
    running = subprocess.Popen(command, cwd=broken.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.close()
    assert running.wait(timeout=60) == 141
    assert running.stderr is not None
    assert running.stderr.read() == b""


def test_the_module_runs_as_a_program_and_without_a_cache(broken: Repository) -> None:
    done = broken.run("-m", "nemo_rl_contracts", "check", "--no-cache")
    assert done.returncode == 1, done.stderr
    assert "pkg/b.py:2" in done.stdout
    done = broken.run("-m", "nemo_rl_contracts", "check", "--format", "yaml")
    assert done.returncode == 2
    assert sorted(path.name for path in broken.root.iterdir()) == [".importlinter", "pkg"]


def test_what_a_picture_cannot_show_is_said_beside_it(broken: Repository, command) -> None:
    text = (broken.root / ".importlinter").read_text()
    broken.write({"pkg/sub/c.py": ""})
    said = command("check", "--format", "mermaid")
    assert said.code == 1
    assert "All files: pkg/sub/c.py is covered by no contract" in said.err
    (broken.root / ".importlinter").write_text(text.replace("source_modules = pkg", "source_modules = pgk"))
    said = command("check", "--format", "mermaid")
    assert (said.code, said.out) == (2, "flowchart LR\n")
    assert "misconfigured: No engine: 100%, really: source_modules names 'pgk" in said.err


def test_a_pipe_is_3_and_waits_for_nobody(repository: Repository, command) -> None:
    repository.package({"a.py": ""}).write({".importlinter": SESSION + RULE})
    os.mkfifo(repository.root / "pkg" / "pipe.py")
    for arguments in (("check",), ("report", "pkg", "--forbid", "json")):
        said = command(*arguments)
        assert said.code == 3
        assert said.err == (
            "nemo-rl-contracts: not covered: pkg/pipe.py is no ordinary file, so nothing can be said about it; take it out\n"
        )


@pytest.mark.parametrize("links", [{"c/loop": "../c"}, {"c/loop": ".."}, {"c/to_d": "../d", "d/to_c": "../c"}])
def test_links_in_a_circle_are_3(links: dict[str, str], repository: Repository, command) -> None:
    """An import linter would see the same module under many names."""
    repository.package({"c/a.py": "", "d/b.py": ""}).write({".importlinter": SESSION + RULE})
    for place, target in links.items():
        (repository.root / "pkg" / place).symlink_to(target)
    for arguments in (("check",), ("report", "pkg", "--forbid", "json")):
        said = command(*arguments)
        assert said.code == 3
        assert "is a link to a folder above it" in said.err


def test_a_link_to_another_folder_is_no_circle(repository: Repository, command) -> None:
    repository.package({"c/a.py": "", "d/b.py": ""}).write({".importlinter": SESSION + RULE})
    (repository.root / "pkg" / "e").symlink_to("c")
    assert command("check").code == 0


@pytest.mark.parametrize("place", ["notes", "notes/deeper"])
def test_a_cache_folder_that_can_be_none_is_2(place: str, repository: Repository, command) -> None:
    repository.package({"a.py": ""}).write({".importlinter": SESSION + RULE, "notes": "mine"})
    said = command("check", "--cache-dir", place)
    assert said.code == 2
    assert f"results are kept in a folder, and {place} can't be one" in said.err
    assert command("check", "--cache-dir", place, "--no-cache").code == 0
    assert command("check", "--cache-dir", "new/folder").code == 0


BAD_CACHE = "import sys, grimp\ndef build_graph(*a, **b):\n    {body}\ngrimp.build_graph = build_graph\n"
MAIN = "from nemo_rl_contracts.cli.app import main\nsys.exit(main())\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise RuntimeError('a\\nb')", "the command itself failed: RuntimeError: a; --traceback shows where"),
        ("raise type('PanicException', (BaseException,), {})('index')", "failed: PanicException: index"),
    ],
)
def test_a_failure_of_the_command_itself_is_2_and_never_1(body: str, words: str, repository: Repository) -> None:
    """1 would mean that a contract is broken."""
    repository.package({"a.py": ""}).write({".importlinter": SESSION + RULE})
    code = BAD_CACHE.format(body=body) + MAIN
    done = repository.run("-c", code, "check")
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = repository.run("-c", code, "check", "--traceback")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    done = repository.run("-c", BAD_CACHE.format(body="raise KeyboardInterrupt") + MAIN, "check")
    assert done.returncode not in (0, 1, 2, 3)
