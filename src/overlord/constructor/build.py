"""Build the microbatches of buckets from the documents of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise, product
from typing import Any

import numpy as np

from overlord.constructor.compact import (
    IDS,
    Expander,
    PayloadViews,
    build_compact,
    build_views,
    for_view,
    layout_of,
)
from overlord.constructor.exclusions import Spans, exclude, exclude_from_pieces, spans_of_pieces
from overlord.constructor.images import PixelForm, decode_pool, encoder_inputs
from overlord.constructor.pack import BatchArrays, build_arrays, documents, new_buffer
from overlord.constructor.pieces import build_pieces
from overlord.constructor.rank_views import narrow, of_stage
from overlord.constructor.runs import build_slices
from overlord.constructor.sample_documents import document_runs, with_document_keys
from overlord.content import Scattered
from overlord.errors import PlanError
from overlord.job.hooks import Assembly, Hook, assembled_by
from overlord.mesh import Batch, ClientPlaceTree
from overlord.messages.control import PlannedStep
from overlord.messages.data import CompactLayout, DecodeFailures, StepInfo
from overlord.plan.module_ranks import OUTSIDE, bucket_by_rank, view_by_rank
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.plan.view import ALL, View, views_of
from overlord.sample import Ragged

# Start and length of each document in the payload, its microbatch, number of microbatches, source
# of each document.
_Spans = tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class StepDocuments:
    """A plan and its documents: row i is ``tokens[stage.doc[i]]``, or not here if that is -1.

    Of a piece of a sample, the document has the piece, and the next token if the sample continues.

    ``items``: the images that ranks of these buckets encode, of samples of any rank.
    ``stage.encoding`` has the placement of the images.
    """

    stage: PlannedStep
    tokens: Ragged
    items: Scattered | None = None
    # int64 [n, 5]: tokens that are not predicted (``exclusions.py``)
    excluded: np.ndarray | None = None
    weights: Ragged | None = None  # loss weights with the offsets of ``tokens``; None: all are 1

    def __post_init__(self) -> None:
        assert self.weights is None or np.array_equal(self.weights.offsets, self.tokens.offsets), (
            "expected loss weights with the offsets of the tokens"
        )

    @property
    def nbytes(self) -> int:
        return (
            self.tokens.nbytes
            + (0 if self.items is None else self.items.nbytes)
            + (0 if self.weights is None else self.weights.nbytes)
        )

    @property
    def weight_values(self) -> np.ndarray | None:
        """The loss weight of each of ``tokens.values``; None: all are 1."""
        return None if self.weights is None else self.weights.values

    @property
    def plan(self) -> LoadingPlan:
        return self.stage.plan


@dataclass(frozen=True, slots=True, eq=False)
class BucketBatch:
    """The microbatches of one bucket in one step, with the rows of the plan in each.

    Entry i of ``samples`` belongs to microbatch m if ``bounds[m] <= i < bounds[m+1]``. The arrays
    are in ``wide``, from its microbatch ``first`` on, or else in ``built``. A hook makes ``built``.
    A rank that a broadcast serves has empty mappings in ``built``.
    """

    samples: np.ndarray  # rows of the plan
    bounds: np.ndarray
    wide: BatchArrays | None
    first: int = 0
    built: tuple[dict[str, np.ndarray], ...] = ()
    # Set if ranks of one constructor get different arrays.
    by_rank: Mapping[int, BucketBatch] = field(default_factory=dict)
    # The images that one rank encodes, and their routes, exchange by exchange
    # (``planning/images.py``).
    encoder: BatchArrays | None = None
    per: str = ""  # "microbatch": exchange m belongs to microbatch m; "iteration": one exchange
    form: CompactLayout | None = None  # set if ``wide`` is compact: how to expand it
    allocate: Callable[[int], np.ndarray] = new_buffer  # allocates memory for expanded arrays
    # Set if the ids of ``wide`` are still in the payload of the step.
    payload: PayloadViews | None = None

    def for_rank(self, rank: int) -> BucketBatch:
        """Return the batch for the queue of a rank. Ranks with equal content share one object."""
        return self.by_rank[rank] if self.by_rank else self

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def microbatches(self) -> Sequence[Mapping[str, np.ndarray]]:
        """The microbatches as views, created on each access.

        A compact microbatch is expanded when one of its per-token arrays is read.
        """
        if self.wide is None:
            return self.built
        cuts = self.wide.cut(self.first, self.first + len(self))
        return (
            cuts
            if self.form is None
            else Expander(
                self.form, self._empty, self.allocate, self.payload, self.first
            ).microbatches(cuts)
        )

    @property
    def _empty(self) -> np.ndarray:
        """Whether each microbatch has no sample."""
        return self.bounds[1:] == self.bounds[:-1]

    def part(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the arrays to send; ``BatchArrays.of_part`` restores them."""
        assert self.wide is not None
        stop = self.first + len(self)
        arrays, rows = self.wide.part(self.first, stop)
        if self.payload is None or self.form is None or not self.form.has_ids:
            return arrays, rows
        ids = {IDS: self.payload.ids(self.first, stop)}
        counts = np.diff(self.payload.tokens[self.first : stop + 1])
        return ids | arrays, np.concatenate([counts[None], rows])

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
        stop = self.first + len(self)
        return (
            (
                self.wide.nbytes_of(self.first, stop)
                if self.wide is not None
                else sum(a.nbytes for m in self.built for a in m.values())
            )
            + (0 if self.payload is None else self.payload.nbytes(self.first, stop))
            + (0 if self.encoder is None else self.encoder.nbytes)
        )


