"""Interface of file formats, and the values that they pass to the loader.

A *chunk* is the smallest unit that can be opened independently (``docs/stream.md``). A format lists
the chunks of a file without reading its data. It reads one chunk front to back in slices of raw
rows. Seeds, shuffling and transforms are applied elsewhere.
"""

from __future__ import annotations

import difflib
import re
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    from overlord.sources.files import Files

# Formats whose `row` is a row number; in the other formats it is a byte offset.
COUNTED = ("parquet", "arrow", "megatron", "mds", "dataset", "factory")
NO_ROWS = "the file has no rows"
# Suffixes of the two files of a Megatron dataset. Alone, many other tools use the first one too.
PAIR = (".bin", ".idx")


class BadFile(ValueError):
    """Raised for a file that cannot be used at all.

    The caller, which has the name of the source, raises a SourceError in its place.
    """

    def __init__(self, problem: str, remedy: str = ""):
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return self.problem


# Common names of text columns, the most usual first.
TEXTS = ("text", "content", "raw_content", "body", "txt")


def text_columns(schema: Mapping[str, str]) -> list[str]:
    """Return the names of columns that may hold text, common names first.

    Nested columns and names that begin with ``__`` are left out. Binary columns are included only
    under a common name.
    """
    flat = {
        name: kind for name, kind in schema.items() if "<" not in kind and not name.startswith("__")
    }
    names = [
        name
        for name, kind in flat.items()
        if "string" in kind or ("binary" in kind and name in TEXTS)
    ]
    return sorted(names, key=lambda name: TEXTS.index(name) if name in TEXTS else len(TEXTS))


def chat_column(schema: Mapping[str, str]) -> str | None:
    """Return the column that holds lists of messages, by its type; None if there is none."""
    forms = (("role: ", "content: "), ("from: ", "value: "))
    for name, kind in schema.items():
        if "list<" in kind and any(all(key in kind for key in form) for form in forms):
            return name
    return None


def _holds_ids(kind: str) -> bool:
    """Return whether a column of this type may hold token ids: a list of whole numbers."""
    return re.fullmatch(r"(large_)?list<\w+: u?int(16|32|64)>", kind) is not None


def missing_columns_error(missing: Sequence[str], schema: Mapping[str, str]) -> BadFile:
    """Return the error for a file that lacks columns named by transforms."""
    remedy = (
        tokenize_hint(missing, schema)
        or _named_hint(missing[0], schema)
        or "name a column that every file has, or rewrite the file"
    )
    return BadFile(missing_columns(missing, list(schema)), remedy)


def _named_hint(missing: str, schema: Mapping[str, str]) -> str:
    """Return a hint for a column that a transform names: a similar name, or its usual content."""
    plain = {re.sub(r"[\W_]+", "", name).lower(): name for name in schema}
    close = difflib.get_close_matches(re.sub(r"[\W_]+", "", missing).lower(), plain, n=1)
    if close:
        return f"did you mean {plain[close[0]]!r}?"
    if missing == "messages" and (chats := chat_column(schema)):
        return f"if {chats!r} holds conversations: messages={chats!r} in ov.Chat"
    if missing == "text" and (texts := text_columns(schema)):
        return f"if {texts[0]!r} holds the text: text={texts[0]!r} in ov.Tokenize"
    return ""


def missing_columns(missing: Sequence[str], found: Sequence[str]) -> str:
    """Return the problem of a file or a row without the columns ``missing``, as text."""
    wanted = f"expected the column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"
    return f"{wanted}, got {', '.join(found) or 'none'}"


def tokenize_hint(missing: Sequence[str], schema: Mapping[str, str]) -> str:
    """Return a hint to add Tokenize if "tokens" is missing and a column may hold text, else ""."""
    if "tokens" in missing and {"chosen", "rejected"} <= schema.keys():
        return (
            "if 'chosen' and 'rejected' are preferences: ov.Pair() before ov.Tokenize(...) or "
            "ov.Chat(...) in the source's transforms"
        )
    if "tokens" in missing and (chats := chat_column(schema)):
        return (
            f"if {chats!r} holds conversations: ov.Chat('folder of a tokenizer', "
            f"messages={chats!r}), in a job file {{chat: {{tokenizer: folder, messages: {chats}}}}}"
        )
    if "tokens" in missing and (ids := [n for n, kind in schema.items() if _holds_ids(kind)]):
        return (
            f"if {ids[0]!r} holds token ids: ov.Tokens({ids[0]!r}) in the source's transforms, in "
            f"a job file {{tokens: {{column: {ids[0]}}}}}"
        )
    if "tokens" not in missing or not (texts := text_columns(schema)):
        return ""
    return (
        f"if {texts[0]!r} holds text, tokenize it: ov.Tokenize('tokenizer.json', "
        f"text={texts[0]!r}), in a job file "
        f"{{tokenize: {{tokenizer: tokenizer.json, text: {texts[0]}}}}}; token ids of "
        "another column: Tokens(column)"
    )


