# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin `forbid_imports`, tried by a real pytest in its own process."""

import pytest

from tests.core.testing.conftest import PLUGIN, Suite

MARK = '@pytest.mark.forbid_imports("heavy")\n'
HEAD = "import importlib.util, sys\nimport pytest\n"


def test_a_marked_test_that_imports_it_fails_and_names_the_importer(suite: Suite) -> None:
    """F17: by a statement in the test, and in what it calls."""
    report = suite.run(
        {
            "test_a.py": f"{HEAD}{MARK}def test_own():\n    import heavy.io\n\n"
            f"{MARK}def test_called():\n    import careless\n\ndef test_free():\n    import heavy\n"
        }
    )
    assert report.counts == {"failed": 2, "passed": 1}
    assert "ForbiddenImportError: import of 'heavy' is refused: suite/test_a.py::test_own must not" in report.text
    assert "suite/test_a.py:5 (test_a)" in report.text
    assert "user/careless.py:2 (careless)" in report.text
    assert "guard/finder.py" not in report.text, "what pytest shows ends at the import statement"


def test_an_import_that_an_except_swallowed_fails_the_test_with_file_and_line(suite: Suite) -> None:
    report = suite.run(
        {
            "test_a.py": f"{HEAD}{MARK}def test_swallows():\n    import swallowing\n    assert swallowing.heavy is None\n\n"
            "def test_next():\n    pass\n"
        }
    )
    assert report.counts == {"passed": 1, "failed": 1}
    assert "user/swallowing.py:2: swallowing imported heavy, which is forbidden here" in report.text
    assert report.text.count("swallowing imported heavy") == 2, "in the report and in the summary, and nowhere else"


SWALLOWS = "    try:\n        import heavy\n    except ImportError:\n        pass\n"


@pytest.mark.parametrize(
    ("mark", "ends_with"),
    [
        ("@pytest.mark.xfail", ""),
        ("@pytest.mark.xfail(strict=True)", ""),
        ("@pytest.mark.xfail", "assert False"),
        ("@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)", "1 / 0"),
        ("", "pytest.xfail('some day')"),
        ("", "pytest.skip('not today')"),
        ("", "raise ValueError"),
    ],
)
def test_a_swallowed_import_fails_the_test_whatever_it_ends_with(suite: Suite, mark: str, ends_with: str) -> None:
    """And is forgiven when the test takes it out, so that the end is what it would be without."""
    kept = f"{mark}\n{MARK}def test_kept():\n{SWALLOWS}    {ends_with or 'pass'}\n\n"
    report = suite.run({"test_a.py": f"{HEAD}{kept}"})
    assert (report.returncode, report.counts) == (1, {"failed": 1})
    assert "test_a.py:7: test_a imported heavy" in report.text
    clean = f"{mark}\ndef test_clean():\n    {ends_with or 'pass'}\n\n"
    popped = f"{mark}\n{MARK}def test_popped(forbid_imports):\n{SWALLOWS}    forbid_imports.pop_violations()\n"
    without = suite.run({"test_a.py": f"{HEAD}{clean}"}).counts
    assert suite.run({"test_a.py": f"{HEAD}{popped}    {ends_with or 'pass'}\n"}).counts == without


def test_what_setup_and_teardown_swallow_fails_the_test_too(suite: Suite) -> None:
    """Beside a body that failed for its own reason, or was expected to: each is told once."""
    code = f"""{HEAD}
@pytest.fixture
def before():
{SWALLOWS}
@pytest.fixture
def after():
    yield
{SWALLOWS}
{MARK}def test_before(before):
    pass

{MARK}def test_before_forgiven(before, forbid_imports):
    forbid_imports.pop_violations()

{MARK}def test_after(after):
    pass

{MARK}@pytest.mark.xfail
def test_after_and_a_refusal_that_was_expected(after):
    import heavy.io
"""
    report = suite.run({"test_a.py": code})
    assert report.counts == {"failed": 1, "passed": 2, "xfailed": 1, "errors": 2}
    for name in ("test_after", "test_after_and_a_refusal_that_was_expected"):
        assert f"ERROR at teardown of {name}" in report.text


def test_a_librarys_handled_attempt_does_not_fail_the_test(suite: Suite) -> None:
    """As with the guard; the module that came up without it is told of, since later tests see it so."""
    report = suite.run(
        {
            "test_a.py": f"{HEAD}{MARK}def test_library(capfd):\n    import library\n    assert capfd.readouterr().err == ''\n"
        }
    )
    assert report.counts == {"passed": 1, "warning": 1}
    assert "library was imported for the first time while heavy was forbidden" in report.text


