"""Cutting steps for the processes that carry them out: what loader workers send by their shares,
and constructors look up by theirs, is to the document what one process would have done.

The workers here are plain lists. Documents are numbers, each popped once, so wherever one turns up
is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from overlord.cluster.placement import Placement
from overlord.cluster.plan_router import PlanRouter, RoutedPlan
from overlord.messages.control import ConstructorPlan, EncodedState, LoaderPlan, PlannedStep
from overlord.plan.plan import Assignment, LoadingPlan
from tests.laws import examples

AFTER = EncodedState(1, np.zeros(3, np.uint8))
ITEM_COLUMNS = ("size", "cost", "memory", "out", "offset")


@dataclass
class Scene:
    """Loaders with documents before them, the workers they are on, and what a planner would know of
    it all.
    """

    rng: Random
    look_ahead: bool
    hooks: bool
    whole: bool
    sources: list[list[int]] = field(default_factory=list)  # loaders of each source
    queue: list[list[int]] = field(default_factory=list)  # by loader: documents it will give
    host_of: list[int] = field(default_factory=list)
    n_hosts: int = 1
    constructor_of: list[int] = field(default_factory=list)
    held: list[tuple[int, int]] = field(
        default_factory=list
    )  # (document, loader), as the planner counts them
    kept_at: dict[int, list[tuple[int, int]]] = field(
        default_factory=dict
    )  # by loader worker: the same, as the worker counts
    sent: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # planned, and for nobody
    n_documents: int = 0

    def __post_init__(self) -> None:
        rng = self.rng
        self.n_hosts = rng.randint(1, 4)
        for _ in range(rng.randint(1, 4)):
            self.add_source()
        n_constructors = rng.randint(1, 3)
        self.constructor_of = [rng.randrange(n_constructors) for _ in range(rng.randint(1, 5))]
        loaders = [len(mine) for mine in self.sources]
        self.placement = Placement(loaders, self.host_of, self.constructor_of)
        self.cutter = PlanRouter(self.placement, whole_plans=self.whole, loader_hooks=self.hooks)

    def add_source(self) -> list[int]:
        loaders = [len(self.queue) + k for k in range(self.rng.choice((1, 1, 2, 3)))]
        together = self.rng.randrange(self.n_hosts)
        for _ in loaders:
            self.queue.append([self.n_documents + k for k in range(self.rng.randint(0, 30))])
            self.n_documents += len(self.queue[-1])
            self.host_of.append(together if self.hooks else self.rng.randrange(self.n_hosts))
        self.sources.append(loaders)
        return loaders

    def join(self) -> None:
        """A source that joins, on a worker of its own."""
        self.n_hosts += 1
        loaders = self.add_source()
        for loader in loaders:
            self.host_of[loader] = self.n_hosts - 1
        self.placement.add_source(len(loaders), self.n_hosts - 1)

    def read_anew(self, move: bool) -> None:
        """Held payload of a source is forgotten, and read again; its loaders may move."""
        loaders = self.rng.choice(self.sources)
        back = [(d, loader) for d, loader in self.held if loader in loaders]
        if back or self.rng.random() < 0.5:
            self.cutter.forget(loaders)
            self.held = [x for x in self.held if x not in back]
            for h, kept in self.kept_at.items():
                self.kept_at[h] = [x for x in kept if x not in back]
        for d, loader in reversed(back):
            self.queue[loader].insert(0, d)
        together = self.rng.randrange(self.n_hosts)
        for loader in loaders if move else ():
            self.host_of[loader] = together if self.hooks else self.rng.randrange(self.n_hosts)
            self.placement.move(loader, self.host_of[loader])

    # a step, as a planner would make it

    def stage(self, step: int) -> tuple[PlannedStep, list[tuple[int, int]], list[tuple[int, int]]]:
        """With the documents of its rows, and those that stay held."""
        rng = self.rng
        pops = [rng.choice((0, rng.randint(0, min(9, len(q))))) for q in self.queue]
        everything = self.held + [
            (d, loader) for loader, q in enumerate(self.queue) for d in q[: pops[loader]]
        ]
        drawn = list(range(len(everything)))
        rng.shuffle(drawn)
        kept = None
        if self.look_ahead:
            cut = rng.randint(0, len(drawn))
            drawn, left = drawn[:cut], drawn[cut:]
            kept = np.array(sorted(left) if rng.random() < 0.5 else left, np.int64)
        rows = [everything[k] for k in drawn]
        plan = self.plan(step, rows)
        stage = PlannedStep(
            plan,
            np.array(pops, np.int64),
            np.array(drawn, np.int64),
            "digest",
            None,
            rng.random() < 0.15,
            kept,  # type: ignore[arg-type]
            np.array([loader for _, loader in rows], np.int32),
            17,
        )
        return stage, rows, [] if kept is None else [everything[k] for k in kept.tolist()]

    def plan(self, step: int, rows: list[tuple[int, int]]) -> LoadingPlan:
        rng, n = self.rng, len(rows)
        source_of = {loader: i for i, loaders in enumerate(self.sources) for loader in loaders}
        sample = list(range(n))
        rng.shuffle(sample)  # items stand in any order
        bins = [
            (rng.choice((0, rng.randrange(len(self.constructor_of)))), rng.randrange(2))
            for _ in sample
        ]
        slots: dict[tuple[int, int], int] = {}
        slot = [slots.setdefault(b, 0) for b in bins]
        for i, b in enumerate(bins):
            slot[i], slots[b] = slots[b], slots[b] + 1
        documents = np.array([d for d, _ in rows], np.int64)
        values = documents[sample] if n else documents
        optional = rng.random() < 0.5
        main = Assignment(
            axis="DP",
            n_buckets=len(self.constructor_of),
            n_microbatches=2,
            sample=np.array(sample, np.int64),
            bucket=np.array([b for b, _ in bins], np.int32),
            microbatch=np.array([m for _, m in bins], np.int32),
            slot=np.array(slot, np.int32),
            size=values + 1,
            cost=values * 0.5,
            memory=values * 2.0 if optional else None,
            out=values + 3 if optional else None,
            offset=values + 4 if optional else None,
        )
        column = lambda more: (documents + more).astype(np.int32)  # noqa: E731
        return LoadingPlan(
            step=step,
            names=tuple(f"s{i}" for i in range(len(self.sources))),
            source=np.array([source_of[loader] for _, loader in rows], np.int32),
            epoch=column(1),
            file=column(2),
            row=documents,
            part=column(3),
            tokens=documents + 5,
            modules={"backbone": main},
            substep=column(4) if rng.random() < 0.5 else None,
        )

    # what the workers do with their shares

    def carry_out(self, part: LoaderPlan, h: int) -> dict[int, list[int]]:
        """A loader worker: documents by constructor worker."""
        loaders = part.loaders.tolist()
        assert loaders == sorted(set(loaders))
        assert all(self.host_of[loader] == h for loader in loaders)
        mine = list(self.kept_at.get(h, []))
        for loader, n in zip(loaders, part.pops.tolist(), strict=True):
            mine += [(d, loader) for d in self.queue[loader][:n]]
        assert (part.kept is not None) == self.look_ahead
        if part.kept is not None:
            self.kept_at[h] = [mine[k] for k in part.kept.tolist()]
        documents = [d for d, _ in mine]
        if part.plan is not None:
            assert self.hooks
            assert part.doc is not None
            shown = [documents[k] for k in part.doc.tolist()]
            assert shown == part.plan.row.tolist(), "a hook is shown the samples that it is told"
            return {
                c: [shown[k] for k in take.tolist()]
                for c, take in zip(part.to, part.take, strict=True)
            }
        if not part.take and part.to:
            [c] = part.to
            return {c: documents}
        assert all((np.diff(take) > 0).all() for take in part.take), (
            "documents leave in the order in which they lie"
        )
        return {
            c: [documents[k] for k in take.tolist()]
            for c, take in zip(part.to, part.take, strict=True)
        }


def wanted(stage: PlannedStep, rows: list[tuple[int, int]], bucket: int) -> list[list[int]]:
    """The documents of a bucket by microbatch, in the order of their slots."""
    main = stage.plan.main
    items = sorted(
        (int(main.microbatch[i]), int(main.slot[i]), rows[int(main.sample[i])][0])
        for i in range(len(main.sample))
        if main.bucket[i] == bucket
    )
    return [
        [d for m, _, d in items if m == microbatch] for microbatch in range(main.n_microbatches)
    ]


def built(placed: ConstructorPlan, payload: list[int], bucket: int) -> list[list[int]]:
    """The same as a constructor finds it: by the plan it was given, in the payload that came."""
    plan, doc, main = placed.stage.plan, placed.stage.doc, placed.stage.plan.main
    found: list[list[int]] = [[] for _ in range(main.n_microbatches)]
    for i in main.order().tolist():
        if main.bucket[i] == bucket:
            row = int(main.sample[i])
            d = payload[int(doc[row])]
            told = (
                plan.epoch[row] - 1,
                plan.file[row] - 2,
                plan.row[row],
                plan.part[row] - 3,
                plan.tokens[row] - 5,
            )
            assert {int(x) for x in told} == {d}, "the ids beside a document are its own"
            assert plan.substep is None or plan.substep[row] == d + 4
            columns = [getattr(main, name) for name in ITEM_COLUMNS]
            assert [c[i] for c in columns if c is not None] in (
                [d + 1, d * 0.5, d * 2.0, d + 3, d + 4],
                [d + 1, d * 0.5],
            )
            found[int(main.microbatch[i])].append(d)
    return found


def check_step(scene: Scene, step: int, served: list[bool]) -> None:
    stage, rows, kept = scene.stage(step)
    cuts = scene.cutter.route(stage, AFTER, np.array(served))
    sent = {h: scene.carry_out(part, h) for h, part in cuts.loader_plans.items()}
    check_hooks(scene, stage, rows, cuts)
    for c, placed in cuts.constructor_plans.items():
        assert not stage.skipped
        assert placed.stage.after is AFTER
        assert placed.stage.valid_tokens == 17
        senders = [h for h in sorted(sent) if c in sent[h]]
        assert list(placed.origins) == senders, (
            "a constructor waits for those who send to it, and for no one else"
        )
        payload = [d for h in placed.origins for d in sent[h][c]]
        mine = [b for b, where in enumerate(scene.constructor_of) if where == c and served[b]]
        assert mine, "a constructor host that serves nobody has nothing to do"
        assert sorted(payload) == sorted(
            d for b in mine for documents in wanted(stage, rows, b) for d in documents
        )
        for b in mine:
            assert built(placed, payload, b) == wanted(stage, rows, b)
    needed = {c for b, c in enumerate(scene.constructor_of) if served[b] and not stage.skipped}
    assert set(cuts.constructor_plans) == needed, (
        "who serves anyone hears of every step, though it has no document in it"
    )
    settle(
        scene,
        stage,
        rows,
        kept,
        [d for by in sent.values() for documents in by.values() for d in documents],
    )


def check_hooks(
    scene: Scene, stage: PlannedStep, rows: list[tuple[int, int]], cuts: RoutedPlan
) -> None:
    """A loader hook sees all rows of a source, in the plan's order."""
    for h, part in cuts.loader_plans.items():
        if part.plan is not None:
            assert part.plan.row.tolist() == [d for d, loader in rows if scene.host_of[loader] == h]
            assert part.plan.source.tolist() == [
                s
                for s, (_, loader) in zip(stage.plan.source, rows, strict=True)
                if scene.host_of[loader] == h
            ]
        else:
            assert not scene.hooks or not part.to


