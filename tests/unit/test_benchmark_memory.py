"""The memory and scale benchmarks cannot rot: slopes are found again, cells without room are
computed and say so, targets as by hand.
"""

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
from holding.compared import FEWEST, MOST, SMALLEST, compare, source_parallelism
from holding.grids import Extent, extras, grid, needless, parallelism
from holding.slopes import features, fit
from tests.properties.test_fleet import LIKELY


def found(case: Case, mb: float, **more: object) -> Found:
    given = Found(
        case=case,
        over_mb=mb,
        whole_mb=mb + 50,
        parts_mb={"all": mb},
        shadows_mb=0.0,
        processes=3,
        waits=(0.001, 0.002),
        late=0,
    )
    return replace(given, **more)  # type: ignore[arg-type]


def torch_case(n: int, ranks: int, workers: int) -> Case:
    return Case(kind=COLOCATED, folder="", n_sources=n, ranks=ranks, workers=workers)


def by_law(case: Case) -> float:
    """40 MB a rank, 20 a worker, 3 a source of a worker; Overlord 200, 5 a rank, 2 a source, 7 a
    thread.
    """
    values = (40.0, 20.0, 3.0) if case.kind == COLOCATED else (200.0, 5.0, 2.0, 0.0, 7.0)
    return float(features(case) @ values)


MEASURED = [torch_case(n, r, w) for n in (5, 100) for r, w in ((2, 1), (2, 4), (8, 1))]
LARGEST = torch_case(300, 8, 4)
EXTENT = Extent(
    sources=(5, 100, 300),
    ranks=(2, 8),
    workers=(1, 2, 4),
    kinds=(COLOCATED, LOCAL, PROCESS, RAY),
    shuffles=(True, False),
    folder="",
)


def ours(workers: int, mb: float, **more: object) -> Found:
    return found(Case(kind=PROCESS, folder="", n_sources=300, ranks=8, workers=workers), mb, **more)


def test_slopes_are_found_again_and_predict_the_cell_that_has_no_room() -> None:
    slopes = fit([found(case, by_law(case)) for case in MEASURED])
    assert slopes.values == pytest.approx((40.0, 20.0, 3.0))
    assert slopes.predict(LARGEST) == pytest.approx(8 * 40 + 32 * (20 + 3 * 300))
    assert slopes.worst < 1e-9


def test_a_cell_that_was_not_run_is_computed_and_says_so_everywhere() -> None:
    cells = [
        *(found(case, by_law(case)) for case in MEASURED),
        found(torch_case(300, 8, 1), 5000.0),
        ours(8, 800.0),
        ours(32, 1000.0),
    ]
    every = [
        *cells,
        *memory.by_slope([*MEASURED, LARGEST], [f for f in cells if f.case.n_sources < 300]),
    ]
    assert [f.case for f in every if f.by_slope] == [LARGEST]
    smallest, equal = memory.verdict(every)
    assert (
        "smallest that keeps pace (8 workers in all; torch 8): process takes 6.2 times less"
        in smallest
    )
    assert "(measured); 13.5 is missed" in smallest
    assert (
        "equal, most workers (32 workers in all; torch 32): process takes 29.8 times less" in equal
    )
    assert "(by slope); 13.5 is met" in equal
    text = memory.page(every, {"ray, 5 sources": "no Ray"}, "today", "command")
    assert "29760 (by slope)" in text
    assert "29.8 (by slope)" in text
    assert "ray, 5 sources: no Ray" in text


def test_each_side_is_compared_at_its_smallest_setting_and_both_at_equal_settings() -> None:
    cells = [
        found(torch_case(300, 8, 1), 5000.0, late=3),
        found(torch_case(300, 8, 2), 9000.0),
        found(torch_case(300, 8, 4), 20000.0),
    ]
    cells += [ours(1, 900.0), ours(8, 1000.0), ours(32, 2000.0)]
    made = {
        c.setting: (c.ours.case.loading, c.theirs.case.loading, c.ratio) for c in compare(cells)
    }
    assert made == {SMALLEST: (1, 16, 10.0), FEWEST: (8, 8, 5.0), MOST: (32, 32, 10.0)}
    rows = [c.row() for c in compare(cells)]
    assert rows[0] == ["process", "on", "300", "8", SMALLEST, "1", "900", "16", "9000", "10.0"]


def test_a_loader_that_is_late_at_every_setting_is_not_said_to_keep_pace() -> None:
    cells = [found(torch_case(300, 8, 1), 5000.0, late=1), ours(1, 900.0)]
    assert compare(cells) == []
    assert "**no**" in memory.rows_of(cells)[0]


def test_shuffled_rows_are_never_compared_with_rows_in_order() -> None:
    cells = [found(replace(torch_case(300, 8, 1), shuffle=False), 5000.0), ours(1, 900.0)]
    assert compare(cells) == []


