"""A server's end of a link: sending never makes the server's thread wait, and messages go to the
server's callback.
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

if TYPE_CHECKING:
    from overlord.transport.server import Server

MAX_QUEUED_BYTES = (
    2**26
)  # of one link, beyond what the socket holds; a single message may be larger
MAX_QUEUED = 1024
LINGER_S = 2.0  # how long a closed link may take to send what is queued


class ServerConnection(SocketConnection):
    """May be used from any thread. What the socket does not take is queued and sent by the server's
    thread.
    """

    def __init__(
        self, sock: socket.socket, peer: str, *, ring: SharedMemoryPool | None, server: Server
    ):
        super().__init__(sock, peer, ring=ring, hangup=False)
        self._server = server
        self._drained = threading.Condition(self._lock)
        self._begun = False  # nothing may be sent before the welcome
        self._watched = False  # whether the server's thread waits for the socket to take more
        self.linger_until = 0.0
        self.max_queued_bytes = MAX_QUEUED_BYTES

    @property
    def reason(self) -> str:
        """Why the link ended."""
        return self._lost or ""

    @property
    def waiting(self) -> bool:
        """Whether something is queued."""
        return len(self._outbox) > 0

    @property
    def queued_bytes(self) -> int:
        return self._outbox.nbytes

    def send(self, value: Any, *, timeout_s: float = 60.0) -> None:
        """Waits while too much is queued; in the server's thread it does not wait but raises
        ``DataStall`` at once.
        """
        wait_s = 0.0 if self._server.in_its_thread else timeout_s
        self._admit(wait_s)
        self._post(self._load(value, wait_s))

    def recv(self, timeout_s: float, *, looked: bool = False) -> Any:
        raise OverlordError(
            "a server's link hands its messages to on_message; there is nothing to receive"
        )

    def _admit(self, wait_s: float) -> None:
        moved, deadline = -1, 0.0
        with self._drained:
            while self._outbox.nbytes > self.max_queued_bytes or len(self._outbox) > MAX_QUEUED:
                self._check()
                if self._outbox.taken != moved:
                    moved, deadline = self._outbox.taken, time.monotonic() + wait_s
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DataStall(
                        f"{self.peer} to take {self._outbox.nbytes} bytes in "
                        f"{len(self._outbox)} messages",
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

    # for the server's thread

    def begin(self, welcome: bytes) -> None:
        with self._lock:
            self._begun = True
            self._outbox.put(OutgoingMessage.raw(welcome), first=True)
            if self._lost is None or self.linger_until:
                self._try_write()

    def _try_write(self) -> bool:
        try:
            return self._write()
        except OverlordError:
            return True  # lost; reading will find the end

    def go_on(self) -> bool:
        """The socket takes more: whether all is sent now."""
        with self._drained:
            done = self._try_write()
            self._watched = not done
            self._drained.notify_all()
            return done

    def hear(self, deliver: Callable[[Any], None]) -> bool:
        """Reads once, hands over what is complete. False: the peer has gone."""
        try:
            self._read()
        except BlockingIOError:
            return True
        while self._inbox.ready:
            value = self._open()
            if value is not NOTHING and not self.linger_until:
                deliver(value)
        return not self._ended

    def end(self, reason: str) -> None:
        SocketConnection.close(self, reason)
        with self._drained:
            self._drained.notify_all()

    def abandon(self) -> None:
        """It was refused: the socket stays with the handshake."""
        with self._lock:
            self._lost = "it was refused"
            self._sender.close()
            self._fileno = -1

    def cut(self, reason: str) -> None:
        """Ends it without waiting for what is queued: nobody is there who would take it."""
        self._server.later(lambda: self._server.drop(self, reason))

    def close(self, reason: str = "") -> None:
        """What is queued is still sent, for a while; nothing is handed over any more."""
        with self._drained:
            if self._lost is not None or self.linger_until:
                return
            self._lost = f"{CLOSED_HERE}{': ' if reason else ''}{reason}"
            self._outbox.put(OutgoingMessage(BYE, [reason.encode()[:1024]]))
            self.linger_until = time.monotonic() + LINGER_S
            self._try_write()
            self._drained.notify_all()
        self._server.later(lambda: self._server.watch_leaving(self))
