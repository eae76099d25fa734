"""Clusters of sources that cost about the same, and the resource level of each: stages 1 and 2 of
the partition algorithm of the Overlord paper (arXiv 2504.09844), section 5.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CLUSTER = 4  # sources of a cluster at most; the paper's number
# the dearest source of a cluster over its cheapest, at most: else three light ones would be
# levelled with a heavy one
SPREAD = 2.0
SMALLEST = 1e-3  # of the mean cost: what costs less is nothing to measure others by


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Sources that get the same number of workers. ``level``: their mean cost, in units of the
    cheapest cluster's.
    """

    sources: tuple[int, ...]
    mean: float
    level: float


def clusters_of(
    costs: Sequence[float], names: Sequence[str], size: int = CLUSTER
) -> tuple[Cluster, ...]:
    """The sources from the dearest to the cheapest (ties: by name), cut after ``size`` and where
    costs fall to less than half.
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
        Cluster(sources=tuple(g), mean=m, level=m / unit if unit else 1.0)
        for g, m in zip(groups, means, strict=True)
    )


def _unit(means: Sequence[float], mean: float) -> float:
    """The mean of the cheapest cluster; one that costs next to nothing would make a level of
    everything else.
    """
    return min((m for m in means if m > SMALLEST * mean), default=0.0)


def total_workers(clusters: Sequence[Cluster]) -> float:
    """Workers of all sources by their levels: what resources are divided by."""
    return math.fsum(c.level * len(c.sources) for c in clusters)
