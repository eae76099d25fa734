"""The launcher of actors on Ray: Ray places, starts and watches them.

Ray finds a machine, starts a process there, reports its end, and registers its name. The actor then
connects to this process (``worker.py``), and all calls use that connection. So calls, errors and
deadlines are those of ``rpc/peers.py``. This module starts actors and handles their ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.concurrency.event_loop import ThreadQueue
from overlord.concurrency.platform import NetworkPlatform, Platform
from overlord.errors import DataStall, JobError, OverlordError
from overlord.process.code import pack_code
from overlord.ray.actors import actor_of, end_process, kill, reason_of
from overlord.ray.cluster import CLUSTER
from overlord.ray.connection import warn_if_exposed
from overlord.ray.node_choice import Node
from overlord.ray.nodes import here, node_here
from overlord.ray.placement import RayPlace, room_text
from overlord.ray.timeouts import TIMEOUTS
from overlord.ray.worker import LaunchSpec, this_machine
from overlord.ray.worker_logs import WorkerOutput
from overlord.rpc import timeouts as rpc_timeouts
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
from overlord.rpc.peers import ActorListener, InboundConnection, after, complete_call

log = logging.getLogger("overlord")

KILLED = "killed"


class RayRecord(ActorRecord):
    """The record of an actor that Ray starts and that connects to this process."""

    def __init__(self, name: str):
        super().__init__(name)
        self.inbound = InboundConnection()
        self.actor: Any = None  # Ray's handle
        self.local = False  # whether its process runs on this machine
        self.killed = ""  # the reason, once it was killed
        self.output = WorkerOutput()

    @property
    def pid(self) -> int:
        """The pid of its process if that runs on this machine, else 0."""
        return (self.local and self.handle is not None and self.handle.pid) or 0


class RayActorSystem(BaseActorSystem[RayRecord]):
    """The actor system of a Ray cluster.

    Callbacks of futures and deaths run in threads of this class.
    """

    def __init__(
        self, address: str | None = None, *, job: str = "overlord", ports: range | None = None
    ):
        super().__init__(RayRecord, send=_send, start=self._start_actor, place=_place)
        CLUSTER.hold(address)
        try:
            warn_if_exposed()
            self.machine = (
                NetworkPlatform(ports) if CLUSTER.multi_machine else Platform(ports)
            )  # for workers
            own = NetworkPlatform(ports, here()) if CLUSTER.multi_machine else self.machine
            self._listener: ActorListener[RayRecord] = ActorListener(
                own,
                on_end=self._ended,
                on_disconnect=self._disconnected,
                on_reply=self._replied,
                on_hello=self._connected,
            )
        except BaseException:
            CLUSTER.release()
            raise
        self.address = self._listener.address
        self._job, self._machine_id, self._pid = job, this_machine(), os.getpid()
        # Ray's callbacks must not send requests to Ray, so this thread handles their events.
        self._events = ThreadQueue(1, "ray")
        # The caller of spawn must not wait for Ray, whose head may be lost.
        self._starts = ThreadQueue(1, "ray-starts")
        self._path = tuple(p for p in sys.path if p)
        # Runs before Ray's handler, which was registered first and ends actors of open sessions.
        atexit.register(self._at_exit)

    # starting

    def nodes(self) -> list[Node]:
        """Return the nodes on which actors can run; empty if the cluster has only this machine."""
        return CLUSTER.nodes() if CLUSTER.multi_machine else []

    def node_here(self) -> str:
        """Return the id of the node of this process; empty if the cluster has only this machine."""
        return node_here() if CLUSTER.multi_machine else ""

    def pid_here(self, handle: ActorHandle) -> int:
        """Return the pid of an actor that has connected from this machine; 0 for another one."""
        return handle.record.pid if isinstance(handle.record, RayRecord) else 0

    def asked(self) -> dict[str, dict[str, float]]:
        """Return the resources requested from Ray for every actor.

        These are cores, memory in bytes, and resources that the cluster defines.
        """
        places = {r.name: r.place for r in self._living() if r.place is not None}
        return {
            name: {"cores": p.num_cpus, "memory": p.memory or 0.0, **dict(p.resources)}
            for name, p in places.items()
        }

    def _start_actor(
        self, record: RayRecord, factory: Callable[..., Any], args: tuple[Any, ...]
    ) -> ActorHandle:
        code = pack_code((factory, args), f"actor {record.name!r}")
        handle = record.handle = ActorHandle(record.name, None, record)
        spec = LaunchSpec(
            name=record.name,
            address=self.address,
            token=self._listener.token,
            lease_id=self._listener.expect(record),
            environ=None if CLUSTER.multi_machine else dict(os.environ),
            directory="" if CLUSTER.multi_machine else os.getcwd(),
            path=self._path,
        )
        self._starts.do(lambda: self._begin(record, spec, code))
        return handle

    def _begin(self, record: RayRecord, spec: LaunchSpec, code: bytes) -> None:
        """Start the actor through Ray; record an error of Ray as its reason of death.

        Runs on: the thread for starts.
        """
        try:
            started = CLUSTER.start(self._job, spec, record.place, code, lambda: not record.killed)
        except Exception as fault:
            text = (
                str(fault)
                if isinstance(fault, OverlordError)
                else f"{type(fault).__name__}: {str(fault)[:500]}"
            )
            self._listener.died(spec.lease_id, f"Ray could not start it: {text}")
            return
        if started is None:
            return
        actor, life = started
        with record.inbound.lock:
            record.actor, killed = actor, record.killed
        if killed:  # while Ray started it
            kill(actor)
        life.add_done_callback(
            lambda _: self._events.do(lambda: self._actor_ended(record, actor, life))
        )
        if record.place.waits:
            after(TIMEOUTS.room_s, lambda: self._warn_that_it_waits(record))
        elif record.place.requests_resources:
            self._check_start_later(record, actor, spec, code)

    def _is_awaited(self, record: RayRecord) -> bool:
        return (
            record.inbound.connection is None
            and record.reason is None
            and not record.killed
            and not self._closed
        )

    def _warn_that_it_waits(self, record: RayRecord) -> None:
        if self._is_awaited(record):
            log.warning(
                "start of %s delayed: Ray waits for %s",
                record.name,
                room_text(record.place, CLUSTER.nodes()),
            )

    def _start_without_resources(
        self, record: RayRecord, actor: Any, spec: LaunchSpec, code: bytes
    ) -> None:
        """Start an actor again without its resources if Ray has not started a process for it.

        Another job took the idle resources of its node, and Ray would wait until that job ends. So
        the actor runs without a reservation, as on a node without room. While the head is lost,
        check again later.
        """
        if not self._is_awaited(record) or (started := CLUSTER.has_process(actor)):
            return
        if started is None:
            self._check_start_later(record, actor, spec, code)
            return
        log.warning(
            "%s started without its resources: %s not available on its node within %g s",
            record.name,
            record.place.request_text,
            TIMEOUTS.process_s,
        )
        with record.inbound.lock:  # a new lease id: a process that starts just now is refused
            record.actor = None
            record.place = replace(record.place, num_cpus=0.0, memory=None, resources=())
            lease_id = self._listener.expect(record)
        kill(actor)
        self._begin(record, replace(spec, lease_id=lease_id), code)

    def _check_start_later(
        self, record: RayRecord, actor: Any, spec: LaunchSpec, code: bytes
    ) -> None:
        after(
            TIMEOUTS.process_s,
            lambda: self._starts.do(
                lambda: self._start_without_resources(record, actor, spec, code)
            ),
        )

    def _waiting_for(self, future: Future[Any]) -> str:
        if isinstance(future, PendingCall):
            for record in self._living():
                if record.name == future.actor and record.inbound.connection is None:
                    where = (
                        f"on {room_text(record.place, CLUSTER.nodes())}"
                        if record.place.waits
                        else "for which Ray has no process yet"
                    )
                    return f"{record.name} to be started, {where}"
        return super()._waiting_for(future)

    # ending

    def kill(self, handle: ActorHandle) -> None:
        record = self._own(handle)
        if record.reason is None:
            self._kill(record)
            if not self._in_callback() and not record.exited.wait(TIMEOUTS.killed_s):
                raise DataStall(
                    f"the process of actor {handle.name!r} to exit after it was killed",
                    TIMEOUTS.killed_s,
                )

    def _kill(self, record: RayRecord, why: str = KILLED) -> None:
        """Kill an actor, for the reason ``why``; return before it has exited.

        Its connection is closed too, so that it exits even if Ray cannot kill it. If Ray reports no
        end within ``Timeouts.killed_silent_s``, it counts as dead.
        """
        with record.inbound.lock:
            record.killed, actor = record.killed or why, record.actor
            connection = record.inbound.connection
        lease_id = record.inbound.lease_id
        if actor is None:  # it was not started yet
            self._listener.died(lease_id, record.killed)
            return
        end_process(actor, record.pid if connection is not None else 0)
        if connection is not None:
            after(rpc_timeouts.TIMEOUTS.death_notice_s, lambda: connection.close(why))
        after(
            TIMEOUTS.killed_silent_s,
            lambda: self._listener.died(record.inbound.lease_id, record.killed),
        )

    def _in_callback(self) -> bool:
        return self._listener.in_its_thread or self._events.is_current()

    def _disconnected(self, record: RayRecord, reason: str) -> None:
        """Kill an actor whose connection ended, unless Ray reports its end first.

        Nearly always its process has ended. A process without a connection is useless.
        """
        if self._closed or record.reason is not None:
            return
        lease_id = record.inbound.lease_id
        why = f"its connection ended, and Ray reported no reason: {reason}"

        def kill_if_alive() -> None:
            if (found := self._listener.find(lease_id)) is not None:
                self._kill(found, why)

        after(rpc_timeouts.TIMEOUTS.death_notice_s, kill_if_alive)

    def _actor_ended(self, record: RayRecord, actor: Any, life: Future[Any]) -> None:
        """Record the end of an actor, as Ray reports it.

        Its earlier messages still count: all of them are read before its connection ends.
        """
        if actor is not record.actor:  # another was started in its place
            return
        error = life.exception()
        code = None if error else life.result()
        end_process(actor, record.pid)
        reason = record.killed or (f"exit code {code or 0}" if error is None else reason_of(error))
        if not record.exiting and record.killed != KILLED and record.fault is None:
            reason += self._last_output(record)
        self._listener.died(record.inbound.lease_id, reason, record.fault)

    def _last_output(self, record: RayRecord) -> str:
        """Log the last output of a lost actor on this machine; return the location of its files.

        The location is text for the end of the reason, or empty. Ray deletes the files of a cluster
        that it started on this machine. Files of another cluster remain, and are named unless they
        are known to be empty.
        """
        if lines := record.output.last_lines() if record.local else []:
            log.warning("last output of %s:\n  %s", record.name, "\n  ".join(lines))
        return (
            f"; {where}"
            if CLUSTER.multi_machine
            and (where := record.output.where)
            and (lines or not record.local)
            else ""
        )

    def _ended(self, record: RayRecord) -> None:
        assert record.inbound.end is not None
        if record.exiting:
            self._mark_ended(record, SHUT_DOWN, quiet=True)
        elif record.fault is not None:
            self._mark_ended(record, factory_failed(record.fault), fault=record.fault)
        else:
            self._mark_ended(record, record.inbound.end[0])
        record.exited.set()

    def _connected(self, record: RayRecord, hello: Mapping[str, Any]) -> None:
        record.local = bool(self._machine_id) and hello.get("machine") == self._machine_id
        record.output = WorkerOutput.from_hello(hello.get("output"))

    def _replied(
        self, record: RayRecord, number: int, header: bytes, columns: list[np.ndarray]
    ) -> None:
        if number != CONTROL:
            complete_call(record, number, header, columns)
            return
        _, fault = open_reply(record.name, header, columns)
        if record.exiting:
            log.warning("actor %s failed to close: %s", record.name, fault)
        else:
            record.fault = fault

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
                self._starts.close,
                self._events.close,
                CLUSTER.leave,
                CLUSTER.settle,
                lambda: atexit.unregister(self._at_exit),
            ]
        )

    def _end_all(self, timeout_s: float) -> None:
        for record in self._request_exit(self._living(), timeout_s, self._kill):
            record.exited.wait(INTERRUPTED_S)
            # Ray ends a suspended process in a few seconds.
            self._mark_ended(record, SHUT_DOWN, quiet=True)

    def _at_exit(self) -> None:
        self.shutdown(INTERRUPTED_S)


def _send(record: RayRecord, number: int, header: bytes, columns: list[np.ndarray]) -> None:
    record.inbound.send(number, header, columns)


def _place(name: str, resources: Mapping[str, float], node: Somewhere) -> RayPlace:
    others = {key: value for key, value in resources.items() if key not in ("cpus", "memory")}
    there, labels = (
        (CLUSTER.node_id(node, name), {}) if isinstance(node, str) else (None, node or {})
    )
    place = RayPlace(
        num_cpus=resources.get("cpus", 0.0),
        memory=resources.get("memory"),
        resources=tuple(sorted(others.items())),
        node=there,
        labels=tuple(sorted(labels.items())),
    )
    try:
        actor_of(place)
    except (TypeError, ValueError) as fault:
        raise JobError(
            [
                f"resources: expected resources that Ray accepts, got {dict(resources)!r}: "
                f"{fault}; correct that one"
            ],
            f"actor {name!r}",
        ) from fault
    return place
