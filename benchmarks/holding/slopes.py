"""The memory of one more source, rank and worker, fitted over the measured cells.

It estimates the cells that do not fit this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holding.case import COLOCATED, Case, Found


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """Fitted memory in MB.

    Colocated loader: per rank, per worker, and per source of a worker. Overlord: constant, per
    rank, per source, per rank times source, and per thread if cells differ in threads.
    """

    kind: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    worst: float  # largest distance from a measured cell, as a share of it

    def predict(self, case: Case) -> float:
        return float(features(case)[: len(self.values)] @ np.array(self.values))


def features(case: Case) -> np.ndarray:
    if case.kind == COLOCATED:
        readers = case.ranks * case.workers
        return np.array([case.ranks, readers, readers * case.n_sources], float)
    return np.array(
        [1, case.ranks, case.n_sources, case.ranks * case.n_sources, case.loading], float
    )


def names_of(kind: str) -> tuple[str, ...]:
    return (
        ("rank", "worker", "source of a worker")
        if kind == COLOCATED
        else ("once", "rank", "source", "rank x source", "thread")
    )


def fit(found: Sequence[Found]) -> Slopes:
    """Return slopes by least squares, with errors relative to the size of a cell."""
    kind = found[0].case.kind
    names = names_of(kind)
    if (
        kind != COLOCATED and len({f.case.workers for f in found}) == 1
    ):  # else one could not be told from what is there once
        names = names[:-1]
    rows = np.array([features(f.case)[: len(names)] for f in found])
    sizes = np.array([f.over_mb for f in found])
    weight = 1 / np.maximum(sizes, 1.0)
    values, *_ = np.linalg.lstsq(rows * weight[:, None], sizes * weight, rcond=None)
    worst = float(np.max(np.abs(rows @ values - sizes) * weight))
    return Slopes(kind=kind, names=names, values=tuple(values.tolist()), worst=worst)


def guess(case: Case) -> float:
    """Return an estimate in MB of a colocated cell before any was measured.

    It keeps the first cell from filling the memory of the machine.
    """
    return (
        case.ranks * case.workers * (30 + 4 * case.n_sources) if case.kind == COLOCATED else 1500.0
    )
