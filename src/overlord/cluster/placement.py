"""The workers of loaders, standbys and ranks. Pure: no input or output."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from overlord.messages.control import FollowLoader, LoaderStart
from overlord.scaling.profile import SourceLoad

# ----------------------------------------------------------------------------
# The worker that reads each loader, follows it as a standby, or is to read it next.


class Placement:
    """The workers of loaders, sources and ranks. Loaders are numbered source by source.

    ``loaders`` is the number of loaders of every source, ``worker_of`` the worker of every loader.
    ``constructor_of`` is the constructor worker of every data-parallel group, ``ranks`` has the
    ranks of every group.
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
        """Return the workers that read a loader after all pending moves."""
        return {self.pending.get(k, self.worker(k)) for k in range(self.n_loaders)}

    def can_open(self, worker: int, source: int) -> bool:
        return source in self.sources_of.get(worker, ())

    def constructor(self, rank: int) -> int:
        """Return the constructor worker of a rank."""
        return int(self.constructor_of[self.bucket_of[rank]])

    def move(self, loader: int, worker: int) -> None:
        self.worker_of[loader] = worker

    def follow(self, standbys: Mapping[int, int]) -> None:
        """Set the worker of each loader's standby. A standby pops the samples its loader pops."""
        self.standby_of = dict(standbys)

    def add_source(self, loaders: int, worker: int) -> None:
        """Add a source after all others, read by one worker."""
        self.loaders = (*self.loaders, loaders)
        self.worker_of = np.concatenate([self.worker_of, np.full(loaders, worker, np.int64)])

    def replace_missing(self, living: Collection[int]) -> None:
        """Move each loader without a living worker to the first living one that can open it."""
        for loader, worker in enumerate(self.worker_of.tolist()):
            if worker not in living:
                source = self.source_of(loader)
                self.move(loader, min(w for w in living if self.can_open(w, source)))


# ----------------------------------------------------------------------------
# Standby loaders: their placement on workers, and their promotion.
#
# A *standby* is a second loader of the same number on another worker. It receives the same plans,
# holds the same samples and sends nothing. When the worker of a loader is lost, the standby's
# worker takes the loader over, and a new standby is placed on another worker.


class StandbyManager:
    """The standbys of a job: their placement and their promotion. Runs on: event loop.

    ``sizes`` has the estimated bytes of every loader. ``wanted`` are the loaders that are to have a
    standby; None: all.
    """

    def __init__(
        self,
        placement: Placement,
        sizes: Mapping[int, float],
        wanted: Collection[int] | None = None,
    ):
        self._placement, self._sizes = placement, dict(sizes)
        self._wanted = sorted(sizes if wanted is None else wanted)
        self.worker_of: dict[int, int] = {}  # loader -> the worker of its standby

    def workers(self) -> set[int]:
        """Return the workers that have a standby."""
        return set(self.worker_of.values())

    def covers(self, worker: int, living: Collection[int]) -> bool:
        """Return whether each loader of a worker has a standby on another living worker.

        True for a worker without loaders.
        """
        others = {h for h in living if h != worker}
        return all(self.worker_of.get(k) in others for k in self._placement.loaders_on(worker))

    def follow(self, starts: Sequence[LoaderStart]) -> list[tuple[int, FollowLoader]]:
        """Return (worker, message) pairs that attach standbys at the starts of their loaders."""
        start_of = {start.loader: start for start in starts}
        return [
            (h, FollowLoader(start_of[loader]))
            for loader, h in self.worker_of.items()
            if loader in start_of
        ]

    def promote(self, dead: Collection[int], living: Collection[int]) -> None:
        """Move loaders of dead workers to living workers that have their standbys.

        All standbys on workers that are not alive are discarded.
        """
        for worker in dead:
            for loader in self._placement.loaders_on(worker):
                if self.worker_of.get(loader) in living:
                    self._placement.move(loader, self.worker_of.pop(loader))
        self.forget(living)

    def forget(self, living: Collection[int]) -> None:
        """Discard standbys on workers that are not alive."""
        self.worker_of = {loader: h for loader, h in self.worker_of.items() if h in living}
        self._placement.follow(self.worker_of)

    def drop(self, loader: int) -> None:
        """Remove the standby of a loader that has moved to the standby's worker."""
        self.worker_of.pop(loader, None)

    def fill(self, living: Collection[int], nodes: Mapping[int, str]) -> list[int]:
        """Place the missing standbys, and return the loaders of the new ones.

        A standby is placed on another of the ``living`` workers that can open the source. Workers
        on another node are preferred, since a node is lost as a whole, then workers that hold fewer
        bytes. The loaders of a source on one worker stay together, for loader hooks.
        """
        load, made = self._held_by(living), list[int]()
        for group in self._groups():
            source, home = self._placement.source_of(group[0]), self._placement.worker(group[0])
            rooms = [h for h in living if h != home and self._placement.can_open(h, source)]
            if not rooms:
                continue
            placed = {self.worker_of[loader] for loader in group if loader in self.worker_of}
            best = (
                min(placed)
                if placed
                else min(rooms, key=lambda h: (nodes.get(h) == nodes.get(home), load[h], h))
            )
            for loader in group:
                if loader not in self.worker_of:
                    self.worker_of[loader] = best
                    load[best] += self._sizes[loader]
                    made.append(loader)
        self._placement.follow(self.worker_of)
        return made

    def _held_by(self, living: Collection[int]) -> dict[int, float]:
        """Return the estimated bytes of loaders and standbys by worker."""
        held = dict.fromkeys(living, 0.0)
        for loader, n in self._sizes.items():
            if (h := self._placement.worker(loader)) in held:
                held[h] += n
        for loader, h in self.worker_of.items():
            held[h] = held.get(h, 0.0) + self._sizes[loader]
        return held

    def _groups(self) -> Sequence[Sequence[int]]:
        """Return the loaders that need a standby, grouped by source and worker, largest first."""
        groups: dict[tuple[int, int], list[int]] = {}
        for loader in self._wanted:
            key = (self._placement.source_of(loader), self._placement.worker(loader))
            groups.setdefault(key, []).append(loader)
        return sorted(groups.values(), key=lambda g: (-sum(self._sizes[loader] for loader in g), g))


def standby_sizes(
    kind: str, loads: Sequence[SourceLoad], loaders: Sequence[int]
) -> tuple[dict[int, float], list[int]]:
    """Return the estimated bytes of every loader, and the loaders that get a standby.

    ``kind`` is the option ``shadows``: the loaders of all sources ("all"), or of sources that cost
    more than the mean ("heavy"). With "none" both results are empty.
    """
    if kind == "none":
        return {}, []
    sizes, wanted = dict[int, float](), list[int]()
    mean = sum(load.cost for load in loads) / len(loads)
    for load, n in zip(loads, loaders, strict=True):
        mine = range(len(sizes), len(sizes) + n)
        sizes |= dict.fromkeys(mine, load.memory / n)
        wanted += mine if kind == "all" or load.cost > mean else ()
    return sizes, wanted


# ----------------------------------------------------------------------------
# The attached ranks of a job, by data-parallel group and constructor worker.


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
        """For every data-parallel group, whether one of its ranks is attached."""
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
