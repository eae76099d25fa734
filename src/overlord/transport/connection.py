"""Links: values one way and the other, in order, each side a deadline for every wait.

``pair`` joins two ends within a process: what is sent is handed over as it is. A ``SocketConnection``
speaks to another process: through shared memory on the same machine, by TCP otherwise. Whoever
sends an array must not change it afterwards; whoever receives one gets it read-only.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Final

import numpy as np

from overlord.buffer_pool import BufferPool
from overlord.errors import ActorLost, DataStall, FrameError
from overlord.transport.message_io import NOTHING, EncodedMessage, MessageDecoder, MessageEncoder
from overlord.transport.shared_memory import SharedMemoryPool
from overlord.transport.socket_io import BYE, OutgoingMessage, ReceiveBuffer, SendBuffer


class _Timeout:
    def __repr__(self) -> str:
        return "TIMEOUT"


TIMEOUT: Final = _Timeout()
PAIR_MESSAGES = 64
MAX_HELD = 8  # slots of a peer, beyond what it said to expect
CLOSES = "the server closes"  # the last word of one that ends in order
CLOSED_HERE = "the link was closed on this side"


class Connection(ABC):
    """One end. ``send`` may be called from any thread."""

    peer: str

    @abstractmethod
    def send(self, value: Any, *, timeout_s: float = 60.0) -> None:
        """``DataStall`` when the peer takes nothing for so long, ``ActorLost`` when it is gone."""

    @abstractmethod
    def recv(self, timeout_s: float) -> Any:
        """The next value, or ``TIMEOUT``. ``ActorLost`` at the end, after everything that was sent
        has been read.
        """

    @abstractmethod
    def flush(self) -> None:
        """Tells the peer what it should know; never waits."""

    @abstractmethod
    def fileno(self) -> int:
        """Readable when there may be something to receive."""

    @abstractmethod
    def close(self, reason: str = "") -> None: ...

    @property
    def remote_held(self) -> int:
        """Slots of the peer that this side holds."""
        return 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Lane:
    """One direction of a pair."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: deque[Any] = deque()
        self.reason: str | None = None
        self.bell: tuple[socket.socket, socket.socket] | None = None

    def end(self, reason: str) -> None:
        with self.changed:
            self.reason = self.reason or reason
            self.ring()
            self.changed.notify_all()

    def ring(self) -> None:
        if self.bell is not None:
            with contextlib.suppress(BlockingIOError):
                self.bell[1].send(b"\0")


class LocalConnection(Connection):
    """An end of a pair within the process."""

    def __init__(self, peer: str, out: _Lane, into: _Lane, ring: SharedMemoryPool | None):
        self.peer, self.ring = peer, ring
        self._out, self._in = out, into

    def send(self, value: Any, *, timeout_s: float = 60.0) -> None:
        lane = self._out
        with lane.changed:
            if not lane.changed.wait_for(
                lambda: len(lane.values) < PAIR_MESSAGES or lane.reason is not None, timeout_s
            ):
                raise DataStall(
                    f"{self.peer} to take one of {len(lane.values)} messages", timeout_s
                )
            if lane.reason is not None:
                raise ActorLost(self.peer, lane.reason)
            lane.values.append(value)
            lane.ring()
            lane.changed.notify_all()

    def recv(self, timeout_s: float) -> Any:
        lane = self._in
        with lane.changed:
            if not lane.changed.wait_for(lambda: lane.values or lane.reason is not None, timeout_s):
                return TIMEOUT
            if not lane.values:
                raise ActorLost(self.peer, lane.reason or "")
            value = lane.values.popleft()
            if lane.bell is not None and not lane.values and lane.reason is None:
                with contextlib.suppress(BlockingIOError):
                    while lane.bell[0].recv(4096):
                        pass
            lane.changed.notify_all()
            return value

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        with self._in.changed:
            if self._in.bell is None:
                self._in.bell = socket.socketpair()
                for end in self._in.bell:
                    end.setblocking(False)
                if self._in.values or self._in.reason is not None:
                    self._in.ring()
            return self._in.bell[0].fileno()

    def close(self, reason: str = "") -> None:
        self._out.end(f"the link was closed{': ' if reason else ''}{reason}")
        with self._in.changed:
            self._in.values.clear()
        self._in.end(f"the link was closed{': ' if reason else ''}{reason}")
        with self._in.changed:
            if self._in.bell is not None:
                for end in self._in.bell:
                    end.close()
                self._in.bell = None


