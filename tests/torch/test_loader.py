"""The one loader for all trainers: its class, what its items tell, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.data_loader import skip_first_batches
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainingArguments

import overlord as ov
import overlord.torch as ot
from tests.torch.jobs import text_job


def test_it_is_of_the_class_that_frameworks_check_and_replaces_the_names_before(tmp_path: Path):
    with ov.torch.Loader(text_job(tmp_path, until=4)) as loader:
        assert isinstance(loader, StatefulDataLoader)
        assert isinstance(loader, DataLoader)
        assert isinstance(loader.dataset, ot.Dataset)
        assert (loader.batch_size, loader.drop_last, loader.num_workers) == (None, False, 0)
        loader.set_epoch(3)
        assert [step.step for step in loader] == list(range(len(loader)))
        assert repr(loader) == "Loader(job 'text', items: steps)"
    assert ot.StatefulLoader is ot.Loader


def test_without_torchdata_it_is_a_dataloader():
    code = (
        "import sys; sys.modules['torchdata'] = None\n"
        "import overlord.torch as ot; print(ot.Loader.__mro__[1].__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "DataLoader", done.stderr


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_microbatch_tells_its_step(tmp_path: Path, device: str | None):
    job = text_job(tmp_path, until=3, microbatches=3)
    with ov.launch(job) as session:
        plain = [
            (mb.step, mb.global_valid_tokens, mb.global_samples, mb.is_last)
            for step in session.client(0)
            for mb in step
        ]
    with ot.Loader(job, True, device=device) as loader:
        items = list(loader)
    found = [(mb.step, mb.global_valid_tokens, mb.global_samples, mb.is_last) for mb in items]
    assert found == plain
    assert [last for *_, last in found] == [False, False, True] * 3
    assert [step for step, *_ in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for moved in (items[2].to("cpu"), items[2].without(["labels"])):
        about = (moved.step, moved.global_valid_tokens, moved.global_samples, moved.is_last)
        assert about == found[2]
    (sent,) = DataLoader(ot.Dataset(text_job(tmp_path, until=1)), batch_size=None, num_workers=1)
    assert [mb.is_last for mb in sent] == [False, True]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_it_has_the_session_to_change_the_mixture_once_it_is_iterated(
    tmp_path: Path, device: str | None
):
    with ot.Loader(text_job(tmp_path, until=6), device=device, prefetch=1) as loader:
        with pytest.raises(ov.JobError, match="got one before the first iter"):
            _ = loader.session
        steps = iter(loader)
        next(steps)
        first = loader.session.set_mixture(dict.fromkeys(loader.job.names, 1.0))
        list(steps)
        assert loader.session.explain(first).weights_from.startswith(
            f"set_mixture from step {first}"
        )


def test_a_loader_of_a_client_has_no_session_of_its_own(tmp_path: Path):
    with ov.launch(text_job(tmp_path, until=2)) as session:
        assert ot.Loader(session.client(0)).session is None


def test_the_loss_of_microbatches_sums_to_that_of_the_steps(tmp_path: Path):
    torch.manual_seed(0)
    head, job = torch.randn(100, 97, dtype=torch.float64), text_job(tmp_path, until=3)

    def loss(mb: Any, tokens: Any) -> float:
        return ot.token_loss(head[mb["tokens"]], mb["labels"], tokens).item()

    with ot.Loader(job) as loader:
        steps = [sum(loss(mb, step.global_valid_tokens) for mb in step) for step in loader]
    with ot.Loader(job, microbatches=True) as loader:
        flat = [0.0] * 3
        for mb in loader:
            flat[mb.step] += loss(mb, mb.global_valid_tokens)
    assert flat == pytest.approx(steps, rel=1e-12)


# refusals


def refused(act: Any) -> str:
    with pytest.raises(ov.JobError) as raised:
        act()
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"), [("num_workers", 4), ("batch_size", 8), ("shuffle", True), ("sampler", [1])]
)
def test_arguments_of_a_dataloader_are_refused_with_their_replacement(
    tmp_path: Path, name: str, value: Any
):
    assert f"{name}: " in refused(lambda: ot.Loader(text_job(tmp_path), **{name: value}))


@pytest.mark.parametrize("sampled", [False, True])
def test_a_dataloader_over_a_loader_is_refused_also_with_a_sampler(tmp_path: Path, sampled: bool):
    loader = ot.Loader(text_job(tmp_path))
    sampler = DistributedSampler(loader, 2, 1) if sampled else None
    said = refused(lambda: next(iter(DataLoader(loader, sampler=sampler))))
    assert "sampler: expected none, got index" in said
    assert "pass overlord.torch.Loader(job) itself to the trainer" in said
    assert loader.client is None, "nothing was launched"


def test_a_trainer_that_would_form_batches_of_items_is_refused(tmp_path: Path):
    dataset = ot.Dataset(text_job(tmp_path), microbatches=True)
    settings = TrainingArguments(
        output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[], max_steps=2
    )
    model = torch.nn.Linear(1, 1)
    said = refused(lambda: Trainer(model, settings, train_dataset=dataset).train())
    assert "batch_size: expected None in the DataLoader, got 8" in said
    assert "recipes.huggingface.use(trainer, loader)" in said


def test_skipping_and_a_loaded_state_are_refused_together(tmp_path: Path):
    accelerate.PartialState(cpu=True)
    with ot.Loader(text_job(tmp_path)) as loader:
        next(iter(loader))
        saved = loader.state_dict()
    with ot.Loader(text_job(tmp_path)) as loader:
        loader.load_state_dict(saved)
        said = refused(lambda: next(iter(skip_first_batches(loader, 1))))
        assert "pass TrainingArguments(ignore_data_skip=True)" in said
        assert next(iter(loader)).step == 1
    with ot.Loader(text_job(tmp_path)) as loader:
        assert next(iter(skip_first_batches(loader, 1))).step == 1
        loader.close()
    accelerate.state.PartialState._reset_state()


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_single_client_of_a_larger_mesh_is_refused(tmp_path: Path, device: str | None):
    with ov.launch(text_job(tmp_path, dp=3)) as session:
        loader = ot.Loader(session.client(1), device=device)
        said = refused(lambda: iter(loader))
        assert "a client for each of the 3 ranks of the mesh, got one of rank 1" in said
        assert "none of 0, 2: their samples would be left out" in said
        assert "write overlord.torch.Loader(job), under torchrun" in said
        others = [session.client(rank) for rank in (0, 2)]
        assert next(iter(loader)).step == 0
        assert [next(client).step for client in others] == [0, 0]
        loader.close()


def test_a_client_of_another_world_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with ov.launch(text_job(tmp_path, dp=3)) as session:
        clients = [session.client(rank) for rank in range(3)]
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        said = refused(lambda: iter(ot.Loader(clients[0])))
        assert (
            "expected a mesh of the 2 ranks of WORLD_SIZE, got a client of rank 0 of a mesh" in said
        )


def test_a_job_of_a_larger_mesh_is_refused_in_one_process(tmp_path: Path):
    said = refused(lambda: next(iter(ot.Loader(text_job(tmp_path, dp=2)))))
    assert "start the processes with torchrun" in said
