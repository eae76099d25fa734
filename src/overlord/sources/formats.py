"""Table of the known formats, and lookup by name and by file suffix."""

from __future__ import annotations

from collections.abc import Sequence

from overlord.errors import SourceError
from overlord.sources.arrow import Arrow
from overlord.sources.base import File, FileSet, Format
from overlord.sources.csv_rows import Csv
from overlord.sources.jsonl import Jsonl
from overlord.sources.mds import Mds
from overlord.sources.megatron import Megatron
from overlord.sources.parquet import Parquet
from overlord.sources.python_objects import DatasetFormat, FactoryFormat
from overlord.sources.text import Text
from overlord.sources.webdataset import WebDataset

_TABLES = (
    Csv("csv", ","),
    Csv("csv-no-header", ",", header=False),
    Csv("csv-semicolon", ";"),
    Csv("csv-semicolon-no-header", ";", header=False),
    Csv("csv-pipe", "|"),
    Csv("csv-pipe-no-header", "|", header=False),
    Csv("tsv", "\t", suffix=".tsv"),
    Csv("tsv-no-header", "\t", header=False, suffix=".tsv"),
)
_TEXTS = (Text("lines", "line"), Text("paragraphs", "paragraph"), Text("text", "file"))
_ALL: tuple[Format, ...] = (
    Parquet(),
    Jsonl(),
    WebDataset(),
    Arrow(),
    Megatron(),
    Mds(),
    *_TABLES,
    *_TEXTS,
    DatasetFormat(),
    FactoryFormat(),
)
FORMATS: dict[str, Format] = {f.name: f for f in _ALL}
# Formats with a file that lists the data files. A check of a protocol is slow: not once per source.
_FILE_SETS = tuple(f for f in _ALL if isinstance(f, FileSet))
ALIASES = {"webdataset": "tar", "json": "jsonl", "ndjson": "jsonl", "ipc": "arrow"}
SUFFIXES = tuple(dict.fromkeys(suffix for f in FORMATS.values() for suffix in f.suffixes))
# Suffixes that select the files of a directory if no format is given. Tables and texts next to data
# usually describe it (README.txt, metadata.csv).
DIRECTORY_SUFFIXES = tuple(
    suffix for suffix in SUFFIXES if not any(suffix in f.suffixes for f in (*_TABLES, *_TEXTS))
)


def format_named(name: str, source: str) -> Format:
    format = FORMATS.get(ALIASES.get(name, name))
    if format is None:
        raise SourceError(
            source,
            f"expected a known format, got {name!r}",
            remedy=f"known formats: {', '.join(sorted(FORMATS))}",
        )
    return format


def format_of(files: Sequence[File], source: str) -> Format:
    """Return the format of files by their suffixes. Raises SourceError if not all have the same."""
    first: dict[str, str] = {}
    for described in _FILE_SETS:
        if all(_describes(described, file) for file in files):
            return FORMATS[described.name]
    for file in files:
        name = next(
            (f.name for f in FORMATS.values() if file.path.lower().endswith(f.suffixes or ("\0",))),
            "",
        )
        first.setdefault(name, file.path)
    if "" in first:
        raise SourceError(
            source,
            f"expected a file name with a known suffix, got {first['']}",
            remedy=f"set format=; {known_formats()}",
        )
    if len(first) > 1:
        shown = ", ".join(f"{name} ({path})" for name, path in sorted(first.items()))
        raise SourceError(
            source,
            f"expected files of one format, got {shown}",
            remedy="make one source for each format",
        )
    return FORMATS[next(iter(first))]


def _describes(format: FileSet, file: File) -> bool:
    return file.path.rpartition("/")[2] in format.index_names


def known_formats() -> str:
    return "known formats: " + ", ".join(
        f"{f.name} ({' '.join(f.suffixes)})" for f in FORMATS.values() if f.suffixes
    )
