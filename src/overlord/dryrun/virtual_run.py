"""The simulated runtime: the same cores, readers and builders on a virtual clock with seeded delays
and orderings.

Nothing is modelled twice: the host is the local runtime's, only *when* a piece of work ends is
drawn from a seed. So a run under any seed must give the stream of the local runtime, byte for byte,
and a failing seed is the bug report.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from overlord.client.step import Step
from overlord.concurrency.command_loop import Done
from overlord.constructor.build import BucketBatch
from overlord.errors import DataStall
from overlord.job.job import Job, Source
from overlord.messages.client import StepInfo
from overlord.messages.control import (
    Cursor,
    PlannedStep,
    RestartSource,
    SetMixture,
    Skip,
    StreamState,
)
from overlord.messages.reports import checked
from overlord.planning.events import EventLog, said_of_all
from overlord.session.local_runtime import local_runtime
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """How long work takes, in virtual seconds: log-normal around a median, so that orders vary
    wildly.
    """

    work_s: float = 0.010
    step_s: float = 0.050  # a rank's time between steps
    sigma: float = 1.0
    slow: Mapping[int, float] = field(
        default_factory=dict
    )  # rank -> how many times longer its steps take


class VirtualExecutor:
    """An event queue. Work is done when its virtual time has come; ties and durations come from the
    seed.
    """

    def __init__(self, seed: int, delays: Delays):
        self._random, self._delays = np.random.Generator(np.random.Philox(seed)), delays
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.now = 0.0

    def delay(self, median_s: float) -> float:
        return median_s * float(np.exp(self._delays.sigma * self._random.standard_normal()))

    def at(self, after_s: float, call: Callable[[], None]) -> None:
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
        def finish() -> None:
            try:
                outcome = work()
            except Exception as error:
                done(None, error)
            else:
                done(outcome, None)

        self.at(self.delay(self._delays.work_s), finish)

    def close(self) -> None:
        self._events.clear()

    def step(self) -> bool:
        if not self._events:
            return False
        self.now, _, call = heapq.heappop(self._events)
        call()
        return True


@dataclass(frozen=True, slots=True)
class Add:
    """``session.add_source`` of a simulated run."""

    source: Source
    at: int = 0
    loaders: int = 1


@dataclass(frozen=True, slots=True)
class Moved:
    """A source is read anew from where the draw stands, as when its loaders move to another host:
    when so many pieces of work are done, or, with ``step``, in the middle of carrying out that
    step's plan. Nobody may notice.
    """

    source: str
    after: int = 0
    step: int | None = None


Trainer = Callable[
    [int, int], Mapping[str, float] | None
]  # (rank, step) -> what it reports, or None


@dataclass(slots=True, eq=False)
class _Rank:
    """A simulated trainer: takes a step, computes for a while, takes the next."""

    rank: int
    inbox: list[tuple[StepInfo, BucketBatch]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    owes: list[int] = field(default_factory=list)  # steps it has not reported of
    idle: bool = True
    ended: bool = False
    error: Exception | None = None
    wake: Callable[[], None] = lambda: None

    def put(self, told: StepInfo, bucket: BucketBatch) -> None:
        self.inbox.append((told, bucket))
        self.wake()

    def end(self, error: Exception | None) -> None:
        self.ended, self.error = True, error

    def resume(self) -> None:
        self.ended, self.error = False, None


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What a simulated run gave: the steps of every rank, and how long it would have taken."""

    steps: dict[int, list[Step]]
    error: Exception | None
    seconds: float
    quarantine: list[Any]
    end_state: dict[str, Any]
    states: dict[
        int, dict[str, Any]
    ]  # behind each step, as it was when the last rank had taken it; where they were asked for
    feedback: dict[str, int]  # what became of reports


