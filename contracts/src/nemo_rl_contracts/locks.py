# SPDX-License-Identifier: Apache-2.0
"""Read a `uv.lock` and say which distributions one distribution brings, with which extras, and why.

Import rules see what a source file says; a lock says what an installer will bring, whether anything imports it or not.
Here a dependency counts whatever its environment marker says: the question is what may be installed on any platform. What
uv leaves out of the lock itself, as ``tool.uv.environments`` asks it to, can't count.

Only where one lock holds several forks for extras that exclude each other, a fork counts where its extras are chosen.
Development groups are never chosen; they are not part of a distribution.

From the command line: ``python -m nemo_rl_contracts.locks uv.lock 'nemo-rl-core[fsdp]' --show torch --forbid vllm``.
"""

import argparse
import difflib
import re
import sys
import tomllib
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.installed import normalized
from nemo_rl_contracts.lock_markers import extra_item, may_apply, project_item

__all__ = [
    "Closure",
    "Distribution",
    "Lock",
    "LockError",
    "LockedDependency",
    "LockedPackage",
    "closure_of",
    "main",
    "normalise",
    "read_lock",
]

#: The version of the lock's format that this module knows; uv raises it when older readers would go wrong.
_FORMAT = 1

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
_REQUESTED = re.compile(r"\s*(?P<name>[^\s\[\]]+)\s*(?:\[(?P<extras>[^\[\]]*)\])?\s*\Z")
_PACKAGE_HEADER = re.compile(r"\[\[\s*package\s*\]\]")


class LockError(MisconfiguredError):
    """A lock that can't be read, or a distribution or extra that it does not hold."""


def normalise(name: str) -> str:
    """Return a distribution's or an extra's name as installers compare it (PEP 503): ``My_Pkg`` is ``my-pkg``.

    Raises:
        LockError: If it is not a name.
    """
    if not _NAME.match(name):
        raise LockError(
            f"a name has letters, digits, '.', '_' and '-', and begins and ends with a letter or digit; got {name!r}"
        )
    return normalized(name)


@dataclass(frozen=True, kw_only=True, order=True)
class Distribution:
    """A distribution with the extras that somebody asks for.

    Attributes:
        name: Normalised name.
        extras: Normalised names of the extras, sorted.
    """

    name: str
    extras: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Distribution":
        """Read ``name`` or ``name[extra,extra]``.

        Raises:
            LockError: If the text is neither.
        """
        match = _REQUESTED.match(text)
        if match is None:
            raise LockError(f"a distribution is written as name or name[extra,extra] without a version, got {text!r}")
        extras = [extra.strip() for extra in (match["extras"] or "").split(",") if extra.strip()]
        return cls(name=normalise(match["name"]), extras=tuple(sorted({normalise(extra) for extra in extras})))

    def __str__(self) -> str:
        return f"{self.name}[{','.join(self.extras)}]" if self.extras else self.name


@dataclass(frozen=True, kw_only=True)
class LockedDependency:
    """One edge of the lock.

    Attributes:
        name: Name of what is required.
        version: Its locked version, "" where the lock has only one of that name.
        extras: Extras of it that are asked for.
        marker: When the edge applies, as uv wrote it; "" for always.
    """

    name: str
    version: str = ""
    extras: tuple[str, ...] = ()
    marker: str = ""


