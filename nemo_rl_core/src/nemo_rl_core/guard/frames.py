# SPDX-License-Identifier: Apache-2.0
"""Who asked the import system: read from the stack of the asking thread."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from types import FrameType

from nemo_rl_core.guard.policy import FIRST_PARTY_ROOTS

__all__ = ["Asker", "identify", "is_asked_through", "is_probe"]

#: Code that imports on behalf of its caller; the caller is the one who asked.
_HELPERS = (
    "importlib_metadata",
    "pkg_resources",
    "pluggy",
    "stevedore",
    "lazy_loader",
    "cloudpickle",
    "ray.cloudpickle",
    "_pytest.monkeypatch",
)
_BOOTSTRAP = ("importlib._bootstrap", "_frozen_importlib")
_STDLIB = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120 - pathlib would double the start-up cost of the guard
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_CHAIN_LIMIT = 40


@dataclass(frozen=True, kw_only=True)
class Asker:
    """Whoever asked for a module.

    Attributes:
        module: ``__name__`` of the asking code.
        file: Its file.
        line: The line that asked, counted from 1.
        is_third_party: True for a package that is installed beside us and is neither ours nor the user's.
        chain: Module-level code on the stack, outermost first, the asking line last.
    """

    module: str
    file: str
    line: int
    is_third_party: bool
    chain: tuple[str, ...]

    @property
    def package(self) -> str:
        """Top-level name of the asking code."""
        return self.module.partition(".")[0]


def _name(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else "?"


def _file(frame: FrameType) -> str:
    """Return the file of the code; for code made by ``exec`` that of the module it runs in."""
    file = frame.f_code.co_filename
    if file.startswith("<") and not file.startswith("<frozen "):
        own = frame.f_globals.get("__file__")
        return own if isinstance(own, str) else file
    return file


def _is_importlib(frame: FrameType) -> bool:
    name = _name(frame)
    return name.startswith("importlib.") or name in ("importlib", "_frozen_importlib", "_frozen_importlib_external")


def _is_installed(file: str) -> bool:
    return any(folder in file for folder in _INSTALLED)


def _is_plumbing(frame: FrameType) -> bool:
    """Tell whether this frame only passes an import on: importlib, the standard library, a known helper."""
    file = _file(frame)
    if _is_importlib(frame) or file.startswith("<frozen "):
        return True
    name = _name(frame)
    if any(name == helper or name.startswith(helper + ".") for helper in _HELPERS):
        return True
    return file.startswith(_STDLIB) and not _is_installed(file)


def is_probe(frame: FrameType | None) -> bool:
    """Tell whether the import system was only asked if a module exists.

    ``importlib.util.find_spec``, ``pkgutil`` and a direct call of a finder are probes, and so is the import of a
    parent that ``find_spec("a.b")`` makes. ``runpy`` asks the same way but means to run the module: an import.

    Args:
        frame: The caller of the finder.
    """
    if frame is None or _name(frame) not in _BOOTSTRAP:
        return True  # somebody calls finders himself
    while frame is not None and _is_importlib(frame):
        is_find = frame.f_code.co_name in ("find_spec", "_find_spec_from_path", "find_loader")
        if is_find and _name(frame) in ("importlib", "importlib.util"):
            return frame.f_back is None or _name(frame.f_back) != "runpy"
        frame = frame.f_back
    return False


def _describe(frame: FrameType) -> str:
    code = frame.f_code
    where = _name(frame) if code.co_name == "<module>" else f"{_name(frame)}.{code.co_name}"
    return f"{where} ({code.co_filename}:{frame.f_lineno})"


def identify(frame: FrameType | None) -> Asker:
    """Find whoever asked for a module.

    Args:
        frame: The caller of the finder.

    Returns:
        The innermost code that is not plumbing; where there is nothing else, the outermost frame.
    """
    outermost = frame
    while frame is not None and _is_plumbing(frame):
        outermost, frame = frame, frame.f_back
    asker = frame or outermost
    if asker is None:
        return Asker(module="?", file="", line=0, is_third_party=False, chain=())
    chain = [_describe(asker)]
    step = asker.f_back
    while step is not None and len(chain) < _CHAIN_LIMIT:
        if step.f_code.co_name == "<module>" and not _is_plumbing(step):
            chain.append(_describe(step))
        step = step.f_back
    module, file = _name(asker), _file(asker)
    is_ours = module.partition(".")[0] in FIRST_PARTY_ROOTS
    return Asker(
        module=module,
        file=file,
        line=asker.f_lineno,
        is_third_party=_is_installed(file) and not is_ours,
        chain=tuple(reversed(chain)),
    )


def is_asked_through(frame: FrameType | None, roots: Collection[str]) -> bool:
    """Tell whether code of one of these packages is on the stack.

    Args:
        frame: The caller of the finder.
        roots: Top-level names.
    """
    while frame is not None:
        if _name(frame).partition(".")[0] in roots:
            return True
        frame = frame.f_back
    return False
