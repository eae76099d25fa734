"""The program that measures hybrid data parallelism on a GPU runs on a CPU, and its parts agree with
hand work.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytest.importorskip("torch")

import torch

from gpu import hdp, hdp_attention, hdp_offload, hdp_page, hdp_steps, timing
from gpu.record import Record
from gpu.rings import LLAMA_8B, TINY, Bench, by_reference, positions
from measured.pages import Page
from overlord.plan.tasks import TaskTable
from overlord.torch.hdp import RingLayout
from overlord.torch.hdp import attention as ring_code

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("hdp")
    words = ["--device", "cpu", "--tiny", "--json", str(folder / "r.json")]
    return hdp.main([*words, "--save", "--out", str(folder)]), folder


def test_a_tiny_run_does_all_parts_and_none_fails(ran: tuple[dict[str, Any], Path]) -> None:
    data, folder = ran
    assert data["errors"] == []
    assert data["not_run"] == []
    assert set(data["rows"]) == {
        *("a", "a exact", "b", "b linear", "b equal", "c", "c fit"),
        *("d", "d bandwidth", "d formula"),
    }
    assert json.loads((folder / "r.json").read_text())["rows"] == data["rows"]


def test_a_step_counts_with_the_median_of_passes_and_shows_each(
    ran: tuple[dict[str, Any], Path],
) -> None:
    rows = [r for r in ran[0]["rows"]["c"] if r["executed"]]
    assert {r["way"] for r in rows} == {"hdp", "static"}
    for row in rows:
        assert row["passes"] == len(row["single_passes"]) == hdp_steps.PASSES
        assert row["over_mean"] == max(row["ranks_s"]) / (sum(row["ranks_s"]) / row["ranks"])
        assert row["misfit"] >= 0
    (fit,) = ran[0]["rows"]["c fit"]
    assert fit["seed"] == rows[0]["seed"] + hdp_steps.OTHER, "costs know the step that they plan"


def test_groups_of_pieces_are_what_the_host_queues_while_the_device_is_held() -> None:
    host_s = np.array([0.5, 0.3, 0.4, 3.0, 0.0, 0.0]) * timing.QUEUE_S
    assert timing.groups_of(6, host_s) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6)]
    assert timing.groups_of(0, host_s[:0]) == []
    assert timing.groups_of(3, None) == [slice(0, 3)]
    for n in (timing.AHEAD, timing.AHEAD + 1):
        groups = timing.groups_of(n, np.zeros(n))
        assert [i for g in groups for i in range(g.start, g.stop)] == list(range(n))
        assert max(g.stop - g.start for g in groups) == timing.AHEAD


def test_a_warm_up_runs_only_the_marked_pieces() -> None:
    found: list[int] = []
    pieces = [lambda i=i: found.append(i) for i in range(4)]
    host_s = timing.host_seconds(pieces, CPU, np.array([True, False, True, False]))
    assert found == [0, 2]
    assert ((host_s > 0) == [True, False, True, False]).all()


def test_steps_hold_their_context_and_the_whole_grid_has_8_to_64_ranks() -> None:
    assert len(set(hdp_steps.CASES)) == len(hdp_steps.CASES)
    for case in hdp_steps.CASES:
        assert case.context <= case.ranks * case.capacity
        assert case.capacity <= hdp_attention.REAL.local
        assert case.context <= hdp_attention.REAL.whole
    assert {c.ranks for c in hdp_steps.CASES if c.context == 512 * 1024} == {8, 16, 32, 64}


def test_rings_agree_with_attention_over_whole_documents(ran: tuple[dict[str, Any], Path]) -> None:
    rows = ran[0]["rows"]["a"]
    assert {r["ring"] for r in rows} == {2, 3, 4}
    assert all(r[f"{name} cosine"] > 0.9999 for r in rows for name in hdp_attention.NAMES)
    assert all(r[f"{name} error"] < 0.01 for r in rows for name in hdp_attention.NAMES)


def test_the_page_is_made_again_from_its_results(
    ran: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    data, folder = ran
    hdp.main(["page", "--json", str(folder / "r.json"), "--save", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.md")
    page = Page.read(path)
    assert page.program == "gpu/hdp.py"
    assert page.text.index("## Missed") < page.text.index("## Ring positions")
    assert "## What one GPU cannot show" in page.text
    assert hdp_page.page(data).splitlines()[0] in page.text


def test_a_page_exists_for_a_run_that_stopped_early() -> None:
    record = Record(None, 60.0, date="2026-01-01", command="", machine="", tag="", tiny=True)
    record.about(shapes={"layer": "", "offload": ""})
    assert record.attempt("b, a cell", int, expected=1e9) is None
    assert record.attempt("c, a cell", int, "no number") is None
    text = hdp_page.page(record.data)
    assert "not run: b, a cell" in text
    assert "failed: c, a cell: ValueError" in text
    assert "no result of part a" in text


def test_transfers_are_replaced_only_inside() -> None:
    before = ring_code.rotate
    with by_reference():
        assert ring_code.rotate is not before
    assert ring_code.rotate is before


def test_positions_are_those_in_the_document() -> None:
    assert positions(RingLayout([8, 4], 2, 0)).tolist() == [0, 1, 6, 7, 0, 3]
    assert positions(RingLayout([8, 4], 2, 1)).tolist() == [2, 3, 4, 5, 1, 2]


def test_a_position_without_tokens_has_no_work() -> None:
    bench = Bench(TINY, 64, 64, CPU)
    assert bench.whole_layer([1], 4, 1) is None
    assert sum(bench.whole_layer([1], 4, p) is not None for p in range(4)) == 1


def test_positions_that_did_not_run_count_the_mean_of_their_ring() -> None:
    table = TaskTable.of([[0, 1, 2], [2]], [0, 1])
    lengths, task = np.array([30, 5]), np.array([0, 1])
    way = hdp_steps.Way.of("hdp", table, task, lengths, 2)
    assert [m.tolist() for m in way.members] == [[0, 2], [0]]
    by = way.by_member(np.array([1.0, 3.0, 7.0]))
    assert by.tolist() == [1.0, 2.0, 3.0, 7.0]
    assert hdp_steps.with_waits(table, by, 3) == 10.0


def test_every_document_of_a_step_has_a_task_of_both_plans() -> None:
    case = hdp_steps.CASES[0]
    lengths = np.array([60_000, 20_000, 4000, 3000, 2000, 9000])
    ways = hdp_steps.ways_of(case, hdp_attention.MODEL, lengths)
    for way in ways:
        assert sorted(np.concatenate(way.documents).tolist()) == sorted(lengths.tolist())
    assert sum(map(len, ways[0].members)) == len(ways[0].table.task_rank)


def test_a_timeline_without_copies_is_the_sum_of_layers_and_slow_copies_extend_it() -> None:
    assert hdp_offload.predicted(0.0, 6, 1.0, 2.0, 9.0, 9.0) == 18.0
    assert hdp_offload.predicted(1.0, 6, 1.0, 2.0, 1.0, 1.0) == 18.0
    # four layers go out from 1 to 13; the last of them is back at 16; then 3 s for each, 2 hidden
    assert hdp_offload.predicted(1.0, 6, 1.0, 2.0, 3.0, 3.0) == 16.0 + 3 * 3 + 2 + 2


def test_the_grid_has_four_lengths_for_every_ring_size() -> None:
    found = hdp_attention.cells(LLAMA_8B, hdp_attention.REAL)
    for d in hdp_attention.REAL.sizes:
        mine = [lengths for lengths, size, _ in found if size == d]
        assert len(set(mine)) >= 4
        assert all(sum(n) <= d * hdp_attention.REAL.local for n in mine)
