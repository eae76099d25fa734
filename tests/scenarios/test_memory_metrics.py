"""What ``metrics()`` says of memory, where everything is one process and where there are
several.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.observe.metrics import pss_by_role
from tests.corpus import write_rows
from tests.internals import running_job
from tests.processes import WORKER_RUNTIME, heard, until

pytestmark = pytest.mark.timeout(200)
ROWS = [{"tokens": list(range(1 + i % 40)), "n": i} for i in range(400)]


def job_of(folder: Path) -> ov.Job:
    for name in ("small", "large"):
        write_rows(folder / name, "parquet", ROWS, row_group_size=100)
    sources = [
        ov.Source(name, str(folder / name), transforms=[ov.Tokens("tokens")], weight=weight)
        for name, weight in (("small", 1), ("large", 3))
    ]
    return ov.Job(
        name="memory",
        sources=sources,
        place=ov.ClientPlaceTree(dp=2),
        batch=ov.Batch(samples=16, context=64),
        seed=3,
        slice_rows=16,
    )


def figures(job: ov.Job, runtime: str, **options: Any) -> dict[str, Any]:
    with ov.launch(job, runtime=runtime, **options) as session:
        clients = [session.client(rank) for rank in range(2)]
        for _ in range(3):
            for client in clients:
                next(client)
        return heard(session)


@pytest.mark.parametrize(
    ("runtime", "options", "roles"),
    [
        ("local", {}, {"session"}),
        (
            WORKER_RUNTIME,
            {"hosts": 2, "sources_per_host": 1},
            {"session", "planner", "loaders", "constructors"},
        ),
        (
            WORKER_RUNTIME,
            {"hosts": 2, "sources_per_host": 1, "shadows": "all"},
            {"session", "planner", "loaders", "constructors"},
        ),
    ],
)
def test_every_process_counts_once_by_its_role_and_every_byte_by_its_source(
    tmp_path: Path, runtime: str, options: dict[str, Any], roles: set[str]
) -> None:
    found = figures(job_of(tmp_path), runtime, **options)
    memory, sources = found["memory"], found["sources"]
    assert set(memory["roles"]) == roles
    assert sum(memory["roles"].values()) == memory["pss"]
    assert all(n > 2**20 for n in memory["roles"].values())  # an interpreter alone is more
    for what, held in (
        ("ready_bytes", "ready"),
        ("kept_bytes", "kept"),
        ("window_bytes", "windows"),
        ("shadow_bytes", "shadows"),
    ):
        by_source = sum(s[what] for s in sources.values())
        if what != "shadow_bytes":  # of standbys the sources' figure has the open files too
            assert by_source == memory[held], what
        assert (by_source > 0) == (memory[held] > 0), what
    assert all(
        s["bytes"] == s["ready_bytes"] + s["kept_bytes"] + s["window_bytes"] + s["open_bytes"]
        for s in sources.values()
    )
    assert all(s["bytes"] > 0 for s in sources.values())


def all_answered(figures: dict[str, Any]) -> bool:
    return all(host["state"] == "running" for host in figures["hosts"])


def unchanged(row: dict[str, Any]) -> dict[str, Any]:
    return row


def test_a_worker_process_that_loaders_share_counts_once(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    apart = replace(
        job.sources[0],
        transforms=[ov.Map(unchanged, rows=True), ov.Tokens("tokens")],
        workers="processes",
    )
    options = {
        "hosts": 1,
        "constructor_hosts": 1,
        "loaders": {"small": 4},
        "autoscale": {"interval_s": 60.0},
    }
    with ov.launch(
        replace(job, sources=(apart, job.sources[1])), runtime=WORKER_RUNTIME, **options
    ) as session:
        for client in [session.client(rank) for rank in range(2)]:
            next(client)
        found = until(lambda: f if all_answered(f := running_job(session).metrics()) else None)
    workers = {row["worker_pid"]: row["worker_pss"] for row in found["loaders"] if row["worker"]}
    assert sum(row["worker"] for row in found["loaders"]) == 4
    assert len(workers) == 1
    assert pss_by_role(found)["workers"] == sum(workers.values())


def test_a_coordinator_with_a_process_of_its_own_counts_apart(tmp_path: Path) -> None:
    job = replace(job_of(tmp_path), journal=str(tmp_path / "journal"))
    roles = figures(job, WORKER_RUNTIME, hosts=1, constructor_hosts=1, memory="4GB")["memory"][
        "roles"
    ]
    assert set(roles) == {"session", "planner", "loaders", "constructors"}
    assert roles["planner"] > 2**20
