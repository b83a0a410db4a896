# SPDX-License-Identifier: Apache-2.0
"""Putting finders first on ``sys.meta_path``, taking them off, and proving that they are reached.

The rule of the process is one layer, and a block that forbids more is another; each goes when it ends, in any order.
"""

import itertools
import sys
from collections.abc import Collection
from types import ModuleType
from typing import cast

from nemo_rl_core.guard.finder import CANARY, CanaryError, GuardedMetaPath, GuardFinder
from nemo_rl_core.guard.policy import BlockRule

__all__ = ["give_back", "hide", "install", "is_first", "prove", "remove"]


def install(finder: GuardFinder) -> None:
    """Let this finder be asked before every other one; the layers that are there come next.

    Args:
        finder: The new layer.
    """
    path = sys.meta_path
    if isinstance(path, GuardedMetaPath):
        sys.meta_path = path.with_guards((finder, *(guard for guard in path.guards if guard is not finder)))
        return
    # Somebody may have copied the guarded list, so the layers below are found in it.
    layers = [other for other in path if isinstance(other, GuardFinder) and other is not finder and not other.is_closed]
    sys.meta_path = GuardedMetaPath((finder, *layers), path, previous=path)


def remove(finder: GuardFinder) -> None:
    """Take this layer off; with the last one the list is again the one that was there before.

    Args:
        finder: The layer. It has no opinion any more, wherever a copy of the list still holds it.
    """
    finder.close()
    path = sys.meta_path
    if not isinstance(path, GuardedMetaPath):  # somebody replaced the list; take the guard out of theirs
        path[:] = [other for other in path if other is not finder]
        return
    layers = tuple(guard for guard in path.guards if guard is not finder)
    if layers:
        sys.meta_path = path.with_guards(layers)
    else:
        path.previous[:] = path.plain()
        sys.meta_path = path.previous


def hide(finder: GuardFinder) -> None:
    """Take the packages that a block forbids out of ``sys.modules``, with all that is below them.

    Args:
        finder: The block's layer.
    """
    finder.hidden.update(_loaded(finder.policy.roots))
    for name in finder.hidden:
        sys.modules.pop(name, None)


def give_back(finder: GuardFinder) -> None:
    """Put back what a layer has hidden, before it is taken off, as if it had never been there.

    A layer that came later and forbids the same package saw none of it because this one had hidden it; it now takes
    over what is hidden, and puts it back in its turn. So a package is loaded again when the last such layer ends.

    Args:
        finder: The layer that ends.
    """
    later = _later_than(finder)
    for root in finder.policy.roots:
        hidden = {name: module for name, module in finder.hidden.items() if _root(name) == root}
        heir = next((other for other in later if root in other.policy.roots - other.granted), None)
        if isinstance(finder.policy, BlockRule):
            _end_of_block(root, hidden, heir)
        elif heir is not None:
            heir.hidden.update(hidden)
            for name in hidden:
                sys.modules.pop(name, None)
        else:
            # Where it is still denied; whoever has put something else there meant it.
            sys.modules.update({name: module for name, module in hidden.items() if sys.modules.get(name, 0) is None})
    finder.hidden.clear()


def _end_of_block(root: str, hidden: dict[str, ModuleType], heir: GuardFinder | None) -> None:
    """Put one package back as it was before a block; what the block has put in its place (a stub, say) goes with it."""
    if heir is not None and isinstance(heir.policy, BlockRule):
        for name in [name for name in heir.hidden if _root(name) == root]:
            del heir.hidden[name]  # put there in this block, and seen by the later one
        heir.hidden.update(hidden)
        return
    for name in _loaded({root}):
        del sys.modules[name]
    if heir is None:
        sys.modules.update(hidden)
        return
    # The process was armed within the block, where the package was absent, and it stays so while it is armed.
    heir.hidden.update(hidden)
    for name in hidden:
        sys.modules[name] = cast(ModuleType, None)


def _later_than(finder: GuardFinder) -> list[GuardFinder]:
    """Return the open layers that came after this one, oldest first."""
    path = sys.meta_path
    guards = path.guards if isinstance(path, GuardedMetaPath) else [g for g in path if isinstance(g, GuardFinder)]
    if finder not in guards:  # somebody replaced the list
        return []
    return [other for other in guards[: guards.index(finder)] if not other.is_closed][::-1]


def _root(name: str) -> str:
    return name.partition(".")[0]


def _loaded(roots: Collection[str]) -> dict[str, ModuleType]:
    """Return the modules of these packages that are loaded; None, by which ``record`` denies one, is no module."""
    found = {name: sys.modules.get(name) for name in list(sys.modules) if _root(name) in roots}
    return {name: module for name, module in found.items() if module is not None}


def is_first(finder: GuardFinder) -> bool:
    """Tell whether imports reach this finder before any that is no guard.

    Args:
        finder: The layer.
    """
    # The canary alone would not show a finder in front that knows the engine and not the canary.
    guards = itertools.takewhile(lambda other: isinstance(other, GuardFinder), sys.meta_path)
    if not any(guard is finder for guard in guards):
        return False
    try:
        __import__(CANARY)
    except CanaryError:
        return True
    except ImportError:
        return False
    raise AssertionError(f"{CANARY} exists")


def prove(finder: GuardFinder) -> None:
    """Prove that this finder is asked first; put it back where somebody replaced ``sys.meta_path``.

    Args:
        finder: The layer.

    Raises:
        RuntimeError: If imports are answered before the import system is asked.
    """
    path = sys.meta_path
    if not (isinstance(path, GuardedMetaPath) and finder in path.guards):
        install(finder)
    if not is_first(finder):
        raise RuntimeError(
            "the guard is not asked first although it was put first on sys.meta_path: something answers imports "
            "before the import system does (a replaced builtins.__import__?); remove it, or arm before it"
        )
