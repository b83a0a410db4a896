# SPDX-License-Identifier: Apache-2.0
"""The folder that holds a run's files."""

import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.observability.metrics_logger import METRICS_FILE
from nemo_rl_core.observability.plain_json import dump_json

__all__ = ["RunFolder"]

_UNFIT_FOR_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MOST_RUNS_A_SECOND = 100


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A run's folder.

    Attributes:
        path: The folder; it exists.
    """

    path: Path

    @classmethod
    def create(
        cls, run_dir: str | Path | None, config_name: str, *, root: str | Path = "results", reuse: bool = False
    ) -> Self:
        """Make the folder.

        Args:
            run_dir: The folder, or None for ``<root>/<config name>/<local time>``, which is new always.
            config_name: Name of the config, e.g. its file's name; a path and a suffix ``.yaml`` are cut off.
            root: Parent of the folders that are named by time.
            reuse: Whether ``run_dir`` may hold files already.

        Raises:
            ConfigError: If ``run_dir`` is no folder, or holds files and ``reuse`` is false.
        """
        if run_dir is None:
            return cls(path=_new_folder(Path(root) / _folder_name(config_name)))
        path = Path(run_dir)
        try:
            path.mkdir(parents=True, exist_ok=True)
            filled = next(path.iterdir(), None)
        except OSError as error:
            raise ConfigError(f"run_dir must be a folder that can be written, got {str(path)!r}: {error}") from error
        if filled is not None and not reuse:
            raise ConfigError(
                f"run_dir must be new or empty, so that no run overwrites another; {str(path)!r} holds "
                f"{filled.name!r}. Name another folder, or set run_dir=null for results/<config name>/<time>"
            )
        return cls(path=path)

    @property
    def config_path(self) -> Path:
        """Path of the config as it was run."""
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """Path of the metrics, one JSON object a step."""
        return self.path / METRICS_FILE

    @property
    def summary_path(self) -> Path:
        """Path of the summary, written at the end."""
        return self.path / "summary.json"

    def write_config(self, yaml_text: str) -> Path:
        """Write ``config.yaml`` in one step: readers see the old text or the new, never a part.

        Args:
            yaml_text: The config, e.g. from ``config.load.dump_yaml``.
        """
        return _write_in_one_step(self.config_path, yaml_text)

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Write ``summary.json`` in one step; NaN and infinities become strings.

        Raises:
            TypeError: If a value is no plain data; the message names it and nothing is written.
        """
        return _write_in_one_step(self.summary_path, dump_json(summary, "summary", indent=2) + "\n")


def _folder_name(config_name: str) -> str:
    name = Path(config_name).name
    for suffix in (".yaml", ".yml"):
        name = name.removesuffix(suffix)
    return _UNFIT_FOR_A_NAME.sub("_", name).strip(".") or "run"


def _new_folder(parent: Path) -> Path:
    """Make a folder that is named by the local time; a number is appended where that name is taken."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, _MOST_RUNS_A_SECOND + 1):
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"the run's folder {str(path)!r} cannot be made: {error}; set run_dir") from error
        return path
    raise ConfigError(f"{str(parent)!r} already holds {_MOST_RUNS_A_SECOND} runs of {stamp}; set run_dir")


def _write_in_one_step(path: Path, text: str) -> Path:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; a run's files are as readable as its folder.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path
