"""The runtime of a session with a coordinator process, loader workers and constructor workers.

The launching process starts processes and sends requests; it plans nothing. Methods run on the
event loop of the session, except ``address_for`` and those that ``Runtime`` excepts. They block the
loop until the coordinator answers, since other calls on the loop need the coordinator too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from overlord.client.remote_queue import RemoteStepQueue
from overlord.client.sent_reports import KnownReports, ReportSender
from overlord.cluster.launched_workers import START_S
from overlord.cluster.launcher import COORDINATOR_NAME, Launcher
from overlord.cluster.status import recovery_rows
from overlord.concurrency.event_loop import EventLoop
from overlord.constructor.build import BucketBatch
from overlord.errors import ActorLost, DataStall, JobError, OverlordError
from overlord.journal.write_ahead import UNWRITTEN, JournalStart
from overlord.messages.control import EndOfJob, Report, SentReport, SourceLost, StreamState
from overlord.messages.data import StepInfo
from overlord.messages.launcher import (
    EventApplied,
    JobFailed,
    JobFinished,
    RowsQuarantined,
    SessionEvent,
    StepAcked,
    StepPlanned,
    WorkerRecovered,
)
from overlord.planning.spec import NewSource
from overlord.rpc.actors import ActorSystem
from overlord.session.coordinator_client import (
    CoordinatorClient,
    PlannedSummary,
    RemotePlans,
    StepNumber,
)
from overlord.session.events import UnansweredEvents
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

REPORTS_S = 5.0  # seconds for the coordinator to return its reports, for a state
REASON_S = 0.8  # seconds for the reason of a wait: a client waits one second for it
ADDRESS_S = 0.8  # seconds for a constructor's address: a client waits one, and asks again
TAKEN_S = 2.0  # seconds for a constructor worker to return the last step of a rank


class LaunchedStepQueue:
    """The queue of one client in this process: a ``RemoteStepQueue`` that connects when it is read.

    ``where`` returns address and token of the constructor. ``siblings``: a shared list of the
    queues of all ranks of this process, which reconnect each other.
    """

    def __init__(
        self,
        rank: int,
        where: Callable[[], tuple[str, str]],
        *,
        next_step: int,
        generation: int,
        prefetch: int,
        sender: ReportSender,
        siblings: list[RemoteStepQueue],
    ):
        self._rank, self._where, self._next, self._generation, self._prefetch = (
            rank,
            where,
            next_step,
            generation,
            prefetch,
        )
        self._sender = sender
        self._remote: RemoteStepQueue | None = None
        self._over: BaseException | None = None
        self._siblings = siblings

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        if self._over is not None:
            raise self._over
        return self._connected().get(timeout_s)

    def _connected(self) -> RemoteStepQueue:
        """Return the connected queue; connect at the first call, since the address may change."""
        if self._remote is None:
            self._remote = RemoteStepQueue(
                rank=self._rank,
                address="",
                token="",
                where=lambda generation: self._where(),
                next_step=self._next,
                generation=self._generation,
                prefetch=self._prefetch,
                sender=self._sender,
                siblings=lambda queue: list(self._siblings),
            )
            self._siblings.append(self._remote)
            if self._over is not None:  # another thread ended the queue meanwhile
                self._remote.end(self._over)
        return self._remote

    @property
    def connection_problem(self) -> str:
        """A description of the fault of the connection; empty while the connection works."""
        return "" if self._remote is None else self._remote.connection_problem

    def ack(self, step: int) -> None:
        if self._remote is not None:
            self._remote.ack(step)

    def report(self, report: Report, in_time: bool) -> None:
        if self._remote is not None:
            self._remote.report(report, in_time)
        else:  # of a loaded state: it is sent once the queue is connected
            self._sender.add(report, in_time)

    def reports(self) -> tuple[SentReport, ...]:
        return self._sender.kept()

    def put(self, info: StepInfo, bucket: BucketBatch) -> None:
        raise OverlordError(
            f"rank {self._rank}: expected steps from its constructor worker, got a step from this "
            "process; this is a bug: report it"
        )

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        self._over = error
        if self._remote is not None:
            with contextlib.suppress(ValueError):
                self._siblings.remove(self._remote)
            self._remote.end(error, drop=drop)

    def __len__(self) -> int:
        return 0 if self._remote is None else len(self._remote)


class ClusterRuntime:
    """The ``Runtime`` of a job in several processes, on one machine or on Ray.

    ``launcher`` starts the processes.
    """

    def __init__(self, launcher: Launcher, loop: EventLoop, generation: int = 0):
        self._loop, self._number = loop, generation
        self._queues: list[RemoteStepQueue] = []  # of clients in this process
        self.on_stage: list[Callable[[Any], None]] = []
        self.on_lost: list[Callable[[SourceLost], None]] = []
        self.on_late: list[Callable[[Any], None]] = []
        self._unanswered = UnansweredEvents()
        self.on_taken: Callable[[int, int], None] = lambda rank, step: None
        self._launcher = launcher
        launcher.on_event = self._received
        self.planner, self.plans = CoordinatorClient(self._launcher), RemotePlans(self._launcher)
        self._bucket_of = {
            rank: b
            for b, ranks in enumerate(launcher.prepared.job.place.buckets("DP"))
            for rank in ranks
        }
        self._addresses: dict[Any, str] = {}  # of constructor workers, by handle
        self._known: dict[str, str] = {}  # last known address of each constructor worker, by name
        self._outside: dict[Any, str] = {}
        # answers of constructor workers, pending ones included
        self._calls: dict[tuple[Any, str], Future[Any]] = {}
        self._calls_lock = threading.Lock()
        self._listening: tuple[str, str] | None = None
        # kills workers that do not acknowledge the end of the job
        self._kill_timer: threading.Timer | None = None
        self._closed = False
        self.recoveries: list[WorkerRecovered] = []
        self.journal = UNWRITTEN  # of this process: the coordinator writes the journal

    def begin(self, state: StreamState | None) -> ClusterRuntime:
        """Start the coordinator and all workers at a state, and return this runtime."""
        try:
            self._launcher.begin(state)
            self._constructor_addresses()
        except BaseException:
            self.close()
            raise
        return self

    @property
    def absent(self) -> str:
        """The reason why the coordinator cannot be called now; empty if it can be called."""
        return self._launcher.absent

    @property
    def actor_system(self) -> ActorSystem:
        """The actor system that started the workers."""
        return self._launcher.control

    def use_buffers(self, buffers: Any) -> None:
        """Do nothing: constructor workers have their own buffers."""

    def _received(self, event: SessionEvent) -> None:
        if self._closed:
            return  # another runtime may serve the same clients now
        match event:
            case StepPlanned(step=step, after=after, skipped=skipped):
                for watcher in self.on_stage:
                    watcher(PlannedSummary(StepNumber(step), after, skipped))
            case StepAcked(rank=rank, step=step):
                self.on_taken(rank, step)
            case RowsQuarantined(rows=rows, undecodable=undecodable):
                self.planner.listed.update(dict.fromkeys(rows))
                self.planner.spoiled.update(dict.fromkeys(undecodable))
            case SourceLost():
                for watcher in self.on_lost:
                    watcher(event)
            case EventApplied(number=number):
                self._unanswered.confirmed(number)
            case WorkerRecovered():
                self.recoveries.append(event)
            case JobFinished(end=None) if self._launcher.is_over:
                pass  # sent by a coordinator that has been given up
            case JobFinished(end=end):
                self.planner.finished = end
            case JobFailed(error=error):
                self._end_all(error)
            case _:
                raise TypeError(
                    f"session: expected an event of the coordinator, got {event!r:.80}; "
                    "this is a bug in Overlord: report it"
                )

    def _end_all(self, error: Exception) -> None:
        """End the job with the error of a coordinator that is given up, or of the event loop.

        Constructor workers send the error to their clients, after the complete steps. A worker that
        does not acknowledge is killed: no coordinator is left to detect that it hangs.
        """
        finish, control = EndOfJob(self._launcher.acked + 1, error), self._launcher.control
        self.planner.finished = self.planner.finished or finish
        workers = [
            h
            for name, h in list(self._launcher.workers.handles.items())
            if name.startswith("constructor-worker/") and h.alive and not self._closed
        ]
        answers = {worker: control.call(worker, "do", [finish]) for worker in workers}

        def kill_hanging() -> None:
            for worker, answer in answers.items():
                if not answer.done() and not self._closed:
                    log.warning("%s killed: it did not acknowledge the end of the job", worker.name)
                    self._launcher.workers.end(worker)

        self._kill_timer = threading.Timer(
            self._launcher.prepared.options.lost_after_s, kill_hanging
        )
        self._kill_timer.daemon = True
        self._kill_timer.start()

    def begin_journal(self, start: JournalStart, prepared: PreparedJob) -> None:
        """Close the journal of this process, and let the coordinator open it."""
        start.journal.close()
        if prepared.job.journal is not None:
            self._launcher.open_journal(start.anew, start.floor, start.journal.launch)

    # clients

    def attach(self, mailboxes: Mapping[int, Any]) -> None:
        self._launcher.attached |= set(mailboxes)
        self._launcher.ask("attach", sorted(mailboxes))

    def detach(self, rank: int) -> None:
        if rank in self._launcher.attached:
            self._launcher.attached.discard(rank)  # a restarted coordinator gets the others
            with contextlib.suppress(ActorLost, DataStall):
                self._launcher.ask("detach", rank)

    def stop(self) -> None:
        """Clear the list of attached ranks; all processes have ended already."""
        self._launcher.attached.clear()

    def consumed(self, ranks: Sequence[int], step: int) -> None:
        """Send acks of clients in this process to the coordinator.

        Constructor workers send them too, but a worker that died may not have sent its last ones.
        The last ack is also needed when the job ends before the workers send it.
        """
        if self._launcher.attached <= set(ranks):
            self._launcher.acked = max(step, self._launcher.acked)
        self._launcher.tell("consumed", list(ranks), step)

    def inbox(self, rank: int, next_step: int) -> LaunchedStepQueue:
        prefetch = self._launcher.prepared.options.prefetch
        return LaunchedStepQueue(
            rank,
            lambda: self.address_for(rank),
            next_step=next_step,
            generation=self._number,
            prefetch=prefetch,
            sender=ReportSender(self._launcher.prepared.job.feedback_lag),
            siblings=self._queues,
        )

    def address_for(self, rank: int) -> tuple[str, str]:
        """Return address and token of a rank's constructor worker. Runs on: any thread.

        The worker itself is called, not the coordinator. Raise ``DataStall`` if it does not answer
        in time or is being restarted, and the error of the job if that has ended.
        """
        return self._address_for(rank, ADDRESS_S), self._launcher.workers.token

    def _address_for(self, rank: int, wait_s: float) -> str:
        worker = self._constructor(rank)
        if worker not in self._addresses:
            self._addresses[worker] = self._known[worker.name] = self._call_once(
                worker, wait_s, "address"
            )
        return self._addresses[worker]

    def listen(self, host: str, token: str) -> None:
        self._listening, self._launcher.watched = (host, token), True
        self._launcher.ask("watch")
        for rank in self._bucket_of:
            # a worker that is restarted now is called when a client connects
            with contextlib.suppress(DataStall):
                self._outside_for(rank, START_S)

    def outside(self, rank: int) -> tuple[str, str]:
        return self._outside_for(rank, ADDRESS_S), ""

    def _outside_for(self, rank: int, wait_s: float) -> str:
        worker = self._constructor(rank)
        if worker not in self._outside:
            assert self._listening is not None
            self._outside[worker] = self._call_once(worker, wait_s, "listen", *self._listening)
        return self._outside[worker]

    def taken_by(self, rank: int) -> int | None:
        """Return the last step that a rank took, from its constructor worker; -1 before the first.

        None: the worker is not alive, and its unsent acks are lost. Raise ``DataStall`` for a
        worker that is alive and does not answer.
        """
        worker, control = (
            self._launcher.workers.handles.get(self._constructor_name(rank)),
            self._launcher.control,
        )
        if worker is None or not worker.alive:
            return None
        try:
            return int(control.get(control.call(worker, "taken", rank), TAKEN_S))
        except ActorLost:
            return None

    def _constructor_name(self, rank: int) -> str:
        return f"constructor-worker/{self._launcher.workers.constructor_of[self._bucket_of[rank]]}"

    def _constructor(self, rank: int) -> Any:
        name = self._constructor_name(rank)
        worker = self._launcher.workers.handles.get(name)
        if worker is None or not worker.alive:
            raise self._error_of(name)
        return worker

    def _error_of(self, name: str) -> Exception:
        """Return the error for a request to a constructor worker that does not answer.

        It is the error of the job if that has ended with a loss, else ``DataStall``.
        """
        finish = self.planner.finished
        if finish is not None and (
            isinstance(finish.error, ActorLost)
            or (finish.error is not None and self._launcher.is_over)
        ):
            return finish.error
        return DataStall(f"{name} to be started again", 0.0)

    def _call_once(self, worker: Any, wait_s: float, method: str, *args: Any) -> str:
        """Call a worker once for all callers, and return its answer.

        A starting worker may answer after ``wait_s``. Then this call raises ``DataStall``, and the
        next caller receives the answer.
        """
        control = self._launcher.control
        with self._calls_lock:
            answer = self._calls.get((worker, method))
            if answer is None or (answer.done() and answer.exception() is not None):
                answer = self._calls[worker, method] = control.call(worker, method, *args)
        try:
            return str(control.get(answer, wait_s))
        except (ActorLost, DataStall):
            raise self._error_of(worker.name) from None

    # events

    def event(self, event: Any, number: int | None = None) -> None:
        """Apply an event once; it is durable in the coordinator's journal on return.

        The event is sent again, with its number, to a coordinator that replaces a lost one.
        """
        assert number is not None, f"expected the number of {event!r:.80}, got None"
        self._unanswered.send(
            number,
            lambda: self._launcher.ask("event", number, event),
            lambda: self._applied_late(event),
        )

    def settle(self) -> None:
        """Determine which events that timed out were applied, before the next event is sent.

        The coordinator executes requests in order, so the others will not be applied later.
        """
        if self._unanswered.unsettled:
            self._unanswered.settle(self._launcher.ask("last_event"))

    def _applied_late(self, event: Any) -> None:
        for watcher in self.on_late:
            watcher(event)

    def report(self, sent: Sequence[SentReport]) -> None:
        """Send reports of ranks without a step queue, or of closed queues, to the coordinator."""
        try:
            self._launcher.ask("report", list(sent))
        except (ActorLost, DataStall) as fault:
            if not self._closed:  # otherwise the session was rewound or closed
                log.warning(
                    "reports of rank %d not confirmed by the coordinator: %s",
                    sent[0].report.rank,
                    fault,
                )
        except OverlordError:
            if not self._closed:
                raise

    def reports(self) -> KnownReports:
        """Return the reports that the coordinator has, and those on their way to it.

        Constructor workers keep the reports of their clients, so a lost coordinator loses none.
        """
        on_their_way, known = self._kept_by_workers(), KnownReports()
        with contextlib.suppress(ActorLost, DataStall):
            known = KnownReports(*self._launcher.ask("reports", timeout_s=REPORTS_S))
        return known.with_pending(on_their_way)

    def _kept_by_workers(self) -> list[SentReport]:
        """Return the reports that constructor workers keep, and that have arrived there."""
        control = self._launcher.control
        workers = [
            h
            for name, h in list(self._launcher.workers.handles.items())
            if name.startswith("constructor-worker/") and h.alive
        ]
        calls, deadline = [control.call(h, "reports") for h in workers], time.monotonic() + TAKEN_S
        found: list[SentReport] = []
        for call in calls:
            with contextlib.suppress(ActorLost, DataStall):  # its clients keep them too
                found += control.get(call, max(0.0, deadline - time.monotonic()))
        return found

    def prepare_source(self, prepared: PreparedJob) -> int:
        """Start a loader worker for an added source, wait for it, and return its number."""
        return self._launcher.workers.prepare(prepared, self._constructor_addresses)

    def _constructor_addresses(self) -> dict[int, str]:
        """Return the addresses of all constructor workers, by number.

        A worker that is being restarted has its old address; the coordinator sends the new one.
        """
        for rank in self._bucket_of:
            with contextlib.suppress(DataStall):
                self._address_for(rank, START_S)
        return {int(name.rpartition("/")[2]): address for name, address in self._known.items()}

    def drop_prepared(self, prepared: int) -> None:
        """End the worker of a source that is not added."""
        self._launcher.workers.drop(prepared)

    def add_source(
        self,
        new: NewSource,
        prepared: int,
        more: PreparedJob,
        joined: Callable[[], None] = lambda: None,
        *,
        number: int | None = None,
    ) -> None:
        assert number is not None, f"expected the number of {new.event!r:.80}, got None"
        launcher, workers = self._launcher, self._launcher.workers
        worker, n = workers.handles[f"loader-worker/{prepared}"], new.source.loaders
        if not worker.alive:
            raise ActorLost(worker.name, "its process ended before its source was added")

        def ask() -> None:
            fingerprint = dict(launcher.prepared.fingerprint)
            launcher.ask(
                "add_source",
                number,
                new,
                prepared,
                fingerprint,
                more.budget_bytes,
                workers.linked[prepared],
            )

        def note_joined() -> None:
            workers.joined(prepared, n)
            joined()

        self._unanswered.send(number, ask, note_joined)
        note_joined()

    def move(self, source: int, hosts: Sequence[str]) -> None:
        self._launcher.ask("move", source, list(hosts))

    def scale(self, source: int, n: int) -> bool:
        return bool(self._launcher.ask("scale", source, n))

    # status

    def waiting_for(self, rank: int) -> str:
        planner = self._launcher.coordinator
        if self.absent or planner is None:
            return self.absent
        try:
            return str(
                self._launcher.control.get(
                    self._launcher.control.call(planner, "waiting_for", rank), REASON_S
                )
            )
        except DataStall as silent:
            return f"the coordinator, which does not answer ({silent})"
        except ActorLost as lost:
            return self.absent or f"the coordinator, which is being restarted ({lost.reason})"

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of all workers and of the journal, over all coordinators."""
        found: dict[str, Any] = self._launcher.ask("metrics")
        for what, n in self._launcher.written_before().items():
            found["journal"][what] = found["journal"].get(what, 0) + n
        return found | {
            "recoveries": recovery_rows(self.recoveries),
            "placement": self._launcher.workers.factory.placement.metrics(),
        }

    def kill(self, name: str) -> None:
        """Kill a process of the job by name, as a crash would, for drills."""
        every = {COORDINATOR_NAME: self._launcher.coordinator, **self._launcher.workers.handles}
        if (handle := every.get(name)) is None:
            raise JobError(
                [
                    f"expected the name of a process of this job, got {name!r}; there are "
                    f"{', '.join(every)}"
                ],
                "kill",
            )
        self._launcher.control.kill(handle)

    def on_loop_failure(self, error: Exception) -> None:
        self._end_all(error)

    def close(self) -> None:
        self._closed = True
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._launcher.close()
