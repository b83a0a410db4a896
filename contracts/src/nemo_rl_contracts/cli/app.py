# SPDX-License-Identifier: Apache-2.0
"""The command `nemo-rl-contracts`."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_contracts.cli import commands
from nemo_rl_contracts.errors import MisconfiguredError, NotCoveredError
from nemo_rl_contracts.formats import FORMATS
from nemo_rl_contracts.running import GRAPH_CACHE, ExitCode

__all__ = ["main"]

_EXIT_CODES = "Exit code: 0 kept, 1 broken, 2 misconfigured (nothing is proven), 3 files are not covered."


#: What a shell reports for a program that ends because of SIGPIPE.
_READER_GONE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What stands behind the command's name; None takes it from the process.

    Returns:
        The exit code; see ``ExitCode``.
    """
    options = _parser().parse_args(arguments)
    # A picture or a document with a character that the terminal's encoding lacks is no reason to fail.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = int(options.command(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever reads has gone, as in `... | head`. What is left to write goes nowhere, also at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except MisconfiguredError as error:
        print(f"nemo-rl-contracts: {error}", file=sys.stderr)
        return int(ExitCode.MISCONFIGURED)
    except NotCoveredError as error:
        print(f"nemo-rl-contracts: not covered: {error}", file=sys.stderr)
        return int(ExitCode.NOT_COVERED)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - an error of ours must not end with 1, which means a broken contract;
        # and a panic of grimp's own, which is written in Rust, is no Exception
        return _unexpected(error, show=options.traceback)


def _unexpected(error: BaseException, *, show: bool) -> int:
    """Say that something of ours failed; nothing is proven then."""
    if show:
        traceback.print_exception(error)
    first = (str(error).splitlines() or [""])[0]
    hint = "" if show else "; --traceback shows where"
    print(
        f"nemo-rl-contracts: nothing is proven, since the command itself failed: {type(error).__name__}: {first}{hint}",
        file=sys.stderr,
    )
    return int(ExitCode.MISCONFIGURED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nemo-rl-contracts", description="Import contracts that know when an import runs.", epilog=_EXIT_CODES
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_check(subparsers)
    _add_report(subparsers)
    _add_init(subparsers)
    return parser


def _add_check(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    check = subparsers.add_parser(
        "check",
        help="check the contracts of our types in a configuration of import-linter",
        description="Check the contracts of our types in .importlinter, setup.cfg or pyproject.toml; `lint-imports` "
        "checks all. Without a `coverage` contract one is added.",
        epilog=_EXIT_CODES,
    )
    check.add_argument("--config", type=Path, help="the configuration (default: as import-linter looks for it)")
    check.add_argument("--format", choices=list(FORMATS), default="text", help="default: text")
    check.add_argument(
        "--shrink-baseline", action="store_true", help="take entries out of the baselines that are no longer true"
    )
    _add_cache(check)
    _add_traceback(check)
    check.set_defaults(command=commands.check)


def _add_report(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    report = subparsers.add_parser(
        "report",
        help="say when a package reaches another, without any configuration",
        description="Say of a package when it reaches others: how many chains are lazy, and which run at import time.",
        epilog=f"{_EXIT_CODES} Without --baseline nothing counts as broken.",
    )
    report.add_argument(
        "target",
        metavar="PATH",
        help="a package's folder, or its name; it is looked for here, in src and among what is installed",
    )
    report.add_argument(
        "--forbid", metavar="NAME", action="append", required=True, help="what must not be reached; may be repeated"
    )
    report.add_argument("--format", choices=["text", "json", "mermaid"], default="text", help="default: text")
    baseline = report.add_mutually_exclusive_group()
    baseline.add_argument("--write-baseline", type=Path, metavar="FILE", help="write what runs at import time today")
    baseline.add_argument("--baseline", type=Path, metavar="FILE", help="fail at what runs at import time and is new")
    baseline.add_argument(
        "--shrink-baseline", type=Path, metavar="FILE", help="take out what is no longer true; nothing is added"
    )
    _add_cache(report)
    _add_traceback(report)
    report.set_defaults(command=commands.report)


def _add_init(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    init = subparsers.add_parser(
        "init",
        help="write a first configuration, and a baseline where it is broken today",
        description="Write .importlinter with a `coverage` and an `import_phase` contract for a package.",
        epilog=_EXIT_CODES,
    )
    init.add_argument("target", metavar="PATH", help="the package's folder, below the working directory, or its name")
    init.add_argument("--forbid", metavar="NAME", action="append", required=True, help="as for report")
    init.add_argument("--config", type=Path, default=Path(".importlinter"), help="default: .importlinter")
    init.add_argument(
        "--baseline",
        type=Path,
        default=Path("import-baseline.json"),
        help="where known violations go, if there are any (default: import-baseline.json)",
    )
    _add_traceback(init)
    init.set_defaults(command=commands.init)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-cache", action="store_true", help="keep nothing between runs")
    parser.add_argument(
        "--cache-dir",
        default=GRAPH_CACHE,
        metavar="DIR",
        help=f"where grimp keeps its results (default: {GRAPH_CACHE})",
    )


def _add_traceback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traceback", action="store_true", help="where the command itself fails, show where")


if __name__ == "__main__":
    sys.exit(main())
