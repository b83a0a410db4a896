# SPDX-License-Identifier: Apache-2.0
"""What a module does when it is imported is its own result: it breaks no other one, and nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl_core.firewall import ModuleState, Verdict
from tests.core.firewall.installation import by_name, end, is_running

DEADLINE_S = 30.0

#: Source of a module, how its import ends, and what the report says of it.
MODULES = {
    "exits": ("import sys\nsys.exit(3)\n", ModuleState.FAILED, "SystemExit: 3"),
    "ends": ("import os\nos._exit(0)\n", ModuleState.FAILED, "ended with exit code 0 before the import was done"),
    "crashes": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
        ModuleState.FAILED,
        "was ended by SIGSEGV",
    ),
    "raises": ("raise RuntimeError('libfoo is missing')\n", ModuleState.FAILED, "RuntimeError: libfoo is missing"),
    "interrupts": ("raise KeyboardInterrupt\n", ModuleState.FAILED, "KeyboardInterrupt"),
    "mute": (
        "class Mute(Exception):\n    def __str__(self):\n        raise OSError\nraise Mute\n",
        ModuleState.FAILED,
        "Mute: <its text cannot be made: OSError>",
    ),
    "misspelt": ("def f(:\n", ModuleState.FAILED, "SyntaxError"),
    "reads": ("input()\n", ModuleState.FAILED, "EOFError"),
    "prints": ("print('{' * 10_000_000)\n", ModuleState.IMPORTED, ""),
    "starts_a_thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\n",
        ModuleState.IMPORTED,
        "",
    ),
    "closes_everything": ("import os\nos.closerange(0, 1000)\n", ModuleState.IMPORTED, ""),
    "comes_back_twice": ("import os\nos.fork()\n", ModuleState.IMPORTED, ""),
    "hides_functions": (
        "import builtins, os, time\ndel builtins.open, builtins.print\nos.open = os.write = time.perf_counter = None\n",
        ModuleState.IMPORTED,
        "",
    ),
    "clears_the_finders": ("import sys\nsys.meta_path.clear()\n", ModuleState.IMPORTED, ""),
    "ignores_its_end": (
        "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
        ModuleState.IMPORTED,
        "",
    ),
    "writes_a_file": ("open('litter', 'w').close()\n", ModuleState.IMPORTED, ""),
    "well": ("VALUE = 1\n", ModuleState.IMPORTED, ""),
}


def test_each_module_has_its_own_result_whatever_the_others_do(installation, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    installation.write({"lib/__init__.py": "", **{f"lib/{name}.py": text for name, (text, _, _) in MODULES.items()}})
    before = sorted(tmp_path.iterdir())
    results = by_name(installation.audit("lib", jobs=2))
    for name, (_, state, words) in MODULES.items():
        result = results[f"lib.{name}"]
        assert result.state is state, (name, result)
        assert words in str(result.failure or ""), (name, result)
    assert capfd.readouterr() == ("", "")
    assert sorted(tmp_path.iterdir()) == before


def test_a_failure_is_told_with_its_last_calls_and_what_was_printed(installation):
    text = "print('loading libfoo')\ndef load():\n    raise OSError('no libfoo')\nload()\n"
    installation.write({"lib/__init__.py": "", "lib/a.py": text})
    report = installation.audit("lib")
    assert report.verdict is Verdict.NOT_PROVEN
    assert report.verdict.exit_code == 3
    failure = by_name(report)["lib.a"].failure
    assert failure is not None
    assert [place.rpartition("/")[2] for place in failure.traceback] == [
        "a.py:4 (lib.a): load()",
        "a.py:3 (lib.a.load): raise OSError('no libfoo')",
    ]
    assert failure.output == "loading libfoo"


def test_a_module_that_hangs_is_ended_and_says_where_it_was(installation):
    hanging = "import time\nprint('waiting')\ndef wait():\n    time.sleep(3600)\nwait()\n"
    busy = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True:\n    pass\n"
    installation.write({"lib/__init__.py": "", "lib/a.py": hanging, "lib/b.py": busy, "lib/c.py": ""})
    results = by_name(installation.audit("lib", timeout_s=2.0, jobs=3))
    for name in ("lib.a", "lib.b"):
        assert results[name].state is ModuleState.TIMED_OUT
        assert "did not end within 2 s" in str(results[name].failure)
    assert results["lib.a"].failure is not None
    assert [place.rpartition("/")[2] for place in results["lib.a"].failure.traceback] == [
        "a.py:5 (<module>): wait()",
        "a.py:4 (wait): time.sleep(3600)",
    ]
    assert results["lib.a"].failure.output == "waiting"
    assert results["lib.c"].state is ModuleState.IMPORTED


def test_what_a_module_leaves_running_is_ended(installation, tmp_path):
    note = tmp_path / "pids"
    text = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '3600'])\n"
        "forked = os.fork()\n"
        "if forked == 0:\n    time.sleep(3600)\n"
        f"open({str(note)!r}, 'w').write(f'{{child.pid}} {{forked}}')\n"
    )
    installation.write({"lib/__init__.py": "", "lib/a.py": text})
    assert installation.audit("lib").verdict is Verdict.CLEAN
    left = [pid for pid in map(int, note.read_text().split()) if is_running(pid)]
    end(left)
    assert left == []


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        ("import time\ntime.sleep(3600)\n", ModuleState.TIMED_OUT, "did not get on within 2 s"),
        ("import os\nos._exit(4)\n", ModuleState.FAILED, "ended with exit code 4 while it imported the package"),
        ("import os\nos.abort()\n", ModuleState.FAILED, "was ended by SIGABRT while it imported the package"),
        ("import no_such_dependency\n", ModuleState.FAILED, "No module named 'no_such_dependency'"),
        ("raise SystemExit('not here')\n", ModuleState.FAILED, "SystemExit: not here"),
    ],
)
def test_where_the_package_itself_cannot_be_imported_no_module_is_tried(installation, text, state, words):
    installation.write({"lib/__init__.py": text, "lib/a.py": "import engine\n", "lib/b.py": ""})
    report = installation.audit("lib", timeout_s=2.0)
    assert report.verdict is Verdict.NOT_PROVEN
    package, *others = report.results
    assert package.state is state
    assert words in str(package.failure)
    assert {other.state for other in others} == {ModuleState.NOT_TRIED}
    assert {str(other.failure) for other in others} == {"lib itself cannot be imported"}


def test_an_attempt_before_the_package_fails_is_still_found(installation):
    installation.write({"lib/__init__.py": "import absent\n", "lib/a.py": ""})
    report = installation.audit("lib", "absent")
    assert report.verdict is Verdict.FOUND
    assert report.findings[0].modules == ("lib",)
    assert len(report.failed) == 2


@pytest.mark.timeout(100)
def test_a_package_that_takes_over_signals_finders_clocks_and_the_exit_is_audited_all_the_same(installation):
    text = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGCHLD, lambda *_: os.waitpid(-1, os.WNOHANG))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'Observer' not in type(finder).__name__]\n"
        "import atexit, threading\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "atexit.register(threading.Event().wait)\n"
        "time.sleep = time.monotonic = os.fork = None\n"
        "os.closerange(0, 1000)\n"
    )
    installation.write({"lib/__init__.py": text, "lib/a.py": "import engine\n", "lib/b.py": ""})
    report = installation.audit("lib", timeout_s=3600.0)  # no deadline of the audit ends this
    assert [result.state for result in report.results] == [ModuleState.IMPORTED] * 3
    assert [finding.modules for finding in report.findings] == [("lib.a",)]
    assert report.findings[0].ask.importer == "lib.a"


def test_an_observer_that_is_killed_leaves_the_rest_unproven(installation):
    text = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(3600)\n"
    installation.write({"lib/__init__.py": "", "lib/a.py": "", "lib/b.py": text, "lib/c.py": ""})
    report = installation.audit("lib")
    assert report.verdict is Verdict.NOT_PROVEN
    results = by_name(report)
    assert results["lib.a"].state is ModuleState.IMPORTED
    for name in ("lib.b", "lib.c"):
        assert results[name].state is ModuleState.NOT_TRIED
        assert "was ended by SIGKILL" in str(results[name].failure)


@pytest.mark.parametrize("name", ["lib/__init__.py", "heavy.py"])
def test_a_package_or_a_preload_that_forks_is_audited_once(installation, name):
    """Its child would go on as a second observer: it is given the lead here, and takes the slow module from the first."""
    files = {"lib/__init__.py": "", "heavy.py": "", "lib/a.py": "import time\ntime.sleep(1.5)\nimport engine\n"}
    installation.write({**files, name: "import os, time\nif os.fork():\n    time.sleep(0.5)\n"})
    report = installation.audit("lib", preload=("heavy",))
    assert [result.state for result in report.results] == [ModuleState.IMPORTED] * 2
    assert [finding.modules for finding in report.findings] == [("lib.a",)]


def test_a_module_can_print_and_start_programs_where_the_package_closes_every_descriptor(installation):
    work = "import os\nos.write(1, b'one ')\nos.write(2, b'two')\nassert os.read(0, 1) == b''\nraise OSError\n"
    installation.write({"lib/__init__.py": "import os\nos.closerange(0, 100)\n", "lib/a.py": work})
    failure = by_name(installation.audit("lib"))["lib.a"].failure
    assert failure is not None
    assert (failure.type, failure.output) == ("OSError", "one two")


def test_each_module_has_a_current_folder_of_its_own_that_it_may_fill_or_remove(installation):
    """F18: what one module does there is no other one's business."""
    fills = "open('lock', 'x').close()\n"
    removes = "import os\nos.rmdir(os.getcwd())\n"
    files = {"lib/__init__.py": "", "lib/a.py": fills, "lib/b.py": fills, "lib/c.py": removes, "lib/d.py": removes}
    installation.write(files)
    report = installation.audit("lib")
    assert [str(result.failure) for result in report.failed] == []
    chosen = {
        "lib/__init__.py": "import os\nos.chdir(os.sep)\n",
        "lib/a.py": "import os\nassert os.getcwd() == os.sep\n",
    }
    installation.write({**dict.fromkeys(files, ""), **chosen})
    assert installation.audit("lib").verdict is Verdict.CLEAN


