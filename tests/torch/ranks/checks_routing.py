"""Encoder outputs routed by a plan's maps: what arrives, what goes back, with ranks that have no
images, in any dtype.
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
from overlord.errors import PlanError
from overlord.mesh import ClientPlaceTree
from overlord.planning.strategies import vlm

WIDTH = 3


def plan_of(
    place: ClientPlaceTree,
    images: list[list[int]],
    *,
    per: str = "iteration",
    joint: bool | None = None,
) -> ov.LoadingPlan:
    """A plan of documents with these images each, by rows; documents have a token before, between
    and behind.
    """
    rng = np.random.default_rng(len(images))
    starts = [[1 + sum(i[:k]) + k for k in range(len(i))] for i in images]
    columns = {
        "tokens": [sum(i) + len(i) + 1 + int(rng.integers(0, 5)) for i in images],
        "image_patches": [[4 * n for n in i] for i in images],
        "image_tokens": images,
        "image_offset": starts,
    }
    batch = ov.Batch(samples=len(images), microbatches=2, context=64)
    buffer = replace(ov.Buffer.from_columns({"seen": columns}, batch=batch, step=7), drawn=True)
    return vlm(per=per, joint=joint, merge=2)(buffer, place)


def some_images(seed: int, n: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(rng.integers(1, 7)) for _ in range(int(rng.integers(0, 4)))] for _ in range(n)]


def row_of(item: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Row k of an item, known to whoever asks."""
    return torch.tensor([item, k, item * 7 + k], dtype=dtype)


def outputs(route: Any, dtype: torch.dtype) -> torch.Tensor:
    rows = [
        row_of(int(i), k, dtype)
        for i, n in zip(route.items, route.send_lens, strict=True)
        for k in range(int(n))
    ]
    return torch.stack(rows) if rows else torch.zeros(0, WIDTH, dtype=dtype)


