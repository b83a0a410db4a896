# SPDX-License-Identifier: Apache-2.0
"""The generation side of a refit: joins sessions, loads buckets into a live model, and guards its validity."""

import json
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol, runtime_checkable

import torch

from nemo_rl_core.errors import RefitError, RefitPeerLostError, RefitTimeoutError
from nemo_rl_core.refit import handshake
from nemo_rl_core.refit.deadline import Deadline
from nemo_rl_core.refit.digest import digests_of, set_digest
from nemo_rl_core.refit.handshake import Hello, Identity, Offer
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.packing import Bucket, Unpacker, cut
from nemo_rl_core.refit.rendezvous import StoreClient, StoreGoneError, StoreLinks, StoreSilentError, split_address
from nemo_rl_core.refit.report import Ack, RefitReport
from nemo_rl_core.refit.session import OPEN_KEY, Session
from nemo_rl_core.refit.settings import DEFAULT_SETTINGS, RefitSettings
from nemo_rl_core.refit.transaction import Outcome, OutcomeKind, WeightState, WeightStatus
from nemo_rl_core.refit.transport import GlooGroup

__all__ = ["RefitReceiver", "ShardedSink", "WeightSink"]

_OFFER_POLL_S = 0.01
_NUM_REMEMBERED_SESSIONS = 16


class _Loadable(Protocol):
    def manifest(self) -> Manifest:
        """Return what the live model expects, in wire names, shapes and dtypes; the order is the sender's to choose."""
        ...

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load complete tensors; they may be views that are only valid during the call."""
        ...

    def finish(self, version: int) -> None:
        """Run the post-load step, drop prefix and KV caches, then set the version.

        The receiver's ``require_valid`` stays shut until all ranks have acknowledged, so do not generate by this alone.
        """
        ...


class WeightSink(_Loadable, Protocol):
    """A live model as the receiver sees it: what the engine's side implements.

    All calls come on the thread that called ``receive``, in the order ``manifest``, ``load`` (once per bucket that
    completes a tensor), ``finish``, ``live_tensors``. An exception of any of them ends the refit on all ranks and is
    reported there with its type and text.
    """

    def live_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield every tensor of the manifest, read back from the live model in its wire layout, in any order."""
        ...


@runtime_checkable
class ShardedSink(_Loadable, Protocol):
    """A live model of which this rank may hold a share only, so that no whole tensor can be read back from it.

    The calls are those of a ``WeightSink``, with ``live_digests`` in place of ``live_tensors``.
    """

    def live_digests(self) -> Mapping[str, str]:
        """Return ``tensor_digest`` of every whole tensor of the manifest that is live here.

        It vouches for the live model as it is now: all that this rank holds is read back and compared with what arrived;
        one that only repeats the digests of what arrived would hide a load that went wrong.

        Raises:
            Exception: If what this rank holds is not its share of what arrived; it ends the refit.
        """
        ...


