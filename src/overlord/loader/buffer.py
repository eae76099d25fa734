"""Shelf: the payload a loader holds ready, in stream order. Popping is a cut from the front, as views."""

from __future__ import annotations

from collections import deque

from overlord.sample import Content


class Shelf:
    """Blocks of samples; the front is popped by plans, the back is filled by the reader."""

    def __init__(self) -> None:
        self._blocks: deque[Content] = deque()
        self._taken = 0  # rows already popped from the first block
        self.rows = 0
        self.nbytes = 0

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
        return pieces