def test_more_workers_are_tried_only_until_the_pace_is_kept() -> None:
    middle, more = torch_case(300, 8, 2), torch_case(300, 8, 4)
    kept, late = found(torch_case(300, 8, 1), 5000.0), found(torch_case(300, 8, 1), 5000.0, late=2)
    assert needless(middle, [kept], EXTENT)
    assert not needless(middle, [late], EXTENT)
    assert not needless(more, [kept], EXTENT), "equal settings need it"
    assert not needless(replace(middle, shuffle=False), [kept], EXTENT)


def test_a_second_loader_worker_that_takes_more_memory_is_called_opposite_to_the_paper() -> None:
    one = Case(
        kind=PROCESS,
        folder="",
        n_sources=300,
        ranks=2,
        workers=2,
        hosts=1,
        tp=16,
        context=32_768,
        microbatches=1,
    )
    cells = [found(one, 400.0), found(replace(one, hosts=2), 500.0)]
    told = source_parallelism(cells)
    assert "two loader hosts take 500 MB, one takes 400 MB (+25%)" in told[0]
    assert "**opposite**" in told[0]
    assert told[0] in memory.page([*cells, found(LARGEST, 1.0)], {}, "today", "command")
    assert (
        "the same direction"
        in source_parallelism([cells[0], found(replace(one, hosts=2), 300.0)])[0]
    )


def test_what_a_rank_takes_is_told_by_number_of_sources() -> None:
    cells = [
        found(c := Case(kind=LOCAL, folder="", n_sources=n, ranks=r, workers=1), by_law(c))
        for n in (5, 300)
        for r in (2, 8)
    ]
    assert memory.flatness(cells) == [
        "local, shuffled, one worker: MB for one more rank 5.0 at 5 sources, 5.0 at 300 sources."
    ]
    ((order, slopes),) = memory.slopes_of(cells)
    assert (order, slopes.values[1]) == ("on", pytest.approx(5.0))
    assert slopes.names == ("once", "rank", "source", "rank x source"), "all have one thread"
    many = [
        found(c := Case(kind=LOCAL, folder="", n_sources=n, ranks=8, workers=8), by_law(c))
        for n in (5, 300)
    ]
    ((_, slopes),) = memory.slopes_of([*cells, *many])
    assert slopes.values == pytest.approx((200.0, 5.0, 2.0, 0.0, 7.0), abs=1e-6)
    assert memory.slope_rows([("on", slopes)])[0][-2:] == ["thread 7.000", "0%"]


def test_cells_go_from_small_to_large_and_every_runtime_has_the_same_in_both_orders() -> None:
    cases = grid(EXTENT)
    assert [c.n_sources for c in cases] == sorted(c.n_sources for c in cases)
    assert LARGEST in cases
    for kind, n, shuffle in product((LOCAL, PROCESS, RAY), (5, 100, 300), (True, False)):
        cells = {
            (c.ranks, c.workers)
            for c in cases
            if (c.kind, c.n_sources, c.shuffle) == (kind, n, shuffle)
        }
        assert cells == {(2, 1), (8, 1), (8, 8), (8, 32)}, (
            "one thread, and as many in all as 8 ranks with 1 and with 4 workers"
        )
    assert {(c.ranks, c.workers) for c in cases if c.kind == COLOCATED} == {
        (2, 1),
        (2, 4),
        (8, 1),
        (8, 2),
        (8, 4),
    }
    assert {c.kind for c in extras(EXTENT) if c.partition == "auto"} == {LOCAL, PROCESS, RAY}
    shapes = parallelism(EXTENT)
    for kind, n in ((PROCESS, 100), (PROCESS, 300), (RAY, 300)):
        assert [(c.hosts, c.shadows) for c in shapes if (c.kind, c.n_sources) == (kind, n)] == [
            (1, False),
            (2, False),
            (2, True),
        ]
    assert [c for c in shapes if (c.kind, c.n_sources) == (RAY, 100)] == []
    assert all(c.context == 32_768 and c.ranks == 2 for c in shapes)


def test_shuffling_is_asked_of_both_sides() -> None:
    for shuffle in (True, False):
        assert (
            replace(ours(1, 1.0).case, shuffle=shuffle).work().peer.endswith("shuffled") is shuffle
        )
        assert replace(torch_case(5, 2, 1), shuffle=shuffle).work().shuffle is shuffle


def test_grids_fall_with_parallelism_and_sharing_takes_less_than_loaders_for_every_group() -> None:
    for table in scale_sim.grids(LIKELY, 300):
        rows = table.apart
        assert all(a > b for row in rows for a, b in pairwise(row)), table.name
        assert all(
            s <= a + 1e-12
            for shared, apart in zip(table.shared, rows, strict=True)
            for s, a in zip(shared, apart, strict=True)
        )
        assert table.apart[-1][-1] < 1
    batch, base = scale_sim.grids(LIKELY, 300)[1], scale_sim.grids(LIKELY, 300)[0]
    assert batch.name == "batch 2048"
    assert base.name == "Figure 14"
