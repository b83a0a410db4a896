# SPDX-License-Identifier: Apache-2.0
"""The parser. A command's module is imported when that command was given, so that ``--help`` is instant."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from nemo_rl_core import __version__
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.guard import ForbiddenImportError

__all__ = ["main"]

#: Exit codes: bad input is told apart from a run that failed.
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``nemo-rl`` and return its exit code.

    Args:
        arguments: Without the program's name; None takes those of the process.
    """
    options = _parse(arguments)
    command = importlib.import_module(f"nemo_rl_core.cli.{options.command}")
    try:
        return command.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (NemoRLError, ForbiddenImportError) as error:
        # These say rule, value and way out themselves; a traceback would bury that.
        print(f"nemo-rl {options.command}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ValueError | ImportError | LookupError) else EXIT_FAILED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; overrides may stand before and after options, which argparse alone does not allow."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (options.command != "train" or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nemo-rl", description="RL post-training with training and generation on different machines."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy", description="Train a policy with GRPO.")
    train.add_argument("config", help="a YAML file, e.g. examples/grpo_tiny.yaml")
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replaces a config value, e.g. grpo.max_num_steps=10"
    )
    train.add_argument("--dry-run", action="store_true", help="print the resolved plan and start nothing")

    backends = commands.add_parser(
        "backends", help="list generation backends", description="List the installed generation backends; imports none."
    )
    backends.add_argument("--check", action="store_true", help="load each one, to tell broken ones apart")
    backends.add_argument("--json", action="store_true", help="print JSON")
    return parser
