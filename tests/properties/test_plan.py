"""Laws of plans: whatever the strategy, every drawn sample has one slot; whatever the bytes, a plan
or a PlanError.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import JobError, PlanError
from overlord.mesh import Batch, ClientPlaceTree
from overlord.plan.codec import MAGIC
from overlord.plan.plan import LoadingPlan
from overlord.planning.graph.dgraph import DGraph
from overlord.planning.strategies import STRATEGIES, resolve
from overlord.sample import Buffer
from tests.laws import examples

CONTEXT = 64


def drawn(
    lengths: list[int], microbatches: int = 1, pad_multiple: int = 1, sources: int = 3
) -> Buffer:
    columns = {f"s{i}": {"tokens": np.array(lengths[i::sources], np.int64)} for i in range(sources)}
    batch = Batch(
        samples=max(1, len(lengths)),
        microbatches=microbatches,
        context=CONTEXT,
        pad_multiple=pad_multiple,
    )
    return replace(Buffer.from_columns(columns, batch=batch, step=5), drawn=True)


steps = st.builds(
    drawn,
    st.lists(st.integers(1, CONTEXT), max_size=120),
    microbatches=st.integers(1, 4),
    pad_multiple=st.sampled_from([1, 8]),
)
places = st.builds(
    ClientPlaceTree,
    dp=st.sampled_from([1, 2, 5, 40]),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]),
)
TEXT = ("vanilla", "packed", "llm_balance", "backbone_balance")  # those for images: test_routes.py
names = st.sampled_from(TEXT)


@given(steps, places, names)
def test_every_drawn_sample_has_exactly_one_slot_and_no_microbatch_overflows(
    buffer: Buffer, place: ClientPlaceTree, name: str
) -> None:
    plan = resolve(name)(buffer, place)
    a = plan.main
    assert (a.n_buckets, a.axis) == (place.dp, "DP")
    assert sorted(a.sample.tolist()) == list(range(len(buffer)))
    assert plan.row.tolist() == buffer.row.tolist()
    assert plan.source.tolist() == buffer.source.tolist()
    assert plan.n_microbatches >= buffer.batch.microbatches
    multiple = buffer.batch.pad_multiple * (4 if place.cp == 2 else 1)
    bins: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for sample, bucket, microbatch, slot in zip(
        a.sample, a.bucket, a.microbatch, a.slot, strict=True
    ):
        bins.setdefault((int(bucket), int(microbatch)), []).append((int(slot), int(sample)))
    for (bucket, microbatch), held in bins.items():
        assert 0 <= bucket < place.dp
        assert 0 <= microbatch < plan.n_microbatches
        assert [slot for slot, _ in sorted(held)] == list(range(len(held)))
        assert [sample for _, sample in sorted(held)] == sorted(sample for _, sample in held), (
            "slots keep the order of the draw"
        )
        assert sum(-(-int(plan.tokens[s]) // multiple) * multiple for _, s in held) <= CONTEXT


@given(steps, places, names)
def test_plans_are_repeatable_and_survive_bytes(
    buffer: Buffer, place: ClientPlaceTree, name: str
) -> None:
    plan = resolve(name)(buffer, place)
    assert resolve(name)(buffer, place).digest() == plan.digest()
    back = LoadingPlan.from_bytes(plan.to_bytes())
    assert back.digest() == plan.digest()
    assert back.to_bytes() == plan.to_bytes()
    assert (back.validate().step, back.names, back.extra) == (plan.step, plan.names, plan.extra)
    assert back.main.broadcast == ("TP",)


@given(steps, places)
def test_the_constructors_walk_is_by_bucket_microbatch_and_slot(
    buffer: Buffer, place: ClientPlaceTree
) -> None:
    a = resolve("llm_balance")(buffer, place).main
    assert a.order().tolist() == np.lexsort((a.slot, a.microbatch, a.bucket)).tolist()


@given(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=120), st.sampled_from([2, 5, 40]))
def test_vanilla_deals_samples_out_in_turn(lengths: list[int], dp: int) -> None:
    plan = resolve("vanilla")(drawn(lengths), ClientPlaceTree(dp=dp))
    assert plan.main.bucket.tolist() == [i % dp for i in range(len(lengths))]


@given(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=120), st.sampled_from([2, 5, 40]))
def test_packed_cuts_one_stream_and_deals_microbatches_out_in_turn(
    lengths: list[int], dp: int
) -> None:
    plan = resolve("packed")(drawn(lengths, sources=1), ClientPlaceTree(dp=dp))
    number = plan.main.microbatch.astype(int) * dp + plan.main.bucket
    assert (np.diff(number) >= 0).all()
    assert set(np.diff(number).tolist()) <= {0, 1}
    full = (
        np.cumsum(lengths)[-1] / CONTEXT
    )  # microbatches, if all were full; next fit leaves none half empty beside its neighbour
    assert plan.n_microbatches <= 2 * full / dp + 1


@given(steps, st.sampled_from([2, 5, 40]))
def test_backbone_balance_keeps_stream_order_inside_a_bucket(buffer: Buffer, dp: int) -> None:
    a = resolve("backbone_balance")(buffer, ClientPlaceTree(dp=dp)).main
    for b in range(dp):
        assert (np.diff(a.microbatch[a.bucket == b]) >= 0).all()


def test_balance_beats_stream_order_on_skewed_lengths() -> None:
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(2.0, 1.0, 16 * 40), 1, CONTEXT).astype(int).tolist()
    found = {
        name: fn(drawn(lengths), ClientPlaceTree(dp=40)).imbalance()["bucket"]
        for name, fn in ((n, STRATEGIES[n]) for n in TEXT)
    }
    assert (
        found["llm_balance"]
        <= found["backbone_balance"] + 0.01
        < found["packed"]
        < found["vanilla"]
    )
    assert found["llm_balance"] < 1.02


SMALL = resolve("llm_balance")(drawn([5, 9, 60, 33, 2]), ClientPlaceTree(dp=2))
FULL = replace(  # every optional column
    SMALL,
    place=ClientPlaceTree(dp=2, cp=2, tp=2, order=("dp", "pp", "cp", "tp")),
    modules={
        "backbone": replace(
            SMALL.main,
            broadcast=("TP", "CP"),
            memory=SMALL.main.cost / 2,
            memory_capacity=float(SMALL.main.cost.sum()),
            out=SMALL.main.size // 2,
            offset=SMALL.main.size * 0,
        )
    },
)
BYTES = FULL.validate().to_bytes()


def test_optional_columns_survive_bytes() -> None:
    back = LoadingPlan.from_bytes(BYTES).validate()
    assert (back.place, back.digest(), back.to_bytes()) == (FULL.place, FULL.digest(), BYTES)
    for name in ("memory", "out", "offset"):
        assert getattr(back.main, name).tolist() == getattr(FULL.main, name).tolist()
        assert getattr(LoadingPlan.from_bytes(SMALL.to_bytes()).main, name) is None
    assert (back.main.memory_capacity, back.main.broadcast) == (
        FULL.main.memory_capacity,
        ("TP", "CP"),
    )


def test_a_digest_tells_deliveries_apart_and_nothing_else() -> None:
    a, digest = FULL.main, FULL.digest()
    swapped = np.array([1, 0, 2, 3, 4])
    delivered = {
        n: getattr(FULL, n)[swapped] + (np.arange(5) == 2)
        for n in ("source", "epoch", "file", "row", "part", "tokens")
    }
    delivered |= {"step": 6, "names": ("a", "b", "c"), "place": ClientPlaceTree(dp=2, cp=2, tp=2)}
    placed = {
        n: getattr(a, n) + (np.arange(5) == 2)
        for n in ("sample", "bucket", "microbatch", "slot", "out", "offset")
    }
    placed |= {"n_microbatches": 9, "axis": "CP", "broadcast": ("TP",)}
    told = {"cost": a.cost * 2, "memory": None, "memory_capacity": 0.0, "capacity": 99}
    assert all(replace(FULL, **{n: v}).digest() != digest for n, v in delivered.items())
    assert [
        n
        for n, v in placed.items()
        if replace(FULL, modules={"backbone": replace(a, **{n: v})}).digest() == digest
    ] == []
    assert [
        n
        for n, v in told.items()
        if replace(FULL, modules={"backbone": replace(a, **{n: v})}).digest() != digest
    ] == []
    assert replace(FULL, extra={"trail": ["another"]}).digest() == digest


def test_bytes_stay_small() -> None:
    plan = resolve("vanilla")(drawn([9] * 2000), ClientPlaceTree(dp=4))
    assert len(plan.to_bytes()) < 2000 * 80 + 2000


def test_bytes_that_end_early_are_refused_wherever_they_end() -> None:
    for n in range(len(BYTES)):
        with pytest.raises(PlanError):
            LoadingPlan.from_bytes(BYTES[:n])
    with pytest.raises(PlanError, match="damaged"):
        LoadingPlan.from_bytes(BYTES + b"\0")


@examples(300)
@given(st.integers(0, len(BYTES) - 1), st.integers(1, 255))
def test_a_flipped_byte_gives_a_plan_or_a_plan_error_and_nothing_else(at: int, mask: int) -> None:
    damaged = bytearray(BYTES)
    damaged[at] ^= mask
    with contextlib.suppress(PlanError):
        LoadingPlan.from_bytes(bytes(damaged)).validate()


def test_a_column_of_another_type_gives_a_plan_or_a_plan_error_and_nothing_else() -> None:
    for kind, others in (
        (b'"<i8"', (b'"<u8"', b'"<f8"')),
        (b'"<i4"', (b'"<u4"',)),
        (b'"<f8"', (b'"<i8"', b'"<u8"')),
    ):
        pieces = BYTES.split(kind)
        for i in range(1, len(pieces)):
            for other in others:
                with contextlib.suppress(PlanError):
                    LoadingPlan.from_bytes(
                        kind.join(pieces[:i]) + other + kind.join(pieces[i:])
                    ).digest()


def test_bytes_of_a_plan_that_breaks_a_rule_are_refused() -> None:
    with pytest.raises(PlanError, match="share a slot"):
        LoadingPlan.from_bytes(
            replace(
                SMALL, modules={"backbone": replace(SMALL.main, slot=SMALL.main.slot * 0)}
            ).to_bytes()
        )


@given(st.binary(max_size=200))
def test_garbage_is_no_plan(data: bytes) -> None:
    for start in (
        b"",
        MAGIC,
        MAGIC + (len(data)).to_bytes(8, "little"),
        MAGIC + (2).to_bytes(8, "little") + b"{}",
    ):
        with pytest.raises(PlanError):
            LoadingPlan.from_bytes(start + data)


def test_deeply_nested_and_object_columns_are_refused() -> None:
    deep = b"[" * 100_000
    with pytest.raises(PlanError):
        LoadingPlan.from_bytes(MAGIC + len(deep).to_bytes(8, "little") + deep)
    for kind in (b'"|O8"', b'"<m8"', b'"<c8"'):
        with pytest.raises(PlanError, match="damaged"):
            LoadingPlan.from_bytes(BYTES.replace(b'"<f8"', kind))


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        (b'"n_buckets": 2', b'"n_buckets": 2000000000000'),  # would allocate terabytes
        (b'"n_microbatches": 1', b'"n_microbatches": 0'),
        (b'"n_buckets": 2, "n_microbatches": 1', b'"n_buckets": -2, "n_microbatches": -1'),
        (b'"pp": 1', b'"pp": 1000000000000'),  # so would a list of its ranks
        (b'"dp": 2', b'"dp": -2'),
        (b'"dp": 2', b'"ep": 2'),
        (b'"order": ["dp"', b'"order": ["tp"'),
        (b'"memory_capacity": ', b'"memory_capacity": Infinity, "x": '),
        (b'"broadcast": ["TP", "CP"]', b'"broadcast": 7'),
    ],
)
def test_a_header_that_lies_is_refused(said: bytes, instead: bytes) -> None:
    assert BYTES.count(said) == 1
    start = len(MAGIC) + 8
    head = BYTES[start : start + int.from_bytes(BYTES[len(MAGIC) : start], "little")]
    lying = head.replace(said, instead)
    with pytest.raises(PlanError, match="damaged"):
        LoadingPlan.from_bytes(
            MAGIC + len(lying).to_bytes(8, "little") + lying + BYTES[start + len(head) :]
        )


def broken(**changes) -> LoadingPlan:
    return replace(
        SMALL,
        place=ClientPlaceTree(dp=2, tp=2),
        modules={"backbone": replace(SMALL.main, **changes)},
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bucket": SMALL.main.bucket + 9}, "expected bucket from 0 to"),
        ({"microbatch": SMALL.main.microbatch - 9}, "expected microbatch from 0 to"),
        ({"sample": SMALL.main.sample * 0}, "exactly once"),
        ({"sample": SMALL.main.sample + 1}, "expected sample from 0 to"),
        ({"slot": SMALL.main.slot * 0}, "share a slot"),
        ({"slot": SMALL.main.slot + 1}, "or an empty slot"),
        ({"capacity": 40}, "expected at most 40 tokens in microbatch"),
        ({"slot": SMALL.main.slot[:2]}, "columns of equal length, got"),
        ({"bucket": SMALL.main.bucket.astype(float)}, "expected whole numbers in bucket"),
        (
            {"memory": np.full(5, 3.0), "memory_capacity": 8.0},
            "expected at most 8.* units of memory cost in microbatch",
        ),
        ({"memory": np.full(4, 3.0)}, "columns of equal length, got"),
        ({"memory": np.array([1, 2, np.nan, 4, 5])}, "expected memory at least 0 and finite"),
        ({"cost": np.array([1, 2, -3.0, 4, 5])}, "expected cost at least 0 and finite, got -3"),
        ({"out": np.full(5, 0.5)}, "expected whole numbers in out"),
        ({"slot": SMALL.main.slot.astype(np.uint64)}, "expected whole numbers in slot, got uint64"),
        (
            {"cost": SMALL.main.cost.astype(complex)},
            "expected whole numbers in cost, got complex128",
        ),
        ({"broadcast": ("EP",)}, "expected broadcast axes of TP, CP, PP, DP, got 'EP'"),
        ({"axis": "EP"}, "expected an axis of .*, got 'EP'"),
        ({"axis": "WORLD"}, "expected 4 buckets along WORLD of pp1xdp2xcp1xtp2, got 2"),
        ({"n_microbatches": 2**40}, "expected at most 67108864 microbatches"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(changes, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        broken(**changes).validate()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": SMALL.tokens * 1.0}, "expected whole numbers in tokens, got float64"),
        ({"row": SMALL.row.astype(np.uint64)}, "expected whole numbers in row, got uint64"),
        ({"source": np.full(5, np.nan)}, "expected whole numbers in source"),
        ({"tokens": SMALL.tokens - 9}, "tokens: expected 0 to"),
        ({"tokens": SMALL.tokens[:4]}, "sample columns: expected 5 rows each"),
    ],
)
def test_samples_that_break_a_rule_are_refused(changes, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        replace(SMALL, **changes).validate()


def test_a_plan_tells_its_imbalance_and_prints_as_a_table() -> None:
    loads = SMALL.loads().sum(axis=1)
    assert SMALL.imbalance()["bucket"] == pytest.approx(loads.max() / loads.mean())
    assert SMALL.imbalance()["bound"] == pytest.approx(
        max(1.0, SMALL.main.cost.max() / loads.mean())
    )
    assert SMALL.fill() == pytest.approx(109 / (64 * 2 * SMALL.n_microbatches))
    assert len(SMALL.to_table().splitlines()) == 2 + 2


def best(costs: list[float], d: int) -> float:
    """The lightest dearest bucket over all placements."""
    placements = itertools.product(range(d), repeat=len(costs))
    return min(
        max(sum(c for c, b in zip(costs, where, strict=True) if b == k) for k in range(d))
        for where in placements
    )


@examples(60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3))
def test_no_placement_passes_the_bound(costs: list[int], d: int) -> None:
    plan = resolve("llm_balance")(drawn(costs, sources=1), ClientPlaceTree(dp=d))
    plan = replace(plan, modules={"backbone": replace(plan.main, cost=np.array(costs, float))})
    found, mean = plan.imbalance(), sum(costs) / d
    assert (
        max(1, max(costs) / mean)
        <= found["bound"] + 1e-9
        <= best([float(c) for c in costs], d) / mean + 2e-9
    )
    assert found["bound"] <= found["slot_bound"] + 1e-9
    assert found["slot_bound"] <= found["microbatch"] + 1e-9


def test_the_bound_sees_more_than_the_dearest_sample() -> None:
    plan = resolve("llm_balance")(drawn([30, 30, 30], sources=1), ClientPlaceTree(dp=2))
    two = replace(plan, modules={"backbone": replace(plan.main, cost=np.full(3, 1.0))}).imbalance()
    assert (two["bound"], two["bucket"]) == (pytest.approx(4 / 3), pytest.approx(4 / 3))


def test_the_slot_bound_sees_samples_that_cannot_share_a_microbatch() -> None:
    """Three long ones of which two fit into a slot, and short ones that cost nothing: the third
    long one needs a slot of its own.
    """
    plan = resolve("llm_balance")(drawn([60, 60, 60, 2, 2], sources=1), ClientPlaceTree(dp=2))
    plan = replace(
        plan, modules={"backbone": replace(plan.main, cost=np.array([6.0, 5.0, 4.0, 0.0, 0.0]))}
    )
    assert plan.imbalance()["slot_bound"] == pytest.approx((6 + 4) / 7.5)
    assert plan.imbalance()["bound"] == pytest.approx((5 + 4) / 7.5)


def test_a_summary_tells_balance_time_peak_and_mixture() -> None:
    plan = replace(
        FULL,
        extra={"weights": {"s0": 3.0, "s1": 1.0, "s2": 0.0}, "unit": {"backbone": "s"}},
        modules={"backbone": replace(FULL.main, memory=None, memory_capacity=0.0)},
    )
    found, loads = plan.summary(), plan.loads()
    module = found["modules"]["backbone"]
    assert (found["samples"], found["tokens"], found["place"]) == (5, 109, "dp2xpp1xcp2xtp2")
    assert module["predicted"] == {
        "unit": "s",
        "iteration": loads.sum(axis=1).max(),
        "microbatch": loads.max(axis=0).sum(),
    }
    assert module["imbalance"] == plan.imbalance()
    assert max(module["by_bucket"]) == pytest.approx(plan.imbalance()["bucket"])
    assert len(module["by_slot"]) == plan.n_microbatches
    assert (module["fetchers"], module["broadcast"]) == ([0, 4], ["TP", "CP"])
    assert found["sources"]["s0"] == {
        "wanted": 0.75,
        "samples": 2,
        "samples_share": 0.4,
        "tokens": 5 + 33,
        "tokens_share": pytest.approx(38 / 109),
    }
    first = module["peak"]["first_out_of_memory"]
    fullest = max(module["peak"]["tokens_by_bucket"])
    assert (first["by"], first["holds"], first["capacity"]) == ("tokens", fullest, CONTEXT)
    assert module["peak"]["tokens_per_rank"] == -(-fullest // 2), (
        "a replica's microbatch is cut along cp"
    )
    assert first["largest_sample"] == "s2/e0/f0/r0"
    assert replace(SMALL, extra={}).summary()["modules"]["backbone"]["predicted"]["unit"] == "cost"


def test_memory_decides_what_runs_out_first_where_it_is_known() -> None:
    memory = np.where(SMALL.tokens == 2, 50.0, 1.0)[SMALL.main.sample]
    plan = replace(
        SMALL, modules={"backbone": replace(SMALL.main, memory=memory, memory_capacity=64.0)}
    ).validate()
    first = plan.summary()["modules"]["backbone"]["peak"]["first_out_of_memory"]
    assert (first["by"], first["of_it"], first["capacity"]) == ("memory", 50.0, 64.0)
    assert (
        plan.sample_id(int(np.flatnonzero(plan.tokens == 2)[0])).__str__()
        == first["largest_sample"]
    )


def test_the_unit_of_a_cost_is_carried() -> None:
    class Seconds:
        unit = "s"

        def __call__(self, columns):
            return columns["tokens"] * 1e-6

    graph = (
        DGraph.from_buffer(drawn([5, 9]), ClientPlaceTree(dp=2))
        .mix()
        .distribute("DP")
        .cost(Seconds())
        .balance("greedy")
    )
    found = LoadingPlan.from_bytes(graph.plan().to_bytes()).summary()["modules"]["backbone"][
        "predicted"
    ]
    assert (found["unit"], found["iteration"]) == ("s", pytest.approx(9e-6))


def test_json_names_every_sample_once_in_the_order_of_the_slots() -> None:
    found = json.loads(SMALL.to_json())
    placed = found["placed"]["backbone"]
    assert sorted(p["sample"] for p in placed) == sorted(str(SMALL.sample_id(i)) for i in range(5))
    assert [(p["bucket"], p["microbatch"], p["slot"]) for p in placed] == sorted(
        (p["bucket"], p["microbatch"], p["slot"]) for p in placed
    )
    assert "placed" not in json.loads(SMALL.to_json(samples=False))


def test_a_plan_without_samples_has_a_summary_too() -> None:
    plan = resolve("vanilla")(drawn([]), ClientPlaceTree(dp=2))
    assert json.loads(plan.to_json())["modules"]["backbone"]["imbalance"]["bucket"] == 1.0


def test_a_plan_made_by_hand_cannot_say_who_fetches() -> None:
    with pytest.raises(PlanError, match="has no place"):
        replace(SMALL, place=None).fetchers()


def test_strategies_are_found_by_name_or_given_as_functions() -> None:
    assert resolve("packed") is STRATEGIES["packed"]
    assert resolve(len) is len
    with pytest.raises(JobError, match="did you mean 'llm_balance'"):
        resolve("llm_balanced")
