"""Offline auto-partitioning: loaders for every source, and the worker of each, from the costs of
sources and the available resources.

The Overlord paper (arXiv 2504.09844), section 5.1: sources are sorted by cost and clustered.
Clusters get resource levels by the ratio of their means. The cores that constructors and planner do
not need are divided by the workers of all levels into blocks. Limits by source, by actor and of
memory are kept.

Terms of the paper and ours: a paper's *worker* is a logical loader, which does one thing at a time
on one core. An *actor* of a source is a loader worker (host) that has loaders of it. Several
loaders on a worker are its worker parallelism, several workers its data parallelism, and sources on
different workers source parallelism. Decision record 0019 lists the differences from the paper.

Configurations for fewer cores are tried, too, and the best predicted rate wins. So more resources
never do worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from overlord.scaling.loader_placement import LoaderPlacement, SourceLoad, place_loaders, worth

# ----------------------------------------------------------------------------
# Clusters of sources of similar cost, and the resource level of each: stages 1 and 2 of the
# partition algorithm of the Overlord paper (arXiv 2504.09844), section 5.1.

CLUSTER = 4  # greatest number of sources in a cluster; the paper's number
# greatest ratio of costs in a cluster: otherwise three light sources would get the level of a heavy
# one
SPREAD = 2.0
SMALLEST = 1e-3  # share of the mean cost below which a cluster cannot be the unit of levels


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCluster:
    """Sources that get the same number of workers. ``level``: their mean cost, in units of the
    cheapest cluster.
    """

    sources: tuple[int, ...]
    mean: float
    level: float


def clusters_of(
    costs: Sequence[float], names: Sequence[str], size: int = CLUSTER
) -> tuple[SourceCluster, ...]:
    """Return the sources from the most expensive to the cheapest (ties: by name), divided after
    ``size`` sources and where the cost falls to less than half.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], names[i]))
    groups: list[list[int]] = []
    for i in order:
        if groups and len(groups[-1]) < size and costs[groups[-1][0]] <= SPREAD * costs[i]:
            groups[-1].append(i)
        else:
            groups.append([i])
    means = [math.fsum(costs[i] for i in g) / len(g) for g in groups]
    unit = _unit(means, math.fsum(costs) / max(1, len(costs)))
    return tuple(
        SourceCluster(sources=tuple(g), mean=m, level=m / unit if unit else 1.0)
        for g, m in zip(groups, means, strict=True)
    )


def _unit(means: Sequence[float], mean: float) -> float:
    """Return the mean of the cheapest cluster. A cluster of almost no cost is ignored, or all other
    levels would be huge.
    """
    return min((m for m in means if m > SMALLEST * mean), default=0.0)


def total_workers(clusters: Sequence[SourceCluster]) -> float:
    """Return the number of workers of all sources by their levels; resources are divided by it."""
    return math.fsum(c.level * len(c.sources) for c in clusters)


HOST_BYTES = 28 * 2**20  # of a worker before it reads anything
# up to these numbers of cores every one is tried, and every eighth; beyond, every 64th
EVERY, BY_EIGHT = 64, 512
TOLD = 3  # sources that one text names
CLOSE = 1e-9  # rates that differ by less are equal
LOCK_BOUND = "a worker whose code holds the interpreter lock, which one thread at a time has"


