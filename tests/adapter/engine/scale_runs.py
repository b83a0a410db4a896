# SPDX-License-Identifier: Apache-2.0
"""Runs of ``scales_side.py``: one process of the engine's interpreter goes through the families, asked once for each.

As a module it prints the table of ``docs/fp8-scales.md``: ``python -m tests.adapter.engine.scale_runs``.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from nemo_rl_core.fp8.checkpoint_keys import ScaleConfig
from nemo_rl_core.fp8.model_description import ModelDescription
from nemo_rl_core.fp8.model_families import describe_model
from tests.adapter.engine.environment import engine_python
from tests.adapter.engine.live import environment
from tests.adapter.engine.scale_models import ARGUMENTS, NOT_RUN, QUANTIZATION, REMARKS, TINY, prompt_of, write

__all__ = ["ScaleRuns", "scale_of", "table"]

HERE = Path(__file__).parent


class ScaleRuns:
    """What live engines say of each family; every question is asked once."""

    def __init__(self, python: Path) -> None:
        """Start nothing yet.

        Args:
            python: The engine's interpreter.
        """
        self._python = python
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._models: dict[str, ModelDescription] = {}
        self._answers: dict[tuple[str, str], dict[str, Any]] = {}

    def model(self, architecture: str) -> ModelDescription:
        """Return what core says of the tiny model."""
        if architecture not in self._models:
            self._models[architecture] = describe_model(write(self._path(architecture, "plain"), architecture))
        return self._models[architecture]

    def by_set(self, architecture: str) -> dict[str, Any]:
        """Return the answer of ``scales_side.set_each``."""
        names = list(self.model(architecture).names(include_q=True))
        return self._once(
            architecture, "set_each", "plain", names=names, prompt=prompt_of(architecture), kv_cache_dtype="fp8"
        )

    def by_load(self, architecture: str) -> dict[str, Any]:
        """Return the answer of ``scales_side.load_each``, under every live name."""
        model = self.model(architecture)
        # A checkpoint's config decides, but not where the attention is built without it.
        return self._once(
            architecture,
            "load_each",
            "compressed-tensors",
            names=list(model.names(include_q=True)),
            prompt=prompt_of(architecture),
            kv_cache_dtype="fp8" if _only_set(model) else "auto",
        )

    def fates(self, architecture: str, config: ScaleConfig, keys: list[str]) -> dict[str, Any]:
        """Return the answer of ``scales_side.fates``."""
        model = self.model(architecture)
        names = [] if _only_set(model) else list(model.names(include_q=True))
        return self._once(architecture, "fates", config, names=names, keys=keys, kv_cache_dtype="fp8")

    def loaded(self, folder: Path) -> dict[str, Any]:
        """Return the answer of ``scales_side.loaded``."""
        return self._ask("loaded", {"folder": str(folder), "arguments": {"kv_cache_dtype": "fp8"}})

    def close(self) -> None:
        """End the process."""
        self._stop()
        self._folder.cleanup()

    def _path(self, architecture: str, config: str) -> Path:
        return Path(self._folder.name) / architecture / config

    def _once(
        self, architecture: str, what: str, config: str, *, kv_cache_dtype: str, **keywords: Any
    ) -> dict[str, Any]:
        key = (architecture, f"{what} {config}")
        if key not in self._answers:
            folder = self._path(architecture, config)
            write(folder, architecture, QUANTIZATION[config])
            arguments = {"kv_cache_dtype": kv_cache_dtype, **ARGUMENTS.get(architecture, {})}
            self._answers[key] = self._ask(what, {"folder": str(folder), "arguments": arguments, **keywords})
        return self._answers[key]

    def _ask(self, what: str, keywords: Mapping[str, Any], limit_s: float = 240.0) -> dict[str, Any]:
        pipe = self._pipe or self._start()
        pipe.send((what, dict(keywords)))
        try:
            if not pipe.poll(limit_s):
                raise TimeoutError(f"{what} took more than {limit_s} s")
            ok, answer = pipe.recv()
        except (EOFError, TimeoutError) as error:
            self._stop()  # the next family gets a process of its own
            raise RuntimeError(f"the engine's side is gone ({error!r}):\n{self._tail()}") from error
        if not ok:
            raise RuntimeError(f"{what} failed:\n{answer}")
        return answer

    def _start(self) -> Connection:
        address = str(Path(self._folder.name) / "socket")
        with Listener(address, family="AF_UNIX") as listener:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [str(self._python), str(HERE / "scales_side.py"), address],
                    env=environment(
                        VLLM_ENABLE_V1_MULTIPROCESSING="0",
                        # The engine drops the weights that it has packed otherwise, before they get numbers.
                        NEMO_RL_VLLM_KEEP_WEIGHTS="1",
                        VLLM_CPU_OMP_THREADS_BIND="nobind",
                        VLLM_NO_USAGE_STATS="1",
                    ),
                    stdout=log,
                    stderr=log,
                )
            self._pipe = listener.accept()
        return self._pipe

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(20)
        self._pipe = self._process = None

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def _only_set(model: ModelDescription) -> bool:
    return any(block.delivery == "set" for block in model.blocks)


def scale_of(copy: str) -> str:
    """Return the scale's live name for the name of one of its copies: ``a.b._k_scale_float`` gives ``a.b.k_scale``."""
    return re.sub(r"\._([qkv]|prob)_scale(?:_float|_cpu)?$", r".\1_scale", copy)


def table(runs: ScaleRuns) -> str:
    """Return the table of the docs, as Markdown, from what the engines said."""
    lines = [
        "| architecture | live module | layers | refit | load | logits react to k, v | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(runs, architecture) for architecture in TINY)])


def _row(runs: ScaleRuns, architecture: str) -> str:
    model, by_set, by_load = runs.model(architecture), runs.by_set(architecture), runs.by_load(architecture)
    names, cached = model.names(include_q=True), model.names()
    refit = "refused" if by_set["refused"] else f"{_arrived(by_set['changes'])} of {len(names)}"
    loaded = by_load["error"] is None and set(by_load["loaded"]) == set(names)
    load = f"{_arrived(by_load['changes'])} of {len(names)}" if loaded else "refused"
    # By the road that there is.
    changes = by_set["changes"] or by_load["changes"]
    react = f"{sum(changes[name]['reacts'] for name in cached)} of {len(cached)}"
    cells = (
        f"`{architecture}`",
        ", ".join(f"`{block.pattern.replace('.*.', '.N.')}`" for block in model.blocks),
        ", ".join(str(layer) for layer in model.blocks[0].layers),
        *(refit, load, "not run" if architecture in NOT_RUN else react),
        NOT_RUN.get(architecture) or REMARKS.get(architecture, ""),
    )
    return f"| {' | '.join(cells)} |"


def _arrived(changes: Mapping[str, Any]) -> int:
    """Return how many scales arrived in their own copies, all of them alike, and in no others."""
    return sum(
        {scale_of(copy) for copy in change["moved"]} == {name} and len(set(change["moved"].values())) == 1
        for name, change in changes.items()
    )


if __name__ == "__main__":
    _runs = ScaleRuns(engine_python())
    try:
        print(table(_runs))
    finally:
        _runs.close()
