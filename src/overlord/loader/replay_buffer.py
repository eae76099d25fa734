"""What a loader has announced, kept so that it can be announced again from any place since the last
acknowledged sample. Pure.

A loader that goes back in memory must say exactly what one would say that is opened at the same
cursor: the window of the cursor without what stands before it, but with all rows that filters
dropped in it, and everything behind.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from overlord.loader.order import SourceOrder
from overlord.messages.control import Cursor
from overlord.messages.loader import Announce, SampleBlock
from overlord.sample import cut_rows

# Announcements without a sample that are kept: a loader all of whose rows a filter drops never has
# one acknowledged, and would keep
# them for ever. Whoever wants to go back further reads again.
MAX_EMPTY = 1024

Place = tuple[int, int, int, int, int, int, int]  # epoch, group, window, key, file, row, part
END = 2**64  # above any key: the end of a window


@dataclass(frozen=True, slots=True)
class ReplayCursor:
    """A cursor, and the key of its row: what stands behind it is wanted."""

    cursor: Cursor
    key: int  # -1: the window's start

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
        """What a loader opened at the cursor would say in place of this; None: nothing."""
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
        if news.error is not None:  # it cannot come as far as the cursor
            return replace(news, epoch=c.epoch, group=c.group, window=c.window)
        if (
            news.last and at[:2] == here[:2]
        ):  # it has nothing in this window either, and none of the group comes after it
            return replace(news, window=c.window, found=None)
        return None

    def _rest(self, found: SampleBlock) -> SampleBlock:
        """Samples behind the cursor, and the failures that a read from the cursor on would meet."""
        n, bad = (
            len(found) - int(self._behind(found).sum()),
            int(self._before(found.bad_key, found.bad_file, found.bad_row).sum()),
        )
        long = found.long
        if long is not None:  # that of the cursor's own row was counted with its sample
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
        """Which rows stand before that of the cursor. ``own``: or are that row."""
        c, key = self.cursor, np.uint64(self.key)
        file = (files < c.file) | ((files == c.file) & (rows < c.row + own))
        return (keys < key) | ((keys == key) & file)


class ReplayBuffer:
    """Announcements of a loader in order. Its samples are counted from its opening on."""

    def __init__(self, order: SourceOrder, since: Cursor):
        self._order = order
        self._news: deque[Announce] = deque()
        self._first = 0  # samples in announcements that are kept no longer
        # rows that filters dropped in the window of the first one, told in announcements before it
        self._dropped = 0
        self._empty = 0  # announcements without a sample
        self._reach = ReplayCursor.of(since, order).place  # nothing before it is known
        self._over: Announce | None = (
            None  # the last of a group, kept no longer though it might be wanted
        )
        self.released = 0  # samples that will not be wanted again

    def add(self, news: Announce) -> None:
        self._news.append(news)
        self._empty += not _samples(news)
        while self._empty > MAX_EMPTY and self._first + _samples(self._news[0]) <= self.released:
            self._forget_ahead()

    def release(self, samples: int) -> None:
        """The first ``samples`` will not be wanted again. The announcement with the last of them
        stays: failures may stand behind it.
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
        """The oldest goes though it might be wanted: with the rest of its window, so that the
        memory begins with a whole one.
        """
        while True:
            news = self._forget()
            if news.closes or not self._news:
                break
        self._reach = max(self._reach, (*_window(news), END, 0, 0, 0))
        self._over = news if news.last else None

    def since(self, since: ReplayCursor) -> tuple[int, list[Announce]] | None:
        """How many samples stand before a place, and what a loader opened there would have said;
        None: memory does not reach so far.
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
                found = (
                    SampleBlock.nothing(0) if cut.found is None else cut.found
                )  # one without a sample may have failures
                cut = replace(cut, found=replace(found, dropped=found.dropped + dropped))
            told.append(cut)
        # One that follows another may be behind what is released.
        return (
            None
            if since.place < self._reach or before < min(self.released, announced)
            else (before, told)
        )


def _samples(news: Announce) -> int:
    return 0 if news.found is None else len(news.found)


def _window(news: Announce) -> tuple[int, int, int]:
    return news.epoch, news.group, news.window
