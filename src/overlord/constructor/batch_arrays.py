"""All microbatches of a build as one array per key, and the rows of each microbatch.

A local delivery slices views. A delivery to another process sends a few arrays instead of hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

ONE = -1  # in ``rows``: a microbatch has a scalar, without a dimension


@dataclass(frozen=True, slots=True, eq=False)
class BatchArrays:
    """Concatenated microbatches, one array per key.

    Microbatch m has the rows from ``starts[k][m]`` up to, but not including, ``starts[k][m + 1]``
    of array k. Keys in ``single`` have one scalar per microbatch.
    """

    arrays: Mapping[str, np.ndarray]
    starts: list[list[int]]
    single: frozenset[str] = frozenset()

    @property
    def n(self) -> int:
        """The number of microbatches."""
        return len(self.starts[0]) - 1 if self.starts else 0

    def cut(self, first: int, stop: int) -> list[dict[str, np.ndarray]]:
        """Return the microbatches from ``first`` up to, not including, ``stop``, as views."""
        if not self.arrays:
            return [{} for _ in range(stop - first)]
        columns = []
        for (key, array), starts in zip(self.arrays.items(), self.starts, strict=True):
            bounds = starts[first : stop + 1]
            columns.append(
                [array[a, ...] for a in bounds[:-1]]
                if key in self.single
                else [array[a:b] for a, b in pairwise(bounds)]
            )
        return [dict(zip(self.arrays, views, strict=True)) for views in zip(*columns, strict=True)]

    def only(self, wanted: Callable[[str], bool]) -> BatchArrays:
        """Return the batch with only the keys for which ``wanted`` returns True."""
        kept = [wanted(key) for key in self.arrays]
        if all(kept):
            return self
        arrays = {
            key: array for (key, array), keep in zip(self.arrays.items(), kept, strict=True) if keep
        }
        return BatchArrays(
            arrays,
            [s for s, keep in zip(self.starts, kept, strict=True) if keep],
            self.single & arrays.keys(),
        )

    def part(self, first: int, stop: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return arrays of the microbatches from ``first`` up to, not including, ``stop``.

        Return also the number of rows of each: int64 [keys, microbatches]; ``ONE`` for a scalar.
        The arrays are views, by key.
        """
        arrays, rows, ones, counted = {}, [], [ONE] * (stop - first), dict[int, list[int]]()
        for (key, array), starts in zip(self.arrays.items(), self.starts, strict=True):
            arrays[key] = array[starts[first] : starts[stop]]
            # arrays of the same kind share one list
            if (counts := counted.get(id(starts))) is None:
                counts = counted[id(starts)] = [
                    b - a for a, b in pairwise(starts[first : stop + 1])
                ]
            rows.append(ones if key in self.single else counts)
        return arrays, np.array(rows, np.int64).reshape(len(rows), stop - first)

    @staticmethod
    def of_part(arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> BatchArrays:
        """Return the batch from the result of ``part``.

        Raise ``ValueError`` if ``rows`` does not fit the arrays.
        """
        if rows.ndim != 2 or len(rows) != len(arrays):
            raise ValueError(
                f"rows: expected the shape ({len(arrays)}, microbatches), got {rows.shape}"
            )
        starts, single, before, sums, one = list[list[int]](), list[str](), None, [0], False
        # A few dozen numbers: numpy would cost more.
        for (key, array), counts in zip(arrays.items(), rows.tolist(), strict=True):
            if counts != before:  # otherwise this array is of the same kind as the previous one
                least = min(counts, default=0)
                if least < ONE:
                    raise ValueError(
                        f"{key!r}: expected numbers of rows of at least 0, or {ONE} for a scalar, "
                        f"got {least}"
                    )
                before, one = counts, least == ONE
                sums = [0, *accumulate([1 if n == ONE else n for n in counts])]
            if one:
                single.append(key)
            if sums[-1] != len(array):
                raise ValueError(
                    f"{key!r}: expected the {sums[-1]} rows of its microbatches, got {len(array)}"
                )
            starts.append(sums)
        return BatchArrays(arrays, starts, frozenset(single))

    def nbytes_of(self, first: int, stop: int) -> int:
        """Return the bytes of the microbatches from ``first`` up to, not including, ``stop``."""
        both = zip(self.arrays.values(), self.starts, strict=True)
        return sum(array[starts[first] : starts[stop]].nbytes for array, starts in both)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())
