"""Reader of MDS, the format of MosaicML Streaming: shards that an ``index.json`` lists.

A chunk is a shard, a row a sample. Columns have the names and the values that ``MDSWriter`` was
given (``mds_columns.py``). The order is that of the index. Files that it does not list are ignored;
files that it lists must exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from overlord.sources import tables as cols
from overlord.sources.base import (
    BadFile,
    Chunks,
    File,
    Lru,
    RawSlice,
    ReadOptions,
    check_refused,
    make_chunks,
    missing_columns_error,
    no_rows_chunk,
    short_read,
)
from overlord.sources.mds_columns import column_type, table_of
from overlord.sources.mds_index import (
    NAME,
    REFUSED,
    MdsIndex,
    Shard,
    folder_of,
    index_paths,
    parse_encoding,
    parse_index,
)
from overlord.sources.mds_shard import (
    BrokenShard,
    PlainBytes,
    ShardBytes,
    check_codec,
    packed_bytes,
    read_offsets,
)

if TYPE_CHECKING:
    from overlord.sources.files import Files

MAX_INDEX = 2**30  # bytes of an index.json: that of a million shards has half as many
ABOVE = 2  # folders above the shards that may hold a merged index
_SHOWN = 5  # most missing files that an error names
_INDEXES: Lru[File, MdsIndex] = Lru(max_items=64, max_bytes=2**28)


class Mds:
    name = "mds"
    suffixes = tuple(f".mds{s}" for s in ("", ".zstd", ".gz", ".br", ".bz2", ".snappy"))
    indexed = False
    index_names = (NAME,)

    def data_files(self, files: Files, listed: Sequence[File]) -> tuple[File, ...]:
        known = {f.path: f for f in listed if not f.path.endswith(f"/{NAME}")}
        indexes = [f for f in listed if f.path.endswith(f"/{NAME}")] + (
            _indexes_of(files, list(known)) if known else []
        )
        found, missing, done = list[File](), list[str](), set[str]()
        for index in indexes:
            shards = [s for s in _index(files, index).shards if not done & {*s.paths}]
            done |= {path for shard in shards for path in shard.paths}
            absent = [s for s in shards if not known.keys() & {*s.paths}]
            here = files.lookup([path for shard in absent for path in shard.paths])
            missing += [s.paths[-1] for s in absent if not here.keys() & {*s.paths}]
            # A glob may select some of the shards; an index.json that is named selects all.
            if index in listed:
                known |= here
            existing = (next((p for p in s.paths if p in known), "") for s in shards)
            found += [replace(known[path], companion=index) for path in existing if path]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise BadFile(
                f"expected every shard of {NAME}, got no {', '.join(missing[:_SHOWN])}{more}",
                "copy the missing shards: without them samples would be lost",
            )
        if not found:
            raise BadFile(
                f"expected shards that {NAME} lists, got none",
                f"name the folder with {NAME}, or write the dataset again",
            )
        return tuple(found)

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        shard, packed = _shard(files, file)
        columns, names = shard.columns, _names(shard, options)
        if missing := [c for c in names if c not in columns.names]:
            types = dict(zip(columns.names, columns.texts, strict=True))
            raise missing_columns_error(missing, types)
        check_refused(columns.names, options)
        for name in names:
            text = columns.texts[columns.names.index(name)]
            if (kind := parse_encoding(text).kind) in ("", REFUSED):
                what = "a pickle, which could run code" if kind else f"the encoding {text!r:.60}"
                raise BadFile(
                    f"column {name!r}: expected a known encoding, got {what}",
                    "select the other columns (Select), or write this one in another encoding",
                )
        size = shard.packed_bytes if packed else shard.nbytes
        if file.size != size:
            raise BadFile(
                f"expected {size} bytes as in {NAME}, got {file.size}",
                "copy the shard again: it is truncated, or of another dataset",
            )
        if packed:
            check_codec(shard.compression)
        if not shard.samples:
            return no_rows_chunk()
        return make_chunks([(0, shard.samples, 0, shard.samples, shard.nbytes)])

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        columns = _shard(files, file)[0].columns
        types = {name: column_type(columns.encoding(name)) for name in columns.names}
        known = {name: str(kind) for name, kind in types.items() if kind is not None}
        return known if len(known) == len(types) else None

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        rows, nbytes = max(1, int(chunks.rows[i])), int(chunks.nbytes[i])
        return 8 * rows + nbytes * min(options.slice_rows, rows) // rows

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        if int(chunks.unit[i]) < 0:
            yield cols.no_rows(options, skip)
            return
        shard, packed = _shard(files, file)
        names, step, rows = _names(shard, options), options.slice_rows, shard.samples
        none, reason, done = cols.empty(0, names), "", min(skip * step, rows)
        if done == rows:
            yield cols.slice_of(rows, 0, none, [], True)
            return
        with ExitStack() as stack:
            handle = stack.enter_context(files.open(file, [(0, file.size)]))
            data: ShardBytes = (
                packed_bytes(handle, file.size, shard) if packed else PlainBytes(handle)
            )
            try:
                offsets = read_offsets(data, shard)
                while done < rows:
                    edges = offsets[done : min(done + step, rows) + 1]
                    table, bad = _rows(data, edges, shard, names, options.max_sample_bytes)
                    n, done = len(edges) - 1, done + len(edges) - 1
                    yield cols.slice_of(done - n, n, table, bad, done == rows)
            except BrokenShard as error:
                reason = str(error)
        # The number of rows is known, so rows that cannot be read are accounted for one by one.
        for at in range(done, rows, step):
            n = min(step, rows - at)
            yield cols.unreadable_slice(at, n, none, reason, at + n == rows)


def _rows(
    data: ShardBytes, edges: np.ndarray, shard: Shard, names: Sequence[str], limit: int
) -> tuple[pa.Table, cols.BadRows]:
    """Return consecutive samples as a table, and those that are not in it; long ones are not read.

    Raises BrokenShard.
    """
    sizes = edges[1:] - edges[:-1]
    long = np.flatnonzero(sizes > limit).tolist()
    runs, at = [], 0
    for stop in [*long, len(sizes)]:
        if stop > at:
            runs.append((at, stop))
        at = stop + 1
    pieces = [data.read(int(edges[a]), int(edges[b])) for a, b in runs]
    kept = np.delete(np.arange(len(sizes)), long)
    some = np.zeros(len(kept) + 1, np.int64)
    np.cumsum(sizes[kept], out=some[1:])
    text = pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.uint8), *pieces])
    table, bad = table_of(text, some, shard.columns, names)
    left = np.delete(kept, [i for i, _ in bad])
    table, invalid = cols.without_invalid_rows(table, limit)
    reasons = {int(kept[i]): reason for i, reason in bad}
    reasons |= {int(left[i]): reason for i, reason in invalid}
    reasons |= {i: cols.too_large(int(sizes[i]), limit) for i in long}
    return table, sorted(reasons.items())


def _names(shard: Shard, options: ReadOptions) -> tuple[str, ...]:
    return shard.columns.names if options.columns is None else options.columns


def _indexes_of(files: Files, paths: list[str]) -> list[File]:
    """Return the indexes that list shards, those nearest to the root first. Raises BadFile.

    An index of a folder is not read if one above it lists all of its shards.
    """
    candidates, left, found = index_paths(paths), set(paths), list[File]()
    for path in candidates:
        below = f"{folder_of(path)}/"
        if not any(p.startswith(below) for p in left):
            continue
        if (index := files.lookup([path]).get(path)) is not None:
            found.append(index)
            left -= _index(files, index).by_path.keys()
    top = folder_of(candidates[0])
    for _ in range(ABOVE if not found else 0):
        top = folder_of(top)
        if top and (index := files.lookup([f"{top}/{NAME}"]).get(f"{top}/{NAME}")) is not None:
            return [index]
    if not found:
        raise BadFile(
            f"expected {NAME} next to the shards of an MDS dataset, got no {candidates[0]}",
            f"copy it, or name the folder above with a merged {NAME}",
        )
    return found


def _index(files: Files, file: File) -> MdsIndex:
    """Return the parsed index of a dataset. Raises BadFile."""
    if (index := _INDEXES.get(file)) is not None:
        return index
    if file.size > MAX_INDEX:
        raise BadFile(
            f"{file.path}: expected at most {MAX_INDEX} bytes, got {file.size}",
            "split the dataset into several",
        )
    with files.open(file, [(0, file.size)]) as handle:
        data = handle.read(file.size)
    if len(data) < file.size:
        raise short_read(file.size - len(data))
    try:
        index = parse_index(bytes(data), folder_of(file.path))
    except BadFile as error:
        raise BadFile(f"{file.path}: {error.problem}", error.remedy) from error
    _INDEXES.put(file, index, 2 * file.size)
    return index


def _shard(files: Files, file: File) -> tuple[Shard, bool]:
    """Return the shard of a file, and whether the file is the compressed one."""
    assert file.companion is not None, f"expected the {NAME} of {file.path}, got none"
    shard = _index(files, file.companion).by_path[file.path]
    return shard, file.path != shard.raw