def build_groups(
    staged: StepDocuments,
    info: StepInfo,
    groups: Mapping[int, Sequence[int]],
    batch: Batch,
    multiple: int,
    allocate: Callable[[int], np.ndarray] = new_buffer,
    hooks: Sequence[Hook] = (),
    compact: bool = False,
    in_place: bool = False,
) -> list[BucketBatch]:
    """Build the batches of some ranks, once for all ranks with equal content.

    ``groups``: the ranks of each group; the result has one batch per group. The ranks of a group
    may belong to several buckets of the plan, and get different parts of them, as ``rank_views.py``
    defines. ``compact``: build a compact form for the receiver to expand, if possible. It is not
    possible for slices along cp, pieces of hybrid plans, results of hooks, documents excluded from
    the loss and loss weights. ``in_place``: leave the ids in the payload where a compact form is
    possible, for receivers in this process.
    """
    if staged.plan.tasks is not None:
        return _build_tasks(staged, info, groups, batch, allocate, hooks)
    excluded = staged.excluded is not None and len(staged.excluded) > 0
    plain = not hooks and staged.weights is None and not excluded
    compact, in_place = compact and plain, in_place and plain and batch.layout == "packed"
    options = (batch, multiple, allocate, compact, in_place)
    if info.place is None and not compact and not in_place:
        return build_buckets(staged, list(groups), batch, multiple, allocate, hooks)
    if info.place is None:
        return _build_views(staged, list(groups), [ALL], *options)[ALL]
    views, bucket_of = (
        view_by_rank(info.place, info.on, info.axis, info.broadcast, batch.cp_split),
        _buckets_of_ranks(info.place, info.on, info.axis),
    )
    wanted = {(bucket_of[rank], views[rank]): None for ranks in groups.values() for rank in ranks}
    buckets = sorted({bucket for bucket, view in wanted if not view.nothing})
    distinct = list(dict.fromkeys(view for _, view in wanted if not view.nothing))
    batches: dict[tuple[int, View], BucketBatch] = {}
    if hooks:
        whole = build_buckets(staged, buckets, batch, multiple, allocate, hooks)
        for (b, bucket), view in product(zip(buckets, whole, strict=True), distinct):
            if (b, view) in wanted:
                batches[b, view] = replace(
                    bucket, built=_for_view(bucket, view, staged.plan.step, hooks)
                )
    elif buckets:
        for view, made in _build_views(staged, buckets, distinct, *options).items():
            batches |= {(b, view): bucket for b, bucket in zip(buckets, made, strict=True)}
    for b, view in wanted:
        if view.nothing:
            rows, bounds, _ = _rows(staged.plan.main, [] if b == OUTSIDE else [b])
            bounds = np.zeros(staged.plan.n_microbatches + 1, np.int64) if b == OUTSIDE else bounds
            batches[b, view] = BucketBatch(
                rows, bounds, None, built=({},) * staged.plan.main.n_microbatches
            )
    return _by_groups(groups, batches, bucket_of, views)


