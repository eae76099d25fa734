"""What a file format must offer, and the shapes that travel from it to the loader.

A *chunk* is what opens alone (``docs/stream.md``). A format lists the chunks of a file without
reading its data, and reads one chunk front to back in slices of raw rows. Nothing here knows of
seeds, shuffling or transforms.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    from overlord.sources.files import Files

NO_ROWS = "the file has no rows"


class BadFile(ValueError):
    """A file that cannot be used at all. Whoever knows the source's name turns it into a
    SourceError.
    """

    def __init__(self, problem: str, remedy: str = ""):
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return self.problem


TEXTS = (
    "text",
    "content",
    "raw_content",
    "body",
    "txt",
)  # names that columns of text often have, the usual ones first


def text_columns(schema: Mapping[str, str]) -> list[str]:
    """Columns that may hold text: by their type, those of the usual names first."""
    flat = {
        name: kind for name, kind in schema.items() if "<" not in kind and not name.startswith("__")
    }
    found = [
        name
        for name, kind in flat.items()
        if "string" in kind or ("binary" in kind and name in TEXTS)
    ]
    return sorted(found, key=lambda name: TEXTS.index(name) if name in TEXTS else len(TEXTS))


def lacks_columns(missing: Sequence[str], schema: Mapping[str, str]) -> BadFile:
    """Return what to raise for a file without columns that transforms name."""
    wanted = f"expected the column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"
    remedy = (
        tokenize_it(missing, schema) or "name a column that every file has, or write the file again"
    )
    return BadFile(f"{wanted}, got {', '.join(schema) or 'none'}", remedy)


def tokenize_it(missing: Sequence[str], schema: Mapping[str, str]) -> str:
    """Suggest Tokenize where token ids are missing and there is text; else nothing."""
    if "tokens" not in missing or not (texts := text_columns(schema)):
        return ""
    return (
        f"if {texts[0]!r} holds text, tokenize it: ov.Tokenize('tokenizer.json', "
        f"text={texts[0]!r}), in a job file "
        f"{{tokenize: {{tokenizer: tokenizer.json, text: {texts[0]}}}}}; token ids of "
        "another column: Tokens(column)"
    )


class Unreachable(OSError):
    """Bytes that could not be had, or not as they were indexed. Says nothing about the data: never
    a reason for quarantine.
    """

    def __init__(self, problem: str, remedy: str = "", kind: str = ""):
        super().__init__(problem, remedy, kind)
        self.problem, self.remedy, self.kind = problem, remedy, kind

    def __str__(self) -> str:
        return self.problem


def is_fault(error: BaseException) -> bool:
    """Whether storage is at fault and not the data: decoders raise OSError too, but only what the
    system said has an errno.
    """
    return isinstance(error, Unreachable) or (
        isinstance(error, OSError) and error.errno is not None
    )


def short_read(missing: int) -> Unreachable:
    return Unreachable(
        f"a read ended {missing} bytes before the end of the file",
        "check the disk or the mount",
        "short read",
    )


@dataclass(frozen=True, slots=True)
class File:
    """One file of a source, as the listing saw it. A change of size, time or version makes cached
    index entries stale.
    """

    path: str
    size: int
    mtime_ns: int
    version: str = ""  # an object's entity tag; empty where there is none


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of a source in listing order, one row each."""

    file: np.ndarray  # int32: ordinal of the file
    start: np.ndarray  # int64: first row (or first byte, for plain JSONL)
    stop: np.ndarray  # int64: one past the last row (or byte); -1: until the end of the file
    # int32: the format's own number of the chunk inside its file (row group, shard); -1: the file
    # has no rows
    unit: np.ndarray
    rows: np.ndarray  # int64: raw rows; -1 where only reading tells
    nbytes: np.ndarray  # int64: bytes in memory when read whole, as far as the file says

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a source is read; every field comes from the job."""

    slice_rows: int = 256
    chunk_bytes: int = 2**23
    max_sample_bytes: int = 2**26
    columns: tuple[str, ...] | None = None  # None: all
    refused: tuple[str, ...] = ()  # columns that say what to train on, which the job would ignore


@dataclass(slots=True, eq=False)
class RawSlice:
    """Raw rows of one slice, in file order. ``table`` holds the readable ones only, in the same
    order.
    """

    row: np.ndarray  # int64: the `row` of every raw row, unreadable ones included
    table: pa.Table  # len(row) - len(bad) rows
    bad: list[tuple[int, str]] = field(default_factory=list)  # (index into row, reason), ascending
    last: bool = False  # no raw row of the chunk comes after this slice


class Format(Protocol):
    """A file format. Instances are stateless; one serves all sources and threads."""

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """How names of its files end."""
        ...

    @property
    def indexed(self) -> bool:
        """True if listing chunks opens the file, so that the answer is worth caching."""
        ...

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        """The chunks of one file (column `file` left 0). Raises BadFile on a file that cannot be
        used.
        """
        ...

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        """Column name -> type, where the file says so without reading data; else None."""
        ...

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        """About how many bytes an open `read` keeps between two slices; the handle cache counts
        with it.
        """
        ...

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        """Chunk i front to back, from slice number ``skip`` on (cheaper than reading and dropping
        them).

        Every slice but the last holds ``slice_rows`` raw rows; at least one slice comes, the final
        one with ``last`` (a ``skip`` past the end gives an empty one). Unreadable rows are in
        ``bad``; what raises is BadFile (the file cannot be used) or OSError (it cannot be reached):
        bytes decide about quarantine, a failing disk never does.
        """
        ...


def check_refused(names: Container[str], options: ReadOptions) -> None:
    """Refuse a file with a column that the job would ignore at the cost of training on the wrong
    tokens.
    """
    if found := [name for name in options.refused if name in names]:
        raise BadFile(
            f"expected token ids alone, got the column {found[0]!r} beside them, which is "
            "not supported yet",
            "add Select with the columns to use: then every token has a loss",
        )


def make_chunks(rows: Sequence[tuple[int, int, int, int, int]]) -> Chunks:
    """Chunks of one file from (start, stop, unit, rows, nbytes) each; column `file` is 0."""
    table = np.array(rows, np.int64).reshape(len(rows), 5)
    return Chunks(
        np.zeros(len(rows), np.int32),
        table[:, 0].copy(),
        table[:, 1].copy(),
        table[:, 2].astype(np.int32),
        table[:, 3].copy(),
        table[:, 4].copy(),
    )


def no_rows_chunk() -> Chunks:
    """What a file without rows has: one chunk with one unreadable row, so that it shows in the
    quarantine.
    """
    return make_chunks([(0, 1, -1, 1, 0)])


def concat_chunks(parts: Sequence[Chunks]) -> Chunks:
    """Chunks of several files as one table; the k-th part gets file ordinal k."""
    names = ("start", "stop", "unit", "rows", "nbytes")
    file = np.repeat(np.arange(len(parts), dtype=np.int32), [len(p) for p in parts])
    return Chunks(file, *(np.concatenate([getattr(p, n) for p in parts]) for n in names))
