"""Drills: what a fault's text means, whom it hits, and that two runs which differ are told
apart.
"""

from __future__ import annotations

from collections import Counter

import pytest

from overlord.drill.delivery import Delivered, compare
from overlord.drill.faults import DrillFault, default_faults, parse_faults
from overlord.drill.run import DrillReport, Outcome, Strike, unrecovered
from overlord.drill.tables import waits_line
from overlord.errors import JobError

PARTS = [
    "planner",
    "loader-worker/10",
    "loader-worker/2",
    "loader-worker/0",
    "constructor-worker/0",
]


def test_a_fault_is_a_short_text_and_back():
    text = "kill:loader-worker/0@10,stop:planner@20,kill:loader-worker*5@35,kill:planner@15%15"
    found = parse_faults(text)
    assert found == [
        DrillFault("kill", "loader-worker/0", 10),
        DrillFault("stop", "planner", 20),
        DrillFault("kill", "loader-worker", 35, count=5),
        DrillFault("kill", "planner", 15, every=15),
    ]
    assert ",".join(map(str, found)) == text
    assert parse_faults(" kill:planner@1 ,") == [DrillFault("kill", "planner", 1)]


def test_every_mistake_is_told_at_once():
    with pytest.raises(JobError) as caught:
        parse_faults("kil:planner@3,kill:loader@4,kill:planner,kill:loader-worker*0@1")
    assert len(caught.value.problems) == 4
    assert "did you mean 'kill'" in str(caught.value)
    assert "did you mean 'loader-worker'" in str(caught.value)
    assert "expected SIGNAL:WORKER@STEP" in str(caught.value)


def test_what_a_fault_cannot_do_is_refused_and_not_left_out():
    with pytest.raises(JobError) as caught:
        parse_faults(
            "kill:planner@3%0,kill:all*2@3,kill:planner*2@1,kill:loader-worker/0*3@1,stop:constructor-worker*2@1%1"
        )
    assert len(caught.value.problems) == 4
    assert "'kill:planner@3%0': expected at least one step between two strikes, got %0" in str(
        caught.value
    )
    assert (
        "'kill:all*2@3': expected loader-worker or constructor-worker with *2, got 'all'; "
        "leave *2 out" in str(caught.value)
    )


def test_the_longest_wait_is_that_of_step_0_if_a_fault_struck_before_it():
    def line(taken: int, *waits_s: float) -> str:
        fault = DrillFault("kill", "planner", taken)
        return waits_line(
            DrillReport(
                None,
                Outcome(),
                Outcome(waits_s=list(waits_s), strikes=[Strike(fault, "planner", 1, taken)]),
            )
        )  # type: ignore[arg-type]

    assert (
        line(0, 2.0, 0.001, 0.003)
        == "wait per step: median 3.0 ms, longest 2000 ms (step 0); 3 steps"
    )
    assert (
        line(1, 2.0, 0.001, 0.003)
        == "wait per step: median 2.0 ms, longest 3 ms (step 2); 3 steps, without step 0"
    )
    assert line(0, 2.0) == "wait per step: median 2000.0 ms, longest 2000 ms (step 0); 1 steps"


def test_a_worker_is_restored_when_another_process_is_there_and_its_recovery_is_reported():
    last = {
        "loader-worker/0": Strike(
            DrillFault("stop", "loader-worker", 3), "loader-worker/0", 11, 3, recovered=1
        )
    }

    def left(pid: int, recovered: int) -> dict[str, str]:
        actors = [{"name": "loader-worker/0", "role": "host", "pid": pid}]
        return unrecovered(
            {"actors": actors, "recoveries": [{"part": "loader-worker/0"}] * recovered}, last
        )

    assert left(11, 1) == {"loader-worker/0": "was not replaced"}
    assert left(12, 1) == {"loader-worker/0": "is not among the recoveries of the metrics"}, (
        "the row is of the time before"
    )
    assert left(12, 2) == {}


def test_a_drill_of_nothing_is_refused():
    with pytest.raises(JobError, match="expected SIGNAL:WORKER@STEP"):
        parse_faults(" , ")


def test_a_role_hits_the_first_of_its_workers_by_number():
    assert DrillFault("kill", "loader-worker", 0, count=2).choose(PARTS) == [
        "loader-worker/0",
        "loader-worker/2",
    ]
    assert DrillFault("kill", "loader-worker/10", 0).choose(PARTS) == ["loader-worker/10"]
    assert DrillFault("kill", "loader-worker/7", 0).choose(PARTS) == []
    assert DrillFault("kill", "planner", 0).choose(PARTS) == ["planner"]
    assert DrillFault("kill", "all", 0).choose(PARTS) == PARTS


def test_a_fault_may_strike_again_and_again():
    assert [k for k in range(50) if DrillFault("kill", "planner", 15, every=15).strikes_at(k)] == [
        15,
        30,
        45,
    ]
    assert [k for k in range(50) if DrillFault("kill", "planner", 15).strikes_at(k)] == [15]


def test_the_usual_faults_are_one_of_each_kind_within_the_run():
    found = default_faults(40, planner=True)
    assert [(f.action, f.target) for f in found] == [
        ("kill", "loader-worker"),
        ("kill", "planner"),
        ("kill", "constructor-worker"),
        ("stop", "loader-worker"),
    ]
    assert all(0 < f.step < 40 for f in found)
    assert "planner" not in {f.target for f in default_faults(40, planner=False)}


def delivered(*rows: tuple[int, int, str, list[str]]) -> Delivered:
    made = Delivered()
    for rank, step, mark, samples in rows:
        made.digests[rank, step] = mark
        made.order.setdefault(rank, []).append(step)
        made.samples.update(Counter((rank, s) for s in samples))
    return made


def test_runs_that_differ_are_told_apart():
    wanted = delivered((0, 0, "x", ["a", "b"]), (0, 1, "y", ["c"]))
    assert not compare(wanted, delivered((0, 0, "x", ["a", "b"]), (0, 1, "y", ["c"])))
    lost = compare(wanted, delivered((0, 0, "x", ["a", "b"])))
    assert (lost.lost, lost.repeated, lost.changed, lost.disordered) == (1, 0, ((0, 1),), (0,))
    twice = compare(wanted, delivered((0, 0, "x", ["a", "b"]), (0, 1, "y", ["c", "a"])))
    assert (twice.lost, twice.repeated) == (0, 1)
    assert compare(wanted, delivered((0, 0, "x", ["a", "b"]), (0, 1, "z", ["c"]))).changed == (
        (0, 1),
    )
    assert compare(wanted, delivered((0, 1, "y", ["c"]), (0, 0, "x", ["a", "b"]))).disordered == (
        0,
    )
    assert wanted.chain != delivered((0, 0, "x", ["a", "b"]), (0, 1, "z", ["c"])).chain
