# SPDX-License-Identifier: Apache-2.0
"""A virtual environment of its own, without nemo-rl-core, in which small packages lie as an installer leaves them."""

import os
import signal
import sysconfig
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.firewall import AuditReport, AuditRequest, ModuleResult, audit


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A virtual environment."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Installation":
        venv.create(folder, symlinks=True, with_pip=False)
        return cls(folder=folder)

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def site(self) -> Path:
        paths = {"base": str(self.folder), "platbase": str(self.folder)}
        return Path(sysconfig.get_path("purelib", "venv", vars=paths))

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def audit(
        self, package: str, *forbid: str, timeout_s: float = 30.0, jobs: int = 1, preload: tuple[str, ...] = ()
    ) -> AuditReport:
        return audit(
            AuditRequest(
                package=package,
                forbid=forbid or ("engine",),
                python=self.python,
                timeout_s=timeout_s,
                jobs=jobs,
                preload=preload,
            )
        )


def by_name(report: AuditReport) -> dict[str, ModuleResult]:
    return {result.name: result for result in report.results}


def end(pids: Iterable[int]) -> None:
    """End what a test has found running: it failed, and should not leave them behind as well."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie, which nobody but its parent can take away."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