def pair(
    ring: SharedMemoryPool | None = None, *, names: tuple[str, str] = ("left", "right")
) -> tuple[Connection, Connection]:
    """Two ends within this process. Values are handed over as they are; ``PAIR_MESSAGES`` of them
    may wait.
    """
    there, back = _Lane(), _Lane()
    return LocalConnection(names[1], there, back, ring), LocalConnection(
        names[0], back, there, ring
    )


class SocketConnection(Connection):
    """A link to another process, worked by whoever calls it: no thread of ours, so a trainer pays a
    socket and a mapping.

    Over a unix socket arrays travel in shared memory; over TCP in frames, into buffers that are
    used again.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        ring: SharedMemoryPool | None = None,
        max_held: int = MAX_HELD,
        hangup: bool = True,
    ):
        self.peer = peer
        self.shares_memory = sock.family == getattr(socket, "AF_UNIX", None)
        self._sock, self._fileno = sock, sock.fileno()
        self._lock = threading.Lock()  # the way out; nobody waits while holding it
        self._reading = threading.RLock()
        self._own_ring = (
            SharedMemoryPool(max_bytes=2**28, name=peer)
            if self.shares_memory and ring is None
            else None
        )
        ring = (ring or self._own_ring) if self.shares_memory else None
        slabs = BufferPool(2**28)
        self._sender = MessageEncoder(ring, peer, self._fileno if hangup else -1)
        self._receiver = MessageDecoder(slabs, max_held)
        self._outbox, self._inbox = SendBuffer(), ReceiveBuffer(slabs, files=self.shares_memory)
        self._lost: str | None = None  # why nothing can be sent any more
        self._ended = False  # all that came was read
        self.waits_for_slots = True  # False: what finds no slot free is copied through the socket
        self._incoming = select.poll()  # for the one who reads; those who send each need their own
        self._incoming.register(self._fileno, select.POLLIN)

    @property
    def ring(self) -> SharedMemoryPool | None:
        """Where to build what will be sent, so that it need not be copied; None over TCP."""
        return self._sender.ring

    @property
    def max_held(self) -> int:
        """Slots of the peer that may be held here; beyond it messages are copied, so that no reader
        exhausts the peer's ring.
        """
        return self._receiver.max_held

    @max_held.setter
    def max_held(self, slots: int) -> None:
        self._receiver.max_held = slots

    @property
    def remote_held(self) -> int:
        return self._receiver.slots.held

    @property
    def remote_mapped(self) -> int:
        """Slots of the peer that are mapped here."""
        return self._receiver.slots.mapped

    @property
    def copied(self) -> int:
        """Messages that were copied out of their slots because too many were held."""
        return self._receiver.copied

    def fileno(self) -> int:
        return self._fileno

    # out

    def send(self, value: Any, *, timeout_s: float = 60.0) -> None:
        """A value whose sending was begun when ``DataStall`` was raised stays on its way; nothing
        new is taken before it has gone.
        """
        self._drain(timeout_s)
        self._post(self._load(value, timeout_s))
        self._drain(timeout_s)

    def _load(self, value: Any, wait_s: float) -> EncodedMessage:
        """The value ready to go, its arrays in slots; waits for a free slot."""

        def take(nbytes: int) -> np.ndarray | None:
            ring = self._sender.ring
            assert ring is not None
            if nbytes > ring.max_bytes or wait_s <= 0 or not self.waits_for_slots:
                return ring.take(nbytes)
            try:
                return ring.wait(nbytes, wait_s)
            except DataStall as e:
                raise DataStall(
                    f"{self.peer} to let go of what was sent: {e.waiting_for}", wait_s
                ) from e

        self._check()
        return self._sender.load(value, take)

    def _post(self, loaded: EncodedMessage) -> None:
        with self._lock:
            self._check()
            for parcel in self._sender.parcels(loaded):
                self._outbox.put(parcel)
            self._write()

    def _drain(self, timeout_s: float) -> None:
        """Waits until the socket has taken all. As long as the peer takes anything it is not
        stalled.
        """
        moved, deadline = -1, 0.0
        while len(self._outbox):
            with self._lock:
                self._check()
                if self._write():
                    return
                taken, waiting = self._outbox.taken, self._outbox.nbytes
            if taken != moved:
                moved, deadline = taken, time.monotonic() + timeout_s
            left = deadline - time.monotonic()
            if left <= 0:
                raise DataStall(f"{self.peer} to take {waiting} bytes", timeout_s)
            self._wait_writable(left)

    def _wait_writable(self, seconds: float) -> None:
        if self._fileno >= 0:
            poll = select.poll()
            poll.register(self._fileno, select.POLLOUT)
            poll.poll(seconds * 1000)

    def _write(self) -> bool:
        """Whether all is sent. Under the lock."""
        try:
            return self._outbox.write(self._sock)
        except OSError as e:
            raise self._lose(f"sending failed: {e.strerror or e}") from e

    def flush(self) -> None:
        with self._lock:
            if self._lost is None:
                for parcel in self._sender.notices():
                    self._outbox.put(parcel)
                self._write()

    # in

    def recv(self, timeout_s: float, *, looked: bool = False) -> Any:
        """``looked``: there was nothing a moment ago, so it waits before it looks."""
        deadline = time.monotonic() + timeout_s
        with self._reading:
            while True:
                while self._inbox.ready:
                    value = self._open()
                    if value is not NOTHING:
                        return value
                if self._ended:
                    raise ActorLost(self.peer, self._lost or "")
                try:
                    if not looked:
                        self._read()
                        continue
                except BlockingIOError:
                    pass
                looked, left = False, deadline - time.monotonic()
                if left <= 0:
                    return TIMEOUT
                self._incoming.poll(
                    left * 1000
                )  # out of the handler: who interrupts this sees one traceback, not two

    def _open(self) -> Any:
        """The value of the next envelope, or ``NOTHING``."""
        envelope = self._inbox.ready.popleft()
        if envelope.kind == BYE:
            said = bytes(envelope.body).decode(errors="replace")[:1024]
            with self._lock:
                self._lose("")
            self._lost, self._ended = f"it closed the link{': ' if said else ''}{said}", True
            return NOTHING
        try:
            return self._receiver.open(envelope)
        except FrameError as e:
            self.close(str(e))
            raise

    def _read(self) -> None:
        """One read; notes the end of the stream. ``BlockingIOError``: there is nothing yet."""
        try:
            if not self._inbox.read(self._sock):
                self._end("it closed the connection, or died")
        except (BlockingIOError, InterruptedError):
            raise BlockingIOError from None
        except FrameError as e:
            self.close(str(e))
            raise
        except OSError as e:
            self._end(f"the connection broke: {e.strerror or e}")

    # the end

    def _check(self) -> None:
        if self._lost is not None:
            raise ActorLost(self.peer, self._lost)

    def _end(self, reason: str) -> None:
        with self._lock:  # someone may be sending, in another thread
            self._lose(reason)
        self._ended = True

    def _lose(self, reason: str) -> ActorLost:
        """Under the lock. Nothing can be sent any more, and what the peer held is free. What it
        sent can still be read.
        """
        if self._lost is None:
            self._lost = reason
            self._outbox.clear()
            self._sender.close()
        return ActorLost(self.peer, self._lost)

    def close(self, reason: str = "") -> None:
        """Views of what was received stay valid."""
        with self._lock:
            if self._fileno < 0:
                return
            self._fileno = -1
            if self._lost is None:
                self._outbox.put(OutgoingMessage(BYE, [reason.encode()[:1024]]))
                with contextlib.suppress(OSError):
                    self._outbox.write(self._sock)
                self._lost = f"{CLOSED_HERE}{': ' if reason else ''}{reason}"
            self._outbox.clear()
            self._sender.close()
        with contextlib.suppress(OSError):
            self._sock.shutdown(
                socket.SHUT_RDWR
            )  # wakes whoever reads, who then lets go of the lock
        with self._reading:
            self._ended = True
            self._inbox.close()
            self._receiver.close()
            self._sock.close()
        if self._own_ring is not None:
            self._own_ring.close()
