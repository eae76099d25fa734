"""Runs of a job on a virtual clock with seeded delays and orderings: ``ov.simulate``.

The runtime is the local one; only the time at which work ends is drawn from a seed. Under any seed
a run must give the stream of the local runtime, byte for byte. A seed whose run differs reproduces
a bug.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from overlord.client.client import Step
from overlord.concurrency.event_loop import Done
from overlord.constructor.build import BucketBatch
from overlord.errors import DataStall
from overlord.job.job import Job, Source
from overlord.messages.control import (
    Cursor,
    PlannedStep,
    RestartSource,
    SetMixture,
    Skip,
    StreamState,
)
from overlord.messages.data import StepInfo, checked_report
from overlord.planning.mixture import EventLog, with_every_weight
from overlord.session.local_runtime import LocalRuntime
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob

MAX_EVENTS = 10_000_000  # after which a run counts as blocked


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Distributions of durations: log-normal, with these medians in virtual seconds."""

    work_s: float = 0.010  # each piece of work, such as a read or a build
    step_s: float = 0.050  # compute time of a rank between two steps
    sigma: float = 1.0  # standard deviation of the logarithm
    slow: Mapping[int, float] = field(default_factory=dict)  # rank -> factor on its step_s


class VirtualExecutor:
    """An executor on a virtual clock: an event queue whose durations come from a seed."""

    def __init__(self, seed: int, delays: Delays):
        self._random, self._delays = np.random.Generator(np.random.Philox(seed)), delays
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.now = 0.0

    def delay(self, median_s: float) -> float:
        """Return a random duration with median ``median_s``."""
        return median_s * float(np.exp(self._delays.sigma * self._random.standard_normal()))

    def call_later(self, after_s: float, call: Callable[[], None]) -> None:
        """Call a function ``after_s`` virtual seconds from now."""
        self._count += 1
        heapq.heappush(self._events, (self.now + after_s, self._count, call))

    def submit(
        self,
        name: str,
        work: Callable[[], Any],
        done: Done,
        *,
        size: int = 1,
        urgent: bool = False,
        waits: Any = None,
    ) -> None:
        """Run ``work`` after a random virtual delay, and call ``done(result, error)``."""

        def finish() -> None:
            try:
                outcome = work()
            except Exception as error:
                done(None, error)
            else:
                done(outcome, None)

        self.call_later(self.delay(self._delays.work_s), finish)

    def close(self) -> None:
        """Drop all pending events."""
        self._events.clear()

    def step(self) -> bool:
        """Execute the next event; return False if there is none."""
        if not self._events:
            return False
        self.now, _, call = heapq.heappop(self._events)
        call()
        return True


@dataclass(frozen=True, slots=True)
class Add:
    """A call of ``session.add_source`` in a simulated run."""

    source: Source
    at: int = 0
    loaders: int = 1


@dataclass(frozen=True, slots=True)
class Moved:
    """A simulated move of a source's loaders: their restart at the position of the draw.

    The restart happens after ``after`` executed events, or, with ``step``, while that step's plan
    is executed. The stream must not change.
    """

    source: str
    after: int = 0
    step: int | None = None


Trainer = Callable[[int, int], Mapping[str, float] | None]  # (rank, step) -> its report, or None


