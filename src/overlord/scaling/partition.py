"""Offline auto-partitioning: the loaders of every source, and the worker of every loader.

The inputs are the costs of sources and the available resources. The algorithm is that of the
Overlord paper (arXiv 2504.09844), section 5.1. Sources are sorted by cost and clustered. The level
of a cluster is the ratio of its mean cost to that of the cheapest cluster. The cores that
constructors and planner do not need are divided into equal blocks, and a source gets as many blocks
as its level. The result respects limits per source, per actor and of memory.

Terms: a *worker* of the paper is a loader here, which does one thing at a time on one core. An
*actor* of a source is a loader worker (host) that has loaders of it. Several loaders on one worker
are the paper's worker parallelism, several workers its data parallelism. Sources on different
workers are its source parallelism. Decision record 0019 lists the differences from the paper.

Configurations for fewer cores are tried, too, and the one with the highest predicted rate is
returned. So more resources never give a lower rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from overlord.scaling.core_demand import cores_of_threads
from overlord.scaling.loader_placement import LoaderPlacement, place_loaders
from overlord.scaling.profile import SourceLoad

# ----------------------------------------------------------------------------
# Clusters of sources of similar cost, and the resource level of each: stages 1 and 2 of the
# partition algorithm of the Overlord paper (arXiv 2504.09844), section 5.1.

CLUSTER = 4  # greatest number of sources in a cluster, as in the paper
# greatest ratio of costs in a cluster, so that light sources do not get the level of a heavy one
MAX_RATIO = 2.0
SMALLEST = 1e-3  # share of the mean cost below which a cluster cannot be the unit of levels


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCluster:
    """Sources of similar cost, which get the same number of loaders."""

    sources: tuple[int, ...]
    mean: float  # mean cost of its sources
    level: float  # mean cost, in units of the cheapest cluster


def clusters_of(
    costs: Sequence[float], names: Sequence[str], size: int = CLUSTER
) -> tuple[SourceCluster, ...]:
    """Return clusters of sources, from the most expensive to the cheapest (ties: by name).

    A cluster has at most ``size`` sources, whose costs differ by a factor of at most two.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], names[i]))
    groups: list[list[int]] = []
    for i in order:
        if groups and len(groups[-1]) < size and costs[groups[-1][0]] <= MAX_RATIO * costs[i]:
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
    """Return the mean cost of the cheapest cluster, the unit of levels.

    Clusters of almost no cost are ignored, since they would make all other levels huge.
    """
    return min((m for m in means if m > SMALLEST * mean), default=0.0)


def total_blocks(clusters: Sequence[SourceCluster]) -> float:
    """Return the sum of the levels of all sources: the number of blocks of cores."""
    return math.fsum(c.level * len(c.sources) for c in clusters)


HOST_BYTES = 28 * 2**20  # memory of a loader worker without open files
# numbers of cores that are tried: all up to EVERY, multiples of 8 up to BY_EIGHT, then of 64
EVERY, BY_EIGHT = 64, 512
NAMED = 3  # most sources that one text names
CLOSE = 1e-9  # rates with a smaller relative difference count as equal
LOCK_BOUND = "a worker whose code holds the interpreter lock, so that one thread runs at a time"


