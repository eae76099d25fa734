"""Images of documents that ranks share, by slices of context parallelism or on rings.

For any mesh, documents, images and groups, each rank gets exactly the rows of its placeholders, and
its labels, as a second implementation finds them from the whole documents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import overlord as ov
from overlord.constructor.build import StepDocuments, build_with_images
from overlord.constructor.images import PixelForm
from overlord.content import Scattered
from overlord.errors import PlanError
from overlord.messages.control import EncodedState, PlannedStep
from overlord.messages.data import StepInfo
from overlord.planning.images import Encodings, check_images
from overlord.planning.step import valid_tokens
from overlord.planning.strategies import hdp, vlm
from overlord.sample import Ragged
from overlord.token_parts import token_parts
from overlord.transforms.image_items import READY, Prefix
from tests.laws import examples
from tests.reference_images import labels_of, places_on_ring, places_on_slice, tokens_of

PLACEHOLDER = 7
FORM = PixelForm(3, "uint8")
IGNORE = -100
AFTER = EncodedState(1, np.zeros(3, np.uint8))
degree = st.sampled_from([1, 1, 2])


class World(NamedTuple):
    """A planned step with its documents and images; some images have too few bytes."""

    plan: ov.LoadingPlan
    batch: ov.Batch
    documents: list[list[int]]
    images: list[list[tuple[int, int]]]  # of each sample: rows, and more patches than rows
    broken: set[tuple[int, int]]  # sample and number
    broadcast: bool


@st.composite
def texts(draw: st.DrawFn, longest: int) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Documents of words and runs of placeholders, with the images of each."""
    documents, images = [], []
    for i in range(draw(st.integers(1, 9))):
        tokens: list[int] = []
        held = []
        for kind, n, more in draw(
            st.lists(
                st.tuples(st.booleans(), st.integers(0, 11), st.integers(0, 2)),
                min_size=1,
                max_size=6,
            )
        ):
            rows = min(n, longest - len(tokens))
            if kind:
                held.append((len(tokens), rows, more))
                tokens += [PLACEHOLDER] * rows
            else:
                tokens += [1000 + 100 * i + k for k in range(rows)]
        tokens = tokens or [1000 + 100 * i]
        documents.append(tokens)
        images.append(held)
    return documents, images  # type: ignore[return-value]


def buffer_of(documents: Any, images: Any, batch: ov.Batch, sync: str = "microbatch") -> ov.Buffer:
    columns = {
        "tokens": [len(d) for d in documents],
        "image_patches": Ragged.from_rows(
            [[r + m or 1 for _, r, m in i] for i in images], np.int64
        ),
        "image_tokens": Ragged.from_rows([[r for _, r, _ in i] for i in images], np.int64),
        "image_offset": Ragged.from_rows([[o for o, _, _ in i] for i in images], np.int64),
    }
    made = ov.Buffer.from_columns({"s": columns}, batch=batch)
    return replace(made, drawn=True, sync=sync)


def world(draw: Any, plan: ov.LoadingPlan, batch: ov.Batch, documents: Any, images: Any) -> World:
    every = [(i, j) for i, held in enumerate(images) for j in range(len(held))]
    broken = set(draw(st.lists(st.sampled_from(every), max_size=2))) if every else set()
    found = [[(r, r + m or 1) for _, r, m in held] for held in images]
    return World(plan, batch, documents, found, broken, draw(st.booleans()))


@st.composite
def sliced_worlds(draw: st.DrawFn) -> World:
    place = ov.Mesh(
        pp=draw(degree),
        dp=draw(st.integers(1, 3)),
        cp=draw(st.integers(1, 3)),
        tp=draw(degree),
        order=tuple(draw(st.permutations(["pp", "dp", "cp", "tp"]))),
    )
    batch = ov.Batch(
        samples=9,
        context=48,
        microbatches=draw(st.integers(1, 2)),
        layout=draw(st.sampled_from(["packed", "padded"])),
        labels=draw(st.sampled_from(["shifted", "unshifted"])),
        cp_split=draw(st.sampled_from(["zigzag", "zigzag_whole", "contiguous", "none"])),
        pad_multiple=draw(st.sampled_from([1, 2])),
        pad_id=5,
    )
    documents, images = draw(texts(30))
    buffer = buffer_of(documents, images, batch)
    strategy = draw(
        st.sampled_from(
            [
                *map(ov.strategy.resolve, ("vanilla", "encoder_balance")),
                vlm(),
                vlm(per="microbatch", joint=False),
                broadcast_along_cp,
            ]
        )
    )
    plan = strategy(buffer, place)
    check_images(plan, buffer)
    return world(draw, plan, batch, documents, images)


