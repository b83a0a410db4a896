# SPDX-License-Identifier: Apache-2.0
"""What the subcommands do, once their options are parsed."""

import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

from nemo_rl_contracts.baseline import Baseline
from nemo_rl_contracts.contract_types.import_phase import ImportPhaseContract
from nemo_rl_contracts.errors import MisconfiguredError, NotCoveredError
from nemo_rl_contracts.formats import render, without_a_picture
from nemo_rl_contracts.phases import Phase
from nemo_rl_contracts.reporting import Report, locate, unknown_names
from nemo_rl_contracts.reporting import report as make_report
from nemo_rl_contracts.running import Configuration, ExitCode, Outcome, exit_code, put_on_path, read, run
from nemo_rl_contracts.sources import CACHE_FOLDER, shown
from nemo_rl_contracts.violations import counted

__all__ = ["check", "init", "report"]


def check(options: Namespace) -> ExitCode:
    """Check a configuration's contracts of our types.

    Args:
        options: ``config``, ``format``, ``shrink_baseline``, ``no_cache``, ``cache_dir``.

    Raises:
        MisconfiguredError: If nothing can be checked.
        NotCoveredError: If there is no import graph.
    """
    put_on_path(Path.cwd())
    configuration = read(options.config)
    cache_dir = None if options.no_cache else options.cache_dir
    if options.shrink_baseline:
        _shrink(configuration, cache_dir)
    outcomes = run(configuration, cache_dir=cache_dir)
    print(render(outcomes, options.format))
    if options.format == "mermaid":
        for text in without_a_picture(outcomes):
            print(text, file=sys.stderr)
    if options.format == "text" and configuration.others:
        print(f"{configuration.others} contracts of other types are for lint-imports.")
    return exit_code(outcomes)


def _shrink(configuration: Configuration, cache_dir: str | None) -> None:
    """Take entries that are no longer true out of the baselines of a configuration."""
    contracts = [(rule, dict(options)) for rule, options in configuration.contracts if options.get("baseline")]
    if not contracts:
        raise MisconfiguredError("no contract has a baseline, so there is none to shrink")
    files = [Path(options.pop("baseline")) for _, options in contracts]
    outcomes = run(replace(configuration, contracts=tuple(contracts)), cache_dir=cache_dir)
    for outcome, file in zip(outcomes, files, strict=False):
        if outcome.problems or outcome.uncovered:
            continue  # it can't say what is still true; the check that follows says why
        before = Baseline.read(file)
        after = before.shrunk(outcome.name, outcome.violations)
        gone = len(before.sections[outcome.name]) - len(after.sections[outcome.name])
        if gone:
            after.write()
        print(f"{file}: {gone} entries of {outcome.name!r} taken out", file=sys.stderr)


def report(options: Namespace) -> ExitCode:
    """Report on a package without a configuration.

    Args:
        options: ``target``, ``forbid``, ``format``, ``baseline``, ``write_baseline``, ``shrink_baseline``, ``no_cache``,
            ``cache_dir``.

    Raises:
        MisconfiguredError: If the package or a name can't be found, or the baseline does not fit.
        NotCoveredError: If there is no import graph.
    """
    _refuse_twice(options.forbid)
    found = make_report(
        options.target,
        options.forbid,
        cache_dir=None if options.no_cache else options.cache_dir,
        reader_cache=None if options.no_cache else Path(CACHE_FOLDER),
    )
    if options.format == "mermaid":
        for text in found.uncovered:
            print(f"not covered: {text}", file=sys.stderr)
    print({"text": found.as_text, "json": found.as_json, "mermaid": found.as_mermaid}[options.format]())
    code = _settle(found, options)
    return code if code is not ExitCode.KEPT or not found.uncovered else ExitCode.NOT_COVERED


def _refuse_twice(names: list[str]) -> None:
    """Refuse a name that is given twice: it would be counted twice, and the baseline's section called after both."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MisconfiguredError(f"--forbid names {twice[0]!r} twice; give it once")


def _settle(found: Report, options: Namespace) -> ExitCode:
    """Write, shrink or compare a report's baseline."""
    section = f"{found.package}: {', '.join(sorted(options.forbid))}"
    if file := options.write_baseline:
        before = Baseline.read(file) if file.exists() else Baseline(path=file)
        before.with_section(section, found.violations()).write()
        print(f"{file}: {counted(len(found.violations()), 'known violation')} written", file=sys.stderr)
    if file := options.shrink_baseline:
        before = Baseline.read(file)
        after = before.shrunk(section, found.violations())
        gone = len(before.sections[section]) - len(after.sections[section])
        if gone:
            after.write()
        print(f"{file}: {gone} entries taken out", file=sys.stderr)
    if file := options.baseline:
        new, known = Baseline.read(file).settle(section, found.violations())
        print(f"{counted(known, 'known violation')} in {file}, {len(new)} new", file=sys.stderr)
        for violation in new:
            print(f"new: {violation.file}:{violation.line}: {violation.message}", file=sys.stderr)
        return ExitCode.BROKEN if new else ExitCode.KEPT
    return ExitCode.KEPT


