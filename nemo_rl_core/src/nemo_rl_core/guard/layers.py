# SPDX-License-Identifier: Apache-2.0
"""Putting finders first on ``sys.meta_path``, taking them off, and proving that they are reached.

The rule of the process is one layer, and a block that forbids more is another; each goes when it ends, in any order.
"""

import itertools
import sys

from nemo_rl_core.guard.finder import CANARY, CanaryError, GuardedMetaPath, GuardFinder

__all__ = ["install", "is_first", "prove", "remove"]


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
