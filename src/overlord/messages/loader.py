"""Messages of a loader.

Read            core -> service                read one window of a group
WindowReady     service -> core                the window is in memory
Evaluate        core -> service                turn the next rows into samples
BlockReady      service -> core                samples of these rows, as a SampleBlock
ReadFailed      service -> core                the loader cannot continue
Announce        loader -> planner              metadata of new samples, in stream order
Pop             service -> core                remove the samples of a planned step
StepPayload     loader worker -> constructor   tokens and images of a planned step
LoaderWork      loader worker -> coordinator   work and read latency so far, when polled
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from overlord.messages.control import Cursor
from overlord.sample import Column, Ragged


@dataclass(frozen=True, slots=True)
class Read:
    """Read one window of a group: slice ``window`` of each of these chunks.

    Rows up to ``after`` are drawn already.
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
    """A window of ``rows`` raw rows is in memory; ``over`` lists the chunks that end with it."""

    rows: int
    over: tuple[int, ...]
    nbytes: int = 0
    dropped: int = 0  # rows dropped by filters, if no row is left to carry the count


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Turn the next ``rows`` rows of the open window, in stream order, into samples."""

    loader: int
    rows: int
    urgent: bool = False
    generation: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LongDocuments:
    """Documents that ``Job.on_long`` truncated or dropped, in stream order."""

    key: np.ndarray  # uint64: the order in the window
    file: np.ndarray
    row: np.ndarray
    lost: np.ndarray  # int64: number of lost tokens

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
    """Samples in stream order as columns, and the quarantined, dropped and long rows."""

    key: np.ndarray  # uint64: the order in the window
    file: np.ndarray
    row: np.ndarray
    part: np.ndarray
    meta: Mapping[str, Column]
    bad_key: np.ndarray  # uint64: keys of quarantined rows
    bad_file: np.ndarray
    bad_row: np.ndarray
    bad_reason: tuple[str, ...]
    dropped: int = 0
    long: LongDocuments | None = None  # None: no document lost tokens

    def __len__(self) -> int:
        return len(self.key)

    @staticmethod
    def nothing(dropped: int) -> SampleBlock:
        """Return the block of a window whose rows were all dropped by filters."""
        none = np.zeros(0, np.int64)
        keys, meta = none.astype(np.uint64), {"tokens": none, "bytes": none}
        return SampleBlock(
            keys, none, none, none.astype(np.int32), meta, keys, none, none, (), dropped
        )


@dataclass(frozen=True, slots=True, eq=False)
class BlockReady:
    """Rows of the open window are evaluated."""

    found: SampleBlock
    rows: int  # raw rows this took from the window
    nbytes: int
    seconds: float = 0.0  # duration; it determines the size of later blocks


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The loader cannot continue. The stream ends with this error when the draw reaches it."""

    error: Exception


@dataclass(frozen=True, slots=True, eq=False)
class Announce:
    """Metadata of new samples of a loader, in stream order, or the error that ends its stream."""

    loader: int
    epoch: int
    group: int
    window: int
    found: SampleBlock | None
    closes: bool = False  # this loader has no more rows of the window
    last: bool = False  # this loader has no more rows of the group
    error: Exception | None = None
    generation: int = 0  # generation of the loader; announcements of older ones are ignored


@dataclass(frozen=True, slots=True, eq=False)
class StepPayload:
    """Payload of a planned step from one loader worker to one constructor worker."""

    step: int
    origin: int
    tokens: Ragged
    generation: int = 0
    # uint8: images to be encoded by its ranks, in the order of the plan
    items: Ragged | None = None


@dataclass(frozen=True, slots=True)
class LoaderWork:
    """Totals of one loader since it was opened, and the seconds of its reads."""

    loader: int
    standby: bool
    busy_s: float  # of cores
    took_s: float
    samples: int
    usual_read_s: float
    slow_read_s: float


@dataclass(frozen=True, slots=True)
class Pop:
    """Remove the first ``samples`` samples of a loader: a PlannedStep takes them."""

    step: int
    samples: int
