# SPDX-License-Identifier: Apache-2.0
"""What is imported once for all modules saves time and changes no result."""

import sys
from typing import Any

import pytest

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.firewall import AuditReport, AuditRequest, ModuleState, Verdict, audit
from tests.core.firewall.installation import by_name

SWALLOWED = "try:\n    import absent\nexcept ImportError:\n    pass\n"


def outcome(report: AuditReport) -> dict[str, Any]:
    """All that must be the same with preloads and without: not seconds, and not the number of modules."""
    document = report.as_dict()
    modules = [
        {key: value for key, value in module.items() if key not in ("seconds", "num_modules")}
        for module in document["modules"]
    ]
    return {key: document[key] for key in ("verdict", "exit_code", "findings", "skipped")} | {"modules": modules}


def test_a_preload_is_imported_once_before_the_package_and_changes_no_result(installation, tmp_path):
    note = tmp_path / "imports"
    files = {
        "heavy/__init__.py": f"import heavy.part\nwith open({str(note)!r}, 'a') as file:\n    file.write('x')\n",
        "heavy/part.py": "",
        "lib/__init__.py": "",
        "lib/a.py": "import heavy\n",
        "lib/b.py": "import heavy\nimport engine\n",
        "lib/c.py": "import heavy\n" + SWALLOWED,
        "lib/d.py": "import heavy.absent_part\n",
    }
    installation.write(files)
    without = installation.audit("lib", "engine", "absent")
    assert note.read_text() == "xxxx"
    note.unlink()
    report = installation.audit("lib", "engine", "absent", preload=("heavy",))
    assert note.read_text() == "x"
    assert outcome(report) == outcome(without)
    assert [(r.name, r.num_modules) for r in report.preloads] == [("heavy", 2)]
    assert by_name(report)["lib.b"].num_modules == 2
    assert by_name(without)["lib.b"].num_modules == 4


def test_the_package_is_imported_after_its_preloads_in_their_order(installation):
    files = {
        "one.py": "import sys\nassert 'two' not in sys.modules\n",
        "two.py": "import one\n",
        "lib.py": "import sys\nassert 'two' in sys.modules\n",
    }
    installation.write(files)
    report = installation.audit("lib", preload=("one", "two"))
    assert report.verdict is Verdict.CLEAN
    assert [(result.name, result.num_modules) for result in report.preloads] == [("one", 1), ("two", 1)]


@pytest.mark.parametrize(
    ("text", "forbidden", "is_loaded"), [("import engine\n", "engine", True), (SWALLOWED, "absent", False)]
)
@pytest.mark.parametrize("package", ["", "import os\nos._exit(0)\n"])
def test_what_a_preload_loads_or_asks_for_is_found_and_told_apart(installation, text, forbidden, is_loaded, package):
    """Nobody asks again in the forks: without this the verdict would be clean. Nor does a package that crashes hide it."""
    installation.write({"heavy.py": text, "lib/__init__.py": package, "lib/a.py": "import heavy\n"})
    report = installation.audit("lib", forbidden, preload=("heavy",))
    assert report.verdict is Verdict.FOUND
    (finding,) = report.findings
    assert (finding.preloads, finding.modules, finding.is_loaded) == (("heavy",), (), is_loaded)
    assert finding.ask.importer == "heavy"


def test_a_part_of_the_package_can_be_preloaded_and_its_own_import_is_not_lost(installation):
    installation.write({"lib/__init__.py": "", "lib/a.py": "import lib.b\n", "lib/b.py": SWALLOWED})
    report = installation.audit("lib", "absent", preload=("lib.b",))
    assert report.verdict is Verdict.FOUND
    assert report.findings[0].preloads == ("lib.b",)
    assert [result.state for result in report.results] == [ModuleState.IMPORTED] * 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise OSError('no libfoo')\n", r"OSError: no libfoo at .*heavy\.py:1 \(heavy\): raise"),
        ("raise SystemExit(0)\n", "SystemExit: 0"),
        ("import os\nos.write(1, b'no device')\nos._exit(0)\n", "ended with exit code 0 .* it printed: no device"),
        ("import ctypes\nctypes.string_at(0)\n", "was ended by SIGSEGV while it preloaded heavy"),
        ("import time\ntime.sleep(3600)\n", r"did not get on within 2 s while it preloaded heavy at .*heavy\.py:2"),
        ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)\n", "did not get on"),
    ],
)
def test_a_preload_that_fails_is_an_error_that_names_it(installation, text, words):
    installation.write({"heavy.py": text, "lib.py": "", "good.py": ""})
    with pytest.raises(ConfigError, match=f"--preload heavy cannot be imported, and nothing was audited: .*{words}"):
        installation.audit("lib", preload=("good", "heavy"), timeout_s=2.0)


def test_a_misspelt_preload_is_told_with_near_names(installation):
    installation.write({"lib.py": ""})
    with pytest.raises(ConfigError, match=r"No module named 'enginee'\. Did you mean 'engine'"):
        installation.audit("lib", "absent", preload=("enginee",))


@pytest.mark.parametrize(
    ("preload", "words"),
    [("vllm", "covered by --forbid vllm"), ("vllm.config", "covered by --forbid vllm"), ("no-name", "--preload takes")],
)
def test_a_preload_that_is_forbidden_or_no_name_is_refused(preload, words):
    with pytest.raises(ConfigError, match=words):
        AuditRequest(package="lib", forbid=("vllm",), preload=("torch", preload))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_with_a_real_torch_preloaded_the_result_is_the_same(installation):
    """Its threads are not in the forks; it computes there all the same."""
    here = [path for path in sys.path if path.endswith("site-packages")]
    work = (
        "import torch\nvalue = (torch.ones(600, 600) @ torch.ones(600, 600)).sum().item()\nassert value == 600.0**3\n"
    )
    files = {
        "here.pth": "\n".join(here) + "\n",
        "lib/__init__.py": "",
        "lib/computes.py": work,
        "lib/light.py": "",
        "lib/loads.py": "import torch\nimport engine\n",
        "lib/asks.py": "import torch.nn\n" + SWALLOWED,
        "lib/fails.py": "import torch.no_such_part\n",
    }
    installation.write(files)
    without = installation.audit("lib", "engine", "absent", timeout_s=120.0)
    report = installation.audit("lib", "engine", "absent", timeout_s=120.0, preload=("torch",))
    assert outcome(report) == outcome(without)
    assert by_name(report)["lib.computes"].num_modules == 1
    assert (report.preloads[0].num_modules or 0) > 500


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_part_of_core_is_as_clean_with_preloads_as_without():
    """U2, U6: what the command for the whole of core says, on a part of it."""
    request = {"package": "nemo_rl_core.objectives", "forbid": ("vllm", "nemo_rl_vllm"), "timeout_s": 120.0}
    with_torch = audit(AuditRequest(**request, preload=("torch",)))
    assert outcome(with_torch) == outcome(audit(AuditRequest(**request)))
    assert with_torch.verdict is Verdict.CLEAN