class StorageUnreachable(OSError):
    """Raised when bytes cannot be read, or when a file differs from the indexed one.

    Storage is at fault, not the data, so no row is quarantined for it.
    """

    def __init__(self, problem: str, remedy: str = "", kind: str = ""):
        super().__init__(problem, remedy, kind)
        self.problem, self.remedy, self.kind = problem, remedy, kind

    def __str__(self) -> str:
        return self.problem


def is_storage_fault(error: BaseException) -> bool:
    """Return whether storage, not the data, is at fault.

    Decoders raise OSError too, but only errors of the operating system have an errno.
    """
    return isinstance(error, StorageUnreachable) or (
        isinstance(error, OSError) and error.errno is not None
    )


def short_read(missing: int) -> StorageUnreachable:
    """Return the error for a read that ended ``missing`` bytes before its expected end."""
    return StorageUnreachable(
        f"expected {missing} more bytes of the file, got the end of the data",
        "check the disk or the mount",
        "short read",
    )


@dataclass(frozen=True, slots=True)
class File:
    """One file of a source at the time of listing.

    A change of size, time or version makes cached index entries stale.
    """

    path: str
    size: int
    mtime_ns: int
    version: str = ""  # entity tag of an object; empty if there is none
    # The file that describes the rows of this one (an .idx, an index.json); None: it stands alone.
    companion: File | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of a source in listing order, one row each."""

    file: np.ndarray  # int32: number of the file
    start: np.ndarray  # int64: first row (or first byte, for plain JSONL)
    stop: np.ndarray  # int64: one past the last row (or byte); -1: until the end of the file
    # int32: number of the chunk inside its file, set by the format (for example the row group);
    # -1: the file has no rows
    unit: np.ndarray
    rows: np.ndarray  # int64: raw rows; -1 if unknown before reading
    nbytes: np.ndarray  # int64: estimate of the bytes in memory when read whole; 0 if unknown

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for reading a source; every field comes from the job."""

    slice_rows: int = 256
    chunk_bytes: int = 2**23
    max_sample_bytes: int = 2**26
    columns: tuple[str, ...] | None = None  # names of the requested columns; None: all
    refused: tuple[str, ...] = ()  # loss columns that the job would ignore: refused
    # Formats that know the lengths of documents from an index need not read the token ids.
    lengths_only: bool = False
    # Columns without which a row is not a sample: those of token ids, texts or messages.
    required: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class RawSlice:
    """Raw rows of one slice, in file order.

    ``table`` holds only the readable rows, in the same order.
    """

    row: np.ndarray  # int64: the `row` of every raw row, unreadable ones included
    table: pa.Table  # len(row) - len(bad) rows
    bad: list[tuple[int, str]] = field(default_factory=list)  # (index into row, reason), ascending
    last: bool = False  # no raw row of the chunk follows this slice
    blank: bool = False  # token ids were not read: they are zeros, and only their number is right


def rows_within(raw: RawSlice, kept: np.ndarray, last: bool) -> RawSlice:
    """Return the rows of a slice for which ``kept`` is true, with another ``last``."""
    number = np.cumsum(kept) - 1
    readable = np.ones(len(kept), bool)
    readable[[i for i, _ in raw.bad]] = False
    return RawSlice(
        raw.row[kept],
        raw.table.filter(kept[readable]),
        [(int(number[i]), reason) for i, reason in raw.bad if kept[i]],
        last,
        raw.blank,
    )


class Format(Protocol):
    """A file format. Instances are stateless; all sources and threads share one."""

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Endings of the format's file names, for example ``.parquet``; empty for objects."""
        ...

    @property
    def indexed(self) -> bool:
        """Whether listing chunks opens the file, so that the result is worth caching."""
        ...

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        """Return the chunks of one file; column `file` is 0.

        Raises BadFile if the file cannot be used.
        """
        ...

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        """Return the type of each column by name, or None if the format must read data for it."""
        ...

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        """Estimate the bytes that an open ``read`` of chunk i holds between two slices.

        The cache of open chunks adds up these estimates.
        """
        ...

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        """Yield the slices of chunk i front to back, starting at slice ``skip``.

        Every slice but the last holds ``slice_rows`` raw rows. At least one slice is yielded, and
        the final one has ``last`` set. A ``skip`` past the end yields one empty slice. Unreadable
        rows are listed in ``bad``. Raises BadFile if the file cannot be used, and OSError if
        storage fails: only invalid bytes lead to quarantine.
        """
        ...


