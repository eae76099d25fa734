"""Loaders inside the trainers that people use, as released: Lightning, the Trainer of transformers,
Accelerate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import overlord as ov
import overlord.torch as ot
from tests.torch.jobs import text_job

STOP = 3  # items before the checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def named(item: Any) -> Any:
    """A step by its number, a microbatch by its tokens."""
    return (
        item.step
        if isinstance(item, ot.TensorStep)
        else tuple((item["tokens"] if "tokens" in item else item["input_ids"][0]).tolist())
    )


def evaluating(job: ov.Job) -> ov.Job:
    return ov.evaluation(job.sources, job.batch, steps=job.until)


def ending(job: ov.Job) -> ov.Job:
    return replace(job, until="all", sources=[replace(source, epochs=1) for source in job.sources])


# Lightning


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.trained, self.validated = torch.nn.Parameter(torch.zeros(1)), [], []

    def training_step(self, batch: Any, i: int) -> torch.Tensor:
        self.trained.append(named(batch))
        return self.weight.sum()

    def validation_step(self, batch: Any, i: int) -> None:
        self.validated.append(named(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Save(lightning.Callback):
    """A checkpoint in the middle of a pass, and the end of the run."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == STOP:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def lightning_trainer(folder: Path, **settings: Any) -> lightning.Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(
        accelerator="cpu", default_root_dir=folder, **{"max_epochs": 1, **quiet, **settings}
    )


@pytest.mark.parametrize("microbatches", [False, True])
@pytest.mark.parametrize("length", ["known", "unknown"])
def test_lightning_resumes_behind_the_last_item_it_trained_on(
    tmp_path: Path, length: str, microbatches: bool
):
    """It takes one item ahead where it knows no length, and saves the loader's state with that one
    held.
    """
    job = text_job(tmp_path / "data", until=4)
    job = job if length == "known" else ending(job)
    with ot.StatefulLoader(job, microbatches=microbatches) as loader:
        wanted = [named(item) for item in loader]
    first, second, path = Module(), Module(), tmp_path / "checkpoint"
    with ot.StatefulLoader(job, microbatches=microbatches) as loader:
        lightning_trainer(tmp_path, callbacks=[Save(path)]).fit(first, loader)
        behind = loader.state_dict()
        assert (
            behind
            == torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"][
                "combined_loader"
            ][0]
        )
        assert named(next(iter(loader))) == wanted[STOP], (
            "an item that the trainer held and dropped comes again"
        )
    with ot.StatefulLoader(job, microbatches=microbatches) as loader:
        lightning_trainer(tmp_path).fit(second, loader, ckpt_path=path, weights_only=False)
    assert first.trained == wanted[:STOP]
    assert second.trained == wanted[STOP:]


def test_lightning_validates_on_the_whole_evaluation_set_every_time(tmp_path: Path):
    module = Module()
    train, valid = (
        ot.StatefulLoader(text_job(tmp_path, until=4)),
        ot.StatefulLoader(evaluating(text_job(tmp_path, until=3))),
    )
    with train, valid:
        lightning_trainer(tmp_path, val_check_interval=2, enable_checkpointing=False).fit(
            module, train, valid
        )
    assert module.trained == [0, 1, 2, 3]
    assert module.validated == [0, 1, *[0, 1, 2] * 2], (
        "two items of a check before training, then a whole pass each time"
    )


def test_lightning_is_refused_a_client_that_it_would_take_steps_from_ahead(tmp_path: Path):
    """Its own clean-up raises another error, which has ours as its context."""
    with (
        ov.launch(text_job(tmp_path, until=4)) as session,
        pytest.raises((ov.JobError, RuntimeError)) as raised,
    ):
        lightning_trainer(tmp_path, enable_checkpointing=False).fit(Module(), session.client(0))
    told = raised.value if isinstance(raised.value, ov.JobError) else raised.value.__context__
    assert isinstance(told, ov.JobError)
    assert "_PrefetchDataFetcher takes steps before it trains on them" in str(told)
    assert "pass overlord.torch.Loader(job)" in str(told)


