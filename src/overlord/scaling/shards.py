"""Which process reads which share of a source. Pure, and never seen in the stream.

A source that may become heavy is cut into as many *shares* (logical loaders) as it could ever use
when the job is launched: they cost next to nothing. To scale it is to spread its shares over more
processes, or over fewer; which chunks a share has never changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence


def spread(
    where: Sequence[int], hosts: Sequence[int], crowded: Container[int] = ()
) -> tuple[int, ...]:
    """A host for every share, of these hosts alone; few shares move. Each has one at least, where
    there are so many; those that are ``crowded``, since they read other sources too, have half as
    many as the others, and these differ by one at most.

    ``where``: the host that each share has now.
    """
    if not hosts:
        raise ValueError("expected at least one host for the shares of a source")
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
    """How many shares each host is to have. Of hosts with equal claims, who has most now has one
    more: fewer shares move then.
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
    """The n of a source's hosts that go on reading it, where it needs no more. Those that read
    other sources stay for those anyway, then those that were there ``first``: who is left over has
    nothing to do, and can be ended. ``others``: loaders of other sources by host.
    """
    return sorted(sorted(hosts, key=lambda h: (not others.get(h), not first(h), h))[:n])


def widened(
    loaders: Sequence[int], host_of: Sequence[int], shares: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Loaders per source and the host of each, with every source cut into ``shares`` where it had
    fewer: on the same hosts, in turn.
    """
    counts, where, first = [], list[int](), 0
    for n, wanted in zip(loaders, shares, strict=True):
        mine, many = host_of[first : first + n], max(n, wanted)
        first += n
        counts.append(many)
        where += [mine[k % n] for k in range(many)]
    return tuple(counts), tuple(where)
