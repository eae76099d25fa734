"""Sums over the documents of a microbatch, such as the log-probability of each response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overlord.errors import JobError
from overlord.torch.tensor_step import TensorMicrobatch, as_tensor


def document_sums(
    values: torch.Tensor, mb: Mapping[str, Any], *, positions: Any = None
) -> torch.Tensor:
    """Return the sum of the values of each document's tokens, [documents]; it has gradients.

    ``values``: one for each token, such as ``-token_losses(logits, mb["labels"])``. The result has
    the order of ``mb["roles"]``. ``positions``: for slices of CP, the token of the un-sliced
    microbatch of each token (``overlord.constructor.rank_views.slice_index``). The sums of all CP
    ranks are then to be added.
    """
    flat = values.reshape(-1)
    check_positions(mb, positions, len(flat), "document_sums")
    document = document_of_tokens(mb, positions, len(flat), flat.device)
    n = len(mb["cu_seqlens_padded"]) - 1
    return flat.new_zeros(n).index_add(0, document, flat)


def check_positions(mb: Mapping[str, Any], positions: Any, tokens: int, where: str) -> None:
    """Raise ``JobError`` for ``tokens`` of a slice of a microbatch without their positions."""
    if positions is None and (whole := tokens_of_all(mb)) > tokens:
        raise JobError(
            [
                f"positions: expected those of a slice of {tokens} of {whole} tokens (context "
                "parallelism), got none; give the positions of its tokens in "
                "the whole microbatch (overlord.constructor.rank_views.slice_index)"
            ],
            where,
        )


def document_of_tokens(
    mb: Mapping[str, Any], positions: Any, tokens: int, device: torch.device
) -> torch.Tensor:
    """Return the number of the document of each token, int64 [tokens]; in rows, of each place."""
    bounds = as_tensor(mb["cu_seqlens_padded"]).to(device=device, dtype=torch.int64)
    at = (
        torch.arange(tokens, device=device)
        if positions is None
        else torch.as_tensor(positions, device=device).to(torch.int64)
    )
    return torch.searchsorted(bounds[1:], at, right=True).clamp(max=len(bounds) - 2)


def tokens_of_all(mb: Mapping[str, Any]) -> int:
    """Return the tokens of the un-sliced microbatch; -1 if only the device has their number."""
    if isinstance(mb, TensorMicrobatch):
        return mb.facts.tokens
    bounds = mb["cu_seqlens_padded"]
    return (
        -1 if isinstance(bounds, torch.Tensor) and bounds.device.type != "cpu" else int(bounds[-1])
    )
