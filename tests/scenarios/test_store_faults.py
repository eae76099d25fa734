"""Stores that fail, by way of a proxy that breaks what goes through it: the same stream, or an
error that names the object.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import pytest

import overlord as ov
from overlord.errors import SourceError
from overlord.sources.index import build_index
from tests.corpus import SUFFIX
from tests.processes import WORKER_RUNTIME, halt
from tests.store_jobs import FORMATS, ROWS, S3, delivered, in_order, job, stream
from tests.stores import BUCKET, Fault, S3Server

pytest.importorskip("obstore")
pytestmark = pytest.mark.timeout(200)
PASSING = [
    (503, "503"),
    (500, "500"),
    (429, "429"),
    ("short", "short body"),
    ("less", "short body"),
    ("reset", "connection"),
    ("stall", "timeout"),
    ("whole", "whole object"),
    ("elsewhere", "other range"),
]


@pytest.mark.parametrize(("fault", "kind"), PASSING, ids=[str(f) for f, _ in PASSING])
def test_faults_that_pass_leave_the_stream_as_it_is_and_are_counted(
    proxy, corpus, monkeypatch, fault, kind
):
    wanted = stream(job(S3))  # and the index is cached: what fails below are reads of rows
    assert wanted == stream(job(str(corpus)))
    stalls = fault == "stall"
    if stalls:
        monkeypatch.setenv("OVERLORD_STORE_TIMEOUT_S", "0.5")
    proxy.faults = [Fault(fault, times=2, path=f"part-00001{SUFFIX[f]}") for f in FORMATS]
    with ov.launch(job(S3), stall_limit_s=60) as session:
        assert delivered(session.client(0)) == wanted
        assert session.quarantine() == []
        found = session.metrics()["sources"]
    for format in FORMATS:
        counts = found[format.replace(".", "-")]["store"]
        assert set(counts["errors"]) == {kind}
        assert counts["retries"] == counts["errors"][kind]
        assert counts["retries"] == 2 or (stalls and counts["retries"] > 2), (
            "on a slow machine others are late too"
        )
        assert counts["requests"] > 2
        assert counts["bytes"] > 0


def test_faults_of_listings_pass_too(proxy, corpus):
    proxy.faults = [
        Fault(503, times=2, path="list-type"),
        Fault("short", path="list-type"),
        Fault("reset", path="list-type"),
    ]
    assert build_index("web", f"{S3}/parquet/*.parquet").rows == len(ROWS)


def lasting(made: ov.Job, then: Any, after_steps: int = 2, runtime: str = "local") -> SourceError:
    """Takes some steps, lets something happen, and goes on until the job ends with an error."""
    with ov.launch(made, runtime=runtime, stall_limit_s=60, prefetch=1) as session:
        client = session.client(0)
        for _ in range(after_steps):
            next(client)
        then()
        with pytest.raises(SourceError) as caught:
            for _ in client:
                pass
        assert session.quarantine() == []
    return caught.value


each_format = pytest.mark.parametrize("far", FORMATS, indirect=True)


@each_format
def test_an_object_that_goes_away_and_comes_back_costs_time_and_nothing_else(
    proxy, server, far, large
):
    """The same bytes have the same entity tag."""
    [second] = [m["path"] for m in listed(server, far) if "part-00001" in m["path"]]
    kept, format = (
        bytes(server.bucket().get(second).bytes()),
        far.sources[0].uri.rpartition("/*.")[2],
    )
    with ov.launch(far, stall_limit_s=60, prefetch=1) as session:
        client = session.client(0)
        got = [next(client), next(client)]
        server.bucket().delete(second)
        thread = threading.Thread(
            target=lambda: (wait_for(session, "gone"), server.bucket().put(second, kept)),
            daemon=True,
        )
        thread.start()
        got += list(client)
        thread.join()
        found = session.metrics()["sources"]["web"]
        assert found["store"]["errors"]["gone"] >= 2
        assert found["storage"]["retries"] == found["store"]["retries"]
        assert session.quarantine() == []
    assert delivered(got) == stream(in_order(str(large / format), format))


@each_format
def test_an_object_that_goes_away_in_mid_run_is_named(proxy, server, far, impatient):
    error = lasting(far, lambda: delete_second(server, far))
    assert "the object does not exist" in str(error)
    assert "part-00001" in error.path
    assert "404" in error.problem


@pytest.mark.parametrize("far", ["parquet"], indirect=True)
def test_an_error_of_a_store_crosses_processes_as_it_is(proxy, server, far, monkeypatch):
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "3")  # which ends what goes well, too
    error = lasting(far, lambda: delete_second(server, far), runtime=WORKER_RUNTIME)
    assert (error.source, error.path) == ("web", f"s3://{BUCKET}/far/parquet/part-00001.parquet")
    assert "the object does not exist" in error.problem


def delete_second(server: S3Server, made: ov.Job) -> None:
    for meta in listed(server, made):
        if "part-00001" in meta["path"]:
            server.bucket().delete(meta["path"])


@each_format
def test_an_object_that_is_replaced_in_mid_run_is_named_and_its_bytes_are_not_mixed(
    proxy, server, far, impatient
):
    error = lasting(far, lambda: replace_all(server, far))
    assert "the object changed since it was indexed (412" in str(error)
    assert error.path.startswith(f"s3://{BUCKET}/far/")


def replace_all(server: S3Server, made: ov.Job) -> None:
    for meta in listed(server, made):
        old = bytes(server.bucket().get(meta["path"]).bytes())
        server.bucket().put(
            meta["path"], old[:-1] + bytes([old[-1] ^ 1])
        )  # the same size, another version


def listed(server: S3Server, made: ov.Job) -> list[Any]:
    prefix = os.path.dirname(made.sources[0].uri).removeprefix(f"s3://{BUCKET}/")
    return [m for page in server.bucket().list(prefix) for m in page]


@each_format
def test_a_store_that_ignores_conditions_is_caught_by_the_version_it_answers_with(
    proxy, server, far, impatient
):
    proxy.faults = [Fault("unconditional", times=10**6, path="part-")]
    error = lasting(far, lambda: replace_all(server, far))
    assert "the object changed since it was indexed (expected version" in str(error)


@each_format
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            503,
            r"could not be read \(bytes \d+ to \d+\) after \d+ attempts in \d\.\d s: 503 .*SlowDown \(seen: 503 x\d+\); check the store: it is busy",
        ),
        ("whole", r"after 3 attempts in .*got the whole object .*does not serve byte ranges"),
    ],
    ids=["503", "whole"],
)
def test_faults_that_last_end_the_job_with_what_was_tried(
    proxy, server, far, impatient, fault, says
):
    error = lasting(far, lambda: proxy.faults.append(Fault(fault, times=10**6, path="part-00001")))
    assert error.path.startswith(f"s3://{BUCKET}/far/")
    assert "part-00001" in error.path
    assert re.search(says, str(error), re.DOTALL), str(error)


@each_format
def test_a_store_that_is_well_again_after_giving_up_is_not_taken_for_bad_data(proxy, far):
    """Looking again finds sound bytes, but the rows that were not read are no bad rows."""
    before = (
        0 if far.sources[0].uri.endswith(".zst") else 2
    )  # requests that go well: it happens in the middle of a file
    error = lasting(
        far, lambda: proxy.faults.append(Fault("whole", times=3, path="part-00001", after=before))
    )
    assert "after 3 attempts" in str(error)


@pytest.mark.parametrize("far", ["jsonl.zst"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("stall", "no byte was received within the read timeout"),
        ("reset", "connection x"),
        ("less", "expected .* bytes, got"),
    ],
)
def test_silence_resets_and_short_answers_that_last_end_the_job_too(
    proxy, far, monkeypatch, impatient, fault, says
):
    if fault == "stall":
        monkeypatch.setenv("OVERLORD_STORE_TIMEOUT_S", "0.4")
        monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "2")
    error = lasting(far, lambda: proxy.faults.append(Fault(fault, times=10**6, path="part-00001")))
    assert re.search(says, str(error)), str(error)


@pytest.mark.parametrize("far", ["tar"], indirect=True)
def test_a_server_that_stands_still_for_a_while_costs_time_and_nothing_else(
    proxy, server, far, large, monkeypatch
):
    """The real thing: the server's process is stopped and goes on later."""
    monkeypatch.setenv("OVERLORD_STORE_TIMEOUT_S", "0.3")
    wanted = stream(in_order(str(large / "tar"), "tar"))
    with ov.launch(far, stall_limit_s=60, prefetch=1) as session:
        client = session.client(0)
        got = [next(client), next(client)]
        halt(server.pid)
        try:
            threading.Thread(
                target=lambda: (wait_for(session, "timeout"), os.kill(server.pid, signal.SIGCONT)),
                daemon=True,
            ).start()
            got += list(client)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert session.metrics()["sources"]["web"]["store"]["errors"].get("timeout", 0) >= 2
        assert session.quarantine() == []
    assert delivered(got) == wanted


def wait_for(session: ov.Session, kind: str) -> None:
    """Until that was met twice; whoever asked is told by what is counted if it never was."""
    deadline = time.monotonic() + 15
    while (
        time.monotonic() < deadline
        and session.metrics()["sources"]["web"]["store"]["errors"].get(kind, 0) < 2
    ):
        time.sleep(0.05)
