"""The half of ``ProcessHost`` that goes back: it keeps what is needed for it, starts lost parts
again, and says Back to all.

What is to be done is decided by ``cluster/supervisor.py``; from where to go on is known to
``cluster/plan_history.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.cluster.plan_history import PlanHistory
from overlord.cluster.standby import Shadowing
from overlord.cluster.startup_watchdog import StartupWatchdog
from overlord.cluster.status import WorkerHandle
from overlord.cluster.supervisor import (
    TICKS,
    Closing,
    Command,
    GiveUp,
    Heartbeat,
    KillWorker,
    Loss,
    Needed,
    Progress,
    RollBack,
    StandbyReady,
    StartWorker,
    Supervisor,
    Tick,
    Unreachable,
    WorkerDied,
    WorkerReady,
    worn_out,
)
from overlord.cluster.worker_factory import WorkerStarter
from overlord.concurrency.event_loop import EventLoop
from overlord.errors import ActorLost, DataStall, OverlordError, PlanError
from overlord.messages.control import (
    STRIDE,
    Attach,
    EndOfJob,
    LoaderStart,
    PlannedStep,
    Report,
    Rollback,
    SetMixture,
    StreamState,
)
from overlord.planning.events import said_of_all
from overlord.planning.planner import Planner
from overlord.rpc.actors import ActorHandle
from overlord.setup.prepared_job import PreparedJob, schedule_of

log = logging.getLogger("overlord")

START_S = 120.0  # for a host to be there: it opens its sources first, and a store may be slow
KEPT_RECOVERIES = 1000  # of which ``metrics()`` tells


class Recovering(Shadowing):
    """In the pump, but for the starting of parts, which waits."""

    _pump: EventLoop
    _starter: WorkerStarter
    _closed: bool
    _addresses: dict[int, str]
    _outside: dict[int, str]
    _constructor_of: np.ndarray
    _bucket_of: dict[int, int]
    _moves: dict[int, int]
    _token: str
    fails_over: bool  # a part that is lost is started again; else the job ends

    def _keep_past(self, blueprint: PreparedJob) -> None:
        """Before anything is started."""
        options = blueprint.options
        self._plan_shadows(blueprint)
        self._first = blueprint  # whose schedule the planner has
        self.past = PlanHistory(self.planner.state(), blueprint.job.feedback_lag)
        self._supervisor = Supervisor(
            lost_after_s=options.lost_after_s, max_restarts=options.max_restarts
        )
        self._fresh: dict[str, WorkerHandle] = {}  # started again, and not told anything yet
        self._listening: tuple[str, str] | None = (
            None  # where clients of other processes are taken, and the token they show
        )
        self._lost_at: dict[str, float] = {}
        self._losses: dict[
            str, tuple[int, Loss]
        ] = {}  # behind which step planning went back for it
        self._base = 0  # generation of the last time
        self.recoveries: list[dict[str, Any]] = []
        self._ticking = False
        self._starts = StartupWatchdog(self._control, options.lost_after_s)
        self._stop_ticking: Callable[[], None] = lambda: None

    def _watch_all(self) -> None:
        """All parts are there: from now on they are missed when they are not."""
        for remote in self._remotes():
            self._supervisor.handle(WorkerReady(remote.handle.name), self._machine.now())
        self._fill_shadows()
        self._follow({o.loader: o for o in self._openings(self.planner.state())})
        self.run()
        if self.fails_over:
            every = self.blueprint.options.lost_after_s / TICKS
            self._stop_ticking = self._machine.every(every, self._tick, "overlord heartbeats")

    def _close_past(self) -> None:
        self._supervisor.handle(Closing(), self._machine.now())
        self._stop_ticking()

    # heartbeats

    def _tick(self) -> None:
        """Beside the pump, which may be busy for longer than a tick: then one is enough."""
        if not self._ticking:
            self._ticking = True
            self._pump.post(self._beat)

    def _beat(self) -> None:
        self._ticking = False
        if self._closed:
            return
        now = self._machine.now()
        for handle in self._starts.look():
            log.warning("%s is killed: it was stopped while it was being started", handle.name)
            self._machine.thread(lambda h=handle: self._kill(h), f"overlord kill {handle.name}")  # type: ignore[misc]
        for remote in [
            *self._remotes(),
            *self._fresh.values(),
        ]:  # those that are there again and wait for others, too
            if remote.lost or not remote.joined:
                continue
            if remote.beat is not None and remote.beat.done() and remote.beat.exception() is None:
                self._heed(
                    self._supervisor.handle(Heartbeat(remote.handle.name, remote.incarnation), now)
                )
            if remote.beat is None or remote.beat.done():
                remote.beat = remote.call(self._control, "beat")
        self._heed(self._supervisor.handle(Tick(), now))

    # parts that are lost

    def _miss(self, remote: WorkerHandle, reason: str) -> None:
        """A part is gone: it is started again."""
        now, name = self._machine.now(), remote.handle.name
        self._lost_at.setdefault(name, now)
        gone = {h: r for h, r in list(self._loaders.items()) if r.lost and r.joined}
        for h in gone:
            if not self._covered(h):
                self._heed(self._supervisor.handle(Needed(f"loader-host/{h}"), now))
        spare = any(r is remote and self._covered(h) for h, r in gone.items())
        commands = self._supervisor.handle(WorkerDied(name, remote.incarnation, reason, spare), now)
        again = (
            "; it is started again, trainers go on with the steps they have"
            if self._supervisor.given_up is None
            else ""
        )
        log.warning("%s is lost: %s%s", name, reason, again)
        self._heed(commands)

    def _cut_off(self, name: str, reason: str, address: str) -> None:
        """A loader host cannot reach a constructor host. If that has died, whoever started it will
        say so; if it answers, it is of no use as it is; if not, it is known by its silence.
        """
        c = int(name.rpartition("/")[2])
        if self._addresses.get(c) != address:
            return  # another is in its place already
        remote = self._fresh.get(
            name, self._constructors[c]
        )  # started again, it may wait for others

        def heard(future: Future[Any]) -> None:
            if future.exception() is None:
                self._pump.post(cut)

        def cut() -> None:
            if not self._closed and self._addresses.get(c) == address:
                self._heed(
                    self._supervisor.handle(
                        Unreachable(name, f"others cannot reach it: {reason}"), self._machine.now()
                    )
                )

        remote.call(self._control, "beat").add_done_callback(heard)

    def _end_of(self, finish: EndOfJob) -> None:
        """Of a host that misses another: the other is started again, unless it was given up; then
        it is known what it died of.
        """
        if (error := self._supervisor.given_up) is not None:
            self._queue.append(EndOfJob(finish.step, error))

    def _heed(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case StartWorker(name=name, incarnation=incarnation):
                    self._machine.thread(
                        lambda n=name, i=incarnation: self._start_again(n, i),  # type: ignore[misc]
                        f"overlord start {name}",
                    )
                case KillWorker(name=name, incarnation=incarnation, reason=reason):
                    self._end(name, incarnation, reason)
                case RollBack(reason=reason):
                    self.go_back(reason)
                case StandbyReady(name=name):
                    self._join(name)
                case GiveUp(error=error):
                    error = self._supervisor.given_up = worn_out(
                        error, self.blueprint.options.max_restarts, self._does(error.name)
                    )
                    log.error("%s", error)
                    self.run(self.planner.handle(EndOfJob(self.planner.next_step, error)))

    def _does(self, name: str) -> str:
        """What a part is there for, in words."""
        kind, _, number = name.partition("/")
        if kind != "loader-host":
            return (
                f"all ranks took the steps up to {self.past.acked}"
                if self.past.acked >= 0
                else "no step was taken by all ranks"
            )
        sources = list(
            dict.fromkeys(self._source_of(loader) for loader in self._loaders_on(int(number)))
        )
        return (
            f"it reads {', '.join(sources[:5])}"
            + (f" and {len(sources) - 5} more" if len(sources) > 5 else "")
            if sources
            else ""
        )

    def _end(self, name: str, incarnation: int, reason: str) -> None:
        every = [*self._remotes(), *self._fresh.values()]
        for remote in [r for r in every if r.handle.name == name and r.incarnation == incarnation]:
            log.warning("%s is killed: %s", name, reason)
            self._machine.thread(lambda r=remote: self._kill(r.handle), f"overlord kill {name}")  # type: ignore[misc]

    def _kill(self, handle: ActorHandle) -> None:
        try:
            self._control.kill(handle)
        except (
            OverlordError
        ) as fault:  # it waits for a disk, perhaps; its name is not free before it is gone
            log.warning("%s: %s", handle.name, fault)

    # starting again, beside the pump

    def _start_again(self, name: str, incarnation: int) -> None:
        kind, _, number = name.partition("/")
        try:
            start = (
                self._constructor_again if kind == "constructor-host" else self._loader_host_again
            )
            remote = start(int(number), incarnation)
        except Exception as fault:
            reason = f"{type(fault).__name__}: {fault}"
            if isinstance(fault, ActorLost) and fault.name == name:
                reason = self._starts.why(name, fault.reason)
            self._pump.post(lambda: self._not_there(name, incarnation, reason))
        else:
            self._pump.post(lambda: self._is_there(remote))

    def _constructor_again(self, c: int, incarnation: int) -> WorkerHandle:
        remote = self._watched(self._starter.constructor(c), incarnation=incarnation)
        remote.address = self._answer(remote, "address")
        if (door := self._listening) is not None:
            remote.outside = self._answer(remote, "listen", *door)
        return remote

    def _loader_host_again(self, h: int, incarnation: int) -> WorkerHandle:
        linked = dict(self._addresses)
        remote = self._watched(
            self._starter.loader_host(h, self._kits[h], (), linked), incarnation=incarnation
        )
        remote.linked = linked
        remote.node = self._answer(remote, "at")
        return remote

    def _answer(self, remote: WorkerHandle, method: str, *args: Any) -> Any:
        try:
            return self._control.get(remote.call(self._control, method, *args), START_S)
        except DataStall:
            self._kill(remote.handle)
            raise

    def _watched(
        self, handle: ActorHandle, *, joined: bool = True, incarnation: int = 0
    ) -> WorkerHandle:
        raise NotImplementedError

    def _not_there(self, name: str, incarnation: int, reason: str) -> None:
        if not self._closed:
            log.warning("%s could not be started: %s", name, reason)
            self._heed(
                self._supervisor.handle(WorkerDied(name, incarnation, reason), self._machine.now())
            )

    def _is_there(self, remote: WorkerHandle) -> None:
        """Nobody says anything to it before all that are missing are there: it knows nothing of the
        steps that are under way.
        """
        if self._closed or remote.lost:
            return
        kind, _, number = remote.handle.name.partition("/")
        self._fresh[remote.handle.name] = remote
        if kind == "constructor-host":  # for loader hosts that are started next
            self._addresses[int(number)] = remote.address
        self._heed(
            self._supervisor.handle(
                WorkerReady(remote.handle.name, remote.incarnation), self._machine.now()
            )
        )

    # going back

    def _openings(self, state: StreamState) -> list[LoaderStart]:
        raise NotImplementedError

    def _settle_change(self, dead: Sequence[int]) -> None:
        raise NotImplementedError

    def go_back(self, reason: str) -> None:
        """Plan again behind the last step that every rank has taken; all hosts hear of it before
        anything that follows from it.
        """
        assert not self._running, "a planner is not replaced while its commands are carried out"
        fresh, self._fresh = self._fresh, {}
        for remote in fresh.values():
            self._take_place(remote)
        dead = [
            h
            for h, r in list(self._loaders.items())
            if r.joined and (r.lost or r.handle.name in fresh)
        ]
        old, step = self.planner, self.past.acked
        self._base += STRIDE
        state = self.past.go_back(old.spec.names)
        new = self._planner_at(state)
        self._cutter.go_back(self._base)
        self._promote(dead)
        self._settle_change(dead)
        if not any(
            self._loaders[h].lost for h in dead
        ):  # else who is being started is to have them
            self._fill_shadows()
        self._moves = {}
        for loss in self._supervisor.back():
            self._losses.setdefault(
                loss.part, (step, loss)
            )  # one that was lost again meanwhile is missed since the first time
        log.warning(
            "back %s: %s", f"behind step {step}" if step >= 0 else "to the beginning", reason
        )
        for c, remote in self._constructors.items():
            remote.out.append(Rollback(self._base, step))
            if remote.handle.name in fresh:
                remote.out += [
                    Attach(rank)
                    for rank in sorted(self._attached)
                    if self._constructor_of[self._bucket_of[rank]] == c
                ]
        openings = [replace(o, generation=self._base) for o in self._openings(state)]
        for h, remote in list(self._loaders.items()):
            if remote.joined:
                self._link_again(remote)
                mine = tuple(o for o in openings if self._cutter.host(o.loader) == h)
                remote.out.append(
                    Rollback(self._base, step, mine, old.holds_over or new.holds_over)
                )
        self._follow({o.loader: o for o in openings})
        self._unhold()
        self.journal.went_back(step, self._base, reason)
        self.planner = new
        self.run(new.adopt(old))
        self._mended(self.planner.next_step - 1)

    def _join(self, name: str) -> None:
        """A loader host is there again, and others have taken over what it had: it follows them
        from here on. Where they have not yet, since someone else is missing whom nobody stands by
        for, it waits until all go back.
        """
        h = int(name.partition("/")[2])
        if name not in self._fresh or self._loaders_on(h) or h in self._shadows.where.values():
            return  # or it came in time for all to go back
        remote = self._fresh.pop(name)
        self._take_place(remote)
        self._link_again(remote)
        remote.out.append(Rollback(self._base, self.planner.next_step - 1))
        self._follow_from_here(followed := self._fill_shadows(only=h))
        log.warning("%s is there again; it stands by for %d loaders", name, len(followed))
        self.run()

    def _planner_at(self, state: StreamState) -> Planner:
        # A schedule of its own: what the old one has learned since is not known yet.
        old, schedule = self.planner, schedule_of(self._first.job, self._first.added)
        spec = replace(old.spec, schedule=schedule, prefer=getattr(schedule, "prefer", None))
        return Planner(spec, state, generation=self._base, floor=max(old.floor, old.next_step))

    def _take_place(self, remote: WorkerHandle) -> None:
        kind, _, text = remote.handle.name.partition("/")
        number = int(text)
        self._lost_at.pop(remote.handle.name, None)
        if kind == "loader-host":
            self._loaders[number] = remote
            return
        self._constructors[number] = remote
        if remote.outside:
            self._outside[number] = remote.outside
        elif (door := self._listening) is not None:  # asked for since it was started
            self._outside.pop(number, None)
            remote.call(self._control, "listen", *door).add_done_callback(
                lambda f: self._found_outside(number, f)
            )

    def _found_outside(self, c: int, future: Future[Any]) -> None:
        if future.exception() is None:
            self._outside[c] = future.result()

    def _link_again(self, remote: WorkerHandle) -> None:
        for c, address in self._addresses.items():
            if remote.linked.get(c) != address:
                remote.linked[c] = address
                remote.out.append(("constructor", c, address, self._token))

    def _mended(self, step: int) -> None:
        """The steps up to this one are planned again; with the last of them, whoever was lost is
        not missed any more.
        """
        if not self._losses or step < self.planner.floor - 1:
            return
        losses, self._losses, now = self._losses, {}, self._machine.now()
        for behind, loss in losses.values():
            first, last = behind + 1, self.planner.floor - 1
            again = (
                f"steps {first} to {last} were planned again"
                if last > first
                else f"step {last} was planned again"
            )
            words = again if last >= first else "no step had to be planned again"
            is_back = "was replaced by its stand-bys" if loss.spare else "is back"
            log.warning(
                "%s %s after %.2f s: %s, nothing was lost",
                loss.part,
                is_back,
                now - loss.since,
                words,
            )
            row = {
                "part": loss.part,
                "reason": loss.reason,
                "seconds": now - loss.since,
                "step": behind,
                "stand_bys": loss.spare,
            }
            self.recoveries.append(row)
        del self.recoveries[:-KEPT_RECOVERIES]

    # what is kept for it

    def _note(self, event: Any) -> None:
        """What people say, before a plan that was made with it is acted upon; behind the end of the
        job nothing comes of it.
        """
        self.past.said(
            said_of_all(event, self.planner.spec.names) if isinstance(event, SetMixture) else event
        )

    def _note_report(self, report: Report) -> None:
        if self.planner.in_time(report):
            self.past.reported(report)

    def _note_stage(self, stage: PlannedStep) -> bool | None:
        """Whether a step is planned for the first time; None: it comes out different than before,
        which ends the job.
        """
        try:
            return self.past.staged(stage)
        except PlanError as error:
            self._queue.extend(self.planner.handle(EndOfJob(stage.plan.step, error)))
            return None

    def _progress(self) -> None:
        taken = self.planner.taken
        if taken is not None and self.past.took(taken):
            self._supervisor.handle(Progress(self.past.acked), self._machine.now())

    def _starting(self, remote: WorkerHandle) -> Exception:
        """Why a part cannot be asked just now."""
        if not self.fails_over or self._supervisor.given_up is not None:
            given_up = self._supervisor.given_up
            return (
                given_up
                if given_up is not None and given_up.name == remote.handle.name
                else ActorLost(remote.handle.name, remote.lost)
            )
        lost_at = self._lost_at.get(remote.handle.name, self._machine.now())
        return DataStall(
            f"{remote.handle.name} to be started again ({remote.lost})",
            self._machine.now() - lost_at,
        )
