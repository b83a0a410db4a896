# SPDX-License-Identifier: Apache-2.0
"""Drives one worker: every call has a deadline, and the version that the worker should hold is kept beside it."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from nemo_rl_core.data.tokenizers import build_tokenizer
from nemo_rl_core.errors import RefitError, text_of
from nemo_rl_core.protocols.generation import Completion, GenerationRequest, GenerationWorker, SamplingParams
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.report import RefitReport
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.testing.conformance.subject import Sender, Subject, Teacher
from nemo_rl_core.testing.conformance.teachers import logprob_gaps

__all__ = ["Bench", "Fault", "Silence", "need"]

#: Tokens of an ordinary completion.
NUM_TOKENS = 12
#: A refit is cut into at least so many buckets, about: where a source fails after its last tensor, the receiver holds
#: some of them already, since a sender packs no more than two ahead.
_NUM_BUCKETS = 8


class Fault(Exception):  # noqa: N818 - what a check finds is no error of the suite
    """The backend does not behave as the check wants it; the message says rule and value."""


class Silence(Exception):  # noqa: N818 - as above
    """A call did not return in time, so nothing more can be asked of the worker."""


def need(holds: bool, words: str) -> None:
    """Raise a `Fault` with these words unless the rule holds."""
    if not holds:
        raise Fault(words)


class _WorkerThread:
    """One thread for all calls of a worker: engines and receivers may be used by one thread only.

    It is a daemon, so that a worker that hangs does not keep the interpreter from ending.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="conformance-worker", daemon=True).start()

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._jobs.put((act, answer))
        return answer

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            act, answer = job
            try:
                value = act()
            except BaseException as error:  # noqa: BLE001 - it is raised again where the answer is waited for
                answer.set_exception(error)
            else:
                answer.set_result(value)