def init(options: Namespace) -> ExitCode:
    """Write a first configuration.

    Args:
        options: ``target``, ``forbid``, ``config``, ``baseline``.

    Raises:
        MisconfiguredError: If there is a configuration already, or the package or a name can't be found.
        NotCoveredError: If there is no import graph.
    """
    _refuse_twice(options.forbid)
    for file in (options.config, options.baseline):
        if file.exists():
            raise MisconfiguredError(f"{file} is there already, and is not overwritten; give another name or edit it")
    on_path = {Path(folder).resolve() for folder in (*sys.path, Path.cwd(), Path.cwd() / "src")}
    package, folders = locate(options.target)
    if Path(options.target).exists() and folders[0].parent.resolve() not in on_path:
        raise MisconfiguredError(
            f"a check finds packages in the working directory, in its src and among what is installed; {folders[0]} is "
            f"none of these. Run it in {folders[0].parent}, or install the package there"
        )
    contract = {
        "name": f"{package} does not reach {', '.join(options.forbid)} when it is imported",
        "source_modules": [package],
        "forbidden_modules": list(options.forbid),
        "phases": [Phase.EAGER.value, Phase.CONDITIONAL.value],
        "accept_unknown": unknown_names(package, options.forbid),
    }
    session = {"root_package": package, "include_external_packages": "True"}
    rule, coverage = run(
        Configuration(session=session, contracts=((ImportPhaseContract.rule, contract),), others=0), cache_dir=None
    )
    if rule.problems:
        raise MisconfiguredError("\n".join(rule.problems))
    if rule.uncovered:
        raise NotCoveredError("\n".join(rule.uncovered))
    known = rule.violations
    if known:
        contract["baseline"] = str(options.baseline)
    _write_both(options, _configuration(package, contract), Baseline(path=options.baseline), rule)
    print(f"{options.config} written for {shown(folders[0])}")
    if known:
        print(
            f"{options.baseline} written: {counted(len(known), 'chain')} at import time today; the list may only shrink"
        )
    for violation in coverage.violations:
        print(f"not covered: {violation.message}")
    print("Next: `nemo-rl-contracts check`, here and in CI.")
    return coverage.verdict


def _write_both(options: Namespace, configuration: str, baseline: Baseline, rule: Outcome) -> None:
    """Write a configuration, and the baseline that it names if there is something known; both or none."""
    try:
        options.config.write_text(configuration, encoding="utf-8")
    except OSError as error:
        raise MisconfiguredError(f"{options.config} can't be written: {error}") from error
    if rule.violations:
        try:
            baseline.with_section(rule.name, rule.violations).write()
        except MisconfiguredError:
            options.config.unlink()
            raise


def _configuration(package: str, contract: Mapping[str, str | list[str]]) -> str:
    """Return the text of a configuration."""
    head = dedent(
        f"""\
        # Checked by `nemo-rl-contracts check`, and by `lint-imports` together with contracts of its own types.
        [importlinter]
        root_package = {package}
        include_external_packages = True
        contract_types =
            coverage: nemo_rl_contracts.contract_types.CoverageContract
            import_phase: nemo_rl_contracts.contract_types.ImportPhaseContract

        [importlinter:contract:coverage]
        name = Every Python file is one that the contracts see
        type = coverage

        [importlinter:contract:at-import]
        type = import_phase
        """
    )
    comments = {
        "accept_unknown": "# Neither declared nor locked here; so they need not be installed where this is checked.\n",
        "baseline": "# What was there when this was written; it may only shrink.\n",
    }
    lines = []
    for option, value in contract.items():
        text = f" {value}" if isinstance(value, str) else "".join(f"\n    {entry}" for entry in value)
        text = text.replace("%", "%%")  # the format's own mark
        lines += [f"{comments.get(option, '')}{option} ={text}\n"] if value else []
    return head + "".join(lines)
