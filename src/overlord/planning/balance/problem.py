"""The problem that a placement algorithm solves, and its result."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from overlord.planning.balance import binpack


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemPlacement:
    """The bucket and microbatch of every item, and the name of the placement algorithm."""

    bucket: np.ndarray  # int32
    microbatch: np.ndarray  # int32
    n_microbatches: int
    algorithm: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingProblem:
    """Items to place into ``n_buckets`` x M bins of ``capacity``.

    M, the number of microbatches, is at least ``microbatches`` and grows until all items fit.
    """

    costs: np.ndarray  # float64, none negative
    sizes: np.ndarray  # int64
    n_buckets: int
    microbatches: int = 1
    capacity: int = 0  # 0: none, then M never grows
    group_size: int | None = None
    method: str = "greedy"
    # float64: a second size of every item, against memory_capacity
    memory: np.ndarray | None = None
    memory_capacity: float = 0.0
    # sub-draw of every item, rising: keep_order keeps it together
    substep: np.ndarray | None = None
    # if M grows anyway, one more microbatch than needed is allowed if it levels the ranks
    spare: bool = True
    count_multiple: int = 1  # M is a multiple of this number
    chunk: np.ndarray | None = None  # chunk of every item, rising: chunks are placed whole

    def counted(self, m: int) -> int:
        """Return the smallest number of microbatches of at least ``m`` that is allowed."""
        return -(-m // self.count_multiple) * self.count_multiple

    def least_microbatches(self) -> int:
        """Return a lower bound of the number of microbatches, at least ``microbatches``.

        All tokens must fit, and items above half the capacity share no bin.
        """
        if not self.capacity or not len(self.sizes):
            return self.microbatches
        by_tokens = -(-int(self.sizes.sum()) // (self.n_buckets * self.capacity))
        by_large = -(-int((2 * self.sizes > self.capacity).sum()) // self.n_buckets)
        return max(self.microbatches, by_tokens, by_large)

    def of_chunks(self) -> PackingProblem:
        """Return the problem whose items are the chunks."""
        if self.chunk is None:
            return self
        n = int(self.chunk[-1]) + 1 if len(self.chunk) else 0
        costs, sizes, memory = (
            None if column is None else np.bincount(self.chunk, weights=column, minlength=n)
            for column in (self.costs, self.sizes, self.memory)
        )
        assert costs is not None
        assert sizes is not None
        return replace(self, costs=costs, sizes=sizes.astype(np.int64), memory=memory, chunk=None)

    def may_add(self, m: int) -> bool:
        """Return whether one microbatch more than the ``m`` needed is allowed, to level the ranks.

        It is not allowed if the items fit into the requested number of microbatches.
        """
        return self.spare and self.capacity > 0 and m > self.microbatches

    def bound(self) -> float:
        """Return a lower bound of the heaviest bucket: the mean or the most expensive item."""
        return max(binpack.total(self.costs) / self.n_buckets, float(self.costs.max(initial=0.0)))
