"""CPU cores that sources need, and cores that their loader workers (``hosts``) have for them.

This module is pure. A worker has two resources: its threads and one interpreter lock. A source uses
both; it uses the lock only for its locked part. The *room* of a worker
for a source is the number of cores that the source can use there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# ----------------------------------------------------------------------------
# CPU cores that the threads of one process can use, given the interpreter lock (GIL).
#
# Python code holds the lock while it runs; pyarrow, tokenizers, zstd and large numpy copies
# release it. The *locked part* of a source is the share of its CPU time under the lock: 1 for
# plain Python, 0 for code that always releases it. Amdahl's law gives the cores that its threads
# can use in one process. Before a source runs, the part is an assumption; afterwards it is
# measured. Decision record 0022 has the reasons.

# threads of a process that can be busy concurrently; more threads only wait for the lock
THREADS = 8
SECOND = 0.9  # part of a core that the second thread of a process, and each further one, adds
# least work items in progress per process: with fewer, threads do not compete for the lock
LEAST_IN_PROGRESS = 1.5
# least busy cores per process: with fewer, threads wait for storage or other programs
SATURATED = 0.75


def cores_of_threads(threads: float) -> float:
    """Return the CPU cores that threads of one process use if their code releases the lock."""
    return 1 + SECOND * (min(threads, THREADS) - 1)


def locked_part(cost_s: float, free_s: float) -> float:
    """Return the assumed share of a source's CPU time that runs under the interpreter lock.

    ``cost_s``: all CPU seconds of a sample. ``free_s``: those in code that is known to release the
    lock.
    """
    return max(0.0, 1 - free_s / cost_s) if cost_s > 0 else 0.0


def measured_part(in_progress: float, cores: float) -> float | None:
    """Return the locked part by the Karp-Flatt metric; None if the lock did not limit the work.

    ``in_progress``: mean number of work items in progress in one process. ``cores``: mean number of
    cores that they kept busy. On a machine without idle cores the result is too high.
    """
    if in_progress < LEAST_IN_PROGRESS or cores < SATURATED:
        return None
    return min(1.0, max(0.0, (in_progress / cores - 1) / (in_progress - 1)))


def usable_cores(lanes: float, locked: float) -> float:
    """Return the CPU cores that one process can use for a source, by Amdahl's law.

    ``lanes``: cores that its threads could use without a lock. ``locked``: the locked part.
    """
    return lanes / (1 + locked * (lanes - 1))


# ----------------------------------------------------------------------------
# The demand of sources, and the room of workers.

# least room of a worker for a source that it reads, as a share of its room without other sources
LEAST_ROOM = 0.1
# least such share at which a worker that does not read the source is considered: with less room, a
# move does not pay off
WORTH = 0.3
CLOSE = 1e-9  # cores that count as zero


@dataclass(frozen=True, slots=True)
class Demand:
    """The CPU cores that one source needs, and the workers that read it or could read it.

    ``now`` and ``later``: cores needed now and soon. ``locked``: the locked part of the source.
    ``hosts``: the workers that read it; its code runs in ``processes`` processes. ``able``: other
    workers that could read it.
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
        """The cores that the source needs now on each of its workers; 0 if it has none."""
        return self.now / len(self.hosts) if self.hosts else 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """The CPU cores that a source needs, and the cores that workers have for it."""

    now: float
    later: float
    rooms: tuple[float, ...]  # room of each of its workers, in cores, the least first
    per_host: float  # room of a worker that reads only this source
    # (room, number) of other workers that could read it, the most room first
    beside: tuple[tuple[float, int], ...] = ()

    @property
    def most(self) -> float:
        """The larger of the cores needed now and later."""
        return max(self.now, self.later)

    @property
    def room(self) -> float:
        """The room of all workers of the source, in cores."""
        return math.fsum(self.rooms)

    def fewest(self, busy: float) -> int:
        """Return the least number n such that any n workers keep utilization at most ``busy``.

        If no number suffices, return the current number of workers.
        """
        return next(
            (n for n in range(1, len(self.rooms)) if self.most <= busy * math.fsum(self.rooms[:n])),
            len(self.rooms),
        )

    def grant(self, target: float, free: int, most: int) -> Grant:
        """Return the additional workers that lower utilization to ``target``, at most ``most``.

        New workers come first, up to ``free``, then existing workers with room.
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
    short: int  # new workers that would be needed in addition, and are not available


def needs_of(demands: Sequence[Demand], lanes: float) -> dict[str, Need]:
    """Return the cores that every source needs and has, by name.

    ``lanes``: cores that one worker can use for all its sources together.
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
    # with fewer processes than workers, several workers share a lock
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

    Each worker counts as 1 to ``lanes`` cores, even without sources. Its sources hold the lock on
    at most one of them.
    """
    free, held = dict[int, float](), dict[int, float]()
    for d in demands:
        for h in d.hosts:
            free[h] = free.get(h, 0.0) + (1 - d.locked) * d.each
            held[h] = held.get(h, 0.0) + d.locked * d.each
    return math.fsum(min(lanes, max(1.0, free[h] + min(1.0, held[h]))) for h in free) + max(
        0, hosts - len(free)
    )