@dataclass(slots=True, eq=False)
class _Rank:
    """A simulated trainer of one rank, which takes steps and computes for a time between them."""

    rank: int
    inbox: list[tuple[StepInfo, BucketBatch]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    last: StepInfo | None = None  # of the last step
    unreported: list[int] = field(default_factory=list)  # steps without a report yet
    idle: bool = True
    ended: bool = False
    error: Exception | None = None
    wake: Callable[[], None] = lambda: None

    def put(self, info: StepInfo, bucket: BucketBatch) -> None:
        self.inbox.append((info, bucket))
        self.wake()

    def end(self, error: Exception | None) -> None:
        self.ended, self.error = True, error

    def resume(self) -> None:
        self.ended, self.error = False, None


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The result of a simulated run: the steps of every rank, and its virtual time."""

    steps: dict[int, list[Step]]
    error: Exception | None
    seconds: float
    quarantine: list[Any]
    end_state: dict[str, Any]
    # With ``save``: the state after each step, when the last rank had taken it.
    states: dict[int, dict[str, Any]]
    feedback: dict[str, int]  # numbers of received, used, late and pending reports


class VirtualRun:
    """One simulated run: the local runtime, simulated trainers, and an event queue."""

    def __init__(
        self,
        prepared: PreparedJob,
        resume: dict[str, Any] | None = None,
        *,
        seed: int = 0,
        steps: int | None = None,
        delays: Delays | None = None,
        ranks: Sequence[int] | None = None,
        report: Trainer | None = None,
        save: bool = False,
    ):
        """See ``simulate``. The run owns ``prepared``, which ``close`` closes."""
        delays = delays or Delays()
        self._prepared = prepared if resume is None else prepared.for_saved_state(resume)
        self._steps, self._delays, self._report, self._save = steps, delays, report, save
        self._executor = VirtualExecutor(seed, delays)
        self._runtime = LocalRuntime(
            self._prepared,
            self._executor,
            None if resume is None else self._prepared.restore(resume),
        )
        job, first = self._prepared.job, self._runtime.planner.next_step
        self._log, self._states = EventLog(job.feedback_lag), dict[int, dict[str, Any]]()
        self._trainers = [
            _Rank(r) for r in (range(job.place.world_size) if ranks is None else ranks)
        ]
        self._moves: list[Moved] = []
        self._runtime.on_stage.append(self._staged)
        self._runtime.on_lost.append(lambda event: self._log.add(event, lambda: 0))
        for trainer in self._trainers:
            trainer.wake = partial(self._executor.call_later, 0.0, partial(self._wake, trainer))
            trainer.unreported = [s for s in range(first - 2, first) if s >= 0]

    def apply(self, event: SetMixture | Skip | Add | Moved) -> None:
        """Apply a change to the runtime; a move is only scheduled."""
        if isinstance(event, Moved):
            self._moves.append(event)
            return
        if isinstance(event, Add):
            self._prepared = made = self._prepared.with_source(event.source, event.loaders)
            self._runtime.add_source(
                made.new_source(event.at),
                made.loaders_for(len(made.job.sources) - 1, Cursor()),
                made,
            )
            return
        self._runtime.event(
            with_every_weight(event, self._prepared.job.names)
            if isinstance(event, SetMixture)
            else event
        )

    def run(self, max_events: int = MAX_EVENTS) -> None:
        """Execute events until every rank has its steps, or the job has ended.

        Raise ``DataStall`` if no event is left, or after ``max_events``.
        """
        self._runtime.attach({t.rank: t for t in self._trainers})
        for n in range(max_events):
            self._move([m for m in self._moves if m.step is None and m.after <= n])
            if all((t.ended and not t.inbox) or self._has_all(t) for t in self._trainers):
                return
            if not self._executor.step():
                stuck = next(t.rank for t in self._trainers if not t.ended)
                raise DataStall(
                    self._runtime.waiting_for(stuck),
                    self._executor.now,
                    self._runtime.planner.next_step,
                    stuck,
                )
        raise DataStall(f"an end of the simulation within {max_events} events", self._executor.now)

    def _staged(self, stage: PlannedStep) -> None:
        self._move([m for m in self._moves if m.step is not None and m.step <= stage.plan.step])

    def _move(self, due: Sequence[Moved]) -> None:
        self._moves = [m for m in self._moves if m not in due] if due else self._moves
        for move in due:
            self._runtime.event(RestartSource(self._prepared.job.names.index(move.source)))

    def _has_all(self, trainer: _Rank) -> bool:
        return self._steps is not None and len(trainer.steps) >= self._steps

    def _wake(self, trainer: _Rank) -> None:
        if trainer.idle:
            self._take(trainer)

    def _take(self, trainer: _Rank) -> None:
        self._send_reports(trainer)
        if not trainer.inbox or self._has_all(trainer):
            trainer.idle = True
            return
        trainer.idle = False
        info, bucket = trainer.inbox.pop(0)
        trainer.last = info
        trainer.steps.append(Step(info, bucket, trainer.rank))
        trainer.unreported.append(info.step)
        self._runtime.consumed([trainer.rank], info.step)
        if self._save:
            self._states[info.step] = self._export(info)
        delays = self._delays
        self._executor.call_later(
            self._executor.delay(delays.step_s * delays.slow.get(trainer.rank, 1.0)),
            partial(self._take, trainer),
        )

    def _send_reports(self, trainer: _Rank) -> None:
        """Send the pending reports of a trainer; that of its last step may be delayed at random."""
        while (
            self._report is not None
            and trainer.unreported
            and (len(trainer.unreported) > 1 or self._executor.delay(1.0) > 1.0)
        ):
            step = trainer.unreported.pop(0)
            if (values := self._report(trainer.rank, step)) is not None:
                report = checked_report(trainer.rank, step, values, self._runtime.planner.next_step)
                if self._runtime.planner.in_time(report):
                    self._log.report(report, 0)
                self._runtime.event(report)

    def _export(self, info: StepInfo) -> dict[str, Any]:
        assert isinstance(info.after, StreamState)
        return self._prepared.export(self._log.completed(info.after, self._prepared.job.names))

    def outcome(self) -> Run:
        """Return the steps, end state and counts of the run so far."""
        ranks, planner = self._trainers, self._runtime.planner
        last = next((t.last for t in ranks if t.last is not None), None)
        return Run(
            steps={t.rank: t.steps for t in ranks},
            error=next((t.error for t in ranks if t.error), None),
            seconds=self._executor.now,
            quarantine=planner.ledger.bad_rows(),
            end_state={} if last is None else self._export(last),
            states=self._states,
            feedback=planner.feedback,
        )

    def close(self) -> None:
        self._prepared.close()


def simulate(
    job: Job,
    *,
    seed: int = 0,
    steps: int | None = None,
    resume: dict[str, Any] | None = None,
    delays: Delays | None = None,
    ranks: Sequence[int] | None = None,
    events: Sequence[SetMixture | Skip | Add | Moved] = (),
    report: Trainer | None = None,
    save: bool = False,
    max_events: int = MAX_EVENTS,
    **options: Any,
) -> Run:
    """Run a job on a virtual clock until it ends, or until every rank has taken ``steps`` steps.

    ``resume``: start from a saved state. ``ranks``: ranks that take steps; None: all.
    ``events``: changes during the run. Each contains its step, so the time of the call does not
    matter; a moved source must not change the stream. ``report(rank, step)``: the report of a
    trainer about a step, sent before it requests the second next step. A resumed run repeats
    reports that the state may lack. ``save``: keep the state after every step, as a checkpoint
    does. Raise ``DataStall`` if the run blocks; an error of the job is in ``Run.error``.
    """
    run = VirtualRun(
        PreparedJob(job, Options.of(options)),
        resume,
        seed=seed,
        steps=steps,
        delays=delays,
        ranks=ranks,
        report=report,
        save=save,
    )
    try:
        for event in events:
            run.apply(event)
        run.run(max_events)
    finally:
        run.close()
    return run.outcome()
