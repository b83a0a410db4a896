# SPDX-License-Identifier: Apache-2.0
"""Installed distributions as folders on sys.path: real metadata, real entry points, real imports."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(kw_only=True)
class Site:
    """A folder that stands for site-packages."""

    root: Path
    modules: list[str] = field(default_factory=list)

    def install(
        self,
        dist: str,
        entry_points: str,
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        group: str = "test.group",
        metadata: bool = True,
        **modules: str,
    ) -> None:
        """Write a distribution: `entry_points` are the lines of the group, `modules` its top-level modules."""
        info = self.root / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        if metadata:
            lines = ["Metadata-Version: 2.1", f"Name: {dist}", f"Version: {version}"]
            lines += [f"Requires-Dist: {requirement}" for requirement in requires]
            (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry_points}\n")
        for name, text in modules.items():
            (self.root / f"{name}.py").write_text(text)
            self.modules.append(name)
        importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = Site(root=tmp_path / "site")
    folder.root.mkdir()
    monkeypatch.syspath_prepend(str(folder.root))
    monkeypatch.delenv("NEMO_RL_PLUGINS_BLOCKED", raising=False)
    yield folder
    for name in folder.modules:
        sys.modules.pop(name, None)
