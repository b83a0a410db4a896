# SPDX-License-Identifier: Apache-2.0
"""Who loads a forbidden module, who asked first, and what the audit consists of."""

import contextlib
import subprocess
import sys
import textwrap
import zipfile

import pytest

from nemo_rl_core import guard
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.firewall import AuditRequest, ModuleState, Verdict, audit
from tests.core.firewall.installation import by_name

DEEP = {
    "lib/__init__.py": "",
    "lib/a/__init__.py": "",
    "lib/a/b.py": "import lib.a.c\n",
    "lib/a/c.py": "def load():\n    import engine.config\n\n\nload()\n",
    "lib/clean.py": "VALUE = 1\n",
}


def test_an_import_three_levels_deep_is_told_with_asker_chain_and_stack(installation):
    """F17."""
    installation.write(DEEP)
    report = installation.audit("lib")
    assert report.verdict is Verdict.FOUND
    assert report.verdict.exit_code == 1
    (finding,) = report.findings
    assert finding.is_loaded
    assert finding.modules == ("lib.a.b", "lib.a.c")
    ask = finding.ask
    assert (ask.importer, ask.line, ask.module) == ("lib.a.c", 2, "engine")
    assert ask.file.endswith("lib/a/c.py")
    assert ask.chain == ("lib.a.b", "lib.a.c", "engine")
    places = [place.rpartition("/")[2] for place in ask.stack]
    assert places == [
        "b.py:1 (lib.a.b): import lib.a.c",
        "c.py:5 (lib.a.c): load()",
        "c.py:2 (lib.a.c.load): import engine.config",
    ]
    assert by_name(report)["lib.a.b"].loaded == {"engine": 2}
    assert by_name(report)["lib.clean"].loaded == {}


def test_no_modules_result_depends_on_the_modules_before_it(installation):
    """F18: the first module loads the engine, the second fails where it is loaded already."""
    second = "import sys\nassert 'engine' not in sys.modules\nassert 'lib.a' not in sys.modules\n"
    installation.write({"lib/__init__.py": "", "lib/a.py": "import engine\n", "lib/b.py": second})
    results = by_name(installation.audit("lib"))
    assert results["lib.a"].loaded == {"engine": 1}
    assert results["lib.b"].state is ModuleState.IMPORTED


def test_several_at_a_time_find_the_same(installation):
    installation.write(DEEP)
    one, three = installation.audit("lib"), installation.audit("lib", jobs=3)
    assert [(r.name, r.state, r.loaded, r.num_modules) for r in one.results] == [
        (r.name, r.state, r.loaded, r.num_modules) for r in three.results
    ]


def test_where_the_package_itself_loads_it_the_finding_names_the_package(installation):
    """U1, U2: an eager initialiser; each import below it begins with that, so it is told once."""
    files = {"lib/__init__.py": "from lib import helper\n", "lib/helper.py": "import engine\n", "lib/other.py": ""}
    installation.write(files)
    report = installation.audit("lib")
    (finding,) = report.findings
    assert finding.modules == ("lib",)
    assert finding.ask.chain == ("lib", "lib.helper", "engine")
    assert report.package_result.loaded == {"engine": 1}


def test_an_attempt_counts_where_the_engine_is_not_installed_whether_it_is_handled_or_not(installation):
    """F11: `try` around it makes it no less an import."""
    guarded = "try:\n    import {0}\nexcept ImportError:\n    pass\n"
    files = {
        "lib/__init__.py": "",
        "lib/handled.py": guarded.format("absent"),
        "lib/naked.py": "import absent\n",
        "lib/below.py": guarded.format("absent.config"),
        "lib/by_name.py": textwrap.dedent(
            """
            import importlib
            try:
                importlib.import_module("absent.config")
            except ImportError:
                pass
            """
        ),
        "lib/clean.py": "import engine\n",
    }
    installation.write(files)
    report = installation.audit("lib", "absent")
    assert report.verdict is Verdict.FOUND
    asking = {result.name: result.asks[0].line for result in report.results if result.asks}
    assert asking == {"lib.handled": 2, "lib.naked": 1, "lib.below": 2, "lib.by_name": 4}
    assert not any(finding.is_loaded for finding in report.findings)
    assert [name.is_installed for name in report.forbidden] == [False]
    assert {"lib.below", "lib.by_name"} == {
        result.name for result in installation.audit("lib", "absent.config").results if result.asks
    }


