"""Images of a step between processes: each comes to the constructor of the rank that encodes it,
whoever trains on its sample.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

import overlord as ov
from overlord.cluster.placement import Placement
from overlord.cluster.plan_router import ImageContext, PlanRouter, RoutedPlan
from overlord.constructor.build import StepDocuments
from overlord.constructor.images import PixelForm, encoder_inputs
from overlord.content import Content, Items, Scattered
from overlord.messages.control import EncodedState, EncoderPlan, PlannedStep
from overlord.plan.plan import LoadingPlan
from overlord.planning.images import Encodings
from overlord.sample import Ragged
from overlord.transforms.image_items import Prefix
from tests.laws import examples

AFTER = EncodedState(1, np.zeros(3, np.uint8))
CONTEXT = 64


def named(document: int, number: int) -> list[int]:
    """The bytes of an image: who it is."""
    return [document % 256, document // 256, number]


@st.composite
def plans(draw: st.DrawFn) -> LoadingPlan:
    place = ov.ClientPlaceTree(
        dp=draw(st.integers(1, 4)), tp=draw(st.integers(1, 2)), pp=draw(st.integers(1, 2))
    )
    images = draw(st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=24))
    batch = ov.Batch(
        samples=len(images),
        context=CONTEXT,
        microbatches=draw(st.integers(1, 3)),
        layout=draw(st.sampled_from(["packed", "padded"])),
    )
    columns = {
        "tokens": [3 + sum(i) + k % 5 for k, i in enumerate(images)],
        "image_patches": Ragged.from_rows(images, np.int64),
        "image_tokens": Ragged.from_rows(images, np.int64),
    }
    buffer = replace(ov.Buffer.from_columns({"s": columns}, batch=batch), drawn=True)
    strategy = draw(st.sampled_from(["vanilla", "vlm_hybrid", "encoder_balance", "llm_balance"]))
    return ov.strategy.resolve(strategy)(buffer, place)


def batch_of(plan: LoadingPlan, layout: str = "packed") -> ov.Batch:
    return ov.Batch(samples=len(plan), context=CONTEXT, layout=layout)


@given(plans())
def test_what_ranks_are_told_is_what_the_routes_say(plan: LoadingPlan) -> None:
    assert plan.place is not None
    ranks = list(range(plan.place.world_size))[:: 1 + len(plan) % 2]
    made = Encodings(plan, batch_of(plan))
    e = made.of(ranks, np.arange(len(made.encoded_by(ranks))))
    for i, rank in enumerate(ranks):
        for slot in range(e.n_slots):
            route, g = plan.routes().for_rank(rank, slot), i * e.n_slots + slot
            sent, got = slice(*e.bounds[g : g + 2]), slice(*e.recv_bounds[g : g + 2])
            assert (
                e.item[sent].tolist()
                == route.items.tolist()
                == made.encoded_by(ranks)[sent].tolist()
            )
            assert e.send_lens[sent].tolist() == route.send_lens.tolist()
            assert e.send_splits[g].tolist() == route.send_splits.tolist()
            assert e.recv_splits[g].tolist() == route.recv_splits.tolist()
            assert e.recv_perm[got].tolist() == route.recv_perm.tolist()
            assert e.out_lens[got].tolist() == route.out_lens.tolist()
            assert e.microbatch[got].tolist() == route.microbatches.tolist()
            assert [plan.sample_id(s)[1:] for s in made.sample[e.item[sent]]] == [
                tuple(ids) for ids in e.ids[sent, 1:].tolist()
            ]


@given(plans())
def test_arrays_of_a_rank_are_its_routes(plan: LoadingPlan) -> None:
    """The layout of the arrays themselves, with ready pixels of one number each."""
    assert plan.place is not None
    ranks = list(range(plan.place.world_size))
    made = Encodings(plan, batch_of(plan))
    items = made.encoded_by(ranks)
    form = PixelForm(3, "uint8")
    prefix = Prefix(
        form=1, patch=1, merge=1, dtype="uint8", grid=(1, 1, 1), box=(0, 0, 1, 1), size=(1, 1)
    )
    bytes_ = [
        np.frombuffer(prefix.pack() + bytes([item % 256] * 3), np.uint8) for item in items.tolist()
    ]
    stage = PlannedStep(
        plan,
        np.zeros(0, np.int64),
        np.arange(len(plan)),
        "",
        AFTER,
        encoding=made.of(ranks, np.arange(len(items))),
    )
    staged = StepDocuments(
        stage,
        Ragged.from_rows([[1]] * len(plan)),
        Scattered([Ragged.from_rows(bytes_, np.uint8)], np.zeros(0, np.int64)),
    )
    done = encoder_inputs(staged, ranks[::-1], form, lambda n: np.empty(n, np.uint8))
    assert done.failures is None
    for rank in ranks:
        for slot, arrays in enumerate(done.arrays[rank].cut(0, done.arrays[rank].n)):
            route = plan.routes().for_rank(rank, slot)
            assert arrays["pixel_values"][:, 0].tolist() == (route.items % 256).tolist()
            assert arrays["image_cu_seqlens"].tolist() == list(range(len(route.items) + 1))
            assert arrays["recv_rows"].tolist() == route.recv_rows.tolist()
            assert arrays["image_token_index"].tolist() == route.image_token_index.tolist()
            assert arrays["send_splits"].tolist() == route.send_splits.tolist()
            assert not any(array.flags.writeable for array in arrays.values())


@examples(60)
@given(plans(), st.data())
def test_every_image_comes_to_the_constructor_of_its_encoder_from_the_worker_that_has_it(
    plan: LoadingPlan, data: st.DataObject
) -> None:
    assert plan.place is not None
    place, loaders = plan.place, data.draw(st.integers(1, 4))
    host_of = data.draw(st.lists(st.integers(0, 2), min_size=loaders, max_size=loaders))
    constructor_of = data.draw(st.lists(st.integers(0, 2), min_size=place.dp, max_size=place.dp))
    served = np.array(data.draw(st.lists(st.booleans(), min_size=place.dp, max_size=place.dp)))
    ahead, hooks = data.draw(st.booleans()), data.draw(st.booleans())
    event(
        f"{len(set(host_of))} hosts, {len(set(constructor_of))} constructors, look-ahead "
        f"{ahead}, hooks {hooks}"
    )
    cutter = PlanRouter(
        Placement([len(host_of)], host_of, constructor_of),
        loader_hooks=hooks,
        images=ImageContext(batch_of(plan), True, place.buckets("DP")),
    )
    extra = (
        data.draw(st.integers(0, 5)) if ahead else 0
    )  # documents that are popped and passed over
    n = len(plan) + extra
    by = np.sort(
        np.array(data.draw(st.lists(st.integers(0, loaders - 1), min_size=n, max_size=n)), np.int64)
    )
    order = np.array(data.draw(st.permutations(range(n))), np.int64)
    doc, kept = order[: len(plan)], np.sort(order[len(plan) :])
    stage = PlannedStep(
        plan, np.bincount(by, minlength=loaders), doc, "", AFTER, kept=kept if ahead else None
    )
    counts = np.full(n, 2, np.int64)  # those passed over have images too
    counts[doc] = np.bincount(plan.module("encoder").sample, minlength=len(plan))
    cuts = cutter.route(stage, AFTER, served)
    arrived = send(cuts, np.array(host_of)[by], counts)
    for c, placed in cuts.constructor_plans.items():
        staged = [image for h in placed.origins for image in arrived.get((h, c), [])]
        assert placed.stage.encoding is not None
        check(
            placed.stage.encoding,
            staged,
            plan,
            doc,
            [
                r
                for b in np.flatnonzero(served)
                if constructor_of[b] == c
                for r in place.buckets("DP")[b]
            ],
        )
    told = sum(
        len(p.stage.encoding.item)
        for p in cuts.constructor_plans.values()
        if p.stage.encoding is not None
    )
    bucket = (
        place.bucket_of("DP")[plan.module("encoder").bucket]
        if plan.module("encoder").axis == "WORLD"
        else plan.module("encoder").bucket
    )
    assert told == int(served[bucket].sum())


def test_a_worker_whose_documents_are_all_wanted_sends_no_image_that_nobody_encodes() -> None:
    place, columns = ov.ClientPlaceTree(dp=2), {"tokens": [4, 4], "image_patches": [[2], [2]]}
    buffer = replace(
        ov.Buffer.from_columns({"s": columns}, batch=ov.Batch(samples=2, context=CONTEXT)),
        drawn=True,
    )
    plan = ov.strategy.resolve("vanilla")(buffer, place)
    encoder = plan.module("encoder")
    plan = replace(
        plan, modules={**plan.modules, "encoder": replace(encoder, bucket=1 - encoder.bucket)}
    )  # each at the other rank
    cutter = PlanRouter(
        Placement([2], [0, 1], [0, 1]),
        images=ImageContext(batch_of(plan), True, place.buckets("DP")),
    )
    stage = PlannedStep(plan, np.array([1, 1]), np.array([0, 1]), "", AFTER)
    alone = cutter.route(stage, AFTER, np.array([True, False]))
    assert send(alone, np.array([0, 1]), np.array([1, 1])) == {(0, 0): [], (1, 0): [named(1, 0)]}
    both = cutter.route(stage, AFTER, np.array([True, True]))
    assert send(both, np.array([0, 1]), np.array([1, 1])) == {
        (0, 0): [],
        (0, 1): [named(0, 0)],
        (1, 0): [named(1, 0)],
        (1, 1): [],
    }
    assert both.constructor_plans[0].origins == both.constructor_plans[1].origins == (0, 1)


def send(
    cuts: RoutedPlan, host: np.ndarray, counts: np.ndarray
) -> dict[tuple[int, int], list[list[int]]]:
    """What loader workers send by their parts: the images of each destination."""
    arrived = {}
    for h, part in cuts.loader_plans.items():
        mine = np.flatnonzero(host == h)
        rows = [named(d, k) for d in mine.tolist() for k in range(counts[d])]
        content = Content(
            Ragged.from_rows([[1]] * len(mine)),
            Items(Ragged.from_rows(rows, np.uint8), counts[mine]),
        )
        found = Scattered.of(
            [content.slice(0, len(mine) // 2), content.slice(len(mine) // 2, len(mine))]
        )
        assert found is not None
        for j, c in enumerate(part.to):
            wanted = (
                range(len(found))
                if not part.take
                else (found.first[part.items[j][0]] + part.items[j][1]).tolist()
                if part.items
                else []
            )
            arrived[h, c] = [found[i].tolist() for i in wanted]
    return arrived


def check(
    e: EncoderPlan, staged: list[list[int]], plan: LoadingPlan, doc: np.ndarray, ranks: list[int]
) -> None:
    assert e.ranks.tolist() == ranks
    assert len(staged) == len(e.item)
    routes, sample = plan.routes(), plan.module("encoder").sample
    for item, at in zip(e.item.tolist(), e.at.tolist(), strict=True):
        assert staged[at] == named(int(doc[sample[item]]), int(routes.number[item]))
        assert routes.encoder[item] in ranks


# content


rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=4),
        st.lists(st.lists(st.integers(0, 255), max_size=5), max_size=3),
    ),
    max_size=6,
)


def content(documents: list[tuple[list[int], list[list[int]]]], bare: bool) -> Content:
    tokens = Ragged.from_rows([t for t, _ in documents], np.int32)
    items = Items(
        Ragged.from_rows([i for _, found in documents for i in found], np.uint8),
        np.array([len(f) for _, f in documents], np.int64),
    )
    return Content(tokens, None if bare else items)


def told(found: Content) -> list[tuple[list[int], list[list[int]]]]:
    first = np.zeros(len(found) + 1, np.int64) if found.items is None else found.items.first
    return [
        (
            found.tokens[d].tolist(),
            [found.items.bytes[i].tolist() for i in range(first[d], first[d + 1])]
            if found.items
            else [],
        )
        for d in range(len(found))
    ]


@given(st.lists(st.tuples(rows, st.booleans()), min_size=1, max_size=4), st.data())
def test_documents_keep_their_images_however_they_are_cut_joined_and_chosen(
    parts: list[tuple[list[tuple[list[int], list[list[int]]]], bool]], data: st.DataObject
) -> None:
    whole = [(t, [] if bare else i) for documents, bare in parts for t, i in documents]
    pieces = [content(documents, bare) for documents, bare in parts]
    joined = Content.concat(pieces)
    assert told(joined) == whole
    assert joined.nbytes == sum(p.nbytes for p in pieces)
    a = data.draw(st.integers(0, len(whole)))
    b = data.draw(st.integers(a, len(whole)))
    assert told(joined.slice(a, b)) == told(joined.slice(a, b).compact()) == whole[a:b]
    chosen = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8)) if whole else []
    picked = np.array(chosen, np.int64)
    assert (
        told(joined.take(picked))
        == told(Content.pick(pieces, picked))
        == [whole[i] for i in chosen]
    )


@given(st.lists(st.lists(st.integers(0, 255), max_size=3), max_size=6), st.data())
def test_long_rows_are_taken_as_short_ones_are(short: list[list[int]], data: st.DataObject) -> None:
    long = Ragged.from_rows([row * 900 for row in short], np.uint8)
    chosen = np.array(
        data.draw(st.lists(st.integers(0, len(short) - 1), max_size=5)) if short else [], np.int64
    )
    taken = long.take(chosen)
    assert [taken[i].tolist() for i in range(len(taken))] == [
        short[i] * 900 for i in chosen.tolist()
    ]
