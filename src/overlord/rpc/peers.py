"""Calls to actors that connect to their caller: the listener, and the actor's endpoint."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, FrameError, LinkRefused, OverlordError
from overlord.process.exit import exit_now
from overlord.rpc.actor_process import ActorServer, exit_code
from overlord.rpc.actors import (
    SHUT_DOWN,
    SHUTDOWN_S,
    ActorHandle,
    ActorRecord,
    ActorSystem,
    BaseActorSystem,
    open_reply,
)
from overlord.rpc.timeouts import TIMEOUTS
from overlord.transport.connection import TIMEOUT, Connection, open_connection
from overlord.transport.server import Server
from overlord.transport.server_connection import ServerConnection
from overlord.transport.shared_memory import SharedMemoryPool

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# The listener for actors that connect to their caller.
#
# An actor presents a token and its lease id. From then on it receives calls by that connection.

OnReply = Callable[[ActorRecord, int, bytes, list[np.ndarray]], None]


def complete_call(
    record: ActorRecord, number: int, header: bytes, columns: list[np.ndarray]
) -> None:
    """Complete the pending call ``number`` of an actor with its encoded reply."""
    record.complete_call(number, *open_reply(record.name, header, columns))


class ActorListener:
    """A listener that accepts the connections of expected actors and receives their replies.

    ``on_hello`` receives the hello of an actor. ``on_disconnect(record, reason)`` reports the end
    of a connection whose process may still be alive. ``on_end(record)`` reports that an actor ended
    and all its messages were read. Callbacks run in the server's thread.
    """

    def __init__(
        self,
        platform: Platform,
        *,
        on_end: Callable[[ActorRecord], None],
        on_disconnect: Callable[[ActorRecord, str], None],
        on_reply: OnReply = complete_call,
        on_hello: Callable[[ActorRecord, Mapping[str, Any]], None] = lambda record, hello: None,
        pool: SharedMemoryPool | None = None,
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self._on_end, self._on_disconnect = on_end, on_disconnect
        self._on_reply, self._on_hello = on_reply, on_hello
        self._lease_ids = itertools.count(1)
        self._expected: dict[int, ActorRecord] = {}  # by lease id
        self._connected: dict[ServerConnection, ActorRecord] = {}
        self._server = Server(
            token=self.token,
            on_open=self._opened,
            on_message=self._received,
            on_close=self._disconnected,
            pool=pool,
            **platform.inside(),
        )
        self.address = self._server.address

    @property
    def in_its_thread(self) -> bool:
        return self._server.in_its_thread

    def expect(self, record: ActorRecord) -> int:
        """Expect an actor to connect, and return its new lease id.

        A former lease id of the actor becomes invalid.
        """
        self._expected.pop(record.inbound.lease_id, None)
        record.inbound.lease_id = next(self._lease_ids)
        self._expected[record.inbound.lease_id] = record
        return record.inbound.lease_id

    def find(self, lease_id: int) -> ActorRecord | None:
        """Return the record of the actor with this lease id; None if the actor has died."""
        return self._expected.get(lease_id)

    def forget(self, lease_id: int) -> None:
        """Expect an actor no longer, because its process could not be started."""
        self._expected.pop(lease_id, None)

    def died(self, lease_id: int, reason: str, fault: BaseException | None = None) -> None:
        """Record that the process of an actor exited, as its launcher reports.

        ``fault`` is the exception of its factory. Messages that it sent before still count, so
        ``on_end`` is called after them. An unknown lease id is ignored.
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

    def later(self, work: Callable[[], None]) -> None:
        """Queue a call of ``work`` in the server's thread; return at once."""
        self._server.later(work)

    # in the server's thread

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Call ``ready`` whenever a file is readable, until ``unwatch``."""
        self._server.watch(fd, ready)

    def unwatch(self, fd: int) -> None:
        self._server.unwatch(fd)

    def exited(self, lease_id: int, reason: str, fault: BaseException | None = None) -> None:
        """Record that a process of this machine has exited: all that it sent has arrived."""
        record = self._expected.get(lease_id)
        connection = None if record is None else record.inbound.connection
        if record is None or connection is None:
            self.died(lease_id, reason, fault)
            return
        del self._expected[lease_id]
        with record.inbound.lock:
            record.inbound.end = (reason, fault)
        self._server.finish(connection, reason)

    def _opened(self, connection: ServerConnection, hello: Mapping[str, Any]) -> dict[str, Any]:
        name, lease_id, pid = hello.get("name"), hello.get("lease_id"), hello.get("pid")
        record = self._expected.get(lease_id) if type(lease_id) is int else None
        if record is None or record.name != name or type(pid) is not int:
            raise OverlordError(
                f"actor {name!r:.60}: expected a valid lease id, got {lease_id!r:.20}; the actor "
                "was replaced or given up"
            )
        with record.inbound.lock:
            if record.inbound.connection is not None or record.reason is not None:
                raise OverlordError(
                    f"{record.name}: expected one connection with lease id {lease_id}, got a "
                    "second one, or the actor was given up"
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
                    f"{record.name}: expected a reply, got {type(value).__name__}; run the same "
                    "version of Overlord on both sides"
                )

    def _disconnected(self, connection: ServerConnection, reason: str) -> None:
        record = self._connected.pop(connection)
        record.inbound.rejected = connection.rejected
        with record.inbound.lock:
            record.inbound.connection, died = None, record.inbound.end is not None
        if died:
            self._on_end(record)
        else:
            self._on_disconnect(record, reason)


def after(seconds: float, act: Callable[[], None]) -> None:
    """Call ``act`` after ``seconds`` in a daemon thread, which does not delay the exit."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


