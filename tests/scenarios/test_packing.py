"""Chunks and fixed shapes on every runtime: the chunks of the reference, also where parts die."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.constructor.rank_views import join
from tests.processes import WAIT_S, Played, launch, play, until
from tests.processes import run as played
from tests.reference_chunks import Piece, reference_chunks
from tests.scenarios.test_coordinator_process import killed
from tests.scenarios.test_failover import APART, EVERYONE, killing, recovered
from tests.scenarios.test_runtime import RUNTIMES, Held, Outcome, all_clean, run
from tests.sizes import on_runtimes
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(4 * WAIT_S)
CONTEXT = 24


def rows(n: int, first: int) -> Rows:
    """Mostly short documents; every fifth is longer than a chunk, some than a step."""
    lengths = [1 + k % 7 if k % 5 else 20 + (k * 37) % 230 for k in range(n)]
    return Rows(
        [
            {
                "n": first + k,
                "tokens": [(first + 13 * k + j) % 60_000 for j in range(length)],
                "weights": [(j // 4 + k) % 3 * 0.5 for j in range(length)],
            }
            for k, length in enumerate(lengths)
        ]
    )


def job(epochs: int | None = 1, *, loss: str | None = None, **changes: Any) -> ov.Job:
    """A job of three sources, of which the last two have weights if ``loss`` names them."""
    batch = {"samples": 6, "context": CONTEXT, "packing": "concat", "cp_split": "zigzag_whole"}
    batch |= {
        k: changes.pop(k)
        for k in ("shape", "packing", "labels", "max_documents", "layout", "pad_multiple")
        if k in changes
    }
    settings: dict[str, Any] = {
        "name": "packed",
        "sources": [
            ov.Source(
                name,
                rows(n, 10_000 * i),
                transforms=[ov.Tokens("tokens", loss=loss if i else None)],
                epochs=epochs,
                weight=w,
            )
            for i, (name, n, w) in enumerate((("a", 30, 1.0), ("b", 40, 2.0), ("c", 35, 1.0)))
        ],
        "batch": ov.Batch(**batch),
        "max_document": 1000,
        "place": ov.Mesh(dp=2),
        "seed": 11,
        "slice_rows": 8,
        "shuffle_chunks": 2,
    }
    return ov.Job(**{**settings, **changes})


def in_whole_documents(epochs: int | None = 1, **changes: Any) -> ov.Job:
    fields = {"shape": "fixed", "packing": "documents", "max_document": None, "look_ahead": 2}
    return job(epochs, **{**fields, **changes})


CASES = {
    "chunks": job(),
    "chunks of fixed shape in slices and stages": job(
        shape="fixed", max_documents=20, place=ov.Mesh(dp=2, cp=2, tp=2, pp=2)
    ),
    "weighted chunks": job(loss="weights", shape="fixed", max_documents=24),
    "padded rows of fixed shape": in_whole_documents(
        loss="weights", layout="padded", pad_multiple=2, max_documents=4
    ),
    "documents of fixed shape": in_whole_documents(),
}


def chunks_of(made: ov.Job, out: Outcome) -> list[list[list[Piece]]]:
    """The chunks of every step, joined from the slices and the stages of all ranks."""
    place, steps = made.place, []
    for step in sorted(out.steps[0]):
        found = []
        for dp in range(place.dp):
            held: list[list[Held]] = [
                out.microbatches[place.rank(dp=dp, cp=cp, pp=pp, tp=0)][step]
                for cp in range(place.cp)
                for pp in (0, place.pp - 1)
            ]
            for parts in zip(*held, strict=True):
                slices = [
                    {**a.arrays, **b.arrays} for a, b in zip(parts[::2], parts[1::2], strict=True)
                ]
                whole = join(slices, made.batch.cp_split)
                if parts[0].samples:
                    found.append(pieces_of(whole, parts[0].samples, parts[0].begins))
        steps.append(found)
    return steps


def pieces_of(mb: dict[str, np.ndarray], samples: list[Any], begins: list[int]) -> list[Piece]:
    assert mb["tokens"].shape == (CONTEXT,)
    pieces = []
    bounds = pairwise(mb["cu_seqlens"].tolist())
    for (a, b), piece, start in zip(bounds, samples, begins, strict=False):
        assert b - a == piece.length
        assert mb["position_ids"][a:b].tolist() == list(range(b - a))
        labels = mb["labels"][a:b].tolist()
        assert labels[:-1] == mb["tokens"][a + 1 : b].tolist()
        assert mb["loss_mask"][a:b].tolist() == [float(label != -100) for label in labels]
        after = None if labels[-1] == -100 else labels[-1]
        pieces.append(Piece(tuple(piece.sample), start, mb["tokens"][a:b].tolist(), after))
    return pieces


@pytest.mark.parametrize(
    ("runtime", "name"), on_runtimes(dict(zip(CASES, CASES, strict=True)), RUNTIMES, ("chunks",))
)
def test_every_runtime_delivers_the_same_bytes(runtime: str, name: str) -> None:
    made = CASES[name]
    out = run(runtime, made)
    all_clean(out)
    assert out.digests() == run("local", made).digests(), "to the byte"
    if made.batch.packing == "concat" and name != "weighted chunks":
        for got, wanted in zip(chunks_of(made, out), reference_chunks(made), strict=True):
            assert sorted(got) == sorted(wanted)


@pytest.fixture(scope="module", params=("chunks", "weighted chunks", "documents"))
def calm(request: pytest.FixtureRequest) -> tuple[Any, Played]:
    loss = "weights" if request.param == "weighted chunks" else None
    made = (in_whole_documents if request.param == "documents" else job)(None, until=24, loss=loss)
    return made, played(made, "local")


@pytest.mark.parametrize("names", [EVERYONE[1:3], EVERYONE[:2] + EVERYONE[2:4]], ids="+".join)
def test_pieces_survive_workers_that_are_killed(
    calm: tuple[ov.Job, Played], names: tuple[str, ...]
) -> None:
    made, wanted = calm
    with launch(made, **APART) as session:
        got = play(session, act={5: killing(*names), 12: killing(*names)})
        until(lambda: set(recovered(session)) >= {n for n in names if n in EVERYONE[:4]})
    assert got == wanted


def test_a_killed_coordinator_and_a_second_launch_continue_inside_a_sample(
    calm: tuple[ov.Job, Played], tmp_path: Path
) -> None:
    made, wanted = calm
    made = replace(made, journal=str(tmp_path / "journal"))
    with launch(made, **APART) as session:
        first = play(session, act={4: killed()}, steps=9)
    with launch(made, resume="auto", **APART) as session:
        rest = play(session)
    assert {r: first.steps[r] + rest.steps[r] for r in first.steps} == wanted.steps


def test_another_mesh_in_mid_run_gets_the_next_chunks() -> None:
    made = job(None, until=10)
    wanted = list(reference_chunks(made))
    with launch(made) as session:
        clients = [session.client(rank) for rank in range(2)]
        before = [[next(client) for client in clients] for _ in range(4)]
        session.reshard(ov.Mesh(dp=3))
        clients = [session.client(rank) for rank in range(3)]
        after = list(zip(*clients, strict=True))
    assert len(before) + len(after) == 10
    for steps, chunks in zip([*before, *after], wanted, strict=True):
        held = [mb for step in steps for mb in step if mb.samples]
        got = [
            pieces_of({k: np.asarray(mb[k]) for k in mb}, mb.samples, mb.begins.tolist())
            for mb in held
        ]
        assert sorted(got) == sorted(chunks)
