"""The runtime of a session whose planner has a process of its own, the coordinator.

The launching process starts processes and sends requests; it plans nothing. All methods but
``prepare_source``, ``address_for`` and ``close`` run on the event loop of the session, and block it
until the coordinator answers: all other calls on that loop need the coordinator too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from overlord.client.local_queue import LaunchedStepQueue
from overlord.client.remote_queue import RemoteStepQueue
from overlord.cluster.coordinator_actor import Counted
from overlord.cluster.event_outbox import EventOutbox
from overlord.cluster.launcher import PLANNER, START_S, Launcher
from overlord.cluster.worker_factory import SIDE_BY_SIDE
from overlord.concurrency.event_loop import EventLoop
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, JobError, OverlordError
from overlord.journal.write_ahead import UNWRITTEN, JournalStart
from overlord.messages.control import Cursor, EndOfJob, PlannedStep, Report, SourceLost, StreamState
from overlord.planning.spec import NewSource, Quarantined
from overlord.rpc.actors import ActorSystem
from overlord.sample import Buffer
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

REPORT_S = 600.0  # no caller waits for a report, and later calls need the coordinator too
WHY_S = 0.8  # a client waits one second for the reason of its wait
WHERE_S = 0.8  # a client waits one second for the address of its constructor, and asks again
TAKEN_S = 2.0  # for a constructor worker to send the last step of a rank


class RemotePlans:
    """The recent plans of the coordinator, fetched on demand."""

    def __init__(self, parts: Launcher):
        self._parts = parts

    def of(self, step: int) -> list[PlannedStep]:
        """Return the plan of one step, if it is kept: plans may be large."""
        stages: list[PlannedStep] = self._parts.ask("stages", step)
        return stages

    def steps(self) -> list[int]:
        steps: list[int] = self._parts.ask("steps")
        return steps

    def __iter__(self) -> Iterator[PlannedStep]:
        stages: list[PlannedStep] = self._parts.ask("stages")
        return iter(stages)


class SourceNames(NamedTuple):
    """The fields of the planner's spec that a session reads."""

    names: tuple[str, ...]


class StepNumber(NamedTuple):
    """The fields of a plan that the server of a session reads."""

    step: int


class CoordinatorClient:
    """The planner in the coordinator process, as far as a session reads it.

    Only the end of the job and the quarantined rows are kept here.
    """

    def __init__(self, parts: Launcher):
        self._parts = parts
        self.finished: EndOfJob | None = None
        self.listed: dict[Quarantined, None] = {}
        self.spoiled: dict[Quarantined, None] = {}

    @property
    def spec(self) -> SourceNames:
        return SourceNames(tuple(self._parts.blueprint.job.names))

    @property
    def ledger(self) -> CoordinatorClient:
        """Return itself, which has ``bad_rows``."""
        return self

    def bad_rows(self) -> list[Quarantined]:
        """Return the quarantined rows of this coordinator and of earlier ones."""
        try:
            rows: list[Quarantined] = self._parts.ask("bad_rows")
        except ActorLost:  # the coordinator is not restarted
            rows = []
        now = set(rows)
        before = [row for row in self.listed if row not in now]
        return [*before, *rows] + [row for row in self.spoiled if row not in now]

    @property
    def open_step(self) -> int:
        return int(self._parts.ask("open_step"))

    @property
    def next_step(self) -> int:
        return self.state().step

    def state(self) -> StreamState:
        state: StreamState = self._parts.ask("state")
        return state

    def refuse_planned(self, step: int) -> None:
        self._parts.ask("refuse_planned", step)

    def summary_buffer(self) -> Buffer:
        buffer: Buffer = self._parts.ask("summary_buffer")
        return buffer

    def counted(self) -> Counted:
        counted: Counted = self._parts.ask("counted")
        return counted


@dataclass(frozen=True, slots=True)
class PlannedSummary:
    """The fields of a planned step that the server of a session uses."""

    plan: StepNumber
    after: StreamState
    skipped: bool


