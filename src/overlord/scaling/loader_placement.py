"""Placement of loaders on loader workers (``hosts``), without effect on the stream.

This module is pure. The number of workers follows the CPU cores, not the sources. A worker is a
process, which costs memory and start-up time. A loader costs almost nothing, and reading and
tokenizing release the interpreter lock. So light sources share workers, and the loaders of a heavy
source are on different workers. User code is assumed to hold the lock: sources with user code share
a worker only while one core suffices for them.

``scaling.partition`` decides how many loaders each source has.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from overlord.scaling.profile import SourceLoad

# Measured: a source took 6 MB where 12 processes had 25 sources each, and 71 MB where each of 100
# sources had its own process. The 12 processes started 25 times faster.
SOURCES_PER_HOST = 25
NAMED = 4  # most sources that the text of a worker names
CLOSE = 1e-9  # smaller differences, in cores, are rounding errors


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlacement:
    """The number of loaders of every source, and the worker (host) of every loader.

    Loaders are numbered consecutively, source by source.
    """

    loaders: tuple[int, ...]  # number of loaders, by source
    host_of: tuple[int, ...]  # number of the worker, by loader
    n_hosts: int  # number of workers
    costs: tuple[float, ...]  # predicted share of each worker in all work
    memory: tuple[int, ...]  # bytes per worker
    reasons: tuple[str, ...]  # one line per worker
    threads: int = 0  # threads of every worker; 0: an equal share of the CPU cores

    @property
    def slowest(self) -> float:
        """The share of all work that the busiest worker does."""
        return max(self.costs)


@dataclass(frozen=True, slots=True)
class _LoaderGroup:
    """Loaders of a source that are placed on one worker: one loader, or all of the source."""

    source: int
    loaders: tuple[int, ...]
    cost: float
    memory: float
    split: bool  # the source has several groups


def place_loaders(
    loads: Sequence[SourceLoad],
    counts: Sequence[int],
    *,
    cores: int,
    sources_per_host: int | None = None,
    named: Collection[str] = (),
    together: bool = False,
) -> LoaderPlacement:
    """Return the placement of ``counts[i]`` loaders of each source i, on ``cores`` CPU cores.

    Light sources share workers, about 25 per worker. If their code holds the interpreter lock, they
    get a worker for every core of their locked work. Every loader of a split source, and every
    source with more than a core's fair share of the work, adds a worker. There are at most
    ``cores`` workers.

    ``sources_per_host`` bounds the sources of a worker, even if that takes more workers than cores.
    ``named``: sources whose number of loaders the user gave, for the reasons. ``together`` keeps
    all loaders of a source on one worker.
    """
    for name, value in (
        ("cores", cores),
        ("sources_per_host", sources_per_host),
        ("sources", len(loads)),
    ):
        if value is not None and value < 1:
            raise ValueError(f"place_loaders: expected {name} of at least 1, got {value}")
    groups = _groups(loads, counts, together)
    n_hosts = _worker_count(loads, groups, cores, sources_per_host)
    limit = sources_per_host or max(SOURCES_PER_HOST, -(-len(groups) // n_hosts))
    hosts = _place_groups(groups, n_hosts, limit)
    return _with_reasons(loads, counts, groups, hosts, n_hosts, named)


def _groups(
    loads: Sequence[SourceLoad], counts: Sequence[int], together: bool
) -> list[_LoaderGroup]:
    """Return the loader groups in the order of placement: split sources first, then by cost.

    The groups of split sources are placed first, while every worker has room for them.
    """
    made, first = list[_LoaderGroup](), 0
    for i, (load, n) in enumerate(zip(loads, counts, strict=True)):
        size = n if together else 1
        starts = range(first, first + n, size)
        made += [
            _LoaderGroup(
                i,
                tuple(range(k, k + size)),
                load.cost / len(starts),
                load.memory / len(starts),
                len(starts) > 1,
            )
            for k in starts
        ]
        first += n
    return sorted(made, key=lambda g: (not g.split, -g.cost, -g.memory, g.source))


def _worker_count(
    loads: Sequence[SourceLoad],
    groups: Sequence[_LoaderGroup],
    cores: int,
    sources_per_host: int | None,
) -> int:
    total, per_host = math.fsum(load.cost for load in loads), sources_per_host or SOURCES_PER_HOST
    # work of every source, in units of a core's fair share
    work = [load.cost * cores / total - CLOSE if total else 0.0 for load in loads]
    light = [g.source for g in groups if not g.split and work[g.source] <= 1]
    # number of interpreter locks that these sources would hold all the time
    held = math.ceil(math.fsum(loads[i].locked * max(0.0, work[i]) for i in light))
    n = max(1, min(cores, len(groups) - len(light) + max(held, -(-len(light) // per_host))))
    if sources_per_host is not None:
        n = max(n, -(-len(groups) // per_host))
    return min(n, len(groups))


def _place_groups(groups: Sequence[_LoaderGroup], n_hosts: int, limit: int) -> list[int]:
    """Return the worker of every group: that with the least work when the group is placed.

    Workers that have the source already, or ``limit`` sources, are used only if no other is left.
    """
    heap = [(0.0, 0, h) for h in range(n_hosts)]
    sources: list[set[int]] = [set() for _ in range(n_hosts)]
    where = []
    for group in groups:
        passed = []
        while heap and (group.source in sources[heap[0][2]] or len(sources[heap[0][2]]) >= limit):
            passed.append(heapq.heappop(heap))
        # If every worker reads this source or is full, one of its workers gets a second loader.
        found = (
            heapq.heappop(heap) if heap else min(p for p in passed if group.source in sources[p[2]])
        )
        h = found[2]
        sources[h].add(group.source)
        where.append(h)
        for entry in [p for p in passed if p is not found] + [
            (found[0] + group.cost, len(sources[h]), h)
        ]:
            heapq.heappush(heap, entry)
    return where


def _with_reasons(
    loads: Sequence[SourceLoad],
    counts: Sequence[int],
    groups: Sequence[_LoaderGroup],
    hosts: Sequence[int],
    n_hosts: int,
    named: Collection[str],
) -> LoaderPlacement:
    """Return the placement of the groups, with costs, memory and a reason for every worker."""
    total = math.fsum(load.cost for load in loads) or 1.0
    host_of, on = [0] * sum(counts), [list[_LoaderGroup]() for _ in range(n_hosts)]
    for group, h in zip(groups, hosts, strict=True):
        on[h].append(group)
        for loader in group.loaders:
            host_of[loader] = h
    why = [
        "as loaders= sets" if load.name in named else f"{load.cost / total:.0%} of the work"
        for load in loads
    ]
    costs = [math.fsum(g.cost for g in mine) / total for mine in on]
    memory = [sum(g.memory for g in mine) for mine in on]
    return LoaderPlacement(
        loaders=tuple(counts),
        host_of=tuple(host_of),
        n_hosts=n_hosts,
        costs=tuple(costs),
        memory=tuple(map(math.ceil, memory)),
        reasons=tuple(
            _reason(loads, counts, mine, why, f"{cost:.1%} of the work, {held / 2**20:,.0f} MB")
            for mine, cost, held in zip(on, costs, memory, strict=True)
        ),
    )


def _reason(
    loads: Sequence[SourceLoad],
    counts: Sequence[int],
    groups: Sequence[_LoaderGroup],
    why: Sequence[str],
    amount: str,
) -> str:
    """Describe the work of a worker: its heaviest sources, and why each has several loaders."""
    here = Counter[int]()
    for group in groups:
        here[group.source] += len(group.loaders)
    mine = sorted(here, key=lambda i: (-loads[i].cost / counts[i], i))
    names = [
        loads[i].name
        + (f" ({here[i]} of its {counts[i]} loaders; {why[i]})" if counts[i] > 1 else "")
        for i in mine[:NAMED]
    ]
    more = f" and {len(mine) - NAMED} more" if len(mine) > NAMED else ""
    return f"{amount}, {len(mine)} source{'s' * (len(mine) != 1)}: {', '.join(names)}{more}"


# ----------------------------------------------------------------------------
# Assignment of a source's shards to loader workers, when the source is scaled.
#
# A source that may become heavy is divided into many *shards* (loaders) when the job is launched;
# a shard costs almost nothing. Scaling assigns its shards to more workers, or to fewer. The chunks
# of a shard never change.


def assign_shards(
    where: Sequence[int], hosts: Sequence[int], crowded: Container[int] = ()
) -> tuple[int, ...]:
    """Return the worker of every shard, among ``hosts``, such that few shards move.

    ``where``: the current worker of each shard. Every worker gets at least one shard if there are
    enough shards. ``crowded`` workers, which also read other sources, get half as many as the
    others. Counts of equally crowded workers differ by one at most.
    """
    if not hosts:
        raise ValueError("assign_shards: expected at least one worker for the shards, got none")
    room = _shards_by_worker(
        Counter(h for h in where if h in set(hosts)), len(where), hosts, crowded
    )
    found: list[int | None] = []
    for h in where:
        stays = room.get(h, 0) > 0
        found.append(h if stays else None)
        if stays:
            room[h] -= 1
    free = [h for h in hosts for _ in range(room[h])]
    return tuple(free.pop(0) if h is None else h for h in found)


def _shards_by_worker(
    held: Mapping[int, int], n: int, hosts: Sequence[int], crowded: Container[int]
) -> dict[int, int]:
    """Return the number of shards, ``n`` in all, that each worker gets.

    ``held``: current numbers. Of equally crowded workers, those that hold the most shards get the
    larger number, so that fewer shards move.
    """
    weight = {h: 0.5 if h in crowded else 1.0 for h in hosts}
    ideal = {h: n * w / math.fsum(weight.values()) for h, w in weight.items()}
    order = sorted(hosts, key=lambda h: (-held.get(h, 0), hosts.index(h)))
    counts = {h: int(k < n) for k, h in enumerate(order)}
    for _ in range(n - sum(counts.values())):
        counts[max(order, key=lambda h: ideal[h] - counts[h])] += 1
    return counts


def workers_to_keep(
    hosts: Sequence[int], n: int, others: Mapping[int, int], first: Callable[[int], bool]
) -> list[int]:
    """Return the n workers of a source that continue to read it when it needs fewer.

    Workers that read other sources are kept first, since they run anyway; ``others`` is the number
    of their loaders of other sources. Workers for which ``first`` is true, those of the launch, are
    kept next. The rest can be stopped.
    """
    return sorted(sorted(hosts, key=lambda h: (not others.get(h), not first(h), h))[:n])


def with_shards(
    loaders: Sequence[int], host_of: Sequence[int], shares: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ``loaders`` and ``host_of`` with at least ``shares[i]`` loaders of each source i.

    Additional loaders are placed on the workers of their source, in turn.
    """
    counts, where, first = [], list[int](), 0
    for n, wanted in zip(loaders, shares, strict=True):
        mine, many = host_of[first : first + n], max(n, wanted)
        first += n
        counts.append(many)
        where += [mine[k % n] for k in range(many)]
    return tuple(counts), tuple(where)
