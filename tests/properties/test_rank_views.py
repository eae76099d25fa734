"""Laws of cutting: what ranks of a bucket get, put together, is the bucket's microbatch, each part
of it once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.constructor.pack import BatchArrays, build_arrays, new_buffer
from overlord.constructor.rank_views import PER_TOKEN, join, narrow, slice_arrays, slice_index
from overlord.constructor.runs import build_slices
from overlord.mesh import AXES, BROADCASTS, BUCKET_AXES, Batch, ClientPlaceTree
from overlord.plan.view import FIRST, LAST, SPLITS, View, view_of, views_of

CUTS = ("zigzag", "zigzag_whole", "contiguous")
degree = st.integers(1, 3)
trees = st.builds(
    ClientPlaceTree,
    pp=degree,
    dp=degree,
    cp=degree,
    tp=degree,
    order=st.permutations(AXES).map(tuple),
)
broadcasts = st.sets(st.sampled_from(BROADCASTS)).map(lambda dims: tuple(sorted(dims)))
axes = st.sampled_from(list(BUCKET_AXES))


@st.composite
def steps(
    draw: st.DrawFn, splits: tuple[str, ...] = SPLITS
) -> tuple[tuple[Any, ...], Batch, int, int]:
    """Documents of some microbatches as a builder gets them, a batch, the degree of cp, and what
    documents are padded to.
    """
    cp, layout, n = (
        draw(st.integers(1, 8)),
        draw(st.sampled_from(["packed", "padded"])),
        draw(st.integers(1, 4)),
    )
    place = ClientPlaceTree(cp=cp, tp=draw(st.integers(1, 2)))
    batch = Batch(
        samples=1,
        context=draw(st.integers(1, 3)) * 32 * cp,
        layout=layout,
        labels=draw(st.sampled_from(["shifted", "unshifted"])),
        pad_id=99,
        cp_split=draw(st.sampled_from(splits)),
        sequence_parallel=draw(st.booleans()),
    )
    multiple = batch.document_multiple(place)
    lengths = draw(st.lists(st.integers(1, min(60, batch.context)), max_size=12))
    microbatch = np.sort(
        np.array(
            draw(st.lists(st.integers(0, n - 1), min_size=len(lengths), max_size=len(lengths))),
            np.int64,
        )
    )
    length = np.array(lengths, np.int64)
    start = np.cumsum(length) - length
    values = np.arange(1000, 1000 + int(length.sum()), dtype=np.int32)
    return (values, start, length, microbatch, n, np.arange(len(length)) % 3), batch, cp, multiple


def equal(one: BatchArrays, other: BatchArrays) -> None:
    assert list(one.arrays) == list(other.arrays)
    for key in one.arrays:
        np.testing.assert_array_equal(one.arrays[key], other.arrays[key], err_msg=key)
        assert one.arrays[key].dtype == other.arrays[key].dtype
    assert (one.starts, one.single) == (other.starts, other.single)


@given(steps())
def test_slices_joined_give_the_microbatch_back(step: Any) -> None:
    documents, batch, cp, multiple = step
    wide = build_arrays(*documents, batch, multiple)
    whole = wide.cut(0, documents[4])
    sliced = [
        slice_arrays(wide, View(cp=cp, cp_rank=r, split=batch.cp_split)).cut(0, documents[4])
        for r in range(cp)
    ]
    for m, microbatch in enumerate(whole):
        joined = join([slices[m] for slices in sliced], batch.cp_split)
        assert list(joined) == list(microbatch)
        for key, array in microbatch.items():
            np.testing.assert_array_equal(joined[key], array, err_msg=key)
            assert joined[key].dtype == array.dtype
        for r, slices in enumerate(
            sliced
        ):  # the same from the microbatch alone, and cut once however often it is narrowed
            view = View(cp=cp, cp_rank=r, split=batch.cp_split)
            once = narrow(microbatch, view)
            for key in microbatch:
                np.testing.assert_array_equal(once[key], slices[m][key], err_msg=key)
                np.testing.assert_array_equal(narrow(once, view)[key], slices[m][key], err_msg=key)


@given(steps(CUTS))
def test_every_token_is_in_exactly_one_slice_and_what_tells_of_documents_in_all(step: Any) -> None:
    documents, batch, cp, multiple = step
    wide = build_arrays(*documents, batch, multiple)
    for m, microbatch in enumerate(wide.cut(0, documents[4])):
        number = np.arange(microbatch["tokens"].size).reshape(microbatch["tokens"].shape)
        slices = [
            narrow({**microbatch, "number": number}, View(cp=cp, cp_rank=r, split=batch.cp_split))
            for r in range(cp)
        ]
        found = np.concatenate([s["number"].ravel() for s in slices])
        np.testing.assert_array_equal(np.sort(found), number.ravel())
        assert len({s["number"].size for s in slices}) == 1
        for s in slices:
            for key in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "source_ids"):
                assert s[key] is microbatch[key]
            for key in PER_TOKEN:
                if key in microbatch:
                    np.testing.assert_array_equal(
                        s[key].ravel(),
                        microbatch[key].ravel()[s["number"].ravel()],
                        err_msg=f"{m} {key}",
                    )


@given(steps(CUTS), st.data())
def test_slices_that_are_built_are_the_slices_of_what_is_built(
    step: Any, data: st.DataObject
) -> None:
    documents, batch, cp, multiple = step
    ranks = sorted(data.draw(st.sets(st.integers(0, cp - 1), min_size=1)))
    wide = build_arrays(*documents, batch, multiple)
    built = build_slices(*documents, batch, multiple, new_buffer, cp, ranks)
    for r, found in zip(ranks, built, strict=True):
        equal(found, slice_arrays(wide, View(cp=cp, cp_rank=r, split=batch.cp_split)))
        assert not any(array.flags.writeable for array in found.arrays.values())


@pytest.mark.parametrize("split", CUTS)
def test_long_documents_are_cut_as_short_ones_are(split: str) -> None:
    """They are laid run by run, not gathered."""
    batch, cp = Batch(samples=1, context=2**15, cp_split=split), 4
    length = np.array([9000, 12000, 5000, 7777])
    documents = (
        np.arange(length.sum(), dtype=np.uint16),
        np.cumsum(length) - length,
        length,
        np.array([0, 0, 1, 1]),
        2,
        np.zeros(4, int),
    )
    wide = build_arrays(*documents, batch, 8)
    for r, found in enumerate(build_slices(*documents, batch, 8, new_buffer, cp, range(cp))):
        equal(found, slice_arrays(wide, View(cp=cp, cp_rank=r, split=split)))


sizes = st.lists(st.integers(1, 20), min_size=1, max_size=8)


@given(sizes, st.integers(1, 8))
def test_the_zigzag_of_documents_is_that_of_the_kernels(chunks: list[int], cp: int) -> None:
    """The index of local token t on rank r, token by token, as attention kernels of packed
    sequences have it.
    """
    ends = np.concatenate([[0], np.cumsum(np.array(chunks) * 2 * cp)])
    local = ends // cp
    for r in range(cp):
        wanted = []
        for t in range(int(local[-1])):
            d = int(np.searchsorted(local, t, side="right")) - 1
            ix, n = t - local[d], local[d + 1] - local[d]
            wanted.append(ix + local[d] * cp + (n // 2) * (r if ix < n // 2 else 2 * (cp - 1) - r))
        assert slice_index(ends, cp, r, "zigzag").tolist() == wanted


@given(sizes, st.integers(1, 8))
def test_causal_attention_costs_every_rank_of_a_zigzag_the_same(chunks: list[int], cp: int) -> None:
    ends = np.concatenate([[0], np.cumsum(np.array(chunks) * 2 * cp)])
    position = np.arange(ends[-1]) - np.repeat(ends[:-1], np.diff(ends))
    by_rank = np.array(
        [(position[slice_index(ends, cp, r, "zigzag")] + 1).sum() for r in range(cp)]
    )
    assert len(set(by_rank.tolist())) == 1
    for a, b in pairwise(ends):  # in every document, and so whatever the kernel does between them
        inside = [
            index[(index >= a) & (index < b)]
            for index in (slice_index(ends, cp, r, "zigzag") for r in range(cp))
        ]
        assert len({int((position[i] + 1).sum()) for i in inside}) == 1


@given(sizes, st.integers(1, 8))
def test_the_other_splits_are_of_the_whole_microbatch(chunks: list[int], cp: int) -> None:
    ends = np.concatenate([[0], np.cumsum(np.array(chunks) * 2 * cp)])
    total = int(ends[-1])
    for r in range(cp):
        parts = np.arange(total).reshape(2 * cp, -1)
        np.testing.assert_array_equal(
            slice_index(ends, cp, r, "zigzag_whole"),
            np.concatenate([parts[r], parts[2 * cp - 1 - r]]),
        )
        np.testing.assert_array_equal(
            slice_index(ends, cp, r, "contiguous"), np.arange(total).reshape(cp, -1)[r]
        )
        np.testing.assert_array_equal(slice_index(ends, cp, r, "none"), np.arange(total))


@pytest.mark.parametrize(
    ("split", "words"),
    [("zigzag", "a document of .*, got 6"), ("contiguous", "a microbatch of .*, got 9")],
)
def test_what_cannot_be_cut_evenly_is_said(split: str, words: str) -> None:
    ends = np.array([0, 4, 10]) if split == "zigzag" else np.array([0, 4, 9])
    with pytest.raises(ValueError, match=words):
        slice_index(ends, 2, 0, split)


# who gets what


@given(trees, axes, broadcasts)
def test_every_rank_is_served_exactly_once(
    tree: ClientPlaceTree, axis: str, broadcast: tuple[str, ...]
) -> None:
    """Its microbatches lie in one mailbox, of its own bucket, that its own fetcher empties."""
    seats, served, buckets = (
        tree.seats(axis, broadcast),
        tree.served_by(broadcast),
        tree.bucket_of(axis),
    )
    views = views_of(tree, axis, broadcast, "zigzag")
    assert [not view.nothing for view in views] == (seats == np.arange(tree.world_size)).tolist()
    for rank, seat in enumerate(seats.tolist()):
        assert seats[seat] == seat <= rank
        assert (served[seat], buckets[seat]) == (served[rank], buckets[rank])
        alike = np.flatnonzero((served == served[rank]) & (buckets == buckets[rank]))
        assert set(seats[alike].tolist()) == {seat}, (
            "one mailbox for all of a bucket that one rank fetches for"
        )
    assert all(seats[fetcher] == fetcher for fetcher in tree.fetchers(broadcast))


def own_keys(
    tree: ClientPlaceTree, axis: str, rank: int, microbatch: dict[str, np.ndarray]
) -> set[str]:
    stage = tree.coords(rank)["pp"]
    if tree.pp == 1 or "pp" in BUCKET_AXES[axis]:
        return set(microbatch)
    hidden = (() if stage == 0 else FIRST) + (() if stage == tree.pp - 1 else LAST)
    return set(microbatch) - set(hidden)


@given(trees, axes, broadcasts, st.sampled_from(SPLITS))
def test_what_a_fetcher_gets_is_what_all_it_serves_need(
    tree: ClientPlaceTree, axis: str, broadcast: tuple[str, ...], split: str
) -> None:
    batch = Batch(samples=1, context=1024, cp_split=split)
    length = np.array([3, 17, 8])
    documents = (
        np.arange(28),
        np.cumsum(length) - length,
        length,
        np.zeros(3, int),
        1,
        np.arange(3),
    )
    wide = build_arrays(*documents, batch, batch.document_multiple(tree))
    [whole] = wide.cut(0, 1)
    seats = tree.seats(axis, broadcast)
    for rank in range(tree.world_size):
        own = view_of(tree, axis, (), rank, split)
        [handed] = slice_arrays(wide, view_of(tree, axis, broadcast, int(seats[rank]), split)).cut(
            0, 1
        )
        got, wanted = narrow(handed, own), narrow(whole, own)
        assert set(got) == set(wanted) == own_keys(tree, axis, rank, whole)
        for key in wanted:
            np.testing.assert_array_equal(got[key], wanted[key], err_msg=key)
        sliced = tree.cp > 1 and "cp" not in BUCKET_AXES[axis] and split != "none"
        assert (own.cp, own.cp_rank) == ((tree.cp, tree.coords(rank)["cp"]) if sliced else (1, 0))


def test_a_key_of_your_own_is_cut_when_it_tells_of_tokens() -> None:
    batch = Batch(samples=1, context=16)
    [whole] = build_arrays(
        np.arange(12), np.array([0]), np.array([12]), np.array([0]), 1, np.array([0]), batch, 4
    ).cut(0, 1)
    weights, words = np.random.default_rng(0).random((12, 3)), np.arange(5)
    found = narrow(
        {**whole, "weights": weights, "words": words},
        View(first=False, last=False, cp=2, cp_rank=1),
    )
    assert set(found) == {"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "weights", "words"}
    np.testing.assert_array_equal(found["weights"], weights[3:9])
    assert found["words"] is words
    with pytest.raises(ValueError, match=r"'tokens': expected the shape \[12\], got \[1, 12\]"):
        narrow({**whole, "tokens": whole["tokens"][None]}, View(cp=2))
