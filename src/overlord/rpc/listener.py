"""The listener for actors that connect to their caller.

An actor presents a token and its lease id. From then on it receives calls by that connection.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, OverlordError
from overlord.rpc.actors import ActorHandle
from overlord.rpc.server import open_reply
from overlord.rpc.timeouts import TIMEOUTS
from overlord.transport.server import Server
from overlord.transport.server_connection import ServerConnection

# Bytes that may be queued for an actor. An event loop must not wait for a stuck actor, which
# heartbeats detect.
UNBOUNDED = 2**62

Call = tuple[int, bytes, list[np.ndarray]]


class InboundConnection:
    """The connection of one actor that connects to its caller.

    Calls made before it connects are queued. ``lock`` guards all fields, so that queued calls are
    sent first.
    """

    def __init__(self) -> None:
        self.lease_id = 0
        self.connection: ServerConnection | None = None
        self.lock = threading.Lock()
        # reason and fault of its end, while the messages that it sent before are still read
        self.end: tuple[str, BaseException | None] | None = None
        self._queued: list[Call] = []

    def attach(self, connection: ServerConnection) -> None:
        """Use a connection and send the queued calls. Call with the lock held."""
        # Messages of an actor are kept for long, so they are copied out of its segments.
        connection.max_held, connection.waits_for_segments = 0, False
        connection.max_queued_bytes = UNBOUNDED
        self.connection = connection
        for call in self._queued:
            connection.send(call, timeout_s=0.0)
        self._queued.clear()

    def send(self, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        """Send a call, or queue it until the actor connects."""
        with self.lock:
            if self.connection is None:
                self._queued.append((number, header, columns))
            else:
                with contextlib.suppress(ActorLost):  # the launcher reports how it ended
                    self.connection.send((number, header, columns), timeout_s=0.0)


class InboundActor(Protocol):
    """The fields of an actor's record that a listener uses."""

    name: str
    handle: ActorHandle | None
    reason: str | None
    inbound: InboundConnection

    def complete_call(self, number: int, ok: bool, value: Any) -> None: ...


A = TypeVar("A", bound=InboundActor)
OnReply = Callable[[A, int, bytes, list[np.ndarray]], None]


def complete_call(
    record: InboundActor, number: int, header: bytes, columns: list[np.ndarray]
) -> None:
    """Complete the pending call that a reply belongs to."""
    record.complete_call(number, *open_reply(record.name, header, columns))


class ActorListener(Generic[A]):
    """A listener that accepts the connections of expected actors and receives their replies.

    ``on_hello`` receives the hello of an actor. ``on_disconnect(record, reason)`` reports the end
    of a connection whose process may still be alive. ``on_end(record)`` reports that an actor ended
    and all its messages were read. Callbacks run in the server's thread.
    """

    def __init__(
        self,
        platform: Platform,
        *,
        on_end: Callable[[A], None],
        on_disconnect: Callable[[A, str], None],
        on_reply: OnReply[A] = complete_call,
        on_hello: Callable[[A, Mapping[str, Any]], None] = lambda record, hello: None,
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self._on_end, self._on_disconnect = on_end, on_disconnect
        self._on_reply, self._on_hello = on_reply, on_hello
        self._lease_ids = itertools.count(1)
        self._expected: dict[int, A] = {}  # by lease id
        self._connected: dict[ServerConnection, A] = {}
        self._server = Server(
            token=self.token,
            on_open=self._opened,
            on_message=self._received,
            on_close=self._disconnected,
            **platform.inside(),
        )
        self.address = self._server.address

    @property
    def in_its_thread(self) -> bool:
        return self._server.in_its_thread

    def expect(self, record: A) -> int:
        """Expect an actor to connect, and return its new lease id.

        A former lease id of the actor becomes invalid.
        """
        self._expected.pop(record.inbound.lease_id, None)
        record.inbound.lease_id = next(self._lease_ids)
        self._expected[record.inbound.lease_id] = record
        return record.inbound.lease_id

    def find(self, lease_id: int) -> A | None:
        """Return the actor with this lease id, unless it has died."""
        return self._expected.get(lease_id)

    def died(self, lease_id: int, reason: str, fault: BaseException | None = None) -> None:
        """Record that the process of an actor exited, as its launcher reports.

        ``fault`` is the exception of its factory. Messages that it sent before still count.
        """
        if (record := self._expected.pop(lease_id, None)) is not None:
            with record.inbound.lock:
                record.inbound.end, connection = (reason, fault), record.inbound.connection
            if connection is None:
                self._on_end(record)
            else:
                # The end of the connection follows its last message. If its machine vanished, no
                # end arrives.
                after(
                    TIMEOUTS.death_notice_s,
                    lambda: connection.cut("its launcher reported that it is gone"),
                )

    def close(self, timeout_s: float) -> None:
        self._server.close(timeout_s)

    # in the server's thread

    def _opened(self, connection: ServerConnection, hello: Mapping[str, Any]) -> dict[str, Any]:
        name, lease_id, pid = hello.get("name"), hello.get("lease_id"), hello.get("pid")
        record = self._expected.get(lease_id) if type(lease_id) is int else None
        if record is None or record.name != name or type(pid) is not int:
            raise OverlordError(
                f"expected an actor with a valid lease id, got {name!r:.60} with lease id "
                f"{lease_id!r:.20}"
            )
        with record.inbound.lock:
            if record.inbound.connection is not None or record.reason is not None:
                raise OverlordError(
                    f"{record.name}: expected one connection with lease id {lease_id}, got "
                    "another, or the actor was given up"
                )
            assert record.handle is not None
            record.handle.pid = pid
            record.inbound.attach(connection)
        self._connected[connection] = record
        self._on_hello(record, hello)
        return {}

    def _received(self, connection: ServerConnection, value: Any) -> None:
        record = self._connected[connection]
        match value:
            case (int(number), bytes(header), list(columns)):
                self._on_reply(record, number, header, columns)
            case _:
                raise OverlordError(
                    f"expected a reply of {record.name}, got {type(value).__name__}"
                )

    def _disconnected(self, connection: ServerConnection, reason: str) -> None:
        record = self._connected.pop(connection)
        with record.inbound.lock:
            record.inbound.connection, died = None, record.inbound.end is not None
        if died:
            self._on_end(record)
        else:
            self._on_disconnect(record, reason)


def after(seconds: float, act: Callable[[], None]) -> None:
    """Call ``act`` after ``seconds`` in a daemon thread.

    A daemon thread does not delay the end of the program.
    """
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
