"""Announcements of a loader, retained so that they can be repeated from any place after the last
acknowledged sample. Pure.

After a rollback in memory a loader must announce exactly what a loader opened at the same cursor
would announce. They are the window of the cursor without samples before it, but with all rows that
filters dropped in it, and everything after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from overlord.loader.order import SourceOrder
from overlord.messages.control import Cursor
from overlord.messages.loader import Announce, SampleBlock
from overlord.sample import cut_rows

# Retained announcements without a sample. A loader whose rows are all dropped by a filter never has
# one acknowledged, and would retain them forever. A rollback further back reads the files again.
MAX_EMPTY = 1024

Place = tuple[int, int, int, int, int, int, int]  # epoch, group, window, key, file, row, part
END = 2**64  # above any key: the end of a window


@dataclass(frozen=True, slots=True)
class ReplayCursor:
    """A cursor and the key of its row. Samples after it are announced again."""

    cursor: Cursor
    key: int  # -1: the start of the window

    @staticmethod
    def of(cursor: Cursor, order: SourceOrder) -> ReplayCursor:
        if cursor.file < 0:
            return ReplayCursor(cursor, -1)
        return ReplayCursor(
            cursor,
            int(order.row_keys(cursor.epoch, np.array([cursor.file]), np.array([cursor.row]))[0]),
        )

    @property
    def place(self) -> Place:
        c = self.cursor
        return c.epoch, c.group, c.window, self.key, c.file, c.row, c.part

    def cut(self, news: Announce) -> Announce | None:
        """Return what a loader opened at the cursor would announce in place of ``news``; None:
        nothing.
        """
        c, at = self.cursor, (news.epoch, news.group, news.window)
        here = (c.epoch, c.group, c.window)
        if at > here:
            return news
        if at == here:
            return (
                news
                if news.found is None or self.key < 0
                else replace(news, found=self._rest(news.found))
            )
        if news.error is not None:  # the loader would fail before the cursor
            return replace(news, epoch=c.epoch, group=c.group, window=c.window)
        # The loader has nothing in this window either, and it was the last one of the group.
        if news.last and at[:2] == here[:2]:
            return replace(news, window=c.window, found=None)
        return None

    def _rest(self, found: SampleBlock) -> SampleBlock:
        """Return the samples after the cursor, and the failures that a read from the cursor on
        would find.
        """
        n, bad = (
            len(found) - int(self._behind(found).sum()),
            int(self._before(found.bad_key, found.bad_file, found.bad_row).sum()),
        )
        long = found.long
        if long is not None:  # the loss of the cursor's own row was counted with its sample
            long = long.take(np.flatnonzero(~self._before(long.key, long.file, long.row, own=True)))
        if not n and not bad:
            return found if long is found.long else replace(found, long=long)
        return SampleBlock(
            found.key[n:],
            found.file[n:],
            found.row[n:],
            found.part[n:],
            {k: cut_rows(v, n, len(found)) for k, v in found.meta.items()},
            found.bad_key[bad:],
            found.bad_file[bad:],
            found.bad_row[bad:],
            found.bad_reason[bad:],
            found.dropped,
            long,
        )

    def _behind(self, found: SampleBlock) -> np.ndarray:
        c, key = self.cursor, np.uint64(self.key)
        row = (found.row > c.row) | ((found.row == c.row) & (found.part > c.part))
        return (found.key > key) | (
            (found.key == key) & ((found.file > c.file) | ((found.file == c.file) & row))
        )

    def _before(
        self, keys: np.ndarray, files: np.ndarray, rows: np.ndarray, own: bool = False
    ) -> np.ndarray:
        """Return a mask of rows before the cursor's row; with ``own``, that row is included."""
        c, key = self.cursor, np.uint64(self.key)
        file = (files < c.file) | ((files == c.file) & (rows < c.row + own))
        return (keys < key) | ((keys == key) & file)


class ReplayBuffer:
    """Announcements of a loader in order. Samples are counted from its opening."""

    def __init__(self, order: SourceOrder, since: Cursor):
        self._order = order
        self._news: deque[Announce] = deque()
        self._first = 0  # samples in announcements that are no longer retained
        # Rows that filters dropped in the window of the first announcement, reported in earlier
        # announcements.
        self._dropped = 0
        self._empty = 0  # announcements without a sample
        self._reach = ReplayCursor.of(since, order).place  # nothing before it is known
        # The last announcement of a group, if it was dropped although it may be needed.
        self._over: Announce | None = None
        self.released = 0  # samples that will not be needed again

    def add(self, news: Announce) -> None:
        self._news.append(news)
        self._empty += not _samples(news)
        while self._empty > MAX_EMPTY and self._first + _samples(self._news[0]) <= self.released:
            self._forget_ahead()

    def release(self, samples: int) -> None:
        """Release the first ``samples``.

        The announcement of the last of them stays: failures may follow it.
        """
        self.released = max(self.released, samples)
        while self._news and self._first + _samples(self._news[0]) < self.released:
            self._forget()

    def _forget(self) -> Announce:
        news = self._news.popleft()
        self._first += _samples(news)
        self._empty -= not _samples(news)
        stays = self._news and _window(self._news[0]) == _window(news)
        self._dropped = (
            self._dropped + (news.found.dropped if news.found is not None else 0) if stays else 0
        )
        return news

    def _forget_ahead(self) -> None:
        """Drop the oldest window although it may be needed; whole, so that the buffer begins with a
        complete one.
        """
        while True:
            news = self._forget()
            if news.closes or not self._news:
                break
        self._reach = max(self._reach, (*_window(news), END, 0, 0, 0))
        self._over = news if news.last else None

    def since(self, since: ReplayCursor) -> tuple[int, list[Announce]] | None:
        """Return the number of samples before a place, and what a loader opened there would have
        announced.

        Returns None if the buffer does not reach back that far.
        """
        before, dropped, announced = self._first, self._dropped, self._first
        told = (
            [over] if self._over is not None and (over := since.cut(self._over)) is not None else []
        )
        for k, news in enumerate(self._news):
            cut = since.cut(news)
            announced += _samples(news)
            before += _samples(news) - (0 if cut is None else _samples(cut))
            if cut is None:
                continue
            if k == 0 and dropped and _window(news) == since.cursor[:3]:
                # An announcement without a sample may have failures.
                found = SampleBlock.nothing(0) if cut.found is None else cut.found
                cut = replace(cut, found=replace(found, dropped=found.dropped + dropped))
            told.append(cut)
        # A standby may lag the released samples.
        return (
            None
            if since.place < self._reach or before < min(self.released, announced)
            else (before, told)
        )


def _samples(news: Announce) -> int:
    return 0 if news.found is None else len(news.found)


def _window(news: Announce) -> tuple[int, int, int]:
    return news.epoch, news.group, news.window
