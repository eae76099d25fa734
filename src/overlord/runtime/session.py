"""Session: a running job. ``launch`` makes one; clients come from it; closing it leaves nothing behind."""

from __future__ import annotations

import json
import operator
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from overlord.client.client import Client, Inbox
from overlord.errors import ActorLost, DataStall, JobError, OverlordError, PlanError, StateMismatch
from overlord.hashing import digest
from overlord.job import Job
from overlord.messages import SetMixture, Skip, StreamState
from overlord.observe.memory import pss_bytes
from overlord.plan import LoadingPlan
from overlord.planner.events import last_step
from overlord.planner.schedule import plain
from overlord.runtime.bootstrap import Blueprint, Options, n_workers
from overlord.runtime.local import Pump, ThreadExecutor

WHY_S = 1.0  # how long a client waits to be told why it waits


class Session:
    """A running job. Use it as a context manager, or call ``close``."""

    def __init__(self, job: Job, blueprint: Blueprint, state: StreamState | None):
        self.job, self._blueprint = job, blueprint
        self._options = blueprint.options
        self._clients: dict[int, Client] = {}
        self._inboxes: dict[int, tuple[int, Inbox]] = {}  # rank -> (generation, inbox)
        self._generation = 0
        self._mark = ""  # of the state that opened the generation
        self._closed = self._begun = False
        self._lock = threading.RLock()  # for who takes part and how far they are; held for a moment only, by a signal's handler too
        self._moving = threading.Lock()  # one rank at a time moves the session to a state
        self._taken: dict[int, int] = {}  # rank -> last step it took
        self._told = -1  # the last step all took, as the pump knows
        self._events: tuple[SetMixture | Skip, ...] = ()  # those that some client's state may not hold yet
        self._started = time.monotonic()
        self._pump = Pump(job.name)
        self._executor = ThreadExecutor(n_workers(self._options), self._pump.post)
        try:
            self._host = blueprint.host(self._executor, state)
        except BaseException:
            self._executor.close()
            blueprint.close()
            raise
        self._start_state = self._host.planner.state()
        self._pump.start(self._broke)

    def client(self, rank: int = 0) -> Client:
        """The client of one rank. Open the clients of all ranks of this process before iterating the first."""
        if self._closed:
            raise OverlordError("the session is closed")
        if not 0 <= rank < self.job.place.world:
            raise JobError([f"rank {rank} is outside 0..{self.job.place.world - 1} of {self.job.place}"], "client")
        with self._lock:
            if rank in self._clients:
                return self._clients[rank]
            if self._begun:
                raise OverlordError(
                    f"rank {rank}: the first step was asked for already, and no step is kept for a rank that comes later; open the "
                    "clients of all ranks of this process before iterating, or load a state on every rank"
                )
            inbox = Inbox()
            self._inboxes[rank] = (self._generation, inbox)
            client = self._clients[rank] = Client(
                rank, inbox, begin=self._begin, consumed=lambda box, step: self._consumed(rank, box, step),
                waiting_for=lambda: self._why(rank), export=self._export,
                rewind=lambda state, allow: self._rewind(rank, state, allow), start=self._start_state,
                close=lambda: self._detach(rank), stall_warn_s=self._options.stall_warn_s, stall_limit_s=self._options.stall_limit_s,
            )  # fmt: skip
            return client

    def _begin(self) -> None:
        """The first step is asked for: from here on all clients of this process are served, at the pace of the slowest."""
        with self._lock:
            if self._begun or self._closed:
                return
            self._begun = True
            host, boxes = self._host, {rank: inbox for rank, (_, inbox) in self._inboxes.items()}
        self._pump.ask(lambda: host.attach(boxes), "clients to be attached")

    def _consumed(self, rank: int, inbox: Inbox, step: int) -> None:
        """A rank took a step. The pump hears of it once all clients of this process took it: the slowest sets the pace
        anyway, and waking a thread for every rank costs more than planning."""
        with self._lock:
            if rank in self._inboxes and self._inboxes[rank][1] is inbox:  # else the client is closed, or of a generation that is over
                self._taken[rank] = step
                self._tell()

    def _tell(self) -> None:
        """Under the lock: the slowest of all clients may have moved on, or left."""
        if self._taken and len(self._taken) == len(self._clients) and min(self._taken.values()) > self._told:
            self._told = slowest = min(self._taken.values())
            host, ranks = self._host, list(self._taken)
            self._pump.post(lambda: host.consumed(ranks, slowest))

    def _detach(self, rank: int) -> None:
        with self._lock:
            self._clients.pop(rank, None)
            self._inboxes.pop(rank, None)
            self._taken.pop(rank, None)
            if self._begun and not self._closed:
                host = self._host
                self._pump.post(lambda: host.detach(rank))
                self._tell()

    def _why(self, rank: int) -> str:
        """What a rank waits for, in words. Asked when nothing comes, so it must not fail for the same reason."""
        if self._pump.broken is not None:
            return f"the pump, which stopped: {self._pump.broken}"
        with self._lock:
            host, taken = self._host, dict(self._taken)

        def act() -> str:
            for r, step in taken.items():  # what the pump was not told yet: who really is the slowest
                host.consumed([r], step)
            return host.waiting_for(rank)

        try:
            return self._pump.ask(act, "the pump", WHY_S)
        except DataStall:
            return "the pump, which is busy: with the strategy, the schedule, or work that was short before"

    # state

    def state_dict(self) -> dict[str, Any]:
        """The stream behind the last step that every client was handed. Plain JSON values."""
        behind = [c._state for c in list(self._clients.values())]
        return self._export(min(behind, key=lambda s: s.step) if behind else self._start_state)

    def _export(self, state: StreamState) -> dict[str, Any]:
        """A state with the events that came after its step was planned: prefetch runs ahead of what a trainer says."""
        late = [e for e in self._events if last_step(e) >= state.step and all(e is not known for known in state.events)]
        return self._blueprint.export(replace(state, events=(*state.events, *late)) if late else state)

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Move the whole session to a saved state: every client goes on from there."""
        restored = self._blueprint.restore(state, allow)
        with self._moving:
            self._restart(restored, self._mark_of(restored))
            with self._lock:
                self._inboxes = {rank: (self._generation, inbox) for rank, (_, inbox) in self._inboxes.items()}
                for rank, client in self._clients.items():
                    client._inbox, client._state = self._inboxes[rank][1], self._start_state

    def _rewind(self, rank: int, state: Mapping[str, Any], allow: tuple[str, ...]) -> tuple[Inbox, StreamState]:
        """One rank loads a state. The first opens a generation; the others join it, and must load the same state."""
        restored = self._blueprint.restore(state, allow)
        mark = self._mark_of(restored)
        with self._moving:
            if rank not in self._inboxes:
                raise OverlordError(f"the client of rank {rank} is closed")
            if self._inboxes[rank][0] == self._generation:
                if mark != self._mark or self._taken:  # else it stands there already, and so does everyone
                    self._restart(restored, mark)
            elif mark != self._mark:
                raise StateMismatch(
                    {"step": (str(restored.step), str(self._start_state.step))},
                    "another rank has moved the session to another state; load the same state on every rank",
                )
            with self._lock:
                inbox = self._inboxes[rank][1]
                self._inboxes[rank] = (self._generation, inbox)
            return inbox, self._start_state

    def _mark_of(self, state: StreamState) -> str:
        """Equal states, equal marks, however they were written down."""
        return digest(json.dumps(self._blueprint.export(state), sort_keys=True))

    def _restart(self, state: StreamState, mark: str) -> None:
        """New cores at a state; the old ones and all they hold are dropped."""
        if self._closed:
            raise OverlordError("the session is closed")
        old = self._host
        self._executor.close()
        self._blueprint.close()
        for _, inbox in list(self._inboxes.values()):
            inbox.end(OverlordError("another rank moved the session to a saved state; load the same state on this rank"))
        self._pump.ask(lambda: old.stop(), "the old cores to stop")
        executor = ThreadExecutor(n_workers(self._options), self._pump.post)
        host = self._blueprint.host(executor, state)
        with self._lock:
            self._generation, self._mark, self._executor, self._host = self._generation + 1, mark, executor, host
            self._start_state = host.planner.state()
            self._taken, self._told, self._events = {}, -1, ()
            self._inboxes = {rank: (joined, Inbox()) for rank, (joined, _) in self._inboxes.items()}
            boxes = {rank: inbox for rank, (_, inbox) in self._inboxes.items()} if self._begun else {}
        if self._closed:  # while this was under way
            executor.close()
        elif boxes:
            self._pump.ask(lambda: host.attach(boxes), "clients to be attached")

    # events

    def _refuse_closed(self) -> None:
        if self._closed:
            raise OverlordError("the session is closed")

    def set_mixture(self, weights: Mapping[str, float], at: int | None = None) -> int:
        """New weights from step ``at`` on (default: the first step not yet planned); returns that step."""
        if not isinstance(weights, Mapping):
            raise PlanError(f"set_mixture: wanted a mapping of source name to weight, found {weights!r}")
        [step] = _steps("set_mixture", [] if at is None else [at]) or [None]
        given = {name: plain(weight) for name, weight in weights.items()}

        def act() -> int:
            event = SetMixture(self._host.planner.next_step if step is None else step, given)
            self._add(event)
            return event.at

        self._refuse_closed()
        return int(self._pump.ask(act, "the planner"))

    def skip(self, steps: Iterable[int]) -> None:
        """These steps are drawn and listed, and not delivered; step numbers do not shift."""
        self._refuse_closed()
        event = Skip(_steps("skip", steps))
        if event.steps:
            self._pump.ask(lambda: self._add(event), "the planner")

    def _add(self, event: SetMixture | Skip) -> None:
        """In the pump. Clients stand at steps planned before this: their states get the event until they have passed it."""
        self._host.event(event)
        first = min((c._state.step for c in list(self._clients.values())), default=self._start_state.step)
        self._events = (*(e for e in self._events if last_step(e) >= first), event)

    # what people ask

    def plan(self, step: int) -> LoadingPlan:
        """The plan of a recent step (the last 256 are kept)."""
        plans = self._pump.ask(lambda: {s.plan.step: s.plan for s in self._host.plans}, "the planner")
        if step not in plans:
            held = f"{min(plans)} to {max(plans)}" if plans else "none"
            raise PlanError(f"step {step} is not planned yet, or no longer held", step, f"steps held: {held}")
        return plans[step]

    def quarantine(self) -> list[dict[str, Any]]:
        """Rows passed so far that never reached a plan, each with its reason."""
        rows = self._pump.ask(lambda: list(self._host.planner.quarantine), "the planner")
        indexes = self._blueprint.indexes
        return [
            {"source": self.job.names[q.source], "epoch": q.epoch, "file": q.file, "row": q.row, "part": 0,
             "path": indexes[q.source].files[q.file].path if q.file < len(indexes[q.source].files) else "", "reason": q.reason}
            for q in rows
        ]  # fmt: skip

    def metrics(self) -> dict[str, Any]:
        """A dict of what is going on: steps, mix wanted and realised, memory, time spent reading and transforming."""
        return self._pump.ask(self._metrics, "the pump")

    def _metrics(self) -> dict[str, Any]:
        host, names = self._host, self.job.names
        totals = host.planner.totals
        drawn = max(1, int(totals.samples.sum()))
        weights = host.planner.weights or [0.0] * len(names)
        stats: dict[str, dict[str, Any]] = {
            name: {
                "wanted": w / (sum(weights) or 1.0), "realised": int(totals.samples[i]) / drawn, "samples": int(totals.samples[i]),
                "tokens": int(totals.tokens[i]), "quarantined": int(totals.quarantined[i]), "dropped": host.planner.dropped[i],
                "read_s": 0.0, "transform_s": 0.0, "ready": 0, "ready_bytes": 0,
            }
            for i, (name, w) in enumerate(zip(names, weights, strict=True))
        }  # fmt: skip
        for loader, reader, shelf in zip(host.loaders, host.readers, host.shelves, strict=True):
            s = stats[reader.order.name]
            s["read_s"] += reader.stats.read_s
            s["transform_s"] += reader.stats.transform_s
            s["ready"] += loader.ready
            s["ready_bytes"] += shelf.nbytes
        return {
            "planned_steps": host.planner.next_step,
            "uptime_s": time.monotonic() - self._started,
            "samples": int(totals.samples.sum()),
            "tokens": int(totals.tokens.sum()),
            "sources": stats,
            "memory": {**host.held_bytes(), "pss": pss_bytes()},
            "files": self._blueprint.handles.metrics(),
            "clients": {r: {"steps": c.steps, "waited_s": c.waited_s, "ready": len(c._inbox)} for r, c in list(self._clients.items())},
            "actors": self._actors(),
        }

    def _actors(self) -> list[dict[str, Any]]:
        pid, host = os.getpid(), self._host
        roles = [("planner", "planner", "planning")]
        roles += [(f"loader/{r.order.name}/{c.number}", "loader", c.doing) for c, r in zip(host.loaders, host.readers, strict=True)]
        roles += [(f"constructor/{a.bucket}", "constructor", a.waiting() or "idle") for a in host.assemblers]
        roles += [(f"client/{rank}", "client", "attached") for rank in list(self._clients)]
        return [{"name": n, "role": role, "pid": pid, "state": state} for n, role, state in roles]

    # the end

    def _broke(self, error: BaseException) -> None:
        if not isinstance(error, Exception):  # in a trainer's thread it would end what it was never meant for
            error = ActorLost("the pump", f"{type(error).__name__}: {error}")
        for _, inbox in list(self._inboxes.values()):
            inbox.end(error)

    def close(self) -> None:
        """Stop everything. Safe to call twice, and from a signal's handler."""
        if self._closed:
            return
        self._closed = True
        self._pump.stop()
        self._executor.close()
        self._blueprint.close()
        self._host.slabs.close()
        for _, inbox in list(self._inboxes.values()):
            inbox.end(OverlordError("the session is closed"))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._clients)} clients"
        return f"Session({self.job!r}, local, {state})"


