"""Steps of many ranks, executed position by position on one device, for one layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from gpu.record import Record, Row
from gpu.rings import Bench, by_reference
from gpu.timing import Work, all_seconds
from hybrid import baselines
from hybrid.lengths import LINUX, draw
from overlord.plan.tasks import TaskTable
from overlord.planning.balance.hybrid import HybridRules, schedule
from overlord.planning.cost.ring import RingCosts

K = 1024
TARGET = 1.03  # slowest over mean rank
FEW = 4  # positions of a ring that run if not all of them do
SHORT_S = 4.0  # of a step that is executed twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step: ``slots`` microbatches of ``capacity`` tokens for every rank."""

    context: int
    ranks: int
    capacity: int = 8 * K
    slots: int = 4
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.ranks * self.capacity * self.slots


CASES = tuple(Case(context=c * K, ranks=n) for c, n in ((64, 8), (128, 16), (256, 32), (512, 64)))
SMALL = (Case(context=128, ranks=4, capacity=32, slots=3),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of dividing a step, and the positions of its tasks that are executed."""

    name: str
    table: TaskTable
    documents: list[np.ndarray]  # by task
    members: list[np.ndarray]  # positions that run, by task

    @staticmethod
    def of(name: str, table: TaskTable, task: np.ndarray, lengths: np.ndarray, most: int) -> Way:
        sizes = table.sizes().tolist()
        documents = [lengths[task == t] for t in range(len(table))]
        return Way(
            name=name, table=table, documents=documents, members=[_spread(d, most) for d in sizes]
        )

    def estimates(self, costs: RingCosts) -> np.ndarray:
        """Return the seconds of a member of every task, by the fitted cost."""
        sums = [(n.sum(), (n.astype(np.float64) ** 2).sum()) for n in self.documents]
        tokens, squares = np.array(sums, np.float64).reshape(-1, 2).T
        return costs.compute(tokens, squares, self.table.sizes())

    def expected(self, costs: RingCosts) -> float:
        return float(self.estimates(costs) @ np.array([len(m) for m in self.members]))

    def works(self, bench: Bench) -> list[Work | None]:
        return [
            bench.whole_layer(documents, int(d), int(p)) if len(documents) else None
            for documents, d, at in zip(
                self.documents, self.table.sizes(), self.members, strict=True
            )
            for p in at
        ]

    def by_member(self, seconds: np.ndarray) -> np.ndarray:
        """Return the seconds of all members, task by task.

        Members that did not run have the mean of those of their task that did.
        """
        found, at = [], 0
        for d, members in zip(self.table.sizes().tolist(), self.members, strict=True):
            mine = seconds[at : at + len(members)]
            at += len(members)
            part = np.full(d, mine.mean())
            part[members] = mine
            found.append(part)
        return np.concatenate(found)


def _spread(d: int, most: int) -> np.ndarray:
    """Return at most ``most`` positions of a ring, the first and the last among them."""
    return np.unique(np.linspace(0, d - 1, min(d, most)).round().astype(np.int64))


def with_waits(table: TaskTable, by_member: np.ndarray, ranks: int) -> float:
    """Return the seconds of a step whose rings start when their last member is free."""
    end, ptr = np.zeros(ranks), table.task_ptr.tolist()
    for t in np.lexsort((table.order, table.index)).tolist():
        mine = table.task_rank[ptr[t] : ptr[t + 1]]
        end[mine] = end[mine].max() + by_member[ptr[t] : ptr[t + 1]].max()
    return float(end.max())


def ways_of(case: Case, costs: RingCosts, lengths: np.ndarray) -> list[Way]:
    """Return the hybrid plan, all of whose members run, and static context parallelism."""
    rules = HybridRules(ranks=case.ranks, capacity=case.capacity)
    plan = schedule(lengths, costs, rules)
    plan.tasks.check(rules.task_rules(), task=plan.task, tokens=lengths)
    static = baselines.static(lengths, case.ranks, case.capacity, case.context)
    return [
        Way.of("hdp", plan.tasks, plan.task, lengths, case.ranks),
        Way.of("static", *static, lengths, FEW),
    ]


def measure(
    bench: Bench, case: Case, costs: RingCosts, lengths: np.ndarray, ways: list[Way], passes: int
) -> list[Row]:
    """Execute the members of all ways in one random order, and whole samples by the fit."""
    with by_reference():
        works = [way.works(bench) for way in ways]
        every = [work for way in works for work in way]
        found = all_seconds(
            [work or _nothing for work in every], bench.device, passes=passes, seed=case.seed
        )
    found[:, [work is None for work in every]] = 0.0
    cut = np.cumsum([0, *map(len, works)])
    return [
        _row(case, way, costs, found[:, a:b], len(lengths))
        for way, a, b in zip(ways, cut, cut[1:], strict=False)
    ] + [_whole(case, costs, lengths)]


def _nothing() -> None:
    """A position without tokens."""


def _row(case: Case, way: Way, costs: RingCosts, seconds: np.ndarray, documents: int) -> Row:
    table = way.table
    by = way.by_member(np.median(seconds, axis=0))
    ranks = np.bincount(table.task_rank, weights=by, minlength=case.ranks)
    told = np.repeat(way.estimates(costs), table.sizes())
    fitted = np.bincount(table.task_rank, weights=told, minlength=case.ranks)
    sums = seconds.sum(axis=1)
    return {
        **asdict(case),
        "way": way.name,
        "documents": documents,
        "tasks": len(table),
        "largest": int(table.sizes().max()),
        "members": len(table.task_rank),
        "executed": int(sum(map(len, way.members))),
        "passes": len(seconds),
        "slowest_s": float(ranks.max()),
        "mean_s": float(ranks.mean()),
        "over_mean": float(ranks.max() / ranks.mean()),
        "with_waits_s": with_waits(table, by, case.ranks),
        "fit_over_mean": float(fitted.max() / fitted.mean()),
        "measured_over_fit": float(by.sum() / told.sum()),
        "drift": float((sums.max() - sums.min()) / sums.mean()),
        "ranks_s": ranks.tolist(),
    }


def _whole(case: Case, costs: RingCosts, lengths: np.ndarray) -> Row:
    load = baselines.whole(lengths, case.ranks, costs)
    return {
        **asdict(case),
        "way": "whole samples",
        "documents": len(lengths),
        "tasks": len(lengths),
        "largest": 1,
        "members": len(lengths),
        "executed": 0,
        "passes": 0,
        "slowest_s": float(load.max()),
        "mean_s": float(load.mean()),
        "over_mean": float(load.max() / load.mean()),
        "ranks_s": load.tolist(),
    }


def steps(
    record: Record,
    bench: Bench,
    cases: tuple[Case, ...],
    costs: RingCosts,
    path: Path = LINUX,
    until: float = 0.75,
) -> None:
    """Execute every case once, then other steps of the same kind while there is time."""
    for seed in range(3):
        for case in (replace(c, seed=seed) for c in cases):
            name = f"c, {case.context} tokens on {case.ranks} ranks, step {seed}"
            lengths = draw("linux", case.tokens, case.context, seed, path)
            ways = record.attempt(f"{name}, plan", ways_of, case, costs, lengths)
            if ways is None:
                continue
            expected = _expected(ways, costs)
            if expected > record.left(until):
                if seed:
                    continue  # the first step of this case has run, or is named as not run
                few = [_spread(int(d), FEW) for d in ways[0].table.sizes()]
                ways[0] = replace(ways[0], members=few)
                expected = _expected(ways, costs)
            passes = 2 if expected < SHORT_S and 2 * expected < record.left(until) else 1
            found = record.attempt(
                name,
                measure,
                bench,
                case,
                costs,
                lengths,
                ways,
                passes,
                expected=expected * passes,
                until=until,
            )
            for row in found or ():
                record.add("c", row)


def _expected(ways: list[Way], costs: RingCosts) -> float:
    return 1.15 * sum(way.expected(costs) for way in ways) + 0.5
