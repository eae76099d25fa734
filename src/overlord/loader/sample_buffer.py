"""Shelf: the payload a loader holds, in stream order. Popping is a cut from the front, as views;
what was popped can be kept before it.
"""

from __future__ import annotations

from collections import deque

from overlord.sample import Content


class SampleBuffer:
    """Blocks of samples; the front is popped by plans, the back is filled by the reader. With
    ``keeps`` popped rows stay before the front until they are released, so that the front can go
    back over them.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._kept: deque[Content] = deque()  # popped rows, oldest first
        self._blocks: deque[Content] = deque()
        self._taken = 0  # rows already popped from the first block
        self.rows = 0
        self.nbytes = 0
        self.kept_rows = 0

    @property
    def kept_bytes(self) -> int:
        """Counted when asked for: hosts of many sources pop a few rows of each all the time, and
        are asked now and then.
        """
        return sum(piece.nbytes for piece in self._kept)

    def put(self, block: Content) -> None:
        if len(block):
            self._blocks.append(block)
            self.rows += len(block)
            self.nbytes += block.nbytes

    def pop(self, n: int) -> list[Content]:
        """The next n rows, in as many pieces as there are blocks to cut; nothing is copied."""
        assert n <= self.rows, f"a plan pops {n} samples, the loader holds {self.rows}"
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
        """The oldest n kept rows go."""
        assert n <= self.kept_rows, f"expected to release {n} rows, {self.kept_rows} are kept"
        self.kept_rows -= n
        while n > 0:
            piece = self._kept.popleft()
            if len(piece) > n:
                self._kept.appendleft(piece.slice(n, len(piece)))
            n -= len(piece)

    def unpop(self, n: int) -> None:
        """The front goes back over the last n rows popped."""
        assert n <= self.kept_rows, f"expected to go back over {n} rows, {self.kept_rows} are kept"
        if n and self._taken:  # what is left of the first block becomes a block of its own
            block = self._blocks.popleft()
            self._blocks.appendleft(block.slice(self._taken, len(block)))
            self.nbytes -= block.nbytes - self._blocks[0].nbytes
            self._taken = 0
        self.kept_rows -= n
        self.rows += n
        while n > 0:
            piece = self._kept.pop()
            first = max(0, len(piece) - n)
            back = piece.slice(first, len(piece))
            if first:
                self._kept.append(piece.slice(0, first))
            self._blocks.appendleft(back)
            self.nbytes += back.nbytes
            n -= len(back)
