# SPDX-License-Identifier: Apache-2.0
"""How a refit ends, exactly once, and what state it leaves the weights in."""

import json
from dataclasses import asdict, dataclass
from enum import Enum

from nemo_rl_core.errors import (
    RefitError,
    RefitPeerLostError,
    RefitRefusedError,
    RefitTimeoutError,
    StateError,
    WeightsInvalidError,
)

__all__ = ["Outcome", "OutcomeKind", "WeightState", "WeightStatus"]


class OutcomeKind(Enum):
    """The ways in which a refit can end."""

    COMMITTED = "committed"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    PEER_LOST = "peer_lost"
    FAILED = "failed"


_ERRORS: dict[OutcomeKind, type[RefitError]] = {
    OutcomeKind.REFUSED: RefitRefusedError,
    OutcomeKind.TIMEOUT: RefitTimeoutError,
    OutcomeKind.PEER_LOST: RefitPeerLostError,
    OutcomeKind.FAILED: RefitError,
}
_WAYS_OUT = {
    OutcomeKind.REFUSED: "No byte was moved: make both sides agree, then refit again.",
    OutcomeKind.TIMEOUT: "See what held that rank up, or raise the deadline in RefitSettings, then refit again.",
    OutcomeKind.PEER_LOST: "Restart that process, then refit again.",
    OutcomeKind.FAILED: "Mend that, then refit again; receivers refuse to generate until then.",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The one end of a refit: the record that the first writer leaves for everybody.

    Attributes:
        kind: Committed, or how it failed.
        cause: The first cause, in the words that both sides report; empty when committed.
        phase: ``rendezvous``, ``handshake``, ``transfer``, ``acknowledge`` or ``finish``.
        culprit: Who caused it.
    """

    kind: OutcomeKind
    cause: str = ""
    phase: str = ""
    culprit: str = ""

    @property
    def committed(self) -> bool:
        """Whether the refit completed on every rank."""
        return self.kind is OutcomeKind.COMMITTED

    def to_json(self) -> str:
        """Write the record."""
        return json.dumps(asdict(self) | {"kind": self.kind.value})

    @classmethod
    def from_json(cls, text: str) -> "Outcome":
        """Read a record that ``to_json`` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"kind": OutcomeKind(fields["kind"])})

    def error(self, version: int | None) -> RefitError:
        """Return the error that tells of this failure; both sides build it from the same record."""
        assert not self.committed
        which = "refit" if version is None else f"refit to version {version}"
        return _ERRORS[self.kind](
            f"{which} failed ({self.phase}): {self.cause}. {_WAYS_OUT[self.kind]}",
            cause=self.cause,
            phase=self.phase,
            culprit=self.culprit,
        )


class WeightState(Enum):
    """What a receiver's weights are."""

    EMPTY = "empty"
    UPDATING = "updating"
    VALID = "valid"
    INVALID = "invalid"


_NEXT = {
    WeightState.EMPTY: {WeightState.UPDATING, WeightState.INVALID},
    WeightState.UPDATING: {WeightState.VALID, WeightState.INVALID},
    WeightState.VALID: {WeightState.UPDATING, WeightState.INVALID},
    WeightState.INVALID: {WeightState.UPDATING, WeightState.INVALID},
}


class WeightStatus:
    """State, version and reason of one receiver's weights, with checked transitions."""

    def __init__(self) -> None:
        """Begin with weights that nobody has sent."""
        self.state = WeightState.EMPTY
        self.version: int | None = None
        self.cause = "no refit has completed yet"

    def _move(self, state: WeightState) -> None:
        if state not in _NEXT[self.state]:
            allowed = ", ".join(sorted(s.value for s in _NEXT[self.state]))
            raise StateError(
                f"weights that are {self.state.value} can become {allowed}, not {state.value}: "
                "one receiver takes part in one refit at a time"
            )
        self.state = state

    def begin(self) -> None:
        """Note that bytes are about to be written.

        Raises:
            StateError: If a refit is under way already.
        """
        self._move(WeightState.UPDATING)
        self.version = None
        self.cause = "a refit is under way"

    def commit(self, version: int) -> None:
        """Note that every rank holds the version.

        Raises:
            StateError: If no refit is under way.
        """
        self._move(WeightState.VALID)
        self.version = version
        self.cause = ""

    def invalidate(self, cause: str) -> None:
        """Note that the weights are not those of one completed refit, and why; an earlier reason is kept."""
        if self.state is not WeightState.INVALID:
            self._move(WeightState.INVALID)
            self.cause = cause
        self.version = None

    def require_valid(self) -> int:
        """Return the version.

        Raises:
            WeightsInvalidError: If no refit has completed since the weights became invalid; says why.
        """
        if self.state is not WeightState.VALID or self.version is None:
            raise WeightsInvalidError(
                f"generation needs the weights of one completed refit, but they are {self.state.value}: {self.cause}. "
                "A full refit is needed",
                cause=self.cause,
            )
        return self.version
