"""Actors that this process launches, calls and supervises, whatever starts their processes.

The process of an actor connects to its launching process with an address, a token and a lease id
(``actor_process.py``). All calls and replies use that connection. A launcher only spawns processes,
kills them and reports their deaths.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from overlord.concurrency.platform import Platform
from overlord.errors import DataStall, OverlordError
from overlord.process.code import pack_code
from overlord.process.shutdown import Steps
from overlord.rpc.actor_process import LaunchSpec
from overlord.rpc.actors import (
    CONTROL,
    INTERRUPTED_S,
    SHUT_DOWN,
    SHUTDOWN_S,
    ActorHandle,
    ActorRecord,
    BaseActorSystem,
    PendingCall,
    PlaceActor,
    factory_failed,
    open_reply,
)
from overlord.rpc.peers import ActorListener, InboundConnection, complete_call
from overlord.transport.shared_memory import SharedMemoryPool

log = logging.getLogger("overlord")

MAX_WAITING_BYTES = 2**30  # queued calls to a stuck actor: more would fill the memory
SHARED_BYTES = 2**28  # large arrays that wait in shared memory for all actors together


class LaunchedRecord(ActorRecord):
    """The record of an actor whose process this process launches."""

    def __init__(self, name: str):
        super().__init__(name)
        self.inbound = InboundConnection(name)
        self.inbound.max_waiting_bytes = MAX_WAITING_BYTES


L = TypeVar("L", bound=LaunchedRecord)


class Launcher(Protocol[L]):
    """The part that starts and kills the processes of actors, and reports their deaths.

    It reports every death once to the listener that ``attach`` gave it, by ``died`` or ``exited``.
    No call or reply of an actor passes through it.
    """

    killed_s: float  # for a killed process to exit
    exit_s: float  # the same at a shutdown

    def attach(self, listener: ActorListener[L]) -> None:
        """Use ``listener`` for all deaths."""

    def spawn(self, record: L, spec: LaunchSpec, code: bytes) -> None:
        """Start the process of an actor, which connects as ``spec`` says and builds ``code``.

        Wait for nothing.
        """

    def kill(self, record: L) -> None:
        """Kill the process of an actor; return before it has exited. Idempotent."""

    def connected(self, record: L, hello: Mapping[str, Any]) -> None:
        """Note the hello of an actor."""

    def disconnected(self, record: L, reason: str) -> None:
        """Kill an actor whose connection ended: without one its process is useless."""

    def awaits(self, record: L) -> str:
        """Return the start of an actor that has not connected yet, as text for ``DataStall``."""
        ...

    def closing(self) -> Steps:
        """Return the steps that end the launcher, after all actors have ended."""
        ...


class LaunchedActorSystem(BaseActorSystem[L], Generic[L]):
    """The actor system of one launcher.

    Callbacks of futures and deaths run in the thread of the listener.
    """

    def __init__(
        self, kind: type[L], launcher: Launcher[L], platform: Platform, *, place: PlaceActor
    ) -> None:
        super().__init__(kind, send=_send, start=self._start_actor, place=place)
        self._launcher, self._pid = launcher, os.getpid()
        self._pool = SharedMemoryPool(name="actors", max_bytes=SHARED_BYTES)
        self._listener: ActorListener[L] = ActorListener(
            platform,
            on_end=self._ended,
            on_disconnect=self._disconnected,
            on_reply=self._replied,
            on_hello=launcher.connected,
            pool=self._pool,
        )
        self.address = self._listener.address
        launcher.attach(self._listener)
        atexit.register(self._at_exit)

    def call(self, handle: ActorHandle, method: str, *args: Any) -> Future[Any]:
        self._check_process()
        return super().call(handle, method, *args)

    def tell(self, handle: ActorHandle, method: str, *args: Any) -> None:
        self._check_process()
        super().tell(handle, method, *args)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise OverlordError(
                "actor system: expected the process that created it, got a forked copy; call "
                "actors in the original process"
            )

    def _start_actor(
        self, record: L, factory: Callable[..., Any], args: tuple[Any, ...]
    ) -> ActorHandle:
        self._check_process()
        code = pack_code((factory, args), f"actor {record.name!r}")
        # The process may connect before ``spawn`` returns.
        handle = record.handle = ActorHandle(record.name, None, record)
        spec = LaunchSpec(
            name=record.name,
            address=self.address,
            token=self._listener.token,
            lease_id=self._listener.expect(record),
        )
        try:
            self._launcher.spawn(record, spec, code)
        except BaseException:
            self._listener.forget(spec.lease_id)
            raise
        return handle

    def _waiting_for(self, future: Future[Any]) -> str:
        if isinstance(future, PendingCall):
            for record in self._living():
                if record.name == future.actor and not record.inbound.connected:
                    return f"{self._launcher.awaits(record)}, and to answer {future.method!r}"
        return super()._waiting_for(future)

    # ending

    def kill(self, handle: ActorHandle) -> None:
        """Kill the process, and wait until it has exited and all its callbacks have run.

        Raise ``DataStall`` if it takes ``Launcher.killed_s``. In a callback, return at once.
        """
        self._check_process()
        record = self._own(handle)
        if record.reason is None:
            self._launcher.kill(record)
        if not self._in_callback() and not record.exited.wait(self._launcher.killed_s):
            raise DataStall(
                f"the process of actor {handle.name!r} to exit after it was killed",
                self._launcher.killed_s,
            )

    def stop(self, handle: ActorHandle, timeout_s: float) -> None:
        """Let an actor finish its calls and exit; kill it after ``timeout_s``.

        Wait for its exit, which does not count as a death. A forked copy of the program does
        nothing.
        """
        if os.getpid() != self._pid:
            return
        record = self._own(handle)
        if record.reason is None:
            for late in self._request_exit([record], timeout_s, self._launcher.kill):
                late.exited.wait(self._launcher.killed_s)

    def _in_callback(self) -> bool:
        return self._listener.in_its_thread

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Let every actor finish its calls and exit; kill the others after ``timeout_s``."""
        if os.getpid() != self._pid:  # a forked copy of the program does not own the actors
            return
        if self._in_callback():
            raise OverlordError(
                "shutdown: expected a caller outside of callbacks, got a callback; call it "
                "from another thread"
            )
        self._run_shutdown(
            lambda: [
                lambda: self._end_all(timeout_s),
                lambda: self._listener.close(INTERRUPTED_S),
                self._pool.close,
                *self._launcher.closing(),
                lambda: atexit.unregister(self._at_exit),
            ]
        )

    def _end_all(self, timeout_s: float) -> None:
        for record in self._request_exit(self._living(), timeout_s, self._launcher.kill):
            record.exited.wait(self._launcher.exit_s)
            # a process that waits for a disk, or a suspended one of another machine, exits later
            self._mark_ended(record, SHUT_DOWN, quiet=True)
            record.exited.set()

    def _at_exit(self) -> None:
        self.shutdown(INTERRUPTED_S)

    # in the listener's thread

    def _disconnected(self, record: L, reason: str) -> None:
        if not self._closed and record.reason is None:
            self._launcher.disconnected(record, reason)

    def _ended(self, record: L) -> None:
        assert record.inbound.end is not None
        if record.exiting:
            self._mark_ended(record, SHUT_DOWN, quiet=True)
        elif record.inbound.rejected:
            self._mark_ended(
                record, f"it sent invalid data and was killed: {record.inbound.rejected}"
            )
        elif record.fault is not None:
            self._mark_ended(record, factory_failed(record.fault), fault=record.fault)
        else:
            self._mark_ended(record, record.inbound.end[0])
        record.exited.set()

    def _replied(self, record: L, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        if number != CONTROL:
            complete_call(record, number, header, columns)
            return
        _, fault = open_reply(record.name, header, columns)
        if record.exiting:
            log.warning("actor %s failed to close: %s", record.name, fault)
        else:
            record.fault = fault


def _send(record: LaunchedRecord, number: int, header: bytes, columns: list[np.ndarray]) -> None:
    record.inbound.send(number, header, columns)
