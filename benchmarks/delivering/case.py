"""The arguments and the result of one cell of benchmarks/delivery.py.

Both are sent between processes as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

OURS = (
    "overlord",
    "overlord-broadcast",
)  # a process serves, a light process for each rank receives
INSIDE = ("overlord-local", "overlord-one")  # all ranks in one process; with one worker thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job for some ranks, delivered by one loader."""

    way: str  # OURS, INSIDE, "bare" or "torch"
    # "null", "tokenized"; with images: "pictures" (captions tokenized), "null-pictures" (captions
    # are ids)
    job: str
    folder: str
    n_sources: int
    # what the ranks are to each other: "tp", "cp" (one group that shares its samples) or "dp" (each
    # its own)
    axis: str = "tp"
    ranks: int = 1
    context: int = 8192
    microbatches: int = 8  # of a group in a step, at least
    samples: int = 0  # of a step; 0: as many as fill the microbatches
    warm: int = 8  # steps before those that count
    steps: int = 32
    seed: int = 1

    @property
    def pictures(self) -> bool:
        return self.job.endswith("pictures")

    @property
    def processes(self) -> int:
        """The number of consuming processes."""
        return 1 if self.way in INSIDE or (self.way == "bare" and self.pictures) else self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The cost of the counted steps, over all processes."""

    case: Case
    tokens: int  # of the groups, each counted once
    samples: int
    delivered: int  # bytes, over all ranks
    read: int  # bytes that files were asked for
    cpu_s: float
    wall_s: float
    pss_mb: float  # at the end
    idle_mb: float  # after imports

    @property
    def over_idle_mb(self) -> float:
        return self.pss_mb - self.idle_mb

    def per_million(self, amount: float) -> float:
        return amount / self.tokens * 1e6

    @property
    def sample_us(self) -> float:
        """CPU microseconds per sample."""
        return self.cpu_s / self.samples * 1e6
