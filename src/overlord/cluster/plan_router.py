"""Plans of a cluster: their routing to workers, and their states for a rollback. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from overlord.batch_by_step import BatchByStep
from overlord.cluster.placement import Placement
from overlord.errors import NO_FUNCTION, PlanError
from overlord.messages.control import (
    ConstructorPlan,
    EncodedState,
    EncoderPlan,
    LoaderPlan,
    PlannedStep,
    Report,
    StreamState,
)
from overlord.plan.module_ranks import OUTSIDE, bucket_by_rank
from overlord.plan.plan import PIECE_COLUMNS, Assignment, LoadingPlan
from overlord.planning.images import Encodings
from overlord.planning.mixture import Event, EventLog

# ----------------------------------------------------------------------------
# Plan history: the planned steps that not every rank has acknowledged, for a rollback.


class PlanHistory:
    """States and digests since the last step that all ranks acknowledged, and the events since.

    ``lag`` is the job's ``feedback_lag``. ``planned`` has digests of steps after ``start`` that an
    earlier coordinator planned.
    """

    def __init__(self, start: StreamState, lag: int, planned: Mapping[int, str] | None = None):
        self._states: dict[int, StreamState] = {start.step - 1: start}
        self._digests: dict[int, str] = dict(planned or {})
        self._log = EventLog(lag)
        # the next step to plan; after a rollback, later steps may be acknowledged already
        self._next = start.step
        self.acked = start.step - 1  # every rank acknowledged the steps up to here

    def planned(self, stage: PlannedStep) -> bool:
        """Record a planned step and return whether it is planned for the first time.

        Raise ``PlanError`` if it differs from its first plan.
        """
        step, first = stage.plan.step, self._digests.get(stage.plan.step)
        if first is not None and first != stage.digest:
            what = (
                "the step was planned again after a worker was lost: expected the first plan "
                f"({first}), got another ({stage.digest})"
            )
            raise PlanError(what, step, NO_FUNCTION)
        assert isinstance(stage.after, StreamState)
        if step >= self.acked:
            self._states[step] = stage.after
        self._digests[step], self._next = stage.digest, step + 1
        return first is None

    def applied(self, event: Event) -> None:
        """Keep an event for the next rollback."""
        self._log.add(event, lambda: self.acked + 1)

    def reported(self, report: Report) -> None:
        """Keep a report that arrived in time, for the next rollback."""
        self._log.report(report, self.acked + 1)

    def reports(self) -> list[Report]:
        """Return the reports that arrived in time, for states since the last rollback's state."""
        before = {(r.step, r.rank): r for r in self._states[self.acked].reports}
        return [*(before | {(r.step, r.rank): r for r in self._log.reports()}).values()]

    def taken(self, step: int) -> None:
        """Record that all ranks took the steps up to this one."""
        step_acked = max((s for s in self._states if s <= step), default=self.acked)
        if step_acked <= self.acked:
            return
        self.acked = step_acked
        self._states = {s: state for s, state in self._states.items() if s >= step_acked}
        self._digests = {
            s: digest for s, digest in self._digests.items() if s > min(step_acked, self._next - 1)
        }

    def rollback(self, names: Sequence[str]) -> StreamState:
        """Return the state after the last acknowledged step, with all events since its plan.

        From now on the next step to plan is the one after it.
        """
        self._next = self.acked + 1
        return self._log.completed(self._states[self.acked], names, ahead=True)


# ----------------------------------------------------------------------------
# Plan router: each loader worker and each constructor worker receives only its part of a plan.

NONE, NO_ITEMS = np.zeros(0, np.int64), np.zeros((2, 0), np.int64)


class RoutedPlan(NamedTuple):
    """The messages of one planned step, by the number of the worker that receives them."""

    loader_plans: dict[int, LoaderPlan]  # by loader worker
    constructor_plans: dict[int, ConstructorPlan]  # by constructor worker


