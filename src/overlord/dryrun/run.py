"""A fleet on a virtual clock: the planner, draw, strategy, loaders and assemblers of a real job at
any place tree; reading, sending and building take what was measured of them. What the planner takes
is no model: it runs, and is timed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from overlord.cluster.plan_router import PlanRouter, RoutedPlan
from overlord.constructor.assembler import Assembler
from overlord.dryrun.arrivals import arrivals
from overlord.dryrun.machines import ClusterShape, Constants
from overlord.dryrun.stand_ins import Probe, StandInReader
from overlord.errors import DataStall
from overlord.loader.loader import Loader
from overlord.messages.constructor import Build, Built, Deliver, PayloadReady
from overlord.messages.control import (
    Attach,
    Consumed,
    Cursor,
    EncodedState,
    EndOfJob,
    LoaderPlan,
    PlannedStep,
    Refill,
)
from overlord.messages.loader import Evaluate, Pop, Read
from overlord.scaling.loader_placement import plan_hosts
from overlord.setup.partition import loads_of
from overlord.setup.prepared_job import PreparedJob

THREADS = 8  # of a loader host, that read side by side
# of a loader, or of a host's threads, at the trainers' pace: the rest is room for steps that cost
# more
BUSY = 0.7
MAX_EVENTS = 5_000_000
LEAST_WAIT = 0.01  # of a step: less is not worth a word


@dataclass(slots=True)
class Happened:
    """What a run saw of one step, in virtual seconds; ``plan_s`` and ``cut_s`` are real."""

    began: float = 0.0  # the planner began to plan it
    plan_s: float = 0.0
    cut_s: float = 0.0
    nbytes: int = 0  # of payload
    has: int = 0  # ranks that have it
    last: float = 0.0  # when the last rank had it
    waited_s: float = 0.0  # that trainers stood still for it

    @property
    def latency_s(self) -> float:
        return self.last - self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The steady steps of a run."""

    steps: tuple[Happened, ...]
    loader_hosts: int
    seconds: float  # of virtual time, over all steps
    planner_s: float = (
        0.0  # that the planner was busy for a step: all it hears, plans, cuts and says
    )
    source: str = ""  # whose loaders have most to do
    source_s: float = 0.0  # that each of them is busy for a step
    source_loaders: int = 1

    def why(self, pace_s: float) -> str:
        """What trainers wait for at this pace, in words; empty where they hardly wait."""
        if self.most("waited_s") < LEAST_WAIT * pace_s:
            return ""
        if self.source_s > max(pace_s, self.planner_s):
            n = f"{self.source_loaders} loader{'s' * (self.source_loaders != 1)}"
            why = (
                f"a step takes each of its {n} {self.source_s:.2f} s, and it has no chunks "
                "for more (shuffle_chunks)"
            )
            return f"source {self.source!r}: {why}"
        if self.planner_s > pace_s:
            return f"the planner: a step takes it {self.planner_s:.2f} s"
        return "reading that is uneven: nothing takes longer than a step on average"

    def median(self, what: str) -> float:
        return float(np.median([getattr(step, what) for step in self.steps]))

    def most(self, what: str) -> float:
        return float(max(getattr(step, what) for step in self.steps))


def loaders_of(
    blueprint: PreparedJob, probes: Sequence[Probe], batch: int, pace_s: float
) -> dict[str, int]:
    """Loaders of each source: so many that none is busy above ``BUSY`` at the trainers' pace, as
    far as its chunks go round.
    """
    asked, job = {}, blueprint.job
    for load, probe, order in zip(loads_of(blueprint), probes, blueprint.orders, strict=True):
        most = min(job.shuffle_chunks if order.shuffle else 1, order.n_chunks)
        asked[load.name] = max(
            1, min(most, math.ceil(load.share * batch * probe.row_s / pace_s / BUSY))
        )
    return asked


