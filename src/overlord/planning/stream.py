"""The front of one source's stream: announcements of its loaders, merged into one order.

Loaders own whole chunks, so each announces its shard of a window in the window's order. A sample is
final when every loader that is not done with the window has announced a later one. The order never
depends on which loader announces first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from overlord.errors import SourceError
from overlord.messages.control import Cursor
from overlord.messages.data import Announce, SampleBlock
from overlord.planning.sample_blocks import NO_ROWS, concat, last_key, sorted_found, split, take
from overlord.sample import Column, Ragged, cut_rows, join_rows, no_items


@dataclass(slots=True, eq=False)
class _ReadyRun:
    """A run of final samples of one window."""

    at: Cursor  # epoch, group, window
    found: SampleBlock
    loader: np.ndarray | int  # loader that holds each sample
    tokens: np.ndarray  # running sum of the samples' tokens, with a leading 0
    bad_at: np.ndarray  # number of samples of the run before each quarantined row
    # int64 [n, 3]: file, row and part of each sample; one array, since steps are joined from
    # hundreds of short runs
    ids: np.ndarray
    size: int  # samples, taken ones included
    long_at: list[int]  # number of samples of the run before each long document, not falling
    lost: list[int]  # running sum of the tokens that these documents lost, with a leading 0
    start: int = 0  # samples already taken

    @property
    def left(self) -> int:
        return self.size - self.start

    @property
    def trails(self) -> bool:
        """Whether quarantined rows or dropped documents may follow the run's last sample."""
        return len(self.bad_at) > 0 or (len(self.long_at) > 0 and self.long_at[-1] >= self.size)


@dataclass(slots=True, eq=False)
class _Announced:
    """The announcements of one loader for the current window."""

    parts: list[SampleBlock] = field(default_factory=list)
    closed: bool = False


class StreamPiece(NamedTuple):
    """Samples ``start`` to ``stop`` of a run, without a copy."""

    at: Cursor  # epoch, group, window
    found: SampleBlock
    loader: np.ndarray | int
    ids: np.ndarray
    start: int
    stop: int


BadRow = tuple[int, int, int, str]  # epoch, file, row, reason


@dataclass(frozen=True, slots=True)
class RowLocations:
    """The locations of a source's rows, as errors name them."""

    files: Sequence[str] = ()
    unit: str = "row"  # of row numbers: "row", or "byte" for offsets

    def path(self, file: int) -> str:
        """Return the path of a file, or its number if the path is not known."""
        return self.files[file] if file < len(self.files) else f"file {file}"


UNNAMED = RowLocations()