class PlanRouter:
    """The router of planned steps to workers; it tracks the loader of each passed-over sample.

    ``whole_plans``: constructor workers receive whole plans, for constructor hooks.
    ``loader_hooks``: loader workers receive a plan of their samples, for loader hooks.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        whole_plans: bool = False,
        loader_hooks: bool = False,
        images: ImageContext | None = None,
    ):
        self._placement = placement
        self._whole, self._hooks, self._images = whole_plans, loader_hooks, images
        self._held_by = NONE  # loader of every held sample
        self._held_on = NONE  # and its worker: held samples do not move with a loader
        self.generation = 0  # of the plans

    def rollback(self, generation: int) -> None:
        """Start a new generation of plans, in which no sample is held yet."""
        self.generation, self._held_by, self._held_on = generation, NONE, NONE

    def forget(self, loaders: Iterable[int]) -> None:
        """Discard the held samples of these loaders."""
        stays = ~np.isin(self._held_by, list(loaders))
        self._held_by, self._held_on = self._held_by[stays], self._held_on[stays]

    def route(
        self, stage: PlannedStep, after: EncodedState, served: np.ndarray, acked: int = -1
    ) -> RoutedPlan:
        """Return the messages of a planned step.

        ``served[g]``: a rank of data-parallel group g is attached. Samples of other groups are not
        sent. ``acked`` is the last step that every rank has acknowledged.
        """
        worker_of, constructor_of = self._placement.worker_of, self._placement.constructor_of
        assert (worker_of[self._held_by] == self._held_on).all(), (
            "a loader with held samples must not be moved: drop the samples first"
        )
        by = np.concatenate([self._held_by, np.repeat(np.arange(len(stage.pops)), stage.pops)])
        worker = worker_of[by]
        number = _numbers(worker)
        if stage.kept is not None:
            self._held_by, self._held_on = by[stage.kept], worker[stage.kept]
        main = stage.plan.main
        goes_to = np.where(served & (not stage.skipped), constructor_of, -1)
        bucket = np.empty(len(stage.plan), np.int64)
        bucket[main.sample] = main.bucket
        # loader worker -> constructor worker -> rows of the plan, in the order they are sent
        sends: dict[int, dict[int, np.ndarray]] = {}
        images = (
            None
            if self._images is None or stage.skipped
            else _StepImages(stage, worker, number, self._images)
        )
        constructor_plans: dict[int, ConstructorPlan] = {}
        of, scratch = (
            _RowsByConstructor(stage.plan, bucket, goes_to),
            np.full(len(stage.plan), -1, np.int64),
        )
        # Every constructor with attached ranks gets a plan: buckets without a sample in it get
        # empty microbatches.
        for c in np.unique(goes_to[goes_to >= 0]).tolist():
            rows, items = of(c)
            order = np.lexsort((stage.doc[rows], worker[stage.doc[rows]]))
            doc = np.empty(len(rows), np.int64)
            doc[order] = np.arange(len(rows))
            origin = worker[stage.doc[rows[order]]]
            origins = np.unique(origin).tolist()
            for h in origins:
                sends.setdefault(h, {})[c] = rows[order[origin == h]]
            share = self._stage_for(stage, rows, doc, items, of.tasks(c), after, scratch)
            if images is not None:
                share = replace(share, encoding=images.send(c, np.flatnonzero(goes_to == c)))
                origins = sorted({*origins, *(h for h, to in images.sends.items() if c in to)})
            constructor_plans[c] = ConstructorPlan(share, tuple(origins), self.generation)
        return RoutedPlan(
            self._loader_plans(stage, worker, number, sends, images, acked), constructor_plans
        )

    def _stage_for(
        self,
        stage: PlannedStep,
        rows: np.ndarray,
        doc: np.ndarray,
        items: np.ndarray,
        tasks: np.ndarray | None,
        after: EncodedState,
        where: np.ndarray,
    ) -> PlannedStep:
        nothing = np.zeros(0, np.int64)
        if self._whole:  # a user hook receives the whole plan in every process
            wide = np.full(len(stage.plan), -1, np.int64)
            wide[rows] = doc
            return replace(stage, pops=nothing, doc=wide, after=after, kept=None, loader=None)
        plan = (
            stage.plan
            if len(rows) == len(stage.plan)
            else _plan_rows(stage.plan, rows, items, where, tasks)
        )
        return replace(
            stage,
            plan=replace(plan, modules={"backbone": plan.main}),
            pops=nothing,
            doc=doc,
            after=after,
            kept=None,
            loader=None,
        )

    def _loader_plans(
        self,
        stage: PlannedStep,
        worker: np.ndarray,
        number: np.ndarray,
        sends: dict[int, dict[int, np.ndarray]],
        images: _StepImages | None,
        acked: int,
    ) -> dict[int, LoaderPlan]:
        popped = np.flatnonzero(stage.pops)
        for h, items in images.sends.items() if images is not None else ():
            sends[h] = {
                c: sends.get(h, {}).get(c, NONE) for c in sorted({*sends.get(h, {}), *items})
            }
        workers = {*np.unique(self._placement.worker_of[popped]).tolist(), *sends}
        if stage.kept is not None:  # workers with held samples need the list of those that stay
            workers |= set(np.unique(worker).tolist())
        kept_by = None if stage.kept is None else worker[stage.kept]
        loader_plans = {}
        for h in sorted(workers):
            mine = popped[self._placement.worker_of[popped] == h]
            to = sends.get(h, {})
            kept = (
                None if stage.kept is None or kept_by is None else number[stage.kept[kept_by == h]]
            )
            all_of_it = (
                stage.kept is None
                and stage.plan.offset is None
                and not self._hooks
                and len(to) == 1
                and len(next(iter(to.values()))) == int((worker == h).sum())
            )
            part = LoaderPlan(
                stage.plan.step,
                mine,
                stage.pops[mine],
                tuple(to),
                kept=kept,
                generation=self.generation,
                acked=acked,
            )
            if images is not None:
                all_of_it = all_of_it and images.sends_all(h)
                part = part if all_of_it else replace(part, items=images.for_workers(h, tuple(to)))
            if self._hooks and to:
                part = self._hooked(part, stage, worker, number, h, to)
            elif not all_of_it:
                part = replace(
                    part,
                    take=tuple(number[stage.doc[rows]] for rows in to.values()),
                    spans=_spans(stage.plan, to.values()),
                )
            loader_plans[h] = part
        for h, followed in self._followed(popped).items():
            part = loader_plans.get(h) or LoaderPlan(
                stage.plan.step, NONE, NONE, (), generation=self.generation, acked=acked
            )
            loaders = np.sort(np.concatenate([part.loaders, followed]))
            loader_plans[h] = replace(part, loaders=loaders, pops=stage.pops[loaders])
        return loader_plans

    def _followed(self, popped: np.ndarray) -> dict[int, list[int]]:
        workers: dict[int, list[int]] = {}
        for loader in popped.tolist() if self._placement.standby_of else ():
            if (h := self._placement.standby_of.get(loader)) is not None:
                workers.setdefault(h, []).append(loader)
        return workers

    def _hooked(
        self,
        part: LoaderPlan,
        stage: PlannedStep,
        worker: np.ndarray,
        number: np.ndarray,
        h: int,
        to: dict[int, np.ndarray],
    ) -> LoaderPlan:
        """Return a loader plan with a plan for loader hooks: all samples of the worker.

        The samples are in draw order.
        """
        rows = np.flatnonzero(worker[stage.doc] == h)
        where = np.full(len(stage.plan), -1, np.int64)
        where[rows] = np.arange(len(rows))
        plan = replace(plan_rows(stage.plan, rows, np.zeros(0, bool)), modules={})
        return replace(
            part,
            plan=plan,
            doc=number[stage.doc[rows]],
            take=tuple(where[sent] for sent in to.values()),
        )


class ImageContext(NamedTuple):
    """The properties of a job with images that routing needs."""

    batches: BatchByStep
    broadcast: bool  # whether the trainer broadcasts where the plan says so
    ranks: Sequence[Sequence[int]]  # ranks of every data-parallel group


class _StepImages:
    """The images of one step: their loader workers, and the constructors that encode them."""

    def __init__(
        self, stage: PlannedStep, worker: np.ndarray, number: np.ndarray, job: ImageContext
    ):
        self._made, self._job = (
            Encodings(stage.plan, job.batches.at(stage.plan.step), job.broadcast),
            job,
        )
        self._doc = stage.doc[self._made.sample]
        self._worker, self._number = worker[self._doc], number[self._doc]
        # loader worker -> constructor worker -> document of the worker and number inside it
        self.sends: dict[int, dict[int, np.ndarray]] = {}

    def send(self, c: int, buckets: np.ndarray) -> EncoderPlan:
        """Return the images that constructor worker ``c`` encodes, for the ranks of its buckets.

        Record in ``sends`` the loader workers that send them.
        """
        ranks = [rank for b in buckets.tolist() for rank in self._job.ranks[b]]
        items, inside = self._made.encoded_by(ranks), self._made.routes.number
        order = np.lexsort((inside[items], self._doc[items], self._worker[items]))
        at = np.empty(len(items), np.int64)
        at[order] = np.arange(len(items))
        for h in np.unique(self._worker[items]).tolist():
            mine = items[order][self._worker[items][order] == h]
            self.sends.setdefault(h, {})[c] = np.stack([self._number[mine], inside[mine]])
        return self._made.of(ranks, at)

    def sends_all(self, h: int) -> bool:
        """Return whether all images of a loader worker's documents are sent."""
        to = self.sends.get(h, {})
        return sum(found.shape[1] for found in to.values()) == int((self._worker == h).sum())

    def for_workers(self, h: int, to: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        found = self.sends.get(h, {})
        return tuple(found.get(c, NO_ITEMS) for c in to) if found else ()


def _groups(plan: LoadingPlan) -> np.ndarray:
    """Return the data-parallel group of each bucket, which is inside one."""
    main, place = plan.main, plan.place
    if main.axis == "DP" or place is None:
        return np.arange(main.n_buckets)
    groups = np.empty(main.n_buckets, np.int64)
    groups[bucket_by_rank(place, None, main.axis)] = bucket_by_rank(place, None, "DP")
    return groups


def _buckets_of(plan: LoadingPlan, groups: np.ndarray) -> np.ndarray:
    """Return which buckets of a plan have a rank in these data-parallel groups.

    Both ``groups`` and the result are boolean masks.
    """
    if _by_group(plan) or plan.place is None:
        return groups
    group_of = bucket_by_rank(plan.place, None, "DP")
    bucket_of = bucket_by_rank(plan.place, plan.main.on, plan.main.axis)[groups[group_of]]
    found = np.zeros(plan.main.n_buckets, bool)
    found[bucket_of[bucket_of != OUTSIDE]] = True
    return found


def _by_group(plan: LoadingPlan) -> bool:
    """Return whether bucket b is data-parallel group b of the job's mesh."""
    return plan.place is None or (plan.main.axis == "DP" and plan.main.on is None)


def plan_rows(plan: LoadingPlan, rows: np.ndarray, items: np.ndarray) -> LoadingPlan:
    """Return a plan of some samples, and of those backbone items that mask ``items`` marks.

    With an empty mask the modules are not changed.
    """
    if not len(items):
        columns, substep = _columns(plan, rows)
        return replace(plan, substep=substep, tasks=None, **columns)
    return _plan_rows(plan, rows, np.flatnonzero(items), np.full(len(plan), -1, np.int64))


def _plan_rows(
    plan: LoadingPlan,
    rows: np.ndarray,
    items: np.ndarray,
    where: np.ndarray,
    tasks: np.ndarray | None = None,
) -> LoadingPlan:
    """Return a plan of some samples, items and tasks, by number.

    ``where`` is scratch memory as long as the plan.
    """
    columns, substep = _columns(plan, rows)
    where[rows] = np.arange(len(rows))
    some = plan.tasks if tasks is None or plan.tasks is None else plan.tasks.of_samples(rows, tasks)
    return replace(
        plan,
        substep=substep,
        modules={"backbone": _items(plan.main, items, where)},
        tasks=some,
        **columns,
    )


def _spans(plan: LoadingPlan, sent: Iterable[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the first token and the number of tokens of the rows sent to each constructor."""
    if (offset := plan.offset) is None:
        return ()
    return tuple(np.stack([offset[rows], plan.payload_tokens[rows]]) for rows in sent)


def _columns(plan: LoadingPlan, rows: np.ndarray) -> tuple[dict[str, Any], np.ndarray | None]:
    columns = {
        name: column[rows]
        for name in ("source", "epoch", "file", "row", "part", "tokens", *PIECE_COLUMNS)
        if (column := getattr(plan, name)) is not None
    }
    if plan.documents is not None:
        columns["documents"] = plan.documents.take(rows)
    return columns, None if plan.substep is None else plan.substep[rows]


class _RowsByConstructor:
    """The rows and items of a plan by constructor worker, in ascending order.

    With data-parallel buckets they are sorted once. A scan of the whole plan for each of a thousand
    workers took ten times as long as planning.
    """

    def __init__(self, plan: LoadingPlan, bucket: np.ndarray, goes_to: np.ndarray):
        self._plan, self._bucket, self._goes_to = plan, bucket, goes_to
        self._sorted = _by_group(plan)
        if plan.tasks is not None:  # several constructors may have ranks of a sample's ring
            to, pieces = goes_to[_groups(plan)], plan.pieces()
            self._piece_sample = pieces.sample
            self._item_of = np.empty(len(plan), np.int64)
            self._item_of[plan.main.sample] = np.arange(len(plan))
            self._pieces = _KeyPositions(to[pieces.bucket])
            self._members = _KeyPositions(to[plan.tasks.table.task_rank])
        elif self._sorted:
            self._rows = _KeyPositions(goes_to[bucket])
            self._items = _KeyPositions(goes_to[plan.main.bucket])

    def __call__(self, c: int) -> tuple[np.ndarray, np.ndarray]:
        if self._plan.tasks is not None:
            rows = np.unique(self._piece_sample[self._pieces(c)])
            return rows, np.sort(self._item_of[rows])
        if self._sorted:
            return self._rows(c), self._items(c)
        # along other axes a bucket may have ranks of several groups
        buckets = _buckets_of(self._plan, self._goes_to == c)
        return np.flatnonzero(buckets[self._bucket]), np.flatnonzero(
            buckets[self._plan.main.bucket]
        )

    def tasks(self, c: int) -> np.ndarray | None:
        """Return the tasks that ranks of a constructor worker run; None without tasks."""
        if (tasks := self._plan.tasks) is None:
            return None
        found: np.ndarray = np.unique(tasks.table.task_of(self._members(c)))
        return found


class _KeyPositions:
    """The positions of every key in an array, which is sorted once for many keys."""

    def __init__(self, keys: np.ndarray):
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def __call__(self, key: int) -> np.ndarray:
        first, last = np.searchsorted(self._keys, (key, key + 1))
        return self._order[first:last]


def _items(main: Assignment, items: np.ndarray, where: np.ndarray) -> Assignment:
    names = ("bucket", "microbatch", "slot", "size", "cost", "memory", "out", "offset")
    columns: dict[str, Any] = {
        name: None if (column := getattr(main, name)) is None else column[items] for name in names
    }
    return replace(main, sample=where[main.sample[items]], **columns)


def _numbers(worker: np.ndarray) -> np.ndarray:
    """Return the index of each document among those of its worker, in the given order."""
    order = np.argsort(worker, kind="stable")
    starts = np.searchsorted(worker[order], worker[order], side="left")
    number = np.empty(len(worker), np.int64)
    number[order] = np.arange(len(worker)) - starts
    return number
