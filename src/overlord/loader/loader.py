"""State machine of a source loader: what to read next, how far ahead, and what a plan pops.

A source has one loader for each share of its chunks. A loader visits its chunks window by window
and requests reads and evaluations from its worker. Rows are not evaluated before they are needed,
so the start-up costs the evaluation of step 0, and not of full buffers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from overlord.loader.samples import ReplayBuffer, ReplayCursor, SourceOrder
from overlord.messages.control import GROUPS_AHEAD, Cursor, Refill
from overlord.messages.data import (
    Announce,
    BlockReady,
    Evaluate,
    GroupShare,
    Pop,
    Read,
    ReadAhead,
    ReadFailed,
    SampleBlock,
    WindowReady,
    WindowsReady,
)

Command = Read | Evaluate | Announce

# Seconds that the evaluation of a block should take: 80 times the 0.2 ms of a round trip, and short
# enough to interleave sources.
BLOCK_S = 0.016
# Rows of the first block read ahead. Each block is twice the previous one until blocks cost
# BLOCK_S. With hundreds of sources, step 1 would otherwise wait until all of them have read several
# steps ahead.
FIRST_BLOCK = 8
# Most groups after the current one that a read may continue with: without shuffling a group is one
# chunk, perhaps of a few rows.
GROUPS_PER_READ = 4


class Loader:
    """State machine of one loader: ``handle(event) -> commands``.

    At most one read or evaluation is in progress.
    """

    def __init__(
        self,
        number: int,
        order: SourceOrder,
        *,
        epochs: int | None,
        loader: int = 0,
        loaders: int = 1,
        cursor: Cursor | None = None,
        block_rows: int = 32,
        budget_bytes: int = 2**26,
        generation: int = 0,
    ):
        self._start = cursor = cursor or Cursor()
        self.generation, self._epochs = generation, epochs
        # generation at creation: results of work that this loader requested stay valid after a
        # rollback
        self.life = generation
        self.number, self._order, self._loader, self._loaders = number, order, loader, loaders
        self._block_rows, self._budget = block_rows, budget_bytes
        self._block_limit = FIRST_BLOCK // 2
        self._groups = order.groups_from(cursor.epoch, cursor.group, epochs)
        self._coming: deque[GroupShare] = deque()  # the next groups, as far as they are known
        self._after: Cursor | None = cursor if cursor.file >= 0 else None
        self._window = cursor.window
        self._epoch, self._group = -1, -1
        self._chunks: tuple[int, ...] = ()  # chunks of the group that are not exhausted
        self._rows = 0  # raw rows of the open window that are not evaluated
        self._closed = True  # the open window was announced to its end
        self._busy = ""
        self._done = self.failed = False  # done: nothing left to read; failed: a read failed
        self._must_have = self._level = 0
        self._horizon = cursor.epoch * order.n_groups + cursor.group + GROUPS_AHEAD
        # Samples announced and not popped; below 0 if a standby has popped more than it read.
        self.ready = 0
        self.announced = 0  # samples announced since the loader was opened
        self.replay_buffer: ReplayBuffer | None = None  # announcements for a rollback, if enabled
        # Target of the last rollback: samples before it are not announced again.
        self._rollback_target: ReplayCursor | None = None
        self.ready_bytes = 0
        self._bytes_per_sample = self._row_s = 0.0
        # Samples per row of the last block, at least 1: long documents are split.
        self._samples_per_row = 1.0
        self._next_group()

    def restarted(self, cursor: Cursor, generation: int) -> Loader:
        """Return a new loader that starts at a cursor and holds no samples."""
        return Loader(
            self.number,
            self._order,
            epochs=self._epochs,
            loader=self._loader,
            loaders=self._loaders,
            cursor=cursor,
            block_rows=self._block_rows,
            budget_bytes=self._budget,
            generation=generation,
        )

    # Rollback

    def enable_replay(self) -> None:
        """Record announcements from now on, so that ``rollback`` can replay them."""
        self.replay_buffer = ReplayBuffer(self._order, self._start)

    @property
    def front(self) -> int:
        """Number of samples popped since the loader was opened."""
        return self.announced - self.ready

    def rollback(self, cursor: Cursor, generation: int) -> list[Command] | None:
        """Move to the cursor and return the announcements that a loader opened there would make.

        The next requests of work follow them; work in progress continues. Return None, without a
        change, if the replay buffer does not reach back far enough. Afterwards ``ready`` is the
        number of samples that the sample buffer must hold.
        """
        target = ReplayCursor.of(cursor, self._order)
        if (
            self.replay_buffer is None
            or (replayed := self.replay_buffer.replay_from(target)) is None
        ):
            return None
        before, repeated = replayed
        self.generation, self._rollback_target = generation, target
        self.ready = self.announced - before
        self.ready_bytes = int(self._bytes_per_sample * self.ready)
        self._must_have = 0  # the draw was discarded
        self._horizon = max(
            self._horizon, cursor.epoch * self._order.n_groups + cursor.group + GROUPS_AHEAD
        )
        return [
            *(replace(announcement, generation=generation) for announcement in repeated),
            *self._next_work(),
        ]

    def handle(self, event: Any) -> list[Command]:
        match event:
            case Pop(samples=n, ready_bytes=left):
                self.ready -= n
                estimate = int(self._bytes_per_sample * self.ready)
                self.ready_bytes = estimate if left is None else left
                self._must_have = max(0, self._must_have - n)
                if self.ready >= self._level and self.ready >= self._must_have:
                    return []  # the common case: every loader receives every step
            case Refill(must=must, level=level, horizon=horizon):
                self._must_have, self._level, self._horizon = (
                    max(self._must_have, must),
                    level,
                    max(self._horizon, horizon),
                )
            case WindowReady():
                return self._window_ready(event) + self._next_work()
            case BlockReady():
                return self._block_ready(event) + self._next_work()
            case WindowsReady(windows=windows):
                return self._windows_ready(windows) + self._next_work()
            case ReadFailed(error=error):
                self._busy, self._done, self.failed = "", True, True
                at = (self._epoch, self._group, self._window)
                return self._record(
                    Announce(self.number, *at, None, error=error, generation=self.generation)
                )
            case _:
                raise TypeError(f"expected an event of a loader, got {type(event).__name__}")
        return self._next_work()

    def _window_ready(self, event: WindowReady) -> list[Command]:
        self._busy, self._rows = "", event.rows
        self._chunks = tuple(c for c in self._chunks if c not in event.over)
        self._after = None
        if event.rows:
            return []
        return self._announce(SampleBlock.empty(event.dropped) if event.dropped else None)

    def _windows_ready(self, windows: Sequence[tuple[WindowReady, BlockReady]]) -> list[Command]:
        commands: list[Command] = []
        for window, block in windows:
            while not self._chunks:  # a group without a chunk of this loader
                commands += self._announce(None)
            commands += self._window_ready(window)
            commands += self._block_ready(block)
        return commands

    def _block_ready(self, event: BlockReady) -> list[Command]:
        self._busy = ""
        self._rows -= event.rows
        self._row_s = event.seconds / max(1, event.rows)
        self._samples_per_row = max(1.0, len(event.found) / max(1, event.rows))
        self.ready += len(event.found)
        self.announced += len(event.found)
        self.ready_bytes += event.nbytes
        if len(event.found):
            self._bytes_per_sample = (
                self.ready_bytes / self.ready
                if self.ready > len(event.found)
                else event.nbytes / len(event.found)
            )
        return self._announce(event.found)

    def _announce(self, block: Any) -> list[Command]:
        closes = self._rows == 0
        last = closes and not self._chunks
        announcement = Announce(
            self.number,
            self._epoch,
            self._group,
            self._window,
            block,
            closes,
            last,
            generation=self.generation,
        )
        if closes:
            self._closed = True
            self._window += 1
            if not self._chunks:
                self._next_group()
        return self._record(announcement)

    def _record(self, announcement: Announce) -> list[Command]:
        """Record an announcement, and return it without the samples before the rollback target.

        Samples before the target count as popped.
        """
        if self.replay_buffer is not None:
            self.replay_buffer.add(announcement)
        if self._rollback_target is None:
            return [announcement]
        repeated = self._rollback_target.adapt(announcement)
        if announcement.found is not None:
            self.ready -= len(announcement.found) - (
                0 if repeated is None or repeated.found is None else len(repeated.found)
            )
            self.ready_bytes = int(self._bytes_per_sample * self.ready)
        if (
            announcement.epoch,
            announcement.group,
            announcement.window,
        ) > self._rollback_target.cursor[:3]:
            self._rollback_target = None
        return [] if repeated is None else [repeated]

    def _next_group(self) -> None:
        """Move to the next group, or finish after the last one.

        A group without a chunk of this loader is announced as complete when its turn comes.
        """
        if not self._know_groups(1):
            self._done = True
            return
        if self._epoch >= 0:
            self._window, self._after = 0, None  # the cursor belongs to the first group alone
        self._epoch, self._group, self._chunks = self._coming.popleft()

    def _know_groups(self, n: int) -> bool:
        """Return whether n more groups follow."""
        while len(self._coming) < n:
            if (at := next(self._groups, None)) is None:
                return False
            chunks = self._order.owned(*at, self._loader, self._loaders)
            self._coming.append(GroupShare(*at, chunks))
        return True

    def _read_ahead(self, urgent: bool) -> ReadAhead:
        """Return how far a read may continue; an urgent one ends with what the draw lacks."""
        self._know_groups(GROUPS_PER_READ)
        lacking = (self._must_have if urgent else self._level) - self.ready
        groups = tuple(g for g in self._coming if self._within_horizon(g.epoch, g.group))
        return ReadAhead(lacking, self._budget - self.ready_bytes, groups)

    def _next_work(self) -> list[Command]:
        commands: list[Command] = []
        while not self._busy and not self._done and self._needs_work():
            if self._rows:
                self._busy = f"turning rows of window {self._window} into samples"
                rows = min(self._rows, self._block())
                commands.append(
                    Evaluate(self.number, rows, self.ready < self._must_have, self.life)
                )
            elif self._chunks:
                self._busy = (
                    f"reading window {self._window} of group {self._group}, epoch {self._epoch}"
                )
                at, urgent = (self._epoch, self._group, self._window), self.ready < self._must_have
                ahead = self._read_ahead(urgent)
                commands.append(
                    Read(self.number, *at, self._chunks, self._after, urgent, self.life, ahead)
                )
            else:
                commands += self._announce(None)
        return commands

    def _needs_work(self) -> bool:
        if not self._rows and not self._within_horizon(self._epoch, self._group):
            return False
        if self.ready < self._must_have:
            return True
        return self.ready < self._level and self.ready_bytes < self._budget

    def _within_horizon(self, epoch: int, group: int) -> bool:
        return epoch * self._order.n_groups + group <= self._horizon

    def _block(self) -> int:
        """Return the number of rows of the next block.

        If a draw waits, the block has the rows that the draw needs. Otherwise it has rows for at
        least ``BLOCK_S`` of work, since each block costs a round trip, within a growing limit and
        the budget. The number affects only how many samples are ready, never the stream: the
        samples of a row depend on the row alone.
        """
        if self.ready < self._must_have:
            return math.ceil((self._must_have - self.ready) / self._samples_per_row)
        worth = max(
            self._block_rows,
            self._level - self.ready,
            int(BLOCK_S / self._row_s) if self._row_s > 0 else 0,
        )
        self._block_limit = min(2 * self._block_limit, 2**20)
        room = (
            (self._budget - self.ready_bytes) / (self._bytes_per_sample * self._samples_per_row)
            if self._bytes_per_sample
            else worth
        )
        # A block of images may be a hundred times the budget.
        return max(1, min(worth, self._block_limit, int(room)))

    def set_budget(self, nbytes: int) -> None:
        """Set the bytes that the loader may hold ready, its part of the budget of all sources."""
        self._budget = nbytes

    @property
    def full(self) -> bool:
        """Whether the loader needs no more work now.

        It then holds the requested samples or bytes, has reached its horizon, or is done.
        """
        return self._done or not self._needs_work()

    def was_short(self, samples: int) -> bool:
        """Return whether a draw waited for samples before the last ``samples`` were announced."""
        return self.ready - samples < self._must_have

    @property
    def activity(self) -> str:
        return self._busy or ("done" if self._done else "idle")

    def state(self) -> dict[str, Any]:
        """Return the position and the activity of the loader, for status queries and tests."""
        return {
            "epoch": self._epoch,
            "group": self._group,
            "window": self._window,
            "ready": self.ready,
            "doing": self.activity,
        }

    def check(self) -> None:
        assert self.ready >= 0 or self.replay_buffer is not None, self.state()
        assert self._rows >= 0, self.state()


def next_read(
    command: Read, over: tuple[int, ...], windows: int, coming: deque[GroupShare]
) -> Read | None:
    """Return the read of the window after those of a command; None at the last known group."""
    if chunks := tuple(c for c in command.chunks if c not in over):
        at = command.epoch, command.group, command.window + windows
        return Read(command.loader, *at, chunks)
    while coming:
        if (share := coming.popleft()).chunks:
            return Read(command.loader, share.epoch, share.group, 0, share.chunks)
    return None
