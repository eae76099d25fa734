"""Describe data without a job, for ``overlord inspect``: columns, rows and a suggested job file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from overlord.discovery.column_roles import IDS
from overlord.errors import SourceError
from overlord.sources.base import TEXTS, ReadOptions, chat_column, text_columns, tokenize_hint
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.formats import SUFFIXES
from overlord.sources.index import build_index, default_cache_dir
from overlord.sources.mds_index import NAME as MDS_INDEX
from overlord.sources.megatron import TOKENS
from overlord.sources.tables import MIXED, type_name
from overlord.uris import is_uri, scrub

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDE = 60  # most characters of a value in a table
PAIR = ("chosen", "rejected")  # usual names of preference data
JOB_FILES = (".yaml", ".yml", ".json")
GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Properties of data without a job: files, size, columns and first row."""

    uri: str
    name: str
    format: str
    files: int
    chunks: int
    rows: int | None  # None: unknown until read
    nbytes: int
    schema: Mapping[str, str]
    first: Mapping[str, Any]  # the first row; empty without rows
    bad: tuple[str, ...] = ()  # reasons of rows of the first slice that cannot be read


def is_data(what: str) -> bool:
    """Return whether an argument names data and not a job file."""
    # An existing job file has precedence, even if its name contains * or ?.
    if os.path.basename(what) == MDS_INDEX:
        return True
    if what.lower().endswith(JOB_FILES) and os.path.isfile(what):
        return False
    if is_uri(what) or os.path.isdir(what) or GLOB.search(what):
        return True
    return what.lower().endswith(SUFFIXES) and not what.lower().endswith(JOB_FILES)


def inspect_data(uri: str) -> DataReport:
    """Return the files, columns and first row of data.

    Raise ``SourceError`` for data without readable rows and without a schema.
    """
    path = Path(uri.partition("?")[0].rstrip("/"))
    path = path.parent if path.name == MDS_INDEX else path
    name = re.sub(r"\W+", "-", path.name.split(".")[0]).strip("-") or "data"
    options = ReadOptions(lengths_only=True)
    index = build_index(name, uri, None, options, cache_dir=default_cache_dir())
    cache = OpenChunkCache(max_open=1)
    try:
        raw = ChunkReader(index, options, cache).slice(0, 0)
    finally:
        cache.close()
    table = raw.table
    first = table.slice(0, 1).to_pylist()[0] if table.num_rows else {}
    if raw.blank and first:
        first[TOKENS] = f"{len(first[TOKENS]):,} ids"
    if not table.num_rows and index.schema is None:
        raise SourceError(
            name,
            "expected rows, got none that can be read",
            scrub(uri),
            "check the format and the first lines of the file",
        )
    return DataReport(
        uri=uri,
        name=name,
        format=index.format,
        files=len(index.files),
        chunks=len(index.chunks),
        rows=index.rows,
        nbytes=index.nbytes,
        schema=dict(index.schema or {field.name: type_name(field.type) for field in table.schema}),
        first=first,
        bad=tuple(dict.fromkeys(reason for _, reason in raw.bad)),
    )


def job_text(report: DataReport) -> str:
    """Return a job file for the data, with transforms for its ids, messages or text."""
    ids = _ids_column(report.schema)
    text = next(iter(text_columns(report.schema)), None)
    source: dict[str, Any] = {
        "uri": scrub(report.uri) if is_uri(report.uri) else os.path.abspath(report.uri)
    }
    if (grouped := pair_transforms(report.schema)) is not None:
        source["transforms"] = grouped
    elif ids is not None:
        source["transforms"] = [{"tokens": {"column": ids}}]
    elif (chats := chat_column(report.schema)) is not None:
        source["transforms"] = [{"chat": {"tokenizer": "tokenizer", "messages": chats}}]
    elif text is not None:
        source["transforms"] = [{"tokenize": {"tokenizer": "tokenizer.json", "text": text}}]
    job = {
        "name": report.name,
        "sources": {report.name: source},
        "batch": {"samples": 64, "context": 2048},
    }
    return yaml.safe_dump(job, sort_keys=False, allow_unicode=True, width=120)


