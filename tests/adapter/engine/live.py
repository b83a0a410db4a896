# SPDX-License-Identifier: Apache-2.0
"""A live engine in another interpreter, the sender that refits it, and fresh engines to compare it with."""

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.errors import NemoRLError, RefitError
from nemo_rl_core.protocols.generation import Completion, GenerationRequest, SamplingParams
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.report import RefitReport
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.settings import RefitSettings
from tests.adapter.engine.checkpoints import CHARACTERS, CONTEXT, FAMILIES, Checkpoint
from tests.adapter.engine.environment import source_path

HERE = Path(__file__).parent
#: Small buckets, so that a model takes many of them and some tensors take several.
REFIT = {"bucket_bytes": 20_000, "rendezvous_timeout_s": 60.0, "transfer_timeout_s": 60.0}
NUM_TOKENS = 12

#: Two of them are longer than a block of the KV cache, and equal in their first one.
PROMPTS = (
    *(tuple(3 + (7 * row + k * (k + row) // 3) % 30 for k in range(5 + 30 * row)) for row in range(3)),
    tuple(3 + k * k % 31 for k in range(200)),
    (*(3 + k * k % 31 for k in range(160)), 5, 6, 7),
)


def settings(family: str, **options: Any) -> GenerationSettings:
    """Return what the worker is told; the driver's model has no checkpoint."""
    return GenerationSettings(
        model=ModelSettings(hf_config=FAMILIES[family], max_total_sequence_length=CONTEXT),
        tokenizer=TokenizerSettings(characters=CHARACTERS),
        seed=3,
        refit=REFIT,
        options={"enforce_eager": True, **options},
    )


def greedy(prompts: Sequence[Sequence[int]] = PROMPTS, **sampling: Any) -> list[GenerationRequest]:
    """Return one greedy request for each prompt."""
    params = SamplingParams(**{"max_new_tokens": NUM_TOKENS, "temperature": 0.0, **sampling})
    return [GenerationRequest(prompt_ids=tuple(prompt), sampling=params) for prompt in prompts]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process on the engine's side: its threads share two cores with the tests."""
    return {**os.environ, "PYTHONPATH": source_path(), "OMP_NUM_THREADS": "1", "NEMO_RL_ROLE": "generation", **more}


class LiveEngine:
    """A ``VllmGenerationWorker`` in a process of the engine's interpreter, and its refit sender in this one."""

    def __init__(
        self,
        python: Path,
        given: GenerationSettings,
        *,
        one_process: bool = False,
        variables: Mapping[str, str] | None = None,
        **keywords: Any,
    ) -> None:
        """Begin to start it; ``ready`` waits.

        Args:
            python: The engine's interpreter.
            given: What the worker is told.
            one_process: Keep the engine in the worker's process, which saves two imports of it (20 s each); with several
                ranks, those are its children then and not its grandchildren.
            variables: More of the process's environment.
            keywords: More arguments of the worker.
        """
        self._folder = tempfile.TemporaryDirectory()
        address = str(Path(self._folder.name) / "socket")
        self._log = Path(self._folder.name) / "log"
        self._listener = Listener(address, family="AF_UNIX")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(python), str(HERE / "engine_side.py"), address],
                # Faults are planted by functions, which vLLM takes over its own sockets only with this.
                env=environment(
                    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
                    VLLM_ENABLE_V1_MULTIPROCESSING="0" if one_process else "1",
                    **(variables or {}),
                ),
                stdout=log,
                stderr=log,
            )
        self._start = (given, {"rank": 0, "world_size": 1, "device": "cpu", **keywords})
        self._pipe: Connection | None = None
        self.num_ranks = int(given.options.get("tensor_parallel_size", 1))
        self.sender = RefitSender(num_receivers=self.num_ranks, settings=RefitSettings(**REFIT), host="127.0.0.1")
        self.version = -1
        #: What it answered to requests before any refit: completions or an error.
        self.before_any_refit: Any = None

    def restart(self, given: GenerationSettings) -> None:
        """Shut the worker down and start another one in the same process."""
        self.call("shutdown")
        _, keywords = self._start
        self.call("start", given, limit_s=480.0, **keywords)

    def ready(self, limit_s: float = 480.0) -> "LiveEngine":
        """Wait until the engine is up."""
        if self._pipe is None:
            self._pipe = self._listener.accept()
            given, keywords = self._start
            self._pipe.send(("start", (given,), keywords))
            self._answer(limit_s)
            try:
                self.before_any_refit = self.generate(greedy())
            except NemoRLError as error:
                self.before_any_refit = error
        return self

    def call(self, name: str, *arguments: Any, limit_s: float = 240.0, **keywords: Any) -> Any:
        """Call a method of the worker; raises what it raises."""
        assert self._pipe is not None, "call ready() first"
        self._pipe.send((name, arguments, keywords))
        return self._answer(limit_s)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Generate in the live engine."""
        return self.call("generate", requests)

    def refit(
        self,
        tensors: Mapping[str, torch.Tensor] | Checkpoint,
        *,
        source: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> tuple[RefitReport | RefitError, Any]:
        """Send tensors to the live engine; returns what each side says of it, a report or an error.

        Args:
            tensors: What is offered.
            source: What is sent, where that is something else.
        """
        if isinstance(tensors, Checkpoint):
            tensors = tensors.tensors
        manifest, items = Manifest.from_tensors(tensors.items()), tensors.items() if source is None else source
        self.version += 1
        sent: list[RefitReport | RefitError] = []

        def send() -> None:
            try:
                sent.append(self.sender.send(manifest, items, self.version))
            except RefitError as error:
                sent.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            received: Any = self.call("receive_weights", self.sender.address)
        except RefitError as error:
            received = error
        thread.join(120)
        return sent[0], received

    def plant(self, fault: str, *, rank: int | None = None) -> Any:
        """Plant a fault, one of ``faults``, in every rank of the engine or in one; returns what each says."""
        return self.call("plant", fault) if rank is None else self.call("plant", "on_rank", rank, fault)

    def heal(self) -> None:
        """Take all planted faults away."""
        self.call("plant", "heal")

    def close(self) -> None:
        """Stop the engine."""
        self.sender.close()
        if self._pipe is not None:
            self._pipe.close()
        self._listener.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
        self._folder.cleanup()

    def _answer(self, limit_s: float) -> Any:
        assert self._pipe is not None
        if not self._pipe.poll(limit_s):
            raise TimeoutError(f"the engine's side did not answer within {limit_s} s:\n{self._tail()}")
        try:
            ok, *rest = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the engine's side is gone:\n{self._tail()}") from None
        if ok:
            return rest[0]
        error, remote = rest
        error.add_note(remote)
        raise error

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]


class FreshEngines:
    """Fresh engines that load checkpoints from disk, in a process of their own beside the live one."""

    def __init__(
        self,
        python: Path,
        checkpoints: Sequence[Checkpoint],
        *,
        dtype: str = "float32",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Begin; ``completions`` waits.

        Args:
            python: The engine's interpreter.
            checkpoints: What each of them loads.
            dtype: Precision that they compute in; the head computes in float32.
            variables: More of the process's environment.
        """
        folders = [str(checkpoint.folder) for checkpoint in checkpoints]
        given = {"folders": folders, "prompts": PROMPTS, "tokens": NUM_TOKENS, "dtype": dtype}
        self._process = subprocess.Popen(
            [str(python), str(HERE / "fresh_side.py"), json.dumps(given)],
            # In one process, which imports the engine once; with the kernels that the live one has.
            env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", NEMO_RL_VLLM_KEEP_WEIGHTS="1", **(variables or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._answers: list[Any] | None = None

    def completions(self, limit_s: float = 480.0) -> list[list[tuple[list[int], list[float]]]]:
        """Return tokens and logprobs for each checkpoint and prompt."""
        if self._answers is None:
            out, err = self._process.communicate(timeout=limit_s)
            assert self._process.returncode == 0, err[-6000:]
            self._answers = json.loads(out.splitlines()[-1])
        return self._answers

    def close(self) -> None:
        """Stop them, if they still run."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate(timeout=30)
