"""Actors, as their callers start, call and supervise them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from threading import Event, Lock
from typing import Any, Protocol, Self

import numpy as np

from overlord.checks import did_you_mean
from overlord.errors import ActorLost, DataStall, FrameError, JobError, OverlordError
from overlord.process.shutdown import CloseOnce, Steps
from overlord.rpc.timeouts import TIMEOUTS
from overlord.transport.codec import decode, encode
from overlord.transport.frame import check_size
from overlord.transport.server_connection import ServerConnection

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# Calls and replies: their numbers and encoding, the same on all backends.

# Call numbers with a special meaning. CONTROL to an actor is a request to exit. CONTROL from an
# actor reports that it started, or failed to start or to close. A call with NO_REPLY has no reply.
CONTROL, NO_REPLY = 0, 2**64 - 1


def encode_message(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """Encode a call or a reply; raise ``FrameError`` if it does not fit a frame of its own."""
    header, columns = encode(value)
    check_size(len(header), len(columns))
    return header, columns


def open_reply(name: str, header: Any, columns: list[np.ndarray]) -> tuple[bool, Any]:
    """Return (success, value or error) of an encoded reply.

    A reply that cannot be decoded (a record that only the actor has registered) counts as a
    ``FrameError`` of its call.
    """
    try:
        ok, value = decode(header, columns)
    except FrameError as e:
        return False, FrameError(e.problem, f"reply of actor {name!r}, {e.where}", e.remedy)
    return ok, value


def factory_failed(error: BaseException) -> str:
    """Return the reason of an actor's end for an exception of its factory, as text."""
    return f"its factory failed: {type(error).__name__}: {error}"


# ----------------------------------------------------------------------------
# The actor system: named actors, calls with futures, and death notices.
#
# Every runtime with more than one process is built on it. An actor is the result of
# ``factory(*args)``. It runs in another process or on another machine, and its methods run one at
# a time. Arguments and results are encoded by ``transport.codec`` on every backend, so a value
# that works on one backend works on all.
#
# ``docs/rpc.md`` is the contract; ``tests/scenarios/test_actor_system.py`` verifies it.

SHUTDOWN_S, INTERRUPTED_S = TIMEOUTS.shutdown_s, TIMEOUTS.interrupted_s
SHUT_DOWN = "it was shut down"


class PendingCall(Future[Any]):
    """The future of one call, with the names of its actor and method."""

    def __init__(self, actor: str, method: str):
        super().__init__()
        self.actor, self.method = actor, method
        self.set_running_or_notify_cancel()  # a call cannot be cancelled


class ActorHandle:
    """A reference to one actor for its whole life.

    A later actor of the same name has another handle.
    """

    __slots__ = ("name", "pid", "record")

    def __init__(self, name: str, pid: int | None, record: ActorRecord):
        self.name, self.pid, self.record = name, pid, record

    @property
    def alive(self) -> bool:
        return self.record.reason is None

    def __repr__(self) -> str:
        return f"Handle({self.name!r}" + (f", pid={self.pid})" if self.pid is not None else ")")


OnDeath = Callable[[ActorHandle, str], None]
Somewhere = str | Mapping[str, str] | None  # a node by name, any node with these labels, or any


class ActorSystem(Protocol):
    """The interface of every backend; ``docs/rpc.md`` specifies each method."""

    def spawn(
        self,
        factory: Callable[..., Any],
        *args: Any,
        name: str,
        resources: Mapping[str, float] | None = None,
        node: Somewhere = None,
    ) -> ActorHandle: ...
    def call(self, handle: ActorHandle, method: str, *args: Any) -> Future[Any]: ...
    def tell(self, handle: ActorHandle, method: str, *args: Any) -> None: ...
    def get(self, future: Future[Any], timeout_s: float) -> Any: ...
    def wait(
        self, futures: Sequence[Future[Any]], timeout_s: float
    ) -> tuple[list[Future[Any]], list[Future[Any]]]: ...
    def lookup(self, name: str) -> ActorHandle: ...
    def kill(self, handle: ActorHandle) -> None: ...
    def on_death(self, handle: ActorHandle, callback: OnDeath) -> None: ...
    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None: ...


# Bytes that may be queued for an actor: no limit. An event loop must not wait for a blocked actor;
# heartbeats detect it.
UNBOUNDED = 2**62


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
        self.lock = Lock()
        # reason and fault of the actor's end, while its earlier messages are still being read
        self.end: tuple[str, BaseException | None] | None = None
        self._queued: list[tuple[int, bytes, list[np.ndarray]]] = []
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


