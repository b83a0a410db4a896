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

_BACKENDS = """\
List the installed generation backends: state, distribution, engine and environment. This process imports none of them;
a child process reads their descriptions, and the engine's version is asked in the environment's interpreter.
"""

_ENV = """\
Build the environments that workers run in, e.g. the engine's for machines without a GPU. They lie in NEMO_RL_VENV_DIR,
by default below the user's cache.
"""

_CALIBRATE = """\
Run a model over texts and write a checkpoint that vLLM serves with an FP8 KV cache: the model's weights (linked, or
copied), a scale for keys and one for values of each attention module, kv_scales.json, report.md and scales.svg. Texts
should be what will be served: prompts with responses. Runs in this process, on a GPU where there is one.
"""

_AUDIT = """\
Import every module of an installed package, each in a process of its own, and say
which of them load or ask for a forbidden module, who asked first, and how long each
import took. The modules' code runs: audit packages that you would install. The
interpreter runs isolated (python -I), so the current directory, PYTHONPATH and the
user's own site-packages are not looked at.
"""

_AUDIT_EXIT_CODES = """\
exit codes:
  0  every module was imported, and nobody loads a forbidden one or asks for it
  1  a module loads a forbidden one, or asks for one that is not installed or fails
  2  the audit was not made: an unknown package, a bad name or value, a preload that fails
  3  nobody loads or asks for one, but modules that could not be imported leave it unproven
"""


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

    backends = commands.add_parser("backends", help="list generation backends", description=_BACKENDS)
    backends.add_argument("--check", action="store_true", help="also import what a worker needs, in its environment")
    backends.add_argument("--json", action="store_true", help="print JSON")
    _add_calibrate(commands)
    _add_env(commands)
    _add_firewall(commands)
    return parser


def _add_env(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    env = commands.add_parser("env", help="build environments of workers", description=_ENV)
    actions = env.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list declared environments", description="List declared environments.")
    listing.add_argument("--json", action="store_true", help="print JSON")
    build = actions.add_parser(
        "build",
        help="build one with uv, if it is not ready",
        description="Build an environment with uv; prints progress.",
    )
    build.add_argument("name", metavar="NAME", help="a declared environment, e.g. vllm-cpu")
    build.add_argument("--rebuild", action="store_true", help="build it also where it is ready")
    build.add_argument(
        "--timeout", type=_seconds, default=1800.0, metavar="SECONDS", help="deadline of the build (default: 1800)"
    )
    path = actions.add_parser(
        "path", help="print the path of its interpreter", description="Print the interpreter of a ready environment."
    )
    path.add_argument("name", metavar="NAME", help="a declared environment")
    remove = actions.add_parser(
        "remove",
        help="remove it with all that was built of it",
        description="Remove all builds of an environment, old ones too. Runs that use it fail.",
    )
    remove.add_argument("name", metavar="NAME", help="a declared environment")


def _add_calibrate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    calibrate = commands.add_parser("calibrate", help="add FP8 KV cache scales to a checkpoint", description=_CALIBRATE)
    calibrate.add_argument("model", metavar="MODEL", help="a local HF folder with safetensors; it is not changed")
    calibrate.add_argument(
        "--data",
        metavar="FILE",
        required=True,
        help='.jsonl with "text", with "prompt" and "response", or with "input_ids" on each line; or .txt, a text a line',
    )
    calibrate.add_argument("--out", metavar="DIR", required=True, help="a new or empty folder for the result")
    calibrate.add_argument(
        "--include-q", action="store_true", help="scales for queries too, which some kernels on NVIDIA GPUs quantise"
    )
    calibrate.add_argument(
        "--percentile",
        type=float,
        default=100.0,
        metavar="P",
        help="of the magnitudes of a layer; what is above it may saturate (default: 100, the largest)",
    )
    calibrate.add_argument(
        "--margin", type=float, default=2.0, metavar="M", help="headroom over that, from 1 (default: 2)"
    )
    calibrate.add_argument(
        "--max-tokens", type=_count, metavar="N", help="cut longer sequences (default: at the model's context)"
    )
    calibrate.add_argument(
        "--batch-tokens", type=_count, default=8192, metavar="N", help="padded tokens of one pass (default: 8192)"
    )
    calibrate.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one"
    )


def _count(text: str) -> int:
    """Read a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text}")
    return value


def _seconds(text: str) -> float:
    """Read a number of seconds that is finite and above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number of seconds above 0, got {text}")
    return value


def _add_firewall(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    firewall = commands.add_parser(
        "firewall", help="see who loads an engine", description="See what keeps an engine out, and what brings it in."
    )
    actions = firewall.add_subparsers(dest="action", required=True, metavar="ACTION")
    audit = actions.add_parser(
        "audit",
        help="import every module of a package and see who loads a forbidden one",
        description=_AUDIT,
        epilog=_AUDIT_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    audit.add_argument("package", metavar="PACKAGE", help="an installed package or a part of it, e.g. accelerate.utils")
    audit.add_argument(
        "--forbid",
        metavar="NAME",
        action="append",
        required=True,
        help="a module that nobody may load, with everything below it; may be given again",
    )
    audit.add_argument(
        "--preload",
        metavar="NAME",
        action="append",
        default=[],
        help="import this once for all modules, before PACKAGE itself (saves time where many need it); may be given again",
    )
    audit.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    audit.add_argument("--python", metavar="PATH", help="audit the environment of this interpreter; default: this one")
    audit.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="deadline of each import (default: 60)"
    )
    audit.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="imports at the same time; more than 1 blurs the times"
    )