def _by_groups(
    groups: Mapping[int, Sequence[int]],
    batches: Mapping[tuple[int, View], BucketBatch],
    bucket_of: Sequence[int] | np.ndarray,
    views: Sequence[View],
) -> list[BucketBatch]:
    """Return one batch for each group of ranks: every rank has its view of its bucket."""
    none = np.zeros(1, np.int64)
    return [
        BucketBatch(
            none[:0], none, None, by_rank={r: batches[bucket_of[r], views[r]] for r in ranks}
        )
        for ranks in groups.values()
    ]


def _build_tasks(
    staged: StepDocuments,
    info: StepInfo,
    groups: Mapping[int, Sequence[int]],
    batch: Batch,
    allocate: Callable[[int], np.ndarray],
    hooks: Sequence[Hook],
) -> list[BucketBatch]:
    """Build the batches of some ranks in a hybrid plan: their pieces, task by task."""
    if hooks:
        raise PlanError(
            f"{hooks[0].__name__}: expected whole samples, got pieces on rings of ranks",
            staged.plan.step,
            "use ov.loader_do_plan, or a strategy without .split()",
        )
    place = info.place or staged.plan.tree
    views = views_of(place, info.axis, info.broadcast, batch.cp_split)
    bucket_of = _buckets_of_ranks(place, None, info.axis)
    buckets = sorted({bucket_of[rank] for ranks in groups.values() for rank in ranks})
    built = build_pieces(
        staged.plan, staged.stage.doc, staged.tokens, buckets, batch, allocate, staged.weights
    )
    if staged.excluded is not None and len(staged.excluded):
        spans = spans_of_pieces(staged.excluded, staged.plan.main, built.samples, built.bounds)
        exclude_from_pieces(built.arrays, spans, batch.labels)
    first, number = built.first.tolist(), {bucket: k for k, bucket in enumerate(buckets)}
    by_view = {view: of_stage(built.arrays, view) for view in set(views) if not view.nothing}

    batches: dict[tuple[int, View], BucketBatch] = {}
    for rank in (rank for ranks in groups.values() for rank in ranks):
        bucket, view = bucket_of[rank], views[rank]
        k = number[bucket]
        bounds = built.bounds[first[k] : first[k + 1] + 1]
        batches[bucket, view] = (
            BucketBatch(built.samples, bounds, None, built=({},) * (len(bounds) - 1))
            if view.nothing
            else BucketBatch(built.samples, bounds, by_view[view], first[k])
        )
    return _by_groups(groups, batches, bucket_of, views)


