"""Rows of tensors that are a slice or an index, and the merge of two blocks of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from overlord.torch.hdp.layout import Rows


def take(values: Tensor, rows: Rows) -> Tensor:
    """Return the rows of a tensor; a slice is a view."""
    return values[rows] if isinstance(rows, slice) else values.index_select(0, rows)


def add(into: Tensor, rows: Rows, part: Tensor) -> None:
    """Add ``part`` to rows of a tensor, in place and in the dtype of the tensor."""
    if isinstance(rows, slice):
        into[rows] += part
    else:
        into.index_add_(0, rows, part.to(into.dtype))


def merge(out: Tensor, lse: Tensor, rows: Rows, part: Tensor, logs: Tensor) -> None:
    """Merge a block's output and lse into ``out`` and ``lse`` of earlier blocks, in place.

    out * exp(l - m) + part * exp(l' - m) with m = log(exp(l) + exp(l')), in a form that cannot
    overflow. Before the first block out is 0 and lse is -inf.
    """
    before, known = take(lse, rows), take(out, rows)
    logs = logs.to(before.dtype)
    known.lerp_(part.to(known.dtype), torch.sigmoid(logs - before).unsqueeze(-1))
    both = torch.logaddexp(before, logs)
    if isinstance(rows, slice):  # ``known`` is a view
        lse[rows] = both
    else:
        out.index_copy_(0, rows, known)
        lse.index_copy_(0, rows, both)
