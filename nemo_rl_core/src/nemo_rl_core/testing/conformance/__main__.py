# SPDX-License-Identifier: Apache-2.0
"""``python -m nemo_rl_core.testing.conformance module:function``: the function returns the `Subject` to test."""

import importlib
import sys
from collections.abc import Sequence

from nemo_rl_core.testing.conformance.runner import run
from nemo_rl_core.testing.conformance.subject import Subject

__all__ = ["main"]

_USAGE = "usage: python -m nemo_rl_core.testing.conformance module:function (which returns a Subject)"


def main(arguments: Sequence[str]) -> int:
    """Run the suite and print its table.

    Returns:
        0 if every check passed, 1 if one did not, 2 if there was nothing to run.
    """
    module, colon, name = arguments[0].partition(":") if len(arguments) == 1 else ("", "", "")
    if not (module and colon and name):
        print(_USAGE, file=sys.stderr)
        return 2
    try:
        make = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        print(f"{module!r} cannot be imported: {error}; name a module that this interpreter finds", file=sys.stderr)
        return 2
    subject = make() if callable(make) else make
    if not isinstance(subject, Subject):
        print(f"{arguments[0]} must be a function that returns a Subject, got {subject!r}", file=sys.stderr)
        return 2
    report = run(subject)
    print(report.table())
    print(f"{len(report.results) - len(report.failed)} of {len(report.results)} checks passed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