def test_results_that_a_later_module_removes_are_kept(installation):
    # It waits first: the command reads a result when it hears of it, which is a moment later.
    text = "import glob, os, time\ntime.sleep(2.0)\nfor name in glob.glob('../result*'):\n    os.remove(name)\n"
    installation.write({"lib/__init__.py": "", "lib/a.py": "import engine\n", "lib/b.py": text, "lib/c.py": ""})
    report = installation.audit("lib")
    assert [finding.modules for finding in report.findings] == [("lib.a",)]
    assert report.failed == ()


def test_a_package_that_prints_without_end_fills_no_disk(installation):
    text = (
        "import os, time\n"
        "for _ in range(40):\n    os.write(1, b'x' * 1_000_000)\n    time.sleep(0.1)\n"
        "raise RuntimeError(os.fstat(1).st_size)\n"
    )
    installation.write({"lib.py": text})
    failure = installation.audit("lib").package_result.failure
    assert failure is not None
    assert int(failure.text) < 20_000_000


#: Ways to have had the engine, or to have asked for it, and to show nothing of it afterwards; and the line that asks.
HIDING = {
    "removed": ("import sys\nimport engine\ndel sys.modules['engine']\n", 2),
    "no_finders": ("import sys\nsys.meta_path.clear()\ntry:\n    import engine\nexcept ImportError:\n    pass\n", 4),
    "halted": (
        "import sys\nsys.modules['engine'] = None\ntry:\n    import engine\nexcept ImportError:\n    pass\n",
        4,
    ),
    "in_a_thread": (
        "import threading\ndef load():\n    import engine\nthread = threading.Thread(target=load)\n"
        "thread.start()\nthread.join()\n",
        3,
    ),
    "by_a_name_that_is_no_text": ("import sys\nsys.modules[3] = sys\nimport engine\n", 3),
}


