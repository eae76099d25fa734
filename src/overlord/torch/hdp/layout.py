"""The layout of documents on a ring: the queries and keys that attention combines at each step.

Everything here follows from the lengths of the documents, so both ends of a transfer compute its
size. Rows are numbered in the order of ``ring.token_index``: document by document, first chunk
before second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from overlord import ring
from overlord.errors import PlanError

Rows: TypeAlias = slice | torch.Tensor  # consecutive rows, or an index


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The queries of one rank, and the keys of the block that it holds, packed by document.

    Documents without a query or without a key are left out.
    """

    queries: Rows
    keys: Rows
    query_bounds: np.ndarray  # int32 [documents + 1]
    key_bounds: np.ndarray  # int32 [documents + 1]
    on_device: tuple[torch.Tensor, torch.Tensor]  # both bounds
    causal: bool

    @property
    def longest(self) -> tuple[int, int]:
        """The largest numbers of queries and of keys in a document."""
        return int(np.diff(self.query_bounds).max()), int(np.diff(self.key_bounds).max())


class RingLayout:
    """The blocks of one position of a ring; it needs no process group.

    ``lengths``: tokens of the whole documents.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, size: int, position: int):
        self.lengths = np.asarray(lengths, np.int64)
        self.size, self.position = size, position
        if size < 1 or not 0 <= position < size:
            raise PlanError(
                f"ring of {size}: expected at least 1 rank and a position of 0 to {size - 1}, got "
                f"position {position}"
            )
        if self.lengths.ndim != 1 or (len(self.lengths) and int(self.lengths.min()) < 0):
            raise PlanError(
                f"ring of {size}: expected a flat list of lengths of at least 0, got "
                f"{self.lengths.tolist()}"
            )
        self._halves = ring.halves(self.lengths, size)
        self._blocks: dict[tuple[int, torch.device], Block | None] = {}

    def tokens(self, step: int = 0) -> int:
        """Return the tokens in the block that this position holds at a step; step 0: its own."""
        return int(self._halves[:, self.source(step)].sum())

    def source(self, step: int) -> int:
        """Return the position that owns the block which this position holds at a step."""
        return (self.position - step) % self.size

    def token_index(self) -> np.ndarray:
        """Return the indices of this rank's tokens in the whole packed documents: int64."""
        bounds = np.concatenate(([0], np.cumsum(self.lengths)))
        return ring.token_index(bounds, self.size, self.position)

    def block(self, step: int, device: torch.device) -> Block | None:
        """Return the queries and keys of a step, with indices on a device; None if there are none.

        Step 0 is causal attention inside the own block. All queries attend to the first chunks of
        a block from an earlier position. Only queries of second chunks attend to a block from a
        later position, to both of its chunks.
        """
        key = (step, device)
        if key not in self._blocks:
            self._blocks[key] = self._block(step, device)
        return self._blocks[key]

    def _block(self, step: int, device: torch.device) -> Block | None:
        source = self.source(step)
        (q1, q2), (k1, k2) = self._halves[:, self.position], self._halves[:, source]
        q_skip = q1 if source > self.position else np.zeros_like(q1)
        q_count = q2 if source > self.position else q1 + q2
        k_count = k1 if source < self.position else k1 + k2
        used = (q_count > 0) & (k_count > 0)
        if not used.any():
            return None
        q_start = np.cumsum(q1 + q2) - (q1 + q2) + q_skip
        k_start = np.cumsum(k1 + k2) - (k1 + k2)
        query_bounds, key_bounds = _bounds(q_count[used]), _bounds(k_count[used])
        return Block(
            queries=_rows(q_start[used], q_count[used], device),
            keys=_rows(k_start[used], k_count[used], device),
            query_bounds=query_bounds,
            key_bounds=key_bounds,
            on_device=(
                torch.from_numpy(query_bounds).to(device),
                torch.from_numpy(key_bounds).to(device),
            ),
            causal=step == 0,
        )


def _bounds(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _rows(starts: np.ndarray, counts: np.ndarray, device: torch.device) -> Rows:
    """Return the rows of runs: a slice if they are consecutive, so that nothing is copied."""
    ends = np.cumsum(counts)
    if (starts[1:] == starts[:-1] + counts[:-1]).all():
        return slice(int(starts[0]), int(starts[0]) + int(ends[-1]))
    index = np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]))
    return torch.from_numpy(index).to(device)
