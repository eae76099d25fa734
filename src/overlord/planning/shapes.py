"""Steps of fixed shape: the samples that fit into a number of microbatches. Pure.

With ``Batch(shape="fixed")`` every step has the same number of microbatches of ``context`` tokens.
Samples that do not fit wait for a later step (packing="documents"). Chunks always fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from overlord.errors import PlanError
from overlord.hashing import position_in_key
from overlord.mesh import Batch, Mesh
from overlord.plan.plan import LoadingPlan
from overlord.planning.balance import binpack
from overlord.planning.selection import fitting
from overlord.sample import Buffer

FEWER = 64  # the search for the samples that fit goes down by this part of them at first


def packing_sizes(sizes: np.ndarray, batch: Batch) -> np.ndarray:
    """Return the sizes that count against the capacity of a microbatch of fixed shape.

    A document counts at least ``context / max_documents`` tokens. So a full microbatch has at most
    ``max_documents`` documents.
    """
    if batch.in_chunks or batch.max_documents is None:
        return sizes
    return np.maximum(sizes, -(-batch.context // batch.max_documents))


def candidate_order(source: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the order of the candidates of a step, which are listed source by source.

    The k-th candidate of a source that should give n samples has the position (k + 1/2)/n. So the
    candidates beyond the draw come after it.
    """
    k = position_in_key(source, len(counts))
    n = np.maximum(1, np.asarray(counts, np.int64))[source]
    return np.argsort((2 * k + 1) / (2 * n), kind="stable")


def fitting_rows(buffer: Buffer, sizes: np.ndarray, place: Mesh) -> np.ndarray:
    """Return the rows, ascending, of the samples that fit into a step's microbatches.

    ``sizes``: their tokens with padding. The other samples wait for a later step.
    """
    batch, n = buffer.batch, place.n_buckets("DP")
    if not batch.fixed:
        return fitting(buffer, sizes, n * batch.microbatches, batch.context)
    count = place.microbatch_count(batch.microbatches)
    return filling(buffer, packing_sizes(sizes, batch), n * count, batch.context)


def filling(buffer: Buffer, sizes: np.ndarray, n_bins: int, capacity: int) -> np.ndarray:
    """Return the rows, ascending, of the samples that fill ``n_bins`` bins; the oldest go first.

    They are a run from the start that best fit can pack. A search from above looks for the longest
    one, and may miss it.
    """
    age = np.zeros(len(buffer), np.int32) if buffer.age is None else buffer.age
    first = np.argsort(-age, kind="stable")
    most = int(np.searchsorted(np.cumsum(sizes[first]), n_bins * capacity, side="right"))

    def fits(n: int) -> bool:
        bins = binpack.best_fit(sizes[first[:n]], n_bins, capacity)
        return bool((bins != binpack.NOWHERE).all())

    return np.sort(first[: _longest(most, fits)])


def _longest(most: int, fits: Callable[[int], bool]) -> int:
    """Return a number of at most ``most`` that fits, while one more does not, or is too many."""
    enough, too_many, step = most, most + 1, max(1, most // FEWER)
    while enough > 1 and not fits(enough):
        too_many, enough, step = enough, max(1, enough - step), 2 * step
    while too_many - enough > 1:
        n = (enough + too_many) // 2
        enough, too_many = (n, too_many) if fits(n) else (enough, n)
    return enough


def check_shapes(plan: LoadingPlan, batch: Batch, place: Mesh) -> None:
    """Raise ``PlanError`` unless a plan has the fixed shape of its batch."""
    main = plan.main
    wanted = place.microbatch_count(batch.least_microbatches(main.n_buckets))
    if main.n_microbatches != wanted:
        raise PlanError(
            f'strategy: expected the {wanted} microbatches of shape="fixed", got '
            f"{main.n_microbatches}",
            plan.step,
            "call .mix() and .balance(), which keep the number, or set Batch(microbatches=)",
        )
    held = np.bincount(main.bins(), minlength=1)
    if held.max() > batch.documents:
        worst = int(held.argmax())
        raise PlanError(
            f"expected at most max_documents={batch.documents} documents in a microbatch, got "
            f"{held[worst]} in microbatch {worst % main.n_microbatches} of bucket "
            f"{worst // main.n_microbatches}",
            plan.step,
            "raise Batch.max_documents; the state fits if allow=('batch',)",
        )
