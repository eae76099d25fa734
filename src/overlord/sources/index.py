"""The index of a source: its files and chunks.

The index is built in parallel and cached on disk; equal files give an equal index on every machine.
A cache entry is valid for a file only while its path, size, time and version are unchanged. A cache
that cannot be read or written costs time, but never fails a job.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from overlord.errors import SourceError
from overlord.hashing import digest
from overlord.sources.base import (
    COUNTED,
    BadFile,
    Chunks,
    File,
    FileSet,
    Format,
    ReadOptions,
    StorageUnreachable,
    concat_chunks,
    make_chunks,
    no_rows_chunk,
)
from overlord.sources.files import Files
from overlord.sources.first_rows import check_first_rows
from overlord.sources.formats import DIRECTORY_SUFFIXES, FORMATS, format_named, format_of
from overlord.sources.parallel_map import OnWait, ParallelMap, SerialMap
from overlord.sources.python_objects import Factory, Listed, files_of, fingerprint_of
from overlord.sources.retry import retry_briefly
from overlord.uris import scrub

log = logging.getLogger("overlord")


Progress = Callable[[int, int], None]
FILES_PER_TASK = 16
SHOWN = 20  # most bad files listed in one error
LISTING = 5  # deadlines that a listing may take: a million files on a slow mount need several


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Arguments for indexing one source."""

    name: str
    path: Any
    format: str | None = None
    options: ReadOptions = field(default_factory=ReadOptions)
    reads_datasets: bool = False  # the first rows of a dataset are checked, like those of files


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Files and chunks of one source.

    Equal fingerprints mean equal relative names, sizes and chunks, on any machine.
    """

    source: str
    format: str
    files: tuple[File, ...]
    chunks: Chunks
    # Type of each column of the first file, by name; None if the format must read data for it.
    schema: dict[str, str] | None
    fingerprint: str
    access: Files  # access to the files
    # Unit of row numbers: "row", or "byte" for offsets. Every read names it, so it is stored.
    row_unit: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_unit", "row" if self.format in COUNTED else "byte")

    @property
    def rows(self) -> int | None:
        """Number of raw rows, or None if it is unknown before reading."""
        return None if (self.chunks.rows < 0).any() else int(self.chunks.rows.sum())

    @property
    def nbytes(self) -> int:
        return sum(max(0, f.size) for f in self.files)


class _FileEntry(msgspec.Struct, array_like=True):
    path: str
    size: int
    mtime_ns: int
    version: str
    chunks: bytes  # int64 [n, 5]: start, stop, unit, rows, nbytes
    companion: tuple[str, int, int, str] | None = None  # path, size, time, version


class _CacheEntry(msgspec.Struct):
    version: int
    schema: dict[str, str] | None
    files: list[_FileEntry]


_VERSION = 3
_DECODER = msgspec.msgpack.Decoder(_CacheEntry)


@dataclass(slots=True)
class _Work:
    """State of one source while its index is being built."""

    spec: IndexSpec
    format: Format
    access: Files
    files: tuple[File, ...]
    cache_file: Path | None
    schema: dict[str, str] | None = None
    parts: dict[str, Chunks] = field(default_factory=dict)  # by path
    problems: list[tuple[str, str, str]] = field(default_factory=list)  # path, problem, remedy
    stale: bool = False  # the cache entry differs from the files and must be rewritten


def build_index(
    name: str,
    path: Any,
    format: str | None = None,
    options: ReadOptions | None = None,
    *,
    cache_dir: str | Path | None = None,
    workers: int = 8,
) -> Index:
    """Build the index of one source. Raises one SourceError with all bad files of the source."""
    return build_indexes(
        [IndexSpec(name, path, format, options or ReadOptions())],
        cache_dir=cache_dir,
        workers=workers,
    )[0]


def build_indexes(
    specs: Sequence[IndexSpec],
    *,
    cache_dir: str | Path | None = None,
    workers: int = 8,
    progress: Progress | None = None,
) -> list[Index]:
    """Build the indexes of all sources together; the files of all sources share the threads.

    ``progress(done, total)`` counts files. Raises one SourceError with all bad sources, or
    StorageError if storage hangs.
    """
    # Factories need no file access, so nothing can hang.
    made = all(isinstance(spec.path, Factory) for spec in specs)
    cache, pool = (
        Path(cache_dir) if cache_dir is not None else None,
        SerialMap() if made else ParallelMap(workers, "overlord-index"),
    )
    started = pool.map(lambda spec, at: _start(spec, cache, at), specs)
    works = [w for w in started if isinstance(w, _Work)]
    _read_all_chunks(
        pool,
        [(w, batch) for w in works for batch in _missing(w)],
        sum(len(w.files) for w in works),
        progress,
    )
    finished = pool.map(lambda w, at: w if isinstance(w, SourceError) else _finish(w), started)
    if errors := [e for e in finished if isinstance(e, SourceError)]:
        raise _combined_error(errors)
    return [index for index in finished if isinstance(index, Index)]


@dataclass(frozen=True, slots=True)
class RemovedSource:
    """A source that was removed from a resumed job; its files may be missing or changed."""

    fingerprint: str
    chunks: int  # lower bound of the number of its chunks


def build_resumed_indexes(
    specs: Sequence[IndexSpec], removed: Mapping[str, RemovedSource], **options: Any
) -> list[Index]:
    """Build the indexes of a resumed job from which sources were removed.

    A removed source that is missing or changed gets an index without files.
    """
    built = {
        index.source: index
        for index in build_indexes([s for s in specs if s.name not in removed], **options)
    }
    for spec in specs:
        if (saved := removed.get(spec.name)) is None:
            continue
        try:
            [index] = build_indexes([spec], **options)
            problem = "" if index.fingerprint == saved.fingerprint else "its files changed"
        except SourceError as error:
            problem = str(error)
        if problem:
            log.warning(
                "removed source %r was not indexed; the job does not need it: %s",
                spec.name,
                problem,
            )
            chunks = concat_chunks([no_rows_chunk()] * saved.chunks)
            index = Index(spec.name, "jsonl", (), chunks, None, saved.fingerprint, Files(None))
        built[spec.name] = index
    return [built[spec.name] for spec in specs]


def _read_all_chunks(
    pool: ParallelMap | SerialMap,
    tasks: Sequence[tuple[_Work, list[File]]],
    n: int,
    progress: Progress | None,
) -> None:
    """Read the chunks of all files without a cache entry; ``n`` is the number of all files."""
    finished = n - sum(len(batch) for _, batch in tasks)

    def done(read: int) -> None:
        nonlocal finished
        finished += read
        if progress:
            progress(finished, n)

    if progress:
        progress(finished, n)
    pool.map(_read_chunks, tasks, done)


def default_cache_dir() -> Path:
    """Return the directory ``index`` below ``$OVERLORD_CACHE`` or the user's cache directory."""
    base = os.environ.get("OVERLORD_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "overlord"
    )
    return Path(base) / "index"


