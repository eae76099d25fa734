"""Actors that this process launches, calls and supervises, whatever starts their processes.

The process of an actor connects to its launching process with an address, a token and a lease id
(``actor_process.py``). All calls and replies use that connection. A launcher makes the process of
each actor, which can be spawned and killed, and reports its death.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

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
    Somewhere,
    factory_failed,
    open_reply,
)
from overlord.rpc.peers import ActorListener, complete_call
from overlord.transport.shared_memory import SharedMemoryPool

log = logging.getLogger("overlord")

MAX_WAITING_BYTES = 2**30  # queued calls to a stuck actor: more would fill the memory
SHARED_BYTES = 2**28  # large arrays that wait in shared memory for all actors together


class ActorProcess(Protocol):
    """The process of one actor, as a launcher starts and kills it.

    It reports its death once to its listener, by ``died`` or ``exited``.
    """

    def spawn(self, spec: LaunchSpec, code: bytes) -> None:
        """Start the process, which connects as ``spec`` says and builds ``code``.

        Wait for nothing.
        """

    def kill(self) -> None:
        """Kill the process; return before it has exited. Idempotent."""

    def connected(self, hello: Mapping[str, Any]) -> None:
        """Note the hello of the actor."""

    def disconnected(self, reason: str) -> None:
        """Kill the process, whose connection ended: without one it is useless."""

    def awaits(self) -> str:
        """Return the start of an actor that has not connected yet, as text for ``DataStall``."""
        ...

    def pid_here(self) -> int:
        """Return the pid of a process of this machine; 0 if it is unknown or another machine's."""
        ...

    def asked(self) -> dict[str, float]:
        """Return the resources that were requested for the actor."""
        ...


class Launcher(Protocol):
    """The collaborator that makes the processes of actors, on one machine or on a cluster.

    No call or reply of an actor passes through it.
    """

    killed_s: float  # for a killed process to exit
    exit_s: float  # the same at a shutdown

    def place(self, name: str, resources: Mapping[str, float], node: Somewhere) -> Any:
        """Return where an actor should run; raise ``JobError`` if it cannot run there."""

    def process(self, record: ActorRecord, listener: ActorListener) -> ActorProcess:
        """Return the process of an actor, which is not started yet."""
        ...

    def nodes(self) -> list[Any]:
        """Return the nodes on which actors can run; empty if there is only this machine."""
        ...

    def node_here(self) -> str:
        """Return the id of the node of this process; empty if there is only this machine."""
        ...

    def in_callback(self) -> bool:
        """Return whether the caller is a thread that reports deaths."""
        ...

    def closing(self) -> Steps:
        """Return the steps that end the launcher, after all actors have ended."""
        ...


class LaunchedActorSystem(BaseActorSystem):
    """The actor system of one launcher.

    Callbacks of futures and deaths run in the thread of the listener.
    """

    def __init__(self, launcher: Launcher, platform: Platform) -> None:
        super().__init__(start=self._start_actor, place=launcher.place)
        self._launcher, self._pid = launcher, os.getpid()
        self._processes: dict[ActorRecord, ActorProcess] = {}  # of actors that have not ended
        self._pool = SharedMemoryPool(name="actors", max_bytes=SHARED_BYTES)
        self._listener = ActorListener(
            platform,
            on_end=self._ended,
            on_disconnect=self._disconnected,
            on_reply=self._replied,
            on_hello=self._connected,
            pool=self._pool,
        )
        self.address = self._listener.address
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
        self, record: ActorRecord, factory: Callable[..., Any], args: tuple[Any, ...]
    ) -> ActorHandle:
        self._check_process()
        process = self._processes[record] = self._launcher.process(record, self._listener)
        record.inbound.max_waiting_bytes = MAX_WAITING_BYTES
        try:
            code = pack_code((factory, args), f"actor {record.name!r}")
            # The process may connect before ``spawn`` returns.
            handle = record.handle = ActorHandle(record.name, None, record)
            spec = LaunchSpec(
                name=record.name,
                address=self.address,
                token=self._listener.token,
                lease_id=self._listener.expect(record),
            )
            process.spawn(spec, code)
        except BaseException:
            self._listener.forget(record.inbound.lease_id)
            self._processes.pop(record, None)
            raise
        return handle

    def _waiting_for(self, future: Future[Any]) -> str:
        if isinstance(future, PendingCall):
            for record, process in list(self._processes.items()):
                if record.name == future.actor and not record.inbound.connected:
                    return f"{process.awaits()}, and to answer {future.method!r}"
        return super()._waiting_for(future)

    # the places of actors

    def nodes(self) -> list[Any]:
        """Return the nodes on which actors can run; empty if there is only this machine."""
        return self._launcher.nodes()

    def node_here(self) -> str:
        """Return the id of the node of this process; empty if there is only this machine."""
        return self._launcher.node_here()

    def pid_here(self, handle: ActorHandle) -> int:
        """Return the pid of a living actor whose process is known to be on this machine, else 0."""
        process = self._processes.get(handle.record)
        return 0 if process is None else process.pid_here()

    def asked(self) -> dict[str, dict[str, float]]:
        """Return the resources requested for every living actor.

        These are cores, memory in bytes, and resources that the cluster defines.
        """
        return {record.name: process.asked() for record, process in list(self._processes.items())}

    # ending

    def kill(self, handle: ActorHandle) -> None:
        """Kill the process, and wait until it has exited and all its callbacks have run.

        Raise ``DataStall`` if it takes ``Launcher.killed_s``. In a callback, return at once.
        """
        self._check_process()
        record = self._own(handle)
        if record.reason is None:
            self._kill(record)
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
            for late in self._request_exit([record], timeout_s, self._kill):
                late.exited.wait(self._launcher.killed_s)

    def _kill(self, record: ActorRecord) -> None:
        if (process := self._processes.get(record)) is not None:
            process.kill()

    def _in_callback(self) -> bool:
        return self._listener.in_its_thread or self._launcher.in_callback()

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
        for record in self._request_exit(self._living(), timeout_s, self._kill):
            record.exited.wait(self._launcher.exit_s)
            # a process that waits for a disk, or a suspended one of another machine, exits later
            self._mark_ended(record, SHUT_DOWN, quiet=True)
            record.exited.set()

    def _at_exit(self) -> None:
        self.shutdown(INTERRUPTED_S)

    # in the listener's thread

    def _connected(self, record: ActorRecord, hello: Mapping[str, Any]) -> None:
        if (process := self._processes.get(record)) is not None:
            process.connected(hello)

    def _disconnected(self, record: ActorRecord, reason: str) -> None:
        process = self._processes.get(record)
        if not self._closed and record.reason is None and process is not None:
            process.disconnected(reason)

    def _ended(self, record: ActorRecord) -> None:
        assert record.inbound.end is not None
        self._processes.pop(record, None)
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

    def _replied(
        self, record: ActorRecord, number: int, header: bytes, columns: list[np.ndarray]
    ) -> None:
        if number != CONTROL:
            complete_call(record, number, header, columns)
            return
        _, fault = open_reply(record.name, header, columns)
        if record.exiting:
            log.warning("actor %s failed to close: %s", record.name, fault)
        else:
            record.fault = fault