def test_a_probe_is_fine_and_finds_nothing(suite: Suite) -> None:
    """F19: also of a package that an earlier test has loaded."""
    code = (
        f"{HEAD}def test_loads():\n    import heavy\n\n{MARK}def test_probes():\n"
        "    assert importlib.util.find_spec('heavy') is None\n    assert 'heavy' not in sys.modules\n\n"
        "def test_after():\n    assert importlib.util.find_spec('heavy')\n"
    )
    assert suite.run({"test_a.py": code}).counts == {"passed": 3}


@pytest.mark.parametrize("order", ["loads_first", "forbids_first"])
def test_the_result_does_not_depend_on_what_ran_before(suite: Suite, order: str) -> None:
    """F18, F15: what is loaded is hidden, all of it, and the same objects are back afterwards."""
    loads = "def test_loads():\n    import heavy.io\n    assert heavy.io.VALUE == 1\n\n"
    forbids = (
        f"{MARK}def test_forbids(forbid_imports):\n"
        "    for name in ('heavy', 'heavy.io'):\n"
        "        with pytest.raises(ImportError, match='is refused'):\n"
        "            __import__(name)\n"
        "    assert [n for n in sys.modules if n.startswith('heavy')] == []\n"
        "    assert len(forbid_imports.pop_violations()) == 1\n\n"
    )
    keeps = (
        "import heavy as early, heavy.io as early_io\n\ndef test_same_objects():\n    import heavy, heavy.io\n"
        "    assert heavy is early and heavy.io is early_io and heavy.Frame is early.Frame\n"
        "    assert sys.modules['heavy.io'] is early_io\n"
    )
    tests = loads + forbids if order == "loads_first" else forbids + loads
    report = suite.run({"test_a.py": HEAD + tests, "test_b.py": HEAD + forbids + keeps})
    assert report.counts == {"passed": 4}


def test_what_a_test_imports_meanwhile_stays_as_it_is(suite: Suite) -> None:
    """A module that came in during the test is the same afterwards, and a stub for the forbidden one is gone."""
    code = (
        f"{HEAD}import heavy\nkept = []\n\n{MARK}def test_imports_another():\n    import other\n    kept.append(other)\n"
        "    sys.modules['heavy'] = object()\n\n"
        "def test_after():\n    import other\n    assert other is kept[0] and sys.modules['heavy'] is heavy\n"
    )
    assert suite.run({"test_a.py": code}).counts == {"passed": 2}


def test_the_fixture_forbids_from_where_it_is_called_and_forgives_on_request(suite: Suite) -> None:
    code = f"""{HEAD}
def test_from_here_on(forbid_imports):
    import heavy
    forbid_imports("heavy", "other")
    for name in ("heavy", "other"):
        with pytest.raises(ImportError):
            __import__(name)
    assert [violation.module for violation in forbid_imports.violations] == ["heavy", "other"]
    assert len(forbid_imports.pop_violations()) == 2

def test_not_forgiven(forbid_imports):
    forbid_imports("heavy")
    with pytest.raises(ImportError):
        import heavy

def test_lifted_again():
    import heavy, other
"""
    report = suite.run({"test_a.py": code})
    assert report.counts == {"passed": 2, "failed": 1}
    assert "FAILED suite/test_a.py::test_not_forgiven" in report.text


def test_marks_of_module_class_function_and_parameters_add_up_and_the_nearest_decides(suite: Suite) -> None:
    code = f"""{HEAD}
pytestmark = pytest.mark.forbid_imports("heavy")

def refused(name):
    return importlib.util.find_spec(name) is None

def test_of_the_module():
    assert refused("heavy") and not refused("other")

@pytest.mark.forbid_imports("other")
class TestClass:
    def test_of_both(self):
        assert refused("heavy") and refused("other")

    @pytest.mark.allow_imports("heavy")
    def test_lifted(self):
        import heavy
        assert refused("other")

@pytest.mark.parametrize("expected", [True, pytest.param(False, marks=pytest.mark.allow_imports("heavy"))])
def test_of_parameters(expected):
    assert refused("heavy") is expected
"""
    assert suite.run({"test_a.py": code}).counts == {"passed": 5}


