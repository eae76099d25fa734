"""Stories of sources that join a running job: what is drawn of them, what stays as it was, what a
state says, what is refused.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.dryrun.virtual_run import Add, Delays, VirtualExecutor, _Rank
from overlord.errors import (
    JobError,
    OverlordError,
    PlanError,
    SourceError,
    StateMismatch,
    TransformError,
)
from overlord.messages.control import AddSource, Cursor, SetMixture
from overlord.session.local_runtime import LocalRuntime
from overlord.setup.prepared_job import Options, PreparedJob
from tests.internals import loader_budget, running_job, runtime_of
from tests.processes import until
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)


def source(name: str, n: int = 400, **changes: Any) -> ov.Source:
    first = ord(name[0]) * 1000
    rows = Rows([{"n": k, "tokens": [first + k] * (1 + k % 3)} for k in range(n)])
    return ov.Source(name, rows, **{"transforms": [ov.Tokens("tokens")], "epochs": 1, **changes})


def job(*names: str, **changes: Any) -> ov.Job:
    settings: dict[str, Any] = {
        "name": "joining",
        "sources": [source(n) for n in names or ("a", "b")],
        "batch": ov.Batch(samples=8, context=64),
        "until": 20,
        "slice_rows": 16,
        "seed": 5,
    }
    return ov.Job(**{**settings, **changes})


def launch(made: ov.Job, **options: Any) -> ov.Session:
    return ov.launch(made, **{"check": True, "stall_limit_s": 10, "prefetch": 3, **options})


def drawn(step: ov.Step) -> Counter[str]:
    return Counter(step.info.sample_id(i).source for i in range(len(step.info.row)))


def samples(steps: list[ov.Step], name: str) -> list[Any]:
    plans = [s.info for s in steps]
    return [
        p.sample_id(i) for p in plans for i in range(len(p.row)) if p.sample_id(i).source == name
    ]


def take(client: ov.Client, n: int) -> list[ov.Step]:
    return [next(client) for _ in range(n)]


# What is drawn


def test_a_source_joins_at_the_first_step_that_is_not_planned_with_its_own_weight() -> None:
    with launch(job()) as session:
        client = session.client(0)
        steps = take(client, 3)
        at = session.add_source(source("c", weight=2.0))
        steps += list(client)
    assert 3 <= at <= 6
    assert len(steps) == 20
    for step in steps[:at]:
        assert drawn(step) == {"a": 4, "b": 4}
    assert sum((drawn(s) for s in steps[at : at + 4]), Counter()) == {"a": 8, "b": 8, "c": 16}
    with launch(job()) as session:  # of the others nothing is lost and nothing comes twice
        alone = list(session.client(0))
    for name in "ab":
        mine = samples(steps, name)
        assert mine == samples(alone, name)[: len(mine)]


def test_a_source_may_join_before_the_first_step_and_at_a_step_to_come() -> None:
    with launch(job()) as session:
        client = session.client(0)
        assert session.add_source(source("c")) == 0
        assert session.add_source(source("d"), at=11) == 11
        steps = list(client)
    assert [set(drawn(s)) for s in steps[:11]] == [{"a", "b", "c"}] * 11
    assert [set(drawn(s)) for s in steps[11:]] == [{"a", "b", "c", "d"}] * 9
    listed = job(
        "a",
        "b",
        "c",
        "d",
        mixture=lambda step, feedback: [1.0, 1.0, 1.0, 1.0 if step >= 11 else 0.0],
    )
    with launch(listed) as session:
        assert [s.plan_digest for s in session.client(0)][11:] == [s.plan_digest for s in steps][
            11:
        ]


@pytest.mark.parametrize(
    ("mixture", "shares"),
    [
        (None, {"a": 1.0, "b": 1.0, "c": 6.0}),
        ({"a": 3.0}, {"a": 3.0, "c": 6.0}),
        (
            lambda step, feedback: [2.0, 4.0],
            {"a": 2.0, "b": 4.0, "c": 18.0},
        ),  # six of eight, as among the sources' own
        (
            ov.schedule.linear({"a": 3, "b": 2}, {"a": 30, "b": 20}, steps=400),
            {"a": 3.0, "b": 2.0, "c": 15.0},
        ),
        (lambda step, feedback: {"b": 2.0}, {"b": 2.0, "c": 6.0}),
        (
            lambda step, feedback: {"b": 2.0, **({"c": 1.0} if step >= 10 else {})},
            {"b": 2.0, "c": 1.0},
        ),
        (
            lambda step, feedback: [1.0, 1.0] if step < 10 else [1.0, 1.0, 2.0],
            {"a": 1.0, "b": 1.0, "c": 2.0},
        ),
        (ov.schedule.temperature(2.0), {"a": 1.0, "b": 1.0, "c": 6.0}),
    ],
)
def test_its_weight_stands_beside_what_the_mixture_gives_the_others_unless_that_names_it(
    mixture: Any, shares: dict[str, float]
) -> None:
    with launch(job(mixture=mixture), prefetch=1) as session:
        client = session.client(0)
        session.add_source(source("c", weight=6.0), at=5)
        list(client)
        wanted = session.metrics()["mix"]["wanted"]
    total = sum(shares.values())
    assert {name: column[-1] for name, column in wanted.items() if column[-1]} == pytest.approx(
        {n: w / total for n, w in shares.items()}
    )
    assert wanted["c"][:5] == [0.0] * 5


def test_a_mixture_set_before_does_not_know_the_source_and_one_set_after_does() -> None:
    with launch(job(), prefetch=1) as session:
        client = session.client(0)
        session.set_mixture({"a": 2.0}, at=2)
        session.set_mixture({"a": 1.0, "b": 1.0}, at=12)
        session.add_source(source("c", weight=2.0), at=2)
        session.set_mixture({"b": 1.0}, at=8)
        session.set_mixture({"c": 1.0, "b": 1.0}, at=16)
        steps = list(client)
        wanted = session.metrics()["mix"]["wanted"]
    shares = [tuple(wanted[n][k] for n in "abc") for k in range(20)]
    assert shares[:2] == [(0.5, 0.5, 0.0)] * 2
    assert shares[2:8] == [(0.5, 0.0, 0.5)] * 6
    assert shares[8:12] == [(0.0, 1.0, 0.0)] * 4
    assert shares[12:16] == [(0.25, 0.25, 0.5)] * 4
    assert shares[16:] == [(0.0, 0.5, 0.5)] * 4
    assert set(drawn(steps[-1])) == {"b", "c"}


def test_a_step_that_was_begun_no_longer_changes() -> None:
    """Long samples are paid for over several draws of a step; had a source joined between two of
    them, a resumed run would differ.
    """
    rows = Rows([{"tokens": [k] * 40} for k in range(60)])
    sources = [ov.Source(n, rows, transforms=[ov.Tokens("tokens")], epochs=1) for n in "ab"]
    made = job(
        sources=sources,
        batch=ov.Batch(tokens=6, context=64),
        slice_rows=1,
        shuffle_chunks=1,
        until=12,
    )
    joining = ov.Source("c", rows, transforms=[ov.Tokens("tokens")], epochs=1)
    held = 0
    for seed in range(10):
        blueprint, executor = (
            PreparedJob(made, Options(prefetch=20, read_ahead=1)),
            VirtualExecutor(seed, Delays()),
        )
        host = LocalRuntime(blueprint, executor)
        boxes = {0: _Rank(0)}
        host.attach(boxes)
        while host.planner.next_step < 5 or host.planner.open_step == host.planner.next_step:
            if not executor.step() or host.planner.next_step > 9:
                break
        at = host.planner.open_step
        held += at > host.planner.next_step
        more = blueprint.with_source(joining)
        with pytest.raises(PlanError, match="planned already"):
            host.add_source(more.new_source(at - 1), more.loaders_for(2, Cursor()), more)
        host.add_source(more.new_source(at), more.loaders_for(2, Cursor()), more)
        while executor.step():
            pass
        run = ov.simulate(made, events=[Add(joining, at)])
        assert [stage.digest for stage in host.plans] == [s.plan_digest for s in run.steps[0]]
    assert held


def test_a_mixture_of_nothing_but_a_source_that_joins_later_is_refused() -> None:
    with launch(job()) as session:
        session.add_source(source("c"), at=9)
        with pytest.raises(PlanError, match="got weights only for c, added at a later step"):
            session.set_mixture({"c": 1.0}, at=8)
        assert session.set_mixture({"c": 1.0}, at=9) == 9


@pytest.mark.parametrize("until", ["all", "first"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_end_of_the_data_is_that_of_all_sources(until: str, epochs: int) -> None:
    with launch(job(until=until, sources=[source("a", 60), source("b", 60)])) as session:
        client = session.client(0)
        take(client, 2)
        session.add_source(source("c", 20, epochs=epochs, weight=2.0))
        list(client)
        mine = session.metrics()["sources"]
    if until == "all":
        assert [mine[n]["samples"] for n in "abc"] == [60, 60, 20 * epochs]
    else:
        assert mine["c"]["samples"] == 20 * epochs
        assert mine["a"]["samples"] < 60


def test_under_weights_by_epoch_a_source_joins_at_its_step_and_its_epoch_counts_from_there() -> (
    None
):
    weights = lambda step, feedback: [1.0, 1.0 + step]  # noqa: E731
    made = job(
        sources=[source("a", 16, epochs=None), source("b", 24, epochs=None)],
        mix_every="epoch",
        mixture=weights,
        until=40,
    )
    seen = set()
    for seed in range(6):
        run = ov.simulate(
            made,
            seed=seed,
            events=[Add(source("c", 16, epochs=None, weight=4.0), 15)],
            read_ahead=1,
            check=True,
        )
        seen.add(
            tuple(
                (s.plan_digest, s.info.after.mix_step, s.info.after.mix_epoch) for s in run.steps[0]
            )
        )
    assert len(seen) == 1
    [steps] = seen
    assert steps[14][2] >= 1
    assert steps[15][1:] == (15, 0)
    assert "c" in drawn(run.steps[0][15])
    assert {s[1] for s in steps[15:]} != {15}  # and rises with it later
    run = ov.simulate(
        made, events=[Add(source("c", weight=0.001), 15)]
    )  # not drawn at once, so that the draw waits for nothing
    assert (run.steps[0][15].info.after.mix_step, run.steps[0][15].info.after.mix_epoch) == (15, 0)


def test_a_source_that_joins_may_have_several_loaders_and_quarantine_and_a_worker_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(
        "".join(json.dumps({"tokens": [k] if k % 5 else []}) + "\n" for k in range(100))
    )
    with launch(job(chunk_bytes=256), prefetch=1) as session:
        client = session.client(0)
        take(client, 1)
        joining = ov.Source(
            "c",
            str(path),
            transforms=[ov.Map(same, rows=True, holds_lock=True), ov.Tokens("tokens")],
            epochs=1,
        )
        session.add_source(joining, loaders=3)
        rest = list(client)
        bad = session.quarantine()
        metrics = session.metrics()
    assert sum(drawn(s)["c"] for s in rest) > 30
    assert {(row["source"], row["path"]) for row in bad} == {("c", str(path))}
    assert metrics["sources"]["c"]["quarantined"] == len(bad)
    assert metrics["sources"]["c"]["read_s"] > 0
    assert [a["name"] for a in metrics["actors"] if a["name"].startswith("loader/c")] == [
        f"loader/c/{k}" for k in (2, 3, 4)
    ]
    assert json.dumps(metrics)


def same(row: dict[str, Any]) -> dict[str, Any]:
    return row


def test_sources_share_one_budget_of_what_is_held_ready() -> None:
    with launch(job(), buffer_bytes=900) as session:
        session.add_source(source("c"))
        assert [loader_budget(loader) for loader in runtime_of(session).loaders] == [300, 300, 300]


def test_training_goes_on_while_a_source_is_indexed() -> None:
    inside, go = threading.Event(), threading.Event()

    class Slow(Rows):
        def __len__(self) -> int:
            if threading.current_thread().name.startswith("overlord-index") and not go.is_set():
                inside.set()
                go.wait(20)
            return len(self.rows)

    late = ov.Source("c", Slow([{"tokens": [1]}] * 50), transforms=[ov.Tokens("tokens")], epochs=1)
    with launch(job()) as session:
        client = session.client(0)
        adding = threading.Thread(target=session.add_source, args=(late,))
        adding.start()
        assert inside.wait(20)
        take(client, 6)
        go.set()
        adding.join(20)
        assert set(drawn(list(client)[-1])) == {"a", "b", "c"}


# State


def test_a_state_names_the_source_and_resumes_where_the_job_lists_it_last() -> None:
    made, joining = job(), source("c", weight=2.0)
    with launch(made) as session:
        client = session.client(0)
        take(client, 2)
        before = client.state_dict()
        at = session.add_source(joining)
        ahead = client.state_dict()  # of a step planned before the source joined
        steps = take(client, 8)
        state = json.loads(json.dumps(client.state_dict()))
        rest = [s.plan_digest for s in client]
    [event] = state["events"]
    assert (event["event"], event["at"], event["name"]) == ("add_source", at, "c")
    assert ahead["events"] == [event]
    assert "c" not in before["cursors"]
    wider = replace(made, sources=(*made.sources, joining))
    with launch(wider, resume=state, loaders={"c": 2}) as session:
        assert [s.plan_digest for s in session.client(0)] == rest
    with launch(wider, resume=json.loads(json.dumps(ahead))) as session:
        assert [s.plan_digest for s in session.client(0)] == [s.plan_digest for s in steps] + rest


def test_a_state_is_refused_where_the_source_is_missing_or_another() -> None:
    made, joining = job(mixture={"a": 1.0, "b": 2.0}), source("c", weight=2.0)
    with launch(made) as session:
        client = session.client(0)
        session.add_source(joining)
        take(client, 4)
        state = client.state_dict()
    with pytest.raises(
        StateMismatch, match=r"source c: added: saved at step 0, got not among the job's sources"
    ) as caught:
        ov.launch(made, resume=state)
    assert "list the sources added in mid-run (c) last in Job.sources" in str(caught.value)
    for other, part in (
        (source("c", 399, weight=2.0), "source c: files"),
        (source("c", weight=3.0), "source c: weight"),
        (source("c", weight=2.0, epochs=2), "source c: reading"),
        (
            source("c", weight=2.0, transforms=[ov.Filter(odd, rows=True), ov.Tokens("tokens")]),
            "source c: transforms",
        ),
    ):
        with pytest.raises(StateMismatch) as caught:
            ov.launch(replace(made, sources=(*made.sources, other)), resume=state)
        assert list(caught.value.differences) == [part]
    with pytest.raises(StateMismatch, match="sources"):
        ov.launch(replace(made, sources=(joining, *made.sources)), resume=state)
    forged = {**state, "events": [{**state["events"][0], "fingerprint": "0" * 32}]}
    with pytest.raises(StateMismatch, match="source c: added"):
        ov.launch(replace(made, sources=(*made.sources, joining)), resume=forged)


def odd(row: dict[str, Any]) -> bool:
    return row["n"] % 2 == 1


def test_one_may_go_on_without_the_source_when_that_is_meant() -> None:
    made = job()
    with launch(made) as session:
        client = session.client(0)
        session.add_source(source("c"))
        take(client, 4)
        state = client.state_dict()
    with pytest.raises(StateMismatch) as caught:
        ov.launch(made, resume=state)
    with launch(made, resume=state, allow=tuple(caught.value.differences)) as session:
        assert set(drawn(next(session.client(0)))) == {"a", "b"}


@pytest.mark.parametrize("mixture", [None, ov.schedule.temperature(2.0), ov.schedule.odm(warmup=2)])
def test_a_session_can_be_moved_to_before_a_source_joined_and_behind_it(mixture: Any) -> None:
    with launch(job(mixture=mixture)) as session:
        client = session.client(0)
        take(client, 2)
        before = client.state_dict()
        session.add_source(source("c"))
        with_it = [s.plan_digest for s in take(client, 4)]
        behind = client.state_dict()
        then = [s.plan_digest for s in take(client, 6)]
        client.load_state_dict(before)
        assert session.job.names == ("a", "b")
        steps = take(client, 6)
        assert all(set(drawn(s)) == {"a", "b"} for s in steps)
        assert list(session.metrics()["sources"]) == ["a", "b"]
        session.load_state_dict(behind)
        assert session.job.names == ("a", "b", "c")
        assert [s.plan_digest for s in take(client, 6)] == then
        client.load_state_dict(before)
        session.add_source(source("d"))  # another story from there on
        assert "d" in set().union(*(drawn(s) for s in take(client, 6)))
    assert with_it


def test_several_sources_join_one_after_another_and_a_state_holds_them_in_order() -> None:
    made = job()
    joining = [source(n, weight=w) for n, w in (("c", 1.0), ("d", 2.0), ("e", 3.0))]
    with launch(made) as session:
        client = session.client(0)
        for one in joining:
            take(client, 2)
            session.add_source(one)
        take(client, 4)
        state = client.state_dict()
        rest = [s.plan_digest for s in client]
    assert [e["name"] for e in state["events"]] == ["c", "d", "e"]
    with launch(replace(made, sources=(*made.sources, *joining)), resume=state) as session:
        assert [s.plan_digest for s in session.client(0)] == rest


@pytest.mark.parametrize("at", [0, 3, 12])
def test_a_source_joins_a_job_that_looks_ahead(at: int) -> None:
    joining = source("c", 30, epochs=2, weight=2.0)
    made = job(
        look_ahead=3,
        mixture=ov.schedule.length_warmup(1, 3, steps=9),
        place=ov.ClientPlaceTree(dp=2),
    )
    whole = ov.simulate(made, seed=3, events=[Add(joining, at)], save=True, check=True)
    assert any("c" in drawn(s) for s in whole.steps[0])
    assert max(Counter(samples(whole.steps[0], "c")).values()) == 1
    wider = replace(made, sources=(*made.sources, joining))
    for k in range(0, 20, 3):
        again = ov.simulate(
            wider, seed=k, resume=json.loads(json.dumps(whole.states[k])), check=True
        )
        assert [s.plan_digest for s in again.steps[0]] == [s.plan_digest for s in whole.steps[0]][
            k + 1 :
        ]
    with launch(made) as session:
        clients = [session.client(0), session.client(1)]
        take(clients[0], 1)
        take(clients[1], 1)
        session.add_source(joining)
        steps = [pair[0] for pair in zip(*clients, strict=True)]
    assert any("c" in drawn(s) for s in steps)


def test_a_simulated_run_gives_what_a_local_one_gives() -> None:
    joining, made = source("c", weight=0.5), job(place=ov.ClientPlaceTree(dp=2))
    with launch(made) as session:
        clients = [session.client(0), session.client(1)]
        session.set_mixture({"a": 1.0, "b": 2.0}, at=4)
        session.add_source(joining, at=7)
        local = [[s.plan_digest for s in steps] for steps in zip(*clients, strict=True)]
    run = ov.simulate(
        made, seed=3, events=[SetMixture(4, {"a": 1.0, "b": 2.0}), Add(joining, 7, 2)], check=True
    )
    assert [s.plan_digest for s in run.steps[0]] == [pair[0] for pair in local]
    assert isinstance(run.steps[0][-1].info.after.events[0], AddSource)


# What is refused


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda d: source("a"), JobError, "expected different names, got 'a' twice"),
        (lambda d: "c.jsonl", JobError, "expected a Source"),
        (
            lambda d: ov.Source("c", str(d / "none-*.jsonl"), transforms=[ov.Tokens("tokens")]),
            SourceError,
            "none-",
        ),
        (
            lambda d: ov.Source("c", str(d / "bad.parquet"), transforms=[ov.Tokens("tokens")]),
            SourceError,
            "bad.parquet",
        ),
        (
            lambda d: source(
                "c", transforms=[ov.Meta("x", len), ov.Meta("x", len), ov.Tokens("tokens")]
            ),
            TransformError,
            "expected different names",
        ),
    ],
)
def test_a_source_that_cannot_join_is_refused_as_at_launch_and_nothing_has_changed(
    make: Any, error: Any, words: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is none")
    with launch(job()) as session:
        client = session.client(0)
        take(client, 2)
        state = client.state_dict()
        with pytest.raises(error, match=words):
            session.add_source(make(tmp_path))
        assert client.state_dict() == state
        assert list(session.metrics()["sources"]) == ["a", "b"]
        got = [s.plan_digest for s in client]
    with launch(job()) as session:
        assert [s.plan_digest for s in session.client(0)][2:] == got


def test_a_step_that_is_planned_or_none_and_a_job_that_ended_are_refused() -> None:
    with launch(job(), prefetch=2) as session:
        client = session.client(0)
        take(client, 4)
        until(lambda: runtime_of(session).planner.open_step == 6)
        with pytest.raises(
            PlanError, match="expected step 6 or a later one for an event, got step 3"
        ):
            session.add_source(source("c"), at=3)
        with pytest.raises(PlanError, match="whole numbers"):
            session.add_source(source("c"), at=7.5)  # type: ignore[arg-type]
        with pytest.raises(JobError, match="loaders"):
            session.add_source(source("c"), loaders=0)
        list(client)
        with pytest.raises(PlanError, match="the job ends before step 20"):
            session.add_source(source("c"))
        assert session.job.names == ("a", "b")
    with pytest.raises(OverlordError, match="closed"):
        session.add_source(source("c"))


def test_all_that_is_wrong_with_a_source_is_said_at_once() -> None:
    with launch(job()) as session, pytest.raises(JobError) as caught:
        session.add_source(ov.Source("c", "x.jsonl", epochs=0, weight=-1.0))
    assert len(caught.value.problems) == 2


def test_a_state_written_in_the_moment_of_joining_has_the_source_and_its_event_or_neither() -> None:
    made, joining = job(), source("c", weight=3.0)
    with launch(made) as session:
        client, note, states = session.client(0), running_job(session).events.note, []
        take(client, 2)

        def watched(event: Any) -> None:
            states.append(client.state_dict())
            note(event)
            states.append(client.state_dict())

        running_job(session).events.note = watched  # type: ignore[method-assign]
        session.add_source(joining, at=9)
        states.append(client.state_dict())
    assert [("c" in s["cursors"], len(s["events"])) for s in states] == [
        (False, 0),
        (False, 0),
        (True, 1),
    ]
