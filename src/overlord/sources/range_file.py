"""A remote object as a file: a few long requests serve many short reads.

A request costs tens of milliseconds, however short it is. Row readers read 64 to 256 kB at a time,
from one place (lines, tar) or alternately from several (columns of a row group). Each place
therefore has a *run* that reads ahead of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Bytes of a run's first request outside known ranges: a reader that skips wastes no more.
FIRST = 2**18
# Most bytes of the following requests, which double up to it. A run then reads 25 MB/s at 30 ms
# per request, more than a core decodes.
READ_AHEAD = 2**20
# Bytes at the end of a file that one request reads: footers are read backwards, in two or three
# pieces.
TAIL = 2**16
GAP = 2**16  # ranges at most this many bytes apart are merged
RUNS = 8  # least number of runs of a file; a file with more known ranges has one for each


@dataclass(slots=True)
class _Run:
    start: int
    data: memoryview
    ahead: int

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


class RangeFile:
    """File object for ``pyarrow.PythonFile`` that reads ahead in several runs. Not thread-safe."""

    closed = False

    def __init__(
        self,
        fetch: Callable[[int, int], memoryview],
        size: int,
        ranges: Sequence[tuple[int, int]] = (),
        end: Callable[[], None] | None = None,
    ):
        self._fetch, self._size, self._at, self._end = fetch, size, 0, end
        self._ranges = sorted(ranges)
        self._most = max(RUNS, len(self._ranges))
        self._runs: list[_Run] = []  # the most recently used one is last

    def read(self, n: int = -1) -> memoryview:
        stop = self._size if n < 0 else min(self._at + n, self._size)
        if stop <= self._at:
            return memoryview(b"")
        data = self._get(self._at, stop)
        self._at = stop
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        self._runs.clear()
        if self._end is not None:
            self._end()

    def _get(self, start: int, stop: int) -> memoryview:
        run = next((r for r in self._runs if r.start <= start <= r.stop), None)
        if run is None:
            run = self._begin(start, stop)
        else:
            self._runs.remove(run)
        self._runs.append(run)
        if stop > run.stop:
            self._advance(run, start, stop)
        return run.data[start - run.start : stop - run.start]

    def _begin(self, start: int, stop: int) -> _Run:
        known = self._end_of_range(start)
        first = min(start, max(0, self._size - TAIL)) if known is None else start
        end = (
            min(known, start + READ_AHEAD) if known is not None else min(self._size, start + FIRST)
        )
        if len(self._runs) >= self._most:
            self._runs.pop(0)
        return _Run(
            first, self._fetch(first, max(stop, end)), READ_AHEAD if known is not None else FIRST
        )

    def _advance(self, run: _Run, start: int, stop: int) -> None:
        """Move the run to ``start``: keep its bytes from ``start`` on, and fetch up to ``stop``.

        The request extends beyond ``stop`` by the read-ahead of the run.
        """
        kept, known = run.data[start - run.start :], self._end_of_range(start)
        run.ahead = min(2 * run.ahead, READ_AHEAD)
        end = min(self._size if known is None else known, run.stop + run.ahead)
        fresh = self._fetch(run.stop, max(stop, end))
        run.start, run.data = start, fresh if not len(kept) else memoryview(b"".join((kept, fresh)))

    def _end_of_range(self, at: int) -> int | None:
        i = bisect_right(self._ranges, (at, self._size + 1)) - 1
        return self._ranges[i][1] if i >= 0 and at < self._ranges[i][1] else None


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges sorted, with ranges at most ``GAP`` bytes apart merged."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if out and start - out[-1][1] <= GAP:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out