def test_a_dotted_name_covers_what_lies_below_it_and_nothing_else(installation):
    files = {
        "lib/__init__.py": "import engine\n",
        "lib/other.py": "import engine.config\n",
        "lib/hit.py": "import engine.models.llama\n",
    }
    installation.write(files)
    report = installation.audit("lib", "engine.models")
    assert {result.name: dict(result.loaded) for result in report.results if result.loaded} == {
        "lib.hit": {"engine.models": 2}
    }
    inside = installation.audit("engine", "engine.models")
    assert inside.verdict is Verdict.CLEAN
    assert set(inside.skipped) == {"engine.models", "engine.models.llama"}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import importlib.util as u\nassert u.find_spec('engine') is not None", False),
        ("import importlib.util as u\nassert u.find_spec('absent') is None", False),
        ("import pkgutil\nassert any(m.name == 'engine' for m in pkgutil.iter_modules())", False),
        ("import sys\nfor finder in sys.meta_path:\n    finder.find_spec('engine', None)", False),
        ("import engine", True),
        ("import importlib\nimportlib.import_module('engine.config')", True),
        ("__import__('engine')", True),
        ("import pickle\npickle.loads(b'cengine.config\\n__name__\\n.')", True),
        ("import pkgutil\npkgutil.resolve_name('engine.config:__name__')", True),
        ("import runpy\nrunpy.run_module('engine.config')", True),
        ("exec('import engine')", True),
    ],
)
def test_a_probe_is_no_import_and_audit_and_guard_agree_on_what_one_is(installation, code, found):
    """F21: what is asked for by a probe is not loaded."""
    installation.write({"lib/__init__.py": "", "lib/asks.py": code + "\n"})
    report = installation.audit("lib")
    assert by_name(report)["lib.asks"].state is ModuleState.IMPORTED
    assert (report.verdict is Verdict.FOUND) == found
    assert [ask.importer for ask in by_name(report)["lib.asks"].asks] == (["lib.asks"] if found else [])

    with guard.armed("generation", forbid=("engine",)) as read:
        with contextlib.suppress(ImportError, AssertionError):  # refused, or a probe that was told there is none
            exec(compile(code, "asks.py", "exec"), {"__name__": "asks"})
        assert bool(read().violations or read().attempts) == found


def test_a_probe_below_an_absent_package_is_no_import(installation):
    """F21: the standard library imports the parent for it, and fails."""
    code = "import importlib.util\ntry:\n    importlib.util.find_spec('absent.config')\nexcept ImportError:\n    pass\n"
    installation.write({"lib/__init__.py": "", "lib/asks.py": code})
    assert installation.audit("lib", "absent").verdict is Verdict.CLEAN


def test_a_probe_that_loads_the_parent_is_found(installation):
    installation.write(
        {"lib/__init__.py": "", "lib/asks.py": "import importlib.util\nimportlib.util.find_spec('engine.config')\n"}
    )
    (finding,) = installation.audit("lib").findings
    assert (finding.is_loaded, finding.ask.importer, finding.ask.line) == (True, "lib.asks", 2)


def test_what_gets_past_the_finders_is_found_without_an_asker(installation):
    code = "import sys, types\nsys.modules['engine'] = types.ModuleType('engine')\n"
    installation.write({"lib/__init__.py": "", "lib/sly.py": code})
    (finding,) = installation.audit("lib").findings
    assert (finding.is_loaded, finding.modules, finding.ask.line) == (True, ("lib.sly",), 0)


def test_what_the_interpreters_start_loads_is_told_apart(installation):
    installation.write({"lib/__init__.py": "import engine\n", "early.pth": "import engine.config\n"})
    report = installation.audit("lib")
    assert report.preloaded == {"engine": 2}
    assert report.verdict is Verdict.FOUND
    assert report.findings == ()


