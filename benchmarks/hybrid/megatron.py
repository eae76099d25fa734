"""Megatron's packing-aware scheduler of dynamic context parallelism, as its development branch has it.

Written anew from the published algorithm (NVIDIA/Megatron-LM, ``next_hdp_group_packing_aware``):
one microbatch after the other, each with groups of 1, 2, 4, ... ranks that cover all ranks.

- Work of a sequence of s tokens on a group of c ranks: s^2 / c. Groups hold at most C tokens a rank.
  Sequences are padded to a multiple of 2 c there, so a rank holds that much of each.
- Longest first; the first opens the smallest group that holds it. Its length times C, and 5 % more,
  bounds the work of a rank.
- Every other may join a group with room or open one, of any size from its least one up. It takes
  the place with the smallest maximum work; ties go to the smaller group, then to the older one.
  A sequence without a place waits for the next microbatch.
- While ranks are idle, the first of the smallest groups doubles. If none can, all ranks are one
  group, and it is filled longest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.plan.tasks import TaskTable

DELTA = 0.05


@dataclass(slots=True, eq=False)
class Groups:
    """The groups of one microbatch in the order of their ranks; arrays have room for ``ranks``."""

    ranks: int
    size: np.ndarray
    held: np.ndarray  # tokens of a rank
    work: np.ndarray
    rows: list[list[int]]

    @staticmethod
    def none(ranks: int) -> Groups:
        return Groups(ranks, np.zeros(ranks, np.int64), np.zeros(ranks), np.zeros(ranks), [])

    def open(self, size: int) -> int:
        self.size[len(self.rows)] = size
        self.rows.append([])
        return len(self.rows) - 1

    def add(self, group: int, row: int, length: int) -> None:
        self.held[group] += piece(length, int(self.size[group]))
        self.work[group] += length * length / self.size[group]
        self.rows[group].append(row)

    def free(self) -> int:
        return self.ranks - int(self.size.sum())

    def fill(self, sizes: list[int]) -> bool:
        """Double the first of the smallest groups until no rank is idle; whether that worked."""
        while free := self.free():
            size = self.size[: len(self.rows)]
            smallest = int(size.min())
            larger = sizes[sizes.index(smallest) + 1 :]
            if not larger or larger[0] - smallest > free:
                return False
            size[int((size == smallest).argmax())] = larger[0]
        return True


def piece(length: int, size: int) -> int:
    """Return the tokens of a rank of a sequence on a group, with padding."""
    return length if size == 1 else 2 * -(-length // (2 * size))


def group_sizes(ranks: int) -> list[int]:
    """Return the sizes of groups: powers of two below the number of ranks, and all ranks."""
    return [2**k for k in range(ranks.bit_length()) if 2**k < ranks] + [ranks]


def microbatch(
    rows: np.ndarray, lengths: np.ndarray, ranks: int, capacity: int
) -> tuple[Groups, np.ndarray]:
    """Return the groups of one microbatch, and the rows without a place.

    ``rows`` are the longest first.
    """
    sizes = group_sizes(ranks)
    length = lengths[rows]
    cap = float(length[0]) * capacity * (1 + DELTA)
    made, taken, busiest = Groups.none(ranks), np.zeros(len(rows), bool), 0.0
    of_size: dict[int, list[int]] = {s: [] for s in sizes}
    at = 0
    while at < len(rows):
        n, free = int(length[at]), made.free()
        best, where, reach = np.inf, (0, -1), 0.0
        for s in sizes:
            groups = of_size[s]
            if groups:
                held, work = made.held[groups], made.work[groups]
                reach = max(
                    reach, min((capacity - held.min()) * s, ((cap - work.min()) * s) ** 0.5)
                )
                most = np.maximum(busiest, work + n * n / s)
                most[(held + piece(n, s) > capacity) | (most > cap)] = np.inf
                first = int(most.argmin())
                if most[first] < best:
                    best, where = float(most[first]), (s, groups[first])
            if free >= s:
                reach = max(reach, min(capacity * s, (cap * s) ** 0.5))
                most_new = max(busiest, n * n / s)
                if piece(n, s) <= capacity and most_new <= cap and most_new < best:
                    best, where = most_new, (s, -1)
            if not at and best < np.inf:  # the first takes the smallest group that holds it
                break
        if best < np.inf:
            size, group = where
            if group < 0:
                group = made.open(size)
                of_size[size].append(group)
            made.add(group, int(rows[at]), n)
            busiest, taken[at] = max(busiest, float(made.work[group])), True
            at += 1
        else:  # longer ones than the reach have no place either
            at = max(at + 1, int(np.searchsorted(-length, -reach * (1 + 1e-9))))
    if made.fill(sizes):
        return made, rows[~taken]
    return _one_group(rows, length, ranks, capacity)


def _one_group(
    rows: np.ndarray, length: np.ndarray, ranks: int, capacity: int
) -> tuple[Groups, np.ndarray]:
    made, left = Groups.none(ranks), []
    group = made.open(ranks)
    for row, n in zip(rows.tolist(), length.tolist(), strict=True):
        if made.held[group] + piece(n, ranks) <= capacity:
            made.add(group, row, n)
        else:
            left.append(row)
    return made, np.array(left, np.int64)


def schedule(lengths: np.ndarray, ranks: int, capacity: int) -> tuple[TaskTable, np.ndarray]:
    """Return the tasks of a step, and the task of every sequence."""
    rows = np.argsort(-lengths, kind="stable")
    rings: list[range] = []
    index: list[int] = []
    task = np.empty(len(lengths), np.int64)
    number = 0
    while len(rows):
        groups, rows = microbatch(rows, lengths, ranks, capacity)
        first = 0
        for size, held in zip(groups.size.tolist(), groups.rows, strict=False):
            task[held] = len(rings)
            rings.append(range(first, first + size))
            index.append(number)
            first += size
        number += 1
    return TaskTable.of(rings, index), task
