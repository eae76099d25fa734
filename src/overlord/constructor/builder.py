"""The building half of a constructor: from a staged step to the microbatches of one bucket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.constructor.microbatch import build
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


def build_bucket(staged: StagedStep, bucket: int, batch: Batch, multiple: int) -> Bucket:
    """Gather the bucket's documents and cut its microbatches."""
    main = staged.plan.main
    mine = np.flatnonzero(main.bucket == bucket)
    mine = mine[np.lexsort((main.slot[mine], main.microbatch[mine]))]
    rows, microbatch = main.sample[mine], main.microbatch[mine]
    docs = staged.stage.doc[rows]
    offsets = staged.tokens.offsets
    start = offsets[docs]
    arrays = build(
        staged.tokens.values, start, offsets[docs + 1] - start, microbatch, main.n_microbatches,
        staged.plan.source[rows], batch, multiple,
    )  # fmt: skip
    bounds = np.searchsorted(microbatch, np.arange(main.n_microbatches + 1))
    return Bucket(arrays, rows, bounds)
