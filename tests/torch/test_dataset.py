"""Steps through torch's DataLoader and torchdata's StatefulDataLoader, and an object that stands
where one of those is expected.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
import overlord.torch as ot
from tests.processes import plain, until
from tests.torch.jobs import text_job

torch = pytest.importorskip("torch")
DataLoader = torch.utils.data.DataLoader
stateful = pytest.importorskip("torchdata.stateful_dataloader")


def tokens_of(item: Any) -> Any:
    """Steps as lists of lists, microbatches as lists."""
    return (
        [mb["tokens"].tolist() for mb in item]
        if isinstance(item, ot.TensorStep)
        else item["tokens"].tolist()
    )


def wanted_of(job: ov.Job, microbatches: bool = False) -> list[Any]:
    with ov.launch(job) as session:
        steps = [[mb["tokens"].tolist() for mb in step] for step in session.client(0)]
    return [mb for step in steps for mb in step] if microbatches else steps


@pytest.mark.parametrize("microbatches", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_gives_the_steps_of_the_job(tmp_path: Path, microbatches: bool, workers: int):
    job = text_job(tmp_path)
    dataset = ot.Dataset(job, microbatches=microbatches)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert [tokens_of(item) for item in loader] == wanted_of(job, microbatches)
    assert dataset.client is None if workers else dataset.client is not None
    dataset.close()


def test_a_dataloader_gives_the_steps_of_a_client(tmp_path: Path):
    job = text_job(tmp_path)
    with ov.launch(job) as session:
        found = [
            tokens_of(step) for step in DataLoader(ot.Dataset(session.client(0)), batch_size=None)
        ]
    assert found == wanted_of(job)


def test_items_keep_what_a_step_says_on_their_way_from_a_worker(tmp_path: Path):
    job = text_job(tmp_path, until=1)
    with ov.launch(job) as session:
        step = next(session.client(0))
        wanted = (
            step.step,
            step.global_valid_tokens,
            step.plan_digest,
            [mb.samples for mb in step],
        )
    (found,) = DataLoader(ot.Dataset(job), batch_size=None, num_workers=1)
    assert (
        found.step,
        found.global_valid_tokens,
        found.plan_digest,
        [mb.samples for mb in found],
    ) == wanted


def refusal(loader: Any) -> str:
    """What the loader's worker says. The workers are ended here: an error that is still held keeps
    them for seconds.
    """
    iterator = iter(loader)
    try:
        next(iterator)
    except ov.JobError as error:
        return str(error)
    finally:
        iterator._shutdown_workers()
    return "nothing"


def test_more_workers_than_one_are_refused_with_the_reason(tmp_path: Path):
    said = refusal(DataLoader(ot.Dataset(text_job(tmp_path)), batch_size=None, num_workers=2))
    assert "num_workers: expected 0 or 1, got 2; each worker would launch the whole job" in said


@pytest.mark.parametrize("microbatches", [False, True])
def test_a_loader_that_would_make_batches_of_steps_is_told_to_leave_it(
    tmp_path: Path, microbatches: bool
):
    with (
        ov.launch(text_job(tmp_path)) as session,
        pytest.raises(ov.JobError, match=r"DataLoader\(dataset, batch_size=None\)"),
    ):
        next(iter(DataLoader(ot.Dataset(session.client(0), microbatches=microbatches))))


def test_a_client_is_refused_in_a_worker_with_the_reason(tmp_path: Path):
    with ov.launch(text_job(tmp_path)) as session:
        said = refusal(DataLoader(ot.Dataset(session.client(0)), batch_size=None, num_workers=1))
    assert "num_workers: expected 0 with a client, got 1; a session does not survive a fork" in said


def test_a_worker_is_refused_where_ranks_share_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = refusal(DataLoader(ot.Dataset(text_job(tmp_path, dp=2)), batch_size=None, num_workers=1))
    assert "num_workers: expected 0 where ranks share a session (WORLD_SIZE=2), got 1" in said


def test_a_state_of_the_middle_of_a_step_is_refused_by_another_mesh(tmp_path: Path):
    first = ot.StatefulLoader(text_job(tmp_path, microbatches=3), microbatches=True)
    next(iter(first))
    saved = first.state_dict()
    first.close()
    with ov.launch(text_job(tmp_path, microbatches=3, dp=2)) as session:
        second, _ = (ot.StatefulLoader(session.client(rank), microbatches=True) for rank in (0, 1))
        second.load_state_dict(saved)
        assert second.state_dict()["plan"] == saved["plan"]
        for _ in range(
            2
        ):  # a step that is refused is not lost: asked for again, it is refused again
            with pytest.raises(
                ov.StateMismatch,
                match=r"the plan of step 0: saved .*, with 1 microbatches delivered.*\n"
                r".*same mesh",
            ):
                next(iter(second))
            assert second.state_dict() == saved
    with pytest.raises(
        ov.StateMismatch, match=r"the state of a Loader: load it there, or json\.loads its"
    ):
        ov.launch(text_job(tmp_path, microbatches=3), resume=saved)


def test_what_is_no_source_of_steps_is_refused(tmp_path: Path):
    with pytest.raises(ov.JobError, match="expected a Job, or a client of one, got list"):
        ot.Dataset([])
    with (
        ov.launch(text_job(tmp_path)) as session,
        pytest.raises(
            ov.JobError, match="prefetch: expected only with a Job, got it with a client"
        ),
    ):
        ot.Dataset(session.client(0), prefetch=3)


def test_the_length_is_known_where_the_job_says_how_many_steps(tmp_path: Path):
    assert (
        len(ot.Dataset(text_job(tmp_path, until=8)))
        == len(ot.StatefulLoader(text_job(tmp_path, until=8)))
        == 8
    )
    assert len(DataLoader(ot.Dataset(text_job(tmp_path, until=8)), batch_size=None)) == 8
    assert (
        len(ot.StatefulLoader(text_job(tmp_path, until=8, microbatches=3), microbatches=True)) == 24
    )
    for other in (text_job(tmp_path, until="all"), ending(text_job(tmp_path, until=8))):
        with pytest.raises(
            TypeError, match=r"number of steps and which has a source without epochs and max_tokens"
        ):
            len(ot.Dataset(other))


def ending(job: ov.Job) -> ov.Job:
    """Its sources end after one pass, so that nobody knows how many steps there are."""
    return replace(job, sources=[replace(source, epochs=1) for source in job.sources])


# trainers that count microbatches


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_grows_is_refused_where_microbatches_are_delivered(tmp_path: Path, ahead: bool):
    job = text_job(
        tmp_path, microbatches=1, context=128
    )  # 12 documents of 20 tokens in the mean do not fit in
    words = (
        r"plan of step 0: expected the 1 microbatches of Batch.microbatches, got \d: .*; "
        r"set Batch\(microbatches=\d\) or more"
    )
    options = {"device": "cpu"} if ahead else {}
    with ot.StatefulLoader(job, microbatches=True, **options) as loader:
        before = loader.state_dict()
        for _ in range(2):
            with pytest.raises(ov.PlanError, match=words):
                next(iter(loader))
            assert json.loads(loader.state_dict()["stream"])["step"] == 0, (
                "a step that is refused is not behind the trainer"
            )
        assert before["microbatches"] == 0
    with ov.launch(job) as session:
        client = session.client(0)
        assert len(next(client)) > 1, "whole steps may grow"
        with pytest.raises(ov.PlanError, match=r"plan of step 1: expected the 1 microbatches"):
            next(client.microbatches())
        with pytest.raises(ov.PlanError, match=r"plan of step 1: expected the 1 microbatches"):
            next(iter(ot.Dataset(client, microbatches=True)))


STANDS: dict[str, Callable[[ov.Session], Any]] = {
    "a client": lambda session: session.client(0),
    "a client of another process": lambda session: ov.connect(
        served := session.serve(), 0, served.token
    ),
    "steps ahead": lambda session: ot.DevicePrefetcher(session.client(0), "cpu"),
}


@pytest.mark.parametrize("which", STANDS)
def test_a_state_saved_after_a_refused_step_includes_that_step(tmp_path: Path, which: str):
    job = text_job(tmp_path, microbatches=1, context=128)
    wanted = wanted_of(job)
    with ov.launch(job) as session, STANDS[which](session) as client:
        assert tokens_of(ot.TensorStep.of(next(client))) == wanted[0]
        for _ in range(2):
            with pytest.raises(ov.PlanError, match=r"plan of step 1: expected the 1 microbatches"):
                next(client.microbatches())
            saved = client.state_dict()
            assert saved["step"] == 1
        found = [tokens_of(ot.TensorStep.of(next(client))) for _ in range(2)]
        assert found == wanted[1:3], "the refused step is the next one"
        assert client.state_dict()["step"] == 3
        with pytest.raises(ov.PlanError, match=r"plan of step 3: expected the 1 microbatches"):
            next(client.microbatches())
        client.load_state_dict(saved)
        assert tokens_of(ot.TensorStep.of(next(client))) == wanted[1], "a loaded state drops it"


def test_a_step_that_grows_is_refused_by_a_client_of_another_process(tmp_path: Path):
    job = text_job(tmp_path, microbatches=1, context=128)
    with ov.launch(job) as session:
        served = session.serve()
        with (
            ov.connect(served, 0, served.token) as client,
            pytest.raises(ov.PlanError, match="expected the 1 microbatches"),
        ):
            next(client.microbatches())


# the same protocol, by torchdata's object and by ours

Make = Callable[[ov.Job, bool], Any]
LOADERS: dict[str, Make] = {
    "torchdata, no worker": lambda job, micro: stateful.StatefulDataLoader(
        ot.Dataset(job, microbatches=micro), batch_size=None
    ),
    "torchdata, a worker": lambda job, micro: stateful.StatefulDataLoader(
        ot.Dataset(job, microbatches=micro), batch_size=None, num_workers=1
    ),
    "ours": lambda job, micro: ot.StatefulLoader(job, microbatches=micro),
    "ours, ahead": lambda job, micro: ot.StatefulLoader(
        job, microbatches=micro, device="cpu", depth=3
    ),
}


def close(loader: Any) -> None:
    (loader if isinstance(loader, ot.StatefulLoader) else loader.dataset).close()


@pytest.mark.parametrize("which", LOADERS)
@pytest.mark.parametrize("microbatches", [False, True])
def test_a_loader_that_loads_the_state_of_another_goes_on_where_that_stood(
    tmp_path: Path, which: str, microbatches: bool
):
    job = text_job(tmp_path, until=5, microbatches=3)
    wanted = wanted_of(job, microbatches)
    for taken in (0, 1, 4, len(wanted)):
        first = LOADERS[which](job, microbatches)
        iterator = iter(first)
        assert [tokens_of(next(iterator)) for _ in range(taken)] == wanted[:taken]
        saved = first.state_dict()
        if taken < len(wanted):
            assert tokens_of(next(iterator)) == wanted[taken]  # saving does not move it
        close(first)
        del iterator, first
        second = LOADERS[which](job, microbatches)
        second.load_state_dict(saved)
        if taken < len(wanted) or "torchdata" not in which:  # torchdata begins anew behind the end
            assert [tokens_of(item) for item in second] == wanted[taken:]
        close(second)


def test_our_state_is_plain_json_and_may_be_a_clients(tmp_path: Path):
    job = text_job(tmp_path)
    wanted = wanted_of(job)
    with ov.launch(job) as session:
        client = session.client(0)
        next(client)
        of_client = client.state_dict()
    with ot.StatefulLoader(job) as loader:
        assert loader.state_dict() == {"stream": None, "microbatches": 0, "plan": None}
        next(iter(loader))
        saved = json.loads(json.dumps(loader.state_dict()))
    assert plain(json.loads(saved["stream"])) == plain(of_client)
    older = {"stream": of_client, "microbatches": 0}  # as earlier versions wrote it
    for state in (saved, of_client, older):
        with ot.StatefulLoader(job) as loader:
            loader.load_state_dict(state)
            assert [tokens_of(step) for step in loader] == wanted[1:]


def test_a_loaded_state_travels_to_a_worker_that_is_spawned(tmp_path: Path):
    job = text_job(tmp_path)
    with ot.StatefulLoader(job) as loader:
        next(iter(loader))
        saved = loader.state_dict()
    dataset = ot.Dataset(job)
    dataset.load_state_dict(saved)
    sent = pickle.loads(pickle.dumps(dataset))
    assert next(iter(sent)).step == 1
    sent.close()


@pytest.mark.parametrize("state", [7, {"stream": "{"}, {"stream": "[]"}])
def test_what_is_no_state_is_refused_by_a_loader(tmp_path: Path, state: Any):
    with pytest.raises(
        ov.StateMismatch, match=r"save and load the result of state_dict\(\) unchanged"
    ):
        ot.StatefulLoader(text_job(tmp_path)).load_state_dict(state)


def test_a_state_is_loaded_in_the_middle_of_a_run(tmp_path: Path):
    job = text_job(tmp_path, microbatches=3)
    wanted = wanted_of(job, microbatches=True)
    with ot.StatefulLoader(job, microbatches=True) as loader:
        iterator = iter(loader)
        states = [loader.state_dict()]
        for _ in range(7):
            next(iterator)
            states.append(loader.state_dict())
        assert [state["microbatches"] for state in states] == [
            0,
            1,
            2,
            0,
            1,
            2,
            0,
            1,
        ]  # none left of a step: good on any mesh
        for back in (5, 1, 3, 0):
            loader.load_state_dict(states[back])
            assert loader.state_dict()["microbatches"] == states[back]["microbatches"]
            iterator = iter(loader)
            assert [tokens_of(next(iterator)) for _ in range(4)] == wanted[back : back + 4]


def test_a_state_in_the_middle_of_a_step_is_refused_by_who_gives_whole_ones(tmp_path: Path):
    job = text_job(tmp_path)
    with ot.StatefulLoader(job, microbatches=True) as loader:
        next(iter(loader))
        saved = loader.state_dict()
    with (
        ot.StatefulLoader(job) as loader,
        pytest.raises(ov.StateMismatch, match="iterate with microbatches=True"),
    ):
        loader.load_state_dict(saved)


def test_a_second_iteration_goes_on_where_the_first_stood(tmp_path: Path):
    job = text_job(tmp_path)
    wanted = wanted_of(job)
    with ot.StatefulLoader(job) as loader:
        found = [tokens_of(next(iter(loader))) for _ in range(3)]
        assert [*found, *(tokens_of(step) for step in loader)] == wanted
        assert list(loader) == []


@pytest.mark.parametrize("microbatches", [False, True])
@pytest.mark.parametrize("of", ["job", "client", "ahead"])
def test_a_loader_for_evaluation_starts_every_pass_at_the_first_step(
    tmp_path: Path, microbatches: bool, of: str
):
    job = text_job(tmp_path, until=3)
    wanted = wanted_of(job, microbatches)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(ov.launch(job)).client(0) if of == "client" else job
        loader = ot.StatefulLoader(
            source,
            microbatches=microbatches,
            rewind=True,
            **({"device": "cpu"} if of == "ahead" else {}),
        )
        stack.callback(loader.close)
        assert [tokens_of(item) for item in loader] == wanted
        assert [tokens_of(item) for item in loader] == wanted
        assert [tokens_of(item) for item in islice(loader, 2)] == wanted[
            :2
        ]  # a pass that is broken off
        saved = loader.state_dict()
        assert [tokens_of(item) for item in loader] == wanted
        loader.load_state_dict(saved)
        assert [tokens_of(item) for item in loader] == wanted[2:], (
            "a loaded state is where the next pass starts"
        )
        assert [tokens_of(item) for item in loader] == wanted


def mesh_of_two(session: ov.Session, which: str) -> Any:
    if which == "connected":
        return ov.connect(served := session.serve(), 0, served.token)
    clients = [session.client(rank) for rank in range(2)]
    return ot.DevicePrefetcher(clients[0], "cpu") if which == "ahead" else clients[0]


@pytest.mark.parametrize("which", ["here", "connected", "ahead"])
def test_rewinding_is_refused_for_a_client_of_several_ranks_that_cannot_meet(
    tmp_path: Path, which: str
):
    """Else the first rank to begin a pass takes the steps from the others."""
    with (
        ov.launch(text_job(tmp_path, dp=2)) as session,
        ot.StatefulLoader(mesh_of_two(session, which), rewind=True) as loader,
    ):
        words = (
            r"rewind=True: expected a process group of the 2 ranks of the mesh.* got no "
            r"process group; call torch.distributed.init"
        )
        with pytest.raises(ov.JobError, match=words):
            iter(loader)


def test_passes_behind_the_end_are_told_and_then_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Some trainers begin pass after pass for ever where none has an item."""
    with ot.StatefulLoader(text_job(tmp_path, until=2)) as loader:
        assert len(list(loader)) == 2
        assert caplog.text == ""
        assert list(loader) == []
        assert "expected another step, got the end of the stream; give rewind=True" in caplog.text
        with pytest.raises(
            ov.JobError, match="expected another step, got the end of the stream; give rewind=True"
        ):
            list(loader)


