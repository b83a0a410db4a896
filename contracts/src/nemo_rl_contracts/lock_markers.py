# SPDX-License-Identifier: Apache-2.0
"""Markers of requirements: can a dependency apply, given the extras that are chosen, or the Python that runs here?

uv writes one lock also for extras that exclude each other, and tells their forks apart by comparisons such as
``extra == 'extra-12-nemo-rl-core-fsdp'``: prefix, length of the name, name, extra. Groups and whole projects that
conflict are written likewise.
"""

import operator
import re
import sys
from collections.abc import Callable, Collection, Iterator

from nemo_rl_contracts.errors import MisconfiguredError

__all__ = ["extra_item", "may_apply", "may_apply_on_this_python", "project_item"]

_CONFLICT_ITEM = re.compile(r"(?:extra|group|project)-\d+-")
_TOKEN = re.compile(r"\s*(?:(?P<string>'[^']*'|\"[^\"]*\")|(?P<word>[()]|[<>=!~]+|[A-Za-z_.]+))")
_VERSION = re.compile(r"\d+(?:\.\d+)*(?:\.\*)?\Z")
_Judge = Callable[[str, str, str], bool]


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

    def judge(left: str, comparison: str, right: str) -> bool:
        item = right.strip("'\"")
        if left != "extra" or not _CONFLICT_ITEM.match(item) or comparison not in ("==", "!="):
            return True
        return (item in chosen) == (comparison == "==")

    return _value(marker, judge)


def may_apply_on_this_python(marker: str) -> bool:
    """Tell whether a marker of a requirement (PEP 508) can hold for the version of Python that runs here.

    Args:
        marker: What stands behind the ``;``. Only comparisons with `python_version` and `python_full_version` can be false;
            another platform or an extra may be the one that is meant.

    Raises:
        MisconfiguredError: If the marker can't be read.
    """
    return _value(marker, _judge_python)


def _judge_python(left: str, comparison: str, right: str) -> bool:
    flipped = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
    if right in ("python_version", "python_full_version"):
        left, comparison, right = right, flipped.get(comparison, comparison), left
    text = right.strip("'\"").strip()
    if left not in ("python_version", "python_full_version"):
        return True
    here = sys.version_info[: 2 if left == "python_version" else 3]
    if comparison in ("in", "not in"):
        return (".".join(map(str, here)) in re.split(r"[,\s]+", text)) == (comparison == "in")
    if not _VERSION.match(text):
        return True
    written = tuple(int(part) for part in text.removesuffix(".*").split("."))
    if text.endswith(".*"):
        same = here[: len(written)] == written
        return {"==": same, "!=": not same}.get(comparison, True)
    length = max(len(here), len(written))
    ours, theirs = ((*version, *[0] * (length - len(version))) for version in (here, written))
    if comparison == "~=":
        return ours >= theirs and here[: len(written) - 1] == written[:-1]
    compare = {
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
        "==": operator.eq,
        "===": operator.eq,
        "!=": operator.ne,
    }.get(comparison)
    return compare is None or compare(ours, theirs)


def _value(marker: str, judge: _Judge) -> bool:
    """Return the value of a marker whose comparisons somebody judges; "" always holds."""
    if not marker:
        return True
    tokens = list(_tokens(marker))
    value = _either(tokens, judge, marker)
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


def _either(tokens: list[str], judge: _Judge, marker: str) -> bool:
    value = _both(tokens, judge, marker)
    while tokens and tokens[0] == "or":
        del tokens[0]
        value = _both(tokens, judge, marker) or value
    return value


def _both(tokens: list[str], judge: _Judge, marker: str) -> bool:
    value = _comparison(tokens, judge, marker)
    while tokens and tokens[0] == "and":
        del tokens[0]
        value = _comparison(tokens, judge, marker) and value
    return value


def _comparison(tokens: list[str], judge: _Judge, marker: str) -> bool:
    if tokens[:1] == ["("]:
        del tokens[0]
        value = _either(tokens, judge, marker)
        if tokens[:1] != [")"]:
            raise _unread(marker)
        del tokens[0]
        return value
    comparison = tokens[1:3] if tokens[1:2] == ["not"] else tokens[1:2]
    end = 2 + len(comparison)
    if len(tokens) < end or comparison[:1] in (["and"], ["or"], ["("], [")"]):
        raise _unread(marker)
    left, right = tokens[0], tokens[end - 1]
    del tokens[:end]
    return judge(left, " ".join(comparison), right)


def _unread(marker: str) -> MisconfiguredError:
    return MisconfiguredError(
        f"a marker can't be read: {marker!r}; correct it, or report it with the version of uv that wrote it"
    )
