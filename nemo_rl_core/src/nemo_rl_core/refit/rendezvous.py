# SPDX-License-Identifier: Apache-2.0
"""The store that both sides meet in: a listener that its owner binds and keeps, and clients that never block.

Calls into torch's store can outlast their own timeouts when the process that holds the listener is stopped. Each
client therefore makes its calls on a thread of its own and gives up on that thread, not on the caller's deadline.
"""

import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, TCPStore

from nemo_rl_core.refit.deadline import RunningClock

__all__ = [
    "BoundedCaller",
    "CallAbandonedError",
    "StoreClient",
    "StoreGoneError",
    "StoreLinks",
    "StoreListener",
    "StoreSilentError",
    "address_towards",
    "join_address",
    "split_address",
]

T = TypeVar("T")

_STEP_S = 0.05
_CLAIM_ANSWER_S = 2.0


class CallAbandonedError(Exception):
    """A call did not return in time; its thread was given up."""


class StoreGoneError(Exception):
    """The store's process closed the connection, or none could be made."""


class StoreSilentError(Exception):
    """The store's process did not answer in time."""


class BoundedCaller:
    """Runs calls one after the other on a daemon thread, so that the caller's deadline holds whatever they do."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._abandoned = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            # Nothing that the call made may live on in this frame while the thread waits.
            del call

    def call(self, function: Callable[[], T], *, timeout_s: float, check: Callable[[], None] | None = None) -> T:
        """Run a function on the thread and wait for it.

        Args:
            function: What to run.
            timeout_s: Seconds that this process has to be running while the call does not return.
            check: Called often while waiting; what it raises ends the wait.

        Raises:
            CallAbandonedError: If it took too long, or an earlier call did.
            Exception: What the function raised.
        """
        if self._abandoned:
            raise CallAbandonedError("an earlier call on this thread never returned")
        done = threading.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001 - carried to the calling thread and raised there
                errors.append(error)
            done.set()

        self._calls.put(run)
        clock = RunningClock(2 * _STEP_S)
        try:
            while not done.wait(min(_STEP_S, timeout_s)):
                if clock.read() >= timeout_s:
                    raise CallAbandonedError(f"no answer within {timeout_s} s")
                if check is not None:
                    check()
        except BaseException:
            self._abandoned = True
            self.close()
            raise
        if errors:
            raise errors[0]
        return results[0]

    def close(self) -> None:
        """Let the thread end after the calls that are under way; does not wait for it."""
        self._calls.put(None)


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 host stands in brackets.

    Raises:
        ValueError: If it is not of that form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"a sender's address is host:port with a port from 1 to 65535, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Write ``host:port``, with brackets round an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_towards(host: str) -> str:
    """Return this machine's own address on the route to ``host``; no packet is sent.

    A name would be looked up, and often is a container's bridge or loopback (a peer then waits for ever).
    Falls back to loopback where there is no route at all.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


class StoreListener:
    """A TCPStore on a socket that this object bound itself and keeps: the port cannot be lost to another process."""

    def __init__(self, host: str) -> None:
        """Bind a free port on ``host`` and serve.

        Raises:
            OSError: If the host's address is not one of this machine's.
        """
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as bound:
            bound.bind((host, 0))
            bound.listen(1024)
            self.host = host
            self.port: int = bound.getsockname()[1]
            # The store's thread owns the descriptor from here on and closes it.
            descriptor = bound.detach()
        self._store: TCPStore | None = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )

    def close(self) -> None:
        """Stop serving; clients see their connection closed."""
        self._store = None


def _tcp_probe(host: str, port: int, timeout_s: float) -> None:
    # torch retries a refused connection until its timeout and then does not say which of the two it was.
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except TimeoutError as error:
        raise StoreSilentError(f"TCP reachable: no ({error})") from error
    except OSError as error:
        raise StoreGoneError(f"TCP reachable: no ({error})") from error


