"""Map-style datasets and replayable factories: rows from Python objects instead of files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.checks import describe_error
from overlord.errors import JobError
from overlord.hashing import digest
from overlord.sources import tables as cols
from overlord.sources.base import (
    BadFile,
    Chunks,
    File,
    RawSlice,
    ReadOptions,
    make_chunks,
    missing_columns,
    no_rows_chunk,
)

if TYPE_CHECKING:
    from overlord.sources.files import Files

NO_DICT = "expected a dict"  # begins the reason of a row that is not one
CHUNK_SLICES = 16  # slices per chunk of a map-style dataset


@dataclass(frozen=True, slots=True)
class Factory:
    """Replayable rows: ``fn(shard)`` returns a new iterator over the same dicts in every call.

    With one shard ``fn`` may take no argument. Set a ``fingerprint`` that changes when the rows
    change: without one a resumed job cannot detect changed rows.
    """

    fn: Callable[..., Iterable[Mapping[str, Any]]]
    shards: int = 1
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        problems = (
            []
            if callable(self.fn)
            else [f"fn: expected a function of a shard's number, got {self.fn!r}"]
        )
        if not isinstance(self.shards, int) or isinstance(self.shards, bool) or self.shards < 1:
            problems.append(f"shards: expected a whole number of at least 1, got {self.shards!r}")
        elif not problems and self.shards > 1 and not _takes_shard(self.fn):
            problems.append(
                f"fn: expected a function of a shard's number for {self.shards} shards, got one "
                "without an argument"
            )
        if problems:
            raise JobError(problems, "factory")

    def rows(self, shard: int) -> Iterable[Mapping[str, Any]]:
        return self.fn(shard) if _takes_shard(self.fn) else self.fn()


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Map-style dataset of the rows of a list or tuple; a source reads a bare list as paths."""

    rows: list[Any] | tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


def as_dataset(name: str, dataset: Any) -> Any:
    """Return the dataset itself, or ``Listed`` for a list or tuple.

    Raises JobError, which names the alternatives, for an object that is not a map-style dataset.
    """
    if isinstance(dataset, (list, tuple)):
        return Listed(dataset)
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if sized and not isinstance(dataset, (str, bytes, Mapping, type)):
        return dataset
    problem = (
        f"from_dataset: expected an object with __len__ and __getitem__ by number, got {dataset!r}"
    )
    raise JobError(
        [f"{problem}; use Source.from_factory for an iterable, Source(name, uri) for files"],
        f"source {name!r}",
    )


def _takes_shard(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn).bind(0)
    except ValueError:  # a builtin without a signature
        return True
    except TypeError:
        return False
    return True


class DatasetFormat:
    """Format of a map-style dataset: an object with ``__len__``, and ``__getitem__`` of dicts."""

    name = "dataset"
    suffixes: tuple[str, ...] = ()
    indexed = False

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        if not file.size:
            return no_rows_chunk()
        step = options.slice_rows * CHUNK_SLICES
        starts = range(0, file.size, step)
        return make_chunks(
            [(a, b, k, b - a, 0) for k, a in enumerate(starts) for b in (min(a + step, file.size),)]
        )

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        return None

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        return 0

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        start, stop, step = int(chunks.start[i]), int(chunks.stop[i]), options.slice_rows
        if len(files.held) != file.size:
            problem = f"expected the {file.size} indexed rows of the dataset, got {len(files.held)}"
            raise BadFile(problem, "do not change the dataset during a run")
        first = start + skip * step
        if first >= stop:
            yield cols.slice_of(stop, 0, cols.empty(0, options.columns), [], True)
        for at in range(first, stop, step):
            end = min(at + step, stop)
            yield _slice(at, [_item(files, k) for k in range(at, end)], options, end == stop)


