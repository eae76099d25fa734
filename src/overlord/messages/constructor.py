"""Messages of a constructor: work it requests, and steps it delivers to ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class DecodeFailures:
    """Images that could not be decoded where they were wanted: their pixels are zero. For the
    record; it changes no stream.
    """

    step: int
    ids: np.ndarray  # int64 [n, 5]: source, epoch, file, row, part of each one's sample
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PayloadReady:
    step: int


@dataclass(frozen=True, slots=True)
class Build:
    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Built:
    step: int


@dataclass(frozen=True, slots=True)
class Deliver:
    step: int
    rank: int


@dataclass(frozen=True, slots=True)
class Release:
    """Everything held for this step may go: all who wanted it have it."""

    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class EndRank:
    """A rank has been sent all its steps: it ends, with an error or without."""

    rank: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Unfinish:
    """What a rank was told of the end holds no longer: the fault behind it is mended."""

    rank: int
