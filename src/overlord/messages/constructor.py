"""Messages of a constructor core.

PayloadReady    service -> core            the payload of a step is complete
Build           core -> service            build the arrays of a step
Built           service -> core            the arrays are built
Deliver         core -> service            send a step to the client of a rank
Release         core -> service            free the memory of a step
EndRank         core -> service            send the end of the stream to a rank
Unfinish        core -> service            withdraw an end that was sent
DecodeFailures  constructor -> planner     images that could not be decoded
RankWait        constructor -> coordinator seconds that a trainer has waited, when polled
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class DecodeFailures:
    """Images that could not be decoded; their pixels are zero.

    The planner only records them: they do not change the stream.
    """

    step: int
    ids: np.ndarray  # int64 [n, 5]: source, epoch, file, row, part of the sample of each image
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PayloadReady:
    """The payload of a step is complete."""

    step: int


@dataclass(frozen=True, slots=True)
class Build:
    """Build the arrays of a step for a bucket."""

    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Built:
    """The arrays of a step are built."""

    step: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send a step to the client of a rank."""

    step: int
    rank: int


@dataclass(frozen=True, slots=True)
class Release:
    """Free the memory of a step: every rank has received it."""

    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class EndRank:
    """End the stream of a rank that has been sent all its steps, with an error or without."""

    rank: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Unfinish:
    """Withdraw the end of the stream that was sent to a rank: its cause has been repaired."""

    rank: int


class RankWait(NamedTuple):
    """The total seconds that the trainer of a rank has waited for steps."""

    rank: int
    waited_s: float
