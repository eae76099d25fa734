"""Steps of many ranks, executed position by position on one device, for one layer.

Plans use costs that are fitted to tasks of another step. A piece is timed while the device is held,
after a warm-up, and counts with the median of some passes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import overlord as ov
from gpu.record import Record, Row
from gpu.rings import Bench, by_reference
from gpu.timing import Work, all_seconds, clock_log, host_seconds
from hybrid import baselines
from hybrid.lengths import LINUX, draw
from overlord.plan.tasks import TaskTable
from overlord.planning.balance.hybrid import HybridRules, schedule
from overlord.planning.cost.ring import RingCosts

K = 1024
TARGET = 1.03  # slowest over mean rank
FEW = 4  # positions of a ring that run if not all of them do
LONG_S = 0.1  # of a piece that needs no warm-up
PASSES, CASE_S = 3, 80.0  # of a case: passes, and most seconds
OTHER = 100  # seed of the step that costs are fitted to, beside that of the case


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

    @property
    def name(self) -> str:
        return f"{self.context} tokens on {self.ranks} ranks, step {self.seed}"


def _grid(pairs: tuple[tuple[int, int], ...], seed: int) -> tuple[Case, ...]:
    """Return cases by context (in thousands) and ranks, with a capacity that holds the context."""
    return tuple(
        Case(
            context=context * K,
            ranks=ranks,
            capacity=max(8, context // ranks) * K,
            slots=4 if context <= 8 * ranks else 2,
            seed=seed,
        )
        for context, ranks in pairs
    )


# By importance. Steps 0 have few long documents, steps 3 have some of at least half of the context.
CASES = (
    *_grid(((64, 8), (128, 16), (256, 32), (512, 64)), 0),
    *_grid(((512, 32), (512, 16), (512, 8)), 3),
    *_grid(((64, 16), (128, 16), (256, 32), (512, 64)), 3),
    *_grid(((64, 64), (128, 8), (256, 8), (64, 32)), 0),
)
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

    def of_members(self, costs: RingCosts) -> np.ndarray:
        """Return the expected seconds of every position that runs."""
        return np.repeat(self.estimates(costs), [len(m) for m in self.members])

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


def hybrid(case: Case, costs: RingCosts, lengths: np.ndarray, most: int) -> Way:
    """Return the hybrid plan; ``most`` positions of a ring run."""
    rules = HybridRules(ranks=case.ranks, capacity=case.capacity)
    plan = schedule(lengths, costs, rules)
    plan.tasks.check(rules.task_rules(), task=plan.task, tokens=lengths)
    return Way.of("hdp", plan.tasks, plan.task, lengths, most)


def ways_of(case: Case, costs: RingCosts, lengths: np.ndarray) -> list[Way]:
    """Return the hybrid plan, all of whose members run, and static context parallelism."""
    table, task = baselines.static(lengths, case.ranks, case.capacity, case.context)
    return [hybrid(case, costs, lengths, case.ranks), Way.of("static", table, task, lengths, FEW)]


def executed(
    bench: Bench, ways: list[Way], costs: RingCosts, passes: int, seed: int
) -> list[np.ndarray]:
    """Return [passes, positions] seconds of all ways; each pass has one random order of all."""
    with by_reference():
        works = [work for way in ways for work in way.works(bench)]
        told = np.concatenate([way.of_members(costs) for way in ways])
        given = [work or _nothing for work in works]
        host_s = host_seconds(given, bench.device, told < LONG_S)
        found = all_seconds(given, bench.device, passes=passes, seed=seed, host_s=host_s)
    found[:, [work is None for work in works]] = 0.0
    cut = np.cumsum([len(way.of_members(costs)) for way in ways])[:-1]
    return np.split(found, cut, axis=1)


def measure(
    bench: Bench, case: Case, costs: RingCosts, lengths: np.ndarray, ways: list[Way], passes: int
) -> list[Row]:
    """Execute the members of all ways, and compute whole samples by the fit."""
    with clock_log(bench.device) as clocks:
        found = executed(bench, ways, costs, passes, case.seed)
    running = {"clock_mhz": [min(clocks), float(np.median(clocks)), max(clocks)]} if clocks else {}
    return [
        {**_row(case, way, costs, seconds, len(lengths)), **running}
        for way, seconds in zip(ways, found, strict=True)
    ] + [_whole(case, costs, lengths)]


def _nothing() -> None:
    """A position without tokens."""


def _row(case: Case, way: Way, costs: RingCosts, seconds: np.ndarray, documents: int) -> Row:
    table = way.table
    by = way.by_member(np.median(seconds, axis=0))
    told = np.repeat(way.estimates(costs), table.sizes())
    ranks, fitted = (_by_rank(case, table, x) for x in (by, told))
    sums = seconds.sum(axis=1)
    single = [_by_rank(case, table, way.by_member(one)) for one in seconds]
    ratio = float(by.sum() / told.sum())
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
        "single_passes": [float(one.max() / one.mean()) for one in single],
        "with_waits_s": with_waits(table, by, case.ranks),
        "fit_over_mean": float(fitted.max() / fitted.mean()),
        "measured_over_fit": ratio,
        "misfit": float(np.abs(by - ratio * told).sum() / by.sum()),
        "drift": float((sums.max() - sums.min()) / sums.mean()),
        "ranks_s": ranks.tolist(),
    }


def _by_rank(case: Case, table: TaskTable, by_member: np.ndarray) -> np.ndarray:
    return np.bincount(table.task_rank, weights=by_member, minlength=case.ranks)


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
    until: float = 0.97,
) -> None:
    """Execute the cases in their order while there is time."""
    fitted: dict[int, RingCosts] = {}  # by capacity
    for case in cases:
        if case.capacity not in fitted:
            fitted[case.capacity] = calibrated(record, bench, case, costs, path, until)
        known, name = fitted[case.capacity], f"c, {case.name}"
        lengths = draw("linux", case.tokens, case.context, case.seed, path)
        ways = record.attempt(f"{name}, plan", ways_of, case, known, lengths)
        if ways is None:
            continue
        time_s = min(CASE_S, record.left(until))
        if expected_s(ways, known, 1) > time_s:
            few = [_spread(int(d), FEW) for d in ways[0].table.sizes()]
            ways[0] = replace(ways[0], members=few)
        passes = max(
            (n for n in range(1, PASSES + 1) if expected_s(ways, known, n) <= time_s), default=1
        )
        found = record.attempt(
            name,
            measure,
            bench,
            case,
            known,
            lengths,
            ways,
            passes,
            expected=expected_s(ways, known, passes),
            until=until,
        )
        for row in found or ():
            record.add("c", row)


def expected_s(ways: list[Way], costs: RingCosts, passes: int) -> float:
    """Return the expected seconds to execute the ways, with their warm-up."""
    told = np.concatenate([way.of_members(costs) for way in ways])
    return 1.15 * float(passes * told.sum() + told[told < LONG_S].sum()) + 0.5


def calibrated(
    record: Record, bench: Bench, case: Case, costs: RingCosts, path: Path, until: float
) -> RingCosts:
    """Return costs fitted to part b and to the tasks of another step; the given ones if it fails.

    Tasks of steps hold many documents of all lengths, which part b does not.
    """
    other = replace(case, seed=case.seed + OTHER)
    lengths = draw("linux", other.tokens, other.context, other.seed, path)
    way = record.attempt(f"c, fit to {other.name}, plan", hybrid, other, costs, lengths, FEW)
    if way is None:
        return costs
    expected = expected_s([way], costs, 1)
    found = record.attempt(
        f"c, fit to {other.name}",
        _calibrated,
        record,
        bench,
        other,
        costs,
        way,
        expected=expected,
        until=until,
    )
    return costs if found is None else found


def _calibrated(record: Record, bench: Bench, case: Case, costs: RingCosts, way: Way) -> RingCosts:
    seconds = executed(bench, [way], costs, 1, case.seed)[0][0]
    ran = [len(m) for m in way.members]
    mean = np.array([part.mean() for part in np.split(seconds, np.cumsum(ran)[:-1])])
    known = [row for row in record.rows("b") if "layer_s" in row]
    samples = [[row["length"]] * row["documents"] for row in known]
    ranks = [row["ring"] for row in known]
    times = [row["layer_s"] for row in known]
    for documents, d, time_s in zip(
        way.documents, way.table.sizes().tolist(), mean.tolist(), strict=True
    ):
        if time_s > 0 and d in ranks:  # other sizes are interpolated
            samples.append(documents.tolist())
            ranks.append(d)
            times.append(time_s)
    found = ov.cost.fit(samples, times, ranks=ranks)
    record.add("c fit", _misfits(case, way, mean, costs, found))
    return found


def _misfits(case: Case, way: Way, mean: np.ndarray, before: RingCosts, after: RingCosts) -> Row:
    """Return how both costs describe the tasks, weighted by their time."""
    row: Row = {**asdict(case), "tasks": len(way.table)}
    by = np.repeat(mean, way.table.sizes())
    for name, costs in (("before", before), ("after", after)):
        told = np.repeat(way.estimates(costs), way.table.sizes())
        row[f"measured_over_{name}"] = float(by.sum() / told.sum())
        row[f"misfit_{name}"] = float(np.abs(by - told * by.sum() / told.sum()).sum() / by.sum())
    row["fitted"] = [asdict(one) for one in after.fitted]
    return row
