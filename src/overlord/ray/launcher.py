"""The launcher of actors on Ray: Ray places, starts and watches them.

Ray finds a machine, starts a process there, reports its end, and registers its name. The actor then
connects to this process (``worker.py``), and all calls use that connection. So calls, errors and
deadlines are those of ``rpc/peers.py``. This module starts actors and handles their ends.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from overlord.concurrency.event_loop import ThreadQueue
from overlord.concurrency.platform import NetworkPlatform, Platform
from overlord.errors import JobError, OverlordError
from overlord.process.shutdown import Steps
from overlord.ray.actors import actor_of, end_process, kill, reason_of
from overlord.ray.cluster import CLUSTER
from overlord.ray.connection import warn_if_exposed
from overlord.ray.node_choice import Node
from overlord.ray.nodes import here, node_here
from overlord.ray.placement import RayPlace, room_text
from overlord.ray.timeouts import TIMEOUTS
from overlord.ray.worker import RayLaunchSpec, this_machine
from overlord.ray.worker_logs import WorkerOutput
from overlord.rpc import timeouts as rpc_timeouts
from overlord.rpc.actor_process import LaunchSpec
from overlord.rpc.actors import INTERRUPTED_S, ActorHandle, Somewhere
from overlord.rpc.launched_actors import LaunchedActorSystem, LaunchedRecord
from overlord.rpc.peers import ActorListener, after

log = logging.getLogger("overlord")

KILLED = "killed"


class RayRecord(LaunchedRecord):
    """The record of an actor that Ray starts."""

    def __init__(self, name: str):
        super().__init__(name)
        self.actor: Any = None  # Ray's handle
        self.local = False  # whether its process runs on this machine
        self.killed = ""  # the reason, once it was killed
        self.output = WorkerOutput()

    @property
    def pid(self) -> int:
        """The pid of its process if that runs on this machine, else 0."""
        return (self.local and self.handle is not None and self.handle.pid) or 0


class RayLauncher:
    """The launcher of processes on a Ray cluster, which it holds until ``close``."""

    exit_s = INTERRUPTED_S  # Ray ends a suspended process in a few seconds
    killed_s = TIMEOUTS.killed_s

    def __init__(self, job: str):
        self._job, self._machine_id = job, this_machine()
        self._listener: ActorListener[RayRecord]
        # Ray's callbacks must not send requests to Ray, so this thread handles their events.
        self._events = ThreadQueue(1, "ray")
        # The caller of spawn must not wait for Ray, whose head may be lost.
        self._starts = ThreadQueue(1, "ray-starts")
        self._path = tuple(p for p in sys.path if p)

    def attach(self, listener: ActorListener[RayRecord]) -> None:
        self._listener = listener

    # starting

    def spawn(self, record: RayRecord, spec: LaunchSpec, code: bytes) -> None:
        on_ray = RayLaunchSpec(
            name=spec.name,
            address=spec.address,
            token=spec.token,
            lease_id=spec.lease_id,
            environ=None if CLUSTER.multi_machine else dict(os.environ),
            directory="" if CLUSTER.multi_machine else os.getcwd(),
            path=self._path,
        )
        self._starts.do(lambda: self._begin(record, on_ray, code))

    def _begin(self, record: RayRecord, spec: RayLaunchSpec, code: bytes) -> None:
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
            and not record.exiting
        )

    def _warn_that_it_waits(self, record: RayRecord) -> None:
        if self._is_awaited(record):
            log.warning(
                "start of %s delayed: Ray waits for %s",
                record.name,
                room_text(record.place, CLUSTER.nodes()),
            )

    def _start_without_resources(
        self, record: RayRecord, actor: Any, spec: RayLaunchSpec, code: bytes
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
        self, record: RayRecord, actor: Any, spec: RayLaunchSpec, code: bytes
    ) -> None:
        after(
            TIMEOUTS.process_s,
            lambda: self._starts.do(
                lambda: self._start_without_resources(record, actor, spec, code)
            ),
        )

    def awaits(self, record: RayRecord) -> str:
        where = (
            f"on {room_text(record.place, CLUSTER.nodes())}"
            if record.place.waits
            else "for which Ray has no process yet"
        )
        return f"{record.name} to be started, {where}"

    # ending

    def kill(self, record: RayRecord) -> None:
        if record.reason is None:
            self._kill(record)

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

    def in_callback(self) -> bool:
        """Return whether the caller is the thread of Ray's events."""
        return self._events.is_current()

    def disconnected(self, record: RayRecord, reason: str) -> None:
        """Kill an actor whose connection ended, unless Ray reports its end first.

        Nearly always its process has ended. A process without a connection is useless.
        """
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

    def connected(self, record: RayRecord, hello: Mapping[str, Any]) -> None:
        record.local = bool(self._machine_id) and hello.get("machine") == self._machine_id
        record.output = WorkerOutput.from_hello(hello.get("output"))

    def closing(self) -> Steps:
        return [self._starts.close, self._events.close, CLUSTER.leave, CLUSTER.settle]


class RayActorSystem(LaunchedActorSystem[RayRecord]):
    """The actor system of a Ray cluster.

    Callbacks of futures and deaths run in threads of this class and of its launcher.
    """

    def __init__(
        self, address: str | None = None, *, job: str = "overlord", ports: range | None = None
    ):
        CLUSTER.hold(address)
        try:
            warn_if_exposed()
            self.machine = (
                NetworkPlatform(ports) if CLUSTER.multi_machine else Platform(ports)
            )  # for workers
            own = NetworkPlatform(ports, here()) if CLUSTER.multi_machine else self.machine
            self._ray = RayLauncher(job)
            # Its exit handler runs before Ray's, which was registered first and ends actors of
            # open sessions.
            super().__init__(RayRecord, self._ray, own, place=_place)
        except BaseException:
            CLUSTER.release()
            raise

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

    def _in_callback(self) -> bool:
        return super()._in_callback() or self._ray.in_callback()


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
