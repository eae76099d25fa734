"""Connections: ordered, bidirectional streams of values, and the client side that opens them."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from typing import Any, Final, Protocol, Self

import numpy as np

from overlord.buffer_pool import BufferPool
from overlord.errors import ActorLost, DataStall, FrameError, LinkRefused, OverlordError
from overlord.transport.address import (
    HAS_SHARED_MEMORY,
    Address,
    TryLater,
    address_text,
    client_side,
    tune,
)
from overlord.transport.frame import BYE, OutgoingMessage, ReceiveBuffer, SendBuffer
from overlord.transport.message_io import NOTHING, EncodedMessage, MessageDecoder, MessageEncoder
from overlord.transport.shared_memory import SharedMemoryPool
from overlord.transport.timeouts import TIMEOUTS

# ----------------------------------------------------------------------------
# The interface of a connection and its two kinds. Every wait has a deadline.
#
# ``local_connection.pair`` connects two ends within a process and passes values by reference. A
# ``SocketConnection`` connects two processes: through shared memory on the same machine, by TCP
# otherwise. The sender of an array must not change it; the receiver gets a read-only array.


class _Timeout:
    def __repr__(self) -> str:
        return "TIMEOUT"


TIMEOUT: Final = _Timeout()
MAX_HELD = 8  # segments that one side may hold, beyond the number that the peer announced
CLOSES = "the server closes"  # the reason of an orderly close
CLOSED_HERE = "the connection was closed on this side"


class Connection(Protocol):
    """One end of a connection. ``send`` may be called from any thread."""

    peer: str

    def send(self, value: Any, *, timeout_s: float = 60.0) -> None:
        """Send a value.

        Raise ``DataStall`` if the peer accepts nothing for ``timeout_s``, and ``ActorLost`` if the
        peer is lost.
        """

    def recv(self, timeout_s: float) -> Any:
        """Return the next value, or ``TIMEOUT`` if none arrives in ``timeout_s``.

        Raise ``ActorLost`` at the end of the stream, after all received values were returned.
        """

    def flush(self) -> None:
        """Send the pending notices about removed segments to the peer; never wait."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a value may have arrived."""
        ...

    def close(self, reason: str = "") -> None:
        """End the connection; the peer's error contains ``reason``. Idempotent."""

    @property
    def remote_held(self) -> int:
        """Number of the peer's segments that this side holds."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SocketConnection:
    """A connection to another process, without a thread: ``send`` and ``recv`` do the I/O.

    Over a unix socket large arrays are sent in shared memory. Over TCP they are sent in frames and
    received into reused buffers.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        pool: SharedMemoryPool | None = None,
        max_held: int = MAX_HELD,
        hangup: bool = True,
    ):
        self.peer = peer
        self.shares_memory = sock.family == getattr(socket, "AF_UNIX", None)
        self._sock, self._fileno = sock, sock.fileno()
        self._lock = threading.Lock()  # for sending; never held while waiting
        self._receive_lock = threading.RLock()
        self._own_pool = (
            SharedMemoryPool(max_bytes=2**28, name=peer)
            if self.shares_memory and pool is None
            else None
        )
        pool = (pool or self._own_pool) if self.shares_memory else None
        self._buffers: BufferPool | None = None  # made for the first large array in a frame
        self._encoder = MessageEncoder(pool, peer, self._fileno if hangup else -1)
        self._decoder = MessageDecoder(self._memory, max_held)
        self._send_buffer = SendBuffer()
        self._receive_buffer = ReceiveBuffer(self._memory, files=self.shares_memory)
        self._lost: str | None = None  # why nothing more can be sent
        self._ended = False  # everything that arrived was read
        # False: if no segment is free, arrays are copied through the socket.
        self.waits_for_segments = True
        self._readable = select.poll()  # for the reader; each sender needs its own
        self._readable.register(self._fileno, select.POLLIN)

    def _memory(self, nbytes: int) -> np.ndarray:
        """Return an unused array for received bytes; the caller holds the lock of receiving."""
        if self._buffers is None:
            self._buffers = BufferPool(2**28)
        return self._buffers(nbytes)

    @property
    def pool(self) -> SharedMemoryPool | None:
        """The shared-memory pool for arrays to be sent without a copy; None over TCP."""
        return self._encoder.pool

    @property
    def max_held(self) -> int:
        """Number of the peer's segments that may be held here.

        Messages that would exceed it are copied, so that no reader exhausts the peer's pool.
        """
        return self._decoder.max_held

    @max_held.setter
    def max_held(self, segments: int) -> None:
        self._decoder.max_held = segments

    @property
    def remote_held(self) -> int:
        return self._decoder.segments.held

    @property
    def remote_mapped(self) -> int:
        """Number of the peer's segments that are mapped here."""
        return self._decoder.segments.mapped

    @property
    def copied(self) -> int:
        """Number of messages that were copied out of their segments because too many were held."""
        return self._decoder.copied

    def fileno(self) -> int:
        return self._fileno

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # sending

    def send(self, value: Any, *, timeout_s: float = 60.0) -> None:
        """Send a value.

        After ``DataStall`` the value may be queued; the next call sends queued bytes first.
        """
        self._drain(timeout_s)
        self._enqueue(self._encode(value, timeout_s))
        self._drain(timeout_s)

    def _encode(self, value: Any, wait_s: float) -> EncodedMessage:
        """Encode a value, and copy large arrays into a segment; wait ``wait_s`` for a free one."""

        def take(nbytes: int) -> np.ndarray | None:
            pool = self._encoder.pool
            assert pool is not None
            if nbytes > pool.max_bytes or wait_s <= 0 or not self.waits_for_segments:
                return pool.take(nbytes)
            try:
                return pool.wait(nbytes, wait_s)
            except DataStall as e:
                raise DataStall(
                    f"{self.peer} to release what was sent: {e.waiting_for}", wait_s
                ) from e

        self._check()
        return self._encoder.encode(value, take)

    def _enqueue(self, encoded: EncodedMessage) -> None:
        with self._lock:
            self._check()
            for message in self._encoder.messages(encoded):
                self._send_buffer.put(message)
            self._write()

    def _drain(self, timeout_s: float) -> None:
        """Wait until the socket has accepted all queued bytes.

        The deadline restarts whenever the peer accepts data.
        """
        moved, deadline = -1, 0.0
        while len(self._send_buffer):
            with self._lock:
                self._check()
                if self._write():
                    return
                taken, waiting = self._send_buffer.taken, self._send_buffer.nbytes
            if taken != moved:
                moved, deadline = taken, time.monotonic() + timeout_s
            left = deadline - time.monotonic()
            if left <= 0:
                raise DataStall(f"{self.peer} to accept {waiting} bytes", timeout_s)
            self._wait_writable(left)

    def _wait_writable(self, seconds: float) -> None:
        if self._fileno >= 0:
            poll = select.poll()
            poll.register(self._fileno, select.POLLOUT)
            poll.poll(seconds * 1000)

    def _write(self) -> bool:
        """Write queued bytes and return whether all are sent. Call with the lock held."""
        try:
            return self._send_buffer.write(self._sock)
        except OSError as e:
            raise self._mark_lost(f"sending failed: {e.strerror or e}") from e

    def flush(self) -> None:
        if not self._encoder.has_notices and not len(self._send_buffer):
            return  # as almost always: callers flush after each turn of their loop
        with self._lock:
            if self._lost is None:
                for message in self._encoder.forget_notices():
                    self._send_buffer.put(message)
                self._write()

    # receiving

    def recv(self, timeout_s: float, *, polled: bool = False) -> Any:
        """Return the next value, or ``TIMEOUT`` if none arrives in ``timeout_s``.

        ``polled``: the caller has just found the socket empty, so wait before reading.
        """
        deadline = time.monotonic() + timeout_s
        with self._receive_lock:
            while True:
                while self._receive_buffer.ready:
                    value = self._decode_next()
                    if value is not NOTHING:
                        return value
                if self._ended:
                    raise ActorLost(self.peer, self._lost or "")
                try:
                    if not polled:
                        self._read()
                        continue
                except BlockingIOError:
                    pass
                polled, left = False, deadline - time.monotonic()
                if left <= 0:
                    return TIMEOUT
                # Outside the except block: an interrupt here shows one traceback, not two.
                self._readable.poll(left * 1000)

    def _decode_next(self) -> Any:
        """Return the value of the next message; ``NOTHING`` for a notice or the peer's close."""
        message = self._receive_buffer.ready.popleft()
        if message.kind == BYE:
            reason = bytes(message.body).decode(errors="replace")[:1024]
            with self._lock:
                self._mark_lost("")
            self._lost, self._ended = (
                f"it closed the connection{': ' if reason else ''}{reason}",
                True,
            )
            return NOTHING
        try:
            return self._decoder.decode(message)
        except FrameError as e:
            self.close(str(e))
            raise

    def _read(self) -> None:
        """Read from the socket once; record the end of the stream if the peer closed it.

        Raise ``BlockingIOError`` if no data has arrived.
        """
        try:
            if not self._receive_buffer.read(self._sock):
                self._end("it closed the connection, or died")
        except (BlockingIOError, InterruptedError):
            raise BlockingIOError from None
        except FrameError as e:
            self.close(str(e))
            raise
        except OSError as e:
            self._end(f"the connection broke: {e.strerror or e}")

    # closing

    def _check(self) -> None:
        if self._lost is not None:
            raise ActorLost(self.peer, self._lost)

    def _end(self, reason: str) -> None:
        with self._lock:  # another thread may be sending
            self._mark_lost(reason)
        self._ended = True

    def _mark_lost(self, reason: str) -> ActorLost:
        """Mark the peer as lost: nothing more can be sent, and its lease of segments ends.

        Received data can still be read. Call with the lock held.
        """
        if self._lost is None:
            self._lost = reason
            self._send_buffer.clear()
            self._encoder.close()
        return ActorLost(self.peer, self._lost)

    def close(self, reason: str = "") -> None:
        """End the connection; drop unsent bytes. Views of received arrays stay valid."""
        with self._lock:
            if self._fileno < 0:
                return
            self._fileno = -1
            if self._lost is None:
                self._send_buffer.put(OutgoingMessage(BYE, [reason.encode()[:1024]]))
                with contextlib.suppress(OSError):
                    self._send_buffer.write(self._sock)
                self._lost = f"{CLOSED_HERE}{': ' if reason else ''}{reason}"
            self._send_buffer.clear()
            self._encoder.close()
        with contextlib.suppress(OSError):
            # This wakes a reader in another thread, which then releases its lock.
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._receive_lock:
            self._ended = True
            self._receive_buffer.close()
            self._decoder.close()
            self._sock.close()
        if self._own_pool is not None:
            self._own_pool.close()