def broadcast_along_cp(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
    drawn = ov.DGraph.from_buffer(buffer, place).mix()
    samples = drawn.select("tokens").distribute("DP").balance("greedy").broadcast_at("CP", "TP")
    return samples.plan(encoder=drawn.select("image_patches").distribute("DP").balance("greedy"))


def follow_rings(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
    """Images of a microbatch are encoded before it; all ranks have as many microbatches."""
    drawn = ov.DGraph.from_buffer(buffer, place).mix()
    samples = drawn.select("tokens").distribute("CP").split()
    images = drawn.select("image_patches").distribute("WORLD")
    return samples.plan(encoder=images.follow(samples, "greedy"))


def with_gaps(plan: ov.LoadingPlan) -> ov.LoadingPlan:
    """Return the plan with every other index: without stages a rank may leave indices out."""
    assert plan.tasks is not None
    main, tasks = plan.main, plan.tasks
    table = replace(tasks.table, index=2 * tasks.table.index)
    n = 2 * main.n_microbatches - 1
    sparse = replace(main, microbatch=2 * main.microbatch, n_microbatches=n)
    modules = {**plan.modules, "backbone": sparse}
    return replace(plan, tasks=replace(tasks, table=table), modules=modules).validate()


@st.composite
def ring_worlds(draw: st.DrawFn) -> World:
    place = ov.Mesh(
        pp=draw(degree), dp=draw(st.integers(1, 4)), cp=draw(st.integers(1, 2)), tp=draw(degree)
    )
    multiple = draw(st.sampled_from([0, 0, 1, 3]))
    batch = ov.Batch(
        samples=9,
        context=12,
        labels=draw(st.sampled_from(["shifted", "unshifted"])),
        pad_multiple=max(1, multiple),
        pad_id=5,
    )
    documents, images = draw(texts(min(60, 12 * place.dp * place.cp)))
    buffer = buffer_of(documents, images, batch, draw(st.sampled_from(["microbatch", "step"])))
    groups = draw(st.sampled_from(["any", "power_of_two"]))
    ring = hdp(ov.cost.LengthCost(1.0, 0.01), groups=groups, padded=multiple > 0)
    strategy = draw(st.sampled_from([ring, follow_rings]) if multiple != 3 else st.just(ring))
    plan = strategy(buffer, place)
    free = place.pp == 1 and not plan.tasks.rules.equal_counts
    if strategy is ring and free and draw(st.booleans()):
        plan = with_gaps(plan)
    check_images(plan, buffer)
    event(f"rings of up to {int(plan.tasks.table.sizes().max())}, {plan.routes().per}")
    return world(draw, plan, batch, documents, images)


def item_bytes(w: World, sample: int, number: int) -> np.ndarray:
    """Return an image with ready pixels that name it, a byte short if it is broken."""
    patches = w.images[sample][number][1]
    prefix = Prefix(
        form=READY,
        patch=1,
        merge=1,
        dtype="uint8",
        grid=(1, 1, patches),
        box=(0, 0, 1, 1),
        size=(1, 1),
    )
    whole = np.frombuffer(prefix.pack() + bytes([sample, number, 1] * patches), np.uint8)
    return whole[:-1] if (sample, number) in w.broken else whole


def built(w: World, groups: list[int]) -> dict[int, tuple[list[Any], list[Any], str]]:
    """Build the data of all ranks of some data-parallel groups, as one constructor does."""
    plan, place = w.plan, w.plan.tree
    ranks = {g: place.buckets("DP")[g] for g in groups}
    members = [r for g in groups for r in ranks[g]]
    made = Encodings(plan, w.batch, w.broadcast)
    items = made.encoded_by(members)
    encoding = made.of(members, np.arange(len(items)))
    bytes_ = [
        item_bytes(w, int(made.sample[i]), int(made.routes.number[i])) for i in items.tolist()
    ]
    stage = PlannedStep(
        plan, np.zeros(0, np.int64), np.arange(len(plan)), "", AFTER, encoding=encoding
    )
    staged = StepDocuments(
        stage,
        Ragged.from_rows(w.documents, np.int32),
        Scattered([Ragged.from_rows(bytes_, np.uint8)], np.zeros(0, np.int64)),
    )
    info = StepInfo.of(stage) if w.broadcast else StepInfo.of(stage).without_broadcast()
    multiple = w.batch.document_multiple(place)
    found, _ = build_with_images(staged, info, ranks, members, FORM, w.batch, multiple)
    by_rank = {}
    for g, batch in zip(groups, found, strict=True):
        for rank in ranks[g]:
            mine = batch.for_rank(rank)
            assert mine.encoder is not None
            exchanges = mine.encoder.cut(0, mine.encoder.n)
            by_rank[rank] = (list(mine.microbatches), exchanges, mine.per)
    return by_rank


def exchanged(w: World, by_rank: dict[int, Any], slot: int) -> list[list[tuple[int, int, int]]]:
    """Return the rows that each rank receives: sample, number of the image, row of the image."""
    sent = []
    for rank in range(w.plan.tree.world_size):
        e = by_rank[rank][1][slot]
        rows = []
        for i, n in enumerate(e["send_lens"].tolist()):
            pixels = e["pixel_values"][e["image_cu_seqlens"][i] : e["image_cu_seqlens"][i + 1]]
            a = w.plan.module("encoder")
            item = int(e["item_ids"][i])
            sample = int(a.sample[item])
            number = int((a.sample[:item] == sample).sum())
            name = [0, 0, 0] if (sample, number) in w.broken else [sample, number, 1]
            assert pixels.tolist() == [name] * w.images[sample][number][1]
            rows += [(sample, number, k) for k in range(n)]
        rows = [rows[k] for k in e["send_rows"].tolist()]
        assert sum(e["send_splits"].tolist()) == len(rows)
        ends = np.cumsum(e["send_splits"]).tolist()
        sent.append([rows[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)])
    received = [[row for parts in sent for row in parts[r]] for r in range(len(sent))]
    for rank, rows in enumerate(received):
        splits = by_rank[rank][1][slot]["recv_splits"].tolist()
        assert splits == [len(parts[rank]) for parts in sent]
        assert len(rows) == len(by_rank[rank][1][slot]["recv_rows"])
    return received


def rows_of(w: World) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return the row of an image at every placeholder, from the whole documents."""
    found = {}
    for s, (tokens, held) in enumerate(zip(w.documents, w.images, strict=True)):
        places = [k for k, token in enumerate(tokens) if token == PLACEHOLDER]
        names = [(s, j, k) for j, (rows, _) in enumerate(held) for k in range(rows)]
        found |= {(s, place): name for place, name in zip(places, names, strict=True)}
    return found


def excluded_samples(w: World) -> set[int]:
    """Return samples with a broken image that the one bucket encodes that trains on them."""
    encoder, main, place = w.plan.module("encoder"), w.plan.main, w.plan.tree
    found = set()
    for sample, number in w.broken:
        item = int(np.flatnonzero(encoder.sample == sample)[number])
        rank = place.buckets(encoder.axis)[int(encoder.bucket[item])][0]
        bucket = int(main.bucket[main.sample == sample][0])
        tasks = w.plan.tasks
        alone = tasks is None or int(tasks.table.sizes()[tasks.task[sample]]) == 1
        if alone and rank in place.buckets(main.axis)[bucket]:
            found.add(sample)
    return found


def check(w: World, split: list[list[int]]) -> None:
    place, plan, batch = w.plan.tree, w.plan, w.batch
    by_rank: dict[int, Any] = {}
    for groups in split:
        by_rank |= built(w, groups)
    lengths = [len(d) for d in w.documents]
    wanted, excluded = rows_of(w), excluded_samples(w)
    got: dict[int, dict[tuple[int, int], Any]] = {r: {} for r in by_rank}
    for slot in range(plan.module("encoder").n_microbatches):
        for rank, rows in enumerate(exchanged(w, by_rank, slot)):
            e = by_rank[rank][1][slot]
            of = np.repeat(e["image_microbatch"], e["out_lens"]).tolist()
            for m, i, k in zip(
                of, e["image_token_index"].tolist(), e["recv_rows"].tolist(), strict=True
            ):
                assert (m, i) not in got[rank]
                assert by_rank[rank][2] == "iteration" or m == slot
                got[rank][m, i] = rows[k]
    counted, placed = 0, 0
    slices = place.cp > 1 and batch.cp_split != "none" and plan.main.axis == "DP"
    slices = slices and not (w.broadcast and "CP" in plan.main.broadcast)
    for bucket, ranks in enumerate(place.buckets(plan.main.axis)):
        for rank in ranks:
            at = place.coords(rank)
            cp, r = (place.cp, at["cp"]) if slices else (1, 0)
            multiple = batch.document_multiple(place)
            places = (
                places_on_ring(plan, lengths, bucket)
                if plan.tasks is not None
                else places_on_slice(plan, lengths, bucket, batch, cp, r, multiple)
            )
            microbatches = by_rank[rank][0]
            assert len(microbatches) == len(places)
            owner = at["pp"] == at["tp"] == 0 and (slices or plan.tasks is not None or not at["cp"])
            for m, (mb, here) in enumerate(zip(microbatches, places, strict=True)):
                if "tokens" in mb:
                    told = tokens_of(here, w.documents, batch.pad_id)
                    assert mb["tokens"].reshape(-1).tolist() == told
                if "labels" in mb:
                    labels = labels_of(
                        here, w.documents, batch.labels, PLACEHOLDER.__eq__, excluded
                    )
                    assert mb["labels"].reshape(-1).tolist() == labels
                    held = [float(x != IGNORE) for x in labels]
                    assert mb["loss_mask"].reshape(-1).tolist() == held
                    first = at["tp"] == 0 and (slices or plan.tasks is not None or not at["cp"])
                    counted += int(sum(held)) if first else 0
                mine = {
                    (m, i): wanted[p] for i, p in enumerate(here) if p is not None and p in wanted
                }
                held_rows = {key: row for key, row in got[rank].items() if key[0] == m}
                assert held_rows == (mine if owner else {})
                placed += len(held_rows)
    assert placed == len(wanted), "every placeholder has its row on one rank"
    if not excluded:
        assert counted == valid_tokens(plan, None, images=True)


def constructors(draw: Any, dp: int) -> list[list[int]]:
    """Return the data-parallel groups of one constructor, or of two."""
    cut = draw(st.integers(0, dp - 1))
    return [g for g in (list(range(cut)), list(range(cut, dp))) if g]


@examples(120)
@given(sliced_worlds(), st.data())
def test_each_slice_gets_the_rows_and_labels_of_its_own_tokens(w: World, data: Any) -> None:
    check(w, constructors(data.draw, w.plan.tree.dp))


@examples(120)
@given(ring_worlds(), st.data())
def test_each_rank_of_a_ring_gets_the_rows_and_labels_of_its_own_pieces(
    w: World, data: Any
) -> None:
    check(w, constructors(data.draw, w.plan.tree.dp))


@given(st.integers(1, 40), st.integers(0, 45), st.integers(0, 30), st.integers(1, 9), st.booleans())
def test_parts_of_a_range_are_those_of_a_walk_over_all_tokens(
    length: int, start: int, count: int, d: int, folded: bool
) -> None:
    start = min(start, length)
    count = min(count, length - start)
    n = 2 * d if folded else d
    chunk = [max(c for c in range(n) if c * length // n <= t) for t in range(length)]
    holder = [min(c, 2 * d - 1 - c) if folded else c for c in chunk]
    inside = [holder[:t].count(holder[t]) for t in range(length)]
    walk = [(t - start, holder[t], inside[t]) for t in range(start, start + count)]
    parts = token_parts(np.array([start]), np.array([count]), np.array([length]), d, folded=folded)
    found = [
        (int(first) + k, int(rank), int(before) + k)
        for rank, first, size, before in zip(
            parts.holder, parts.first, parts.length, parts.inside, strict=True
        )
        for k in range(size)
    ]
    assert found == walk
    assert len(parts.holder) >= 1, "an empty range has one part"


def test_routes_whose_parts_leave_a_row_out_are_refused() -> None:
    batch = ov.Batch(samples=2, context=48)
    documents, images = [[PLACEHOLDER] * 20, [1, 2]], [[(0, 20, 0)], []]
    plan = hdp()(buffer_of(documents, images, replace(batch, context=12)), ov.Mesh(dp=3))
    routes = plan.routes()
    assert len(routes.parts) > len(routes) == 1
    parts = replace(routes.parts, first=routes.parts.first + 1)
    with pytest.raises(PlanError, match="expected parts that tile the rows of every item"):
        replace(routes, parts=parts).validate()
