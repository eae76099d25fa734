"""A job's journal: every plan and event is written down before anyone acts on it. What is written
is decided by ``journal/checkpoint.py``.

The pump calls it, and a thread of its own writes: plans wait for that in
``journal/write_ahead.py``, events in the call that says them. Once an append has failed nothing is
written any more, so that the journal never says less than what was acted upon: the job ends before
the step that could not be written.
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
from overlord.journal.append_thread import AppendThread
from overlord.journal.checkpoint import JOB, PLAN, REWIND, SNAPSHOT, Entry, Interval
from overlord.journal.log import JournalLog, Where
from overlord.journal.record import Record
from overlord.journal.replay import Recovered
from overlord.journal.segment import Header
from overlord.journal.storage import JournalStorage, place_of
from overlord.journal.write_ahead import NullJournal
from overlord.messages.control import (
    AddSource,
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

SEGMENT_BYTES = (
    2**22
)  # a snapshot begins a new segment behind so many bytes: what pruning frees at a time
CLOSE_S = 1.0  # that closing waits for an append under way


class JobJournal(NullJournal):
    """Of a fresh job (``JobJournal.fresh``) or of one that goes on (``JobJournal.resumed``); ``begin``
    before the first plan.
    """

    def __init__(
        self,
        place: JournalStorage,
        name: str,
        log: JournalLog | None,
        interval: Interval | None = None,
        launch: str = "",
    ):
        """Not for callers: see ``fresh`` and ``resumed``."""
        self.launch = launch or token_hex(8)
        self._place, self._header, self._log, self._interval = (
            place,
            Header(job=name, launch=self.launch),
            log,
            interval or Interval(),
        )
        self._told: Callable[[], None] | None = None
        self._writer: AppendThread | None = None
        self.make_writer: Callable[[JournalLog, Callable[[], None] | None], AppendThread] = (
            AppendThread  # simulations have one that knows no threads
        )
        self._last: StreamState | None = (
            None  # behind the last plan that was handed over, with the reports since
        )
        self._next = 0  # the first step that was not handed over to be written
        self._durable = 0  # the first that is not written
        self._orders: deque[tuple[int, int]] = (
            deque()
        )  # (step, order of the writer): with it all before the step are durable
        self._acked = -1  # as it is written
        self._digests: dict[int, str] = {}  # of steps that are written and come again
        self._pending: list[Entry] = []  # reports: nobody acts on them before the next plan
        self._whose: Entry | None = None
        self._snapshots: deque[int] = deque()
        self._snapshot_bytes = self._bytes_since = self._plans_since = self._segment_bytes = 0
        self._counts = {"bytes": 0, "plans": 0, "snapshots": 0}

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._told = lambda: post(lambda: self.heard())

    # opening

    @staticmethod
    def fresh(where: Where, name: str) -> JobJournal:
        """A new journal; refused where there is one. Nothing is written before ``begin``: a launch
        that fails leaves none behind.
        """
        place = place_of(where) if isinstance(where, (str, os.PathLike)) else where
        try:
            place.hold()
            if place.names():
                JournalLog.create(place, Header(job=name))  # it says what is there
        except BaseException:
            place.close()
            raise
        return JobJournal(place, name, None)

    @staticmethod
    def resumed(
        where: Where, name: str, allow: Sequence[str] = (), launch: str = ""
    ) -> tuple[JobJournal, Recovered]:
        """The journal of a job, which may be empty, and what it says. Older writers are shut out.
        ``launch``: as it is known already; then the journal must be empty, or that launch's: a job
        that was shut out must not come back by another of its processes.
        """
        place = place_of(where) if isinstance(where, (str, os.PathLike)) else where
        header = Header(job=name, launch=launch or token_hex(8))
        log, records = JournalLog.open(place, header, allow=tuple(allow), goes_on=bool(launch))
        try:
            found = Recovered.of(entries(records))
            journal = JobJournal(place, name, log, launch=header.launch)
            journal._go_on(found, records)
        except BaseException:
            log.close()
            raise
        return journal, found

    def _go_on(self, found: Recovered, records: Sequence[Record]) -> None:
        if found.empty:
            return
        self._last, self._acked, self._digests = found.front(), found.acked, dict(found.planned)
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
        self._segment_bytes = SEGMENT_BYTES  # the next snapshot begins a segment

    def begin(self, state: StreamState, blueprint: PreparedJob) -> None:
        """Before anything is planned: where the stream begins. A journal that says so already is
        left as it is.
        """
        self._whose = _whose(blueprint, state.step)
        if self._last is None:
            self._open_anew(checkpoint.snapshot(state, state.step - 1), state)

    # what happens

    def planned(self, stages: Sequence[PlannedStep], taken: int | None) -> None:
        """These steps are planned, and nobody knows it yet. ``taken``: the last step that all ranks
        took; None: nobody takes part.

        Steps that are written already are planned again: they must come out as they were.
        """
        acked, found = (
            self._acked if taken is None else max(taken, self._acked),
            list(self._pending),
        )
        for stage in stages:
            if self._again(stage):
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

    def _again(self, stage: PlannedStep) -> bool:
        if stage.plan.step >= self._next:
            return False
        first = self._digests.get(stage.plan.step)
        if first is not None and first != stage.digest:
            what = (
                f"the journal has another plan of this step: it came out as {stage.digest}, "
                f"and before as {first}"
            )
            raise PlanError(what, stage.plan.step, NO_FUNCTION)
        return True

    def said(self, event: Any) -> None:
        """An event that the planner has accepted, before anyone is told so. Anything else is no
        event of the log.
        """
        if isinstance(event, (SetMixture, Skip, SourceLost)):
            self._settle(self._append([*self._pending, checkpoint.event(event, self._next)]))

    def joined(self, event: AddSource, blueprint: PreparedJob) -> None:
        """A source has joined: the same for it. By name and fingerprint; its code is in the job."""
        self._whose = _whose(blueprint, self._next)
        self._settle(
            self._append([*self._pending, self._whose, checkpoint.event(event, self._next)])
        )

    def reported(self, report: Report) -> None:
        """A report that came in time. It is written with what comes next: nothing depends on it
        before a plan does.
        """
        if self._last is not None:
            self._pending.append(checkpoint.report(report))
            self._last = checkpoint.with_report(self._last, report)

    def took(self, step: int | None, last: bool) -> None:
        """All ranks took a step. The next plan says so, unless there is none to come (``last``), or
        is long in coming.
        """
        if step is not None and step > self._acked + (not last):
            self._append([*self._pending, checkpoint.acked(step)])
            self._acked = step

    def went_back(self, step: int, generation: int, reason: str) -> None:
        """A part was lost, and steps behind this one are planned again: for people, so it is
        written with what comes next.
        """
        self._pending.append(checkpoint.back(step, generation, reason))

    def rewound(self, state: StreamState, blueprint: PreparedJob, floor: int = 0) -> None:
        """The stream begins anew at a state: trainers loaded it, or the mesh is another. What was
        planned before does not count.
        """
        self._whose, self._digests = _whose(blueprint, state.step), {}
        self._open_anew(
            checkpoint.rewind(state, floor), state
        )  # with it goes all before, whose steps may have higher numbers

    # writing

    def has(self, step: int) -> bool:
        while self._orders and self._writer is not None and self._orders[0][1] <= self._writer.done:
            self._durable = self._orders.popleft()[0]
        return step < self._durable

    @property
    def failed(self) -> JournalError | None:  # type: ignore[override]
        return None if self._writer is None else self._writer.failed

    def _open_anew(self, entry: Entry, state: StreamState) -> None:
        assert self._whose is not None
        self._last, self._next, self._acked, self._pending = state, state.step, state.step - 1, []
        self._settle(self._append([self._whose, entry], rolls=True, anew=entry.kind == REWIND))
        self._orders, self._durable, self._snapshots = deque(), state.step, deque([state.step])
        self._counts["snapshots"] += 1

    def _snapshot(self) -> None:
        """What is pending comes before it: it stands for all that was said so far."""
        assert self._last is not None
        assert self._whose is not None
        rolls = self._place.whole or self._segment_bytes >= SEGMENT_BYTES
        whose = [Entry(JOB, self._next, self._whose.body)] if rolls else []
        self._append(
            [*self._pending, *whose, checkpoint.snapshot(self._last, self._acked)], rolls=rolls
        )
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
        """Hand entries over to be written; returns the order by which to wait for it."""
        if self._writer is None:
            self._log = self._log or JournalLog.create(self._place, self._header)
            self._writer = self.make_writer(self._log, self._told)
        records = [Record.of(entry.kind, entry.number, entry.body) for entry in found]
        order = self._writer.put(records, rolls=rolls, before=before, anew=anew)
        self._pending = []
        self._count(records, rolls)
        return order

    def _settle(self, order: int) -> None:
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
        """Nobody goes back behind the last step that all ranks took: of what lies before the newest
        snapshot up to it nothing is needed.
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

    # the end

    def figures(self) -> dict[str, Any]:
        writer = self._writer
        done = (
            {"appends": 0, "seconds": 0.0}
            if writer is None
            else {"appends": writer.appends, "seconds": writer.seconds}
        )
        wrong = {} if self.failed is None else {"failed": str(self.failed)}
        if writer is not None and writer.unpruned:
            wrong["unpruned"] = writer.unpruned
        told = {
            "snapshot_bytes": self._snapshot_bytes,
            "acked": self._acked,
            "planned": self._next - 1,
        }
        return {**self._counts, **done, **told, **wrong}

    def close(self, taken: int = -1) -> None:
        """Say how far all ranks came, and let go. From a signal's handler, too; nothing that counts
        is lost without it.
        """
        if self._writer is None:
            (self._log or self._place).close()
            return
        if self._last is not None and (taken > self._acked or self._pending):
            with contextlib.suppress(JournalError):  # it only says what is sure
                self._append([*self._pending, checkpoint.acked(max(taken, self._acked))])
                self._acked = max(taken, self._acked)
        if (
            self._writer.close(CLOSE_S) and self._log is not None
        ):  # else it is closed behind the append
            self._log.close()


def entries(records: Sequence[Record]) -> list[Entry]:
    """Records by what they mean; bodies that this version does not know are a ``JournalError``."""
    found = []
    for record in records:
        body = record.body
        if not isinstance(body, Mapping):
            raise JournalError(
                record.where,
                f"expected the fields of a {record.kind}, got {type(body).__name__}",
                "no job wrote this journal",
            )
        found.append(Entry(record.kind, record.number, dict(body), record.where))
    return found


def _whose(blueprint: PreparedJob, step: int) -> Entry:
    return checkpoint.job(step, blueprint.job.names, blueprint.fingerprint, slots_of(blueprint.job))


def slots_of(job: Job) -> str:
    """Return what decides the slots of a step and not its samples: plans of the same samples differ
    with it.
    """
    return f"{job.place!r}, sync={job.sync!r}"
