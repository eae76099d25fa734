"""Files with the same rows in every format, for tests."""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SUFFIX = {
    "parquet": ".parquet",
    "jsonl": ".jsonl",
    "jsonl.gz": ".jsonl.gz",
    "jsonl.zst": ".jsonl.zst",
    "tar": ".tar",
    "arrow": ".arrow",
    "arrow-stream": ".arrow",
}
FORMATS = tuple(SUFFIX)  # formats that hold any columns
INDEXED_FORMATS = ("mds", "mds.zstd")  # the same, where an index lists the files
TOKEN_FORMATS = ("megatron", "megatron.modes")  # formats that hold the column ``tokens`` alone
SUFFIX |= {"megatron": ".bin", "megatron.modes": ".bin", "mds": ".mds", "mds.zstd": ".mds.zstd"}
# Formats whose values are all text: read by the laws of tests/properties/test_sources_text.py.
TEXT_FORMATS = tuple(
    name + packed
    for name in ("csv", "tsv", "lines", "paragraphs")
    for packed in ("", ".gz", ".zst")
)
# Those of them in which a row is a text of JSON, for the laws of all rows.
JSON_TEXTS = ("csv", "tsv.gz", "lines", "lines.zst", "paragraphs", "text")
TEXT_SUFFIX = {"csv": ".csv", "tsv": ".tsv", "lines": ".txt", "paragraphs": ".txt", "text": ".txt"}


def write_rows(
    directory: str | Path, format: str, rows: Sequence[dict[str, Any]], files: int = 2, **kw: Any
) -> str:
    """Write rows in order into ``files`` files of equal size, and return their glob.

    ``row_group_size`` is for parquet, ``batch_rows`` for arrow. In a tar every value becomes a
    member ``<row number>.<column>``, text as UTF-8 and anything else as JSON. In a format of text
    the column ``text`` is the row as JSON, with line breaks where the format has some in a value.
    """
    if format in JSON_TEXTS:
        indent = None if format.startswith("lines") else 1
        texts = [json.dumps(row, indent=indent) for row in rows]
        return write_texts(directory, format, texts, len(rows) if format == "text" else files)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    share = -(-len(rows) // files) if rows else 0
    kw = {
        "schema": pa.Table.from_pylist(list(rows)).schema
        if format in ("parquet", "arrow", "arrow-stream")
        else None
    } | kw
    if format in INDEXED_FORMATS:
        shares = [rows[k * share : (k + 1) * share] for k in range(files)]
        write_mds(directory, shares, format.partition(".")[2], **kw)
        return str(directory / f"*{SUFFIX[format]}")
    for k in range(files):
        path = directory / f"part-{k:05d}{SUFFIX[format]}"
        _write(path, format, rows[k * share : (k + 1) * share], k * share, kw)
    return str(directory / f"*{SUFFIX[format]}")


def _write(
    path: Path, format: str, rows: Sequence[dict[str, Any]], first: int, kw: dict[str, Any]
) -> None:
    if format == "parquet":
        table = pa.Table.from_pylist(list(rows), schema=kw["schema"])
        pq.write_table(
            table,
            path,
            row_group_size=kw.get("row_group_size", 1000),
            compression=kw.get("compression", "snappy"),
        )
    elif format in ("arrow", "arrow-stream"):
        table = pa.Table.from_pylist(list(rows), schema=kw["schema"])
        make = pa.ipc.new_file if format == "arrow" else pa.ipc.new_stream
        with make(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=kw.get("batch_rows", 1000))
    elif format == "tar":
        write_tar(
            path,
            [
                (f"{first + i:08d}.{c}", _as_bytes(v))
                for i, row in enumerate(rows)
                for c, v in row.items()
            ],
            **kw,
        )
    elif format in TOKEN_FORMATS:
        documents = [split_document(first + i, row["tokens"]) for i, row in enumerate(rows)]
        given = {k: v for k, v in kw.items() if k == "dtype"}
        if format == "megatron.modes":
            given = {
                "dtype": "int32",
                "modes": [k % 3 - 1 for k in range(sum(map(len, documents)))],
            }
        write_megatron(path, documents, **given)
    else:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        path.write_bytes(pack(text, format))


def pack(text: bytes, format: str) -> bytes:
    """Return text as it is stored in a file of a format of lines."""
    if format.endswith(".gz"):
        return gzip.compress(text, mtime=0)
    if format.endswith(".zst"):
        import zstandard

        return zstandard.ZstdCompressor().compress(text)
    return text


def write_texts(directory: str | Path, format: str, texts: Sequence[str], files: int = 1) -> str:
    """Write texts as rows of the column ``text`` of a format of text, and return their glob.

    In a table each text has its number next to it, as the column ``id``.
    """
    kind, _, packed = format.partition(".")
    suffix = TEXT_SUFFIX[kind] + ("." + packed if packed else "")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    share = -(-len(texts) // files)
    for k in range(files):
        out, part = io.StringIO(newline=""), texts[k * share : (k + 1) * share]
        if kind in ("csv", "tsv"):
            table = csv.writer(out, delimiter="," if kind == "csv" else "\t")
            table.writerows([("id", "text"), *((i + k * share, t) for i, t in enumerate(part))])
        else:
            out.write(("\n\n" if kind == "paragraphs" else "\n").join(part))
        path = directory / f"part-{k:05d}{suffix}"
        path.write_bytes(pack(out.getvalue().encode(), format))
    return str(directory / f"*{suffix}")


def write_tar(
    path: str | Path,
    members: Sequence[tuple[str, bytes]],
    tar_format: int = tarfile.PAX_FORMAT,
    **_: Any,
) -> None:
    with tarfile.open(path, "w", format=tar_format) as out:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))


