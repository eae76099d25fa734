"""Simulation of a cluster of any size on a virtual clock.

Planner, loaders and assemblers are those of a real job. Reading, sending and building take virtual
time, computed from measured constants. The planner runs, and its time is measured, not modelled.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from overlord.cluster.placement import Placement
from overlord.cluster.plan_router import PlanRouter, RoutedPlan
from overlord.constructor.assembler import Assembler
from overlord.dryrun.arrivals import arrivals
from overlord.dryrun.machines import ClusterShape, Constants
from overlord.dryrun.stand_ins import Probe, StandInReader
from overlord.errors import DataStall
from overlord.loader.loader import Loader
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
from overlord.messages.data import Build, Built, Deliver, Evaluate, PayloadReady, Pop, Read
from overlord.plan.module_ranks import first_ranks
from overlord.scaling.loader_placement import place_loaders
from overlord.setup.partition import loads_of
from overlord.setup.prepared_job import PreparedJob

THREADS = 8  # threads of a loader worker that read concurrently
# Target utilisation of a loader, or of the threads of a worker, at the trainers' speed. The rest is
# a reserve for steps that cost more.
BUSY = 0.7
MAX_EVENTS = 5_000_000
LEAST_WAIT = 0.01  # share of the step time; waits shorter than this have no reported reason


@dataclass(slots=True)
class StepTimes:
    """The times of one step in virtual seconds; ``plan_s`` and ``route_s`` are real seconds."""

    began: float = 0.0  # when the planner began to plan the step
    plan_s: float = 0.0
    route_s: float = 0.0
    nbytes: int = 0  # bytes of payload
    has: int = 0  # number of ranks that have received the step
    last: float = 0.0  # when the last rank received the step
    waited_s: float = 0.0  # seconds that trainers waited for the step

    @property
    def latency_s(self) -> float:
        """Seconds from the start of planning until the last rank has received the step."""
        return self.last - self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunResult:
    """The result of a dry run: the times of its steps, without the first ones, and its load."""

    steps: tuple[StepTimes, ...]
    loader_hosts: int
    seconds: float  # seconds of virtual time, over all steps
    planner_s: float = 0.0  # time per step in which the planner receives, plans, routes and sends
    source: str = ""  # the source whose loaders are busiest
    source_s: float = 0.0  # time per step in which each of its loaders is busy
    source_loaders: int = 1

    def wait_reason(self, pace_s: float) -> str:
        """Describe what delays trainers that compute ``pace_s`` per step.

        The text is empty if they wait less than LEAST_WAIT of a step.
        """
        if self.most("waited_s") < LEAST_WAIT * pace_s:
            return ""
        if self.source_s > max(pace_s, self.planner_s):
            n = f"{self.source_loaders} loader{'s' * (self.source_loaders != 1)}"
            why = (
                f"each of its {n} needs {self.source_s:.2f} s per step, and it has no chunks "
                "for more loaders (shuffle_chunks)"
            )
            return f"source {self.source!r}: {why}"
        if self.planner_s > pace_s:
            return f"the planner, which needs {self.planner_s:.2f} s per step"
        return "uneven reading: no part needs more than the step time on average"

    def median(self, what: str) -> float:
        """Return the median of attribute ``what`` of ``StepTimes`` over the steps."""
        return float(np.median([getattr(step, what) for step in self.steps]))

    def most(self, what: str) -> float:
        """Return the maximum of attribute ``what`` of ``StepTimes`` over the steps."""
        return float(max(getattr(step, what) for step in self.steps))


def loaders_of(
    prepared: PreparedJob, probes: Sequence[Probe], batch: int, pace_s: float
) -> dict[str, int]:
    """Return the number of loaders of each source, such that each is at most ``BUSY`` utilised.

    A source cannot have more loaders than chunks that it reads at a time, so its loaders may be
    busier.
    """
    loaders, job = {}, prepared.job
    for load, probe, order in zip(loads_of(prepared), probes, prepared.orders, strict=True):
        most = min(job.shuffle_chunks if order.shuffle else 1, order.n_chunks)
        loaders[load.name] = max(
            1, min(most, math.ceil(load.share * batch * probe.row_s / pace_s / BUSY))
        )
    return loaders


class DryRun:
    """One run of a cluster on a virtual clock. ``pace_s``: seconds that trainers compute per step.

    ``clock`` times the planner. With the default clock planning takes no time, and runs are exactly
    reproducible.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        probes: Sequence[Probe],
        fleet: ClusterShape,
        constants: Constants,
        *,
        pace_s: float = 1.0,
        clock: Callable[[], float] = lambda: 0.0,
    ):
        wanted = loaders_of(prepared, probes, fleet.batch, pace_s)
        hosting = place_loaders(
            loads_of(prepared),
            [wanted[name] for name in prepared.job.names],
            cores=fleet.loader_hosts,
            sources_per_host=fleet.sources_per_host,
            named=wanted,
        )
        self._made = made = prepared.with_loaders(hosting.loaders, fleet.read_ahead)
        self._fleet, self._c, self._pace_s, self._clock = fleet, constants, pace_s, clock
        by_loader = [
            fleet.batch * load.share * probe.row_s / n
            for load, probe, n in zip(loads_of(prepared), probes, hosting.loaders, strict=True)
        ]
        self._slowest, self._slowest_s = max(enumerate(by_loader), key=lambda found: found[1])
        self._slowest_loaders, self._planner_s = hosting.loaders[self._slowest], 0.0
        self.planner = made.planner()
        self._loaders: list[Loader] = []
        self._readers: list[StandInReader] = []
        for i, probe in enumerate(probes):
            for o in made.loader_starts(i, Cursor()):
                order, epochs = made.orders[i], made.reader_spec(i).epochs
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
        self._sent = np.zeros(self.n_hosts)  # when each loader worker has sent all its payload
        self.steps: dict[int, StepTimes] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self.now, self._planner_free = 0, 0.0, 0.0
        self._trained, self._stepped = -1, 0.0  # the last step that all ranks took, and when
        self._wanted = 0
        self._ended = False

    def _receivers(self) -> None:
        """Create the receivers of payload: constructor workers, or every fetching rank."""
        fleet, place = self._fleet, self._made.job.place
        self._groups = [list(ranks) for ranks in place.buckets("DP")]
        n = fleet.constructor_hosts
        self._builder_of = np.arange(fleet.dp) * n // fleet.dp  # of every group
        self._built_until = np.zeros(n)
        self._served = np.ones(fleet.dp, bool)
        # The whole prefetch window is built: otherwise the latency of a step would include its
        # wait for the previous step to be taken.
        self._assemblers = (
            [Assembler(b, ranks, fleet.prefetch) for b, ranks in enumerate(self._groups)]
            if fleet.constructors
            else []
        )
        of = self._builder_of if fleet.constructors else np.arange(fleet.dp)
        self._router = PlanRouter(
            Placement([len(self._host_of)], self._host_of.tolist(), of.tolist())
        )
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
        # Ranks on another node than their constructor.
        self._away = np.arange(fleet.gpus) // fleet.gpus_per_node != first[group]
        nodes = n if fleet.constructors else fleet.nodes
        self._free = np.zeros(nodes)  # when each node has received everything
        self._node_of = (
            np.arange(n) if fleet.constructors else self._fetching // fleet.gpus_per_node
        )

    # time

    def _at(self, when: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, call))

    def run(
        self, steps: int, warm: int, on_step: Callable[[int], None] = lambda step: None
    ) -> DryRunResult:
        """Run until ``steps`` are trained; return the times of all steps but the first ``warm``.

        ``on_step`` is called with each trained step. Raise ``DataStall`` if no event is left.
        """
        self._wanted = steps
        for assembler in self._assemblers:
            for rank in assembler.ranks:
                assembler.handle(Attach(rank))
        self._handle([Attach(rank) for rank in range(self._fleet.gpus)])
        reported = -1
        for _ in range(MAX_EVENTS):
            if self._trained + 1 >= steps or self._ended:
                break
            if not self._events:
                raise DataStall(
                    f"an event in the simulated cluster: {self.planner.waiting_for()}",
                    self.now,
                    self._trained + 1,
                )
            self.now, _, call = heapq.heappop(self._events)
            call()
            if self._trained > reported:
                reported = self._trained
                on_step(reported)
        counted = [self.steps[s] for s in sorted(self.steps) if warm <= s <= self._trained] or list(
            self.steps.values()
        )
        if not counted:
            raise DataStall("a step of the simulated cluster", self.now, 0)
        return DryRunResult(
            steps=tuple(counted),
            loader_hosts=self.n_hosts,
            seconds=self.now,
            planner_s=self._planner_s / len(self.steps),
            source=self._made.job.names[self._slowest],
            source_s=self._slowest_s,
            source_loaders=self._slowest_loaders,
        )

    # planner

    def _handle(self, events: Sequence[Any]) -> None:
        """Pass events to the planner, which is busy in virtual time as long as the call took."""
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
        routed = self._router.route(
            stage, EncodedState(stage.plan.step + 1, np.zeros(0, np.uint8)), self._served
        )
        if not self._fleet.constructors:
            routed = _to_ranks(routed, self._groups)
        route_s = self._clock() - start
        send_s = self._c.link_s * (len(routed.loader_plans) + len(routed.constructor_plans))
        self._planner_free += route_s
        self._planner_s += route_s + send_s
        traffic = self._traffic(stage)
        step = self.steps[stage.plan.step] = StepTimes(began, plan_s, route_s, int(traffic.sum()))
        # Loader workers receive their plans one after another.
        received = (
            self._planner_free
            + self._c.call_s / 2
            + self._c.link_s * np.arange(1, self.n_hosts + 1)
        )
        for loader in np.flatnonzero(stage.pops).tolist():
            pop = Pop(stage.plan.step, int(stage.pops[loader]))
            self._at(float(received[self._host_of[loader]]), partial(self._loader, loader, pop))
        self._planner_free += send_s
        start_at = np.maximum(self._sent, received)
        last, self._sent, self._free = arrivals(
            start_at,
            traffic,
            self._node_of,
            free=self._free,
            link_s=self._c.link_s,
            bandwidth=self._c.bandwidth,
        )
        # Building starts only after the receiver has its plan.
        last = np.maximum(last, self._planner_free + self._c.call_s / 2)
        if self._fleet.constructors:
            for c in range(len(last)):
                self._at(float(last[c]), partial(self._payload_arrived, c, stage))
        else:
            self._built_by_ranks(stage, step, last)

    def _copies(self, stage: PlannedStep) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples that travel, as rows of the plan, and their data-parallel groups.

        A sample that several groups share travels to each.
        """
        held, on = stage.plan.pieces(), stage.plan.main.on
        if held.axis == "DP" and on is None:
            group = held.bucket.astype(np.int64)
        else:
            first = first_ranks(on or self._made.job.place, held.axis)
            of_rank = np.empty(self._fleet.gpus, np.int64)
            for g, ranks in enumerate(self._groups):
                of_rank[ranks] = g
            group = of_rank[first[held.bucket]]
        if stage.plan.tasks is None:
            return held.sample, group
        pairs = np.unique(held.sample * self._fleet.dp + group)
        return pairs // self._fleet.dp, pairs % self._fleet.dp

    def _traffic(self, stage: PlannedStep) -> np.ndarray:
        """Return the payload bytes of a step by [loader worker, receiver]."""
        assert stage.loader is not None
        sample, group = self._copies(stage)
        host = self._host_of[stage.loader[sample]]
        nbytes = stage.plan.tokens[sample] * (self._c.sample_bytes / self._c.sample_tokens)
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
                    self._at(self.now + self._c.call_s / 2, partial(self._handle, [command]))
                    continue
            free = self._threads[self._host_of[number]]
            end = max(self.now, heapq.heappop(free)) + seconds
            heapq.heappush(free, end)
            self._at(end, partial(self._loader, number, found))

    # constructors and ranks

    def _payload_arrived(self, c: int, stage: PlannedStep) -> None:
        """Start to build a step whose payload has arrived at constructor worker ``c``."""
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

    def _built_by_ranks(self, stage: PlannedStep, step: StepTimes, last: np.ndarray) -> None:
        """Deliver a step of a cluster without constructors, once all fetching ranks have built it.

        The other ranks only receive the description of the step.
        """
        sample, group = self._copies(stage)
        tokens = np.bincount(group, weights=stage.plan.tokens[sample], minlength=self._fleet.dp)
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
        """Start training on the next step, if all ranks have it and the previous step has ended."""
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
            pending = by_host.setdefault(int(self._builder_of[g]), [])
            for rank in assembler.ranks:
                pending += assembler.handle(Consumed(rank, number))
        for c, commands in by_host.items():
            self._build(c, commands)
        self._at(self.now + self._c.call_s / 2, partial(self._handle, taken))
        self._at(self.now + self._pace_s, self._train)


def _to_ranks(routed: RoutedPlan, ranks: Sequence[Sequence[int]]) -> RoutedPlan:
    """Return the routes of a step in a cluster without constructors.

    Each of ``ranks[b]`` receives the plan and the payload of the constructor of bucket ``b``. Only
    the model of the paper's Figure 18 has this case.
    """

    def to_ranks(plan: LoaderPlan) -> LoaderPlan:
        take = [rows for b, rows in zip(plan.to, plan.take, strict=False) for _ in ranks[b]]
        to = tuple(rank for b in plan.to for rank in ranks[b])
        return replace(plan, to=to, take=tuple(take))

    placed = {rank: p for b, p in routed.constructor_plans.items() for rank in ranks[b]}
    return RoutedPlan({h: to_ranks(plan) for h, plan in routed.loader_plans.items()}, placed)
