"""A store for scenarios: the server, a proxy before it, and files in it. Started only for tests
that ask for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import overlord as ov
from overlord.sources.retry import Clock, StorageStats
from tests.corpus import write_rows
from tests.processes import WORKER_RUNTIME
from tests.store_jobs import BIG, FORMATS, ROWS, in_order
from tests.stores import BUCKET, FOREIGN, PROXIES, CannotRun, Proxy, S3Server, s3_server

TRIES = 3


@pytest.fixture(autouse=True)
def _on_ray(request: pytest.FixtureRequest) -> None:
    """Tests that run on Ray share one cluster, or are skipped with the reason."""
    if WORKER_RUNTIME == "ray" or (
        "runtime" in request.fixturenames and request.getfixturevalue("runtime") == "ray"
    ):
        request.getfixturevalue("ray_cluster")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with contextlib.ExitStack() as stack:
        for left in reversed(range(TRIES)):
            try:
                running = stack.enter_context(s3_server(tmp_path_factory.mktemp("s3")))
                break
            # it may have been a port that somebody else took: all tests of stores are not to be
            # left out for it
            except CannotRun as why:
                if not left:
                    pytest.skip(str(why))
        yield running


@pytest.fixture(scope="session")
def the_proxy(server: S3Server) -> Iterator[Proxy]:
    made = Proxy(server)
    yield made
    made.close()


@pytest.fixture
def proxy(server: S3Server, the_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """An environment in which everything goes to the server by way of the proxy. Time-outs that
    none meets whose requests go well: how many there were is counted. Tests of requests that do not
    have shorter ones.
    """
    for name in [n for n in os.environ if n.startswith(FOREIGN) or n.lower() in PROXIES]:
        monkeypatch.delenv(name)
    for name, value in server.environment(the_proxy.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "20")
    monkeypatch.setenv("OVERLORD_STORE_TIMEOUT_S", "20")
    the_proxy.reset()
    return the_proxy


@pytest.fixture
def impatient(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may come back is not waited for: pauses between tries take no time, they only count.
    What goes well has all of its own.
    """
    init, slept = (
        StorageStats.__init__,
        threading.local(),
    )  # each thread by itself: no other one is late for it

    def sleep(seconds: float) -> None:
        slept.s = getattr(slept, "s", 0.0) + seconds

    clock = Clock(now=lambda: time.monotonic() + getattr(slept, "s", 0.0), sleep=sleep)
    monkeypatch.setattr(
        StorageStats, "__init__", lambda tally, source="", _=clock: init(tally, source, clock)
    )
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "5")


@pytest.fixture(scope="session")
def corpus(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same files on disk and, under the same names, in the bucket."""
    root = tmp_path_factory.mktemp("corpus")
    for format in FORMATS:
        write_rows(root / format, format, ROWS, row_group_size=16, batch_rows=20)
    server.upload(root, "corpus")
    return root


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of some megabytes in every format: what happens to the second one happens in
    mid-run.
    """
    root = tmp_path_factory.mktemp("large")
    for format in FORMATS:
        write_rows(root / format, format, BIG, row_group_size=100, batch_rows=100)
    return root


@pytest.fixture
def far(server: S3Server, large: Path, request: pytest.FixtureRequest) -> ov.Job:
    """A job that reads the large files one after the other, uploaded afresh."""
    server.upload(large / request.param, f"far/{request.param}")
    return in_order(f"s3://{BUCKET}/far/{request.param}", request.param)
