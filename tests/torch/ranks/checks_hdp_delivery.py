"""Training on steps of hybrid jobs that ``ot.join`` delivers: gradients equal one process to 1e-11.

Documents are longer than a rank holds. One process gets the same steps as whole documents.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import overlord as ov
import overlord.torch as ot
from overlord.planning.strategies import hdp
from overlord.torch import hdp as rings
from tests.torch.ranks import checks_hdp_images
from tests.torch.ranks.hdp_decoder import Decoder, Grads, grads_of, plain
from tests.torch.ranks.hdp_plans import VOCABULARY
from tests.worlds import Rows

CONTEXT, STEPS, LONGEST = 24, 3, 60


@functools.cache
def documents() -> list[dict[str, Any]]:
    rng = random.Random(3)
    lengths = [rng.choice((1, 3, 8, 20, 26, 45, LONGEST + 7)) for _ in range(90)]
    return [{"tokens": [rng.randrange(VOCABULARY) for _ in range(n)]} for n in lengths]


def job(place: ov.Mesh, strategy: Any = "hdp_balance", **changes: Any) -> ov.Job:
    source = ov.Source("web", Rows(documents()), transforms=[ov.Tokens("tokens")])
    settings: dict[str, Any] = {
        "name": "hybrid",
        "sources": [source],
        "place": place,
        "batch": ov.Batch(samples=9, context=CONTEXT),
        "strategy": strategy,
        "seed": 5,
        "until": STEPS,
        "max_document": min(LONGEST, CONTEXT * place.dp * place.cp),
    }
    return ov.Job(**{**settings, **changes})


@functools.cache
def alone(longest: int) -> list[tuple[Grads, float]]:
    """Gradients and loss of every step in one process, from whole documents."""
    batch = ov.Batch(samples=9, context=longest)
    made = job(ov.Mesh(), "packed", batch=batch, max_document=None)
    found = []
    with ov.launch(made) as session:
        for step in session.client(0):
            model, total = Decoder(), 0.0
            for mb in step:
                bounds = mb["cu_seqlens_padded"].tolist()
                for a, b in pairwise(bounds):
                    tokens, labels = (
                        torch.from_numpy(np.array(mb[k][a:b])) for k in ("tokens", "labels")
                    )
                    logits = model.head(model(tokens, torch.arange(b - a), plain))
                    loss = nn.functional.cross_entropy(
                        logits, labels, ignore_index=-100, reduction="sum"
                    )
                    loss = loss / step.global_valid_tokens
                    loss.backward()
                    total += loss.item()
            found.append((grads_of(model), total))
    assert len(found) == STEPS
    return found


def train(made: ov.Job, **options: Any) -> int:
    """Train on a job; return the largest ring of this rank."""
    wanted, largest, place = alone(made.document_limit), 1, made.place
    with ot.join(made, stall_limit_s=30.0, **options) as client:
        rank = client.rank
        peers = [ranks[place.coords(rank)["tp"]] for ranks in place.buckets("CP")]
        group = dist.group.WORLD if place.tp == 1 else _column(place, rank)
        for step, (grads, loss) in zip(client, wanted, strict=True):
            model, total = Decoder(), torch.zeros((), dtype=torch.float64)
            with rings.local_gradients(model):
                for mb in ot.TensorStep.of(step):
                    around = rings.Ring.of(mb, peers=peers)
                    largest = max(largest, int(mb["local_cp_size"]))

                    def attend(q: Any, k: Any, v: Any, ring: rings.Ring = around) -> Any:
                        return rings.ring_attention(q, k, v, ring)

                    with ot.offload(float(mb["offload"]), model.layers):
                        hidden = model(mb["tokens"], mb["position_ids"], attend)
                        piece = ot.token_loss(
                            hidden, mb["labels"], step.global_valid_tokens, head=model.head
                        )
                    piece.backward()
                    total += piece.detach()
            rings.sum_gradients(model, group)
            dist.all_reduce(total, group=group)
            for name, found in grads_of(model).items():
                scale = max(1e-3, float(grads[name].abs().max()))
                error = float((found - grads[name]).abs().max()) / scale
                assert error < 1e-11, f"{made}: gradient of {name} differs by {error:.3g}"
            assert abs(total.item() - loss) < 1e-11 * max(1.0, abs(loss))
    return largest


@functools.cache
def _columns(place: ov.Mesh) -> list[Any]:
    """A group for each tensor-parallel rank: made once, since all ranks must make all groups."""
    return [dist.new_group([ranks[t] for ranks in place.buckets("CP")]) for t in range(place.tp)]


def _column(place: ov.Mesh, rank: int) -> Any:
    return _columns(place)[place.coords(rank)["tp"]]


def any_ring(out: Path) -> None:
    world = dist.get_world_size()
    largest = train(job(ov.Mesh(dp=world)))
    assert largest > 1 or world == 1


def free_counts(out: Path) -> None:
    train(job(ov.Mesh(dp=dist.get_world_size()), sync="step"))


def powers_of_two(out: Path) -> None:
    """Padding to equal chunks changes no gradient."""
    train(job(ov.Mesh(dp=dist.get_world_size()), hdp(groups="power_of_two"), sync="step"))


def dp_and_cp_are_one_axis(out: Path) -> None:
    world = dist.get_world_size()
    cp = 2 if world % 2 == 0 else 1
    batch = ov.Batch(samples=9, context=CONTEXT, pad_multiple=3)
    train(job(ov.Mesh(dp=world // cp, cp=cp), batch=batch))


def a_broadcast_serves_tensor_parallel_ranks(out: Path) -> None:
    world = dist.get_world_size()
    if world % 2 == 0:
        train(job(ov.Mesh(dp=world // 2, tp=2)))


def a_schedule_of_ones_own(out: Path) -> None:
    """Any valid tasks give equal gradients: here all samples are on one ring, one by one."""
    world = dist.get_world_size()
    strategy = functools.partial(one_by_one, ranks=world)
    strategy.hybrid = True  # type: ignore[attr-defined]
    train(job(ov.Mesh(dp=world), strategy, sync="step"))


def one_by_one(buffer: ov.Buffer, place: ov.Mesh, ranks: int) -> ov.LoadingPlan:
    """A plan whose ring of all ranks, turned by one every time, takes every sample alone."""
    from overlord.plan.tasks import TaskTable

    plan = hdp()(buffer, place)
    assert plan.tasks is not None
    n = len(plan)
    table = TaskTable.of([np.roll(np.arange(ranks), i).tolist() for i in range(n)], range(n))
    task = np.arange(n, dtype=np.int32)
    main = replace(
        plan.main,
        n_microbatches=n,
        bucket=table.task_rank[table.task_ptr[:-1]][plan.main.sample],
        microbatch=task[plan.main.sample],
        slot=np.zeros(n, np.int32),
    )
    tasks = replace(plan.tasks, table=table, task=task)
    return replace(plan, modules={"backbone": main}, tasks=tasks).validate()


CHECKS: dict[str, Any] = {
    check.__name__: check
    for check in (
        any_ring,
        free_counts,
        powers_of_two,
        dp_and_cp_are_one_axis,
        a_broadcast_serves_tensor_parallel_ranks,
        a_schedule_of_ones_own,
    )
} | checks_hdp_images.CHECKS
