"""The throughput benchmarks cannot rot: tiny cells run as real ones do, and slopes and efficiencies
come out as worked out by hand.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import corpus as corpora
import rank_memory
import scaling
import throughput
from corpus import FILES, GROUPS_PER_FILE, Corpus, Words, name_of, open_corpus, write_source
from peers.kernel import RowBuffer, SourceRows
from peers.runner import SERVED, CellFailed, Figures, run_cell
from peers.work import Work

N_SOURCES = 3
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A few sources of some dozen kB, without a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    words = Words.invent(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "SOURCE_BYTES", 2**18)
        for number in range(N_SOURCES):
            write_source(folder / name_of(number), words, number, 1)
    return open_corpus(folder, N_SOURCES)


def work(tiny: Corpus, peer: str, **more: Any) -> Work:
    return Work(
        peer,
        "null",
        str(tiny.folder),
        N_SOURCES,
        300_000,
        context=2048,
        ranks=2,
        microbatches=2,
        **{"trainer": False, **more},
    )


def figures(**given: Any) -> Figures:
    zero = dict.fromkeys(Figures.__dataclass_fields__, 0) | {
        "peer": "torch",
        "job": "null",
        "n_sources": 5,
    }
    return Figures(
        **(
            zero
            | {"steady_tokens": 10**6, "tokens": 10**6}
            | {"steady_wall_s": 1.0, "wall_s": 1.0}
            | given
        )
    )


@pytest.mark.parametrize("peer", SERVED)
def test_connected_clients_get_the_tokens_and_every_process_counts(tiny: Corpus, peer: str) -> None:
    found = run_cell(work(tiny, peer), LIMIT_S)
    assert found.tokens >= 300_000
    # clients, launcher, a loader worker and a constructor worker
    assert found.processes >= 2 + 1 + 2
    assert 0 < found.clients_idle_mb == found.idle_pss_mb, "only what ranks import is left out"
    assert found.clients_pss_mb < found.pss_mb
    assert 0 < found.first_step_s < found.wall_s
    assert 0 < found.startup_cpu_s < found.cpu_s


def test_a_cell_has_as_many_loader_workers_as_were_asked_for(tiny: Corpus) -> None:
    one, three = (
        run_cell(work(tiny, "overlord-process", equal=True, hosts=n), LIMIT_S) for n in (1, 3)
    )
    assert three.processes == one.processes + 2


def test_ranks_of_a_dataloader_may_have_several_workers(tiny: Corpus) -> None:
    pytest.importorskip("torch")
    found = run_cell(work(tiny, "torch-numpy", workers=2), LIMIT_S)
    assert found.tokens >= 300_000
    assert found.processes == 2 + 2 * 2
    assert found.clients_pss_mb == 0


def test_ranks_of_every_loader_have_the_imports_of_a_trainer(tiny: Corpus) -> None:
    pytest.importorskip("torch")
    plain, trainer = (
        run_cell(work(tiny, "overlord", trainer=trainer), LIMIT_S) for trainer in (False, True)
    )
    assert trainer.idle_pss_mb > plain.idle_pss_mb + 50, "torch is imported, and counts as imported"
    assert trainer.over_idle_mb < trainer.pss_mb - 50


def test_a_shuffled_dataloader_gives_every_row_of_a_pass_in_another_order(tiny: Corpus) -> None:
    source = tiny.sources[0]
    in_order, shuffled = (
        [row.tobytes() for row in SourceRows(source, "tokens", 0, 1, order)]
        for order in (None, np.random.default_rng(2))
    )
    assert Counter(shuffled) == Counter(in_order)
    assert shuffled != in_order


def test_a_row_buffer_loses_no_row_and_holds_as_many_as_it_may() -> None:
    buffer = RowBuffer(5, np.random.default_rng(1))
    left = [
        row
        for first in range(0, 40, 4)
        for row in buffer.exchange([0] * 4, [str(i) for i in range(first, first + 4)])[1]
    ]
    assert len(buffer.held) == 5
    assert Counter([*left, *(row for _, row in buffer.held)]) == Counter(str(i) for i in range(40))
    assert left != sorted(left, key=int)


def test_a_cell_that_cannot_start_says_why(tiny: Corpus) -> None:
    with pytest.raises(CellFailed, match="FileNotFoundError"):
        run_cell(
            Work("overlord-process", "null", str(tiny.folder / "nowhere"), 1, 1000, ranks=1),
            LIMIT_S,
        )


@pytest.mark.parametrize("readers", [1, 3, FILES * GROUPS_PER_FILE])
def test_readers_share_an_epoch_without_overlap(tiny: Corpus, readers: int) -> None:
    source = tiny.sources[0]
    read = Counter(
        row.tobytes()
        for reader in range(readers)
        for row in SourceRows(source, "tokens", reader, readers)
    )
    assert sum(read.values()) == source.rows
    assert read == Counter(row.tobytes() for row in SourceRows(source, "tokens", 0, 1))


def test_more_readers_than_row_groups_read_everything_each_from_another_place(tiny: Corpus) -> None:
    source, groups = tiny.sources[0], FILES * GROUPS_PER_FILE
    rows = [
        [row.tobytes() for row in SourceRows(source, "tokens", reader, groups + 1)]
        for reader in range(groups)
    ]
    assert all(Counter(read) == Counter(rows[0]) and len(read) == source.rows for read in rows)
    assert len({read[0] for read in rows}) == groups


def test_the_price_of_a_rank_is_the_slope_over_idle() -> None:
    torch = [figures(ranks=r, pss_mb=300.0 * r, idle_pss_mb=200.0 * r) for r in (2, 8)]
    ours = [
        figures(
            peer="overlord-process",
            ranks=r,
            pss_mb=100 + 30.0 * r,
            idle_pss_mb=50 + 20.0 * r,
            clients_pss_mb=25.0 * r,
            clients_idle_mb=20.0 * r,
        )
        for r in (8, 2)
    ]
    rows = {row[2]: row for row in rank_memory.slope_rows([*torch, *ours])}
    assert rows["torch"][3:] == ["100.0", "300.0", "", "1.00"]
    assert rows["overlord-process"][3:] == ["10.0", "30.0", "5.0", "0.10"]
    assert "| null | 5 | overlord-process | 10.0 |" in rank_memory.page(
        [*torch, *ours], "2026-01-01", "python benchmarks/rank_memory.py"
    )


def test_efficiency_is_speed_over_what_so_many_workers_would_give() -> None:
    def point(peer: str, n: int, wall_s: float) -> scaling.Point:
        return scaling.Point(
            peer, n, [figures(peer=peer, ranks=8, steady_wall_s=wall_s, steady_cpu_s=2.0)]
        )

    points = [
        point("overlord-process", 1, 4.0),
        point("overlord-process", 4, 1.25),
        point("torch", 2, 1.0),
        point("torch", 4, 0.5),
    ]
    rows = scaling.rows_of(points)
    assert [row[5:7] for row in rows] == [
        ["1.00", "100%"],
        ["3.20", "80%"],
        ["1.00", "100%"],
        ["2.00", "100%"],
    ]
    assert rows[1][9] == "1.6"
    assert "| overlord-process | 4 |" in scaling.page(
        points, "2026-01-01", "python benchmarks/scaling.py"
    )


@given(n=st.integers(1, 64), ranks=st.integers(1, 16))
def test_a_dataloader_gets_exactly_so_many_workers_in_no_more_ranks_than_asked_for(
    n: int, ranks: int
) -> None:
    plan, corpus = scaling.Plan(hosts=(n,), ranks=ranks), Corpus(Path("nowhere"), ())
    theirs, ours = plan.work("torch", n, corpus), plan.work("overlord-process", n, corpus)
    assert theirs.ranks * theirs.workers == n
    assert theirs.ranks <= ranks
    assert (ours.hosts, ours.ranks) == (n, ranks)
    assert theirs.tokens == ours.tokens


def test_the_table_tells_what_clients_hold_of_the_memory() -> None:
    bare = figures(peer="bare", steady_cpu_s=0.02, cpu_s=0.02, ranks=8)
    ours = figures(
        peer="overlord-process",
        steady_cpu_s=0.03,
        cpu_s=0.05,
        pss_mb=500.0,
        idle_pss_mb=100.0,
        clients_pss_mb=120.0,
        ranks=8,
    )
    setting = throughput.Setting("null", 5, [bare, ours, bare])
    row = dict(zip(throughput.HEADINGS, throughput.rows_of(setting)[1], strict=True))
    assert row["x bare"] == "1.50"
    assert row["with imports MB (clients)"] == "500 (120)"
    assert row["MB over imports"] == "400", "imports are left out for everyone"
    assert "8 ranks" in throughput.markdown([setting], 1, "2026-01-01", [])


def test_overlord_runs_with_every_number_of_arenas_that_was_asked_for_and_with_its_own() -> None:
    assert throughput.with_arenas(["bare", "overlord-process", "torch"], [3, 64]) == [
        "bare",
        "overlord-process",
        "overlord-process@3",
        "overlord-process@64",
        "torch",
    ]
    assert throughput.parts_of("overlord-process@64") == ("overlord-process", 64)
    assert throughput.parts_of("bare") == ("bare", 0)
    assert replace(Work("overlord", "null", "", 1, 1), arenas=3).label == "overlord@3"