def settle(
    scene: Scene,
    stage: PlannedStep,
    rows: list[tuple[int, int]],
    kept: list[tuple[int, int]],
    sent: list[int],
) -> None:
    """Popped documents are sent once, or kept, or were for nobody; nothing else happened to any."""
    for loader, n in enumerate(stage.pops.tolist()):
        del scene.queue[loader][:n]
    assert len(set(sent)) == len(sent)
    assert not set(sent) & scene.sent, "a document is sent once, ever"
    scene.sent |= set(sent)
    scene.gone |= {d for d, _ in rows} - set(sent)
    scene.held = kept
    by_host = {h: [x for x in kept if scene.host_of[x[1]] == h] for h in range(scene.n_hosts)}
    assert {h: scene.kept_at.get(h, []) for h in by_host} == by_host, (
        "what is held lies where its loader is, in the planner's order"
    )
    waiting = {d for q in scene.queue for d in q} | {d for d, _ in kept}
    places: list[set[int]] = [scene.sent, scene.gone, waiting]
    assert sum(map(len, places)) == scene.n_documents == len(set().union(*places)), (
        "nothing is lost, nothing is twice"
    )


@given(
    rng=st.randoms(use_true_random=False),
    look_ahead=st.booleans(),
    hooks=st.booleans(),
    whole=st.booleans(),
    absent=st.sampled_from((0.0, 0.3, 1.0)),
)
@examples(300)
def test_workers_do_with_their_shares_what_one_process_does_with_the_whole(
    rng: Random, look_ahead: bool, hooks: bool, whole: bool, absent: float
) -> None:
    scene = Scene(rng, look_ahead, hooks, whole)
    event(f"{scene.n_hosts} loader hosts, {len(set(scene.constructor_of))} constructor hosts")
    for step in range(rng.randint(1, 6)):
        if rng.random() < 0.3:
            scene.read_anew(move=rng.random() < 0.7)
        if rng.random() < 0.1:
            scene.join()
        check_step(scene, step, [rng.random() >= absent for _ in scene.constructor_of])


