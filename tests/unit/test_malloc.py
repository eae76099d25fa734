"""A worker process keeps no unused freed memory and does not import pandas. Its threads have enough
arenas.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.cluster.constructor_worker import ConstructorWorker
from overlord.cluster.worker import WorkerConfig
from overlord.concurrency import platform
from overlord.concurrency.platform import Platform
from overlord.process import resources
from overlord.process.resources import (
    DEFAULT,
    LATER,
    arena_limit,
    chosen_by_user,
    cores,
    limit_arenas,
)
from overlord.rpc.peers import RpcServer
from overlord.rpc.process_launcher import process_actors
from overlord.sources.tables import arrow_of, numpy_of
from overlord.transport.connection import open_connection
from tests.corpus import write_rows
from tests.laws import examples
from tests.processes import WAIT_S

SRC = Path(__file__).resolve().parents[2] / "src"
DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8", "?"]


@examples(60)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 100), max_size=40),
    st.integers(0, 20),
    st.integers(0, 40),
)
def test_a_view_is_what_arrow_makes_of_it(
    dtype: str, numbers: list[int], first: int, n: int
) -> None:
    values = np.array(numbers, dtype)
    array = pa.array(values)
    assert arrow_of(values).equals(array)
    assert arrow_of(values[::2]).equals(pa.array(values[::2].copy()))
    cut = array.slice(first, n)
    found = numpy_of(cut)
    assert found.dtype == values.dtype
    assert found.tolist() == values[first : first + n].tolist()


@pytest.mark.parametrize("values", [[1, None, 3], [True, None], ["a", "b"], []])
def test_what_has_no_memory_of_numbers_is_left_to_arrow(values: list[Any]) -> None:
    array = pa.array(values)
    np.testing.assert_array_equal(numpy_of(array), array.to_numpy(zero_copy_only=False))


READ = """
import sys
import overlord as ov

if __name__ == "__main__":
    job = ov.Job(
        name="frugal",
        sources=[
            ov.Source(
                "ids", f"{sys.argv[1]}/ids/*.parquet", transforms=[ov.Tokens("ids")], shuffle=True
            ),
            ov.Source(
                "text", sys.argv[1] + "/text/*.parquet", transforms=[ov.Tokenize(sys.argv[2])]
            ),
        ],
        batch=ov.Batch(samples=8, context=64),
        place=ov.ClientPlaceTree(dp=1),
        until=4,
    )
    with ov.launch(job) as session:
        assert sum(1 for _ in session.client(0)) == 4
    print("pandas" in sys.modules)
"""


def test_to_read_parquet_does_not_load_pandas(tmp_path: Path, tokenizer: str) -> None:
    write_rows(
        tmp_path / "ids",
        "parquet",
        [{"ids": list(range(1 + i % 7))} for i in range(100)],
        row_group_size=20,
    )
    write_rows(
        tmp_path / "text", "parquet", [{"text": "one two three " * (1 + i % 5)} for i in range(100)]
    )
    (tmp_path / "lib" / "pandas").mkdir(parents=True)
    (tmp_path / "lib" / "pandas" / "__init__.py").write_text(
        "__version__ = '99.0'\n"
    )  # so that a pool exists
    program = tmp_path / "read.py"
    program.write_text(READ)
    environ = {**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{tmp_path / 'lib'}"}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), tokenizer],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "False\n", done.stderr


class Pool:
    def backend(self) -> list[str | None]:
        return [pa.default_memory_pool().backend_name, os.environ.get("ARROW_DEFAULT_MEMORY_POOL")]


def test_workers_let_arrow_use_the_c_library_without_a_trace_in_their_environment() -> None:
    with process_actors() as control:
        found = control.get(control.call(control.spawn(Pool, name="pool"), "backend"), 30.0)
    assert found == ["system", None]


# arenas

GNU = hasattr(ctypes.CDLL(None), "mallopt")
HEAP = 2**26  # bytes: the GNU C library aligns the memory of an arena to this


class Arenas:
    """A worker process that starts its threads in the order of a real one: service threads first,
    then workers.
    """

    def shared(self, workers: int) -> list[list[str]]:
        """Return the threads that share an arena with a worker."""
        Platform().prepare(workers)
        resources, over, where = ctypes.CDLL(None).malloc, threading.Event(), dict[str, int]()
        resources.restype = ctypes.c_void_p

        def allocate(name: str, done: threading.Event) -> None:
            where[name] = resources(5000) // HEAP  # more than the cache of a thread serves
            done.set()
            over.wait()

        for name in [f"service {k}" for k in range(LATER)] + [
            f"worker {k}" for k in range(workers)
        ]:
            done = threading.Event()
            threading.Thread(target=allocate, args=(name, done), daemon=True).start()
            done.wait()
        over.set()
        by_arena = [
            sorted(n for n, a in where.items() if a == arena) for arena in set(where.values())
        ]
        return [names for names in by_arena if len(names) > 1 and names[-1].startswith("worker")]


@pytest.mark.skipif(
    not GNU or cores() < 2,
    reason="needs the GNU C library, and cores for threads to run at the same time",
)
def test_no_thread_of_a_worker_process_shares_an_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library assigns arenas to threads in order of their start. With one arena per worker,
    service threads had taken them.
    """
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    with process_actors() as control:
        assert (
            control.get(control.call(control.spawn(Arenas, name="arenas"), "shared", 4), 30.0) == []
        )