class ActorRecord:
    """The state of one actor in its actor system: pending calls, and the reason of its end.

    ``owner`` identifies the actor system. Runs on: any thread.
    """

    def __init__(self, name: str, owner: object = None):
        self.name, self.owner = name, owner
        self.inbound = InboundConnection(name)
        self.handle: ActorHandle | None = None  # None while it is being started
        self.reason: str | None = None  # why it ended; None while it runs
        self.fault: BaseException | None = None  # the exception of its factory
        self.place: Any = None  # where it should run, in the form of the backend
        self.exiting = False  # its exit was requested
        self.exited = Event()  # set by backends with processes once the process has exited
        self._lock = Lock()
        self._pending: dict[int, PendingCall] = {}
        self._callbacks: list[Callable[[str], None]] = []
        self._numbers = itertools.count(1)  # call numbers
        self._quiet = False

    def open_call(self, method: str) -> tuple[int, PendingCall]:
        """Register a call that is about to be sent.

        If the actor has ended, the future already holds its error.
        """
        number, answer = next(self._numbers), PendingCall(self.name, method)
        with self._lock:
            if self.reason is None:
                self._pending[number] = answer
                return number, answer
        answer.set_exception(self._lost())
        return number, answer

    def complete_call(self, number: int, ok: bool, value: Any) -> None:
        """Set the value or error of a pending call; ignore a call that is no longer pending."""
        with self._lock:
            answer = self._pending.pop(number, None)
        if answer is None:  # the actor was given up
            return
        if ok:
            answer.set_result(value)
        else:
            answer.set_exception(value)

    def mark_ended(
        self, reason: str, *, fault: BaseException | None = None, quiet: bool = False
    ) -> bool:
        """Mark the actor as ended, fail its pending calls, and run its death callbacks.

        Return False without effect if it was marked before. ``quiet``: it exited on request, which
        does not count as a death, so no callback runs.
        """
        with self._lock:
            if self.reason is not None:
                return False
            self.reason, self.fault, self._quiet = reason, fault, quiet
            pending, self._pending = list(self._pending.values()), {}
            callbacks, self._callbacks = self._callbacks, []
        for answer in pending:
            answer.set_exception(self._lost())
        for callback in callbacks if not quiet else ():
            callback(reason)
        return True

    def on_end(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` when the actor dies, or at once if it is dead.

        An exit on request is not a death.
        """
        with self._lock:
            if self.reason is None:
                self._callbacks.append(callback)
                return
        if not self._quiet:
            callback(self.reason)

    def _lost(self) -> BaseException:
        """Return the error of all calls: the exception of the factory, or ``ActorLost``."""
        return self.fault if self.fault is not None else ActorLost(self.name, self.reason or "")


StartActor = Callable[[ActorRecord, Callable[..., Any], tuple[Any, ...]], ActorHandle]
PlaceActor = Callable[[str, Mapping[str, float], Somewhere], Any]


def this_machine_only(name: str, resources: Mapping[str, float], node: Somewhere) -> None:
    """Return None as the place of an actor; raise ``JobError`` if a node is requested."""
    if node is not None:
        raise JobError(
            [
                f"node: expected None, since this runtime has one machine, got {node!r}; "
                "leave it out"
            ],
            f"actor {name!r}",
        )


class BaseActorSystem:
    """The common code of all backends: names, calls and waits.

    A backend passes functions that start and place an actor. It adds ``kill`` and ``shutdown``.
    """

    def __init__(self, *, start: StartActor, place: PlaceActor = this_machine_only) -> None:
        self._start, self._place = start, place
        self._owner = object()  # identifies the records of this actor system
        self._names: dict[str, ActorRecord] = {}
        self._names_lock = Lock()
        self._closed = False
        self._ending = CloseOnce()

    def spawn(
        self,
        factory: Callable[..., Any],
        *args: Any,
        name: str,
        resources: Mapping[str, float] | None = None,
        node: Somewhere = None,
    ) -> ActorHandle:
        """Start an actor and return its handle before its factory has run.

        Actors therefore start concurrently. ``resources`` is for backends that place actors; others
        ignore it. Raise ``JobError`` if a living actor has this name.
        """
        place = self._place(name, resources or {}, node)
        record = self._new_record(name)
        record.place = place
        with self._names_lock:
            self._check_open(name)
            if name in self._names:
                raise JobError(
                    [
                        "expected a free name, got that of a living actor; kill that actor, or use "
                        "another name"
                    ],
                    f"actor {name!r}",
                )
            self._names[name] = record
        try:
            record.handle = self._start(record, factory, args)
        except BaseException:
            self._mark_ended(record, "it could not be started", quiet=True)
            raise
        return record.handle

    def call(self, handle: ActorHandle, method: str, *args: Any) -> Future[Any]:
        """Call a method of an actor and return its future; never wait.

        Calls of one thread arrive in order. The arguments must not be changed afterwards. Raise
        ``FrameError`` for arguments that cannot be encoded. If the actor is dead, the future has
        the error.
        """
        record = self._own(handle)
        header, columns = _encoded(handle.name, method, args)
        number, answer = record.open_call(method)
        if not answer.done():
            try:
                record.inbound.send(number, header, columns)
            except OverlordError as e:
                record.complete_call(number, False, e)
                raise
        return answer

    def tell(self, handle: ActorHandle, method: str, *args: Any) -> None:
        """Call a method without a reply, which saves a wake-up on both sides.

        A call to a dead actor is dropped. An exception of the method goes to the actor's log.
        """
        record = self._own(handle)
        header, columns = _encoded(handle.name, method, args)
        if record.reason is None:
            record.inbound.send(NO_REPLY, header, columns)

    def get(self, future: Future[Any], timeout_s: float) -> Any:
        """Return the result of a call or raise its exception; ``DataStall`` at the deadline.

        After a ``DataStall`` the call continues, and ``get`` may be called again.
        """
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # it completed just now, or the method itself raised TimeoutError
                return future.result()
            raise DataStall(self._waiting_for(future), timeout_s) from None

    def _waiting_for(self, future: Future[Any]) -> str:
        """Return the event that completes a call, as text for ``DataStall``."""
        return (
            f"actor {future.actor!r} to answer {future.method!r}"
            if isinstance(future, PendingCall)
            else "a future"
        )

    def wait(
        self, futures: Sequence[Future[Any]], timeout_s: float
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        """Wait until one future is done, or for ``timeout_s``; return done and pending futures.

        Both lists keep the given order.
        """
        concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)
        ready = {id(f) for f in futures if f.done()}
        return [f for f in futures if id(f) in ready], [f for f in futures if id(f) not in ready]

    def lookup(self, name: str) -> ActorHandle:
        """Return the handle of a living actor; raise ``ActorLost`` if there is none."""
        with self._names_lock:
            known = {record.name: record.handle for record in self._names.values()}
        handle = known.get(name)
        if handle is None:
            raise ActorLost(
                name,
                "there is no actor of this name"
                + (did_you_mean(name, known) if known else "; no actor is alive"),
            )
        return handle

    def on_death(self, handle: ActorHandle, callback: OnDeath) -> None:
        """Call ``callback(handle, reason)`` once when the actor dies, or at once if it is dead.

        An exit on request is not a death. Callbacks must be short: replies of other actors wait for
        them.
        """

        def notify(reason: str) -> None:
            try:
                callback(handle, reason)
            except Exception:
                log.exception("death callback of actor %s failed", handle.name)

        self._own(handle).on_end(notify)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(SHUTDOWN_S if kind is None else INTERRUPTED_S)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Refuse new actors; a backend also ends its actors."""
        self._close_once()

    # for backends

    def _new_record(self, name: str) -> ActorRecord:
        return ActorRecord(name, self._owner)

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise OverlordError(
                f"actor {name!r}: expected a running actor system, got one that was shut down; "
                "create another"
            )

    def _own(self, handle: ActorHandle) -> ActorRecord:
        """Return the record of a handle; raise ``OverlordError`` if it is of another system."""
        if handle.record.owner is not self._owner:
            raise OverlordError(
                f"{handle}: expected an actor of this actor system, got one of another; call it "
                "there"
            )
        return handle.record

    def _mark_ended(
        self,
        record: ActorRecord,
        reason: str,
        *,
        fault: BaseException | None = None,
        quiet: bool = False,
    ) -> bool:
        """Mark an actor as ended; return False if it was marked before.

        Its name is free before any callback runs, so that a callback can start a successor.
        """
        with self._names_lock:
            if self._names.get(record.name) is record:
                del self._names[record.name]
        return record.mark_ended(reason, fault=fault, quiet=quiet)

    def _living(self) -> list[ActorRecord]:
        with self._names_lock:
            return list(self._names.values())

    def _request_exit(
        self, records: Sequence[ActorRecord], timeout_s: float, kill: Callable[[ActorRecord], None]
    ) -> list[ActorRecord]:
        """Request that actors finish their calls and exit; kill the others after ``timeout_s``.

        Return the killed actors. After an interrupt (Ctrl-C), kill all that have not exited.
        """
        deadline = time.monotonic() + timeout_s
        try:
            for record in records:
                record.exiting = True
                record.inbound.send(CONTROL, b"", [])
            late = [
                record
                for record in records
                if not record.exited.wait(max(0.0, deadline - time.monotonic()))
            ]
        except BaseException:  # Ctrl-C: do not wait any longer, and leave no actor running
            for record in records:
                if not record.exited.is_set():
                    kill(record)
                    self._mark_ended(record, SHUT_DOWN, quiet=True)
            raise
        for record in late:
            log.warning("actor %s did not exit in %.1f s; killed", record.name, timeout_s)
            kill(record)
        return late

    def _run_shutdown(self, steps: Callable[[], Steps]) -> None:
        """Run the shutdown steps once.

        After an interrupt, the next call runs the remaining steps.
        """
        self._closed = True
        self._ending.run(steps)

    def _close_once(self) -> bool:
        """Refuse new actors from now on; return True only for the first call."""
        with self._names_lock:
            before, self._closed = self._closed, True
        return not before


def _encoded(actor: str, method: str, args: tuple[Any, ...]) -> tuple[bytes, list[np.ndarray]]:
    try:
        return encode_message((method, args))
    except FrameError:
        _name_argument(actor, method, args)
        raise


def _name_argument(actor: str, method: str, args: tuple[Any, ...]) -> None:
    """Raise a ``FrameError`` that names the argument that cannot be encoded."""
    for i, value in enumerate(args, 1):
        try:
            encode(value)
        except FrameError as e:
            where = f"{method!r} of actor {actor!r}, argument {i}{e.where.removeprefix('value')}"
            raise FrameError(e.problem, where, e.remedy) from None