class FactoryFormat:
    """Format of a factory: one chunk per shard, read front to back.

    A factory cannot continue after an exception. So an exception is an error and not a bad row.
    """

    name = "factory"
    suffixes: tuple[str, ...] = ()
    indexed = False

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        return make_chunks([(0, -1, 0, -1, 0)])

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        return None

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        return 2**16  # the size is unknown; the cache also bounds the number of chunks

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        step, left, at = options.slice_rows, skip * options.slice_rows, 0
        held: list[Any] = []
        for row in _rows(files, int(chunks.file[i])):
            if left:
                left, at = left - 1, at + 1
            elif len(held) == step:
                out, held, at = _slice(at, held, options, False), [row], at + step
                yield out
            else:
                held.append(row)
        if not held and not skip:
            yield cols.no_rows(options, skip, "the shard has no rows")
        else:
            yield _slice(at, held, options, True)


def _rows(files: Files, shard: int) -> Iterator[Any]:
    n = 0
    files.set_requested(n)
    try:
        for row in files.held.rows(shard):
            yield row if isinstance(row, Mapping) else f"{NO_DICT}, got {type(row).__name__}"
            n += 1
            files.set_requested(n)
    except Exception as error:
        problem = f"the factory raised at row {n} of shard {shard}: {describe_error(error)}"
        raise BadFile(problem, "catch the exception in the factory, row by row") from error


def _item(files: Files, k: int) -> Any:
    """Return row k, or a text with the reason why it is bad: user code may raise any error."""
    files.set_requested(k)
    try:
        row = files.held[k]
    except Exception as error:
        return f"the dataset raised {describe_error(error)}"
    return row if isinstance(row, Mapping) else f"{NO_DICT}, got {type(row).__name__}"


def _slice(at: int, rows: list[Any], options: ReadOptions, last: bool) -> RawSlice:
    """Return a slice of rows; a row that is a text is bad, and the text is its reason.

    Values may be numpy arrays or tensors.
    """
    rows = [_with_required(row, options.required) for row in rows]
    bad = [(i, row) for i, row in enumerate(rows) if isinstance(row, str)]
    numbers = [i for i, row in enumerate(rows) if not isinstance(row, str)]
    good = [{key: _to_python(value) for key, value in rows[i].items()} for i in numbers]
    if options.refused:
        cols.check_values(cols.columns_of(good, options.refused), options)
    table, misfits = cols.table_of(cols.columns_of(good, options.columns), len(good))
    return cols.slice_of(
        at, len(rows), table, sorted(bad + [(numbers[i], reason) for i, reason in misfits]), last
    )


def _with_required(row: Any, required: Sequence[str]) -> Any:
    """Return a row, or the reason why it is bad if it lacks a column of ``required``."""
    if isinstance(row, str) or not (missing := [name for name in required if name not in row]):
        return row
    return missing_columns(missing, [str(key) for key in row])


def _to_python(value: Any) -> Any:
    if hasattr(value, "__array__") and not hasattr(value, "dtype"):
        return value.__array__()
    if hasattr(value, "detach"):  # a tensor, detected without importing torch
        value = value.detach().cpu().numpy()
    if getattr(value, "ndim", 1) == 0:
        return value.item()
    return value.tolist() if getattr(value, "ndim", 1) > 1 else value


def files_of(held: Any) -> tuple[File, ...]:
    """Return placeholders for the files of a Python object.

    A factory has one for each shard. A dataset has one, whose size is the number of rows.
    """
    if isinstance(held, Factory):
        return tuple(File(f"shard {k}", -1, 0) for k in range(held.shards))
    return (File("dataset", len(held), 0),)


def fingerprint_of(held: Any) -> str:
    """Return a digest of the object's type and size, and of its own fingerprint if it has one."""
    own = getattr(held, "fingerprint", None) or getattr(held, "_fingerprint", None)
    size = held.shards if isinstance(held, Factory) else len(held)
    kind = type(held).__qualname__
    return digest("held", kind, str(size), str(own) if isinstance(own, str) else "")
