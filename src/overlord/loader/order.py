"""The order of the chunks and rows of a source, as pure functions.

``docs/stream.md``, "One source", specifies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from overlord.hashing import key64, keyed_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrder:
    """All parameters of the order of one source's rows before filters."""

    name: str
    n_chunks: int
    seed: int
    shuffle: bool
    shuffle_chunks: int
    # Read once per group, and a source of many chunks has many groups. Two epochs are cached, since
    # loaders may be in different ones.
    _orders: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def group_size(self) -> int:
        return self.shuffle_chunks if self.shuffle else 1

    @property
    def n_groups(self) -> int:
        return -(-self.n_chunks // self.group_size)

    def chunk_order(self, epoch: int) -> np.ndarray:
        """Return the chunks of an epoch, in the order in which they are opened."""
        order = self._orders.get(epoch)
        if order is None:
            order = self._orders[epoch] = self._chunk_order(epoch)
            if len(self._orders) > 2:
                del self._orders[next(iter(self._orders))]
        return order

    def _chunk_order(self, epoch: int) -> np.ndarray:
        chunks = np.arange(self.n_chunks)
        if not self.shuffle:
            return chunks
        return np.argsort(
            keyed_hash(key64("chunks", self.seed, self.name, epoch), chunks), kind="stable"
        )

    def owned(self, epoch: int, group: int, loader: int, loaders: int) -> tuple[int, ...]:
        """Return the chunks of a group that one loader reads: every ``loaders``-th chunk."""
        places = np.arange(
            group * self.group_size, min(self.n_chunks, (group + 1) * self.group_size)
        )
        return tuple(self.chunk_order(epoch)[places[places % loaders == loader]].tolist())

    def row_keys(self, epoch: int, file: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return the sort keys of rows within their window; ties are broken by file and row."""
        if not self.shuffle:
            return row.astype(np.uint64)
        return keyed_hash(key64("rows", self.seed, self.name, epoch), file, row)

    def groups_from(self, epoch: int, group: int, epochs: int | None) -> Iterator[tuple[int, int]]:
        """Yield (epoch, group) from a position to the end of the last epoch."""
        while epochs is None or epoch < epochs:
            for g in range(group, self.n_groups):
                yield epoch, g
            epoch, group = epoch + 1, 0
