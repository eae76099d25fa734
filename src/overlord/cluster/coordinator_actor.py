"""The RPC interface of a coordinator: the coordinator process of a job.

The launching process starts and ends workers, and redirects them to this process. The coordinator
requests them by name (``RemoteWorkerFactory``) and then calls them directly (``rpc/peers.py``).
Requests of the session arrive as calls of this actor and are answered on its event loop.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.cluster.coordinator import Coordinator
from overlord.cluster.coordinator_config import CoordinatorConfig
from overlord.cluster.job_sources import PlannerJob
from overlord.cluster.takeover import Takeover, first_coordinator
from overlord.cluster.worker import EventQueue
from overlord.cluster.worker_factory import MULTI_WORKER_READ_AHEAD, RemoteWorkerFactory
from overlord.concurrency.event_loop import EventLoop
from overlord.errors import ActorLost, JournalError, OverlordError
from overlord.journal.applied_ids import SESSION
from overlord.journal.job_journal import JobJournal
from overlord.journal.replay import Recovered
from overlord.journal.write_ahead import JournalStart
from overlord.messages.control import (
    EncodedState,
    EndOfJob,
    PlannedStep,
    Report,
    SentReport,
    StreamState,
)
from overlord.messages.launcher import (
    CoordinatorFailed,
    EventApplied,
    JobFinished,
    KillProcess,
    PlacementChanged,
    RowsQuarantined,
    StepAcked,
    StepPlanned,
    StepProgress,
    WorkerDisconnected,
)
from overlord.planning.losses import DataLosses
from overlord.planning.mixture import lost_sources
from overlord.planning.spec import Mixed, NewSource, Quarantined, SourceSpec, has_losses
from overlord.process.resources import pss_bytes
from overlord.rpc.actors import ActorHandle
from overlord.rpc.peers import RpcServer
from overlord.sample import Buffer
from overlord.transport.codec import register

log = logging.getLogger("overlord")

# counts of a journal that are summed over successive coordinators
WRITTEN = ("appends", "bytes", "plans", "snapshots", "seconds")

for _cls in (Mixed, NewSource, Quarantined, SourceSpec):
    register(_cls)


@register
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counted:
    """Counts of a planner at one moment; fields are named as in ``Planner`` and its ledger."""

    next_step: int
    samples: np.ndarray
    tokens: np.ndarray
    quarantined: np.ndarray
    dropped: np.ndarray
    long: np.ndarray
    lost_tokens: np.ndarray
    mixed: tuple[Mixed, ...]
    weights: tuple[float, ...]
    active: tuple[bool, ...]
    feedback: Mapping[str, int]

    @property
    def totals(self) -> Counted:
        return self


# Progress that no caller waits for is sent to the launching process at this interval: it concerns
# every step, and a message wakes both processes.
PROGRESS_S = 0.1


class SessionEvents:
    """Changes of a coordinator that the launching process keeps, since it outlives this process."""

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator
        # the ledger of a planner, and how many of its quarantined and undecodable rows were sent
        self._listed: tuple[Any, int, int] = (None, 0, 0)
        self._n_recovered = 0
        self._worker_of = coordinator.placement.worker_of.copy()

    def collect(self) -> Iterator[Any]:
        """Yield events for the launching process: quarantined rows, recoveries, moved loaders.

        Each call yields what changed since the call before.
        """
        ledger = self._coordinator.planner.ledger
        of, bad, spoiled = self._listed if self._listed[0] is ledger else (ledger, 0, 0)
        if len(ledger.quarantine) > bad or len(ledger.spoiled) > spoiled:
            rows = list(itertools.islice(ledger.quarantine, bad, None))
            late = [row for _, row in itertools.islice(ledger.spoiled, spoiled, None)]
            yield RowsQuarantined(rows, late)
        self._listed = (of, len(ledger.quarantine), len(ledger.spoiled))
        recovery = self._coordinator.recovery
        if (new := recovery.n_recovered - self._n_recovered) > 0:
            yield from recovery.recoveries[-new:]
            self._n_recovered = recovery.n_recovered
        worker_of = self._coordinator.placement.worker_of
        if not np.array_equal(worker_of, self._worker_of):
            self._worker_of = worker_of.copy()
            yield PlacementChanged(worker_of.tolist())


class CoordinatorActor:
    """The RPC interface of a coordinator.

    The launching process calls its methods. Methods that read or change the coordinator run on its
    event loop, in order. ``events``, ``event_loop`` and ``rpc`` are those of the platform, unless
    they are given.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        events: EventQueue | None = None,
        event_loop: EventLoop | None = None,
        rpc: RpcServer | None = None,
    ):
        config.registered.restore()
        self._config = config
        self._events = events or EventQueue(config.machine.now, quiet_s=PROGRESS_S)
        self._event_loop = event_loop or config.machine.event_loop("planner")
        self._rpc = rpc or RpcServer(
            end=lambda name, lease_id, why: self._send(KillProcess(lease_id, name)),
            cut=self._disconnected,
            machine=config.machine,
        )
        self._starter = RemoteWorkerFactory(
            self._rpc, self._send, config.loader_placement, config.token
        )
        self._coordinator: Coordinator
        self._takeover: Takeover | None = None
        self._session_events: SessionEvents
        self._closed = self._opens_journal = self._beats_loop = False
        self._ran = threading.Event()
        self._ran.set()
        # the last end of the job that was sent to the launching process; a text before the first
        self._end_sent: EndOfJob | str | None = "nothing yet"
        self._acked = -2
        self._watched = config.watched
        self._losses = DataLosses()

    # the launching process

    def rpc_address(self) -> tuple[str, str]:
        """Return the address that workers connect to, and the token they present."""
        return self._rpc.address, self._rpc.token

    def beat(self) -> bool:
        """Return False if the event loop is blocked: it has not run since the last call.

        Then the coordinator is killed. The result is True before the loop starts, and while it
        waits for the journal: a successor would wait for the same disk.
        """
        if not self._ran.is_set():
            return self._writes()
        if self._beats_loop:
            self._ran.clear()
            self._event_loop.post(self._ran.set)
        return True

    def activity(self) -> str:
        """Describe what a blocked event loop executes: the step and the function."""
        return f"step {self._coordinator.planner.next_step}, {self._event_loop.running_call()}"

    def _writes(self) -> bool:
        """Return whether the event loop waits for the journal."""
        return self._opens_journal or self._coordinator.journal.settling

    def events(self) -> Future[list[Any]]:
        return self._events.ask()

    def _send(self, message: Any) -> None:
        """Send a message to the launching process at once. Runs on: any thread."""
        self._events.put(message)
        self._events.answer()

    def _disconnected(self, name: str, lease_id: int, why: str) -> None:
        if not self._closed:
            self._send(WorkerDisconnected(lease_id, name, why))

    def died(self, lease_id: int, reason: str, fault: BaseException | None = None) -> None:
        self._rpc.died(lease_id, reason, fault)

    def begin(self) -> Future[int]:
        """Start the workers, or take over living ones.

        Return a future of the last step that all ranks acknowledged; it is set when workers run.
        """
        begun = Future[int]()
        self._config.machine.thread(lambda: self._begin(begun), "overlord-begin")
        return begun

    def _begin(self, begun: Future[int]) -> None:
        try:
            coordinator = self._start()
            coordinator.on_stage.append(self._planned)
            coordinator.on_lost.append(self._events.put)
            coordinator.on_taken = self._taken
            self.serve(coordinator)
            acked = coordinator.history.acked
            self._session_events = SessionEvents(coordinator)
            self._event_loop.start(self._loop_failed, self._after_turn)
            self._beats_loop = True
            begun.set_result(acked)
        except BaseException as fault:
            begun.set_exception(fault)

    def serve(self, coordinator: Coordinator) -> None:
        """Answer requests by ``coordinator``; send what its predecessor may not have sent."""
        self._coordinator = coordinator
        self._send_recovered()

    def _start(self) -> Coordinator:
        """Return a coordinator with started workers, or one that took over the living workers."""
        given = (self._config, self._rpc, self._event_loop, self._starter)
        if not self._config.incarnation:
            return first_coordinator(*given)
        if not self._config.opened:
            # the journal is empty, or of an earlier session: ``open_journal`` follows
            self._takeover = Takeover(*given, Recovered(), send=self._send)
            return self._takeover.roll_back()
        journal, found = JobJournal.resumed(
            self._where_journal, self._config.prepared.job.name, launch=self._config.launch
        )
        journal.start(self._event_loop.post)
        try:
            self._takeover = Takeover(*given, found, send=self._send)
            coordinator = self._takeover.coordinator
            coordinator.journal = journal
            journal.write_start(coordinator.planner.state(), coordinator.prepared)
        except BaseException:
            journal.close()
            raise
        return self._takeover.roll_back()

    def _send_recovered(self) -> None:
        """Send the events that an earlier coordinator may not have sent before it died.

        These are the events in the journal and the removed sources. With clients in other
        processes, they include the last acknowledged step and the last step of each rank.
        """
        state = self._coordinator.planner.state()
        if last := self._coordinator.gate.applied.last(SESSION):
            self._events.put(EventApplied(last))
        for event in lost_sources(state.events) if self._config.incarnation else ():
            self._events.put(event)
        if self._takeover is None:
            return
        if self._watched and (acked_state := self._takeover.acked_state) is not None:
            self._events.put(StepPlanned(acked_state.step - 1, acked_state, True))
        for rank, step in self._takeover.acked_by_rank.items():
            self._taken(rank, step)

    @property
    def _where_journal(self) -> str:
        where = self._config.prepared.job.journal
        assert where is not None, "a journal is opened only for a job with one"
        return where

    def open_journal(self, anew: bool, floor: int, launch: str) -> Future[None]:
        """Open the journal and write the start of the stream, before any step is planned.

        ``anew``: earlier plans in the journal become void. The session has closed the journal
        before this call. Raise ``JournalError`` if another launch has continued it since.
        """

        def act() -> None:
            coordinator, self._opens_journal = self._coordinator, True
            try:
                if not isinstance(coordinator.journal, JobJournal):
                    coordinator.journal, _ = JobJournal.resumed(
                        self._where_journal, self._config.prepared.job.name, launch=launch
                    )
                    coordinator.journal.start(self._event_loop.post)
                start = JournalStart(coordinator.journal, floor=floor, anew=anew)
                start.append(coordinator.planner.state(), coordinator.prepared)
            finally:
                self._opens_journal = False

        return self._on_loop(act)

    def _loop_failed(self, error: BaseException) -> None:
        """Report a failure of the event loop; the launcher then replaces this process."""
        log.critical("event loop of the coordinator failed: %s: %s", type(error).__name__, error)
        fault = error if isinstance(error, Exception) else None
        fault = fault or OverlordError(f"{type(error).__name__}: {error}")
        self._send(CoordinatorFailed(fault))

    def _after_turn(self) -> float | None:
        coordinator = self._coordinator
        if (finished := coordinator.planner.finished) is not self._end_sent:
            self._end_sent = finished
            self._events.put(JobFinished(finished))
        if (acked := coordinator.history.acked) != self._acked:
            self._acked = acked
            written = coordinator.journal.metrics()
            self._events.put(
                StepProgress(acked, [written.get(what, 0) for what in WRITTEN]), hurry=False
            )
        for event in self._session_events.collect():
            self._events.put(event)
        return self._events.answer()

    def _planned(self, stage: PlannedStep, encoded: EncodedState) -> None:
        assert isinstance(stage.after, StreamState)
        # for clients in other processes, and for warnings of the session about lost data
        counts = stage.after.counts
        lost = has_losses(counts) and self._losses.newly_exceeding(counts)
        if lost or self._watched:
            after = stage.after if lost else encoded
            self._events.put(StepPlanned(stage.plan.step, after, stage.skipped))

    def _taken(self, rank: int, step: int) -> None:
        if self._watched:
            # at once: a client that connects next continues from there
            self._events.put(StepAcked(rank, step))

    # requests of the session

    def _on_loop(self, act: Callable[[], Any]) -> Future[Any]:
        """Run a call on the event loop; return a future of its result or exception."""
        answer = Future[Any]()

        def run() -> None:
            try:
                value = act()
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(value)

        if self._event_loop.broken is not None:
            answer.set_exception(
                ActorLost(
                    "planner",
                    f"{type(self._event_loop.broken).__name__}: {self._event_loop.broken}",
                )
            )
        else:
            self._event_loop.post(run)
        return answer

    def attach(self, ranks: list[int]) -> Future[None]:
        """Attach the given ranks, except those that are already attached."""
        return self._on_loop(
            lambda: self._coordinator.attach(
                [r for r in ranks if r not in self._coordinator.attached]
            )
        )

    def detach(self, rank: int) -> Future[None]:
        return self._on_loop(lambda: self._coordinator.detach(rank))

    def consumed(self, ranks: list[int], step: int) -> Future[None]:
        return self._on_loop(lambda: self._coordinator.consumed(ranks, step))

    def event(self, number: int, event: Any) -> Future[None]:
        """Apply an event of the session, once; confirm it by a message, too.

        ``number`` identifies it. The message also arrives if the caller no longer waits for the
        answer.
        """

        def act() -> None:
            self._coordinator.event(event, number)
            self._events.put(EventApplied(number))

        return self._on_loop(act)

    def report(self, sent: list[SentReport]) -> Future[None]:
        """Apply reports of ranks that have no step queue, each once."""
        return self._on_loop(lambda: self._coordinator.report(sent))

    def reports(self) -> Future[tuple[list[Report], dict[int, int]]]:
        """Return a future of the fields of ``KnownReports``, for states."""
        return self._on_loop(
            lambda: (self._coordinator.history.reports(), self._coordinator.gate.applied.reports())
        )

    def add_source(
        self,
        number: int,
        new: NewSource,
        h: int,
        fingerprint: dict[str, str],
        budget_bytes: int,
        linked: dict[int, str],
    ) -> Future[None]:
        """Add a source that loader worker ``h`` reads, which the launching process has started.

        ``number`` identifies the event. ``linked``: addresses of the constructor workers to which
        the worker is connected, by number.
        """

        def act() -> None:
            coordinator, before = self._coordinator, self._coordinator.prepared
            event_id = coordinator.gate.applied.id_of(new.event, number)
            assert event_id is not None
            if not coordinator.gate.applied.is_new(event_id):
                return self._events.put(EventApplied(number))
            assert isinstance(before, PlannerJob)
            loaders = (*coordinator.placement.loaders, new.source.loaders)
            more = before.joined_by(new.source, fingerprint)
            more_loaders = more.with_loaders(loaders, MULTI_WORKER_READ_AHEAD)
            coordinator.sources.adopt(more_loaders, h, lambda: self._claim(h), linked)
            try:
                coordinator.add_source(
                    new,
                    h,
                    budget_bytes,
                    lambda: coordinator.gate.record_source(
                        new.event, coordinator.prepared, event_id
                    ),
                )
            except JournalError:
                coordinator.sources.abandon(h)
                raise
            except BaseException:
                coordinator.sources.refuse(before, h)
                raise
            return self._events.put(EventApplied(number))

        return self._on_loop(act)

    def _claim(self, h: int) -> ActorHandle:
        """Return the handle of a worker that the launching process started for a new source."""
        name = f"loader-worker/{h}"
        return self._starter.living(name) if self._takeover is None else self._takeover.claim(name)

    def last_event(self) -> Future[int]:
        """Return a future of the number of the last applied event of the session; 0: none."""
        return self._on_loop(lambda: self._coordinator.gate.applied.last(SESSION))

    def watch(self) -> None:
        """Report planned and taken steps from now on, for clients in other processes."""
        self._watched = True

    def move(self, source: int, workers: list[str]) -> Future[None]:
        return self._on_loop(lambda: self._coordinator.move(source, workers))

    def scale(self, source: int, n: int) -> Future[bool]:
        return self._on_loop(lambda: self._coordinator.scale(source, n))

    def relocate(self, workers: list[int]) -> Future[bool]:
        return self._on_loop(lambda: self._coordinator.rebalancer.relocate(workers))

    # status

    def waiting_for(self, rank: int) -> str | Future[str]:
        if self._writes():
            return "an event to be written to the journal"  # that write blocks the event loop
        return self._on_loop(lambda: self._coordinator.waiting_for(rank))

    def metrics(self) -> Future[dict[str, Any]]:
        me = {
            "pid": os.getpid(),
            "node": self._config.machine.node(),
            "pss": pss_bytes(),
            "state": "planning",
        }
        return self._on_loop(
            lambda: {
                **self._coordinator.metrics(),
                "planner": me,
                "journal": self._coordinator.journal.metrics(),
            }
        )

    def state(self) -> Future[StreamState]:
        return self._on_loop(lambda: self._coordinator.planner.state())

    def open_step(self) -> Future[int]:
        return self._on_loop(lambda: self._coordinator.planner.open_step)

    def refuse_planned(self, step: int) -> Future[None]:
        return self._on_loop(lambda: self._coordinator.planner.refuse_planned(step))

    def stages(self, step: int | None = None) -> Future[list[PlannedStep]]:
        """Return a future of all kept plans, or of those of one step."""
        return self._on_loop(
            lambda: (
                list(self._coordinator.plans) if step is None else self._coordinator.plans.of(step)
            )
        )

    def steps(self) -> Future[list[int]]:
        return self._on_loop(lambda: self._coordinator.plans.steps())

    def bad_rows(self) -> Future[list[Quarantined]]:
        return self._on_loop(lambda: self._coordinator.planner.ledger.bad_rows())

    def summary_buffer(self) -> Future[Buffer]:
        return self._on_loop(lambda: self._coordinator.planner.summary_buffer())

    def counted(self) -> Future[Counted]:
        return self._on_loop(self._counted)

    def _counted(self) -> Counted:
        p = self._coordinator.planner
        totals = p.totals
        return Counted(
            next_step=p.next_step,
            mixed=tuple(totals.mixed),
            weights=tuple(map(float, p.weights)),
            active=p.active,
            feedback=p.feedback,
            **totals.counts(),
        )

    # the end

    def stop(self, taken: int = -1) -> None:
        """Stop supervising workers, which are about to exit, and close the journal.

        ``taken`` is the last step that all ranks took by the record of the launching process.
        """
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_coordinator"):
            self._event_loop.stop()
            self._coordinator.close()
            known = self._coordinator.planner.taken
            self._coordinator.journal.close(taken if known is None else max(known, taken))

    def close(self) -> None:
        self.stop()
        self._rpc.shutdown(1.0)
