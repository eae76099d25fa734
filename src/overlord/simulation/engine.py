"""The simulated runtime: the same cores, readers and builders on a virtual clock with seeded delays and orderings.

Nothing is modelled twice: the host is the local runtime's, only *when* a piece of work ends is drawn from a seed. So a
run under any seed must give the stream of the local runtime, byte for byte, and a failing seed is the bug report.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.client.step import Step
from overlord.constructor.builder import Bucket
from overlord.errors import DataStall
from overlord.job import Job, Source
from overlord.messages import Cursor, SetMixture, Skip, Stage
from overlord.planner.events import Log, said_of_all
from overlord.planner.feedback import checked
from overlord.runtime.bootstrap import Blueprint
from overlord.runtime.host import Done
from overlord.runtime.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """How long work takes, in virtual seconds: log-normal around a median, so that orders vary wildly."""

    work_s: float = 0.010
    step_s: float = 0.050  # a rank's time between steps
    sigma: float = 1.0
    slow: Mapping[int, float] = field(default_factory=dict)  # rank -> how many times longer its steps take


class VirtualExecutor:
    """An event queue. Work is done when its virtual time has come; ties and durations come from the seed."""

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

    def submit(self, name: str, work: Callable[[], Any], done: Done, *, size: int = 1, urgent: bool = False) -> None:
        def finish() -> None:
            try:
                outcome = work()
            except Exception as error:
                done(None, error)
            else:
                done(outcome, None)

        self.at(self.delay(self._delays.work_s), finish)

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


Trainer = Callable[[int, int], Mapping[str, float] | None]  # (rank, step) -> what it reports, or None


@dataclass(slots=True, eq=False)
class _Rank:
    """A simulated trainer: takes a step, computes for a while, takes the next."""

    rank: int
    inbox: list[tuple[Stage, Bucket]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    owes: list[int] = field(default_factory=list)  # steps it has not reported of
    idle: bool = True
    ended: bool = False
    error: Exception | None = None
    wake: Callable[[], None] = lambda: None

    def put(self, stage: Stage, bucket: Bucket) -> None:
        self.inbox.append((stage, bucket))
        self.wake()

    def end(self, error: Exception | None) -> None:
        self.ended, self.error = True, error


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What a simulated run gave: the steps of every rank, and how long it would have taken."""

    steps: dict[int, list[Step]]
    error: Exception | None
    seconds: float
    quarantine: list[Any]
    end_state: dict[str, Any]
    states: dict[int, dict[str, Any]]  # behind each step, as it was when the last rank had taken it; where they were asked for
    feedback: dict[str, int]  # what became of reports


def simulate(
    job: Job, *, seed: int = 0, steps: int | None = None, resume: dict[str, Any] | None = None, delays: Delays | None = None,
    ranks: Sequence[int] | None = None, events: Sequence[SetMixture | Skip | Add] = (), report: Trainer | None = None,
    save: bool = False, max_events: int = 10_000_000, **options: Any,
) -> Run:  # fmt: skip
    """Run a job on a virtual clock until it ends, or until every rank has taken ``steps`` steps. ``events``: what people
    change in mid-run; each names its step, so when it is said does not matter. ``report``: what trainers report of a step, some
    time before they ask for the second next; resumed, they say again what the state may lack. ``save``: keep the state behind
    every step, as a checkpoint would."""
    delays = delays or Delays()
    blueprint = Blueprint(job, Options.of(options))
    executor = VirtualExecutor(seed, delays)
    if resume is not None:
        blueprint = blueprint.fitting(resume)
    host = blueprint.host(executor, None if resume is None else blueprint.restore(resume))
    log, states = Log(job.feedback_lag), dict[int, dict[str, Any]]()
    trainers = [_Rank(r) for r in (range(job.place.world_size) if ranks is None else ranks)]

    def say(event: SetMixture | Skip | Add) -> None:
        nonlocal blueprint
        if isinstance(event, Add):
            blueprint = blueprint.with_source(event.source, event.loaders)
            new = blueprint.new_source(event.at)
            host.add_source(new, blueprint.loaders_for(len(blueprint.job.sources) - 1, Cursor()), blueprint.budget_bytes)
            return
        host.event(said_of_all(event, blueprint.job.names) if isinstance(event, SetMixture) else event)

    def tell(trainer: _Rank) -> None:
        """All it owes but perhaps the report of its last step, which it may still be working on."""
        while report is not None and trainer.owes and (len(trainer.owes) > 1 or executor.delay(1.0) > 1.0):
            step = trainer.owes.pop(0)
            if (said := report(trainer.rank, step)) is not None:
                what = checked(trainer.rank, step, said, host.planner.next_step)
                if host.planner.in_time(what):
                    log.report(what, 0)
                host.event(what)

    def take(trainer: _Rank) -> None:
        tell(trainer)
        if not trainer.inbox or (steps is not None and len(trainer.steps) >= steps):
            trainer.idle = True
            return
        trainer.idle = False
        stage, bucket = trainer.inbox.pop(0)
        trainer.steps.append(Step(stage, bucket, trainer.rank))
        trainer.owes.append(stage.plan.step)
        host.consumed([trainer.rank], stage.plan.step)
        if save:
            states[stage.plan.step] = blueprint.export(log.completed(stage.after, blueprint.job.names))
        executor.at(executor.delay(delays.step_s * delays.slow.get(trainer.rank, 1.0)), lambda: take(trainer))

    try:
        for trainer in trainers:
            trainer.wake = lambda t=trainer: executor.at(0.0, lambda: take(t) if t.idle else None)  # type: ignore[misc]
            trainer.owes = [s for s in range(host.planner.next_step - 2, host.planner.next_step) if s >= 0]
        for event in events:
            say(event)
        host.attach({t.rank: t for t in trainers})
        for _ in range(max_events):
            if all((t.ended and not t.inbox) or (steps is not None and len(t.steps) >= steps) for t in trainers):
                break
            if not executor.step():
                stuck = next(t.rank for t in trainers if not t.ended)
                raise DataStall(host.waiting_for(stuck), executor.now, host.planner.next_step, stuck)
        else:
            raise DataStall(f"an end of the simulation within {max_events} events", executor.now)
    finally:
        blueprint.close()
    last = [t.steps[-1]._stage.after for t in trainers if t.steps]
    return Run(
        steps={t.rank: t.steps for t in trainers}, error=next((t.error for t in trainers if t.error), None), seconds=executor.now,
        quarantine=list(host.planner.ledger.quarantine),
        end_state=blueprint.export(log.completed(last[0], blueprint.job.names)) if last else {},
        states=states, feedback=host.planner.feedback,
    )  # fmt: skip
