"""The journal of a job: every plan and event is written before it is executed.

``journal/checkpoint.py`` defines the entries. The event loop calls the journal, and a separate
thread writes. Plans wait for the write in ``journal/write_ahead.py``, events in the call that
applies them. After a failed append nothing more is written, and the job ends before the step that
could not be written. So the journal always has everything that was executed.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from overlord.errors import NO_FUNCTION, JournalError, PlanError
from overlord.journal import checkpoint
from overlord.journal.applied_ids import AppliedIds
from overlord.journal.checkpoint import JOB, PLAN, REWIND, SNAPSHOT, Entry, Interval
from overlord.journal.log import JournalLog, Where
from overlord.journal.record import Record
from overlord.journal.replay import Recovered
from overlord.journal.segments import Header
from overlord.journal.storage import JournalStorage, storage_of
from overlord.journal.timeouts import TIMEOUTS
from overlord.journal.write_ahead import AppendThread, NullJournal
from overlord.messages.control import (
    AddSource,
    EventId,
    PlannedStep,
    Report,
    SetMixture,
    Skip,
    SourceLost,
    StreamState,
)

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.setup.prepared_job import PreparedJob

# A snapshot begins a new segment after this many bytes: the amount that pruning frees at a time.
SEGMENT_BYTES = 2**22

# creates the writer of a log, which calls the second argument after every append
MakeWriter = Callable[[JournalLog, Callable[[], None] | None], AppendThread]


class JobJournal(NullJournal):
    """The journal of a new job (``fresh``) or of a job that resumes (``resumed``).

    ``write_start`` or ``write_rewind`` is called before the first plan.
    """

    applied: AppliedIds

    def __init__(
        self,
        storage: JournalStorage,
        name: str,
        log: JournalLog | None,
        interval: Interval | None = None,
        launch: str = "",
        make_writer: MakeWriter = AppendThread,
    ):
        """Initialize the journal; use ``fresh`` or ``resumed`` instead."""
        self.launch = launch or token_hex(8)
        self.applied = AppliedIds(self.launch)
        self._storage, self._header, self._log, self._interval = (
            storage,
            Header(job=name, launch=self.launch),
            log,
            interval or Interval(),
        )
        self._on_change: Callable[[], None] | None = None
        self._writer: AppendThread | None = None
        self._make_writer = make_writer
        # the state after the last plan that was queued for writing, with later reports
        self._last: StreamState | None = None
        self._next = 0  # the first step that was not queued for writing
        self._durable = 0  # the first step that is not durable
        # (step, number of an append): once that append is done, all steps before are durable
        self._orders: deque[tuple[int, int]] = deque()
        self._acked = -1  # the last acknowledged step, as written
        self._digests: dict[int, str] = {}  # of written steps that are planned again
        self._pending: list[Entry] = []  # reports and rollbacks, written with the next plan
        self._job: Entry | None = None
        self._snapshots: deque[int] = deque()
        self._snapshot_bytes = self._bytes_since = self._plans_since = self._segment_bytes = 0
        self._counts = {"bytes": 0, "plans": 0, "snapshots": 0}

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._on_change = lambda: post(lambda: self.on_durable())

    # opening

    @staticmethod
    def fresh(where: Where, name: str) -> JobJournal:
        """Return a new journal, with its storage locked.

        Raise ``JournalError`` if the storage already has segments. No segment is written before
        ``write_start``, so a launch that fails leaves no journal.
        """
        storage = storage_of(where) if isinstance(where, (str, os.PathLike)) else where
        try:
            storage.hold()
            if storage.names():
                JournalLog.create(storage, Header(job=name))  # raises: the journal exists
        except BaseException:
            storage.close()
            raise
        return JobJournal(storage, name, None)

    @staticmethod
    def resumed(
        where: Where,
        name: str,
        allow: Sequence[str] = (),
        launch: str = "",
        make_writer: MakeWriter = AppendThread,
    ) -> tuple[JobJournal, Recovered]:
        """Open the journal of a job, which may be empty, and return it with its content.

        Older writers are fenced off. With ``launch`` the journal must be empty or of that launch,
        or ``JournalTaken`` is raised. So a launch that was fenced off cannot open it again.
        ``make_writer`` creates the writer that appends.
        """
        storage = storage_of(where) if isinstance(where, (str, os.PathLike)) else where
        header = Header(job=name, launch=launch or token_hex(8))
        log, records = JournalLog.open(storage, header, allow=tuple(allow), goes_on=bool(launch))
        try:
            found = Recovered.of(entries(records))
            journal = JobJournal(storage, name, log, launch=header.launch, make_writer=make_writer)
            journal.continue_after(found, records)
        except BaseException:
            log.close()
            raise
        return journal, found

    def continue_after(self, found: Recovered, records: Sequence[Record]) -> None:
        """Take over position, digests and sizes from the records of an existing journal.

        Later writes continue from there. Do nothing if the journal is empty.
        """
        if found.empty:
            return
        self._last, self._acked, self._digests = found.front(), found.acked, dict(found.planned)
        self.applied = AppliedIds(self.launch, found.applied.values())
        self._next = self._durable = self._last.step
        self._snapshots = deque(found.snapshots)
        for record in records:
            if record.kind in (SNAPSHOT, REWIND):
                self._snapshot_bytes, self._bytes_since, self._plans_since = len(record.data), 0, 0
            elif record.kind == PLAN:
                self._bytes_since, self._plans_since = (
                    self._bytes_since + len(record.data),
                    self._plans_since + 1,
                )
        self._segment_bytes = SEGMENT_BYTES  # the next snapshot begins a new segment

    def write_start(self, state: StreamState, prepared: PreparedJob) -> None:
        """Write the start of the stream, before any step is planned; wait until it is durable.

        A journal that already has a start is not changed.
        """
        self._job = _job_entry(prepared, state.step)
        if self._last is None:
            self._open_anew(checkpoint.snapshot(state, state.step - 1), state)

    # plans and events

    def write_plans(self, stages: Sequence[PlannedStep], taken: int | None) -> None:
        """Queue planned steps for writing, before any process receives them.

        ``taken`` is the last step that all ranks acknowledged; None if no rank takes part. Steps
        that are already written and are planned again must have the same plans.
        """
        acked, found = (
            self._acked if taken is None else max(taken, self._acked),
            list(self._pending),
        )
        for stage in stages:
            if self._is_written(stage):
                continue
            assert self._last is not None
            assert isinstance(stage.after, StreamState)
            assert stage.plan.step == self._next, (
                f"expected the plan of step {self._next}, got that of step {stage.plan.step}"
            )
            found.append(checkpoint.plan(stage, self._last, acked))
            self._last, self._next = stage.after, self._next + 1
        if len(found) == len(self._pending):
            return
        self._orders.append((self._next, self._append(found)))
        self._acked = acked
        if self._interval.due(self._snapshot_bytes, self._bytes_since, self._plans_since):
            self._snapshot()
        self._prune()

    def _is_written(self, stage: PlannedStep) -> bool:
        """Return whether a plan is already written or queued for writing.

        Raise ``PlanError`` if the journal has another plan of its step.
        """
        if stage.plan.step >= self._next:
            return False
        first = self._digests.get(stage.plan.step)
        if first is not None and first != stage.digest:
            what = f"expected the plan in the journal ({first}), got another ({stage.digest})"
            raise PlanError(what, stage.plan.step, NO_FUNCTION)
        return True

    def write_event(self, event: Any, event_id: EventId) -> None:
        """Write an event that the planner has accepted, and wait until it is durable.

        Messages that are not events of the stream are ignored.
        """
        if isinstance(event, (SetMixture, Skip, SourceLost)):
            entry = checkpoint.event(event, self._next, event_id)
            self._settle(self._append([*self._pending, entry]))

    def write_added_source(
        self, event: AddSource, prepared: PreparedJob, event_id: EventId
    ) -> None:
        """Write that a source was added, and wait until it is durable.

        The source is recorded by name and fingerprint; its code is in the job.
        """
        self._job = _job_entry(prepared, self._next)
        entry = checkpoint.event(event, self._next, event_id)
        self._settle(self._append([*self._pending, self._job, entry]))

    def write_report(self, report: Report, event_id: EventId) -> None:
        """Record a report that arrived in time.

        It is written with the next append: the next plan is the first that depends on it.
        """
        if self._last is not None:
            self._pending.append(checkpoint.report(report, event_id))
            self._last = checkpoint.with_report(self._last, report)

    def write_acked(self, step: int | None, last: bool) -> None:
        """Record that all ranks acknowledged a step (None: no rank takes part).

        The next plan records it too. So it gets its own entry only if no plan follows (``last``),
        or if at least two steps were acknowledged since the last one written.
        """
        if step is not None and step > self._acked + (not last):
            self._append([*self._pending, checkpoint.acked(step)])
            self._acked = step

    def write_rollback(self, step: int, generation: int, reason: str) -> None:
        """Record a rollback: a worker was lost, and the steps after this one are replanned.

        A replay does not need the entry, so it is written with the next append.
        """
        self._pending.append(checkpoint.rollback(step, generation, reason))

    def write_rewind(self, state: StreamState, prepared: PreparedJob, floor: int = 0) -> None:
        """Write that the stream restarts at ``state``, and wait until that is durable.

        Trainers loaded that state, or the mesh changed. Earlier plans are pruned, although their
        steps may have higher numbers. ``floor``: the first step that events may still change.
        """
        self._job, self._digests = _job_entry(prepared, state.step), {}
        self.applied.clear()
        self._open_anew(checkpoint.rewind(state, floor), state)

    # writing

    def has(self, step: int) -> bool:
        while self._orders and self._writer is not None and self._orders[0][1] <= self._writer.done:
            self._durable = self._orders.popleft()[0]
        return step < self._durable

    @property
    def failed(self) -> JournalError | None:  # type: ignore[override]
        return None if self._writer is None else self._writer.failed

    def _open_anew(self, entry: Entry, state: StreamState) -> None:
        assert self._job is not None
        self._last, self._next, self._acked, self._pending = state, state.step, state.step - 1, []
        self._settle(self._append([self._job, entry], rolls=True, anew=entry.kind == REWIND))
        self._orders, self._durable, self._snapshots = deque(), state.step, deque([state.step])
        self._counts["snapshots"] += 1

    def _snapshot(self) -> None:
        """Queue a snapshot for writing, after the pending entries, whose effect it contains."""
        assert self._last is not None
        assert self._job is not None
        rolls = self._storage.whole or self._segment_bytes >= SEGMENT_BYTES
        job = [Entry(JOB, self._next, self._job.body)] if rolls else []
        entry = checkpoint.snapshot(self._last, self._acked, self.applied.ids())
        self._append([*self._pending, *job, entry], rolls=rolls)
        self._snapshots.append(self._next)
        self._counts["snapshots"] += 1

    def _append(
        self,
        found: Sequence[Entry],
        *,
        rolls: bool = False,
        before: int | None = None,
        anew: bool = False,
    ) -> int:
        """Queue entries for writing; return the number of the append, for ``_settle``.

        ``rolls``, ``before`` and ``anew`` are those of ``AppendThread.put``.
        """
        if self._writer is None:
            self._log = self._log or JournalLog.create(self._storage, self._header)
            self._writer = self._make_writer(self._log, self._on_change)
        records = [Record.of(entry.kind, entry.number, entry.body) for entry in found]
        order = self._writer.put(records, rolls=rolls, before=before, anew=anew)
        self._pending = []
        self._count(records, rolls)
        return order

    def _settle(self, order: int) -> None:
        """Wait until an append is durable."""
        assert self._writer is not None
        self.settling = True
        try:
            self._writer.wait(order)
        finally:
            self.settling = False

    def _count(self, records: Sequence[Record], rolls: bool) -> None:
        size = sum(len(record.data) for record in records)
        self._counts["bytes"] += size
        self._segment_bytes = size if rolls else self._segment_bytes + size
        for record in records:
            if record.kind in (SNAPSHOT, REWIND):
                own = sum(len(r.data) for r in records if r.kind in (SNAPSHOT, REWIND, JOB))
                self._snapshot_bytes, self._bytes_since, self._plans_since = own, 0, 0
            elif record.kind == PLAN:
                self._counts["plans"] += 1
                self._bytes_since, self._plans_since = (
                    self._bytes_since + len(record.data),
                    self._plans_since + 1,
                )

    def _prune(self) -> None:
        """Prune all entries before the newest snapshot that all ranks have passed.

        A rollback never returns to a step before the last one that all ranks acknowledged.
        """
        passed = False
        while len(self._snapshots) > 1 and self._snapshots[1] <= self._acked + 1:
            self._snapshots.popleft()
            passed = True
        if passed:
            self._digests = {
                step: digest for step, digest in self._digests.items() if step > self._acked
            }
            self._append([], before=self._snapshots[0])

    # metrics and close

    def metrics(self) -> dict[str, Any]:
        writer = self._writer
        done = (
            {"appends": 0, "seconds": 0.0}
            if writer is None
            else {"appends": writer.appends, "seconds": writer.seconds}
        )
        problems = {} if self.failed is None else {"failed": str(self.failed)}
        if writer is not None and writer.unpruned:
            problems["unpruned"] = writer.unpruned
        progress = {
            "snapshot_bytes": self._snapshot_bytes,
            "acked": self._acked,
            "planned": self._next - 1,
        }
        return {**self._counts, **done, **progress, **problems}

    def close(self, taken: int = -1) -> None:
        """Write the last step that all ranks acknowledged (-1: none), and close the log.

        A signal handler may call this. A job can resume from a journal that was not closed.
        """
        if self._writer is None:
            (self._log or self._storage).close()
            return
        if self._last is not None and (taken > self._acked or self._pending):
            with contextlib.suppress(JournalError):  # a resumed job does not need this entry
                self._append([*self._pending, checkpoint.acked(max(taken, self._acked))])
                self._acked = max(taken, self._acked)
        in_time = self._writer.close(TIMEOUTS.close_s)
        if in_time and self._log is not None:  # otherwise the writer closes the log when it ends
            self._log.close()


def entries(records: Sequence[Record]) -> list[Entry]:
    """Return the entries of records; raise ``JournalError`` for a body that is not an entry."""
    found = []
    for record in records:
        body = record.body
        if not isinstance(body, Mapping):
            raise JournalError(
                record.where,
                f"expected the fields of a {record.kind}, got {type(body).__name__}",
                "the journal was not written by a job: give the job another one",
            )
        found.append(Entry(record.kind, record.number, dict(body), record.where))
    return found


def _job_entry(prepared: PreparedJob, step: int) -> Entry:
    job, parts = prepared.job, prepared.job.batches.parts if prepared.job.stages else ()
    stages = [(part.first, part.name or k) for k, part in enumerate(parts)]
    return checkpoint.job(step, job.names, prepared.fingerprint, slots_of(job), stages)


def slots_of(job: Job) -> str:
    """Return a text that identifies the mesh, ``sync`` and the model of a job.

    They decide the slots of samples in a step, and so its plan, but not the samples.
    """
    model = "" if job.model is None else f", model={job.model!r}"
    return f"{job.place!r}, sync={job.sync!r}{model}"
