"""Needs of sources and room of their loader workers (hosts), in cores. Pure.

A worker has two resources: its threads, and one interpreter lock. A source needs both, the lock for
its locked part alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlord.scaling.loader_placement import useful

# share of a worker's capacity for a source alone that it is assumed to have at least, however
# crowded it is
LEAST_ROOM = 0.1
# the same for a worker that does not read it yet: with less, reading it there is not worth the
# change
WORTH = 0.3
CLOSE = 1e-9  # cores that count as zero


@dataclass(frozen=True, slots=True)
class Demand:
    """One source: cores that it needs now and soon, and its locked part. ``hosts`` read it in
    ``processes`` processes; ``able`` are other workers that could.
    """

    name: str
    now: float
    later: float
    locked: float
    hosts: tuple[int, ...]
    processes: int
    able: tuple[int, ...] = ()

    @property
    def each(self) -> float:
        """The cores that it needs of each of its workers."""
        return self.now / len(self.hosts) if self.hosts else 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """The cores that a source needs and has."""

    now: float
    later: float
    rooms: tuple[float, ...]  # that each of its workers has for it, the least first
    per_host: float
    # room on other workers that could read it, the most first, and their numbers
    beside: tuple[tuple[float, int], ...] = ()

    @property
    def most(self) -> float:
        return max(self.now, self.later)

    @property
    def room(self) -> float:
        return math.fsum(self.rooms)

    def fewest(self, busy: float) -> int:
        """Return the number of workers that suffices if none is to be busier than ``busy``,
        whichever workers are removed.
        """
        return next(
            (n for n in range(1, len(self.rooms)) if self.most <= busy * math.fsum(self.rooms[:n])),
            len(self.rooms),
        )

    def grant(self, target: float, free: int, most: int) -> Grant:
        """Return the workers that bring it to ``target``: up to ``free`` new ones, then existing
        ones with room, ``most`` in total.
        """
        missing = self.most / target - self.room
        new = min(free, most, max(1, math.ceil(missing / self.per_host - CLOSE)))
        missing, on = missing - new * self.per_host, list[int]()
        for room, h in self.beside:
            if missing > CLOSE and new + len(on) < most:
                on.append(h)
                missing -= room
        return Grant(new, tuple(on), max(0, math.ceil(missing / self.per_host - CLOSE)))


@dataclass(frozen=True, slots=True)
class Grant:
    """Workers for a source: the number to start, existing ones to use, and the number that is still
    missing.
    """

    new: int
    on: tuple[int, ...]
    short: int


def needs_of(demands: Sequence[Demand], lanes: float) -> dict[str, Need]:
    """Return the needs and room of every source, if workers have ``lanes`` threads each and may
    read several sources.
    """
    threads, lock = dict[int, float](), dict[int, float]()
    for d in demands:
        for h in d.hosts:
            threads[h] = threads.get(h, 0.0) + min(d.each, useful(lanes, d.locked))
            lock[h] = lock.get(h, 0.0) + min(d.locked * d.each, 1.0)
    return {d.name: _need(d, lanes, threads, lock) for d in demands}


def _need(d: Demand, lanes: float, threads: Mapping[int, float], lock: Mapping[int, float]) -> Need:
    alone = useful(lanes, d.locked)
    others = sorted(
        (
            (min(lanes - threads.get(h, 0.0), (1 - lock.get(h, 0.0)) / (d.locked or 1.0), alone), h)
            for h in d.able
        ),
        reverse=True,
    )
    # several workers share a lock
    apart = min(1.0, d.processes / (d.locked * len(d.hosts))) if d.locked and d.hosts else 1.0

    def room(h: int) -> float:
        free = lanes - (threads[h] - min(d.each, alone))
        if d.locked:
            free = min(free, (1 - (lock[h] - min(d.locked * d.each, 1.0))) / d.locked, alone)
        return apart * max(LEAST_ROOM * alone, free)

    beside = tuple((room, h) for room, h in others if room >= WORTH * alone)
    return Need(d.now, d.later, tuple(sorted(map(room, d.hosts))), alone, beside)


def cores_used(demands: Sequence[Demand], lanes: float, hosts: int) -> float:
    """Return the cores that ``hosts`` loader workers keep busy: at least one each, one in total for
    holders of a lock, at most ``lanes`` each.
    """
    free, held = dict[int, float](), dict[int, float]()
    for d in demands:
        for h in d.hosts:
            free[h] = free.get(h, 0.0) + (1 - d.locked) * d.each
            held[h] = held.get(h, 0.0) + d.locked * d.each
    return math.fsum(min(lanes, max(1.0, free[h] + min(1.0, held[h]))) for h in free) + max(
        0, hosts - len(free)
    )
