"""What a trainer holds: steps of ranks that are handed all, a part, or nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.buffer_pool import BufferPool
from overlord.client.client import Step
from overlord.constructor.build import BucketBatch, StepDocuments, build_buckets, build_groups
from overlord.constructor.compact import IDS
from overlord.constructor.pack import new_buffer
from overlord.constructor.rank_views import narrow
from overlord.messages.control import PlannedStep, StreamState
from overlord.messages.data import StepInfo
from overlord.plan.view import view_of
from overlord.sample import Buffer, Ragged

LENGTHS = [3, 9, 4, 12, 1, 7, 5, 6]


def staged(
    place: ov.ClientPlaceTree, batch: ov.Batch, axis: str = "DP", broadcast: Sequence[str] = ()
) -> tuple[StepDocuments, StepInfo]:
    """A step of eight documents, document k of tokens 100k and on."""
    buffer = Buffer.from_columns({"web": {"tokens": np.array(LENGTHS)}}, batch=batch)
    plan = (
        ov.DGraph.from_buffer(buffer, place)
        .mix({"web": 1.0})
        .distribute(axis)
        .balance("greedy")
        .broadcast_at(*broadcast)
        .plan()
    )
    tokens = Ragged.from_rows([100 * k + np.arange(n) for k, n in enumerate(LENGTHS)])
    after = StreamState(step=1, cursors=np.zeros((1, 6), np.int64), owed=(0,), active=(True,))
    stage = PlannedStep(plan, np.array([8]), plan.row.astype(np.int64), plan.digest(), after)
    return StepDocuments(stage, tokens), StepInfo.of(stage)


class Slab:
    """Memory, and how much of it was asked for."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, nbytes: int) -> np.ndarray:
        self.nbytes += nbytes
        return new_buffer(nbytes)


def built(
    place: ov.ClientPlaceTree,
    ranks: Sequence[int],
    slab: Any = new_buffer,
    batch: Mapping[str, Any] | None = None,
    compact: bool = False,
    **how: Any,
) -> BucketBatch:
    made = ov.Batch(**{"samples": 8, "context": 96, **(batch or {})})
    [bucket] = build_groups(
        *staged(place, made, **how),
        {0: ranks},
        made,
        made.document_multiple(place),
        slab,
        compact=compact,
    )
    return bucket


def step_of(place: ov.ClientPlaceTree, rank: int, **how: Any) -> Step:
    batch = ov.Batch(samples=8, context=96)
    return Step(staged(place, batch, **how)[1], built(place, [rank], **how).for_rank(rank), rank)


def test_a_rank_that_is_served_holds_nothing_and_says_who_fetches() -> None:
    place = ov.ClientPlaceTree(cp=2, tp=2)
    step = step_of(place, 3, broadcast=("TP",))
    assert step.served_by == 2
    assert [dict(mb) for mb in step] == [{}]
    with pytest.raises(
        KeyError,
        match=r"'tokens' is not on this rank: rank 2 fetches this microbatch .* \(broadcast_at TP\); "
        r"join with overlord\.torch",
    ):
        step[0]["tokens"]
    assert "tokens" not in step[0]
    assert repr(step[0]) == "Microbatch(8 samples: served by rank 2)"
    assert [(p.offset, p.length) for p in step[0].samples] == [(-1, n) for n in LENGTHS], (
        "which samples they are is known"
    )
    assert step_of(place, 2, broadcast=("TP",)).served_by == 2


def test_offsets_tell_of_the_whole_microbatch() -> None:
    place = ov.ClientPlaceTree(cp=2, pp=3)
    for rank in range(6):  # also of a stage in the middle, which has no tokens at all
        [mb] = step_of(place, rank)
        assert [p.offset for p in mb.samples] == [0, 4, 16, 20, 32, 36, 44, 52]


def test_a_stage_says_which_stage_has_the_key_that_it_lacks() -> None:
    place = ov.ClientPlaceTree(pp=3)
    with pytest.raises(
        KeyError,
        match=r"expected one of tokens, .*, got 'labels' "
        r"\(labels is for the last pipeline stage\)",
    ):
        step_of(place, 0)[0]["labels"]
    with pytest.raises(
        KeyError,
        match=r"expected one of cu_seqlens, .*, got 'tokens' \(tokens is for the first pipeline stage\)",
    ):
        step_of(place, 1)[0]["tokens"]
    with pytest.raises(
        KeyError,
        match=r"expected one of tokens, position_ids, labels, [a-z_, ]*max_seqlen, got 'seven'\W*$",
    ):
        step_of(ov.ClientPlaceTree(dp=1), 0)[0]["seven"]


def test_ranks_that_get_the_same_share_one_object() -> None:
    place = ov.ClientPlaceTree(pp=2, cp=2, tp=2)
    bucket = built(place, range(8))
    alike = {rank: id(bucket.for_rank(rank)) for rank in range(8)}
    assert [alike[r] == alike[r + 1] for r in (0, 2, 4, 6)] == [True] * 4
    assert len(set(alike.values())) == 4


