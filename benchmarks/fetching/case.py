"""What one cell of benchmarks/constructors.py does, and what it found. Travels between its
processes as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job on so many ranks, with constructors or without."""

    constructors: bool
    folder: str  # a file for each source
    dp: int = 2
    tp: int = 1
    hosts: int = 4  # loader hosts
    context: int = 8192
    microbatches: int = 8  # of a group in a step
    steps: int = 60  # that are counted
    warm: int = 10  # before them
    pause_ms: float = 50.0  # a rank's own work between two steps

    @property
    def ranks(self) -> int:
        return self.dp * self.tp

    @property
    def name(self) -> str:
        return "constructors" if self.constructors else "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What it cost, over all processes."""

    case: Case
    links_per_loader_host: float
    links_per_client: float
    links: int  # that payload and steps go through, in all
    step_bytes: float  # sent by loader hosts for a step
    step_cpu_ms: float  # of all processes
    client_cpu_ms: float  # of that, in a client, on average
    pss_mb: float
    client_pss_mb: float  # a client, on average
    fetch_ms: tuple[float, ...]  # of every step of every rank