def test_a_second_iteration_goes_on_in_the_middle_of_a_step(tmp_path: Path):
    job = text_job(tmp_path, microbatches=3)
    wanted = wanted_of(job, microbatches=True)
    with ot.StatefulLoader(job, microbatches=True) as loader:
        found = [tokens_of(next(iter(loader))) for _ in range(4)]
        assert [*found, *(tokens_of(mb) for mb in loader)] == wanted


def test_an_iterator_follows_a_state_that_is_loaded_in_the_middle_of_a_step(tmp_path: Path):
    job = text_job(tmp_path, microbatches=3)
    wanted = wanted_of(job, microbatches=True)
    with ot.StatefulLoader(job, microbatches=True) as loader:
        before = loader.state_dict()  # of a job that nobody has launched
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        middle = loader.state_dict()
        for state, back in ((before, 0), (middle, 5)):
            loader.load_state_dict(state)
            assert [tokens_of(next(iterator)) for _ in range(2)] == wanted[back : back + 2]


def test_a_client_is_refused_by_a_worker_that_is_spawned_with_the_reason(tmp_path: Path):
    with ov.launch(text_job(tmp_path)) as session:
        loader = DataLoader(
            ot.Dataset(session.client(0)),
            batch_size=None,
            num_workers=1,
            multiprocessing_context="spawn",
        )
        with pytest.raises(ov.JobError, match="a session cannot move to another process"):
            iter(loader)


def test_an_adapter_changes_every_item(tmp_path: Path):
    job = text_job(tmp_path, until=2)
    with ot.StatefulLoader(job, microbatches=True, transform=ot.adapters.torchtitan.flat) as loader:
        found = [
            batch["input"][0].tolist()
            for batch, labels in loader
            if labels.shape == batch["positions"].shape
        ]
    assert found == wanted_of(job, microbatches=True)


def test_a_worker_that_was_refused_ends_by_itself(tmp_path: Path):
    """Else torch waits for it for seconds where the loader is freed late: at the end of the
    program, with the error that holds it.
    """
    before = set(multiprocessing.active_children())
    iterator = iter(DataLoader(ot.Dataset(text_job(tmp_path)), batch_size=None, num_workers=2))
    with pytest.raises(ov.JobError, match="num_workers: expected 0 or 1, got 2"):
        next(iterator)
    until(lambda: set(multiprocessing.active_children()) <= before)


def test_reports_reach_the_client(tmp_path: Path):
    with ot.StatefulLoader(text_job(tmp_path)) as loader:
        step = next(iter(loader))
        loader.report(step.step, {"loss/web": 2.0})
        with pytest.raises(ov.OverlordError, match="step 7"):
            loader.report(7, {"loss/web": 2.0})
