"""The building half of a constructor: from a staged step to the microbatches of one bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from overlord.constructor.microbatch import build_wide, fresh
from overlord.constructor.wide import Wide
from overlord.hooks import Assembly, Hook, assembled_by
from overlord.job import Batch
from overlord.messages import Stage
from overlord.plan import Assignment, LoadingPlan
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
    microbatch m when ``bounds[m] <= i < bounds[m+1]``. They are microbatches ``first`` and on of ``wide``, or those a hook built."""

    samples: np.ndarray  # rows of the plan
    bounds: np.ndarray
    wide: Wide | None
    first: int = 0
    built: tuple[dict[str, np.ndarray], ...] = ()

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def microbatches(self) -> Sequence[dict[str, np.ndarray]]:
        """Cut when asked for: views, made anew each time."""
        return self.built if self.wide is None else self.wide.cut(self.first, self.first + len(self))

    def part(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """As it is sent: ``Wide.of_part`` makes it again."""
        assert self.wide is not None
        return self.wide.part(self.first, self.first + len(self))

    @property
    def nbytes(self) -> int:
        arrays = self.part()[0].values() if self.wide is not None else (a for m in self.built for a in m.values())
        return sum(a.nbytes for a in arrays)


def build_buckets(
    staged: StagedStep,
    buckets: Sequence[int],
    batch: Batch,
    multiple: int,
    slab: Callable[[int], np.ndarray] = fresh,
    hooks: Sequence[Hook] = (),
) -> list[Bucket]:
    """Gather the documents of some buckets and cut their microbatches: one gather for all, since small ones cost more apart."""
    m = staged.plan.main.n_microbatches
    rows, place = _walk(staged.plan.main, buckets)
    bounds = np.searchsorted(place, np.arange(m * len(buckets) + 1))
    cuts = [bounds[k * m : (k + 1) * m + 1] for k in range(len(buckets))]

    def wide_of(a: int, b: int, first: int, n: int) -> Wide:
        """Microbatches first to first + n, whose documents are rows a to b."""
        docs, offsets = staged.stage.doc[rows[a:b]], staged.tokens.offsets
        start, source = offsets[docs], staged.plan.source[rows[a:b]]
        return build_wide(staged.tokens.values, start, offsets[docs + 1] - start, place[a:b] - first, n, source, batch, multiple, slab)

    if not hooks:
        wide = wide_of(0, len(rows), 0, m * len(buckets))
        return [Bucket(rows, cut, wide, k * m) for k, cut in enumerate(cuts)]
    built = []
    for k, (bucket, cut) in enumerate(zip(buckets, cuts, strict=True)):
        assembly = Assembly(
            step=staged.plan.step, bucket=bucket, batch=batch, plan=staged.plan, rows=tuple(rows[a:b] for a, b in pairwise(cut.tolist())),
            gather=lambda rows: staged.tokens.take(staged.stage.doc[rows]),
            build=partial(_cut, wide_of, int(cut[0]), int(cut[-1]), k * m, m),
        )  # fmt: skip
        built.append(Bucket(rows, cut, None, built=tuple(assembled_by(hooks, assembly))))
    return built


def _cut(wide_of: Callable[[int, int, int, int], Wide], a: int, b: int, first: int, n: int) -> list[dict[str, np.ndarray]]:
    return wide_of(a, b, first, n).cut(0, n)


def _walk(main: Assignment, buckets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Documents of these buckets in the order of their slots: rows of the plan, and the microbatch of each, counted over them."""
    number = np.full(main.n_buckets, -1)
    number[list(buckets)] = np.arange(len(buckets))
    order = main.order()
    order = order[number[main.bucket[order]] >= 0]
    place = number[main.bucket[order]] * main.n_microbatches + main.microbatch[order]
    if len(buckets) > 1 and list(buckets) != sorted(buckets):
        sort = np.argsort(place, kind="stable")
        order, place = order[sort], place[sort]
    return main.sample[order], place
