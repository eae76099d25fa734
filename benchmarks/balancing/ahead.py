"""Measure look-ahead over many steps.

Samples that cost more than a rank's share wait for each other (``planning.selection.hold_long``),
none longer than ``max_age``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from balancing.bounds import iteration_bound
from balancing.grid import Case
from overlord.mesh import Batch, ClientPlaceTree
from overlord.plan.plan import LoadingPlan
from overlord.planning.graph.dgraph import DGraph
from overlord.planning.selection import hold_long
from overlord.planning.strategies import DENSE_12B
from overlord.sample import Buffer
from page import context_name
from profiles import draw

CASES = (
    Case(profile="navit", context=16384, ranks=64, per_rank=8),
    Case(profile="navit", context=32768, ranks=64, per_rank=16),
    Case(profile="navit", context=32768, ranks=512, per_rank=8),
    Case(profile="navit", context=32768, ranks=512, per_rank=16),
)
MAX_AGE = 8  # steps, the job's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """The result of one width of look-ahead: slowest over mean rank, over all steps together."""

    case: Case
    look_ahead: int
    steps: int
    bucket: float
    sync: float
    bound: float  # of the steps as they were chosen, ranks meeting once a step
    oldest: int  # times that a sample was passed over, at most


class Stream:
    """The samples of all sources, and which are taken: the planner's state between steps."""

    def __init__(self, case: Case, steps: int, look_ahead: int, seed: int):
        n = case.samples * (steps + look_ahead)
        mixed = draw(case.profile, n, seed=seed, context=case.context)
        wanted = [
            np.bincount(
                mixed.source[t * case.samples : (t + 1) * case.samples], minlength=len(mixed.names)
            )
            for t in range(steps)
        ]
        by_source = mixed.take(np.argsort(mixed.source, kind="stable"))
        self.wanted, self.look_ahead = wanted, look_ahead
        self.all = by_source.buffer(Batch(samples=case.samples, context=case.context), images=False)
        self.first = np.searchsorted(by_source.source, np.arange(len(mixed.names)))
        self.taken, self.age = np.zeros(n, bool), np.zeros(n, np.int32)

    def candidates(self, step: int) -> Buffer:
        """Return the first ``look_ahead * n`` remaining samples of every source that gives n."""
        left, wanted = np.flatnonzero(~self.taken), self.wanted[step]
        source = self.all.source[left]
        rank = np.arange(len(left)) - np.searchsorted(source, np.arange(len(wanted)))[source]
        self.rows = left[rank < self.look_ahead * wanted[source]]
        return replace(
            self.all.take(self.rows),
            drawn=False,
            wanted=(tuple(wanted.tolist()),),
            age=self.age[self.rows],
            max_age=MAX_AGE,
            step=step,
        )

    def settle(self, plan: LoadingPlan) -> None:
        """Update the ages as ``overlord.planning.step`` does.

        A candidate becomes a step older if a later sample of its source was taken before it.
        """
        chosen = self.first[plan.source] + plan.row
        self.taken[chosen] = True
        last = np.full(len(self.first), -1)
        np.maximum.at(last, plan.source, chosen)
        self.age[self.rows[self.rows < last[self.all.source[self.rows]]]] += 1


def run_ahead(case: Case, look_ahead: int, *, steps: int, seed: int = 0) -> Ahead:
    stream, place = Stream(case, steps, look_ahead, seed), ClientPlaceTree(dp=case.ranks)
    slowest, synced, mean, bound = 0.0, 0.0, 0.0, 0.0
    for step in range(steps):
        graph = DGraph.from_buffer(stream.candidates(step), place, meta="tokens").mix(
            prefer=hold_long(DENSE_12B)
        )
        graph = graph.distribute("DP").cost(DENSE_12B)
        once = graph.balance("greedy", objective="iteration").plan()
        each = graph.balance("greedy", objective="microbatch").plan()
        slowest += float(once.loads().sum(axis=1).max())
        synced += float(each.loads().max(axis=0).sum())
        share = float(once.main.cost.sum()) / case.ranks
        mean, bound = mean + share, bound + share * iteration_bound(once.main.cost, case.ranks)
        stream.settle(once)
    oldest = int(stream.age[stream.taken].max())
    return Ahead(
        case=case,
        look_ahead=look_ahead,
        steps=steps,
        bucket=slowest / mean,
        sync=synced / mean,
        bound=bound / mean,
        oldest=oldest - 1,
    )


def ahead_table(found: Sequence[Ahead]) -> tuple[list[str], list[list[str]]]:
    head = [
        "profile",
        "context",
        "ranks",
        "a rank",
        "look-ahead",
        "bound",
        "once a step",
        "after every microbatch",
        "passed over, at most",
    ]
    rows = [
        [
            a.case.profile,
            context_name(a.case.context),
            f"{a.case.ranks:,}",
            str(a.case.per_rank),
            str(a.look_ahead),
            f"{a.bound:.3f}",
            f"{a.bucket:.3f}",
            f"{a.sync:.3f}",
            str(a.oldest),
        ]
        for a in found
    ]
    return head, rows