def placed_on(*, host_of: list[int], constructor_of: list[int]) -> Placement:
    return Placement([1] * len(host_of), host_of, constructor_of)


def cutter_for(*, host_of: list[int], constructor_of: list[int]) -> PlanRouter:
    return PlanRouter(placed_on(host_of=host_of, constructor_of=constructor_of))


def stage_of(bucket: list[int], pops: list[int], n_buckets: int, **more: Any) -> PlannedStep:
    n = len(bucket)
    zeros = np.zeros(n, np.int32)
    main = Assignment(
        axis="DP",
        n_buckets=n_buckets,
        n_microbatches=1,
        sample=np.arange(n),
        bucket=np.array(bucket, np.int32),
        microbatch=zeros,
        slot=np.array([bucket[:i].count(b) for i, b in enumerate(bucket)], np.int32),
        size=np.ones(n, np.int64),
        cost=np.ones(n),
    )
    plan = LoadingPlan(
        step=0,
        names=("a",),
        source=zeros,
        epoch=zeros,
        file=zeros,
        row=np.arange(n),
        part=zeros,
        tokens=np.ones(n, np.int64),
        modules={"backbone": main},
    )
    return PlannedStep(plan, np.array(pops), np.arange(n), "", AFTER, **more)


def test_a_worker_all_of_whose_documents_go_to_one_constructor_is_told_no_numbers() -> None:
    cuts = cutter_for(host_of=[0, 1], constructor_of=[0, 0]).route(
        stage_of([0, 1, 0, 1], [2, 2], 2), AFTER, np.array([True, True])
    )
    assert [(p.to, p.take) for p in cuts.loader_plans.values()] == [((0,), ()), ((0,), ())]


