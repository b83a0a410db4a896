# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a config, as data and as text."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.errors import ConfigError

__all__ = ["UNSET", "Problem", "config_error", "show_value"]


class _Unset:
    """Stands for the value of a key that is not there."""

    def __repr__(self) -> str:
        return "UNSET"


#: The value of a key that is not there; None is a value (YAML's null).
UNSET = _Unset()

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One broken rule.

    Attributes:
        key: Dotted key, e.g. ``policy.generation.top_p``.
        rule: What must hold, e.g. ``must be an integer``.
        value: The value found, or ``UNSET``.
        way_out: What to do about it.
    """

    key: str
    rule: str
    value: Any = UNSET
    way_out: str = ""

    def __str__(self) -> str:
        """Return ``key: rule, got value; way out``."""
        got = "" if self.value is UNSET else f", got {show_value(self.value)}"
        return f"{self.key}: {self.rule}{got}" + (f"; {self.way_out}" if self.way_out else "")


def show_value(value: Any) -> str:
    """Return a value as one would write it in YAML, shortened to about 80 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def config_error(source: str, problems: Iterable[Problem]) -> ConfigError:
    """Return one error that lists all problems in the order of their keys.

    Args:
        source: Where the config came from, usually the path of its file.
        problems: At least one.
    """
    lines = sorted({str(problem) for problem in problems})
    if len(lines) == 1:
        return ConfigError(f"{source}: {lines[0]}")
    listed = "\n".join(f"  {number}. {line}" for number, line in enumerate(lines, 1))
    return ConfigError(f"{source} has {len(lines)} problems:\n{listed}")
