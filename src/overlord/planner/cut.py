"""Cutting a step for the processes that carry it out: each loader host and each constructor host is told its share, no more. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from overlord.messages import Part, Placed, Sealed, Stage
from overlord.plan import Assignment, LoadingPlan


class Cuts(NamedTuple):
    """What a Stage is for every host that has to do with it."""

    parts: dict[int, Part]  # by loader host
    placed: dict[int, Placed]  # by constructor host


class Cutter:
    """Knows which host has which loader and which bucket, and who holds what look-ahead passed over."""

    def __init__(self, host_of: Sequence[int], constructor_of: Sequence[int], *, whole_plans: bool = False, loader_hooks: bool = False):
        self._host_of = np.asarray(host_of, np.int64)  # of every loader
        self._constructor_of = np.asarray(constructor_of, np.int64)  # of every bucket
        self._whole, self._hooks = whole_plans, loader_hooks
        self._held_by = np.zeros(0, np.int64)  # loader of every held document

    def add_loaders(self, hosts: Iterable[int]) -> None:
        """Loaders behind all others."""
        self._host_of = np.concatenate([self._host_of, np.fromiter(hosts, np.int64)])

    def move(self, loader: int, host: int) -> None:
        assert loader not in self._held_by, "held payload does not move with a loader: forget it first"
        self._host_of[loader] = host

    def forget(self, loaders: Iterable[int]) -> None:
        self._held_by = self._held_by[~np.isin(self._held_by, list(loaders))]

    def host(self, loader: int) -> int:
        return int(self._host_of[loader])

    def cut(self, stage: Stage, after: Sealed, served: np.ndarray) -> Cuts:
        """``served[b]``: somebody waits for bucket b; documents of the others go nowhere."""
        by = np.concatenate([self._held_by, np.repeat(np.arange(len(stage.pops)), stage.pops)])
        host = self._host_of[by]
        number = _numbers(host)
        if stage.kept is not None:
            self._held_by = by[stage.kept]
        main = stage.plan.main
        goes_to = np.where(served & (not stage.skipped), self._constructor_of, -1)
        to = np.full(len(stage.plan), -1)
        to[main.sample] = goes_to[main.bucket]
        sends: dict[int, dict[int, np.ndarray]] = {}  # loader host -> constructor host -> rows of the plan, in the order they are sent
        placed: dict[int, Placed] = {}
        # Whoever serves anyone hears of the step: buckets without a document in it get empty microbatches.
        for c in np.unique(goes_to[goes_to >= 0]).tolist():
            rows = np.flatnonzero(to == c)
            order = np.lexsort((stage.doc[rows], host[stage.doc[rows]]))
            doc = np.empty(len(rows), np.int64)
            doc[order] = np.arange(len(rows))
            origin = host[stage.doc[rows[order]]]
            origins = np.unique(origin).tolist()
            for h in origins:
                sends.setdefault(h, {})[c] = rows[order[origin == h]]
            placed[c] = Placed(self._stage_for(stage, rows, doc, goes_to == c, after), tuple(origins))
        return Cuts(self._parts(stage, host, number, sends), placed)

    def _stage_for(self, stage: Stage, rows: np.ndarray, doc: np.ndarray, buckets: np.ndarray, after: Sealed) -> Stage:
        nothing = np.zeros(0, np.int64)
        if self._whole:  # a hook of the user sees the whole plan, whoever runs it
            wide = np.full(len(stage.plan), -1, np.int64)
            wide[rows] = doc
            return replace(stage, pops=nothing, doc=wide, after=after, kept=None, loader=None)
        plan = stage.plan if len(rows) == len(stage.plan) else cut_plan(stage.plan, rows, buckets[stage.plan.main.bucket])
        return replace(
            stage, plan=replace(plan, modules={"backbone": plan.main}), pops=nothing, doc=doc, after=after, kept=None, loader=None
        )

    def _parts(self, stage: Stage, host: np.ndarray, number: np.ndarray, sends: dict[int, dict[int, np.ndarray]]) -> dict[int, Part]:
        popped = np.flatnonzero(stage.pops)
        hosts = {*np.unique(self._host_of[popped]).tolist(), *sends}
        if stage.kept is not None:  # who holds payload must hear what stays
            hosts |= set(np.unique(host).tolist())
        kept_by = None if stage.kept is None else host[stage.kept]
        parts = {}
        for h in sorted(hosts):
            mine = popped[self._host_of[popped] == h]
            to = sends.get(h, {})
            kept = None if stage.kept is None or kept_by is None else number[stage.kept[kept_by == h]]
            all_of_it = stage.kept is None and not self._hooks and len(to) == 1 and len(next(iter(to.values()))) == int((host == h).sum())
            part = Part(stage.plan.step, mine, stage.pops[mine], tuple(to), kept=kept)
            if self._hooks and to:
                part = self._hooked(part, stage, host, number, h, to)
            elif not all_of_it:
                part = replace(part, take=tuple(number[stage.doc[rows]] for rows in to.values()))
            parts[h] = part
        return parts

    def _hooked(self, part: Part, stage: Stage, host: np.ndarray, number: np.ndarray, h: int, to: dict[int, np.ndarray]) -> Part:
        """A loader hook is shown all that a step takes from a source, in the order of the draw."""
        rows = np.flatnonzero(host[stage.doc] == h)
        where = np.full(len(stage.plan), -1, np.int64)
        where[rows] = np.arange(len(rows))
        plan = replace(cut_plan(stage.plan, rows, np.zeros(0, bool)), modules={})
        return replace(part, plan=plan, doc=number[stage.doc[rows]], take=tuple(where[sent] for sent in to.values()))


def spread(cuts: Cuts, ranks: Sequence[Sequence[int]]) -> Cuts:
    """Without constructors every rank is one: what constructor b was to get, each of ``ranks[b]`` gets."""

    def to_ranks(part: Part) -> Part:
        take = tuple(rows for b, rows in zip(part.to, part.take, strict=True) for _ in ranks[b]) if part.take else ()
        return replace(part, to=tuple(rank for b in part.to for rank in ranks[b]), take=take)

    placed = {rank: p for b, p in cuts.placed.items() for rank in ranks[b]}
    return Cuts({h: to_ranks(part) for h, part in cuts.parts.items()}, placed)


def cut_plan(plan: LoadingPlan, rows: np.ndarray, items: np.ndarray) -> LoadingPlan:
    """These samples of a plan, and of its backbone the items that ``items`` marks, which must be of them."""
    columns = {name: getattr(plan, name)[rows] for name in ("source", "epoch", "file", "row", "part", "tokens")}
    substep = None if plan.substep is None else plan.substep[rows]
    if not len(items):
        return replace(plan, substep=substep, **columns)
    where = np.full(len(plan), -1, np.int64)
    where[rows] = np.arange(len(rows))
    return replace(plan, substep=substep, modules={"backbone": _items(plan.main, items, where)}, **columns)


def _items(main: Assignment, items: np.ndarray, where: np.ndarray) -> Assignment:
    names = ("bucket", "microbatch", "slot", "size", "cost", "memory", "out", "offset")
    columns: dict[str, Any] = {name: None if (column := getattr(main, name)) is None else column[items] for name in names}
    return replace(main, sample=where[main.sample[items]], **columns)


def _numbers(host: np.ndarray) -> np.ndarray:
    """The number of each document within its host, in the documents' order."""
    order = np.argsort(host, kind="stable")
    starts = np.searchsorted(host[order], host[order], side="left")
    number = np.empty(len(host), np.int64)
    number[order] = np.arange(len(host)) - starts
    return number
