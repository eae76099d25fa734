"""A tiny ViT and a tiny decoder, trained with images encoded wherever the plan says: loss and
gradients of both are those of one process that encodes each image where its text is. In float64;
differences above 1e-11 would be no rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import overlord as ov
import overlord.torch as ot
from overlord.constructor.rank_views import slice_index
from overlord.mesh import ClientPlaceTree
from overlord.planning.strategies import vlm
from tests import images
from tests.torch.ranks.checks_broadcast import broadcasting_images
from tests.torch.ranks.jobs import samples_of
from tests.torch.ranks.meshes import sum_all
from tests.torch.ranks.models import WIDTH, Cut, Params, Run, microbatch, parameters

STEPS, TOLERANCE, VOCABULARY, MERGED = 3, 1e-11, 1000, 4
PATCH_DIM = 3 * images.IMAGES["patch"] ** 2

_state: dict[str, Any] = {"broadcast": ""}


def base(out: Path) -> ov.Job:
    """Few samples a step, so that some ranks have no image; the files are written once by each
    rank, and read by one.
    """
    if "job" not in _state:
        batch = ov.Batch(samples=3 + dist.get_world_size() // 4, context=64, microbatches=2)
        _state["job"] = images.job(
            out / f"files{dist.get_rank()}", batch=batch, strategy="vanilla", until=20
        )
    return _state["job"]


def encoder_parameters() -> Params:
    made = torch.Generator().manual_seed(9)
    sizes = {
        "patch": (PATCH_DIM, WIDTH),
        "q": (WIDTH, WIDTH),
        "k": (WIDTH, WIDTH),
        "v": (WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
    }
    return {
        f"vit.{name}": torch.randn(*size, generator=made, dtype=torch.float64) * 0.2
        for name, size in sizes.items()
    }


def encoded(p: Params, exchange: Any) -> torch.Tensor:
    """Attention inside each image, then a row for every four patches. Without images: no rows, of
    the right width.
    """
    pixels = torch.tensor(np.asarray(exchange["pixel_values"]), dtype=torch.float64)
    if not len(pixels):
        return torch.zeros(0, WIDTH, dtype=torch.float64)
    image = np.searchsorted(
        np.asarray(exchange["image_cu_seqlens"]), np.arange(len(pixels)), side="right"
    )
    x = pixels @ p["vit.patch"]
    q, k, v = (x @ p[f"vit.{name}"] for name in ("q", "k", "v"))
    seen = torch.from_numpy(image[:, None] == image[None])
    x = x + (q @ k.T / WIDTH**0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v @ p["vit.out"]
    return torch.tanh(x.view(-1, MERGED, WIDTH).mean(1))


def lens_of(exchange: Any) -> np.ndarray:
    return np.diff(np.asarray(exchange["image_cu_seqlens"])) // MERGED


def alone(p: Params, step: ov.Step) -> list[tuple[torch.Tensor, np.ndarray]]:
    """Rows and places of each microbatch, without any exchange: one rank has encoded all."""
    found = [(torch.zeros(0, WIDTH, dtype=torch.float64), np.zeros(0, np.int64))] * len(step)
    for exchange in step.encoder:
        lens, rows = lens_of(exchange), encoded(p, exchange)
        starts = np.cumsum(lens) - lens
        kept = np.concatenate(
            [
                np.zeros(0, np.int64),
                *(a + np.arange(n) for a, n in zip(starts, exchange["send_lens"], strict=True)),
            ]
        )
        rows = rows[torch.tensor(kept[exchange["recv_rows"]])]
        of = np.repeat(exchange["image_microbatch"], exchange["out_lens"])
        for m in np.unique(of).tolist():
            mine = np.flatnonzero(of == m)
            found[m] = (rows[torch.tensor(mine)], exchange["image_token_index"][mine])
    return found


def put(
    cut: Cut, mb: Any, rows: torch.Tensor, index: np.ndarray
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The rows into the embeddings of this rank: its own, or those of the bucket's first rank where
    several embed its tokens and the trainer broadcasts them.
    """
    shared = cut.place.cp > 1 and "cp" in _state["broadcast"]

    def done(x: torch.Tensor) -> torch.Tensor:
        nonlocal rows, index
        if shared:
            rows, index = ot.share_rows(rows, index, cut.cp, gradients="sum")
        if cut.place.tp > 1:
            rows, index = ot.share_rows(rows, index, cut.tp, gradients="own")
        ends = np.asarray(mb["cu_seqlens_padded"])
        at = slice_index(ends, cut.place.cp, cut.at["cp"], "zigzag") if shared else None
        return ot.place_rows(x, rows, index, positions=at)

    return done