class RefitReceiver:
    """Takes part in refits as one receiving rank; outlives failures and restarts of the sender.

    A refusal in the handshake leaves weights, state and version as they are. Once the sender has begun to send, any
    failure leaves the weights invalid until a later refit completes. One thread uses it.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_receivers: int,
        settings: RefitSettings = DEFAULT_SETTINGS,
        role: str = "generation",
        device_id: str | None = None,
    ) -> None:
        """Describe this rank; nothing is connected yet.

        Args:
            rank: Receiving rank, from 1 to ``num_receivers``.
            num_receivers: Receiving ranks over all replicas.
            settings: Its ``rendezvous_timeout_s`` and ``silence_timeout_s`` hold until the handshake; the sender's after.
            role: What this process is for, as its peers name it.
            device_id: Opaque id of this rank's device; default ``cpu:<host>:<pid>``.

        Raises:
            ValueError: If the rank is out of range.
        """
        if not 1 <= rank <= num_receivers:
            raise ValueError(f"a receiving rank is from 1 to num_receivers={num_receivers}, got rank={rank}")
        self._num_receivers = num_receivers
        self._settings = settings
        self._me = Identity.here(role=role, rank=rank, device_id=device_id)
        self._status = WeightStatus()
        self._seen: deque[str] = deque(maxlen=_NUM_REMEMBERED_SESSIONS)
        self._links: StoreLinks | None = None

    @property
    def state(self) -> WeightState:
        """What the weights are."""
        return self._status.state

    @property
    def version(self) -> int | None:
        """Version of the weights, or None while they are not valid."""
        return self._status.version

    def require_valid(self) -> int:
        """Return the version of the weights; call it before generating.

        Raises:
            WeightsInvalidError: If no refit has completed since the weights became invalid; says the first cause.
        """
        return self._status.require_valid()

    def invalidate(self, cause: str) -> None:
        """Refuse to generate until the next refit, e.g. after the engine discarded its weights to sleep."""
        self._status.invalidate(cause)

    def close(self) -> None:
        """Declare the weights unusable and drop the connections; calling it twice is fine."""
        self._unlink()
        self._status.invalidate("the receiver was closed")

    def receive(
        self, address: str, sink: WeightSink | ShardedSink, *, expected_version: int | None = None
    ) -> RefitReport:
        """Take part in the sender's next refit.

        Args:
            address: ``host:port`` of the sender's listener.
            sink: The live model.
            expected_version: Version that the refit must give to the weights, or None to take any.

        Returns:
            The report, with this rank's acknowledgement only.

        Raises:
            RefitRefusedError: If the handshake found a difference; nothing was changed.
            RefitTimeoutError: If no refit was opened, or a deadline passed.
            RefitPeerLostError: If the sender or another rank died or fell silent.
            RefitError: If the refit failed otherwise. All ranks raise the same cause.
            ValueError: If the address is malformed.
        """
        started = time.monotonic()
        endpoint = split_address(address)
        text = self._await_offer(address, endpoint)
        protocol, session_id, version, sender = Offer.head_from_json(text)
        # An offer of another protocol number has no more than its head in common with ours.
        same = protocol == handshake.PROTOCOL_NUMBER
        settings = Offer.from_json(text).settings if same else self._settings
        self._seen.append(session_id)
        assert self._links is not None
        session = Session(
            self._links,
            session=session_id,
            version=version,
            me=self._me,
            owner=sender,
            silence_s=settings.silence_timeout_s,
        )
        attempt = _Attempt(session, sink, self._status)
        try:
            attempt.shake_hands(text, self._num_receivers, expected_version)
            report = attempt.take(started)
        except RefitError as error:
            if session.outcome is None:  # the sink raised it
                session.fail_by(error)
            self._fail(error.cause or str(error))
            raise
        except BaseException as error:
            failure = session.fail_by(error)
            self._fail(failure.cause)
            if isinstance(error, Exception):
                raise failure from error
            raise
        finally:
            attempt.close()
            if not (session.outcome and session.outcome.committed):
                # A connection may be stuck in a call; the next refit makes new ones.
                self._unlink()
        return report

    def _unlink(self) -> None:
        if self._links is not None:
            self._links.close()
            self._links = None

    def _linked(self, endpoint: tuple[str, int]) -> StoreClient:
        """Return a connection that works: one kept from the last refit may have been cut since."""
        if self._links is not None and self._links.address == endpoint:
            try:
                for client in (self._links.control, self._links.claims, self._links.heartbeat):
                    client.read(OPEN_KEY)
            except (StoreGoneError, StoreSilentError):
                self._unlink()
            else:
                return self._links.control
        self._unlink()
        self._links = StoreLinks(
            endpoint,
            connect_timeout_s=self._settings.rendezvous_timeout_s,
            answer_timeout_s=self._settings.silence_timeout_s,
        )
        return self._links.control

    def _fail(self, cause: str) -> None:
        if self._status.state is WeightState.UPDATING:
            self._status.invalidate(cause)

    def _await_offer(self, address: str, endpoint: tuple[str, int]) -> str:
        """Wait until the sender opens a refit that this receiver has not yet been in; returns the offer."""
        deadline = Deadline(self._settings.rendezvous_timeout_s)
        try:
            client = self._linked(endpoint)
            while True:
                text = client.read(OPEN_KEY)
                if text is not None and self._is_open(client, text):
                    return text
                if deadline.expired:
                    raise RefitTimeoutError(
                        f"a refit has to be opened within {deadline.seconds:.1f} s, but the sender at {address} opened "
                        "none: see what holds the trainer up, or raise rendezvous_timeout_s",
                        cause=f"the sender at {address} opened no refit within {deadline.seconds:.1f} s",
                        phase="rendezvous",
                        culprit=f"the sender at {address}",
                    )
                time.sleep(_OFFER_POLL_S)
        except StoreGoneError as error:
            raise _lost(f"the sender at {address} is gone: {error}", f"the sender at {address}", None) from error
        except StoreSilentError as error:
            cause = f"the sender at {address} has been silent for {self._settings.silence_timeout_s:.1f} s: {error}"
            raise _lost(cause, f"the sender at {address}", None) from error

    def _is_open(self, client: StoreClient, text: str) -> bool:
        session_id = Offer.head_from_json(text)[1]
        if session_id in self._seen:
            return False
        # A failed one is still announced to ranks that come late, so that they learn the cause.
        outcome = client.read(f"refit/{session_id}/outcome")
        return outcome is None or not Outcome.from_json(outcome).committed


def _lost(cause: str, culprit: str, version: int | None) -> RefitPeerLostError:
    which = "refit" if version is None else f"refit to version {version}"
    return RefitPeerLostError(
        f"{which} failed (rendezvous): {cause}. Get the address of a sender that runs, then refit again.",
        cause=cause,
        phase="rendezvous",
        culprit=culprit,
    )


class _Attempt:
    """One refit as a receiver goes through it."""

    def __init__(self, session: Session, sink: WeightSink | ShardedSink, status: WeightStatus) -> None:
        self._session = session
        self._sink = sink
        self._status = status
        self._manifest = Manifest(())
        self._settings = DEFAULT_SETTINGS
        self._group: GlooGroup | None = None

    def shake_hands(self, text: str, num_receivers: int, expected_version: int | None) -> None:
        """Accept the offer or refuse it in words, and connect."""
        session, me = self._session, self._session.me
        ended = session.ended()
        if ended is not None:
            raise ended.error(session.version)
        protocol = Offer.head_from_json(text)[0]
        if protocol != handshake.PROTOCOL_NUMBER:
            cause = f"{session.owner} speaks refit protocol {protocol} and {me} protocol {handshake.PROTOCOL_NUMBER}"
            raise session.fail(OutcomeKind.REFUSED, f"{cause}: install the same nemo-rl-core on both")
        offer = Offer.from_json(text)
        self._settings = offer.settings
        expected = self._sink.manifest()
        # Equal digests mean equal names, shapes, dtypes and order: then the sender's copy need not be fetched.
        same = offer.manifest_digest == expected.digest
        self._manifest = expected if same else Manifest.from_json(session.read_text("manifest") or "[]")
        differences = handshake.offer_differences(
            offer,
            self._manifest,
            me=me,
            expected=expected,
            expected_version=expected_version,
            num_receivers=num_receivers,
        )
        if differences:
            raise session.fail(OutcomeKind.REFUSED, "; ".join(differences))
        self._claim_rank(num_receivers)
        deadline = Deadline(offer.settings.rendezvous_timeout_s + offer.settings.silence_timeout_s)
        # The sender names who is missing; this rank's own deadline is the later one, for a sender that does not.
        late = f"{session.owner} did not let {me} go on within {deadline.seconds:.1f} s"
        session.wait(lambda: session.read("accept"), deadline, late=lambda: (late, session.owner))
        self._group = session.connect(1 + num_receivers, offer.settings, deadline)

    def _claim_rank(self, num_receivers: int) -> None:
        session, me = self._session, self._session.me
        hello = Hello(identity=me, nonce=secrets.token_hex(8))
        winner = Hello.from_json(session.set_once(f"hello/{me.rank}", hello.to_json()))
        if winner == hello:
            session.join()
            return
        cause = (
            f"receiving rank {me.rank} is claimed twice, by {winner.identity} and by {me}: "
            f"each receiver needs a rank of its own from 1 to {num_receivers}"
        )
        # Once all ranks are there a surplus process is no reason to end their refit.
        raise session.refuse_alone(cause) if session.read("accept") else session.fail(OutcomeKind.REFUSED, cause)

    def take(self, started: float) -> RefitReport:
        """Load what is sent, acknowledge it, and wait for the agreed end."""
        session, settings = self._session, self._settings
        session.phase = "transfer"
        slack_s = settings.transfer_timeout_s + settings.silence_timeout_s
        idle = Deadline(slack_s)
        late = f"{session.owner} opened the refit and did not begin to send within {slack_s:.1f} s"
        session.wait(lambda: session.read("begin"), idle, late=lambda: (late, session.owner))
        begun = time.monotonic()
        deadline = Deadline(slack_s)
        self._status.begin()
        buckets = cut(self._manifest, settings.bucket_bytes)
        num_bytes, num_tensors = self._load(buckets, deadline)
        session.phase = "finish"
        self._sink.finish(session.version)
        ack = self._acknowledge(num_bytes, num_tensors)
        late_end = f"{session.owner} did not end the refit within {slack_s:.1f} s"
        outcome = session.wait(session.ended, deadline, late=lambda: (late_end, session.owner))
        if not outcome.committed:
            raise outcome.error(session.version)
        self._status.commit(session.version)
        ended = time.monotonic()
        return RefitReport(
            version=session.version,
            num_bytes=num_bytes,
            num_tensors=num_tensors,
            num_buckets=len(buckets),
            seconds=ended - started,
            rendezvous_s=begun - started,
            transfer_s=ended - begun,
            digest=ack.digest,
            acks=(ack,),
        )

    def _load(self, buckets: tuple[Bucket, ...], deadline: Deadline) -> tuple[int, int]:
        """Load each bucket while the next one arrives; returns bytes and tensors loaded."""
        session, group = self._session, self._group
        assert group is not None
        size = max((bucket.num_bytes for bucket in buckets), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        unpacker = Unpacker(self._manifest)
        num_bytes = num_tensors = 0

        def late() -> tuple[str, Identity]:
            return f"the transfer did not end within {deadline.seconds:.1f} s", session.owner

        def start(index: int) -> object:
            if index >= len(buckets) or not buckets[index].num_bytes:
                return None
            return group.broadcast(buffers[index % 2][: buckets[index].num_bytes])

        arriving = start(0)
        for index, bucket in enumerate(buckets):
            if arriving is not None:
                session.settle(arriving, deadline, late=late)
            arriving = start(index + 1)
            tensors = unpacker.read(bucket, buffers[index % 2])
            if tensors:
                self._sink.load(tensors)
            num_bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
            num_tensors += len(tensors)
            # Where the sender's deadline passes, this tells it who was slow.
            session.set(f"progress/{session.me.rank}", str(index + 1))
        return num_bytes, num_tensors

    def _acknowledge(self, num_bytes: int, num_tensors: int) -> Ack:
        session = self._session
        digest = None
        if self._settings.digest:
            sink = self._sink
            digests = dict(sink.live_digests()) if isinstance(sink, ShardedSink) else digests_of(sink.live_tensors())
            digest = set_digest(self._manifest, digests)
            session.set_text(f"digests/{session.me.rank}", json.dumps(digests))
        session.phase = "acknowledge"
        ack = Ack(
            rank=session.me.rank,
            num_bytes=num_bytes,
            num_tensors=num_tensors,
            version=session.version,
            digest=digest,
        )
        session.set(f"ack/{ack.rank}", json.dumps(asdict(ack)))
        return ack

    def close(self) -> None:
        """Give up everything that belongs to this refit."""
        if self._group is not None:
            self._group.close()
        self._session.leave()
        self._session.close()