def build_with_images(
    staged: StepDocuments,
    info: StepInfo,
    groups: Mapping[int, Sequence[int]],
    members: Sequence[int],
    form: PixelForm,
    batch: Batch,
    multiple: int,
    allocate: Callable[[int], np.ndarray] = new_buffer,
    hooks: Sequence[Hook] = (),
    compact: bool = False,
    in_place: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[list[BucketBatch], DecodeFailures | None]:
    """Build the batches of some ranks as ``build_groups`` does, with encoder arrays.

    ``members``: all ranks of the groups' buckets, attached or not. Images of ranks that are not
    attached are decoded too: the samples excluded from the loss must not depend on attached ranks.
    Return the batches, and the images that could not be decoded (None if there are none).
    """
    encoded = encoder_inputs(staged, members, form, allocate, decode_pool(), stopped)
    staged = replace(staged, excluded=encoded.excluded)
    options = (batch, multiple, allocate, hooks, compact, in_place)
    built = build_groups(staged, info, groups, *options)
    none = np.zeros(1, np.int64)
    with_encoder = [
        BucketBatch(
            none[:0],
            none,
            None,
            by_rank={
                r: replace(b.for_rank(r), encoder=encoded.arrays[r], per=encoded.per) for r in ranks
            },
        )
        for b, ranks in zip(built, groups.values(), strict=True)
    ]
    return with_encoder, encoded.failures


@lru_cache(maxsize=32)
def _buckets_of_ranks(place: ClientPlaceTree, on: ClientPlaceTree | None, axis: str) -> list[int]:
    return bucket_by_rank(place, on, axis).tolist()


def _for_view(
    bucket: BucketBatch, view: View, step: int, hooks: Sequence[Hook]
) -> tuple[dict[str, np.ndarray], ...]:
    """Return the microbatches that a hook built, restricted to the view of a rank."""
    try:
        made = tuple(narrow(arrays, view) for arrays in bucket.built)
    except ValueError as e:
        remedy = "pad documents as assembly.default() does, or set Batch(cp_split=...)"
        raise PlanError(
            f"{hooks[-1].__name__}: expected microbatches that can be sliced along cp, got: {e}",
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
    allocate: Callable[[int], np.ndarray],
    compact: bool,
    in_place: bool,
) -> dict[View, list[BucketBatch]]:
    """Return the batches of the buckets for each view.

    Slices of all cp ranks are built together; all views must have the same cp.
    """
    rows, bounds, place = _rows(staged.plan.main, buckets)
    m, cp = staged.plan.main.n_microbatches, views[0].cp
    spans = _spans(staged, rows, place, m * len(buckets))
    on = _continues(staged, rows)
    forms: dict[View, CompactLayout] = {}
    payload: PayloadViews | None = None
    if cp == 1 and (in_place or compact):
        if in_place:
            # a sample of several documents has several spans in its row
            known = staged.stage.doc[rows] if staged.plan.documents is None else None
            docs = documents(*spans, batch, multiple, on)
            whole, payload = build_views(staged.tokens, docs, batch, known)
        else:
            values = staged.tokens.values
            whole = build_compact(values, *spans, batch, multiple, allocate, on)
        built = _with_document_keys(whole, staged, rows), layout_of(batch)
        made = {view: for_view(*built, view) for view in views}
        by_view, forms = (
            {view: arrays for view, (arrays, _) in made.items()},
            {view: form for view, (_, form) in made.items()},
        )
    elif cp == 1:
        values = staged.tokens.values
        made_whole = build_arrays(
            values, *spans, batch, multiple, allocate, staged.weight_values, on
        )
        made_whole = _with_document_keys(made_whole, staged, rows)
        whole = _with_exclusions(made_whole, staged, buckets, 0, batch)
        by_view = {view: of_stage(whole, view) for view in views}
    else:
        ranks = sorted({view.cp_rank for view in views})
        values = staged.tokens.values
        built_slices = build_slices(
            values, *spans, batch, multiple, allocate, cp, ranks, staged.weight_values, on
        )
        keyed = (_with_document_keys(part, staged, rows) for part in built_slices)
        slices = dict(zip(ranks, keyed, strict=True))
        for r, arrays in slices.items():
            view = View(cp=cp, cp_rank=r, split=batch.cp_split)
            _with_exclusions(arrays, staged, buckets, 0, batch, view)
        by_view = {view: of_stage(slices[view.cp_rank], view) for view in views}
    cuts = [bounds[k * m : (k + 1) * m + 1] for k in range(len(buckets))]
    # A receiver of the payload is in this process, and expands into memory of this allocator.
    lazy: dict[str, Any] = {} if payload is None else {"payload": payload, "allocate": allocate}
    return {
        view: [
            BucketBatch(rows, cut, arrays, k * m, form=forms.get(view), **lazy)
            for k, cut in enumerate(cuts)
        ]
        for view, arrays in by_view.items()
    }


def build_buckets(
    staged: StepDocuments,
    buckets: Sequence[int],
    batch: Batch,
    multiple: int,
    allocate: Callable[[int], np.ndarray] = new_buffer,
    hooks: Sequence[Hook] = (),
) -> list[BucketBatch]:
    """Gather the documents of some buckets and build their microbatches.

    One gather for all buckets costs less than one gather each.
    """
    m = staged.plan.main.n_microbatches
    rows, bounds, place = _rows(staged.plan.main, buckets)
    cuts = [bounds[k * m : (k + 1) * m + 1] for k in range(len(buckets))]

    def arrays_of(a: int, b: int, first: int, n: int) -> BatchArrays:
        """Build ``n`` microbatches from number ``first`` on; ``rows[a:b]`` are their documents."""
        spans = _spans(staged, rows[a:b], place[a:b] - first, n)
        on = _continues(staged, rows[a:b])
        values = staged.tokens.values
        made = build_arrays(values, *spans, batch, multiple, allocate, staged.weight_values, on)
        made = _with_document_keys(made, staged, rows[a:b])
        return _with_exclusions(made, staged, buckets, first, batch)

    if not hooks:
        arrays = arrays_of(0, len(rows), 0, m * len(buckets))
        return [BucketBatch(rows, cut, arrays, k * m) for k, cut in enumerate(cuts)]
    built = []
    for k, (bucket, cut) in enumerate(zip(buckets, cuts, strict=True)):
        assembly = Assembly(
            step=staged.plan.step,
            bucket=bucket,
            batch=batch,
            plan=staged.plan,
            rows=tuple(rows[a:b] for a, b in pairwise(cut.tolist())),
            gather=lambda rows: _documents_of_rows(staged, rows),
            build=partial(_microbatches, arrays_of, int(cut[0]), int(cut[-1]), k * m, m),
        )
        built.append(BucketBatch(rows, cut, None, built=tuple(assembled_by(hooks, assembly))))
    return built


def _with_exclusions(
    arrays: BatchArrays,
    staged: StepDocuments,
    buckets: Sequence[int],
    first: int,
    batch: Batch,
    view: View = ALL,
) -> BatchArrays:
    """Exclude tokens that are not predicted, in place.

    ``arrays`` has consecutive microbatches from number ``first`` on, counted over ``buckets``:
    whole, or the slice of ``view``.
    """
    if staged.excluded is None or not len(staged.excluded):
        return arrays
    m, number = staged.plan.main.n_microbatches, np.full(staged.plan.main.n_buckets, -1)
    number[list(buckets)] = np.arange(len(buckets))
    excluded = staged.excluded[number[staged.excluded[:, 0]] >= 0]
    k = number[excluded[:, 0]] * m + excluded[:, 1] - first
    here = (k >= 0) & (k < arrays.n)
    if here.any():
        exclude(arrays, Spans(k[here], *excluded[here, 2:].T), view, batch.labels)
    return arrays


def _rows(main: Assignment, buckets: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the plan rows of these buckets, the bounds of microbatches, each row's microbatch.

    Microbatches are numbered over all ``buckets``, in their order.
    """
    rows, place = _in_slot_order(main, buckets)
    return rows, np.searchsorted(place, np.arange(main.n_microbatches * len(buckets) + 1)), place


def _spans(
    staged: StepDocuments, rows: np.ndarray, microbatch: np.ndarray, n_microbatches: int
) -> _Spans:
    """Return the documents of these plan rows, as spans of the values of the payload."""
    docs, offsets = staged.stage.doc[rows], staged.tokens.offsets
    start, source = offsets[docs], staged.plan.source[rows]
    length = offsets[docs + 1] - start
    if (on := _continues(staged, rows)) is not None:  # the payload also has the next token
        length = length - on
    if (documents := staged.plan.documents) is not None:
        runs = document_runs(documents.take(rows), start, length)
        start, length = runs.start, runs.length
        microbatch, source = microbatch[runs.sample], source[runs.sample]
    return start, length, microbatch, n_microbatches, source


def _with_document_keys(
    arrays: BatchArrays, staged: StepDocuments, rows: np.ndarray
) -> BatchArrays:
    """Return microbatches of these plan rows with the keys of samples of several documents."""
    documents = staged.plan.documents
    return arrays if documents is None else with_document_keys(arrays, documents.take(rows))


def _documents_of_rows(staged: StepDocuments, rows: np.ndarray) -> Ragged:
    """Return the tokens of the documents of some plan rows."""
    tokens = staged.tokens.take(staged.stage.doc[rows])
    if (documents := staged.plan.documents) is None:
        return tokens
    sizes = documents.take(rows).sizes(tokens.lengths)
    return Ragged(tokens.values, np.concatenate(([0], np.cumsum(sizes))))


def _continues(staged: StepDocuments, rows: np.ndarray) -> np.ndarray | None:
    """Return which rows are pieces that their sample continues; None if rows are whole samples."""
    remaining = staged.plan.remaining
    return None if remaining is None else remaining[rows] > 0


def _microbatches(
    arrays_of: Callable[[int, int, int, int], BatchArrays], a: int, b: int, first: int, n: int
) -> list[dict[str, np.ndarray]]:
    return arrays_of(a, b, first, n).cut(0, n)


def _in_slot_order(main: Assignment, buckets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the plan rows of these buckets in slot order, and the microbatch number of each."""
    number = np.full(main.n_buckets, -1)
    number[list(buckets)] = np.arange(len(buckets))
    order = main.order()
    order = order[number[main.bucket[order]] >= 0]
    place = number[main.bucket[order]] * main.n_microbatches + main.microbatch[order]
    if len(buckets) > 1 and list(buckets) != sorted(buckets):
        sort = np.argsort(place, kind="stable")
        order, place = order[sort], place[sort]
    return main.sample[order], place