# ----------------------------------------------------------------------------
# Client side of a connection: connect by unix socket or TCP, then authenticate.
#
# With ``transport="auto"`` the unix socket is used if it accepts the connection, TCP otherwise.

TRANSPORTS = ("auto", "unix", "tcp")
MAX_HOLD = 2**16
RETRY_S = TIMEOUTS.retry_s


def open_connection(
    address: str,
    token: str,
    hello: dict[str, Any],
    *,
    timeout_s: float,
    pool: SharedMemoryPool | None = None,
    transport: str = "auto",
    name: str = "",
) -> tuple[SocketConnection, dict[str, Any]]:
    """Connect to the server at ``address``; return the connection and the server's welcome.

    The server uses ``name`` for this client in its errors. Raise ``LinkRefused`` if it refuses,
    ``ActorLost`` if it cannot be reached, ``DataStall`` at the deadline. Retry temporary refusals.
    """
    if transport not in TRANSPORTS:
        raise OverlordError(f"transport: expected {' or '.join(TRANSPORTS)}, got {transport!r}")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _open_connection(
                address, token, {"hello": hello, "name": name}, deadline, timeout_s, pool, transport
            )
        # This process was suspended during the handshake, or many others connected first.
        except TryLater as later:
            if time.monotonic() + RETRY_S > deadline:
                raise DataStall(
                    f"{address_text(address)} to accept a connection, which it refuses temporarily "
                    f"({later.reason})",
                    timeout_s,
                ) from None
        time.sleep(RETRY_S)


