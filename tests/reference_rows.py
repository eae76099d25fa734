"""Raw rows of files and ids of rows, for the reference stream, without code of the package.

Damaged containers (a truncated .gz, a flipped page) are left to the tests of the formats.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import tarfile
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from overlord.job.job import Job, Source
from tests.reference_groups import FAILED, grouped, weighted

Row = tuple[int, Any]  # `row`, and the fields by name; None: unreadable
Chunk = tuple[int, list[Row]]  # file, rows
DROPPED = "dropped"


# Files


def list_files(path: Any) -> list[str]:
    if isinstance(path, (list, tuple)):
        return sorted({file for one in path for file in list_files(one)})
    path = os.fspath(path).removeprefix("file://")
    if os.path.isdir(path):
        path = os.path.join(glob.escape(path), "**")
    return sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))


def read_chunks(job: Job, source: Source) -> list[Chunk]:
    path = source.uri
    if hasattr(path, "shards"):
        return [(shard, list(enumerate(path.fn(shard)))) for shard in range(path.shards)]
    if not isinstance(path, (str, os.PathLike, list, tuple)):
        size = 16 * job.slice_rows
        return [
            (0, [(i, item(path, i)) for i in range(at, min(at + size, len(path)))])
            for at in range(0, len(path), size)
        ]
    return [
        (file, rows)
        for file, name in enumerate(list_files(path))
        for rows in chunks_of_file(job, source, name)
    ]


def chunk_sizes(job: Job, source: Source) -> list[int] | None:
    """Return the bytes of each chunk in its file; None if every chunk has a known number of rows.

    Shards of a factory have one byte each.
    """
    path = source.uri
    if hasattr(path, "shards"):
        return [1] * path.shards
    files = list_files(path) if isinstance(path, (str, os.PathLike, list, tuple)) else []
    if not files or any(".mds" in f or f.endswith((".parquet", ".bin")) for f in files):
        return None
    sizes = []
    for name in files:
        size = os.path.getsize(name)
        lines = source.format == "lines" or name.endswith(".jsonl")
        step = job.chunk_bytes if lines and not name.endswith((".gz", ".zst")) else size
        sizes += [min(step, size - at) for at in range(0, size, step)] if size else [0]
    return sizes


def item(dataset: Any, i: int) -> Any:
    try:
        return dict(dataset[i])
    except Exception:
        return None


def chunks_of_file(job: Job, source: Source, name: str) -> list[list[Row]]:
    with open(name, "rb") as f:
        data = f.read()
    chunks = chunks_of_bytes(job, source, name, data) if data else []
    return chunks if any(chunks) or (name.endswith(".jsonl") and data) else [[(0, None)]]


def chunks_of_bytes(job: Job, source: Source, name: str, data: bytes) -> list[list[Row]]:
    kind = source.format or name.removesuffix(".gz").removesuffix(".zst").rsplit(".", 1)[-1]
    if kind in ("parquet", "pq"):
        import pyarrow.parquet as pq

        file, at, out = pq.ParquetFile(name), 0, []
        for g in range(file.num_row_groups):
            rows = file.read_row_group(g).to_pylist()
            out.append(list(enumerate(rows, at)))
            at += len(rows)
        return out
    if kind in ("arrow", "feather", "ipc"):
        return [list(enumerate(read_arrow(name).to_pylist()))]
    if kind in ("tar", "webdataset"):
        return [read_tar(name, source.max_sample_bytes)]
    if ".mds" in name:
        return [read_mds(name, data)]
    if kind == "bin":
        return read_megatron(name, data, job.chunk_bytes)
    if kind in ("csv", "tsv"):
        return [read_table(unpack(name, data), "," if kind == "csv" else "\t")]
    if kind in ("paragraphs", "text"):
        return [read_texts(unpack(name, data), b"\n\n" if kind == "paragraphs" else None)]
    lines = (
        read_texts(unpack(name, data), b"\n")
        if kind == "lines"
        else read_lines(unpack(name, data), source.max_sample_bytes)
    )
    if name.endswith((".gz", ".zst")):
        return [lines]
    out = [[] for _ in range(0, len(data), job.chunk_bytes)]
    for row, fields in lines:
        out[row // job.chunk_bytes].append((row, fields))
    return out


def read_megatron(name: str, data: bytes, chunk_bytes: int) -> list[list[Row]]:
    """Return the documents of a Megatron dataset, by the range of bytes in which they start."""
    with open(name.removesuffix(".bin") + ".idx", "rb") as f:
        head = f.read(34)
        n, m = np.frombuffer(head[18:], "<u8").tolist()
        lengths, starts, edges = (
            np.frombuffer(f.read(k * np.dtype(d).itemsize), d).tolist()
            for k, d in ((n, "<i4"), (n, "<i8"), (m, "<i8"))
        )
    dtype = np.dtype({4: "<i4", 8: "<u2"}[head[17]])
    out: dict[int, list[Row]] = {}
    for row, (a, b) in enumerate(pairwise(edges)):
        at = starts[a] if a < n else len(data)
        size = dtype.itemsize * sum(lengths[a:b])
        tokens = np.frombuffer(data[at : at + size], dtype).tolist()
        out.setdefault(min(at, len(data) - 1) // chunk_bytes, []).append((row, {"tokens": tokens}))
    return [out[k] for k in sorted(out)]


def read_mds(name: str, data: bytes) -> list[Row]:
    """Return the samples of a shard, whose columns the index of its folder lists."""
    with open(os.path.join(os.path.dirname(name), "index.json")) as f:
        (shard,) = (
            s for s in json.load(f)["shards"] if s["raw_data"]["basename"] in os.path.basename(name)
        )
    if name.endswith(".zstd"):
        import zstandard

        data = zstandard.ZstdDecompressor().decompress(data)
    edges = np.frombuffer(data[4 : 4 * (shard["samples"] + 2)], "<u4").tolist()
    rows: list[Row] = []
    for a, b in pairwise(edges):
        sample, fields = data[a:b], {}
        columns = zip(shard["column_names"], shard["column_encodings"], strict=True)
        at = 4 * shard["column_sizes"].count(None)
        sizes = iter(np.frombuffer(sample[:at], "<u4").tolist())
        for column, encoding in columns:
            size = 8 if encoding == "int" else next(sizes)
            fields[column] = mds_value(encoding, sample[at : at + size])
            at += size
        rows.append((len(rows), fields))
    return rows


def mds_value(encoding: str, value: bytes) -> Any:
    if encoding == "int":
        return int.from_bytes(value, "little", signed=True)
    if encoding == "ndarray:int32":
        return np.frombuffer(value[3 if value[0] & 1 else 2 :], "<i4").tolist()
    return value.decode() if encoding == "str" else json.loads(value)


def unpack(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.decompress(data)
    if name.endswith(".zst"):
        import zstandard

        return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    return data


def read_lines(text: bytes, max_bytes: int) -> list[Row]:
    rows, at = [], 0
    for line in text.split(b"\n"):
        if line.strip():
            rows.append((at, parse(line) if len(line) <= max_bytes else None))
        at += len(line) + 1
    return rows


def read_texts(text: bytes, separator: bytes | None) -> list[Row]:
    """Return the texts between separators; all of it without a separator."""
    rows, at = [], 0
    for part in [text] if separator is None else text.split(separator):
        if part.strip():
            rows.append((at, {"text": part.decode()}))
        at += len(part) + len(separator or b"")
    return rows


def read_table(text: bytes, delimiter: str) -> list[Row]:
    """Return the rows of a table with a header; a row ends at a line break outside quotes."""
    found, start = [], 0
    for at in (k for k, byte in enumerate(text) if byte == ord("\n")):
        if text[start:at].count(b'"') % 2 == 0:
            line = io.StringIO(text[start:at].decode(), newline="")
            found.append((start, next(csv.reader(line, delimiter=delimiter))))
            start = at + 1
    (_, names), *rows = found
    return [(row, dict(zip(names, fields, strict=True))) for row, fields in rows]


def parse(line: bytes) -> Any:
    try:
        fields = json.loads(line.decode())
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def read_arrow(name: str) -> Any:
    import pyarrow as pa

    try:
        return pa.ipc.open_file(pa.memory_map(name)).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_stream(pa.memory_map(name)).read_all()


def read_tar(name: str, max_bytes: int) -> list[Row]:
    """Return the samples of a tar. Consecutive members with one key are a sample, with one field
    for each extension. A key is the path up to the first dot of its last component.
    """
    rows, last = [], None
    with tarfile.open(name) as tar:
        for member in tar:
            if member.isfile():
                folder, base = os.path.split(member.name)
                stem, _, extension = base.partition(".")
                if (key := os.path.join(folder, stem)) != last:
                    rows.append((member.offset, {"__key__": key}))
                    last = key
                rows[-1][1][extension] = tar.extractfile(member).read()  # type: ignore[union-attr]
    size = [sum(len(v) for k, v in fields.items() if k != "__key__") for _, fields in rows]
    return [
        (row, fields if n <= max_bytes else None)
        for (row, fields), n in zip(rows, size, strict=True)
    ]


# Transforms, on one slice


def transform(source: Source, rows: list[Row]) -> list[Any]:
    """Return the token ids of each row, or FAILED, or DROPPED."""
    live = {i: dict(fields) for i, (_, fields) in enumerate(rows) if fields is not None}
    outcome: list[Any] = [FAILED] * len(rows)
    for step in source.transforms:
        results = apply(step, list(live.values()))
        for i, result in zip(list(live), results, strict=True):
            if isinstance(result, dict):
                live[i] = result
            else:
                outcome[i] = result
                del live[i]
    for i, fields in live.items():
        outcome[i] = fields.get("documents") or ids(fields.get("tokens"))
    return outcome


def apply(step: Any, rows: list[dict[str, Any]]) -> list[Any]:
    """Apply one transform: return new fields by row, or FAILED, or DROPPED."""
    kind = type(step).__name__
    if kind in ("Pair", "Group"):
        return [grouped(step, fields) for fields in rows]
    if kind == "Tokens" and rows and "documents" in rows[0]:
        return [weighted(step, fields) for fields in rows]
    if kind == "Tokens":
        return [
            {**fields, "tokens": fields.get(step.column)}
            if step.loss is None or are_weights(fields.get(step.loss), fields.get(step.column))
            else FAILED
            for fields in rows
        ]
    if kind == "Tokenize":
        return [tokenize(step, fields) for fields in rows]
    if kind == "Select":
        return [{name: fields.get(name) for name in step.columns} for fields in rows]
    if kind == "Meta" and isinstance(step.value, str):
        return [fields if is_meta(fields.get(step.value)) else FAILED for fields in rows]
    if kind == "Meta" or not rows:
        return list(rows)
    try:
        result = (
            [step.fn(dict(fields)) for fields in rows] if step.rows else step.fn(columns_of(rows))
        )
    except Exception:  # find the rows that fail by themselves
        return (
            [FAILED]
            if len(rows) == 1
            else [result for fields in rows for result in apply(step, [fields])]
        )
    if kind == "Filter":
        return [fields if keep else DROPPED for fields, keep in zip(rows, result, strict=True)]
    return (
        result
        if step.rows
        else [
            dict(zip(result, values, strict=True)) for values in zip(*result.values(), strict=True)
        ]
    )


def are_weights(weights: Any, tokens: Any) -> bool:
    """Return whether a list has a finite weight of at least 0 for each token."""
    if not isinstance(weights, list) or len(weights) != len(tokens or []):
        return False
    most = float(np.finfo(np.float32).max)
    return all(w is not None and 0 <= w <= most for w in weights)


def is_meta(value: Any) -> bool:
    """Return whether a value is a number, or a list of numbers that are not negative."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return all(v is not None and is_meta(v) and v >= 0 for v in value)
    return isinstance(value, (int, float, np.number)) and bool(np.isfinite(value))


