"""The loader's state in torch's distributed checkpoint, and as a file: saved once, loaded on any
mesh.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
import overlord.torch as ot
from tests.torch.jobs import text_job

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
from torch.distributed.checkpoint.stateful import Stateful  # noqa: E402


def samples(steps: Any) -> list[set[str]]:
    """Of every step, over ranks."""
    return [
        {str(piece.sample) for step in ranks for mb in step for piece in mb.samples}
        for ranks in steps
    ]


def tokens_of(item: Any) -> list[int]:
    return [t for mb in ([item] if "tokens" in item else item) for t in mb["tokens"].tolist()]


def all_ranks(session: ov.Session) -> Any:
    return zip(*[session.client(rank) for rank in range(session.job.place.world_size)], strict=True)


def loaders(session: ov.Session, kind: str) -> Any:
    client = session.client(0)
    if kind == "prefetcher":
        return ot.DevicePrefetcher(client, "cpu", depth=3)
    return ot.StatefulLoader(client) if kind == "loader" else client


@pytest.mark.filterwarnings("ignore:.*single process.*", "ignore:.*torch.distributed.*")
@pytest.mark.parametrize("kind", ["client", "prefetcher", "loader"])
def test_a_distributed_checkpoint_holds_the_state_beside_the_model(tmp_path: Path, kind: str):
    job = text_job(tmp_path / "data")
    with ov.launch(job) as session:
        wanted = samples(all_ranks(session))
    model = torch.nn.Linear(3, 2)
    with ov.launch(job) as session:
        steps = loaders(session, kind)
        iterator = iter(steps)
        for _ in range(3):
            next(iterator)
        state = ot.LoaderState(steps)
        assert isinstance(state, Stateful)
        dcp.save(
            {"model": model.state_dict(), "loader": state},
            checkpoint_id=tmp_path / "checkpoint",
            no_dist=True,
        )
        steps.close()
    other = text_job(tmp_path / "data", dp=3)
    with ov.launch(other) as session:
        clients = [session.client(rank) for rank in range(3)]
        for client in clients:  # as every rank does in its own process
            found = {
                "model": torch.nn.Linear(3, 2).state_dict(),
                "loader": ot.LoaderState(_stream_of(client, kind)),
            }
            dcp.load(found, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
            assert torch.equal(found["model"]["weight"], model.weight)
        assert samples(zip(*clients, strict=True)) == wanted[3:]


def _stream_of(client: ov.Client, kind: str) -> Any:
    return ot.StatefulLoader(client) if kind == "loader" else client


@pytest.mark.filterwarnings("ignore:.*single process.*", "ignore:.*torch.distributed.*")
@pytest.mark.parametrize("microbatches", [False, True])
def test_a_loader_is_loaded_from_a_distributed_checkpoint_as_it_is(
    tmp_path: Path, microbatches: bool
):
    """Nothing wraps it: torchtitan gives its loader to the checkpoint, which asks one that was
    never iterated for the keys to load.
    """
    job = text_job(tmp_path / "data", microbatches=3)
    with ot.StatefulLoader(job, microbatches=microbatches) as saved:
        iterator = iter(saved)
        for _ in range(4):
            next(iterator)
        dcp.save({"dataloader": saved}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        wanted, state = tokens_of(next(iterator)), saved.state_dict()
    with ot.StatefulLoader(job, microbatches=microbatches) as loaded:
        assert loaded.state_dict().keys() == state.keys()
        dcp.load({"dataloader": loaded}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        assert tokens_of(next(iter(loaded))) == wanted


@pytest.mark.filterwarnings("ignore:.*single process.*", "ignore:.*torch.distributed.*")
def test_a_state_that_grew_since_is_loaded_all_the_same(tmp_path: Path):
    """The state asked for while loading is a short one of step 0; what is loaded has another
    length.
    """
    job = text_job(tmp_path / "data", until=30)
    with ov.launch(job) as session:
        client = session.client(0)
        for _ in range(20):
            next(client)
        client.report(19, {"loss/web": 1.25, "loss/code": 2.5})
        saved = client.state_dict()
        dcp.save(
            {"loader": ot.LoaderState(client)}, checkpoint_id=tmp_path / "checkpoint", no_dist=True
        )
    with ov.launch(job) as session:
        client = session.client(0)
        assert len(json.dumps(client.state_dict())) != len(json.dumps(saved))
        dcp.load(
            {"loader": ot.LoaderState(client)}, checkpoint_id=tmp_path / "checkpoint", no_dist=True
        )
        assert next(client).step == 20


def test_whoever_saves_a_state_that_cannot_be_had_is_told_why(tmp_path: Path):
    job = text_job(tmp_path / "data", dp=2)
    with ov.launch(job) as session:
        first, second = session.client(0), session.client(1)
        for client in (first, second):
            next(client)
        saved = first.state_dict()
        next(first)
        first.load_state_dict(saved)
        with pytest.raises(dcp.CheckpointException, match="another rank rewound the session"):
            dcp.save(
                {"loader": ot.LoaderState(second)},
                checkpoint_id=tmp_path / "checkpoint",
                no_dist=True,
            )


def test_a_state_of_another_job_is_refused_unless_its_difference_is_allowed(tmp_path: Path):
    with ov.launch(text_job(tmp_path, seed=5)) as session:
        saved = ot.LoaderState(session.client(0)).state_dict()
    with ov.launch(text_job(tmp_path, seed=6)) as session:
        client = session.client(0)
        with pytest.raises(ov.StateMismatch) as refused:
            ot.LoaderState(client).load_state_dict(saved)
        ot.LoaderState(client, allow=tuple(refused.value.differences)).load_state_dict(saved)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({}, "got no keys"),
        ({"model": 3}, "got model"),
        ({"overlord": "{"}, "JSON"),
        ({"overlord": "[]"}, "a mapping"),
        (7, "int"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, saved: Any, words: str):
    with ov.launch(text_job(tmp_path)) as session, pytest.raises(ov.StateMismatch, match=words):
        ot.LoaderState(session.client(0)).load_state_dict(saved)


@pytest.mark.parametrize("name", ["step-3", "state.json"])
def test_the_state_is_saved_as_a_file_and_resumed_from_it(tmp_path: Path, name: str):
    job = text_job(tmp_path / "data", dp=2)
    with ov.launch(job) as session:
        clients = [session.client(rank) for rank in range(2)]
        for client in clients:
            next(client)
        written = {ot.save_state(client, tmp_path / "new" / name) for client in reversed(clients)}
    (file,) = written
    assert [path for path in (tmp_path / "new").rglob("*") if path.is_file()] == [file]
    with ov.launch(job, resume=ot.load_state(tmp_path / "new" / name)) as session:
        assert {next(client).step for client in [session.client(rank) for rank in range(2)]} == {1}


def test_a_file_that_is_no_state_is_refused_by_name(tmp_path: Path):
    (tmp_path / "overlord.json").write_text("{")
    with pytest.raises(ov.StateMismatch, match=r"overlord\.json"):
        ot.load_state(tmp_path)


def test_a_loader_of_another_rank_than_the_first_writes_no_file(tmp_path: Path):
    """It has no rank of its own; its client has."""
    with ov.launch(text_job(tmp_path / "data", dp=2)) as session:
        for rank in (1, 0):
            target = ot.save_state(ot.StatefulLoader(session.client(rank)), tmp_path / "state")
            assert target.exists() == (rank == 0)
