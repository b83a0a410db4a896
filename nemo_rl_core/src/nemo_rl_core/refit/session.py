# SPDX-License-Identifier: Apache-2.0
"""One rank's part in one refit: its heartbeat, the single outcome, and waits that always end.

Keys live under ``refit/<session>/``. The key ``outcome`` is written once, by compare-and-set: it holds either the
commit or the first cause of failure, so a refit cannot be both and every rank tells the same story. A failure that
a rank *causes or sees itself* (an exception, a difference, silence) is written at once. One that it only *suffers*
(a connection closed) first waits for somebody else's record.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from nemo_rl_core.errors import RefitError, text_of
from nemo_rl_core.refit.deadline import Deadline, RunningClock, SilenceMeter
from nemo_rl_core.refit.handshake import Identity
from nemo_rl_core.refit.rendezvous import (
    BoundedCaller,
    CallAbandonedError,
    StoreClient,
    StoreGoneError,
    StoreLinks,
    StoreSilentError,
    address_towards,
)
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.refit.transaction import Outcome, OutcomeKind
from nemo_rl_core.refit.transport import GlooGroup

__all__ = ["OPEN_KEY", "Session"]

#: Holds the offer of the refit that is open for receivers, or nothing.
OPEN_KEY = "refit/open"

T = TypeVar("T")

_POLL_S = 0.002
#: Characters of one value in the store, well below its limit also where each takes several bytes.
_PART_CHARS = 2**20
#: Characters of a cause; an engine's text can be of any length, and the store's values are not.
_LONGEST_CAUSE = 4000
_WORK_POLL_S = 0.0005
_HEARTBEATS_PER_LIMIT = 8
_LONGEST_HEARTBEAT_S = 0.25


class _Monitor:
    """The background thread of a rank: raises its heartbeat, reads the outcome, judges watched ranks."""

    def __init__(self, client: StoreClient, *, key: Callable[[str], str], rank: int, silence_s: float) -> None:
        self._client = client
        self._key = key
        self._rank = rank
        #: Whether the rank is this process's own by now, so that its heartbeat may be raised.
        self.joined = False
        self._silence_s = silence_s
        self._watched: dict[int, tuple[Identity, SilenceMeter]] = {}
        self._stop = threading.Event()
        #: Completed rounds; stands still while the store does not answer.
        self.rounds = 0
        #: Whether the store's process closed the connection.
        self.lost = False
        self.outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._run, name=f"refit-heartbeat-{rank}", daemon=True)
        self._thread.start()

    def watch(self, identity: Identity) -> None:
        """Judge that rank's heartbeat from now on."""
        # A new dict, since the thread iterates over the old one.
        self._watched = {**self._watched, identity.rank: (identity, SilenceMeter(self._silence_s))}

    def _run(self) -> None:
        interval = min(_LONGEST_HEARTBEAT_S, self._silence_s / _HEARTBEATS_PER_LIMIT)
        while not self._stop.wait(interval):
            try:
                self._round()
            except StoreGoneError:
                self.lost = True
                return
            except StoreSilentError:
                return  # `rounds` stands still, which is how the session's own thread sees it
            self.rounds += 1

    def _round(self) -> None:
        if self.joined:
            self._client.add(self._key(f"beat/{self._rank}"), 1)
        if self.outcome is not None:
            return
        text = self._client.read(self._key("outcome"))
        if text is not None:
            self.outcome = Outcome.from_json(text)
            return
        for rank, (identity, meter) in self._watched.items():
            if meter.is_silent(self._client.add(self._key(f"beat/{rank}"), 0)):
                claim = silent(identity, self._silence_s, "transfer")
                self.outcome = Outcome.from_json(self._client.set_once(self._key("outcome"), claim.to_json()))
                return

    def close(self) -> None:
        """Let the thread end; does not wait for it."""
        self._stop.set()