def test_an_environment_that_arms_the_guard_does_not_blind_the_audit(installation, monkeypatch):
    """Under an armed guard each import would fail, and the audit would tell of attempts alone."""
    source = guard.__file__.removesuffix("/nemo_rl_core/guard/__init__.py")
    hook = "import nemo_rl_core.guard.hooks as hooks; hooks.at_interpreter_start()\n"
    installation.write({"lib/__init__.py": "import engine\n", "a.pth": source + "\n", "b.pth": hook})
    for name, value in guard.environment_for("generation", forbid=["engine"]).items():
        monkeypatch.setenv(name, value)
    assert installation.audit("lib").package_result.loaded == {"engine": 1}


def test_neither_the_current_folder_nor_pythonpath_is_looked_at(installation, tmp_path, monkeypatch):
    """F25: a folder that is named like the package is no installed package."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("import engine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"'lib' is not installed in .*The folder 'lib' in the current directory"):
        installation.audit("lib")


def test_a_folder_that_an_uninstall_left_is_no_package(installation):
    """F25."""
    (installation.site / "leftover" / "__pycache__").mkdir(parents=True)
    with pytest.raises(ConfigError, match="'leftover' is a folder without a module"):
        installation.audit("leftover")


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("enginee", "Did you mean 'engine'"),
        ("engine.model", "Did you mean 'engine.models'"),
        ("engine.config.below", "'engine.config.below' is not installed"),
        ("nothing.like.it", "'nothing' is not installed"),
    ],
)
def test_an_unknown_package_is_refused_with_near_names(installation, package, words):
    with pytest.raises(ConfigError, match=words):
        installation.audit(package, "absent")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"package": "no-name"}, "PACKAGE takes the name"),
        ({"package": "engine."}, "PACKAGE takes the name"),
        ({"forbid": ("vllm/x",)}, "--forbid takes the name"),
        ({"forbid": ()}, "at least one forbidden name"),
        ({"package": "engine.models", "forbid": ("engine",)}, "itself is covered by --forbid engine"),
        ({"timeout_s": 0.0}, "--timeout is a positive number"),
        ({"timeout_s": float("nan")}, "--timeout is a positive number"),
        ({"jobs": 0}, "--jobs is at least 1"),
    ],
)
def test_a_bad_request_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        AuditRequest(**{"package": "lib", "forbid": ("vllm",), **values})


@pytest.mark.parametrize("python", ["no/such/python", "no-such-python", "."])
def test_an_interpreter_that_is_none_is_refused(python):
    with pytest.raises(ConfigError, match="--python takes the path of an interpreter"):
        audit(AuditRequest(package="json", forbid=("vllm",), python=python))


def test_a_program_that_is_no_python_is_refused(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho I am no Python\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match=r"exit code 3\): I am no Python"):
        audit(AuditRequest(package="json", forbid=("vllm",), python=str(program)))


def test_every_kind_of_module_is_found_and_what_is_none_is_skipped_with_the_reason(installation):
    """F2, U7: a folder without an initialiser is a package too."""
    files = {
        "lib/__init__.py": "",
        "lib/__main__.py": "raise SystemExit('it ran')\n",
        "lib/plain.py": "",
        "lib/space/deep/inner.py": "",
        "lib/data/readme.txt": "",
        "lib/both.py": "",
        "lib/both/hidden.py": "",
        "lib/my-script.py": "",
        "lib/native.so": "not even an ELF file",
        "lib/__pycache__/stale.py": "",
    }
    installation.write(files)
    (installation.site / "lib" / "loop").symlink_to(installation.site / "lib", target_is_directory=True)
    report = installation.audit("lib")
    names = [result.name for result in report.results]
    deep = ["lib.space", "lib.space.deep", "lib.space.deep.inner"]
    assert names == ["lib", "lib.both", "lib.loop", "lib.plain", *deep]  # the link is a module, and nothing below it
    assert report.verdict is Verdict.CLEAN
    assert set(report.skipped) == {"lib.__main__", "lib.my-script", "lib.native"}
    assert "would run" in report.skipped["lib.__main__"]


def test_a_zipped_package_is_audited_to_its_last_module(installation, tmp_path):
    """A folder that is none has modules too: without them a package that loads the engine would be clean."""
    files = {
        "zipped/__init__.py": "",
        "zipped/a.py": "",
        "zipped/deep/__init__.py": "",
        "zipped/deep/b.py": "import engine\n",
    }
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        for name, text in {**files, "zipped/__main__.py": "raise SystemExit\n"}.items():
            archive.writestr(name, text)
    installation.write({"zipped.pth": f"{tmp_path / 'zipped.zip'}\n"})
    report = installation.audit("zipped")
    assert [result.name for result in report.results] == ["zipped", "zipped.a", "zipped.deep", "zipped.deep.b"]
    assert [finding.modules for finding in report.findings] == [("zipped.deep.b",)]
    assert set(report.skipped) == {"zipped.__main__"}
    assert installation.audit("zipped.deep").verdict is Verdict.FOUND


def test_a_single_file_a_part_of_a_package_and_a_namespace_can_be_audited(installation):
    installation.write(
        {"single.py": "import engine\n", "space/lib/__init__.py": "", "space/lib/a.py": "import engine\n"}
    )
    assert [result.name for result in installation.audit("single").results] == ["single"]
    assert installation.audit("single").verdict is Verdict.FOUND
    assert [result.name for result in installation.audit("space").results] == ["space", "space.lib", "space.lib.a"]
    assert [result.name for result in installation.audit("space.lib").results] == ["space.lib", "space.lib.a"]


def test_modules_and_seconds_are_counted_beyond_the_package_itself(installation):
    """The script in the audited interpreter loads nothing, so nothing is missing in the numbers."""
    installation.write({"lib/__init__.py": "import engine.models\n", "lib/a.py": "import engine.models.llama, json\n"})
    report = installation.audit("lib", "absent")
    fresh = "import sys; before = set(sys.modules); import {0}; print(len(set(sys.modules) - before))"

    def number(names: str) -> int:
        done = subprocess.run(
            [installation.python, "-I", "-c", fresh.format(names)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return int(done.stdout)

    assert report.package_result.num_modules == number("lib") == 3
    assert by_name(report)["lib.a"].num_modules == number("lib.a") - 3
    assert all(result.seconds is not None and result.seconds >= 0 for result in report.results)


def test_near_names_are_told_for_a_forbidden_name_that_is_a_typo_and_for_no_known_engine(installation):
    installation.write({"lib.py": "", "vlllm.py": ""})
    report = installation.audit("lib", "enginee", "vllm")
    assert [name.near for name in report.forbidden] == [("engine",), ()]


def test_parts_of_core_are_clean_in_this_environment():
    """U2, U6: what runs before an environment is chosen; the whole of core is audited in the full tier."""
    for package in ("nemo_rl_core.guard", "nemo_rl_core.plugins", "nemo_rl_core.firewall"):
        report = audit(AuditRequest(package=package, forbid=("vllm", "torch", "ray", "transformers")))
        assert report.verdict is Verdict.CLEAN, report.findings
        assert report.python == sys.executable


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_every_module_of_core_imports_and_none_loads_the_engine_or_asks_for_it():
    """U1, U2, U6, F31."""
    forbidden = ("nemo_rl_vllm", *sorted(guard.FORBIDDEN_ROOTS["train"]))
    report = audit(AuditRequest(package="nemo_rl_core", forbid=forbidden, timeout_s=300.0, jobs=2))
    own = [finding for finding in report.findings if finding.ask.importer.startswith("nemo_rl_core")]
    assert own == []
    assert [str(result.failure) for result in report.failed] == []
    assert not any(result.loaded for result in report.results)
    assert len(report.results) > 80


@pytest.mark.full
def test_a_library_that_loads_its_heavy_dependency_is_found():
    """F24, with a real library: accelerate's top level imports torch."""
    report = audit(AuditRequest(package="accelerate.state", forbid=("torch",), timeout_s=120.0))
    assert report.verdict is Verdict.FOUND
    assert report.package_result.loaded["torch"] > 100
    assert report.package_result.asks[0].importer.startswith("accelerate")
