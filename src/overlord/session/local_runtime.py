"""The local runtime: planner, loaders and constructors of a job on one event loop, in one process.

Payload is passed on without a copy. Work that takes time (reading, transforming, building) goes to
an *executor*, and its result returns as an event. The executor is a pool of threads, or a virtual
clock in a dry run. Everything else runs on the event loop, in order.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.buffer_pool import BufferPool
from overlord.client.sent_reports import KnownReports, ReportSender
from overlord.cluster.autoscale import LoadObserver, observing_scaler
from overlord.concurrency.event_loop import CommandLoop, Done, Executor, ThreadExecutor
from overlord.constructor.assembler import Assembler
from overlord.constructor.build import BucketBatch, StepDocuments
from overlord.constructor.service import ConstructorService, RankQueue
from overlord.content import Content, RaggedParts, Scattered
from overlord.errors import JobError, JournalError
from overlord.job.hooks import CONSTRUCTOR, LOADER, ordered_weights, popped_by
from overlord.journal.write_ahead import JournalStart, NullJournal, WriteAheadGate, lose_source
from overlord.loader.loader import Loader
from overlord.loader.reader import SourceReader
from overlord.loader.service import NOTHING, LoaderService
from overlord.messages.control import (
    Attach,
    Consumed,
    Cursor,
    Detach,
    DropHeldSamples,
    EndOfJob,
    PlannedStep,
    Refill,
    Report,
    RestartLoader,
    SentReport,
    SetReadAhead,
    SourceLost,
    StreamState,
)
from overlord.messages.data import (
    Announce,
    Build,
    Deliver,
    EndRank,
    Evaluate,
    Read,
    Release,
    StepInfo,
)
from overlord.planning.images import Encodings
from overlord.planning.mixture import EventLog
from overlord.planning.spec import NewSource, RecentPlans
from overlord.sample import Ragged
from overlord.transforms.transform_process import TransformWorker

if TYPE_CHECKING:
    from overlord.setup.options import Options
    from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")


__all__ = ["Done", "Executor", "LocalRuntime", "RankQueue", "RecentPlans"]


class LocalStepQueue:
    """The queue of one client, filled by the event loop and read by the thread of the trainer.

    ``on_report`` posts a report to the event loop, before later steps count as taken.
    """

    def __init__(self, on_report: Callable[[SentReport], None], sender: ReportSender) -> None:
        self._on_report, self._sender = on_report, sender
        self._steps: deque[tuple[StepInfo, BucketBatch]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None

    def put(self, info: StepInfo, bucket: BucketBatch) -> None:
        with self._changed:
            self._steps.append((info, bucket))
            self._changed.notify()

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        """End the stream after the queued steps, or with ``drop`` now, and discard them.

        ``get`` then raises ``error``; None: ``StopIteration``.
        """
        with self._changed:
            self._ended, self._error = True, error
            if drop:
                self._steps.clear()
            self._changed.notify_all()

    def resume(self) -> None:
        """Withdraw the end of the stream."""
        with self._changed:
            self._ended, self._error = False, None

    def ack(self, step: int) -> None:
        """Drop old reports. The session counts the steps of clients in this process."""
        if self._sender.used:
            self._sender.drop_passed(step)

    def report(self, report: Report, in_time: bool) -> None:
        self._on_report(self._sender.add(report, in_time))

    def reports(self) -> tuple[SentReport, ...]:
        return self._sender.kept()

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        """Return the next step, or None if none arrives within ``timeout_s``.

        At the end of the stream raise ``StopIteration``, or the error that ended it.
        """
        with self._changed:
            if not self._steps and not self._ended:
                self._changed.wait(timeout_s)
            if self._steps:
                return self._steps.popleft()
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopIteration
            return None


class LocalRuntime:
    """The planner, loaders and constructors of a job at a state, in one process.

    Runs on: event loop.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        executor: Executor,
        state: StreamState | None = None,
        *,
        post: Callable[[Callable[[], None]], None] = lambda call: call(),
    ):
        """Start at a state; ``post`` runs a call on the event loop."""
        job, options = prepared.job, prepared.options
        self._post, self._lag = post, job.feedback_lag
        self._reports = EventLog(job.feedback_lag)  # those in time, for states
        self.commands = CommandLoop(self._execute, check=self.check if options.check else None)
        self.gate = WriteAheadGate(self.commands, lambda: self.planner)
        self.planner, self._executor = prepared.planner(state), executor
        self.loading = LoaderService(executor, self.run)
        for i, cursor in enumerate(self.planner.state().cursors.tolist()):
            for loader, reader in prepared.loaders_for(i, Cursor(*cursor)):
                self.loading.open(loader, reader)
        self._images = prepared.images
        self._batches = job.batches if job.stages else job.batch
        self._broadcast, self._seed = options.broadcast, job.seed
        self._pop_hooks = job.hooks_of(LOADER)
        buckets = job.place.buckets("DP")
        self.building = ConstructorService(
            [
                Assembler(b, ranks, options.build_ahead or options.prefetch)
                for b, ranks in enumerate(buckets)
            ],
            batch=self._batches,
            multiple=job.document_multiple,
            executor=executor,
            run=self.run,
            cannot=self.event,
            hooks=job.hooks_of(CONSTRUCTOR),
            images=self._images,
            broadcast=options.broadcast,
            spoiled=self.event,
            # several ranks with the same arrays share those of the step; each would expand its own
            in_place=all(len(ranks) == 1 for ranks in buckets),
        )
        if options.memory is not None and options.ring_bytes is not None:
            self.building.slabs = BufferPool(options.ring_bytes)
        self._taken = -1  # the highest step that ``consumed`` received
        self._observer: LoadObserver | None = None
        self.plans = RecentPlans()
        self.on_stage: list[Callable[[PlannedStep], None]] = []
        self.on_lost: list[Callable[[SourceLost], None]] = []
        self.on_late: list[Callable[[Any], None]] = []
        self.on_taken: Callable[[int, int], None] = lambda rank, step: None  # never called here

    @property
    def journal(self) -> NullJournal:
        return self.gate.journal

    @journal.setter
    def journal(self, journal: NullJournal) -> None:
        self.gate.journal = journal

    def begin_journal(self, start: JournalStart, prepared: PreparedJob) -> None:
        """Write the start of the stream to the journal, before any step is planned."""
        start.append(self.planner.state(), prepared)
        self.journal = start.journal

    def run(self, commands: Sequence[Any] = ()) -> None:
        self.commands.run(commands)

    # events

    def settle(self) -> None:
        """Do nothing: an event has taken effect when ``event`` returns."""

    def event(self, event: Any, number: int | None = None) -> None:
        """Apply an event and write it to the journal: it is durable on return.

        ``number`` identifies an event of the session. A report is written with the next plan. If an
        event cannot be written, the job ends and ``JournalError`` is raised.
        """
        self.run(self.gate.record(event, number))

    def report(self, sent: Sequence[SentReport]) -> None:
        """Apply the reports that are new; no plan uses a late report."""
        for one in sent:
            event_id = self.gate.applied.id_of(one.report, one.number)
            assert event_id is not None
            if self.gate.applied.is_new(event_id) and self.planner.in_time(one.report):
                self._reports.report(one.report, self._taken + 1)
            self.event(one.report, one.number)

    def reports(self) -> KnownReports:
        """Return the reports that arrived in time, for states."""
        return KnownReports(self._reports.reports(), self.gate.applied.reports())

    def attach(self, mailboxes: Mapping[int, RankQueue]) -> None:
        """Attach the clients of these ranks in one call, before a step is delivered to any."""
        self.commands.queue.extend(self.building.attach(mailboxes))
        self.run([command for rank in mailboxes for command in self.planner.handle(Attach(rank))])

    def detach(self, rank: int) -> None:
        if rank in self.building.mailboxes:
            self.commands.queue.extend(self.building.detach(rank))
            self.run(self.planner.handle(Detach(rank)))

    def stop(self) -> None:
        """Detach all ranks; results of work in progress are not delivered."""
        for rank in list(self.building.mailboxes):
            self.detach(rank)

    def consumed(self, ranks: Sequence[int], step: int) -> None:
        here = [rank for rank in ranks if rank in self.building.mailboxes]
        self._taken = max(self._taken, step)
        self.commands.queue.extend(self.building.consumed(here, step))
        self.run(
            [command for rank in here for command in self.planner.handle(Consumed(rank, step))]
        )
        self.gate.acked()

    def inbox(self, rank: int, next_step: int) -> LocalStepQueue:
        """Return the step queue of a client in this process."""
        return LocalStepQueue(
            lambda sent: self._post(lambda: self.report([sent])), ReportSender(self._lag)
        )

    def prepare_source(self, prepared: PreparedJob) -> list[tuple[Loader, SourceReader]]:
        """Open the loaders of the last source of a job, which is to be added."""
        return prepared.loaders_for(len(prepared.job.sources) - 1, Cursor())

    def drop_prepared(self, prepared: object) -> None:
        """Do nothing: prepared loaders hold no resources, and the job owns transform workers."""

    def add_source(
        self,
        new: NewSource,
        prepared: Sequence[tuple[Loader, SourceReader]],
        more: PreparedJob,
        joined: Callable[[], None] = lambda: None,
        *,
        number: int | None = None,
    ) -> None:
        """Add the last source of ``more`` with its open loaders; a ``PlanError`` changes nothing.

        ``joined`` is called once the source is added, before a client receives a step with it.
        """
        event_id = self.gate.applied.id_of(new.event, number)
        assert event_id is not None
        commands = self.planner.handle(new)
        for loader, reader in prepared:
            self.loading.open(loader, reader)
        for hosted in self.loading.slots.values():
            hosted.loader.set_budget(more.budget_bytes)
        try:
            self.gate.record_source(new.event, more, event_id)
        # the planner has the source and the journal lacks it: no step may be planned with it
        except JournalError as error:
            self.event(EndOfJob(self.planner.next_step, error))
            raise
        joined()
        self.run(commands)

    # executing commands

    def _execute(self, command: Any) -> None:
        match self.gate.admit(command):
            case None:
                pass
            case (Refill() | Read() | Evaluate()) as work:
                self.commands.queue.extend(self.loading.execute(work))
            case Announce() as announce:
                self.commands.queue.extend(self.planner.handle(announce))
            case DropHeldSamples(loaders=loaders):
                self.loading.forget(loaders)
            case SourceLost() as lost:
                lose_source(lost, self.event, self.on_lost)
            case RestartLoader() as restart:
                self.loading.reopen(restart)
            case PlannedStep() as stage:
                self._stage(stage)
            case (Build() | Deliver() | EndRank() | Release()) as work:
                self.building.execute(work, self.commands.queue)
            case EndOfJob() as finish:
                self.commands.queue.extend(self.building.finish(finish))
            case unknown:
                raise TypeError(
                    f"local runtime: expected a known command, got {type(unknown).__name__}; "
                    "this is a bug in Overlord: report it"
                )

    def _stage(self, stage: PlannedStep) -> None:
        """Pop the step's samples from their loaders and pass them to the constructors."""
        loaders = np.flatnonzero(stage.pops)
        pops = dict(zip(loaders.tolist(), stage.pops[loaders].tolist(), strict=True))
        pieces, commands = self.loading.pop(stage.plan.step, pops, stage.kept)
        self.commands.queue.extend(commands)
        self.plans.keep(stage)
        for watcher in self.on_stage:
            watcher(stage)
        self.building.plan(stage)
        if stage.skipped:
            return
        # a held sample would keep all samples alive that were popped with it
        if stage.kept is not None or stage.plan.offset is not None:
            pieces = [_copied(pieces, stage)]
            stage = replace(stage, doc=np.arange(len(stage.doc)))
        columns = [p.tokens for p in pieces] or [NOTHING.tokens]
        if (weights := Content.weights_of(pieces)) is None:
            tokens: Ragged = RaggedParts(columns)
        else:  # the weights have the offsets of the joined tokens
            tokens = Ragged.concat(columns)
        staged = StepDocuments(stage, tokens, weights=weights)
        if self._images is not None:
            staged = self._with_images(staged, Scattered.of(pieces))
        if self._pop_hooks:
            self._executor.submit(
                "loader hooks", lambda: self._popped(staged), self._pop_done(stage), urgent=True
            )
        else:  # before the reads that the planner requested: a trainer waits for a step
            self.commands.queue.extendleft(
                reversed(self.building.staged(staged, StepInfo.of(stage)))
            )

    def _with_images(self, staged: StepDocuments, found: Scattered | None) -> StepDocuments:
        """Return the documents with their images, and with the images that each rank encodes."""
        stage, ranks = staged.stage, self.building.served()
        made, items = (
            Encodings(stage.plan, self._batches.at(stage.plan.step), self._broadcast),
            found or Scattered([], np.zeros(len(staged.tokens), np.int64)),
        )
        wanted = made.encoded_by(ranks)
        doc, number = stage.doc[made.sample[wanted]], made.routes.number[wanted]
        assert (number < items.counts[doc]).all(), "a plan has more images than its documents"
        return replace(
            staged,
            stage=replace(stage, encoding=made.of(ranks, items.first[doc] + number)),
            items=items,
        )

    def _popped(self, staged: StepDocuments) -> StepDocuments:
        doc, tokens = popped_by(
            self._pop_hooks, staged.plan, staged.stage.doc, staged.tokens, self._seed
        )
        weights = ordered_weights(staged.plan, staged.stage.doc, staged.weights)
        return replace(staged, stage=replace(staged.stage, doc=doc), tokens=tokens, weights=weights)

    def _pop_done(self, stage: PlannedStep) -> Done:
        def done(outcome: Any, error: BaseException | None) -> None:
            if error is not None:
                self.building.fail_step(stage.plan.step, None, "popping", error)
            else:
                self.run(self.building.staged(outcome, StepInfo.of(stage)))

        return done

    # statistics

    def observe_load(self, options: Options, waited_s: float, now: float) -> None:
        """Pass the load of loaders and trainers to the scaler, and execute its decisions.

        ``waited_s`` is the mean of the seconds that trainers have waited so far. Do nothing if the
        launch option ``watch_s`` is 0.
        """
        if self._observer is None:
            scaler = observing_scaler(options, self.planner.spec.read_ahead)
            if scaler is None:
                return
            self._observer = LoadObserver(
                scaler, lambda: self.planner, self, set_read_ahead=self._set_read_ahead
            )
        if self.planner.finished is None and self.building.mailboxes:
            stats = {0: self.loading.work()}
            observed = self._observer.observe(now, stats, self._taken, waited_s, hosts=1)
            self._observer.conclude(observed, now)

    def _set_read_ahead(self, command: SetReadAhead) -> None:
        self.run(self.planner.handle(command))

    def loaders_of(self, source: int) -> range:
        """Return the numbers of a source's loaders."""
        return self.planner.loaders_of(source)

    def places_of(self, source: int) -> tuple[int, ...]:
        """Return the loaders of a source: all of them run in this process."""
        return tuple(self.loaders_of(source))

    def available_workers(self, source: int) -> tuple[int, ...]:
        """Return an empty tuple: no other process can read a source."""
        return ()

    def n_processes(self, source: int) -> int:
        """Return the number of transform processes of a source, or 1 for this process."""
        mine = [
            self.loading.slots[n].reader.stages
            for n in self.loaders_of(source)
            if n in self.loading.slots
        ]
        return len(mine) if any(isinstance(stages, TransformWorker) for stages in mine) else 1

    def free_s(self, source: int) -> float:
        """Return 0 if the source has user code and no tokenizer or image transform, else infinity.

        Tokenizers and image transforms cost most, and release the interpreter lock.
        """
        hosted = self.loading.slots.get(self.loaders_of(source)[0])
        transforms = () if hosted is None else getattr(hosted.reader.stages, "transforms", ())
        own, heavy = (
            any(t.user_code for t in transforms),
            any(t.kind in ("tokenize", "images") for t in transforms),
        )
        return 0.0 if own and not heavy else math.inf

    def move(self, source: int, hosts: Sequence[str]) -> None:
        raise JobError(
            ["all loaders run in this process; launch with runtime='process' to move them"], "move"
        )

    def scale(self, source: int, n: int) -> bool:
        raise JobError(
            ["all loaders run in this process; launch with runtime='process' to scale them"],
            "scale",
        )

    def kill(self, name: str) -> None:
        raise JobError(
            [
                f"{name!r}: all components run in this process; launch with runtime='process' for "
                "processes to kill"
            ],
            "kill",
        )

    # clients in other processes: this process serves them itself

    absent, actor_system = "", None

    def use_buffers(self, buffers: Any) -> None:
        self.building.slabs = buffers
        self.building.in_place = False  # arrays are built where other processes can map them

    def listen(self, host: str, token: str) -> None:
        """Do nothing: there are no constructor workers."""

    def outside(self, rank: int) -> None:
        """Return None: there are no constructor workers."""

    def taken_by(self, rank: int) -> None:
        """Return None: there are no constructor workers."""

    # status

    def waiting_for(self, rank: int) -> str:
        """Describe what a rank's next step waits for: constructor, journal, planner or loaders."""
        if words := self.building.waiting(rank) or self.gate.waiting_for():
            return words
        busy = self.loading.busy()
        return self.planner.waiting_for() + (f" ({'; '.join(busy[:3])})" if busy else "")

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that loaders and constructors hold."""
        return self.loading.held_bytes() | self.building.held_bytes()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of loaders, constructors and the scaler."""
        here = {"pid": os.getpid()}
        return {
            "loaders": [row | here for row in self.loading.figures()],
            "constructors": [row | here for row in self.building.figures()],
            "memory": self.held_bytes(),
            "hosts": [],
            "scaling": {} if self._observer is None else self._observer.metrics(time.monotonic()),
        }

    def on_loop_failure(self, error: Exception) -> None:
        """Do nothing: the session ends its clients after the event loop has failed."""

    def close(self) -> None:
        """Accept no more work; results of work in progress are dropped."""
        self.building.stopped = True
        if isinstance(self._executor, ThreadExecutor):
            self._executor.close()
        self.slabs.close()

    @property
    def loaders(self) -> list[Loader]:
        return [h.loader for h in self.loading.slots.values()]

    @property
    def assemblers(self) -> list[Assembler]:
        return list(self.building.assemblers.values())

    @property
    def slabs(self) -> Any:
        return self.building.slabs

    def check(self) -> None:
        self.planner.check()
        self.loading.check()
        self.building.check()


def _copied(pieces: Sequence[Content], stage: PlannedStep) -> Content:
    """Return a copy of the payload of each row of a plan: a sample, or a piece of one."""
    plan = stage.plan
    if plan.offset is None:
        return Content.pick(pieces, stage.doc)
    tokens, weights = Ragged.concat([p.tokens for p in pieces]), Content.weights_of(pieces)
    spans = (stage.doc, plan.offset, plan.payload_tokens)
    return Content(
        tokens.take_spans(*spans), weights=None if weights is None else weights.take_spans(*spans)
    )