class Noted(Platform):
    """Record the number of connections with a thread each, and leave the arenas of this process
    alone.
    """

    links = -1

    def prepare(self, workers: int, *, links: int = 0, background: bool = False) -> None:
        self.links = links


@pytest.mark.parametrize("links", [0, 40])
def test_a_constructor_worker_counts_all_its_threads_however_many_connections_it_has(
    links: int,
) -> None:
    """One thread serves all connections of a server: more connections need no more arenas. The
    planner is in another process here.
    """
    machine, peers = Noted(), RpcServer()
    before = set(threading.enumerate())
    settings = WorkerConfig(name="linked", token="t", workers=1, machine=machine)
    host = ConstructorWorker(0, settings, {0: (0,)}, ov.Batch(samples=4, context=32), 1, ())
    with closing(host), ExitStack() as open_links:
        open_links.callback(peers.shutdown)
        host.listen("127.0.0.1", "u")
        handle, ticket = peers.expect(host.name)
        host.redirect(peers.address, peers.token, ticket)
        assert peers.get(peers.call(handle, "beat"), WAIT_S)
        for k in range(links):
            hello = {"role": "loader", "host": k, "incarnation": 1}
            open_links.enter_context(
                closing(open_connection(host.address(), "t", hello, timeout_s=WAIT_S)[0])
            )
        found = sorted(thread.name for thread in set(threading.enumerate()) - before)
    assert len(found) <= LATER + machine.links, found
    assert machine.links == 0, "an arena for each link would hold memory that no thread uses"


@examples(100)
@given(st.integers(1, 64), st.integers(1, 256), st.integers(0, 64), st.integers(1, 40))
def test_a_worker_has_an_arena_for_each_thread_but_no_more_than_the_c_library_would_give(
    workers: int, n_cores: int, links: int, running: int
) -> None:
    limit = arena_limit(workers, n_cores, links=links, running=running)
    threads = running + workers + links + LATER
    assert limit >= min(threads, DEFAULT * n_cores)
    assert workers + 1 <= limit <= max(workers + 1, DEFAULT * n_cores)
    assert limit <= threads + n_cores, "beyond threads of our own, one for each core"
    assert limit <= arena_limit(workers + 1, n_cores, links=links, running=running)
    assert limit <= arena_limit(workers, n_cores + 1, links=links, running=running)


@pytest.mark.parametrize(
    ("workers", "n_cores", "limit"),
    [(1, 1, 8), (1, 2, 11), (2, 2, 12), (4, 16, 28), (16, 16, 40)],
    ids=lambda value: str(value),
)
def test_arenas_of_workers_of_some_machines(workers: int, n_cores: int, limit: int) -> None:
    assert arena_limit(workers, n_cores, links=1, running=3) == limit


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_ARENA_MAX", "64"),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=3"),
    ],
)
def test_arenas_that_the_user_has_chosen_stay(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert limit_arenas(4) == 0
    assert not chosen_by_user(
        {"MALLOC_ARENA_MAX": "", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    )


def test_a_trainer_keeps_its_arenas_where_everything_runs_in_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(*_: Any) -> int:
        raise AssertionError("the arenas of a trainer's process are not for hosts to limit")

    monkeypatch.setattr(platform, "limit_arenas", called)
    monkeypatch.setattr(resources, "limit_arenas", called)
    write_rows(tmp_path / "ids", "parquet", [{"ids": [1, 2]} for _ in range(20)])
    source = ov.Source("ids", str(tmp_path / "ids"), transforms=[ov.Tokens("ids")])
    job = ov.Job(
        name="embedded",
        sources=[source],
        batch=ov.Batch(samples=4, context=8),
        place=ov.ClientPlaceTree(dp=1),
        until=2,
    )
    with ov.launch(job) as session:
        assert sum(1 for _ in session.client(0)) == 2
