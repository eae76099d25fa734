"""Gradients of a step whose ranks run different numbers of microbatches.

The loss is summed over tokens and divided by the tokens of the whole step. So gradients are summed
over ranks, once per step, and never averaged. No collective runs inside a microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlord.errors import PlanError
from overlord.torch.hdp.ring import Group

BUCKET = 64 << 20  # bytes of gradients in one reduction


def startup_barrier(group: Group = None, device: torch.device | str = "cpu") -> None:
    """Run the first collective of a group, on all of its ranks.

    NCCL requires it before some ranks of the group may exchange point-to-point operations. Call it
    once, after ``init_process_group`` and before the first microbatch, with the rank's device.
    """
    world = dist.get_world_size(group)
    ranks = torch.ones((), dtype=torch.int64, device=device)
    dist.all_reduce(ranks, group=group)
    if int(ranks) != world:
        raise PlanError(
            f"startup_barrier: expected {world} ranks, got {int(ranks)}; give the same group on "
            "all of its ranks"
        )


@contextmanager
def local_gradients(*modules: nn.Module) -> Iterator[None]:
    """Keep the gradients of modules on this rank; ``sum_gradients`` reduces them afterwards.

    ``DistributedDataParallel`` otherwise reduces gradients and broadcasts buffers in every
    microbatch, and blocks if ranks have different numbers of them. Other modules are not changed.
    FSDP and expert parallelism communicate in every microbatch: they need plans with
    ``equal_counts=True``.
    """
    wrapped = [m for module in modules for m in module.modules() if _is_ddp(m)]
    before = [(m.require_backward_grad_sync, m.require_forward_param_sync) for m in wrapped]
    try:
        for module in wrapped:
            module.require_backward_grad_sync = module.require_forward_param_sync = False
        yield
    finally:
        for module, (backward, forward) in zip(wrapped, before, strict=True):
            module.require_backward_grad_sync = backward
            module.require_forward_param_sync = forward


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)


def sum_gradients(
    parameters: nn.Module | Iterable[torch.Tensor], group: Group = None, *, bucket: int = BUCKET
) -> None:
    """Sum gradients over the ranks of a group, in place.

    All ranks call it once per step, with the same parameters in the same order. A parameter
    without a gradient, as on a rank without microbatches, counts as zeros and has a gradient
    afterwards. ``bucket``: most bytes of gradients in one collective.
    """
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    trained = [p for p in given if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    works = []
    for part in _buckets([p.grad for p in trained], bucket):
        flat = torch.cat([g.reshape(-1) for g in part]) if len(part) > 1 else part[0].reshape(-1)
        works.append((part, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for part, flat, work in works:
        work.wait()
        for grad, summed in zip(part, flat.split([g.numel() for g in part]), strict=True):
            if summed.data_ptr() != grad.data_ptr():
                grad.copy_(summed.view_as(grad))


def _buckets(grads: list[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Yield lists of gradients of one dtype and device, each of at most ``limit`` bytes.

    A gradient above the limit is in a list of its own.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        kinds[grad.dtype, grad.device].append(grad)
    for alike in kinds.values():
        part, held = list[torch.Tensor](), 0
        for grad in alike:
            size = grad.numel() * grad.element_size()
            if part and held + size > limit:
                yield part
                part, held = [], 0
            part.append(grad)
            held += size
        yield part
