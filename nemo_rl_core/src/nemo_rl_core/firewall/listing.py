# SPDX-License-Identifier: Apache-2.0
"""What a package consists of, read without importing it: ``python -I listing.py FOLDER PACKAGE NAME...``.

A script for the audited interpreter, like ``observer``: any CPython from 3.9 on, the standard library only. Its answer
is a file of one literal, since an installation may print when its interpreter starts.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import pkgutil
import sys
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["LISTING", "main"]

#: The file in FOLDER.
LISTING = "listing"


def _contents(package: str) -> dict[str, Any]:
    """Find a package without importing it or one of its parents.

    Returns:
        ``problem`` (``""``, ``absent`` or ``empty``), ``missing`` (the part that is absent), ``siblings`` (names beside
        that part), ``modules`` below the package and ``skipped`` ones with the reason.
    """
    found: dict[str, Any] = {"problem": "", "missing": "", "siblings": [], "modules": [], "skipped": []}
    parts = package.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
    except ValueError:
        spec = None  # something in sys.modules without a spec, which is no installed package
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        if number > 1:
            locations = list(spec.submodule_search_locations or ()) if spec is not None else []
            found["siblings"] = sorted(_walk(name.rpartition(".")[0], locations, set(), depth=1)[0])
            spec = PathFinder.find_spec(name, locations) if locations else None
        if spec is None:
            return {**found, "problem": "absent", "missing": name}
    assert spec is not None
    locations = list(spec.submodule_search_locations or ())
    modules, skipped = _walk(package, locations, set())
    if not modules and spec.submodule_search_locations is not None and not spec.has_location:
        return {**found, "problem": "empty", "missing": package}
    return {**found, "modules": sorted(modules), "skipped": sorted(skipped)}


def _walk(
    package: str, folders: list[str], above: set[str], depth: int = 100
) -> tuple[set[str], list[tuple[str, str]]]:
    """Return the names of all modules under a package's folders, and what is skipped with the reason."""
    modules: set[str] = set()
    skipped: list[tuple[str, str]] = []
    for folder in folders:
        real = os.path.realpath(folder)
        if not Path(folder).is_dir():
            below, unused = _behind_a_hook(package, folder, depth)
            modules |= below
            skipped += unused
            continue
        if real in above:
            continue  # a link that leads back
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_file() and (stem := _stem(entry.name)) and stem != "__init__":
                reason = _reason_to_skip(stem, entry)
                if reason:
                    skipped.append((f"{package}.{stem}", reason))
                else:
                    modules.add(f"{package}.{stem}")
        for entry in entries:
            name = f"{package}.{entry.name}"
            if not entry.is_dir() or not entry.name.isidentifier() or entry.name == "__pycache__":
                continue
            is_package = any(_stem(below.name) == "__init__" for below in os.scandir(entry.path))
            if name in modules and not is_package:
                continue  # a module comes before a folder without an initialiser
            if depth > 1:
                below, unused = _walk(name, [entry.path], above | {real}, depth - 1)
                skipped += unused
                modules |= below | ({name} if below or is_package else set())
            else:
                modules.add(name)
    return modules, skipped


def _behind_a_hook(package: str, place: str, depth: int) -> tuple[set[str], list[tuple[str, str]]]:
    """Do the same for what is no folder: a part of a zip file, or a place that only its import hook understands."""
    modules: set[str] = set()
    skipped: list[tuple[str, str]] = []
    for found in pkgutil.iter_modules([place]):
        name = f"{package}.{found.name}"
        if reason := _reason_by_name(found.name):
            skipped.append((name, reason))
            continue
        modules.add(name)
        if found.ispkg and depth > 1:
            below, unused = _behind_a_hook(name, f"{place}/{found.name}", depth - 1)
            modules |= below
            skipped += unused
    return modules, skipped


def _stem(file: str) -> str:
    """Return the module name that a file name stands for; "" where it is no module."""
    for suffix in sorted(all_suffixes(), key=len, reverse=True):
        if file.endswith(suffix):
            return file[: -len(suffix)]
    return ""


def _reason_by_name(stem: str) -> str:
    if stem == "__main__":
        return "it is a program: it would run when it is imported"
    if not stem.isidentifier():
        return "its file name is no Python name, so no statement can import it"
    return ""


def _reason_to_skip(stem: str, entry: os.DirEntry[str]) -> str:
    if reason := _reason_by_name(stem):
        return reason
    if entry.name == f"{stem}.so":
        with Path(entry.path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(f"PyInit_{stem}".encode()) < 0:
                return "it is a shared library and no module: it has no PyInit function"
    return ""


def main(arguments: list[str]) -> None:
    """Run as a script.

    Args:
        arguments: The folder, the package, and the forbidden names.
    """
    folder, package, *forbidden = arguments

    def is_installed(name: str) -> bool:
        try:
            return importlib.util.find_spec(name.partition(".")[0]) is not None
        except ValueError:
            return True  # loaded when the interpreter started, by something that gave it no spec

    listing = {
        "version": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "stdlib": os.path.dirname(os.__file__),  # noqa: PTH120 - the form that code objects have
        "top_level": sorted({module.name for module in pkgutil.iter_modules()} | set(sys.builtin_module_names)),
        "installed": {name: is_installed(name) for name in forbidden},
        **_contents(package),
    }
    Path(folder, LISTING).write_text(ascii(listing), encoding="ascii")


if __name__ == "__main__":
    main(sys.argv[1:])