# ----------------------------------------------------------------------------
# The partition: loaders and workers of every source.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a partition. ``batch`` and ``per_source`` bound the loaders of a source (the
    paper's w_src), ``per_actor`` those of one source on one worker (w_actor). Numbers that the user
    gave in ``loaders`` are kept as they are.
    """

    batch: int | None = None  # samples of a step: more loaders would have none to read
    per_source: int | None = None
    per_actor: int | None = None
    loaders: Mapping[str, int] = field(default_factory=dict)
    sources_per_host: int | None = None
    together: bool = False
    cluster: int = CLUSTER
    worth_s: float = 0.0  # cost per step below which a source is not split

    def __post_init__(self) -> None:
        numbers = {
            n: getattr(self, n)
            for n in ("batch", "per_source", "per_actor", "sources_per_host", "cluster")
        }
        if wrong := [
            f"{n}: expected at least 1, got {v}"
            for n, v in numbers.items()
            if v is not None and v < 1
        ]:
            raise ValueError("; ".join(wrong))

    def most(self, load: SourceLoad) -> int:
        """Return the greatest number of loaders of a source."""
        if self.sources_per_host == 1 or load.cost * (self.batch or 1) < self.worth_s:
            return 1
        here = self.per_actor if self.together else None
        return max(
            1,
            min(n for n in (load.max_loaders, self.batch, self.per_source, here) if n is not None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Available resources: cores for loading, constructors and planner together, and memory for
    loader workers; None: enough.
    """

    cores: int
    memory_bytes: int | None = None
    beside_s: float = 0.0  # seconds of constructors, planner and transfer for every drawn sample

    def __post_init__(self) -> None:
        if (
            self.cores < 1
            or (self.memory_bytes is not None and self.memory_bytes < 1)
            or not 0 <= self.beside_s < math.inf
        ):
            raise ValueError(
                f"expected at least 1 core and 1 byte, and beside_s of at least 0, got {self}"
            )

    def for_loading(self, work_s: float) -> int:
        """Return the cores for loaders if constructors and planner keep up with them."""
        return (
            max(1, round(self.cores * work_s / (work_s + self.beside_s))) if work_s else self.cores
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAllocation:
    """The loaders and cores of one source, and the reason."""

    source: str
    cluster: int
    level: float
    cores: float  # its worker resource blocks
    loaders: int
    actors: int
    work: float  # share of all work
    reason: str
    cost: float  # seconds of one core for every drawn sample
    most: int  # greatest number of loaders, on any number of cores
    why_not_more: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A configuration and its prediction. ``rate``: drawn samples per second; 0 if it does not fit
    into memory.
    """

    hosting: LoaderPlacement
    shares: tuple[SourceAllocation, ...]  # in the order of the sources
    clusters: tuple[SourceCluster, ...]
    resources: Resources
    loading_cores: int
    block: float  # cores of a worker of level 1
    rate: float
    # of one core, for every drawn sample: loading, constructors, planner and transfer
    sample_s: float
    memory: int
    bound: str  # the bottleneck

    @property
    def fits(self) -> bool:
        return self.resources.memory_bytes is None or self.memory <= self.resources.memory_bytes

    def tokens_per_s(self, tokens: float) -> float:
        """Return the rate in tokens if a drawn sample has ``tokens`` tokens."""
        return self.rate * tokens

    def shortfall(self, demand: float) -> str:
        """Return by how much a demand of samples per second cannot be met, and what would be
        needed, as text; "" if it is met.
        """
        if not self.fits:
            assert self.resources.memory_bytes is not None
            short = self.memory - self.resources.memory_bytes
            return (
                f"memory: {self.memory / 2**20:,.0f} MB are needed at least, "
                f"{short / 2**20:,.0f} MB more than there are"
            )
        if demand <= self.rate * (1 + CLOSE):
            return ""
        cores = math.ceil(demand * self.sample_s - CLOSE)
        more = (
            f"it takes {cores} cores in all"
            if cores > self.resources.cores
            else "more cores would not help"
        )
        said = (
            f"{1 - self.rate / demand:.1%} of the demand are not met; {more}; the bottleneck is "
            f"{self.bound}"
        )
        return "; ".join([said, *self._short_of_loaders(demand)])

    def _short_of_loaders(self, demand: float) -> list[str]:
        """Return the sources that could not keep up on any number of cores, the most distant ones
        first.
        """
        wanted = [(math.ceil(demand * s.cost - CLOSE), s) for s in self.shares]
        short = sorted(
            ((n, s) for n, s in wanted if n > s.most),
            key=lambda found: (-found[0] / found[1].most, found[1].source),
        )
        said = [
            f"on any number of cores source {s.source!r} would take {n} loaders and can "
            f"have {s.why_not_more}"
            for n, s in short[:TOLD]
        ]
        return said + [f"{len(short) - TOLD} more are short of loaders too"] * (len(short) > TOLD)


def partition(
    loads: Sequence[SourceLoad], resources: Resources, limits: Limits | None = None
) -> Partition:
    """Return loaders and workers for these sources. ``cost`` of a load is in seconds of one core
    for every sample that the mixture draws. The order of the sources does not matter: they are
    placed in the order of their names.
    """
    if not loads:
        raise ValueError("sources: expected at least 1, got none")
    limits = limits or Limits()
    order = sorted(range(len(loads)), key=lambda i: loads[i].name)
    named = [loads[i] for i in order]
    made = _Search(named, resources, limits).best()
    if resources.memory_bytes is not None and made.fits:
        free = _Search(named, replace(resources, memory_bytes=None), limits).best()
        if free.rate > made.rate * (1 + CLOSE):
            made = replace(
                made,
                bound=f"memory: with {free.memory / 2**20:,.0f} MB it would be "
                f"{free.rate / made.rate - 1:.0%} faster",
            )
    return _in_order(made, order)


@dataclass(frozen=True, slots=True)
class _Tried:
    """One configuration and its quality. ``cores``: number for which the levels were computed;
    ``room``: number of workers for which it was placed.
    """

    hosting: LoaderPlacement
    cores: int
    room: int
    seconds: float  # per drawn sample, of the bottleneck
    memory: int

    @property
    def small(self) -> tuple[int, int, int]:
        return sum(self.hosting.loaders), self.hosting.n_hosts, self.memory


class _Search:
    """Tries all configurations for up to the available cores, the largest first, until no other can
    be better.
    """

    def __init__(self, loads: Sequence[SourceLoad], resources: Resources, limits: Limits):
        self.loads, self.resources, self.limits = loads, resources, limits
        self.work = math.fsum(load.cost for load in loads)
        self.cores = resources.for_loading(self.work)
        self.clusters = clusters_of(
            [load.cost for load in loads], [load.name for load in loads], limits.cluster
        )
        self.level = {i: c for c in self.clusters for i in c.sources}
        self.workers = total_workers(self.clusters)

    def best(self) -> Partition:
        best: _Tried | None = None
        seen: set[tuple[tuple[int, ...], int]] = set()
        for cores, room, least in self._ways():
            if best is not None and self._fits(best) and least >= best.seconds * (1 - CLOSE):
                break
            for counts in self._counts(cores):
                hosting = self._placed(counts, room)
                if (counts, hosting.n_hosts) not in seen and self._allowed(hosting):
                    seen.add((counts, hosting.n_hosts))
                    best = self._better(best, self._judged(hosting, cores, room))
        assert best is not None, "one core and one loader a source are always allowed"
        return self._told(self._trimmed(best))

    def _ways(self) -> Iterator[tuple[int, int, float]]:
        """Yield numbers of cores for the levels, numbers of workers for their loaders, and the
        least possible seconds. The number of workers is one for each core; if memory is bounded
        also half as many, and so on. Loaders of a source that share a worker, which holds its files
        once, are the paper's worker parallelism.
        """
        for cores in _tried_cores(self.cores):
            least, room = self._least(cores), cores
            yield cores, room, least
            while self.resources.memory_bytes is not None and room > 1:
                room //= 2
                yield cores, room, least

    def _placed(self, counts: Sequence[int], room: int) -> LoaderPlacement:
        return place_loaders(
            self.loads,
            counts,
            cores=room,
            sources_per_host=self.limits.sources_per_host,
            named=self.limits.loaders,
            together=self.limits.together,
        )

    def _trimmed(self, best: _Tried) -> _Tried:
        """Return the same rate with fewer loaders, if one source delays all and the others need not
        be ready before it.
        """
        if not best.seconds:
            return best
        counts = [
            n
            if load.name in self.limits.loaders
            else min(n, max(1, math.ceil(load.cost / best.seconds - CLOSE)))
            for load, n in zip(self.loads, best.hosting.loaders, strict=True)
        ]
        hosting = self._placed(counts, best.room)
        new = self._judged(hosting, best.cores, best.room)
        as_good = new.seconds <= best.seconds * (1 + CLOSE) and self._fits(new) >= self._fits(best)
        return new if as_good and self._allowed(hosting) else best

    def _counts(self, cores: int) -> Iterator[tuple[int, ...]]:
        """Yield loaders of every source, by its cluster's level, and by its own share: the mean may
        hide a source that delays all.
        """
        for wanted in (self._by_level, self._by_share):
            yield tuple(
                self.limits.loaders.get(
                    load.name,
                    min(self.limits.most(load), max(1, math.ceil(wanted(i, cores) - CLOSE))),
                )
                for i, load in enumerate(self.loads)
            )

    def _by_level(self, i: int, cores: int) -> float:
        """Return the worker resource blocks of a source, in cores: its level times the cores per
        worker of all levels.
        """
        return self.level[i].level * cores / self.workers if self.workers else 0.0

    def _by_share(self, i: int, cores: int) -> float:
        return self.loads[i].cost * cores / self.work if self.work else 0.0

    def _least(self, cores: int) -> float:
        """Return a lower bound of the seconds per sample for ``cores`` cores or fewer."""
        every = [max(counts) for counts in zip(*self._counts(cores), strict=True)]
        slowest = max(load.cost / n for load, n in zip(self.loads, every, strict=True))
        return max((self.work + self.resources.beside_s) / self.resources.cores, slowest)

    def _allowed(self, hosting: LoaderPlacement) -> bool:
        most = self.limits.per_actor
        if most is None:
            return True
        return all(
            n <= most
            for load, on in zip(self.loads, _on_hosts(hosting), strict=True)
            if load.name not in self.limits.loaders
            for n in on.values()
        )

    def _judged(self, hosting: LoaderPlacement, cores: int, room: int) -> _Tried:
        threads = -(-self.cores // hosting.n_hosts)
        memory = hosting.n_hosts * HOST_BYTES + sum(load.memory for load in self.loads)
        memory += sum(
            load.state * (len(on) - 1)
            for load, on in zip(self.loads, _on_hosts(hosting), strict=True)
        )
        return _Tried(
            replace(hosting, threads=threads),
            cores,
            room,
            max(self._parts(hosting, threads).values()),
            memory,
        )

    def _parts(self, hosting: LoaderPlacement, threads: int) -> dict[str, float]:
        """Return the seconds per drawn sample of every possible bottleneck: all cores together, a
        worker, its interpreter lock, a loader.
        """
        slowest = max(
            range(len(self.loads)),
            key=lambda i: (self.loads[i].cost / hosting.loaders[i], self.loads[i].name),
        )
        load, n = self.loads[slowest], hosting.loaders[slowest]
        on = f"{threads} thread{'s' * (threads != 1)}"
        return {
            f"the {self.resources.cores} cores, which are all busy": (
                self.work + self.resources.beside_s
            )
            / self.resources.cores,
            f"source {load.name!r}, which has {self._why(load, n)}": load.cost / n,
            f"a worker that does {hosting.slowest:.0%} of the work on {on}": hosting.slowest
            * self.work
            / worth(threads),
            LOCK_BOUND: self._locked(hosting),
        }

    def _locked(self, hosting: LoaderPlacement) -> float:
        """Return the seconds per drawn sample for which the busiest worker's lock is held."""
        held: dict[int, float] = {}
        for load, n, on in zip(self.loads, hosting.loaders, _on_hosts(hosting), strict=True):
            for host, mine in on.items() if load.locked else ():
                held[host] = held.get(host, 0.0) + load.locked * load.cost * mine / n
        return max(held.values(), default=0.0)

    def _why(self, load: SourceLoad, n: int, else_: str = "its share of the cores") -> str:
        """Return why a source has no more loaders."""
        limits = self.limits
        if load.name in limits.loaders:
            return f"{n} as loaders= says"
        known = {
            "its open chunks allow (shuffle_chunks)": load.max_loaders,
            "a batch has samples": limits.batch,
            "per_source allows": limits.per_source,
            "sources_per_host=1 allows": 1 if limits.sources_per_host == 1 else None,
        }
        by = next((words for words, most in known.items() if most is not None and n >= most), "")
        return f"{n} loader{'s' * (n != 1)}" + (f", as many as {by}" if by else f", {else_}")

    def _fits(self, tried: _Tried) -> bool:
        return self.resources.memory_bytes is None or tried.memory <= self.resources.memory_bytes

    def _better(self, best: _Tried | None, new: _Tried) -> _Tried:
        """Return the better one: a configuration that fits before one that does not, then the
        faster; of two that do not fit, the one with less memory.
        """
        if best is None or self._fits(new) > self._fits(best):
            return new
        if self._fits(best) > self._fits(new):
            return best
        if not self._fits(new):
            return min(best, new, key=lambda t: (t.memory, t.seconds))
        if abs(new.seconds - best.seconds) > CLOSE * best.seconds:
            return min(best, new, key=lambda t: t.seconds)
        # Of equal ones for as many cores, the smaller. But processes are not saved for their own
        # sake: threads of one process share a lock.
        return min(best, new, key=lambda t: (-t.cores, -t.room, t.small))

    def _told(self, best: _Tried) -> Partition:
        hosting, fits = best.hosting, self._fits(best)
        parts = self._parts(hosting, hosting.threads)
        on = _on_hosts(hosting)
        return Partition(
            hosting=hosting,
            shares=tuple(self._share(i, best, len(on[i])) for i in range(len(self.loads))),
            clusters=self.clusters,
            resources=self.resources,
            loading_cores=self.cores,
            block=best.cores / self.workers if self.workers else 0.0,
            rate=1 / best.seconds if best.seconds and fits else 0.0 if not fits else math.inf,
            sample_s=self.work + self.resources.beside_s,
            memory=best.memory,
            bound=max(parts, key=lambda words: parts[words]) if fits else "memory",
        )

    def _share(self, i: int, best: _Tried, actors: int) -> SourceAllocation:
        load, n = self.loads[i], best.hosting.loaders[i]
        cores, cluster = self._by_level(i, best.cores), self.clusters.index(self.level[i])
        work = load.cost / self.work if self.work else 0.0
        wanted = max(cores, self._by_share(i, best.cores))
        keeps_up = n < min(self.limits.most(load), math.ceil(wanted - CLOSE))
        why = self._why(
            load,
            n,
            "as many as keep up with the slowest source" if keeps_up else "its share of the cores",
        )
        if load.name in self.limits.loaders:
            reason = "as loaders= says"
        elif n == 1:
            reason = "light: shares a worker" if wanted <= 1 else why
        else:
            reason = f"{work:.0%} of the work is worth {wanted:.1f} cores; {why}"
        most = self.limits.loaders.get(load.name, self.limits.most(load))
        return SourceAllocation(
            source=load.name,
            cluster=cluster,
            level=self.level[i].level,
            cores=cores,
            loaders=n,
            actors=actors,
            work=work,
            reason=reason,
            cost=load.cost,
            most=most,
            why_not_more=self._why(load, most),
        )


def _tried_cores(most: int) -> Iterator[int]:
    """Yield numbers of cores, the largest first. Numbers for fewer cores are among those for more,
    or more cores could do worse.
    """
    for c in range(most, 0, -1):
        if c <= EVERY or (c <= BY_EIGHT and c % 8 == 0) or c % 64 == 0:
            yield c


def _on_hosts(hosting: LoaderPlacement) -> list[dict[int, int]]:
    """Return the loaders of every source by worker."""
    found, first = [], 0
    for n in hosting.loaders:
        mine: dict[int, int] = {}
        for host in hosting.host_of[first : first + n]:
            mine[host] = mine.get(host, 0) + 1
        found.append(mine)
        first += n
    return found


def _in_order(made: Partition, order: Sequence[int]) -> Partition:
    """Return the partition for sources in the given order: ``order[k]`` is the position of the k-th
    by name.
    """
    hosting, place = made.hosting, {i: k for k, i in enumerate(order)}
    firsts = [0]
    for n in hosting.loaders:
        firsts.append(firsts[-1] + n)
    back = [place[i] for i in range(len(order))]
    host_of = tuple(h for k in back for h in hosting.host_of[firsts[k] : firsts[k + 1]])
    clusters = tuple(replace(c, sources=tuple(order[k] for k in c.sources)) for c in made.clusters)
    hosting = replace(hosting, loaders=tuple(hosting.loaders[k] for k in back), host_of=host_of)
    return replace(
        made, hosting=hosting, shares=tuple(made.shares[k] for k in back), clusters=clusters
    )
