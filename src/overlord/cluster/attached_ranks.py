"""The ranks that take part in a job, by constructor worker and data-parallel group. Pure."""

from __future__ import annotations

import numpy as np

from overlord.cluster.placement import Placement


class AttachedRanks:
    """The ranks whose clients are attached. ``groups`` is the number of data-parallel groups."""

    def __init__(self, placement: Placement, groups: int):
        self._placement = placement
        self._ranks: set[int] = set()
        self._count = np.zeros(groups, np.int64)  # attached ranks of every group

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    def __bool__(self) -> bool:
        return bool(self._ranks)

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self._ranks)

    @property
    def served(self) -> np.ndarray:
        """Return for every data-parallel group whether one of its ranks is attached."""
        return self._count > 0

    def add(self, rank: int) -> None:
        self._ranks.add(rank)
        self._count[self._placement.bucket_of[rank]] += 1

    def remove(self, rank: int) -> None:
        self._ranks.discard(rank)
        self._count[self._placement.bucket_of[rank]] -= 1

    def served_by(self, constructor: int) -> list[int]:
        """Return the attached ranks that a constructor worker serves."""
        return [r for r in sorted(self._ranks) if self._placement.constructor(r) == constructor]
