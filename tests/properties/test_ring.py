"""Pieces of documents on a ring: they tile each document, and no chunk is larger than another by
more than a token.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlord import ring

sizes = st.integers(1, 9)
documents = st.lists(st.integers(0, 70), min_size=1, max_size=6)
long = st.integers(0, 2**53)


@given(long, st.integers(1, 40_000))
def test_chunks_tile_a_document_and_differ_by_at_most_one_token(length: int, d: int) -> None:
    at = ring.bounds(length, d)
    assert (at[0], at[-1], len(at)) == (0, length, 2 * d + 1)
    assert np.diff(at).min() >= 0
    assert np.ptp(np.diff(at)) <= 1
    c = 2 * d // 3  # numbers of Python have no overflow
    assert int(at[c]) == c * length // (2 * d)


@given(long, st.integers(1, 300))
def test_pieces_of_all_positions_tile_a_document(length: int, d: int) -> None:
    runs = sorted(run for k in range(d) for run in ring.piece(length, d, k))
    assert runs[0][0] == 0
    assert runs[-1][1] == length
    assert all(a[1] == b[0] for a, b in pairwise(runs))


@given(long, st.integers(1, 300))
def test_pieces_differ_by_at_most_two_tokens(length: int, d: int) -> None:
    held = ring.halves(np.array([length]), d).sum(axis=0)[:, 0]
    assert np.ptp(held) <= 2
    assert held.sum() == length


@given(documents, sizes)
def test_every_token_of_a_buffer_is_held_once(lengths: list[int], d: int) -> None:
    cu = np.concatenate(([0], np.cumsum(lengths)))
    held = [ring.token_index(cu, d, k) for k in range(d)]
    assert np.array_equal(np.sort(np.concatenate(held)), np.arange(cu[-1]))


@given(documents, sizes, st.data())
def test_the_vector_forms_agree_with_pieces(
    lengths: list[int], d: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, d - 1))
    cu = np.concatenate(([0], np.cumsum(lengths)))
    pieces = [ring.piece(n, d, k) for n in lengths]
    wanted = [
        np.arange(start, stop) + at
        for at, both in zip(cu[:-1], pieces, strict=True)
        for start, stop in both
    ]
    assert np.array_equal(ring.token_index(cu, d, k), np.concatenate(wanted))
    first, second = ring.halves(np.array(lengths), d)[:, k]
    assert first.tolist() == [a[1] - a[0] for a, _ in pieces]
    assert second.tolist() == [b[1] - b[0] for _, b in pieces]
    many = ring.sizes(np.array(lengths), np.full(len(lengths), d), np.full(len(lengths), k))
    assert many.tolist() == (first + second).tolist()
    local = ring.local_bounds(cu, d, k)
    assert local.dtype == np.int32
    assert np.diff(local).tolist() == (first + second).tolist()


@given(documents, sizes, st.integers(1, 4))
def test_padded_documents_have_equal_chunks(lengths: list[int], d: int, multiple: int) -> None:
    whole = ring.padded(np.array(lengths), d, multiple)
    assert (whole >= lengths).all()
    assert (whole - lengths < 2 * d * multiple).all()
    parts = ring.halves(whole, d)
    assert (parts == whole // (2 * d)).all()
    assert (parts % multiple == 0).all()


@given(st.integers(1, 400), st.integers(2, 12))
def test_positions_have_equal_work(length: int, d: int) -> None:
    """The pairs of query and key of positions differ by rounding alone: O(length) of length^2."""
    work = []
    for k in range(d):
        work.append(
            sum(
                stop * (stop + 1) // 2 - start * (start + 1) // 2
                for start, stop in ring.piece(length, d, k)
            )
        )
    assert max(work) - min(work) <= 3 * length + 2


def test_a_single_token_is_at_position_zero() -> None:
    assert [ring.piece(1, 3, k) for k in range(3)] == [
        ((0, 0), (0, 1)),
        ((0, 0), (0, 0)),
        ((0, 0), (0, 0)),
    ]
