"""The samples a loader holds, in stream order.

Popping returns views from the front; popped samples can be retained.
"""

from __future__ import annotations

from collections import deque

from overlord.sample import Content


class SampleBuffer:
    """Blocks of samples: plans pop the front, the reader appends.

    With ``keeps``, popped rows are retained before the front until they are released, so that a
    rollback can restore them.
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
        """Return the bytes of retained rows.

        They are computed on demand: workers of many sources pop a few rows of each all the time,
        and are rarely queried.
        """
        return sum(piece.nbytes for piece in self._kept)

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
        """Restore the last n popped rows at the front."""
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
