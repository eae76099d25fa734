"""The mutable state of a ``Session``: event loop, clients and current generation."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from overlord.client.client import Client, State, StepQueue
from overlord.client.sent_reports import KnownReports
from overlord.concurrency.event_loop import EventLoop
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, JobError, OverlordError
from overlord.job.job import Job
from overlord.journal.write_ahead import JournalStart
from overlord.messages.control import EncodedState, Report, SentReport, StreamState
from overlord.planning.losses import DataLosses
from overlord.planning.mixture import EventLog
from overlord.planning.schedule.base import learns
from overlord.planning.schedule.by_stage import job_schedule
from overlord.planning.spec import has_losses
from overlord.process.shutdown import CloseOnce, Steps
from overlord.serving.control_server import RemoteClient
from overlord.serving.session_server import SessionServer
from overlord.serving.step_publisher import MOVED
from overlord.session.events import UserEvents
from overlord.session.generation import Generation, decoded
from overlord.session.local_runtime import LocalRuntime
from overlord.session.runtime import Runtime, end_processes, hold_cluster, start_runtime
from overlord.setup.prepared_job import PreparedJob
from overlord.setup.profile_store import Refresher

log = logging.getLogger("overlord")

WAITING_FOR_S = 1.0  # for the event loop to return the reason of a wait


Rewind = Callable[[int, Mapping[str, Any], tuple[str, ...]], tuple[StepQueue, State]]


class RemoteRanks(Protocol):
    """Ranks whose clients are in other processes; see ``session/served_ranks.py``."""

    @property
    def server(self) -> SessionServer: ...
    @property
    def ranks(self) -> frozenset[int]: ...
    @property
    def remote_clients(self) -> list[RemoteClient]: ...
    @property
    def finished(self) -> bool: ...

    def take_over(self, rank: int) -> StepQueue | None: ...
    def new_queue(self, rank: int, generation: int) -> StepQueue: ...
    def follow(self, runtime: Runtime) -> None: ...
    def rewound(self) -> None: ...
    def expect(self, ranks: Iterable[int]) -> None: ...
    def serve_by_broadcast(self, ranks: Iterable[int], idle: Iterable[int]) -> None: ...
    def constructor_address(self, rank: int) -> tuple[str, str]: ...
    def explain_wait(self, words: str) -> str: ...
    def wait_until_left(self, timeout_s: float, since: float | None = None) -> bool: ...
    def close(self) -> None: ...


class RunningJob:
    """Clients, their progress and the current generation of a session.

    Not part of the public API: ``Session`` is. The packages of Overlord use it as
    ``session.internals``. ``lock`` guards ``clients``, ``begun`` and the rank-wise fields of the
    generation. It is held for moments only, also by signal handlers.
    """

    def __init__(
        self, prepared: PreparedJob, state: StreamState | None, kind: str, start: JournalStart
    ):
        self.kind, self.options = kind, prepared.options
        # one more for each added source: a saved state may be older than the source
        self.prepared_jobs = [prepared]
        self.adding: PreparedJob | None = None  # with the source that was or is being added last
        self.clients: dict[int, Client | RemoteClient] = {}
        self.closed = self.begun = False
        self.remote_ranks: RemoteRanks | None = None  # None: ``serve`` was not called
        self.broadcast_ranks: frozenset[int] = frozenset()  # ranks whose steps other ranks fetch
        self.lock = threading.RLock()
        self.switching = threading.Lock()  # held while one generation replaces another
        mixture = job_schedule(prepared.given)
        self.learns = learns(mixture)
        self.uses_reports = self.learns or not callable(mixture)
        self._event_numbers = itertools.count(1)
        self.started = time.monotonic()
        self.loop = EventLoop(prepared.given.name)
        self.events = UserEvents(self)
        self._losses = DataLosses()
        self.journal = start.journal
        self._close_once = CloseOnce()
        self.journal.start(self.loop.post)
        self._release_cluster: Callable[[], None] = lambda: None
        runtime: Runtime | None = None
        try:
            self._release_cluster = hold_cluster(kind, prepared.options.address)
            runtime = start_runtime(kind, prepared.with_floor(start.floor), state, self.loop)
            self.observe(runtime)
            self.generation = Generation.of(0, prepared, runtime, runtime.planner.state(), "")
            start.write(runtime, prepared)
        except BaseException:
            if runtime is not None:
                runtime.close()
            prepared.close()
            self.journal.close()
            self._release_cluster()
            raise
        self.loop.start(self.fail)
        self.refresher = (
            Refresher(lambda: self.generation.prepared, self.metrics)
            if prepared.options.partition == "auto"
            else None
        )
        if self.refresher is not None:
            self.refresher.start()
        self._stop_watching = self._watch_local_loaders()

    def observe(self, runtime: Runtime) -> None:
        """Record the events that a new runtime sends, and warn of lost data."""
        self.events.observe(runtime)
        runtime.on_stage.append(lambda stage: self._warn_of_losses(stage.after))

    def _warn_of_losses(self, after: State) -> None:
        """Warn once of each source that loses many tokens to ``on_long``, or whose rows are bad.

        A coordinator in another process sends decoded states where they are needed for this.
        """
        if isinstance(after, EncodedState) or not has_losses(after.counts):
            return
        job = (self.adding or self.generation.prepared).job
        for loss in self._losses.warnings(after.counts, job):
            log.warning("job %r: %s", job.name, loss)

    @property
    def job(self) -> Job:
        return self.generation.prepared.given

    @property
    def runtime(self) -> Runtime:
        return self.generation.runtime

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the runtime. Runs on: any thread but the event loop."""
        found: dict[str, Any] = self.loop.call(lambda: self.runtime.metrics(), "the event loop")
        return found

    def refuse_closed(self) -> None:
        if self.closed:
            raise OverlordError("the session is closed; launch the job again to continue")

    def prepared_for(self, n: int, known: PreparedJob | None = None) -> PreparedJob:
        """Return the prepared job for ``n`` sources: ``known``, or the one that is being added.

        A coordinator in another process may have added a source before its answer arrives here.
        ``known``: the current job by default.
        """
        known, adding = known or self.generation.prepared, self.adding
        late = adding is not None and len(known.job.names) < n == len(adding.job.names)
        return adding if adding is not None and late else known

    # clients

    def open_client(self, rank: int, rewind: Rewind) -> Client:
        self.refuse_closed()
        if problem := self.job.place.rank_problem(rank):
            raise JobError([problem], "client")
        with self.lock:
            queue = None if self.remote_ranks is None else self.remote_ranks.take_over(rank)
            if isinstance(client := self.clients.get(rank), Client):
                return client
            if queue is None and self.begun:
                raise OverlordError(
                    f"rank {rank}: expected client() before the first step, got it after; open the "
                    "clients of all ranks of this process before iterating, or load a state on "
                    "every rank"
                )
            if queue is None:
                queue = self.runtime.inbox(rank, self.generation.start.step)
            self.generation.add_queue(rank, queue)
            client = self.clients[rank] = self._new_client(rank, queue, rewind)
            return client

    def _new_client(self, rank: int, queue: StepQueue, rewind: Rewind) -> Client:
        job, options = self.job, self.options
        return Client(
            rank,
            queue,
            begin=self.begin,
            consumed=lambda queue, step: self.acked(rank, queue, step),
            waiting_for=lambda: self.waiting_for(rank),
            export=lambda queue, state: self.export(rank, queue, state),
            rewind=lambda state, allow: rewind(rank, state, allow),
            start=self.generation.start,
            report=lambda queue, step, metrics, next_step: self.events.report(
                rank, queue, step, metrics, next_step
            ),
            close=lambda: self.detach(rank),
            stall_warn_s=options.stall_warn_s,
            stall_limit_s=options.stall_limit_s,
            on_stall=options.on_stall,
            microbatches=job.batch.microbatches,
            world_size=job.place.world_size,
            evaluation=job.evaluation,
            missing_ranks=self.missing_ranks,
        )

    def missing_ranks(self) -> list[int]:
        """Return the ranks of the mesh that no client takes, before the first step.

        Of a session that serves other processes it is empty: it waits for all ranks.
        """
        with self.lock:
            if self.begun or self.remote_ranks is not None:
                return []
            return [rank for rank in range(self.job.place.world_size) if rank not in self.clients]

    def new_queue(self, rank: int, generation: Generation) -> StepQueue:
        """Return an empty step queue of a rank. The caller holds the lock."""
        if self.remote_ranks is not None and not isinstance(self.clients.get(rank), Client):
            return self.remote_ranks.new_queue(rank, generation.number)
        return generation.runtime.inbox(rank, generation.start.step)

    def begin(self) -> None:
        """Start to plan for all clients that are open now.

        Clients call this at their first request for a step. Only the first call has an effect, and
        the first one after a reshard.
        """
        with self.lock:
            if self.begun or self.closed:
                return
            self.begun = True
            generation = self.generation
        self.loop.call(lambda: self.attach(generation), "clients to be attached")

    def attach(self, generation: Generation) -> None:
        """Attach the ranks that are open now. Runs on: event loop.

        A rank that was closed after the call was posted must not be attached: it would block all
        other ranks.
        """
        with self.lock:
            queues = dict(generation.queues) if generation is self.generation else {}
        generation.runtime.attach(queues)

    def acked(self, rank: int, queue: StepQueue, step: int) -> None:
        """Record that a rank took a step.

        The event loop is notified once all clients took it. Only the slowest rank matters for
        planning, and waking a thread for every rank costs more than planning.
        """
        queue.ack(step)
        with self.lock:
            # otherwise the client is closed, or of an older generation
            if self.generation.queues.get(rank) is queue:
                self.generation.acked[rank] = step
                self._notify_slowest()

    def _notify_slowest(self) -> None:
        """Send the step of the slowest client if it has changed. The caller holds the lock."""
        generation = self.generation
        acked, runtime = generation.acked, generation.runtime
        if (
            acked
            and len(acked) == len(self.clients)
            and min(acked.values()) > generation.acked_by_all
        ):
            generation.acked_by_all = slowest = min(acked.values())
            ranks = list(acked)
            self.loop.post(lambda: runtime.consumed(ranks, slowest))

    def slowest_step(self) -> int:
        """Return the lowest next step of all clients; without clients the generation's first."""
        steps = (client.position.step for client in list(self.clients.values()))
        return min(steps, default=self.generation.start.step)

    def detach(self, rank: int) -> None:
        with self.lock:
            queue = self.generation.queues.get(rank)
            if queue is not None and self.learns and not self.closed:
                # its constructor worker may be lost, and these reports with it
                self.post_reports(self.generation.runtime, queue.reports())
            if (client := self.clients.pop(rank, None)) is not None and not self.clients:
                self.generation.last_state = client.position
            self.generation.remove(rank)
            if self.begun and not self.closed:
                runtime = self.runtime
                self.loop.post(lambda: runtime.detach(rank))
                self._notify_slowest()

    def waiting_for(self, rank: int) -> str:
        """Describe what a rank waits for; return a text even if the event loop does not answer."""
        if self.loop.broken is not None:
            return f"the event loop, which failed: {self.loop.broken}"
        with self.lock:
            runtime, acked = self.runtime, dict(self.generation.acked)
        if missing := runtime.absent:
            return missing

        def act() -> str:
            for r, step in acked.items():  # acks that were not sent yet: to find the slowest rank
                runtime.consumed([r], step)
            return runtime.waiting_for(rank)

        try:
            words: str = self.loop.call(act, "the event loop", WAITING_FOR_S)
            return words if self.remote_ranks is None else self.remote_ranks.explain_wait(words)
        except DataStall:
            return (
                "the event loop, which is busy: with the strategy, the schedule, or a read that "
                "was short before"
            )

    def _watch_local_loaders(self) -> Callable[[], None]:
        """Poll loaders and clients every ``watch_s``; in a cluster the coordinator does so."""
        options = self.options
        if not options.watch_s or not isinstance(self.runtime, LocalRuntime):
            return lambda: None

        def poll() -> None:
            runtime, waits = self.runtime, [c.waited_s for c in list(self.clients.values())]
            if isinstance(runtime, LocalRuntime) and waits:
                mean = math.fsum(waits) / len(waits)
                self.loop.post(lambda: runtime.observe_load(options, mean, time.monotonic()))

        return Platform().every(options.watch_s, poll, "overlord watch")

    # states

    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            generation = self.generation
            # a rank that has not loaded the state of this generation took no step of it
            positions = [
                client.position if rank in generation.joined else generation.start
                for rank, client in self.clients.items()
            ]
            slowest = (
                min(positions, key=lambda s: s.step)
                if positions
                else generation.last_state or generation.start
            )
            prepared, events = generation.prepared, generation.events
        return self._exported(slowest, prepared, events)

    def export(
        self, rank: int, queue: StepQueue, state: State, reports: Sequence[SentReport] = ()
    ) -> dict[str, Any]:
        """Export the state of a client, with the events of its own generation.

        ``reports``: those that a client in another process keeps. Raise ``OverlordError`` if
        another generation has replaced that of the client.
        """
        with self.lock:
            if self.generation.queues.get(rank, queue) is not queue:
                raise OverlordError(f"rank {rank}: {MOVED}")
            prepared, events = self.generation.prepared, self.generation.events
        return self._exported(state, prepared, events, reports)

    def _exported(
        self,
        state: State,
        prepared: PreparedJob,
        events: EventLog,
        reports: Sequence[SentReport] = (),
    ) -> dict[str, Any]:
        """Export a state with the events and reports that came after its step was planned.

        Steps are planned ahead of the events and reports that trainers send.
        """
        found = self.reports(reports)
        whole = decoded(state)
        known = self.prepared_for(len(whole.owed), prepared)
        return known.export(events.completed(whole, known.job.names, reports=found))

    def reports(self, kept: Sequence[SentReport] = ()) -> Sequence[Report]:
        """Return the reports that states need; of one rank and step the last counts.

        ``kept``: those of a client in another process. Runs on: any thread but the event loop.
        """
        if not self.learns:
            return ()
        runtime, known = self.runtime, KnownReports()
        # otherwise the planner does not answer: clients have what it will receive in time
        with contextlib.suppress(ActorLost, DataStall):
            known = self.loop.call(runtime.reports, "the planner")
        return known.with_pending([*self.unconfirmed_reports(), *kept]).reports

    def unconfirmed_reports(self) -> list[SentReport]:
        """Return the reports that the clients of this process keep."""
        with self.lock:
            queues = list(self.generation.queues.values())
        return [sent for queue in queues for sent in queue.reports()]

    def post_reports(self, runtime: Runtime, sent: Sequence[SentReport]) -> None:
        """Send reports of a closed client to the planner, before later changes of this client."""
        if sent:
            self.loop.post(lambda: runtime.report(sent))

    def next_event(self) -> int:
        """Return the number of a new event, which identifies it in this launch."""
        return next(self._event_numbers)

    # the end

    def fail(self, error: BaseException) -> None:
        """End all queues with the error of the event loop, or of a failed start of a generation."""
        if not isinstance(error, Exception):  # a BaseException must not end a trainer's thread
            error = ActorLost("the event loop", f"{type(error).__name__}: {error}")
        for queue in list(self.generation.queues.values()):
            queue.end(error)
        self.runtime.on_loop_failure(error)

    def close(self) -> None:
        self.closed = True
        first = [
            self._stop_watching,
            *([] if self.refresher is None else [self.refresher.close]),
            self.loop.stop,
        ]
        self._close_once.run(lambda: [*first, *self.steps_to_close()])

    def steps_to_close(self) -> Steps:
        generation, remote_ranks = self.generation, self.remote_ranks

        def end_queues() -> None:  # before the constructors exit: otherwise clients would reconnect
            for queue in list(self.generation.queues.values()):
                queue.end(OverlordError("the session is closed; launch the job again to continue"))

        return [
            end_queues,
            generation.runtime.close,
            lambda: end_processes(generation.runtime),
            generation.prepared.close,
            lambda: self.journal.close(self.generation.acked_by_all),
            *([] if remote_ranks is None else [remote_ranks.close]),
            self._release_cluster,
        ]
