# SPDX-License-Identifier: Apache-2.0
"""The vLLM generation worker: one engine, weights by refit, plain data in and out."""

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from nemo_rl_core import errors
from nemo_rl_core.errors import DataError, GenerationError, NemoRLError, RefitError
from nemo_rl_core.protocols.generation import Completion, GenerationRequest
from nemo_rl_core.protocols.settings import GenerationSettings
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_vllm.bounded import EngineProcesses
from nemo_rl_vllm.checks import check_settings
from nemo_rl_vllm.engine import EngineFolder, engine_arguments, engine_version, failure
from nemo_rl_vllm.engine_plugin import keep_weights_loadable

__all__ = ["VllmGenerationWorker"]


class VllmGenerationWorker:
    """One replica of the vLLM backend; a ``GenerationWorker``."""

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        """Start the engine with weights that no request gets to see.

        Args:
            settings: What to build; ``options`` is the section ``vllm_cfg``, checked by its schema.
            rank: Index of this replica.
            world_size: Number of replicas.
            local_rank: Index on its node.
            device: What the engine must compute on.

        Raises:
            BackendIncompatibleError: If no engine of the supported range is installed, or it is built for another device.
            ConfigError: If a key of ``vllm_cfg`` asks for something that is not there.
            ModelError: If config or tokenizer cannot be built.
            GenerationError: If the engine does not start.
        """
        self.settings = settings
        self.rank, self.world_size, self.local_rank, self.device = rank, world_size, local_rank, device
        # The driver has checked the same before; a worker may be built without one.
        check_settings(settings)
        self._num_ranks = int(settings.options.get("tensor_parallel_size", 1))
        self._version = engine_version()
        self._refit = RefitSettings(**settings.refit)
        self._llm: Any = None
        self._folder = EngineFolder(settings)
        self._processes = EngineProcesses()
        try:
            self._folder.set_environment(device)
            self._llm = self._guarded("start", self._start)
            self._processes.started()
            self._prepare()
        except BaseException:
            self.shutdown()
            raise

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Continue each prompt once, in the order of the requests.

        Raises:
            WeightsInvalidError: If no refit has completed since the weights became invalid.
            DataError: If a prompt is empty, leaves no room in the context, or asks for what needs a tokenizer.
            GenerationError: If the engine failed or refused a request.
        """
        version = self._weight_version()
        for index, request in enumerate(requests):
            self._check(index, request)
        if not requests:
            return []
        outputs = self._call("generate", lambda: self._run(requests))
        return [self._completion(output, version) for output in outputs]

    def num_receiving_ranks(self) -> int:
        """Return how many ranks the engine has."""
        return self._num_ranks

    def receive_weights(self, address: str) -> Mapping[str, Any]:
        """Take part in one refit with every rank of the engine; see ``GenerationWorker``.

        The prefix cache is emptied before: no request runs until the refit has ended, so nothing can fill it in between.
        """
        try:
            dropped = self._call("reset_prefix_cache", lambda: self._engine().reset_prefix_cache(), self._answer_s)
            reports = self._ask("nemo_rl_receive", address, bool(dropped), limit_s=self._longest_refit_s())
            self._agree(reports)
        except RefitError:
            raise
        except NemoRLError as error:
            who = f"generation worker {self.rank}"
            if isinstance(error, GenerationError) and error.rank >= 0:
                who = f"rank {error.rank} of the engine of {who}"
            raise RefitError(
                f"the engine failed during a refit: {error}", cause=str(error), phase="transfer", culprit=who
            ) from error
        return reports[0]

    def weights_digest(self) -> str:
        """Return the digest of the live weights, in the checkpoint's names and the order of the last refit."""
        digests = {report["digest"] for report in self._ask("nemo_rl_weights_digest")}
        if len(digests) != 1:
            raise self._broken("weights_digest", f"its {self._num_ranks} ranks hold different weights; refit again")
        return digests.pop()

    def describe(self) -> Mapping[str, str]:
        """Return what ``summary.json`` says of this worker."""
        return {
            "backend": "vllm",
            "engine_version": self._version,
            "interpreter": sys.executable,
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "device": self.device,
        }

    def shutdown(self) -> None:
        """Stop the engine and remove its folder; calling it twice is fine."""
        self._processes.close()
        llm, self._llm = self._llm, None
        core = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
        if core is not None and hasattr(core, "shutdown"):
            core.shutdown()
        self._folder.remove()

    # -- inside --------------------------------------------------------------------------------------------------

    def _start(self) -> Any:
        import vllm  # pyrefly: ignore[missing-import] - only in the engine's environment
        from vllm.platforms import current_platform  # pyrefly: ignore[missing-import] - only in the engine's environment

        if current_platform.device_type != self.device:
            raise errors.BackendIncompatibleError(
                f"{self._version} computes on {current_platform.device_type}, and this worker was given {self.device}; "
                "install a build for that device, or set generation's device"
            )
        if self.settings.kv_scales and current_platform.is_fp8_fnuz():
            raise errors.BackendIncompatibleError(
                f"{self._version} keeps FP8 here in the format fnuz, in which a scale means twice as much; set "
                "vllm_cfg.kv_cache_dtype to auto"
            )
        arguments = engine_arguments(self.settings, self._folder, rank=self.rank, device=self.device)
        if self.settings.fp8_weights is not None:
            # An engine in this process, or in a fork of it, runs vLLM's plugins no second time after another engine.
            keep_weights_loadable()
        return vllm.LLM(**arguments)

    def _prepare(self) -> None:
        """Make a receiver in each rank of the engine, and watch their processes from now on."""
        answers = self._ask(
            "nemo_rl_prepare",
            json.dumps(
                {
                    "num_ranks": self._num_ranks,
                    "first_rank": 1 + self.rank * self._num_ranks,
                    "num_receivers": self.world_size * self._num_ranks,
                    "refit": dict(self.settings.refit),
                    "kv_scales": list(self.settings.kv_scales),
                    "fp8_weights": list(self.settings.fp8_weights.cast if self.settings.fp8_weights else ()),
                    "graphs": self.device == "cuda" and not self.settings.options.get("enforce_eager", False),
                    "owner": f"{self.device}:{socket.gethostname()}:{os.getpid()}:generation-{self.rank}",
                }
            ),
        )
        pids = {rank: answer["pid"] for rank, answer in enumerate(answers)}
        self._guarded("prepare", lambda: self._processes.watch(pids))

    def _engine(self) -> Any:
        if self._llm is None:
            raise self._broken(
                "shutdown", f"the engine of generation worker {self.rank} is shut down; start a new worker"
            )
        return self._llm

    def _guarded(self, phase: str, act: Callable[[], Any]) -> Any:
        """Run a call into the engine; what it raises leaves as plain data."""
        try:
            return act()
        except NemoRLError:
            raise
        except Exception as error:  # noqa: BLE001 - the engine's boundary: whatever it is leaves as plain data
            raise failure(error, phase, self._version, self._folder, lost=self._processes.lost) from None

    def _broken(self, phase: str, words: str, *, rank: int = -1) -> GenerationError:
        """Return what this worker itself finds wrong with its engine."""
        where = f"{self._version}, rank {rank}" if rank >= 0 else self._version
        return GenerationError(f"{where} ({phase}): {words}", rank=rank, phase=phase, engine_version=self._version)

    def _call(self, phase: str, act: Callable[[], Any], limit_s: float | None = None) -> Any:
        """Call the running engine; ends also where the engine has died or does not answer in time."""
        self._engine()
        return self._guarded(phase, lambda: self._processes.call(act, limit_s=limit_s))

    def _ask(self, method: str, *arguments: Any, limit_s: float | None = None) -> list[dict[str, Any]]:
        """Call a method of the extension in every rank; raise the first error in rank order."""
        phase = method.removeprefix("nemo_rl_")
        texts = self._call(
            phase, lambda: self._engine().collective_rpc(method, args=arguments), limit_s or self._answer_s
        )
        answers = [json.loads(text) for text in texts]
        if len(answers) != self._num_ranks:
            raise self._broken(phase, f"{self._num_ranks} ranks were asked and {len(answers)} answered")
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise self._error_of(answer["error"], rank, phase)
        return answers

    def _error_of(self, fields: Mapping[str, str], rank: int, phase: str) -> NemoRLError:
        """Make the error again that a rank of the engine has put into plain data."""
        kind = getattr(errors, fields["type"], None)
        if isinstance(kind, type) and issubclass(kind, RefitError):
            return kind(
                fields["message"],
                cause=fields.get("cause", ""),
                phase=fields.get("phase", ""),
                culprit=fields.get("culprit", ""),
            )
        if isinstance(kind, type) and issubclass(kind, NemoRLError):
            return kind(fields["message"])
        error = self._broken(phase, f"{fields['type']}: {fields['message']}", rank=rank)
        error.type_name, error.remote_traceback = fields["type"], fields["traceback"]
        return error

    def _weight_version(self) -> int:
        """Return the version that every rank of the engine holds."""
        return self._agree(self._ask("nemo_rl_version"))

    def _agree(self, answers: Sequence[Mapping[str, Any]]) -> int:
        versions = {answer["version"] for answer in answers}
        if len(versions) != 1:
            cause = f"the ranks of the engine hold weights of different versions: {sorted(versions)}"
            self._ask("nemo_rl_invalidate", cause)
            raise errors.WeightsInvalidError(f"{cause}; refit again", cause=cause)
        return versions.pop()

    @property
    def _answer_s(self) -> float:
        """Seconds in which the engine must answer what needs no computing but a read of its weights."""
        return self._refit.transfer_timeout_s

    def _longest_refit_s(self) -> float:
        """Return when to give up on a refit; the ranks' own deadlines come first and say more."""
        refit = self._refit
        return 2 * (refit.rendezvous_timeout_s + refit.transfer_timeout_s + 4 * refit.silence_timeout_s)

    def _check(self, index: int, request: GenerationRequest) -> None:
        limit = self.settings.model.max_total_sequence_length
        if not request.prompt_ids:
            raise DataError(f"request {index} has an empty prompt; a prompt needs at least one token")
        if len(request.prompt_ids) >= limit:
            raise DataError(
                f"request {index} has a prompt of {len(request.prompt_ids)} tokens, which leaves no room in a context of "
                f"{limit}; shorten the prompt or raise policy.max_total_sequence_length"
            )
        if request.sampling.stop_strings and self.settings.options.get("skip_tokenizer_init"):
            raise DataError(
                f"request {index} has stop strings, which need the engine's tokenizer; take vllm_cfg.skip_tokenizer_init "
                "out"
            )

    def _run(self, requests: Sequence[GenerationRequest]) -> list[Any]:
        import vllm  # pyrefly: ignore[missing-import] - only in the engine's environment

        limit = self.settings.model.max_total_sequence_length
        params = []
        for request in requests:
            sampling = request.sampling
            params.append(
                vllm.SamplingParams(
                    max_tokens=min(sampling.max_new_tokens, limit - len(request.prompt_ids)),
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    seed=sampling.seed,
                    stop=list(sampling.stop_strings) or None,
                    stop_token_ids=list(sampling.stop_token_ids) or None,
                    # Only this request's own rules end it.
                    ignore_eos=True,
                    # The sampled token alone.
                    logprobs=0,
                    detokenize=bool(sampling.stop_strings),
                    # A stop string may be, or contain, a special token.
                    skip_special_tokens=False,
                    spaces_between_special_tokens=False,
                )
            )
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        outputs = self._engine().generate(prompts, params, use_tqdm=False)
        if len(outputs) != len(requests):
            raise RuntimeError(f"{len(requests)} requests gave {len(outputs)} results")
        return outputs

    def _completion(self, output: Any, version: int) -> Completion:
        (sample,) = output.outputs
        tokens = tuple(int(token) for token in sample.token_ids)
        if sample.finish_reason not in ("stop", "length"):
            raise self._broken("generate", f"a request ended with {sample.finish_reason!r}, not with stop or length")
        logprobs = tuple(float(step[token].logprob) for token, step in zip(tokens, sample.logprobs, strict=True))
        return Completion(
            token_ids=tokens, logprobs=logprobs, finish_reason=sample.finish_reason, weight_version=version
        )