def test_slices_of_all_cp_ranks_are_built_once_for_all_stages_into_one_piece_of_memory() -> None:
    slab = Slab()
    bucket = built(ov.ClientPlaceTree(pp=2, cp=4, tp=2), range(16), slab)
    total = sum(-(-n // 8) * 8 for n in LENGTHS)
    assert slab.nbytes == 28 * total
    bases = {
        id(a.base)
        for r in range(16)
        for mb in bucket.for_rank(r).microbatches
        for a in mb.values()
        if a.dtype == np.int64
    }
    assert len(bases) == 1


def test_what_nobody_asked_for_is_not_built() -> None:
    place, total = ov.ClientPlaceTree(cp=4, tp=2), sum(-(-n // 8) * 8 for n in LENGTHS)
    for ranks, share in (([0], 1 / 4), ([2, 3], 1 / 4), ([1, 4], 2 / 4)):
        slab = Slab()
        built(place, ranks, slab)
        assert slab.nbytes == 28 * total * share
    slab = Slab()
    built(place, [1, 3, 5, 7], slab, broadcast=("TP",))
    assert slab.nbytes == 0, "all of them are served by others"


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(
    "broadcast", [(), ("TP",), ("TP", "CP", "PP")], ids=lambda dims: "-".join(dims) or "none"
)
def test_a_plan_says_who_fetches_and_how_many_bytes(
    layout: str, broadcast: tuple[str, ...]
) -> None:
    place, batch = (
        ov.ClientPlaceTree(pp=3, cp=2, tp=2),
        ov.Batch(samples=8, context=96, microbatches=9, layout=layout),
    )  # some are empty
    bucket = built(
        place, range(12), batch={"microbatches": 9, "layout": layout}, broadcast=broadcast
    )
    found = {
        r: sum(a.nbytes for mb in bucket.for_rank(r).microbatches for a in mb.values())
        for r in range(12)
    }
    plan = staged(place, batch, broadcast=broadcast)[0].plan
    said = plan.delivery(batch)
    assert said["bytes_by_client"] == {rank: n for rank, n in found.items() if n}
    assert (said["fetchers"], said["served"], said["bytes"]) == (
        plan.fetchers(),
        12 - said["clients"],
        sum(found.values()),
    )
    assert plan.delivery(batch, broadcast=False)["clients"] == 12


@pytest.mark.parametrize("axis", ["DP", "CP", "TP"])
@pytest.mark.parametrize("split", ["zigzag", "contiguous", "none"])
@pytest.mark.parametrize("compact", [False, True], ids=["wide", "compact"])
def test_each_rank_is_handed_its_own_part_of_its_own_bucket(
    axis: str, split: str, compact: bool
) -> None:
    place, batch = (
        ov.ClientPlaceTree(pp=2, cp=2, tp=2),
        ov.Batch(samples=8, context=96, cp_split=split),
    )
    step, _ = staged(place, batch, axis)
    whole = build_buckets(step, range(place.n_buckets(axis)), batch, batch.document_multiple(place))
    bucket = built(place, range(8), batch={"cp_split": split}, axis=axis, compact=compact)
    for rank, b in enumerate(place.bucket_of(axis).tolist()):
        view = view_of(place, axis, (), rank, split)
        for mb, all_of_it in zip(
            bucket.for_rank(rank).microbatches, whole[b].microbatches, strict=True
        ):
            wanted = narrow(all_of_it, view)
            assert {key: array.tolist() for key, array in mb.items()} == {
                key: array.tolist() for key, array in wanted.items()
            }


def test_who_takes_compact_microbatches_in_turn_needs_memory_for_one() -> None:
    place, pool = ov.ClientPlaceTree(), BufferPool()
    bucket = replace(built(place, [0], batch={"microbatches": 8}, compact=True), allocate=pool)
    step = Step(staged(place, ov.Batch(samples=8, context=96))[1], bucket, 0)
    largest = max(int(mb["cu_seqlens_padded"][-1]) for mb in step)
    assert pool.nbytes == 0, "nothing is widened that was not asked for"
    assert [mb["labels"] is mb["labels"] for mb in step] == [True] * 8
    assert pool.nbytes < 2 * 28 * largest
    kept = [dict(mb) for mb in step]
    assert pool.nbytes >= 28 * sum(len(mb["tokens"]) for mb in kept)
    assert [mb["tokens"].tolist() for mb in kept] == [mb["tokens"].tolist() for mb in step]


def test_ids_alone_are_what_a_constructor_holds_of_a_compact_step() -> None:
    slab = Slab()
    bucket = built(ov.ClientPlaceTree(), [0], slab, compact=True)
    assert slab.nbytes == sum(LENGTHS) * 8, "as wide as its payload is, here int64"
    assert bucket.nbytes < sum(LENGTHS) * 28


def test_a_stage_in_the_middle_is_handed_no_ids() -> None:
    bucket = built(ov.ClientPlaceTree(pp=3), range(3), compact=True)
    assert [IDS in bucket.for_rank(rank).wide.arrays for rank in range(3)] == [True, False, True]
    [mb] = bucket.for_rank(1).microbatches
    assert list(mb) == ["cu_seqlens", "cu_seqlens_padded", "max_seqlen"]


def test_a_compact_step_and_its_microbatches_can_be_copied() -> None:
    place = ov.ClientPlaceTree()
    bucket = replace(
        built(place, [0], batch={"microbatches": 2}, compact=True), allocate=BufferPool()
    )
    step = Step(staged(place, ov.Batch(samples=8, context=96))[1], bucket, 0)
    for copied in (
        pickle.loads(pickle.dumps(step)),
        [pickle.loads(pickle.dumps(mb)) for mb in step],
        copy.deepcopy(list(step)),
    ):
        assert [{k: a.tolist() for k, a in mb.items()} for mb in copied] == [
            {k: a.tolist() for k, a in mb.items()} for mb in step
        ]
