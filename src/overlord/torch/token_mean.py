"""The mean loss of tokens over microbatches and ranks, for evaluation and for logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from overlord.client.world import process_groups
from overlord.errors import JobError
from overlord.torch.loss import Head, token_losses
from overlord.torch.microbatch_info import IGNORE
from overlord.torch.step_share import shifted_labels


class TokenMean:
    """The sum of losses divided by the sum of weights of all tokens, in float64.

    A mean of means of microbatches depends on their sizes, and is undefined for an empty one. Here
    an empty microbatch adds nothing.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(
        self, logits: torch.Tensor, mb: Mapping[str, Any], *, head: Head | None = None
    ) -> TokenMean:
        """Add a microbatch, and return this object.

        ``logits``: [tokens, vocabulary], or losses per token; a leading dimension of one is
        allowed. ``mb``: with ``labels``, and a ``loss_mask`` if the job has loss weights. ``head``:
        as in ``token_losses``.
        """
        with torch.no_grad():
            labels, mask = shifted_labels(logits, mb)
            known = head is None and logits.numel() == labels.numel()
            losses = logits if known else token_losses(logits, labels, head=head)
            weights = (labels != IGNORE if mask is None else mask).reshape(-1).double()
            losses = losses.reshape(-1).double().masked_fill(weights == 0, 0)
            sums = torch.stack(((losses * weights).sum(), weights.sum()))
        self._sums = sums if self._sums is None else self._sums + sums
        return self

    def sums(self, group: Any = None) -> tuple[float, float]:
        """Return the sum of losses and the sum of weights, over the ranks of ``group``.

        Every rank calls it. A rank that added nothing contributes zeros. ``group``: all ranks by
        default, if there is a process group.
        """
        dist = process_groups()
        total = torch.zeros(2, dtype=torch.float64) if self._sums is None else self._sums.clone()
        if dist is not None and dist.get_world_size(group) > 1:
            if dist.get_backend(group) == "nccl":
                total = total.cuda()
            dist.all_reduce(total, group=group)
        losses, weights = total.tolist()
        return losses, weights

    def mean(self, group: Any = None) -> float:
        """Return the mean loss over the ranks of ``group``; raise ``JobError`` without a token."""
        losses, weights = self.sums(group)
        if weights == 0:
            raise JobError(
                ["expected at least one token with a label, got none; add microbatches first"],
                "TokenMean",
            )
        return losses / weights


def evaluate(
    loader: Iterable[Any],
    logits_of: Callable[[Any], torch.Tensor],
    *,
    model: torch.nn.Module | None = None,
    group: Any = None,
) -> float:
    """Return the mean loss of the tokens of one pass over an evaluation, over all ranks.

    ``loader``: a ``Loader`` of ``ov.evaluation(...)``, of steps or microbatches. ``logits_of``: a
    function of a microbatch that returns logits, or losses per token. ``model``: is in evaluation
    mode meanwhile. Every rank calls it, and runs the same number of forward passes.
    """
    mean, training = TokenMean(), model is not None and model.training
    if model is not None:
        model.eval()
    with torch.no_grad():
        for item in loader:
            for mb in [item] if isinstance(item, Mapping) else item:
                mean.add(logits_of(mb), mb)
    if model is not None:
        model.train(training)
    return mean.mean(group)
