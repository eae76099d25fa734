"""Open chunks, bounded: slices of a chunk are asked for in order, and what is open is shared by the whole process.

Many chunks of many sources are open at the same time, one slice taken from each in turn. Handles beyond the bounds are
closed, least recently used first; asked for again, a chunk is reopened and moved forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any

from overlord.errors import SourceError
from overlord.sources import columns as cols
from overlord.sources.base import BadFile, RawSlice, ReadOptions, Unreachable
from overlord.sources.formats import FORMATS
from overlord.sources.index import Index
from overlord.sources.lru import Lru
from overlord.sources.uris import scrub


@dataclass(slots=True)
class Handle:
    """An open chunk. ``slices`` will give slice number ``next`` next."""

    slices: Iterator[RawSlice]
    next: int

    def close(self) -> None:
        close = getattr(self.slices, "close", None)  # a generator, which closes its file
        if close is not None:
            close()


class HandleCache:
    """Open chunks of all sources of a process, bounded by number and by the bytes they hold."""

    def __init__(self, max_open: int = 1024, max_bytes: int = 2**29):
        self._handles: Lru[tuple[int, int], Handle] = Lru(max_open, max_bytes, Handle.close)
        self._lock = Lock()
        self._counts = {"opens": 0, "reopens": 0, "reads": 0}

    def take(self, key: tuple[int, int]) -> Handle | None:
        return self._handles.take(key)

    def put(self, key: tuple[int, int], handle: Handle, nbytes: int) -> None:
        self._handles.put(key, handle, nbytes)

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def close(self, reader: int | None = None) -> None:
        """Closes all handles, or those of one reader."""
        self._handles.clear(lambda key: reader is None or key[0] == reader)

    def metrics(self) -> dict[str, int]:
        """``opens``, ``reopens`` (among them), ``reads``, ``evictions``; ``open`` and ``bytes`` now."""
        with self._lock:
            counts = dict(self._counts)
        return counts | {"evictions": self._handles.evictions, "open": len(self._handles), "bytes": self._handles.nbytes}


HANDLES = HandleCache()
_READERS = count()


class ChunkReader:
    """Slices of one source's chunks. Threads may share it; two of them at the same chunk are right, but slow."""

    def __init__(self, index: Index, options: ReadOptions, cache: HandleCache | None = None):
        self.index, self.options = index, options
        self._files = index.access.counted()
        self._format = FORMATS[index.format]
        self._cache = cache or HANDLES
        self._id = next(_READERS)

    def slice(self, chunk: int, t: int) -> RawSlice:
        """Slice t of a chunk: cheap if slice t-1 was the last one asked for. Past the end it is empty, with ``last``."""
        key = (self._id, chunk)
        handle = self._cache.take(key)  # ours alone until it is put back
        if handle is not None and handle.next != t:
            handle.close()
            handle = None
        try:
            if handle is None:
                handle = self._open(chunk, t)
            found = next(handle.slices, None)
        except (OSError, ValueError) as error:  # BadFile and what Arrow raises are among the latter
            raise self._error(chunk, error) from error
        self._cache.count("reads")
        if found is None:
            return cols.slice_of(0, 0, cols.empty(0, self.options.columns), [], True)
        if found.last:
            handle.close()
        else:
            handle.next = t + 1
            held = self._format.held_bytes(self.index.chunks, chunk, self.options) + self._files.read_ahead
            self._cache.put(key, handle, held)
        return found

    @property
    def store_metrics(self) -> dict[str, Any] | None:
        """What this reader asked of an object store; None on a disk."""
        return self._files.store_metrics

    def file_of(self, chunk: int) -> int:
        return int(self.index.chunks.file[chunk])

    def close(self) -> None:
        self._cache.close(self._id)

    def _open(self, chunk: int, t: int) -> Handle:
        file = self.index.files[self.file_of(chunk)]
        self._files.check_unchanged(file)
        self._cache.count("opens")
        if t:
            self._cache.count("reopens")
        return Handle(self._format.read(self._files, file, self.index.chunks, chunk, self.options, t), t)

    def _error(self, chunk: int, error: OSError | ValueError) -> SourceError:
        path = self.index.files[self.file_of(chunk)].path
        if isinstance(error, (BadFile, Unreachable)):
            return SourceError(self.index.source, error.problem, path, error.remedy)
        return SourceError(
            self.index.source, f"cannot be read: {scrub(str(error))}", path, "check the disk or store; data is never skipped for it"
        )
