"""The front of one source's stream: announcements of its loaders, merged into one order.

Loaders own whole chunks, so each announces its share of a window in the window's order; a sample is final when every
loader that is not done with the window has announced one behind it. The order never depends on who announces first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from overlord.errors import SourceError
from overlord.messages import Announce, Cursor, Found
from overlord.sample import Column, Ragged, cut_rows, join_rows, no_items, take_rows


@dataclass(slots=True, eq=False)
class _Segment:
    """A run of final samples of one window."""

    at: Cursor  # epoch, group, window
    found: Found
    loader: np.ndarray | int  # who holds each sample
    tokens: np.ndarray  # running sum, with a leading 0
    bad_at: np.ndarray  # how many samples of the segment stand before each quarantined row
    ids: np.ndarray  # int64 [n, 3]: file, row and part of each, side by side, since steps are joined of hundreds of short runs
    size: int
    start: int = 0  # samples already taken

    @property
    def left(self) -> int:
        return self.size - self.start


@dataclass(slots=True, eq=False)
class _Share:
    """What one loader has announced of the window being merged."""

    parts: list[Found] = field(default_factory=list)
    closed: bool = False


class Piece(NamedTuple):
    """Samples ``start`` to ``stop`` of a run: what a draw takes, without a copy."""

    at: Cursor  # epoch, group, window
    found: Found
    loader: np.ndarray | int
    ids: np.ndarray
    start: int
    stop: int


BadRow = tuple[int, int, int, str]  # epoch, file, row, reason


class SourceStream:
    """One source's front. A pure value machine: announcements in, samples out."""

    def __init__(
        self, name: str, *, loaders: int, n_groups: int, epochs: int | None, max_bad: int, cursor: Cursor, files: Sequence[str] = ()
    ):
        self._files = files  # their paths, for errors
        self.name, self._n_loaders, self._n_groups, self._epochs, self._max_bad = name, loaders, n_groups, epochs, max_bad
        self._at = Cursor(cursor.epoch, cursor.group, cursor.window)  # the window being merged
        self._shares: dict[tuple[int, int, int], list[_Share]] = {}
        self._lasts: dict[tuple[int, int], list[int | None]] = {}  # (epoch, group) -> the last window of each loader, once known
        self._segments: deque[_Segment] = deque()
        self._ready = 0
        self._epoch_has_sample = cursor.file >= 0
        self._bad_run, self._bad_said = 0, ""  # failures in a row; what was wrong with the last
        self._exhausted = epochs is not None and cursor.epoch >= epochs
        self._failed: dict[int, tuple[tuple[int, int, int], Exception]] = {}  # loader -> the window it cannot go on from, and why
        self._drops: deque[tuple[Cursor, int]] = deque()  # rows that filters dropped in windows not yet behind the samples taken
        self.error: Exception | None = None  # the stream breaks behind the ready samples
        self.dropped = 0  # in windows behind the samples taken

    @property
    def ready(self) -> int:
        return self._ready

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
            # The stream breaks where it comes to this window, not now: what was final when the news came depends on timing.
            self._failed[ordinal] = ((news.epoch, news.group, news.window), news.error)
            self._advance()
            return
        shares = self._shares.setdefault((news.epoch, news.group, news.window), [_Share() for _ in range(self._n_loaders)])
        if news.found is not None:
            shares[ordinal].parts.append(news.found)
        shares[ordinal].closed |= news.closes
        if news.last:
            self._lasts.setdefault((news.epoch, news.group), [None] * self._n_loaders)[ordinal] = news.window
        self._advance()

    def _advance(self) -> None:
        while not self._exhausted and self.error is None:
            at = (self._at.epoch, self._at.group, self._at.window)
            shares = self._shares.setdefault(at, [_Share() for _ in range(self._n_loaders)])
            lasts = self._lasts.get(at[:2], [None] * self._n_loaders)
            # A loader done with the group has nothing in later windows and says no more about them.
            closed = [s.closed or (last is not None and at[2] > last) for s, last in zip(shares, lasts, strict=True)]
            self._merge(shares, closed)
            if not all(closed):
                broken = [self._failed[k][1] for k, over in enumerate(closed) if not over and self._fails_at(k, at)]
                if len(broken) == closed.count(False) and self.error is None:
                    self.error = broken[0]  # nobody is left to wait for: samples behind these can never be ordered
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
                last = _last_key(share.parts)
                if last is None:
                    return
                bound = last if bound is None else min(bound, last)
        picked, loaders = [], []
        for ordinal, share in enumerate(shares):
            final, share.parts = _split(share.parts, bound)
            picked += final
            loaders += [np.full(len(f), ordinal) for f in final]
        if picked:
            found = _concat(picked)
            order = np.lexsort((found.part, found.row, found.file, found.key))
            bad = np.lexsort((found.bad_row, found.bad_file, found.bad_key))
            self._append(_take(found, order, bad), np.concatenate(loaders)[order])

    def _append(self, found: Found, loader: np.ndarray | int) -> None:
        if self.error is not None:
            return  # the stream broke in a part before this one
        if found.dropped:
            self._drops.append((self._at, found.dropped))
        if not len(found) and not len(found.bad_key):
            return
        bad_at = _rank_of_bad(found)
        stop = self._check_bad(found, bad_at)
        if stop is not None:
            goods, bads = stop
            found = _take(found, np.arange(goods), np.arange(bads))
            loader, bad_at = loader if isinstance(loader, int) else loader[:goods], bad_at[:bads]
        tokens = np.zeros(len(found) + 1, np.int64)
        lengths = found.meta["tokens"]
        assert isinstance(lengths, np.ndarray)
        np.cumsum(lengths, out=tokens[1:])
        ids = np.stack([found.file, found.row, found.part], axis=1, dtype=np.int64)
        self._segments.append(_Segment(self._at, found, loader, tokens, bad_at, ids, len(found)))
        self._ready += len(found)
        self._epoch_has_sample |= len(found) > 0

    def _check_bad(self, found: Found, bad_at: np.ndarray) -> tuple[int, int] | None:
        """Count failures in a row, in stream order; (samples, failures) up to where the job must stop, or None."""
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
                    self.name, f"{self._bad_run} rows in a row could not be used; the last: row {row}: {found.bad_reason[j]}",
                    self._files[file] if file < len(self._files) else f"file {file}",
                    remedy=f"mend the source (overlord inspect shows it), filter these rows, or raise max_bad{_tokenize(self._bad_said)}",
                )  # fmt: skip
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
            self.error = SourceError(
                self.name, f"epoch {at.epoch} gave no sample: every row was quarantined or dropped by a filter{self._bad_said}",
                remedy=f"look at session.quarantine() and at the source's filters{_tokenize(self._bad_said)}",
            )  # fmt: skip
            return
        self._at, self._epoch_has_sample = Cursor(epoch=at.epoch + 1), False
        self._exhausted = self._epochs is not None and self._at.epoch >= self._epochs

    def behind(self) -> list[int]:
        """Loaders whose word is missing before more samples become final, those that will never speak again among them."""
        at = (self._at.epoch, self._at.group, self._at.window)
        shares, lasts = self._shares.get(at), self._lasts.get(at[:2], [None] * self._n_loaders)
        return [
            k for k, last in enumerate(lasts)
            if (shares is None or not shares[k].closed) and (last is None or at[2] <= last)
        ]  # fmt: skip

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
                bad += _bad_rows(segment, np.flatnonzero((segment.bad_at < b) & (segment.bad_at >= a)))
            n -= b - a
            # A used-up segment is left only to reach the next sample, so that failures behind the last one stay unlisted.
            if b == segment.size and (n > 0 or not len(segment.bad_at)):
                bad += _bad_rows(segment, np.flatnonzero(segment.bad_at >= b))
                self._segments.popleft()
        # A window's drops count when a later one is drawn from: a restored stream reads the window of its cursor again.
        while pieces and self._drops and self._drops[0][0] < pieces[-1].at:
            self.dropped += self._drops.popleft()[1]
        return pieces, bad

    def ahead(self) -> list[Piece]:
        """Everything that is ready, left where it is."""
        return [Piece(s.at, s.found, s.loader, s.ids, s.start, s.size) for s in self._segments if s.left]

    def rest(self) -> list[BadRow]:
        """Failures behind the last sample taken: of an exhausted source those at its end, of a broken one those that broke it.
        Said once, at the end; drops are counted to the end too."""
        if self.error is None and (self._ready or not self._exhausted):
            return []
        self.dropped += sum(n for _, n in self._drops)
        self._drops.clear()
        return [row for s in self._segments for row in _bad_rows(s, np.flatnonzero(s.bad_at >= s.start))]

    def check(self) -> None:
        assert self._ready == sum(s.left for s in self._segments), (self.name, self._ready)