@dataclass(frozen=True, kw_only=True)
class LockedPackage:
    """One version of one distribution.

    Attributes:
        name: Normalised name.
        version: Locked version, "" where the project computes it.
        line: Line of the lock on which its entry begins, from 1; None where that can't be told.
        member: Whether it is a project of the workspace and not something that is downloaded.
        dependencies: What it requires without any extra.
        by_extra: What each of its extras adds; an extra that adds nothing has an empty entry.
    """

    name: str
    version: str
    line: int | None
    member: bool
    dependencies: tuple[LockedDependency, ...]
    by_extra: Mapping[str, tuple[LockedDependency, ...]]


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A lock that was read.

    Attributes:
        path: The file.
        packages: Every entry, in the order of the file.
    """

    path: Path
    packages: tuple[LockedPackage, ...]

    @cached_property
    def by_name(self) -> Mapping[str, tuple[LockedPackage, ...]]:
        """Every locked version of each name."""
        found: dict[str, list[LockedPackage]] = {}
        for package in self.packages:
            found.setdefault(package.name, []).append(package)
        return MappingProxyType({name: tuple(packages) for name, packages in found.items()})

    def members(self) -> tuple[Distribution, ...]:
        """Return each project of the workspace without an extra, and with each of its extras alone."""
        found = []
        for package in sorted((p for p in self.packages if p.member), key=lambda p: p.name):
            found.append(Distribution(name=package.name))
            found += [Distribution(name=package.name, extras=(extra,)) for extra in sorted(package.by_extra)]
        return tuple(found)

    def near(self, name: str) -> tuple[str, ...]:
        """Return names of the lock that look like this one."""
        return tuple(difflib.get_close_matches(name, sorted(self.by_name), n=3))


@dataclass(frozen=True, kw_only=True)
class Closure:
    """All that one distribution brings.

    Attributes:
        distribution: What was asked for.
        packages: What it brings, itself left out, sorted by name and version; one name can have several versions.
        chains: For each of them the shortest way to it: the distribution, then one link a step.
    """

    distribution: Distribution
    packages: tuple[LockedPackage, ...]
    chains: Mapping[tuple[str, str], tuple[str, ...]]

    @property
    def names(self) -> frozenset[str]:
        """Names of what it brings."""
        return frozenset(package.name for package in self.packages)

    def versions(self, name: str) -> tuple[LockedPackage, ...]:
        """Return every version that it brings of one name; several where platforms or Pythons need their own."""
        return tuple(package for package in self.packages if package.name == name)

    def chain(self, package: LockedPackage) -> tuple[str, ...]:
        """Return why a package is there, e.g. ``("core[fsdp]", "a[fast]", "vllm 0.33.0")``."""
        return self.chains[package.name, package.version]


def read_lock(path: Path) -> Lock:
    """Read a `uv.lock`.

    Raises:
        LockError: If the file is missing, is not a lock of uv, or has a version of the format that is not known here.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LockError(
            f"there is no lock at {path}; write one with `uv lock`, or name the file that is meant"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"the lock {path} can't be read: {error}") from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LockError(f"{path} is not a lock of uv, since it is not TOML: {error}") from error
    version, entries = content.get("version"), content.get("package")
    if not isinstance(version, int) or isinstance(version, bool) or not isinstance(entries, list):
        raise LockError(
            f"{path} is not a lock of uv: that has a number 'version' and tables [[package]], "
            f"got the keys {sorted(content)}; name the uv.lock"
        )
    if version != _FORMAT:
        raise LockError(
            f"{path} is a lock of format version {version}, and only version {_FORMAT} is known here; "
            "install a newer nemo-rl-contracts, or lock with a uv that writes the older format"
        )
    if not entries:
        raise LockError(f"{path} holds no [[package]], so there is nothing to check; lock anew")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _PACKAGE_HEADER.match(line.strip())]
    # A lock that was written in another style, inline say, has no line that could be named.
    numbers = lines if len(lines) == len(entries) else [None] * len(entries)
    return Lock(path=path, packages=tuple(_package(path, *pair) for pair in zip(entries, numbers, strict=True)))


