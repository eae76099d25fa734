"""Pairs, groups and plain documents in one job: one stream on every runtime, after kills, resumes
and on other meshes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ov
from overlord.constructor.rank_views import join
from tests import chats, rays
from tests.processes import RUNTIMES, WORKER_RUNTIME, launch, play, run, workers_of, written
from tests.tokenizers_made import bpe

pytestmark = pytest.mark.timeout(200)
ON_RAY = pytest.param(
    "ray", marks=pytest.mark.skipif(bool(rays.missing()), reason=rays.missing() or "it is there")
)
ROWS = 36
WORDS = ("hello", "world", "lower", "low", "hello lower", "world low low")


def text(k: int) -> str:
    return " ".join(WORDS[(k * 7 + i) % len(WORDS)] for i in range(1 + k % 5))


def write_sources(folder: Path) -> list[ov.Source]:
    """Write pairs of texts, groups of ids and pairs of conversations; some rows are incomplete."""
    pairs = [
        {"prompt": text(k), "chosen": text(k + 1), "rejected": None if k % 9 == 4 else text(k + 2)}
        for k in range(ROWS)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    groups = [
        {
            "prompt": [k] * (k % 4),
            "answers": [[k, n, *range(n + k % 6)] for n in range(1 + k % 4)],
            "rewards": [float(n - k % 3) for n in range(1 + k % 4)],
        }
        for k in range(ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(groups), folder / "groups.parquet", row_group_size=8)
    talks = []
    for k in range(ROWS):
        begin = [{"role": "user", "content": text(k)}]
        talks.append(
            {
                name: [*begin, {"role": "assistant", "content": text(k + i)}]
                for i, name in enumerate(("chosen", "rejected"))
            }
        )
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    bpe().save(str(folder / "tokenizer.json"))
    tokenize = ov.Tokenize(str(folder / "tokenizer.json"), bos=4, eos=5)
    template = chats.write_folder(folder / "chatml", "chatml")
    chains: dict[str, list[Any]] = {
        "pairs.jsonl": [ov.Pair(prompt="prompt"), tokenize],
        "groups.parquet": [ov.Group("answers", prompt="prompt", values=["rewards"])],
        "talks.jsonl": [ov.Pair(), ov.Chat(template, date=chats.DAY)],
    }
    sources = [
        ov.Source(name.partition(".")[0], str(folder / name), transforms=chain, epochs=1)
        for name, chain in chains.items()
    ]
    plain = [{"tokens": list(range(1 + k % 30))} for k in range(ROWS)]
    pq.write_table(pa.Table.from_pylist(plain), folder / "plain.parquet")
    return [*sources, ov.Source("plain", str(folder / "plain.parquet"), epochs=1)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[ov.Source]:
    return write_sources(tmp_path_factory.mktemp("pairs"))


def job(sources: list[ov.Source], place: ov.Mesh, **changes: Any) -> ov.Job:
    batch = {"samples": 12, "context": 512, "microbatches": 2} | changes.pop("batch", {})
    fields: dict[str, Any] = {"slice_rows": 4, "shuffle_chunks": 2, "seed": 3} | changes
    return ov.Job(name="pairs", sources=sources, place=place, batch=ov.Batch(**batch), **fields)


MESHES: dict[str, tuple[ov.Mesh, dict[str, Any]]] = {
    "replicas": (ov.Mesh(dp=2), {"strategy": "even"}),
    "slices and stages": (ov.Mesh(pp=2, cp=2), {}),
    "padded rows": (ov.Mesh(dp=2, cp=2), {"batch": {"layout": "padded", "labels": "unshifted"}}),
    "broadcasts": (ov.Mesh(tp=2, cp=2), {"batch": {"sequence_parallel": True}}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_runtime_delivers_one_stream(sources: list[ov.Source], mesh: str) -> None:
    place, changes = MESHES[mesh]
    made = job(sources, place, **changes)
    found = [run(made, runtime, hosts=2) for runtime in RUNTIMES]
    assert not found[0].error
    assert found[0].steps == found[1].steps
    assert key(found[0].quarantine) == key(found[1].quarantine)
    assert len(found[0].quarantine) == sum(k % 9 == 4 for k in range(ROWS))
    done = ov.simulate(made, seed=5)
    assert done.error is None
    assert {rank: [written(s) for s in steps] for rank, steps in done.steps.items()} == found[
        0
    ].steps


def key(quarantine: list[dict[str, Any]]) -> list[Any]:
    return sorted((q["source"], q["row"], q["reason"]) for q in quarantine)


@pytest.mark.parametrize("runtime", [WORKER_RUNTIME, ON_RAY])
def test_kills_of_loaders_and_constructors_change_nothing(
    sources: list[ov.Source], runtime: str, tmp_path: Path
) -> None:
    made = job(sources, ov.Mesh(dp=2))
    wanted = run(made, "local")

    def kill(role: str) -> Any:
        return lambda session: session.kill(
            next(name for name in workers_of(session) if name.startswith(role))
        )

    done = run(
        made, runtime, hosts=2, act={2: kill("loader"), 4: kill("constructor"), 6: kill("loader")}
    )
    assert not done.error
    assert done.steps == wanted.steps
    assert key(done.quarantine) == key(wanted.quarantine)


def test_a_state_of_every_step_continues_the_stream(sources: list[ov.Source]) -> None:
    made = job(sources, ov.Mesh(dp=2))
    with launch(made, "local") as session:
        whole = play(session)
    assert len(whole.states) > 5
    for k, state in enumerate(whole.states):
        rest = run(made, "local", resume=state)
        assert {rank: steps[k + 1 :] for rank, steps in whole.steps.items()} == rest.steps


def test_look_ahead_holds_samples_of_several_documents_over_a_resume(
    sources: list[ov.Source],
) -> None:
    made = job(sources, ov.Mesh(dp=2), strategy="look_ahead_balance", look_ahead=3)
    whole = run(made, "local")
    assert not whole.error
    assert run(made, WORKER_RUNTIME, hosts=2).steps == whole.steps
    for k in (0, 2, 4):
        rest = run(made, "local", resume=whole.states[k])
        assert {rank: steps[k + 1 :] for rank, steps in whole.steps.items()} == rest.steps


def contents(steps: list[ov.Step], place: ov.Mesh) -> list[Any]:
    """Return the documents of a step, whatever the mesh: sample, role, ids, labels, mask."""
    found = []
    for dp in range(place.dp):
        ranks = [place.rank(dp=dp, cp=cp) for cp in range(place.cp)]
        for microbatches in zip(*(steps[rank] for rank in ranks), strict=True):
            mb = join(microbatches, "zigzag")
            starts, lengths = mb["cu_seqlens_padded"], np.diff(mb["cu_seqlens"])
            for d, (a, n) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=False)):
                if mb["group_ids"][d] < 0:
                    continue
                keys = ("group_ids", "roles", "prompt_lengths", "source_ids")
                columns = [mb[c][a : a + n].tolist() for c in ("tokens", "labels", "loss_mask")]
                reward = float(np.nan_to_num(mb["rewards"][d], nan=-99))
                found.append([*(int(mb[c][d]) for c in keys), reward, *columns])
    return sorted(found)


@pytest.mark.parametrize("runtime", ["local", WORKER_RUNTIME])
def test_other_meshes_in_mid_run_have_the_same_documents_in_every_step(
    sources: list[ov.Source], runtime: str
) -> None:
    first, later = ov.Mesh(dp=2), [ov.Mesh(cp=2), ov.Mesh(dp=3), ov.Mesh()]
    wanted = []
    with launch(job(sources, first), "local") as session:
        clients = [session.client(r) for r in range(2)]
        for steps in zip(*clients, strict=True):
            wanted.append(contents(list(steps), first))
    with launch(job(sources, first), runtime) as session:
        found, place = [], first
        for mesh in [first, *later]:
            if mesh != place:
                session.reshard(mesh)
                place = mesh
            clients = [session.client(r) for r in range(mesh.world_size)]
            for _ in range(2):
                found.append(contents([next(client) for client in clients], mesh))
    assert found == wanted[: len(found)]


def test_a_mesh_that_pads_more_than_samples_leave_free_is_refused_on_reshard(
    sources: list[ov.Source],
) -> None:
    with launch(job(sources, ov.Mesh()), "local") as session:
        next(session.client(0))
        with pytest.raises(ov.JobError, match="expected room for 2 documents of source 'pairs'"):
            session.reshard(ov.Mesh(cp=8))
