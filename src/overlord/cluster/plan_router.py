"""Cutting a step for the processes that carry it out: each loader host and each constructor host is
told its share, no more. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from overlord.batch import Batch
from overlord.mesh import ClientPlaceTree
from overlord.messages.control import (
    ConstructorPlan,
    EncodedState,
    EncoderPlan,
    LoaderPlan,
    PlannedStep,
)
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.planning.images.encoding import Encodings

NONE, NO_ITEMS = np.zeros(0, np.int64), np.zeros((2, 0), np.int64)


class RoutedPlan(NamedTuple):
    """What a Stage is for every host that has to do with it."""

    parts: dict[int, LoaderPlan]  # by loader host
    placed: dict[int, ConstructorPlan]  # by constructor host


class PlanRouter:
    """Knows which host has which loader and which bucket, and who holds what look-ahead passed
    over.
    """

    def __init__(
        self,
        host_of: Sequence[int],
        constructor_of: Sequence[int],
        *,
        whole_plans: bool = False,
        loader_hooks: bool = False,
        images: ImageContext | None = None,
    ):
        self._host_of = np.asarray(host_of, np.int64)  # of every loader
        self._constructor_of = np.asarray(constructor_of, np.int64)  # of every data-parallel group
        self._whole, self._hooks, self._images = whole_plans, loader_hooks, images
        self._held_by = np.zeros(0, np.int64)  # loader of every held document
        self.generation = 0  # under which steps are planned
        self._shadow_of: dict[int, int] = {}  # loader -> the host where another follows it

    def add_loaders(self, hosts: Iterable[int]) -> None:
        """Loaders behind all others."""
        self._host_of = np.concatenate([self._host_of, np.fromiter(hosts, np.int64)])

    def move(self, loader: int, host: int) -> None:
        assert loader not in self._held_by, (
            "held payload does not move with a loader: forget it first"
        )
        self._host_of[loader] = host

    def go_back(self, generation: int) -> None:
        """Steps are planned again: nothing is held."""
        self.generation, self._held_by = generation, np.zeros(0, np.int64)

    def follow(self, shadows: Mapping[int, int]) -> None:
        """These loaders are followed on these hosts: what they pop is popped there too."""
        self._shadow_of = dict(shadows)

    def shadow(self, loader: int) -> int | None:
        return self._shadow_of.get(loader)

    def forget(self, loaders: Iterable[int]) -> None:
        self._held_by = self._held_by[~np.isin(self._held_by, list(loaders))]

    def host(self, loader: int) -> int:
        return int(self._host_of[loader])

    def hosts(self) -> np.ndarray:
        """Of every loader, as it is now."""
        return self._host_of.copy()

    def cut(
        self, stage: PlannedStep, after: EncodedState, served: np.ndarray, acked: int = -1
    ) -> RoutedPlan:
        """``served[g]``: somebody of data-parallel group g waits; documents for the others go
        nowhere. ``acked``: the last step that every rank has taken.
        """
        by = np.concatenate([self._held_by, np.repeat(np.arange(len(stage.pops)), stage.pops)])
        host = self._host_of[by]
        number = _numbers(host)
        if stage.kept is not None:
            self._held_by = by[stage.kept]
        main = stage.plan.main
        goes_to = np.where(served & (not stage.skipped), self._constructor_of, -1)
        bucket = np.empty(len(stage.plan), np.int64)
        bucket[main.sample] = main.bucket
        sends: dict[
            int, dict[int, np.ndarray]
        ] = {}  # loader host -> constructor host -> rows of the plan, in the order they are sent
        pictures = (
            None
            if self._images is None or stage.skipped
            else _Pictures(stage, host, number, self._images)
        )
        placed: dict[int, ConstructorPlan] = {}
        of, scratch = _Shares(stage.plan, bucket, goes_to), np.full(len(stage.plan), -1, np.int64)
        # Whoever serves anyone hears of the step: buckets without a document in it get empty
        # microbatches.
        for c in np.unique(goes_to[goes_to >= 0]).tolist():
            rows, items = of(c)
            order = np.lexsort((stage.doc[rows], host[stage.doc[rows]]))
            doc = np.empty(len(rows), np.int64)
            doc[order] = np.arange(len(rows))
            origin = host[stage.doc[rows[order]]]
            origins = np.unique(origin).tolist()
            for h in origins:
                sends.setdefault(h, {})[c] = rows[order[origin == h]]
            cut = self._stage_for(stage, rows, doc, items, after, scratch)
            if pictures is not None:
                cut = replace(cut, encoding=pictures.send(c, np.flatnonzero(goes_to == c)))
                origins = sorted({*origins, *(h for h, to in pictures.sends.items() if c in to)})
            placed[c] = ConstructorPlan(cut, tuple(origins), self.generation)
        return RoutedPlan(self._parts(stage, host, number, sends, pictures, acked), placed)

    def _stage_for(
        self,
        stage: PlannedStep,
        rows: np.ndarray,
        doc: np.ndarray,
        items: np.ndarray,
        after: EncodedState,
        where: np.ndarray,
    ) -> PlannedStep:
        nothing = np.zeros(0, np.int64)
        if self._whole:  # a hook of the user sees the whole plan, whoever runs it
            wide = np.full(len(stage.plan), -1, np.int64)
            wide[rows] = doc
            return replace(stage, pops=nothing, doc=wide, after=after, kept=None, loader=None)
        plan = stage.plan if len(rows) == len(stage.plan) else _cut(stage.plan, rows, items, where)
        return replace(
            stage,
            plan=replace(plan, modules={"backbone": plan.main}),
            pops=nothing,
            doc=doc,
            after=after,
            kept=None,
            loader=None,
        )

    def _parts(
        self,
        stage: PlannedStep,
        host: np.ndarray,
        number: np.ndarray,
        sends: dict[int, dict[int, np.ndarray]],
        pictures: _Pictures | None,
        acked: int,
    ) -> dict[int, LoaderPlan]:
        popped = np.flatnonzero(stage.pops)
        for h, items in pictures.sends.items() if pictures is not None else ():
            sends[h] = {
                c: sends.get(h, {}).get(c, NONE) for c in sorted({*sends.get(h, {}), *items})
            }
        hosts = {*np.unique(self._host_of[popped]).tolist(), *sends}
        if stage.kept is not None:  # who holds payload must hear what stays
            hosts |= set(np.unique(host).tolist())
        kept_by = None if stage.kept is None else host[stage.kept]
        parts = {}
        for h in sorted(hosts):
            mine = popped[self._host_of[popped] == h]
            to = sends.get(h, {})
            kept = (
                None if stage.kept is None or kept_by is None else number[stage.kept[kept_by == h]]
            )
            all_of_it = (
                stage.kept is None
                and not self._hooks
                and len(to) == 1
                and len(next(iter(to.values()))) == int((host == h).sum())
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
            if pictures is not None:
                all_of_it = all_of_it and pictures.sends_all(h)
                part = part if all_of_it else replace(part, items=pictures.for_hosts(h, tuple(to)))
            if self._hooks and to:
                part = self._hooked(part, stage, host, number, h, to)
            elif not all_of_it:
                part = replace(part, take=tuple(number[stage.doc[rows]] for rows in to.values()))
            parts[h] = part
        for h, followed in self._followed(popped).items():
            part = parts.get(h) or LoaderPlan(
                stage.plan.step, NONE, NONE, (), generation=self.generation, acked=acked
            )
            loaders = np.sort(np.concatenate([part.loaders, followed]))
            parts[h] = replace(part, loaders=loaders, pops=stage.pops[loaders])
        return parts

    def _followed(self, popped: np.ndarray) -> dict[int, list[int]]:
        hosts: dict[int, list[int]] = {}
        for loader in popped.tolist() if self._shadow_of else ():
            if (h := self._shadow_of.get(loader)) is not None:
                hosts.setdefault(h, []).append(loader)
        return hosts

    def _hooked(
        self,
        part: LoaderPlan,
        stage: PlannedStep,
        host: np.ndarray,
        number: np.ndarray,
        h: int,
        to: dict[int, np.ndarray],
    ) -> LoaderPlan:
        """A loader hook is shown all that a step takes from a source, in the order of the draw."""
        rows = np.flatnonzero(host[stage.doc] == h)
        where = np.full(len(stage.plan), -1, np.int64)
        where[rows] = np.arange(len(rows))
        plan = replace(cut_plan(stage.plan, rows, np.zeros(0, bool)), modules={})
        return replace(
            part,
            plan=plan,
            doc=number[stage.doc[rows]],
            take=tuple(where[sent] for sent in to.values()),
        )


class ImageContext(NamedTuple):
    """What a cutter must know of a job with images."""

    batch: Batch
    multiple: int  # that documents are padded to
    ranks: Sequence[Sequence[int]]  # of every bucket


class _Pictures:
    """The images of one step: from which host, to the constructor of which rank."""

    def __init__(self, stage: PlannedStep, host: np.ndarray, number: np.ndarray, job: ImageContext):
        self._made, self._job = Encodings(stage.plan, job.batch, job.multiple), job
        self._doc = stage.doc[self._made.sample]
        self._host, self._number = host[self._doc], number[self._doc]
        self.sends: dict[
            int, dict[int, np.ndarray]
        ] = {}  # loader host -> constructor host -> document of the host and number inside it

    def send(self, c: int, buckets: np.ndarray) -> EncoderPlan:
        """What the ranks of these buckets, which live at constructor host c, encode."""
        ranks = [rank for b in buckets.tolist() for rank in self._job.ranks[b]]
        items, inside = self._made.encoded_by(ranks), self._made.routes.number
        order = np.lexsort((inside[items], self._doc[items], self._host[items]))
        at = np.empty(len(items), np.int64)
        at[order] = np.arange(len(items))
        for h in np.unique(self._host[items]).tolist():
            mine = items[order][self._host[items][order] == h]
            self.sends.setdefault(h, {})[c] = np.stack([self._number[mine], inside[mine]])
        return self._made.of(ranks, at)

    def sends_all(self, h: int) -> bool:
        """Whether all images of the host's documents are wanted, in the order in which the host has
        them.
        """
        to = self.sends.get(h, {})
        return sum(found.shape[1] for found in to.values()) == int((self._host == h).sum())

    def for_hosts(self, h: int, to: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        found = self.sends.get(h, {})
        return tuple(found.get(c, NO_ITEMS) for c in to) if found else ()


def _buckets_of(plan: LoadingPlan, groups: np.ndarray) -> np.ndarray:
    """Buckets of the plan that have a rank in one of these data-parallel groups: bool, as
    ``groups`` is.
    """
    if plan.main.axis == "DP" or plan.place is None:
        return groups
    group_of, bucket_of = _ranks(plan.place, "DP"), _ranks(plan.place, plan.main.axis)
    found = np.zeros(plan.main.n_buckets, bool)
    found[bucket_of[groups[group_of]]] = True
    return found


@lru_cache(maxsize=32)
def _ranks(place: ClientPlaceTree, axis: str) -> np.ndarray:
    return place.bucket_of(axis)


def cut_plan(plan: LoadingPlan, rows: np.ndarray, items: np.ndarray) -> LoadingPlan:
    """These samples of a plan, and of its backbone the items that ``items`` marks, which must be of
    them.
    """
    if not len(items):
        columns, substep = _columns(plan, rows)
        return replace(plan, substep=substep, **columns)
    return _cut(plan, rows, np.flatnonzero(items), np.full(len(plan), -1, np.int64))


def _cut(plan: LoadingPlan, rows: np.ndarray, items: np.ndarray, where: np.ndarray) -> LoadingPlan:
    """The same with the numbers of the items. ``where``: as long as the plan, to be written to,
    what is in it does not matter.
    """
    columns, substep = _columns(plan, rows)
    where[rows] = np.arange(len(rows))
    return replace(
        plan, substep=substep, modules={"backbone": _items(plan.main, items, where)}, **columns
    )


def _columns(plan: LoadingPlan, rows: np.ndarray) -> tuple[dict[str, Any], np.ndarray | None]:
    columns = {
        name: getattr(plan, name)[rows]
        for name in ("source", "epoch", "file", "row", "part", "tokens")
    }
    return columns, None if plan.substep is None else plan.substep[rows]


class _Shares:
    """Rows and items of a plan by constructor host, rising. Sorted once: there may be a thousand
    hosts, and a look at the whole plan for each of them took ten times what planning takes.
    """

    def __init__(self, plan: LoadingPlan, bucket: np.ndarray, goes_to: np.ndarray):
        self._plan, self._bucket, self._goes_to = plan, bucket, goes_to
        self._sorted = plan.main.axis == "DP" or plan.place is None
        if self._sorted:
            self._rows, self._items = _Sorted(goes_to[bucket]), _Sorted(goes_to[plan.main.bucket])

    def __call__(self, c: int) -> tuple[np.ndarray, np.ndarray]:
        if self._sorted:
            return self._rows(c), self._items(c)
        buckets = _buckets_of(
            self._plan, self._goes_to == c
        )  # along other axes a bucket may have ranks of several groups
        return np.flatnonzero(buckets[self._bucket]), np.flatnonzero(
            buckets[self._plan.main.bucket]
        )


class _Sorted:
    """Where a key stands in an array, for many keys."""

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


def _numbers(host: np.ndarray) -> np.ndarray:
    """The number of each document within its host, in the documents' order."""
    order = np.argsort(host, kind="stable")
    starts = np.searchsorted(host[order], host[order], side="left")
    number = np.empty(len(host), np.int64)
    number[order] = np.arange(len(host)) - starts
    return number
