# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl firewall audit``: who loads a forbidden module, as text or as JSON."""

import argparse
import json
import sys
from collections.abc import Iterator

from nemo_rl_core.firewall import AuditReport, AuditRequest, Finding, ForbiddenName, ModuleState, Verdict, audit
from nemo_rl_core.observability.console import RunConsole

__all__ = ["run"]

_SLOWEST = 10
_NAMES = 8


def run(options: argparse.Namespace) -> int:
    """Audit a package, print the report, and return the exit code that stands for the verdict."""
    request = AuditRequest(
        package=options.package,
        forbid=tuple(dict.fromkeys(options.forbid)),
        python=options.python,
        timeout_s=options.timeout,
        jobs=options.jobs,
        preload=tuple(dict.fromkeys(options.preload)),
    )
    report = audit(request, _show_progress if sys.stderr.isatty() else None)
    if options.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        console = RunConsole()
        for line in _text(report):
            console.note(line)
    return report.verdict.exit_code


def _show_progress(done: int, total: int) -> None:
    """Keep one line of a terminal up to date; it is wiped when all is done."""
    text = f"{done} of {total} modules" if done < total else ""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _text(report: AuditReport) -> Iterator[str]:
    states = [result.state for result in report.results]
    numbers = [f"{states.count(state)} {state.value}" for state in ModuleState if state in states]
    numbers += [f"{len(report.skipped)} skipped"] if report.skipped else []
    yield f"audit of {report.package} in {report.python} ({report.python_version})"
    yield f"  modules    {', '.join(numbers)}, in {report.seconds:.1f} s"
    for preload in report.preloads:
        yield f"  preloaded  {preload.name} ({preload.num_modules} modules, {preload.seconds or 0.0:.1f} s), once for all modules"
    for name in report.forbidden:
        yield f"  forbidden  {name.name}, {'installed here' if name.is_installed else _not_installed(name)}"
    for name, number in report.preloaded.items():
        yield ""
        yield f"{name} was loaded when the interpreter started ({number} modules), before {report.package} was imported:"
        yield "  a .pth file or sitecustomize of this environment loads it, and nobody's own import of it can be seen"
    for finding in report.findings:
        yield ""
        yield from _finding(report, finding)
    yield from _slowest(report)
    yield from _failures(report)
    if report.skipped:
        yield ""
        yield "skipped"
        yield from (f"  {name}: {reason}" for name, reason in report.skipped.items())
    yield ""
    yield _last_line(report)


def _not_installed(name: ForbiddenName) -> str:
    return "not installed here" + (f"; did you mean {' or '.join(name.near)}?" if name.near else "")


def _finding(report: AuditReport, finding: Finding) -> Iterator[str]:
    ask = finding.ask
    number = len(finding.modules)
    preloads = " and ".join(finding.preloads)
    subject = preloads if not number else "1 module" if number == 1 else f"{number} modules"
    s = "s" if (number or len(finding.preloads)) == 1 else ""
    if finding.is_loaded:
        yield f"{subject} load{s} {ask.rule}"
    else:
        is_installed = {name.name: name.is_installed for name in report.forbidden}[ask.rule]
        fails = "its import fails, or it was taken out of sys.modules again"
        yield f"{subject} ask{s} for {ask.rule}: {fails if is_installed else 'it is not installed here'}"
    if report.package in finding.modules:
        yield f"  {report.package} itself does, so every import of a module below it does"
    elif number:
        more = f" and {number - _NAMES} more" if number > _NAMES else ""
        yield f"  {', '.join(finding.modules[:_NAMES])}{more}"
    if preloads:
        yield f"  {'also ' if number else ''}while preloading {preloads}; which modules need that is told without --preload"
    if not ask.line:
        yield "  who asked was not seen: it was loaded past the import system's finders"
        return
    yield f"  first asker: {ask.importer}, {ask.file}:{ask.line}, for {ask.module}"
    yield f"  being imported: {' -> '.join(ask.chain)}"
    yield "  stack, the asker last"
    yield from (f"    {place}" for place in ask.stack)


def _slowest(report: AuditReport) -> Iterator[str]:
    """Show the slowest imports; the first result is the package, whose import every other one shares."""
    package, *others = report.results
    timed = sorted((result for result in others if result.seconds is not None), key=lambda r: -(r.seconds or 0.0))
    if package.seconds is None:
        return
    beyond = f"{package.name} itself" + (" and the preloads" if report.preloads else "")
    yield ""
    yield f"slowest {min(_SLOWEST, len(timed)) or ''}".rstrip() + f", each beyond {beyond}"
    yield "   seconds  modules  name"
    for result in (*report.preloads, package, *timed[:_SLOWEST]):
        note = " (preloaded)" if result in report.preloads else ""
        yield f"  {result.seconds:8.3f}  {result.num_modules:7d}  {result.name}{note}"


def _failures(report: AuditReport) -> Iterator[str]:
    if not report.failed:
        return
    yield ""
    yield "not imported, so nothing is proven about"
    not_tried: dict[str, int] = {}
    for result in report.failed:
        if result.state is ModuleState.NOT_TRIED:
            not_tried[str(result.failure)] = not_tried.get(str(result.failure), 0) + 1
            continue
        # Some messages are pages long; the document has the whole of them.
        yield f"  {result.name}: {(str(result.failure).splitlines() or [''])[0]}"
        if result.failure is None:
            continue
        yield from (f"      {place}" for place in result.failure.traceback[-1:])
        if not result.failure.type:  # no exception says what it was
            yield from (f"      | {line}" for line in result.failure.output.splitlines()[-5:])
    for why, number in not_tried.items():
        yield f"  {number} modules that were not tried: {why}"


def _last_line(report: AuditReport) -> str:
    names = " or ".join(name.name for name in report.forbidden)
    # A rule against a name that nobody has is always kept, and this may be the only line that is read.
    doubts = "".join(f"; {name.name} is {_not_installed(name)}" for name in report.forbidden if name.near)
    failed = "1 module" if len(report.failed) == 1 else f"{len(report.failed)} modules"
    words = {
        Verdict.CLEAN: f"clean: no module of {report.package} loads {names} or asks for it",
        Verdict.FOUND: f"found: see above who loads {names} or asks for it",
        Verdict.NOT_PROVEN: f"not proven: {failed} could not be imported; the others do not load {names} or ask for it",
    }
    return f"{words[report.verdict]}{doubts} (exit code {report.verdict.exit_code})"
