"""Laws of plans: whatever the strategy, every drawn sample has one slot; whatever the bytes, a plan or a PlanError."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.errors import JobError, PlanError
from overlord.job import Batch
from overlord.placetree import ClientPlaceTree
from overlord.plan import MAGIC, LoadingPlan
from overlord.planner.strategy import STRATEGIES, resolve
from overlord.sample import Buffer

CONTEXT = 64


def drawn(lengths: list[int], microbatches: int = 1, pad_multiple: int = 1, sources: int = 3) -> Buffer:
    columns = {f"s{i}": {"tokens": np.array(lengths[i::sources], np.int64)} for i in range(sources)}
    batch = Batch(samples=max(1, len(lengths)), microbatches=microbatches, context=CONTEXT, pad_multiple=pad_multiple)
    return replace(Buffer.from_columns(columns, batch=batch, step=5), drawn=True)


steps = st.builds(
    drawn, st.lists(st.integers(1, CONTEXT), max_size=120), microbatches=st.integers(1, 4), pad_multiple=st.sampled_from([1, 8])
)
places = st.builds(ClientPlaceTree, dp=st.sampled_from([1, 2, 5, 40]), cp=st.sampled_from([1, 2]), tp=st.sampled_from([1, 2]))
names = st.sampled_from(sorted(STRATEGIES))


@given(steps, places, names)
def test_every_drawn_sample_has_exactly_one_slot_and_no_microbatch_overflows(buffer: Buffer, place: ClientPlaceTree, name: str) -> None:
    plan = resolve(name)(buffer, place)
    a = plan.main
    assert (a.n_buckets, a.axis) == (place.dp, "DP")
    assert sorted(a.sample.tolist()) == list(range(len(buffer)))
    assert plan.row.tolist() == buffer.row.tolist()
    assert plan.source.tolist() == buffer.source.tolist()
    assert plan.n_microbatches >= buffer.batch.microbatches
    multiple = buffer.batch.pad_multiple * (4 if place.cp == 2 else 1)
    bins: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for sample, bucket, microbatch, slot in zip(a.sample, a.bucket, a.microbatch, a.slot, strict=True):
        bins.setdefault((int(bucket), int(microbatch)), []).append((int(slot), int(sample)))
    for (bucket, microbatch), held in bins.items():
        assert 0 <= bucket < place.dp
        assert 0 <= microbatch < plan.n_microbatches
        assert [slot for slot, _ in sorted(held)] == list(range(len(held)))
        assert [sample for _, sample in sorted(held)] == sorted(sample for _, sample in held), "slots keep the order of the draw"
        assert sum(-(-int(plan.tokens[s]) // multiple) * multiple for _, s in held) <= CONTEXT


@given(steps, places, names)
def test_plans_are_repeatable_and_survive_bytes(buffer: Buffer, place: ClientPlaceTree, name: str) -> None:
    plan = resolve(name)(buffer, place)
    assert resolve(name)(buffer, place).digest() == plan.digest()
    back = LoadingPlan.from_bytes(plan.to_bytes())
    assert back.digest() == plan.digest()
    assert back.to_bytes() == plan.to_bytes()
    assert (back.validate().step, back.names, back.extra) == (plan.step, plan.names, plan.extra)
    assert back.main.broadcast == ("TP",)


@given(steps, places)
def test_the_constructors_walk_is_by_bucket_microbatch_and_slot(buffer: Buffer, place: ClientPlaceTree) -> None:
    a = resolve("llm_balance")(buffer, place).main
    assert a.order().tolist() == np.lexsort((a.slot, a.microbatch, a.bucket)).tolist()


@given(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=120), st.sampled_from([2, 5, 40]))
def test_vanilla_deals_samples_out_in_turn(lengths: list[int], dp: int) -> None:
    plan = resolve("vanilla")(drawn(lengths), ClientPlaceTree(dp=dp))
    assert plan.main.bucket.tolist() == [i % dp for i in range(len(lengths))]


@given(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=120), st.sampled_from([2, 5, 40]))
def test_packed_cuts_one_stream_and_deals_microbatches_out_in_turn(lengths: list[int], dp: int) -> None:
    plan = resolve("packed")(drawn(lengths, sources=1), ClientPlaceTree(dp=dp))
    number = plan.main.microbatch.astype(int) * dp + plan.main.bucket
    assert (np.diff(number) >= 0).all()
    assert set(np.diff(number).tolist()) <= {0, 1}
    for b in range(int(number.max())):  # no bin was closed while the next sample still fitted
        first_of_next = lengths[int(np.searchsorted(number, b + 1))]
        assert sum(length for length, n in zip(lengths, number, strict=True) if n == b) + first_of_next > CONTEXT


@given(steps, st.sampled_from([2, 5, 40]))
def test_backbone_balance_keeps_stream_order_inside_a_bucket(buffer: Buffer, dp: int) -> None:
    a = resolve("backbone_balance")(buffer, ClientPlaceTree(dp=dp)).main
    for b in range(dp):
        assert (np.diff(a.microbatch[a.bucket == b]) >= 0).all()


def test_balance_beats_stream_order_on_skewed_lengths() -> None:
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(2.0, 1.0, 16 * 40), 1, CONTEXT).astype(int).tolist()
    found = {name: fn(drawn(lengths), ClientPlaceTree(dp=40)).imbalance()["bucket"] for name, fn in STRATEGIES.items()}
    assert found["llm_balance"] <= found["backbone_balance"] + 0.01 < found["packed"] < found["vanilla"]
    assert found["llm_balance"] < 1.02


SMALL = resolve("llm_balance")(drawn([5, 9, 60, 33, 2]), ClientPlaceTree(dp=2))
BYTES = SMALL.to_bytes()


def test_bytes_that_end_early_are_refused_wherever_they_end() -> None:
    for n in range(len(BYTES)):
        with pytest.raises(PlanError):
            LoadingPlan.from_bytes(BYTES[:n])
    with pytest.raises(PlanError, match="damaged"):
        LoadingPlan.from_bytes(BYTES + b"\0")


@settings(max_examples=300)
@given(st.integers(0, len(BYTES) - 1), st.integers(1, 255))
def test_a_flipped_byte_gives_a_plan_or_a_plan_error_and_nothing_else(at: int, mask: int) -> None:
    damaged = bytearray(BYTES)
    damaged[at] ^= mask
    with contextlib.suppress(PlanError):
        LoadingPlan.from_bytes(bytes(damaged)).validate()


@given(st.binary(max_size=200))
def test_garbage_is_no_plan(data: bytes) -> None:
    for start in (b"", MAGIC, MAGIC + (len(data)).to_bytes(8, "little"), MAGIC + (2).to_bytes(8, "little") + b"{}"):
        with pytest.raises(PlanError):
            LoadingPlan.from_bytes(start + data)


def test_deeply_nested_and_object_columns_are_refused() -> None:
    deep = b"[" * 100_000
    with pytest.raises(PlanError):
        LoadingPlan.from_bytes(MAGIC + len(deep).to_bytes(8, "little") + deep)
    for kind in (b'"|O8"', b'"<m8"', b'"<c8"'):
        with pytest.raises(PlanError, match="damaged"):
            LoadingPlan.from_bytes(BYTES.replace(b'"<f8"', kind))


def broken(**changes) -> LoadingPlan:
    return replace(SMALL, modules={"backbone": replace(SMALL.main, **changes)})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bucket": SMALL.main.bucket + 9}, "bucket outside"),
        ({"microbatch": SMALL.main.microbatch - 9}, "microbatch outside"),
        ({"sample": SMALL.main.sample * 0}, "exactly once"),
        ({"sample": SMALL.main.sample + 1}, "sample outside"),
        ({"slot": SMALL.main.slot * 0}, "share a slot"),
        ({"slot": SMALL.main.slot + 1}, "left empty"),
        ({"capacity": 40}, "more than its capacity of 40"),
        ({"slot": SMALL.main.slot[:2]}, "different length"),
        ({"bucket": SMALL.main.bucket.astype(float)}, "wanted whole numbers in bucket"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(changes, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        broken(**changes).validate()


def test_a_plan_tells_its_imbalance_and_prints_as_a_table() -> None:
    loads = SMALL.loads().sum(axis=1)
    assert SMALL.imbalance()["bucket"] == pytest.approx(loads.max() / loads.mean())
    assert SMALL.imbalance()["bound"] == pytest.approx(max(1.0, SMALL.main.cost.max() / loads.mean()))
    assert SMALL.fill() == pytest.approx(109 / (64 * 2 * SMALL.n_microbatches))
    assert len(SMALL.to_table().splitlines()) == 2 + 2


def test_strategies_are_found_by_name_or_given_as_functions() -> None:
    assert resolve("packed") is STRATEGIES["packed"]
    assert resolve(len) is len
    with pytest.raises(JobError, match="did you mean 'llm_balance'"):
        resolve("llm_balanced")
