"""The real cores of a job over several loader workers, without processes, threads or a clock.

Planner, router, loaders and readers exchange messages through one queue to and one queue from every
worker. A seed decides which of them runs next. Workers start and stop as sources are scaled.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.cluster.placement import Placement
from overlord.cluster.plan_router import PlanRouter
from overlord.content import Content
from overlord.loader.service import LoaderService
from overlord.messages.control import (
    Attach,
    ConstructorPlan,
    Consumed,
    Cursor,
    DropHeldSamples,
    DropLoader,
    EndOfJob,
    FollowLoader,
    LoaderPlan,
    LoaderStart,
    PlannedStep,
    Refill,
    RestartLoader,
    RestartSource,
    Rollback,
    StreamState,
    TakeOverLoader,
)
from overlord.messages.data import Announce
from overlord.scaling.loader_placement import assign_shards, workers_to_keep
from overlord.setup.prepared_job import PreparedJob, open_loader
from overlord.transport.codec import encode_state

MOST_MOVES = 100_000  # far more than any of these jobs needs
# The samples of a step in the order of its plan: (id, tokens).
Delivered = list[tuple[tuple[Any, ...], list[int]]]


class Reading:
    """A loader worker: loaders, and the work that they have started."""

    def __init__(self, blueprint: PreparedJob):
        self._blueprint = blueprint
        self.loading = LoaderService(self, self._run, keeps=True)
        self.begun: list[Any] = []
        self.inbox: deque[Any] = deque()
        self.news: deque[Announce] = deque()
        self.sent: dict[int, list[list[int]]] = {}  # by step

    def submit(
        self,
        name: str,
        work: Any,
        done: Any,
        *,
        size: int = 1,
        urgent: bool = False,
        waits: Any = None,
    ) -> None:
        self.begun.append((work, done))

    def close(self) -> None:
        pass

    def open(self, opening: LoaderStart) -> None:
        loader, reader, _ = open_loader(
            self._blueprint.reader_spec(opening.source), opening, self._blueprint.handles
        )
        self.loading.open(loader, reader)

    def work(self, rng: random.Random) -> None:
        work, done = self.begun.pop(rng.randrange(len(self.begun)))
        try:
            outcome, error = work(), None
        except Exception as fault:
            outcome, error = None, fault
        done(outcome, error)
        self.loading.check()

    def take(self, message: Any) -> None:
        match message:
            case LoaderPlan():
                self._part(message)
            case Rollback():
                self._run(self.loading.rollback(message, self.open))
            case LoaderStart():
                self.open(message)
            case FollowLoader(start=opening):
                self._run(self.loading.attach_standby(opening, self.open))
            case TakeOverLoader(step=step, start=opening):
                self._run(self.loading.promote(opening, self.open, step))
            case DropLoader(loader=number):
                self.loading.close(number)
            case DropHeldSamples(loaders=loaders):
                self.loading.forget(loaders)
            case Refill():
                self._run([message])
        self.loading.check()

    def _run(self, commands: Sequence[Any]) -> None:
        queue = deque(commands)
        while queue:
            command = queue.popleft()
            if not isinstance(command, Announce):
                queue.extend(self.loading.execute(command))
            elif not self.loading.slots[command.loader].standby:
                self.news.append(command)

    def _part(self, part: LoaderPlan) -> None:
        self.loading.acked(part.acked)
        pops, commands = self.loading.pop_standbys(
            part.step, dict(zip(part.loaders.tolist(), part.pops.tolist(), strict=True))
        )
        self._run(commands)
        if not (pops or part.to or part.kept is not None):
            return
        pieces, commands = self.loading.pop(part.step, pops, part.kept)
        tokens = Content.concat(pieces).tokens
        rows = [tokens[i].tolist() for i in range(len(tokens))]
        assert part.step not in self.sent, "carried out twice"
        self.sent[part.step] = (
            [rows[i] for i in part.take[0].tolist()] if part.take else rows if part.to else []
        )
        self._run(commands)


class Fleet:
    """A job whose loaders are all on one worker at first.

    ``changes`` has (moves, source, workers): after these moves, read the source in as many workers.
    """

    def __init__(
        self,
        blueprint: PreparedJob,
        seed: int,
        changes: Sequence[tuple[int, int, int]] = (),
        state: StreamState | None = None,
    ):
        self.blueprint, self.planner = blueprint, blueprint.planner(state)
        self._random, self._changes = random.Random(seed), deque(sorted(changes))
        n = len(blueprint.job.sources)
        self.shares = [blueprint.loaders_of(i) for i in range(n)]
        self._first = [sum(self.shares[:i]) for i in range(n)]
        self._buckets = len(list(blueprint.job.place.buckets("DP")))
        self.placement = Placement(self.shares, [0] * sum(self.shares), [0] * self._buckets)
        self.cutter = PlanRouter(self.placement)
        self.hosts = {0: Reading(blueprint)}
        self._change: tuple[int, dict[int, int]] | None = (
            None  # a source that is on its way, and where its loaders go
        )
        self._moves: dict[int, int] = {}
        self.placed: dict[int, ConstructorPlan] = {}
        self.states: dict[int, StreamState] = {}
        self.finish: EndOfJob | None = None
        # Workers of a source before and after, for each change.
        self.degrees: Counter[tuple[int, int]] = Counter()
        cursors = [Cursor(*c) for c in self.planner.state().cursors.tolist()]
        for i in range(n):
            for opening in blueprint.loader_starts(i, cursors[i]):
                self.hosts[0].open(opening)

    def run(self, last: int | None = None) -> Fleet:
        """Run to the end of the job, or until a step is planned."""
        ranks, moves = range(self.blueprint.job.place.world_size), 0
        for rank in ranks:
            self._do(self.planner.handle(Attach(rank)))
        while self.finish is None and not (last is not None and last in self.placed):
            moves += 1
            assert moves < MOST_MOVES, f"no end: {self.planner.waiting_for()}"
            self._change_something(moves)
            step = self.planner.next_step - 1
            if step >= 0 and self.planner.taken != step and self._random.random() < 0.3:
                for rank in ranks:
                    self._do(self.planner.handle(Consumed(rank, step)))
                continue
            self._move()
            self.planner.check()
        while any(host.inbox for host in self.hosts.values()):
            self._move(parts_only=True)
        return self

    def _move(self, parts_only: bool = False) -> None:
        ways: list[Any] = [(host.inbox, host.take) for host in self.hosts.values() if host.inbox]
        if not parts_only:
            ways += [
                (host.news, lambda m: self._do(self.planner.handle(m)))
                for host in self.hosts.values()
                if host.news
            ]
        ways += [(host.begun, host) for host in self.hosts.values() if host.begun]
        assert ways or self._change or self._unconsumed(), (
            f"nothing moves any more: {self.planner.waiting_for()}"
        )
        if not ways:
            return
        queue, act = self._random.choice(ways)
        if isinstance(act, Reading):
            act.work(self._random)
        else:
            act(queue.popleft())

    def _unconsumed(self) -> bool:
        return self.planner.taken != self.planner.next_step - 1

    # resharding

    def workers_of(self, source: int) -> list[int]:
        return sorted({self.placement.worker(k) for k in self._numbers(source)})

    def _numbers(self, source: int) -> range:
        return range(self._first[source], self._first[source] + self.shares[source])

    def _change_something(self, moves: int) -> None:
        if self._change is not None:
            if self._random.random() < 0.1:
                self._switch()
        elif self._changes and self._changes[0][0] <= moves:
            _, source, n = self._changes.popleft()
            self._spread(source % len(self.shares), n)

    def _spread(self, source: int, n: int) -> None:
        """Scale a source as ``cluster/rebalance.py`` does, with workers that start at once."""
        now, n = self.workers_of(source), min(n, self.shares[source])
        others = Counter(
            self.placement.worker(k)
            for k in range(sum(self.shares))
            if k not in self._numbers(source)
        )
        hosts = workers_to_keep(now, n, others, lambda h: h == 0)
        for _ in range(n - len(now)):
            h = len(self.hosts)
            self.hosts[h] = Reading(self.blueprint)
            self.hosts[h].inbox.append(Rollback(0, self.planner.next_step - 1))
            hosts.append(h)
        where = [self.placement.worker(k) for k in self._numbers(source)]
        to = assign_shards(where, hosts, others)
        moves = {
            k: h for k, was, h in zip(self._numbers(source), where, to, strict=True) if h != was
        }
        self.degrees[len(now), len(set(to))] += 1
        self._change = source, moves
        if (
            self._random.random() < 0.7 and not self.planner.holds_over
        ):  # a worker that follows first; else they are opened there
            self.placement.follow(moves)
            for k, h in moves.items():
                cursor, generation, refill = self.planner.loader_position(k)
                self.hosts[h].inbox += [FollowLoader(self._opening(k, cursor, generation)), refill]

    def _switch(self) -> None:
        assert self._change is not None
        (source, self._moves), self._change = self._change, None
        self.placement.follow({})
        self._do(self.planner.handle(RestartSource(source)))

    def _opening(self, loader: int, cursor: Cursor, generation: int) -> LoaderStart:
        source = next(i for i in range(len(self.shares)) if loader in self._numbers(i))
        return replace(
            self.blueprint.loader_starts(source, cursor)[loader - self._first[source]],
            generation=generation,
        )

    def _open(self, command: RestartLoader) -> None:
        loader, was = command.loader, self.placement.worker(command.loader)
        host = self._moves.pop(loader, was)
        if host != was:
            self.hosts[was].inbox.append(DropLoader(loader))
            self.placement.move(loader, host)
        opening = self._opening(loader, command.cursor, command.generation)
        self.hosts[host].inbox.append(
            opening if self.planner.holds_over else TakeOverLoader(command.step, opening)
        )

    # commands of the planner

    def _do(self, commands: Sequence[Any]) -> None:
        for command in commands:
            match command:
                case Refill(loader=loader):
                    for h in {
                        self.placement.worker(loader),
                        self.placement.standby_of.get(loader),
                    } - {None}:
                        self.hosts[h].inbox.append(command)  # type: ignore[index]
                case PlannedStep():
                    self._stage(command)
                case EndOfJob():
                    self.finish = command
                case DropHeldSamples(loaders=loaders):
                    self.cutter.forget(loaders)
                    for host in self.hosts.values():
                        host.inbox.append(command)
                case RestartLoader():
                    self._open(command)

    def _stage(self, stage: PlannedStep) -> None:
        assert isinstance(stage.after, StreamState)
        self.states[stage.plan.step] = stage.after
        acked = -1 if self.planner.taken is None else self.planner.taken
        cuts = self.cutter.route(
            stage, encode_state(stage.after), np.ones(self._buckets, bool), acked
        )
        self.placed[stage.plan.step] = cuts.constructor_plans[0]
        for h, part in cuts.loader_plans.items():
            self.hosts[h].inbox.append(part)

    # results

    def delivered(self) -> list[Delivered]:
        """Return what the constructor would build for every step, from what workers really sent."""
        found = []
        for step, placed in sorted(self.placed.items()):
            payload = [row for h in placed.origins for row in self.hosts[h].sent[step]]
            plan, doc = placed.stage.plan, placed.stage.doc.tolist()
            assert sorted(doc) == list(range(len(payload))), (
                "every row that was sent is of one sample, and each has one"
            )
            found.append([(tuple(plan.sample_id(i)), payload[doc[i]]) for i in range(len(plan))])
        return found

    @property
    def end(self) -> tuple[int, str]:
        assert self.finish is not None
        return self.finish.step, repr(self.finish.error)

    @property
    def counted(self) -> Mapping[str, Any]:
        return {name: c.tolist() for name, c in self.planner.ledger.counts().items()}
