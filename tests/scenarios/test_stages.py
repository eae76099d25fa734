"""Stages on every runtime: the steps of the reference, also where parts die or the mesh changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
from tests.processes import WAIT_S, Played, launch, play, until
from tests.processes import run as played
from tests.reference import pieces_in_stage, reference_stream, stage_of
from tests.scenarios.test_coordinator_process import killed
from tests.scenarios.test_failover import APART, EVERYONE, killing, recovered
from tests.scenarios.test_packing import rows
from tests.scenarios.test_runtime import RUNTIMES, all_clean, run
from tests.sizes import on_runtimes

pytestmark = pytest.mark.timeout(4 * WAIT_S)


def job(epochs: int | None = 1, **changes: Any) -> ov.Job:
    settings: dict[str, Any] = {
        "name": "staged",
        "sources": [
            ov.Source(
                name, rows(n, 10_000 * i), transforms=[ov.Tokens("tokens")], epochs=epochs, weight=w
            )
            for i, (name, n, w) in enumerate((("a", 60, 1.0), ("b", 80, 2.0), ("c", 70, 1.0)))
        ],
        "batch": ov.Batch(samples=ov.schedule.linear(4, 8, steps=4), context=256),
        "stages": [
            ov.Stage(4, context=24, name="short"),
            ov.Stage(3, mixture={"a": 1, "c": 3}, context=64),
            ov.Stage(
                name="long",
                batch=ov.Batch(
                    samples=ov.schedule.linear(6, 12, steps=6, multiple=2),
                    microbatches=2,
                    context=256,
                ),
                mixture=ov.schedule.linear({"a": 1, "b": 1}, {"b": 1, "c": 1}, 5),
            ),
        ],
        "place": ov.Mesh(dp=2),
        "seed": 11,
        "slice_rows": 8,
        "shuffle_chunks": 2,
    }
    return ov.Job(**{**settings, **changes})


CASES = {
    "documents": job(),
    "truncated": job(on_long="truncate"),
    "chunks": job(
        batch=ov.Batch(samples=4, context=64, packing="concat", cp_split="contiguous"),
        stages=[ov.Stage(4, context=24), ov.Stage(3, mixture={"c": 1}), ov.Stage(context=256)],
    ),
    "slices": job(place=ov.Mesh(dp=2, cp=2)),
}
Key = tuple[Any, int, tuple[int, ...]]


def of_reference(made: ov.Job) -> list[list[Key]]:
    return [
        sorted(
            (ident, at, tuple(tokens))
            for sample in samples
            for ident, at, tokens in pieces_in_stage(made, step, sample)
        )
        for step, samples in enumerate(reference_stream(made))
    ]


def of_steps(steps: list[ov.Step]) -> list[Key]:
    found = []
    for mb in (mb for step in steps for mb in step):
        tokens = np.asarray(mb["tokens"])
        for piece, begin in zip(mb.samples, mb.begins.tolist(), strict=True):
            own = tokens[piece.offset : piece.offset + piece.length]
            found.append((tuple(piece.sample), begin, tuple(own.tolist())))
    return sorted(found)


@pytest.mark.parametrize(
    ("runtime", "name"), on_runtimes(dict(zip(CASES, CASES, strict=True)), RUNTIMES, ("slices",))
)
def test_every_runtime_delivers_the_same_bytes(runtime: str, name: str) -> None:
    made = CASES[name]
    out = run(runtime, made)
    all_clean(out)
    assert out.digests() == run("local", made).digests(), "to the byte"


def test_the_ranks_of_processes_get_the_stages_of_the_reference() -> None:
    made = job()
    wanted = of_reference(made)
    with launch(made, runtime="process") as session:
        clients = [session.client(rank) for rank in range(2)]
        for k, steps in enumerate(zip(*clients, strict=True)):
            number, _ = stage_of(made, k)
            stage = made.stages[number].name or number
            assert [step.stage for step in steps] == [stage, stage]
            assert of_steps(list(steps)) == wanted[k]
            assert clients[0].state_dict()["stage"] == stage_name(made, k + 1)
        assert k == len(wanted) - 1
        assert session.metrics()["stage"] == "long"


def stage_name(made: ov.Job, step: int) -> str | int:
    number, _ = stage_of(made, step)
    return made.stages[number].name or number


@pytest.fixture(scope="module")
def calm() -> tuple[ov.Job, Played]:
    made = job(None, until=20)
    return made, played(made, "local")


@pytest.mark.parametrize("at", [(2, 5), (6, 9)], ids=str)
@pytest.mark.parametrize("names", [EVERYONE[1:3], EVERYONE[:2] + EVERYONE[2:4]], ids="+".join)
def test_stages_survive_workers_that_are_killed_around_a_boundary(
    calm: tuple[ov.Job, Played], names: tuple[str, ...], at: tuple[int, int]
) -> None:
    made, wanted = calm
    with launch(made, **APART) as session:
        got = play(session, act=dict.fromkeys(at, killing(*names)))
        until(lambda: set(recovered(session)) >= {n for n in names if n in EVERYONE[:4]})
    assert got == wanted


@pytest.mark.parametrize("stop", [3, 4, 7, 9])
def test_a_killed_coordinator_and_a_second_launch_continue_in_the_stage(
    calm: tuple[ov.Job, Played], tmp_path: Path, stop: int
) -> None:
    made, wanted = calm
    made = replace(made, journal=str(tmp_path / "journal"))
    with launch(made, **APART) as session:
        first = play(session, act={2: killed()}, steps=stop)
    with launch(made, resume="auto", **APART) as session:
        rest = play(session)
        begun = session.resumed.step
    # the last acknowledgements are lost where the coordinator had not returned yet
    assert stop - 2 <= begun <= stop
    for rank, steps in wanted.steps.items():
        assert first.steps[rank] == steps[:stop]
        assert rest.steps[rank] == steps[begun:]


@pytest.mark.parametrize("after", [2, 4, 6])
def test_another_mesh_in_mid_run_gets_the_samples_of_the_stages(after: int) -> None:
    made = job()
    wanted = of_reference(made)
    with launch(made) as session:
        clients = [session.client(rank) for rank in range(2)]
        before = [[next(client) for client in clients] for _ in range(after)]
        session.reshard(ov.Mesh(dp=3))
        clients = [session.client(rank) for rank in range(3)]
        rest = list(zip(*clients, strict=True))
    assert [of_steps(list(steps)) for steps in [*before, *rest]] == wanted


def test_a_mesh_that_does_not_fit_a_later_stage_is_refused() -> None:
    made = job(stages=[ov.Stage(5), ov.Stage(context=20)])
    with launch(made) as session:
        next(session.client(0))
        with pytest.raises(
            ov.JobError, match=r"stages\[1\]\.batch\.context: expected a multiple of"
        ):
            session.reshard(ov.Mesh(dp=1, cp=4))


def test_a_source_added_in_a_stage_has_its_own_weight_from_there_on() -> None:
    made = job(None, until=12)
    more = ov.Source("d", rows(50, 90_000), transforms=[ov.Tokens("tokens")], weight=2.0)
    with launch(made, runtime="process") as session:
        clients = [session.client(rank) for rank in range(2)]
        next(clients[0]), next(clients[1])
        session.add_source(more, at=9)
        steps = list(zip(*clients, strict=True))
    grown = replace(made, sources=[*made.sources, more])
    wanted = [
        sorted((i, at, tuple(t)) for s in samples for i, at, t in pieces_in_stage(grown, k, s))
        for k, samples in enumerate(reference_stream(grown, joins={"d": 9}))
    ]
    assert [of_steps(list(step)) for step in steps] == wanted[1:]
    assert any("d" in key[0] for key in wanted[-1])
