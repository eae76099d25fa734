"""The job of every transport: 16 pieces become one contiguous array that the consumer reads."""

from __future__ import annotations

import numpy as np

N_PIECES = 16
MIB = 2**20
COPIED, VIEWED = "copied", "viewed"


class Pieces:
    """A message as 16 pieces; messages differ only in their stamp."""

    def __init__(self, nbytes: int):
        rng = np.random.default_rng(nbytes)
        self.nbytes = nbytes
        self.parts = [rng.integers(0, 256, nbytes // N_PIECES, np.uint8) for _ in range(N_PIECES)]

    def stamp(self, k: int) -> None:
        """Write the number of the message to two places, which the consumer checks.

        So a transport that fills memory before it was read is detected.
        """
        for part in (self.parts[0], self.parts[-1]):
            part[-8:].view(np.int64)[0] = k

    def gather(self, out: np.ndarray) -> None:
        """Make the one copy that every transport must make."""
        np.concatenate(self.parts, out=out)


class Reader:
    """The consumer's work on a message.

    ``copied``: copy it into a fixed buffer. ``viewed``: read only four bytes of every piece.
    """

    def __init__(self, nbytes: int, mode: str):
        self.mode, self._step = mode, nbytes // N_PIECES
        self._buffer = np.zeros(nbytes, np.uint8)
        self._expected = Pieces(nbytes).parts

    def read(self, array: np.ndarray, k: int) -> None:
        if self.mode == COPIED:
            np.copyto(self._buffer, array)
            array = self._buffer
        else:
            int(array[:: self._step // 4].sum())
        for end in (self._step, len(array)):
            found = int(array[end - 8 : end].view(np.int64)[0])
            if found != k:
                raise RuntimeError(f"message {k} holds the stamp of message {found}")

    def check(self, array: np.ndarray) -> None:
        """Check once that all received bytes equal the sent bytes."""
        for i, part in enumerate(self._expected):
            if not np.array_equal(array[i * self._step : (i + 1) * self._step - 8], part[:-8]):
                raise RuntimeError(f"piece {i} did not arrive as it was sent")
