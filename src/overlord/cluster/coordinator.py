"""The planner's half of a job that runs in several processes: the same face as ``Host``, the
loaders and constructors elsewhere.

The planner core lives here, in the session's pump. Loader hosts and constructor hosts are actors of
a control plane; they get one message list per turn and answer with what happened. Which process
does what is never seen in the stream.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from overlord.client.local_queue import LaunchedStepQueue
from overlord.client.remote_queue import RemoteStepQueue
from overlord.cluster.autoscale import Scaling
from overlord.cluster.node_placement import watch
from overlord.cluster.plan_history import RecentPlans
from overlord.cluster.plan_router import ImageContext, PlanRouter, RoutedPlan
from overlord.cluster.recovery import START_S
from overlord.cluster.status import WorkerHandle
from overlord.cluster.worker_factory import (
    WorkerFactory,
    WorkerStarter,
    constructors_of,
    read_ahead_of,
    settings_of,
)
from overlord.concurrency.event_loop import EventLoop
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, OverlordError
from overlord.job.hooks import CONSTRUCTOR, LOADER, of_kind
from overlord.messages.constructor import DecodeFailures
from overlord.messages.control import (
    Attach,
    Consumed,
    Cursor,
    Detach,
    DropHeldSamples,
    EndOfJob,
    LoaderStart,
    PlannedStep,
    Refill,
    Report,
    RestartLoader,
    SetMixture,
    Skip,
    SourceLost,
    StreamState,
)
from overlord.messages.loader import Announce
from overlord.process.pickle_check import sendable
from overlord.rpc.actors import ActorHandle, ActorSystem
from overlord.setup.partition import hosting_of, scales
from overlord.setup.prepared_job import PreparedJob
from overlord.transport.state_codec import seal

log = logging.getLogger("overlord")

TAKEN_S = 2.0  # for a constructor host to say how far a rank is
LEAVE_S = 1.0  # for all hosts together to end


class ProcessHost(Scaling):
    """A planner, and remote loaders and constructors."""

    def __init__(
        self,
        blueprint: PreparedJob,
        state: StreamState | None,
        control: ActorSystem,
        pump: EventLoop,
        generation: int = 0,
        machine: Platform | None = None,
        starter: WorkerStarter | None = None,
    ):
        super().__init__(check=blueprint.options.check)
        self._machine = (
            machine or Platform()
        )  # time and threads come from it alone: simulations have another
        self.hosting = hosting_of(blueprint) if starter is None else starter.hosting
        blueprint = self.blueprint = blueprint.with_loaders(
            self.hosting.loaders, read_ahead_of(self.hosting, scales(blueprint))
        )
        self.planner = blueprint.planner(state)
        self.fails_over = blueprint.options.failover
        self._control, self._pump, self._number = control, pump, generation
        self._keep_past(blueprint)
        self._plan_spreading()
        self._plan_scaling()
        self._token = secrets.token_urlsafe(24) if starter is None else starter.token
        self.plans = RecentPlans()
        self.on_stage: list[Callable[[PlannedStep], None]] = []
        self.on_lost: list[Callable[[SourceLost], None]] = []
        self.on_late: list[Callable[[Any], None]] = []
        self.on_taken: Callable[[int, int], None] = lambda rank, step: None
        self._ranks = list(blueprint.job.place.buckets("DP"))
        self._constructor_of = np.array(constructors_of(blueprint))
        settings = settings_of(blueprint, self.hosting, self._token, generation, machine)
        self._starter = starter or WorkerFactory(
            control, lambda: self.blueprint, settings, self.hosting, self._constructor_of.tolist()
        )
        self._bucket_of = {rank: b for b, ranks in enumerate(self._ranks) for rank in ranks}
        hooks = blueprint.job.hooks
        self._cutter = PlanRouter(
            self.hosting.host_of,
            self._constructor_of.tolist(),
            whole_plans=bool(of_kind(hooks, CONSTRUCTOR)),
            loader_hooks=bool(of_kind(hooks, LOADER)),
            images=self._imaging(),
        )
        self._served = np.zeros(len(self._ranks), np.int64)  # attached ranks of every bucket
        self._attached: set[int] = set()
        self._boxes: list[RemoteStepQueue] = []  # of clients in this process
        self._moves: dict[int, int] = {}  # loader -> the host it is to be opened on
        self._closed = False
        self._stop_reviews: Callable[[], None] = lambda: None
        self._loaders: dict[int, WorkerHandle] = {}
        self._constructors: dict[int, WorkerHandle] = {}
        self._addresses: dict[int, str] = {}
        self._outside: dict[int, str] = {}  # of constructor hosts, for clients in other processes
        self._kits: dict[int, frozenset[int]] = {}  # sources that a loader host can open
        try:
            self._spawn()
            self._watch_all()
            self._start_scaling()
            if isinstance(
                self._starter, WorkerFactory
            ):  # else they are reviewed where the hosts are started
                self._stop_reviews = watch(
                    self._starter.placement, self._machine, control, self._relocate_later
                )
        except BaseException:
            self.close()
            raise

    def _relocate_later(self, hosts: Sequence[int], accept: Callable[[], None]) -> None:
        def act() -> None:
            if not self._closed and self.relocate(hosts):
                accept()

        self._pump.post(act)

    def figures(self) -> dict[str, Any]:
        placement = (
            self._starter.placement.figures() if isinstance(self._starter, WorkerFactory) else {}
        )
        return super().figures() | {"placement": placement}

    # starting

    def _imaging(self) -> ImageContext | None:
        job = self.blueprint.job
        return (
            None
            if self.blueprint.images is None
            else ImageContext(job.batch, job.document_multiple, self._ranks)
        )

    def _spawn(self) -> None:
        """Constructor hosts first, since loader hosts connect to them; each kind together."""
        sendable(self.blueprint.job.hooks, "hooks")
        for c in range(int(self._constructor_of.max()) + 1):
            self._constructors[c] = self._watched(self._starter.constructor(c))
        asked = {
            c: self._control.call(remote.handle, "address")
            for c, remote in self._constructors.items()
        }
        self._addresses = {c: self._control.get(future, START_S) for c, future in asked.items()}
        openings, sources = (
            self._openings(self.planner.state()),
            range(len(self.blueprint.job.sources)),
        )
        for h in range(self.hosting.n_hosts):
            self._start_loader_host(
                h, sources, [o for o in openings if self.hosting.host_of[o.loader] == h]
            )
        ready = [
            (remote, self._control.call(remote.handle, "at")) for remote in self._loaders.values()
        ]
        for (
            remote,
            future,
        ) in ready:  # what is wrong with a source is said by launch, not by the first step
            remote.node = self._control.get(future, START_S)

    def _openings(self, state: StreamState) -> list[LoaderStart]:
        cursors = [Cursor(*c) for c in state.cursors.tolist()]
        return [o for i, cursor in enumerate(cursors) for o in self.blueprint.openings(i, cursor)]

    def _start_loader_host(
        self,
        h: int,
        sources: Collection[int],
        openings: Sequence[LoaderStart],
        *,
        joined: bool = True,
    ) -> None:
        self._kits[h] = frozenset(sources)
        linked = dict(self._addresses)
        self._loaders[h] = self._watched(
            self._starter.loader_host(h, sources, openings, linked), joined=joined
        )
        self._loaders[h].linked = linked

    def _watched(
        self, handle: ActorHandle, *, joined: bool = True, incarnation: int = 0
    ) -> WorkerHandle:
        remote = WorkerHandle(handle, joined=joined, incarnation=incarnation)
        self._starts.watch(handle)
        self._control.on_death(
            remote.handle,
            lambda handle, reason: self._pump.post(lambda: self._lost(remote, reason)),
        )
        self._listen(remote, "events")
        return remote

    def _listen(self, remote: WorkerHandle, method: str, *args: Any) -> None:
        def told(future: Future[Any]) -> None:
            if (error := future.exception()) is None:
                self._pump.post(lambda: self._happened(remote, future.result()))
            elif not isinstance(error, ActorLost):
                self._pump.post(lambda: self._lost(remote, f"{type(error).__name__}: {error}"))

        remote.call(self._control, method, *args).add_done_callback(told)

    # what comes in

    def _happened(self, remote: WorkerHandle, events: Sequence[Any]) -> None:
        if self._closed or remote.lost:
            return
        remote.asks = True
        self._hear(events)

    def _hear(self, events: Sequence[Any]) -> None:
        for event in events:
            match event:
                case Announce():
                    self._queue.append(event)
                case ("taken", list(ranks), list(steps)):
                    for rank, step in zip(ranks, steps, strict=True):
                        self._took(rank, step)
                case ("cut", str(name), str(reason), str(address)):
                    self._cut_off(name, reason, address)
                case EndOfJob(error=ActorLost(name=name)) if (
                    lost := self._named(name)
                ) is not None:
                    if self.fails_over:
                        self._end_of(event)
                    else:
                        self._ask_how(lost, event)
                case EndOfJob() | DecodeFailures():
                    self._queue.append(event)
                case _:
                    raise TypeError(f"a host tells of {event!r}")
        self.run()
        self._was_taken()

    def _took(self, rank: int, step: int) -> None:
        if rank in self._attached:
            self.on_taken(rank, step)
            self._count([Consumed(rank, step)])

    def _count(self, taken: list[Consumed]) -> None:
        self._queue.extend(taken)

    def _named(self, name: str) -> WorkerHandle | None:
        return next((remote for remote in self._remotes() if remote.handle.name == name), None)

    def _ask_how(self, lost: WorkerHandle, finish: EndOfJob) -> None:
        """A host that died is missed by its peers, who see but the end of a link; how it ended is
        known to who started it.
        """

        def heard(future: Future[Any]) -> None:
            error = future.exception()
            told = EndOfJob(finish.step, error) if isinstance(error, ActorLost) else finish
            self._pump.post(lambda: None if self._closed else self.run([told]))

        self._control.call(lost.handle, "do", []).add_done_callback(heard)

    def _lost(self, remote: WorkerHandle, reason: str) -> None:
        """A host is gone, and with it what it held: the job ends behind the steps that are
        complete.
        """
        if self._closed or remote.lost:
            return
        remote.lost = reason
        if not remote.joined:
            return  # whoever prepares it hears of it
        if self.fails_over:
            self._miss(remote, reason)
            return
        log.error("%s is lost: %s", remote.handle.name, reason)
        self.run(
            self.planner.handle(
                EndOfJob(self.planner.next_step, ActorLost(remote.handle.name, reason))
            )
        )

    def attach(self, mailboxes: Mapping[int, Any]) -> None:
        """Clients of these ranks exist; their steps reach them from their constructor host."""
        for rank in mailboxes:
            self._attached.add(rank)
            self._served[self._bucket_of[rank]] += 1
            self._constructor(rank).out.append(Attach(rank))
        self.run([command for rank in mailboxes for command in self.planner.handle(Attach(rank))])

    def detach(self, rank: int) -> None:
        if rank in self._attached:
            self._attached.discard(rank)
            self._served[self._bucket_of[rank]] -= 1
            self._constructor(rank).out.append(Detach(rank))
            self.run(self.planner.handle(Detach(rank)))

    def stop(self) -> None:
        for rank in list(self._attached):
            self.detach(rank)

    def consumed(self, ranks: Sequence[int], step: int) -> None:
        """Constructor hosts tell it themselves. What was said to one that died is heard here: who
        took a step may not look for the next before others have theirs.
        """
        if self.fails_over:
            self.run(
                [
                    Consumed(rank, step)
                    for rank in ranks
                    if rank in self._attached and self.planner.took(rank) < step
                ]
            )

    def event(self, event: Any) -> None:
        if isinstance(event, Report):
            self._note_report(event)
        ended, commands = self.planner.ended, self._answered(event)
        if isinstance(event, (SetMixture, Skip, SourceLost)) and ended is None:
            self._note(event)
        self.run(commands)

    def report(self, report: Report) -> bool:
        """Whether it comes in time for a plan."""
        used = self.planner.in_time(report)
        self.event(report)
        return used

    def _constructor(self, rank: int) -> WorkerHandle:
        return self._constructors[int(self._constructor_of[self._bucket_of[rank]])]

    def address_for(self, rank: int) -> tuple[str, str]:
        """Where a rank's steps come from, and the token it takes; a constructor that is lost is
        said to be.
        """
        remote = self._constructor(rank)
        if remote.lost:
            raise self._starting(remote)
        c = int(self._constructor_of[self._bucket_of[rank]])
        return self._addresses[c], self._token

    def listen(self, host: str, token: str) -> None:
        """Clients in other processes are expected at this interface, and show the token they were
        given.
        """
        self._listening = (host, token)  # first: those that are being started will be asked
        there = {
            c: remote
            for c, remote in self._constructors.items()
            if not (remote.lost and self.fails_over)
        }
        asked = {
            c: self._control.call(remote.handle, "listen", host, token)
            for c, remote in there.items()
        }
        self._outside = {c: self._control.get(future, START_S) for c, future in asked.items()}

    def outside(self, rank: int) -> tuple[str, str]:
        """The same for a client that came by the front door; it knows the token already."""
        self.address_for(rank)
        found = self._outside.get(int(self._constructor_of[self._bucket_of[rank]]))
        if found is None:
            raise self._starting(self._constructor(rank))
        return found, ""

    def taken_by(self, rank: int) -> int | None:
        """The last step that a client took, as its constructor host knows, which tells when the
        slowest has moved on. Not in the pump. None: it is being replaced, and what it alone knew is
        not known any more. ``DataStall``: it lives, and does not say.
        """
        remote = self._constructor(rank)
        if remote.lost:
            return None
        try:
            taken: int = self._control.get(
                self._control.call(remote.handle, "taken", rank), TAKEN_S
            )
        except ActorLost:
            return None
        return taken

    def inbox(self, rank: int, next_step: int) -> LaunchedStepQueue:
        """Where a client in this process gets its steps: from the constructor host, as any
        other.
        """
        prefetch = self.blueprint.options.prefetch
        return LaunchedStepQueue(
            rank,
            lambda: self.address_for(rank),
            next_step=next_step,
            generation=self._number,
            prefetch=prefetch,
            beside=self._boxes,
        )

    # carrying out

    def run(self, commands: Sequence[Any] = ()) -> None:
        super().run(commands)
        if not self._running:
            for remote in (*self._constructors.values(), *self._loaders.values()):
                if remote.out or remote.asks:
                    self._say(remote)

    def _say(self, remote: WorkerHandle) -> None:
        """All that a turn had for a host in one message; where its next news are to be asked for,
        in that one too.
        """
        messages, remote.out = remote.out, []
        asks, remote.asks = remote.asks, False
        if remote.lost:
            return
        if asks:
            self._listen(remote, "turn", messages)
        else:
            remote.tell(self._control, messages)

    def _carry_out(self, command: Any) -> None:
        match command:
            case Refill(loader=loader):
                self._host_of(loader).out.append(command)
                if (shadow := self._cutter.shadow(loader)) is not None:
                    self._loaders[shadow].out.append(command)
            case Announce() | Consumed() | DecodeFailures():
                self._queue.extend(self.planner.handle(command))
                if isinstance(command, Consumed):
                    self._progress()
                    self._end_idle()
            case PlannedStep():
                self._stage(command)
            case EndOfJob():
                self._finish(command)
            case DropHeldSamples(loaders=loaders):
                self._cutter.forget(loaders)
                for remote in list(
                    self._loaders.values()
                ):  # a source may be joining, in another thread
                    remote.out.append(command)
            case SourceLost():
                self._lose(command)
            case RestartLoader():
                self._open(command)
            case _:
                raise TypeError(f"no one carries out {type(command).__name__}")

    def _host_of(self, loader: int) -> WorkerHandle:
        return self._loaders[self._cutter.host(loader)]

    def _stage(self, stage: PlannedStep) -> None:
        assert isinstance(stage.after, StreamState)
        step, ends = stage.plan.step, self.planner.finished
        if (ends is not None and step >= ends.step) or (first := self._note_stage(stage)) is None:
            return
        if first or not self.plans.of(
            step
        ):  # one that was planned before by a planner that is gone is known here since now
            self.plans.keep(stage)
            for watcher in self.on_stage:
                watcher(stage)
        self._send_cuts(
            self._cutter.cut(stage, seal(stage.after), self._served > 0, self.past.acked)
        )
        self._mended(step)

    def _send_cuts(self, cuts: RoutedPlan) -> None:
        for c, placed in cuts.placed.items():
            self._constructors[c].out.append(placed)
        for h, part in cuts.parts.items():
            self._loaders[h].out.append(part)

    def _finish(self, finish: EndOfJob) -> None:
        """Of the planner, or of a host that cannot go on: then the planner hears of it first, and
        says it again.
        """
        if self.planner.finished is not finish:
            self._queue.extend(self.planner.handle(finish))
            return
        for remote in self._constructors.values():
            remote.out.append(finish)

    def broke(self, error: Exception) -> None:
        """The pump has stopped for good: constructor hosts tell their clients, who would else wait
        until they give up.
        """
        for remote in list(self._constructors.values()):
            if not remote.lost and not self._closed:
                with contextlib.suppress(OverlordError):
                    remote.tell(self._control, [EndOfJob(self.planner.next_step, error)])

    def close(self) -> None:
        self._closed = True
        self._close_past()
        self._stop_looking()
        self._stop_reviews()
        self._control.shutdown(LEAVE_S)

    def check(self) -> None:
        self.planner.check()
