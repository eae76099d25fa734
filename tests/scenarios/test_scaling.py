"""Sources that are read in more processes, and in fewer, in mid-run: nobody may notice, whatever
dies meanwhile.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.cluster import rebalance
from overlord.observe.tables import scaling_facts
from tests.coordinators import launch_here
from tests.corpus import write_rows
from tests.internals import launcher_of
from tests.processes import (
    WAIT_S,
    WORKER_RUNTIME,
    Played,
    launch,
    play,
    run,
    runs,
    until,
    workers_of,
)
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(180)

FIRST_SCALED = "loader-worker/10000"


def source(name: str, n: int, first: int, **settings: Any) -> ov.Source:
    rows = Rows([{"n": first + k, "tokens": [first + k] * (1 + k % 7)} for k in range(n)])
    return ov.Source(name, rows, transforms=[ov.Tokens("tokens")], epochs=None, **settings)


def job(**changes: Any) -> ov.Job:
    settings = {
        "name": "scaled",
        "sources": [source("light", 60, 0), source("heavy", 240, 1000)],
        "place": ov.ClientPlaceTree(dp=2),
        "seed": 5,
        "batch": ov.Batch(samples=10, context=32),
        "slice_rows": 8,
        "shuffle_chunks": 4,
        "until": 40,
        "mixture": ov.schedule.staged(
            {
                0: {"light": 9, "heavy": 1},
                14: {"light": 1, "heavy": 9},
                28: {"light": 9, "heavy": 1},
            }
        ),
    }
    return ov.Job(**{**settings, **changes})


ONE = {"loaders": {"heavy": 4}, "hosts": 1, "constructor_hosts": 1, "workers": 1}


@pytest.fixture(scope="module")
def alone() -> Played:
    return run(job(), "local")


def has(session: ov.Session, n: int) -> bool:
    return sum(name.startswith("loader-worker/") for name in workers_of(session)) == n


def loaders_apart(session: ov.Session) -> int:
    return len(
        {a["pid"] for a in session.metrics()["actors"] if a["name"].startswith("loader/heavy/")}
    )


def kill_scaled(session: ov.Session) -> None:
    """Ends a worker that scaling has started, as soon as one is there."""

    def struck() -> bool:
        for pid in [
            pid for name, pid in workers_of(session).items() if name.startswith(FIRST_SCALED[:-1])
        ]:
            if pid and runs(pid):
                with suppress(ProcessLookupError):  # it has just left by itself: another comes
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    until(struck)


@pytest.mark.parametrize("journal", [False, True], ids=["without a journal", "with a journal"])
def test_workers_are_added_and_taken_away_and_the_stream_is_the_same(
    alone: Played, journal: bool, tmp_path: Path
) -> None:
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


def test_workers_that_answer_late_take_over_and_the_log_names_them(
    alone: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rebalance, "FOLLOW_S", 0.0)

    def grow(session: ov.Session) -> None:
        assert session.scale("heavy", 2)
        until(lambda: loaders_apart(session) == 2)

    with launch_here(job(), **ONE) as session, caplog.at_level("WARNING", "overlord"):
        assert play(session, act={8: grow}) == alone
    words = f"loaders of heavy moved before {FIRST_SCALED} caught up: no answer within 0 s"
    assert words in caplog.text


@pytest.mark.parametrize("journal", [False, True], ids=["without a journal", "with a journal"])
def test_a_new_worker_that_is_killed_while_it_takes_over_changes_nothing(
    alone: Played, journal: bool, tmp_path: Path
) -> None:
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


def test_a_coordinator_that_is_killed_takes_over_workers_that_were_added(
    alone: Played, tmp_path: Path
) -> None:
    def grow(session: ov.Session) -> None:
        assert session.scale("heavy", 2)
        until(lambda: loaders_apart(session) == 2)

    with launch(job(journal=str(tmp_path / "journal")), **ONE) as session:
        found = play(
            session,
            act={
                8: grow,
                14: lambda s: s.kill("planner"),
                24: lambda s: until(lambda: loaders_apart(s) == 2),
            },
        )
        assert found == alone


def readers(session: ov.Session) -> set[str]:
    """The workers that have loaders."""
    pids = {a["pid"] for a in session.metrics()["actors"] if a["role"] == "loader"}
    return {name for name, pid in workers_of(session).items() if pid in pids}


def relocate(session: ov.Session, *hosts: int) -> bool:
    """As a review of the nodes does, when one with room joins."""
    return bool(launcher_of(session).ask("relocate", list(hosts)))


@pytest.mark.parametrize("journal", [False, True], ids=["without a journal", "with a journal"])
def test_a_worker_is_replaced_by_another_with_all_its_sources_and_the_stream_is_the_same(
    alone: Played, journal: bool, tmp_path: Path
) -> None:
    made = job(journal=str(tmp_path / "journal")) if journal else job()

    def replace_it(session: ov.Session) -> None:
        assert relocate(session, 0, 7), "of these, one is there"
        assert not relocate(session, 0), "one change at a time"
        until(lambda: readers(session) == {FIRST_SCALED})
        assert session.metrics()["recoveries"] == []

    def replaced(session: ov.Session) -> None:
        until(
            lambda: (
                {name for name in workers_of(session) if name.startswith("loader")}
                == {FIRST_SCALED}
            )
        )
        session.add_source(source("late", 60, 5000), at=39)
        assert "loader-worker/1" in workers_of(session), "those that join have numbers of their own"

    with launch(made, **ONE) as session:
        found = play(session, act={6: replace_it, 20: replaced, 30: lambda s: s.kill(FIRST_SCALED)})
        assert [row["part"] for row in session.metrics()["recoveries"]] == [FIRST_SCALED]
    assert {rank: steps[:39] for rank, steps in found.steps.items()} == {
        rank: steps[:39] for rank, steps in alone.steps.items()
    }


@pytest.mark.parametrize("journal", [False, True], ids=["without a journal", "with a journal"])
@pytest.mark.parametrize("dies", ["the old one", "the new one"])
def test_a_worker_that_is_killed_while_it_is_replaced_changes_nothing(
    alone: Played, journal: bool, dies: str, tmp_path: Path
) -> None:
    def replace_it(session: ov.Session) -> None:
        assert relocate(session, 0)
        session.kill("loader-worker/0") if dies == "the old one" else kill_scaled(session)

    with launch(job(journal=str(tmp_path / "journal")) if journal else job(), **ONE) as session:
        assert play(session, act={8: replace_it}) == alone


HURRIED = {
    "cores": 3,
    "interval_s": 0.02,
    "patience": 1,
    "idle_patience": 2,
    "cool_down_s": 0.05,
    "low": 0.05,
    "target": 0.06,
    "high": 0.07,
}


def test_a_heavy_source_gets_workers_by_itself_when_the_mixture_gives_it_more(
    alone: Played,
) -> None:
    """The scaler's own decisions, hurried: who gets what depends on how fast this machine is, the
    stream does not.
    """
    with launch(job(), autoscale=HURRIED, **ONE) as session:
        found = play(session, act={20: lambda s: until(lambda: s.metrics()["scaling"]["sources"])})
        told = session.metrics()["scaling"]
    assert found == alone
    assert told["most_hosts"] == 3
    assert set(told["sources"]) == {"light", "heavy"}
    assert all(d["words"] for d in told["decisions"])


def test_no_worker_is_added_for_which_there_is_no_memory(alone: Played) -> None:
    with launch(job(), autoscale={**HURRIED, "memory_bytes": 2**20}, **ONE) as session:
        found = play(
            session, act={20: lambda s: until(lambda: s.metrics()["scaling"]["host_bytes"])}
        )
        told = session.metrics()["scaling"]
    assert found == alone
    assert told["hosts"] == 1
    assert told["host_bytes"] > 2**20
    assert not [d for d in told["decisions"] if d["what"] == "Scale"]


def test_a_source_that_has_one_loader_cannot_be_spread() -> None:
    with launch(job(until=3), **ONE) as session:
        with pytest.raises(
            ov.JobError,
            match="expected 1 to 1 loader workers for 'light', which has 1 loader, got 2",
        ):
            session.scale("light", 2)
        with pytest.raises(ov.JobError, match="unknown source 'hevy'; did you mean 'heavy'"):
            session.scale("hevy", 2)


@pytest.mark.parametrize("journal", [False, True], ids=["without a journal", "with a journal"])
def test_a_source_that_joined_is_scaled_as_the_others_are(journal: bool, tmp_path: Path) -> None:
    rows = Rows([{"n": k, "tokens": [5000 + k] * (1 + k % 7)} for k in range(200)])
    late = ov.Source(
        "late",
        rows,
        transforms=[ov.Map(unchanged, rows=True), ov.Tokens("tokens")],
        epochs=None,
        weight=5.0,
    )
    plain = job(mixture={"light": 5, "heavy": 5}, until=80)
    made = replace(plain, journal=str(tmp_path / "journal")) if journal else plain

    def join(session: ov.Session) -> None:
        session.add_source(late, at=12)

    def apart(session: ov.Session) -> int:
        return len(
            {a["pid"] for a in session.metrics()["actors"] if a["name"].startswith("loader/late/")}
        )

    def grow(session: ov.Session) -> None:
        """By the scaler, hurried, or by hand where it has decided otherwise: it may take back at
        once what nobody uses just now.
        """
        until(lambda: "late" in session.metrics()["scaling"]["sources"])
        until(
            lambda: apart(session) >= 2 or (session.scale("late", 2) and apart(session) >= 2),
            2 * WAIT_S,
        )

    with launch(plain, "local") as session:
        alone = play(session, act={4: join})
    with launch(made, autoscale={**HURRIED, "cores": 5}, **{**ONE, "hosts": 2}) as session:
        looks = {
            k: lambda s: s.profile() for k in range(13, 80)
        }  # what a loader counted is forgotten where it moves
        found = play(session, act={**looks, 4: join, 20: grow})
        profile = session.profile().sources["late"]
    assert found.steps == alone.steps
    assert profile.samples >= 64


# code that holds the interpreter lock


def locked(row: dict[str, Any]) -> dict[str, Any]:
    """Plain Python: threads of one process run it one after the other."""
    sum(k * k for k in range(20_000))
    return row


def locked_job(folder: Path, workers: str = "threads") -> ov.Job:
    """The mixture begins with so little of the locked source that one worker is enough for all."""
    for name, first in (("light", 0), ("heavy", 1000)):
        rows = [{"n": first + k, "tokens": [first + k] * (1 + k % 7)} for k in range(240)]
        write_rows(folder / name, "parquet", rows, row_group_size=16)
    light, heavy = (str(folder / name / "*.parquet") for name in ("light", "heavy"))
    return job(
        sources=[
            ov.Source("light", light, transforms=[ov.Tokens("tokens")], epochs=None),
            ov.Source(
                "heavy",
                heavy,
                transforms=[ov.Map(locked, rows=True), ov.Tokens("tokens")],
                epochs=None,
                workers=workers,
            ),
        ],
        mixture=ov.schedule.staged({0: {"light": 999, "heavy": 1}, 4: {"light": 1, "heavy": 9}}),
        place=ov.ClientPlaceTree(dp=1),
        batch=ov.Batch(samples=40, context=32),
        until=5000,
    )


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_autoscaling_adds_a_process_for_code_that_holds_the_interpreter_lock(
    workers: str, tmp_path: Path
) -> None:
    """With default threads: one worker with as many threads as cores is not as many cores for such
    code.
    """
    made = locked_job(tmp_path / "data", workers)
    hurried = {"interval_s": 0.1, "patience": 1, "cool_down_s": 0.1}
    digests: list[str] = []
    with launch(
        made, hosts=3, constructor_hosts=1, autoscale=hurried, cache_dir=tmp_path / "cache"
    ) as session:
        assert has(session, 1), "the partition has chosen one host for the mixture as it begins"
        client = session.client(0)

        def grown() -> bool:
            for _ in range(10):  # a trainer that does nothing but wait
                digests.append(next(client).plan_digest)
            return loaders_apart(session) >= 2

        until(grown)
        told = session.metrics()["scaling"]
    assert any(
        d["what"] == "Scale" and d["source"] == "heavy" and d["hosts"] >= 2
        for d in told["decisions"]
    )
    assert told["sources"]["heavy"]["locked"] > 0.5
    assert told["most_hosts"] == 3
    with launch(made, "local", cache_dir=tmp_path / "cache") as session:
        client = session.client(0)
        assert [next(client).plan_digest for _ in range(min(50, len(digests)))] == digests[:50], (
            "the stream is the same"
        )


def test_where_every_core_has_a_worker_a_heavy_source_is_read_on_workers_of_others_that_have_room(
    tmp_path: Path,
) -> None:
    """Two locked sources begin with a worker each, on two cores; then nearly all is drawn from one
    of them.
    """
    made = locked_job(tmp_path / "data")
    other = replace(made.sources[1], name="light", uri=made.sources[0].uri)
    mixture = ov.schedule.staged({0: {"light": 1, "heavy": 1}, 4: {"light": 1, "heavy": 99}})
    hurried = {"interval_s": 0.1, "patience": 1, "cool_down_s": 0.1}
    made = replace(made, sources=[other, made.sources[1]], mixture=mixture)
    with launch(
        made, hosts=2, constructor_hosts=1, autoscale=hurried, cache_dir=tmp_path / "cache"
    ) as session:
        assert has(session, 2)
        assert loaders_apart(session) == 1
        client = session.client(0)
        until(lambda: [next(client) for _ in range(10)] and loaders_apart(session) == 2)
        moved = [
            d
            for d in session.metrics()["scaling"]["decisions"]
            if d["what"] == "Scale" and d["source"] == "heavy"
        ]
        assert has(session, 2), "as many as cores: none was added"
    assert any(d["on"] for d in moved)


# where nothing is moved


def busy(row: dict[str, Any]) -> dict[str, Any]:
    sum(k * k for k in range(100_000))
    return row


@pytest.mark.parametrize("runtime", ["local", WORKER_RUNTIME])
def test_a_source_that_cannot_keep_up_is_named_with_the_loaders_it_would_take_though_nobody_asked_for_scaling(
    runtime: str,
) -> None:
    rows = Rows([{"n": k, "tokens": [k] * (1 + k % 7)} for k in range(240)])
    slow = ov.Source(
        "slow", rows, transforms=[ov.Map(busy, rows=True), ov.Tokens("tokens")], epochs=None
    )
    made = job(
        sources=[source("light", 60, 0), slow],
        mixture=None,
        place=ov.ClientPlaceTree(dp=1),
        until="all",
    )
    options = {} if runtime == "local" else {"hosts": 1, "constructor_hosts": 1, "workers": 1}
    with launch(made, runtime, watch_s=0.02, loaders={"light": 1, "slow": 1}, **options) as session:
        client = session.client(0)

        def named() -> dict[str, Any]:
            for _ in range(10):  # trainers that do nothing but wait
                next(client)
            told = session.metrics()["scaling"]
            return told if "slow" in told.get("cannot_keep_up", {}) else {}

        told = until(named)
    assert any(
        what == "cannot keep up" and words.startswith("slow has 1 loader, needs ")
        for what, words in scaling_facts(told)
    )
    slow_one = told["cannot_keep_up"]["slow"]
    assert (slow_one["has"], slow_one["what"]) == (1, "loaders")
    assert slow_one["needs"] > 1
    assert "samples per second of" in slow_one["reason"] or "are CPU time" in slow_one["reason"], (
        "on a busy machine it waits for a core as well"
    )
    assert {d["what"] for d in told["decisions"]} <= {"CannotKeepUp", "ReadAhead"}, (
        "nothing is moved unless it was asked for"
    )


@pytest.mark.parametrize("runtime", ["local", WORKER_RUNTIME])
def test_whoever_looks_changes_nothing(alone: Played, runtime: str) -> None:
    options = {} if runtime == "local" else ONE
    assert run(job(), runtime, **{**options, "watch_s": 0.005}) == alone


def test_who_does_not_want_to_be_looked_at_is_not() -> None:
    with launch(job(until=3), "local", watch_s=0) as session:
        assert len(list(session.client(0))) == 3
        assert session.metrics()["scaling"] == {}


# in one process


class Meeting:
    """A transform that waits until it is called again beside itself, and says whether it was."""

    def __init__(self) -> None:
        self.inside, self.most, self.changed = 0, 0, threading.Condition()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most > 1, timeout=WAIT_S)
            self.inside -= 1
        return row


def unchanged(row: dict[str, Any]) -> dict[str, Any]:
    return row


def loaders_here(session: ov.Session) -> dict[str, int]:
    return dict(
        Counter(
            a["name"].split("/")[1] for a in session.metrics()["actors"] if a["role"] == "loader"
        )
    )


@pytest.mark.parametrize("partition", ["auto", "off"])
def test_in_one_process_all_threads_may_read_a_source_that_becomes_heavy(
    alone: Played, partition: str
) -> None:
    met = Meeting()
    rows = [{"n": 1000 + k, "tokens": [1000 + k] * (1 + k % 7)} for k in range(240)]
    heavy = ov.Source(
        "heavy", Rows(rows), transforms=[ov.Map(met, rows=True), ov.Tokens("tokens")], epochs=None
    )
    made = job(sources=[source("light", 60, 0), heavy])
    with launch(made, "local", autoscale=True, workers=2, partition=partition) as session:
        assert loaders_here(session) == {"light": 1, "heavy": 2}, (
            "as many as threads; what is light has one"
        )
        found = play(session)
    assert found.steps == alone.steps
    assert met.most > 1


def test_in_one_process_what_was_said_and_worker_processes_stay_as_they_are() -> None:
    rows = Rows([{"n": k, "tokens": [k]} for k in range(60)])
    settings: dict[str, Any] = {
        "transforms": [ov.Map(unchanged, rows=True), ov.Tokens("tokens")],
        "epochs": None,
    }
    made = job(
        sources=[
            ov.Source("said", rows, **settings),
            ov.Source("apart", rows, workers="processes", **settings),
        ],
        mixture=None,
        until=3,
    )
    with launch(made, "local", autoscale=True, workers=3, loaders={"said": 2}) as session:
        assert loaders_here(session) == {"said": 2, "apart": 1}
        with pytest.raises(
            ov.JobError,
            match="all loaders run in this process; launch with runtime='process' to scale them",
        ):
            session.scale("said", 2)