@pytest.mark.parametrize("way", HIDING)
def test_who_hides_the_engine_again_is_found_with_the_line_that_asks(installation, way):
    text, line = HIDING[way]
    installation.write({"lib/__init__.py": "", "lib/a.py": text, "lib/b.py": ""})
    report = installation.audit("lib")
    assert [finding.modules for finding in report.findings] == [("lib.a",)]
    assert (report.findings[0].ask.importer, report.findings[0].ask.line) == ("lib.a", line)


def test_a_finder_of_the_package_that_answers_first_leaves_the_asker_known(installation):
    first = (
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "class First:\n    find_spec = staticmethod(PathFinder.find_spec)\nsys.meta_path.insert(0, First)\n"
    )
    files = {"lib/__init__.py": first, "lib/a.py": "import importlib\nimportlib.import_module('engine')\n"}
    installation.write(files)
    assert installation.audit("lib").findings[0].ask.importer == "lib.a"


def test_a_thread_that_is_left_running_has_a_moment_to_import(installation):
    text = (
        "import threading, time\ndef load():\n    time.sleep(0.1)\n    import engine\n"
        "threading.Thread(target=load).start()\n"
    )
    installation.write({"lib/__init__.py": "", "lib/a.py": text})
    assert [finding.modules for finding in installation.audit("lib").findings] == [("lib.a",)]


def wait_for(path: Path) -> int:
    """Return the process id that a module writes into a file."""
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, "the module was not imported"
        time.sleep(0.05)
    return int(path.read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("where", ["__init__", "a"])
@pytest.mark.parametrize("first", ["", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"])
def test_an_audit_that_is_ended_leaves_neither_a_process_nor_a_folder_behind(
    installation, tmp_path, where, number, first
):
    """Also where nothing of it can run any more, and where the package does not heed a polite end."""
    note, temporary = tmp_path / "pid", tmp_path / "temporary"
    temporary.mkdir()
    text = f"import os, time\nwith open({str(note)!r}, 'w') as file:\n    file.write(str(os.getpid()))\n"
    installation.write({"lib/__init__.py": "", "lib/a.py": "", f"lib/{where}.py": f"{first}{text}time.sleep(3600)\n"})
    command = [sys.executable, "-m", "nemo_rl_core", "firewall", "audit", "lib", "--forbid", "engine"]
    process = subprocess.Popen(
        [*command, "--python", installation.python],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        pid = wait_for(note)
        assert len(list(temporary.iterdir())) == 1
        process.send_signal(number)
        process.wait(timeout=DEADLINE_S)
    finally:
        process.kill()
    deadline = time.monotonic() + DEADLINE_S
    while (is_running(pid) or list(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid] if is_running(pid) else []
    end(left)
    assert (left, list(temporary.iterdir())) == ([], [])
