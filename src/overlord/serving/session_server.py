"""Serving: clients in other processes, of a session in this one. Beside those that live here, and
treated alike.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from overlord.client.client import State, StepQueue
from overlord.errors import DataStall, JobError, OverlordError
from overlord.messages.control import PlannedStep
from overlord.serving.control_server import (
    ControlServer,
    RemoteClient,
    ServedElsewhere,
    where_it_stands,
)
from overlord.serving.step_publisher import MOVED, PublishedQueue, SharedBufferPool, StepPublisher
from overlord.session.reshard import not_in_the_mesh
from overlord.transport.address import Address
from overlord.transport.shared_memory import SharedMemoryPool

if TYPE_CHECKING:
    from overlord.messages.control import StreamState
    from overlord.session.session import Session

log = logging.getLogger("overlord")


class ServedAddress(str):
    """An address, with its token. As text it is the address; printed it is two lines for the
    environment of the trainers.
    """

    token: str
    # where the job goes on and why, of one that was submitted to a cluster; else the session knows
    resumed: str

    def __new__(cls, address: str, token: str, resumed: str = "") -> ServedAddress:
        made = super().__new__(cls, address)
        made.token, made.resumed = token, resumed
        return made

    @property
    def address(self) -> str:
        return str.__str__(self)

    def __str__(self) -> str:
        return f"OVERLORD_ADDRESS={self.address}\nOVERLORD_TOKEN={self.token}"

    def __repr__(self) -> str:
        """Without the token: a repr ends up in logs."""
        return f"Served({self.address!r})"

    def __format__(self, spec: str) -> str:
        return format(self.address, spec)


class SessionServer:
    """What a session has that serves: the seats' steps, the front door, and who is there."""

    def __init__(self, session: Session, *, host: str, port: int, token: str, ranks: Iterable[int]):
        self._session = session
        self.ranks = frozenset(ranks)
        self.prefetch: int = session._options.prefetch
        self._joined: set[int] = set()  # ranks that a change of the mesh brought
        self._left: set[int] = set()
        self.excused: frozenset[int] = (
            frozenset()
        )  # ranks that are served by a broadcast: they take no steps here, and may ask
        self._bind = host
        self._afters: dict[int, StreamState] = {}  # of the steps that some client has still to take
        self._last = -1  # the last step that is to be taken
        self._lock = threading.Lock()  # a leaf
        here = session._runtime == "local"
        self._ring = SharedMemoryPool(name=session.job.name) if here else None
        self.delivery = StepPublisher(took=self.took) if here else None
        if self.delivery is not None:
            self.delivery.on_took = lambda box, step: self.took(box.rank, step, box)
        self._front = ControlServer(
            self, self.delivery, token=token, host=host, port=port, ring=self._ring
        )
        self.served = ServedAddress(self._front.address, token)

    def furnish(self, host: Any, *, listen: bool = True) -> None:
        """New cores, before their first step."""
        with self._lock:
            self._afters, self._last = {}, -1
        host.on_stage.append(self._note)
        if self._ring is not None:
            host.building.slabs = SharedBufferPool(self._ring)
        else:
            host.on_taken = self.took
            if listen:
                host.listen(self._bind, self.served.token)

    def again(
        self, host: str, port: int, token: str | None, ranks: Iterable[int] | None
    ) -> ServedAddress:
        """Asked for a second time: there is one door, so what is asked for must be what there is,
        or nothing in particular.
        """
        asked = {
            "host": host,
            "port": port,
            "token": token,
            "ranks": None if ranks is None else sorted(set(ranks)),
        }
        port_here = Address.parse(self.served.address).port
        here = {
            "host": self._bind,
            "port": port_here,
            "token": self.served.token,
            "ranks": sorted(self.ranks),
        }
        nothing = {"host": "127.0.0.1", "port": 0, "token": None, "ranks": None}
        if wrong := [name for name in asked if asked[name] not in (nothing[name], here[name])]:
            words = (
                f"{', '.join(wrong)}: the session is served already at {self.served.address}, "
                "and not as asked for now"
            )
            raise JobError([f"{words}; call serve() without arguments for its address"], "serve")
        return self.served

    def box(self, rank: int, generation: int) -> PublishedQueue | ServedElsewhere:
        return (
            ServedElsewhere(rank, generation)
            if self.delivery is None
            else self.delivery.box(rank, generation)
        )

    def _note(self, stage: PlannedStep) -> None:
        """In the pump, or in a thread that hears what a planner elsewhere says: one that came in
        the place of another may say of a step that was taken already what that one did not live to
        say.
        """
        session, step = self._session, stage.plan.step
        with session._lock, self._lock:
            self._afters[step] = stage.after  # type: ignore[assignment]
            if not stage.skipped:
                self._last = max(step, self._last)
            if step > max(session._taken.values(), default=-1):
                return
            for seat in self.seats:
                if session._taken.get(seat.rank) == step:
                    seat._state = stage.after

    def took(self, rank: int, step: int, of: PublishedQueue | None = None) -> None:
        """A client has handed a step to its trainer. ``of``: from this box, which may be one of a
        generation that is over.
        """
        session = self._session
        with session._lock:
            seat = session._clients.get(rank)
            if not isinstance(seat, RemoteClient):
                return
            box = session._inboxes[rank][1]
            before = session._taken.get(rank, -1)
            if (of is not None and box is not of) or step < max(before, session._start_state.step):
                # after a loss constructors count every rank as having taken all up to where
                # planning begins: that says nothing
                return
            session._inboxes[rank] = (
                session._generation,
                box,
            )  # whoever takes a step of a generation has joined it
            with self._lock:
                seat._state = self._afters.get(step, seat._state)
                slowest = (
                    min([step, *session._taken.values()])
                    if len(session._taken) == len(session._clients)
                    else -1
                )
                for old in [s for s in self._afters if s < slowest]:
                    del self._afters[old]
            seat.steps, seat.waited_s = seat.steps + (step > before), getattr(box, "waited_s", 0.0)
        session._consumed(rank, box, step)

    # who is there

    def admit(self, rank: int) -> None:
        """In the server's thread: refuses whoever cannot be served, in words."""
        session = self._session
        session._refuse_closed()
        if problem := session.job.place.rank_problem(rank):
            raise JobError([problem], "connect")
        with session._lock:
            if isinstance(session._clients.get(rank), RemoteClient):
                return
        if rank in self._left:
            raise OverlordError(
                f"rank {rank}: its client was closed, and no step is kept for it since"
            )
        known = f"; served to others are ranks {_few(sorted(self.ranks))}"
        raise OverlordError(
            f"rank {rank} has its client in the session's own process, or none at all{known}"
        )

    def excuse(self, ranks: Iterable[int], idle: Iterable[int]) -> None:
        """Trainers broadcast to these ranks what another of them fetches: they may ask for the
        state, and report, and take no steps. For the idle ones no step is kept, and nobody waits
        for them; the mailboxes of the others are emptied by who fetches for them.
        """
        self.excused = frozenset(ranks)
        for rank in idle:
            self._session._detach(rank)
            if self.delivery is not None:
                self.delivery.forget(rank)

    def admit_served(self, rank: int) -> None:
        self._session._refuse_closed()
        if rank not in self.excused:
            raise OverlordError(f"rank {rank} is served by no broadcast: it connects as a client")

    def came(self, rank: int, peer: str) -> None:
        if (seat := self._seat_or_none(rank)) is not None:
            seat.be(there=True, peer=peer)

    def went(self, rank: int, reason: str) -> None:
        if (seat := self._seat_or_none(rank)) is not None:
            seat.be(there=False)

    def _seat_or_none(self, rank: int) -> RemoteClient | None:
        seat = self._session._clients.get(rank)
        return seat if isinstance(seat, RemoteClient) else None

    def _seat(self, rank: int) -> RemoteClient:
        if (seat := self._seat_or_none(rank)) is None:
            place = self._session.job.place
            gone = (
                not_in_the_mesh(rank, place)
                if rank >= place.world_size
                else f"the client of rank {rank} is closed"
            )
            raise OverlordError(gone)
        return seat

    @property
    def seats(self) -> list[RemoteClient]:
        return [
            seat for seat in list(self._session._clients.values()) if isinstance(seat, RemoteClient)
        ]

    def say(self, words: str) -> str:
        """Why someone waits; where it is for a rank to take its steps, whether that rank is there
        at all.
        """
        if not words.startswith("rank "):
            return words
        session = self._session
        with session._lock:
            slowest = (
                min(session._taken.values()) if len(session._taken) == len(session._clients) else -1
            )
            absent = [
                s for s in self.seats if s.absent and session._taken.get(s.rank, -1) <= slowest
            ]
        if not absent:
            return words
        named = "; ".join(f"rank {s.rank}, {s.absent}" for s in absent[:8]) + (
            f"; and {len(absent) - 8} more" if len(absent) > 8 else ""
        )
        return f"{named} ({self.prefetch} steps are kept, and none is planned beyond them)"

    @property
    def finished(self) -> bool:
        """The job has ended, and everyone who is expected took all there is."""
        session = self._session
        finish = session._host.planner.finished
        if finish is None:
            return False
        with session._lock:
            return all(
                session._taken.get(rank, -1) >= min(self._last, finish.step - 1)
                for rank in session._clients
            )

    def wait_until_left(self, timeout_s: float) -> bool:
        """Until no client of another process needs the session any more: it has left, or it is
        gone.
        """
        deadline = time.monotonic() + timeout_s
        while waiting := [seat for seat in self.seats if seat.there or not seat.peer]:
            if time.monotonic() >= deadline:
                log.warning(
                    "closing, though %s not left in %.0f s",
                    _have([s.rank for s in waiting]),
                    timeout_s,
                )
                return False
            time.sleep(0.05)
        return True

    # requests, in a thread that may wait

    def carry_out(self, rank: int, request: Mapping[str, Any], *, served: bool = False) -> Any:
        """``served``: of a rank that takes no steps here. It has no box that would tell whether the
        session was moved since.
        """
        todo: dict[str, Callable[[int, Mapping[str, Any]], Any]] = {
            "start": self._start,
            "where": self._where,
            "why": self._why,
            "export": self._export,
            "rewind": self._rewind,
            "report": self._report,
            "refused": self._refused,
            "detach": self._detach,
            "crashed": self._crashed,
        }
        if served:
            todo = {name: todo[name] for name in ("why", "export", "report", "refused")}
        if (act := todo.get(request["ask"])) is None:
            raise OverlordError(f"expected one of {', '.join(todo)}, got {request['ask']!r:.60}")
        if (
            served
            and request.get("generation", self._session._generation) != self._session._generation
        ):
            raise OverlordError(f"rank {rank}: {MOVED}")
        return act(rank, request)

    def _start(self, rank: int, request: Mapping[str, Any]) -> dict[str, Any]:
        session = self._session
        self._seat(rank)
        session._begin()
        self._catch_up(rank)
        with session._lock:
            seat, (joined, _) = self._seat(rank), session._inboxes[rank]
            generation = session._generation
            state: State = seat._state if joined == generation else session._start_state
        o = session._options
        about: dict[str, Any] = {
            "job": session.job.name,
            "world_size": session.job.place.world_size,
            "prefetch": self.prefetch,
        }
        about["microbatches"] = session.job.batch.microbatches
        stalls = {"stall_warn_s": float(o.stall_warn_s), "stall_limit_s": float(o.stall_limit_s)}
        return where_it_stands(state, generation, self._address(rank)) | about | stalls

    def _catch_up(self, rank: int) -> None:
        """A rank that comes again goes on behind the last step it took. Its constructor host tells
        of it when the slowest rank has moved on, which may be later. One that lives and does not
        say is waited for: who began at an older step would be refused.
        """
        session = self._session
        with session._lock:
            host, before = session._host, session._taken.get(rank, -1)
        if not hasattr(host, "taken_by"):
            return
        step = host.taken_by(rank)
        if step is not None and step > before and host is session._host:
            self.took(rank, step)

    def _address(self, rank: int) -> tuple[str, str]:
        """Of the rank's constructor; empty while another is started in its place: its client asks
        again.
        """
        try:
            return self._session._constructor_address(rank)
        except DataStall:
            return "", ""

    def _current(self, rank: int, generation: Any) -> StepQueue:
        """The rank's box, if the client is in the session's generation; else one that is no longer
        any.
        """
        session = self._session
        with session._lock:
            box = session._inboxes[rank][1] if rank in session._inboxes else None
            return (
                box
                if box is not None and generation == session._generation
                else ServedElsewhere(rank, -1)
            )

    def _where(self, rank: int, request: Mapping[str, Any]) -> dict[str, Any]:
        session = self._session
        with session._lock:
            seat, (joined, _) = self._seat(rank), session._inboxes[rank]
            state, generation = seat._state, session._generation
            if generation not in (request.get("generation"), joined):
                raise OverlordError(f"rank {rank}: {MOVED}")
        moved = generation != request.get(
            "generation"
        )  # it must hear of that though its constructor is away: what it has is of before
        return where_it_stands(
            state, generation, self._address(rank) if moved else session._constructor_address(rank)
        )

    def _why(self, rank: int, request: Mapping[str, Any]) -> str:
        return self._session._why(rank)

    def _export(self, rank: int, request: Mapping[str, Any]) -> dict[str, Any]:
        session, state = self._session, request["state"]
        box = self._current(rank, request.get("generation"))
        with session._lock:
            seat, (joined, now) = self._seat_or_none(rank), session._inboxes.get(rank, (-1, box))
            if (
                seat is not None and box is not now and joined == session._generation
            ):  # the whole session was moved, this rank with it
                state, box = seat._state, now
        return session._export_of(rank, box, state)

    def _rewind(self, rank: int, request: Mapping[str, Any]) -> dict[str, Any]:
        session, (generation, took) = self._session, request["took"]
        with session._lock:
            again = (
                generation != session._generation and rank not in session._taken
            )  # perhaps: the first answer was lost with its link
            if took >= 0 and rank in session._inboxes and generation == session._generation:
                session._taken.setdefault(rank, took)
        box, state = session._rewind(rank, request["state"], request["allow"], again=again)
        with session._lock:
            seat = self._seat(rank)
            seat._inbox, seat._state = box, state
            generation = session._generation
        return where_it_stands(state, generation, self._address(rank))

    def _report(self, rank: int, request: Mapping[str, Any]) -> None:
        box = self._current(rank, request.get("generation"))
        self._session._report(rank, box, request["step"], request["metrics"], request["next_step"])

    def _refused(self, rank: int, request: Mapping[str, Any]) -> None:
        with self._session._lock:
            self._session._refused += 1

    def _crashed(self, rank: int, request: Mapping[str, Any]) -> None:
        """It may come again, behind the last step it took: its last word of that may be lost with
        its other link.
        """
        session, (generation, step) = self._session, request["took"]
        with session._lock:
            news = generation == session._generation and step > session._taken.get(rank, -1)
        if news:
            self.took(rank, step)

    def _detach(self, rank: int, request: Mapping[str, Any]) -> None:
        self._left.add(rank)
        generation, step = request["took"]
        with self._session._lock, self._lock:  # its last word on another link may come later
            if (
                seat := self._seat_or_none(rank)
            ) is not None and generation == self._session._generation:
                seat._state = self._afters.get(step, seat._state)
        self._session._detach(rank)
        if self.delivery is not None:
            self.delivery.forget(rank)

    # what else happens to a session

    def expect(self, ranks: Iterable[int]) -> None:
        """The mesh is another one: ranks that nobody had a client for may connect, and are waited
        for.
        """
        session, expected = self._session, set(ranks)
        if self.delivery is not None:
            for rank in {*self.ranks, *self._joined} - expected:
                self.delivery.forget(rank, not_in_the_mesh(rank, session.job.place))
        self._joined |= expected
        with session._lock:
            for rank in expected:
                if rank not in session._clients:
                    self._left.discard(rank)
                    session._clients[rank] = seat = RemoteClient(rank, None, session._start_state)  # type: ignore[assignment]
                    box = session._new_box(rank)
                    session._inboxes[rank], seat._inbox = (session._generation, box), box

    def carry(self) -> None:
        """The whole session was moved to a state: connected clients go on there."""
        if self.delivery is not None:
            for seat in self.seats:
                self.delivery.carry(seat.rank, self._session._start_state)

    def close(self) -> None:
        self._front.close(OverlordError("the session is closed"))
        if self._ring is not None:
            self._ring.close()


def _have(ranks: list[int]) -> str:
    return (
        f"rank{'' if len(ranks) == 1 else 's'} {_few(ranks)} {'has' if len(ranks) == 1 else 'have'}"
    )


def _few(ranks: list[int]) -> str:
    return (
        ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "") if ranks else "none"
    )
