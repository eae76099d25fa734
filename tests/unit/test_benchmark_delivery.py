"""The benchmark of delivery cannot rot: tiny cells run, the bare loop makes the pixels that
Overlord makes, ratios agree with hand work.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytest.importorskip("simplejpeg")

import corpus as corpora
import delivery
import overlord as ov
from corpus import Words, name_of, write_source
from delivering.assembled import assembled_bytes, distinct_bytes
from delivering.case import Case, Found
from delivering.cell import CellFailed, run
from delivering.job import make_job
from delivering.kernel import picture_steps
from delivering.pictures import Pictures, make_pictures

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "SOURCE_BYTES", 2**18)
        write_source(folder / name_of(0), Words.invent(1), 0, 1)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return make_pictures(tmp_path_factory.mktemp("pictures"), 1, 1, lambda *_: None, rows=24)


def group(texts: Path, way: str, **more: Any) -> Case:
    given = {
        "way": way,
        "job": "null",
        "folder": str(texts),
        "n_sources": 1,
        "context": 2048,
        "microbatches": 2,
        "samples": 12,
    }
    return Case(**(given | {"warm": 1, "steps": 2} | more))


def album(pictures: Pictures, way: str, **more: Any) -> Case:
    given = {
        "way": way,
        "job": "null-pictures",
        "folder": str(pictures.folder),
        "n_sources": 1,
        "axis": "dp",
        "ranks": 2,
        "context": 4096,
    }
    return Case(**(given | {"microbatches": 1, "samples": 8, "warm": 1, "steps": 2} | more))


def found(way: str, **more: Any) -> Found:
    case = Case(
        way=way, job=more.pop("job", "pictures"), folder="", n_sources=1, ranks=more.pop("ranks", 1)
    )
    zero: dict[str, Any] = dict.fromkeys(Found.__dataclass_fields__, 0) | {
        "tokens": 10**6,
        "samples": 1000,
        "wall_s": 1.0,
    }
    return Found(**(zero | {"case": case} | more))


def test_ranks_of_a_group_share_what_was_read_for_them(texts: Path) -> None:
    shared, apart = (run(group(texts, way, ranks=2), LIMIT_S) for way in ("overlord", "bare"))
    assert shared.tokens > 0
    assert apart.tokens > 0
    assert shared.delivered > 2 * 20 * shared.tokens  # both ranks have all of it
    assert shared.pss_mb > shared.idle_mb > 0


def test_a_rank_that_is_served_by_a_broadcast_is_given_nothing(texts: Path) -> None:
    each, one = (
        run(group(texts, way, ranks=2), LIMIT_S) for way in ("overlord", "overlord-broadcast")
    )
    assert each.delivered / each.tokens == pytest.approx(2 * one.delivered / one.tokens, rel=0.05)


def test_memory_of_ranks_with_the_same_arrays_counts_once(texts: Path) -> None:
    assert assembled_bytes(group(texts, "overlord", ranks=4)) == pytest.approx(1 / 4, rel=0.01)
    assert assembled_bytes(group(texts, "overlord", axis="cp", ranks=2)) == pytest.approx(
        1, rel=0.05
    )


def test_shared_memory_is_counted_once() -> None:
    memory = np.zeros(100, np.uint8)
    assert distinct_bytes([memory[:50], memory[25:75], memory[:50], np.zeros(7, np.uint8)]) == 82


def test_the_bare_loop_makes_the_pixels_that_overlord_delivers(pictures: Pictures) -> None:
    case = album(pictures, "bare")
    microbatches, encoder = next(picture_steps(case, pictures, None, case.samples))
    bare = split(encoder["pixel_values"], encoder["grid_thw"])
    with ov.launch(make_job(case), runtime="local") as session:
        steps = [
            next(client) for client in [session.client(rank=rank) for rank in range(case.ranks)]
        ]
        ours = [
            image
            for step in steps
            for part in step.encoder
            for image in split(part["pixel_values"], part["grid_thw"])
        ]
        tokens = sorted(doc for step in steps for mb in step for doc in documents(mb))
    assert sorted(ours) == sorted(bare)
    assert tokens == sorted(doc for mb in microbatches for doc in documents(mb))


def split(pixels: np.ndarray, grids: np.ndarray) -> list[bytes]:
    return [part.tobytes() for part in np.split(pixels, np.cumsum(grids.prod(axis=1))[:-1])]


def documents(mb: Any) -> list[list[int]]:
    return [mb["tokens"][a:b].tolist() for a, b in pairwise(mb["cu_seqlens"].tolist())]


@pytest.mark.parametrize("way", ["bare", "overlord-one", "overlord"])
def test_a_cell_with_images_counts_its_samples(pictures: Pictures, way: str) -> None:
    cell = run(album(pictures, way), LIMIT_S)
    assert cell.samples == 2 * 8
    assert cell.delivered > 10**6
    assert cell.cpu_s > 0


def test_a_cell_that_cannot_start_says_why(texts: Path) -> None:
    with pytest.raises(CellFailed, match="FileNotFoundError"):
        run(group(texts / "nowhere", "bare"), LIMIT_S)


def test_every_run_stands_between_two_bare_ones() -> None:
    cases = delivery.image_cases(["overlord", "torch"], Path("nowhere"), 2, 6)
    order = [case.way for case in delivery.between_bare(cases, 2)]
    assert order == [
        "bare",
        "overlord",
        "bare",
        "torch",
        "bare",
        "torch",
        "bare",
        "overlord",
        "bare",
    ]


def test_ratios_are_to_the_neighbouring_bare_runs() -> None:
    runs = [
        found("bare", cpu_s=1.0),
        found("overlord", cpu_s=2.2),
        found("bare", cpu_s=3.0),
        found("torch", cpu_s=8.0),
        found("bare", cpu_s=1.0),
    ]
    assert delivery.ratios(runs) == {
        "overlord": [pytest.approx(1.1)],
        "torch": [pytest.approx(4.0)],
    }
    rows = {row[0]: row for row in delivery.image_rows(runs)}
    assert rows["overlord"][3:5] == ["1.100", "met"]
    pictures = Pictures(Path("nowhere"), (), 10, 500_000, 2_000_000)
    assert "| torch | 1 | 8000 | 4.000 |" in delivery.page(
        [], runs, pictures, "2026-01-01", "python benchmarks/delivery.py"
    )


def test_ranks_with_a_loader_each_assemble_what_they_get_and_shared_ones_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "assembled_bytes", lambda case: 1 / case.ranks)
    runs = [
        found(
            way,
            job="null",
            ranks=4,
            delivered=4 * 2**20,
            read=r * 2**20,
            cpu_s=c,
            pss_mb=p,
            idle_mb=100.0,
        )
        for way, r, c, p in (("overlord", 1, 0.5, 110.0), ("torch", 4, 2.0, 140.0))
    ]
    rows = {row[3]: row[4:] for row in delivery.group_rows(delivery.assembled(runs))}
    assert rows["torch"] == ["4.00", "1.00", "4.00", "1.00", "2.00", "1.00", "40.00", "1.00", "4"]
    assert rows["overlord"] == [
        "1.00",
        "4.00",
        "1.00",
        "4.00",
        "0.50",
        "4.00",
        "10.00",
        "4.00",
        "4",
    ]


def test_a_rank_alone_is_measured_once_and_broadcasts_along_tp_only() -> None:
    cases = delivery.group_cases(
        ["null"], [1, 2], ["tp", "cp"], delivery.GROUP_WAYS, Path("nowhere"), 1
    )
    assert [(c.axis, c.ranks, c.way) for c in cases if c.way.startswith("overlord")] == [
        ("tp", 1, "overlord"),
        ("tp", 2, "overlord"),
        ("tp", 2, "overlord-broadcast"),
        ("cp", 2, "overlord"),
    ]
    assert replace(cases[0], way="torch") in cases
