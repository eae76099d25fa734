"""The front of one source's stream: announcements of its loaders, merged into one order.

Loaders own whole chunks, so each announces its share of a window in the window's order; a sample is
final when every loader that is not done with the window has announced one behind it. The order
never depends on who announces first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from overlord.errors import SourceError
from overlord.messages.control import Cursor
from overlord.messages.loader import Announce, SampleBlock
from overlord.planning.sample_blocks import (
    concat,
    last_key,
    rank_of_bad,
    rank_of_long,
    sorted_found,
    split,
    take,
)
from overlord.sample import Column, Ragged, cut_rows, join_rows, no_items


@dataclass(slots=True, eq=False)
class _Segment:
    """A run of final samples of one window."""

    at: Cursor  # epoch, group, window
    found: SampleBlock
    loader: np.ndarray | int  # who holds each sample
    tokens: np.ndarray  # running sum, with a leading 0
    bad_at: np.ndarray  # how many samples of the segment stand before each quarantined row
    # int64 [n, 3]: file, row and part of each, side by side, since steps are joined of hundreds of
    # short runs
    ids: np.ndarray
    size: int
    long_at: np.ndarray  # how many samples of the segment stand before each long document
    start: int = 0  # samples already taken

    @property
    def left(self) -> int:
        return self.size - self.start

    @property
    def trails(self) -> bool:
        """Return whether rows without a sample may follow its last sample."""
        return len(self.bad_at) > 0 or (
            len(self.long_at) > 0 and int(self.long_at[-1]) >= self.size
        )


@dataclass(slots=True, eq=False)
class _Share:
    """What one loader has announced of the window being merged."""

    parts: list[SampleBlock] = field(default_factory=list)
    closed: bool = False


class Piece(NamedTuple):
    """Samples ``start`` to ``stop`` of a run: what a draw takes, without a copy."""

    at: Cursor  # epoch, group, window
    found: SampleBlock
    loader: np.ndarray | int
    ids: np.ndarray
    start: int
    stop: int


BadRow = tuple[int, int, int, str]  # epoch, file, row, reason


class SourceStream:
    """One source's front. A pure value machine: announcements in, samples out."""

    def __init__(
        self,
        name: str,
        *,
        loaders: int,
        n_groups: int,
        epochs: int | None,
        max_bad: int,
        cursor: Cursor,
        files: Sequence[str] = (),
    ):
        self._files = files  # their paths, for errors
        self.name, self._n_loaders, self._n_groups, self._epochs, self._max_bad = (
            name,
            loaders,
            n_groups,
            epochs,
            max_bad,
        )
        self._at = Cursor(cursor.epoch, cursor.group, cursor.window)  # the window being merged
        self._shares: dict[tuple[int, int, int], list[_Share]] = {}
        # (epoch, group) -> the last window of each loader, once known
        self._lasts: dict[tuple[int, int], list[int | None]] = {}
        self._segments: deque[_Segment] = deque()
        self._ready = 0
        self._epoch_has_sample = cursor.file >= 0
        self._epoch_long = 0  # documents of the epoch being merged that lost tokens
        self._bad_run, self._bad_said = 0, ""  # failures in a row; what was wrong with the last
        self._exhausted = epochs is not None and cursor.epoch >= epochs
        # loader -> the window it cannot go on from, and why
        self._failed: dict[int, tuple[tuple[int, int, int], Exception]] = {}
        # rows that filters dropped in windows not yet behind the samples taken
        self._drops: deque[tuple[Cursor, int]] = deque()
        self.error: Exception | None = None  # the stream breaks behind the ready samples
        self.dropped = 0  # in windows behind the samples taken
        # documents that lost tokens up to the last sample taken, and how many tokens
        self.long = self.lost = 0

    @property
    def ready(self) -> int:
        return self._ready

    @property
    def passed(self) -> tuple[int, int, int]:
        """Rows that filters dropped, documents that lost tokens to ``on_long``, and these tokens:
        so far (``spec.PASSED``).
        """
        return self.dropped, self.long, self.lost

    @property
    def ended(self) -> bool:
        return self._exhausted and self.error is None

    @property
    def group(self) -> int:
        """The group being merged, counted over epochs."""
        return self._at.epoch * self._n_groups + self._at.group

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

    def add(self, news: Announce, ordinal: int) -> None:
        """Take in an announcement of the source's loader number ``ordinal``."""
        if self.error is not None or self._exhausted:
            return
        if news.error is not None:
            # The stream breaks where it comes to this window, not now: what was final when the news
            # came depends on timing.
            self._failed[ordinal] = ((news.epoch, news.group, news.window), news.error)
            self._advance()
            return
        shares = self._shares.setdefault(
            (news.epoch, news.group, news.window), [_Share() for _ in range(self._n_loaders)]
        )
        if news.found is not None:
            shares[ordinal].parts.append(news.found)
        shares[ordinal].closed |= news.closes
        if news.last:
            self._lasts.setdefault((news.epoch, news.group), [None] * self._n_loaders)[ordinal] = (
                news.window
            )
        self._advance()

    def _advance(self) -> None:
        while not self._exhausted and self.error is None:
            at = (self._at.epoch, self._at.group, self._at.window)
            shares = self._shares.setdefault(at, [_Share() for _ in range(self._n_loaders)])
            lasts = self._lasts.get(at[:2], [None] * self._n_loaders)
            # A loader done with the group has nothing in later windows and says no more about them.
            closed = [
                s.closed or (last is not None and at[2] > last)
                for s, last in zip(shares, lasts, strict=True)
            ]
            self._merge(shares, closed)
            if not all(closed):
                broken = [
                    self._failed[k][1]
                    for k, over in enumerate(closed)
                    if not over and self._fails_at(k, at)
                ]
                if len(broken) == closed.count(False) and self.error is None:
                    # nobody is left to wait for: samples behind these can never be ordered
                    self.error = broken[0]
                return
            del self._shares[at]
            self._next_window(lasts)

    def _fails_at(self, loader: int, at: tuple[int, int, int]) -> bool:
        return loader in self._failed and self._failed[loader][0] == at

    def _merge(self, shares: list[_Share], closed: list[bool]) -> None:
        """Move what is final from the shares to the ready segments."""
        if self._n_loaders == 1:
            for found in shares[0].parts:
                self._append(found, 0)
            shares[0].parts = []
            return
        bound = None  # the smallest last key among loaders that may still announce
        for share, is_closed in zip(shares, closed, strict=True):
            if not is_closed:
                last = last_key(share.parts)
                if last is None:
                    return
                bound = last if bound is None else min(bound, last)
        picked, loaders = [], []
        for ordinal, share in enumerate(shares):
            final, share.parts = split(share.parts, bound)
            picked += final
            loaders += [np.full(len(f), ordinal) for f in final]
        if picked:
            found, order = sorted_found(concat(picked))
            self._append(found, np.concatenate(loaders)[order])

    def _append(self, found: SampleBlock, loader: np.ndarray | int) -> None:
        if self.error is not None:
            return  # the stream broke in a part before this one
        if found.dropped:
            self._drops.append((self._at, found.dropped))
        if not len(found) and not len(found.bad_key) and found.long is None:
            return
        self._epoch_long += 0 if found.long is None else len(found.long)
        bad_at = rank_of_bad(found)
        stop = self._check_bad(found, bad_at)
        if stop is not None:
            goods, bads = stop
            found = take(found, np.arange(goods), np.arange(bads))
            loader, bad_at = loader if isinstance(loader, int) else loader[:goods], bad_at[:bads]
        tokens = np.zeros(len(found) + 1, np.int64)
        lengths = found.meta["tokens"]
        assert isinstance(lengths, np.ndarray)
        np.cumsum(lengths, out=tokens[1:])
        ids = np.stack([found.file, found.row, found.part], axis=1, dtype=np.int64)
        self._segments.append(
            _Segment(self._at, found, loader, tokens, bad_at, ids, len(found), rank_of_long(found))
        )
        self._ready += len(found)
        self._epoch_has_sample |= len(found) > 0

    def _check_bad(self, found: SampleBlock, bad_at: np.ndarray) -> tuple[int, int] | None:
        """Count failures in a row, in stream order; (samples, failures) up to where the job must
        stop, or None.
        """
        if not len(bad_at):
            self._bad_run = self._bad_run if not len(found) else 0
            return None
        self._bad_said = f"; the last: row {int(found.bad_row[-1])}: {found.bad_reason[-1]}"
        previous = 0
        for j, goods in enumerate(bad_at.tolist()):
            self._bad_run = self._bad_run + 1 if goods == previous else 1
            previous = goods
            if self._bad_run >= self._max_bad:
                file, row = int(found.bad_file[j]), int(found.bad_row[j])
                self.error = SourceError(
                    self.name,
                    f"{self._bad_run} rows in a row could not be used; the last: row "
                    f"{row}: {found.bad_reason[j]}",
                    self._files[file] if file < len(self._files) else f"file {file}",
                    remedy="mend the source (overlord inspect shows it), filter these rows, or "
                    f"raise max_bad{_tokenize(self._bad_said)}",
                )
                return goods, j + 1
        if previous < len(found):
            self._bad_run = 0
        return None

    def _next_window(self, lasts: list[int | None]) -> None:
        at = self._at
        if any(last is None or last > at.window for last in lasts):
            self._at = at._replace(window=at.window + 1)
            return
        del self._lasts[at.epoch, at.group]
        self._at = at._replace(group=at.group + 1, window=0)
        if self._at.group < self._n_groups:
            return
        if not self._epoch_has_sample:
            self.error = self._no_sample(at.epoch)
            return
        self._at, self._epoch_has_sample, self._epoch_long = Cursor(epoch=at.epoch + 1), False, 0
        self._exhausted = self._epochs is not None and self._at.epoch >= self._epochs

    def _no_sample(self, epoch: int) -> SourceError:
        lost = f"epoch {epoch} gave no sample: every row was quarantined or dropped by a filter"
        remedy = (
            f"look at session.quarantine() and at the source's filters{_tokenize(self._bad_said)}"
        )
        if n := self._epoch_long:
            lost += (
                f", or is longer than the context (on_long='drop'; {n:,} document{'s' * (n > 1)})"
            )
            remedy = "raise the context, or let on_long split long documents; " + remedy
        return SourceError(self.name, lost + self._bad_said, remedy=remedy)

    def behind(self) -> list[int]:
        """Loaders whose word is missing before more samples become final, those that will never
        speak again among them.
        """
        at = (self._at.epoch, self._at.group, self._at.window)
        shares, lasts = self._shares.get(at), self._lasts.get(at[:2], [None] * self._n_loaders)
        return [
            k
            for k, last in enumerate(lasts)
            if (shares is None or not shares[k].closed) and (last is None or at[2] <= last)
        ]

    def take(self, n: int) -> tuple[list[Piece], list[BadRow]]:
        """The next n samples, and the quarantined rows passed on the way."""
        pieces: list[Piece] = []
        bad: list[BadRow] = []
        self._ready -= n
        while n > 0:
            segment = self._segments[0]
            a = segment.start
            segment.start = b = min(a + n, segment.size)
            if b > a:
                pieces.append(Piece(segment.at, segment.found, segment.loader, segment.ids, a, b))
            if len(segment.bad_at):
                bad += _bad_rows(
                    segment, np.flatnonzero((segment.bad_at < b) & (segment.bad_at >= a))
                )
            self._count_long(segment, a, b)
            n -= b - a
            # A used-up segment is left only to reach the next sample, so that failures behind the
            # last one stay unlisted.
            if b == segment.size and (n > 0 or not segment.trails):
                bad += _bad_rows(segment, np.flatnonzero(segment.bad_at >= b))
                self._count_long(segment, b)
                self._segments.popleft()
        # A window's drops count when a later one is drawn from: a restored stream reads the window
        # of its cursor again.
        while pieces and self._drops and self._drops[0][0] < pieces[-1].at:
            self.dropped += self._drops.popleft()[1]
        return pieces, bad

    def _count_long(self, segment: _Segment, start: int, stop: int | None = None) -> None:
        """Count the documents that lost tokens before samples ``start`` to ``stop`` of a segment,
        or up to its end. One that was cut counts with its sample, one that was dropped with the
        next sample: so a restored stream counts each once.
        """
        if (long := segment.found.long) is None:
            return
        mine = segment.long_at >= start
        if stop is not None:
            mine &= segment.long_at < stop
        self.long += int(mine.sum())
        self.lost += int(long.lost[mine].sum())

    def ahead(self) -> list[Piece]:
        """Everything that is ready, left where it is."""
        return [
            Piece(s.at, s.found, s.loader, s.ids, s.start, s.size) for s in self._segments if s.left
        ]

    def rest(self) -> list[BadRow]:
        """Failures behind the last sample taken: of an exhausted source those at its end, of a
        broken one those that broke it. Said once, at the end; drops are counted to the end too, and
        long documents if no sample is left untaken.
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


def _tokenize(said: str) -> str:
    """Token ids that are missing in every row are most often text that nobody tokenizes."""
    return (
        "; text becomes token ids by Tokenize in the source's transforms"
        if said.endswith(": tokens is null or missing")
        else ""
    )


def step_meta(pieces: Sequence[Piece]) -> dict[str, Column]:
    """Metadata of all pieces, joined.

    A number that only some sources have cannot be balanced on; it is left out rather than invented.
    A list is another matter: a source without image_patches has no images.
    """
    meta: dict[str, Column] = {}
    first = pieces[0].found.meta
    if all(p.found.meta.keys() == first.keys() for p in pieces):
        return {
            name: join_rows([cut_rows(p.found.meta[name], p.start, p.stop) for p in pieces])
            for name in first
        }
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


def _bad_rows(segment: _Segment, which: np.ndarray) -> list[BadRow]:
    f = segment.found
    return [
        (segment.at.epoch, int(f.bad_file[j]), int(f.bad_row[j]), f.bad_reason[j])
        for j in which.tolist()
    ]
