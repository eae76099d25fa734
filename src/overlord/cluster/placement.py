"""Which worker reads which loader, follows it as a standby, or is to read it next. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np


class Placement:
    """Loaders, sources and ranks by worker. Loaders are numbered source by source.

    ``loaders`` is the number of loaders of every source, ``worker_of`` the worker of every loader,
    ``constructor_of`` the constructor worker of every data-parallel group, ``ranks`` its ranks.
    """

    def __init__(
        self,
        loaders: Sequence[int],
        worker_of: Sequence[int],
        constructor_of: Sequence[int] = (),
        ranks: Sequence[Sequence[int]] = (),
    ):
        assert sum(loaders) == len(worker_of), "every loader has a worker"
        self.loaders = tuple(loaders)
        self.worker_of = np.array(worker_of, np.int64)
        self.constructor_of = np.array(constructor_of, np.int64)
        self.bucket_of = {rank: b for b, group in enumerate(ranks) for rank in group}
        self.standby_of: dict[int, int] = {}  # loader -> the worker that follows it
        self.pending: dict[int, int] = {}  # loader -> the worker that it is to be opened on
        # loader worker -> the sources that it can open: code is sent only when a process starts
        self.sources_of: dict[int, frozenset[int]] = {}

    @property
    def n_loaders(self) -> int:
        return len(self.worker_of)

    @property
    def n_constructors(self) -> int:
        return int(self.constructor_of.max()) + 1

    def worker(self, loader: int) -> int:
        """Return the worker that reads a loader."""
        return int(self.worker_of[loader])

    def source_of(self, loader: int) -> int:
        return int(np.searchsorted(np.cumsum(self.loaders), loader, side="right"))

    def loaders_of(self, source: int) -> range:
        first = sum(self.loaders[:source])
        return range(first, first + self.loaders[source])

    def loaders_on(self, worker: int) -> list[int]:
        """Return the loaders that a worker reads."""
        return [loader for loader in range(self.n_loaders) if self.worker(loader) == worker]

    def workers_of(self, source: int) -> list[int]:
        """Return the workers that read a source."""
        return sorted({self.worker(loader) for loader in self.loaders_of(source)})

    def busy(self) -> set[int]:
        """Return the workers that read a loader, or are about to."""
        return {self.pending.get(k, self.worker(k)) for k in range(self.n_loaders)}

    def can_open(self, worker: int, source: int) -> bool:
        return source in self.sources_of.get(worker, ())

    def constructor(self, rank: int) -> int:
        """Return the constructor worker of a rank."""
        return int(self.constructor_of[self.bucket_of[rank]])

    def move(self, loader: int, worker: int) -> None:
        self.worker_of[loader] = worker

    def follow(self, standbys: Mapping[int, int]) -> None:
        """Set the workers that follow loaders: they pop the same samples as the loader's worker."""
        self.standby_of = dict(standbys)

    def add_source(self, loaders: int, worker: int) -> None:
        """Add a source after all others, read by one worker."""
        self.loaders = (*self.loaders, loaders)
        self.worker_of = np.concatenate([self.worker_of, np.full(loaders, worker, np.int64)])

    def replace_missing(self, living: Collection[int]) -> None:
        """Move loaders whose worker does not exist to the first worker that can open them."""
        for loader, worker in enumerate(self.worker_of.tolist()):
            if worker not in living:
                source = self.source_of(loader)
                self.move(loader, min(w for w in living if self.can_open(w, source)))
