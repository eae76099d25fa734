"""Laws of routes: whatever the mesh, the strategy and the data, one exchange brings every image's
rows to its placeholders.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import PlanError
from overlord.mesh import Batch, ClientPlaceTree
from overlord.plan.plan import LoadingPlan
from overlord.plan.routes import Routes
from overlord.planning.graph.dgraph import DGraph
from overlord.planning.strategies import resolve, vlm
from overlord.sample import Buffer, Ragged
from tests.laws import examples

CONTEXT = 64
ROWS = 1000  # more than any item sends: row k of item i is the number i * ROWS + k

Item = tuple[int, int, int]  # patches, output tokens, offset


@st.composite
def buffers(draw: st.DrawFn) -> Buffer:
    """A source of text and one whose samples have images; the rows of an image and their place
    said, or left to be assumed.
    """
    texts = draw(st.lists(st.integers(1, CONTEXT), max_size=12))
    items = st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, CONTEXT + 4))
    seen = draw(
        st.lists(st.tuples(st.integers(1, CONTEXT), st.lists(items, max_size=4)), max_size=20)
    )
    columns: dict[str, dict[str, Any]] = {
        "text": {"tokens": np.array(texts, np.int64)},
        "seen": {
            "tokens": np.array([n for n, _ in seen], np.int64),
            "image_patches": lists(seen, 0),
        },
    }
    if draw(st.booleans()):
        columns["seen"]["image_tokens"] = lists(seen, 1)
    if draw(st.booleans()):
        columns["seen"]["image_offset"] = lists(seen, 2)
    batch = Batch(
        samples=64,
        microbatches=draw(st.integers(1, 4)),
        context=CONTEXT,
        pad_multiple=draw(st.sampled_from([1, 4])),
    )
    made = replace(Buffer.from_columns(columns, batch=batch, step=3), drawn=True)
    order = np.array(draw(st.permutations(range(len(made)))), np.int64)
    return made.take(order)


def lists(seen: list[tuple[int, list[Item]]], field: int) -> Ragged:
    return Ragged.from_rows([[item[field] for item in images] for _, images in seen], np.int64)


degree = st.sampled_from([1, 1, 2, 3])
places = st.builds(
    ClientPlaceTree,
    pp=degree,
    dp=st.sampled_from([1, 2, 3, 5]),
    cp=st.sampled_from([1, 2]),
    tp=degree,
    order=st.permutations(["pp", "dp", "cp", "tp"]).map(tuple),
)
hybrids = st.builds(
    vlm,
    per=st.sampled_from(["iteration", "microbatch"]),
    joint=st.sampled_from([None, True, False]),
    merge=st.sampled_from([1, 2]),
    method=st.sampled_from(["greedy", "zigzag", "none"]),
)


def over_cp(buffer: Buffer, place: ClientPlaceTree) -> LoadingPlan:
    """Every (dp, cp) pair takes microbatches of its own; the encoder runs on groups of ranks."""
    drawn = DGraph.from_buffer(buffer, place).mix()
    return (
        drawn.select("tokens")
        .distribute("CP")
        .balance("greedy")
        .plan(encoder=drawn.select("image_patches").distribute("WORLD").balance("zigzag"))
    )


named = st.sampled_from(
    ["vanilla", "packed", "llm_balance", "backbone_balance", "encoder_balance", "vlm_hybrid"]
).map(resolve)
named = named | st.just(over_cp)
strategies = hybrids | named


def exchange(routes: Routes, slot: int) -> list[np.ndarray]:
    """What every rank holds after the all-to-all of a slot."""
    sent, every = [], [routes.for_rank(rank, slot) for rank in range(routes.world_size)]
    for route in every:
        rows = [
            i * ROWS + np.arange(n)
            for i, n in zip(route.items.tolist(), route.send_lens.tolist(), strict=True)
        ]
        flat = np.concatenate([*rows, np.zeros(0, np.int64)])
        assert route.send_splits.dtype == route.recv_splits.dtype == np.int32
        assert (len(route.send_splits), int(route.send_splits.sum())) == (
            routes.world_size,
            len(flat),
        )
        sent.append(np.split(flat, np.cumsum(route.send_splits)[:-1]))
    sends, receives = (
        np.stack([route.send_splits for route in every]),
        np.stack([route.recv_splits for route in every]),
    )
    assert (sends == receives.T).all()
    return [
        np.concatenate([sent[e][r] for e in range(routes.world_size)])
        for r in range(routes.world_size)
    ]


def scattered(plan: LoadingPlan) -> dict[tuple[int, int], np.ndarray]:
    """Rows as a trainer puts them into the microbatches of every (rank, microbatch); -1 where there
    is text.
    """
    routes = plan.routes("encoder")
    sizes = np.zeros((plan.main.n_buckets, plan.main.n_microbatches), np.int64)
    np.add.at(sizes, (plan.main.bucket, plan.main.microbatch), plan.main.size)
    assert plan.place is not None
    bucket_of = plan.place.bucket_of(plan.main.axis)
    tokens = {
        (r, m): np.full(sizes[bucket_of[r], m], -1)
        for r in range(routes.world_size)
        for m in range(plan.n_microbatches)
    }
    for slot in range(routes.n_slots):
        for rank, got in enumerate(exchange(routes, slot)):
            route = routes.for_rank(rank, slot)
            chunks = (
                np.split(got, np.cumsum(route.out_lens[np.argsort(route.recv_perm)])[:-1])
                if len(route.recv_perm)
                else []
            )
            in_order = np.concatenate(
                [*(chunks[i] for i in route.recv_perm), np.zeros(0, np.int64)]
            )
            assert in_order.tolist() == got[route.recv_rows].tolist(), (
                "rows by item and rows by row agree"
            )
            for m in [slot] if routes.per == "microbatch" else range(plan.n_microbatches):
                rows, index = route.microbatch(m)
                assert (tokens[rank, m][index] == -1).all()
                tokens[rank, m][index] = got[rows]
    return tokens


def expected(plan: LoadingPlan, buffer: Buffer, merge: int = 1) -> dict[tuple[int, int], list[int]]:
    """The same, written down sample by sample from the metadata."""
    a, out = plan.main, {}
    assert plan.place is not None
    first = np.cumsum([0, *(len(buffer.column("image_patches")[i]) for i in range(len(buffer)))])  # type: ignore[index]
    for bucket, m in itertools.product(range(a.n_buckets), range(a.n_microbatches)):
        held = sorted(
            (int(s), int(n))
            for s, n, b, k in zip(a.slot, a.sample, a.bucket, a.microbatch, strict=True)
            if (b, k) == (bucket, m)
        )
        tokens: list[int] = []
        for _, n in held:
            start, length = len(tokens), int(buffer.column("tokens")[n])
            tokens += [-1] * int(a.size[a.sample == n][0])
            for j, (offset, rows) in enumerate(images(buffer, n, merge)):
                later = [
                    o
                    for i, (o, r) in enumerate(images(buffer, n, merge))
                    if r and (o, i) > (offset, j) and o < length
                ]
                for k in range(min(rows, length - offset, *(o - offset for o in later), ROWS)):
                    tokens[start + offset + k] = int(first[n] + j) * ROWS + k
        out[min(plan.place.buckets(a.axis)[bucket]), m] = tokens
    return out


def images(buffer: Buffer, n: int, merge: int) -> list[tuple[int, int]]:
    """(offset, rows) of each image of a sample."""
    said = {
        name: buffer.meta[name][n].tolist()
        for name in ("image_tokens", "image_offset")
        if name in buffer.meta
    }
    patches = buffer.column("image_patches")[n].tolist()  # type: ignore[union-attr]
    rows = said.get("image_tokens", [p // merge**2 for p in patches])
    offsets = said.get("image_offset", [sum(rows[:i]) for i in range(len(rows))])
    return list(zip(offsets, rows, strict=True))


@examples(120)
@given(buffers(), places, named)
def test_every_image_arrives_at_its_placeholders_under_every_strategy(
    buffer: Buffer, place: ClientPlaceTree, strategy: Any
) -> None:
    check(strategy(buffer, place), buffer, 1)


@examples(120)
@given(
    buffers(),
    places,
    st.sampled_from(["iteration", "microbatch"]),
    st.sampled_from([None, True, False]),
    st.sampled_from([1, 2]),
    st.sampled_from(["greedy", "zigzag", "none", "karmarkar_karp"]),
)
def test_every_image_arrives_at_its_placeholders_in_every_mode(
    buffer: Buffer, place: ClientPlaceTree, per: str, joint: bool | None, merge: int, method: str
) -> None:
    plan = vlm(per=per, joint=joint, merge=merge, method=method)(buffer, place)
    check(plan, buffer, merge)
    routes, together = plan.routes(), joint or (joint is None and place.tp * place.pp == 1)
    if together:
        assert (
            place.bucket_of("DP")[routes.encoder] == place.bucket_of("DP")[routes.parts.owner]
        ).all(), "images stay in their group"
    if per == "microbatch":
        assert routes.n_slots == plan.n_microbatches
        assert (routes.slot == routes.parts.microbatch).all(), (
            "images keep the slot of their sample"
        )
    else:
        assert routes.n_slots == 1


def check(plan: LoadingPlan, buffer: Buffer, merge: int) -> None:
    found, wanted = scattered(plan), expected(plan, buffer, merge)
    for (rank, m), tokens in found.items():
        assert tokens.tolist() == wanted.get((rank, m), [-1] * len(tokens)), (
            f"microbatch {m} of rank {rank}"
        )
    routes = plan.routes()
    encoded = [
        i
        for slot in range(routes.n_slots)
        for rank in range(routes.world_size)
        for i in routes.for_rank(rank, slot).items.tolist()
    ]
    assert sorted(encoded) == list(range(len(routes))), "every image is encoded exactly once"
    assert len(routes) == int(buffer.column("image_patches").lengths.sum())  # type: ignore[union-attr]
    a = plan.modules["encoder"]
    assert routes.encoder.tolist() == a.bucket.tolist(), "WORLD's buckets are ranks"


@given(buffers(), places, strategies)
def test_routes_survive_bytes_and_are_repeatable(
    buffer: Buffer, place: ClientPlaceTree, strategy: Any
) -> None:
    plan = strategy(buffer, place)
    back = LoadingPlan.from_bytes(plan.to_bytes()).validate()
    assert back.digest() == plan.digest() == strategy(buffer, place).digest()
    routes = [p.routes() for p in (plan, back)]
    for rank, slot in itertools.product(range(place.world_size), range(routes[0].n_slots)):
        one, other = (r.for_rank(rank, slot) for r in routes)
        assert all(
            np.array_equal(getattr(one, name), getattr(other, name)) for name in one.__slots__
        )


@given(buffers(), st.integers(1, 3), st.integers(1, 3))
def test_balancing_images_over_all_ranks_is_never_worse_than_leaving_them_where_they_are(
    buffer: Buffer, dp: int, tp: int
) -> None:
    place = ClientPlaceTree(dp=dp, tp=tp)
    hybrid, vanilla = vlm(joint=False)(buffer, place), resolve("vanilla")(buffer, place)
    heaviest = max(float(vanilla.loads("encoder").sum(axis=1).max()), 1e-9)
    assert float(hybrid.loads("encoder").sum(axis=1).max()) <= heaviest * (
        4 / 3
    )  # LPT's bound against any placement


@given(buffers(), places, st.booleans())
def test_slots_are_level_and_no_rank_gets_the_dearest_image_of_every_slot(
    buffer: Buffer, place: ClientPlaceTree, joint: bool
) -> None:
    plan = vlm(joint=joint, per="microbatch")(buffer, place)
    a, loads = plan.modules["encoder"], plan.loads("encoder")
    groups = np.array(place.buckets("DP")) if joint else np.arange(place.world_size)[None]
    for ranks in groups:
        mine = loads[ranks]
        spread = mine.max(axis=0) - mine.min(axis=0)
        for m in range(a.n_microbatches):
            dearest = a.cost[(a.microbatch == m) & np.isin(a.bucket, ranks)].max(initial=0.0)
            assert spread[m] <= dearest * (1 + 1e-9), (
                "LPT: the heaviest rank of a slot is one image above the lightest at most"
            )
        total = mine.sum(axis=1)
        assert total.max() - total.min() <= spread.max(initial=0.0) * (1 + 1e-9), (
            "over the step they are no further apart than in a slot"
        )


SMALL = vlm(joint=False, per="microbatch")(
    replace(
        Buffer.from_columns(
            {"seen": {"tokens": [20, 30, 9], "image_patches": [[4, 6], [], [8]]}},
            batch=Batch(samples=3, microbatches=2, context=CONTEXT),
        ),
        drawn=True,
    ),
    ClientPlaceTree(dp=2, tp=2),
)
BYTES = SMALL.to_bytes()


@examples(300)
@given(st.integers(0, len(BYTES) - 1), st.integers(1, 255))
def test_a_flipped_byte_gives_routes_or_a_plan_error_and_nothing_else(at: int, mask: int) -> None:
    damaged = bytearray(BYTES)
    damaged[at] ^= mask
    with contextlib.suppress(PlanError):
        plan = LoadingPlan.from_bytes(bytes(damaged)).validate()
        if "encoder" in plan.modules and plan.place is not None and plan.place.world_size < 2**20:
            plan.routes("encoder")