def _tokenize(said: str) -> str:
    """Token ids that are missing in every row are most often text that nobody tokenizes."""
    return "; text becomes token ids by Tokenize in the source's transforms" if said.endswith(": tokens is null or missing") else ""


def step_meta(pieces: Sequence[Piece]) -> dict[str, Column]:
    """Metadata of all pieces, joined.

    A number that only some sources have cannot be balanced on; it is left out rather than invented. A list is another
    matter: a source without image_patches has no images.
    """
    meta: dict[str, Column] = {}
    first = pieces[0].found.meta
    if all(p.found.meta.keys() == first.keys() for p in pieces):
        return {name: join_rows([cut_rows(p.found.meta[name], p.start, p.stop) for p in pieces]) for name in first}
    for name in dict.fromkeys(name for p in pieces for name in p.found.meta):
        held = [p.found.meta.get(name) for p in pieces]
        if any(c is None for c in held) and not any(isinstance(c, Ragged) for c in held):
            continue
        cut = [no_items(p.stop - p.start) if c is None else cut_rows(c, p.start, p.stop) for c, p in zip(held, pieces, strict=True)]
        meta[name] = join_rows(cut)
    return meta


def _bad_rows(segment: _Segment, which: np.ndarray) -> list[BadRow]:
    f = segment.found
    return [(segment.at.epoch, int(f.bad_file[j]), int(f.bad_row[j]), f.bad_reason[j]) for j in which.tolist()]


