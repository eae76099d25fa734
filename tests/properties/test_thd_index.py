"""The slices of context parallelism against the index formula of THD kernels, and against a loop
that deals out chunks.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlord.constructor.rank_views import join, slice_index

documents = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def ends_of(chunks: list[int], cp: int, per: int) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.array(chunks) * per * cp)]).astype(np.int32)


def kernel_index(ends: np.ndarray, cp: int, rank: int) -> np.ndarray:
    """Token t of rank r, as THD kernels compute it one by one: of a document's local half h, the
    first lies r * h behind its start and the second (2 * (cp - 1) - r) * h further than it would
    without parallelism.
    """
    local = ends // cp
    found = []
    for t in range(int(local[-1])):
        d = int(np.searchsorted(local, t, side="right")) - 1
        at, half = t - local[d], (local[d + 1] - local[d]) // 2
        found.append(at + local[d] * cp + half * (rank if at < half else 2 * (cp - 1) - rank))
    return np.array(found, np.int64)


@given(documents, st.integers(1, 6))
def test_the_zigzag_of_documents_is_the_index_of_thd_kernels(chunks: list[int], cp: int) -> None:
    ends = ends_of(chunks, cp, 2)
    for rank in range(cp):
        assert np.array_equal(slice_index(ends, cp, rank, "zigzag"), kernel_index(ends, cp, rank))


@given(documents, st.integers(1, 5))
def test_a_zigzag_over_the_whole_is_that_of_one_document(chunks: list[int], cp: int) -> None:
    ends = ends_of(chunks, cp, 2)
    whole = ends[[0, -1]]
    for rank in range(cp):
        assert np.array_equal(
            slice_index(ends, cp, rank, "zigzag_whole"), kernel_index(whole, cp, rank)
        )


@given(documents, st.integers(1, 5))
def test_contiguous_slices_follow_each_other(chunks: list[int], cp: int) -> None:
    ends = ends_of(chunks, cp, 1)
    joined = np.concatenate([slice_index(ends, cp, rank, "contiguous") for rank in range(cp)])
    assert np.array_equal(joined, np.arange(ends[-1]))


@given(documents, st.integers(2, 5), st.sampled_from(["zigzag", "zigzag_whole"]))
def test_every_slice_of_a_zigzag_has_the_same_causal_work(
    chunks: list[int], cp: int, split: str
) -> None:
    """Which is what it is for: pairs of tokens that attention looks at, with chunks as units."""
    ends = ends_of(chunks, cp, 2)
    starts = ends[:-1] if split == "zigzag" else ends[:1]
    work = []
    for rank in range(cp):
        index = slice_index(ends, cp, rank, split)
        work.append(
            int((index - starts[np.searchsorted(starts, index, side="right") - 1] + 1).sum())
        )
    assert len(set(work)) == 1


@given(documents, st.integers(1, 5), st.sampled_from(["zigzag", "zigzag_whole", "contiguous"]))
def test_slices_joined_are_the_microbatch(chunks: list[int], cp: int, split: str) -> None:
    ends = ends_of(chunks, cp, 2)
    tokens = np.random.default_rng(len(chunks)).integers(0, 99, int(ends[-1]))
    slices = [
        {"tokens": tokens[slice_index(ends, cp, r, split)], "cu_seqlens_padded": ends}
        for r in range(cp)
    ]
    assert np.array_equal(join(slices, split)["tokens"], tokens)
