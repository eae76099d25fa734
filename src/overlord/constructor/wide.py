"""Microbatches as they are built: end to end in one array a key, and the rows of it that each has.

Whoever hands them to a trainer cuts views; whoever sends them to another process sends a few arrays instead of hundreds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

ONE = -1  # in ``rows``: a microbatch has a single number, without a dimension


@dataclass(frozen=True, slots=True, eq=False)
class Wide:
    """``starts[k][m]`` to ``starts[k][m + 1]`` are the rows of microbatch m in array number k; of those in ``single`` one each."""

    arrays: Mapping[str, np.ndarray]
    starts: list[list[int]]
    single: frozenset[str] = frozenset()

    def cut(self, first: int, stop: int) -> list[dict[str, np.ndarray]]:
        """Microbatches first to stop, as views."""
        made: list[dict[str, np.ndarray]] = [{} for _ in range(stop - first)]
        for (key, array), starts in zip(self.arrays.items(), self.starts, strict=True):
            if key in self.single:
                for m, views in enumerate(made):
                    views[key] = array[starts[first + m], ...]
            else:
                for m, views in enumerate(made):
                    views[key] = array[starts[first + m] : starts[first + m + 1]]
        return made

    def part(self, first: int, stop: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The arrays of these microbatches alone, as views, and the rows of each: int64 [keys, microbatches]."""
        arrays, rows = {}, np.empty((len(self.arrays), stop - first), np.int64)
        for k, ((key, array), starts) in enumerate(zip(self.arrays.items(), self.starts, strict=True)):
            arrays[key] = array[starts[first] : starts[stop]]
            rows[k] = ONE if key in self.single else np.diff(starts[first : stop + 1])
        return arrays, rows

    @staticmethod
    def of_part(arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> Wide:
        """What ``part`` gave, as others got it. ``ValueError`` where the two do not fit each other."""
        if rows.ndim != 2 or len(rows) != len(arrays) or (rows < ONE).any():
            raise ValueError(f"rows of {len(arrays)} arrays, found {rows.shape}")
        single = (rows == ONE).any(axis=1)
        counts = np.where(rows == ONE, 1, rows)
        starts = [[0, *np.cumsum(c).tolist()] for c in counts]
        for (key, array), s in zip(arrays.items(), starts, strict=True):
            if s[-1] != len(array):
                raise ValueError(f"{key!r} has {len(array)} rows, its microbatches {s[-1]}")
        return Wide(arrays, starts, frozenset(key for key, one in zip(arrays, single.tolist(), strict=True) if one))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())
