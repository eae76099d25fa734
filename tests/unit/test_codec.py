"""Values in frames by example: round trips, and the text of every refusal."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pytest

from overlord.errors import FrameError, OverlordError
from overlord.mesh import Batch, Mesh
from overlord.messages import control, data
from overlord.messages.control import Consumed, Cursor, SetMixture, Skip, StreamState
from overlord.messages.data import Announce, BlockReady, SampleBlock
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.sample import Buffer, Columns, Ragged
from overlord.transport import codec
from overlord.transport.codec import decode, encode, register
from overlord.transport.frame import DTYPES, pack, unpack
from tests.frames import joined, sent, tree


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        2**63,
        2**64 - 1,
        -(2**63),
        2**64,
        -(2**63) - 1,
        10**300,
        1.5,
        "text",
        "",
        "é\0",
        b"",
        b"\xff" * 5,
        bytes(100_000),
        [],
        (),
        {},
        [1, (2, [3])],
        {"a": 1, 7: [None]},
        {"nested": {"deep": (1, {"x": [2**80]})}},
        float("inf"),
        -0.0,
    ],
    ids=lambda v: repr(v)[:20],
)
def test_a_plain_value_comes_back_equal_and_of_the_same_type(value: Any):
    found = sent(value)
    assert (found, type(found)) == (value, type(value))


def test_not_a_number_comes_back_as_such():
    assert np.isnan(sent(float("nan")))
    assert np.isnan(sent(np.float16("nan")))
    assert np.isnan(sent(np.array([np.nan, 1.0]))[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_and_numbers_of_every_dtype_come_back(dtype: np.dtype):
    for array in (
        np.array([0, 1, 1], dtype),
        np.array(1, dtype),
        np.zeros(0, dtype),
        np.zeros((3, 0, 2), dtype),
        np.ones((2, 3, 4), dtype),
    ):
        found = sent(array)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert np.array_equal(found, array)
    number = sent(dtype.type(1))
    assert (type(number), number) == (dtype.type, 1)


def test_a_strided_array_is_made_whole_and_a_big_endian_one_turned():
    grid = np.arange(24).reshape(4, 6)
    for array in (
        grid[:, ::2],
        grid.T,
        grid[::-1],
        np.asfortranarray(grid),
        np.array([1, 2], ">i4"),
        np.array(3, ">f8"),
    ):
        found = sent(array)
        assert np.array_equal(found, array)
        assert found.shape == array.shape
        assert found.dtype == array.dtype.newbyteorder("<")


def test_a_contiguous_array_is_sent_from_where_it_lies():
    arrays = {f"a{i}": np.zeros(2**17) for i in range(30)}
    tracemalloc.start()
    header, columns = encode(arrays)
    pieces = pack(header, columns)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert all(
        np.shares_memory(np.frombuffer(p, np.uint8), a)
        for p, a in zip([p for p in pieces if len(p) == 2**20], arrays.values(), strict=True)
    )


def test_a_small_array_stands_in_the_header_unless_it_lies_in_shared_memory():
    small, large, lent = np.arange(32), np.arange(33), np.frombuffer(bytearray(64), np.int64)
    assert encode([small, small[:0], small[::2], np.zeros(3, bool)])[1] == []
    assert len(encode([large, np.zeros((2, 2)), lent])[1]) == 3
    back = sent({"a": small, "b": np.zeros(0, np.float32)})
    assert back["a"].tolist() == small.tolist()
    assert back["a"].dtype == small.dtype
    assert not back["a"].flags.writeable
    assert back["b"].dtype == np.float32
    assert back["b"].shape == (0,)


def test_decoding_thirty_megabytes_of_arrays_allocates_no_more_than_their_names():
    frame = joined(*encode({f"a{i}": np.zeros(2**17) for i in range(30)}))
    tracemalloc.start()
    found = decode(*unpack(frame))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 30
    assert peak < 100_000


def test_a_slice_of_a_ragged_column_sends_its_rows_only():
    whole = Ragged(np.arange(100_000), np.arange(0, 100_001, 10))
    header, columns = encode(whole.slice(500, 503))
    assert sum(c.nbytes for c in columns) == 30 * 8 + 4 * 8
    found = decode(header, columns)
    assert [found[i].tolist() for i in range(3)] == [whole[i].tolist() for i in (500, 501, 502)]
    assert np.shares_memory(columns[0], whole.values)


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a"]),
        np.array([object()]),
        np.zeros(1, "M8[s]"),
        np.zeros(1, complex),
        np.datetime64("now"),
        np.longdouble(1),
        object(),
        {1, 2},
        frozenset(),
        range(3),
        len,
        int,
        1j,
        np.ma.zeros(3),
        bytearray(b"x"),
        memoryview(b"x"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_travel_is_refused_with_its_place(value: Any):
    found = SampleBlock.empty(0)
    with pytest.raises(FrameError, match=re.escape("value[1].found.meta['x']: expected ")):
        encode(
            [
                0,
                Announce(
                    0,
                    0,
                    0,
                    0,
                    SampleBlock(
                        *[getattr(found, n) for n in codec.KINDS["SampleBlock"].names[:4]],
                        {"x": value},
                        *[()] * 5,
                    ),
                ),
            ]
        )


@pytest.mark.parametrize("key", [1.5, None, True, (1,), b"x", np.int64(1)], ids=repr)
def test_a_key_is_a_text_or_a_whole_number(key: Any):
    with pytest.raises(FrameError, match="expected keys of type str or int, got"):
        encode({"a": {key: 1}})


def test_values_nested_without_end_are_refused_and_never_overflow_the_stack():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(FrameError, match="at most 64 levels of nesting"):
        encode(loop)
    with pytest.raises(FrameError, match="at most 64 levels of nesting"):
        decode(b"\x92\x00" * 67 + b"\x91\x00", [])
    for head in (b"\x92\x00", b"\x82\x01\x01\x02", b"\x91"):
        with pytest.raises(FrameError):
            decode(head * 100_000 + b"\xc0", [])


def test_what_is_nested_just_deep_enough_comes_back():
    value: Any = [2**70, np.arange(3), Consumed(1, 2)]
    for _ in range(63):
        value = [value]
    found = sent(value)
    for _ in range(63):
        (found,) = found
    assert found[0] == 2**70
    assert found[2] == Consumed(1, 2)
    with pytest.raises(FrameError, match="levels of nesting"):
        encode([[value]])


def test_a_number_of_more_than_four_thousand_bytes_is_refused():
    with pytest.raises(FrameError, match="at most 4096 bytes"):
        encode([1 << 40_000])
    with pytest.raises(FrameError, match="at most 64 bits"):
        encode({1 << 70: 0})


def test_half_a_character_is_no_text():
    with pytest.raises(FrameError, match="lone surrogate"):
        encode(["a\ud800"])


def test_other_mappings_arrive_as_dicts_and_metadata_as_what_it_is():
    assert sent(MappingProxyType({"a": 1})) == {"a": 1}
    found = sent(
        Columns({"tokens": np.arange(3), "images": Ragged.from_rows([[1], [], [2, 3]])}, step=4)
    )
    assert type(found) is Columns
    with pytest.raises(
        OverlordError, match="plan of step 4: expected metadata of images, tokens, got 'x'"
    ):
        found["x"]


# records


def test_a_record_comes_back_with_its_fields():
    for record in (
        Consumed(1, 2),
        Cursor(1, 2, 3),
        SetMixture(4, {"web": 0.5, "code": 1}),
        Skip((3, 1)),
        Batch(samples=3, context=8),
    ):
        found = sent(record)
        assert type(found) is type(record)
        assert found == record


def test_a_plan_comes_back_valid_and_with_the_same_digest():
    rows, zero = np.arange(4), np.zeros(4, np.int32)
    main = Assignment(
        axis="DP",
        n_buckets=2,
        n_microbatches=1,
        sample=rows,
        bucket=np.array([0, 0, 1, 1], np.int32),
        microbatch=zero,
        slot=np.array([0, 1, 0, 1], np.int32),
        size=rows + 1,
        cost=rows.astype(float),
        broadcast=("TP",),
    )
    plan = LoadingPlan(
        step=3,
        names=("web", "code"),
        source=zero,
        epoch=zero,
        file=zero,
        row=rows,
        part=zero,
        tokens=rows + 1,
        modules={"backbone": main},
        place=Mesh(dp=2, tp=2),
        extra={"weights": {"web": 0.5}, "list": [1, "a"]},
    )
    found = sent(plan)
    assert found.validate().digest() == plan.digest()
    assert found.extra == plan.extra


def test_all_messages_and_what_they_hold_are_known_from_the_start():
    modules = (control, data, data, data)
    wanted = {
        c.__name__
        for m in modules
        for c in vars(m).values()
        if isinstance(c, type) and c.__module__ == m.__name__
    }
    assert wanted | {"LoadingPlan", "Assignment", "Mesh", "Buffer"} <= set(codec.KINDS)


STATE = StreamState(3, np.zeros((2, 6), np.int64), (1, 2), (True, False))


@pytest.mark.parametrize(
    ("record", "field", "wrong", "words"),
    [
        (Consumed(1, 2), "step", "2", "value.step: expected int, got '2'"),
        (Consumed(1, 2), "step", True, "value.step: expected int, got True"),
        (Consumed(1, 2), "rank", None, "value.rank: expected int, got None"),
        (Consumed(1, 2), "rank", 1.0, "expected int, got 1.0"),
        (STATE, "cursors", [[1]], "value.cursors: expected ndarray, got list"),
        (STATE, "owed", (1, "2"), "value.owed: expected tuple[int, ...], got tuple"),
        (STATE, "owed", [1, 2], "expected tuple[int, ...], got list"),
        (STATE, "owed", (1, 2.5), "expected tuple[int, ...]"),
        (STATE, "active", (1, 0), "expected tuple[bool, ...]"),
        (STATE, "events", (Consumed(1, 2),), "value.events: expected tuple["),
        (STATE, "counts", {"tokens": 3}, "value.counts: expected "),
        (STATE, "counts", {3: np.arange(3)}, "value.counts: expected "),
        (STATE, "ahead", (3,), "value.ahead: expected "),
        (STATE, "weights", ("x",), "value.weights: expected tuple[float, ...]"),
        (STATE, "schedule", 3, "value.schedule: expected "),
        (
            BlockReady(SampleBlock.empty(0), 1, 2),
            "seconds",
            True,
            "value.seconds: expected float, got True",
        ),
        (Announce(0, 0, 0, 0, None), "error", "no", "value.error: expected "),
        (Announce(0, 0, 0, 0, None), "found", Consumed(1, 2), "value.found: expected "),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_where_it_arrives(
    record: Any, field: str, wrong: Any, words: str
):
    object.__setattr__(
        record := type(record)(
            **{n: getattr(record, n) for n in codec.KINDS[type(record).__name__].names}
        ),
        field,
        wrong,
    )
    header, columns = encode(record)
    with pytest.raises(FrameError, match=re.escape(words)):
        decode(header, columns)


def test_numbers_of_numpy_fit_where_numbers_are_wanted():
    state = StreamState(
        np.int64(3),
        np.zeros((1, 6)),
        (np.int32(1), 2),
        (np.bool_(True), False),
        weights=(np.float32(0.5), 1),
    )
    found = sent(state)
    assert (found.step, found.owed, found.active, found.weights) == (
        3,
        (1, 2),
        (True, False),
        (0.5, 1),
    )
    assert type(found.weights[1]) is int


def test_a_record_with_other_fields_or_an_unknown_name_is_refused():
    layout = codec.KINDS["Consumed"].layout
    for fields in ([layout, 1], [layout, 1, 2, 3], [layout + 1, 1, 2], [layout], [], ["x", 1, 2]):
        with pytest.raises(
            FrameError,
            match="expected a Consumed of rank, step, got a record with other fields; run "
            "the same version",
        ):
            decode(tree([8, "Consumed", *fields]), [])
    with pytest.raises(
        FrameError, match="expected a known record, got 'Consumd'; did you mean 'Consumed'"
    ):
        decode(tree([8, "Consumd", 0]), [])
    with pytest.raises(FrameError, match="expected a known record, got 7"):
        decode(tree([8, 7]), [])


def test_a_record_that_its_own_class_refuses_is_refused():
    header, columns = encode(Mesh(dp=66))
    with pytest.raises(
        FrameError,
        match=r"expected a valid Mesh, got JobError: place.dp: expected a whole "
        r"number",
    ):
        decode(header.replace(b"\x42", b"\x00"), columns)


def test_a_record_of_yours_travels_once_it_is_made_known():
    @dataclass(frozen=True)
    class Nothing:
        pass

    @register
    @dataclass(frozen=True, kw_only=True)
    class Parcel:
        step: int
        tokens: Ragged
        how: Literal["whole", "half"]
        by: Mapping[str, Any] | None = None
        pair: tuple[int, str] = (0, "")
        beside: list[int] | None = None

    class Pair(NamedTuple):
        a: np.ndarray
        b: Any = None

    try:
        with pytest.raises(
            FrameError,
            match=r"got .*Nothing; send plain values, numpy arrays, or a record registered with",
        ):
            encode(Nothing())
        register(Nothing)
        register(Pair)
        tokens, by = Ragged.from_rows([[1, 2], [3]]), {"x": Pair(np.arange(2))}
        found = sent(
            [Nothing(), Parcel(step=1, tokens=tokens, how="half", by=by, pair=(1, "a"), beside=[1])]
        )
        assert found[0] == Nothing()
        assert found[1].tokens[1].tolist() == [3]
        assert found[1].by["x"].a.tolist() == [0, 1]
        for wrong in (
            {"how": "third"},
            {"pair": (1,)},
            {"pair": ("a", 1)},
            {"beside": (1,)},
            {"beside": ["a"]},
            {"by": [1]},
        ):
            bad = Parcel(**{"step": 1, "tokens": found[1].tokens, "how": "half", **wrong})
            with pytest.raises(FrameError, match=rf"value.{next(iter(wrong))}: expected"):
                sent(bad)
        assert register(Parcel) is Parcel
        other = dataclass(frozen=True)(type("Parcel", (), {}))
        with pytest.raises(TypeError, match="a record Parcel is already registered"):
            register(other)
        for no_record in (int, dataclass(type("Loose", (), {})), type("Plain", (), {})):
            with pytest.raises(TypeError, match="register: expected a frozen dataclass"):
                register(no_record)
    finally:
        for name in ("Nothing", "Parcel", "Pair"):
            codec.KINDS.pop(name, None)


def test_a_buffer_comes_back_for_a_strategy_to_see():
    buffer = Buffer.from_columns(
        {"web": {"tokens": [5, 9], "images": [[1], [2, 3]]}}, batch=Batch(samples=2, context=16)
    )
    found = sent(buffer)
    assert repr(found) == repr(buffer)
    assert type(found.meta) is Columns


# forged headers


ONE = [np.arange(3), np.zeros((2, 2), np.uint8), np.array([0, 5, 2]), np.array([-1, 2])]


@pytest.mark.parametrize(
    "lie",
    [
        [],
        [11],
        [-1],
        ["x"],
        [None],
        [True, 1],
        [[0]],
        [2],
        [2, 4],
        [2, -1],
        [2, 0, 0],
        [2, True],
        [2, 0.0],
        [2, None],
        [3, 0],
        [3, 0, 3],
        [3, 0, 4],
        [3, 0, 1],
        [3, 0, 2],
        [3, 2, 1],
        [4, 12, b"x"],
        [4, -1, bytes(8)],
        [4, 4, b"short"],
        [4, 0, "x"],
        [5, "x"],
        [5, bytes(4097)],
        [5],
        [10],
        [10, 4],
        [10, 4, bytes(7)],
        [10, 12, bytes(8)],
        [10, -1, bytes(8)],
        [10, 4, "x"],
        [10, 4, bytes(264)],
        [10, True, bytes(8)],
        [6, 0],
        [6, 1],
        [6, 9],
        [7, 0, []],
        [7, 0, {"a": 1}],
        [7, 0, {1: [2, 0]}],
        [7, "0", {}],
        {1.5: 0},
        {None: 0},
        {b"a": 0},
        {(1, 2): 0},
        msgspec.msgpack.Ext(5, b"x"),
        [0, msgspec.msgpack.Ext(-1, bytes(4))],
    ],
    ids=lambda lie: repr(lie).partition(" object at ")[0],
)
def test_a_header_that_lies_is_refused(lie: Any):
    with pytest.raises(FrameError, match="expected"):
        decode(tree(lie), ONE)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\x01",
        b"\xc6\x7f\xff\xff\xff",
    ],
    ids=repr,
)
def test_a_header_that_is_no_messagepack_is_refused_without_believing_its_lengths(header: bytes):
    tracemalloc.start()
    with pytest.raises(FrameError, match="expected a header in MessagePack"):
        decode(header, [])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
