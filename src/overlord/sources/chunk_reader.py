"""Open chunks, bounded: slices of a chunk are asked for in order, and what is open is shared by the
whole process.

Many chunks of many sources are open at the same time, one slice taken from each in turn. Handles
beyond the bounds are closed, least recently used first; asked for again, a chunk is reopened and
moved forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any

from overlord.errors import SourceError, StorageError
from overlord.sources import clean_tables as cols
from overlord.sources.base import BadFile, File, RawSlice, ReadOptions, Unreachable
from overlord.sources.file_errors import gave_up, is_disk, why
from overlord.sources.formats import FORMATS
from overlord.sources.index import Index
from overlord.sources.lru import Lru
from overlord.sources.python_objects import Listed
from overlord.sources.retry import CLOCK, SLACK_S, SLOW_S, Clock, StorageStats, deadline_s, persist
from overlord.uris import scrub


@dataclass(slots=True)
class OpenChunk:
    """An open chunk. ``slices`` will give slice number ``next`` next. While nobody uses it, it
    holds ``nbytes`` for ``reader``.
    """

    slices: Iterator[RawSlice]
    next: int
    reader: int = -1
    nbytes: int = 0

    def close(self) -> None:
        close = getattr(self.slices, "close", None)  # a generator, which closes its file
        if close is not None:
            close()


class OpenChunkCache:
    """Open chunks of all sources of a process, bounded by number and by the bytes they hold."""

    def __init__(self, max_open: int = 1024, max_bytes: int = 2**29):
        self._handles: Lru[tuple[int, int], OpenChunk] = Lru(max_open, max_bytes, self._let_go)
        self._lock = Lock()
        self._held: dict[int, int] = {}  # bytes by reader
        self._counts = {"opens": 0, "reopens": 0, "reads": 0}

    def take(self, key: tuple[int, int]) -> OpenChunk | None:
        if (handle := self._handles.take(key)) is not None:
            self._hold(handle.reader, -handle.nbytes)
        return handle

    def put(self, key: tuple[int, int], handle: OpenChunk, nbytes: int) -> None:
        handle.reader, handle.nbytes = key[0], nbytes
        self._hold(key[0], nbytes)
        self._handles.put(key, handle, nbytes)

    def bytes_of(self, reader: int) -> int:
        """What the open chunks of one reader hold."""
        return self._held.get(reader, 0)

    def _hold(self, reader: int, nbytes: int) -> None:
        with self._lock:
            left = self._held.get(reader, 0) + nbytes
            if left:
                self._held[reader] = left
            else:
                self._held.pop(reader, None)

    def _let_go(self, handle: OpenChunk) -> None:
        self._hold(handle.reader, -handle.nbytes)
        handle.close()

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def close(self, reader: int | None = None) -> None:
        """Closes all handles, or those of one reader."""
        self._handles.clear(lambda key: reader is None or key[0] == reader)

    def metrics(self) -> dict[str, int]:
        """``opens``, ``reopens`` (among them), ``reads``, ``evictions``; ``open`` and ``bytes``
        now.
        """
        with self._lock:
            counts = dict(self._counts)
        return counts | {
            "evictions": self._handles.evictions,
            "open": len(self._handles),
            "bytes": self._handles.nbytes,
        }


HANDLES = OpenChunkCache()
STALLED = "the disk or the mount hangs; no data is skipped for it: resume when it answers"
_READERS = count()


class ChunkReader:
    """Slices of one source's chunks. Threads may share it; two of them at the same chunk are right,
    but slow.
    """

    def __init__(
        self,
        index: Index,
        options: ReadOptions,
        cache: OpenChunkCache | None = None,
        clock: Clock = CLOCK,
    ):
        self.index, self.options = index, options
        self.tally = StorageStats(index.source, clock)
        self._files = index.access.counted(self.tally)
        self._format = FORMATS[index.format]
        self._cache = cache or HANDLES
        self._id = next(_READERS)
        self._on_disk = self._files.local

    def slice(self, chunk: int, t: int) -> RawSlice:
        """Slice t of a chunk: cheap if slice t-1 was the last one asked for. Past the end it is
        empty, with ``last``.
        """
        file = self.index.files[self.file_of(chunk)]
        try:
            if self._files.fs is None or self._files.remote:
                return self._slice(chunk, t, file)
            return persist(
                lambda: self._checked(chunk, t, file),
                why,
                path=file.path,
                done="read",
                tally=self.tally,
                gave_up=gave_up,
            )
        except (OSError, ValueError) as error:  # BadFile and what Arrow raises are among the latter
            raise self._error(file, error) from error

    def _checked(self, chunk: int, t: int, file: File) -> RawSlice:
        """What was read of a file that changed meanwhile is dropped, whether it makes sense or
        not.
        """
        try:
            found = self._slice(chunk, t, file)
        except (OSError, ValueError) as error:
            if not isinstance(
                getattr(error, "errno", None), int
            ):  # not said by the system: what makes no sense may be another file's
                self._files.check_unchanged(file)
            raise
        if self._files.local or found.bad:
            self._files.check_unchanged(file)
        return found

    def _slice(self, chunk: int, t: int, file: File) -> RawSlice:
        key = (self._id, chunk)
        handle = self._cache.take(key)  # ours alone until it is put back
        if handle is not None and handle.next != t:
            handle.close()
            handle = None
        if handle is None:
            handle = self._open(chunk, t, file)
        found = next(handle.slices, None)
        self._cache.count("reads")
        if found is None:
            return cols.slice_of(0, 0, cols.empty(0, self.options.columns), [], True)
        if found.last:
            handle.close()
        else:
            handle.next = t + 1
            held = (
                self._format.held_bytes(self.index.chunks, chunk, self.options)
                + self._files.read_ahead
            )
            self._cache.put(key, handle, held)
        return found

    # what people ask, from other threads

    @property
    def waits(self) -> bool:
        """Whether reading may wait for storage; rows of a Python object do not."""
        return self._files.fs is not None

    @property
    def own_code(self) -> str:
        """Whose code gives the rows, if it is not ours: that of a Python object."""
        held = self._files.held
        return "" if held is None or isinstance(held, Listed) else type(held).__name__

    @property
    def many(self) -> bool:
        """Whether reads wait for answers rather than for a core."""
        return self._files.remote

    @property
    def quick(self) -> bool:
        """Whether no read hangs: all files opened so far are on disks of this machine."""
        return self._on_disk

    @contextmanager
    def hasty(self) -> Iterator[None]:
        """A read that fails raises ``Later``, and is not tried again here."""
        self.tally.hasty = True
        try:
            yield
        finally:
            self.tally.hasty = False

    @property
    def store_metrics(self) -> dict[str, Any] | None:
        """What this reader asked of an object store; None on a disk."""
        return self.tally.metrics() if self._files.remote else None

    @property
    def storage_metrics(self) -> dict[str, Any] | None:
        """What went wrong with its storage: retries, errors by kind, seconds waited, reads given
        up.
        """
        return self.tally.trouble() if self.waits else None

    @property
    def open_bytes(self) -> int:
        """What its open chunks hold while nobody reads them."""
        return self._cache.bytes_of(self._id)

    def doing(self) -> str:
        """What is waited for, in words, once that takes long."""
        if (attempt := self.tally.oldest()) is None:
            return ""
        seconds, seen = self.tally.clock.now() - attempt.began, attempt.seen
        if seen:
            return (
                f"trying to read {attempt.path} for {seconds:.0f} s ({len(seen)} tries "
                f"failed; the last: {seen[-1].text})"
            )
        return f"reading {attempt.path} for {seconds:.0f} s" if seconds >= SLOW_S else ""

    def stalled(self) -> StorageError | None:
        """Why a read that is under way is to be given up: nothing ends it, and its deadline has
        passed.
        """
        if (attempt := self.tally.oldest()) is None:
            return None
        if self.tally.clock.now() - attempt.began < SLOW_S:
            return None
        # A request of a store is not cut off but ends by itself: it may take twice as long.
        seconds, limit = (
            attempt.idle_s(self.tally.clock),
            deadline_s() * (2 if self._files.remote else 1) + SLACK_S,
        )
        if seconds < limit:
            return None
        problem = f"a read has not ended for {seconds:.1f} s" + (
            f"; before it: {attempt.seen[-1].text}" if attempt.seen else ""
        )
        self.tally.failed("stalled")
        self.tally.gave_up()
        self.tally.end(attempt)
        return StorageError(self.index.source, problem, attempt.path, STALLED)

    def file_of(self, chunk: int) -> int:
        return int(self.index.chunks.file[chunk])

    def close(self) -> None:
        self._cache.close(self._id)

    def _open(self, chunk: int, t: int, file: File) -> OpenChunk:
        found = self._files.check_unchanged(file)
        self._on_disk = self._on_disk and found is not None and is_disk(found.st_dev)
        self._cache.count("opens")
        if t:
            self._cache.count("reopens")
        return OpenChunk(
            self._format.read(self._files, file, self.index.chunks, chunk, self.options, t), t
        )

    def _error(self, file: File, error: OSError | ValueError) -> SourceError:
        if isinstance(error, Unreachable):
            return StorageError(self.index.source, error.problem, file.path, error.remedy)
        if isinstance(error, BadFile):
            return SourceError(self.index.source, error.problem, file.path, error.remedy)
        return SourceError(
            self.index.source,
            f"cannot be read: {scrub(str(error))}",
            file.path,
            "check the disk or store; data is never skipped for it",
        )
