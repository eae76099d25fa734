"""Ring attention, gradients and pipelines of hybrid plans, equal to one process to 1e-11."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import overlord.torch as ot
from overlord.errors import PlanError
from overlord.torch import hdp
from tests.torch.ranks.hdp_decoder import HEAD, HEADS, KV_HEADS, alone, check_plan, plain
from tests.torch.ranks.hdp_plans import Plan


def whole(world: int, stages: int = 1) -> Plan:
    """A ring of all ranks, backwards, uneven documents; then a task for each rank but the first."""
    ranks = world // stages
    rings = [tuple(reversed(range(ranks))), *((r,) for r in range(1, ranks))]
    lengths = (23, 1, 2, 7, *range(3, 3 + ranks - 1))
    task = (0, 0, 0, 0, *range(1, ranks))
    return Plan(lengths, task, tuple(rings), (0, *[1] * (ranks - 1)), stages)


def mixed(world: int) -> Plan:
    """Rings of different sizes and orders, unequal counts, and an idle last rank if there are 4."""
    busy = max(1, world - (world > 3))
    first, second = tuple(range(busy)), tuple(reversed(range(0, busy, 2)))
    third = (busy - 1, 0) if busy > 1 else (0,)
    return Plan(
        (31, 17, 1, 12, 5, 40), (0, 1, 1, 2, 3, 3), (first, second, (0,), third), (0, 1, 2, 3)
    )


def a_ring_of_all_ranks(out: Path) -> None:
    check_plan(whole(dist.get_world_size()))


def rings_of_any_size_with_unequal_counts_and_idle_ranks(out: Path) -> None:
    check_plan(mixed(dist.get_world_size()))


def padded_documents(out: Path) -> None:
    """Padding at the end of documents changes no gradient."""
    check_plan(mixed(dist.get_world_size()), pad=2)


def documents_shorter_than_the_ring(out: Path) -> None:
    world = dist.get_world_size()
    check_plan(Plan((1, 1, 2, 3), (0, 0, 0, 0), (tuple(range(world)),), (0,)))
    check_plan(Plan((1, 2), (0, 1), (tuple(range(world)), (world - 1,)), (0, 1)))


def two_plans_of_one_batch(out: Path) -> None:
    world = dist.get_world_size()
    lengths = (31, 17, 1, 12, 5, 40)
    one = Plan(lengths, (0, 0, 0, 0, 0, 0), ((world - 1,),), (0,))
    other = Plan(
        lengths,
        (0, 1, 2, 2, 1, 0),
        (tuple(range(world)), (0,), tuple(reversed(range(world)))),
        (0, 1, 2),
    )
    wanted = alone(one)
    first, second = check_plan(one, wanted), check_plan(other, wanted)
    for name, grad in first.items():
        assert torch.allclose(grad, second[name], rtol=0, atol=1e-12)


def pipelines_with_unequal_counts(out: Path) -> None:
    world = dist.get_world_size()
    for stages in (2, 3):
        if world % stages == 0:
            check_plan(whole(world, stages))
            ranks = world // stages
            ring = tuple(range(ranks))
            rings = (ring, ring[::-1], *[(0,)] * 3)
            plan = Plan((9, 26, 4, 1, 6), (0, 1, 2, 3, 4), rings, (0, 1, 2, 3, 4), stages)
            check_plan(plan)


def ddp_reduces_once_although_counts_differ(out: Path) -> None:
    """DDP would block: its buckets and buffers are exchanged in every microbatch."""
    plan = mixed(dist.get_world_size())
    made: list[DistributedDataParallel] = []

    def wrapped(model: nn.Module) -> nn.Module:
        made.append(DistributedDataParallel(model, broadcast_buffers=True))
        return made[-1]

    check_plan(plan, wrap=wrapped)
    assert made[0].require_backward_grad_sync
    assert made[0].require_forward_param_sync


def offload_changes_no_bit(out: Path) -> None:
    plan = mixed(dist.get_world_size())
    made = []

    def around(model: Any) -> Any:
        made.append(ot.offload(0.6, model.layers))
        return made[-1]

    wanted, found = check_plan(plan), check_plan(plan, around=around)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert all(o.offloaded_bytes for o in made if o.saved_bytes)


def wide_dtypes(out: Path) -> None:
    """float32 and bfloat16 accumulate in float32, with an own scale and equal heads too."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ring = hdp.Ring([41, 3], range(world), rank)
    torch.manual_seed(3)
    given = [torch.randn(44, h, HEAD).double() for h in (HEADS, KV_HEADS, KV_HEADS)]
    weight, here = torch.randn(44, HEADS, HEAD).double(), torch.from_numpy(ring.token_index())
    wanted = [x.clone().requires_grad_() for x in given]
    split = [x.split([41, 3]) for x in wanted]
    ideal = torch.cat([plain(*(x[i] for x in split)) for i in range(2)])
    (ideal * weight).sum().backward()
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 3e-2)):
        mine = [x[here].to(dtype).requires_grad_() for x in given]
        found = hdp.ring_attention(*mine, ring)
        assert found.dtype == dtype
        (found * weight[here].to(dtype)).sum().backward()
        for x, y in zip(
            [found, *(m.grad for m in mine)], [ideal, *(w.grad for w in wanted)], strict=True
        ):
            assert x is not None
            assert y is not None
            assert x.dtype == dtype
            error = (x.double() - y[here]).abs().max() if len(here) else torch.zeros(())
            assert error < tolerance * float(y.abs().max()), (dtype, float(error))


def a_ring_that_is_not_this_ranks_is_refused(out: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        return
    with pytest.raises(PlanError, match=f"expected this rank, {rank}, at position"):
        hdp.Ring([9], range(world), (rank + 1) % world)
    with pytest.raises(PlanError, match=f"expected ranks of 0 to {world - 1}"):
        hdp.Ring([9], (0, world), 0)


def the_startup_barrier_reaches_all_ranks(out: Path) -> None:
    hdp.startup_barrier()


CHECKS: dict[str, Any] = {
    check.__name__: check
    for check in (
        the_startup_barrier_reaches_all_ranks,
        a_ring_of_all_ranks,
        rings_of_any_size_with_unequal_counts_and_idle_ranks,
        padded_documents,
        documents_shorter_than_the_ring,
        two_plans_of_one_batch,
        pipelines_with_unequal_counts,
        ddp_reduces_once_although_counts_differ,
        offload_changes_no_bit,
        wide_dtypes,
        a_ring_that_is_not_this_ranks_is_refused,
    )
}
