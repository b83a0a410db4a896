# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl firewall audit`` as a command: exit codes, what it prints, and what it leaves alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_core.cli.app import main
from tests.core.firewall.installation import Installation

FILES = {
    "engine/__init__.py": "print('the engine prints')\n",
    "clean/__init__.py": 'print(\'{"so": "does a module"}\')\n',
    "clean/a.py": "",
    "loads/__init__.py": "",
    "loads/a.py": "import loads.b\n",
    "loads/b.py": "import engine\n",
    "loads/c.py": "\n\ntry:\n    import engine.absent\nexcept ImportError:\n    pass\n",
    "asks.py": "try:\n    import absent\nexcept ImportError:\n    pass\n",
    "broken/__init__.py": "",
    "broken/a.py": "import no_such_dependency\n",
    "broken/b.py": "import os\nos.write(2, b'fatal: no device')\nos._exit(9)\n",
}


@pytest.fixture
def python(tmp_path: Path) -> str:
    made = Installation.make(tmp_path / "venv")
    made.write(FILES)
    return made.python


def run(capfd, python, package, *arguments):
    code = main(["firewall", "audit", package, "--forbid", "engine", "--python", python, *arguments])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("package", "more", "code", "verdict"),
    [
        ("clean", [], 0, "clean"),
        ("loads", [], 1, "found"),
        ("asks", ["--forbid", "absent"], 1, "found"),
        ("asks", [], 0, "clean"),
        ("broken", [], 3, "not proven"),
        ("broken", ["--forbid", "no_such_dependency"], 1, "found"),
    ],
)
def test_the_exit_code_and_the_document_say_the_same(package, more, code, verdict, python, capfd):
    """Standard output is the document and nothing else, whatever the modules print."""
    got, out, err = run(capfd, python, package, "--json", *more)
    document = json.loads(out)
    assert (got, document["exit_code"], document["verdict"], document["schema"]) == (code, code, verdict, 1)
    assert err == ""
    got, out, _ = run(capfd, python, package, *more)
    assert got == code
    assert re.search(rf"^{verdict}: .*\(exit code {code}\)$", out, re.MULTILINE), out


def test_the_document_holds_all_that_was_found(python, capfd):
    _, out, _ = run(capfd, python, "loads", "--json", "--forbid", "absent")
    document = json.loads(out)
    assert set(document) == {
        *("schema", "package", "forbid", "python", "verdict", "exit_code", "seconds"),
        *("preloaded", "preloads", "findings", "modules", "skipped"),
    }
    assert document["forbid"] == [
        {"name": "engine", "is_installed": True, "near": []},
        {"name": "absent", "is_installed": False, "near": []},
    ]
    assert [module["name"] for module in document["modules"]] == ["loads", "loads.a", "loads.b", "loads.c"]
    module = document["modules"][1]
    assert (module["state"], module["loaded"], module["num_modules"]) == ("imported", {"engine": 1}, 3)
    assert module["asks"][0]["chain"] == ["loads.a", "loads.b", "engine"]
    finding = document["findings"][0]
    assert (finding["modules"], finding["is_loaded"], finding["line"]) == (["loads.a", "loads.b"], True, 1)
    assert [place.partition(" ")[2] for place in finding["stack"]] == [
        "(loads.a): import loads.b",
        "(loads.b): import engine",
    ]


def test_the_text_names_each_first_asker_once_with_its_modules_and_its_stack(python, capfd):
    """F17."""
    _, out, _ = run(capfd, python, "loads")
    assert "2 modules load engine\n  loads.a, loads.b\n  first asker: loads.b, " in out
    assert "  being imported: loads.a -> loads.b -> engine\n" in out
    assert "1 module loads engine\n  loads.c\n  first asker: loads.c, " in out
    assert "loads/c.py:4, for engine\n" in out
    assert re.search(r"seconds +modules +name\n +[\d.]+ +1 +loads\n", out)
    assert "forbidden  engine, installed here" in out


def test_text_and_document_tell_apart_what_a_preload_does(python, capfd):
    code, out, _ = run(capfd, python, "clean", "--preload", "loads.b")
    assert code == 1
    assert "preloaded  loads.b (3 modules, " in out
    assert "loads.b loads engine\n  while preloading loads.b; " in out
    assert "slowest 1, each beyond clean itself and the preloads\n" in out
    assert re.search(r"seconds +modules +name\n +[\d.]+ +3 +loads\.b \(preloaded\)\n +[\d.]+ +1 +clean\n", out)
    code, out, _ = run(capfd, python, "clean", "--json", "--preload", "loads.b", "--preload", "loads.b")
    document = json.loads(out)
    assert (code, document["schema"], document["exit_code"]) == (1, 1, 1)
    (preload,) = document["preloads"]
    assert (preload["name"], preload["state"], preload["loaded"]) == ("loads.b", "imported", {"engine": 1})
    assert [(found["modules"], found["preloads"]) for found in document["findings"]] == [([], ["loads.b"])]


