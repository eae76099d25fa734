"""Files with the same rows in every format, for tests."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
FORMATS = tuple(SUFFIX)
# Formats whose values are all text: read by the laws of tests/properties/test_sources_text.py.
TEXT_FORMATS = tuple(
    name + packed
    for name in ("csv", "tsv", "lines", "paragraphs")
    for packed in ("", ".gz", ".zst")
)
TEXT_SUFFIX = {"csv": ".csv", "tsv": ".tsv", "lines": ".txt", "paragraphs": ".txt", "text": ".txt"}


def write_rows(
    directory: str | Path, format: str, rows: Sequence[dict[str, Any]], files: int = 2, **kw: Any
) -> str:
    """Write rows in order into ``files`` files of equal size, and return their glob.

    ``row_group_size`` is for parquet, ``batch_rows`` for arrow. In a tar every value becomes a
    member ``<row number>.<column>``, text as UTF-8 and anything else as JSON.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    share = -(-len(rows) // files) if rows else 0
    kw = {
        "schema": pa.Table.from_pylist(list(rows)).schema
        if format in ("parquet", "arrow", "arrow-stream")
        else None
    } | kw
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


def _as_bytes(value: Any) -> bytes:
    return (
        value.encode()
        if isinstance(value, str)
        else value
        if isinstance(value, bytes)
        else json.dumps(value).encode()
    )
