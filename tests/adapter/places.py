# SPDX-License-Identifier: Apache-2.0
"""Interpreters that hold what a test says: this one's packages, with other versions of some of them on record."""

import subprocess
import sys
import sysconfig
from pathlib import Path

__all__ = ["interpreter_with"]


def interpreter_with(folder: Path, **versions: str) -> Path:
    """Make a venv with this interpreter's packages, in which distributions have the given versions.

    Args:
        folder: Where the venv goes.
        **versions: Distribution, with ``_`` for ``-``, to the version that its metadata shall say.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "shared.pth").write_text("\n".join(entry for entry in sys.path if entry and Path(entry).is_dir()))
    for name, version in versions.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return folder / "bin" / "python"