# the Trainer of transformers


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.trained, self.validated = torch.nn.Parameter(torch.zeros(1)), [], []

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        (self.trained if self.training else self.validated).append(named(batch))
        return {"loss": self.weight.sum()}


class Own(Trainer):
    """Its loaders are ours."""

    def __init__(self, train: ot.StatefulLoader, valid: ot.StatefulLoader, *given: Any):
        super().__init__(*given)
        self.train_, self.valid = train, valid

    def get_train_dataloader(self) -> Any:
        return self.train_

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.valid


def test_the_trainer_of_transformers_resumes_and_evaluates(tmp_path: Path):
    """By default it skips what it trained on, in a DataLoader that it makes of the attributes of
    ours.
    """
    train, valid = (
        text_job(tmp_path / "data", until=4),
        text_job(tmp_path / "data", until=2, seed=6),
    )
    flat = {"microbatches": True, "transform": ot.adapters.huggingface.flattened}

    def wanted(job: ov.Job) -> list[Any]:
        with ot.StatefulLoader(job, **flat) as loader:
            return [named(item) for item in loader]

    def run(steps: int, resume: Any) -> Model:
        model = Model()
        settings = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            report_to=[],
            gradient_accumulation_steps=2,
            save_steps=STOP,
            max_steps=steps,
            disable_tqdm=True,
            logging_strategy="no",
        )
        with (
            ot.StatefulLoader(train, **flat) as loader,
            ot.StatefulLoader(evaluating(valid), **flat) as evaluated,
        ):
            trainer = Own(loader, evaluated, model, settings)
            trainer.train(resume_from_checkpoint=resume)
            trainer.evaluate()
            trainer.evaluate()
        return model

    first, second = run(STOP, None), run(4, str(tmp_path / "out" / f"checkpoint-{STOP}"))
    assert first.trained == wanted(train)[: 2 * STOP]
    assert second.trained == wanted(train)[2 * STOP :]
    assert second.validated == wanted(evaluating(valid)) * 2


# Accelerate


@pytest.fixture
def _one_process() -> Iterator[None]:
    accelerate.PartialState(cpu=True)
    yield
    accelerate.state.PartialState._reset_state()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 1, "collate_fn": lambda items: items[0]}, {"batch_size": None}],
    ids=["one", "none"],
)
def test_accelerate_is_refused_a_dataset_that_it_would_deal_out_to_two_processes(
    tmp_path: Path, settings: dict[str, Any]
):
    dataset = ot.Dataset(text_job(tmp_path), microbatches=True)
    loader = prepare_data_loader(
        DataLoader(dataset, **settings), num_processes=2, process_index=1, dispatch_batches=False
    )
    with pytest.raises(
        ov.JobError,
        match=r"got IterableDatasetShard, .* over 2 processes; "
        r".*overlord\.torch\.Loader\(job\)",
    ):
        next(iter(loader))
    assert dataset.client is None, "nothing was launched"


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("stateful", [False, True])
def test_accelerate_holds_one_item_ahead_that_no_state_counts(tmp_path: Path, stateful: bool):
    """With torchdata's loader below it saves the state before it takes the next item; otherwise the
    dataset is asked.
    """
    job = text_job(tmp_path, until=4)

    def prepared() -> tuple[ot.Dataset, Any]:
        made = ot.Dataset(job)
        loader = DataLoader(made, batch_size=None)
        return made, prepare_data_loader(
            loader, num_processes=1, process_index=0, use_stateful_dataloader=stateful
        )

    for stop in range(4):
        dataset, loader = prepared()
        assert [step.step for step in islice(loader, stop + 1)] == list(range(stop + 1))
        saved = (loader if stateful else dataset).state_dict()
        dataset.close()
        if stop < 3 or not stateful:  # torchdata begins anew behind the end
            dataset, loader = prepared()
            (loader if stateful else dataset).load_state_dict(saved)
            assert [step.step for step in loader] == list(range(stop + 1, 4))
            dataset.close()


def test_accelerate_leaves_a_loader_of_ours_as_it_is(tmp_path: Path):
    with ot.StatefulLoader(text_job(tmp_path)) as loader:
        assert accelerate.Accelerator(cpu=True).prepare(loader) is loader
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
