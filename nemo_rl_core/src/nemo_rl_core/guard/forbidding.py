# SPDX-License-Identifier: Apache-2.0
"""Forbidding imports for a block, whatever the role of the process."""

import contextlib
from collections.abc import Callable, Generator

from nemo_rl_core.guard import layers
from nemo_rl_core.guard.finder import GuardFinder
from nemo_rl_core.guard.policy import BlockRule
from nemo_rl_core.guard.records import Ledger, Recorder

__all__ = ["forbidding"]

_WAY_OUT = "do without it on this path: import it inside the function that needs it, or move out what is shared"


@contextlib.contextmanager
def forbidding(
    *names: str,
    because: str = "this block",
    way_out: str = _WAY_OUT,
    recorder: Recorder | None = None,
) -> Generator[Callable[[], Ledger]]:
    """Refuse imports of these packages within a block, on top of what the process forbids.

    A package that is loaded already is hidden, with all that is below it, so that a statement in the block is refused
    like one in a fresh process; afterwards the same module objects are back, and nothing else is there under these
    names. Where blocks overlap, a package stays hidden until the last one that forbids it ends. References that somebody
    holds stay as they are. The block counts for the whole process, other threads included; a child by fork inherits it
    with a ledger of its own, and a child that starts an interpreter is not held to it.

    Whether a package of that name exists is not checked: an absent one is what most blocks are about.

    Args:
        names: Top-level names.
        because: Who forbids them: the subject of "... must not import 'x'".
        way_out: What to do about a refusal, for the message.
        recorder: Where violations and attempts go; None makes a new one.

    Yields:
        A function that returns the ledger, during the block and afterwards.

    Raises:
        ValueError: If there is no name, or one that is no top-level name, or one that Python itself needs.
    """
    rule = BlockRule(names=frozenset(names), because=because, way_out=way_out)
    records = Recorder(rule.role) if recorder is None else recorder
    finder = GuardFinder(rule, records)
    layers.install(finder)
    try:
        layers.prove(finder)
        # After the finder is in place, or another thread could load the package anew in between.
        layers.hide(finder)
        yield records.snapshot
    finally:
        layers.give_back(finder)
        layers.remove(finder)