def silent(who: Identity, silence_s: float, phase: str) -> Outcome:
    """Return the outcome for a rank whose heartbeat stopped."""
    cause = f"{who} has been silent for {silence_s:.1f} s"
    return Outcome(kind=OutcomeKind.PEER_LOST, cause=cause, phase=phase, culprit=str(who))


class Session:
    """A rank's handle on the refit under way. Not for use from several threads, except ``decide``."""

    def __init__(
        self, links: StoreLinks, *, session: str, version: int, me: Identity, owner: Identity, silence_s: float
    ) -> None:
        """Start to watch the store.

        Args:
            links: Connections to the sender's store; they stay open.
            session: Id of this refit.
            version: Version that it gives to the weights.
            me: This rank.
            owner: The sender, whose process holds the store.
            silence_s: Seconds of silence after which a rank is lost.
        """
        self.version = version
        self.me = me
        self.owner = owner
        self.silence_s = silence_s
        self.phase = "handshake"
        self._address = links.address
        self._prefix = f"refit/{session}/"
        links.set_answer_timeout(silence_s)
        self._control, self._claims = links.control, links.claims
        self._monitor = _Monitor(links.heartbeat, key=self.key, rank=me.rank, silence_s=silence_s)
        self._own_meter = SilenceMeter(silence_s)
        self._own_clock = RunningClock(silence_s)
        self._decided: Outcome | None = None
        self._alone = False

    def key(self, name: str) -> str:
        """Return the store key of a name in this session."""
        return self._prefix + name

    def join(self) -> None:
        """Take this session's rank as this process's own: its heartbeat begins."""
        self._monitor.joined = True

    def watch(self, identity: Identity) -> None:
        """Judge that rank's heartbeat from now on; its silence fails the refit."""
        self._monitor.watch(identity)

    @property
    def outcome(self) -> Outcome | None:
        """How the refit ended, as far as this rank knows."""
        return self._decided or self._monitor.outcome

    def decide(self, outcome: Outcome) -> Outcome:
        """Write the outcome unless somebody has, and return the one that counts.

        Where the store does not answer, this rank's own record counts for it.
        """
        try:
            text = self._claims.set_once(self.key("outcome"), outcome.to_json())
        except (StoreGoneError, StoreSilentError):
            self._decided = self._monitor.outcome or outcome
        else:
            self._decided = Outcome.from_json(text)
        return self._decided

    def commit(self) -> Outcome:
        """Write that the refit has completed, unless it has failed, and return what counts.

        Unlike ``decide`` this needs the store's answer: nobody completes a refit alone.
        """
        text = self.set_once("outcome", Outcome(kind=OutcomeKind.COMMITTED).to_json())
        self._decided = Outcome.from_json(text)
        return self._decided

    def fail(self, kind: OutcomeKind, cause: str, *, culprit: Identity | str | None = None) -> RefitError:
        """Record a failure that this rank causes or sees itself, and return the error of the first cause.

        Args:
            kind: How it failed.
            cause: What happened, without the version.
            culprit: Who caused it; this rank where nothing is given.
        """
        culprit = self.me if culprit is None else culprit
        claim = Outcome(kind=kind, cause=cause[:_LONGEST_CAUSE], phase=self.phase, culprit=str(culprit))
        outcome = self.outcome or self.decide(claim)
        # Where all ranks have agreed that the refit is complete, what fails afterwards is this rank's own affair.
        return (claim if outcome.committed else outcome).error(self.version)

    def refuse_alone(self, cause: str) -> RefitError:
        """Return the error of a refusal that concerns this process only; the others go on."""
        self._alone = True
        self._decided = Outcome(kind=OutcomeKind.REFUSED, cause=cause, phase=self.phase, culprit=str(self.me))
        return self._decided.error(self.version)

    def fail_by(self, error: BaseException) -> RefitError:
        """Record an exception of this rank's own side."""
        return self.fail(OutcomeKind.FAILED, f"{self.me}: {type(error).__name__}: {text_of(error)}")

    def fail_derived(self, error: BaseException) -> RefitError:
        """Record a failure that this rank only suffers, after giving the one who caused it time to be recorded."""
        clock = RunningClock(self.silence_s)
        # A killed rank is found by its silence, so the grace has to be longer than that.
        while clock.read() < 1.5 * self.silence_s + 1.0:
            self.check()
            time.sleep(_POLL_S)
        text = str(error).splitlines()[0][:300]
        return self.fail(OutcomeKind.PEER_LOST, f"{self.me} lost a connection: {text}")

    def check(self) -> None:
        """Look for an end that others have made, and at the store's process.

        Raises:
            RefitError: If the refit has failed, the sender is gone, or it is silent.
        """
        self._own_clock.read()
        outcome = self.outcome
        if outcome is not None:
            if outcome.committed:
                return
            raise outcome.error(self.version)
        if self._monitor.lost:
            self._end_with(self._gone())
        elif self._own_meter.is_silent(self._monitor.rounds):
            self._end_with(silent(self.owner, self.silence_s, self.phase))

    def _gone(self) -> Outcome:
        cause = f"{self.owner} is gone"
        return Outcome(kind=OutcomeKind.PEER_LOST, cause=cause, phase=self.phase, culprit=str(self.owner))

    def _end_with(self, claim: Outcome) -> None:
        outcome = self.outcome or self.decide(claim)
        if not outcome.committed:
            raise outcome.error(self.version)

    def forget_own_gaps(self) -> None:
        """Start to measure whether this process itself stands still; ``check`` takes the readings."""
        self._own_clock = RunningClock(self.silence_s)

    def fail_if_asleep(self) -> None:
        """Refuse to go on after this process stood still for so long that the others gave it up.

        Raises:
            RefitError: In the words in which the others report it.
        """
        self._own_clock.read()
        if self._own_clock.longest_gap_s >= self.silence_s:
            self._end_with(silent(self.me, self.silence_s, self.phase))

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except StoreGoneError:
            claim = self._gone()
        except StoreSilentError:
            claim = silent(self.owner, self.silence_s, self.phase)
        raise (self.outcome or self.decide(claim)).error(self.version)

    def set(self, name: str, value: str) -> None:
        """Set a key of this session.

        Raises:
            RefitError: If the refit has failed or the store's process does not answer; so do all calls below.
        """
        self._ask(lambda: self._control.set(self.key(name), value, self.check))

    def set_once(self, name: str, value: str) -> str:
        """Set a key of this session unless somebody has, and return its value."""
        return self._ask(lambda: self._control.set_once(self.key(name), value, self.check))

    def read(self, name: str) -> str | None:
        """Return the value of a key of this session, or None."""
        return self._ask(lambda: self._control.read(self.key(name), self.check))

    def set_text(self, name: str, text: str) -> None:
        """Set a key of this session to a text of any length; the store itself refuses values above 8 MiB."""
        parts = [text[start : start + _PART_CHARS] for start in range(0, len(text), _PART_CHARS)]
        for index, part in enumerate(parts):
            self.set(f"{name}/{index}", part)
        self.set(name, str(len(parts)))

    def read_text(self, name: str) -> str | None:
        """Return what ``set_text`` set, or None."""
        count = self.read(name)
        if count is None:
            return None
        return "".join(self.read(f"{name}/{index}") or "" for index in range(int(count)))

    def announce(self, offer: str) -> None:
        """Open this session to receivers."""
        self._ask(lambda: self._control.set(OPEN_KEY, offer, self.check))

    def withdraw(self, names: Iterable[str], texts: Iterable[str]) -> None:
        """Close this session to receivers and remove what it set; never raises. The outcome stays readable.

        Args:
            names: Keys of this session.
            texts: Keys that ``set_text`` set.
        """
        try:
            keys = [self.key(name) for name in names]
            for name in texts:
                count = self._control.read(self.key(name))
                keys += [self.key(name), *(self.key(f"{name}/{index}") for index in range(int(count or 0)))]
            for key in (OPEN_KEY, *keys):
                self._control.delete(key)
        except (StoreGoneError, StoreSilentError):
            return

    def ended(self) -> Outcome | None:
        """Return the outcome as it is now, asking the store for it, or None while it is undecided."""
        if self.outcome is not None:
            return self.outcome
        try:
            text = self._control.read(self.key("outcome"), self.check)
        except StoreGoneError:
            return self.decide(self._gone())
        except StoreSilentError:
            return self.decide(silent(self.owner, self.silence_s, self.phase))
        if text is not None:
            self._decided = Outcome.from_json(text)
        return self._decided

    def connect(self, num_ranks: int, settings: RefitSettings, deadline: Deadline) -> GlooGroup:
        """Build the group for the broadcasts; every rank calls it.

        Raises:
            RefitTimeoutError: If the ranks did not connect before the deadline.
            RefitError: If the refit has failed otherwise.
        """
        self.phase = "rendezvous"
        caller = BoundedCaller("refit-connect")
        try:
            return caller.call(
                lambda: GlooGroup(
                    store=self._control.raw,
                    prefix=self.key("gloo"),
                    rank=self.me.rank,
                    size=num_ranks,
                    local_host=address_towards(self._address[0]),
                    connect_timeout_s=settings.rendezvous_timeout_s,
                    transfer_timeout_s=settings.transfer_timeout_s + settings.silence_timeout_s,
                ),
                timeout_s=deadline.remaining_s,
                check=self.check,
            )
        except CallAbandonedError as error:
            cause = f"{self.me} did not connect to all other ranks within {deadline.seconds:.1f} s"
            raise self.fail(OutcomeKind.TIMEOUT, cause) from error
        except RefitError:
            raise
        except RuntimeError as error:
            raise self.fail_derived(error) from error
        finally:
            caller.close()

    def settle(self, work: Any, deadline: Deadline, *, late: Callable[[], tuple[str, Identity | str | None]]) -> None:
        """Wait for one broadcast.

        Raises:
            RefitError: If the deadline passed, a connection was lost or the refit has failed otherwise.
        """
        self.wait(lambda: work.is_completed() or None, deadline, late=late, poll_s=_WORK_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.fail_derived(error) from error

    def wait(
        self,
        ready: Callable[[], T | None],
        deadline: Deadline,
        *,
        late: Callable[[], tuple[str, Identity | str | None]],
        poll_s: float = _POLL_S,
    ) -> T:
        """Poll until something is there.

        Args:
            ready: Returns it, or None.
            deadline: Until when to wait.
            late: Gives cause and culprit for the error when it has passed.
            poll_s: Seconds between two looks.

        Raises:
            RefitTimeoutError: If the deadline passed.
            RefitError: If the refit has ended otherwise.
        """
        while (value := ready()) is None:
            self.check()
            if deadline.expired:
                cause, culprit = late()
                who = str(culprit or self.me)
                self._end_with(Outcome(kind=OutcomeKind.TIMEOUT, cause=cause, phase=self.phase, culprit=who))
            time.sleep(poll_s)
        return value

    def wait_until_left(self, ranks: Iterable[int], *, grace_s: float) -> None:
        """Give other ranks a moment to read the outcome before the store may go away; never raises."""
        clock = RunningClock(self.silence_s)
        missing = set(ranks)
        while missing and clock.read() < grace_s:
            try:
                missing = {rank for rank in missing if self._control.read(self.key(f"left/{rank}")) is None}
            except (StoreGoneError, StoreSilentError):
                return
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """Say that this rank has read the outcome; never raises."""
        if self._alone:
            return
        try:
            self._claims.set(self.key(f"left/{self.me.rank}"), "1")
        except (StoreGoneError, StoreSilentError):
            return

    def close(self) -> None:
        """Stop the heartbeat; does not wait."""
        self._monitor.close()
