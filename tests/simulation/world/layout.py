"""Loader workers of a simulated job: part of the scenario, by a rule of the simulator's own.

A seed that failed once keeps its cluster that way, however partitions are improved. Never change
the rule: all seeds would get other clusters, and the past ones would prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from overlord.scaling.loader_placement import LoaderPlacement
from tests.simulation.world.scenario import Scenario

# of a simulated row, and of an open source: they break ties between loaders as they always did
ROW_BYTES, ROW_S, SOURCE_BYTES = 2048, 2048 * 2e-8, 3 * 2**20
CLOSE = 1e-9


class _Loader(NamedTuple):
    source: int
    cost: float
    memory: float
    split: bool  # one of several of its source


def placement_of(scenario: Scenario) -> LoaderPlacement:
    """Return the loaders that the scenario names, in the workers of its clusters.

    Numbers of workers for up to ``hosts`` cores are tried; the one whose busiest worker has the
    least work wins.
    """
    loaders, counts = _loaders(scenario), _counts(scenario)
    best: tuple[float, list[int]] | None = None
    for cores in range(scenario.options["hosts"], 0, -1):
        where = _placed(loaders, _n_workers(scenario, cores), scenario.options["sources_per_host"])
        slowest = max(_work(loaders, where))
        if best is None or slowest < best[0]:
            best = slowest, where
    assert best is not None
    where, total = best[1], math.fsum(x.cost for x in loaders)
    work = _work(loaders, where)
    return LoaderPlacement(
        loaders=tuple(counts),
        host_of=tuple(where),
        n_hosts=len(work),
        costs=tuple(w / total for w in work),
        memory=(0,) * len(work),
        reasons=("as the scenario says",) * len(work),
    )


def _counts(scenario: Scenario) -> list[int]:
    return [scenario.options["loaders"][name] for name in scenario.names]


def _costs(scenario: Scenario) -> list[float]:
    total = sum(scenario.weights)
    return [w / total * ROW_S for w in scenario.weights]


def _loaders(scenario: Scenario) -> list[_Loader]:
    """Return all loaders, source by source."""
    made = list[_Loader]()
    for i, (cost, n) in enumerate(zip(_costs(scenario), _counts(scenario), strict=True)):
        rows = min(scenario.shuffle_chunks, len(scenario.rows[i])) * scenario.slice_rows
        memory = (SOURCE_BYTES + 2 * rows * ROW_BYTES) / n
        made += [_Loader(i, cost / n, memory, n > 1)] * n
    return made


def _n_workers(scenario: Scenario, cores: int) -> int:
    """Return one worker for each loader of a heavy or split source; light sources share workers."""
    costs, counts, most = _costs(scenario), _counts(scenario), scenario.options["sources_per_host"]
    total, n = math.fsum(costs), sum(counts)
    fair = [cost * cores / total - CLOSE for cost in costs]
    light = [f for f, count in zip(fair, counts, strict=True) if count == 1 and f <= 1]
    shared = max(math.ceil(math.fsum(light)), -(-len(light) // most))
    return min(n, max(1, min(cores, n - len(light) + shared), -(-n // most)))


def _placed(loaders: Sequence[_Loader], n_workers: int, most: int) -> list[int]:
    """Return the worker of every loader: split sources first, then the heaviest, each in the worker
    with the least work that has no loader of its source.
    """
    work, sources = [0.0] * n_workers, [set[int]() for _ in range(n_workers)]
    where = [0] * len(loaders)
    order = {k: (not x.split, -x.cost, -x.memory, k) for k, x in enumerate(loaders)}
    for k in sorted(order, key=order.__getitem__):
        mine, every = loaders[k].source, range(n_workers)
        free = [w for w in every if mine not in sources[w] and len(sources[w]) < most]
        where[k] = min(
            free or [w for w in every if mine in sources[w]],
            key=lambda w: (work[w], len(sources[w]), w),
        )
        work[where[k]] += loaders[k].cost
        sources[where[k]].add(mine)
    return where


def _work(loaders: Sequence[_Loader], where: Sequence[int]) -> list[float]:
    """Return the work of every worker."""
    return [
        math.fsum(x.cost for x, w in zip(loaders, where, strict=True) if w == worker)
        for worker in range(1 + max(where))
    ]