def train(client: Any, cut: Cut, *, routed: str) -> Run:
    """``routed``: "" in one process, "step" by one exchange a step, "microbatch" by one before
    each.
    """
    params = {
        n: v.requires_grad_() for n, v in cut.of(parameters(3, vocabulary=VOCABULARY)).items()
    }
    vit = {n: v.requires_grad_() for n, v in encoder_parameters().items()}
    done = Run()
    for _ in range(STEPS):
        step = next(client)
        loss = steps_loss(step, params, vit, cut, routed)
        grads = {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in (params | vit).items()
        }
        if cut.sums is not None:
            sum_all([g for n, g in grads.items() if n in vit], None)
            sum_all([*(g for n, g in grads.items() if n not in vit), loss], cut.sums)
        done.grads.append({n: g.clone() for n, g in grads.items()})
        done.losses.append(float(loss))
        done.samples.append([str(piece.sample) for mb in step for piece in mb.samples])
        _state.setdefault("images", []).append(sum(len(e["grid_thw"]) for e in step.encoder))
        with torch.no_grad():
            for name, p in (params | vit).items():
                p -= 0.05 * grads[name]
                p.grad = None
    return done


def steps_loss(step: ov.Step, params: Params, vit: Params, cut: Cut, routed: str) -> torch.Tensor:
    total, valid = torch.zeros((), dtype=torch.float64), step.global_valid_tokens
    if not routed:
        given = alone(vit, step)
        for mb, (rows, index) in zip(step, given, strict=True):
            x = put(cut, mb, rows, index)
            total += microbatch(params, cut, mb, valid, x)
        return total
    if routed == "step":
        [exchange] = step.encoder
        moved = ot.Exchange(encoded(vit, exchange), exchange, lens=lens_of(exchange))
        for m, mb in enumerate(step):
            if len(mb):  # nothing on a rank outside of the backbone's mesh
                total += microbatch(params, cut, mb, valid, put(cut, mb, *moved.microbatch(m)))
        moved.backward()
        return total
    for mb in step:  # an exchange of its own: its maps are keys of the microbatch
        rows = ot.route(encoded(vit, mb), mb, lens=lens_of(mb))
        if "cu_seqlens" not in mb:  # a rank outside of the backbone's mesh
            ot.tied(torch.zeros((), dtype=torch.float64), rows).backward()
        elif cut.first:
            into = put(cut, mb, rows, mb["image_token_index"])
            total += microbatch(
                params, cut, mb, valid, lambda x, into=into, rows=rows: ot.tied(into(x), rows)
            )
        else:
            total += microbatch(params, cut, mb, valid)
            ot.tied(torch.zeros((), dtype=torch.float64), rows).backward()
    return total


def whole(out: Path) -> Run:
    if "whole" not in _state:
        done: list[Any] = [None]
        if dist.get_rank() == 0:
            with ov.launch(
                replace(base(out), place=ClientPlaceTree()), stall_limit_s=30.0
            ) as session:
                done = [train_once(session.client(0))]
        dist.broadcast_object_list(done)
        _state["whole"] = done[0]
    return _state["whole"]


def train_once(client: Any) -> Run:
    """One process: gradients of shared rows are kept until all microbatches used them."""
    return train(client, Cut(), routed="")


def trained(
    out: Path, place: ClientPlaceTree, strategy: Any, routed: str, *, broadcast: str = ""
) -> None:
    """``broadcast``: the axes along which the plan broadcasts, beside tp."""
    wanted, cut = whole(out), Cut(place, dist.get_rank())
    _state["images"], _state["broadcast"] = [], broadcast
    with ot.join(replace(base(out), place=place, strategy=strategy), stall_limit_s=30.0) as client:
        run = train(client, cut, routed=routed)
        dist.barrier()
    everyone: list[Any] = [None] * place.world_size
    dist.all_gather_object(everyone, (run.samples, _state["images"]))
    first = {place.coords(r)["dp"]: found for r, (found, _) in enumerate(everyone)}
    assert samples_of(
        [[s for f in first.values() for s in f[k]] for k in range(STEPS)]
    ) == samples_of(wanted.samples)
    counts = np.array([n for _, n in everyone])
    assert counts.sum() > 0
    assert (counts == 0).any(), (
        f"images by rank and step: {counts.tolist()}; some rank should have none"
    )
    for step in range(STEPS):
        vit = {n: g for n, g in wanted.grads[step].items() if n.startswith("vit.")}
        for name, value in (
            cut.of({n: g for n, g in wanted.grads[step].items() if n not in vit}) | vit
        ).items():
            off = float((run.grads[step][name] - value).abs().max())
            assert off < TOLERANCE, (
                f"{place}, step {step}, {name}: off by {off:.1e} of {float(value.abs().max()):.1e}"
            )
        assert not cut.last or abs(run.losses[step] - wanted.losses[step]) < TOLERANCE
    assert all(float(g.abs().max()) > 1e-6 for g in wanted.grads[0].values()), (
        "a gradient is nothing: it proves nothing"
    )


