"""Clusters of sources of similar cost, and the resource level of each: stages 1 and 2 of the
partition algorithm of the Overlord paper (arXiv 2504.09844), section 5.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
