# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: tests, or whole runs, in which some packages must not be imported.

    @pytest.mark.forbid_imports("pandas")      # this test (class, module) must not import it
    @pytest.mark.allow_imports("pandas")       # this one may, whatever the command line says
    def test_...(forbid_imports): forbid_imports("pandas")    # from here on
    pytest --forbid-imports=pandas,pyarrow     # all tests, and their collection

pytest loads this module by its entry point in every environment that has core, so it is light: the guard is loaded when
something is forbidden, and nothing else of core ever. pytest itself is imported when pytest calls, since core doesn't
depend on it. ``-p no:forbid_imports`` keeps the plugin out. It needs pytest 7 or later.
"""

import contextlib
import sys
import warnings
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl_core.guard import Violation
    from nemo_rl_core.guard.records import Recorder

__all__ = ["ForbidImports", "ForbidImportsWarning", "pytest_addoption"]

_TEST_TOOLS = frozenset({"_pytest", "pluggy", "pytest"})
_EVERYWHERE = "a test of this run (--forbid-imports, or forbid_imports in the ini file)"


class ForbidImportsWarning(UserWarning):
    """What a test leaves behind depends on what it forbade, or what it forbids looks like a typo."""


class _InForce:
    """What is forbidden at the moment, and by whom."""

    def __init__(self) -> None:
        self.session_names = frozenset[str]()
        self.names = frozenset[str]()
        self.because = ""
        self.block = contextlib.ExitStack()
        #: Violations and attempts, as soon as something is forbidden; a test takes its own violations out when it ends.
        self.records: Recorder | None = None

    def put(self, names: frozenset[str], because: str) -> None:
        """Forbid exactly these names from now on.

        Args:
            names: Top-level names; none lifts everything.
            because: Who forbids them, for messages.
        """
        if names == self.names and (not names or because == self.because):
            return
        self.block.close()
        self.names, self.because = frozenset(), ""
        if names:
            from nemo_rl_core.guard.forbidding import forbidding
            from nemo_rl_core.guard.records import Recorder

            self.records = self.records or Recorder("test")
            way_out = "do without it on this path, or lift it for one test: @pytest.mark.allow_imports(<name>)"
            block = forbidding(*names, because=because, way_out=way_out, recorder=self.records)
            self.block.enter_context(block)
            self.names, self.because = names, because

    def violations(self) -> tuple["Violation", ...]:
        """Return what has been imported against the rule since somebody took it out."""
        return self.records.snapshot().violations if self.records else ()

    def take_violations(self) -> tuple["Violation", ...]:
        """Return the violations and forget them."""
        return self.records.take_violations() if self.records else ()

    def importers(self) -> dict[str, Any]:
        """Return the first attempt of each third party, by its package."""
        return dict(self.records.snapshot().attempts) if self.records else {}

    def put_session(self) -> None:
        """Forbid what the whole run forbids."""
        self.put(self.session_names, _EVERYWHERE)

    @contextlib.contextmanager
    def for_all_tests(self) -> Generator[None]:
        """Forbid only what the whole run forbids while a fixture is set up that several tests share."""
        names, because = self.names, self.because
        self.put_session()
        try:
            yield
        finally:
            self.put(names, because)


class ForbidImports:
    """What the fixture ``forbid_imports`` gives a test.

    Calling it forbids packages from here to the test's end.
    """

    def __init__(self, in_force: _InForce, nodeid: str) -> None:
        """Take what is in force.

        Args:
            in_force: What is forbidden in this process.
            nodeid: The test.
        """
        self._in_force = in_force
        self._nodeid = nodeid

    def __call__(self, *names: str) -> None:
        """Forbid packages from here to the test's end, on top of what is forbidden.

        Args:
            names: Top-level names.

        Raises:
            ValueError: If there is no name, or one that can't be forbidden.
        """
        checked = _checked(names, "forbid_imports(...)")
        _warn_of_typos(checked - self._in_force.names)
        self._in_force.put(self._in_force.names | checked, self._nodeid)

    @property
    def violations(self) -> tuple["Violation", ...]:
        """Forbidden imports of this test so far; any of them fails the test, whatever it ends with."""
        return self._in_force.violations()

    def pop_violations(self) -> tuple["Violation", ...]:
        """Return the forbidden imports so far and forgive them: for a test that provokes one on purpose.

        In the test itself or its set-up; a fixture's teardown is too late for what the test has swallowed.
        """
        return self._in_force.take_violations()


def _checked(names: Iterable[Any], where: str) -> frozenset[str]:
    """Return the names as a set.

    Raises:
        ValueError: If there is no name, or one that can't be forbidden; it says where.
    """
    from nemo_rl_core.guard.policy import BlockRule

    found = tuple(names)
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise ValueError(f"{where} takes names of packages as text; got {wrong[0]!r}")
    if tools := sorted(_TEST_TOOLS & {name.partition(".")[0] for name in found}):
        raise ValueError(f"{where}: {tools[0]!r} can't be forbidden: the tests themselves run on it")
    try:
        return BlockRule(names=frozenset(found), because="", way_out="").names
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _session_names(options: Iterable[str], ini: Iterable[str]) -> frozenset[str]:
    """Read the command line and the ini file; both take names with commas or blanks between them."""
    texts = (*options, *ini)
    parts = [part for text in texts for part in text.replace(",", " ").split()]
    return frozenset() if not texts else _checked(parts, "--forbid-imports (ini: forbid_imports)")


def _marks_by_level(item: Any) -> Generator[list[Any]]:
    """Yield the marks of each level from the outside in: package, module, class, function, parameters."""
    of_parameters = list(getattr(getattr(item, "callspec", None), "marks", ()))
    for node in item.listchain():
        yield [mark for mark in getattr(node, "own_markers", ()) if mark not in of_parameters]
    yield of_parameters


def _names_for(item: Any, session_names: frozenset[str]) -> frozenset[str]:
    """Return what a test forbids: the run's names, then the marks from the outside in, the nearest with the last word.

    Raises:
        ValueError: If a mark has no names, or takes something that is no name, or contradicts one beside it.
    """
    names = session_names
    for marks in _marks_by_level(item):
        found = {"forbid_imports": frozenset[str](), "allow_imports": frozenset[str]()}
        for mark in marks:
            if mark.name not in found:
                continue
            where = f"{item.nodeid}: mark {mark.name}"
            if mark.kwargs:
                raise ValueError(f"{where} takes names of packages only; got {', '.join(sorted(mark.kwargs))}=")
            found[mark.name] |= _checked(mark.args, where)
        if both := sorted(found["forbid_imports"] & found["allow_imports"]):
            raise ValueError(f"{item.nodeid}: {both[0]!r} is forbidden and allowed at the same place; drop one mark")
        names = (names | found["forbid_imports"]) - found["allow_imports"]
    return names


def _lines(violations: Iterable["Violation"]) -> str:
    """Say what was imported, by whom and how often."""
    return "\n".join(
        f"{each.file}:{each.line}: {each.importer} imported {each.module}, which is forbidden here"
        + (f" ({each.count} times)" if each.count > 1 else "")
        for each in violations
    )


def _judge(report: Any, call: Any, violations: list["Violation"]) -> None:
    """Let a phase fail for what was imported in it, whatever it ended with."""
    from nemo_rl_core.guard.records import ForbiddenImportError

    # Then whoever expects the test to fail has seen it.
    is_ended_by_refusal = call.excinfo is not None and isinstance(call.excinfo.value, ForbiddenImportError)
    if report.failed:
        report.sections.append(("forbidden imports", _lines(violations)))
    elif not is_ended_by_refusal:
        report.outcome, report.longrepr = "failed", _lines(violations)
        vars(report).pop("wasxfail", None)  # xfail speaks of how a test ends, not of what it swallowed


def _warn_of_typos(names: Iterable[str]) -> None:
    """Tell of names that nothing installed has while something spelled alike is: a rule against a typo always holds.

    An absent package is a legal one to forbid, hence no error, and no word where nothing is near.
    """
    unknown = [name for name in sorted(names) if not _is_importable(name)]
    if not unknown:
        return
    import pkgutil
    from difflib import get_close_matches

    known = {module.name for module in pkgutil.iter_modules()} - sys.stdlib_module_names
    for name in unknown:
        # A letter more or less, or changed places: `tomli` beside `tomli_w` is no typo.
        alike = [other for other in known if abs(len(other) - len(name)) < 2 and not other.startswith("_")]
        if near := get_close_matches(name, alike, n=3, cutoff=0.8):
            text = (
                f"{name!r} is forbidden, and there is no such package here, so nothing can break that rule; did you "
                f"mean {' or '.join(map(repr, near))}?"
            )
            warnings.warn(ForbidImportsWarning(text), stacklevel=2)


def _is_importable(name: str) -> bool:
    """Tell whether a package is there, whatever is forbidden at the moment, or a known one that may be absent."""
    from nemo_rl_core.guard.finder import GuardFinder
    from nemo_rl_core.guard.policy import ENGINE_ROOTS

    if any(name in roots for roots in ENGINE_ROOTS.values()):
        return True
    if name in sys.modules:
        return True
    finders = [finder for finder in list(sys.meta_path) if not isinstance(finder, GuardFinder)]
    try:
        return any(finder.find_spec(name, None) for finder in finders if hasattr(finder, "find_spec"))
    except ImportError:  # somebody else's finder refuses this name, so it knows it
        return True


def _warn_of_fallbacks(before: frozenset[str], known_attempts: frozenset[str], in_force: _InForce) -> None:
    """Tell of modules that came up without a forbidden package and stay so in the tests after this one."""
    for package, attempt in in_force.importers().items():
        if package not in known_attempts and attempt.importer not in before and attempt.importer in sys.modules:
            text = (
                f"{attempt.importer} was imported for the first time while {attempt.module} was forbidden "
                f"({attempt.file}:{attempt.line}), and keeps its fallback in the tests after this one; import it "
                f"before, or run this test in a process of its own"
            )
            warnings.warn(ForbidImportsWarning(text), stacklevel=2)


def pytest_addoption(parser: Any, pluginmanager: Any) -> None:
    """Add the option and the ini value, and register what needs pytest.

    Args:
        parser: pytest's.
        pluginmanager: pytest's.
    """
    group = parser.getgroup("forbid_imports", "imports that tests must not make")
    group.addoption(
        "--forbid-imports",
        action="append",
        default=[],
        metavar="NAMES",
        help="packages that no test of this run may import, with commas between them",
    )
    parser.addini("forbid_imports", "packages that no test may import", type="args", default=[])
    pluginmanager.register(_hooks(), "forbid_imports_hooks")


def _hooks() -> object:
    """Return the object with the hooks and the fixture; only pytest calls this, so pytest is there."""
    import pytest

    class Hooks:
        """One run's hooks; they decide when, and ``_InForce`` does it."""

        def __init__(self) -> None:
            self.in_force = _InForce()
            self.told = frozenset["Violation"]()

        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self, early_config: Any) -> None:
            options = getattr(early_config.known_args_namespace, "forbid_imports", [])
            try:
                self.in_force.session_names = _session_names(options, early_config.getini("forbid_imports"))
            except ValueError as error:
                raise pytest.UsageError(str(error)) from error
            early_config.add_cleanup(self.in_force.block.close)
            self.in_force.put_session()

        def pytest_configure(self, config: Any) -> None:
            for mark, what in (("forbid_imports", "must not import"), ("allow_imports", "may import after all")):
                config.addinivalue_line("markers", f"{mark}(*names): packages, by top-level name, that a test {what}")

        @pytest.hookimpl(trylast=True)  # a conftest.py may add marks in its own
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            try:
                names = self.in_force.session_names.union(
                    *(_names_for(item, self.in_force.session_names) for item in items)
                )
            except ValueError as error:
                raise pytest.UsageError(str(error)) from error
            _warn_of_typos(names)

        @pytest.hookimpl(hookwrapper=True)
        def pytest_make_collect_report(self) -> Generator[None, Any]:
            report = (yield).get_result()
            violations = self.in_force.take_violations()
            if violations and not report.failed:
                report.outcome, report.longrepr, report.result = "failed", _lines(violations), []

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_setup(self, item: Any) -> None:
            self.told = frozenset()
            names = _names_for(item, self.in_force.session_names)
            if names != self.in_force.session_names and not hasattr(item, "fixturenames"):
                self.in_force.put(names, item.nodeid)  # no Python function: it has no fixtures that it could share
            elif names != self.in_force.session_names:
                # First, so that it holds for the other fixtures of this test, and ends after they have ended.
                item.fixturenames[:] = ["forbid_imports", *(n for n in item.fixturenames if n != "forbid_imports")]

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any]:
            is_shared = fixturedef.scope != "function"
            with self.in_force.for_all_tests() if is_shared else contextlib.nullcontext():
                yield

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, call: Any) -> Generator[None, Any]:
            report = (yield).get_result()  # outermost, so that xfail has had its say
            is_last = call.when == "teardown"
            found = self.in_force.take_violations() if is_last else self.in_force.violations()
            if is_last:
                self.in_force.put_session()
            new = [violation for violation in found if violation not in self.told]
            # What a test's set-up swallows is judged with its body, where it may still be forgiven.
            if not new or (call.when == "setup" and report.passed):
                return
            self.told |= frozenset(new)
            _judge(report, call, new)

        @pytest.fixture(name="forbid_imports")
        def _forbid_imports(self, request: Any) -> Generator[ForbidImports]:
            """Forbid packages for this test: `forbid_imports("pandas")`."""
            yield from _in_test(self.in_force, request.node)

    return Hooks()


def _in_test(in_force: _InForce, item: Any) -> Generator[ForbidImports]:
    """Forbid what a test's marks say, until it ends."""
    names = _names_for(item, in_force.session_names)
    before, known_attempts = frozenset(sys.modules), frozenset(in_force.importers())
    in_force.put(names, _EVERYWHERE if names == in_force.session_names else item.nodeid)
    try:
        yield ForbidImports(in_force, item.nodeid)
    finally:
        in_force.put_session()
        _warn_of_fallbacks(before, known_attempts, in_force)
