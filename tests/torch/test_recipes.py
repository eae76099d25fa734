"""Losses by tokens, and what recipes refuse: settings with which losses or steps would be wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import overlord as ov
import overlord.torch as ot
from overlord.torch import recipes
from tests.torch.jobs import VOCAB, text_job

HEAD = torch.randn(
    VOCAB + 3, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
)


def test_every_recipe_has_a_page_and_is_imported_at_its_first_use():
    pages = {path.stem for path in (Path(__file__).parents[2] / "docs" / "trainers").glob("*.md")}
    assert {name.replace("_", "-") for name in recipes.__all__} == pages - {
        "trl",
        "trl-dpo",
        "README",
    }
    with pytest.raises(AttributeError, match="no attribute 'jax'"):
        _ = recipes.jax


def microbatch(lengths: list[int], masked: list[bool]) -> dict[str, torch.Tensor]:
    """A microbatch of logits and labels, some of them without a label; it may be empty."""
    n = sum(lengths)
    labels = (torch.arange(n) + 1) % VOCAB
    labels[torch.tensor([masked[i % len(masked)] for i in range(n)], dtype=torch.bool)] = -100
    return {"labels": labels, "tokens": torch.arange(n) % VOCAB}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=3),
)
def test_a_token_mean_is_that_of_all_tokens_at_once(lengths: list[list[int]], masked: list[bool]):
    mean, logits, labels = ot.TokenMean(), [], []
    for some in lengths:
        mb = microbatch(some, masked)
        mean.add(HEAD[mb["tokens"]], mb)
        logits.append(HEAD[mb["tokens"]])
        labels.append(mb["labels"])
    wanted = cross_entropy(torch.cat(logits), torch.cat(labels))  # nan without a label
    if torch.isnan(wanted):
        with pytest.raises(ov.JobError, match="at least one token with a label, got none"):
            mean.mean()
    else:
        assert mean.mean() == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
def test_the_mean_of_a_step_is_the_sum_of_its_shares(tmp_path: Path, labels: str):
    with ot.Loader(text_job(tmp_path, until=2, labels=labels), microbatches=True) as loader:
        mean, total, found = ot.TokenMean(), 0.0, []
        for mb in loader:
            total += ot.microbatch_loss(HEAD[mb["tokens"]], mb).item()
            mean.add(HEAD[mb["tokens"]], mb)
            if mb.is_last:
                assert mean.mean() == pytest.approx(total, rel=1e-12)
                found.append(total)
                mean, total = ot.TokenMean(), 0.0
    if labels == "unshifted":
        with ot.Loader(text_job(tmp_path, until=2), microbatches=True) as loader:
            steps = [0.0, 0.0]
            for mb in loader:
                steps[mb.step] += ot.microbatch_loss(HEAD[mb["tokens"]], mb).item()
        assert found == pytest.approx(steps, rel=1e-12)


def test_losses_are_weighted_by_the_mask(tmp_path: Path):
    labels, losses = torch.tensor([3, 4, 5]), torch.tensor([1.0, 2.0, float("inf")])
    mb = {"labels": labels, "loss_mask": torch.tensor([0.5, 1.0, 0.0])}
    assert ot.TokenMean().add(losses, mb).mean() == pytest.approx(2.5 / 1.5)
    assert ot.TokenMean().add(losses, mb).add(losses, mb).sums() == (5.0, 3.0)


def test_an_evaluation_has_one_mean_for_steps_and_microbatches(tmp_path: Path):
    job = text_job(tmp_path)
    evaluation = ov.evaluation(job.sources, job.batch)
    model, found = torch.nn.Linear(1, 1), []
    for microbatches in (False, True):
        with ot.Loader(evaluation, microbatches=microbatches) as loader:
            for _ in range(2):
                found.append(ot.evaluate(loader, lambda mb: HEAD[mb["tokens"]], model=model))
    assert found == pytest.approx([found[0]] * 4, rel=1e-12)
    assert model.training


def test_a_microbatch_without_its_step_is_refused():
    mb = microbatch([3], [False])
    with pytest.raises(
        ov.JobError, match=r"a microbatch of a Loader, got dict .* leave transform="
    ):
        ot.microbatch_loss(HEAD[mb["tokens"]], mb)


# settings of trainers


def trained(loader: ot.Loader, accelerator: Any, model: Any) -> None:
    for mb in loader:
        with accelerator.accumulate(model):
            recipes.accelerate.loss(accelerator, HEAD[mb["tokens"]], mb)


@pytest.mark.parametrize("steps", [1, 3])
def test_accelerate_with_another_accumulation_is_refused(tmp_path: Path, steps: int):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    with (
        ot.Loader(text_job(tmp_path), microbatches=True) as loader,
        pytest.raises(ov.JobError, match=f"Batch.microbatches of the job, got {steps}; write Acc"),
    ):
        trained(loader, accelerator, torch.nn.Linear(1, 1))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("ready", "refused"), [(1, True), (2, False)])
def test_lightning_with_another_accumulation_is_refused(tmp_path: Path, ready: int, refused: bool):
    progress = SimpleNamespace(current=SimpleNamespace(ready=ready))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    trainer = SimpleNamespace(accumulate_grad_batches=2, world_size=1, fit_loop=loop)
    with ot.Loader(text_job(tmp_path), microbatches=True) as loader:
        _, last = next(items := iter(loader)), next(items)
        if refused:
            with pytest.raises(ov.JobError, match="accumulate_grad_batches: expected the Batch"):
                recipes.lightning.loss(trainer, HEAD[last["tokens"]], last)
        else:
            share = ot.microbatch_loss(HEAD[last["tokens"]], last)
            assert recipes.lightning.loss(trainer, HEAD[last["tokens"]], last) == 2 * share


def hf_trainer(folder: Path, **changes: Any) -> Trainer:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_attention_heads=2, **sizes))
    given: dict[str, Any] = {"gradient_accumulation_steps": 2, **changes}
    args = TrainingArguments(output_dir=str(folder / "out"), use_cpu=True, report_to=[], **given)
    return Trainer(model, args)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gradient_accumulation_steps": 3},
            "expected 2, the Batch.microbatches of the job, got 3",
        ),
        (
            {"restore_callback_states_from_checkpoint": True},
            "restore_callback_states_from_checkpoint: expected False, got True",
        ),
    ],
)
def test_settings_of_transformers_that_would_be_wrong_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
):
    trainer = hf_trainer(tmp_path, **changes)
    with (
        pytest.raises(ov.JobError, match=words),
        recipes.huggingface.use(trainer, text_job(tmp_path)),
    ):
        pass


def test_transformers_without_a_number_of_steps_is_refused_with_the_name_of_the_setting(
    tmp_path: Path,
):
    endless = text_job(tmp_path, until="all")
    with (
        pytest.raises(ov.JobError, match=r"max_steps: expected the number of steps .* got neither"),
        recipes.huggingface.use(hf_trainer(tmp_path, num_train_epochs=2), endless),
    ):
        pass
    with recipes.huggingface.use(hf_trainer(tmp_path, max_steps=3), endless):
        pass


@pytest.mark.parametrize(("epochs", "warned"), [({}, False), ({"num_train_epochs": 2}, True)])
def test_transformers_ends_at_the_end_of_the_job_and_says_so_of_epochs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, epochs: dict[str, int], warned: bool
):
    trainer = hf_trainer(tmp_path, **epochs)
    with recipes.huggingface.use(trainer, text_job(tmp_path, until=4)):
        assert trainer.args.max_steps == 4
    said = "num_train_epochs=2 has no effect, since a job has steps; training ends after"
    assert (said in caplog.text) is warned


def test_a_callback_of_transformers_changes_the_mixture(tmp_path: Path):
    job = text_job(tmp_path, until=12)
    trainer = hf_trainer(tmp_path)
    changed: list[int] = []

    class Change(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and loader.session is not None:
                changed.append(loader.session.set_mixture(dict.fromkeys(job.names, 1.0)))
            if changed and state.global_step == changed[0] + 1:
                changed.append(loader.session.explain(changed[0]).weights_from.startswith("set_"))

    trainer.add_callback(Change())
    with recipes.huggingface.use(trainer, job, prefetch=2) as loader:
        trainer.train()
    assert changed[1] is True


def test_stages_with_other_numbers_of_microbatches_are_refused(tmp_path: Path):
    job = text_job(tmp_path)
    more = replace(job.batch, microbatches=3)
    staged = replace(job, until="all", stages=[ov.Stage(2), ov.Stage(2, batch=more)])
    with (
        pytest.raises(ov.JobError, match=r"one number of Batch\.microbatches, got 2, 3"),
        recipes.huggingface.use(hf_trainer(tmp_path), staged),
    ):
        pass


def test_a_checkpoint_without_a_position_is_refused(tmp_path: Path):
    job = text_job(tmp_path, until=4)
    outside = hf_trainer(tmp_path, max_steps=2, save_steps=2)
    flat = {"microbatches": True, "transform": ot.adapters.huggingface.flattened}
    with ot.Loader(job, **flat) as loader:
        outside.get_train_dataloader = lambda: loader  # type: ignore[method-assign]
        outside.train()
    trainer = hf_trainer(tmp_path)
    with (
        recipes.huggingface.use(trainer, job),
        pytest.raises(
            ov.JobError, match="position of the data at step 2, got a checkpoint without"
        ),
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
