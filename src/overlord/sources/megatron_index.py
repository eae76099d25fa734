"""The index of a Megatron dataset (``.idx``): its layout, its checks, and the place of documents.

The index lists sequences (length, byte offset) and documents (runs of sequences). It is not
trusted. ``cut_chunks`` reads all of it once, in pieces. The sequences must cover the ``.bin``
exactly, in order and without overlap, as Megatron's builder writes them. Any entry
that was changed, repeated or lost is detected by that rule, and readers need no further checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from overlord.sources.base import BadFile, short_read

MAGIC, OLD_MAGIC = b"MMIDIDX\0\0", b"TNTIDX\0\0"
HEADER = 34  # bytes of magic, version, type code, and two counts: what follows is not aligned
_VERSION = 1  # the only one that Megatron wrote
# Types of token ids by their code in the file.
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
PIECE = 2**21  # entries that are read and checked at once
MAX_DOCUMENTS = 2**16  # documents of a chunk: an open chunk holds their offsets
_REMEDY = "write both files again, or exclude them: the index does not describe the .bin"

ReadAt = Callable[[int, int], bytes]  # (bytes, offset) -> these bytes of the index


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """The layout of an index, from its header and its size."""

    dtype: np.dtype
    sequences: int
    entries: int  # document boundaries: one more than documents
    multimodal: bool  # a mode per sequence follows; the file does not say so, but its size does

    @property
    def documents(self) -> int:
        return self.entries - 1

    @property
    def pointers_at(self) -> int:
        return HEADER + 4 * self.sequences

    @property
    def documents_at(self) -> int:
        return HEADER + 12 * self.sequences

    @property
    def modes_at(self) -> int:
        return self.documents_at + 8 * self.entries


def parse_header(data: bytes, size: int) -> MegatronIndex:
    """Return the layout of an index of ``size`` bytes that begins with ``data``. Raises BadFile."""
    if data.startswith(OLD_MAGIC[:6]):
        raise BadFile(
            "expected an index of Megatron (MMIDIDX), got one of fairseq's old format (TNTIDX)",
            "write the dataset again with Megatron's preprocess_data",
        )
    if not data.startswith(MAGIC):
        raise BadFile(
            f"expected the magic bytes {MAGIC!r} at the start of the index, got {data[:9]!r}",
            "name the .idx that belongs to the .bin, or set format= for other data",
        )
    if len(data) < HEADER:
        raise BadFile(f"expected an index of at least {HEADER} bytes, got {len(data)}", _REMEDY)
    version, code = int.from_bytes(data[9:17], "little"), data[17]
    if version != _VERSION:
        raise BadFile(f"expected version {_VERSION} of the index, got {version}", _REMEDY)
    if code not in DTYPES:
        raise BadFile(f"expected a type code from 1 to 8 in the index, got {code}", _REMEDY)
    sequences, entries = (int.from_bytes(data[a : a + 8], "little") for a in (18, 26))
    if not entries:
        raise BadFile("expected at least one document boundary in the index, got none", _REMEDY)
    plain = HEADER + 12 * sequences + 8 * entries
    if size not in (plain, plain + sequences):
        raise BadFile(
            f"expected an index of {plain} bytes (multimodal: {plain + sequences}) for its "
            f"{sequences} sequences and {entries} document boundaries, got {size}",
            _REMEDY,
        )
    return MegatronIndex(np.dtype(DTYPES[code]), sequences, entries, size > plain)


def cut_chunks(
    read_at: ReadAt, index: MegatronIndex, nbytes: int, chunk_bytes: int
) -> list[tuple[int, int]]:
    """Check the whole index; return the chunks as ranges of documents.

    A document belongs to the range of ``chunk_bytes`` in which it starts. ``nbytes`` is the size
    of the ``.bin``. Raises BadFile, which names the first wrong entry.
    """
    firsts = _check_sequences(read_at, index, nbytes, chunk_bytes)
    cuts = _check_documents(read_at, index, firsts)
    edges = np.unique(np.concatenate([[0], cuts, [index.documents]]))
    return [
        (a, min(a + MAX_DOCUMENTS, stop))
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        for a in range(start, stop, MAX_DOCUMENTS)
    ]


def _check_sequences(
    read_at: ReadAt, index: MegatronIndex, nbytes: int, chunk_bytes: int
) -> np.ndarray:
    """Check that the sequences cover the data; return the first sequence of each byte range."""
    end, firsts, edge = 0, [np.zeros(0, np.int64)], chunk_bytes
    for at, n in _pieces(index.sequences):
        lengths = _array(read_at, "<i4", HEADER + 4 * at, n)
        starts = _array(read_at, "<i8", index.pointers_at + 8 * at, n)
        if int(lengths.min()) < 0:
            k = int(np.argmax(lengths < 0))
            raise BadFile(
                f"sequence {at + k}: expected a length of at least 0, got {lengths[k]}", _REMEDY
            )
        stops = end + np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
        previous = np.concatenate([[end], stops[:-1]])
        if not np.array_equal(starts, previous):
            k = int(np.argmax(starts != previous))
            raise BadFile(
                f"sequence {at + k}: expected it to start at byte {previous[k]} of the .bin, where "
                f"the one before it ends, got {starts[k]}",
                _REMEDY,
            )
        end = int(stops[-1])
        if end > nbytes:
            break
        edges = np.arange(edge, end, chunk_bytes)
        firsts.append(at + np.searchsorted(starts, edges))
        edge += chunk_bytes * len(edges)
    if end != nbytes:
        wanted, what = (
            (f"at least {end}", "it is truncated")
            if end > nbytes
            else (f"{end}", "the index is of another or an older file")
        )
        raise BadFile(f"expected {wanted} bytes in the .bin, got {nbytes}: {what}", _REMEDY)
    return np.concatenate(firsts)


def _check_documents(read_at: ReadAt, index: MegatronIndex, firsts: np.ndarray) -> np.ndarray:
    """Check the document boundaries; return the first document from each sequence in ``firsts``."""
    before, cuts = 0, []
    for at, n in _pieces(index.entries):
        edges = _array(read_at, "<i8", index.documents_at + 8 * at, n)
        previous = np.concatenate([[before], edges[:-1]])
        wrong = edges < previous
        wrong[0] |= at == 0 and edges[0] != 0
        if wrong.any():
            k = int(np.argmax(wrong))
            least = f"at least sequence {previous[k]}" if at + k else "sequence 0"
            raise BadFile(f"document boundary {at + k}: expected {least}, got {edges[k]}", _REMEDY)
        last = int(edges[-1])
        low, high = np.searchsorted(firsts, [before, last], side="right")
        cuts.append(at + np.searchsorted(edges, firsts[low:high]))
        before = last
    if before != index.sequences:
        raise BadFile(
            f"expected the last document to end at sequence {index.sequences}, got {before}",
            _REMEDY,
        )
    return np.concatenate(cuts)


def _pieces(n: int) -> Iterator[tuple[int, int]]:
    for at in range(0, n, PIECE):
        yield at, min(PIECE, n - at)


def _array(read_at: ReadAt, dtype: str, offset: int, n: int) -> np.ndarray:
    wanted = n * np.dtype(dtype).itemsize
    data = read_at(wanted, offset)
    if len(data) < wanted:
        raise short_read(wanted - len(data))
    return np.frombuffer(data, dtype)


@dataclass(frozen=True, slots=True)
class Documents:
    """The place of the documents of a chunk.

    ``starts`` and ``sequence`` have one entry more than there are documents, ``edges`` one more
    than sequences.
    """

    starts: np.ndarray  # int64: first byte of each document in the .bin, then the end
    sequence: np.ndarray  # int64: first sequence of each document, from the chunk's first one
    edges: np.ndarray  # int64: first byte of each sequence, then the end
    modes: np.ndarray  # int8: mode of each sequence; empty if the dataset has none

    def __len__(self) -> int:
        return len(self.starts) - 1

    def slice(self, start: int, stop: int) -> Documents:
        """Return documents ``start`` to ``stop - 1``, as views."""
        a, b = int(self.sequence[start]), int(self.sequence[stop])
        return Documents(
            self.starts[start : stop + 1],
            self.sequence[start : stop + 1],
            self.edges[a : b + 1],
            self.modes[a:b],
        )

    @staticmethod
    def none() -> Documents:
        edge = np.zeros(1, np.int64)
        return Documents(edge, edge, edge, np.zeros(0, np.int8))


def read_documents(
    read_at: ReadAt, index: MegatronIndex, first: int, stop: int, nbytes: int
) -> Documents:
    """Return the place of documents ``first`` to ``stop - 1``; ``nbytes``: size of the ``.bin``."""
    edges = _array(read_at, "<i8", index.documents_at + 8 * first, stop + 1 - first)
    a, b = int(edges[0]), int(edges[-1])
    in_order = 0 <= a <= b <= index.sequences and bool((edges[1:] >= edges[:-1]).all())
    if in_order:
        after = b < index.sequences  # the next sequence starts where the last one ends
        starts = _array(read_at, "<i8", index.pointers_at + 8 * a, b - a + after)
        starts = starts if after else np.append(starts, nbytes)
        in_order = bool((starts[1:] >= starts[:-1]).all()) and int(starts[0]) >= 0
        in_order = in_order and int(starts[-1]) <= nbytes
    if not in_order:  # it was in order when it was indexed
        raise BadFile("expected the index that was checked, got another of the same size", _REMEDY)
    modes = _array(read_at, "i1", index.modes_at + a, b - a) if index.multimodal else None
    return Documents(
        starts[edges - a], edges - a, starts, np.zeros(0, np.int8) if modes is None else modes
    )


def companion_paths(paths: Sequence[str]) -> dict[str, str]:
    """Return the path of the ``.idx`` of every dataset, by the path of its ``.bin``.

    ``paths`` name one of the two files, or both.
    """
    stems = dict.fromkeys(path[:-4] for path in paths)
    return {f"{stem}.bin": f"{stem}.idx" for stem in stems}