class Bench:
    """The worker under test, and what it should be at the moment.

    Attributes:
        teacher: The model whose weights the worker should hold; None before the first refit.
        version: The version that it should hold; None before the first refit.
        digest: The digest that its sender gave them; None before the first refit.
        kept: What checks leave for later ones, by name.
        errors: What the worker raised where it had to, from all checks so far.
    """

    def __init__(self, subject: Subject) -> None:
        """Take the subject; ``build`` makes the worker."""
        self.subject = subject
        self.context = subject.settings.model.max_total_sequence_length
        self.vocab = subject.teachers[0].logits([0]).shape[1]
        self.tokenizer = build_tokenizer(subject.settings.tokenizer)
        self.teacher: Teacher | None = None
        self.version: int | None = None
        self.digest: str | None = None
        self.kept: dict[str, Any] = {}
        self.errors: list[Exception] = []
        self._thread = _WorkerThread()
        self._worker: GenerationWorker | None = None
        self._sender: Sender | None = None

    # -- the worker ----------------------------------------------------------------------------------------------

    @property
    def worker(self) -> GenerationWorker:
        """The worker itself; calls go through ``call``."""
        assert self._worker is not None
        return self._worker

    def build(self) -> None:
        """Make the worker; raises what its maker raises."""
        self._worker = self._answer(self._thread.submit(self.subject.make_worker), "building the worker")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the worker and wait; raises what it raises.

        Raises:
            Silence: If it did not return in time.
        """
        return self._answer(self._thread.submit(lambda: getattr(self.worker, name)(*arguments)), name)

    def error_of(self, kinds: type[Exception] | tuple[type[Exception], ...], name: str, *arguments: Any) -> Exception:
        """Return the error that a call must raise.

        Raises:
            Fault: If it raises none, or one of another kind.
        """
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        wanted = " or ".join(kind.__name__ for kind in kinds)
        try:
            value = self.call(name, *arguments)
        except kinds as error:
            self.errors.append(error)
            return error
        except Silence:
            raise
        except Exception as error:  # whatever a backend raises, the report says what
            raise Fault(f"{name} must raise {wanted}, got {type(error).__name__}: {text_of(error)}") from error
        raise Fault(f"{name} must raise {wanted}, and returned {_short(value)}")

    def close(self) -> None:
        """Let the thread end and stop the sender; the worker is not touched."""
        self._thread.close()
        if self._sender is not None:
            self._sender.close()

    def _answer(self, answer: "Future[Any]", what: str) -> Any:
        try:
            return answer.result(self.subject.limit_s)
        except TimeoutError:
            if answer.done():  # the call itself raised it
                raise
            raise Silence(f"{what} did not return within {self.subject.limit_s:g} s") from None

    # -- refits --------------------------------------------------------------------------------------------------

    def refit(self, teacher: Teacher, version: int) -> tuple[RefitReport, Mapping[str, Any]]:
        """Send a teacher's weights; returns the sender's report and the worker's.

        Raises:
            RefitError: What the worker raised, or where it raised nothing, what the sender raised.
            Silence: If the worker did not return in time.
        """
        tensors = list(teacher.tensors())
        sent, received = self._transfer(Manifest.from_tensors(tensors), tensors, version)
        for outcome in (received, sent):
            if isinstance(outcome, BaseException):
                raise outcome
        self.teacher, self.version, self.digest = teacher, version, sent.digest
        return sent, received

    def broken_refit(self, teacher: Teacher, version: int) -> tuple[Any, Any]:
        """Send all tensors of a teacher and then fail; returns each side's report or error."""
        tensors = list(teacher.tensors())

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors
            raise RuntimeError("the trainer fails on purpose")

        return self._transfer(Manifest.from_tensors(tensors), source(), version)

    def unfitting_refit(self, teacher: Teacher, version: int) -> tuple[Any, Any]:
        """Offer a teacher's weights and one tensor more; returns each side's report or error."""
        tensors = [*teacher.tensors(), ("tensor.that.no.model.has", torch.zeros(3))]
        return self._transfer(Manifest.from_tensors(tensors), tensors, version)

    def _transfer(
        self, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> tuple[Any, Any]:
        """Let both sides do one refit; returns what each reports or raises."""
        sender = self._sender = self._sender or self._make_sender(manifest)
        address = sender.address
        answer = self._thread.submit(lambda: self.worker.receive_weights(address))
        try:
            sent: Any = sender.send(manifest, tensors, version)
        except RefitError as error:
            sent = error
        try:
            received = self._answer(answer, "receive_weights")
        except Silence:
            raise
        except Exception as error:  # noqa: BLE001 - of any kind: the check looks at it
            received = error
            self.errors.append(error)
        return sent, received

    def _make_sender(self, manifest: Manifest) -> Sender:
        """Make the sender of all refits, whose buckets are small: see `_NUM_BUCKETS`."""
        settings = RefitSettings(**self.subject.settings.refit)
        size = max(64, sum(spec.num_bytes for spec in manifest.specs) // _NUM_BUCKETS)
        settings = replace(settings, bucket_bytes=min(size, settings.bucket_bytes))
        return self.subject.make_sender(self.call("num_receiving_ranks"), settings)

    # -- requests ------------------------------------------------------------------------------------------------

    def prompt(self, length: int, salt: int = 0) -> tuple[int, ...]:
        """Return a prompt; another salt gives another one, from the first token on."""
        return tuple((salt * 5 + 3 + k * k * 7 + k * (salt + 2)) % self.vocab for k in range(length))

    def request(self, length: int, salt: int = 0, **sampling: Any) -> GenerationRequest:
        """Return a request for such a prompt; `NUM_TOKENS` tokens unless said otherwise."""
        fields: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, **sampling}
        params = SamplingParams(**fields)
        return GenerationRequest(prompt_ids=self.prompt(length, salt), sampling=params)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Generate, and see that there is a completion for each request.

        Raises:
            Fault: If there is not.
            Silence: If the worker did not return in time.
        """
        completions = self.call("generate", requests)
        need(isinstance(completions, list), f"generate must return a list, got {type(completions).__name__}")
        need(
            len(completions) == len(requests),
            f"generate must return one completion for each of {len(requests)} requests, got {len(completions)}",
        )
        for index, completion in enumerate(completions):
            kind = type(completion).__name__
            need(isinstance(completion, Completion), f"result {index} must be core's Completion, got {kind}")
        return completions

    def one(self, request: GenerationRequest) -> Completion:
        """Generate for one request."""
        return self.generate([request])[0]

    def teacher_logits(self, request: GenerationRequest, completion: Completion) -> torch.Tensor:
        """Return the teacher's logits float32 [N, V] before each of the completion's N tokens."""
        assert self.teacher is not None
        wrong = [token for token in completion.token_ids if not 0 <= token < self.vocab]
        need(not wrong, f"a token must be from 0 to {self.vocab - 1}, got {wrong[:3]}")
        need(bool(completion.token_ids), "a completion has at least one token, got none")
        ids = [*request.prompt_ids, *completion.token_ids]
        return self.teacher.logits(ids[:-1])[len(request.prompt_ids) - 1 :]

    def gap(self, request: GenerationRequest, completion: Completion) -> float:
        """Return the largest distance of a completion's logprobs from the teacher's, in nats."""
        tokens, logprobs = completion.token_ids, completion.logprobs
        need(len(tokens) == len(logprobs), f"{len(tokens)} tokens need as many logprobs, got {len(logprobs)}")
        return max(logprob_gaps(self.teacher_logits(request, completion), request.sampling, tokens, logprobs))

    def need_agreement(self, requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> str:
        """See that all logprobs are those of a teacher-forced pass; returns what was measured.

        Raises:
            Fault: If one is further away than the tolerance.
        """
        gaps = [self.gap(request, completion) for request, completion in zip(requests, completions, strict=True)]
        worst = max(range(len(gaps)), key=gaps.__getitem__)
        limit = self.subject.tolerance
        need(
            gaps[worst] <= limit,
            f"logprobs must be within {limit:g} nats of a teacher-forced pass, and those of request {worst} of {len(gaps)} "
            f"are {gaps[worst]:.3g} away ({requests[worst].sampling})",
        )
        return f"within {max(gaps):.2g} nats of a teacher-forced pass in {len(gaps)} completions"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
