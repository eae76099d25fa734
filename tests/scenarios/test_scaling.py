"""Sources that are read in more processes, and in fewer, in mid-run: nobody may notice, whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from tests.processes import Played, hosts_of, launch, play, run, runs, until
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(180)

FIRST_SCALED = "loader-host/10000"


def source(name: str, n: int, first: int, **settings: Any) -> ov.Source:
    rows = Rows([{"n": first + k, "tokens": [first + k] * (1 + k % 7)} for k in range(n)])
    return ov.Source(name, rows, transforms=[ov.Tokens("tokens")], epochs=None, **settings)


def job(**changes: Any) -> ov.Job:
    settings = {
        "name": "scaled", "sources": [source("light", 60, 0), source("heavy", 240, 1000)], "place": ov.ClientPlaceTree(dp=2), "seed": 5,
        "batch": ov.Batch(samples=10, context=32), "slice_rows": 8, "shuffle_chunks": 4, "until": 40,
        "mixture": ov.schedule.staged({0: {"light": 9, "heavy": 1}, 14: {"light": 1, "heavy": 9}, 28: {"light": 9, "heavy": 1}}),
    }  # fmt: skip
    return ov.Job(**{**settings, **changes})


ONE = {"loaders": {"heavy": 4}, "hosts": 1, "constructor_hosts": 1, "workers": 1}


@pytest.fixture(scope="module")
def alone() -> Played:
    return run(job(), "local")


def has(session: ov.Session, n: int) -> bool:
    return sum(name.startswith("loader-host/") for name in hosts_of(session)) == n


def loaders_apart(session: ov.Session) -> int:
    return len({a["pid"] for a in session.metrics()["actors"] if a["name"].startswith("loader/heavy/")})


def kill_scaled(session: ov.Session) -> None:
    """Ends a host that scaling has started, as soon as one is there."""

    def living() -> int | None:
        scaled = [pid for name, pid in hosts_of(session).items() if name.startswith(FIRST_SCALED[:-1])]
        return next((pid for pid in scaled if pid and runs(pid)), None)

    os.kill(until(living), signal.SIGKILL)


@pytest.mark.parametrize("journal", [False, True], ids=["planner at home", "planner apart"])
def test_hosts_are_added_and_taken_away_and_the_stream_is_the_same(alone: Played, journal: bool, tmp_path: Path) -> None:
    made = job(journal=str(tmp_path / "journal")) if journal else job()

    def grow(session: ov.Session) -> None:
        assert session.scale("heavy", 3)
        until(lambda: loaders_apart(session) == 3)
        assert session.metrics()["recoveries"] == []

    def shrink(session: ov.Session) -> None:
        assert session.scale("heavy", 1)
        until(lambda: loaders_apart(session) == 1)

    def ended(session: ov.Session) -> None:
        until(lambda: has(session, 1))

    with launch(made, **ONE) as session:
        assert not session.scale("heavy", 1), "it is read so already"
        found = play(session, act={6: grow, 22: shrink, 32: ended})
        assert session.metrics()["recoveries"] == []
    assert found == alone


@pytest.mark.parametrize("journal", [False, True], ids=["planner at home", "planner apart"])
def test_a_new_host_that_is_killed_while_it_takes_over_changes_nothing(alone: Played, journal: bool, tmp_path: Path) -> None:
    made = job(journal=str(tmp_path / "journal")) if journal else job()

    def grow(session: ov.Session) -> None:
        assert session.scale("heavy", 2)
        kill_scaled(session)

    def kill_again(session: ov.Session) -> None:
        until(lambda: loaders_apart(session) == 2 or session.scale("heavy", 2))
        until(lambda: loaders_apart(session) == 2)
        kill_scaled(session)

    with launch(made, **ONE) as session:
        assert play(session, act={8: grow, 18: kill_again}) == alone


def test_a_planner_that_is_killed_takes_over_hosts_that_were_added(alone: Played, tmp_path: Path) -> None:
    def grow(session: ov.Session) -> None:
        assert session.scale("heavy", 2)
        until(lambda: loaders_apart(session) == 2)

    with launch(job(journal=str(tmp_path / "journal")), **ONE) as session:
        found = play(session, act={8: grow, 14: lambda s: s.kill("planner"), 24: lambda s: until(lambda: loaders_apart(s) == 2)})
        assert found == alone


HURRIED = {
    "cores": 3, "interval_s": 0.02, "patience": 1, "idle_patience": 2, "cool_down_s": 0.05, "low": 0.05, "target": 0.06, "high": 0.07,
}  # fmt: skip


def test_a_heavy_source_gets_hosts_by_itself_when_the_mixture_gives_it_more(alone: Played) -> None:
    """The scaler's own decisions, hurried: who gets what depends on how fast this machine is, the stream does not."""
    with launch(job(), autoscale=HURRIED, **ONE) as session:
        found = play(session, act={20: lambda s: until(lambda: s.metrics()["scaling"]["sources"])})
        told = session.metrics()["scaling"]
    assert found == alone
    assert told["most_hosts"] == 3
    assert set(told["sources"]) == {"light", "heavy"}
    assert all(d["words"] for d in told["decisions"])


def test_no_host_is_added_for_which_there_is_no_memory(alone: Played) -> None:
    with launch(job(), autoscale={**HURRIED, "memory_bytes": 2**20}, **ONE) as session:
        found = play(session, act={20: lambda s: until(lambda: s.metrics()["scaling"]["host_bytes"])})
        told = session.metrics()["scaling"]
    assert found == alone
    assert told["hosts"] == 1
    assert told["host_bytes"] > 2**20
    assert not [d for d in told["decisions"] if d["what"] == "Scale"]


def test_a_source_that_has_one_loader_cannot_be_spread() -> None:
    with launch(job(until=3), **ONE) as session:
        with pytest.raises(ov.JobError, match="wanted 1 to 1 hosts for 'light', which has 1 loader, found 2"):
            session.scale("light", 2)
        with pytest.raises(ov.JobError, match="unknown source 'hevy'; did you mean 'heavy'"):
            session.scale("hevy", 2)
