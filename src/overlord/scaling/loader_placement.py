"""Placement of loaders on loader workers (processes). Pure, and without effect on the stream.

The number of processes follows cores, not sources. A process costs memory and start-up, a logical
loader costs next to nothing, and reading and tokenizing release the interpreter lock. So light
sources share workers. Only a source that would delay all others gets several loaders, on different
workers. User code is assumed to hold the lock: sources that run it share a worker only as far as
one core does their work.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlord.scaling.threads import locked_part

# 300 sources in 12 processes held 6 MB each, in 100 processes 71 MB each, and started 25 times
# faster
SOURCES_PER_HOST = 25
NAMED = 4  # sources that the reason of a worker names


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLoad:
    """The cost of reading one source, as far as it is known in advance."""

    name: str
    share: float  # of the mixture
    # seconds of reading and transforming per step, in any unit that is the same for all sources
    cost: float
    memory: int  # bytes of file state and buffers
    max_loaders: int = 1  # more would have no work
    state: int = 0  # file state in ``memory``; every worker with a loader of the source holds it
    # number of shards if it may be scaled: a row may be expensive, whatever its weight now
    shares: int = 1
    # seconds of a core per sample that are known to release the interpreter lock; the rest is
    # assumed to hold it
    free_s: float = math.inf

    def __post_init__(self) -> None:
        if not (
            0 <= self.cost < math.inf
            and 0 <= self.share < math.inf
            and self.memory >= 0
            and self.max_loaders >= 1
            and self.state >= 0
            and self.free_s >= 0
        ):
            raise ValueError(
                f"{self.name}: expected share, cost and memory finite and at least 0, "
                f"max_loaders at least 1, got {self}"
            )

    @property
    def locked(self) -> float:
        """Share of its cost that is assumed to hold the interpreter lock: one core per process does
        it.
        """
        return locked_part(self.cost / self.share, self.free_s) if self.share else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlacement:
    """Loaders per source, and the worker (host) of each loader; loaders are numbered source by
    source.
    """

    loaders: tuple[int, ...]
    host_of: tuple[int, ...]
    n_hosts: int
    costs: tuple[float, ...]  # predicted, per worker, as shares of all work
    memory: tuple[int, ...]  # bytes per worker
    reasons: tuple[str, ...]  # one line per worker
    threads: int = 0  # of every worker; 0: an equal share of the cores

    def loaders_on(self, host: int) -> tuple[int, ...]:
        return tuple(loader for loader, h in enumerate(self.host_of) if h == host)

    @property
    def slowest(self) -> float:
        """The share of all work that the busiest worker does."""
        return max(self.costs)

    def to_table(self) -> str:
        """Return a human-readable table."""
        head = (
            f"{sum(self.loaders)} loaders of {len(self.loaders)} sources in {self.n_hosts} "
            f"workers, the busiest does {self.slowest:.0%}"
        )
        return "\n".join(
            [head, *(f"  worker {h:<3} {reason}" for h, reason in enumerate(self.reasons))]
        )


@dataclass(frozen=True, slots=True)
class _LoaderGroup:
    """Loaders that are placed together: one, or all of a source."""

    source: int
    loaders: tuple[int, ...]
    cost: float
    memory: float
    split: bool  # one of several


@dataclass(frozen=True, slots=True, eq=False)
class _Rules:
    """The inputs that stay fixed while the number of workers is searched."""

    loads: tuple[SourceLoad, ...]
    named: Mapping[str, int]
    counts: tuple[int, ...] | None  # loaders of every source, if they are given
    per_host: int
    # the user set per_host: more workers than cores rather than more sources per worker
    strict: bool
    together: bool
    memory_bytes: int | None
    total: float

    def loaders(self, cores: int) -> tuple[int, ...]:
        """Return the loaders per source: enough that none has more work than a core's fair share,
        if chunks allow it.
        """
        if self.counts is not None:
            return self.counts
        alone = self.strict and self.per_host == 1
        return tuple(
            self.named.get(
                load.name,
                1
                if alone
                else min(load.max_loaders, cores, max(1, math.ceil(self.fair(load, cores)))),
            )
            for load in self.loads
        )

    def fair(self, load: SourceLoad, cores: int) -> float:
        """Return the source's work in units of a core's fair share."""
        return load.cost * cores / self.total - 1e-9 if self.total else 0.0

    def parts(self, cores: int) -> list[_LoaderGroup]:
        """Return the groups in the order of placement: split sources while every worker has room,
        then the heaviest first.
        """
        made, first = [], 0
        for i, (load, n) in enumerate(zip(self.loads, self.loaders(cores), strict=True)):
            groups = (
                [range(first, first + n)]
                if self.together
                else [range(first + k, first + k + 1) for k in range(n)]
            )
            made += [
                _LoaderGroup(
                    i, tuple(g), load.cost / len(groups), load.memory / len(groups), len(groups) > 1
                )
                for g in groups
            ]
            first += n
        return sorted(made, key=lambda p: (not p.split, -p.cost, -p.memory, p.source))

    def n_hosts(self, cores: int, parts: Sequence[_LoaderGroup]) -> int:
        light = [
            self.loads[p.source]
            for p in parts
            if not p.split and self.fair(self.loads[p.source], cores) <= 1
        ]
        # number of locks that are always held
        held = math.ceil(
            math.fsum(load.locked * max(0.0, self.fair(load, cores)) for load in light)
        )
        n = max(1, min(cores, len(parts) - len(light) + max(held, -(-len(light) // self.per_host))))
        if self.strict:
            n = max(n, -(-len(parts) // self.per_host))
        if self.memory_bytes is not None:
            n = max(n, math.ceil(sum(load.memory for load in self.loads) / self.memory_bytes))
        return min(n, len(parts))

    def limit(self, n_hosts: int, parts: Sequence[_LoaderGroup]) -> int:
        """Return the greatest number of sources per worker: as requested, or an equal share if
        there are too few cores.
        """
        return self.per_host if self.strict else max(self.per_host, -(-len(parts) // n_hosts))


def plan_hosts(
    loads: Sequence[SourceLoad],
    *,
    cores: int,
    sources_per_host: int | None = None,
    loaders: Mapping[str, int] | None = None,
    together: bool = False,
    memory_bytes: int | None = None,
    counts: Sequence[int] | None = None,
) -> LoaderPlacement:
    """Return loaders and workers for these sources on ``cores`` cores.

    There are ``min(cores, sources / 25)`` workers. Sources of more than a core's fair share of the
    work add one for each of their loaders. Light sources whose code holds the interpreter lock get
    a worker for every core of their locked work. There are more workers if one would hold more than
    ``memory_bytes``.

    ``sources_per_host`` is kept even if that takes more workers than cores; 1 gives every source a
    process of its own. ``loaders`` fixes the number for the sources it names, ``counts`` for all
    (from ``scaling.partition``, which has reasons of its own). ``together`` keeps all loaders of a
    source on one worker.
    """
    for name, value in (
        ("cores", cores),
        ("sources_per_host", sources_per_host),
        ("memory_bytes", memory_bytes),
        ("sources", len(loads)),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    rules = _Rules(
        tuple(loads),
        dict(loaders or {}),
        None if counts is None else tuple(counts),
        sources_per_host or SOURCES_PER_HOST,
        sources_per_host is not None,
        together,
        memory_bytes,
        math.fsum(load.cost for load in loads),
    )
    return _explained(rules, _layout(rules, cores) if counts is not None else _best(rules, cores))


def _best(rules: _Rules, cores: int) -> _HostLayout:
    """Return the best layout of all numbers of cores. Placing the heaviest first is near the best,
    but not monotone: if fewer cores do better, they are used.
    """
    best, tried = _layout(rules, cores), set[tuple[int, tuple[int, ...]]]()
    for c in range(cores - 1, 0, -1):
        parts = rules.parts(c)
        key = (rules.n_hosts(c, parts), rules.loaders(c))
        if _bound(rules, c, parts) >= best.slowest:
            break
        if key not in tried and (layout := _layout(rules, c)).slowest < best.slowest:
            best = layout
        tried.add(key)
    return best


@dataclass(frozen=True, slots=True, eq=False)
class _HostLayout:
    cores: int
    parts: list[_LoaderGroup]
    host: list[int]  # of every group
    n_hosts: int

    def on(self) -> list[list[_LoaderGroup]]:
        """Return the groups of every worker."""
        found: list[list[_LoaderGroup]] = [[] for _ in range(self.n_hosts)]
        for part, h in zip(self.parts, self.host, strict=True):
            found[h].append(part)
        return found

    @property
    def costs(self) -> list[float]:
        return [math.fsum(p.cost for p in parts) for parts in self.on()]

    @property
    def slowest(self) -> float:
        return max(self.costs)


def _bound(rules: _Rules, cores: int, parts: Sequence[_LoaderGroup]) -> float:
    """Return a lower bound of the slowest worker for ``cores`` cores or fewer."""
    hosts = len(parts) if rules.memory_bytes is not None else rules.n_hosts(cores, parts)
    return max(rules.total / hosts, max(p.cost for p in parts)) * (1 - 1e-12)


def _layout(rules: _Rules, cores: int) -> _HostLayout:
    parts = rules.parts(cores)
    n = rules.n_hosts(cores, parts)
    while (host := _placed(parts, n, rules.limit(n, parts), rules.memory_bytes)) is None:
        n += 1  # memory: with a worker for every group there always is room
    return _HostLayout(cores, parts, host, n)


def _placed(
    parts: Sequence[_LoaderGroup], n_hosts: int, limit: int, memory_bytes: int | None
) -> list[int] | None:
    """Return a worker for every group, each time the one with the least work; None if memory does
    not allow it.
    """
    heap = [(0.0, 0, h) for h in range(n_hosts)]
    sources: list[set[int]] = [set() for _ in range(n_hosts)]
    memory, where = [0.0] * n_hosts, []

    def may(part: _LoaderGroup, h: int) -> bool:
        room = memory_bytes is None or not sources[h] or memory[h] + part.memory <= memory_bytes
        return room and (part.source in sources[h] or len(sources[h]) < limit)

    for part in parts:
        passed = []
        while heap and (part.source in sources[heap[0][2]] or not may(part, heap[0][2])):
            passed.append(heapq.heappop(heap))
        # Every worker has a loader of this source, or no room: then a second loader goes to one
        # with room.
        found = (
            heapq.heappop(heap)
            if heap
            else min((p for p in passed if may(part, p[2])), default=None)
        )
        if found is None:
            return None
        h = found[2]
        sources[h].add(part.source)
        memory[h] += part.memory
        where.append(h)
        for entry in [p for p in passed if p is not found] + [
            (found[0] + part.cost, len(sources[h]), h)
        ]:
            heapq.heappush(heap, entry)
    return where


def _explained(rules: _Rules, layout: _HostLayout) -> LoaderPlacement:
    loaders, total = rules.loaders(layout.cores), rules.total or 1.0
    host_of, memory = [0] * sum(loaders), [0.0] * layout.n_hosts
    for part, h in zip(layout.parts, layout.host, strict=True):
        memory[h] += part.memory
        for loader in part.loaders:
            host_of[loader] = h
    costs = [c / total for c in layout.costs]
    reasons = [
        _reason(rules, parts, costs[h], memory[h], loaders) for h, parts in enumerate(layout.on())
    ]
    return LoaderPlacement(
        loaders=loaders,
        host_of=tuple(host_of),
        n_hosts=layout.n_hosts,
        costs=tuple(costs),
        memory=tuple(map(math.ceil, memory)),
        reasons=tuple(reasons),
    )


def _reason(
    rules: _Rules, parts: Sequence[_LoaderGroup], cost: float, memory: float, loaders: Sequence[int]
) -> str:
    """Return the work of a worker as text: its heavy sources first, and why they are split."""
    mine = sorted({p.source for p in parts})
    mine.sort(key=lambda i: -rules.loads[i].cost / loaders[i])
    told = []
    for i in mine[:NAMED]:
        load, n = rules.loads[i], sum(p.source == i for p in parts)
        what = load.name
        if loaders[i] > 1:
            why = (
                "as asked"
                if load.name in rules.named
                else f"{load.cost / (rules.total or 1.0):.0%} of the work"
            )
            what += f" ({loaders[i] if rules.together else n} of its {loaders[i]} loaders; {why})"
        told.append(what)
    more = f" and {len(mine) - NAMED} more" if len(mine) > NAMED else ""
    said = (
        f"{cost:.1%} of the work, {memory / 2**20:,.0f} MB, {len(mine)} "
        f"source{'s' * (len(mine) != 1)}: {', '.join(told)}{more}"
    )
    over = rules.memory_bytes is not None and memory > rules.memory_bytes
    return said + (
        f"; above {rules.memory_bytes} bytes, which one loader alone needs" if over else ""
    )
