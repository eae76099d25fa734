"""Megatron-Core: forward steps and losses for its pipeline schedules, by tokens of whole steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from overlord.client.world import process_groups
from overlord.errors import JobError
from overlord.torch.adapters.labels import refuse_weights
from overlord.torch.adapters.megatron import get_batch
from overlord.torch.loader import Loader
from overlord.torch.recipes.checkpoint import last_step, read, write

ALL = "complete"  # the file that is written when all ranks have written


def forward_step(iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    """Run a model on the next microbatch; return its output, and a function of it for the loss.

    It is the ``forward_step_func`` of Megatron's schedules. Each rank iterates its own ``Loader``,
    and gets what its pipeline stage needs.
    """
    mb = next(iterator)
    if "loss_mask" in mb:
        refuse_weights(mb.facts, "recipes.megatron")
    ranks = parallel_state.get_context_parallel_world_size()
    cp = (ranks, parallel_state.get_context_parallel_rank())
    batch = get_batch(iter((mb,)), cp=cp, device=next(model.parameters()).device)
    output = model(
        batch.tokens,
        batch.position_ids,
        batch.attention_mask,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
    )
    return output, partial(_sums, batch.loss_mask)


def _sums(
    mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of losses, the number of tokens, and both for the trainer."""
    kept = losses.masked_fill(mask == 0, 0).sum()
    tokens = (mask != 0).sum()
    return kept, tokens.int(), torch.stack((kept.detach().double(), tokens.double()))


def train_step(model: Any, iterator: Iterator[Any], microbatches: int) -> float:
    """Run forward and backward of one step; return its mean loss over all tokens and ranks.

    ``model``: Megatron's ``DistributedDataParallel``, with ``calculate_per_token_loss=True`` in its
    configuration. ``iterator``: ``iter(Loader(job, microbatches=True))``. ``microbatches``:
    ``Batch.microbatches``.
    """
    if not get_model_config(model).calculate_per_token_loss:
        raise JobError(
            ["calculate_per_token_loss: expected True in TransformerConfig, got False"], "megatron"
        )
    model.zero_grad_buffer()
    return _mean(_run(model, iterator, microbatches, forward_only=False))


def optimizer_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer of torch on the gradients of Megatron's ``DistributedDataParallel``.

    Gradients are released afterwards: backward would add to them, and Megatron once more. Its own
    optimizers do this themselves.
    """
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def evaluate(model: Any, loader: Loader) -> float:
    """Return the mean loss of the tokens of one pass over an evaluation, over all ranks."""
    found: list[torch.Tensor] = []
    model.eval()
    with torch.no_grad():
        for step in loader:
            found += _run(model, iter(step), len(step), forward_only=True)
    model.train()
    return _mean(found)


def _run(model: Any, iterator: Iterator[Any], n: int, *, forward_only: bool) -> list[torch.Tensor]:
    """Run the schedule; return sums and tokens of each microbatch, on the last stage."""
    found: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=[model],
        num_microbatches=n,
        seq_length=1,  # not used: TransformerConfig(variable_seq_lengths=True)
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return found


def _mean(results: Sequence[torch.Tensor]) -> float:
    """Return the mean loss over the tokens of all ranks; other stages than the last have none."""
    total = sum(results, torch.zeros(2, dtype=torch.float64))
    if (dist := process_groups()) is not None:
        total = total.cuda() if dist.get_backend() == "nccl" else total
        dist.all_reduce(total)
    losses, tokens = total.tolist()
    return float(losses / tokens)


def save(
    folder: str | os.PathLike[str], step: int, model: Any, optimizer: Any, loader: Any
) -> None:
    """Write this rank's part of model and optimizer, and the position in the data, after ``step``.

    Every rank calls it. ``load`` reads the last step that all ranks have written.
    """
    dist, base = process_groups(), Path(folder) / str(step)
    write(base / str(dist.get_rank()), model.module, optimizer, loader, no_dist=True)
    dist.barrier()
    if dist.get_rank() == 0:
        (base / ALL).touch()


def load(folder: str | os.PathLike[str], model: Any, optimizer: Any, loader: Any) -> int:
    """Load the last checkpoint of ``save`` on the same mesh; return the next step, or 0."""
    if (step := last_step(folder, ALL)) is None:
        return 0
    part = Path(folder) / str(step) / str(process_groups().get_rank())
    read(part, model.module, optimizer, loader, no_dist=True)
    return step + 1
