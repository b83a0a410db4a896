# SPDX-License-Identifier: Apache-2.0
"""A folder of results that appears whole, in one step, or not at all; its place is tried before the work begins."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from nemo_rl_core.errors import DataError

__all__ = ["OutputFolder", "require_free_place"]


def require_free_place(out: Path, model: Path) -> None:
    """Refuse a place that holds something, cannot be replaced by a rename, or lies in the model's folder.

    Raises:
        DataError: If so; nothing is written.
    """
    shown = repr(str(out))
    try:
        is_link, place = out.is_symlink(), out.resolve()
        is_mount = os.path.ismount(place)
        filled = next(place.iterdir(), None) if place.exists() else None
    except OSError as error:
        raise DataError(f"the output {shown} must be a folder that can be written: {error.strerror}") from error
    if is_link:
        raise DataError(
            f"the output {shown} must not be a link, which a new folder would replace; give where it points to"
        )
    if place.is_relative_to(model.resolve()):
        raise DataError(f"the output folder {shown} must lie outside of the model's, which is not changed")
    if is_mount:
        raise DataError(f"the output {shown} must not be a mount point, which cannot be replaced; give a folder in it")
    if filled is not None:
        raise DataError(
            f"the output folder {shown} must be new or empty, so that nothing is overwritten; it holds {filled.name!r}"
        )


class OutputFolder:
    """A folder beside its final place, on the same file system."""

    def __init__(self, out: Path, holder: Path) -> None:
        """Keep the place; use ``claim``."""
        self._out = out
        self._holder = holder
        #: Where to write.
        self.folder = holder / "result"

    @classmethod
    @contextlib.contextmanager
    def claim(cls, out: Path) -> Generator["OutputFolder"]:
        """Make the folder; whatever this made and did not publish is removed in the end.

        Raises:
            DataError: If it cannot be made there.
        """
        place = out.resolve()
        made: list[Path] = []
        holder: OutputFolder | None = None
        try:
            try:
                for parent in reversed([parent for parent in place.parents if not parent.exists()]):
                    parent.mkdir()
                    made.append(parent)
                # Not the whole name, which may be as long as names may be.
                holder = cls(place, Path(tempfile.mkdtemp(prefix=f".{place.name[:40]}.partial-", dir=place.parent)))
                # A folder inside, since the outer one is for its owner alone.
                holder.folder.mkdir()
            except OSError as error:
                raise DataError(
                    f"the output folder {str(out)!r} cannot be made: {error}; give a place that can be written"
                ) from error
            yield holder
        finally:
            if holder is not None:
                holder.discard()
            for parent in reversed(made):
                # It stays where it holds the result, or something of others.
                with contextlib.suppress(OSError):
                    parent.rmdir()

    def publish(self) -> None:
        """Move the folder to its place. An empty folder there is replaced, one that was filled meanwhile is not.

        Raises:
            OSError: If that is impossible.
        """
        self.folder.rename(self._out)

    def discard(self) -> None:
        """Remove what was not published."""
        shutil.rmtree(self._holder, ignore_errors=True)

    def rescue(self, name: str, contents: str) -> Path | None:
        """Write a single file beside the place, never onto another; returns it, or None if that fails too."""
        path: Path | None = None
        try:
            handle, made = tempfile.mkstemp(prefix=f"{self._out.name[:40]}.", suffix=f".{name}", dir=self._out.parent)
            path = Path(made)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(contents)
        except OSError:
            if path is not None:
                path.unlink(missing_ok=True)
            return None
        return path