def _rank_of_bad(found: Found) -> np.ndarray:
    """How many samples stand before each quarantined row: by key, then file and row."""
    if not len(found.bad_key):
        return np.zeros(0, np.int64)
    key = np.concatenate([found.key, found.bad_key])
    file, row = np.concatenate([found.file, found.bad_file]), np.concatenate([found.row, found.bad_row])
    order = np.lexsort((row, file, key))
    is_bad = order >= len(found.key)
    return np.cumsum(~is_bad)[is_bad]


def _last_key(parts: list[Found]) -> int | None:
    keys = [int(k[-1]) for part in parts for k in (part.key, part.bad_key) if len(k)]
    return max(keys) if keys else None


def _split(parts: list[Found], bound: int | None) -> tuple[list[Found], list[Found]]:
    """Parts before a key, and the rest. Rows of the key itself wait: a row of equal key may still be announced before them."""
    if bound is None:
        return parts, []
    final, rest = [], []
    for part in parts:
        a = int(np.searchsorted(part.key, np.uint64(bound), side="left"))
        b = int(np.searchsorted(part.bad_key, np.uint64(bound), side="left"))
        if a == len(part.key) and b == len(part.bad_key):
            final.append(part)
        elif a == 0 and b == 0:
            rest.append(part)
        else:
            final.append(_take(part, np.arange(a), np.arange(b)))
            rest.append(replace(_take(part, np.arange(a, len(part)), np.arange(b, len(part.bad_key))), dropped=0))
    return final, rest


def _take(found: Found, rows: np.ndarray, bad: np.ndarray) -> Found:
    return Found(
        found.key[rows], found.file[rows], found.row[rows], found.part[rows], {n: take_rows(c, rows) for n, c in found.meta.items()},
        found.bad_key[bad], found.bad_file[bad], found.bad_row[bad], tuple(found.bad_reason[j] for j in bad.tolist()), found.dropped,
    )  # fmt: skip


def _concat(parts: list[Found]) -> Found:
    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in parts])

    full = [p for p in parts if len(p)] or parts[:1]
    meta = {n: join_rows([p.meta[n] for p in full]) for n in full[0].meta}
    reasons = tuple(r for p in parts for r in p.bad_reason)
    return Found(
        join("key"), join("file"), join("row"), join("part"), meta,
        join("bad_key"), join("bad_file"), join("bad_row"), reasons, sum(p.dropped for p in parts),
    )  # fmt: skip
