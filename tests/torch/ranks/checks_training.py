"""A tiny decoder trained on any mesh has the gradients of the unsplit model on the unsplit stream,
step by step.

Everything is float64 and gradients are of the order of 1e-2 to 1; they are compared to 1e-11, which
is summation order and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlord as ov
import overlord.torch as ot
from overlord.mesh import ClientPlaceTree
from tests.torch.ranks.jobs import broadcasting, job, samples_of
from tests.torch.ranks.models import Cut, Run, train

STEPS = 3
FEW = 4  # ranks: what more of them would show no better is shown with so many only
TOLERANCE = 1e-11
FIRST, LAST, EVERY = (
    {"tokens", "position_ids"},
    {"labels", "loss_mask", "source_ids"},
    {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"},
)

_whole: list[Run] = []


def whole(**changes: Any) -> Run:
    """The same steps on one rank, unsplit: what everything is compared with. Rank 0 computes it
    once, and tells the others.
    """
    if not _whole:
        done: list[Any] = [None]
        if dist.get_rank() == 0:
            with ov.launch(job(ClientPlaceTree()), stall_limit_s=30.0) as session:
                done = [train(session.client(0), Cut(), STEPS)]
        dist.broadcast_object_list(done)
        _whole.append(done[0])
    return _whole[0]


def trained(
    place: ClientPlaceTree,
    strategy: Any,
    *,
    split: str = "zigzag",
    model: ClientPlaceTree | None = None,
    **changes: Any,
) -> Run:
    """The job on a mesh; every step has the samples of the unsplit one, and every gradient and loss
    its values. ``model``: how the model is cut, where that is not how the job's place is.
    """
    model = model or place
    wanted, cut = whole(), Cut(model, dist.get_rank(), split)
    with ot.join(
        job(place, strategy, batch={"cp_split": split}, **changes), stall_limit_s=30.0
    ) as client:
        run = train(client, cut, STEPS)
        dist.barrier()
    assert samples_everywhere(model, run) == samples_of(wanted.samples), (
        "the steps have other samples"
    )
    for step in range(STEPS):
        mine = cut.of(wanted.grads[step])
        assert mine.keys() == run.grads[step].keys()
        for name, value in mine.items():
            off = float((run.grads[step][name] - value).abs().max())
            assert off < TOLERANCE, (
                f"step {step}, {name}: the gradient is off by {off:.1e} of "
                f"{float(value.abs().max()):.1e}"
            )
        assert not cut.last or abs(run.losses[step] - wanted.losses[step]) < TOLERANCE
    return run


def samples_everywhere(place: ClientPlaceTree, run: Run) -> list[list[str]]:
    """The samples of each step, over all replicas; ranks of one replica hold the same."""
    everyone: list[Any] = [None] * place.world_size
    dist.all_gather_object(everyone, run.samples)
    first: dict[int, Any] = {}
    for rank, found in enumerate(everyone):
        assert first.setdefault(place.coords(rank)["dp"], found) == found, (
            "ranks of one replica have different samples"
        )
    return samples_of([[s for found in first.values() for s in found[k]] for k in range(STEPS)])


def balanced_and_unbalanced_plans_have_equal_gradients(out: Path) -> None:
    place = ClientPlaceTree(dp=dist.get_world_size())
    more = ("packed", "backbone_balance") if place.world_size == FEW else ()
    runs = {name: trained(place, name) for name in ("vanilla", "llm_balance", *more)}
    layouts = {name: run.samples for name, run in runs.items()}
    assert layouts["vanilla"] != layouts["llm_balance"], (
        "balancing moved nothing, and so proved nothing"
    )
    for run in runs.values():
        assert all(
            torch.allclose(run.params[k], v, rtol=0, atol=10 * TOLERANCE)
            for k, v in runs["vanilla"].params.items()
        )


def context_parallel_slices_equal_the_whole(out: Path) -> None:
    w = dist.get_world_size()
    for degrees in ({"dp": w // 2, "cp": 2}, {"dp": w // 4, "cp": 4}):
        trained(ClientPlaceTree(**degrees), "llm_balance")
    for split in ("zigzag_whole", "contiguous") if w == FEW else ():
        trained(ClientPlaceTree(dp=w // 2, cp=2), "llm_balance", split=split)


def context_parallel_ranks_with_microbatches_of_their_own_equal_the_whole(out: Path) -> None:
    """``distribute("CP")``: a model that takes cp ranks for replicas."""
    w = dist.get_world_size()
    trained(ClientPlaceTree(dp=w // 2, cp=2), broadcasting(split="CP"), model=ClientPlaceTree(dp=w))
    if w > FEW:
        trained(
            ClientPlaceTree(dp=2, cp=2, tp=2),
            broadcasting("TP", split="CP"),
            model=ClientPlaceTree(dp=4, tp=2),
        )


def tensor_parallel_ranks_equal_the_whole(out: Path) -> None:
    trained(ClientPlaceTree(dp=dist.get_world_size() // 2, tp=2), broadcasting("TP"))
    trained(ClientPlaceTree(dp=dist.get_world_size() // 2, tp=2), broadcasting())


def pipeline_stages_equal_the_whole(out: Path) -> None:
    w = dist.get_world_size()
    trained(ClientPlaceTree(pp=2, dp=w // 2), "llm_balance")
    trained(ClientPlaceTree(pp=4, dp=w // 4), broadcasting("PP"))
    stages_get_their_keys_only(ClientPlaceTree(pp=4, dp=w // 4))


def stages_get_their_keys_only(place: ClientPlaceTree) -> None:
    stage = place.coords(dist.get_rank())["pp"]
    wanted = EVERY | (FIRST if stage == 0 else set()) | (LAST if stage == place.pp - 1 else set())
    for axes in ((), ("PP",)):
        with ot.join(job(place, broadcasting(*axes)), stall_limit_s=30.0) as client:
            assert all(set(mb) == wanted for mb in next(client)), (
                f"stage {stage} has {sorted(next(client)[0])}"
            )
            dist.barrier()


def combined_meshes_equal_the_whole(out: Path) -> None:
    if dist.get_world_size() == FEW:
        trained(ClientPlaceTree(cp=2, tp=2), broadcasting("TP", "CP"))
        trained(ClientPlaceTree(pp=2, cp=2), broadcasting("PP", "CP"))
        return
    trained(ClientPlaceTree(dp=2, cp=2, tp=2), broadcasting("TP"))
    trained(ClientPlaceTree(dp=2, cp=2, tp=2), broadcasting("TP", "CP"))
    trained(ClientPlaceTree(pp=2, cp=2, tp=2), broadcasting("TP"))
    trained(ClientPlaceTree(pp=2, dp=2, cp=2), broadcasting("CP", "PP"))
    trained(ClientPlaceTree(pp=2, dp=2, cp=2), broadcasting("DP"))
    trained(ClientPlaceTree(pp=2, dp=2, tp=2), broadcasting("TP", "PP", "DP"))


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        balanced_and_unbalanced_plans_have_equal_gradients,
        context_parallel_slices_equal_the_whole,
        context_parallel_ranks_with_microbatches_of_their_own_equal_the_whole,
        tensor_parallel_ranks_equal_the_whole,
        pipeline_stages_equal_the_whole,
        combined_meshes_equal_the_whole,
    )
}
