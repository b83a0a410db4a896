# SPDX-License-Identifier: Apache-2.0
"""The errors that users meet: one root, and each is also the standard error that it specialises.

Every message says the rule, the value that broke it and the way out. All of them survive a pickle round trip,
so they can cross process boundaries: the message is the only positional argument, the fields are keyword-only
with defaults and travel in the instance's ``__dict__``.

``guard.ForbiddenImportError`` stands apart: the guard lies below this module and has to be importable alone.
"""

__all__ = [
    "BackendAbsentError",
    "BackendBlockedError",
    "BackendBrokenError",
    "BackendDuplicateError",
    "BackendError",
    "BackendIncompatibleError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "EnvironmentBuildError",
    "EnvironmentLookupError",
    "GenerationError",
    "ModelError",
    "NemoRLError",
    "RefitError",
    "RefitPeerLostError",
    "RefitRefusedError",
    "RefitTimeoutError",
    "RewardError",
    "ScaleNameError",
    "StateError",
    "UnknownBackendError",
    "WeightsInvalidError",
    "WorkerError",
    "WorkerTimeoutError",
    "text_of",
]


def text_of(error: BaseException) -> str:
    """Return an exception's message, also where its own ``__str__`` is broken: a foreign class may raise anything."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - whatever it is, the first error is the one to tell
        return f"<{type(error).__name__} whose text cannot be made: {type(broken).__name__}>"


class NemoRLError(Exception):
    """Root of the errors that this project raises on purpose."""

    def __init__(self, message: str) -> None:
        """Keep the message; subclasses add keyword-only fields with defaults."""
        super().__init__(message)


class ConfigError(NemoRLError, ValueError):
    """A config value breaks a rule; the message names the key."""


class DataError(NemoRLError, ValueError):
    """A prompt, a task or a batch breaks a rule."""


class ModelError(NemoRLError, ValueError):
    """A model folder or a model description cannot be used."""


class ScaleNameError(NemoRLError, ValueError):
    """An FP8 scale has a malformed name or an impossible value; the message names the key."""


class StateError(NemoRLError, RuntimeError):
    """A call came in a state that does not allow it."""


class BackendError(NemoRLError, ImportError):
    """A generation backend cannot be used."""


class UnknownBackendError(BackendError, LookupError):
    """No plugin of that name is installed."""


class BackendAbsentError(BackendError):
    """The distribution that brings the backend, or its engine, is not installed."""


class BackendIncompatibleError(BackendError):
    """The backend is installed in a version, or speaks a protocol, that does not fit."""


class BackendBrokenError(BackendError):
    """The backend is installed and fails to load; ``__cause__`` holds the reason."""


class BackendBlockedError(BackendError):
    """The backend is switched off by the user or by policy."""


class BackendDuplicateError(BackendError):
    """Two distributions register the same backend name."""


class EnvironmentLookupError(NemoRLError, LookupError):
    """No environment is registered for a worker class, or the one that is meant is not there."""


class EnvironmentBuildError(NemoRLError, RuntimeError):
    """An environment could not be built; the message holds the end of the builder's log."""


class ClusterError(NemoRLError, RuntimeError):
    """The Ray cluster cannot give what the config asks for."""


class WorkerError(NemoRLError, RuntimeError):
    """A worker failed.

    Attributes:
        worker: Name of the worker, e.g. ``policy-0``.
        rank: Its rank in the worker group.
        host: Host it ran on.
        phase: What it was doing: ``start`` or the method's name.
        cause_type: Type name of the remote exception.
        remote_traceback: The remote traceback as text.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str = "",
        rank: int = -1,
        host: str = "",
        phase: str = "",
        cause_type: str = "",
        remote_traceback: str = "",
    ) -> None:
        """Keep the message and the fields."""
        super().__init__(message)
        self.worker = worker
        self.rank = rank
        self.host = host
        self.phase = phase
        self.cause_type = cause_type
        self.remote_traceback = remote_traceback


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker did not answer before the deadline."""


class GenerationError(NemoRLError, RuntimeError):
    """An engine's exception as plain data, so that no engine is needed to unpickle it.

    Attributes:
        rank: Rank of the engine inside its worker that failed; -1 where it is not one alone, or not known which.
        phase: What the engine was doing: ``start``, ``generate``, ``receive``, ``reset_prefix_cache``, ...
        engine_version: Distribution and version of the engine, e.g. ``vllm 0.33.0``.
        type_name: Qualified name of the engine's exception type.
        remote_traceback: Its traceback, or the last lines of the engine's log, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        phase: str = "",
        engine_version: str = "",
        type_name: str = "",
        remote_traceback: str = "",
    ) -> None:
        """Keep the message and the fields."""
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.engine_version = engine_version
        self.type_name = type_name
        self.remote_traceback = remote_traceback


class RewardError(NemoRLError, RuntimeError):
    """A reward function raised; the message names task, sample and cause."""


class RefitError(NemoRLError, RuntimeError):
    """A refit failed. The receiver's weights are invalid until a full refit has completed.

    Attributes:
        cause: The first cause, in the same words on both sides.
        phase: ``rendezvous``, ``handshake``, ``transfer``, ``acknowledge`` or ``finish``.
        culprit: Who caused it, e.g. ``generation rank 1 (host a, pid 12)``.
    """

    def __init__(self, message: str, *, cause: str = "", phase: str = "", culprit: str = "") -> None:
        """Keep the message and the fields."""
        super().__init__(message)
        self.cause = cause
        self.phase = phase
        self.culprit = culprit


class RefitRefusedError(RefitError, ValueError):
    """The handshake found a difference; no byte was moved."""


class RefitTimeoutError(RefitError, TimeoutError):
    """A deadline passed; the message names who was missing and in which phase."""


class RefitPeerLostError(RefitError, ConnectionError):
    """A peer died or fell silent."""


class WeightsInvalidError(RefitError):
    """Generation was asked for while the weights are not those of one completed refit."""
