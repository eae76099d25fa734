"""Hundreds of steps under real kills and stops at moments drawn by lot: every rank gets, byte for
byte, what an undisturbed run gives.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.drill.faults import DrillFault
from overlord.drill.run import Drill, Outcome, run_disturbed, run_undisturbed
from tests.internals import DRILL_STRIKES, running_job
from tests.processes import WAIT_S, WORKER_RUNTIME, left_after, until, workers_lost
from tests.scenarios.test_process import source
from tests.sizes import part

STEPS = 240
OPTIONS = {
    "hosts": 6,
    "sources_per_host": 1,
    "constructor_hosts": 2,
    "prefetch": 3,
    "stall_limit_s": 60.0,
    "runtime": WORKER_RUNTIME,
}
OPTIONS |= {
    "max_restarts": 30
}  # on a machine with much else to do, workers that live are taken for dead now and then
OPTIONS |= {
    "lost_after_s": 1.0 if WORKER_RUNTIME == "process" else 4.0
}  # Ray's starts take the cores
# on Ray each takes a minute: some 30 starts
LOTS = part([(1, "none"), (2, "all")], [(1, "all"), (2, "none")] * (WORKER_RUNTIME == "process"))


def job() -> ov.Job:
    sources = [source(name, 400 + 30 * k, 1000 * k) for k, name in enumerate("abcdef")]
    return ov.Job(
        name="faults",
        sources=sources,
        place=ov.ClientPlaceTree(dp=2),
        batch=ov.Batch(samples=12, microbatches=2, context=256),
        seed=5,
        until=STEPS,
        shuffle_chunks=2,
        slice_rows=16,
    )


def by_lot(seed: int) -> list[DrillFault]:
    """Some ten faults, of all roles and both kinds; two strike everything at once."""
    lot = random.Random(seed)
    moments = sorted(lot.sample(range(3, STEPS - 10), 9))
    parts = [
        "planner",
        "loader-worker",
        "constructor-worker",
        "loader-worker/3",
        "planner",
        "loader-worker",
        "constructor-worker/1",
        "all",
        "all",
    ]
    lot.shuffle(parts)
    faults = [DrillFault("kill", whom, at) for whom, at in zip(parts, moments, strict=True)]
    k = lot.randrange(len(faults))
    faults[k] = replace(faults[k], count=5, target="loader-worker")
    stop = lot.choice([f for f in faults if f.target not in ("all",)])
    return [replace(f, action="stop") if f is stop else f for f in faults]


@pytest.fixture(scope="module")
def calm() -> Outcome:
    return run_undisturbed(Drill(job=job(), faults=(), steps=STEPS))


@pytest.mark.parametrize(("seed", "shadows"), LOTS)
def test_hundreds_of_steps_with_faults_drawn_by_lot(
    seed: int, shadows: str, calm: Outcome, tmp_path: Path
) -> None:
    faults = by_lot(seed)
    hit = run_disturbed(
        Drill(
            job=job(),
            faults=faults,
            steps=STEPS,
            step_s=0.004,
            options={**OPTIONS, "shadows": shadows},
        ),
        tmp_path,
    )
    assert not hit.missed, [str(f) for f in hit.missed]
    assert len(hit.strikes) >= len(faults)
    assert hit.recoveries
    assert not left_after([strike.pid for strike in hit.strikes], WAIT_S), (
        "nor does one that was stopped go on when it wakes"
    )
    assert hit.delivered.digests == calm.delivered.digests
    assert hit.delivered.order == calm.delivered.order
    assert hit.delivered.samples == calm.delivered.samples


@pytest.mark.parametrize(
    "fault",
    [
        DrillFault("stop", "loader-worker", 8),
        DrillFault("kill", "all", 9),
        DrillFault("kill", "planner", 9),
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [10, 40])
def test_the_worker_that_was_hit_last_is_reported(
    fault: DrillFault, steps: int, tmp_path: Path
) -> None:
    """Its process is there before planning goes on, and the steps that are left may all have been
    delivered when it was hit.
    """
    asked = Drill(job=replace(job(), until=steps), faults=[fault], steps=10, options=OPTIONS)
    hit = run_disturbed(asked, tmp_path)
    assert not hit.unrecovered
    assert workers_lost(hit.recoveries, struck := {s.name for s in hit.strikes}) == struck


def test_one_that_does_not_come_back_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlord.drill.run.SETTLE_S", 0.3)
    strike, fault = DRILL_STRIKES.real, DrillFault("stop", "loader-worker", 9)

    def when_the_last_step_is_there(session: ov.Session, *how: Any) -> None:
        """Else it is that of the one that is stopped which is waited for."""
        until(lambda: all(len(client.queue) for client in running_job(session).clients.values()))
        strike(session, *how)

    DRILL_STRIKES.replace(monkeypatch, when_the_last_step_is_there)
    hit = run_disturbed(
        Drill(job=job(), faults=[fault], steps=10, options={**OPTIONS, "lost_after_s": 60.0}),
        tmp_path,
    )
    assert hit.unrecovered == ["loader-worker/0, hit after 9 steps, was not replaced within 0.3 s"]
