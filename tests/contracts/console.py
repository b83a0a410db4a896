# SPDX-License-Identifier: Apache-2.0
"""The command `nemo-rl-contracts`, called in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nemo_rl_contracts.cli.app import main

__all__ = ["Said", "console"]


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a call of the command gave.

    Attributes:
        code: The exit code.
        out: What stands on the standard output.
        err: What stands on the standard error.
    """

    code: int
    out: str
    err: str


def console(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Return a function that calls the command and takes what it says."""

    def call(*arguments: str) -> Said:
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr()
        return Said(code=code, out=said.out, err=said.err)

    return call
