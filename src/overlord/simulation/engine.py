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
from overlord.job import Job
from overlord.messages import SetMixture, Skip, Stage
from overlord.runtime.bootstrap import Blueprint, Options
from overlord.runtime.host import Done


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


@dataclass(slots=True, eq=False)
class _Rank:
    """A simulated trainer: takes a step, computes for a while, takes the next."""

    rank: int
    inbox: list[tuple[Stage, Bucket]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
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


def simulate(
    job: Job, *, seed: int = 0, steps: int | None = None, resume: dict[str, Any] | None = None, delays: Delays | None = None,
    ranks: Sequence[int] | None = None, events: Sequence[SetMixture | Skip] = (), max_events: int = 10_000_000, **options: Any,
) -> Run:  # fmt: skip
    """Run a job on a virtual clock until it ends, or until every rank has taken ``steps`` steps. ``events``: what people
    change in mid-run; each names its step, so when it is said does not matter."""
    delays = delays or Delays()
    blueprint = Blueprint(job, Options(**options))
    executor = VirtualExecutor(seed, delays)
    host = blueprint.host(executor, None if resume is None else blueprint.restore(resume))
    trainers = [_Rank(r) for r in (range(job.place.world) if ranks is None else ranks)]

    def take(trainer: _Rank) -> None:
        if not trainer.inbox or (steps is not None and len(trainer.steps) >= steps):
            trainer.idle = True
            return
        trainer.idle = False
        stage, bucket = trainer.inbox.pop(0)
        trainer.steps.append(Step(stage, bucket, trainer.rank))
        host.consumed([trainer.rank], stage.plan.step)
        executor.at(executor.delay(delays.step_s * delays.slow.get(trainer.rank, 1.0)), lambda: take(trainer))

    try:
        for trainer in trainers:
            trainer.wake = lambda t=trainer: executor.at(0.0, lambda: take(t) if t.idle else None)  # type: ignore[misc]
        for event in events:
            host.event(event)
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
        quarantine=list(host.planner.quarantine), end_state=blueprint.export(last[0]) if last else {},
    )  # fmt: skip
