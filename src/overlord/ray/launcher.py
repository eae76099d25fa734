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
from overlord.rpc.actors import INTERRUPTED_S, ActorRecord, Somewhere
from overlord.rpc.launched_actors import LaunchedActorSystem
from overlord.rpc.peers import ActorListener, after

log = logging.getLogger("overlord")

KILLED = "killed"


class RayProcess:
    """The process of one actor, which Ray starts and watches.

    ``events``: the thread for the events of Ray, whose callbacks must not send requests to Ray.
    ``starts``: the thread for starts; the caller of ``spawn`` must not wait for Ray, whose head may
    be lost.
    """

    def __init__(
        self,
        record: ActorRecord,
        listener: ActorListener,
        *,
        job: str,
        machine_id: str,
        path: tuple[str, ...],
        events: ThreadQueue,
        starts: ThreadQueue,
    ) -> None:
        self._record, self._listener, self._inbound = record, listener, record.inbound
        self._job, self._machine_id, self._path = job, machine_id, path
        self._events, self._starts = events, starts
        self._actor: Any = None  # Ray's handle
        self._local = False  # whether the process runs on this machine
        self._killed = ""  # the reason, once it was killed
        self._output = WorkerOutput()

    # starting

    def spawn(self, spec: LaunchSpec, code: bytes) -> None:
        on_ray = RayLaunchSpec(
            name=spec.name,
            address=spec.address,
            token=spec.token,
            lease_id=spec.lease_id,
            environ=None if CLUSTER.multi_machine else dict(os.environ),
            directory="" if CLUSTER.multi_machine else os.getcwd(),
            path=self._path,
        )
        self._starts.do(lambda: self._begin(on_ray, code))

    def _begin(self, spec: RayLaunchSpec, code: bytes) -> None:
        """Start the actor through Ray; record an error of Ray as its reason of death.

        Runs on: the thread for starts.
        """
        try:
            started = CLUSTER.start(
                self._job, spec, self._record.place, code, lambda: not self._killed
            )
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
        with self._inbound.lock:
            self._actor, killed = actor, self._killed
        if killed:  # while Ray started it
            kill(actor)
        life.add_done_callback(lambda _: self._events.do(lambda: self._actor_ended(actor, life)))
        if self._record.place.waits:
            after(TIMEOUTS.room_s, self._warn_that_it_waits)
        elif self._record.place.requests_resources:
            self._check_start_later(actor, spec, code)

    def _is_awaited(self) -> bool:
        return (
            self._inbound.connection is None
            and self._record.reason is None
            and not self._killed
            and not self._record.exiting
        )

    def _warn_that_it_waits(self) -> None:
        if self._is_awaited():
            log.warning(
                "start of %s delayed: Ray waits for %s",
                self._record.name,
                room_text(self._record.place, CLUSTER.nodes()),
            )

    def _start_without_resources(self, actor: Any, spec: RayLaunchSpec, code: bytes) -> None:
        """Start an actor again without its resources if Ray has not started a process for it.

        Another job took the idle resources of its node, and Ray would wait until that job ends. So
        the actor runs without a reservation, as on a node without room. While the head is lost,
        check again later.
        """
        if not self._is_awaited() or (started := CLUSTER.has_process(actor)):
            return
        if started is None:
            self._check_start_later(actor, spec, code)
            return
        log.warning(
            "%s started without its resources: %s not available on its node within %g s",
            self._record.name,
            self._record.place.request_text,
            TIMEOUTS.process_s,
        )
        with self._inbound.lock:  # a new lease id: a process that starts just now is refused
            self._actor = None
            self._record.place = replace(
                self._record.place, num_cpus=0.0, memory=None, resources=()
            )
            lease_id = self._listener.expect(self._record)
        kill(actor)
        self._begin(replace(spec, lease_id=lease_id), code)

    def _check_start_later(self, actor: Any, spec: RayLaunchSpec, code: bytes) -> None:
        after(
            TIMEOUTS.process_s,
            lambda: self._starts.do(lambda: self._start_without_resources(actor, spec, code)),
        )

    def awaits(self) -> str:
        where = (
            f"on {room_text(self._record.place, CLUSTER.nodes())}"
            if self._record.place.waits
            else "for which Ray has no process yet"
        )
        return f"{self._record.name} to be started, {where}"

    # ending

    def kill(self) -> None:
        if self._record.reason is None:
            self._kill()

    def _kill(self, why: str = KILLED) -> None:
        """Kill an actor, for the reason ``why``; return before it has exited.

        Its connection is closed too, so that it exits even if Ray cannot kill it. If Ray reports no
        end within ``Timeouts.killed_silent_s``, it counts as dead.
        """
        with self._inbound.lock:
            self._killed, actor = self._killed or why, self._actor
            connection = self._inbound.connection
        lease_id = self._inbound.lease_id
        if actor is None:  # it was not started yet
            self._listener.died(lease_id, self._killed)
            return
        end_process(actor, self.pid_here() if connection is not None else 0)
        if connection is not None:
            after(rpc_timeouts.TIMEOUTS.death_notice_s, lambda: connection.close(why))
        after(
            TIMEOUTS.killed_silent_s,
            lambda: self._listener.died(self._inbound.lease_id, self._killed),
        )

    def disconnected(self, reason: str) -> None:
        """Kill an actor whose connection ended, unless Ray reports its end first.

        Nearly always its process has ended. A process without a connection is useless.
        """
        lease_id = self._inbound.lease_id
        why = f"its connection ended, and Ray reported no reason: {reason}"

        def kill_if_alive() -> None:
            if self._listener.find(lease_id) is not None:
                self._kill(why)

        after(rpc_timeouts.TIMEOUTS.death_notice_s, kill_if_alive)

    def _actor_ended(self, actor: Any, life: Future[Any]) -> None:
        """Record the end of an actor, as Ray reports it.

        Its earlier messages still count: all of them are read before its connection ends.
        """
        if actor is not self._actor:  # another was started in its place
            return
        error = life.exception()
        code = None if error else life.result()
        end_process(actor, self.pid_here())
        reason = self._killed or (f"exit code {code or 0}" if error is None else reason_of(error))
        if not self._record.exiting and self._killed != KILLED and self._record.fault is None:
            reason += self._last_output()
        self._listener.died(self._inbound.lease_id, reason, self._record.fault)

    def _last_output(self) -> str:
        """Log the last output of a lost actor on this machine; return the location of its files.

        The location is text for the end of the reason, or empty. Ray deletes the files of a cluster
        that it started on this machine. Files of another cluster remain, and are named unless they
        are known to be empty.
        """
        if lines := self._output.last_lines() if self._local else []:
            log.warning("last output of %s:\n  %s", self._record.name, "\n  ".join(lines))
        return (
            f"; {where}"
            if CLUSTER.multi_machine
            and (where := self._output.where)
            and (lines or not self._local)
            else ""
        )

    def connected(self, hello: Mapping[str, Any]) -> None:
        self._local = bool(self._machine_id) and hello.get("machine") == self._machine_id
        self._output = WorkerOutput.from_hello(hello.get("output"))

    def pid_here(self) -> int:
        handle = self._record.handle
        return (self._local and handle is not None and handle.pid) or 0

    def asked(self) -> dict[str, float]:
        place = self._record.place
        return {"cores": place.num_cpus, "memory": place.memory or 0.0, **dict(place.resources)}