# ----------------------------------------------------------------------------
# Direct calls to actors that another process started.
#
# The launching process sends each actor the address of its caller. The actor connects to the
# server of the caller and presents a token and a lease id. If the caller dies, the actors connect
# to its successor. If a caller that counted as dead resumes, it has no actors: an actor serves
# only the server to which it was redirected last. Calls and replies are those of the other actor
# systems.

EndProcess = Callable[[str, int, str], None]  # name, lease id, reason


def _cannot_end(name: str, lease_id: int, reason: str) -> None:
    """Do nothing: this process has no connection to the launcher of the actor."""


class RpcServer(BaseActorSystem):
    """An actor system whose actors connect to it.

    ``end(name, lease_id, reason)`` asks the launcher of an actor to end its process. ``cut``
    reports an actor whose connection broke, nearly always because its process ended. After both,
    the owner must call ``died``. Callbacks run in the server's thread.
    """

    def __init__(
        self,
        *,
        end: EndProcess = _cannot_end,
        cut: EndProcess | None = None,
        machine: Platform | None = None,
    ) -> None:
        super().__init__(start=_refuse_start)
        self._end, self._cut = end, cut
        self._listener: ActorListener = ActorListener(
            machine or Platform(), on_end=self._ended, on_disconnect=self._disconnected
        )
        self.token, self.address = self._listener.token, self._listener.address

    def expect(self, name: str) -> tuple[ActorHandle, int]:
        """Expect an actor to connect, for the first time or again; return its handle and lease id.

        Calls through the handle are queued until it connects. Raise ``OverlordError`` if an actor
        of this name is expected or alive.
        """
        record = self._new_record(name)
        with self._names_lock:
            self._check_open(name)
            if (former := self._names.get(name)) is not None and former.reason is None:
                raise OverlordError(
                    f"actor {name!r}: expected a free name, got that of an actor that is expected "
                    "or alive; use another name, or kill that actor"
                )
            record.handle = ActorHandle(name, None, record)
            self._names[name] = record
            return record.handle, self._listener.expect(record)

    def died(self, lease_id: int, reason: str, fault: BaseException | None = None) -> None:
        """Record that an actor exited, as its launcher reports.

        ``fault`` is the exception of its factory. Messages that it sent before still count. An
        unknown lease id is ignored.
        """
        self._listener.died(lease_id, reason, fault)

    def kill(self, handle: ActorHandle) -> None:
        self.kill_all([handle])

    def kill_all(self, handles: Sequence[ActorHandle]) -> None:
        """Kill actors concurrently, because a single one may take seconds to exit.

        Raise ``DataStall`` if one has not exited after ``Timeouts.killed_elsewhere_s``.
        """
        timeout_s = TIMEOUTS.killed_elsewhere_s
        records, deadline = [self._own(handle) for handle in handles], time.monotonic() + timeout_s
        for record in records:
            self._end(record.name, record.inbound.lease_id, "killed")
        if late := [
            r.name
            for r in records
            if r.reason is None and not r.exited.wait(max(0.0, deadline - time.monotonic()))
        ]:
            raise DataStall(
                f"the process of actor {', '.join(map(repr, late))} to exit after it was killed",
                timeout_s,
            )

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Disconnect from all actors, which keep running until their launcher ends them."""
        if self._close_once():
            for record in self._living():
                self._mark_ended(record, SHUT_DOWN, quiet=True)
            self._listener.close(timeout_s)

    # in the server's thread

    def _ended(self, record: ActorRecord) -> None:
        assert record.inbound.end is not None
        reason, fault = record.inbound.end
        self._mark_ended(record, reason, fault=fault)
        record.exited.set()

    def _disconnected(self, record: ActorRecord, reason: str) -> None:
        if self._closed or record.reason is not None:
            return
        if self._cut is not None:
            self._cut(record.name, record.inbound.lease_id, reason)
        else:
            self.died(record.inbound.lease_id, f"its connection ended: {reason}")


def _refuse_start(
    record: ActorRecord, factory: Callable[..., Any], args: tuple[Any, ...]
) -> NoReturn:
    raise OverlordError(
        f"actor {record.name!r}: expected expect() here, got spawn(); start actors where the "
        "job was launched"
    )


def fault_of(control: ActorSystem, dead: ActorHandle) -> BaseException | None:
    """Return the exception of the factory of a dead actor; None if the factory did not fail."""
    error = control.call(dead, "").exception(0)
    return None if isinstance(error, ActorLost) else error


class OpenConnection(Protocol):
    """A function that opens a connection, such as ``transport.connection.open_connection``."""

    def __call__(
        self, address: str, token: str, hello: dict[str, Any], *, timeout_s: float
    ) -> tuple[Connection, dict[str, Any]]: ...


class RpcEndpoint:
    """The actor's end, which executes calls of the server to which it was redirected last.

    The actor also executes calls of its launcher, by another connection.
    """

    def __init__(
        self,
        name: str,
        actor: object,
        *,
        open_connection: OpenConnection = open_connection,
        exit_process: Callable[[int], None] = exit_now,
    ):
        self._name, self._actor, self._open_connection, self._exit = (
            name,
            actor,
            open_connection,
            exit_process,
        )
        self._lock = threading.Lock()
        self._redirects = 0
        self._connection: Connection | None = None

    def redirect(self, address: str, token: str, lease_id: int) -> None:
        """Disconnect from the former server, and connect to this one in a thread.

        Return at once, because the server may hang and be replaced by another.
        """
        with self._lock:
            self._redirects += 1
            redirect, former, self._connection = self._redirects, self._connection, None
        if former is not None:
            former.close("redirected to another server")
        hello = {"name": self._name, "lease_id": lease_id, "pid": os.getpid()}
        threading.Thread(
            target=self._connect,
            args=(redirect, address, token, hello),
            name=f"overlord-calls-{lease_id}",
            daemon=True,
        ).start()

    def _connect(self, redirect: int, address: str, token: str, hello: dict[str, Any]) -> None:
        while self._redirects == redirect:
            try:
                connection, _ = self._open_connection(
                    address, token, hello, timeout_s=TIMEOUTS.connect_s
                )
            except DataStall:
                continue
            except (ActorLost, LinkRefused) as gone:  # a new redirect will follow
                log.debug("actor %s could not connect to its caller: %s", self._name, gone)
                return
            if hasattr(connection, "max_held"):
                connection.max_held = 0  # messages are kept for long, so they are copied
            with self._lock:
                if wanted := self._redirects == redirect:
                    self._connection = connection
            if wanted:
                self._serve(connection)
            connection.close()
            return

    def _serve(self, connection: Connection) -> None:
        server = ActorServer(self._name, lambda *reply: self._reply(connection, *reply))
        server.build(lambda: self._actor)
        # The caller is lost, so a new redirect will follow.
        with contextlib.suppress(ActorLost, FrameError):
            while self._connection is connection:
                if (call := connection.recv(TIMEOUTS.idle_s)) is TIMEOUT:
                    continue
                try:
                    server.perform(*call)
                except SystemExit as e:
                    self._exit(exit_code(e))

    def _reply(
        self, connection: Connection, number: int, header: bytes, columns: list[np.ndarray]
    ) -> None:
        try:
            connection.send((number, header, columns), timeout_s=TIMEOUTS.reply_s)
        except ActorLost:
            pass
        except DataStall as stalled:
            log.warning("connection of %s closed: %s", self._name, stalled)
            connection.close(str(stalled))

    def close(self) -> None:
        with self._lock:
            self._redirects += 1
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close("it exits")