def test_it_holds_for_a_tests_own_fixtures_and_not_for_those_that_other_tests_share(suite: Suite) -> None:
    """F18: whether a shared fixture comes up in the marked test or before it must make no difference."""
    code = f"""{HEAD}
@pytest.fixture(scope="module")
def shared():
    import heavy
    yield heavy
    import heavy.io

@pytest.fixture
def own():
    yield
    import other

@pytest.mark.forbid_imports("heavy", "other")
def test_shared(shared):
    assert shared.Frame

@pytest.mark.forbid_imports("heavy", "other")
def test_shared_later(request):
    assert request.getfixturevalue("shared").Frame
    assert importlib.util.find_spec("heavy") is None

@pytest.mark.forbid_imports("other")
def test_own(own):
    pass
"""
    report = suite.run({"test_a.py": code})
    assert report.counts == {"passed": 3, "error": 1}
    assert "ERROR at teardown of test_own" in report.text


def test_it_holds_in_threads_in_coroutines_and_in_unittest_classes(suite: Suite) -> None:
    code = f"""{HEAD}
import asyncio, threading, unittest

def swallow(caught):
    try:
        import heavy
    except ImportError as error:
        caught.append(error)

{MARK}def test_thread():
    caught = []
    thread = threading.Thread(target=swallow, args=(caught,))
    thread.start()
    thread.join(30)
    assert caught

{MARK}def test_coroutine():
    async def work():
        import heavy
    asyncio.run(work())

class TestOld(unittest.TestCase):
    {MARK}    def test_method(self):
        import heavy
"""
    report = suite.run({"test_a.py": code})
    assert report.counts == {"failed": 3}
    for name in ("test_a.py::test_coroutine", "test_a.py::TestOld::test_method"):
        assert f"ForbiddenImportError: import of 'heavy' is refused: suite/{name} must not" in report.text


def test_a_refusal_that_was_expected_to_fail_is_one_expected_failure(suite: Suite) -> None:
    code = f"{HEAD}{MARK}@pytest.mark.xfail(strict=True)\ndef test_a():\n    import heavy\n"
    assert suite.run({"test_a.py": code}).counts == {"xfailed": 1}


def test_importorskip_skips_and_the_reason_says_that_it_is_forbidden(suite: Suite) -> None:
    """F29: never silently; the reason of the skip is the refusal."""
    report = suite.run({"test_a.py": f"{HEAD}{MARK}def test_a():\n    pytest.importorskip('heavy')\n"})
    assert report.counts == {"skipped": 1}
    assert "must not import 'heavy'" in report.text


def test_the_command_line_holds_for_collection_and_for_all_tests_but_those_that_are_marked(suite: Suite) -> None:
    files = {
        "test_clean.py": f"{HEAD}def test_a():\n    import heavy\n\ndef test_b():\n    pass\n\n"
        '@pytest.mark.allow_imports("heavy")\ndef test_c():\n    import heavy\n\n'
        "def test_hidden_again():\n    assert importlib.util.find_spec('heavy') is None\n",
        "test_eager.py": "import heavy\n\ndef test_never():\n    pass\n",
        "test_swallows.py": "try:\n    import heavy\nexcept ImportError:\n    pass\n\ndef test_never():\n    pass\n",
    }
    report = suite.run(files, "--forbid-imports=heavy,flashinfer", "--continue-on-collection-errors")
    assert report.counts == {"failed": 1, "passed": 3, "errors": 2}
    assert "a test of this run (--forbid-imports" in report.text
    assert "suite/test_eager.py:1 (test_eager)" in report.text
    assert "test_swallows.py:2: test_swallows imported heavy, which is forbidden here" in report.text


def test_the_ini_file_says_the_same_and_a_conftest_is_held_to_it(suite: Suite) -> None:
    files = {
        "pytest.ini": "[pytest]\nforbid_imports = heavy other\n",
        "test_a.py": "def test_a():\n    import other\n",
    }
    report = suite.run(files)
    assert report.counts == {"failed": 1}
    report = suite.run({"conftest.py": "\nimport heavy\n"})
    assert report.returncode == 4
    assert "suite/conftest.py:2 (conftest)" in report.text


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("forbid_imports()", "test_a: mark forbid_imports: name at least one package"),
        ("forbid_imports", "test_a: mark forbid_imports: name at least one package"),
        ("allow_imports()", "test_a: mark allow_imports: name at least one package"),
        ('forbid_imports(name="heavy")', "test_a: mark forbid_imports takes names of packages only; got name="),
        ('forbid_imports(["heavy"])', "takes names of packages as text; got ['heavy']"),
        ('forbid_imports("heavy.io")', "got 'heavy.io': forbid 'heavy'"),
        ('forbid_imports("heavy-io")', "got 'heavy-io'"),
        ('forbid_imports("sys")', "'sys' can't be forbidden"),
        ('forbid_imports("_pytest")', "'_pytest' can't be forbidden: the tests themselves run on it"),
        (
            'forbid_imports("heavy")\n@pytest.mark.allow_imports("heavy")',
            "'heavy' is forbidden and allowed at the same place",
        ),
    ],
)
def test_a_mark_that_means_nothing_is_a_usage_error_that_names_the_test(suite: Suite, mark: str, words: str) -> None:
    report = suite.run({"test_a.py": f"{HEAD}@pytest.mark.{mark}\ndef test_a():\n    pass\n"})
    assert report.returncode == 4
    assert words in report.text
    assert "Traceback" not in report.text


