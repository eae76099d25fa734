"""The cells of benchmarks/memory.py: orders of rows, numbers of ranks, and compared settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from holding.case import COLOCATED, LOCAL, PROCESS, RAY, Case, Found


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The extent of the measurement; ``workers``: of one rank's DataLoader, in increasing order."""

    sources: tuple[int, ...]
    ranks: tuple[int, ...]
    workers: tuple[int, ...]
    kinds: tuple[str, ...]
    shuffles: tuple[bool, ...]
    folder: str

    @property
    def ours(self) -> list[str]:
        return [kind for kind in (LOCAL, PROCESS, RAY) if kind in self.kinds]


def grid(extent: Extent) -> list[Case]:
    """Return the cells of both loaders.

    Colocated: all numbers of workers at the most ranks, to find the smallest that keeps the pace.
    At the fewest ranks it has the least and the most workers, for slopes. Overlord: one thread, and
    at the most ranks as many threads in total as the others have workers.
    """
    few, many, least, most = (
        extent.ranks[0],
        extent.ranks[-1],
        extent.workers[0],
        extent.workers[-1],
    )
    theirs = {(many, w) for w in extent.workers} | {(few, least), (few, most)}
    ours = {(few, 1), (many, 1), (many, many * least), (many, many * most)}
    made = []
    for n in extent.sources:
        for shuffle in extent.shuffles:
            base = Case(
                kind=COLOCATED,
                folder=extent.folder,
                n_sources=n,
                ranks=few,
                workers=least,
                shuffle=shuffle,
            )
            if COLOCATED in extent.kinds:
                made += [replace(base, ranks=r, workers=w) for r, w in sorted(theirs)]
            made += [
                replace(base, kind=kind, ranks=r, workers=w)
                for kind in extent.ours
                for r, w in sorted(ours)
            ]
    return sorted(made, key=lambda c: (c.n_sources, c.loading if c.kind == COLOCATED else 0))


def extras(extent: Extent) -> list[Case]:
    """Return the largest cells with auto-partitioning on every runtime, and with standbys."""
    base = Case(
        kind=PROCESS,
        folder=extent.folder,
        n_sources=extent.sources[-1],
        ranks=extent.ranks[-1],
        workers=extent.ranks[-1] * extent.workers[0],
        shuffle=extent.shuffles[0],
    )
    made = [replace(base, kind=kind, partition="auto") for kind in extent.ours]
    return made + ([replace(base, shadows=True, hosts=2)] if PROCESS in extent.kinds else [])


def parallelism(extent: Extent) -> list[Case]:
    """Return the cells of Figure 15: TP 16, DP 2, batch 32, a context of 32k.

    Sources are in one loader worker and in two, and in two with standbys, which run in the other
    worker. One rank of a TP group loads. On Ray only the most sources are measured.
    """
    shape: dict[str, Any] = {
        "folder": extent.folder,
        "ranks": 2,
        "context": 32_768,
        "microbatches": 1,
        "shuffle": extent.shuffles[0],
    }
    made = []
    for n in [n for n in extent.sources if n >= 100]:
        for w in sorted({extent.workers[0], extent.workers[-1]}):
            made += (
                [Case(kind=COLOCATED, n_sources=n, workers=w, **shape)]
                if COLOCATED in extent.kinds
                else []
            )
        for kind in (
            k for k in extent.ours if k == PROCESS or (k == RAY and n == max(extent.sources))
        ):
            base = Case(
                kind=kind,
                n_sources=n,
                workers=2 * extent.workers[0],
                hosts=1,
                tp=16,
                samples=32,
                **shape,
            )
            made += [base, replace(base, hosts=2), replace(base, hosts=2, shadows=True)]
    return made


def needless(case: Case, found: Sequence[Found], extent: Extent) -> bool:
    """Return whether a cell can be skipped.

    A number of workers between the least and the most is needed only if fewer do not keep the pace.
    """
    if case.kind != COLOCATED or case.workers in (extent.workers[0], extent.workers[-1]):
        return False
    return any(
        f.keeps_pace
        and f.case.workers < case.workers
        and replace(f.case, workers=case.workers) == case
        for f in found
    )