class ReadsWhole(Protocol):
    """A format that reads small chunks at once."""

    def whole(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions
    ) -> pa.Table | None:
        """Return all rows of chunk i; None if it is large, or if a row may be unreadable.

        ``Format.read`` reads such a chunk. Row k of the table is row ``chunks.start[i] + k`` of the
        file. Raises OSError if storage fails.
        """
        ...


@runtime_checkable
class FileSet(Protocol):
    """A format whose data files are described by other files."""

    @property
    def index_names(self) -> tuple[str, ...]:
        """Names of describing files that may be listed instead of data files."""
        ...

    def data_files(self, files: Files, listed: Sequence[File]) -> tuple[File, ...]:
        """Return the data files of a listing in the order of their rows, with their companions.

        Raises BadFile if a file is missing.
        """
        ...


def check_refused(names: Container[str], options: ReadOptions) -> None:
    """Raise BadFile if ``names`` contains a loss column that the job would ignore.

    Training would otherwise compute the loss over the wrong tokens.
    """
    if refused := [name for name in options.refused if name in names]:
        raise BadFile(
            f"expected token ids alone, got the column {refused[0]!r} next to them, which no "
            "transform reads",
            "name a column of loss weights in Tokens(loss=...), or add Select with the columns to "
            "use: then every token has a loss",
        )


def make_chunks(rows: Sequence[tuple[int, int, int, int, int]]) -> Chunks:
    """Return the chunks of one file; each row is (start, stop, unit, rows, nbytes).

    Column ``file`` is 0.
    """
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
    """Return the only chunk of a file without rows.

    The chunk has one unreadable row, so that the quarantine lists the file.
    """
    return make_chunks([(0, 1, -1, 1, 0)])


def concat_chunks(parts: Sequence[Chunks]) -> Chunks:
    """Return the chunks of several files as one table; the k-th part gets file number k."""
    names = ("start", "stop", "unit", "rows", "nbytes")
    file = np.repeat(np.arange(len(parts), dtype=np.int32), [len(p) for p in parts])
    return Chunks(file, *(np.concatenate([getattr(p, n) for p in parts]) for n in names))


# ----------------------------------------------------------------------------
# A thread-safe cache, bounded by number of items and by bytes.

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Least-recently-used cache that passes evicted, replaced and cleared values to ``on_evict``.

    Values removed by ``take`` are not passed. ``on_evict`` is called outside the lock.
    """

    def __init__(self, max_items: int, max_bytes: int, on_evict: Callable[[V], None] | None = None):
        self.max_items, self.max_bytes = max_items, max_bytes
        self.nbytes = 0
        self.evictions = 0
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()
        self._on_evict = on_evict

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._items:
                return None
            self._items.move_to_end(key)
            return self._items[key][0]

    def take(self, key: K) -> V | None:
        """Remove and return a value, or None: of several threads only one receives the value."""
        with self._lock:
            if key not in self._items:
                return None
            value, nbytes = self._items.pop(key)
            self.nbytes -= nbytes
            return value

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Store the value, then evict others until the bounds hold or only the new one is left."""
        removed: list[V] = []
        with self._lock:
            if key in self._items:
                removed.append(self._drop(key))
            self._items[key] = (value, nbytes)
            self.nbytes += nbytes
            while len(self._items) > 1 and (
                len(self._items) > self.max_items or self.nbytes > self.max_bytes
            ):
                removed.append(self._drop(next(iter(self._items))))
                self.evictions += 1
        self._evicted(removed)

    def clear(self, owned: Callable[[K], bool] = lambda _: True) -> None:
        """Remove all keys, or those for which ``owned`` returns true."""
        with self._lock:
            removed = [self._drop(key) for key in [k for k in self._items if owned(k)]]
        self._evicted(removed)

    def _drop(self, key: K) -> V:
        value, nbytes = self._items.pop(key)
        self.nbytes -= nbytes
        return value

    def _evicted(self, removed: list[V]) -> None:
        if self._on_evict is not None:
            for value in removed:
                self._on_evict(value)
