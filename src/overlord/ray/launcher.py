"""Actors that Ray places, starts and watches; called by links of ours.

Ray does what it is good at: it finds a machine, starts a process there, says when that ends, and
gives it a name others can find. An actor then comes back by a link (``ray_actor.py``), and all that
is said goes that way. So calls, errors and deadlines are those of ``peers.py``; here stands how an
actor is started and how it ends.
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

from overlord.concurrency.platform import NetworkPlatform, Platform
from overlord.concurrency.thread_queue import ThreadQueue
from overlord.errors import DataStall, JobError, OverlordError
from overlord.ray.cluster import (
    CLUSTER,
    Key,
    actor_of,
    end_process,
    has_no_process,
    here,
    kill,
    pickled,
    reason_of,
    warn_if_exposed,
)
from overlord.ray.node_choice import Node
from overlord.ray.placement import RayPlace, no_room
from overlord.ray.worker import Home, this_machine
from overlord.ray.worker_logs import WorkerOutput
from overlord.rpc.actors import (
    HURRY_S,
    SHUT_DOWN,
    SHUTDOWN_S,
    ActorHandle,
    BaseActorSystem,
    PendingCall,
    Somewhere,
)
from overlord.rpc.peers import CUT_S, RpcRecord, RpcServer, after
from overlord.rpc.server import ITSELF, factory_failed, open_reply
from overlord.transport.server_connection import ServerConnection

log = logging.getLogger("overlord")

KILLED = "killed"
KILL_S = 8.0  # for Ray to say that an actor is gone
ROOM_S = 10.0  # for a node with room: whoever waits longer is told for what
# for a process on a node that had room: far above what a slow disk takes to start one, far below
# what a launch waits
PROCESS_S = 40.0
SILENT_S = 6.0  # for Ray to say that one that was killed is gone; without a head it may say nothing


class RayRecord(RpcRecord):
    """An actor that Ray started and that comes to us."""

    def __init__(self, name: str):
        super().__init__(name)
        self.actor: Any = None
        self.near = False  # whether its process is one of this machine
        self.killed = ""  # why, when it was
        self.words = WorkerOutput()  # where its output is

    @property
    def pid(self) -> int:
        """Of its process, where that is one of this machine; else 0."""
        return (self.near and self.handle is not None and self.handle.pid) or 0


class RayActorSystem(RpcServer):
    """Actors of a Ray cluster. Callbacks of futures and deaths run in threads of this class."""

    _kind = RayRecord

    def __init__(
        self, address: str | None = None, *, job: str = "overlord", ports: range | None = None
    ):
        CLUSTER.hold(address)
        try:
            warn_if_exposed()
            self.machine = (
                NetworkPlatform(ports) if CLUSTER.far else Platform(ports)
            )  # of every host
            mine = NetworkPlatform(ports, here()) if CLUSTER.far else self.machine
            super().__init__(end=self._end_by_name, cut=self._cut_off, machine=mine)
        except BaseException:
            CLUSTER.release()
            raise
        self._job, self._machine_id, self._pid = job, this_machine(), os.getpid()
        self._news = ThreadQueue(
            1, "ray"
        )  # what Ray says is heard in a thread of ours: in its own nothing may be asked of it
        self._starts = ThreadQueue(
            1, "ray-starts"
        )  # whoever wants an actor must not wait for Ray, whose head may be gone
        self._home = {
            "address": self.address,
            "token": self.token,
            "path": tuple(p for p in sys.path if p),
        }
        atexit.register(
            self._at_exit
            # before Ray's own, which was registered first and ends actors under a session that is
            # not
            # closed
        )

    # starting

    def spawn(
        self,
        factory: Callable[..., Any],
        *args: Any,
        name: str,
        resources: Mapping[str, float] | None = None,
        node: Somewhere = None,
    ) -> ActorHandle:
        return BaseActorSystem.spawn(
            self, factory, *args, name=name, resources=resources, node=node
        )

    def nodes(self) -> list[Node]:
        """Where actors can be; none where there is no choice."""
        return CLUSTER.nodes() if CLUSTER.far else []

    def pid_here(self, handle: ActorHandle) -> int:
        """Of an actor's process, once that is known and if it is one of this machine; else 0."""
        return handle._record.pid if isinstance(handle._record, RayRecord) else 0

    def asked(self) -> dict[str, dict[str, float]]:
        """What Ray was asked for, for every actor: cores, memory in bytes, and kinds of the
        cluster's own.
        """
        places = {r.name: r.place for r in self._living() if r.place is not None}
        return {
            name: {"cores": p.num_cpus, "memory": p.memory or 0.0, **dict(p.resources)}
            for name, p in places.items()
        }

    def _place(self, name: str, resources: Mapping[str, float], node: Somewhere) -> RayPlace:
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
                [f"resources: {dict(resources)!r} is nothing that Ray can give: {fault}"],
                f"actor {name!r}",
            ) from fault
        return place

    def _start(
        self, record: RpcRecord, factory: Callable[..., Any], args: tuple[Any, ...]
    ) -> ActorHandle:
        assert isinstance(record, RayRecord)
        code = pickled(record.name, (factory, args))
        record.ticket = next(self._tickets)
        handle = record.handle = ActorHandle(record.name, None, record)
        self._by_ticket[record.ticket] = record
        of_now = {} if CLUSTER.far else {"environ": dict(os.environ), "directory": os.getcwd()}
        home = Home(name=record.name, ticket=record.ticket, **of_now, **self._home)  # type: ignore[arg-type]
        self._starts.do(lambda: self._begin(record, home, code))
        return handle

    def _begin(self, record: RayRecord, home: Home, code: bytes) -> None:
        """What Ray says against it is what the actor died of."""
        try:
            started = CLUSTER.start(self._key(record), home, code, lambda: not record.killed)
        except Exception as fault:
            words = (
                str(fault)
                if isinstance(fault, OverlordError)
                else f"{type(fault).__name__}: {str(fault)[:500]}"
            )
            self.died(record.ticket, f"Ray cannot start it: {words}")
            return
        if started is None:
            return
        actor, life, waited = started
        with record.order:
            record.actor, unwanted = actor, record.killed
        if unwanted:  # meanwhile
            kill(actor)

        def over() -> None:
            if waited and self._never_began(record, life):
                self._starts.do(lambda: self._begin(record, home, code))
            else:
                self._life_over(record, actor, life)

        life.add_done_callback(lambda _: self._news.do(over))
        if record.place.waits:
            after(ROOM_S, lambda: self._tell_that_it_waits(record))
        elif record.place.asks:
            self._look_later(record, actor, home, code)

    def _is_awaited(self, record: RayRecord) -> bool:
        return (
            record.link is None and record.reason is None and not record.killed and not self._closed
        )

    def _never_began(self, record: RayRecord, life: Future[Any]) -> bool:
        """Its process had died while it waited for an actor: of memory, with its node."""
        assert record.handle is not None
        return (
            record.handle.pid is None
            and self._is_awaited(record)
            and has_no_process(life.exception())
        )

    def _tell_that_it_waits(self, record: RayRecord) -> None:
        if self._is_awaited(record):
            log.warning("%s waits for %s", record.name, no_room(record.place, CLUSTER.nodes()))

    def _ask_for_nothing(self, record: RayRecord, actor: Any, home: Home, code: bytes) -> None:
        """What its node had idle a moment before was given to somebody else, and Ray would wait for
        it as long as they have it: a job must not. So it takes what is idle, as one does for which
        there was no room to begin with.
        """
        if not self._is_awaited(record) or (there := CLUSTER.has_process(actor)):
            return
        if there is None:
            self._look_later(record, actor, home, code)
            return
        log.warning(
            "%s was not given %s on its node in %g s, and is started without",
            record.name,
            record.place.wanted,
            PROCESS_S,
        )
        with record.order:  # a ticket of its own: one that has come to life just now is nobody
            record.actor, record.place = (
                None,
                replace(record.place, num_cpus=0.0, memory=None, resources=()),
            )
            del self._by_ticket[record.ticket]
            record.ticket = next(self._tickets)
            self._by_ticket[record.ticket] = record
        kill(actor)
        self._begin(record, replace(home, ticket=record.ticket), code)

    def _look_later(self, record: RayRecord, actor: Any, home: Home, code: bytes) -> None:
        after(
            PROCESS_S,
            lambda: self._starts.do(lambda: self._ask_for_nothing(record, actor, home, code)),
        )

    def _whom(self, future: Future[Any]) -> str:
        if isinstance(future, PendingCall):
            for record in self._living():
                if record.name == future.actor and record.link is None:
                    where = (
                        f"on {no_room(record.place, CLUSTER.nodes())}"
                        if record.place.waits
                        else "for which Ray has no process yet"
                    )
                    return f"{record.name} to be started, {where}"
        return super()._whom(future)

    def _key(self, record: RayRecord) -> Key:
        return self._job, record.name, record.place

    # ending

    def kill(self, handle: ActorHandle) -> None:
        record = self._mine(handle)
        if record.reason is None:
            self._kill(record)
            if not self._in_callback() and not record.gone.wait(KILL_S):
                raise DataStall(
                    f"the process of actor {handle.name!r} to end after it was killed", KILL_S
                )

    def _kill(self, record: RpcRecord, why: str = KILLED) -> None:
        """One whose link is closed leaves by itself, also where Ray can do nothing; if no word
        comes of it, it is given up.
        """
        assert isinstance(record, RayRecord)
        with record.order:
            record.killed, actor, link = record.killed or why, record.actor, record.link
        if actor is None:  # nobody has started it, or it has left
            self.died(record.ticket, record.killed)
            return
        end_process(actor, record.pid if link is not None else 0)
        if link is not None:
            after(CUT_S, lambda: link.close(why))
        after(SILENT_S, lambda: self.died(record.ticket, record.killed))

    def _in_callback(self) -> bool:
        return self._server.in_its_thread or self._news.is_me()

    def _end_by_name(self, name: str, ticket: int, why: str) -> None:
        if (record := self._by_ticket.get(ticket)) is not None:
            self._kill(record, why)

    def _cut_off(self, name: str, ticket: int, why: str) -> None:
        """Its link ended: nearly always because its process did, which Ray tells by itself. One
        that lives is of no use.
        """
        after(
            CUT_S,
            lambda: self._end_by_name(
                name, ticket, f"its link ended, and Ray did not say of what: {why}"
            ),
        )

    def _life_over(self, record: RayRecord, actor: Any, life: Future[Any]) -> None:
        """Ray says that it is over. What the actor said before still counts: the end of its link
        says that all was read.
        """
        if actor is not record.actor:  # another was started in its place
            return
        error = life.exception()
        code = None if error else life.result()
        # whoever is late to kill it must not find the process: it may be another session's by then
        with record.order:
            if leaves := record.leaving and not record.killed and error is None and code is None:
                record.actor = None
        if leaves:
            CLUSTER.give_back(self._key(record), actor, record.pid)
        else:
            end_process(actor, record.pid)
        reason = record.killed or (f"exit code {code or 0}" if error is None else reason_of(error))
        if not leaves and not record.leaving and record.killed != KILLED and record.fault is None:
            reason += self._last_words(record)
        self.died(record.ticket, reason, record.fault)

    def _last_words(self, record: RayRecord) -> str:
        """Of one that died of itself. They are in files of Ray's, which a cluster of this machine
        takes with it: so they are said here. In one that is there they stay, and it is told where,
        unless it can be seen that there are none.
        """
        if lines := record.words.last() if record.near else []:
            log.warning("%s said last:\n  %s", record.name, "\n  ".join(lines))
        return (
            f"; {where}"
            if CLUSTER.far and (where := record.words.where) and (lines or not record.near)
            else ""
        )

    def _ended(self, record: RpcRecord) -> None:
        assert isinstance(record, RayRecord)
        assert record.end is not None
        if record.leaving:
            self._over(record, SHUT_DOWN, quiet=True)
        elif record.fault is not None:
            self._over(record, factory_failed(record.fault), fault=record.fault)
        else:
            self._over(record, record.end[0])
        record.gone.set()

    def _opened(self, link: ServerConnection, hello: Mapping[str, Any]) -> dict[str, Any]:
        welcome = super()._opened(link, hello)
        record = self._of_link[link]
        assert isinstance(record, RayRecord)
        record.near = bool(self._machine_id) and hello.get("machine") == self._machine_id
        record.words = WorkerOutput.of(hello.get("words"))
        return welcome

    def _message(self, link: Any, value: Any) -> None:
        match value:
            case (int(number), bytes(header), list(columns)) if number == ITSELF:
                self._of_itself(self._of_link[link], header, columns)
            case _:
                super()._message(link, value)

    def _of_itself(self, record: RpcRecord, header: bytes, columns: list[np.ndarray]) -> None:
        assert isinstance(record, RayRecord)
        _, fault = open_reply(record.name, header, columns)
        if record.leaving:
            log.warning("actor %s did not close well: %s", record.name, fault)
        else:
            record.fault = fault

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Every actor finishes its calls, is closed and goes; one that has not at the deadline is
        killed.
        """
        if os.getpid() != self._pid:  # a forked copy of the program: the actors are not its own
            return
        if self._in_callback():
            raise OverlordError(
                "shutdown waits for the thread that runs callbacks; call it from another thread"
            )
        self._end_by(
            lambda: [
                lambda: self._dismiss_all(timeout_s),
                lambda: self._server.close(HURRY_S),
                self._starts.close,
                self._news.close,
                CLUSTER.leave,
                CLUSTER.settle,
                lambda: atexit.unregister(self._at_exit),
            ]
        )

    def _dismiss_all(self, timeout_s: float) -> None:
        records = [r for r in self._living() if isinstance(r, RayRecord)]
        for record in self._dismiss(records, timeout_s, self._kill):
            record.gone.wait(HURRY_S)
            self._over(
                record, SHUT_DOWN, quiet=True
            )  # one that stands still is ended by Ray in a few seconds

    def _at_exit(self) -> None:
        self.shutdown(HURRY_S)