def path_text(path: Any) -> str:
    return str(path) if isinstance(path, (str, os.PathLike)) else f"{len(path)} paths"


def is_python_object(path: Any) -> bool:
    """Return whether the path of a source is a dataset, a factory or a list of dicts, not files."""
    if isinstance(path, (str, bytes, os.PathLike)):
        return False
    if isinstance(path, (list, tuple)):
        return bool(path) and isinstance(path[0], dict)
    return isinstance(path, Factory) or (hasattr(path, "__getitem__") and hasattr(path, "__len__"))


def _start(spec: IndexSpec, cache: Path | None, at: OnWait) -> _Work | SourceError:
    """List a source, choose its format and load its cache entry.

    A SourceError is returned, not raised, so that all sources are examined.
    """
    try:
        if is_python_object(spec.path):
            held_as = FORMATS["factory" if isinstance(spec.path, Factory) else "dataset"]
            return _Work(spec, held_as, Files(None, True, spec.path), files_of(spec.path), None)
        if not isinstance(spec.path, (str, list, tuple, os.PathLike)):
            problem = f"expected files, a dataset or a factory, got {type(spec.path).__name__}"
            return SourceError(spec.name, problem, remedy="a dataset needs __len__ and __getitem__")
        given = format_named(spec.format, spec.name) if spec.format else None
        at(spec.name, path_text(spec.path), LISTING)
        access, files = Files.resolve(
            spec.path, source=spec.name, suffixes=given.suffixes if given else DIRECTORY_SUFFIXES
        )
        fmt = given or format_of(files, spec.name)
        files = _data_files(fmt, access, files, spec)
        work = _Work(
            spec,
            fmt,
            access,
            files,
            _cache_file(cache, spec, fmt) if cache and fmt.indexed else None,
        )
        _load_cache(work)
        return work
    except SourceError as error:
        return error


