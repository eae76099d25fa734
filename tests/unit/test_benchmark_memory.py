"""The memory and scale benchmarks cannot rot: slopes are found again, cells without room are computed and say so, targets as by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import memory
import scale_sim
from holding.case import COLOCATED, LOCAL, PROCESS, RAY, Case, Found
from holding.slopes import features, fit
from tests.properties.test_fleet import LIKELY


def found(case: Case, mb: float, **more: object) -> Found:
    given = Found(case=case, over_mb=mb, whole_mb=mb + 50, parts_mb={"all": mb}, shadows_mb=0.0, processes=3, waits=(0.001, 0.002), late=0)
    return replace(given, **more)  # type: ignore[arg-type]


def torch_case(n: int, ranks: int, workers: int) -> Case:
    return Case(kind=COLOCATED, folder="", n_sources=n, ranks=ranks, workers=workers)


def by_law(case: Case) -> float:
    """40 MB a rank, 20 a worker, 3 a source of a worker; Overlord 200, 5 a rank, 2 a source, 7 a thread."""
    values = (40.0, 20.0, 3.0) if case.kind == COLOCATED else (200.0, 5.0, 2.0, 0.0, 7.0)
    return float(features(case) @ values)


MEASURED = [torch_case(n, r, w) for n in (5, 100) for r, w in ((2, 1), (2, 4), (8, 1))]
LARGEST = torch_case(300, 8, 4)


def test_slopes_are_found_again_and_predict_the_cell_that_has_no_room() -> None:
    slopes = fit([found(case, by_law(case)) for case in MEASURED])
    assert slopes.values == pytest.approx((40.0, 20.0, 3.0))
    assert slopes.predict(LARGEST) == pytest.approx(8 * 40 + 32 * (20 + 3 * 300))
    assert slopes.worst < 1e-9


def test_a_cell_that_was_not_run_is_computed_and_says_so_everywhere() -> None:
    cells = [found(case, by_law(case)) for case in MEASURED]
    ours = found(Case(kind=PROCESS, folder="", n_sources=300, ranks=8, workers=4), 1000.0)
    every = [*cells, ours, *memory.by_slope([*MEASURED, LARGEST, ours.case], [*cells, ours])]
    assert [f.case for f in every if f.by_slope] == [LARGEST]
    fewer = replace(ours, case=replace(ours.case, workers=1))
    (line,) = memory.verdict([*every, fewer])
    assert "takes 29.8 times less" in line
    assert "(by slope); 13.5 is met" in line
    text = memory.page(every, {"ray, 5 sources": "no Ray"}, "today", "command")
    assert "29760 (by slope)" in text
    assert "ray, 5 sources: no Ray" in text


def test_what_a_rank_takes_is_told_by_number_of_sources() -> None:
    cells = [found(c := Case(kind=LOCAL, folder="", n_sources=n, ranks=r, workers=4), by_law(c)) for n in (5, 300) for r in (2, 8)]
    assert memory.flatness(cells) == ["local: MB for one more rank 5.0 at 5 sources, 5.0 at 300 sources."]
    assert memory.slopes_of(cells)[0].values[1] == pytest.approx(5.0)
    assert memory.slopes_of(cells)[0].names == ("once", "rank", "source", "rank x source"), "all have four threads"
    few = [found(c := Case(kind=LOCAL, folder="", n_sources=n, ranks=8, workers=1), by_law(c)) for n in (5, 300)]
    (slopes,) = memory.slopes_of([*cells, *few])
    assert slopes.values == pytest.approx((200.0, 5.0, 2.0, 0.0, 7.0), abs=1e-6)
    assert memory.slope_rows([slopes])[0][-2:] == ["thread 7.000", "0%"]


def test_cells_go_from_small_to_large_and_every_runtime_has_the_same() -> None:
    cases = memory.grid([5, 100, 300], [2, 8], [1, 4], [COLOCATED, LOCAL, PROCESS, RAY], "")
    assert [c.n_sources for c in cases] == sorted(c.n_sources for c in cases)
    assert LARGEST in cases
    for kind, n in product((LOCAL, PROCESS, RAY), (5, 100, 300)):
        assert {(c.ranks, c.workers) for c in cases if (c.kind, c.n_sources) == (kind, n)} == {(2, 4), (8, 1), (8, 4)}
    more = memory.extras([5, 100, 300], [2, 8], [1, 4], [COLOCATED, LOCAL, PROCESS, RAY], "")
    assert {c.kind for c in more if c.partition == "auto"} == {LOCAL, PROCESS, RAY}
    shapes = memory.parallelism([5, 100, 300], [1, 4], [COLOCATED, PROCESS, RAY], "")
    for kind, n in ((PROCESS, 100), (PROCESS, 300), (RAY, 300)):
        assert [(c.hosts, c.shadows) for c in shapes if (c.kind, c.n_sources) == (kind, n)] == [(1, False), (2, False), (2, True)]
    assert [c for c in shapes if (c.kind, c.n_sources) == (RAY, 100)] == []
    assert all(c.context == 32_768 and c.ranks == 2 for c in shapes)


def test_grids_fall_with_parallelism_and_sharing_takes_less_than_loaders_for_every_group() -> None:
    for grid in scale_sim.grids(LIKELY, 300):
        rows = grid.apart
        assert all(a > b for row in rows for a, b in pairwise(row)), grid.name
        assert all(s <= a + 1e-12 for shared, apart in zip(grid.shared, rows, strict=True) for s, a in zip(shared, apart, strict=True))
        assert grid.apart[-1][-1] < 1
    batch, base = scale_sim.grids(LIKELY, 300)[1], scale_sim.grids(LIKELY, 300)[0]
    assert batch.name == "batch 2048"
    assert base.name == "Figure 14"
