"""Process groups along the axes of a mesh, and the few collectives with gradients that the tiny
models need. Own code, no library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from overlord.mesh import AXES, ClientPlaceTree

_made: dict[tuple[ClientPlaceTree, tuple[str, ...]], list[tuple[list[int], Any]]] = {}


def group_along(place: ClientPlaceTree, *axes: str) -> Any:
    """The group of the ranks that differ from this one along these axes only. All ranks call it, in
    the same order.
    """
    if (place, axes) not in _made:
        other = [a for a in AXES if a not in axes]
        number = np.zeros(place.world_size, np.int64)
        for axis in other:
            number = number * getattr(place, axis) + place.along(axis)
        lists = [np.flatnonzero(number == k).tolist() for k in np.unique(number)]
        _made[place, axes] = [(ranks, dist.new_group(ranks, backend="gloo")) for ranks in lists]
    return next(group for ranks, group in _made[place, axes] if dist.get_rank() in ranks)


def sum_all(values: Sequence[torch.Tensor], group: Any) -> None:
    """Each becomes its sum over the group: one collective for all of them, since each takes the
    ranks of a small machine their turns.
    """
    flat = torch.cat([value.reshape(-1) for value in values])
    dist.all_reduce(flat, group=group)
    for value, part in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(part.view_as(value))


class _Same(torch.autograd.Function):
    """Megatron's f: the same value on all; backward adds up what it means to each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Summed(torch.autograd.Function):
    """Megatron's g: the sum over all; backward hands each the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    """Parts of all ranks, rank after rank; backward brings each rank what the others have for its
    part.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.n = group, len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        at = dist.get_rank(ctx.group) * ctx.n
        return grad[at : at + ctx.n], None


def same(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x if dist.get_world_size(group) == 1 else _Same.apply(x, group)


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x if dist.get_world_size(group) == 1 else _Summed.apply(x, group)


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x if dist.get_world_size(group) == 1 else _Gathered.apply(x, group)
