"""The connection of an actor that connects to its caller, as the caller uses it."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np

from overlord.errors import ActorLost, DataStall
from overlord.transport.server_connection import ServerConnection

# Bytes that may be queued for an actor: no limit. An event loop must not wait for a blocked actor;
# heartbeats detect it.
UNBOUNDED = 2**62

Call = tuple[int, bytes, list[np.ndarray]]


class InboundConnection:
    """The connection of one actor that connects to its caller.

    Calls made before it connects are queued. ``lock`` guards all fields, so that queued calls are
    sent first.
    """

    def __init__(self, actor: str) -> None:
        self.actor = actor
        self.lease_id = 0
        self.connection: ServerConnection | None = None
        self.connected = False  # whether the actor has ever connected
        self.rejected = ""  # why its data was refused; empty if it was not
        self.max_waiting_bytes = UNBOUNDED
        self.lock = threading.Lock()
        # reason and fault of the actor's end, while its earlier messages are still being read
        self.end: tuple[str, BaseException | None] | None = None
        self._queued: list[Call] = []
        self._queued_bytes = 0
        self._sent, self._sent_at = 0, time.monotonic()  # last known progress of the actor

    def attach(self, connection: ServerConnection) -> None:
        """Use ``connection`` for all calls, and send the queued ones. Call with the lock held."""
        # Messages of an actor are kept for long, so they are copied out of its segments.
        connection.max_held, connection.waits_for_segments = 0, False
        # ``send`` has its own limit, which the caller of an actor sees
        connection.max_queued_bytes = connection.max_queued = UNBOUNDED
        self.connection, self.connected = connection, True
        for call in self._queued:
            connection.send(call, timeout_s=0.0)
        self._queued.clear()
        self._queued_bytes = 0

    def send(self, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        """Send a call, or queue it until the actor connects.

        Raise ``DataStall`` if more than ``max_waiting_bytes`` would wait for the actor.
        """
        with self.lock:
            nbytes = len(header) + sum(column.nbytes for column in columns)
            self._check_waiting(nbytes)
            if self.connection is None:
                self._queued.append((number, header, columns))
                self._queued_bytes += nbytes
            else:
                with contextlib.suppress(ActorLost):  # the launcher reports how it ended
                    self.connection.send((number, header, columns), timeout_s=0.0)

    def _check_waiting(self, more: int) -> None:
        sent, waiting = 0, self._queued_bytes
        if self.connection is not None:
            sent, waiting = self.connection.sent_bytes, self.connection.queued_bytes
        if sent != self._sent or not waiting:
            self._sent, self._sent_at = sent, time.monotonic()
        if waiting and waiting + more > self.max_waiting_bytes:
            raise DataStall(
                f"actor {self.actor!r} to accept its calls", time.monotonic() - self._sent_at
            )
