"""The choice of a loader's number of workers: the smallest with which it keeps pace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

CLOSE = 0.95  # of the pace counts as the pace: runs of a sweep are short


@dataclass(slots=True)
class Sweep:
    """Speeds of one loader by its number of workers, in million tokens per second."""

    pace: float
    speeds: dict[int, float] = field(default_factory=dict)

    def keeps_pace(self, workers: int) -> bool:
        return self.speeds[workers] >= CLOSE * self.pace

    @property
    def chosen(self) -> int:
        """The smallest number of workers that keeps pace; if none does, the fastest."""
        enough = [n for n in self.speeds if self.keeps_pace(n)]
        return min(enough) if enough else max(self.speeds, key=lambda n: self.speeds[n])


def sweep(pace: float, counts: Iterable[int], speed: Callable[[int], float]) -> Sweep:
    """Measure the speed with more and more workers, until one number keeps pace."""
    found = Sweep(pace)
    for n in sorted(counts):
        found.speeds[n] = speed(n)
        if found.keeps_pace(n):
            break
    return found