def test_a_step_with_fewer_documents_than_buckets_reaches_every_constructor_worker() -> None:
    cuts = cutter_for(host_of=[0], constructor_of=[0, 1]).route(
        stage_of([0], [1], 2), AFTER, np.array([True, True])
    )
    assert set(cuts.constructor_plans) == {0, 1}
    assert cuts.constructor_plans[1].origins == ()
    assert len(cuts.constructor_plans[1].stage.plan) == 0


def test_a_loader_does_not_move_while_payload_of_it_is_held() -> None:
    placement = placed_on(host_of=[0, 0], constructor_of=[0])
    cutter, served = PlanRouter(placement), np.array([True])
    cutter.route(stage_of([0], [1, 1], 1, kept=np.array([1])), AFTER, served)
    placement.move(0, 1)
    cutter.route(stage_of([0], [1, 0], 1, kept=np.array([0])), AFTER, served)
    placement.move(1, 1)
    with pytest.raises(AssertionError, match="drop the samples first"):
        cutter.route(stage_of([0], [1, 0], 1), AFTER, served)
    cutter.forget([1])
    cutter.route(stage_of([0], [1, 0], 1), AFTER, served)


def test_what_a_loader_pops_is_popped_where_it_is_followed_and_sent_from_its_own_worker_alone() -> (
    None
):
    placement = placed_on(host_of=[0, 1, 1], constructor_of=[0, 1])
    placement.follow({0: 1, 2: 2})
    cutter = PlanRouter(placement)
    stage = stage_of([0, 1, 0, 1, 0], [2, 0, 3], 2)
    plain = cutter_for(host_of=[0, 1, 1], constructor_of=[0, 1]).route(
        stage, AFTER, np.array([True, True])
    )
    cuts = cutter.route(stage, AFTER, np.array([True, True]), acked=7)
    assert {
        h: (p.loaders.tolist(), p.pops.tolist(), p.to) for h, p in cuts.loader_plans.items()
    } == {0: ([0], [2], (0, 1)), 1: ([0, 2], [2, 3], (0, 1)), 2: ([2], [3], ())}
    assert {p.acked for p in cuts.loader_plans.values()} == {7}
    for h, part in plain.loader_plans.items():
        assert all(
            np.array_equal(a, b) for a, b in zip(part.take, cuts.loader_plans[h].take, strict=True)
        ), "numbers are of its own documents"


def test_parts_and_plans_carry_the_generation_and_after_a_rollback_nothing_is_held() -> None:
    cutter = cutter_for(host_of=[0], constructor_of=[0])
    cutter.route(stage_of([0, 0], [3], 1, kept=np.array([2])), AFTER, np.array([True]))
    cutter.rollback(5)
    cuts = cutter.route(
        stage_of([0, 0], [2], 1, kept=np.zeros(0, np.int64)), AFTER, np.array([True])
    )
    assert (cuts.loader_plans[0].generation, cuts.constructor_plans[0].generation) == (5, 5)
    assert cuts.loader_plans[0].take[0].tolist() == [0, 1], "numbered from the start"
