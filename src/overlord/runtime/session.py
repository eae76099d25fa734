"""Session: a running job. ``launch`` makes one; clients come from it; closing it leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from overlord.client.client import Client, Inbox
from overlord.errors import JobError, OverlordError, PlanError, StateMismatch
from overlord.hashing import digest
from overlord.job import Job
from overlord.messages import SetMixture, Skip, StreamState
from overlord.observe.memory import pss_bytes
from overlord.plan import LoadingPlan
from overlord.runtime.bootstrap import Blueprint, Options, n_workers
from overlord.runtime.local import Pump, ThreadExecutor


class Session:
    """A running job. Use it as a context manager, or call ``close``."""

    def __init__(self, job: Job, blueprint: Blueprint, state: StreamState | None):
        self.job, self._blueprint = job, blueprint
        self._options = blueprint.options
        self._clients: dict[int, Client] = {}
        self._inboxes: dict[int, tuple[int, Inbox]] = {}  # rank -> (generation, inbox)
        self._generation = 0
        self._closed = self._begun = False
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}  # rank -> last step it took
        self._told = -1  # the last step all took, as the pump knows
        self._started = time.monotonic()
        self._pump = Pump(job.name)
        self._executor = ThreadExecutor(n_workers(self._options), self._pump.post)
        self._host = blueprint.host(self._executor, state)
        self._start_state = self._host.planner.state()
        self._pump.start(self._broke)

    def client(self, rank: int = 0) -> Client:
        """The client of one rank. Open the clients of all ranks of this process before iterating the first."""
        if self._closed:
            raise OverlordError("the session is closed")
        if not 0 <= rank < self.job.place.world:
            raise JobError([f"rank {rank} is outside 0..{self.job.place.world - 1} of {self.job.place}"], "client")
        if rank in self._clients:
            return self._clients[rank]
        if self._begun:
            raise OverlordError(
                f"rank {rank}: the first step was asked for already, and no step is kept for a rank that comes later; open the "
                "clients of all ranks of this process before iterating, or load a state on every rank"
            )
        inbox = Inbox()
        self._inboxes[rank] = (self._generation, inbox)
        client = Client(
            rank, inbox, begin=self._begin, consumed=lambda step: self._consumed(rank, step), waiting_for=lambda: self._why(rank),
            export=self._blueprint.export, rewind=lambda state, allow: self._rewind(rank, state, allow), start=self._start_state,
            close=lambda: self._detach(rank), stall_warn_s=self._options.stall_warn_s, stall_limit_s=self._options.stall_limit_s,
        )  # fmt: skip
        self._clients[rank] = client
        return client

    def _begin(self) -> None:
        """The first step is asked for: from here on all clients of this process are served, at the pace of the slowest."""
        if not self._begun and not self._closed:
            self._begun = True
            host, boxes = self._host, {rank: inbox for rank, (_, inbox) in self._inboxes.items()}
            self._pump.ask(lambda: host.attach(boxes), "clients to be attached")

    def _consumed(self, rank: int, step: int) -> None:
        """A rank took a step. The pump hears of it once all clients of this process took it: the slowest sets the pace
        anyway, and waking a thread for every rank costs more than planning."""
        with self._lock:
            self._taken[rank] = step
            slowest = min(self._taken.values())
            if slowest <= self._told or len(self._taken) < len(self._clients):
                return
            self._told = slowest
        host, ranks = self._host, list(self._taken)
        self._pump.post(lambda: host.consumed(ranks, slowest))

    def _detach(self, rank: int) -> None:
        host = self._host
        self._clients.pop(rank, None)
        self._inboxes.pop(rank, None)
        with self._lock:
            self._taken.pop(rank, None)
        if self._begun and not self._closed:
            self._pump.post(lambda: host.detach(rank))

    def _why(self, rank: int) -> str:
        if self._pump.broken is not None:
            return f"the pump, which stopped: {self._pump.broken}"
        return self._pump.ask(lambda: self._host.waiting_for(rank), "the pump", 5.0)

    # state

    def state_dict(self) -> dict[str, Any]:
        """The stream behind the last step that every client was handed. Plain JSON values."""
        behind = [c._state for c in self._clients.values()]
        return self._blueprint.export(min(behind, key=lambda s: s.step) if behind else self._start_state)

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Move the whole session to a saved state: every client goes on from there."""
        self._restart(self._blueprint.restore(state, allow), digest(repr(sorted(state.items()))))
        for rank, client in self._clients.items():
            client._inbox, client._state = self._inboxes[rank][1], self._start_state

    def _rewind(self, rank: int, state: Mapping[str, Any], allow: tuple[str, ...]) -> tuple[Inbox, StreamState]:
        """One rank loads a state. The first opens a generation; the others join it, and must load the same state."""
        restored = self._blueprint.restore(state, allow)
        mark = digest(repr(sorted(state.items())))
        joined, _ = self._inboxes[rank]
        if joined == self._generation or self._mark is None:
            self._restart(restored, mark)
        elif mark != self._mark:
            raise StateMismatch(
                {"step": (str(restored.step), str(self._start_state.step))},
                "another rank has moved the session to another state; load the same state on every rank",
            )
        self._inboxes[rank] = (self._generation, self._inboxes[rank][1])
        return self._inboxes[rank][1], self._start_state

    _mark: str | None = None

    def _restart(self, state: StreamState, mark: str) -> None:
        """New cores at a state; the old ones and all they hold are dropped."""
        old = self._host
        self._executor.close()
        self._blueprint.close()
        for _, inbox in self._inboxes.values():
            inbox.end(OverlordError("another rank moved the session to a saved state; load the same state on this rank"))
        self._pump.ask(lambda: old.stop(), "the old cores to stop")
        self._generation += 1
        self._mark = mark
        self._executor = ThreadExecutor(n_workers(self._options), self._pump.post)
        self._host = host = self._blueprint.host(self._executor, state)
        self._start_state = host.planner.state()
        with self._lock:
            self._taken, self._told = {}, -1
        self._inboxes = {rank: (joined, Inbox()) for rank, (joined, _) in self._inboxes.items()}
        if self._begun:
            boxes = {rank: inbox for rank, (_, inbox) in self._inboxes.items()}
            self._pump.ask(lambda: host.attach(boxes), "clients to be attached")

    # events

    def set_mixture(self, weights: Mapping[str, float], at: int | None = None) -> int:
        """New weights from step ``at`` on (default: the first step not yet planned); returns that step."""

        def act() -> int:
            step = self._host.planner.next_step if at is None else at
            self._host.event(SetMixture(step, dict(weights)))
            return step

        return int(self._pump.ask(act, "the planner"))

    def skip(self, steps: list[int] | tuple[int, ...] | range) -> None:
        """These steps are drawn and listed, and not delivered; step numbers do not shift."""
        self._pump.ask(lambda: self._host.event(Skip(tuple(steps))), "the planner")

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
            "clients": {r: {"steps": c.steps, "waited_s": c.waited_s, "ready": len(c._inbox)} for r, c in self._clients.items()},
            "actors": self._actors(),
        }

    def _actors(self) -> list[dict[str, Any]]:
        pid, host = os.getpid(), self._host
        roles = [("planner", "planner", "planning")]
        roles += [(f"loader/{r.order.name}/{c.number}", "loader", c.doing) for c, r in zip(host.loaders, host.readers, strict=True)]
        roles += [(f"constructor/{a.bucket}", "constructor", a.waiting() or "idle") for a in host.assemblers]
        roles += [(f"client/{rank}", "client", "attached") for rank in self._clients]
        return [{"name": n, "role": role, "pid": pid, "state": state} for n, role, state in roles]

    # the end

    def _broke(self, error: BaseException) -> None:
        for _, inbox in self._inboxes.values():
            inbox.end(error)

    def close(self) -> None:
        """Stop everything. Safe to call twice, and from a signal's handler."""
        if self._closed:
            return
        self._closed = True
        self._pump.stop()
        self._executor.close()
        self._blueprint.close()
        for _, inbox in self._inboxes.values():
            inbox.end(OverlordError("the session is closed"))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._clients)} clients"
        return f"Session({self.job!r}, local, {state})"


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
