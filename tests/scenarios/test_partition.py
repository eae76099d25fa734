"""How many loaders a source has, and what it was measured to cost, is never seen in the stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.scaling.profile import JobProfile, SourceProfile
from overlord.setup import profile_store
from overlord.setup.measure import machine
from overlord.setup.prepared_job import Options, PreparedJob
from tests.corpus import write_rows
from tests.processes import RUNTIMES, Played, launch, play, run, until

pytestmark = pytest.mark.timeout(200)
COSTS = {
    "web": 1e-3,
    "code": 8e-2,
    "books": 3e-3,
}  # seconds of a sample: code is what the job is made of


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ov.Job:
    folder = tmp_path_factory.mktemp("partition")
    for first, name in enumerate(COSTS):
        rows = [{"n": k, "tokens": [1000 * first + k] * (1 + k % 9)} for k in range(160)]
        write_rows(folder / name, "parquet", rows, row_group_size=10)
    return ov.Job(
        name="partitioned",
        batch=ov.Batch(samples=12, context=64, microbatches=2),
        place=ov.ClientPlaceTree(dp=2),
        slice_rows=4,
        seed=11,
        until=16,
        shuffle_chunks=6,
        sources=[
            ov.Source(
                n, str(folder / n / "*.parquet"), transforms=[ov.Tokens("tokens")], weight=1 + k
            )
            for k, n in enumerate(COSTS)
        ],
    )


@pytest.fixture(scope="module")
def alone(job: ov.Job) -> Played:
    """One loader a source, in one process."""
    return run(job, "local", partition="off", loaders=dict.fromkeys(COSTS, 1))


def loaders_of(session: ov.Session) -> dict[str, int]:
    rows = [a["name"] for a in session.metrics()["actors"] if a["role"] == "loader"]
    return {name: sum(row.startswith(f"loader/{name}/") for row in rows) for name in COSTS}


def keep(job: ov.Job, cache: Path, costs: dict[str, float]) -> None:
    ready = PreparedJob(job, Options(cache_dir=cache))
    marks = profile_store.fingerprints(ready)
    ready.close()
    fields: dict[str, Any] = {"samples": 500, "read_s": 0.0, "tokens": 5.0}
    made = JobProfile.of(
        (
            SourceProfile(name=n, fingerprint=marks[n], transform_s=s, **fields)
            for n, s in costs.items()
        ),
        machine(),
    )
    assert profile_store.save(profile_store.path_of(job, cache), made)


@pytest.mark.parametrize("runtime", ["local", "process", "ray"])
def test_the_stream_is_the_same_whatever_was_measured(
    job: ov.Job, alone: Played, runtime: str, tmp_path: Path
) -> None:
    options = {"cache_dir": tmp_path, "hosts": 4, **({"workers": 4} if runtime == "local" else {})}
    keep(job, tmp_path, COSTS)
    with launch(job, runtime, **options) as session:
        assert loaders_of(session) == {"web": 1, "code": 4, "books": 1}
        assert play(session) == alone
        found = until(
            lambda: code if (code := session.profile().sources["code"]).samples > 500 else None
        )  # a host may not answer in time
        assert found.transform_s < COSTS["code"], "what loaders measured is on its way in"
    if runtime == "local":  # the other way round, and broken
        keep(job, tmp_path, {"web": 8e-2, "code": 1e-5, "books": 1e-5})
        with launch(job, runtime, **options) as session:
            assert loaders_of(session) == {"web": 4, "code": 1, "books": 1}
            assert play(session) == alone
        profile_store.path_of(job, tmp_path).write_text("{")
        with launch(job, runtime, **options) as session:
            assert play(session) == alone


def test_without_partition_loaders_follow_the_index_and_the_stream_is_the_same(
    job: ov.Job, alone: Played, tmp_path: Path
) -> None:
    keep(job, tmp_path, COSTS)
    with launch(job, "process", cache_dir=tmp_path, hosts=4, partition="off") as session:
        assert loaders_of(session) == {"web": 1, "code": 2, "books": 2}, (
            "by their weights: rows are alike"
        )
        assert play(session) == alone


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_job_goes_on_with_another_partition_than_it_was_saved_with(
    job: ov.Job, alone: Played, runtime: str, tmp_path: Path
) -> None:
    keep(job, tmp_path, COSTS)
    with launch(
        job, runtime, cache_dir=tmp_path, hosts=3, **({"workers": 3} if runtime == "local" else {})
    ) as session:
        begun = play(session, steps=5)
    rest = run(job, "local", resume=begun.states[-1], partition=None)
    assert {rank: begun.steps[rank] + rest.steps[rank] for rank in begun.steps} == alone.steps
