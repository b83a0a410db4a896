# SPDX-License-Identifier: Apache-2.0
"""Markers of a `uv.lock`: can this dependency apply, given the extras that are chosen?

uv writes one lock also for extras that exclude each other, and tells their forks apart by comparisons such as
``extra == 'extra-12-nemo-rl-core-fsdp'``: prefix, length of the name, name, extra. Groups and whole projects that
conflict are written likewise.
"""

import re
from collections.abc import Collection, Iterator

from nemo_rl_contracts.errors import MisconfiguredError

__all__ = ["extra_item", "may_apply", "project_item"]

_CONFLICT_ITEM = re.compile(r"(?:extra|group|project)-\d+-")
_TOKEN = re.compile(r"\s*(?:(?P<string>'[^']*'|\"[^\"]*\")|(?P<word>[()]|[<>=!~]+|[A-Za-z_.]+))")


def extra_item(name: str, extra: str) -> str:
    """Return how a marker names an extra of a distribution."""
    return f"extra-{len(name)}-{name}-{extra}"


def project_item(name: str) -> str:
    """Return how a marker names a whole distribution."""
    return f"project-{len(name)}-{name}"


def may_apply(marker: str, chosen: Collection[str]) -> bool:
    """Tell whether a marker holds on some platform and Python, given what is chosen.

    Args:
        marker: A marker as uv writes it into a lock: comparisons, ``and``, ``or`` and parentheses; "" always holds.
        chosen: The conflicting extras, groups and projects that are in use, in uv's spelling. Only comparisons with such
            a name can be false here; every other comparison counts as one that can hold.

    Raises:
        MisconfiguredError: If the marker can't be read.
    """
    if not marker:
        return True
    tokens = list(_tokens(marker))
    value = _either(tokens, chosen, marker)
    if tokens:
        raise _unread(marker)
    return value


def _tokens(marker: str) -> Iterator[str]:
    position = 0
    while marker[position:].strip():
        match = _TOKEN.match(marker, position)
        if match is None:
            raise _unread(marker)
        yield match["string"] or match["word"]
        position = match.end()


def _either(tokens: list[str], chosen: Collection[str], marker: str) -> bool:
    value = _both(tokens, chosen, marker)
    while tokens and tokens[0] == "or":
        del tokens[0]
        value = _both(tokens, chosen, marker) or value
    return value


def _both(tokens: list[str], chosen: Collection[str], marker: str) -> bool:
    value = _comparison(tokens, chosen, marker)
    while tokens and tokens[0] == "and":
        del tokens[0]
        value = _comparison(tokens, chosen, marker) and value
    return value


def _comparison(tokens: list[str], chosen: Collection[str], marker: str) -> bool:
    if tokens[:1] == ["("]:
        del tokens[0]
        value = _either(tokens, chosen, marker)
        if tokens[:1] != [")"]:
            raise _unread(marker)
        del tokens[0]
        return value
    operator = tokens[1:3] if tokens[1:2] == ["not"] else tokens[1:2]
    end = 2 + len(operator)
    if len(tokens) < end or operator[:1] in (["and"], ["or"], ["("], [")"]):
        raise _unread(marker)
    left, right = tokens[0], tokens[end - 1]
    del tokens[:end]
    item = right.strip("'\"")
    if left != "extra" or not _CONFLICT_ITEM.match(item) or operator not in (["=="], ["!="]):
        return True
    return (item in chosen) == (operator == ["=="])


def _unread(marker: str) -> MisconfiguredError:
    return MisconfiguredError(
        f"a marker of the lock can't be read: {marker!r}; report it with the version of uv that wrote it"
    )
