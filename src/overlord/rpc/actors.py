"""The control plane: actors by name, calls with futures, deaths that are told. Every runtime that
has more than one part is built on it.

An actor is whatever ``factory(*args)`` returns. It lives somewhere else (a thread, a process, later
another machine), its methods run one at a time, and only data travels: what a call carries is
encoded by ``channel.codec`` on every backend, so what works on one works on all.
``docs/control.md`` is the contract; ``tests/scenarios/test_control.py`` is its proof.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from threading import Event, Lock
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from overlord.checks import did_you_mean
from overlord.errors import ActorLost, DataStall, FrameError, JobError, OverlordError
from overlord.process.shutdown import CloseOnce, Steps
from overlord.rpc.server import ITSELF, NOBODY
from overlord.transport.codec import encode

log = logging.getLogger("overlord")

SHUTDOWN_S = 5.0
# for actors to leave when an exception, or the end of the program, is on its way: Ctrl-C ends
# within a second
HURRY_S = 0.5
SHUT_DOWN = "it was shut down"


class PendingCall(Future[Any]):
    """The future of one call; knows whom it waits for."""

    def __init__(self, actor: str, method: str):
        super().__init__()
        self.actor, self.method = actor, method
        self.set_running_or_notify_cancel()  # a call cannot be taken back


class ActorHandle:
    """One actor, for life: an actor that comes later under the same name has another handle."""

    __slots__ = ("_record", "name", "pid")

    def __init__(self, name: str, pid: int | None, record: ActorRecord):
        self.name, self.pid, self._record = name, pid, record

    @property
    def alive(self) -> bool:
        return self._record.reason is None

    def __repr__(self) -> str:
        return f"Handle({self.name!r}" + (f", pid={self.pid})" if self.pid is not None else ")")


OnDeath = Callable[[ActorHandle, str], None]
Somewhere = str | Mapping[str, str] | None  # a node by its name, any that has these labels, or any


class ActorSystem(Protocol):
    """What a backend does; ``docs/control.md`` says each word of it."""

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


class ActorRecord:
    """What a control plane knows of one actor: calls without an answer, and how it ended. For any
    thread.
    """

    def __init__(self, name: str):
        self.name = name
        self.handle: ActorHandle | None = None  # while it is being started
        self.reason: str | None = None  # why it ended; None while it lives
        self.fault: BaseException | None = None  # what its factory raised
        self.place: Any = None  # where it was asked to be, as its backend has it
        self.leaving = False  # it was asked to
        self.gone = Event()  # set by backends whose actors have a process: that is no more
        self._lock = Lock()
        self._pending: dict[int, PendingCall] = {}
        self._callbacks: list[Callable[[str], None]] = []
        self._numbers = itertools.count(1)  # of calls
        self._quiet = False

    def opened(self, method: str) -> tuple[int, PendingCall]:
        """A call is about to be sent. If there is nobody left to send it to, its answer is an error
        already.
        """
        number, answer = next(self._numbers), PendingCall(self.name, method)
        with self._lock:
            if self.reason is None:
                self._pending[number] = answer
                return number, answer
        answer.set_exception(self._lost())
        return number, answer

    def answered(self, number: int, ok: bool, value: Any) -> None:
        with self._lock:
            answer = self._pending.pop(number, None)
        if answer is None:  # of an actor that was given up
            return
        if ok:
            answer.set_result(value)
        else:
            answer.set_exception(value)

    def ended(
        self, reason: str, *, fault: BaseException | None = None, quiet: bool = False
    ) -> bool:
        """The actor is no more: whoever waits for it is told, once. ``quiet``: it left because it
        was asked to, which is no death.
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
        with self._lock:
            if self.reason is None:
                self._callbacks.append(callback)
                return
        if not self._quiet:
            callback(self.reason)

    def _lost(self) -> BaseException:
        """A fault of the factory is the answer to every call, whenever it was made: callers need
        not win a race to learn of it.
        """
        return self.fault if self.fault is not None else ActorLost(self.name, self.reason or "")


R = TypeVar("R", bound=ActorRecord)


