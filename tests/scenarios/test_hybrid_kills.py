"""Processes that are killed while rings share documents: every rank gets the bytes of the run that
nobody disturbed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from tests.processes import WAIT_S, Played, launch, play, run, until
from tests.scenarios.test_coordinator_process import killed
from tests.scenarios.test_failover import APART, EVERYONE, killing, recovered
from tests.scenarios.test_hybrid import CASES

pytestmark = pytest.mark.timeout(4 * WAIT_S)

NAMES = ("any ring", "tensor parallelism")


def job(name: str, **changes: Any) -> ov.Job:
    made = CASES[name].job()
    sources = [
        ov.Source(s.name, s.uri, transforms=s.transforms, weight=s.weight) for s in made.sources
    ]
    return CASES[name].job(sources=sources, until=24, **changes)


@pytest.fixture(scope="module", params=NAMES)
def calm(request: pytest.FixtureRequest) -> tuple[str, Played]:
    return request.param, run(job(request.param), "local")


@pytest.mark.parametrize(
    "names", [EVERYONE[:1], EVERYONE[1:3], EVERYONE[:2] + EVERYONE[2:4]], ids="+".join
)
def test_all_ranks_of_a_ring_get_the_same_bytes(
    calm: tuple[str, Played], names: tuple[str, ...]
) -> None:
    name, wanted = calm
    with launch(job(name), **APART) as session:
        got = play(session, act={5: killing(*names), 12: killing(*names)})
        until(lambda: set(recovered(session)) >= {n for n in names if n in EVERYONE[:4]})
    assert got == wanted


def test_a_killed_coordinator_plans_the_same_rings(
    calm: tuple[str, Played], tmp_path: Path
) -> None:
    name, wanted = calm
    made = job(name, journal=str(tmp_path / "journal"))
    with launch(made, **APART) as session:
        got = play(
            session, act={7: killed(), 15: killed("loader-worker/0", "constructor-worker/1")}
        )
    assert got == wanted


def test_a_job_that_is_launched_again_continues_from_its_journal(
    calm: tuple[str, Played], tmp_path: Path
) -> None:
    name, wanted = calm
    made = job(name, journal=str(tmp_path / "journal"))
    with launch(made, **APART) as session:
        first = play(session, steps=9)
    with launch(made, resume="auto", **APART) as session:
        rest = play(session)
    assert {r: first.steps[r] + rest.steps[r] for r in first.steps} == wanted.steps