class _Simulation:
    """One run: the host of the local runtime, trainers that take steps and report, and an event
    queue in place of time.
    """

    def __init__(
        self,
        blueprint: PreparedJob,
        resume: dict[str, Any] | None,
        *,
        seed: int,
        steps: int | None,
        delays: Delays,
        ranks: Sequence[int] | None,
        report: Trainer | None,
        save: bool,
    ):
        self._blueprint = blueprint if resume is None else blueprint.fitting(resume)
        self._steps, self._delays, self._report, self._save = steps, delays, report, save
        self._executor = VirtualExecutor(seed, delays)
        self._host = local_runtime(
            self._blueprint,
            self._executor,
            None if resume is None else self._blueprint.restore(resume),
        )
        job, first = self._blueprint.job, self._host.planner.next_step
        self._log, self._states = EventLog(job.feedback_lag), dict[int, dict[str, Any]]()
        self._trainers = [
            _Rank(r) for r in (range(job.place.world_size) if ranks is None else ranks)
        ]
        self._moves: list[Moved] = []
        self._host.on_stage.append(self._staged)
        self._host.on_lost.append(lambda event: self._log.add(event, 0))
        for trainer in self._trainers:
            trainer.wake = partial(self._executor.at, 0.0, partial(self._wake, trainer))
            trainer.owes = [s for s in range(first - 2, first) if s >= 0]

    def say(self, event: SetMixture | Skip | Add | Moved) -> None:
        if isinstance(event, Moved):
            self._moves.append(event)
            return
        if isinstance(event, Add):
            self._blueprint = made = self._blueprint.with_source(event.source, event.loaders)
            self._host.add_source(
                made.new_source(event.at),
                made.loaders_for(len(made.job.sources) - 1, Cursor()),
                made.budget_bytes,
            )
            return
        self._host.event(
            said_of_all(event, self._blueprint.job.names)
            if isinstance(event, SetMixture)
            else event
        )

    def run(self, max_events: int) -> None:
        self._host.attach({t.rank: t for t in self._trainers})
        for n in range(max_events):
            self._move([m for m in self._moves if m.step is None and m.after <= n])
            if all((t.ended and not t.inbox) or self._has_all(t) for t in self._trainers):
                return
            if not self._executor.step():
                stuck = next(t.rank for t in self._trainers if not t.ended)
                raise DataStall(
                    self._host.waiting_for(stuck),
                    self._executor.now,
                    self._host.planner.next_step,
                    stuck,
                )
        raise DataStall(f"an end of the simulation within {max_events} events", self._executor.now)

    def _staged(self, stage: PlannedStep) -> None:
        self._move([m for m in self._moves if m.step is not None and m.step <= stage.plan.step])

    def _move(self, due: Sequence[Moved]) -> None:
        self._moves = [m for m in self._moves if m not in due] if due else self._moves
        for move in due:
            self._host.event(RestartSource(self._blueprint.job.names.index(move.source)))

    def _has_all(self, trainer: _Rank) -> bool:
        return self._steps is not None and len(trainer.steps) >= self._steps

    def _wake(self, trainer: _Rank) -> None:
        if trainer.idle:
            self._take(trainer)

    def _take(self, trainer: _Rank) -> None:
        self._tell(trainer)
        if not trainer.inbox or self._has_all(trainer):
            trainer.idle = True
            return
        trainer.idle = False
        told, bucket = trainer.inbox.pop(0)
        trainer.steps.append(Step(told, bucket, trainer.rank))
        trainer.owes.append(told.step)
        self._host.consumed([trainer.rank], told.step)
        if self._save:
            self._states[told.step] = self._export(told)
        delays = self._delays
        self._executor.at(
            self._executor.delay(delays.step_s * delays.slow.get(trainer.rank, 1.0)),
            partial(self._take, trainer),
        )

    def _tell(self, trainer: _Rank) -> None:
        """All it owes but perhaps the report of its last step, which it may still be working on."""
        while (
            self._report is not None
            and trainer.owes
            and (len(trainer.owes) > 1 or self._executor.delay(1.0) > 1.0)
        ):
            step = trainer.owes.pop(0)
            if (said := self._report(trainer.rank, step)) is not None:
                what = checked(trainer.rank, step, said, self._host.planner.next_step)
                if self._host.planner.in_time(what):
                    self._log.report(what, 0)
                self._host.event(what)

    def _export(self, told: StepInfo) -> dict[str, Any]:
        assert isinstance(told.after, StreamState)
        return self._blueprint.export(self._log.completed(told.after, self._blueprint.job.names))

    def outcome(self) -> Run:
        ranks, planner = self._trainers, self._host.planner
        last = next((t.steps[-1]._told for t in ranks if t.steps), None)
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
        self._blueprint.close()


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
    max_events: int = 10_000_000,
    **options: Any,
) -> Run:
    """Run a job on a virtual clock until it ends, or until every rank has taken ``steps`` steps.
    ``events``: what people change in mid-run; each names its step, so when it is said does not
    matter; and sources that move, which must not matter at all. ``report``: what trainers report of
    a step, some time before they ask for the second next; resumed, they say again what the state
    may lack. ``save``: keep the state behind every step, as a checkpoint would.
    """
    blueprint, delays = PreparedJob(job, Options.of(options)), delays or Delays()
    run = _Simulation(
        blueprint,
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
            run.say(event)
        run.run(max_events)
    finally:
        run.close()
    return run.outcome()
