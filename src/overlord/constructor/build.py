"""The building half of a constructor: from a staged step to the microbatches of one bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise, product

import numpy as np

from overlord.batch import Batch
from overlord.constructor.batch_arrays import BatchArrays
from overlord.constructor.compact import Expander, build_compact, form_of, seen
from overlord.constructor.images import (
    PixelForm,
    encoder_inputs,
    leave_out,
    placeholders,
    pool,
    strike_out,
)
from overlord.constructor.pack import build_slices, build_wide, fresh
from overlord.constructor.rank_views import narrow, of_stage
from overlord.errors import PlanError
from overlord.job.hooks import Assembly, Hook, assembled_by
from overlord.mesh import ClientPlaceTree
from overlord.messages.client import CompactLayout, StepInfo
from overlord.messages.constructor import DecodeFailures
from overlord.messages.control import PlannedStep
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.plan.rank_view import ALL, View, views_of
from overlord.sample import Ragged, Scattered

# Payload, where documents begin in it, their lengths, the microbatch of each, how many
# microbatches, the source of each.
_Documents = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class StepDocuments:
    """A plan and the payload its samples were popped into: document d is ``tokens[d]``. ``items``
    are the images that ranks of these buckets encode, of whoever's samples: which row is whose is
    said by ``stage.encoding``.
    """

    stage: PlannedStep
    tokens: Ragged
    items: Scattered | None = None
    masked: np.ndarray | None = (
        None  # int64 [n, 3]: bucket, microbatch, slot of documents that are left out of the loss
    )
    struck: np.ndarray | None = (
        # int64 [n, 4]: bucket, microbatch, first token and number of those that are nothing to
        # predict
        None
    )

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + (0 if self.items is None else self.items.nbytes)

    @property
    def plan(self) -> LoadingPlan:
        return self.stage.plan


@dataclass(frozen=True, slots=True, eq=False)
class BucketBatch:
    """The microbatches of one bucket in one step, with the rows of the plan in each: row i of
    ``samples`` belongs to microbatch m when ``bounds[m] <= i < bounds[m+1]``. They are microbatches
    ``first`` and on of ``wide``, or those in ``built``: of a hook, or without arrays for a rank
    that is served by a broadcast.
    """

    samples: np.ndarray  # rows of the plan
    bounds: np.ndarray
    wide: BatchArrays | None
    first: int = 0
    built: tuple[dict[str, np.ndarray], ...] = ()
    by_rank: Mapping[int, BucketBatch] = field(
        default_factory=dict
    )  # where ranks of one constructor get different things
    encoder: BatchArrays | None = (
        # the images that one rank encodes, and their routes, exchange by exchange (``encoding.py``)
        None
    )
    per: str = ""  # "microbatch": exchange m belongs to microbatch m
    form: CompactLayout | None = None  # ``wide`` is compact, and is widened so
    slab: Callable[[int], np.ndarray] = fresh  # memory for what is widened

    def for_rank(self, rank: int) -> BucketBatch:
        """What is put into the rank's mailbox. Ranks that get the same share one object."""
        return self.by_rank[rank] if self.by_rank else self

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def microbatches(self) -> Sequence[Mapping[str, np.ndarray]]:
        """Cut when asked for: views, made anew each time; what is compact is widened microbatch by
        microbatch, as they are looked at.
        """
        if self.wide is None:
            return self.built
        cuts = self.wide.cut(self.first, self.first + len(self))
        return (
            cuts
            if self.form is None
            else Expander(self.form, np.diff(self.bounds) == 0, self.slab).opened(cuts)
        )

    def part(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """As it is sent: ``BatchArrays.of_part`` makes it again."""
        assert self.wide is not None
        return self.wide.part(self.first, self.first + len(self))

    @property
    def nbytes(self) -> int:
        if self.by_rank:
            shared = {
                (id(b.wide), b.first, id(b.built)): replace(b, encoder=None).nbytes
                for b in self.by_rank.values()
            }
            return sum(shared.values()) + sum(
                b.encoder.nbytes for b in self.by_rank.values() if b.encoder is not None
            )
        arrays = (
            self.part()[0].values()
            if self.wide is not None
            else (a for m in self.built for a in m.values())
        )
        return sum(a.nbytes for a in arrays) + (0 if self.encoder is None else self.encoder.nbytes)


def build_groups(
    staged: StepDocuments,
    told: StepInfo,
    groups: Mapping[int, Sequence[int]],
    batch: Batch,
    multiple: int,
    slab: Callable[[int], np.ndarray] = fresh,
    hooks: Sequence[Hook] = (),
    compact: bool = False,
) -> list[BucketBatch]:
    """What the given ranks of some data-parallel groups get: built once for all that get the same,
    and for nobody else.

    A group's ranks may be of several buckets of the plan, and get other parts of them: ``views.py``
    says which. ``compact``: to be widened by whoever gets it, where that can be; slices along cp
    cannot, nor what hooks build.
    """
    compact = (
        compact
        and not hooks
        and not any(left is not None and len(left) for left in (staged.masked, staged.struck))
    )
    if told.place is None and not compact:
        return build_buckets(staged, list(groups), batch, multiple, slab, hooks)
    if told.place is None:
        return _build_views(staged, list(groups), [ALL], batch, multiple, slab, compact)[ALL]
    views, bucket_of = (
        views_of(told.place, told.axis, told.broadcast, batch.cp_split),
        _buckets_of_ranks(told.place, told.axis),
    )
    wanted = {(bucket_of[rank], views[rank]): None for ranks in groups.values() for rank in ranks}
    buckets = sorted({bucket for bucket, view in wanted if not view.nothing})
    distinct = list(dict.fromkeys(view for _, view in wanted if not view.nothing))
    found: dict[tuple[int, View], BucketBatch] = {}
    if hooks:
        whole = build_buckets(staged, buckets, batch, multiple, slab, hooks)
        for (b, bucket), view in product(zip(buckets, whole, strict=True), distinct):
            if (b, view) in wanted:
                found[b, view] = replace(
                    bucket, built=_narrowed(bucket, view, staged.plan.step, hooks)
                )
    elif buckets:
        for view, made in _build_views(
            staged, buckets, distinct, batch, multiple, slab, compact
        ).items():
            found |= {(b, view): bucket for b, bucket in zip(buckets, made, strict=True)}
    for b, view in wanted:
        if view.nothing:
            rows, bounds, _ = _rows(staged.plan.main, [b])
            found[b, view] = BucketBatch(
                rows, bounds, None, built=({},) * staged.plan.main.n_microbatches
            )
    none = np.zeros(1, np.int64)
    return [
        BucketBatch(none[:0], none, None, by_rank={r: found[bucket_of[r], views[r]] for r in ranks})
        for ranks in groups.values()
    ]


def build_with_images(
    staged: StepDocuments,
    told: StepInfo,
    groups: Mapping[int, Sequence[int]],
    members: Sequence[int],
    form: PixelForm,
    batch: Batch,
    multiple: int,
    slab: Callable[[int], np.ndarray] = fresh,
    hooks: Sequence[Hook] = (),
    compact: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[list[BucketBatch], DecodeFailures | None]:
    """The same with the encoder's part of every rank. ``members`` are all ranks of the groups: the
    images of those whom nobody serves are decoded too, since a sample is left out of the loss
    whoever looks on.
    """
    if told.place is not None and any(
        v.cp > 1 for v in views_of(told.place, told.axis, told.broadcast, batch.cp_split)
    ):
        found = "context parallelism cuts microbatches, and rows of images go into whole ones"
        raise PlanError(
            found, told.step, 'launch without broadcast=False, or set batch.cp_split="none"'
        )
    encoded = encoder_inputs(staged, members, form, slab, pool(), stopped)
    staged = replace(staged, masked=encoded.masked, struck=placeholders(staged))
    built = build_groups(staged, told, groups, batch, multiple, slab, hooks, compact)
    none = np.zeros(1, np.int64)
    with_encoder = [
        BucketBatch(
            none[:0],
            none,
            None,
            by_rank={
                r: replace(b.for_rank(r), encoder=encoded.wides[r], per=encoded.per) for r in ranks
            },
        )
        for b, ranks in zip(built, groups.values(), strict=True)
    ]
    return with_encoder, encoded.spoiled


@lru_cache(maxsize=32)
def _buckets_of_ranks(place: ClientPlaceTree, axis: str) -> list[int]:
    return place.bucket_of(axis).tolist()


def _narrowed(
    bucket: BucketBatch, view: View, step: int, hooks: Sequence[Hook]
) -> tuple[dict[str, np.ndarray], ...]:
    """A hook's microbatches as a view has them."""
    try:
        made = tuple(narrow(arrays, view) for arrays in bucket.built)
    except ValueError as e:
        remedy = "pad documents as assembly.default() does, or set Batch(cp_split=...)"
        raise PlanError(
            f"{hooks[-1].__name__}: its microbatches cannot be cut for context parallelism: {e}",
            step,
            remedy,
        ) from None
    for array in (a for arrays in made for a in arrays.values()):
        array.flags.writeable = False
    return made


def _build_views(
    staged: StepDocuments,
    buckets: Sequence[int],
    views: Sequence[View],
    batch: Batch,
    multiple: int,
    slab: Callable[[int], np.ndarray],
    compact: bool,
) -> dict[View, list[BucketBatch]]:
    """The buckets as each view has them. Slices of all cp ranks are built together; no bucket's
    views are partly cut.
    """
    rows, bounds, place = _rows(staged.plan.main, buckets)
    m, cp = staged.plan.main.n_microbatches, views[0].cp
    documents = _gathered(staged, rows, place, m * len(buckets))
    forms: dict[View, CompactLayout] = {}
    if cp == 1 and compact:
        found = build_compact(*documents, batch, multiple, slab), form_of(batch)
        made = {view: seen(*found, view) for view in views}
        wides, forms = (
            {view: wide for view, (wide, _) in made.items()},
            {view: form for view, (_, form) in made.items()},
        )
    elif cp == 1:
        whole = _left_out(build_wide(*documents, batch, multiple, slab), staged, buckets, 0, batch)
        wides = {view: of_stage(whole, view) for view in views}
    else:
        ranks = sorted({view.cp_rank for view in views})
        slices = dict(
            zip(ranks, build_slices(*documents, batch, multiple, slab, cp, ranks), strict=True)
        )
        wides = {view: of_stage(slices[view.cp_rank], view) for view in views}
    cuts = [bounds[k * m : (k + 1) * m + 1] for k in range(len(buckets))]
    return {
        view: [
            BucketBatch(rows, cut, wide, k * m, form=forms.get(view)) for k, cut in enumerate(cuts)
        ]
        for view, wide in wides.items()
    }


def build_buckets(
    staged: StepDocuments,
    buckets: Sequence[int],
    batch: Batch,
    multiple: int,
    slab: Callable[[int], np.ndarray] = fresh,
    hooks: Sequence[Hook] = (),
) -> list[BucketBatch]:
    """Gather the documents of some buckets and cut their microbatches: one gather for all, since
    small ones cost more apart.
    """
    m = staged.plan.main.n_microbatches
    rows, bounds, place = _rows(staged.plan.main, buckets)
    cuts = [bounds[k * m : (k + 1) * m + 1] for k in range(len(buckets))]

    def wide_of(a: int, b: int, first: int, n: int) -> BatchArrays:
        """Microbatches first to first + n, whose documents are rows a to b."""
        made = build_wide(
            *_gathered(staged, rows[a:b], place[a:b] - first, n), batch, multiple, slab
        )
        return _left_out(made, staged, buckets, first, batch)

    if not hooks:
        wide = wide_of(0, len(rows), 0, m * len(buckets))
        return [BucketBatch(rows, cut, wide, k * m) for k, cut in enumerate(cuts)]
    built = []
    for k, (bucket, cut) in enumerate(zip(buckets, cuts, strict=True)):
        assembly = Assembly(
            step=staged.plan.step,
            bucket=bucket,
            batch=batch,
            plan=staged.plan,
            rows=tuple(rows[a:b] for a, b in pairwise(cut.tolist())),
            gather=lambda rows: staged.tokens.take(staged.stage.doc[rows]),
            build=partial(_cut, wide_of, int(cut[0]), int(cut[-1]), k * m, m),
        )
        built.append(BucketBatch(rows, cut, None, built=tuple(assembled_by(hooks, assembly))))
    return built


def _left_out(
    wide: BatchArrays, staged: StepDocuments, buckets: Sequence[int], first: int, batch: Batch
) -> BatchArrays:
    """Without a loss for placeholders of images, and for samples whose image is missing. The
    microbatches are those of ``buckets`` from number ``first`` on.
    """
    m, number = staged.plan.main.n_microbatches, {b: k for k, b in enumerate(buckets)}
    if staged.struck is not None and len(staged.struck):
        runs = staged.struck[np.isin(staged.struck[:, 0], buckets)]
        k = np.array([number[b] for b in runs[:, 0].tolist()], np.int64) * m + runs[:, 1] - first
        here = (k >= 0) & (k < wide.n)
        strike_out(wide, np.column_stack((k, runs[:, 2:]))[here], batch.labels)
    if staged.masked is not None and len(staged.masked):
        places = [
            (number[b] * m + k - first, slot)
            for b, k, slot in staged.masked.tolist()
            if b in number
        ]
        leave_out(wide, [(k, slot) for k, slot in places if 0 <= k < wide.n])
    return wide


def _rows(main: Assignment, buckets: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the plan in these buckets, where those of each microbatch begin, and the microbatch
    of each, counted over them.
    """
    rows, place = _walk(main, buckets)
    return rows, np.searchsorted(place, np.arange(main.n_microbatches * len(buckets) + 1)), place


def _gathered(
    staged: StepDocuments, rows: np.ndarray, microbatch: np.ndarray, n_microbatches: int
) -> _Documents:
    docs, offsets = staged.stage.doc[rows], staged.tokens.offsets
    start = offsets[docs]
    return (
        staged.tokens.values,
        start,
        offsets[docs + 1] - start,
        microbatch,
        n_microbatches,
        staged.plan.source[rows],
    )


def _cut(
    wide_of: Callable[[int, int, int, int], BatchArrays], a: int, b: int, first: int, n: int
) -> list[dict[str, np.ndarray]]:
    return wide_of(a, b, first, n).cut(0, n)


def _walk(main: Assignment, buckets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Documents of these buckets in the order of their slots: rows of the plan, and the microbatch
    of each, counted over them.
    """
    number = np.full(main.n_buckets, -1)
    number[list(buckets)] = np.arange(len(buckets))
    order = main.order()
    order = order[number[main.bucket[order]] >= 0]
    place = number[main.bucket[order]] * main.n_microbatches + main.microbatch[order]
    if len(buckets) > 1 and list(buckets) != sorted(buckets):
        sort = np.argsort(place, kind="stable")
        order, place = order[sort], place[sort]
    return main.sample[order], place
