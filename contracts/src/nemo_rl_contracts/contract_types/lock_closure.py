# SPDX-License-Identifier: Apache-2.0
"""``lock_closure``: what a `uv.lock` brings with a distribution holds none of the forbidden ones.

Import contracts read the project's own source. An engine that comes in through a dependency of a dependency is in no
source file of the project, but it is in the lock.
"""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from grimp import ImportGraph

from nemo_rl_contracts.contract_types.base import FirewallContract
from nemo_rl_contracts.contract_types.options import required_text, required_texts, texts
from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.locks import Closure, Distribution, Lock, closure_of, normalise, read_lock
from nemo_rl_contracts.violations import Hop, Violation

__all__ = ["LockClosureContract"]


class LockClosureContract(FirewallContract):
    """Each distribution, with the extras that are written beside it, brings none of the forbidden distributions.

    Options:

    - ``lock``: the `uv.lock`, relative to the folder in which the linter runs.
    - ``distributions``: ``name`` or ``name[extra,extra]``, one a line; each is checked by itself.
    - ``forbidden_distributions``: names, one a line, in any spelling that an installer accepts.
    - ``accept_unknown``: forbidden names that the lock holds nowhere, one a line. Without it such a name is an error,
      since it may be misspelled and would then forbid nothing.
    """

    rule = "lock_closure"

    lock: str = required_text()
    distributions: list[str] = required_texts()
    forbidden_distributions: list[str] = required_texts()
    accept_unknown: list[str] = texts()

    def examine(self, graph: ImportGraph) -> list[Violation]:
        """Return one violation for each distribution and forbidden name that it brings; see the base class.

        Args:
            graph: Plays no part.
        """
        del graph
        for option in ("distributions", "forbidden_distributions"):
            if not getattr(self, option):
                raise MisconfiguredError(f"{option} is empty, so the contract checks nothing; name at least one")
        lock = read_lock(Path(self.lock))
        forbidden, accepted = _names(self.forbidden_distributions), _names(self.accept_unknown)
        # All at once: whoever repairs a configuration wants to see everything that is wrong with it.
        problems = _unknown(lock, forbidden, accepted)
        closures: list[Closure] = []
        for text in self.distributions:
            try:
                closures.append(closure_of(lock, Distribution.parse(text)))
            except MisconfiguredError as error:
                problems.append(str(error))
        if problems:
            raise MisconfiguredError("\n".join(problems))
        self.note(f"{self.lock}: {', '.join(map(_size, closures))}")
        return [
            _violation(closure, name, self.lock) for closure in closures for name in forbidden if name in closure.names
        ]


def _size(closure: Closure) -> str:
    """Return how much a distribution brings, without square brackets: the linter takes them for styles in a note."""
    extras = f" with {' and '.join(closure.distribution.extras)}" if closure.distribution.extras else ""
    return f"{closure.distribution.name}{extras} brings {len(closure.names)} distributions"


def _names(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(normalise(value) for value in values))


def _unknown(lock: Lock, forbidden: Sequence[str], accepted: Sequence[str]) -> list[str]:
    """Return what is wrong with names that the lock lacks, and with exceptions that are not needed."""
    problems = []
    for name in forbidden:
        if name not in lock.by_name and name not in accepted:
            near = lock.near(name)
            hint = f" (near names: {', '.join(near)})" if near else ""
            problems.append(
                f"forbidden_distributions names {name!r}, which is nowhere in {lock.path}{hint}; correct it, or list it "
                "under accept_unknown too"
            )
    for name in accepted:
        if name in lock.by_name:
            problems.append(f"accept_unknown lists {name!r}, which is in {lock.path} now; take it out there")
        elif name not in forbidden:
            problems.append(f"accept_unknown lists {name!r}, which forbidden_distributions does not; take it out there")
    return problems


def _violation(closure: Closure, name: str, lock: str) -> Violation:
    package = min(closure.versions(name), key=lambda each: len(closure.chain(each)))
    chain = closure.chain(package)
    hops = tuple(Hop(importer=before, imported=after) for before, after in itertools.pairwise(chain))
    versions = ", ".join(each.version for each in closure.versions(name) if each.version)
    return Violation(
        rule=LockClosureContract.rule,
        message=f"{closure.distribution} brings {name} {versions}".rstrip(),
        file=lock,
        line=package.line or 0,
        hops=hops,
        key=f"{closure.distribution} -> {name}",
        advice=f"Drop the requirement of {chain[1]}, or move it to an extra that this contract does not list.",
    )