def pair_transforms(schema: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Return the transforms of preference data; None without columns chosen and rejected."""
    kinds = [_content(schema.get(name, "")) for name in PAIR]
    if kinds[0] is None or kinds[0] != kinds[1]:
        return None
    pair: dict[str, Any] = {"chosen": PAIR[0], "rejected": PAIR[1]}
    # the prompt of conversations may be a text
    if _content(schema.get("prompt", "")) in (kinds[0], "tokenize" if kinds[0] == "chat" else None):
        pair["prompt"] = "prompt"
    encode: dict[str, dict[str, Any]] = {
        "tokenize": {"tokenizer": "tokenizer.json"},
        "chat": {"tokenizer": "tokenizer"},
        "tokens": {},
    }
    return [{"pair": pair}, {kinds[0]: encode[kinds[0]]}]


def _content(kind: str) -> str | None:
    """Return the transform that reads a column of a type: texts, conversations or ids."""
    if kind in ("string", "large_string"):
        return "tokenize"
    if "list" in kind and "struct" in kind:
        return "chat"
    return "tokens" if "list" in kind and "int" in kind else None


def _ids_column(schema: Mapping[str, str]) -> str | None:
    """Return the column of token ids; None if there is none.

    The column has one of the names in ``IDS``, and holds lists of whole numbers. A column of values
    of several types is accepted too, and checked when it is read.
    """
    kinds = {name: schema[name] for name in IDS if name in schema}
    return next(
        (
            name
            for name, kind in kinds.items()
            if kind == type_name(MIXED) or ("int" in kind and "list" in kind)
        ),
        None,
    )


def remarks(report: DataReport) -> list[str]:
    """Return remarks on the suggested job file: changes that the user still has to make."""
    tokens = _ids_column(report.schema) is not None
    found = []
    if (grouped := pair_transforms(report.schema)) is not None:
        found.append(
            "chosen and rejected are a pair: both stay in one microbatch (documentation: 'Pairs "
            "and groups')"
        )
        if "tokenize" in grouped[1]:
            found.append("replace tokenizer.json by the tokenizer of your model; set its eos")
        elif "chat" in grouped[1]:
            found.append("replace tokenizer by the folder of your model's tokenizer")
    elif not tokens and chat_column(report.schema):
        found.append("replace tokenizer by the folder of your model's tokenizer, with its template")
    elif not tokens and text_columns(report.schema):
        found.append("replace tokenizer.json by the tokenizer of your model")
    elif not tokens:
        found.append(
            f"no column of text, messages or token ids was recognised; {_remedy(report.schema)}"
        )
    if images := [
        name
        for name, kind in report.schema.items()
        if "binary" in kind and name not in ("json", *TEXTS)
    ]:
        found.append(f"{', '.join(images)}: bytes; Images reads images (documentation: 'Images')")
    return found


def defects(report: DataReport) -> list[str]:
    """Return the reasons why a job cannot use the data as they are."""
    found = [f"a row cannot be read: {reason}" for reason in report.bad]
    schema = report.schema
    usable = _ids_column(schema) or chat_column(schema) or text_columns(schema)
    if not usable and pair_transforms(schema) is None:
        found.append(f"no column of text, messages or token ids was recognised; {_remedy(schema)}")
    return found


def _remedy(schema: Mapping[str, str]) -> str:
    """Return what to do with data of which no column was recognised."""
    hint = tokenize_hint(["tokens"], schema)
    return hint or "a Map must return 'tokens' (documentation: 'Sources')"


def data_document(report: DataReport) -> dict[str, Any]:
    """Return the report as a JSON document."""
    return {
        "name": report.name,
        "uri": scrub(report.uri),
        "format": report.format,
        "files": report.files,
        "chunks": report.chunks,
        "rows": report.rows,
        "bytes": report.nbytes,
        "columns": report.schema,
        "first": {name: _short_text(value) for name, value in report.first.items()},
        "remarks": remarks(report),
        "warnings": defects(report),
        "job": job_text(report),
    }


def data_view(report: DataReport) -> RenderableType:
    """Return tables of files and of columns with the first row, and a suggested job file."""
    from rich.console import Group
    from rich.text import Text

    from overlord.observe.tables import grid, size
    from overlord.observe.terminal_text import one_line, printable

    rows = "unknown until read" if report.rows is None else f"{report.rows:,}"
    head = grid(
        ("data", "format", "files", "chunks", "rows", "bytes"),
        [
            (
                report.name,
                report.format,
                f"{report.files:,}",
                f"{report.chunks:,}",
                rows,
                size(report.nbytes),
            )
        ],
        2,
    )
    columns = grid(
        ("column", "type", "first row"),
        [(n, kind, _short_text(report.first.get(n))) for n, kind in report.schema.items()],
        3,
    )
    remarked = [Text(one_line(f"  {remark}")) for remark in remarks(report)]
    return Group(
        head,
        Text(""),
        columns,
        Text(""),
        Text("`overlord init` writes a complete job file, and previews the data", "dim"),
        Text("a job file for it:", style="bold"),
        *remarked,
        Text(""),
        Text(printable(job_text(report))),
    )


def _short_text(value: Any) -> str:
    text = f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)
    return text if len(text) <= WIDE else text[: WIDE - 3] + "..."
