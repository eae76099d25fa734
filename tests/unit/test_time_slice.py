"""Workers that read ahead run in the background; other threads do not, and a policy chosen by the
user stays.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

import overlord as ov
from overlord.process.resources import SLICE_S, in_background
from tests.corpus import write_rows

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="no policies here")


def in_thread(*calls):  # type: ignore[no-untyped-def]
    """Return the results of calls, run in one thread of their own, with which their changes end."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(call() for call in calls))
    thread.start()
    thread.join(10.0)
    return found


def policy() -> int:
    return os.sched_getscheduler(0)


def slice_ns() -> int:
    """Return the slice as the system reports it; 0 if it does not."""
    try:
        lines = Path("/proc/thread-self/sched").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split(":")[1]) for line in lines if line.startswith("se.slice")), 0)


def test_a_thread_goes_to_the_background_with_those_it_starts() -> None:
    went, own, inherited, nice = in_thread(
        in_background, policy, lambda: in_thread(policy, slice_ns), lambda: os.nice(0)
    )
    if not went:
        pytest.skip("this system does not have it")
    assert own == os.SCHED_BATCH
    assert inherited[0] == os.SCHED_BATCH
    assert inherited[1] in (0, round(SLICE_S * 1e9)) or tuple(
        map(int, os.uname().release.split(".")[:2])
    ) < (6, 12)
    assert nice == os.nice(0)
    assert policy() == os.SCHED_OTHER  # other threads of this process are unchanged


def test_a_policy_that_somebody_chose_is_left_alone() -> None:
    idle = os.sched_param(0)
    assert in_thread(lambda: os.sched_setscheduler(0, os.SCHED_IDLE, idle), in_background, policy)[
        1:
    ] == [False, os.SCHED_IDLE]


def policies_of(pid: int) -> set[int]:
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that ends meanwhile
            found.add(os.sched_getscheduler(int(thread)))
    return found


def test_loader_workers_are_in_the_background_and_nobody_else(tmp_path: Path) -> None:
    if not in_thread(in_background)[0]:
        pytest.skip("this system does not have it")
    write_rows(tmp_path, "parquet", [{"ids": list(range(1 + i % 7))} for i in range(100)])
    source = ov.Source("ids", str(tmp_path / "*.parquet"), transforms=[ov.Tokens("ids")])
    job = ov.Job(
        name="aside",
        sources=[source],
        batch=ov.Batch(samples=8, context=64),
        place=ov.ClientPlaceTree(dp=1),
        until=4,
    )
    with ov.launch(job, runtime="process") as session:
        assert sum(1 for _ in session.client(0)) == 4
        hosts = {
            part["name"]: part["pid"]
            for part in session.metrics()["actors"]
            if part["role"] == "host"
        }
        found = {name: policies_of(pid) for name, pid in hosts.items()}
    assert {name.split("/")[0] for name in found} == {"loader-worker", "constructor-worker"}
    for name, policies in found.items():
        assert (os.SCHED_BATCH in policies) == name.startswith("loader-worker"), found
