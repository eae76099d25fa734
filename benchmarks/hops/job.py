"""The job, the same for every way: 16 pieces in the producer's memory become one contiguous array
that the consumer reads.
"""

from __future__ import annotations

import numpy as np

N_PIECES = 16
MIB = 2**20
COPIED, VIEWED = "copied", "viewed"


class Pieces:
    """A message as 16 pieces. Only its stamp differs from message to message."""

    def __init__(self, nbytes: int):
        rng = np.random.default_rng(nbytes)
        self.nbytes = nbytes
        self.parts = [rng.integers(0, 256, nbytes // N_PIECES, np.uint8) for _ in range(N_PIECES)]

    def stamp(self, k: int) -> None:
        """Two places that the consumer looks at: a way that fills memory before it was read is
        found out.
        """
        for part in (self.parts[0], self.parts[-1]):
            part[-8:].view(np.int64)[0] = k

    def gather(self, out: np.ndarray) -> None:
        """The one copy that every way must make."""
        np.concatenate(self.parts, out=out)


class Reader:
    """What the consumer does with a message: ``copied`` into its fixed buffer, or only ``viewed``:
    four bytes of every piece are read.
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
        """All of it, once: the bytes that were sent are the bytes that came."""
        for i, part in enumerate(self._expected):
            if not np.array_equal(array[i * self._step : (i + 1) * self._step - 8], part[:-8]):
                raise RuntimeError(f"piece {i} did not arrive as it was sent")
