"""Assignment of a source's shards to loader workers (hosts). Pure, and without effect on the
stream.

A source that may become heavy is divided into as many *shards* (logical loaders) as it could ever
use when the job is launched: they cost next to nothing. Scaling assigns its shards to more workers,
or to fewer. The chunks of a shard never change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence


def spread(
    where: Sequence[int], hosts: Sequence[int], crowded: Container[int] = ()
) -> tuple[int, ...]:
    """Return a worker for every shard, among these workers only; few shards move. Each worker has
    at least one if there are enough. ``crowded`` workers, which also read other sources, have half
    as many as the others, and these differ by one at most.

    ``where``: the current worker of each shard.
    """
    if not hosts:
        raise ValueError("expected at least one worker for the shards of a source, got none")
    room = _allotted(Counter(h for h in where if h in set(hosts)), len(where), hosts, crowded)
    found: list[int | None] = []
    for h in where:
        stays = room.get(h, 0) > 0
        found.append(h if stays else None)
        if stays:
            room[h] -= 1
    free = [h for h in hosts for _ in range(room[h])]
    return tuple(free.pop(0) if h is None else h for h in found)


def _allotted(
    held: Mapping[int, int], n: int, hosts: Sequence[int], crowded: Container[int]
) -> dict[int, int]:
    """Return the number of shards of each worker. Of workers with equal claims, the one with the
    most shards now gets one more, so that fewer shards move.
    """
    weight = {h: 0.5 if h in crowded else 1.0 for h in hosts}
    ideal = {h: n * w / math.fsum(weight.values()) for h, w in weight.items()}
    order = sorted(hosts, key=lambda h: (-held.get(h, 0), hosts.index(h)))
    counts = {h: int(k < n) for k, h in enumerate(order)}
    for _ in range(n - sum(counts.values())):
        counts[max(order, key=lambda h: ideal[h] - counts[h])] += 1
    return counts


def kept(
    hosts: Sequence[int], n: int, others: Mapping[int, int], first: Callable[[int], bool]
) -> list[int]:
    """Return the n workers of a source that continue to read it when it needs no more. Workers that
    read other sources stay, since those keep them, then those that were there ``first``. The others
    have no work and can be stopped. ``others``: loaders of other sources by worker.
    """
    return sorted(sorted(hosts, key=lambda h: (not others.get(h), not first(h), h))[:n])


def widened(
    loaders: Sequence[int], host_of: Sequence[int], shares: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return loaders per source and the worker of each, with every source divided into at least
    ``shares`` shards: on the same workers, in turn.
    """
    counts, where, first = [], list[int](), 0
    for n, wanted in zip(loaders, shares, strict=True):
        mine, many = host_of[first : first + n], max(n, wanted)
        first += n
        counts.append(many)
        where += [mine[k % n] for k in range(many)]
    return tuple(counts), tuple(where)
