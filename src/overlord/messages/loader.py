"""Messages of a loader: work it requests, results of that work, samples it announces, payload it
sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from overlord.messages.control import Cursor
from overlord.sample import Column, Ragged


@dataclass(frozen=True, slots=True)
class Read:
    """Read one window of a group: slice ``window`` of each of these chunks; rows up to ``after``
    are already drawn.
    """

    loader: int
    epoch: int
    group: int
    window: int
    chunks: tuple[int, ...]
    after: Cursor | None = None
    urgent: bool = False  # the draw waits for it
    generation: int = 0


@dataclass(frozen=True, slots=True)
class WindowReady:
    """A window is in memory: ``rows`` raw rows wait to be evaluated; ``over`` lists chunks that
    ended with it.
    """

    rows: int
    over: tuple[int, ...]
    nbytes: int = 0
    dropped: int = 0  # by filters, where no row is left to tell of it


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Turn the next ``rows`` rows of the open window, in stream order, into samples."""

    loader: int
    rows: int
    urgent: bool = False
    generation: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LongDocuments:
    """Documents that lost tokens to ``Job.on_long``, in stream order: cut ("truncate"), or no
    sample at all ("drop").
    """

    key: np.ndarray  # uint64: the order in the window
    file: np.ndarray
    row: np.ndarray
    lost: np.ndarray  # int64: tokens

    def __len__(self) -> int:
        return len(self.key)

    def take(self, rows: np.ndarray) -> LongDocuments | None:
        """Return these documents; None if there are none."""
        return (
            LongDocuments(self.key[rows], self.file[rows], self.row[rows], self.lost[rows])
            if len(rows)
            else None
        )


@dataclass(frozen=True, slots=True, eq=False)
class SampleBlock:
    """Samples in stream order, as columns, and what became of the other rows."""

    key: np.ndarray  # uint64: the order in the window
    file: np.ndarray
    row: np.ndarray
    part: np.ndarray
    meta: Mapping[str, Column]
    bad_key: np.ndarray  # the same for quarantined rows
    bad_file: np.ndarray
    bad_row: np.ndarray
    bad_reason: tuple[str, ...]
    dropped: int = 0
    long: LongDocuments | None = None  # None: no document lost tokens

    def __len__(self) -> int:
        return len(self.key)

    @staticmethod
    def nothing(dropped: int) -> SampleBlock:
        """A window all of whose rows a filter dropped."""
        none = np.zeros(0, np.int64)
        keys, meta = none.astype(np.uint64), {"tokens": none, "bytes": none}
        return SampleBlock(
            keys, none, none, none.astype(np.int32), meta, keys, none, none, (), dropped
        )


@dataclass(frozen=True, slots=True, eq=False)
class BlockReady:
    found: SampleBlock
    rows: int  # raw rows this took from the window
    nbytes: int
    seconds: float = 0.0  # what it cost: blocks are sized by it


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The loader cannot go on; the stream ends here with this error, when the draw comes to it."""

    error: Exception


@dataclass(frozen=True, slots=True, eq=False)
class Announce:
    loader: int
    epoch: int
    group: int
    window: int
    found: SampleBlock | None
    closes: bool = False  # this loader has no more rows of the window
    last: bool = False  # and none of the group
    error: Exception | None = None
    generation: int = 0  # of the loader: what one of before says is not heard


@dataclass(frozen=True, slots=True, eq=False)
class StepPayload:
    """What a loader host has for a constructor host in a step."""

    step: int
    origin: int
    tokens: Ragged
    generation: int = 0
    # uint8: images to be encoded there, in the order in which they are planned
    items: Ragged | None = None


@dataclass(frozen=True, slots=True)
class Pop:
    """Loader's share of a Stage."""

    step: int
    samples: int