class DryRun:
    """One run. ``clock`` times what really runs; without it planning takes no time, and runs are
    equal to the last digit.
    """

    def __init__(
        self,
        blueprint: PreparedJob,
        probes: Sequence[Probe],
        fleet: ClusterShape,
        constants: Constants,
        *,
        pace_s: float = 1.0,
        clock: Callable[[], float] = lambda: 0.0,
    ):
        asked = loaders_of(blueprint, probes, fleet.batch, pace_s)
        hosting = plan_hosts(
            loads_of(blueprint),
            cores=fleet.loader_hosts,
            sources_per_host=fleet.sources_per_host,
            loaders=asked,
        )
        self._made = made = blueprint.with_loaders(hosting.loaders, fleet.read_ahead)
        self._fleet, self._c, self._pace_s, self._clock = fleet, constants, pace_s, clock
        by_loader = [
            fleet.batch * load.share * probe.row_s / n
            for load, probe, n in zip(loads_of(blueprint), probes, hosting.loaders, strict=True)
        ]
        self._slowest, self._slowest_s = max(enumerate(by_loader), key=lambda found: found[1])
        self._slowest_loaders, self._planner_s = hosting.loaders[self._slowest], 0.0
        self.planner = made.planner()
        self._loaders: list[Loader] = []
        self._readers: list[StandInReader] = []
        for i, probe in enumerate(probes):
            for o in made.openings(i, Cursor()):
                order, epochs = made.orders[i], made.job.sources[i].epochs
                self._loaders.append(
                    Loader(
                        o.loader,
                        order,
                        epochs=epochs,
                        loader=o.share,
                        loaders=o.shares,
                        budget_bytes=o.budget_bytes,
                    )
                )
                self._readers.append(
                    StandInReader(order, made.indexes[i], probe, made.job.slice_rows)
                )
        self._host_of, self.n_hosts = np.asarray(hosting.host_of, np.int64), hosting.n_hosts
        self._threads = [[0.0] * THREADS for _ in range(self.n_hosts)]
        self._receivers()
        self._sent = np.zeros(self.n_hosts)  # until when each loader host sends
        self.steps: dict[int, Happened] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self.now, self._planner_free = 0, 0.0, 0.0
        self._trained, self._stepped = -1, 0.0  # the last step that all ranks took, and when
        self._wanted = 0
        self._ended = False

    def _receivers(self) -> None:
        """Who gets payload: constructor hosts, or every rank that fetches."""
        fleet, place = self._fleet, self._made.job.place
        self._groups = [list(ranks) for ranks in place.buckets("DP")]
        n = fleet.constructor_hosts
        self._builder_of = np.arange(fleet.dp) * n // fleet.dp  # of every group
        self._built_until = np.zeros(n)
        self._served = np.ones(fleet.dp, bool)
        # All of the window is built: else a step's latency would have in it how long it waits for
        # the one before to be taken.
        self._assemblers = (
            [Assembler(b, ranks, fleet.prefetch) for b, ranks in enumerate(self._groups)]
            if fleet.constructors
            else []
        )
        of = self._builder_of if fleet.constructors else np.arange(fleet.dp)
        self._cutter = PlanRouter(self._host_of.tolist(), of.tolist())
        fetchers = np.asarray(
            sorted(place.fetchers("TP")) if fleet.broadcast else range(fleet.gpus), np.int64
        )
        group = np.empty(fleet.gpus, np.int64)
        for g, ranks in enumerate(self._groups):
            group[ranks] = g
        stage = (
            np.asarray([place.coords(int(r))["pp"] for r in fetchers])
            if fleet.broadcast and place.pp > 1
            else np.zeros(len(fetchers), np.int64)
        )
        self._fetching = fetchers[(stage == 0) | (stage == place.pp - 1)]
        self._fetching_group = group[self._fetching]
        self._is_fetching = np.zeros(fleet.gpus, bool)
        self._is_fetching[self._fetching] = True
        first = np.asarray([ranks[0] for ranks in self._groups]) // fleet.gpus_per_node
        self._away = (
            np.arange(fleet.gpus) // fleet.gpus_per_node != first[group]
        )  # on another node than their constructor
        nodes = n if fleet.constructors else fleet.nodes
        self._free = np.zeros(nodes)  # until when each receives
        self._node_of = (
            np.arange(n) if fleet.constructors else self._fetching // fleet.gpus_per_node
        )

    # time

    def _at(self, when: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, call))

    def run(self, steps: int, warm: int, on_step: Callable[[int], None] = lambda step: None) -> Ran:
        """Until ``steps`` are trained; those behind the first ``warm`` count."""
        self._wanted = steps
        for assembler in self._assemblers:
            for rank in assembler.ranks:
                assembler.handle(Attach(rank))
        self._tell([Attach(rank) for rank in range(self._fleet.gpus)])
        told = -1
        for _ in range(MAX_EVENTS):
            if self._trained + 1 >= steps or self._ended:
                break
            if not self._events:
                raise DataStall(
                    f"an event in the simulated fleet: {self.planner.waiting_for()}",
                    self.now,
                    self._trained + 1,
                )
            self.now, _, call = heapq.heappop(self._events)
            call()
            if self._trained > told:
                told = self._trained
                on_step(told)
        counted = [self.steps[s] for s in sorted(self.steps) if warm <= s <= self._trained] or list(
            self.steps.values()
        )
        if not counted:
            raise DataStall("a step of the simulated fleet", self.now, 0)
        return Ran(
            steps=tuple(counted),
            loader_hosts=self.n_hosts,
            seconds=self.now,
            planner_s=self._planner_s / len(self.steps),
            source=self._made.job.names[self._slowest],
            source_s=self._slowest_s,
            source_loaders=self._slowest_loaders,
        )

    # planner

    def _tell(self, events: Sequence[Any]) -> None:
        """The planner hears these; what it does takes the time it really takes."""
        began, start = max(self.now, self._planner_free), self._clock()
        commands = [command for event in events for command in self.planner.handle(event)]
        took = self._clock() - start
        stages = [command for command in commands if isinstance(command, PlannedStep)]
        self._planner_free = began + took
        self._planner_s += took
        for command in commands:
            match command:
                case PlannedStep():
                    self._stage(command, began, took / len(stages))
                case Refill():
                    self._at(
                        self._planner_free + self._c.call_s / 2,
                        partial(self._loader, command.loader, command),
                    )
                case EndOfJob():
                    self._ended = True
                    if command.error is not None:
                        raise command.error

    def _stage(self, stage: PlannedStep, began: float, plan_s: float) -> None:
        start = self._clock()
        cuts = self._cutter.cut(
            stage, EncodedState(stage.plan.step + 1, np.zeros(0, np.uint8)), self._served
        )
        if not self._fleet.constructors:
            cuts = _to_ranks(cuts, self._groups)
        cut_s = self._clock() - start
        said_s = self._c.link_s * (len(cuts.parts) + len(cuts.placed))
        self._planner_free += cut_s
        self._planner_s += cut_s + said_s
        traffic = self._traffic(stage)
        step = self.steps[stage.plan.step] = Happened(began, plan_s, cut_s, int(traffic.sum()))
        heard = (
            self._planner_free
            + self._c.call_s / 2
            + self._c.link_s * np.arange(1, self.n_hosts + 1)
        )  # one after another
        for loader in np.flatnonzero(stage.pops).tolist():
            pop = Pop(stage.plan.step, int(stage.pops[loader]))
            self._at(float(heard[self._host_of[loader]]), partial(self._loader, loader, pop))
        self._planner_free += said_s
        start_at = np.maximum(self._sent, heard)
        last, self._sent, self._free = arrivals(
            start_at,
            traffic,
            self._node_of,
            free=self._free,
            link_s=self._c.link_s,
            bandwidth=self._c.bandwidth,
        )
        last = np.maximum(
            last, self._planner_free + self._c.call_s / 2
        )  # no sooner than it is told what to do with it
        if self._fleet.constructors:
            for c in range(len(last)):
                self._at(float(last[c]), partial(self._come, c, stage))
        else:
            self._built_by_ranks(stage, step, last)

    def _buckets(self, stage: PlannedStep) -> np.ndarray:
        """The data-parallel group of every sample of the plan."""
        main = stage.plan.main
        bucket = np.empty(len(stage.plan), np.int64)
        bucket[main.sample] = main.bucket
        if main.axis == "DP":
            return bucket
        first = np.asarray([ranks[0] for ranks in self._made.job.place.buckets(main.axis)])
        group = np.empty(self._fleet.gpus, np.int64)
        for g, ranks in enumerate(self._groups):
            group[ranks] = g
        return group[first[bucket]]

    def _traffic(self, stage: PlannedStep) -> np.ndarray:
        """Bytes from every loader host to every receiver."""
        assert stage.loader is not None
        host, group = self._host_of[stage.loader], self._buckets(stage)
        nbytes = stage.plan.tokens * (self._c.sample_bytes / self._c.sample_tokens)
        by_group = np.bincount(
            host * self._fleet.dp + group, weights=nbytes, minlength=self.n_hosts * self._fleet.dp
        )
        by_group = by_group.reshape(self.n_hosts, self._fleet.dp)
        if not self._fleet.constructors:
            return by_group[:, self._fetching_group]
        out = np.zeros((self.n_hosts, len(self._built_until)))
        np.add.at(out.T, self._builder_of, by_group.T)
        return out

    # loaders

    def _loader(self, number: int, event: Any) -> None:
        for command in self._loaders[number].handle(event):
            match command:
                case Read():
                    found, seconds = self._readers[number].read(command)
                case Evaluate():
                    found, seconds = self._readers[number].evaluate(command)  # type: ignore[assignment]
                case _:
                    self._at(self.now + self._c.call_s / 2, partial(self._tell, [command]))
                    continue
            free = self._threads[self._host_of[number]]
            end = max(self.now, heapq.heappop(free)) + seconds
            heapq.heappush(free, end)
            self._at(end, partial(self._loader, number, found))

    # constructors and ranks

    def _come(self, c: int, stage: PlannedStep) -> None:
        """All payload of a step is at a constructor host."""
        commands: list[Any] = []
        for g in np.flatnonzero(self._builder_of == c).tolist():
            self._assemblers[g].handle(stage)
            commands += self._assemblers[g].handle(PayloadReady(stage.plan.step))
        self._build(c, commands)

    def _build(self, c: int, commands: Sequence[Any]) -> None:
        steps: dict[int, list[int]] = {}
        for command in commands:
            if isinstance(command, Build):
                steps.setdefault(command.step, []).append(command.bucket)
        for step, buckets in steps.items():
            tokens = self._tokens(step) * len(buckets) / self._fleet.dp
            self._built_until[c] = max(self.now, self._built_until[c]) + tokens * self._c.build_s
            self._at(float(self._built_until[c]), partial(self._built, c, step, buckets))

    def _tokens(self, step: int) -> float:
        return self.steps[step].nbytes / self._c.sample_bytes * self._c.sample_tokens

    def _built(self, c: int, step: int, buckets: Sequence[int]) -> None:
        commands = [command for b in buckets for command in self._assemblers[b].handle(Built(step))]
        when = self.now
        for command in commands:
            if isinstance(command, Deliver):
                whole = self._tokens(command.step) / self._fleet.dp * self._c.built_bytes
                far = self._is_fetching[command.rank] and self._away[command.rank]
                when += self._c.link_s + (
                    whole / self._fleet.cp / self._c.bandwidth if far else 0.0
                )
                self._has(command.step, 1, when)

    def _built_by_ranks(self, stage: PlannedStep, step: Happened, last: np.ndarray) -> None:
        """Without constructors: every rank that fetches builds its group's microbatches; the others
        hear that there is a step.
        """
        tokens = np.bincount(
            self._buckets(stage), weights=stage.plan.tokens, minlength=self._fleet.dp
        )
        ready = last + tokens[self._fetching_group] * self._c.build_s
        self._at(
            float(ready.max()),
            partial(self._has, stage.plan.step, self._fleet.gpus, float(ready.max())),
        )

    def _has(self, number: int, ranks: int, when: float) -> None:
        step = self.steps[number]
        step.has, step.last = step.has + ranks, max(step.last, when)
        if step.has == self._fleet.gpus:
            self._at(step.last, self._train)

    def _train(self) -> None:
        """Ranks train together: a step begins when all have it and the one before is over."""
        number = self._trained + 1
        step = self.steps.get(number)
        if step is None or step.has < self._fleet.gpus or step.last > self.now:
            return
        over = self._stepped + self._pace_s if number else self.now
        if self.now < over:
            self._at(over, self._train)
            return
        if self._trained >= number:
            return
        step.waited_s = max(0.0, step.last - over)
        self._trained, self._stepped = number, self.now
        taken = [Consumed(rank, number) for rank in range(self._fleet.gpus)]
        by_host: dict[int, list[Any]] = {}
        for g, assembler in enumerate(self._assemblers):
            said = by_host.setdefault(int(self._builder_of[g]), [])
            for rank in assembler.ranks:
                said += assembler.handle(Consumed(rank, number))
        for c, commands in by_host.items():
            self._build(c, commands)
        self._at(self.now + self._c.call_s / 2, partial(self._tell, taken))
        self._at(self.now + self._pace_s, self._train)


def _to_ranks(routed: RoutedPlan, ranks: Sequence[Sequence[int]]) -> RoutedPlan:
    """Route a step without constructors: each of ``ranks[b]`` is sent the plan and the payload that
    the constructor of bucket ``b`` is sent with constructors. Only the model of the paper's
    Figure 18 has this case.
    """

    def to_ranks(part: LoaderPlan) -> LoaderPlan:
        take = [rows for b, rows in zip(part.to, part.take, strict=False) for _ in ranks[b]]
        to = tuple(rank for b in part.to for rank in ranks[b])
        return replace(part, to=to, take=tuple(take))

    placed = {rank: p for b, p in routed.placed.items() for rank in ranks[b]}
    return RoutedPlan({h: to_ranks(part) for h, part in routed.parts.items()}, placed)