# ----------------------------------------------------------------------------
# The partition: loaders and workers of every source.


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLimits:
    """Limits of a partition; None is no limit.

    ``batch`` and ``per_source`` bound the loaders of a source (the paper's w_src). ``per_actor``
    bounds the loaders of one source on one worker (w_actor). Sources in ``loaders`` get exactly the
    number that the user gave.
    """

    batch: int | None = None  # samples of a step: more loaders of a source would have no work
    per_source: int | None = None
    per_actor: int | None = None
    loaders: Mapping[str, int] = field(default_factory=dict)
    sources_per_host: int | None = None
    together: bool = False  # all loaders of a source are on one worker
    cluster: int = CLUSTER  # greatest number of sources in a cluster
    worth_s: float = 0.0  # CPU seconds per step below which a source gets one loader

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
            raise ValueError(f"limits of a partition: {'; '.join(wrong)}")

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
    """The CPU cores and the memory that a job may use."""

    cores: int  # for loaders, constructors and planner together
    memory_bytes: int | None = None  # for loader workers; None: unlimited
    beside_s: float = 0.0  # CPU seconds of constructors, planner and transfer per drawn sample

    def __post_init__(self) -> None:
        if (
            self.cores < 1
            or (self.memory_bytes is not None and self.memory_bytes < 1)
            or not 0 <= self.beside_s < math.inf
        ):
            raise ValueError(
                "resources: expected cores and memory_bytes of at least 1, and a finite beside_s "
                f"of at least 0, got {self}"
            )

    def for_loading(self, work_s: float) -> int:
        """Return the cores that remain for loaders if constructors and planner keep up.

        ``work_s``: CPU seconds of loading per drawn sample.
        """
        return (
            max(1, round(self.cores * work_s / (work_s + self.beside_s))) if work_s else self.cores
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAllocation:
    """The number of loaders and the cores of one source, and the reason for them."""

    source: str
    cluster: int
    level: float
    cores: float  # cores of its blocks
    loaders: int
    actors: int  # number of workers that have loaders of the source
    work: float  # share of the source in all work
    reason: str
    cost: float  # CPU seconds for every sample that the mixture draws
    most: int  # greatest number of loaders, on any number of cores
    why_not_more: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The loaders and workers of a job, and the predicted rate."""

    hosting: LoaderPlacement
    shares: tuple[SourceAllocation, ...]  # in the order of the sources
    clusters: tuple[SourceCluster, ...]
    resources: Resources
    loading_cores: int
    block: float  # cores of one block, which a source of level 1 gets
    rate: float  # drawn samples per second; 0 if the configuration does not fit into memory
    # CPU seconds for every drawn sample: loading, constructors, planner and transfer
    sample_s: float
    memory: int  # bytes of all loader workers
    bound: str  # the bottleneck

    @property
    def fits(self) -> bool:
        """Whether the loader workers fit into memory."""
        return self.resources.memory_bytes is None or self.memory <= self.resources.memory_bytes

    def tokens_per_s(self, tokens: float) -> float:
        """Return the rate in tokens per second if a drawn sample has ``tokens`` tokens."""
        return self.rate * tokens

    def shortfall(self, demand: float) -> str:
        """Describe how far the rate is below ``demand`` samples per second, and the remedy.

        The text is empty if the demand is met.
        """
        if not self.fits:
            assert self.resources.memory_bytes is not None
            short = self.memory - self.resources.memory_bytes
            return (
                f"memory: at least {self.memory / 2**20:,.0f} MB are needed, "
                f"{short / 2**20:,.0f} MB more than available"
            )
        if demand <= self.rate * (1 + CLOSE):
            return ""
        cores = math.ceil(demand * self.sample_s - CLOSE)
        more = (
            f"it takes {cores} cores in all"
            if cores > self.resources.cores
            else "more cores would not help"
        )
        missing = (
            f"{1 - self.rate / demand:.1%} of the demand is not met; {more}; the bottleneck is "
            f"{self.bound}"
        )
        return "; ".join([missing, *self._short_of_loaders(demand)])

    def _short_of_loaders(self, demand: float) -> list[str]:
        """Describe the sources that cannot have enough loaders on any number of cores.

        The source that lacks the largest factor comes first.
        """
        wanted = [(math.ceil(demand * s.cost - CLOSE), s) for s in self.shares]
        short = sorted(
            ((n, s) for n, s in wanted if n > s.most),
            key=lambda found: (-found[0] / found[1].most, found[1].source),
        )
        texts = [
            f"on any number of cores source {s.source!r} would take {n} loaders and can "
            f"have {s.why_not_more}"
            for n, s in short[:NAMED]
        ]
        return texts + [f"{len(short) - NAMED} more sources lack loaders, too"] * (
            len(short) > NAMED
        )


def partition(
    loads: Sequence[SourceLoad], resources: Resources, limits: PartitionLimits | None = None
) -> Partition:
    """Return the best partition of these sources for the given resources.

    The ``cost`` of a load must be in CPU seconds per sample that the mixture draws from any source.
    The order of the sources has no effect: they are placed in the order of their names.
    """
    if not loads:
        raise ValueError("partition: expected at least 1 source, got none")
    limits = limits or PartitionLimits()
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
    return _in_job_order(made, order)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One configuration with its predicted time and memory."""

    hosting: LoaderPlacement
    cores: int  # number of cores for which the loaders were counted
    room: int  # number of workers for which they were placed
    seconds: float  # seconds of the bottleneck per drawn sample
    memory: int  # bytes

    @property
    def footprint(self) -> tuple[int, int, int]:
        """Loaders, workers and memory, to compare candidates of equal rate."""
        return sum(self.hosting.loaders), self.hosting.n_hosts, self.memory


class _Search:
    """Search for the best configuration, with up to the available cores.

    The largest configurations are tried first; the search stops when no other can be better.
    """

    def __init__(self, loads: Sequence[SourceLoad], resources: Resources, limits: PartitionLimits):
        self.loads, self.resources, self.limits = loads, resources, limits
        self.work = math.fsum(load.cost for load in loads)
        self.cores = resources.for_loading(self.work)
        self.clusters = clusters_of(
            [load.cost for load in loads], [load.name for load in loads], limits.cluster
        )
        self.level = {i: c for c in self.clusters for i in c.sources}
        self.workers = total_blocks(self.clusters)

    def best(self) -> Partition:
        """Return the partition of the best configuration."""
        best: _Candidate | None = None
        seen: set[tuple[tuple[int, ...], int]] = set()
        for cores, room, least in self._sizes():
            if best is not None and self._fits(best) and least >= best.seconds * (1 - CLOSE):
                break
            for counts in self._counts(cores):
                hosting = self._placed(counts, room)
                if (counts, hosting.n_hosts) not in seen and self._allowed(hosting):
                    seen.add((counts, hosting.n_hosts))
                    best = self._better(best, self._evaluated(hosting, cores, room))
        assert best is not None, "one core with one loader per source is always allowed"
        return self._partition(self._trimmed(best))

    def _sizes(self) -> Iterator[tuple[int, int, float]]:
        """Yield (cores, workers, lower bound of the seconds per sample) to try.

        There is a worker for each core. If memory is limited, half as many workers are tried, too,
        and so on: loaders of a source that share a worker hold the state of its files once.
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

    def _trimmed(self, best: _Candidate) -> _Candidate:
        """Return a configuration of the same rate with fewer loaders, if there is one.

        If one source limits the rate, the others need only as many loaders as keep up with it.
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
        new = self._evaluated(hosting, best.cores, best.room)
        as_good = new.seconds <= best.seconds * (1 + CLOSE) and self._fits(new) >= self._fits(best)
        return new if as_good and self._allowed(hosting) else best

    def _counts(self, cores: int) -> Iterator[tuple[int, ...]]:
        """Yield the number of loaders of every source in two ways.

        The first number follows from the level of the source's cluster, the second from its own
        cost. The mean cost of a cluster may hide one source that limits the rate.
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
        """Return the cores of a source's blocks: its level times the cores of one block."""
        return self.level[i].level * cores / self.workers if self.workers else 0.0

    def _by_share(self, i: int, cores: int) -> float:
        """Return the cores of a source by its own share of the work."""
        return self.loads[i].cost * cores / self.work if self.work else 0.0

    def _least(self, cores: int) -> float:
        """Return a lower bound of the seconds per sample for ``cores`` cores or fewer."""
        every = [max(counts) for counts in zip(*self._counts(cores), strict=True)]
        slowest = max(load.cost / n for load, n in zip(self.loads, every, strict=True))
        return max((self.work + self.resources.beside_s) / self.resources.cores, slowest)

    def _allowed(self, hosting: LoaderPlacement) -> bool:
        """Return whether no worker has more than ``per_actor`` loaders of a source."""
        most = self.limits.per_actor
        if most is None:
            return True
        return all(
            n <= most
            for load, on in zip(self.loads, _loaders_by_worker(hosting), strict=True)
            if load.name not in self.limits.loaders
            for n in on.values()
        )

    def _evaluated(self, hosting: LoaderPlacement, cores: int, room: int) -> _Candidate:
        """Return a placement with its predicted time and memory."""
        threads = -(-self.cores // hosting.n_hosts)
        memory = hosting.n_hosts * HOST_BYTES + sum(load.memory for load in self.loads)
        memory += sum(
            load.state * (len(on) - 1)
            for load, on in zip(self.loads, _loaders_by_worker(hosting), strict=True)
        )
        return _Candidate(
            replace(hosting, threads=threads),
            cores,
            room,
            max(self._bottlenecks(hosting, threads).values()),
            memory,
        )

    def _bottlenecks(self, hosting: LoaderPlacement, threads: int) -> dict[str, float]:
        """Return the seconds per drawn sample of every possible bottleneck, by its description.

        The bottlenecks are all cores together, the slowest source, the busiest worker, and the
        interpreter lock of a worker.
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
            f"source {load.name!r}, which has {self._count_reason(load, n)}": load.cost / n,
            f"a worker that does {hosting.slowest:.0%} of the work on {on}": hosting.slowest
            * self.work
            / cores_of_threads(threads),
            LOCK_BOUND: self._locked(hosting),
        }

    def _locked(self, hosting: LoaderPlacement) -> float:
        """Return the most seconds per drawn sample for which the lock of a worker is held."""
        held: dict[int, float] = {}
        for load, n, on in zip(
            self.loads, hosting.loaders, _loaders_by_worker(hosting), strict=True
        ):
            for host, mine in on.items() if load.locked else ():
                held[host] = held.get(host, 0.0) + load.locked * load.cost * mine / n
        return max(held.values(), default=0.0)

    def _count_reason(self, load: SourceLoad, n: int, else_: str = "its share of the cores") -> str:
        """Describe why a source has n loaders and no more."""
        limits = self.limits
        if load.name in limits.loaders:
            return f"{n}, as loaders= sets"
        known = {
            "its open chunks allow (shuffle_chunks)": load.max_loaders,
            "a batch has samples": limits.batch,
            "per_source allows": limits.per_source,
            "sources_per_host=1 allows": 1 if limits.sources_per_host == 1 else None,
        }
        by = next((words for words, most in known.items() if most is not None and n >= most), "")
        return f"{n} loader{'s' * (n != 1)}" + (f", as many as {by}" if by else f", {else_}")

    def _fits(self, candidate: _Candidate) -> bool:
        """Return whether a configuration fits into memory."""
        return (
            self.resources.memory_bytes is None or candidate.memory <= self.resources.memory_bytes
        )

    def _better(self, best: _Candidate | None, new: _Candidate) -> _Candidate:
        """Return the better of two configurations.

        A configuration that fits into memory is better than one that does not. Of two that fit, the
        faster is better; of two that do not, the one with less memory.
        """
        if best is None or self._fits(new) > self._fits(best):
            return new
        if self._fits(best) > self._fits(new):
            return best
        if not self._fits(new):
            return min(best, new, key=lambda t: (t.memory, t.seconds))
        if abs(new.seconds - best.seconds) > CLOSE * best.seconds:
            return min(best, new, key=lambda t: t.seconds)
        # At equal rates more workers are better, since threads of one worker share a lock.
        # Of equal numbers the smaller footprint is better.
        return min(best, new, key=lambda t: (-t.cores, -t.room, t.footprint))

    def _partition(self, best: _Candidate) -> Partition:
        """Return a configuration as a partition with its reasons."""
        hosting, fits = best.hosting, self._fits(best)
        parts = self._bottlenecks(hosting, hosting.threads)
        on = _loaders_by_worker(hosting)
        return Partition(
            hosting=hosting,
            shares=tuple(self._allocation(i, best, len(on[i])) for i in range(len(self.loads))),
            clusters=self.clusters,
            resources=self.resources,
            loading_cores=self.cores,
            block=best.cores / self.workers if self.workers else 0.0,
            rate=1 / best.seconds if best.seconds and fits else 0.0 if not fits else math.inf,
            sample_s=self.work + self.resources.beside_s,
            memory=best.memory,
            bound=max(parts, key=lambda words: parts[words]) if fits else "memory",
        )

    def _allocation(self, i: int, best: _Candidate, actors: int) -> SourceAllocation:
        """Return the loaders and cores of source i, with the reason."""
        load, n = self.loads[i], best.hosting.loaders[i]
        cores, cluster = self._by_level(i, best.cores), self.clusters.index(self.level[i])
        work = load.cost / self.work if self.work else 0.0
        wanted = max(cores, self._by_share(i, best.cores))
        keeps_up = n < min(self.limits.most(load), math.ceil(wanted - CLOSE))
        why = self._count_reason(
            load,
            n,
            "as many as keep up with the slowest source" if keeps_up else "its share of the cores",
        )
        if load.name in self.limits.loaders:
            reason = "as loaders= sets"
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
            why_not_more=self._count_reason(load, most),
        )


def _tried_cores(most: int) -> Iterator[int]:
    """Yield the core counts to try, the largest first.

    A larger ``most`` only adds candidates, so more cores never give a worse result.
    """
    for c in range(most, 0, -1):
        if c <= EVERY or (c <= BY_EIGHT and c % 8 == 0) or c % 64 == 0:
            yield c


def _loaders_by_worker(hosting: LoaderPlacement) -> list[dict[int, int]]:
    """Return the number of loaders of every source on each of its workers."""
    found, first = [], 0
    for n in hosting.loaders:
        mine: dict[int, int] = {}
        for host in hosting.host_of[first : first + n]:
            mine[host] = mine.get(host, 0) + 1
        found.append(mine)
        first += n
    return found


def _in_job_order(made: Partition, order: Sequence[int]) -> Partition:
    """Return a partition whose sources are in the order of names, in the order of the job.

    ``order[k]`` is the number in the job of the k-th source by name.
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
