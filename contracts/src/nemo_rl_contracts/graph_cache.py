# SPDX-License-Identifier: Apache-2.0
"""Whether grimp's cache may be trusted: it goes by the time of a file, and a file can change without its time.

Checkouts with fixed times, copies that keep them and restored caches do that. So the content of each file is kept beside
its time, and where the same time comes with another content the cache is thrown away.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["distrust_if_changed"]

_MANIFEST = "contents.json"


def distrust_if_changed(graph_cache: Path, packages: Iterable[Path], *, folder: Path) -> bool:
    """Throw grimp's cache away if a file has changed behind its time, or nothing is known of the files.

    Args:
        graph_cache: Where grimp keeps its results.
        packages: The folders of the packages that the graph is made from.
        folder: Where the contents are kept between runs.

    Returns:
        True if the cache was thrown away.
    """
    now = {path: _state(path) for package in packages for path in _files(package)}
    known = _read(folder / _MANIFEST)
    changed = any(
        known.get(path) is None or (known[path][0] == time and known[path][1] != digest)
        for path, (time, digest) in now.items()
    )
    if changed and graph_cache.is_dir():
        shutil.rmtree(graph_cache, ignore_errors=True)
    if any(known.get(path) != state for path, state in now.items()):
        _write(folder, {**known, **now})
    return changed


def _files(package: Path) -> Iterator[str]:
    for folder, _, names in os.walk(package.absolute(), followlinks=True):
        yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))  # noqa: PTH118 -- thousands


def _state(path: str) -> list:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 -- thousands of them, and a Path costs more than the reading
            time = os.fstat(file.fileno()).st_mtime_ns
            return [time, hashlib.blake2b(file.read(), digest_size=16).hexdigest()]
    except OSError:
        return [0, ""]  # whoever needs the file says what is wrong with it


def _read(path: Path) -> dict[str, list]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # absent or spoiled: nothing is known
    good = isinstance(data, dict) and all(isinstance(state, list) and len(state) == 2 for state in data.values())
    return data if good else {}


def _write(folder: Path, states: dict[str, list]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
        aside = folder / f"{_MANIFEST}.tmp"
        aside.write_text(json.dumps(states), encoding="utf-8")
        aside.replace(folder / _MANIFEST)
    except OSError:
        return  # a read-only checkout: then the cache is not trusted next time either
