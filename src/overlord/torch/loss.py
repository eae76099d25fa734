"""A loss that does not depend on the placement of samples, and the mean loss of each source.

The loss is summed over tokens and divided by the tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from overlord.errors import JobError
from overlord.torch.by_document import check_positions, document_of_tokens
from overlord.torch.microbatch_info import IGNORE
from overlord.torch.tensor_step import as_tensor

CHUNK = 2048  # tokens; with a vocabulary of 128,000 the logits of a chunk are 1 GB in float32
GRADIENTS = ("sum", "mean")

Head = Callable[[torch.Tensor], torch.Tensor]


def token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    global_valid_tokens: int | float,
    *,
    gradients: str = "sum",
    dp_size: int | None = None,
    loss_mask: torch.Tensor | None = None,
    head: Head | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Return the share of a microbatch in the loss of the step.

    The shares of all microbatches and ranks sum to the mean loss of the step's valid tokens.
    ``logits`` [tokens, vocabulary] with shifted ``labels`` [tokens], or losses per token, [tokens],
    with labels or ``loss_mask``; a leading dimension of one is allowed. If both are given,
    ``loss_mask`` alone weights the losses. ``global_valid_tokens``: that of the step. A job with
    loss weights needs ``loss_mask``: the labels alone do not have them.
    ``gradients``: ``"sum"`` if the trainer sums gradients over ranks. ``"mean"`` if it averages
    them, as DDP and FSDP do, over ``dp_size`` ranks (dp x cp if they share one group). Shares are
    then ``dp_size`` times larger. ``head``, ``chunk``: as in ``token_losses``.
    """
    if gradients not in GRADIENTS:
        raise JobError(
            [f"gradients: expected one of {', '.join(GRADIENTS)}, got {gradients!r}"], "token_loss"
        )
    if gradients == "mean" and (dp_size is None or dp_size < 1):
        raise JobError(
            [
                "dp_size: expected the number of ranks that gradients are averaged over, "
                f"got {dp_size!r}; pass dp_size="
            ],
            "token_loss",
        )
    losses = _flat_losses(logits, labels, head, chunk)
    if loss_mask is not None:
        mask = loss_mask.reshape(-1).to(losses.dtype)
        # A masked loss may be infinite, so it is replaced before the product.
        losses = losses.masked_fill(mask == 0, 0) * mask
    elif global_valid_tokens != int(global_valid_tokens):
        problem = (
            f"loss_mask: expected the weights of a step with {global_valid_tokens} valid tokens, "
            "got none; pass loss_mask=mb['loss_mask']"
        )
        raise JobError([problem], "token_loss")
    elif labels is None:
        raise JobError(
            ["expected labels, or loss_mask with losses of tokens, got neither; pass one of them"],
            "token_loss",
        )
    else:
        losses = losses.masked_fill(labels.reshape(-1) == IGNORE, 0)
    scale = (dp_size or 1) if gradients == "mean" else 1
    # A step without any label has a loss of 0.
    return losses.sum() * (scale / (global_valid_tokens or 1))


def _flat_losses(
    logits: torch.Tensor, labels: torch.Tensor | None, head: Head | None, chunk: int
) -> torch.Tensor:
    if labels is None or (head is None and logits.numel() == labels.numel()):
        return logits.reshape(-1)
    return token_losses(logits, labels, head=head, chunk=chunk)


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, *, head: Head | None = None, chunk: int = CHUNK
) -> torch.Tensor:
    """Return the cross entropy of each token, [tokens], at least float32; 0 without a label.

    It is computed ``chunk`` tokens at a time, and again in backward, so that float32 logits exist
    for one chunk only. With ``head`` the first argument is the last hidden states. ``head`` maps a
    chunk of them to logits, so the logits of all tokens never exist at once.
    """
    flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if len(flat) != len(wanted):
        raise JobError(
            [
                f"labels: expected as many as rows of logits, {len(flat)}, got {len(wanted)}; pass "
                "the labels of the same microbatch"
            ],
            "token_losses",
        )
    if chunk < 1:
        raise JobError([f"chunk: expected at least 1 token, got {chunk}"], "token_losses")
    recompute = len(flat) > chunk and torch.is_grad_enabled()
    chunks = []
    for rows, targets in zip(flat.split(chunk), wanted.split(chunk), strict=True):
        chunks.append(
            checkpoint(_chunk, rows, targets, head, use_reentrant=False)
            if recompute
            else _chunk(rows, targets, head)
        )
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def _chunk(rows: torch.Tensor, targets: torch.Tensor, head: Head | None) -> torch.Tensor:
    logits = rows if head is None else head(rows)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


def source_losses(
    losses: Any, microbatches: Any, names: Sequence[str], *, positions: Any = None
) -> dict[str, float]:
    """Return the mean loss and the labelled tokens of each source, for ``client.report``.

    The result looks like ``{"loss/web": 2.31, "tokens/web": 8192}``. It covers this rank, and
    leaves out sources without a label in these microbatches. ``losses``: those of one microbatch,
    per token, as from ``token_losses``. Lists of losses and microbatches of a whole step
    synchronize with the device only once. ``names``: of all ``job.sources``, in order.
    ``positions``: for slices of CP, the token of the un-sliced microbatch of each token.
    """
    many = isinstance(microbatches, (list, tuple))
    all_losses, all_mbs = (list(losses), list(microbatches)) if many else ([losses], [microbatches])
    places = (
        [None] * len(all_mbs) if positions is None else list(positions) if many else [positions]
    )
    if not len(all_losses) == len(all_mbs) == len(places):
        counts = f"{len(all_losses)} losses, {len(all_mbs)} microbatches, {len(places)} positions"
        raise JobError(
            [
                f"expected as many losses as microbatches and positions, got {counts}; give lists "
                "with one entry per microbatch"
            ],
            "source_losses",
        )
    if not all_mbs:
        return {}
    totals = sum(
        _by_source(*given, len(names)) for given in zip(all_losses, all_mbs, places, strict=True)
    )
    sums, counts_of = torch.as_tensor(totals).tolist()
    found: dict[str, float] = {}
    for name, loss, tokens in zip(names, sums, counts_of, strict=True):
        if tokens:
            found |= {f"loss/{name}": loss / tokens, f"tokens/{name}": tokens}
    return found


def _by_source(losses: torch.Tensor, mb: Mapping[str, Any], positions: Any, n: int) -> torch.Tensor:
    """Return the sums of losses and the numbers of labelled tokens by source, [2, sources]."""
    flat = losses.detach().reshape(-1).double()
    check_positions(mb, positions, len(flat), "source_losses")
    labels, ids = (as_tensor(mb[key]).to(flat.device) for key in ("labels", "source_ids"))
    document = document_of_tokens(mb, positions, len(flat), flat.device)
    weight = (labels.reshape(-1) != IGNORE).double()
    # The source of an empty microbatch is -1; its tokens have weight 0.
    source = ids.to(torch.int64)[document].clamp(min=0)
    into = torch.zeros(2, n, dtype=torch.float64, device=flat.device)
    return into.index_add_(1, source, torch.stack((torch.where(weight > 0, flat, 0.0), weight)))
