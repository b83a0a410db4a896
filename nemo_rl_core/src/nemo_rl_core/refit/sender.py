# SPDX-License-Identifier: Apache-2.0
"""The train side of a refit: owns the listener, opens sessions, broadcasts buckets, counts acknowledgements."""

import json
import secrets
import threading
import time
from collections.abc import Container, Generator, Iterable
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch

from nemo_rl_core.errors import RefitError, RefitPeerLostError, StateError
from nemo_rl_core.refit import handshake
from nemo_rl_core.refit.deadline import Deadline
from nemo_rl_core.refit.digest import digest_of_bytes, first_difference, set_digest
from nemo_rl_core.refit.handshake import Hello, Identity, Offer
from nemo_rl_core.refit.manifest import Manifest, TensorSpec
from nemo_rl_core.refit.packing import Bucket, Packer, cut
from nemo_rl_core.refit.rendezvous import (
    StoreGoneError,
    StoreLinks,
    StoreListener,
    StoreSilentError,
    address_towards,
    join_address,
)
from nemo_rl_core.refit.report import Ack, RefitReport
from nemo_rl_core.refit.session import Session
from nemo_rl_core.refit.settings import DEFAULT_SETTINGS, RefitSettings
from nemo_rl_core.refit.transaction import Outcome, OutcomeKind
from nemo_rl_core.refit.transport import GlooGroup

__all__ = ["RefitSender"]

# A documentation address: routing to it picks the interface of the default route, and no packet is sent.
_ANYWHERE = "192.0.2.1"
_LINGER_S = 1.0


class _Opened:
    """A refit that is being opened, or that every receiver has accepted."""

    def __init__(self, session: Session, manifest: Manifest) -> None:
        self.session = session
        self.manifest = manifest
        self.receivers: dict[int, Identity] = {}
        self.group: GlooGroup | None = None
        self.rendezvous_s = 0.0