class SourceStream:
    """The front of one source's stream, a pure object: it turns announcements into samples."""

    def __init__(
        self,
        name: str,
        *,
        loaders: int,
        n_groups: int,
        epochs: int | None,
        max_bad: int,
        cursor: Cursor,
        rows: RowLocations = UNNAMED,
        last_groups: int | None = None,
    ):
        """``last_groups``: the groups of the last epoch, if it ends early."""
        self._rows = rows
        self._last_groups = last_groups
        self.name, self._n_loaders, self._n_groups, self._epochs, self._max_bad = (
            name,
            loaders,
            n_groups,
            epochs,
            max_bad,
        )
        self._at = Cursor(cursor.epoch, cursor.group, cursor.window)  # the window being merged
        self._announced: dict[tuple[int, int, int], list[_Announced]] = {}
        # (epoch, group) -> the last window of each loader, once known
        self._lasts: dict[tuple[int, int], list[int | None]] = {}
        self._segments: deque[_ReadyRun] = deque()
        self._ready = 0
        self._epoch_has_sample = cursor.file >= 0
        self._epoch_long = 0  # documents of the epoch being merged that lost tokens
        self._bad_run, self._last_bad = 0, ""  # consecutive failures; text of the last one
        self._exhausted = epochs is not None and (
            cursor.epoch >= epochs
            or (self._ends_early(cursor.epoch) and cursor.group >= (last_groups or 0))
        )
        # loader -> the window at which it failed, and its error
        self._failed: dict[int, tuple[tuple[int, int, int], Exception]] = {}
        # rows that filters dropped, in windows that the draw has not passed
        self._drops: deque[tuple[Cursor, int]] = deque()
        self.error: Exception | None = None  # set once the stream fails after the ready samples
        self.dropped = 0  # rows that filters dropped, in windows that the draw has passed
        # documents that lost tokens up to the last sample taken, and the number of these tokens
        self.long = self.lost = 0

    @property
    def ready(self) -> int:
        return self._ready

    @property
    def passed(self) -> tuple[int, int, int]:
        """The counts of ``spec.PASSED`` since this stream was made.

        They are rows that filters dropped, documents that lost tokens to ``on_long``, and the
        number of these tokens.
        """
        return self.dropped, self.long, self.lost

    @property
    def ended(self) -> bool:
        return self._exhausted and self.error is None

    @property
    def group(self) -> int:
        """The number of the group being merged, counted over all epochs."""
        return self._at.epoch * self._n_groups + self._at.group

    def _ends_early(self, epoch: int) -> bool:
        return self._last_groups is not None and epoch + 1 == self._epochs

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        count = held = 0
        for segment in self._segments:
            if start >= segment.left:
                start -= segment.left
                continue
            first = segment.start + start
            base = int(segment.tokens[first])
            k = int(np.searchsorted(segment.tokens, base + tokens - held, side="left"))
            k = min(k, len(segment.found))
            count, held, start = count + k - first, held + int(segment.tokens[k]) - base, 0
            if held >= tokens:
                break
        return count, held

    def samples_within(self, tokens: int) -> tuple[int, int]:
        """Return the most ready samples with at most ``tokens`` in all, and their tokens."""
        count = held = 0
        for segment in self._segments:
            base = int(segment.tokens[segment.start])
            k = int(np.searchsorted(segment.tokens, base + tokens - held, side="right")) - 1
            count, held = count + k - segment.start, held + int(segment.tokens[k]) - base
            if k < segment.size:
                break
        return count, held

    def add(self, announcement: Announce, ordinal: int) -> None:
        """Add an announcement of loader ``ordinal``, counted from 0 within the source."""
        if self.error is not None or self._exhausted:
            return
        if announcement.error is not None:
            # The stream breaks when it reaches this window, not now: the samples that are final at
            # this moment depend on timing.
            self._failed[ordinal] = (
                (announcement.epoch, announcement.group, announcement.window),
                announcement.error,
            )
            self._advance()
            return
        announced = self._window((announcement.epoch, announcement.group, announcement.window))
        if announcement.found is not None:
            announced[ordinal].parts.append(announcement.found)
        announced[ordinal].closed |= announcement.closes
        if announcement.last:
            self._lasts.setdefault(
                (announcement.epoch, announcement.group), [None] * self._n_loaders
            )[ordinal] = announcement.window
        self._advance()

    def _advance(self) -> None:
        while not self._exhausted and self.error is None:
            at = (self._at.epoch, self._at.group, self._at.window)
            if at not in self._announced and at[:2] not in self._lasts and not self._failed:
                return  # no loader has announced this window or the end of its group
            announced = self._window(at)
            lasts = self._lasts.get(at[:2], [None] * self._n_loaders)
            # A loader that is done with the group has no rows in later windows and does not
            # announce them.
            closed = [
                s.closed or (last is not None and at[2] > last)
                for s, last in zip(announced, lasts, strict=True)
            ]
            self._merge(announced, closed)
            if not all(closed):
                broken = [
                    self._failed[k][1]
                    for k, over in enumerate(closed)
                    if not over and self._fails_at(k, at)
                ]
                if len(broken) == closed.count(False) and self.error is None:
                    # no loader is left to wait for: later samples can never be ordered
                    self.error = broken[0]
                return
            del self._announced[at]
            self._next_window(lasts)

    def _window(self, at: tuple[int, int, int]) -> list[_Announced]:
        """Return the announcements of a window by loader; of a new window they are empty."""
        if (announced := self._announced.get(at)) is None:
            announced = self._announced[at] = [_Announced() for _ in range(self._n_loaders)]
        return announced

    def _fails_at(self, loader: int, at: tuple[int, int, int]) -> bool:
        return loader in self._failed and self._failed[loader][0] == at

    def _merge(self, announced: list[_Announced], closed: list[bool]) -> None:
        """Move final samples from the loaders' announcements to the ready runs."""
        if self._n_loaders == 1:
            for found in announced[0].parts:
                self._append(found, 0)
            announced[0].parts = []
            return
        bound = None  # the smallest last key among loaders that may still announce
        for one, is_closed in zip(announced, closed, strict=True):
            if not is_closed:
                last = last_key(one.parts)
                if last is None:
                    return
                bound = last if bound is None else min(bound, last)
        picked, loaders = [], []
        for ordinal, one in enumerate(announced):
            final, one.parts = split(one.parts, bound)
            picked += final
            loaders += [np.full(len(f), ordinal) for f in final]
        if picked:
            found, order = sorted_found(concat(picked))
            self._append(found, np.concatenate(loaders)[order])

    def _append(self, found: SampleBlock, loader: np.ndarray | int) -> None:
        if self.error is not None:
            return  # the stream broke before this block
        if found.dropped:
            self._drops.append((self._at, found.dropped))
        if not len(found) and not len(found.bad_key) and found.long is None:
            return
        self._epoch_long += 0 if found.long is None else len(found.long)
        bad_at = _rank_of_bad(found)
        stop = self._check_bad(found, bad_at)
        if stop is not None:
            goods, bads = stop
            found = take(found, np.arange(goods), np.arange(bads))
            loader, bad_at = loader if isinstance(loader, int) else loader[:goods], bad_at[:bads]
        n, lengths = len(found), found.meta["tokens"]
        assert isinstance(lengths, np.ndarray)
        tokens, ids = np.zeros(n + 1, np.int64), np.empty((n, 3), np.int64)
        lengths.cumsum(out=tokens[1:])
        ids[:, 0], ids[:, 1], ids[:, 2] = found.file, found.row, found.part
        long_at, lost = _long_documents(found)
        self._segments.append(
            _ReadyRun(self._at, found, loader, tokens, bad_at, ids, n, long_at, lost)
        )
        self._ready += n
        self._epoch_has_sample |= n > 0

    def _check_bad(self, found: SampleBlock, bad_at: np.ndarray) -> tuple[int, int] | None:
        """Count consecutive failures in stream order; set ``error`` once they reach ``max_bad``.

        Return the numbers of samples and failures up to that one; None if it is not reached.
        """
        if not len(bad_at):
            self._bad_run = self._bad_run if not len(found) else 0
            return None
        unit = self._rows.unit
        self._last_bad = f"; the last: {unit} {int(found.bad_row[-1])}: {found.bad_reason[-1]}"
        previous = 0
        for j, goods in enumerate(bad_at.tolist()):
            self._bad_run = self._bad_run + 1 if goods == previous else 1
            previous = goods
            if self._bad_run >= self._max_bad:
                file, row = int(found.bad_file[j]), int(found.bad_row[j])
                self.error = SourceError(
                    self.name,
                    f"{self._bad_run} consecutive rows could not be used; the last: {unit} "
                    f"{row}: {found.bad_reason[j]}",
                    self._rows.path(file),
                    remedy="correct the source (overlord inspect shows it), filter these rows, or "
                    f"raise max_bad{_tokenize(self._last_bad)}",
                    byte=row if unit == "byte" else -1,
                )
                return goods, j + 1
        if previous < len(found):
            self._bad_run = 0
        return None

    def _next_window(self, lasts: list[int | None]) -> None:
        at = self._at
        if any(last is None or last > at.window for last in lasts):
            self._at = Cursor(at.epoch, at.group, at.window + 1)
            return
        del self._lasts[at.epoch, at.group]
        self._at = Cursor(at.epoch, at.group + 1)
        early = self._ends_early(at.epoch)
        if self._at.group < (self._last_groups if early and self._last_groups else self._n_groups):
            return
        # a part of an epoch may have no sample where the whole epochs before it had some
        if not self._epoch_has_sample and not (early and at.epoch):
            self.error = self._no_sample(at.epoch)
            return
        self._at, self._epoch_has_sample, self._epoch_long = Cursor(epoch=at.epoch + 1), False, 0
        self._exhausted = self._epochs is not None and self._at.epoch >= self._epochs

    def _no_sample(self, epoch: int) -> SourceError:
        """Return the error of an epoch without a sample."""
        lost = f"epoch {epoch} gave no sample: every row was quarantined or dropped by a filter"
        remedy = (
            f"look at session.quarantine() and at the source's filters{_tokenize(self._last_bad)}"
        )
        if n := self._epoch_long:
            lost += (
                f", or is longer than max_document (on_long='drop'; {n:,} document{'s' * (n > 1)})"
            )
            remedy = (
                "raise the context or max_document, or let on_long split long documents; " + remedy
            )
        return SourceError(self.name, lost + self._last_bad, remedy=remedy)

    def delaying_loaders(self) -> list[int]:
        """Return the loaders that still have to announce rows of the window being merged.

        They are counted from 0 within the source, and include failed ones.
        """
        at = (self._at.epoch, self._at.group, self._at.window)
        announced, lasts = (
            self._announced.get(at),
            self._lasts.get(at[:2], [None] * self._n_loaders),
        )
        return [
            k
            for k, last in enumerate(lasts)
            if (announced is None or not announced[k].closed) and (last is None or at[2] <= last)
        ]

    def take(self, n: int) -> tuple[list[StreamPiece], list[BadRow]]:
        """Take the next n samples, which must be ready, and the quarantined rows before them."""
        pieces: list[StreamPiece] = []
        bad: list[BadRow] = []
        self._ready -= n
        while n > 0:
            segment = self._segments[0]
            a = segment.start
            segment.start = b = min(a + n, segment.size)
            if b > a:
                pieces.append(
                    StreamPiece(segment.at, segment.found, segment.loader, segment.ids, a, b)
                )
            if len(segment.bad_at):
                bad += _bad_rows(
                    segment, np.flatnonzero((segment.bad_at < b) & (segment.bad_at >= a))
                )
            self._count_long(segment, a, b)
            n -= b - a
            # A run whose samples are all taken is removed only to reach the next sample, so that
            # failures after its last sample stay unlisted.
            if b == segment.size and (n > 0 or not segment.trails):
                bad += _bad_rows(segment, np.flatnonzero(segment.bad_at >= b))
                self._count_long(segment, b)
                self._segments.popleft()
        # Dropped rows of a window count when a later window is drawn from: a restored stream reads
        # the window of its cursor again.
        while pieces and self._drops and self._drops[0][0] < pieces[-1].at:
            self.dropped += self._drops.popleft()[1]
        return pieces, bad

    def _count_long(self, segment: _ReadyRun, start: int, stop: int | None = None) -> None:
        """Count the documents that lost tokens from sample ``start`` to ``stop`` - 1 of a run.

        Without ``stop``, count to the end of the run. A truncated document counts with its sample,
        a dropped one with the next sample. So a restored stream counts each once.
        """
        if not segment.long_at:
            return
        # Every source gives to every step: numpy would cost more than the few numbers.
        a = bisect_left(segment.long_at, start)
        b = len(segment.long_at) if stop is None else bisect_left(segment.long_at, stop)
        self.long += b - a
        self.lost += segment.lost[b] - segment.lost[a]

    def ahead(self) -> list[StreamPiece]:
        """Return all ready samples without taking them."""
        return [
            StreamPiece(s.at, s.found, s.loader, s.ids, s.start, s.size)
            for s in self._segments
            if s.left
        ]

    def last_failures(self) -> list[BadRow]:
        """Return the failed rows after the last sample taken, and count dropped rows to the end.

        The list is empty unless the stream failed, or ended with all samples taken. Long documents
        are counted to the end only if all samples are taken. Call once, when the source leaves the
        job.
        """
        if self.error is None and (self._ready or not self._exhausted):
            return []
        self.dropped += sum(n for _, n in self._drops)
        self._drops.clear()
        for s in self._segments if not self._ready else ():
            self._count_long(s, s.start)
        return [
            row for s in self._segments for row in _bad_rows(s, np.flatnonzero(s.bad_at >= s.start))
        ]

    def check(self) -> None:
        assert self._ready == sum(s.left for s in self._segments), (self.name, self._ready)