def rows_arrive_where_their_placeholders_are(out: Path) -> None:
    rank, w = dist.get_rank(), dist.get_world_size()
    for place in (
        ClientPlaceTree(dp=w),
        ClientPlaceTree(dp=w // 2, tp=2),
        ClientPlaceTree(pp=2, dp=w // 2),
    ):
        for per in ("iteration", "microbatch"):
            routes = plan_of(place, some_images(3, 3 * w), per=per).routes("encoder")
            for slot in range(routes.n_slots):
                route = routes.for_rank(rank, slot)
                for dtype in (torch.float64, torch.bfloat16):
                    got = ot.route(outputs(route, dtype), route)
                    wanted = [
                        row_of(int(i), k, dtype)
                        for i, n in zip(route.recv_items, route.out_lens, strict=True)
                        for k in range(int(n))
                    ]
                    assert got.dtype == dtype
                    assert len(got) == len(route.image_token_index)
                    assert torch.equal(got, torch.stack(wanted) if wanted else got[:0])


def gradients_go_home(out: Path) -> None:
    """The gradient of a row is what its placeholder's use says, on the rank that encoded it; ranks
    without any take part.
    """
    rank, w = dist.get_rank(), dist.get_world_size()
    few = [[2], *[[] for _ in range(2 * w - 1)]]  # most ranks neither encode nor receive
    for images in (few, some_images(5, 3 * w), [[] for _ in range(w)]):
        plan = plan_of(ClientPlaceTree(dp=w), images, joint=False)
        route = plan.routes("encoder").for_rank(rank)
        rows = outputs(route, torch.float64).requires_grad_()
        got = ot.route(rows, route)
        weight = 1.0 + route.image_token_index.astype(np.float64)  # what a row means where it went
        ot.tied((got * torch.tensor(weight)[:, None]).sum(), got).backward()
        everywhere: list[Any] = [None] * w
        dist.all_gather_object(
            everywhere, (route.recv_items, route.out_lens, route.image_token_index)
        )
        wanted: dict[int, np.ndarray] = {}
        for items, lens, index in everywhere:
            for i, part in (
                zip(items, np.split(index, np.cumsum(lens)[:-1]), strict=True) if len(items) else ()
            ):
                wanted[int(i)] = 1.0 + part
        mine = [wanted[int(i)] for i in route.items]
        assert rows.grad is not None
        assert np.array_equal(
            rows.grad[:, 0].numpy(), np.concatenate(mine) if mine else np.zeros(0)
        )


def a_rank_whose_rows_need_no_gradient_still_answers(out: Path) -> None:
    rank, w = dist.get_rank(), dist.get_world_size()
    route = (
        plan_of(ClientPlaceTree(dp=w), some_images(9, 3 * w), joint=False)
        .routes("encoder")
        .for_rank(rank)
    )
    rows = outputs(route, torch.float32).requires_grad_(
        rank % 2 == 0
    )  # the others run a frozen encoder, or none
    ot.tied(ot.route(rows, route).sum(), rows[:0]).backward()
    assert (rows.grad is not None) == (rank % 2 == 0)
    if rank % 2 == 0:
        assert torch.equal(rows.grad, torch.ones_like(rows))


def an_exchange_serves_all_microbatches(out: Path) -> None:
    """One all-to-all for a step, a backward for each microbatch, one way back."""
    rank, w = dist.get_rank(), dist.get_world_size()
    plan = plan_of(ClientPlaceTree(dp=w), some_images(11, 4 * w), joint=False)
    route = plan.routes("encoder").for_rank(rank)
    rows = outputs(route, torch.float64).requires_grad_()
    exchange = ot.Exchange(rows, route)
    seen = []
    for m in range(plan.main.n_microbatches):
        part, index = exchange.microbatch(m)
        want_rows, want_index = route.microbatch(m)
        assert np.array_equal(index, want_index)
        assert len(part) == len(want_rows)
        embeddings = torch.zeros(64, WIDTH, dtype=torch.float64)
        placed = ot.place_rows(embeddings, part, index)
        assert torch.equal(placed[torch.tensor(index)], part)
        (placed.sum() * (m + 1)).backward()
        seen.append(len(part))
    exchange.backward()
    per_item = {int(i): m + 1 for i, m in zip(route.recv_items, route.microbatches, strict=True)}
    everywhere: list[Any] = [None] * w
    dist.all_gather_object(everywhere, per_item)
    of = {i: m for one in everywhere for i, m in one.items()}
    wanted = np.repeat([of[int(i)] for i in route.items], route.send_lens)
    assert np.array_equal(rows.grad[:, 0].numpy(), wanted)
    assert sum(seen) == len(route.image_token_index)


def rows_that_their_document_did_not_take_are_not_sent(out: Path) -> None:
    rank, w = dist.get_rank(), dist.get_world_size()
    route = (
        plan_of(ClientPlaceTree(dp=w), some_images(13, 3 * w), joint=False)
        .routes("encoder")
        .for_rank(rank)
    )
    lens = route.send_lens + 1 + np.arange(len(route.send_lens)) % 2
    rows = [
        row_of(int(i), k, torch.float64)
        for i, n in zip(route.items, lens, strict=True)
        for k in range(int(n))
    ]
    full = (
        torch.stack(rows) if rows else torch.zeros(0, WIDTH, dtype=torch.float64)
    ).requires_grad_()
    got = ot.route(full, route, lens=lens)
    assert torch.equal(got, ot.route(outputs(route, torch.float64), route))
    got.sum().backward()
    kept = (
        np.concatenate([np.arange(n) < s for n, s in zip(lens, route.send_lens, strict=True)])
        if len(lens)
        else np.zeros(0, bool)
    )
    assert np.array_equal(full.grad[:, 0].numpy() > 0, kept)


def mistakes_are_told_before_anyone_waits(out: Path) -> None:
    rank, w = dist.get_rank(), dist.get_world_size()
    route = plan_of(ClientPlaceTree(dp=w), some_images(3, 3 * w)).routes("encoder").for_rank(rank)
    rows = outputs(route, torch.float32)
    for call, words in (
        (
            lambda: ot.route(torch.cat([rows, rows.new_zeros(1, WIDTH)]), route),
            "rows that the plan sends",
        ),
        (lambda: ot.route(rows, {"send_splits": route.send_splits}), "recv_splits"),
        (
            lambda: ot.place_rows(rows.new_zeros(2, WIDTH), rows.new_zeros(1, WIDTH), [5]),
            "CP slice",
        ),
        (lambda: ot.share_rows(rows, [], None, gradients="mean"), "own"),
        (
            lambda: ot.share_rows(rows.new_zeros(2, WIDTH), [4, 1, 0] if rank == 0 else [], None),
            "rank 0, got 2 rows and 3 positions",
        ),
    ):
        with pytest.raises(PlanError, match=words):
            call()


def rows_are_shared_inside_a_bucket(out: Path) -> None:
    """Along CP gradients add up; along TP the first rank's is the whole one."""
    rank, w = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(6.0).view(2, WIDTH) * (rank == 0)
    rows = (rows if rank == 0 else rows[:0]).clone().requires_grad_()
    for way, wanted in (("sum", w * (w + 1) / 2), ("own", 1.0)):
        rows.grad = None
        shared, index = ot.share_rows(rows, [4, 1] if rank == 0 else [], None, gradients=way)
        assert index.tolist() == [4, 1]
        assert torch.equal(shared, torch.arange(6.0).view(2, WIDTH))
        (shared.sum() * (rank + 1)).backward()
        assert len(rows.grad) == len(rows)
        assert rank or torch.equal(rows.grad, torch.full_like(rows, wanted))
    shared, index = ot.share_rows(rows[:0], [], None)
    assert len(shared) == len(index) == 0


def rows_of_other_slices_are_left_out(out: Path) -> None:
    rows = torch.arange(9.0).view(3, WIDTH)
    placed = ot.place_rows(torch.zeros(4, WIDTH), rows, [6, 0, 3], positions=[0, 1, 6, 7])
    assert torch.equal(placed[0], rows[1])
    assert torch.equal(placed[2], rows[0])
    assert not placed[[1, 3]].any()


def rows_of_different_dtypes_or_widths_are_refused_on_all_ranks(out: Path) -> None:
    """A rank without images says them too, and what arrives there would be garbage."""
    rank, w = dist.get_rank(), dist.get_world_size()
    counts = np.zeros(w, np.int64)
    counts[0] = 2 if rank == 0 else 0  # rank 0 sends to itself alone
    maps = {
        "send_splits": counts,
        "recv_splits": counts,
        "send_rows": np.arange(int(counts.sum())),
        "recv_rows": np.arange(int(counts[0])),
        "send_lens": counts[:1],
    }
    for width, dtype in ((WIDTH, torch.bfloat16), (WIDTH + 1, torch.float32)):
        group = dist.new_group(list(range(w)))
        rows = (
            torch.zeros(int(counts[0]), WIDTH)
            if rank < w - 1
            else torch.zeros(0, width, dtype=dtype)
        )
        with pytest.raises(PlanError, match=f"rank {w - 1}: {dtype}, width {width}"):
            ot.route(rows, maps, group)
        assert len(ot.route(torch.zeros(int(counts[0]), WIDTH), maps, group)) == counts[0]


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        rows_arrive_where_their_placeholders_are,
        gradients_go_home,
        a_rank_whose_rows_need_no_gradient_still_answers,
        an_exchange_serves_all_microbatches,
        rows_that_their_document_did_not_take_are_not_sent,
        mistakes_are_told_before_anyone_waits,
        rows_are_shared_inside_a_bucket,
        rows_of_other_slices_are_left_out,
        rows_of_different_dtypes_or_widths_are_refused_on_all_ranks,
    )
}