def _steps(what: str, steps: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(step) for step in steps)
    except TypeError:
        raise PlanError(f"{what}: steps are whole numbers, found {steps!r}") from None


def launch(
    job: Job, runtime: str = "local", resume: Mapping[str, Any] | None = None, allow: tuple[str, ...] = (), **options: Any
) -> Session:
    """Start a job. ``runtime``: ``"local"`` embeds it in this process. ``resume``: a state to go on from.

    Options (none changes the stream): prefetch=4, loaders={"web": 3}, workers=, read_ahead=2, buffer_bytes=, open_bytes=,
    open_files=, cache_dir=, stall_warn_s=30, stall_limit_s=600, progress=callback(done, total).
    """
    if not isinstance(job, Job):
        raise JobError([f"wanted a Job, found {type(job).__name__}"], "launch")
    if runtime != "local":
        raise JobError([f"runtime: only 'local' is available in this version, found {runtime!r}"], "launch")
    try:
        chosen = Options(**options)
    except TypeError:
        known = list(Options.__dataclass_fields__)
        unknown = [o for o in options if o not in known]
        raise JobError([f"unknown option {o!r}; known: {', '.join(known)}" for o in unknown], "launch") from None
    blueprint = Blueprint(job, chosen)
    state = None if resume is None else blueprint.restore(resume, allow)
    return Session(job, blueprint, state)
