"""Laws of Megatron datasets: documents in order however chunks are cut; hostile files never give
wrong ids, and raise nothing unnamed.
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SourceError
from tests.corpus import write_megatron
from tests.laws import examples
from tests.source_reads import Everything, read_all

SEQUENCE = st.lists(st.integers(0, 60_000), max_size=9)
DOCUMENTS = st.lists(st.lists(SEQUENCE, max_size=4), min_size=1, max_size=25)
FIXED = [[[k, k + 1], [], [k + 2] * (k % 5)][: 1 + k % 3] for k in range(30)]


@given(DOCUMENTS, st.integers(1, 30), st.integers(1, 200), st.sampled_from(["uint16", "int32"]))
@examples(60)
def test_all_slices_of_all_chunks_are_the_documents_written(documents, step, chunk, dtype):
    with tempfile.TemporaryDirectory() as folder:
        write_megatron(f"{folder}/a.bin", documents, dtype)
        everything = read_all(f"{folder}/a.bin", slice_rows=step, chunk_bytes=chunk)
    assert [row["tokens"] for row in everything.rows] == [
        [i for s in d for i in s] for d in documents
    ]
    assert [row["lengths"] for row in everything.rows] == [[len(s) for s in d] for d in documents]
    assert everything.ids == [(0, k) for k in range(len(documents))]


def read_pair(data: bytes, index: bytes) -> Everything | None:
    """Everything in a dataset of these bytes, or None for a named error."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.bin").write_bytes(data)
        (Path(folder) / "a.idx").write_bytes(index)
        try:
            return read_all(f"{folder}/a.bin", slice_rows=4, chunk_bytes=50)
        except SourceError:
            return None


def fixed_pair() -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write_megatron(f"{folder}/a.bin", FIXED)
        return (Path(folder) / "a.bin").read_bytes(), (Path(folder) / "a.idx").read_bytes()


DATA, INDEX = fixed_pair()
FLAT = [i for document in FIXED for sequence in document for i in sequence]


def check(everything: Everything | None, index: bytes) -> None:
    """A dataset that is accepted has every id once and in order.

    Only boundaries between documents that name another sequence cannot be detected.
    """
    if everything is None or index[17] != INDEX[17]:
        return
    assert everything.reasons == []
    assert [i for row in everything.rows for i in row["tokens"]] == FLAT


@given(st.floats(0, 1, exclude_max=True), st.booleans())
@examples(60)
def test_a_cut_file_gives_a_named_error(where, of_index):
    data, index = (DATA, INDEX[: int(where * len(INDEX))]) if of_index else (DATA, INDEX)
    data = data if of_index else DATA[: int(where * len(DATA))]
    assert read_pair(data, index) is None


@given(
    st.lists(st.tuples(st.integers(0, len(INDEX) - 1), st.integers(0, 255)), min_size=1, max_size=6)
)
@examples(150)
def test_an_index_with_other_bytes_gives_a_named_error_or_the_ids_written(changes):
    index = bytearray(INDEX)
    for at, value in changes:
        index[at] = value
    check(read_pair(DATA, bytes(index)), bytes(index))


HUGE = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**32 - 1, 2**61, 2**63 - 1, -(2**63)]),
)


@given(st.lists(st.tuples(st.integers(0, 200), HUGE), min_size=1, max_size=3))
@examples(150)
def test_hostile_counts_lengths_offsets_and_boundaries_give_a_named_error(changes):
    """Every number of the index in turn: counts, lengths, offsets, boundaries."""
    index = bytearray(INDEX)
    n, m = struct.unpack_from("<QQ", INDEX, 18)
    places = [(18, "<q"), (26, "<q"), *((34 + 4 * k, "<i") for k in range(n))]
    places += [(34 + 4 * n + 8 * k, "<q") for k in range(n + m)]
    for which, value in changes:
        at, kind = places[which % len(places)]
        bits = 8 * struct.calcsize(kind)
        struct.pack_into(kind, index, at, (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1))
    check(read_pair(DATA, bytes(index)), bytes(index))


@given(st.binary(max_size=300), st.binary(max_size=100), st.booleans())
@examples(60)
def test_any_bytes_give_a_named_error(index, data, magic):
    everything = read_pair(data, (INDEX[:18] if magic else b"") + index)
    assert everything is None or len(everything.ids) <= len(index) + 1