def test_a_forbidden_name_that_looks_like_a_typo_is_told_where_the_verdict_stands(python, capfd):
    """The exit code stays, since an absent package may be forbidden; without a near name nothing is said."""
    code, out, _ = run(capfd, python, "clean", "--forbid", "engin", "--forbid", "nothing_like_it")
    assert code == 0
    assert "forbidden  engin, not installed here; did you mean engine?\n" in out
    assert "forbidden  nothing_like_it, not installed here\n" in out
    assert "or asks for it; engin is not installed here; did you mean engine? (exit code 0)\n" in out
    _, out, _ = run(capfd, python, "clean", "--json", "--forbid", "engin", "--forbid", "nothing_like_it")
    assert [(name["is_installed"], name["near"]) for name in json.loads(out)["forbid"]] == [
        (True, []),
        (False, ["engine"]),
        (False, []),
    ]


def test_the_text_says_why_something_is_not_proven(python, capfd):
    _, out, _ = run(capfd, python, "broken")
    assert "broken.a: ModuleNotFoundError: No module named 'no_such_dependency'" in out
    assert "broken/a.py:1 (broken.a): import no_such_dependency" in out
    assert "broken.b: its process ended with exit code 9 before the import was done\n      | fatal: no device" in out


@pytest.mark.parametrize(
    ("package", "more", "words"),
    [
        ("cleen", [], "Did you mean 'clean'"),
        ("clean", ["--forbid", "no-name"], "--forbid takes the name"),
        ("clean", ["--timeout", "0"], "--timeout is a positive number"),
        ("clean", ["--jobs", "0"], "--jobs is at least 1"),
        ("engine", [], "itself is covered by --forbid engine"),
        ("clean", ["--python", "no/such/python"], "--python takes the path of an interpreter"),
        ("clean", ["--python", "~nobody-of-this-name/python"], "--python takes the path of an interpreter"),
        ("clean", ["--preload", "no-name"], "--preload takes the name"),
        ("clean", ["--preload", "engine.config"], "--preload engine.config is covered by --forbid engine"),
        ("clean", ["--preload", "cleen"], "--preload cleen cannot be imported, and nothing was audited"),
        ("clean", ["--preload", "broken.b"], "ended with exit code 9 while it preloaded broken.b"),
    ],
)
def test_what_cannot_be_audited_ends_with_2_and_prints_no_document(package, more, words, python, capfd):
    code, out, err = run(capfd, python, package, "--json", *more)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_it_runs_where_the_current_folder_is_gone(python, tmp_path, monkeypatch, capfd):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run(capfd, python, "clean")[0] == 0
    code, _, err = run(capfd, "bin/python", "clean")
    assert code == 2
    assert "--python takes the path of an interpreter" in err


@pytest.mark.parametrize("arguments", [["audit"], ["audit", "clean"], [], ["audit", "clean", "--forbid"]])
def test_a_command_line_that_lacks_something_ends_with_2(arguments, capfd):
    with pytest.raises(SystemExit) as end:
        main(["firewall", *arguments])
    assert end.value.code == 2
    assert "usage:" in capfd.readouterr().err


def test_a_reader_that_stops_reading_gets_no_traceback(python):
    command = f"{sys.executable} -m nemo_rl_core firewall audit loads --forbid engine --python {python} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("audit of loads")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["firewall", "--help"], ["firewall", "audit", "--help"]])
def test_the_help_loads_neither_torch_nor_ray_nor_transformers_and_lists_the_exit_codes(arguments):
    """F31, U2."""
    probe = (
        "import sys\nfrom nemo_rl_core.cli.app import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm', 'nemo_rl_vllm', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if "audit" in arguments:
        assert re.findall(r"^  (\d)  ", done.stdout, re.MULTILINE) == ["0", "1", "2", "3"]


def test_an_audit_itself_loads_neither_torch_nor_ray_nor_transformers():
    """U2: the command that proves it is light itself; the package is imported elsewhere."""
    probe = (
        "import sys\nfrom nemo_rl_core.cli.app import main\n"
        "assert main(['firewall', 'audit', 'nemo_rl_core.guard', '--forbid', 'vllm']) == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm', 'nemo_rl_vllm'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
