"""Decisions of scaling: values that the scaler returns, and the runtime executes or reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Decision to read a source in another number of loader workers."""

    source: str
    hosts: int  # new number of workers
    had: int  # number of workers before
    reason: str
    # existing workers that are added; the others are started
    on: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.source}: {self.had} -> {self.hosts} loader workers: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotKeepUp:
    """Report that trainers wait, or will wait, for a source that cannot get more workers."""

    source: str
    hosts: int  # number of workers or loaders that the source has
    wanted: int  # number of workers or loaders that it would need
    reason: str
    what: str = "loader workers"  # unit of both numbers

    def __str__(self) -> str:
        return (
            f"{self.source} cannot keep up: it would take {self.wanted} {self.what} and has "
            f"{self.hosts}: {self.reason}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """Decision to read a source ``steps`` steps ahead of the draw."""

    source: str
    steps: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: read {self.steps} steps ahead: {self.reason}"


Decision = Scale | CannotKeepUp | ReadAhead


def current_shortages(decisions: Sequence[Decision]) -> list[CannotKeepUp]:
    """Return the last report of each source that cannot keep up and was not scaled since.

    ``decisions`` are in the order in which they were made.
    """
    last: dict[str, Decision] = {}
    for decision in decisions:
        if not isinstance(decision, ReadAhead):
            last[decision.source] = decision
    return [decision for decision in last.values() if isinstance(decision, CannotKeepUp)]
