"""Code of a user's that does not come to an end in a loader worker: it is named, and its worker is
not taken for dead.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.errors import DataStall
from tests.corpus import write_rows
from tests.processes import RUNTIMES, WAIT_S, launch, workers_of

pytestmark = pytest.mark.timeout(200)

NEVER = 40  # reads before it have shown to be short: what is short may be done in the event loop


def endless(row: dict[str, Any]) -> dict[str, Any]:
    if row["tokens"][0] == NEVER:
        threading.Event().wait()
    return row


class Endless:
    """A dataset that does not give one of its rows."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, k: int) -> dict[str, Any]:
        return endless({"tokens": [k]})


def stalls(source: ov.Source, runtime: str, named: str = "endless", **options: Any) -> str:
    job = ov.Job(
        name="endless",
        sources=[source],
        batch=ov.Batch(samples=8, context=8),
        slice_rows=8,
        until=8,
    )
    told: list[str] = []
    usual = {
        "stall_warn_s": 2.0,
        "stall_limit_s": 4.0,
        "prefetch": 1,
        "on_stall": lambda words, seconds: told.append(words),
    }
    if runtime != "local":
        usual |= {
            "lost_after_s": 2.5,
            "max_restarts": 0,
        }  # one that is taken for dead would end the job with another error
    with launch(job, runtime, **usual, **options) as session:
        before = workers_of(session) if runtime != "local" else []
        client, deadline = session.client(0), time.monotonic() + WAIT_S
        while True:
            with pytest.raises(DataStall) as stall:
                list(client)
            if all(
                any(named in words.lower() for words in some) for some in (told, [str(stall.value)])
            ):
                break
            assert time.monotonic() < deadline, (
                told,
                stall.value,
            )  # its worker may have been late to say so, and a stall is no end
        assert "recoveries" not in session.metrics() or not session.metrics()["recoveries"]
        assert (workers_of(session) if runtime != "local" else []) == before
    return str(stall.value)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_transform_that_does_not_end_is_named_with_its_row(runtime: str, tmp_path: Path) -> None:
    glob = write_rows(tmp_path, "parquet", [{"tokens": [k]} for k in range(64)], files=1)
    source = ov.Source(
        "web", glob, transforms=[ov.Map(endless, rows=True), ov.Tokens("tokens")], shuffle=False
    )
    found = stalls(source, runtime)
    assert "loader/web/0 is in Map(endless, rows=True) for " in found
    assert f"with row {NEVER} of {tmp_path}" in found


def test_so_is_one_in_a_process_of_its_own_with_the_rows_it_was_given(tmp_path: Path) -> None:
    glob = write_rows(tmp_path, "parquet", [{"tokens": [k]} for k in range(64)], files=1)
    transforms = [ov.Map(endless, rows=True), ov.Tokens("tokens")]
    found = stalls(
        ov.Source("web", glob, transforms=transforms, shuffle=False, workers="processes"),
        RUNTIMES[1],
    )
    assert "loader/web/0 is in Map(endless, rows=True), in process " in found
    assert f"with rows 40 to 47 of {tmp_path}" in found


def test_so_is_a_dataset_that_does_not_give_a_row() -> None:
    found = stalls(
        ov.Source("web", Endless(), transforms=[ov.Tokens("tokens")], shuffle=False), RUNTIMES[1]
    )
    assert "loader/web/0 is in Endless for " in found
    assert f", with row {NEVER} of dataset" in found


def test_so_is_a_factory_that_does_not_give_a_row() -> None:
    rows = ov.Factory(lambda: map(endless, ({"tokens": [k]} for k in range(64))))
    found = stalls(
        ov.Source("web", rows, transforms=[ov.Tokens("tokens")], shuffle=False),
        RUNTIMES[1],
        "factory",
    )
    assert "loader/web/0 is in Factory for " in found
    assert f", with row {NEVER} of shard 0" in found
