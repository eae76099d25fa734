"""Reader of slices, and the bounded cache of open chunks that all sources of a process share.

Many chunks of many sources are open at the same time, and one slice is read from each in turn. Open
chunks beyond the bounds are closed, least recently used first. A chunk that is needed again is
reopened and advanced to the slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.errors import SourceError, StorageError
from overlord.sources import tables as cols
from overlord.sources.base import BadFile, File, Lru, RawSlice, ReadOptions, StorageUnreachable
from overlord.sources.formats import FORMATS
from overlord.sources.index import Index
from overlord.sources.python_objects import Listed
from overlord.sources.retry import (
    CLOCK,
    Clock,
    StorageStats,
    classify_file_error,
    deadline_s,
    file_give_up_error,
    is_disk,
    retry_call,
)
from overlord.sources.timeouts import TIMEOUTS
from overlord.uris import scrub

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(slots=True)
class OpenChunk:
    """An open chunk: all its rows, or an iterator whose next item is slice number ``next``.

    ``reader`` and ``nbytes`` are valid while the chunk is in the cache: its owner and its size.
    """

    slices: Iterator[RawSlice]
    next: int
    whole: pa.Table | None = None  # all rows of the chunk, if it was read at once
    reader: int = -1
    nbytes: int = 0

    def close(self) -> None:
        close = getattr(self.slices, "close", None)  # a generator closes its file
        if close is not None:
            close()


class OpenChunkCache:
    """Cache of the open chunks of a process, bounded by their number and by the bytes they hold."""

    def __init__(self, max_open: int = 1024, max_bytes: int = 2**29):
        self._chunks: Lru[tuple[int, int], OpenChunk] = Lru(max_open, max_bytes, self._evicted)
        self._lock = Lock()
        self._held: dict[int, int] = {}  # bytes per reader
        self._counts = {"opens": 0, "reopens": 0, "reads": 0}

    def take(self, key: tuple[int, int]) -> OpenChunk | None:
        if (handle := self._chunks.take(key)) is not None:
            self._add_bytes(handle.reader, -handle.nbytes)
        return handle

    def put(self, key: tuple[int, int], handle: OpenChunk, nbytes: int) -> None:
        handle.reader, handle.nbytes = key[0], nbytes
        self._add_bytes(key[0], nbytes)
        self._chunks.put(key, handle, nbytes)

    def bytes_of(self, reader: int) -> int:
        """Return the bytes that the cached open chunks of one reader hold, as estimated."""
        return self._held.get(reader, 0)

    def _add_bytes(self, reader: int, nbytes: int) -> None:
        with self._lock:
            left = self._held.get(reader, 0) + nbytes
            if left:
                self._held[reader] = left
            else:
                self._held.pop(reader, None)

    def _evicted(self, handle: OpenChunk) -> None:
        self._add_bytes(handle.reader, -handle.nbytes)
        handle.close()

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def close(self, reader: int | None = None) -> None:
        """Close all open chunks, or those of one reader."""
        self._chunks.clear(lambda key: reader is None or key[0] == reader)

    def metrics(self) -> dict[str, int]:
        """Return counters of the cache.

        ``opens``, ``reopens`` (included in opens), ``reads`` and ``evictions`` are totals; ``open``
        and ``bytes`` are current values.
        """
        with self._lock:
            counts = dict(self._counts)
        return counts | {
            "evictions": self._chunks.evictions,
            "open": len(self._chunks),
            "bytes": self._chunks.nbytes,
        }


OPEN_CHUNKS = OpenChunkCache()
STALLED = "check the disk or the mount; no data is skipped: resume when it responds"
_READERS = count()


class ChunkReader:
    """Reader of slices of the chunks of one source.

    Runs on: any thread. Two threads that read the same chunk get correct slices, but slowly.
    """

    def __init__(
        self,
        index: Index,
        options: ReadOptions,
        cache: OpenChunkCache | None = None,
        clock: Clock = CLOCK,
    ):
        self.index, self.options = index, options
        self.stats = StorageStats(index.source, clock)
        self._files = index.access.with_stats(self.stats).with_requested()
        self._format = FORMATS[index.format]
        self._cache = cache or OPEN_CHUNKS
        self._id = next(_READERS)
        self._on_disk = self._files.local

    def slice(self, chunk: int, t: int) -> RawSlice:
        """Return slice t of a chunk; cheap if slice t-1 was the last one read.

        Past the end the slice is empty and has ``last`` set. Raises SourceError, or StorageError
        if storage is at fault.
        """
        return self.slices(chunk, t, 1)

    def slices(self, chunk: int, t: int, n: int) -> RawSlice:
        """Return slices t to ``t + n - 1`` of a chunk as one, or slice t alone.

        They are read as one if the whole chunk was read at once. Raises as ``slice`` does.
        """
        file = self.index.files[self.file_of(chunk)]
        try:
            if self._files.fs is None or self._files.remote:
                return self._slice(chunk, t, n, file)
            return retry_call(
                lambda: self._verified_slice(chunk, t, n, file),
                classify_file_error,
                path=file.path,
                operation="read",
                stats=self.stats,
                give_up_error=file_give_up_error,
            )
        except (OSError, ValueError) as error:  # ValueError includes BadFile and Arrow's errors
            raise self._error(file, error) from error

    def _verified_slice(self, chunk: int, t: int, n: int, file: File) -> RawSlice:
        """Read a slice. Raises StorageUnreachable if the file changed meanwhile.

        A status costs a request where files are not local. There it is requested for slices with
        unreadable rows, and at both ends of a chunk.
        """
        try:
            raw = self._slice(chunk, t, n, file)
        except (OSError, ValueError) as error:
            # Without an errno the error is not from the operating system: the invalid bytes may
            # belong to a file that replaced the indexed one.
            if not isinstance(getattr(error, "errno", None), int):
                self._files.check_unchanged(file)
            raise
        if self._files.local or raw.bad or raw.last:
            self._files.check_unchanged(file)
        return raw

    def _slice(self, chunk: int, t: int, n: int, file: File) -> RawSlice:
        key = (self._id, chunk)
        handle = self._cache.take(key)  # owned by this thread until it is put back
        if handle is not None and handle.whole is None and handle.next != t:
            handle.close()
            handle = None
        if handle is None:
            handle = self._open(chunk, t, file)
        self._cache.count("reads")
        if handle.whole is not None:
            raw = self._part(handle.whole, chunk, t, n)
        elif (found := next(handle.slices, None)) is not None:
            raw = found
        else:
            raw = cols.slice_of(0, 0, cols.empty(0, self.options.columns), [], True)
        if raw.last:
            handle.close()
        else:
            handle.next = t + 1
            held = (
                self._format.held_bytes(self.index.chunks, chunk, self.options)
                + self._files.read_ahead
            )
            self._cache.put(key, handle, held)
        return raw

    def _part(self, whole: pa.Table, chunk: int, t: int, n: int) -> RawSlice:
        """Return slices t to ``t + n - 1`` of a chunk that was read at once, as views."""
        first = min(t * self.options.slice_rows, whole.num_rows)
        table = whole.slice(first, n * self.options.slice_rows)
        last = first + table.num_rows >= whole.num_rows
        start = int(self.index.chunks.start[chunk]) + first
        return cols.slice_of(start, table.num_rows, table, [], last)

    # Status of the reader, read by other threads.

    @property
    def may_wait(self) -> bool:
        """Whether reads access storage; reads of a Python object do not."""
        return self._files.fs is not None

    @property
    def user_code(self) -> str:
        """Class name of the user's dataset or factory; empty for files and lists of rows."""
        held = self._files.held
        return "" if held is None or isinstance(held, Listed) else type(held).__name__

    def running(self, thread: int) -> tuple[str, int]:
        """Return ``user_code``, and the row that a thread requests from it; -1: unknown."""
        return self.user_code, (self._files.requested or {}).get(thread, -1)

    def rows_of_slice(self, chunk: int, t: int) -> np.ndarray:
        """Return the first and the last row of slice t of a dataset's or a factory's chunk.

        A factory yields the row after a slice before the slice is complete.
        """
        start, stop = int(self.index.chunks.start[chunk]), int(self.index.chunks.stop[chunk])
        first = start + t * self.options.slice_rows
        last = first + self.options.slice_rows
        return np.array([first, last if stop < 0 else min(last, stop) - 1])

    @property
    def is_remote(self) -> bool:
        """Whether the source is in an object store: reads mostly wait for its responses."""
        return self._files.remote

    @property
    def never_hangs(self) -> bool:
        """Whether all files opened so far are on local disks, where reads do not hang."""
        return self._on_disk

    @contextmanager
    def no_wait(self) -> Iterator[None]:
        """Let a failing read raise ``WouldBlock`` instead of retrying it, within this context."""
        self.stats.no_wait = True
        try:
            yield
        finally:
            self.stats.no_wait = False

    @property
    def store_metrics(self) -> dict[str, Any] | None:
        """Counters of requests to an object store; None for any other source."""
        return self.stats.metrics() if self._files.remote else None

    @property
    def storage_metrics(self) -> dict[str, Any] | None:
        """Counters of storage problems (``StorageStats.problem_metrics``); None without storage."""
        return self.stats.problem_metrics() if self.may_wait else None

    @property
    def open_bytes(self) -> int:
        """Bytes that the cached open chunks of this reader hold, as estimated."""
        return self._cache.bytes_of(self._id)

    def activity(self) -> str:
        """Describe the oldest read in progress if it is slow or has failed; else return ""."""
        if (attempt := self.stats.oldest()) is None:
            return ""
        seconds, failures = self.stats.clock.now() - attempt.began, attempt.failures
        if failures:
            return (
                f"trying to read {attempt.path} for {seconds:.0f} s ({len(failures)} attempts "
                f"failed; the last: {failures[-1].text})"
            )
        return f"reading {attempt.path} for {seconds:.0f} s" if seconds >= TIMEOUTS.slow_s else ""

    def stalled(self) -> StorageError | None:
        """Return the error of the oldest read if it hangs beyond its deadline, else None.

        The read is then counted as failed, and is no longer in progress.
        """
        if (attempt := self.stats.oldest()) is None:
            return None
        if self.stats.clock.now() - attempt.began < TIMEOUTS.slow_s:
            return None
        # A store request is not cancelled but ends by itself, so it may take twice as long.
        seconds, limit = (
            attempt.idle_s(self.stats.clock),
            deadline_s() * (2 if self._files.remote else 1) + TIMEOUTS.slack_s,
        )
        if seconds < limit:
            return None
        problem = f"expected a read to end within {limit:.0f} s, got no end for {seconds:.1f} s" + (
            f" (previous attempt: {attempt.failures[-1].text})" if attempt.failures else ""
        )
        self.stats.count_failure("stalled")
        self.stats.count_given_up()
        self.stats.end(attempt)
        return StorageError(self.index.source, problem, attempt.path, STALLED)

    def file_of(self, chunk: int) -> int:
        return int(self.index.chunks.file[chunk])

    def close(self) -> None:
        self._cache.close(self._id)

    def _open(self, chunk: int, t: int, file: File) -> OpenChunk:
        status = self._files.check_unchanged(file)
        self._on_disk = self._on_disk and status is not None and is_disk(status.st_dev)
        self._cache.count("opens")
        if t:
            self._cache.count("reopens")
        arguments = self._files, file, self.index.chunks, chunk, self.options
        reads: Any = getattr(self._format, "whole", None)  # a method of formats that ``ReadsWhole``
        whole = None if reads is None else reads(*arguments)
        # a generator: it reads nothing yet
        return OpenChunk(self._format.read(*arguments, t), t, whole)

    def _error(self, file: File, error: OSError | ValueError) -> SourceError:
        if isinstance(error, StorageUnreachable):
            return StorageError(self.index.source, error.problem, file.path, error.remedy)
        if isinstance(error, BadFile):
            return SourceError(self.index.source, error.problem, file.path, error.remedy)
        return SourceError(
            self.index.source,
            f"could not be read: {scrub(str(error))}",
            file.path,
            "check the disk or the store; no data is skipped",
        )
