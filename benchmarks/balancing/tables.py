"""Tables of the grid: a row per profile, context and samples per rank, a column per rank count."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from balancing.grid import METHODS, Case, Outcome
from overlord.observe.svg import Axes, PlotLine, lines, series_color
from page import context_name

Row = tuple[str, int, int]  # profile, context, samples a rank
Pick = Callable[[Outcome], float]


class Grid:
    """The outcomes by case and method."""

    def __init__(self, outcomes: Iterable[Outcome]):
        self.outcomes = list(outcomes)
        self.by_cell: dict[tuple[Case, str], list[Outcome]] = {}
        for o in self.outcomes:
            self.by_cell.setdefault((o.case, o.method), []).append(o)
        self.cases = sorted(
            {o.case for o in self.outcomes},
            key=lambda c: (c.profile, c.context, c.per_rank, c.ranks),
        )
        self.ranks = sorted({c.ranks for c in self.cases})
        self.rows: list[Row] = list(
            dict.fromkeys((c.profile, c.context, c.per_rank) for c in self.cases)
        )
        self.methods = [m for m in METHODS if any(o.method == m for o in self.outcomes)]

    def cell(self, row: Row, ranks: int, method: str) -> list[Outcome]:
        return self.by_cell.get(
            (Case(profile=row[0], context=row[1], per_rank=row[2], ranks=ranks), method), []
        )

    def across(self, row: Row, method: str, pick: Pick, form: str) -> str:
        """Return the mean over the seeds for each rank count; "-" if the method was not run."""
        found = [self.cell(row, ranks, method) for ranks in self.ranks]
        return " / ".join(
            format(statistics.fmean(map(pick, cell)), form) if cell else "-" for cell in found
        )


def excess(o: Outcome) -> float:
    """Return percent above the lower bound, for ranks that wait for each other once per step."""
    return 100 * (o.bucket / o.bucket_bound - 1)


def iteration_table(grid: Grid) -> tuple[list[str], list[list[str]]]:
    mine = [m for m in grid.methods if m not in ("vanilla", "packed")]
    head = [
        "profile",
        "context",
        "a rank",
        "bound",
        "vanilla",
        "packed",
        *(f"{m}, %" for m in mine),
    ]
    rows = []
    for row in grid.rows:
        cells = [grid.across(row, "greedy", lambda o: o.bucket_bound, ".2f")]
        cells += [grid.across(row, m, lambda o: o.bucket, ".2f") for m in ("vanilla", "packed")]
        rows.append([*_names(row), *cells, *(grid.across(row, m, excess, ".2f") for m in mine)])
    return head, rows


def microbatch_table(grid: Grid) -> tuple[list[str], list[list[str]]]:
    mine = [m for m in grid.methods if not m.startswith("groups")]
    head = ["profile", "context", "a rank", "bound", *mine]
    rows = []
    for row in grid.rows:
        bound = grid.across(row, "greedy", lambda o: o.sync_bound, ".3f")
        rows.append(
            [*_names(row), bound, *(grid.across(row, m, lambda o: o.sync, ".3f") for m in mine)]
        )
    return head, rows


def fill_table(grid: Grid) -> tuple[list[str], list[list[str]]]:
    """Return a table of the microbatches per rank and their fill."""
    mine = [m for m in ("vanilla", "packed", "greedy", "microbatch") if m in grid.methods]
    head = ["profile", "context", "a rank", *(f"M {m}" for m in mine), *(f"fill {m}" for m in mine)]
    rows = []
    for row in grid.rows:
        many = [grid.across(row, m, lambda o: o.microbatches, ".0f") for m in mine]
        rows.append(
            [*_names(row), *many, *(grid.across(row, m, lambda o: o.fill, ".2f") for m in mine)]
        )
    return head, rows


def time_table(grid: Grid) -> tuple[list[str], list[list[str]]]:
    """Return a table of CPU milliseconds: the median and the maximum.

    Both are over the best seeds of each profile and context.
    """
    head = ["samples", "ranks", *grid.methods]
    sizes = sorted({(c.samples, c.ranks) for c in grid.cases})
    rows = []
    for samples, ranks in sizes:
        cells = []
        for m in grid.methods:
            best = [
                min(o.cpu_ms for o in cell)
                for (c, method), cell in grid.by_cell.items()
                if method == m and (c.samples, c.ranks) == (samples, ranks)
            ]
            cells.append(f"{statistics.median(best):.1f} ({max(best):.1f})" if best else "-")
        rows.append([f"{samples:,}", f"{ranks:,}", *cells])
    return head, rows


def plots(grid: Grid) -> dict[str, str]:
    """Return plots of imbalance over ranks, and of planning time over samples."""
    found = {}
    for row in (("coyo", 4096, 16), ("navit", 16384, 16), ("navit", 16384, 72)):
        if row not in grid.rows or len(grid.ranks) < 2:
            continue
        name = f"{row[0]}-{context_name(row[1])}-{row[2]}"
        once = ("vanilla", "packed", "zigzag", "greedy")
        found[f"balance-iteration-{name}"] = _plot(
            grid, row, once, lambda o: o.bucket, lambda o: o.bucket_bound, "once a step"
        )
        each = ("vanilla", "packed", "greedy", "microbatch")
        found[f"balance-microbatch-{name}"] = _plot(
            grid, row, each, lambda o: o.sync, lambda o: o.sync_bound, "after every microbatch"
        )
    return found


def _plot(grid: Grid, row: Row, methods: Sequence[str], pick: Pick, bound: Pick, when: str) -> str:
    ranks = [r for r in grid.ranks if grid.cell(row, r, methods[0])]
    x = np.log2(np.array(ranks, float))

    def series(method: str, value: Pick) -> np.ndarray:
        return np.array([statistics.fmean(map(value, grid.cell(row, r, method))) for r in ranks])

    drawn = [
        PlotLine(label="bound", color="var(--faint)", y=series(methods[0], bound), kind="bound")
    ]
    drawn += [
        PlotLine(label=m, color=series_color(i), y=series(m, pick))
        for i, m in enumerate(methods)
        if m in grid.methods
    ]
    most = max(float(line.y.max()) for line in drawn)
    what = f"{row[0]}, context {context_name(row[1])}, {row[2]} samples a rank; ranks meet {when}"
    return lines(
        x,
        drawn,
        Axes(
            x_label=f"ranks ({what})",
            y_label="slowest over mean",
            y_from=1.0,
            y_to=1 + 1.05 * (most - 1),
            show=lambda v: f"{v:.2f}",
            x_ticks=[(float(v), f"{r:,}") for v, r in zip(x, ranks, strict=True)],
        ),
        about=f"Slowest over mean rank: {what}",
        height=320,
    )


def _names(row: Row) -> list[str]:
    return [row[0], context_name(row[1]), str(row[2])]
