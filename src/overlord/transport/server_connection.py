"""The server's end of a connection.

Sending never blocks the server's thread. Received messages go to the server's callback.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from overlord.errors import DataStall, OverlordError
from overlord.transport.connection import CLOSED_HERE, SocketConnection
from overlord.transport.frame import BYE, OutgoingMessage
from overlord.transport.message_io import NOTHING
from overlord.transport.shared_memory import SharedMemoryPool
from overlord.transport.timeouts import TIMEOUTS

# send queue of one connection, in addition to the socket's buffer; one message may be larger
MAX_QUEUED_BYTES = 2**26
MAX_QUEUED = 1024


class ServerThread(Protocol):
    """The thread that serves the connections of a server, as one of them calls it."""

    @property
    def in_its_thread(self) -> bool:
        """Whether the caller is the server's thread."""

    def later(self, work: Callable[[], None]) -> None:
        """Queue a call of ``work`` in the server's thread; return at once."""

    def watch_writing(self, connection: ServerConnection) -> None:
        """Resume writing once the socket of a connection accepts more."""

    def watch_lingering(self, connection: ServerConnection) -> None:
        """Drop a closed connection once its queue is sent, or at its deadline."""

    def drop(self, connection: ServerConnection, reason: str) -> None:
        """End a connection without sending its queue. Idempotent."""


class ServerConnection(SocketConnection):
    """The server's end of one connection.

    Runs on: any thread. The server's thread sends the bytes that the socket does not accept at
    once.
    """

    def __init__(
        self, sock: socket.socket, peer: str, *, pool: SharedMemoryPool | None, server: ServerThread
    ):
        super().__init__(sock, peer, pool=pool, hangup=False)
        self._server = server
        self._drained = threading.Condition(self._lock)
        self._begun = False  # nothing may be sent before the welcome
        self._watched = False  # whether the server's thread waits for the socket to accept more
        self.linger_until = 0.0
        self.max_queued_bytes, self.max_queued = MAX_QUEUED_BYTES, MAX_QUEUED
        self.rejected = ""  # why received data was refused; empty if it was not

    @property
    def reason(self) -> str:
        """The reason why the connection ended; empty while it is open."""
        return self._lost or ""

    @property
    def waiting(self) -> bool:
        """Whether messages are queued for sending."""
        return len(self._send_buffer) > 0

    @property
    def queued_bytes(self) -> int:
        return self._send_buffer.nbytes

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that the socket has accepted; it grows while the peer reads."""
        return self._send_buffer.taken

    def send(self, value: Any, *, timeout_s: float = 60.0) -> None:
        """Queue a value for sending; wait while too many bytes or messages are queued.

        In the server's thread raise ``DataStall`` at once instead of waiting.
        """
        wait_s = 0.0 if self._server.in_its_thread else timeout_s
        self._wait_for_room(wait_s)
        self._enqueue(self._encode(value, wait_s))

    def recv(self, timeout_s: float, *, polled: bool = False) -> Any:
        raise OverlordError("recv: a server passes its messages to on_message; handle them there")

    def _wait_for_room(self, wait_s: float) -> None:
        moved, deadline = -1, 0.0
        with self._drained:
            while (
                self._send_buffer.nbytes > self.max_queued_bytes
                or len(self._send_buffer) > self.max_queued
            ):
                self._check()
                if self._send_buffer.taken != moved:
                    moved, deadline = self._send_buffer.taken, time.monotonic() + wait_s
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DataStall(
                        f"{self.peer} to accept {self._send_buffer.nbytes} bytes in "
                        f"{len(self._send_buffer)} messages",
                        wait_s,
                    )
                self._drained.wait(left)

    def _write(self) -> bool:
        if not self._begun:
            return False
        done = super()._write()
        if not done and not self._watched:
            self._watched = True
            self._server.later(lambda: self._server.watch_writing(self))
        return done

    # in the server's thread

    def begin(self, welcome: bytes) -> None:
        """Send the welcome, then all messages that were queued before it."""
        with self._lock:
            self._begun = True
            self._send_buffer.put(OutgoingMessage.raw(welcome), first=True)
            if self._lost is None or self.linger_until:
                self._try_write()

    def _try_write(self) -> bool:
        try:
            return self._write()
        except OverlordError:
            return True  # lost; the next read finds the end

    def resume_writing(self) -> bool:
        """Write to a socket that accepts more; return whether nothing is left to write.

        Nothing is left if all bytes are sent or the connection is lost.
        """
        with self._drained:
            done = self._try_write()
            self._watched = not done
            self._drained.notify_all()
            return done

    def receive(self, deliver: Callable[[Any], None]) -> bool:
        """Read once and deliver complete messages; after ``close``, drop them.

        Return False if the peer has closed.
        """
        try:
            self._read()
        except BlockingIOError:
            return True
        while self._receive_buffer.ready:
            value = self._decode_next()
            if value is not NOTHING and not self.linger_until:
                deliver(value)
        return not self._ended

    def has_arrived(self) -> bool:
        """Return whether data, or the end of the stream, has arrived and is not read yet."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def end(self, reason: str) -> None:
        """Close the socket at once, and wake blocked senders."""
        super().close(reason)
        with self._drained:
            self._drained.notify_all()

    def abandon(self) -> None:
        """Mark a refused connection as lost, but leave its socket open for the refusal."""
        with self._lock:
            self._lost = "it was refused"
            self._encoder.close()
            self._fileno = -1

    def cut(self, reason: str) -> None:
        """Drop the connection of a lost peer without sending its queue."""
        self._server.later(lambda: self._server.drop(self, reason))

    def close(self, reason: str = "") -> None:
        """Close after sending queued messages, for up to ``Timeouts.linger_s``.

        No received message is delivered afterwards.
        """
        with self._drained:
            if self._lost is not None or self.linger_until:
                return
            self._lost = f"{CLOSED_HERE}{': ' if reason else ''}{reason}"
            self._send_buffer.put(OutgoingMessage(BYE, [reason.encode()[:1024]]))
            self.linger_until = time.monotonic() + TIMEOUTS.linger_s
            self._try_write()
            self._drained.notify_all()
        self._server.later(lambda: self._server.watch_lingering(self))
