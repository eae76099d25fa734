"""Reader of Megatron datasets: token ids in a ``.bin``, described by the ``.idx`` next to it.

A row is a document, the sequences of which are joined. The column ``tokens`` has its ids in the
type of the file, and ``lengths`` the number of ids of each sequence. A multimodal dataset also has
``modes``, the mode of each sequence. The lengths of all documents are known from the index, so
planning reads no byte of the ``.bin`` (``ReadOptions.lengths_only``).

One read copies the ids of a slice from the file into the memory that transforms and batches use.
The file is not mapped: an unreadable mapped page ends the process (``docs/sources.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from overlord.sources import tables as cols
from overlord.sources.base import (
    PAIR,
    BadFile,
    Chunks,
    File,
    Lru,
    RawSlice,
    ReadOptions,
    make_chunks,
    missing_columns_error,
    no_rows_chunk,
    short_read,
)
from overlord.sources.megatron_index import (
    HEADER,
    Documents,
    MegatronIndex,
    companion_paths,
    cut_chunks,
    parse_header,
    read_documents,
)

if TYPE_CHECKING:
    from overlord.sources.files import Files

TOKENS, LENGTHS, MODES = "tokens", "lengths", "modes"
_SHOWN = 5  # most missing files that an error names
_INDEXES: Lru[File, MegatronIndex] = Lru(max_items=4096, max_bytes=2**22)


class Megatron:
    name = "megatron"
    suffixes = PAIR
    indexed = True
    index_names = ()

    def data_files(self, files: Files, listed: Sequence[File]) -> tuple[File, ...]:
        pairs = companion_paths([file.path for file in listed])
        known = {file.path: file for file in listed}
        known |= files.lookup(
            [path for pair in pairs.items() for path in pair if path not in known]
        )
        missing = [path for pair in pairs.items() for path in pair if path not in known]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise BadFile(
                "expected a .bin and an .idx for each Megatron dataset, got no "
                f"{', '.join(missing[:_SHOWN])}{more}",
                "copy both files, or set format= if the data have another format",
            )
        return tuple(replace(known[a], companion=known[b]) for a, b in pairs.items())

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        index = _index(files, file)
        types = _types(index)
        if missing := [c for c in options.columns or () if c not in types]:
            raise missing_columns_error(missing, {name: str(kind) for name, kind in types.items()})
        companion = _index_file(file)
        with _naming(companion), files.open(companion, [(0, companion.size)]) as handle:
            cut = cut_chunks(handle.read_at, index, file.size, options.chunk_bytes)
        if not index.documents:
            return no_rows_chunk()
        per_document = file.size / index.documents
        return make_chunks(
            [(a, b, k, b - a, int((b - a) * per_document)) for k, (a, b) in enumerate(cut)]
        )

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        return {name: str(kind) for name, kind in _types(_index(files, file)).items()}

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        return 32 * max(0, int(chunks.rows[i]))  # offsets of documents and of their sequences

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        if int(chunks.unit[i]) < 0:
            yield cols.no_rows(options, skip)
            return
        first, rows, step = int(chunks.start[i]), int(chunks.rows[i]), options.slice_rows
        index = _index(files, file)
        names = options.columns if options.columns is not None else tuple(_types(index))
        if skip * step >= rows:
            none = Documents.none()
            table, _ = _rows(None, none, index, names, options.max_sample_bytes)
            yield RawSlice(np.zeros(0, np.int64), table, [], True)
            return
        documents = _documents(files, file, index, first, rows)
        blank = options.lengths_only and TOKENS in names
        with ExitStack() as stack:
            data = None
            if TOKENS in names and not blank:
                span = int(documents.starts[0]), int(documents.starts[-1])
                data = stack.enter_context(files.open(file, [span] if span[0] < span[1] else []))
            for at in range(skip * step, rows, step):
                some = documents.slice(at, min(at + step, rows))
                table, bad = _rows(data, some, index, names, options.max_sample_bytes)
                last = at + step >= rows
                row = np.arange(first + at, first + at + len(some), dtype=np.int64)
                yield RawSlice(row, table, bad, last, blank)


def _index_file(file: File) -> File:
    assert file.companion is not None, f"expected the .idx of {file.path}, got none"
    return file.companion


def _index(files: Files, file: File) -> MegatronIndex:
    """Return the layout of the index of a dataset. Raises BadFile."""
    companion = _index_file(file)
    if (index := _INDEXES.get(companion)) is not None:
        return index
    with _naming(companion), files.open(companion) as handle:
        data = handle.read_at(min(HEADER, companion.size), 0)
        if len(data) < min(HEADER, companion.size):
            raise short_read(min(HEADER, companion.size) - len(data))
        index = parse_header(data, companion.size)
    _INDEXES.put(companion, index, 256)
    return index


def _types(index: MegatronIndex) -> dict[str, pa.DataType]:
    types = {
        TOKENS: pa.large_list(pa.from_numpy_dtype(index.dtype)),
        LENGTHS: pa.large_list(pa.int32()),
        MODES: pa.large_list(pa.int8()),
    }
    return types if index.multimodal else {n: t for n, t in types.items() if n != MODES}


def _documents(files: Files, file: File, index: MegatronIndex, first: int, rows: int) -> Documents:
    companion, at = _index_file(file), index.documents_at + 8 * first
    with _naming(companion), files.open(companion, [(at, at + 8 * rows + 8)]) as handle:
        return read_documents(handle.read_at, index, first, first + rows, file.size)


@contextmanager
def _naming(file: File) -> Iterator[None]:
    """Put the path of the index in front of a problem with it."""
    try:
        yield
    except BadFile as error:
        raise BadFile(f"{file.path}: {error.problem}", error.remedy) from error


def _rows(
    data: pa.NativeFile | None,
    documents: Documents,
    index: MegatronIndex,
    names: Sequence[str],
    limit: int,
) -> tuple[pa.Table, cols.BadRows]:
    """Return the documents as a table, and those of more than ``limit`` bytes, which are not read.

    Without ``data`` the token ids are zeros.
    """
    sizes = np.diff(documents.starts)
    bad = [(int(i), cols.too_large(int(sizes[i]), limit)) for i in np.flatnonzero(sizes > limit)]
    sizes = np.where(sizes > limit, 0, sizes)
    columns: dict[str, pa.Array] = {}
    for name in names:
        if name == TOKENS:
            ids = (
                np.zeros(int(sizes.sum()) // index.dtype.itemsize, index.dtype)
                if data is None
                else _ids(data, documents.starts, [i for i, _ in bad], index.dtype)
            )
            columns[name] = _lists(ids, _offsets(sizes // index.dtype.itemsize))
        else:
            sequence = documents.sequence - documents.sequence[0]
            values = (
                documents.modes
                if name == MODES
                else (np.diff(documents.edges) // index.dtype.itemsize).astype(np.int32)
            )
            columns[name] = _lists(values, sequence)
    table = pa.table(columns) if columns else cols.empty(len(sizes))
    return (cols.drop_rows(table, [i for i, _ in bad]) if bad else table), bad


def _ids(
    data: pa.NativeFile, starts: np.ndarray, left_out: list[int], dtype: np.dtype
) -> np.ndarray:
    """Read the ids of consecutive documents, with one read for each run of documents."""
    edges = [-1, *left_out, len(starts) - 1]
    parts = []
    for a, b in pairwise(edges):
        start, stop = int(starts[a + 1]), int(starts[b])
        if start < stop:
            data.seek(start)
            buffer = data.read_buffer(stop - start)
            if buffer.size < stop - start:
                raise short_read(stop - start - buffer.size)
            parts.append(np.frombuffer(buffer, dtype))
    if len(parts) == 1:
        return np.require(parts[0], requirements="A")  # a read of a store may begin anywhere
    return np.concatenate([np.zeros(0, dtype), *parts])


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _lists(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
    return pa.LargeListArray.from_arrays(cols.arrow_of(offsets), cols.arrow_of(values))
