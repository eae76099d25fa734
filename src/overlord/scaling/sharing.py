"""Which process reads which share of a source. Pure, and never seen in the stream.

A source that may become heavy is cut into as many *shares* (logical loaders) as it could ever use when the job is launched: they cost
next to nothing. To scale it is to spread its shares over more processes, or over fewer; which chunks a share has never changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence


def spread(where: Sequence[int], hosts: Sequence[int]) -> tuple[int, ...]:
    """A host for every share, of these hosts alone, each with as many as the others or one more; few shares move.

    ``where``: the host that each share has now. Of equal counts, hosts that come first in ``hosts`` have the greater one.
    """
    if not hosts:
        raise ValueError("wanted at least one host for the shares of a source")
    # Whoever has most now keeps one more: fewer shares move than where the first ones do.
    held = Counter(h for h in where if h in set(hosts))
    order = sorted(hosts, key=lambda h: (-held[h], hosts.index(h)))
    room = {h: len(where) // len(hosts) + (k < len(where) % len(hosts)) for k, h in enumerate(order)}
    found: list[int | None] = []
    for h in where:
        stays = room.get(h, 0) > 0
        found.append(h if stays else None)
        if stays:
            room[h] -= 1
    free = [h for h in hosts for _ in range(room[h])]
    return tuple(free.pop(0) if h is None else h for h in found)


def kept(hosts: Sequence[int], n: int, others: Mapping[int, int], first: Callable[[int], bool]) -> list[int]:
    """The n of a source's hosts that go on reading it, where it needs no more. Those that read other sources stay for those anyway, then
    those that were there ``first``: who is left over has nothing to do, and can be ended. ``others``: loaders of other sources by host."""
    return sorted(sorted(hosts, key=lambda h: (not others.get(h), not first(h), h))[:n])


def widened(loaders: Sequence[int], host_of: Sequence[int], shares: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Loaders per source and the host of each, with every source cut into ``shares`` where it had fewer: on the same hosts, in turn."""
    counts, where, first = [], list[int](), 0
    for n, wanted in zip(loaders, shares, strict=True):
        mine, many = host_of[first : first + n], max(n, wanted)
        first += n
        counts.append(many)
        where += [mine[k % n] for k in range(many)]
    return tuple(counts), tuple(where)
