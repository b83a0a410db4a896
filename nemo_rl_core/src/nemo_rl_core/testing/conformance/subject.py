# SPDX-License-Identifier: Apache-2.0
"""What the conformance suite is given, and what it gives back."""

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nemo_rl_core import plugins
from nemo_rl_core.errors import BackendBrokenError, DataError
from nemo_rl_core.protocols.generation import PROTOCOL_NUMBER, BackendSpec, GenerationWorker
from nemo_rl_core.protocols.settings import GenerationSettings
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.report import RefitReport
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.settings import RefitSettings

__all__ = ["MIN_CONTEXT", "Report", "Result", "Sender", "Subject", "Teacher", "installed_worker", "local_sender"]

#: Shortest context that leaves room for the suite's prompts and completions, in tokens.
MIN_CONTEXT = 32
#: Characters of a check's words in the table.
_WIDEST = 400


class Teacher(Protocol):
    """A model outside of the backend: its weights are sent, and its teacher-forced pass judges what comes back."""

    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return what a refit sends, under the names that the backend expects."""
        ...

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return float32 [S, V]: row i scores the token after ``ids[: i + 1]``; S is the number of ids."""
        ...


class Sender(Protocol):
    """The train side of a refit, as `RefitSender` is; one in another process is driven by a proxy with these names."""

    @property
    def address(self) -> str:
        """``host:port`` of its listener."""
        ...

    def send(self, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> RefitReport:
        """Do a whole refit.

        The iterable is read while the refit runs; in one check it raises at its end, after all tensors.

        Raises:
            RefitError: If the refit failed.
        """
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


def local_sender(num_receivers: int, settings: RefitSettings) -> Sender:
    """Return a sender in this process, for a worker on this machine."""
    return RefitSender(
        num_receivers=num_receivers, settings=settings, host="127.0.0.1", device_id="sender of the conformance suite"
    )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A backend as the suite tests it.

    Attributes:
        settings: What the worker is built with; its tokenizer and context length are used.
        make_worker: Builds the one worker that all checks share, or a proxy of one in another process. It must not have
            seen a refit yet.
        teachers: Two models of one shape, of which no two tensors are equal.
        make_sender: Makes the sender for a number of receiving ranks.
        tolerance: Largest allowed distance between a logprob and the teacher's, in nats.
        limit_s: Seconds that one call of the worker may take; building it is one.
    """

    settings: GenerationSettings
    make_worker: Callable[[], GenerationWorker]
    teachers: tuple[Teacher, Teacher]
    make_sender: Callable[[int, RefitSettings], Sender] = local_sender
    tolerance: float = 1e-4
    limit_s: float = 300.0

    def __post_init__(self) -> None:
        """Check what the checks rely on.

        Raises:
            DataError: If the context is too short, a number is out of its range, or the teachers share a tensor.
        """
        context = self.settings.model.max_total_sequence_length
        if context < MIN_CONTEXT:
            raise DataError(f"the suite needs a context of at least {MIN_CONTEXT} tokens, got {context}; raise it")
        for field in ("tolerance", "limit_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise DataError(f"{field} of a conformance subject must be finite and above 0, got {value!r}")
        first, second = (dict(teacher.tensors()) for teacher in self.teachers)
        if Manifest.from_tensors(first.items()).specs != Manifest.from_tensors(second.items()).specs:
            raise DataError("the two teachers must have tensors of the same names, shapes and types in the same order")
        same = [name for name, tensor in first.items() if tensor.numel() and torch.equal(tensor, second[name])]
        if same:
            raise DataError(
                f"no tensor may be equal in both teachers, or a refit that skips it would pass; {same[0]!r} is "
                f"({len(same)} in all); give them other weights"
            )


def installed_worker(name: str, settings: GenerationSettings, **keywords: Any) -> Callable[[], GenerationWorker]:
    """Return what builds a worker of an installed backend, found by its entry point as core finds it.

    Args:
        name: The backend's name.
        settings: What the worker is told.
        keywords: More arguments of the worker's class, e.g. ``device``.
    """

    def make() -> GenerationWorker:
        spec = plugins.load(name, expected_protocol=PROTOCOL_NUMBER)
        if not isinstance(spec, BackendSpec):
            raise BackendBrokenError(f"backend {name!r} must name a BackendSpec, got {type(spec).__name__}")
        module, _, attribute = spec.worker_class.partition(":")
        kind = getattr(importlib.import_module(module), attribute)
        return kind(settings, **{"rank": 0, "world_size": 1, "local_rank": 0, "device": "cpu", **keywords})

    return make


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one check found.

    Attributes:
        name: Name of the check.
        passed: Whether the backend behaves so.
        words: What was measured, or the rule and the value that breaks it.
    """

    name: str
    passed: bool
    words: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of all checks, in the order in which they ran.

    Attributes:
        results: One for each check, also for those that could not run: they did not pass.
        described: What the worker said of itself.
    """

    results: tuple[Result, ...]
    described: Mapping[str, str]

    @property
    def failed(self) -> frozenset[str]:
        """Names of the checks that did not pass."""
        return frozenset(result.name for result in self.results if not result.passed)

    def require(self, name: str) -> None:
        """Raise unless a check passed.

        Raises:
            AssertionError: If it did not; the message says what it found.
            KeyError: If there is no check of that name.
        """
        result = {result.name: result for result in self.results}[name]
        if not result.passed:
            raise AssertionError(f"{name}: {result.words}")

    def require_all(self) -> None:
        """Raise unless every check passed.

        Raises:
            AssertionError: If one did not; the message is the whole table.
        """
        if self.failed:
            raise AssertionError(f"{len(self.failed)} of {len(self.results)} checks did not pass\n{self.table()}")

    def table(self) -> str:
        """Return one line for each check; very long words are cut there."""
        width = max(len(result.name) for result in self.results)
        lines = []
        for result in self.results:
            words = " ".join(result.words.split())
            words = words if len(words) <= _WIDEST else f"{words[: _WIDEST - 3]}..."
            lines.append("  ".join((("ok" if result.passed else "FAILED").ljust(6), result.name.ljust(width), words)))
        return "\n".join(lines)