class RefitSender:
    """Sends weights to a fixed number of receiving ranks, as often as wanted. Lives in train rank 0.

    ``send`` does a whole refit. A trainer with several ranks calls ``open``, tells its other ranks "begin version N",
    and then ``transfer``. One thread uses it; ``abort`` may come from any.
    """

    def __init__(
        self,
        *,
        num_receivers: int,
        settings: RefitSettings = DEFAULT_SETTINGS,
        host: str | None = None,
        device_id: str | None = None,
    ) -> None:
        """Bind the listener.

        Args:
            num_receivers: Receiving ranks over all replicas, at least 1.
            settings: Sizes and deadlines; they rule on the receivers too.
            host: Address of this machine that receivers can reach; default: the one on the default route.
            device_id: Opaque id of this rank's device; default ``cpu:<host>:<pid>``.

        Raises:
            ValueError: If there is no receiver.
            OSError: If ``host`` is not an address of this machine.
        """
        if num_receivers < 1:
            raise ValueError(f"a refit needs at least 1 receiver to be a success, got num_receivers={num_receivers}")
        self._num_receivers = num_receivers
        self._settings = settings
        self._me = Identity.here(role="train", rank=0, device_id=device_id)
        self._listener: StoreListener | None = StoreListener(host or address_towards(_ANYWHERE))
        self._endpoint = (self._listener.host, self._listener.port)
        self._opened: _Opened | None = None
        self._links: StoreLinks | None = None
        self._busy = False
        #: What ended a refit between ``open`` and ``transfer``, with its version; ``transfer`` reports it.
        self._aborted: tuple[Outcome, int] | None = None
        self._opening = threading.Lock()
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """``host:port`` of the listener, for the receivers; whatever control plane there is carries it."""
        return join_address(*self._endpoint)

    def open(self, manifest: Manifest, version: int) -> None:
        """Bring all ranks together and compare what they expect; moves no byte.

        Args:
            manifest: What will be sent, in order.
            version: Version that the weights will get.

        Raises:
            RefitRefusedError: If a receiver differs; it keeps the weights that it has.
            RefitTimeoutError: If a rank is missing.
            RefitError: If the refit failed otherwise.
            StateError: If the sender is closed or a refit is open.
            ValueError: If the manifest is empty or the version is no integer from 0 on.
        """
        if self._listener is None:
            raise StateError("a closed RefitSender cannot open a refit: make a new one")
        if self._opened is not None:
            raise StateError(
                f"one refit at a time, but that to version {self._opened.session.version} is still open: "
                "transfer or abort it first"
            )
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"the version of a refit is an integer from 0 on, got {version!r}")
        if not len(manifest):
            raise ValueError("a refit moves at least one tensor, got an empty manifest: an empty one proves nothing")
        if not self._opening.acquire(blocking=False):
            raise StateError("one refit at a time, but another thread is opening one: wait for it")
        try:
            self._open(manifest, version)
        finally:
            self._opening.release()

    def _open(self, manifest: Manifest, version: int) -> None:
        """Do the work of ``open`` once its arguments are known to be good."""
        self._aborted = None
        started = time.monotonic()
        session_id = secrets.token_hex(8)
        session = Session(
            self._linked(),
            session=session_id,
            version=version,
            me=self._me,
            owner=self._me,
            silence_s=self._settings.silence_timeout_s,
        )
        opened = self._opened = _Opened(session, manifest)
        with self._attempt(opened):
            deadline = Deadline(self._settings.rendezvous_timeout_s)
            self._announce(opened, session_id)
            self._gather(opened, deadline)
            opened.group = session.connect(1 + self._num_receivers, self._settings, deadline)
        opened.rendezvous_s = time.monotonic() - started

    def transfer(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> RefitReport:
        """Send the tensors of the refit that is open, and wait until every receiver holds them.

        Args:
            tensors: Names and tensors in the manifest's order; checked against it while they are read. Each is read
                once, and may be reused by the source when the next is asked for. The source runs on this thread, so
                the deadlines bound the receivers while it works, and this call as soon as it yields.

        Returns:
            The report with one acknowledgement per receiving rank.

        Raises:
            RefitError: If the refit failed on any rank; the same cause is raised on all of them.
            StateError: If no refit is open.
        """
        opened = self._opened
        if opened is None and self._aborted is not None:
            outcome, version = self._aborted
            raise outcome.error(version)
        if opened is None:
            raise StateError("transfer needs an open refit: call open(manifest, version) first, or send")
        started = time.monotonic()
        buckets = cut(opened.manifest, self._settings.bucket_bytes)
        with self._attempt(opened):
            session = opened.session
            session.phase = "transfer"
            deadline = Deadline(self._settings.transfer_timeout_s)
            session.set("begin", "1")
            digests = self._broadcast(opened, buckets, tensors, deadline)
            session.phase = "acknowledge"
            session.forget_own_gaps()
            acks = self._acknowledged(opened, deadline)
            digest = self._verified(opened, acks, digests)
            session.fail_if_asleep()
            outcome = session.commit()
            if not outcome.committed:
                raise outcome.error(session.version)
        self._end(opened)
        transfer_s = time.monotonic() - started
        return RefitReport(
            version=session.version,
            num_bytes=opened.manifest.num_bytes,
            num_tensors=len(opened.manifest),
            num_buckets=len(buckets),
            seconds=opened.rendezvous_s + transfer_s,
            rendezvous_s=opened.rendezvous_s,
            transfer_s=transfer_s,
            digest=digest,
            acks=acks,
        )

    def send(self, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> RefitReport:
        """Do a whole refit: ``open``, then ``transfer``; raises what they raise."""
        self.open(manifest, version)
        return self.transfer(tensors)

    def abort(self, cause: str) -> None:
        """End the refit that is open, if there is one, on all ranks; may be called from any thread.

        Args:
            cause: Why; every rank reports it.
        """
        with self._lock:
            opened, busy = self._opened, self._busy
        if opened is None:
            return
        claim = Outcome(
            kind=OutcomeKind.FAILED,
            cause=f"{self._me} aborted the refit: {cause}",
            phase=opened.session.phase,
            culprit=str(self._me),
        )
        outcome = opened.session.decide(claim)
        if not busy:
            self._aborted = None if outcome.committed else (outcome, opened.session.version)
            self._end(opened)

    def close(self) -> None:
        """Abort an open refit and stop listening; calling it twice is fine."""
        self.abort("the sender was closed")
        if self._links is not None:
            self._links.close()
            self._links = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _attempt(self, opened: _Opened) -> Generator[None]:
        """Turn whatever goes wrong inside into the refit's one outcome, and end the refit."""
        with self._lock:
            self._busy = True
        try:
            yield
        except RefitError as error:
            if opened.session.outcome is None:  # the caller's own source raised it
                opened.session.fail_by(error)
            self._end(opened)
            raise
        except BaseException as error:
            failure = opened.session.fail_by(error)
            self._end(opened)
            if isinstance(error, Exception):
                raise failure from error
            raise
        finally:
            with self._lock:
                self._busy = False

    def _end(self, opened: _Opened) -> None:
        with self._lock:
            if self._opened is not opened:
                return
            self._opened = None
        if opened.group is not None:
            opened.group.close()
        outcome, silence_s = opened.session.outcome, self._settings.silence_timeout_s
        if outcome is not None and outcome.kind is OutcomeKind.REFUSED:
            # One rank's refusal can come before another rank has arrived, which should hear of it too.
            opened.session.wait_until_left(range(1, self._num_receivers + 1), grace_s=silence_s)
        else:
            opened.session.wait_until_left(opened.receivers, grace_s=min(_LINGER_S, silence_s))
        opened.session.withdraw(
            names=[f"{name}/{rank}" for rank in opened.receivers for name in ("hello", "progress", "ack")],
            texts=["manifest", *(f"digests/{rank}" for rank in opened.receivers)],
        )
        opened.session.close()
        # After a failure a connection may be stuck in a call; the next refit makes new ones.
        if self._links is not None and not (outcome and outcome.committed):
            self._links.close()
            self._links = None

    def _linked(self) -> StoreLinks:
        if self._links is None:
            settings = self._settings
            try:
                self._links = StoreLinks(
                    self._endpoint,
                    connect_timeout_s=settings.rendezvous_timeout_s,
                    answer_timeout_s=settings.silence_timeout_s,
                )
            except (StoreGoneError, StoreSilentError) as error:
                cause = f"{self._me} could not connect to its own store at {self.address}: {error}"
                raise RefitPeerLostError(
                    f"refit failed (rendezvous): {cause}. See whether this host can reach itself by that address (reverse "
                    "DNS that times out costs 5 s a connection), or raise rendezvous_timeout_s.",
                    cause=cause,
                    phase="rendezvous",
                    culprit=str(self._me),
                ) from error
        return self._links

    def _announce(self, opened: _Opened, session_id: str) -> None:
        session = opened.session
        offer = Offer(
            protocol=handshake.PROTOCOL_NUMBER,
            session=session_id,
            version=session.version,
            sender=self._me,
            facts=handshake.equal_facts(),
            num_receivers=self._num_receivers,
            manifest_digest=opened.manifest.digest,
            settings=self._settings,
        )
        session.join()
        session.set_text("manifest", opened.manifest.to_json())
        session.announce(offer.to_json())

    def _gather(self, opened: _Opened, deadline: Deadline) -> None:
        """Wait for every receiver's hello, compare the receivers with each other, and let them go on."""
        session, arrived = opened.session, opened.receivers

        def complete() -> bool | None:
            for rank in self._missing(arrived):
                text = session.read(f"hello/{rank}")
                if text is not None:
                    arrived[rank] = Hello.from_json(text).identity
                    session.watch(arrived[rank])
            return True if len(arrived) == self._num_receivers else None

        def late() -> tuple[str, str]:
            names = ", ".join(f"generation rank {rank}" for rank in self._missing(arrived))
            there = ", ".join(map(str, arrived.values())) or "nobody"
            return f"{names} did not arrive within {deadline.seconds:.1f} s; arrived: {there}", names

        session.wait(complete, deadline, late=late)
        session.phase = "handshake"
        shared = handshake.shared_devices([self._me, *(arrived[rank] for rank in sorted(arrived))])
        if shared:
            raise session.fail(OutcomeKind.REFUSED, "; ".join(shared))
        session.set("accept", "1")

    def _missing(self, found: Container[int]) -> list[int]:
        return [rank for rank in range(1, self._num_receivers + 1) if rank not in found]

    def _broadcast(
        self,
        opened: _Opened,
        buckets: tuple[Bucket, ...],
        tensors: Iterable[tuple[str, torch.Tensor]],
        deadline: Deadline,
    ) -> dict[str, str]:
        """Pack each bucket while the one before it travels; returns the digests of what was read, by name."""
        session, group = opened.session, opened.group
        assert group is not None
        packer = Packer(opened.manifest, tensors)
        size = max((bucket.num_bytes for bucket in buckets), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        works: list[Any] = [None, None]
        digests: dict[str, str] = {}

        def seen(spec: TensorSpec, flat: torch.Tensor) -> None:
            digests[spec.name] = digest_of_bytes(spec, flat)

        def late() -> tuple[str, str]:
            slow, loaded = self._slowest(opened)
            cause = f"the transfer did not end within {deadline.seconds:.1f} s: {slow} had loaded {loaded} of {len(buckets)} buckets"
            return cause, slow

        for index, bucket in enumerate(buckets):
            slot = index % 2
            if works[slot] is not None:
                session.settle(works[slot], deadline, late=late)
            packer.fill(bucket, buffers[slot], seen if self._settings.digest else None)
            session.check()
            works[slot] = group.broadcast(buffers[slot][: bucket.num_bytes]) if bucket.num_bytes else None
        packer.finish()
        for work in works:
            if work is not None:
                session.settle(work, deadline, late=late)
        return digests

    def _slowest(self, opened: _Opened) -> tuple[str, int]:
        """Return the receivers that are furthest behind, and how many buckets they have loaded."""
        loaded = {rank: int(opened.session.read(f"progress/{rank}") or 0) for rank in opened.receivers}
        least = min(loaded.values())
        return " and ".join(str(opened.receivers[rank]) for rank in sorted(loaded) if loaded[rank] == least), least

    def _acknowledged(self, opened: _Opened, deadline: Deadline) -> tuple[Ack, ...]:
        session = opened.session
        acks: dict[int, Ack] = {}

        def complete() -> bool | None:
            for rank in self._missing(acks):
                text = session.read(f"ack/{rank}")
                if text is not None:
                    acks[rank] = Ack(**json.loads(text))
            return True if len(acks) == self._num_receivers else None

        def late() -> tuple[str, str]:
            names = ", ".join(str(opened.receivers[rank]) for rank in self._missing(acks))
            return f"no acknowledgement within {deadline.seconds:.1f} s from {names}", names

        session.wait(complete, deadline, late=late)
        return tuple(acks[rank] for rank in sorted(acks))

    def _verified(self, opened: _Opened, acks: tuple[Ack, ...], digests: dict[str, str]) -> str | None:
        """Compare every acknowledgement with what was sent; returns the digest of the set."""
        session, manifest = opened.session, opened.manifest
        digest = set_digest(manifest, digests) if self._settings.digest else None
        for ack in acks:
            who = opened.receivers[ack.rank]
            for name, sent, got in (
                ("version", session.version, ack.version),
                ("tensors", len(manifest), ack.num_tensors),
                ("bytes", manifest.num_bytes, ack.num_bytes),
            ):
                if sent != got:
                    cause = f"{who} acknowledged {name} {got}, sent was {sent}"
                    raise session.fail(OutcomeKind.FAILED, cause, culprit=who)
            if digest != ack.digest:
                live = json.loads(session.read_text(f"digests/{ack.rank}") or "{}")
                first = first_difference(manifest, digests, live)
                cause = f"the live weights of {who} are not those that were sent; first differing tensor: {first!r}"
                raise session.fail(OutcomeKind.FAILED, cause, culprit=who)
        return digest