def _tokenize(reason: str) -> str:
    """Return a hint to use ``Tokenize`` if ``reason`` is missing token ids, else an empty text."""
    lacks = (
        reason.endswith(": tokens is null or missing")
        or ": expected the column 'tokens', got " in reason
    )
    return "; text becomes token ids by Tokenize in the source's transforms" if lacks else ""


def step_meta(pieces: Sequence[StreamPiece]) -> dict[str, Column]:
    """Return the metadata columns of all pieces, joined.

    A column of numbers that only some sources have is left out, since a strategy cannot balance
    on it. In a column of lists, samples of other sources have empty lists: they have no images.
    """
    meta: dict[str, Column] = {}
    first = pieces[0].found.meta
    if all(p.found.meta.keys() == first.keys() for p in pieces):
        return {name: _joined(pieces, name) for name in first}
    for name in dict.fromkeys(name for p in pieces for name in p.found.meta):
        held = [p.found.meta.get(name) for p in pieces]
        if any(c is None for c in held) and not any(isinstance(c, Ragged) for c in held):
            continue
        cut = [
            no_items(p.stop - p.start) if c is None else cut_rows(c, p.start, p.stop)
            for c, p in zip(held, pieces, strict=True)
        ]
        meta[name] = join_rows(cut)
    return meta