class RayLauncher:
    """The launcher of processes on a Ray cluster, which it holds until ``closing``."""

    exit_s = INTERRUPTED_S  # Ray ends a suspended process in a few seconds
    killed_s = TIMEOUTS.killed_s

    def __init__(self, job: str):
        self._job, self._machine_id = job, this_machine()
        self._events, self._starts = ThreadQueue(1, "ray"), ThreadQueue(1, "ray-starts")
        self._path = tuple(p for p in sys.path if p)

    def place(self, name: str, resources: Mapping[str, float], node: Somewhere) -> RayPlace:
        return _place(name, resources, node)

    def process(self, record: ActorRecord, listener: ActorListener) -> RayProcess:
        return RayProcess(
            record,
            listener,
            job=self._job,
            machine_id=self._machine_id,
            path=self._path,
            events=self._events,
            starts=self._starts,
        )

    def nodes(self) -> list[Node]:
        return CLUSTER.nodes() if CLUSTER.multi_machine else []

    def node_here(self) -> str:
        return node_here() if CLUSTER.multi_machine else ""

    def in_callback(self) -> bool:
        """Return whether the caller is the thread of Ray's events."""
        return self._events.is_current()

    def closing(self) -> Steps:
        return [self._starts.close, self._events.close, CLUSTER.leave, CLUSTER.settle]


def ray_actors(
    address: str | None = None, *, job: str = "overlord", ports: range | None = None
) -> LaunchedActorSystem:
    """Return the actor system of a Ray cluster.

    Callbacks of futures and deaths run in threads of the actor system and of its launcher.
    """
    CLUSTER.hold(address)
    try:
        warn_if_exposed()
        own = NetworkPlatform(ports, here()) if CLUSTER.multi_machine else Platform(ports)
        # Its exit handler runs before Ray's, which was registered first and ends actors of open
        # sessions.
        return LaunchedActorSystem(RayLauncher(job), own)
    except BaseException:
        CLUSTER.release()
        raise


def worker_platform(ports: range | None) -> Platform:
    """Return the platform of workers on the cluster that this process holds."""
    return NetworkPlatform(ports) if CLUSTER.multi_machine else Platform(ports)


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
