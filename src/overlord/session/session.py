"""Session: a running job. ``launch`` makes one; clients come from it; closing it leaves nothing
behind.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from overlord.client.client import Client, State, StepQueue
from overlord.client.local_queue import LaunchedStepQueue
from overlord.concurrency.event_loop import EventLoop
from overlord.concurrency.platform import Platform
from overlord.errors import (
    ActorLost,
    DataStall,
    JobError,
    JournalError,
    OverlordError,
    StateMismatch,
)
from overlord.hashing import digest
from overlord.job.job import Job
from overlord.journal.write_ahead import UNWRITTEN, JournalStart
from overlord.messages.control import StreamState
from overlord.planning.events import EventLog, lost
from overlord.planning.lost_tokens import TokenLosses
from overlord.planning.schedule.base import learns
from overlord.process.shutdown import CloseOnce, Steps, in_turn
from overlord.serving.session_methods import ServingMethods
from overlord.serving.session_server import SessionServer
from overlord.serving.step_publisher import MOVED
from overlord.session.events import Changes
from overlord.session.inspection import Questions
from overlord.session.local_runtime import LocalRuntime
from overlord.session.reshard import Resharding, not_in_the_mesh
from overlord.session.runtime import Runtime, dismiss, keep, make_engine, why_not
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from overlord.setup.profile_store import Refresher
from overlord.transport.state_codec import unseal

log = logging.getLogger("overlord")

WHY_S = 1.0  # how long a client waits to be told why it waits
# for a session that is moved to be written down: its planner may be lost meanwhile, and hosts with
# it
MOVE_S = 600.0


class Session(Questions, Changes, ServingMethods, Resharding):
    """A running job. Use it as a context manager, or call ``close``."""

    def __init__(
        self,
        job: Job,
        blueprint: PreparedJob,
        state: StreamState | None,
        runtime: str = "local",
        beginning: JournalStart | None = None,
    ):
        self.job, self._blueprint, self._runtime = job, blueprint, runtime
        self._joining: PreparedJob | None = None
        self._blueprints = [
            blueprint
        ]  # with each source that joined, one more: a state may be of before
        self._options = blueprint.options
        self._clients: dict[int, Client] = {}
        self._inboxes: dict[int, tuple[int, StepQueue]] = {}  # rank -> (generation, inbox)
        self._generation = 0
        self._mark = ""  # of the state that opened the generation
        self._closed = self._begun = False
        self._ending = CloseOnce()
        self._serving: SessionServer | None = None
        # for who takes part and how far they are; held for a moment only, by a signal's handler too
        self._lock = threading.RLock()
        self._moving = threading.Lock()  # one rank at a time moves the session to a state
        self._taken: dict[int, int] = {}  # rank -> last step it took
        self._left: State | None = None  # where the last client stood when it left
        self._told = -1  # the last step all took, as the pump knows
        self._log = EventLog(job.feedback_lag)  # what some client's state may not hold yet
        self._learns = learns(job.mixture)
        self._refused = 0  # reports that raised, or were used in part
        self._warned = self._learns or not callable(job.mixture)
        self._losses = TokenLosses()
        self._started = time.monotonic()
        self._pump = EventLoop(job.name)
        beginning = beginning or JournalStart()
        self.resumed, self._journal = beginning.resumed, beginning.journal
        self._journal.start(self._pump.post)
        try:
            self._let_go = keep(runtime, blueprint.options.address)
            self._host = make_engine(runtime, blueprint.floored(beginning.floor), state, self._pump)
            self._listen_to(self._host)
            self._start_state = self._host.planner.state()
            self._lost = {event.name: event for event in lost(self._start_state.events)}
            beginning.write(self._host, blueprint)
        except BaseException:
            if (engine := getattr(self, "_host", None)) is not None:
                engine.close()
            blueprint.close()
            self._journal.close()
            getattr(self, "_let_go", lambda: None)()
            raise
        self._pump.start(self._broke)
        self._refresher = (
            Refresher(blueprint, self._figures) if blueprint.options.partition == "auto" else None
        )
        if self._refresher is not None:
            self._refresher.start()
        self._stop_looking = self._watch_here(blueprint.options)

    def client(self, rank: int = 0) -> Client:
        """The client of one rank. Open the clients of all ranks of this process before iterating
        the first.
        """
        if self._closed:
            raise OverlordError("the session is closed")
        if problem := self.job.place.rank_problem(rank):
            raise JobError([problem], "client")
        with self._lock:
            seated = self._take_seat(rank)
            if rank in self._clients:
                return self._clients[rank]
            if self._begun and seated is None:
                raise OverlordError(
                    f"rank {rank}: the first step was asked for already, and no step is "
                    "kept for a rank that comes later; open the "
                    "clients of all ranks of this process before iterating, or load a "
                    "state on every rank"
                )
            inbox = (
                self._host.inbox(rank, self._start_state.step) if seated is None else seated
            )  # an empty one is false
            self._inboxes[rank] = (self._generation, inbox)
            client = self._clients[rank] = Client(
                rank,
                inbox,
                begin=self._begin,
                consumed=lambda box, step: self._consumed(rank, box, step),
                waiting_for=lambda: self._why(rank),
                export=lambda box, state: self._export_of(rank, box, state),
                rewind=lambda state, allow: self._rewind(rank, state, allow),
                start=self._start_state,
                report=lambda box, step, metrics, next_step: self._report(
                    rank, box, step, metrics, next_step
                ),
                close=lambda: self._detach(rank),
                stall_warn_s=self._options.stall_warn_s,
                stall_limit_s=self._options.stall_limit_s,
                on_stall=self._options.on_stall,
                microbatches=self.job.batch.microbatches,
                world_size=self.job.place.world_size,
            )
            return client

    def _begin(self) -> None:
        """The first step is asked for: from here on all clients of this process are served, at the
        pace of the slowest.
        """
        with self._lock:
            if self._begun or self._closed:
                return
            self._begun = True
            host = self._host
        self._pump.ask(lambda: self._attach(host), "clients to be attached")

    def _watch_here(self, options: Options) -> Callable[[], None]:
        """Where all cores are in this process, look at loaders and trainers every now and then;
        elsewhere the planner's host does.
        """
        if not options.watch_s or not isinstance(self._host, LocalRuntime):
            return lambda: None

        def look() -> None:
            host, waits = self._host, [client.waited_s for client in list(self._clients.values())]
            if isinstance(host, LocalRuntime) and waits:
                self._pump.post(
                    lambda: host.look(options, math.fsum(waits) / len(waits), time.monotonic())
                )

        return Platform().every(options.watch_s, look, "overlord watch")

    def _attach(self, host: Runtime) -> None:
        """In the pump. Who takes part is asked here: one who closed since this was sent for would
        hold up all others for ever.
        """
        with self._lock:
            boxes = (
                {rank: inbox for rank, (_, inbox) in self._inboxes.items()}
                if host is self._host
                else {}
            )
        host.attach(boxes)

    def _consumed(self, rank: int, inbox: StepQueue, step: int) -> None:
        """A rank took a step. The pump hears of it once all clients of this process took it: the
        slowest sets the pace anyway, and waking a thread for every rank costs more than planning.
        """
        if isinstance(inbox, LaunchedStepQueue):  # its constructor host is to know
            inbox.took(step)
        with self._lock:
            if (
                rank in self._inboxes and self._inboxes[rank][1] is inbox
            ):  # else the client is closed, or of a generation that is over
                self._taken[rank] = step
                self._tell()

    def _tell(self) -> None:
        """Under the lock: the slowest of all clients may have moved on, or left."""
        if (
            self._taken
            and len(self._taken) == len(self._clients)
            and min(self._taken.values()) > self._told
        ):
            self._told = slowest = min(self._taken.values())
            host, ranks = self._host, list(self._taken)
            self._pump.post(lambda: host.consumed(ranks, slowest))

    @property
    def taken(self) -> int:
        """The last step that all ranks took, in this run or before it; -1 before the first."""
        return max(self._told, self._start_state.step - 1)

    def _detach(self, rank: int) -> None:
        with self._lock:
            if (client := self._clients.pop(rank, None)) is not None and not self._clients:
                self._left = client._state
            self._inboxes.pop(rank, None)
            self._taken.pop(rank, None)
            if self._begun and not self._closed:
                host = self._host
                self._pump.post(lambda: host.detach(rank))
                self._tell()

    def _why(self, rank: int) -> str:
        """What a rank waits for, in words. Asked when nothing comes, so it must not fail for the
        same reason.
        """
        if self._pump.broken is not None:
            return f"the pump, which stopped: {self._pump.broken}"
        with self._lock:
            host, taken = self._host, dict(self._taken)
        if missing := why_not(host):
            return missing

        def act() -> str:
            for (
                r,
                step,
            ) in taken.items():  # what the pump was not told yet: who really is the slowest
                host.consumed([r], step)
            return host.waiting_for(rank)

        try:
            words: str = self._pump.ask(act, "the pump", WHY_S)
            return words if self._serving is None else self._serving.say(words)
        except DataStall:
            return (
                "the pump, which is busy: with the strategy, the schedule, or work that was "
                "short before"
            )

    # state

    def state_dict(self) -> dict[str, Any]:
        """The stream behind the last step that every client was handed. Plain JSON values."""
        # a rank that has not loaded the state yet to which another moved the session was handed
        # nothing behind it
        with self._lock:
            here = {rank: self._inboxes[rank][0] == self._generation for rank in self._clients}
            behind = [
                client._state if here[rank] else self._start_state
                for rank, client in self._clients.items()
            ]
            slowest = (
                min(behind, key=lambda s: s.step) if behind else self._left or self._start_state
            )
            blueprint, said = self._blueprint, self._log
        return self._export(slowest, blueprint, said)

    def _export_of(self, rank: int, inbox: StepQueue, state: State) -> dict[str, Any]:
        """A client's state. What was said since belongs to the generation the client is in, and to
        no other.
        """
        with self._lock:
            if rank in self._inboxes and self._inboxes[rank][1] is not inbox:
                raise OverlordError(f"rank {rank}: {MOVED}")
            blueprint, said = self._blueprint, self._log
        return self._export(state, blueprint, said)

    def _export(self, state: State, blueprint: PreparedJob, said: EventLog) -> dict[str, Any]:
        """A state with the events and reports that came after its step was planned: prefetch runs
        ahead of what a trainer says.
        """

        def act() -> dict[str, Any]:
            whole = opened(state)
            known = self._blueprint_of(len(whole.owed), blueprint)
            return known.export(said.completed(whole, known.job.names))

        if not self._learns:
            return act()
        try:  # behind the reports that are on their way to the planner
            done: dict[str, Any] = self._pump.ask(act, "the planner")
            return done
        except (
            ActorLost,
            DataStall,
        ):  # a planner that is away for long: what it has not heard is in no state
            return act()

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Move the whole session to a saved state: every client goes on from there."""
        blueprint, restored = self._restore(state, allow)
        with self._moving:
            self._restart(blueprint, restored, mark_of(blueprint, restored), together=True)
            if self._serving is not None:
                self._serving.carry()

    def _restore(
        self, saved: Mapping[str, Any], allow: tuple[str, ...]
    ) -> tuple[PreparedJob, StreamState]:
        """A state, and the blueprint with the sources there were: it may be of a step before some
        of them joined.
        """
        names = saved.get("cursors") if isinstance(saved, Mapping) else None
        known = set(names) if isinstance(names, Mapping) else set()
        error: StateMismatch | None = None
        for one in [b for b in reversed(self._blueprints) if set(b.job.names) == known] or [
            self._blueprint
        ]:
            try:
                blueprint = one.fitting(saved)
                return blueprint, blueprint.restore(saved, allow)
            except StateMismatch as e:
                error = error or e
        assert error is not None
        raise error

    def _rewind(
        self, rank: int, state: Mapping[str, Any], allow: tuple[str, ...], *, again: bool = False
    ) -> tuple[StepQueue, StreamState]:
        """One rank loads a state. The first opens a generation; the others join it, and must load
        the same state. ``again``: it may have said so before, and not have heard the answer.
        """
        blueprint, restored = self._restore(state, allow)
        mark = mark_of(blueprint, restored)
        with self._moving:
            if rank not in self._inboxes:
                raise OverlordError(f"the client of rank {rank} is closed")
            if self._inboxes[rank][0] == self._generation:
                lost = self._host.planner.finished is not None and isinstance(
                    self._host.planner.finished.error, (ActorLost, JournalError)
                )
                if (
                    mark != self._mark or (self._taken and not again) or lost
                ):  # else it stands there already, and so does everyone
                    self._restart(blueprint, restored, mark)
            elif mark != self._mark:
                differ = _apart(
                    blueprint.export(restored), self._blueprint.export(self._start_state)
                )
                problem = (
                    f"rank {rank} loads a state of this job that is not the one to which "
                    "another rank has moved the session"
                )
                raise StateMismatch(differ, "load the same state on every rank", problem)
            # A state that this rank saved for itself holds its own reports; that of the first rank
            # may be a moment older.
            own = [
                report
                for report in restored.reports
                if report.rank == rank and report not in self._start_state.reports
            ]
            with self._lock:
                for report in own:
                    self._send(
                        report, promised=True
                    )  # nothing is planned further ahead before all have taken a step
                inbox = self._inboxes[rank][1]
                self._inboxes[rank] = (self._generation, inbox)
            return inbox, self._start_state

    def _restart(
        self, blueprint: PreparedJob, state: StreamState, mark: str, *, together: bool = False
    ) -> None:
        """New cores at a state; the old ones and all they hold are dropped. ``together``: all
        clients are moved there at once.
        """
        if self._closed:
            raise OverlordError("the session is closed")
        old, boxes = self._host, dict(self._inboxes)
        old.close()
        self._blueprint.close()
        for _, inbox in boxes.values() if not together else ():
            inbox.end(OverlordError(MOVED))
        host: Runtime | None = None
        try:
            self._pump.ask(lambda: old.stop(), "the old cores to stop")
            old.journal = UNWRITTEN
            host = self._new_engine(blueprint, state)
            self._listen_to(host)
            self._pump.ask(
                lambda: JournalStart(self._journal, anew=True).write(host, blueprint),
                "the journal",
                MOVE_S,
            )
            if self._serving is not None:
                self._serving.furnish(host)
            start_state = (
                host.planner.state()
            )  # it may have to be waited for, which nobody may do under the lock
        except BaseException as error:  # nothing is left to serve anyone: they are to know why
            if host is not None:
                host.close()
            self._broke(error)
            raise
        with self._lock:
            self._blueprint, self.job = blueprint, blueprint.given
            self._generation, self._mark, self._host = self._generation + 1, mark, host
            self._start_state, self._left = start_state, None
            self._lost = {event.name: event for event in lost(self._start_state.events)}
            self._taken, self._told, self._log = {}, -1, EventLog(self.job.feedback_lag)
            world = self.job.place.world_size
            joined = {
                rank: self._generation if together else generation
                for rank, (generation, _) in boxes.items()
                if rank < world
            }
            self._inboxes = {
                rank: (generation, self._new_box(rank)) for rank, generation in joined.items()
            }
            left = {rank: self._clients.pop(rank) for rank in list(self._clients) if rank >= world}
            for rank, client in self._clients.items() if together else ():
                client._inbox, client._state = self._inboxes[rank][1], self._start_state
            begun = self._begun
        for rank, (_, inbox) in (
            boxes.items() if together else ()
        ):  # a connected one is carried over, and hears of nothing else
            if isinstance(self._clients.get(rank) or left.get(rank), Client):
                inbox.end(
                    OverlordError(not_in_the_mesh(rank, self.job.place) if rank in left else MOVED),
                    drop=True,
                )
        if self._closed:  # while this was under way: what it closed was replaced
            in_turn(self._parts_to_close())
            raise OverlordError("the session is closed")
        if begun:
            self._pump.ask(lambda: self._attach(host), "clients to be attached")

    def _new_engine(self, blueprint: PreparedJob, state: StreamState) -> Runtime:
        """For a session that runs: a part that is lost while they are all being started does not
        end it.
        """
        options = blueprint.options
        for left in reversed(range(1 + (options.max_restarts if options.failover else 0))):
            try:
                return make_engine(
                    self._runtime, blueprint, state, self._pump, self._generation + 1
                )
            except ActorLost as fault:
                if not left or self._closed:
                    raise
                log.warning(
                    "%s is lost while the session is moved: %s; all parts are started once more",
                    fault.name,
                    fault.reason,
                )
        raise AssertionError("the last attempt returns or raises")

    # the end

    def _broke(self, error: BaseException) -> None:
        if not isinstance(
            error, Exception
        ):  # in a trainer's thread it would end what it was never meant for
            error = ActorLost("the pump", f"{type(error).__name__}: {error}")
        for _, inbox in list(self._inboxes.values()):
            inbox.end(error)
        self._host.broke(error)

    def close(self) -> None:
        """Stop everything. Safe to call twice, and from a signal's handler. Whatever interrupts it,
        the rest is done all the same, and who calls it again does what was interrupted.
        """
        self._closed = True
        first = [
            self._stop_looking,
            *([] if self._refresher is None else [self._refresher.close]),
            self._pump.stop,
        ]
        self._ending.go(lambda: [*first, *self._parts_to_close()])

    def _parts_to_close(self) -> Steps:
        host, serving = self._host, self._serving

        def end_inboxes() -> None:  # before their constructors go, or clients would look for them
            for _, inbox in list(self._inboxes.values()):
                inbox.end(OverlordError("the session is closed"))

        return [
            end_inboxes,
            host.close,
            lambda: dismiss(host),
            self._blueprint.close,
            lambda: self._journal.close(self._told),
            *([] if serving is None else [serving.close]),
            self._let_go,
        ]

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._clients)} clients"
        return f"Session({self.job!r}, {self._runtime}, {state})"


def opened(state: State) -> StreamState:
    return state if isinstance(state, StreamState) else unseal(state)


def mark_of(blueprint: PreparedJob, state: StreamState) -> str:
    """Equal states, equal marks, however they were written down. Reports are left out: those of one
    step are in the states of some ranks and not yet in those of others.
    """
    return digest(json.dumps(blueprint.export(replace(state, reports=())), sort_keys=True))


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """What tells two states apart: the step, or of the same step all that differs, such as an event
    said between the two.
    """
    parts = [p for p in sorted({*one, *other} - {"reports"}) if one.get(p) != other.get(p)]
    return {
        p: (f"{one.get(p)!s:.80}", f"{other.get(p)!s:.80}")
        for p in (["step"] if "step" in parts else parts)
    }
