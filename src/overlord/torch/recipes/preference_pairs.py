"""``DPOTrainer`` of TRL: rows of pairs, and losses that are means over the pairs of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.trainer_utils import EvalLoopOutput

from overlord.job.job import Job
from overlord.torch.adapters import huggingface

# The losses of TRL that are a mean over pairs. Others depend on the pairs that share a microbatch.
PAIRWISE = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
)
KEYS = ("input_ids", "attention_mask", "completion_mask")  # of TRL's preference collator
PAIRS, STEP_PAIRS = "overlord_pairs", "overlord_step_pairs"
# Every rank runs a forward pass for every microbatch. These rows have no response and no gradient.
FILLING = torch.zeros((2, 2), dtype=torch.int64)

Rows = Callable[[Any], Mapping[str, Any]]


def takes_pairs(trainer: Any) -> bool:
    """Return whether a trainer is a ``DPOTrainer``."""
    module = sys.modules.get("trl.trainer.dpo_trainer")
    return module is not None and isinstance(trainer, module.DPOTrainer)


def rows(mb: Any, transform: Rows = huggingface.preference) -> dict[str, Any]:
    """Return a microbatch of pairs as ``PairLoss`` takes it: rows of TRL, and numbers of pairs."""
    found = transform(mb)
    made = {key: found[key] for key in KEYS}
    pairs = len(made["input_ids"]) // 2
    if pairs == 0:
        empty = FILLING.to(made["input_ids"].device)
        made = dict(zip(KEYS, (empty, torch.ones_like(empty), empty), strict=True))
    return {**made, PAIRS: pairs, STEP_PAIRS: mb.global_samples}


def unfit_settings(trainer: Any) -> list[str]:
    """Return a line for each setting of a ``DPOTrainer`` with which losses would be wrong."""
    wrong = []
    if others := [name for name in trainer.loss_types if name not in PAIRWISE]:
        wrong.append(
            f"loss_type: expected losses that are a mean over pairs ({', '.join(PAIRWISE)}), got "
            f"{', '.join(others)}, which depends on the pairs that share a microbatch"
        )
    if trainer.precompute_ref_logps:
        wrong.append(
            "precompute_ref_log_probs: expected False, got True; TRL would compute them for the "
            "placeholder alone: leave it out, and TRL runs the reference model in each step"
        )
    return wrong


class PairLoss:
    """The loss of a trainer, weighted by the pairs of each microbatch.

    TRL takes the mean over the pairs of a microbatch. The trainer averages it over microbatches,
    and gradients over ranks. Here a microbatch weighs as much as its share of the pairs of the
    step, and an empty one nothing.
    """

    def __init__(self, trainer: Any, job: Job):
        self._trainer, self._replicas = trainer, job.place.dp
        self._compute, self._gather = trainer.compute_loss, trainer.accelerator.gather
        self._counts: list[int] | None = None  # pairs of each rank in the current microbatch

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the loss of the trainer, and its gathering of metrics, in a ``with`` block."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        trainer.compute_loss, accelerator.gather = self.of_step, self.gather
        try:
            yield
        finally:
            trainer.compute_loss, accelerator.gather = self._compute, self._gather

    def of_step(self, model: Any, inputs: Mapping[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """Return the loss of a microbatch, whose mean over microbatches and ranks is the step's."""
        share = inputs[PAIRS] / inputs[STEP_PAIRS]
        microbatches = self._trainer.current_gradient_accumulation_steps
        return self.mean(model, inputs) * (share * self._replicas * microbatches)

    def mean(self, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the mean loss over the pairs of a microbatch; every rank calls it together."""
        pairs = torch.tensor([inputs[PAIRS]], device=inputs["input_ids"].device)
        self._counts = self._gather(pairs).tolist()
        try:
            loss: torch.Tensor = self._compute(model, {key: inputs[key] for key in KEYS})
        finally:
            self._counts = None
        return loss

    def gather(self, tensor: Any) -> Any:
        """Gather a tensor of all ranks, also one with a value for each pair.

        Ranks may have different numbers of pairs, which collectives do not take.
        """
        counts = self._counts
        by_pair = isinstance(tensor, torch.Tensor) and tensor.dim() > 0
        if not by_pair or counts is None or max(counts) == 0 or len({*counts, len(tensor)}) == 1:
            return self._gather(tensor)
        filled = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        here = min(len(tensor), len(filled))
        filled[:here] = tensor[:here]
        parts = self._gather(filled).split(max(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


class PairWeightedEvaluation:
    """The evaluation loop of a trainer: one pass, with the mean loss of all pairs of all ranks."""

    def __init__(self, trainer: Any, loss: PairLoss, transform: Rows):
        self._trainer, self._loss, self._transform = trainer, loss, transform

    def __call__(
        self, dataloader: Any, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> EvalLoopOutput:
        trainer, total, pairs = self._trainer, 0.0, 0
        model = trainer.model_wrapped
        model.eval()  # TRL logs these metrics as those of the evaluation in this mode
        with torch.no_grad(), trainer.compute_loss_context_manager():
            for step in dataloader:
                for mb in step:
                    made = rows(mb, self._transform)
                    inputs = {
                        key: value.to(trainer.args.device) if key in KEYS else value
                        for key, value in made.items()
                    }
                    total += self._loss.mean(model, inputs).item() * made[PAIRS]
                    pairs += made[PAIRS]
        sums = torch.tensor([total, float(pairs)], device=trainer.args.device)
        losses, count = trainer.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = {f"{metric_key_prefix}_loss": losses / max(count, 1.0)}
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics=metrics, num_samples=int(count)
        )
