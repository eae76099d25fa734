"""A server whose one thread serves all connections and never waits for a single one.

Callbacks run in that thread, so they must be short. Messages that a slow peer does not accept wait
in the bounded queue of its connection, arrays by reference. A sender in another thread then waits;
the server's thread does not.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from overlord.errors import FrameError, LinkRefused, OverlordError
from overlord.transport.address import (
    HAS_SHARED_MEMORY,
    Accepted,
    Address,
    PendingHandshake,
    check_key,
    listen_local,
    listen_tcp,
    new_key,
    reachable,
    refusal,
    tune,
)
from overlord.transport.connection import CLOSES
from overlord.transport.server_connection import ServerConnection
from overlord.transport.shared_memory import SharedMemoryPool
from overlord.transport.timeouts import TIMEOUTS

log = logging.getLogger("overlord.transport")

MAX_PENDING = 256  # connections in the handshake; beyond it the oldest is refused
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

OnMessage = Callable[[ServerConnection, Any], None]
OnOpen = Callable[[ServerConnection, dict[str, Any]], dict[str, Any]]
OnClose = Callable[[ServerConnection, str], None]


class Server:
    """A server that accepts connections at ``address``.

    Callbacks run in the server's thread. ``on_open`` returns the welcome, or raises an error whose
    text is sent to the refused peer. ``hold``: segments that a client may hold beyond ``MAX_HELD``.
    """

    def __init__(
        self,
        *,
        token: str,
        on_message: OnMessage,
        on_open: OnOpen | None = None,
        on_close: OnClose | None = None,
        pool: SharedMemoryPool | None = None,
        host: str = "127.0.0.1",
        port: int | range = 0,
        tcp: bool = True,
        key: str | None = None,
        hold: int = 0,
        handshake_s: float = TIMEOUTS.handshake_s,
    ):
        if not tcp and not HAS_SHARED_MEMORY:
            raise OverlordError(
                "server: expected tcp=True on a platform without shared memory and unix sockets, "
                "got tcp=False; set tcp=True"
            )
        self._token, self._hold, self._handshake_s = token, hold, handshake_s
        self._on_message, self._on_open, self._on_close = (
            on_message,
            on_open or _welcome_all,
            on_close or _ignore,
        )
        self._listeners = [listen_tcp(host, port)] if tcp else []
        found = Address(
            host=reachable(host),
            port=self._listeners[0].getsockname()[1] if tcp else 0,
            key=check_key(key or new_key()),
        )
        self.address = str(found)
        if HAS_SHARED_MEMORY:
            try:
                self._listeners.append(listen_local(found))
            except OverlordError:
                for sock in self._listeners:
                    sock.close()
                raise
        self._own_pool = None if pool else SharedMemoryPool(name=found.key)
        self.pool = pool or self._own_pool
        self._connections: set[ServerConnection] = set()
        self._lingering: set[ServerConnection] = set()  # closed, but not everything is sent
        self._pending: dict[int, PendingHandshake] = {}  # oldest first
        self._watched: dict[int, Callable[[], None]] = {}  # files of others, by descriptor
        self._calls: deque[Callable[[], None]] = deque()
        self._paused_until = 0.0
        self._closing_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._waker = WakePair()
        self._selector.register(self._waker, READ, self._waker.drain)
        for sock in self._listeners:
            self._selector.register(sock, READ, lambda sock=sock: self._accept(sock))
        self._thread = threading.Thread(
            target=self._run, name=f"overlord-server-{found.key}", daemon=True
        )
        self._thread.start()

    @property
    def links(self) -> list[ServerConnection]:
        """The open connections."""
        return list(self._connections)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send queued messages for up to ``Timeouts.linger_s``, then end all connections.

        Wait for that for up to ``timeout_s``; in the server's thread, return at once. Idempotent.
        """
        self.later(self._begin_close)
        if threading.get_ident() != self._thread.ident:
            self._thread.join(timeout_s)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # for connections, from any thread

    def later(self, work: Callable[[], None]) -> None:
        """Queue a call of ``work`` in the server's thread; return at once."""
        self._calls.append(work)
        self._waker.wake()

    def caught_up(self, timeout_s: float) -> bool:
        """Wait until all data that has already arrived is read; return False at the deadline.

        Afterwards, every message that was in a socket at the time of the call was delivered.
        """
        done = threading.Event()
        # The current round may have read its sockets before this call; the next round has not.
        self.later(lambda: self.later(done.set))
        return done.wait(timeout_s)

    @property
    def in_its_thread(self) -> bool:
        """Whether the caller is the server's thread."""
        return threading.get_ident() == self._thread.ident

    def watch_writing(self, connection: ServerConnection) -> None:
        """Resume writing once the socket of a connection accepts more."""
        if connection in self._connections:
            self._selector.modify(connection.fileno(), READ | WRITE, connection)

    def watch_lingering(self, connection: ServerConnection) -> None:
        """Drop a closed connection once its queue is sent, or at its deadline."""
        if connection in self._connections:
            self._lingering.add(connection)

    # in the server's thread

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Call ``ready`` whenever a file is readable, until ``unwatch``."""

        def call() -> None:
            # a former callback of the same round may have ended the watch
            if self._watched.get(fd) is call:
                try:
                    ready()
                except Exception:
                    log.exception("callback of a watched file failed; the server continues")

        self._watched[fd] = call
        self._selector.register(fd, READ, call)

    def unwatch(self, fd: int) -> None:
        """Stop watching a file, which must still be open."""
        del self._watched[fd]
        self._selector.unregister(fd)

    def finish(self, connection: ServerConnection, reason: str) -> None:
        """Deliver everything that has arrived from a peer that is gone, then drop it."""
        while connection in self._connections and connection.has_arrived():
            self._receive(connection)
        self.drop(connection, reason)

    def _run(self) -> None:
        while not self._finished():
            for key, mask in self._selector.select(self._select_timeout()):
                if isinstance(key.data, ServerConnection):
                    self._serve(key.data, mask)
                elif isinstance(key.data, PendingHandshake):
                    self._continue_handshake(key.data)
                else:
                    key.data()
            for _ in range(len(self._calls)):  # calls that these add run in the next round
                self._calls.popleft()()
            self._check_deadlines()
        self._shut_down()

    def _select_timeout(self) -> float | None:
        oldest = next(iter(self._pending.values()), None)
        deadlines = [oldest.deadline] if oldest else []
        deadlines += [connection.linger_until for connection in self._lingering] + [
            d for d in (self._paused_until, self._closing_at or 0.0) if d
        ]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        while (oldest := next(iter(self._pending.values()), None)) and oldest.deadline <= now:
            reason = f"the client did not finish the handshake in {self._handshake_s:g} s"
            self._refuse(oldest, reason, later=True)
        for connection in [x for x in self._lingering if x.linger_until <= now or not x.waiting]:
            self.drop(connection, connection.reason)
        if self._paused_until and self._paused_until <= now:
            self._paused_until = 0.0
            for sock in self._listeners:
                self._selector.register(sock, READ, lambda sock=sock: self._accept(sock))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(64):
            try:
                sock, where = listener.accept()
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause(e)
                return  # nothing more, or a connection that is closed already
            if len(self._pending) >= MAX_PENDING:
                self._refuse(
                    next(iter(self._pending.values())),
                    "too many connections wait in the handshake",
                    later=True,
                )
            tune(sock)
            pending = PendingHandshake(
                sock, _name_of(sock, where), self._token, time.monotonic() + self._handshake_s
            )
            self._pending[sock.fileno()] = pending
            self._selector.register(sock, READ, pending)

    def _pause(self, error: OSError) -> None:
        """Stop accepting for a while because no more files can be opened.

        The oldest handshake is refused to free its socket.
        """
        log.warning("accepting connections paused for 0.2 s: %s", error.strerror)
        if self._pending:
            self._refuse(
                next(iter(self._pending.values())),
                "the server can open no more connections",
                later=True,
            )
        if not self._paused_until:
            self._paused_until = time.monotonic() + 0.2
            for sock in self._listeners:
                self._selector.unregister(sock)

    def _continue_handshake(self, pending: PendingHandshake) -> None:
        if self._pending.get(pending.sock.fileno()) is not pending:
            return
        try:
            accepted = pending.read()
        except LinkRefused as e:
            self._refuse(pending, e.reason)
        except OSError as e:
            self._forget(pending)
            log.debug("connection of %s lost during the handshake: %s", pending.name, e)
        else:
            if accepted is not None:
                self._welcome(pending, accepted)

    def _welcome(self, pending: PendingHandshake, accepted: Accepted) -> None:
        first = accepted.hello
        hello = first.get("hello")
        if not isinstance(hello, dict):
            return self._refuse(
                pending,
                "expected a hello in the handshake, got none; run the same version of Overlord on "
                "both sides",
            )
        name = first.get("name")
        connection = ServerConnection(
            pending.sock,
            name[:200] if isinstance(name, str) and name else pending.name,
            pool=self.pool,
            server=self,
        )
        try:
            welcome = accepted.sign_welcome(
                {"welcome": self._on_open(connection, hello), "hold": self._hold}
            )
        except Exception as e:  # the peer receives the text of any error of the callback
            connection.abandon()
            return self._refuse(
                pending, f"{e}" if isinstance(e, OverlordError) else f"{type(e).__name__}: {e}"
            )
        del self._pending[pending.sock.fileno()]
        self._connections.add(connection)
        self._selector.modify(pending.sock, READ, connection)
        connection.begin(welcome)
        return None

    def _refuse(self, pending: PendingHandshake, reason: str, *, later: bool = False) -> None:
        """Refuse a connection.

        ``later``: the peer may connect again, for example after a suspension during its handshake.
        """
        with contextlib.suppress(OSError):
            pending.write(refusal(reason, later=later))
        self._forget(pending)

    def _forget(self, pending: PendingHandshake) -> None:
        del self._pending[pending.sock.fileno()]
        self._selector.unregister(pending.sock)
        pending.sock.close()

    def _serve(self, connection: ServerConnection, mask: int) -> None:
        if mask & WRITE and connection in self._connections and connection.resume_writing():
            self._selector.modify(connection.fileno(), READ, connection)
        if mask & READ and connection in self._connections:
            self._receive(connection)

    def _receive(self, connection: ServerConnection) -> None:
        """Read a connection once and deliver its messages."""
        try:
            alive = connection.receive(lambda value: self._on_message(connection, value))
        except FrameError as e:
            connection.rejected = str(e)
            self.drop(connection, str(e))
        except OverlordError as e:  # on_message rejects the message
            log.warning("disconnected %s, whose message was rejected: %s", connection.peer, e)
            connection.rejected = str(e)
            self.drop(connection, str(e))
        except Exception as e:  # an error of the callback ends this connection only
            log.exception("disconnected %s: on_message failed", connection.peer)
            self.drop(connection, f"{type(e).__name__}: {e}")
        else:
            if not alive:
                self.drop(connection, connection.reason)

    def drop(self, connection: ServerConnection, reason: str) -> None:
        """End a connection without sending its queue. Idempotent."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._lingering.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.fileno())
        connection.end(reason)
        try:
            self._on_close(connection, reason)
        except Exception:
            log.exception("on_close failed for %s; the server continues", connection.peer)

    # closing

    def _begin_close(self) -> None:
        if self._closing_at is None:
            self._closing_at = time.monotonic() + TIMEOUTS.linger_s
            for connection in list(self._connections):
                connection.close(CLOSES)

    def _finished(self) -> bool:
        return self._closing_at is not None and (
            not self._connections or time.monotonic() >= self._closing_at
        )

    def _shut_down(self) -> None:
        for pending in list(self._pending.values()):
            self._refuse(pending, CLOSES)
        for connection in list(self._connections):
            self.drop(connection, connection.reason)
        for sock in self._listeners:
            sock.close()
        self._selector.close()
        self._waker.close()
        if self._own_pool is not None:
            self._own_pool.close()


class WakePair:
    """A socket pair that wakes a selector from another thread, on every platform."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        for end in (self._near, self._far):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._near.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up is pending; closed: not needed
            self._far.send(b"\0")

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            while self._near.recv(4096):
                pass

    def close(self) -> None:
        self._near.close()
        self._far.close()


def _welcome_all(connection: ServerConnection, hello: dict[str, Any]) -> dict[str, Any]:
    return {}


def _ignore(connection: ServerConnection, reason: str) -> None:
    pass


def _name_of(sock: socket.socket, where: Any) -> str:
    if sock.family == getattr(socket, "AF_UNIX", None):
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"process {pid}"
    return f"{where[0]}:{where[1]}"
