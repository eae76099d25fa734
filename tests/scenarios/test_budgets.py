"""Budgets of sources on every runtime: the same bytes, also where parts die or a budget changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from tests.corpus import write_rows
from tests.processes import WAIT_S, Played, launch, play, until
from tests.processes import run as played
from tests.reference import reference_stream
from tests.scenarios.test_coordinator_process import killed
from tests.scenarios.test_failover import APART, EVERYONE, killing, recovered
from tests.scenarios.test_runtime import RUNTIMES, all_clean, run
from tests.sizes import on_runtimes
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(4 * WAIT_S)


def rows(n: int, first: int) -> list[dict[str, Any]]:
    return [
        {"n": first + k, "tokens": [(first + 13 * k + j) % 60_000 for j in range(1 + k * 7 % 23)]}
        for k in range(n)
    ]


def job(**changes: Any) -> ov.Job:
    """Three sources: one ends inside its second epoch, one at its tokens, one never."""
    limits: tuple[dict[str, Any], ...] = ({"epochs": 1.5}, {"max_tokens": 320}, {})
    batch = {name: changes.pop(name) for name in ("packing",) if name in changes}
    settings: dict[str, Any] = {
        "name": "limited",
        "sources": [
            ov.Source(
                name,
                Rows(rows(30, 10_000 * i)),
                transforms=[ov.Tokens("tokens")],
                weight=1.0 + i,
                **limits[i],
            )
            for i, name in enumerate("abc")
        ],
        "batch": ov.Batch(samples=7, context=24, **batch),
        "max_document": 64,
        "place": ov.Mesh(dp=2),
        "seed": 5,
        "slice_rows": 8,
        "shuffle_chunks": 2,
        "until": 24,
    }
    if batch.get("packing") != "concat":
        settings["max_document"] = None
    return ov.Job(**{**settings, **changes})


CASES = {"documents": job(), "chunks": job(packing="concat"), "choices": job(look_ahead=3)}


@pytest.mark.parametrize(
    ("runtime", "name"), on_runtimes(dict(zip(CASES, CASES, strict=True)), RUNTIMES, ("chunks",))
)
def test_every_runtime_delivers_the_same_bytes(runtime: str, name: str) -> None:
    made = CASES[name]
    out = run(runtime, made)
    all_clean(out)
    assert out.digests() == run("local", made).digests(), "to the byte"
    if name == "documents":
        wanted = [[key for key, _ in step] for step in reference_stream(made)]
        got = [[tuple(p.sample) for p in step] for step in samples_by_step(made, out)]
        assert [sorted(step) for step in got] == [sorted(step) for step in wanted]


def samples_by_step(made: ov.Job, out: Any) -> list[list[Any]]:
    return [
        [
            p
            for rank in out.microbatches
            for held in out.microbatches[rank][step]
            for p in held.samples
        ]
        for step in sorted(out.steps[0])
    ]


@pytest.fixture(scope="module", params=("documents", "chunks"))
def calm(request: pytest.FixtureRequest) -> tuple[ov.Job, Played]:
    made = CASES[request.param]
    return made, played(made, "local")


def test_budgets_survive_workers_that_are_killed(calm: tuple[ov.Job, Played]) -> None:
    made, wanted = calm
    names = EVERYONE[1:3]
    with launch(made, **APART) as session:
        got = play(session, act={5: killing(*names), 12: killing(*names)})
        until(lambda: set(recovered(session)) >= {n for n in names if n in EVERYONE[:4]})
    assert got == wanted


def test_a_killed_coordinator_and_a_second_launch_keep_the_counts(
    calm: tuple[ov.Job, Played], tmp_path: Path
) -> None:
    made, wanted = calm
    made = replace(made, journal=str(tmp_path / "journal"))
    with launch(made, **APART) as session:
        first = play(session, act={4: killed()}, steps=9)
    with launch(made, resume="auto", **APART) as session:
        rest = play(session)
        found = session.metrics()["sources"]
    assert {r: first.steps[r] + rest.steps[r] for r in first.steps} == wanted.steps
    assert found["b"]["ended"]
    assert 290 < found["b"]["tokens"] <= found["b"]["max_tokens"] == 320


@pytest.mark.parametrize("runtime", ["local", "process"])
def test_a_journal_continues_with_another_budget(runtime: str, tmp_path: Path) -> None:
    made = job(journal=str(tmp_path / "journal"), until=40)
    with ov.launch(made, runtime=runtime) as session:
        play(session, steps=20)
    first, second, third = made.sources
    more = replace(made, sources=[first, replace(second, max_tokens=500), third])
    with pytest.raises(ov.StateMismatch, match="source b: reading"):
        ov.launch(more, runtime=runtime, resume="auto")
    allow = ("source b: reading",)
    with ov.launch(more, runtime=runtime, resume="auto", allow=allow) as session:
        play(session)
        assert 470 < session.metrics()["sources"]["b"]["tokens"] <= 500


def test_another_mesh_in_mid_run_gets_the_next_samples(tmp_path: Path) -> None:
    """Also of lines, of which a part is chosen by a hash."""
    write_rows(tmp_path, "jsonl", rows(40, 0), files=3)
    lines = ov.Source("lines", tmp_path / "*.jsonl", transforms=[ov.Tokens("tokens")], epochs=2.25)
    made = job(until="all")
    made = replace(made, sources=[lines, made.sources[1], replace(made.sources[0], epochs=1.25)])
    wanted = [[key for key, _ in step] for step in reference_stream(made)]
    with ov.launch(made) as session:
        clients = [session.client(rank) for rank in range(2)]
        before = [[next(client) for client in clients] for _ in range(7)]
        session.reshard(ov.Mesh(dp=3))
        clients = [session.client(rank) for rank in range(3)]
        after = list(zip(*clients, strict=True))
    got = [
        sorted(tuple(p.sample) for step in steps for mb in step for p in mb.samples)
        for steps in [*before, *after]
    ]
    assert got == [sorted(step) for step in wanted]
