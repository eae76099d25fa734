"""Batches for Megatron's interleaved schedule and for its dynamic context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
import overlord.torch as ot
from overlord import ring
from overlord.errors import JobError, PlanError
from tests.torch.jobs import text_job

torch = pytest.importorskip("torch")
megatron, chunks, dynamic_cp = (
    getattr(ot.adapters, name) for name in ("megatron", "megatron_chunks", "dynamic_cp")
)

# Virtual stages


def interleaved(microbatches: int, vpp: int, group: int) -> Iterator[tuple[int, int]]:
    """The order in which a rank runs (microbatch, chunk) forward: groups, then chunks."""
    for first in range(0, microbatches, group):
        for chunk in range(vpp):
            for m in range(first, min(first + group, microbatches)):
                yield m, chunk


def staged(
    tmp_path: Path, pp: int = 2, vpp: int = 2, microbatches: int = 4, **fields: Any
) -> ov.Job:
    job = text_job(tmp_path, until=3)
    batch = replace(job.batch, microbatches=microbatches)
    return replace(job, place=ov.Mesh(pp=pp, vpp=vpp), batch=batch, **fields)


def test_every_chunk_reads_all_microbatches_in_the_order_of_the_schedule(tmp_path: Path) -> None:
    job = staged(tmp_path)
    with ov.launch(job) as session:
        clients = [session.client(rank) for rank in range(2)]
        for steps in zip(*clients, strict=True):
            assert len(steps[0]) % 2 == 0
            for rank, step in enumerate(steps):
                read = chunks.iterators(step, job.place, rank)
                assert len(read) == 2
                for m, chunk in interleaved(len(step), 2, 2):
                    mb = next(read[chunk])
                    first, last = (rank, chunk) == (0, 0), (rank, chunk) == (1, 1)
                    assert ("tokens" in mb) == ("position_ids" in mb) == first
                    assert ("labels" in mb) == ("loss_mask" in mb) == last
                    assert torch.equal(mb["cu_seqlens"], torch.tensor(step[m]["cu_seqlens"]))
                    assert [p.sample for p in mb.samples] == [p.sample for p in step[m].samples]
                    if first:
                        assert mb["tokens"].tolist() == step[m]["tokens"].tolist()
                assert [next(iterator, None) for iterator in read] == [None, None]


def test_batches_of_chunks_have_what_their_stage_needs(tmp_path: Path) -> None:
    job = staged(tmp_path)
    with ov.launch(job) as session:
        for rank, client in enumerate([session.client(rank) for rank in range(2)]):
            read = chunks.iterators(client.microbatches(), job.place, rank)
            for chunk, iterator in enumerate(read):
                batch = megatron.get_batch(iterator, cp=(1, 0))
                assert (batch.tokens is not None) == ((rank, chunk) == (0, 0))
                assert (batch.labels is not None) == ((rank, chunk) == (1, 1))
                assert batch.packed_seq_params.qkv_format == "thd"
                assert batch.padding_mask is not None


def test_a_chunk_that_does_not_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MOST_AHEAD", 3)
    one = {"tokens": np.zeros(2, np.int64), "cu_seqlens": np.array([0, 2], np.int32)}
    first, _ = chunks.iterators((one for _ in range(9)), ov.Mesh(pp=2, vpp=2), 0)
    for _ in range(3):
        next(first)
    with pytest.raises(
        JobError, match=r"expected every chunk to read .* got 3 that chunk 1 has not"
    ):
        next(first)


def test_ranks_without_virtual_stages_need_no_iterators() -> None:
    with pytest.raises(JobError, match=r"place.vpp: expected at least 2 chunks .* got 1; use the"):
        chunks.iterators([], ov.Mesh(pp=2), 0)


@pytest.mark.parametrize(
    "strategy", ["vanilla", "packed", "llm_balance", "backbone_balance", "raw", "karmarkar_karp"]
)
@pytest.mark.parametrize("context", [64, 96])
def test_steps_that_need_more_microbatches_stay_multiples_of_the_stages(
    strategy: str, context: int
) -> None:
    lengths = np.random.default_rng(context).integers(8, 64, 41)
    batch = ov.Batch(samples=41, microbatches=3, context=context)
    buffer = ov.Buffer.from_columns({"a": {"tokens": lengths}}, batch=batch)
    place = ov.Mesh(pp=3, dp=2, vpp=2)
    drawn = ov.DGraph.from_buffer(buffer, place).mix([1])
    if strategy == "karmarkar_karp":
        plan = drawn.distribute("DP").balance(strategy).plan()
    elif strategy == "raw":
        bins = np.arange(41)
        by_hand = ov.plan_raw(
            lambda columns, place, batch, step: {"bucket": bins % 2, "microbatch": bins // 2 + 1}
        )
        plan = by_hand(drawn.buffer, place)
    else:
        plan = getattr(ov.strategy, strategy)(drawn.buffer, place)
    assert plan.n_microbatches > 3
    assert plan.n_microbatches % 3 == 0
    assert place.microbatch_count(plan.n_microbatches - 1) == plan.n_microbatches
    again = ov.LoadingPlan.from_bytes(plan.to_bytes())
    assert again.place == place
    uneven = replace(plan.main, n_microbatches=plan.n_microbatches + 1)
    with pytest.raises(PlanError, match=r"expected a multiple of 3 microbatches, since vpp=2"):
        replace(plan, modules={"backbone": uneven}).validate()


def test_meshes_and_batches_that_do_not_fit_virtual_stages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"place.vpp: expected 1 for pp=1, without stages, got 2"):
        ov.Mesh(vpp=2)
    with pytest.raises(JobError, match=r"place.vpp: expected a whole number of at least 1, got 0"):
        ov.Mesh(pp=2, vpp=0)
    with pytest.raises(JobError, match=r"batch.microbatches: expected a multiple of place.pp=2"):
        staged(tmp_path, microbatches=3)
    assert "vpp" not in repr(ov.Mesh(pp=2))  # journals compare it
    assert "vpp=2" in repr(ov.Mesh(pp=2, vpp=2))


# Dynamic context parallelism


def piece(lengths: list[int], ranks: list[int], position: int, pad: int = 1) -> dict[str, Any]:
    """A microbatch of a hybrid plan: pieces of these documents on a ring."""
    d = len(ranks)
    whole = ring.padded(np.array(lengths), d, pad) if pad else np.array(lengths)
    bounds = np.concatenate(([0], np.cumsum(whole))).astype(np.int32)
    here = ring.token_index(bounds, d, position)
    return {
        "tokens": np.arange(int(bounds[-1]), dtype=np.int64)[here],
        "position_ids": np.concatenate([np.arange(n) for n in whole])[here],
        "labels": np.arange(1, int(bounds[-1]) + 1, dtype=np.int64)[here],
        "loss_mask": np.ones(len(here), np.float32),
        "cu_seqlens": np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        "cu_seqlens_padded": bounds,
        "cp_ranks": np.array(ranks, np.int32),
        "cp_rank": np.int32(position),
        "offload": np.float32(0),
    }


# the keys that Megatron's reader of packed sequences asserts, with their types
KEYS = {
    "tokens": torch.int64,
    "position_ids": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "cu_seqlens": torch.int32,
    "cu_seqlens_padded": torch.int32,
    "max_seqlen": torch.int32,
    "local_cp_size": torch.int32,
}


@pytest.mark.parametrize(
    ("ranks", "lengths"), [([5], [7, 30]), ([2, 3], [9, 40]), ([4, 5, 6, 7], [100])]
)
def test_pieces_of_aligned_rings_have_megatrons_keys(ranks: list[int], lengths: list[int]) -> None:
    joined = []
    for position in range(len(ranks)):
        made = dynamic_cp.packed(piece(lengths, ranks, position))
        assert {key: t.dtype for key, t in made.items()} == KEYS
        assert int(made["local_cp_size"]) == len(ranks)
        assert made["max_seqlen"].numel() == made["local_cp_size"].numel() == 1
        padded = np.diff(made["cu_seqlens_padded"])
        assert (padded % (2 * len(ranks)) == 0).all()
        assert int(made["max_seqlen"]) == padded.max()
        assert made["cu_seqlens"].diff().tolist() == lengths
        # its reader views token arrays with this length
        total = int(made["cu_seqlens_padded"][-1]) // len(ranks)
        for key in ("tokens", "position_ids", "labels", "loss_mask"):
            assert made[key].view(1, total).shape == (1, total)
        joined += made["tokens"].tolist()
    assert sorted(joined) == list(range(int(padded.sum())))


def test_stages_get_the_keys_that_their_microbatch_has() -> None:
    mb = piece([16], [0, 1], 1)
    middle = {key: mb[key] for key in ("cu_seqlens_padded", "cp_ranks", "cp_rank")}
    assert sorted(dynamic_cp.packed(middle)) == [
        "cu_seqlens",
        "cu_seqlens_padded",
        "local_cp_size",
        "max_seqlen",
    ]
    alone = {key: value for key, value in piece([16], [3], 0).items() if "cp_rank" not in key}
    assert int(dynamic_cp.packed(alone)["local_cp_size"]) == 1


@pytest.mark.parametrize(
    ("mb", "text"),
    [
        (piece([12], [0, 1, 2], 0), r"an aligned block of 2\^i .* got \[0, 1, 2\]; plan with"),
        (piece([8], [1, 2], 0), r"an aligned block .* got \[1, 2\]"),
        (piece([8], [1, 0], 0), r"an aligned block .* got \[1, 0\]"),
        (piece([8], [0, 1], 0) | {"cp_rank": 2}, "cp_rank: expected 0 to 1, got 2"),
        (
            piece([9], [0, 1], 0, pad=0),
            "padded to a multiple of 4 tokens for 2 ranks, got one of 9",
        ),
        (piece([8], [0], 0) | {"cp_ranks": np.array([0, 1])}, r"tokens: expected the 4 tokens"),
        ({"tokens": np.zeros(1)}, "expected cu_seqlens_padded in the microbatch"),
    ],
)
def test_what_megatron_has_no_group_or_no_chunks_for_is_refused(mb: Any, text: str) -> None:
    for adapter in (dynamic_cp, megatron):
        with pytest.raises(JobError, match=text):
            adapter.packed(mb)


def test_both_names_of_the_packed_dict_return_the_same_for_pieces() -> None:
    mb = piece([9, 40], [2, 3], 1)
    found, other = dynamic_cp.packed(mb), megatron.packed(mb)
    assert sorted(found) == sorted(other)
    assert all(torch.equal(found[key], other[key]) for key in found)