def mds_value(encoding: str, value: Any) -> bytes:
    if encoding == "int":
        return struct.pack("<q", value)
    if encoding == "ndarray:int32":
        values = np.array(value, "<i4")
        head = (1 << 2) | (len(values) > 255)
        return bytes([head]) + len(values).to_bytes(1 + (head & 1), "little") + values.tobytes()
    return value.encode() if encoding == "str" else json.dumps(value).encode()


def mds_encodings(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    kinds = {int: "int", str: "str"}
    return {
        name: "ndarray:int32" if name == "tokens" else kinds.get(type(rows[0][name]), "json")
        for name in sorted(rows[0])
    }


def mds_shard(rows: Sequence[dict[str, Any]], encodings: dict[str, str]) -> bytes:
    """Return a shard as MDSWriter writes it."""
    samples = []
    for row in rows:
        values = [mds_value(kind, row[name]) for name, kind in encodings.items()]
        varies = [kind != "int" for kind in encodings.values()]
        sizes = [len(v) for v, vary in zip(values, varies, strict=True) if vary]
        samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values))
    config = json.dumps({"column_encodings": list(encodings.values())}).encode()
    edges = np.cumsum([4 * (len(rows) + 2) + len(config), *map(len, samples)]).astype("<u4")
    return struct.pack("<I", len(rows)) + edges.tobytes() + config + b"".join(samples)


def write_mds(
    directory: Path, shares: Sequence[Sequence[dict[str, Any]]], packed: str = "", **_: Any
) -> None:
    """Write one shard for each share of the rows, and the index of all."""
    encodings = mds_encodings(next((rows for rows in shares if rows), [{}]))
    shards: list[dict[str, Any]] = []
    for k, rows in enumerate(shares):
        data, name = mds_shard(rows, encodings), f"part-{k:05d}.mds"
        shards.append(
            {
                "version": 2,
                "format": "mds",
                "samples": len(rows),
                "column_names": list(encodings),
                "column_encodings": list(encodings.values()),
                "column_sizes": [8 if kind == "int" else None for kind in encodings.values()],
                "compression": packed or None,
                "hashes": [],
                "size_limit": None,
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "zip_data": None,
            }
        )
        if packed:
            import zstandard

            data, name = zstandard.ZstdCompressor().compress(data), f"{name}.{packed}"
            shards[-1]["zip_data"] = {"basename": name, "bytes": len(data), "hashes": {}}
        (directory / name).write_bytes(data)
    (directory / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


MEGATRON_CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}


def split_document(k: int, tokens: Sequence[int]) -> list[list[int]]:
    """Return the sequences of document k: one for most, several for some, none for some empty."""
    size = (len(tokens), 7, 1)[k % 3] or 1
    return [list(tokens[a : a + size]) for a in range(0, len(tokens), size)] or [[]][: k % 2]


def write_megatron(
    path: str | Path,
    documents: Sequence[Sequence[Sequence[int]]],
    dtype: str = "uint16",
    modes: Sequence[int] | None = None,
) -> None:
    """Write a ``.bin`` and its ``.idx``; a document is a list of sequences."""
    sequences = [s for document in documents for s in document]
    lengths = np.array([len(s) for s in sequences], "<i4")
    item = np.dtype(dtype).itemsize
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * item
    edges = np.cumsum([0, *map(len, documents)])
    Path(path).write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    head = b"MMIDIDX\0\0" + struct.pack(
        "<QBQQ", 1, MEGATRON_CODES[dtype], len(sequences), len(edges)
    )
    parts = [lengths, starts.astype("<i8"), edges.astype("<i8"), np.array(modes or [], "i1")]
    Path(path).with_suffix(".idx").write_bytes(head + b"".join(p.tobytes() for p in parts))


def _as_bytes(value: Any) -> bytes:
    return (
        value.encode()
        if isinstance(value, str)
        else value
        if isinstance(value, bytes)
        else json.dumps(value).encode()
    )
