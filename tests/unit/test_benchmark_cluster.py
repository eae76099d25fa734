"""The cluster benchmark cannot rot: orphans are counted and ended, what is left out is said,
targets are judged as by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import cluster
from peers import ray_data
from peers.cluster_cell import Outcome
from peers.contract import check_microbatch, real_tokens
from peers.ledger import PARTS

BENCHMARKS = Path(cluster.__file__).parent


def outcome(peer: str, cpu_s: float, mb: float, **more: Any) -> Outcome:
    """A run of a million tokens."""
    given: dict[str, Any] = dict.fromkeys(Outcome.__dataclass_fields__, 0)
    given |= {
        "peer": peer,
        "job": "null",
        "n_sources": 300,
        "ranks": 8,
        "tokens": 10**6,
        "steady_tokens": 10**6,
        "steady_s": 1.0,
        "whole_cpu_s": cpu_s,
    }
    given |= {
        "steady_cpu": dict.fromkeys(PARTS, cpu_s / len(PARTS)),
        "pss_mb": dict.fromkeys(PARTS, mb / len(PARTS)) | {"all": mb},
    }
    return Outcome(
        **given | {"idle_parts": dict.fromkeys(PARTS, 0.0), "waits": [0.001], "ahead": 3} | more
    )


def test_what_lost_its_parent_is_found_and_ended_by_its_id() -> None:
    program = (
        "import os, subprocess\n"
        "from peers.ledger import adopt_orphans, below_me, end_all, living\n"
        "adopt_orphans()\n"
        "said = subprocess.check_output(['sh', '-c', 'sleep 60 >/dev/null & echo $!'])\n"
        "orphan, = below_me()\n"
        "assert orphan.pid == int(said) and orphan.parent == os.getpid(), (orphan, said)\n"
        "end_all(10.0)\n"
        "assert not below_me()\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
    )


def test_one_source_a_worker_is_measured_with_few_sources_and_left_out_with_a_reason() -> None:
    made = cluster.settings_of(
        ["null", "tokenized"], [5, 100, 300], [2, 8], ["bare", "overlord-ray", "overlord-ray-one"]
    )
    of_one = [(s.job, s.n_sources, s.ranks) for s in made if cluster.ONE in s.peers]
    assert of_one == [("null", 5, 2), ("null", 5, 8), ("null", 100, 8), ("tokenized", 5, 8)]
    assert "above 100 sources is left out" in cluster.one_note(made)
    made[0].runs = [
        outcome("overlord-ray", 1, len(PARTS) * 100, processes=5),
        outcome("overlord-ray-one", 1, len(PARTS) * 2600, processes=30),
    ]
    assert "One such host more took 100 MB, " in cluster.one_note(made)


@pytest.mark.parametrize(
    ("cpu_s", "mb", "first_s", "missed"),
    [(0.05, 1000, 12, 0), (0.07, 1000, 12, 1), (0.05, 9000, 12, 2), (0.05, 1000, 21, 1)],
)
def test_targets_are_judged_as_by_hand(
    cpu_s: float, mb: float, first_s: float, missed: int
) -> None:
    setting = cluster.Setting("null", 300, 8, ["bare", "overlord-ray", "ray-data", "ray-data-list"])
    setting.runs = [
        outcome("bare", 0.015, 100),
        outcome("overlord-ray", cpu_s, mb, first_s=first_s),
        outcome("bare", 0.025, 100),
    ]
    setting.runs += [outcome("ray-data", 0.3, 8000), outcome("ray-data-list", 0.2, 9001)]
    rows = cluster.verdicts([setting])
    assert len(rows) == 3 + 2 * 3
    assert sum("missed" in row[-1] for row in rows) == missed, rows


def test_the_page_names_a_cell_that_failed() -> None:
    setting = cluster.Setting(
        "null",
        5,
        2,
        ["bare", "ray-data"],
        [outcome("bare", 0.02, 100)],
        {"ray-data": "hung up\nmore"},
    )
    text = cluster.page([setting], "2026-01-01", "python benchmarks/cluster.py")
    assert "| ray-data | failed |" in text
    assert "- ray-data: hung up" in text
    assert all(len(row) == len(cluster.HEAD) for row in cluster.rows_of(setting))


def test_what_ray_data_packs_keeps_the_batch_contract() -> None:
    rows = [list(range(1, n + 1)) for n in (3, 5, 8, 2, 9, 1)]
    table = ray_data.tag(pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))}), 4)
    packed = ray_data.packed(table, [np.array(row[:8], np.int32) for row in rows], 8)
    microbatches = list(ray_data.microbatches(packed, np.arange(8)))
    for microbatch in microbatches:
        check_microbatch(microbatch, 8, 5)
    assert [real_tokens(m) for m in microbatches] == [8, 8, 2, 8, 1]


def test_nothing_is_judged_beside_a_loader_that_failed_and_a_failure_of_ours_is_a_miss() -> None:
    theirs = cluster.Setting(
        "tokenized",
        5,
        8,
        ["overlord-ray", "ray-data"],
        [outcome("overlord-ray", 0.05, 100)],
        {"ray-data": "no step"},
    )
    ours = cluster.Setting(
        "tokenized",
        5,
        8,
        ["overlord-ray", "ray-data"],
        [outcome("ray-data", 0.05, 100)],
        {"overlord-ray": "no step"},
    )
    assert [row[-1] for row in cluster.verdicts([theirs])] == ["not judged"]
    assert [row[-1] for row in cluster.verdicts([ours])] == ["**missed**"]


def test_cpu_that_differs_by_less_than_single_runs_do_is_not_called_a_win() -> None:
    runs = [outcome("overlord-ray", 0.097, 90), outcome("ray-data-list", 0.1, 100)]
    setting = cluster.Setting("tokenized", 5, 8, ["overlord-ray", "ray-data-list"], runs)
    assert [row[-1] for row in cluster.verdicts([setting])] == [
        "too close to tell",
        "too close to tell",
        "met",
    ]


def test_of_several_runs_the_median_is_shown_and_a_difference_of_all_runs_counts() -> None:
    def setting(theirs: list[float]) -> cluster.Setting:
        runs = [outcome("bare", 0.02, 10)] * 4 + [
            outcome("overlord-ray", cpu, 90) for cpu in (0.093, 0.09, 0.095)
        ]
        runs += [outcome("ray-data-list", cpu, 100) for cpu in theirs]
        return cluster.Setting(
            "tokenized", 5, 8, ["bare", "overlord-ray", "ray-data-list"], runs, repeats=3
        )

    apart, mixed = setting([0.096, 0.1, 0.098]), setting([0.094, 0.1, 0.098])
    assert apart.cells() == ["bare", "overlord-ray", "ray-data-list"] * 3 + ["bare"]
    assert apart.of("overlord-ray").cpu == pytest.approx(0.093)  # type: ignore[union-attr]
    assert "(0.0900 to 0.0950)" in cluster.rows_of(apart)[1][4]
    assert [row[-1] for row in cluster.verdicts([apart])] == ["met"] * 3
    assert [row[-1] for row in cluster.verdicts([mixed])] == ["too close to tell"] * 2 + ["met"]
    assert "3 rounds of every loader" in cluster.page(
        [apart], "2026-01-01", "python benchmarks/cluster.py"
    )