def _data_files(
    fmt: Format, access: Files, listed: tuple[File, ...], spec: IndexSpec
) -> tuple[File, ...]:
    """Return the data files of a listing, with the files that describe them. Raises SourceError."""
    if not isinstance(fmt, FileSet):
        return listed
    try:
        return retry_briefly(lambda: fmt.data_files(access, listed))
    except (BadFile, StorageUnreachable) as error:
        raise SourceError(spec.name, error.problem, path_text(spec.path), error.remedy) from error
    except OSError as error:
        raise SourceError(
            spec.name,
            f"could not be listed: {scrub(str(error))}",
            path_text(spec.path),
            "check that the files exist and are readable",
        ) from error


def _identity(file: File) -> tuple[str, int, int, str]:
    return file.path, file.size, file.mtime_ns, file.version


def _companion(file: File) -> tuple[str, int, int, str] | None:
    return None if file.companion is None else _identity(file.companion)


def _cache_file(cache: Path, spec: IndexSpec, fmt: Format) -> Path:
    paths = [spec.path] if isinstance(spec.path, (str, os.PathLike)) else spec.path
    where = [p if "://" in (p := os.fspath(x)) else os.path.abspath(p) for x in paths]
    columns = "*" if spec.options.columns is None else "\x1f".join(spec.options.columns)
    refused = "\x1f".join(spec.options.refused)
    sizes = str(spec.options.chunk_bytes)
    return cache / f"{digest(fmt.name, columns, refused, sizes, *where)}.msgpack"


def _load_cache(work: _Work) -> None:
    if work.cache_file is None:
        return
    try:
        entry = _DECODER.decode(work.cache_file.read_bytes())
        if entry.version != _VERSION:
            return
        known = {(e.path, e.size, e.mtime_ns, e.version, e.companion): e for e in entry.files}
        for file in work.files:
            if cached := known.get((*_identity(file), _companion(file))):
                table = np.frombuffer(cached.chunks, np.int64).reshape(-1, 5)
                work.parts[file.path] = make_chunks(table)  # type: ignore[arg-type]
        if work.files[0].path in work.parts:
            work.schema = entry.schema
        work.stale = len(entry.files) != len(work.files)
    except (OSError, ValueError, msgspec.MsgspecError):
        work.parts, work.schema = {}, None  # a damaged entry is rewritten


def _missing(work: _Work) -> list[list[File]]:
    left = [f for f in work.files if f.path not in work.parts]
    return [left[k : k + FILES_PER_TASK] for k in range(0, len(left), FILES_PER_TASK)]


def _opens_nothing(held: Any) -> bool:
    """Return whether rows can be read before workers start: those of files or of a list."""
    return held is None or isinstance(held, Listed)


def _read_chunks(task: tuple[_Work, list[File]], at: OnWait) -> int:
    """List the chunks of a few files of one source in ``work.parts``; return their number.

    A bad file is recorded in ``work.problems``, so that all bad files are reported together.
    """
    work, files = task
    fmt, access, options = work.format, work.access, work.spec.options
    for file in files:
        at(work.spec.name, file.path, 2 if access.remote else 1)
        try:
            work.parts[file.path] = retry_briefly(lambda f=file: fmt.chunks(access, f, options))  # type: ignore[misc]
            if file is work.files[0]:
                work.schema = retry_briefly(lambda f=file: fmt.schema(access, f, options))  # type: ignore[misc]
                if work.schema is None and (
                    work.spec.reads_datasets or _opens_nothing(access.held)
                ):
                    of = (work.parts[file.path], options)
                    retry_briefly(lambda f=file, of=of: check_first_rows(fmt, access, f, *of))  # type: ignore[misc]
            work.stale = True
        except (BadFile, StorageUnreachable) as error:
            work.problems.append((file.path, error.problem, error.remedy))
        except (OSError, ValueError) as error:  # ValueError includes Arrow's errors
            work.problems.append(
                (
                    file.path,
                    f"could not be read: {scrub(str(error))}",
                    "check that the file exists and is readable",
                )
            )
    return len(files)


