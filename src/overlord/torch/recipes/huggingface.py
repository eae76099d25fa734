"""``Trainer`` of transformers, and the trainers of TRL that derive from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput

from overlord.errors import JobError
from overlord.job.job import Job
from overlord.torch.adapters import huggingface
from overlord.torch.loader import Loader
from overlord.torch.recipes import preference_pairs as pairs
from overlord.torch.recipes.step_shape import fixed_microbatches
from overlord.torch.token_mean import evaluate

log = logging.getLogger("overlord")


@contextmanager
def use(
    trainer: Any,
    job: Job,
    evaluation: Job | None = None,
    *,
    transform: Callable[[Any], Any] | None = None,
    **launch_options: Any,
) -> Iterator[Loader]:
    """Let a ``Trainer`` train on a job and evaluate on another, in a ``with`` block.

    An optimizer step is a step of the job. Losses are means over the tokens of the whole step, and
    of the whole evaluation. ``max_steps`` is ``Job.until`` by default. The position in the data is
    in every checkpoint, and ``train(resume_from_checkpoint=...)`` continues there on any number of
    ranks. ``transform``: a function from a microbatch to the arguments of the model; ``flattened``
    by default.

    A ``DPOTrainer`` of TRL needs a job of ``Pair`` sources. Losses are means over the pairs of the
    step, and ``preference`` is the default of ``transform``.
    """
    preferences = pairs.takes_pairs(trainer)
    _check(trainer, job, preferences)
    given = transform or (huggingface.preference if preferences else huggingface.flattened)
    trainer.args.ignore_data_skip = True  # the position is loaded, so nothing is left to skip
    if trainer.args.max_steps <= 0:
        trainer.args.max_steps = job.end_step
    if trainer.args.num_train_epochs != TrainingArguments.num_train_epochs:
        log.warning(
            "huggingface: num_train_epochs=%s has no effect, since a job has steps; training ends "
            "after max_steps=%d",
            trainer.args.num_train_epochs,
            trainer.args.max_steps,
        )
    with ExitStack() as stack:
        loader = stack.enter_context(
            Loader(
                job,
                microbatches=True,
                transform=partial(pairs.rows, transform=given) if preferences else given,
                **launch_options,
            )
        )
        loss = pairs.PairLoss(trainer, job) if preferences else None
        if loss is not None:
            stack.enter_context(loss.installed())
        trainer.get_train_dataloader = lambda: loader
        trainer.add_callback(LoaderPosition(loader))
        if evaluation is not None:
            valid = stack.enter_context(Loader(evaluation, **launch_options))
            trainer.eval_dataset = valid.dataset
            trainer.get_eval_dataloader = lambda eval_dataset=None: valid
            trainer.evaluation_loop = (
                _TokenWeightedEvaluation(trainer, given)
                if loss is None
                else pairs.PairWeightedEvaluation(trainer, loss, given)
            )
        yield loader


def placeholder() -> Any:
    """Return a dataset of one row, for trainers that take one at construction; ``use`` replaces it.

    The ``Trainer`` takes an ``eval_dataset`` with an ``eval_strategy``. ``SFTTrainer`` of TRL takes
    a ``train_dataset``: with ``SFTConfig(dataset_kwargs={"skip_prepare_dataset": True})`` this one.
    ``DPOTrainer`` takes one too, and tokenizes its texts.
    """
    texts = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = [{"input_ids": [0, 0], "labels": [0, 0], **texts}]
    if find_spec("datasets") is None:
        return rows
    return import_module("datasets").Dataset.from_list(rows)


class LoaderPosition(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keep the position of the loader in ``trainer_state.json``, beside that of the trainer."""

    def __init__(self, loader: Loader | None = None):
        self._loader = loader

    def state(self) -> dict[str, Any]:
        """Return the position after the last trained step, as transformers stores it."""
        position = None if self._loader is None else self._loader.state_dict()
        return {"args": {}, "attributes": {"position": position}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the position of the checkpoint from which the trainer resumes."""
        if state.global_step == 0 or self._loader is None:
            return
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            raise JobError(
                [
                    f"resume_from_checkpoint: expected the position of the data at step "
                    f"{state.global_step}, got a checkpoint without one; it was saved outside of "
                    "recipes.huggingface.use"
                ],
                "huggingface",
            )
        self._loader.load_state_dict(saved["attributes"]["position"])


class _TokenWeightedEvaluation:
    """The evaluation loop of a trainer: one pass, with the mean loss of all tokens of all ranks."""

    def __init__(self, trainer: Any, transform: Callable[[Any], Any]):
        self._trainer, self._transform = trainer, transform

    def __call__(
        self, dataloader: Any, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> EvalLoopOutput:
        trainer, documents = self._trainer, 0
        model = trainer.model_wrapped

        def logits(mb: Any) -> Any:
            nonlocal documents
            documents += len(mb.samples)
            inputs = {**self._transform(mb)}
            inputs.pop("labels", None)
            device = trainer.args.device
            moved = {k: v.to(device) if hasattr(v, "to") else v for k, v in inputs.items()}
            with trainer.compute_loss_context_manager():
                return model(**moved).logits

        loss = evaluate(dataloader, logits, model=model)
        metrics = {f"{metric_key_prefix}_loss": loss}
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics=metrics, num_samples=documents
        )


def _check(trainer: Any, job: Job, preferences: bool) -> None:
    """Raise ``JobError`` with all settings of a trainer that would train on wrong losses."""
    args, wanted = trainer.args, fixed_microbatches(job, "huggingface")
    wrong = pairs.unfit_settings(trainer) if preferences else _unfit_settings(trainer)
    if args.gradient_accumulation_steps != wanted:
        wrong.append(
            f"gradient_accumulation_steps: expected {wanted}, the Batch.microbatches of the job, "
            f"got {args.gradient_accumulation_steps}"
        )
    if args.max_steps <= 0 and job.end_step is None:
        wrong.append(
            "max_steps: expected the number of steps in TrainingArguments or as Job.until, got "
            "neither; num_train_epochs does not end a job"
        )
    if args.restore_callback_states_from_checkpoint:
        wrong.append("restore_callback_states_from_checkpoint: expected False, got True")
    if args.n_gpu > 1:
        wrong.append(f"expected one process per GPU, got {args.n_gpu} GPUs; start with torchrun")
    if wrong:
        raise JobError(wrong, "huggingface")


def _unfit_settings(trainer: Any) -> list[str]:
    """Return a line for each setting with which losses would not be weighted by tokens."""
    args, wrong = trainer.args, []
    if not args.average_tokens_across_devices and args.world_size > 1:
        wrong.append("average_tokens_across_devices: expected True, got False")
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        wrong.append(
            "model: expected one whose forward takes num_items_in_batch, or compute_loss_func=, "
            f"got {type(trainer.model).__name__}; its loss would be a mean of each microbatch"
        )
    return wrong
