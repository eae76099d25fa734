"""The stream of fixed jobs, byte for byte, as it was when its digests were written: users' data
order between releases.

A failure here means that a saved state would go on with other samples. If that is meant, ``python
-m tests.golden`` writes the digests anew, and the changelog says **Breaks:**.
"""

from __future__ import annotations

import json

import pytest

import overlord as ov
from overlord.setup.prepared_job import Options, PreparedJob
from tests.golden.jobs import FILE, STATE, arrays, jobs

KEPT = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ov.Job]:
    return jobs(tmp_path_factory.mktemp("golden"))


def test_the_file_holds_these_jobs_and_no_two_streams_are_alike(made: dict[str, ov.Job]) -> None:
    assert sorted(KEPT) == sorted(made)
    assert len({kept["arrays"] for kept in KEPT.values()}) == len(KEPT)
    assert all(len(kept["plans"]) > 2 for kept in KEPT.values())


@pytest.mark.parametrize("name", KEPT)
def test_a_fixed_job_gives_the_stream_it_always_gave(made: dict[str, ov.Job], name: str) -> None:
    run = ov.simulate(made[name], seed=3, loaders=dict.fromkeys(made[name].names, 2))
    assert run.error is None
    assert [s.plan_digest for s in run.steps[0]] == KEPT[name]["plans"]
    assert arrays(run.steps) == KEPT[name]["arrays"]


@pytest.mark.parametrize("name", KEPT)
def test_a_state_saved_then_goes_on_as_it_did(made: dict[str, ov.Job], name: str) -> None:
    job, kept = made[name], KEPT[name]
    fingerprint = PreparedJob(
        job, Options()
    ).fingerprint  # of the files as they are now: their bytes may differ by library
    state = {**kept["state"], "job": job.name, "fingerprint": fingerprint, "counts": {}}
    rest = ov.simulate(job, resume=state)
    half = len(kept["plans"]) // 2
    assert [s.plan_digest for s in rest.steps[0]] == kept["plans"][half:]
    assert arrays(rest.steps) == kept["rest"]
    again = ov.simulate(job, steps=half).end_state
    assert {key: again[key] for key in STATE} == kept["state"]