def vanilla_plans(out: Path) -> None:
    trained(out, ClientPlaceTree(dp=dist.get_world_size()), "vanilla", "microbatch")


def hybrid_plans_over_replicas(out: Path) -> None:
    w = dist.get_world_size()
    trained(out, ClientPlaceTree(dp=w), vlm(joint=False), "step")
    trained(out, ClientPlaceTree(dp=w), vlm(per="microbatch", joint=False), "microbatch")
    trained(out, ClientPlaceTree(dp=w), "encoder_balance", "step")


def hybrid_plans_over_tensor_and_context_parallelism(out: Path) -> None:
    w = dist.get_world_size()
    trained(out, ClientPlaceTree(dp=w // 2, tp=2), "vlm_hybrid", "step")
    along_cp = broadcasting_images(["CP"], "iteration")
    trained(out, ClientPlaceTree(dp=w // 2, cp=2), along_cp, "step", broadcast="cp")
    trained(
        out,
        ClientPlaceTree(dp=w // 4, cp=2, tp=2),
        broadcasting_images(["CP", "TP"], "microbatch"),
        "microbatch",
        broadcast="cp",
    )


def rows_for_slices_of_context_parallelism(out: Path) -> None:
    """Each rank gets the rows of its own slice, and no rank shares them."""
    w = dist.get_world_size()
    trained(out, ClientPlaceTree(dp=w // 2, cp=2), "vlm_hybrid", "step")
    trained(out, ClientPlaceTree(cp=w), "vanilla", "microbatch")
    trained(out, ClientPlaceTree(dp=w // 4, cp=2, tp=2), vlm(per="microbatch"), "microbatch")
    trained(out, ClientPlaceTree(pp=2, dp=w // 4, cp=2), "encoder_balance", "step")


def hybrid_plans_over_a_pipeline(out: Path) -> None:
    w = dist.get_world_size()
    trained(out, ClientPlaceTree(pp=2, dp=w // 2), "vlm_hybrid", "step")
    trained(out, ClientPlaceTree(pp=2, dp=w // 4, tp=2), vlm(per="microbatch"), "microbatch")


def apart(encoder: ClientPlaceTree, backbone: ClientPlaceTree | None, per: str) -> Any:
    """Encoder and backbone on meshes of their own."""

    def strategy(buffer: ov.Buffer, place: ClientPlaceTree) -> ov.LoadingPlan:
        drawn = ov.DGraph.from_buffer(buffer, place).mix()
        samples = drawn.select("tokens").distribute("DP", on=backbone).balance("greedy")
        images = drawn.select("image_patches", merge=2).distribute("WORLD", on=encoder)
        images = images.balance("greedy") if per == "step" else images.follow(samples)
        return samples.plan(encoder=images)

    return strategy


def an_encoder_on_its_own_mesh(out: Path) -> None:
    if (w := dist.get_world_size()) > 4:
        return  # more ranks add time, and no other case
    place, half = ClientPlaceTree(dp=w), w // 2
    for encoder, backbone in (
        (ov.Mesh(dp=half), ov.Mesh(dp=w - half, first_rank=half)),  # apart
        (ov.Mesh(dp=w - 1), ov.Mesh(dp=w - 1, first_rank=1)),  # each on one rank alone
        (ov.Mesh(dp=1, first_rank=half), None),  # on one of the backbone's ranks
    ):
        for per in ("step", "microbatch"):
            trained(out, place, apart(encoder, backbone, per), per)


def a_broadcast_on_a_mesh_of_its_own_needs_the_plain_delivery(out: Path) -> None:
    def strategy(buffer: ov.Buffer, place: ClientPlaceTree) -> ov.LoadingPlan:
        drawn = ov.DGraph.from_buffer(buffer, place).mix()
        samples = drawn.select("tokens").distribute("DP", on=ov.Mesh(tp=2)).balance("greedy")
        images = drawn.select("image_patches", merge=2).distribute("WORLD").balance("greedy")
        return samples.broadcast_at("TP").plan(encoder=images)

    place = ClientPlaceTree(dp=dist.get_world_size())
    made = replace(base(out), place=place, strategy=strategy)
    with pytest.raises(ov.PlanError, match=r"got one on .*tp2; pass broadcast=False"):
        ot.join(made, stall_limit_s=30.0)
    with ot.join(made, stall_limit_s=30.0, broadcast=False) as client:
        step = next(client)
        assert all(("tokens" in mb) == (dist.get_rank() < 2) for mb in step)
        dist.barrier()


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        vanilla_plans,
        hybrid_plans_over_replicas,
        hybrid_plans_over_tensor_and_context_parallelism,
        rows_for_slices_of_context_parallelism,
        hybrid_plans_over_a_pipeline,
        an_encoder_on_its_own_mesh,
        a_broadcast_on_a_mesh_of_its_own_needs_the_plain_delivery,
    )
}
