"""Samples of a loader: their stream order, their buffer, and their replay after a rollback."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from overlord.content import Content
from overlord.hashing import key64, keyed_hash
from overlord.loader.partial_epoch import PartialEpoch
from overlord.messages.control import Cursor
from overlord.messages.data import Announce, SampleBlock
from overlord.sample import cut_rows

# ----------------------------------------------------------------------------
# The order of the chunks and rows of a source, as pure functions.
#
# ``docs/stream.md``, "One source", specifies this order.


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrder:
    """Parameters that determine the order of the rows of one source, before filters."""

    name: str
    n_chunks: int
    seed: int
    shuffle: bool
    shuffle_chunks: int
    partial: PartialEpoch | None = None  # the last epoch, if it ends early
    rows_known: bool = True  # whether the index has the number of rows of every chunk
    # Cached orders of chunks by epoch: each is read once per group. Two epochs are cached, since
    # loaders may be in different ones.
    _orders: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def group_size(self) -> int:
        return self.shuffle_chunks if self.shuffle else 1

    @property
    def n_groups(self) -> int:
        return -(-self.n_chunks // self.group_size)

    def groups_of(self, epoch: int) -> int:
        """Return the number of groups of an epoch."""
        partial = self.partial
        return partial.groups if partial and epoch == partial.epoch else self.n_groups

    def begun(self, epochs: float | None) -> int | None:
        """Return the number of epochs that a source read ``epochs`` times begins."""
        if epochs is None:
            return None
        return self.partial.epoch + 1 if self.partial is not None else int(epochs)

    def chunk_order(self, epoch: int) -> np.ndarray:
        """Return the chunks of an epoch, in the order in which they are opened."""
        order = self._orders.get(epoch)
        if order is None:
            order = self._orders[epoch] = self._chunk_order(epoch)
            if len(self._orders) > 2:
                del self._orders[next(iter(self._orders))]
        return order

    def _chunk_order(self, epoch: int) -> np.ndarray:
        chunks = np.arange(self.n_chunks)
        if not self.shuffle:
            return chunks
        return np.argsort(
            keyed_hash(key64("chunks", self.seed, self.name, epoch), chunks), kind="stable"
        )

    def owned(self, epoch: int, group: int, loader: int, loaders: int) -> tuple[int, ...]:
        """Return the chunks of a group that one of several loaders reads.

        These are the chunks whose place in the order of the epoch is ``loader`` modulo ``loaders``.
        """
        partial = self.partial
        n = partial.chunks if partial and epoch == partial.epoch else self.n_chunks
        places = np.arange(group * self.group_size, min(n, (group + 1) * self.group_size))
        return tuple(self.chunk_order(epoch)[places[places % loaders == loader]].tolist())

    def row_keys(self, epoch: int, file: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return the sort keys of rows within their window; ties are broken by file and row."""
        if not self.shuffle:
            return row.astype(np.uint64)
        return keyed_hash(key64("rows", self.seed, self.name, epoch), file, row)

    def in_stream_order(
        self,
        epoch: int,
        after: Cursor | None,
        files: list[np.ndarray],
        rows: list[np.ndarray],
        ats: list[np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return key, file, row and table position of rows from a cursor on, in stream order."""
        if len(rows) == 1:  # rows of one file, in ascending order
            (file,), (row,), (at,) = files, rows, ats
            key = self.row_keys(epoch, file, row)
            if not self.shuffle and after is None:
                return key, file, row, at
            positions = np.argsort(key, kind="stable")
        else:
            file, row, at = np.concatenate(files), np.concatenate(rows), np.concatenate(ats)
            key = self.row_keys(epoch, file, row)
            positions = np.argsort(key)  # several times faster than lexsort
            ascending = key[positions]
            if (ascending[1:] == ascending[:-1]).any():
                positions = np.lexsort((row, file, key))
        if after is not None:
            ordered = key[positions], file[positions], row[positions]
            positions = positions[self.at_or_after(*ordered, after, epoch)]
        return key[positions], file[positions], row[positions], at[positions]

    def at_or_after(
        self, key: np.ndarray, file: np.ndarray, row: np.ndarray, after: Cursor, epoch: int
    ) -> np.ndarray:
        """Return a mask of the ordered rows at or after the cursor.

        The cursor's own row is included, since pieces of it may not be drawn yet.
        """
        limit = self.row_keys(epoch, np.array([after.file]), np.array([after.row]))[0]
        return (key > limit) | (
            (key == limit) & ((file > after.file) | ((file == after.file) & (row >= after.row)))
        )

    def groups_from(self, epoch: int, group: int, epochs: int | None) -> Iterator[tuple[int, int]]:
        """Yield (epoch, group) from a position on, for ``epochs`` epochs in all; None: endless."""
        while epochs is None or epoch < epochs:
            for g in range(group, self.groups_of(epoch)):
                yield epoch, g
            epoch, group = epoch + 1, 0


# ----------------------------------------------------------------------------
# Buffer of the samples that a loader holds, in stream order.


class SampleBuffer:
    """Samples of a loader in blocks: the reader appends blocks, and plans pop rows at the front.

    With ``keeps``, popped rows are retained until they are released, so that a rollback can restore
    them.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._kept: deque[Content] = deque()  # popped rows, oldest first
        self._blocks: deque[Content] = deque()
        self._taken = 0  # rows already popped from the first block
        self.rows = 0  # rows that are not popped
        self.nbytes = 0  # bytes of the blocks, the popped rows of the first block included
        self.kept_rows = 0  # popped rows that are retained

    @property
    def kept_bytes(self) -> int:
        """Bytes of the retained rows.

        They are computed on demand: workers of many sources pop a few rows of each all the time,
        and are rarely queried.
        """
        return sum(piece.nbytes for piece in self._kept)

    @property
    def ready_bytes(self) -> int:
        """Bytes of the rows that are not popped."""
        popped = self._blocks[0].bytes_before(self._taken) if self._taken else 0
        return self.nbytes - popped

    def put(self, block: Content) -> None:
        if len(block):
            self._blocks.append(block)
            self.rows += len(block)
            self.nbytes += block.nbytes

    def pop(self, n: int) -> list[Content]:
        """Pop the next n rows, one piece per block; nothing is copied."""
        assert n <= self.rows, f"expected {n} samples to pop, got {self.rows}"
        pieces = []
        self.rows -= n
        self.kept_rows += n if self._keeps else 0
        while n > 0:
            block = self._blocks[0]
            take = min(n, len(block) - self._taken)
            pieces.append(block.slice(self._taken, self._taken + take))
            self._taken += take
            n -= take
            if self._taken == len(block):
                self._blocks.popleft()
                self._taken = 0
                self.nbytes -= block.nbytes
        if self._keeps:
            self._kept.extend(pieces)
        return pieces

    def release(self, n: int) -> None:
        """Release the oldest n retained rows."""
        assert n <= self.kept_rows, f"expected to release {n} rows, got {self.kept_rows} retained"
        self.kept_rows -= n
        while n > 0:
            piece = self._kept.popleft()
            if len(piece) > n:
                self._kept.appendleft(piece.slice(n, len(piece)))
            n -= len(piece)

    def restore(self, n: int) -> None:
        """Put the last n popped rows, which must be retained, back at the front."""
        assert n <= self.kept_rows, f"expected to restore {n} rows, got {self.kept_rows} retained"
        if n and self._taken:  # the rest of the first block becomes a separate block
            block = self._blocks.popleft()
            self._blocks.appendleft(block.slice(self._taken, len(block)))
            self.nbytes -= block.nbytes - self._blocks[0].nbytes
            self._taken = 0
        self.kept_rows -= n
        self.rows += n
        while n > 0:
            piece = self._kept.pop()
            first = max(0, len(piece) - n)
            restored = piece.slice(first, len(piece))
            if first:
                self._kept.append(piece.slice(0, first))
            self._blocks.appendleft(restored)
            self.nbytes += restored.nbytes
            n -= len(restored)


# ----------------------------------------------------------------------------
# Replay of the announcements of a loader from any position that is not acknowledged.
#
# After a rollback in memory a loader must announce exactly what a loader opened at the same
# cursor would announce. These announcements cover the window of the cursor and all later ones.
# Samples before the cursor are excluded; rows that filters dropped in its window are included.

# Most retained announcements without a sample. If a filter drops all rows of a loader, none of its
# announcements is ever acknowledged, and all would be retained. A rollback to an earlier position
# reads the files again.
MAX_EMPTY = 1024

Position = tuple[int, int, int, int, int, int, int]  # epoch, group, window, key, file, row, part
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
    def position(self) -> Position:
        c = self.cursor
        return c.epoch, c.group, c.window, self.key, c.file, c.row, c.part

    def adapt(self, announcement: Announce) -> Announce | None:
        """Return the announcement that a loader opened at the cursor would make in its place.

        Return None if that loader would announce nothing.
        """
        c, at = self.cursor, (announcement.epoch, announcement.group, announcement.window)
        here = (c.epoch, c.group, c.window)
        if at > here:
            return announcement
        if at == here:
            return (
                announcement
                if announcement.found is None or self.key < 0
                else replace(announcement, found=self._remaining(announcement.found))
            )
        if announcement.error is not None:  # the loader would fail before the cursor
            return replace(announcement, epoch=c.epoch, group=c.group, window=c.window)
        # The group ended before the cursor's window: a loader opened there would announce the end.
        if announcement.last and at[:2] == here[:2]:
            return replace(announcement, window=c.window, found=None)
        return None

    def _remaining(self, block: SampleBlock) -> SampleBlock:
        """Return the samples after the cursor, and the failures that a read there would find."""
        n, bad = (
            len(block) - int(self._after(block).sum()),
            int(self._before(block.bad_key, block.bad_file, block.bad_row).sum()),
        )
        long = block.long
        if long is not None:  # the loss of the cursor's own row was counted with its sample
            long = long.take(np.flatnonzero(~self._before(long.key, long.file, long.row, own=True)))
        if not n and not bad:
            return block if long is block.long else replace(block, long=long)
        return SampleBlock(
            block.key[n:],
            block.file[n:],
            block.row[n:],
            block.part[n:],
            {k: cut_rows(v, n, len(block)) for k, v in block.meta.items()},
            block.bad_key[bad:],
            block.bad_file[bad:],
            block.bad_row[bad:],
            block.bad_reason[bad:],
            block.dropped,
            long,
        )

    def _after(self, block: SampleBlock) -> np.ndarray:
        c, key = self.cursor, np.uint64(self.key)
        row = (block.row > c.row) | ((block.row == c.row) & (block.part > c.part))
        return (block.key > key) | (
            (block.key == key) & ((block.file > c.file) | ((block.file == c.file) & row))
        )

    def _before(
        self, keys: np.ndarray, files: np.ndarray, rows: np.ndarray, own: bool = False
    ) -> np.ndarray:
        """Return a mask of rows before the cursor's row; with ``own``, that row is included."""
        c, key = self.cursor, np.uint64(self.key)
        file = (files < c.file) | ((files == c.file) & (rows < c.row + own))
        return (keys < key) | ((keys == key) & file)


class ReplayBuffer:
    """Announcements of a loader in order, for a replay; samples are counted from its opening."""

    def __init__(self, order: SourceOrder, since: Cursor):
        self._order = order
        self._announcements: deque[Announce] = deque()
        self._first = 0  # samples in announcements that are no longer retained
        # Rows that filters dropped in the window of the first announcement, reported in earlier
        # announcements.
        self._dropped = 0
        self._empty = 0  # announcements without a sample
        self._earliest = ReplayCursor.of(since, order).position  # no replay starts before it
        # The last announcement of a group, if it was dropped although it may be needed.
        self._last_of_group: Announce | None = None
        self.released = 0  # number of samples since the opening that no rollback will need

    def add(self, announcement: Announce) -> None:
        self._announcements.append(announcement)
        self._empty += not _samples(announcement)
        while (
            self._empty > MAX_EMPTY
            and self._first + _samples(self._announcements[0]) <= self.released
        ):
            self._drop_oldest_window()

    def release(self, samples: int) -> None:
        """Release the first ``samples`` samples since the opening of the loader.

        The announcement with the last of them is retained, since failures may follow that sample.
        """
        self.released = max(self.released, samples)
        while (
            self._announcements and self._first + _samples(self._announcements[0]) < self.released
        ):
            self._drop_oldest()

    def _drop_oldest(self) -> Announce:
        announcement = self._announcements.popleft()
        self._first += _samples(announcement)
        self._empty -= not _samples(announcement)
        stays = self._announcements and _window(self._announcements[0]) == _window(announcement)
        self._dropped = (
            self._dropped + (announcement.found.dropped if announcement.found is not None else 0)
            if stays
            else 0
        )
        return announcement

    def _drop_oldest_window(self) -> None:
        """Drop all announcements of the oldest window, although a rollback may need them.

        The buffer then begins with a complete window.
        """
        while True:
            announcement = self._drop_oldest()
            if announcement.closes or not self._announcements:
                break
        self._earliest = max(self._earliest, (*_window(announcement), END, 0, 0, 0))
        self._last_of_group = announcement if announcement.last else None

    def replay_from(self, start: ReplayCursor) -> tuple[int, list[Announce]] | None:
        """Return the number of samples before the cursor, and the announcements after it.

        Return None if the buffer does not reach back to the cursor.
        """
        before, dropped, announced = self._first, self._dropped, self._first
        repeated = (
            [over]
            if self._last_of_group is not None
            and (over := start.adapt(self._last_of_group)) is not None
            else []
        )
        for k, announcement in enumerate(self._announcements):
            adapted = start.adapt(announcement)
            announced += _samples(announcement)
            before += _samples(announcement) - (0 if adapted is None else _samples(adapted))
            if adapted is None:
                continue
            if k == 0 and dropped and _window(announcement) == start.cursor[:3]:
                # An announcement without a sample may have failures.
                found = SampleBlock.empty(0) if adapted.found is None else adapted.found
                adapted = replace(adapted, found=replace(found, dropped=found.dropped + dropped))
            repeated.append(adapted)
        # A standby may not have announced all released samples yet.
        return (
            None
            if start.position < self._earliest or before < min(self.released, announced)
            else (before, repeated)
        )


def _samples(announcement: Announce) -> int:
    return 0 if announcement.found is None else len(announcement.found)


def _window(announcement: Announce) -> tuple[int, int, int]:
    return announcement.epoch, announcement.group, announcement.window
