"""Choose the samples of a step among look-ahead candidates. Pure.

The n samples of a source are chosen among its first ``look_ahead * n``.

The draw determines how many samples each source gives. A score for each candidate may determine
which ones. Candidates passed over for ``max_age`` steps come first, then the lowest scores, ties in
stream order. The chosen samples have the positions of a prefix: in stream order, the k-th of n at
(k + 1/2)/n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from overlord.checks import signature_problem
from overlord.errors import PlanError
from overlord.hashing import key64, keyed_hash
from overlord.mesh import Mesh
from overlord.plan.plan import LoadingPlan
from overlord.planning.balance import binpack
from overlord.planning.cost import CostFn, checked_costs
from overlord.planning.document_nodes import lengths_of, summed
from overlord.planning.draw import step_positions
from overlord.sample import Buffer

Prefer = Callable[[Buffer, Mesh], np.ndarray]
IDENTITY = ("source", "epoch", "file", "row", "part")


def choose(candidates: Buffer, scores: np.ndarray | None) -> Buffer:
    """Return the step's samples in the order of the draw, chosen among its candidates.

    ``candidates`` are listed source by source in stream order. ``scores``: the lowest are chosen;
    None: the first ones. Raise ``PlanError`` for invalid scores or missing candidates.
    """
    rows = _chosen_rows(candidates, None if scores is None else checked_scores(scores, candidates))
    order, substep = step_positions(candidates.wanted)
    return replace(
        candidates.take(rows[order]), drawn=True, substep=substep, wanted=(), age=None, scores=None
    )


def checked_scores(scores: np.ndarray, candidates: Buffer) -> np.ndarray:
    """Return scores as float64; raise ``PlanError`` unless each has one and none is NaN."""
    try:
        found = np.asarray(scores, np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0) if len(candidates) else np.zeros(1)  # a shape that is never valid
    if found.shape != candidates.source.shape or np.isnan(found).any():
        raise PlanError(
            f"prefer: expected {len(candidates)} numbers, one for each candidate, got "
            f"shape {found.shape}" + (" with NaN in it" if np.isnan(found).any() else ""),
            candidates.step,
            "return one number for each candidate, infinity to take it last",
        )
    return found


def preferred(prefer: Any, candidates: Buffer, place: Mesh) -> np.ndarray:
    """Return the checked scores of ``prefer(candidates, place)``, a function of the strategy."""
    problem = (
        signature_problem(prefer, ("candidates", "place"))
        if callable(prefer)
        else f"expected a function, got {type(prefer).__name__}"
    )
    if problem:
        raise PlanError(f"prefer: {problem}", candidates.step)
    return checked_scores(prefer(candidates, place), candidates)


def overdue(candidates: Buffer) -> np.ndarray:
    """Return a mask of the candidates that have reached ``max_age``."""
    return (
        np.zeros(len(candidates), bool)
        if candidates.age is None
        else candidates.age >= candidates.max_age
    )


def _chosen_rows(candidates: Buffer, scores: np.ndarray | None) -> np.ndarray:
    """Return the rows of the chosen candidates, source by source, in stream order."""
    wanted = np.sum(candidates.wanted, axis=0)
    counts = np.bincount(candidates.source, minlength=len(wanted))
    if (counts < wanted).any():
        raise PlanError(
            "mix: expected all candidates of the step, got fewer than a source's draw needs",
            candidates.step,
            "call .mix() before .select(sources=...)",
        )
    if scores is None:
        scores = np.zeros(len(candidates))
    # stable: ties stay in stream order
    best = np.lexsort((scores, ~overdue(candidates), candidates.source))
    rank = np.arange(len(best)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(best[rank < np.repeat(wanted, counts)])


def fitting(buffer: Buffer, sizes: np.ndarray, n_bins: int, capacity: int) -> np.ndarray:
    """Return the rows, rising, of the samples that fit into ``n_bins`` bins; the oldest go first.

    The other samples wait for a later step.

    Packing is best fit, the last resort of every balance method. So samples that fit here also fit
    there, without more microbatches.
    """
    first = (
        np.argsort(-buffer.age, kind="stable") if buffer.age is not None else np.arange(len(buffer))
    )
    enough, too_many = 0, len(first) + 1
    while too_many - enough > 1:
        n = (enough + too_many) // 2 if too_many <= len(first) else len(first)
        if (binpack.best_fit(sizes[first[:n]], n_bins, capacity) != binpack.NOWHERE).all():
            enough = n
        else:
            too_many = n
    return np.sort(first[:enough])


def rows_of(plan: LoadingPlan, buffer: Buffer) -> np.ndarray:
    """Return the buffer row of each sample of a plan.

    Raise ``PlanError`` if a sample is not in the buffer, or is in the plan twice.
    """
    if len(plan) == len(buffer) and all(getattr(plan, n) is getattr(buffer, n) for n in IDENTITY):
        rows, known = np.arange(len(buffer)), True
    else:
        there, planned = _hashes(buffer), _hashes(plan)
        order = np.argsort(there, kind="stable")
        rows = (
            order[np.minimum(np.searchsorted(there[order], planned), max(0, len(order) - 1))]
            if len(order)
            else np.zeros(0, np.int64)
        )
        known = len(rows) == len(planned) and all(
            np.array_equal(getattr(buffer, n)[rows], getattr(plan, n)) for n in IDENTITY
        )
        known = known and len(np.unique(rows)) == len(rows)
    known = known and np.array_equal(plan.tokens, np.asarray(buffer.meta["tokens"])[rows])
    if not known or plan.names != buffer.names or plan.step != buffer.step:
        raise PlanError(
            "strategy: expected a plan for the step, sources and samples of its buffer, got "
            "another",
            buffer.step,
            "build the plan from the buffer, without adding, repeating or changing samples",
        )
    return rows


def _hashes(columns: Buffer | LoadingPlan) -> np.ndarray:
    return keyed_hash(key64("sample"), *(getattr(columns, n).astype(np.int64) for n in IDENTITY))


def check_choice(rows: np.ndarray, buffer: Buffer, left_allowed: bool) -> None:
    """Raise ``PlanError`` unless the rows of a plan are a complete choice in the order of the step.

    ``left_allowed``: some samples of a drawn step may be left for later, but not all.
    """
    if not buffer.wanted:
        if (
            len(rows) == 0
            or (np.diff(rows) <= 0).any()
            or (len(rows) < len(buffer) and not left_allowed)
        ):
            raise PlanError(
                "strategy: expected every drawn sample once, in the order of the draw, got "
                f"{len(rows)} of {len(buffer)} samples",
                buffer.step,
                "place every sample of the buffer, without sorting or leaving out any",
            )
        return
    wanted = np.sum(buffer.wanted, axis=0)
    counts = np.bincount(buffer.source[rows], minlength=len(wanted))
    if not np.array_equal(counts, wanted):
        i = int(np.flatnonzero(counts != wanted)[0])
        raise PlanError(
            f"strategy: expected {wanted[i]} samples of {buffer.names[i]!r}, as drawn, got "
            f"{counts[i]}",
            buffer.step,
            "call .mix()",
        )
    if (~np.isin(np.flatnonzero(overdue(buffer)), rows)).sum() > _unavoidable(buffer, wanted):
        raise PlanError(
            f"strategy: expected every candidate of age max_age={buffer.max_age} or more, got a "
            "plan without one of them",
            buffer.step,
            "call .mix(), which takes these candidates first",
        )
    if not np.array_equal(np.sort(rows)[step_positions(buffer.wanted)[0]], rows):
        raise PlanError(
            "strategy: expected the samples in the order of the draw, got another order",
            buffer.step,
            "call .mix(), which keeps the order",
        )


def _unavoidable(buffer: Buffer, wanted: np.ndarray) -> int:
    """Return the number of overdue candidates for which the draw of their source has no room."""
    late = np.bincount(buffer.source[overdue(buffer)], minlength=len(wanted))
    return int(np.maximum(late - wanted, 0).sum())


@dataclass(frozen=True, slots=True)
class HoldLong:
    """A ``prefer`` function by which very expensive samples wait until several can share a step.

    A sample is very expensive if it costs more than a rank's share of the step. A step with one is
    as slow as that sample, so several in one step cost as much as one. They are taken when there
    is one for every rank, or when the oldest reaches ``max_age``.
    """

    cost: CostFn | str

    def __call__(self, candidates: Buffer, place: Mesh) -> np.ndarray:
        evaluate = partial(checked_costs, self.cost)
        cost = summed(evaluate, candidates.meta, lengths_of(candidates), len(candidates))
        n, ranks = int(np.sum(candidates.wanted)), place.n_buckets("DP")
        share = binpack.total(cost) / len(cost) * n / ranks if len(cost) else 0.0
        long, late = cost > share, overdue(candidates)
        paid = float(cost[late & long].max(initial=0.0))  # the least time of the step in any case
        if int(long.sum()) >= ranks:
            paid = max(paid, float(np.sort(cost[long])[-ranks]))
        return np.where(long, np.where(cost <= paid, -1.0, 1.0), 0.0)

    @property
    def fingerprint(self) -> str:
        return f"hold_long({getattr(self.cost, 'fingerprint', self.cost)})"


def hold_long(cost: CostFn | str) -> HoldLong:
    """Return a ``prefer`` function that lets very expensive samples wait (see ``HoldLong``)."""
    return HoldLong(cost)


def counts_of(wanted: Sequence[Sequence[int]], look_ahead: int) -> list[int]:
    """Return the number of candidates of each source: ``look_ahead`` times its drawn samples."""
    return [look_ahead * n for n in np.sum(wanted, axis=0).tolist()]
