"""The server's end of a connection.

Sending never blocks the server's thread. Received messages go to the server's callback.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlord.errors import DataStall, OverlordError
from overlord.transport.connection import CLOSED_HERE, SocketConnection
from overlord.transport.message_io import NOTHING
from overlord.transport.shared_memory import SharedMemoryPool
from overlord.transport.socket_io import BYE, OutgoingMessage
from overlord.transport.timeouts import TIMEOUTS

if TYPE_CHECKING:
    from overlord.transport.server import Server

# queue of one connection, in addition to the socket's buffer; a single message may be larger
MAX_QUEUED_BYTES = 2**26
MAX_QUEUED = 1024


class ServerConnection(SocketConnection):
    """A connection of a server. Runs on: any thread.

    The server's thread sends the bytes that the socket does not accept at once.
    """

    def __init__(
        self, sock: socket.socket, peer: str, *, ring: SharedMemoryPool | None, server: Server
    ):
        super().__init__(sock, peer, ring=ring, hangup=False)
        self._server = server
        self._drained = threading.Condition(self._lock)
        self._begun = False  # nothing may be sent before the welcome
        self._watched = False  # whether the server's thread waits for the socket to accept more
        self.linger_until = 0.0
        self.max_queued_bytes = MAX_QUEUED_BYTES

    @property
    def reason(self) -> str:
        """The reason why the connection ended."""
        return self._lost or ""

    @property
    def waiting(self) -> bool:
        """Whether messages are queued for sending."""
        return len(self._send_buffer) > 0

    @property
    def queued_bytes(self) -> int:
        return self._send_buffer.nbytes

    def send(self, value: Any, *, timeout_s: float = 60.0) -> None:
        """Send a value; wait while too many bytes are queued.

        In the server's thread raise ``DataStall`` at once instead of waiting.
        """
        wait_s = 0.0 if self._server.in_its_thread else timeout_s
        self._wait_for_room(wait_s)
        self._enqueue(self._encode(value, wait_s))

    def recv(self, timeout_s: float, *, looked: bool = False) -> Any:
        raise OverlordError("recv: a server passes its messages to on_message; handle them there")

    def _wait_for_room(self, wait_s: float) -> None:
        moved, deadline = -1, 0.0
        with self._drained:
            while (
                self._send_buffer.nbytes > self.max_queued_bytes
                or len(self._send_buffer) > MAX_QUEUED
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
        """Write to a socket that accepts more; return whether all queued bytes are sent."""
        with self._drained:
            done = self._try_write()
            self._watched = not done
            self._drained.notify_all()
            return done

    def receive(self, deliver: Callable[[Any], None]) -> bool:
        """Read once and deliver complete messages. Return False once the peer has closed."""
        try:
            self._read()
        except BlockingIOError:
            return True
        while self._receive_buffer.ready:
            value = self._decode_next()
            if value is not NOTHING and not self.linger_until:
                deliver(value)
        return not self._ended

    def end(self, reason: str) -> None:
        """Close the socket at once, and wake blocked senders."""
        super().close(reason)
        with self._drained:
            self._drained.notify_all()

    def abandon(self) -> None:
        """Release the socket of a refused connection, which the handshake still uses."""
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
