"""Targets of the balance benchmark: met or missed in every cell, and by how much.

A missed target is compared with the lower bound, which tells whether any placement could meet it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from balancing.grid import Case, Outcome
from balancing.tables import Grid, excess
from page import context_name

GROUPING_POINTS = 0.1  # percent of the mean rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A limit that a method must keep in some of the cells."""

    name: str
    method: str
    wanted: Callable[[Case], float | None]  # None: no target here
    found: Callable[[Outcome], float]
    possible: Callable[[Outcome], float]  # what no placement can pass, in the same terms
    bound: Callable[[Outcome], float]  # the same as slowest over mean
    form: str = ".3f"


def _excess_wanted(case: Case) -> float | None:
    return 1.5 if case.per_rank < 16 else 0.7 if case.per_rank < 32 else 0.2


def _sync_wanted(case: Case) -> float | None:
    if case.context <= 8192:
        return 1.04 if case.per_rank >= 16 else None
    return 1.02 if case.context == 16384 and case.per_rank >= 64 else None


TARGETS = (
    Target(
        name="excess over the bound, %, ranks meet once a step",
        method="greedy",
        wanted=_excess_wanted,
        found=excess,
        possible=lambda o: 0.0,
        bound=lambda o: o.bucket_bound,
        form=".2f",
    ),
    Target(
        name="slowest over mean, ranks meet after every microbatch",
        method="microbatch",
        wanted=_sync_wanted,
        found=lambda o: o.sync,
        possible=lambda o: o.sync_bound,
        bound=lambda o: o.sync_bound,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The worst seed of one cell, compared with one target."""

    target: Target
    case: Case
    wanted: float
    worst: Outcome

    @property
    def over(self) -> float:
        return self.target.found(self.worst) - self.wanted

    @property
    def met(self) -> bool:
        return self.over <= 0

    @property
    def impossible(self) -> bool:
        return self.target.possible(self.worst) > self.wanted

    def __str__(self) -> str:
        value = format(self.target.found(self.worst), self.target.form)
        if self.met:
            return value
        return (
            f"**{value}** (over by "
            f"{format(self.over, self.target.form)}{', impossible' if self.impossible else ''})"
        )


def judge(grid: Grid, target: Target) -> list[Verdict]:
    verdicts = []
    for case in grid.cases:
        cell, wanted = grid.by_cell.get((case, target.method), []), target.wanted(case)
        if cell and wanted is not None:
            verdicts.append(
                Verdict(target=target, case=case, wanted=wanted, worst=max(cell, key=target.found))
            )
    return verdicts


def verdict_table(grid: Grid, verdicts: list[Verdict]) -> tuple[list[str], list[list[str]]]:
    """Return a table of the worst seed at every rank count, with the bound of that step.

    It has a row per profile, context and samples per rank.
    """
    target = verdicts[0].target
    head = [
        "profile",
        "context",
        "a rank",
        "target",
        *(f"{r:,} ranks" for r in grid.ranks),
        "bound of the worst step",
        "how it went",
    ]
    rows = []
    for row in grid.rows:
        mine = {v.case.ranks: v for v in verdicts if _row_of(v.case) == row}
        if mine:
            cells = [str(mine[r]) if r in mine else "-" for r in grid.ranks]
            bounds = " / ".join(
                format(target.bound(mine[r].worst), ".3f") if r in mine else "-" for r in grid.ranks
            )
            ways = " / ".join(
                f"{mine[r].worst.way}, fill {mine[r].worst.fill:.2f}"
                for r in grid.ranks
                if r in mine
            )
            wanted = format(next(iter(mine.values())).wanted, "g")
            rows.append([row[0], context_name(row[1]), str(row[2]), wanted, *cells, bounds, ways])
    return head, rows


def grouping_losses(grid: Grid) -> list[tuple[str, Case, int, float]]:
    """Return the loss by grouping in percent of the mean rank, by method, case and seed."""
    plain = {(o.case, o.seed): o.bucket for o in grid.outcomes if o.method == "greedy"}
    return [
        (o.method, o.case, o.seed, 100 * (o.bucket - plain[o.case, o.seed]))
        for o in grid.outcomes
        if o.method.startswith("groups of ") and (o.case, o.seed) in plain
    ]


def grouping_table(grid: Grid) -> tuple[list[str], list[list[str]]]:
    """Return a table of the worst seed of each cell, for rank counts that have groups."""
    losses = grouping_losses(grid)
    methods = list(dict.fromkeys(method for method, *_ in losses))
    rows = []
    for row in grid.rows:
        cells = []
        for method in methods:
            mine = {
                c.ranks: p
                for m, c, _, p in sorted(losses, key=lambda loss: loss[3])
                if m == method and _row_of(c) == row
            }
            cells.append(" / ".join(_points(mine[r]) if r in mine else "-" for r in grid.ranks))
        if losses:
            rows.append([row[0], context_name(row[1]), str(row[2]), *cells])
    return ["profile", "context", "a rank", *methods], rows


def _points(points: float) -> str:
    return (
        f"{points:+.3f}"
        if points <= GROUPING_POINTS
        else f"**{points:+.3f}** (over by {points - GROUPING_POINTS:.3f})"
    )


def _row_of(case: Case) -> tuple[str, int, int]:
    return case.profile, case.context, case.per_rank


def summary(grid: Grid) -> list[str]:
    """Return one line per target."""
    said = []
    for target in TARGETS:
        verdicts = judge(grid, target)
        missed = [v for v in verdicts if not v.met]
        cannot = sum(v.impossible for v in missed)
        line = (
            f"- {target.name}: met in {len(verdicts) - len(missed)} of {len(verdicts)} cells "
            "(worst seed of each)"
        )
        if missed:
            worst = max(missed, key=lambda v: v.over)
            line += (
                f"; worst miss {_where(worst.case)}: "
                f"{format(target.found(worst.worst), target.form)} where {worst.wanted:g} is "
                "wanted"
            )
            line += f"; {cannot} of the misses are impossible for any placement" if cannot else ""
        said.append(line + ".")
    losses = grouping_losses(grid)
    if losses:
        missed_losses = [loss for loss in losses if loss[3] > GROUPING_POINTS]
        method, case, _, points = max(losses, key=lambda loss: loss[3])
        said.append(
            f"- group_size, at most {GROUPING_POINTS} points: met in "
            f"{len(losses) - len(missed_losses)} of {len(losses)} steps; "
            f"worst {points:+.3f} points ({method}, {_where(case)})."
        )
    overfull = sum(o.overfull for o in grid.outcomes)
    said.append(
        f"- microbatches above the context: {overfull} in {len(grid.outcomes)} plans, all "
        "of them validated."
    )
    return said


def _where(case: Case) -> str:
    return f"{case.profile} {context_name(case.context)}, {case.ranks} ranks x {case.per_rank}"