class StoreClient:
    """One connection to the store, with bounded calls. Keys and values are text."""

    def __init__(self, host: str, port: int, *, connect_timeout_s: float, answer_timeout_s: float) -> None:
        """Connect.

        Args:
            host: Host of the listener.
            port: Its port.
            connect_timeout_s: Seconds within which it has to be connected. torch looks the peer's name up when it
                connects, which takes 5 s on a host with broken reverse DNS.
            answer_timeout_s: Seconds within which each later call has to be answered.

        Raises:
            StoreGoneError: If nothing listens there.
            StoreSilentError: If no answer came in time.
        """
        self.answer_timeout_s = connect_timeout_s
        self._caller = BoundedCaller(f"refit-store-{port}")
        _tcp_probe(host, port, connect_timeout_s)
        self._store: Any = None
        limit = timedelta(seconds=connect_timeout_s)
        self._store = self._call(lambda: TCPStore(host, port, is_master=False, timeout=limit), None)
        self.answer_timeout_s = answer_timeout_s

    @property
    def raw(self) -> TCPStore:
        """Torch's own client, for the rendezvous of a process group; this object must not be used meanwhile."""
        return self._store

    def _call(self, function: Callable[[], T], check: Callable[[], None] | None) -> T:
        try:
            return self._caller.call(function, timeout_s=self.answer_timeout_s, check=check)
        except CallAbandonedError as error:
            raise StoreSilentError(str(error)) from error
        except DistError as error:
            raise StoreGoneError(str(error)) from error

    def set(self, key: str, value: str, check: Callable[[], None] | None = None) -> None:
        """Set a key. Raises as every call here: ``StoreGoneError``, ``StoreSilentError``, or what ``check`` does."""
        self._call(lambda: self._store.set(key, value), check)

    def read(self, key: str, check: Callable[[], None] | None = None) -> str | None:
        """Return the value of a key, or None where there is none yet."""
        value = self._call(lambda: self._store.get(key) if self._store.check([key]) else None, check)
        return None if value is None else value.decode()

    def add(self, key: str, amount: int, check: Callable[[], None] | None = None) -> int:
        """Raise a counter and return its value; a missing one counts from 0."""
        return self._call(lambda: self._store.add(key, amount), check)

    def set_once(self, key: str, value: str, check: Callable[[], None] | None = None) -> str:
        """Set a key unless somebody has, and return the value that it now has."""
        return self._call(lambda: self._store.compare_set(key, "", value), check).decode()

    def delete(self, key: str, check: Callable[[], None] | None = None) -> None:
        """Remove a key; a missing one is fine."""
        self._call(lambda: self._store.delete_key(key), check)

    def close(self) -> None:
        """Drop the connection once the calls under way have ended; does not wait."""
        self._caller.close()


class StoreLinks:
    """A rank's three connections to one store, kept from refit to refit.

    One waits while another is in use, and ``claims`` is always free, so that a record reaches even a stopped owner's
    socket and is read when it wakes.
    """

    def __init__(self, address: tuple[str, int], *, connect_timeout_s: float, answer_timeout_s: float) -> None:
        """Connect; raises what ``StoreClient`` raises."""
        self.address = address
        clients: list[StoreClient] = []
        try:
            for _ in range(3):
                client = StoreClient(*address, connect_timeout_s=connect_timeout_s, answer_timeout_s=answer_timeout_s)
                clients.append(client)
        except (StoreGoneError, StoreSilentError):
            for client in clients:
                client.close()
            raise
        self.control, self.claims, self.heartbeat = clients

    def set_answer_timeout(self, silence_s: float) -> None:
        """Set how long an answer may take before its owner counts as silent."""
        self.control.answer_timeout_s = silence_s
        self.claims.answer_timeout_s = min(_CLAIM_ANSWER_S, silence_s)
        self.heartbeat.answer_timeout_s = 4 * silence_s

    def close(self) -> None:
        """Drop the connections; does not wait."""
        for client in (self.control, self.claims, self.heartbeat):
            client.close()
