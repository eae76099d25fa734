"""The building half of a constructor: from a staged step to the microbatches of one bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from overlord.constructor.microbatch import build, fresh
from overlord.job import Batch
from overlord.messages import Stage
from overlord.plan import LoadingPlan
from overlord.sample import Ragged


@dataclass(frozen=True, slots=True, eq=False)
class StagedStep:
    """A plan and the payload its samples were popped into: document d is ``tokens[d]``."""

    stage: Stage
    tokens: Ragged

    @property
    def plan(self) -> LoadingPlan:
        return self.stage.plan


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The microbatches of one bucket in one step, with the rows of the plan in each: row i of ``samples`` belongs to
    microbatch m when ``bounds[m] <= i < bounds[m+1]``."""

    microbatches: list[dict[str, np.ndarray]]
    samples: np.ndarray  # rows of the plan
    bounds: np.ndarray


def build_buckets(
    staged: StagedStep, buckets: Sequence[int], batch: Batch, multiple: int, slab: Callable[[int], np.ndarray] = fresh
) -> list[Bucket]:
    """Gather the documents of some buckets and cut their microbatches: one gather for all, since small ones cost more apart."""
    main = staged.plan.main
    m = main.n_microbatches
    number = np.full(main.n_buckets, -1)
    number[list(buckets)] = np.arange(len(buckets))
    order = main.order()
    order = order[number[main.bucket[order]] >= 0]
    place = number[main.bucket[order]] * m + main.microbatch[order]
    if len(buckets) > 1 and list(buckets) != sorted(buckets):
        sort = np.argsort(place, kind="stable")
        order, place = order[sort], place[sort]
    rows = main.sample[order]
    docs = staged.stage.doc[rows]
    offsets = staged.tokens.offsets
    start = offsets[docs]
    arrays = build(
        staged.tokens.values, start, offsets[docs + 1] - start, place, m * len(buckets), staged.plan.source[rows], batch, multiple, slab
    )  # fmt: skip
    bounds = np.searchsorted(place, np.arange(m * len(buckets) + 1))
    return [Bucket(arrays[k * m : (k + 1) * m], rows, bounds[k * m : (k + 1) * m + 1]) for k in range(len(buckets))]