def _open_connection(
    address: str,
    token: str,
    hello: dict[str, Any],
    deadline: float,
    timeout_s: float,
    pool: SharedMemoryPool | None,
    transport: str,
) -> tuple[SocketConnection, dict[str, Any]]:
    where = address_text(address)
    sock = _connect(Address.parse(address), transport, deadline)
    try:
        answer = _handshake(sock, where, token, hello, deadline, timeout_s)
        welcome, hold = answer.get("welcome"), answer.get("hold")
        if not isinstance(welcome, dict) or type(hold) is not int or not 0 <= hold <= MAX_HOLD:
            raise LinkRefused(
                where,
                "expected a welcome in the handshake, got none; run the same version of Overlord "
                "on both sides",
            )
        tune(sock)
        return SocketConnection(sock, where, pool=pool, max_held=MAX_HELD + hold), welcome
    except BaseException:
        sock.close()
        raise


def _connect(address: Address, transport: str, deadline: float) -> socket.socket:
    if transport == "unix" or (transport == "auto" and HAS_SHARED_MEMORY):
        try:
            return _connect_local(address, deadline)
        except OSError as e:
            if transport == "unix" or not address.port:
                raise ActorLost(
                    address_text(str(address)),
                    f"its local socket does not answer: {e.strerror or e}; check its process",
                ) from e
    try:
        return socket.create_connection(
            (address.host, address.port), max(0.001, deadline - time.monotonic())
        )
    except OSError as e:
        text = f"it does not answer: {e.strerror or e}; check the address, and its process"
        raise ActorLost(str(address), text) from e


def _connect_local(address: Address, deadline: float) -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(address.local_name)
            return sock
        except OSError as e:
            sock.close()
            if e.errno != errno.EAGAIN or time.monotonic() > deadline:
                raise
        time.sleep(0.1)  # the accept queue is full, and no event reports free space


def _handshake(
    sock: socket.socket,
    address: str,
    token: str,
    hello: dict[str, Any],
    deadline: float,
    timeout_s: float,
) -> dict[str, Any]:
    steps = client_side(token, hello, address)
    step, answer = next(steps), b""
    try:
        while True:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            if isinstance(step, bytes):
                # The peer may have closed already: its reason can still be read.
                with contextlib.suppress(BrokenPipeError):
                    sock.sendall(step)
                step = next(steps)
                continue
            some = sock.recv(step - len(answer))
            if not some:
                raise ActorLost(address, "it closed the connection in the handshake")
            answer += some
            if len(answer) == step:
                whole, answer = answer, b""
                step = steps.send(whole)
    except StopIteration as done:
        return done.value
    except TimeoutError as e:
        raise DataStall(f"{address} to answer the handshake", timeout_s) from e
    except OSError as e:
        raise ActorLost(address, f"the connection broke in the handshake: {e.strerror or e}") from e
