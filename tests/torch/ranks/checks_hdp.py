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


def gradients_are_summed_in_buckets_of_one_dtype(out: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes = [(3, 4), (), (5,), (2, 2), (7,)]
    kinds = [torch.float64, torch.float32, torch.float64, torch.float32, torch.float64]
    for bucket in (1, 64, 1 << 20):
        given = [torch.zeros(s, dtype=k) for s, k in zip(shapes, kinds, strict=True)]
        parameters = [nn.Parameter(p) for p in given] + [nn.Parameter(given[0], False)]
        for i, p in enumerate(parameters[:-1]):
            if rank or i:  # rank 0 has no gradient of the first
                p.grad = torch.full_like(p, rank + i)
        parameters[3].grad = torch.arange(4.0).reshape(2, 2).t()  # not contiguous
        hdp.sum_gradients(iter(parameters), bucket=bucket)
        ranks = world * (world - 1) // 2
        for i, p in enumerate(parameters[:-1]):
            assert p.grad is not None
            wanted = torch.full_like(p, ranks + i * world)
            if i == 3:
                wanted = world * torch.arange(4.0).reshape(2, 2).t()
            assert torch.equal(p.grad, wanted), (bucket, i)
        assert parameters[-1].grad is None


def a_group_of_some_ranks(out: Path) -> None:
    """Ranks of a ring and of a pipeline are those of their group, not of the world."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world < 3:
        return
    group = dist.new_group(range(1, world))
    if not rank:
        return
    hdp.startup_barrier(group)
    ring = hdp.Ring([40, 7], list(reversed(range(world - 1))), world - 1 - rank, group=group)
    torch.manual_seed(5)
    whole = [torch.randn(47, h, HEAD, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS)]
    here = torch.from_numpy(ring.token_index())
    found = hdp.ring_attention(*(x[here] for x in whole), ring)
    parts = zip(*(x.split([40, 7]) for x in whole), strict=True)
    wanted = torch.cat([plain(*part) for part in parts])
    assert torch.allclose(found, wanted[here], rtol=0, atol=1e-12)
    one_stage_a_rank(group)


def one_stage_a_rank(group: Any) -> None:
    """Stage s multiplies by s + 2: the gradient of the first stage is the product of the others."""
    number, count = dist.get_rank(group), dist.get_world_size(group)
    factor = torch.tensor(number + 2.0, requires_grad=True)

    def forward(mb: float, x: torch.Tensor | None) -> torch.Tensor:
        y = factor * (torch.full((3,), mb) if x is None else x)
        return y.sum() if number == count - 1 else y

    stage = hdp.Stage(
        number=number, count=count, previous=number - 1, following=number + 1, group=group
    )
    losses = hdp.Pipeline(stage, forward, lambda mb: (3,)).run([1.0, 2.0, 3.0, 4.0])
    product = float(torch.arange(2.0, count + 2).prod())
    if number == count - 1:
        assert [loss.item() for loss in losses] == [3 * mb * product for mb in (1, 2, 3, 4)]
    else:
        assert losses == []
    assert factor.grad is not None
    assert factor.grad.item() == 30 * product / (number + 2)


def batches_with_one_work_for_all_operations(out: Path) -> None:
    """NCCL returns one work for a batch."""

    class Together:
        def __init__(self, works: list[Any]):
            self._works = works

        def wait(self) -> None:
            for work in self._works:
                work.wait()

    each = dist.batch_isend_irecv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", lambda ops: [Together(each(ops))])
        one_stage_a_rank(dist.group.WORLD)
        a_ring_of_all_ranks(out)


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
        gradients_are_summed_in_buckets_of_one_dtype,
        a_group_of_some_ranks,
        batches_with_one_work_for_all_operations,
        a_ring_that_is_not_this_ranks_is_refused,
    )
}
