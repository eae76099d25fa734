"""Overlord compared with the colocated loader.

Each is compared at the smallest setting that keeps the pace, and both at equal settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holding.case import COLOCATED, PROCESS, RAY, Case, Found

SMALLEST, FEWEST, MOST = "smallest that keeps pace", "equal, fewest workers", "equal, most workers"
HEAD = (
    "loader",
    "shuffle",
    "sources",
    "ranks",
    "setting",
    "workers in all",
    "MB",
    "torch workers in all",
    "torch MB",
    "x less than torch",
)
PAPER_15 = "the paper's Figure 15 reports a substantial reduction"


def on_off(shuffle: bool) -> str:
    return "on" if shuffle else "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One cell of Overlord and the colocated cell that it is compared with."""

    setting: str
    ours: Found
    theirs: Found

    @property
    def ratio(self) -> float:
        return self.theirs.over_mb / self.ours.over_mb

    @property
    def measured(self) -> bool:
        return not (self.ours.by_slope or self.theirs.by_slope)

    def row(self) -> list[str]:
        case, slope = self.ours.case, "" if self.measured else " (by slope)"
        return [
            case.name,
            on_off(case.shuffle),
            str(case.n_sources),
            str(case.ranks),
            self.setting,
            str(case.loading),
            f"{self.ours.over_mb:.0f}",
            str(self.theirs.case.loading),
            f"{self.theirs.over_mb:.0f}{slope}",
            f"{self.ratio:.1f}{slope}",
        ]


def smallest(cells: Sequence[Found]) -> Found | None:
    """Return the cell with the fewest workers that kept the pace.

    It is one of the cells of one loader, job and number of ranks.
    """
    return min((f for f in cells if f.keeps_pace), key=lambda f: f.case.loading, default=None)


def compare(found: Sequence[Found]) -> list[Comparison]:
    """Return all comparisons of the plain cells.

    They cover every number of sources and ranks, and both orders of rows.
    """
    plain = [f for f in found if f.case.tp == 1 and f.case.context == 8192 and not f.case.shadows]
    made = []
    keys = dict.fromkeys((f.case.n_sources, f.case.ranks, f.case.shuffle) for f in plain)
    for key in keys:
        cells = [f for f in plain if (f.case.n_sources, f.case.ranks, f.case.shuffle) == key]
        theirs = [f for f in cells if f.case.kind == COLOCATED]
        for name in dict.fromkeys(f.case.name for f in cells if f.case.kind != COLOCATED):
            made += _settings([f for f in cells if f.case.name == name], theirs)
    return made


def _settings(ours: Sequence[Found], theirs: Sequence[Found]) -> list[Comparison]:
    made = []
    least, best = smallest(ours), smallest(theirs)
    if least is not None and best is not None:
        made.append(Comparison(setting=SMALLEST, ours=least, theirs=best))
    by_workers = {f.case.loading: f for f in theirs}
    equal = sorted(
        (f.case.loading, f) for f in ours if f.case.loading in by_workers and f.case.ranks > 1
    )
    names = [FEWEST, *[""] * (len(equal) - 2), MOST] if len(equal) > 1 else [FEWEST]
    made += [
        Comparison(setting=name, ours=f, theirs=by_workers[n])
        for name, (n, f) in zip(names, equal, strict=False)
        if name
    ]
    return made


def source_parallelism(found: Sequence[Found]) -> list[str]:
    """Describe Figure 15: whether a second loader worker affects memory as in the paper."""
    lines = []
    cells = {f.case: f for f in found if f.case.tp > 1 and not f.case.shadows}
    for case, one in cells.items():
        two = cells.get(replace(case, hosts=2))
        if case.hosts == 1 and case.kind in (PROCESS, RAY) and two is not None:
            lines.append(_second_host(case, one.over_mb, two.over_mb))
    if any("opposite" in line for line in lines):
        lines.append(
            "One loader host already holds every source once, so a second one divides "
            "nothing and adds a process."
        )
    return lines


def _second_host(case: Case, one: float, two: float) -> str:
    change = two / one - 1
    fact = (
        f"{case.kind}, {case.n_sources} sources: two loader hosts take {two:.0f} MB, one "
        f"takes {one:.0f} MB ({change:+.0%})"
    )
    return f"{fact}; {PAPER_15}: {'**opposite**' if two >= one else 'the same direction'}."
