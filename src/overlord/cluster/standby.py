"""Standby loaders: their placement on workers, and their promotion. Pure.

A *standby* is a second loader of the same number on another worker. It receives the same plans,
holds the same samples and sends nothing. When the worker of a loader is lost, the standby's worker
becomes the loader's, and a new standby is placed where there is room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from overlord.cluster.placement import Placement
from overlord.messages.control import FollowLoader, LoaderStart
from overlord.scaling.loader_placement import SourceLoad


class StandbyManager:
    """Places and promotes standbys. Runs on: event loop.

    ``sizes`` has the bytes of every loader, roughly; ``wanted`` are the loaders that are to have a
    standby.
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
        """Return whether living workers have standbys of all loaders of a worker."""
        others = {h for h in living if h != worker}
        return all(self.worker_of.get(k) in others for k in self._placement.loaders_on(worker))

    def follow(self, starts: Sequence[LoaderStart]) -> list[tuple[int, FollowLoader]]:
        """Return the messages that let standbys follow loaders from their start on, by worker."""
        start_of = {start.loader: start for start in starts}
        return [
            (h, FollowLoader(start_of[loader]))
            for loader, h in self.worker_of.items()
            if loader in start_of
        ]

    def promote(self, dead: Collection[int], living: Collection[int]) -> None:
        """Move loaders of dead workers to the workers of their standbys."""
        for worker in dead:
            for loader in self._placement.loaders_on(worker):
                if self.worker_of.get(loader) in living:
                    self._placement.move(loader, self.worker_of.pop(loader))
        self.forget(living)

    def forget(self, living: Collection[int]) -> None:
        """Forget standbys on workers that are not alive."""
        self.worker_of = {loader: h for loader, h in self.worker_of.items() if h in living}
        self._placement.follow(self.worker_of)

    def drop(self, loader: int) -> None:
        """Forget the standby of a loader, which has become the loader itself."""
        self.worker_of.pop(loader, None)

    def fill(self, living: Collection[int], nodes: Mapping[int, str]) -> list[int]:
        """Give a standby to every loader that is to have one, and return the loaders of new ones.

        A standby goes to another worker that can open the source: the one that holds least, and on
        another of the ``nodes`` where there is one, since a node is lost as a whole. Loaders of a
        source on one worker stay together, since hooks see them together. ``living`` are the
        workers to choose from.
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
        """Return the bytes of loaders and standbys by worker."""
        held = dict.fromkeys(living, 0.0)
        for loader, n in self._sizes.items():
            if (h := self._placement.worker(loader)) in held:
                held[h] += n
        for loader, h in self.worker_of.items():
            held[h] = held.get(h, 0.0) + self._sizes[loader]
        return held

    def _groups(self) -> Sequence[Sequence[int]]:
        """Return the loaders of each source and worker, the largest group first."""
        groups: dict[tuple[int, int], list[int]] = {}
        for loader in self._wanted:
            key = (self._placement.source_of(loader), self._placement.worker(loader))
            groups.setdefault(key, []).append(loader)
        return sorted(groups.values(), key=lambda g: (-sum(self._sizes[loader] for loader in g), g))


def standby_sizes(
    kind: str, loads: Sequence[SourceLoad], loaders: Sequence[int]
) -> tuple[dict[int, float], list[int]]:
    """Return the bytes of every loader, and the loaders to which ``shadows`` gives a standby.

    These are the loaders of all sources ("all"), of sources that cost more than the mean ("heavy"),
    or of none ("none").
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