def _finish(work: _Work) -> Index | SourceError:
    name = work.spec.name
    if work.problems:
        return _bad_files_error(name, sorted(work.problems), len(work.files))
    parts = [work.parts[f.path] for f in work.files]
    if work.cache_file is not None and work.stale:
        _write_cache(work.cache_file, work.schema, work.files, parts)
    chunks = concat_chunks(parts)
    if (chunks.unit < 0).all():
        where = work.spec.path if isinstance(work.spec.path, str) else ""
        return SourceError(
            name,
            f"expected files with rows, got {len(work.files)} files without any",
            where,
            "remove the source, or add data to it",
        )
    return Index(
        name,
        work.format.name,
        work.files,
        chunks,
        work.schema,
        _fingerprint(work, chunks),
        work.access,
    )


def _fingerprint(work: _Work, chunks: Chunks) -> str:
    """Return a digest over the names, sizes and chunks of the files, or over a Python object.

    Names are relative to the common directory of the files, so a copy in another directory or store
    has the same fingerprint.
    """
    structure = (chunks.file, chunks.start, chunks.stop, chunks.unit)
    if work.access.held is not None:
        return digest(work.format.name, fingerprint_of(work.access.held), *structure)
    parts = [f.path.split("/") for f in work.files]
    # os.path.commonpath is not used since it would merge the '//' of a URI.
    shared = [len(set(level)) == 1 for level in zip(*(p[:-1] for p in parts), strict=False)]
    root = shared.index(False) if False in shared else len(shared)
    names = "\0".join("/".join(p[root:]) for p in parts)
    sizes = [f.size for f in work.files]
    sizes += [f.companion.size for f in work.files if f.companion is not None]
    return digest(work.format.name, names, np.array(sizes, np.int64), *structure)


def _write_cache(
    path: Path, schema: dict[str, str] | None, files: Sequence[File], parts: Sequence[Chunks]
) -> None:
    """Write the cache entry to a temporary file and rename it, so that no reader gets a part of it.

    A cache that cannot be written is not an error.
    """
    tables = [
        np.stack([c.start, c.stop, c.unit, c.rows, c.nbytes], axis=1).astype(np.int64)
        for c in parts
    ]
    entries = [
        _FileEntry(*_identity(f), t.tobytes(), _companion(f))
        for f, t in zip(files, tables, strict=True)
    ]
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(msgspec.msgpack.encode(_CacheEntry(_VERSION, schema, entries)))
            os.replace(name, path)
        except OSError:
            with suppress(OSError):
                os.unlink(name)


def _bad_files_error(
    source: str, problems: Sequence[tuple[str, str, str]], total: int
) -> SourceError:
    if len(problems) == 1:
        path, problem, remedy = problems[0]
        return SourceError(source, problem, path, remedy)
    listed = "".join(f"\n  - {path}: {problem}" for path, problem, _ in problems[:SHOWN])
    more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    remedies = "; ".join(dict.fromkeys(remedy for _, _, remedy in problems if remedy))
    return SourceError(
        source,
        f"{len(problems)} of its {total} files cannot be used{listed}{more}",
        remedy=remedies,
    )


def _combined_error(errors: Sequence[SourceError]) -> SourceError:
    if len(errors) == 1:
        return errors[0]
    names = ", ".join(e.source for e in errors)
    return SourceError(
        names, f"{len(errors)} sources cannot be used" + "".join(f"\n- {e}" for e in errors)
    )
