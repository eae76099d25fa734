"""CPU cores that sources need, and cores that their loader workers (``hosts``) have for them. Pure.

A worker has two resources: its threads and one interpreter lock. A source uses both; it uses the
lock only for its locked part (``loader_placement.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlord.scaling.loader_placement import usable_cores

# least room for a source on a worker that reads it, however many other sources it reads: share of
# the room that the source would have alone
LEAST_ROOM = 0.1
# the same for a worker that does not read the source yet: with less, a move does not pay off
WORTH = 0.3
CLOSE = 1e-9  # cores that count as zero


@dataclass(frozen=True, slots=True)
class Demand:
    """The CPU cores that one source needs, and the workers that read it or could read it.

    ``now`` and ``later``: cores needed now and soon. ``locked``: its locked part. ``hosts``: the
    workers that read it, in ``processes`` processes. ``able``: other workers that could read it.
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
        """The cores that the source needs on each of its workers."""
        return self.now / len(self.hosts) if self.hosts else 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """The CPU cores that a source needs, and the cores that workers have for it."""

    now: float
    later: float
    rooms: tuple[float, ...]  # cores of each of its workers for this source, the least first
    per_host: float  # cores of a worker that reads only this source
    # (cores, number) of other workers that could read it, the most cores first
    beside: tuple[tuple[float, int], ...] = ()

    @property
    def most(self) -> float:
        """The larger of the cores needed now and later."""
        return max(self.now, self.later)

    @property
    def room(self) -> float:
        """The cores that all workers of the source have for it."""
        return math.fsum(self.rooms)

    def fewest(self, busy: float) -> int:
        """Return the least number of workers whose utilization stays at most ``busy``.

        It suffices whichever of the other workers are removed.
        """
        return next(
            (n for n in range(1, len(self.rooms)) if self.most <= busy * math.fsum(self.rooms[:n])),
            len(self.rooms),
        )

    def grant(self, target: float, free: int, most: int) -> Grant:
        """Return the workers that lower the utilization of the source's workers to ``target``.

        Up to ``free`` new workers come first, then existing ones with room, ``most`` in total.
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
    """Additional workers for a source."""

    new: int  # workers to start
    on: tuple[int, ...]  # existing workers to use
    short: int  # workers that are still missing


def needs_of(demands: Sequence[Demand], lanes: float) -> dict[str, Need]:
    """Return the cores that every source needs and has, by name.

    Every worker can use ``lanes`` cores, and may read several sources.
    """
    threads, lock = dict[int, float](), dict[int, float]()
    for d in demands:
        for h in d.hosts:
            threads[h] = threads.get(h, 0.0) + min(d.each, usable_cores(lanes, d.locked))
            lock[h] = lock.get(h, 0.0) + min(d.locked * d.each, 1.0)
    return {d.name: _need(d, lanes, threads, lock) for d in demands}


def _need(d: Demand, lanes: float, threads: Mapping[int, float], lock: Mapping[int, float]) -> Need:
    alone = usable_cores(lanes, d.locked)
    others = sorted(
        (
            (min(lanes - threads.get(h, 0.0), (1 - lock.get(h, 0.0)) / (d.locked or 1.0), alone), h)
            for h in d.able
        ),
        reverse=True,
    )
    # fewer processes than workers: several workers share a lock
    apart = min(1.0, d.processes / (d.locked * len(d.hosts))) if d.locked and d.hosts else 1.0

    def room(h: int) -> float:
        free = lanes - (threads[h] - min(d.each, alone))
        if d.locked:
            free = min(free, (1 - (lock[h] - min(d.locked * d.each, 1.0))) / d.locked, alone)
        return apart * max(LEAST_ROOM * alone, free)

    beside = tuple((room, h) for room, h in others if room >= WORTH * alone)
    return Need(d.now, d.later, tuple(sorted(map(room, d.hosts))), alone, beside)


def cores_used(demands: Sequence[Demand], lanes: float, hosts: int) -> float:
    """Return the CPU cores that ``hosts`` loader workers keep busy.

    Each worker keeps 1 to ``lanes`` cores busy; its sources hold the lock on at most one of them.
    """
    free, held = dict[int, float](), dict[int, float]()
    for d in demands:
        for h in d.hosts:
            free[h] = free.get(h, 0.0) + (1 - d.locked) * d.each
            held[h] = held.get(h, 0.0) + d.locked * d.each
    return math.fsum(min(lanes, max(1.0, free[h] + min(1.0, held[h]))) for h in free) + max(
        0, hosts - len(free)
    )