def _package(path: Path, entry: Any, line: int | None) -> LockedPackage:
    try:
        extras = {
            normalise(extra): _dependencies(found) for extra, found in entry.get("optional-dependencies", {}).items()
        }
        # An extra that requires nothing is named by the metadata alone.
        for extra in _texts(entry.get("metadata", {}).get("provides-extras", [])):
            extras.setdefault(normalise(extra), ())
        return LockedPackage(
            name=normalise(entry["name"]),
            version=_text(entry.get("version", "")),
            line=line,
            member=bool(entry.get("source", {}).keys() & {"editable", "virtual", "directory"}),
            dependencies=_dependencies(entry.get("dependencies", ())),
            by_extra=MappingProxyType(extras),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise LockError(
            f"{path}:{line or '?'} has a [[package]] that is not one of uv's: {error!r}; lock anew"
        ) from error


def _dependencies(entries: Iterable[Mapping[str, Any]]) -> tuple[LockedDependency, ...]:
    return tuple(
        LockedDependency(
            name=normalise(entry["name"]),
            version=_text(entry.get("version", "")),
            extras=tuple(normalise(extra) for extra in _texts(entry.get("extra", []))),
            marker=_text(entry.get("marker", "")),
        )
        for entry in entries
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return list(map(_text, value))


def closure_of(lock: Lock, distribution: Distribution, *, may_be_empty: bool = False) -> Closure:
    """Return all that a distribution brings on any platform.

    Args:
        lock: The lock.
        distribution: What is asked for.
        may_be_empty: Whether it may bring nothing; it may where nobody asked for it by name.

    Raises:
        LockError: If the lock does not hold the distribution or one of its extras, or if nothing is brought: an empty
            answer would pass for a clean one.
        MisconfiguredError: If a marker can't be read.
    """
    _check_request(lock, distribution)
    chosen = {extra_item(distribution.name, extra) for extra in distribution.extras} | {project_item(distribution.name)}
    while True:
        reached = _walk(lock, distribution, frozenset(chosen))
        # An extra that is asked for on the way chooses a fork too, also for edges that were already looked at.
        also = {extra_item(each.package.name, each.extra) for each in reached if each.extra}
        also |= {project_item(each.package.name) for each in reached}
        if also <= chosen:
            break
        chosen |= also
    chains: dict[tuple[str, str], tuple[str, ...]] = {}
    packages: dict[tuple[str, str], LockedPackage] = {}
    for each in reached:
        key = (each.package.name, each.package.version)
        if each.package.name != distribution.name:
            packages.setdefault(key, each.package)
            chains.setdefault(key, each.links)  # the walk goes by length, so the first is a shortest one
    if not packages and not may_be_empty:
        raise LockError(f"{distribution} brings nothing in {lock.path}, so there is nothing to check; leave it out")
    return Closure(
        distribution=distribution,
        packages=tuple(packages[key] for key in sorted(packages)),
        chains=MappingProxyType(chains),
    )


def _check_request(lock: Lock, distribution: Distribution) -> None:
    _require(lock, distribution.name)
    known = sorted(set().union(*(package.by_extra for package in lock.by_name[distribution.name])))
    for extra in distribution.extras:
        if extra not in known:
            has = f"its extras there: {', '.join(known)}" if known else "it has none there"
            raise LockError(f"'{distribution.name}' has no extra '{extra}' in {lock.path}; {has}")


def _require(lock: Lock, name: str) -> None:
    if name not in lock.by_name:
        near = lock.near(name)
        hint = f"near names: {', '.join(near)}" if near else "lock it, or take it out"
        raise LockError(f"the distribution '{name}' is not in {lock.path}; {hint}")


@dataclass(frozen=True, kw_only=True)
class _Reached:
    """A package, or one extra of it, and the chain that leads there."""

    links: tuple[str, ...]
    package: LockedPackage
    extra: str | None


def _walk(lock: Lock, distribution: Distribution, chosen: Collection[str]) -> list[_Reached]:
    """Return each package, and each extra that is asked of it, in the order of the length of the way there."""
    reached: list[_Reached] = []
    seen: set[tuple[str, str, str | None]] = set()
    start = (str(distribution),)
    queue = deque(
        _Reached(links=start, package=package, extra=extra)
        for package in lock.by_name[distribution.name]
        for extra in (None, *distribution.extras)
    )
    while queue:
        here = queue.popleft()
        if (key := (here.package.name, here.package.version, here.extra)) in seen:
            continue
        seen.add(key)
        reached.append(here)
        for dependency in (
            here.package.dependencies if here.extra is None else here.package.by_extra.get(here.extra, ())
        ):
            if not may_apply(dependency.marker, chosen):
                continue
            for target in _targets(lock, dependency):
                link = f"{Distribution(name=target.name, extras=dependency.extras)} {target.version}".strip()
                queue.extend(
                    _Reached(links=(*here.links, link), package=target, extra=extra)
                    for extra in (None, *dependency.extras)
                )
    return reached


def _targets(lock: Lock, dependency: LockedDependency) -> tuple[LockedPackage, ...]:
    versions = lock.by_name.get(dependency.name, ())
    found = tuple(p for p in versions if not dependency.version or p.version == dependency.version)
    if not found:
        raise LockError(
            f"{lock.path} requires {f'{dependency.name} {dependency.version}'.strip()} and has no such entry; lock anew"
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of closures, and the chains to what is forbidden.

    Args:
        argv: What stands behind the command's name; None takes it from the process.

    Returns:
        0, 1 if a closure holds a forbidden name, or 2 if the request can't be answered.
    """
    parser = argparse.ArgumentParser(prog="python -m nemo_rl_contracts.locks", description="What a uv.lock brings.")
    parser.add_argument("lock", type=Path, help="path of a uv.lock")
    parser.add_argument(
        "distributions", nargs="*", help="name or name[extra,...]; by default each member, and with each of its extras"
    )
    parser.add_argument("--show", action="append", default=[], metavar="NAME", help="add a column: versions of NAME")
    parser.add_argument(
        "--forbid", action="append", default=[], metavar="NAME", help="fail, with the chain, where NAME is brought"
    )
    arguments = parser.parse_args(argv)
    try:
        lock = read_lock(arguments.lock)
        named = [Distribution.parse(text) for text in arguments.distributions]
        wanted = named or list(lock.members())
        if not wanted:
            raise LockError(f"{arguments.lock} has no project of its own; name the distributions")
        closures = [closure_of(lock, distribution, may_be_empty=not named) for distribution in wanted]
        shown, forbidden = _known(lock, arguments.show), _known(lock, arguments.forbid)
    except MisconfiguredError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_table(closures, shown))
    chains = [c.chain(package) for name in forbidden for c in closures for package in c.versions(name)]
    for chain in chains:
        print(" -> ".join(chain))
    return 1 if chains else 0


def _known(lock: Lock, names: Iterable[str]) -> list[str]:
    """Return names in their normal form; one that the lock holds nowhere may be misspelled, and is refused."""
    found = [normalise(name) for name in names]
    for name in found:
        _require(lock, name)
    return found


def _table(closures: Sequence[Closure], shown: Sequence[str]) -> str:
    rows = [["distribution", "brings", *shown]]
    for closure in closures:
        versions = [", ".join(p.version for p in closure.versions(name)) or "-" for name in shown]
        rows.append([str(closure.distribution), str(len(closure.names)), *versions])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, count, *versions in rows:
        cells = [name.ljust(widths[0]), count.rjust(widths[1])]
        cells += [text.ljust(width) for text, width in zip(versions, widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