def _joined(pieces: Sequence[StreamPiece], name: str) -> Column:
    """Return a metadata column that all pieces have, joined."""
    # unpacked, since reading fields of hundreds of pieces by name takes longer
    held = [(found.meta[name], start, stop) for _, found, _, _, start, stop in pieces]
    if set(map(type, next(zip(*held, strict=True)))) == {np.ndarray}:
        return np.concatenate([column[start:stop] for column, start, stop in held])  # type: ignore[index]
    return join_rows([cut_rows(*cut) for cut in held])


def _bad_rows(segment: _ReadyRun, which: np.ndarray) -> list[BadRow]:
    f = segment.found
    return [
        (segment.at.epoch, int(f.bad_file[j]), int(f.bad_row[j]), f.bad_reason[j])
        for j in which.tolist()
    ]


def _rank_of_bad(found: SampleBlock) -> np.ndarray:
    """Return the number of the block's samples that precede each quarantined row in its window."""
    return _rank(found, found.bad_key, found.bad_file, found.bad_row)


def _long_documents(found: SampleBlock) -> tuple[list[int], list[int]]:
    """Return the number of the block's samples that precede each long document.

    For a truncated document it is the index of its own sample. Return also the running sum of the
    tokens that they lost.
    """
    if (long := found.long) is None:
        return [], [0]
    at = _rank(found, long.key, long.file, long.row)
    return at.tolist(), [0, *np.cumsum(long.lost).tolist()]


def _rank(found: SampleBlock, key: np.ndarray, file: np.ndarray, row: np.ndarray) -> np.ndarray:
    if not len(key):
        return NO_ROWS
    order = np.lexsort(  # stable: a row precedes the sample that was made of it
        (
            np.concatenate([row, found.row]),
            np.concatenate([file, found.file]),
            np.concatenate([key, found.key]),
        )
    )
    is_row = order < len(key)
    return np.cumsum(~is_row)[is_row]