class ClusterRuntime:
    """The ``Runtime`` of a job with a coordinator process."""

    def __init__(
        self,
        prepared: PreparedJob,
        state: StreamState | None,
        loop: EventLoop,
        generation: int = 0,
        *,
        control: ActorSystem,
        machine: Platform,
    ):
        self._loop, self._number = loop, generation
        self._boxes: list[RemoteStepQueue] = []  # of clients in this process
        self.on_stage: list[Callable[[Any], None]] = []
        self.on_lost: list[Callable[[SourceLost], None]] = []
        self.on_late: list[Callable[[Any], None]] = []
        self._sayings = EventOutbox()
        self.on_taken: Callable[[int, int], None] = lambda rank, step: None
        self._parts = Launcher(prepared, generation, self._received, control, machine)
        self.planner, self.plans = CoordinatorClient(self._parts), RemotePlans(self._parts)
        self._bucket_of = {
            rank: b for b, ranks in enumerate(prepared.job.place.buckets("DP")) for rank in ranks
        }
        self._addresses: dict[Any, str] = {}  # of constructor workers, by handle
        self._known: dict[str, str] = {}  # last known address, by name
        self._outside: dict[Any, str] = {}
        # answers of constructor workers, pending ones included
        self._asked: dict[tuple[Any, str], Future[Any]] = {}
        self._asking = threading.Lock()
        self._door: tuple[str, str] | None = None
        # the worker of the last source that was prepared, and the job without that source
        self._without: tuple[int, PreparedJob | None] = (-1, None)
        # kills workers that do not acknowledge the end of the job
        self._deaf: threading.Timer | None = None
        self._closed = False
        self.recoveries: list[dict[str, Any]] = []
        self.journal = UNWRITTEN  # of this process: the coordinator writes the journal
        try:
            self._parts.begin(state)
            self._constructor_addresses()
        except BaseException:
            self.close()
            raise

    @property
    def absent(self) -> str:
        """Why the coordinator cannot be asked; empty if it can."""
        return self._parts.absent

    @property
    def actor_system(self) -> ActorSystem:
        """The actor system that started the workers."""
        return self._parts.control

    def use_buffers(self, buffers: Any) -> None:
        """Do nothing: constructor workers have buffers of their own."""

    def _received(self, event: tuple[Any, ...]) -> None:
        if self._closed:
            return  # another runtime may serve the same clients by now
        match event:
            case ("staged", int(step), StreamState() as after, bool(skipped)):
                for watcher in self.on_stage:
                    watcher(PlannedSummary(StepNumber(step), after, skipped))
            case ("taken", int(rank), int(step)):
                self.on_taken(rank, step)
            case ("bad", list(rows), list(late)):
                self.planner.listed.update(dict.fromkeys(rows))
                self.planner.spoiled.update(dict.fromkeys(late))
            case ("lost", SourceLost() as gone):
                for told in self.on_lost:
                    told(gone)
            case ("said", said):
                self._sayings.heard(said)
            case ("found", list(events)):
                self._sayings.found(events)
            case ("reports", int(mark)):
                self._loop.post(lambda: self._all_reported(mark))
            case ("recovered", dict(row)):
                self.recoveries.append(row)
            case ("finish", None) if self._parts.is_over:
                pass  # sent by a coordinator that was given up since
            case ("finish", (EndOfJob() | None) as finish):
                self.planner.finished = finish
            case ("over", Exception() as error):
                self._end_all(error)
            case _:
                raise TypeError(f"unknown event of the coordinator: {event!r:.80}")

    def _end_all(self, error: Exception) -> None:
        """End the job after the loss of the coordinator, which is not restarted.

        Constructor workers send the error to their clients, after the steps that are complete. A
        worker that does not acknowledge is killed: no coordinator is left to detect that it hangs.
        """
        finish, control = EndOfJob(self._parts.acked + 1, error), self._parts.control
        self.planner.finished = self.planner.finished or finish
        hosts = [
            h
            for name, h in list(self._parts.hosts.items())
            if name.startswith("constructor-worker/") and h.alive and not self._closed
        ]
        answers = {host: control.call(host, "do", [finish]) for host in hosts}

        def kill_hanging() -> None:
            for host, answer in answers.items():
                if not answer.done() and not self._closed:
                    log.warning("%s killed: it did not acknowledge the end of the job", host.name)
                    self._parts.end(host)

        self._deaf = threading.Timer(self._parts.blueprint.options.lost_after_s, kill_hanging)
        self._deaf.daemon = True
        self._deaf.start()

    def write_beginning(self, beginning: JournalStart) -> None:
        """Release the journal, and let the coordinator open it."""
        beginning.journal.close()
        self._parts.open_journal(beginning.anew, beginning.floor, beginning.journal.launch)

    # clients

    def attach(self, mailboxes: Mapping[int, Any]) -> None:
        self._parts.attached |= set(mailboxes)
        self._parts.ask("attach", sorted(mailboxes))

    def detach(self, rank: int) -> None:
        if rank in self._parts.attached:
            self._parts.attached.discard(rank)  # a restarted coordinator reads it
            with contextlib.suppress(ActorLost, DataStall):
                self._parts.ask("detach", rank)

    def stop(self) -> None:
        """Forget the attached ranks: all processes have ended."""
        self._parts.attached.clear()

    def consumed(self, ranks: Sequence[int], step: int) -> None:
        """Send acks of clients in this process.

        Constructor workers send them too; one that died may not have sent its last ones. The last
        ack is also needed when the job ends before the workers send it.
        """
        if self._parts.attached <= set(ranks):
            self._parts.acked = max(step, self._parts.acked)
        self._parts.tell("consumed", list(ranks), step)

    def inbox(self, rank: int, next_step: int) -> LaunchedStepQueue:
        prefetch = self._parts.blueprint.options.prefetch
        return LaunchedStepQueue(
            rank,
            lambda: self.address_for(rank),
            next_step=next_step,
            generation=self._number,
            prefetch=prefetch,
            siblings=self._boxes,
        )

    def address_for(self, rank: int) -> tuple[str, str]:
        """Return address and token of a constructor. Runs on: any thread.

        The coordinator is not needed for it.
        """
        return self._address_for(rank, WHERE_S), self._parts.token

    def _address_for(self, rank: int, wait_s: float) -> str:
        host = self._constructor(rank)
        if host not in self._addresses:
            self._addresses[host] = self._known[host.name] = self._of_host(host, wait_s, "address")
        return self._addresses[host]

    def listen(self, host: str, token: str) -> None:
        self._door, self._parts.watched = (host, token), True
        self._parts.ask("watch")
        for rank in self._bucket_of:
            # a worker that is restarted now is asked when a client connects
            with contextlib.suppress(DataStall):
                self._outside_for(rank, START_S)

    def outside(self, rank: int) -> tuple[str, str]:
        return self._outside_for(rank, WHERE_S), ""

    def _outside_for(self, rank: int, wait_s: float) -> str:
        host = self._constructor(rank)
        if host not in self._outside:
            assert self._door is not None
            self._outside[host] = self._of_host(host, wait_s, "listen", *self._door)
        return self._outside[host]

    def taken_by(self, rank: int) -> int | None:
        """Return the last step that a rank took, from its constructor worker.

        None: the worker is being replaced, and its unsent acks are lost. Raise ``DataStall`` for a
        worker that is alive and does not answer.
        """
        host, control = self._parts.hosts.get(self._constructor_name(rank)), self._parts.control
        if host is None or not host.alive:
            return None
        try:
            return int(control.get(control.call(host, "taken", rank), TAKEN_S))
        except ActorLost:
            return None

    def _constructor_name(self, rank: int) -> str:
        return f"constructor-worker/{self._parts.constructor_of[self._bucket_of[rank]]}"

    def _constructor(self, rank: int) -> Any:
        name = self._constructor_name(rank)
        host = self._parts.hosts.get(name)
        if host is None or not host.alive:
            raise self._missed(name)
        return host

    def _missed(self, name: str) -> Exception:
        finish = self.planner.finished
        if finish is not None and (
            isinstance(finish.error, ActorLost)
            or (finish.error is not None and self._parts.is_over)
        ):
            return finish.error
        return DataStall(f"{name} to be started again", 0.0)

    def _of_host(self, host: Any, wait_s: float, method: str, *args: Any) -> str:
        """Call a worker once for all callers, and return its answer.

        A worker that is being started answers later; a caller that asks many must not wait for it.
        """
        control = self._parts.control
        with self._asking:
            answer = self._asked.get((host, method))
            if answer is None or (answer.done() and answer.exception() is not None):
                answer = self._asked[host, method] = control.call(host, method, *args)
        try:
            return str(control.get(answer, wait_s))
        except (ActorLost, DataStall):
            raise self._missed(host.name) from None

    # events

    def event(self, event: Any) -> None:
        """Apply an event. When this returns it is in the journal of the coordinator."""
        if isinstance(event, Report):
            self.report(event)
        else:
            self._sayings.say(event, lambda: self._send(event), lambda: self._applied_late(event))

    def settle(self) -> None:
        """Find out which events that timed out were applied. Called before each further event.

        The coordinator executes requests in order, so the others never will be.
        """
        if self._sayings.unsettled:
            self._sayings.settle(self._parts.ask("said"))

    def _applied_late(self, event: Any) -> None:
        for told in self.on_late:
            told(event)

    def _send(self, event: Any) -> None:
        self._parts.ask("event", event, done=lambda: event in self._parts.ask("said"))

    def report(self, report: Report) -> bool | None:
        """Return whether a report is in time for a plan; None: the coordinator is lost for good.

        The report is kept before the answer arrives: a coordinator may accept it and die, and be
        restarted before this is known.
        """
        key, before = (report.step, report.rank), self._parts.reports
        self._keep(report)
        try:
            used = bool(self._parts.ask("report", report, timeout_s=REPORT_S))
            if not used:
                others = {k: kept for k, kept in self._parts.reports.items() if k != key}
                self._parts.reports = others | ({key: before[key]} if key in before else {})
            return used
        except OverlordError as fault:
            if not self._closed and not isinstance(fault, (ActorLost, DataStall)):
                raise
            if not self._closed:  # else the session was rewound or closed
                log.warning(
                    "report of rank %d on step %d lost with the coordinator: %s",
                    report.rank,
                    report.step,
                    fault,
                )
            return None

    def _all_reported(self, mark: int) -> None:
        """Confirm that all reports before ``mark`` were sent. Runs on: event loop."""
        with contextlib.suppress(OverlordError):  # the session was rewound or closed
            self._parts.ask("all_reported", mark)

    def _keep(self, report: Report) -> None:
        """Keep a report for a restarted coordinator: it may be accepted and not be durable yet."""
        job, prefetch = self._parts.blueprint.job, self._parts.blueprint.options.prefetch
        oldest = report.step - job.feedback_lag - prefetch
        kept = (
            {key: r for key, r in self._parts.reports.items() if r.step >= oldest}
            if self._parts.reports
            else {}
        )
        self._parts.reports = kept | {(report.step, report.rank): report}

    def prepare_source(self, prepared: PreparedJob) -> int:
        """Start a loader worker for an added source; return its number."""
        parts, i = self._parts, len(prepared.job.sources) - 1
        before, h = parts.blueprint, parts.next_host
        parts.next_host += 1
        parts.blueprint = prepared.with_loaders(
            (*parts.hosting.loaders, prepared.loaders_of(i)), SIDE_BY_SIDE
        )
        parts.kits[h], self._without = (i,), (h, before)
        try:
            host = parts.recipes.loader_host(
                h, [i], parts.blueprint.openings(i, Cursor()), self._constructor_addresses()
            )
            parts.prepared(host)
            parts.control.get(parts.control.call(host, "do", []), START_S)
        except BaseException:
            self.drop_prepared(h)
            raise
        finally:
            parts.preparing.discard(f"loader-worker/{h}")
        return h

    def _constructor_addresses(self) -> dict[int, str]:
        """Return the addresses of all constructor workers.

        For one that is being restarted it is the old address; the coordinator sends the new one.
        """
        for rank in self._bucket_of:
            with contextlib.suppress(DataStall):
                self._address_for(rank, START_S)
        return {int(name.rpartition("/")[2]): address for name, address in self._known.items()}

    def drop_prepared(self, prepared: int) -> None:
        self._parts.kits.pop(prepared, None)
        of, before = self._without
        if of == prepared and before is not None:  # a restarted coordinator must not have it
            self._parts.blueprint = before
        host = self._parts.hosts.pop(f"loader-worker/{prepared}", None)
        if host is not None and not self._closed:
            self._parts.recipes.end(prepared, host)

    def add_source(
        self,
        new: NewSource,
        prepared: int,
        budget_bytes: int,
        joined: Callable[[], None] = lambda: None,
    ) -> None:
        parts = self._parts
        host, n = parts.hosts[f"loader-worker/{prepared}"], new.source.loaders
        if not host.alive:
            raise ActorLost(host.name, "it died before its source was added")

        def ask() -> None:
            fingerprint = dict(parts.blueprint.fingerprint)
            parts.ask(
                "add_source",
                new,
                prepared,
                fingerprint,
                budget_bytes,
                done=lambda: new.event in parts.ask("said"),
            )

        def takes_part() -> None:
            parts.joined(prepared, n)
            joined()

        self._sayings.say(new.event, ask, takes_part)
        takes_part()

    def move(self, source: int, hosts: Sequence[str]) -> None:
        self._parts.ask("move", source, list(hosts))

    def spread(self, source: int, n: int) -> bool:
        return bool(self._parts.ask("spread", source, n))

    # questions

    def waiting_for(self, rank: int) -> str:
        planner = self._parts.planner
        if self.absent or planner is None:
            return self.absent
        try:
            return str(
                self._parts.control.get(
                    self._parts.control.call(planner, "waiting_for", rank), WHY_S
                )
            )
        except DataStall as silent:
            return f"the planner, which does not answer ({silent})"
        except ActorLost as lost:
            return self.absent or f"the planner, which is being started again ({lost.reason})"

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = self._parts.ask("figures")
        for what, n in self._parts.written_before().items():
            figures["journal"][what] = figures["journal"].get(what, 0) + n
        return figures | {
            "recoveries": list(self.recoveries),
            "placement": self._parts.recipes.placement.figures(),
        }

    def kill(self, name: str) -> None:
        """Kill a process, as a crash would. For drills."""
        every = {PLANNER: self._parts.planner, **self._parts.hosts}
        if (handle := every.get(name)) is None:
            raise JobError(
                [f"no process of this job is called {name!r}; there are {', '.join(every)}"], "kill"
            )
        self._parts.control.kill(handle)

    def broke(self, error: Exception) -> None:
        self._end_all(error)

    def close(self) -> None:
        self._closed = True
        if self._deaf is not None:
            self._deaf.cancel()
        self._parts.close()

    def check(self) -> None:
        """Do nothing: the coordinator checks its own invariants."""
