"""Where other loaders are ahead of Overlord: the order of a table, and the words in it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from peers.runner import Figures
from peers.table import OVERLORD, SHUFFLED, peer_of

# Less is better in all of them.
MEASURES: dict[str, Callable[[Figures], float]] = {
    "CPU": lambda run: run.steady_cpu,
    "whole CPU": lambda run: run.whole_cpu,
    "Mtok/s": lambda run: -run.speed,
    "whole Mtok/s": lambda run: -run.whole_speed,
    "first step": lambda run: run.first_step_s,
    "MB over imports": lambda run: run.over_idle_mb,
    "MB with imports": lambda run: run.pss_mb,
}


def ours(label: str) -> bool:
    return label.partition("@")[0] in OVERLORD


def rivals(label: str, labels: Sequence[str]) -> list[str]:
    """Return the loaders of Overlord that a loader is compared with: as shuffled as it is."""
    if ours(label) or label == "bare":
        return []
    shuffled = peer_of(label)[1]
    return [name for name in labels if name in OVERLORD and name.endswith(SHUFFLED) == shuffled]


def ahead(runs: dict[str, list[Figures]], label: str) -> dict[str, list[str]]:
    """Return the measures in which the median of a loader is better, by loader of Overlord."""
    found = {}
    for rival in rivals(label, list(runs)):
        better = [
            name
            for name, measure in MEASURES.items()
            if statistics.median(map(measure, runs[label]))
            < statistics.median(map(measure, runs[rival]))
        ]
        if better:
            found[rival] = better
    return found


def described(found: dict[str, list[str]]) -> str:
    return "; ".join(
        f"{rival}: {'all' if len(better) == len(MEASURES) else ', '.join(better)}"
        for rival, better in found.items()
    )


def ordered(runs: dict[str, list[Figures]]) -> list[str]:
    """Return the loaders: bare, those ahead of Overlord in most measures first, Overlord, others."""

    def key(label: str) -> tuple[int, int, float]:
        better = sum(map(len, ahead(runs, label).values()))
        place = 0 if label == "bare" else 2 if ours(label) else 1 if better else 3
        cpu = statistics.median(run.steady_cpu for run in runs[label])
        return place, -better, cpu if place in (1, 3) else 0.0

    return sorted(runs, key=key)