@pytest.mark.parametrize("option", ["--forbid-imports=", "--forbid-imports=a.b", "--forbid-imports=sys"])
def test_an_option_that_means_nothing_is_a_usage_error(suite: Suite, option: str) -> None:
    report = suite.run({"test_a.py": "def test_a():\n    pass\n"}, option)
    assert report.returncode == 4
    assert "--forbid-imports" in report.text
    assert "Traceback" not in report.text


def test_a_process_that_is_armed_already_keeps_its_own_rule_beside_the_tests(suite: Suite) -> None:
    """Nested: both rules hold in the test, each in its own ledger, and the process's one goes on after it."""
    code = f"""{HEAD}
from nemo_rl_core import guard
guard.arm_from_environment()

{MARK}def test_both(forbid_imports):
    for name in ("heavy", "vllm"):
        with pytest.raises(guard.ForbiddenImportError):
            __import__(name)
    assert guard.is_armed()
    assert [violation.module for violation in forbid_imports.pop_violations()] == ["heavy"]
    assert [violation.module for violation in guard.ledger().violations] == ["vllm"]

{MARK}def test_a_block_inside(forbid_imports):
    with guard.armed("generation"), pytest.raises(guard.ForbiddenImportError):
        import heavy
    forbid_imports.pop_violations()

def test_after():
    import heavy
    assert guard.is_armed()
    with pytest.raises(guard.ForbiddenImportError):
        import vllm
"""
    assert suite.run({"test_a.py": code}, env={"NEMO_RL_ROLE": "train"}).counts == {"passed": 3}


def test_without_the_plugin_the_marks_and_the_option_are_unknown_and_nothing_else_changes(suite: Suite) -> None:
    """Switched off as any plugin is; strict marks show that it is really gone."""
    off = ("-p", f"no:{PLUGIN}")
    files = {"test_a.py": f"{HEAD}def test_a():\n    import heavy\n"}
    assert suite.run(files, plugin=off).counts == {"passed": 1}
    assert suite.run(files, "--forbid-imports=heavy", plugin=off).returncode == 4
    assert (
        suite.run({"test_a.py": f"{HEAD}{MARK}def test_a():\n    pass\n"}, "--strict-markers", plugin=off).returncode
        == 2
    )


def test_each_option_and_mark_is_explained_by_pytest_itself(suite: Suite) -> None:
    shown = (
        suite.run({"test_a.py": ""}, "--help").text + suite.run({}, "--markers").text + suite.run({}, "--fixtures").text
    )
    for part in (
        "--forbid-imports=NAMES",
        "forbid_imports (args)",
        "mark.forbid_imports(*names)",
        "mark.allow_imports",
    ):
        assert part in shown
    assert "Forbid packages for this test" in shown


def test_a_name_that_looks_like_a_typo_is_told_of_and_one_that_is_only_absent_is_not(suite: Suite) -> None:
    """By mark, fixture and option, once a name; what is forbidden at the moment is not taken for absent."""
    code = f"""{HEAD}
@pytest.mark.forbid_imports("haevy", "heavy", "nothing_like_it", "vllm", "tomllib")
def test_a():
    pass

@pytest.mark.forbid_imports("haevy")
def test_b(forbid_imports):
    forbid_imports("haevy")
    forbid_imports("othr")
"""
    report = suite.run({"test_a.py": code}, "--forbid-imports=libraryy,library")
    assert report.counts == {"passed": 2, "warnings": 3}
    for name, near in (("haevy", "heavy"), ("othr", "other"), ("libraryy", "library")):
        assert f"{name!r} is forbidden, and there is no such package here" in report.text
        assert f"did you mean {near!r}?" in report.text