class BaseActorSystem(Generic[R]):
    """What all backends share: names, calls, waits. A backend adds how an actor is started, called,
    killed and asked to leave.
    """

    _kind: type[R]

    def __init__(self) -> None:
        self._names: dict[str, R] = {}
        self._names_lock = Lock()
        self._closed = False
        self._ending = CloseOnce()

    # for a backend to fill

    def _start(self, record: R, factory: Callable[..., Any], args: tuple[Any, ...]) -> ActorHandle:
        raise NotImplementedError

    def _place(self, name: str, resources: Mapping[str, float], node: Somewhere) -> Any:
        """Where an actor is to be, in the backend's own words."""
        if node is not None:
            raise JobError(
                [f"node {node!r} was asked for, but this runtime has one machine; leave node out"],
                f"actor {name!r}",
            )

    def _send(self, record: R, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        """Hand a call over without waiting for anyone."""
        raise NotImplementedError

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        raise NotImplementedError

    # for everyone

    def spawn(
        self,
        factory: Callable[..., Any],
        *args: Any,
        name: str,
        resources: Mapping[str, float] | None = None,
        node: Somewhere = None,
    ) -> ActorHandle:
        """Start an actor; returns before its factory has run, so that many start together.
        ``resources`` is a hint for backends that place actors; these run on this machine, and know
        no other ``node``.
        """
        place = self._place(name, resources or {}, node)
        record = self._kind(name)
        record.place = place
        with self._names_lock:
            self._check_open(name)
            if name in self._names:
                raise JobError(
                    ["the name is taken by a living actor; kill that first, or take another name"],
                    f"actor {name!r}",
                )
            self._names[name] = record
        try:
            record.handle = self._start(record, factory, args)
        except BaseException:
            self._over(record, "it could not be started", quiet=True)
            raise
        return record.handle

    def call(self, handle: ActorHandle, method: str, *args: Any) -> Future[Any]:
        """Ask an actor; never waits. Calls of one thread arrive in order. Arguments must not be
        changed afterwards.
        """
        record = self._mine(handle)
        header, columns = _encoded(handle.name, method, args)
        number, answer = record.opened(method)
        if not answer.done():
            try:
                self._send(record, number, header, columns)
            except OverlordError as e:
                record.answered(number, False, e)
                raise
        return answer

    def tell(self, handle: ActorHandle, method: str, *args: Any) -> None:
        """The same without an answer, which would wake both sides once more. One who is gone is
        told nothing; a fault of the method is in the log of its actor.
        """
        record = self._mine(handle)
        header, columns = _encoded(handle.name, method, args)
        if record.reason is None:
            self._send(record, NOBODY, header, columns)

    def get(self, future: Future[Any], timeout_s: float) -> Any:
        """The answer, or the actor's own exception; ``DataStall`` at the deadline. The call goes
        on, and may be asked for again.
        """
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # it came just now; or the method itself raised this
                return future.result()
            raise DataStall(self._whom(future), timeout_s) from None

    def _whom(self, future: Future[Any]) -> str:
        """What an answer that does not come waits for."""
        return (
            f"actor {future.actor!r} to answer {future.method!r}"
            if isinstance(future, PendingCall)
            else "a future"
        )

    def wait(
        self, futures: Sequence[Future[Any]], timeout_s: float
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        """Until one has its answer (or its error), or the deadline: those that have, and those that
        have not, in the order given.
        """
        concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)
        ready = {id(f) for f in futures if f.done()}
        return [f for f in futures if id(f) in ready], [f for f in futures if id(f) not in ready]

    def lookup(self, name: str) -> ActorHandle:
        with self._names_lock:
            known = {record.name: record.handle for record in self._names.values()}
        handle = known.get(name)
        if handle is None:
            raise ActorLost(
                name,
                "there is no actor of this name"
                + (did_you_mean(name, known) if known else "; there is none at all"),
            )
        return handle

    def on_death(self, handle: ActorHandle, callback: OnDeath) -> None:
        """Call back once when the actor dies, at once if it has. Callbacks must be short: other
        actors' answers wait behind them.
        """

        def told(reason: str) -> None:
            try:
                callback(handle, reason)
            except Exception:
                log.exception("the callback for the death of %s failed", handle.name)

        self._mine(handle).on_end(told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(SHUTDOWN_S if kind is None else HURRY_S)

    # for backends

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise OverlordError(f"actor {name!r}: this control plane was shut down; make another")

    def _mine(self, handle: ActorHandle) -> R:
        if not isinstance(handle._record, self._kind):
            raise OverlordError(f"{handle} is of another control plane")
        return handle._record

    def _over(
        self, record: R, reason: str, *, fault: BaseException | None = None, quiet: bool = False
    ) -> bool:
        """The name is free before anyone is told, so that whoever is told can start another under
        it.
        """
        with self._names_lock:
            if self._names.get(record.name) is record:
                del self._names[record.name]
        return record.ended(reason, fault=fault, quiet=quiet)

    def _living(self) -> list[R]:
        with self._names_lock:
            return list(self._names.values())

    def _dismiss(
        self, records: Sequence[R], timeout_s: float, kill: Callable[[R], None]
    ) -> list[R]:
        """Ask these to finish their calls and leave. Those that had not at the deadline, and were
        killed for it.
        """
        deadline = time.monotonic() + timeout_s
        try:
            for record in records:
                record.leaving = True
                self._send(record, ITSELF, b"", [])
            late = [
                record
                for record in records
                if not record.gone.wait(max(0.0, deadline - time.monotonic()))
            ]
        except (
            BaseException
        ):  # Ctrl-C: nobody wants to wait any more, and who is not asked again must not stay
            for record in records:
                if not record.gone.is_set():
                    kill(record)
                    self._over(record, SHUT_DOWN, quiet=True)
            raise
        for record in late:
            log.warning("actor %s did not leave in %.1f s and was killed", record.name, timeout_s)
            kill(record)
        return late

    def _end_by(self, steps: Callable[[], Steps]) -> None:
        """For the first who shuts down; for another one after that was interrupted, who does the
        rest.
        """
        self._closed = True
        self._ending.go(steps)

    def _close_once(self) -> bool:
        """True for the first who shuts down. For backends that have nothing to wait for in
        between.
        """
        with self._names_lock:
            before, self._closed = self._closed, True
        return not before


def _encoded(actor: str, method: str, args: tuple[Any, ...]) -> tuple[bytes, list[np.ndarray]]:
    try:
        return encode((method, args))
    except FrameError:
        _name_argument(actor, method, args)
        raise


def _name_argument(actor: str, method: str, args: tuple[Any, ...]) -> None:
    """Encoding failed: raise for the argument that is to blame."""
    for i, value in enumerate(args, 1):
        try:
            encode(value)
        except FrameError as e:
            where = f"{method!r} of actor {actor!r}, argument {i}{e.where.removeprefix('value')}"
            raise FrameError(e.problem, where, e.remedy) from None