def columns_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {
        name: [fields.get(name) for fields in rows]
        for name in dict.fromkeys(name for fields in rows for name in fields)
    }
    numbers = {
        name
        for name, values in columns.items()
        if all(isinstance(v, (int, float, np.number)) for v in values)
    }
    return {
        name: np.array(values) if name in numbers else values for name, values in columns.items()
    }


@cache
def load_tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenize(step: Any, fields: dict[str, Any]) -> Any:
    text = fields.get(step.text)
    try:
        text = text.decode() if isinstance(text, bytes) else text
    except ValueError:
        return FAILED
    if not isinstance(text, str):
        return FAILED
    tokenizer = load_tokenizer(os.fspath(step.tokenizer))
    ends = [
        [] if t is None else [tokenizer.token_to_id(t) if isinstance(t, str) else t]
        for t in (step.bos, step.eos)
    ]
    return {
        **fields,
        "tokens": ends[0]
        + tokenizer.encode(text, add_special_tokens=step.add_special_tokens).ids
        + ends[1],
    }


def ids(value: Any) -> Any:
    """Return a flat list of integers from 0 to 2**31 - 1, or FAILED."""
    try:
        values = list(value)
    except TypeError:
        return FAILED
    good = all(
        isinstance(v, (int, np.integer)) and not isinstance(v, bool) and 0 <= v < 2**31
        for v in values
    )
    return [int(v) for v in values] if good and not isinstance(value, (str, bytes)) else FAILED
