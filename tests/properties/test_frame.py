"""Properties of frames: every value returns equal. Any bytes give an equal value, another of the
closed list, or a FrameError.
"""

from __future__ import annotations

import struct
import tracemalloc
import types
import zlib
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from overlord import errors
from overlord.errors import FrameError
from overlord.mesh import AXES, Batch, ClientPlaceTree
from overlord.messages.batches import Announcements, Refills
from overlord.sample import Columns, Ragged
from overlord.transport.codec import KINDS, decode, encode
from overlord.transport.frame import DTYPES, PREFIX_BYTES, frame_bytes, pack, size_of, unpack
from tests.laws import examples

ENTRY = struct.Struct("<BB6sQQ8Q")
NUMBERS = {int: (int, np.integer), float: (int, float, np.number), bool: (bool, np.bool_)}

# values that can be sent


def tables(columns: int) -> Any:
    """Return a strategy of int64 tables with so many columns."""
    return st.integers(0, 4).flatmap(lambda n: hnp.arrays(np.int64, (n, columns)))


def announcements(counts: np.ndarray) -> Any:
    """Return a strategy of joined announcements of so many samples each."""
    column = st.sampled_from(DTYPES).flatmap(lambda d: hnp.arrays(d, int(counts.sum())))
    table = hnp.arrays(np.int64, (len(counts), 8)).map(
        lambda rows: np.column_stack([rows[:, :4], counts, rows[:, 5:]])
    )
    meta = st.dictionaries(texts, column, max_size=3)
    return st.builds(Announcements, table, column, column, column, column, meta)


arrays = st.sampled_from(DTYPES).flatmap(
    lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
numbers = st.sampled_from(DTYPES).flatmap(lambda d: hnp.from_dtype(d))
raggeds = st.builds(
    lambda rows, cut: Ragged.from_rows(rows, np.int32).slice(min(cut, len(rows)), len(rows)),
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5),
    st.integers(0, 2),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
faults = st.one_of(
    st.builds(errors.SourceError, texts, texts),
    st.builds(errors.JobError, st.lists(texts, max_size=3)),
    st.builds(ValueError, st.integers()),
    st.builds(errors.DataStall, texts, st.floats(0, 9)),
    st.builds(errors.StateMismatch, st.dictionaries(texts, st.tuples(texts, texts))),
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**90), 2**90),
    st.floats(),
    texts,
    st.binary(max_size=9),
)
keys = texts | st.integers(-(2**63), 2**64 - 1)
values = st.recursive(
    st.one_of(
        plain, arrays, numbers, raggeds, faults, st.binary(min_size=2**14, max_size=2**14 + 5)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)
WORKER_RUNTIME: dict[Any, Any] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats() | st.integers(-99, 99),
    bool: st.booleans(),
    str: texts,
    bytes: st.binary(max_size=9),
    type(None): st.none(),
    np.ndarray: arrays,
    Ragged: raggeds,
    Exception: faults,
    Any: st.recursive(plain, lambda v: st.lists(v, max_size=3)),
    ClientPlaceTree: st.builds(
        ClientPlaceTree,
        dp=st.integers(1, 99),
        tp=st.integers(1, 9),
        order=st.permutations(AXES).map(tuple),
    ),
    Batch: st.builds(Batch, samples=st.integers(1, 99), context=st.integers(1, 99)),
    Announcements: st.lists(st.integers(0, 3), max_size=3).flatmap(
        lambda counts: announcements(np.array(counts, np.int64))
    ),
    Refills: tables(4).map(Refills),
}


def of(annotation: Any) -> Any:
    """Return a strategy of values that match an annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in WORKER_RUNTIME:
        return WORKER_RUNTIME[annotation]
    if origin in (Union, types.UnionType):
        return st.one_of(*map(of, args))
    if origin is tuple and args[1:] == (Ellipsis,):
        return st.lists(of(args[0]), max_size=5).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of, args))
    if origin is list:
        return st.lists(of(args[0]), max_size=4)
    if origin in (Mapping, dict):
        return st.dictionaries(of(args[0]), of(args[1]), max_size=4)
    return record_of(annotation)


def record_of(cls: type) -> Any:
    if cls in WORKER_RUNTIME:
        return WORKER_RUNTIME[cls]
    hints = get_type_hints(cls, localns={name: kind.cls for name, kind in KINDS.items()})
    return st.deferred(
        lambda: st.builds(cls, **{name: of(hints[name]) for name in KINDS[cls.__name__].names})
    )


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal and of the same types at every level; NaNs are equal."""
    if isinstance(a, (np.ndarray, np.generic)):
        return (
            type(a) is type(b)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, Ragged):
        return len(a) == len(b) and all(same(a[i], b[i]) for i in range(len(a)))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (a != a and b != b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if type(a).__name__ in KINDS:
        return all(same(getattr(a, n), getattr(b, n)) for n in KINDS[type(a).__name__].names)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Exception):
        return same(a.args, b.args) and str(a) == str(b)
    return bool(a == b)


def joined(header: bytes, columns: list[np.ndarray]) -> bytes:
    return b"".join(bytes(piece) for piece in pack(header, columns))


def header_end(frame: bytes) -> int:
    columns, header = struct.unpack_from("<II", frame, 8)
    return PREFIX_BYTES + ENTRY.size * columns + header


def with_crc(frame: bytes) -> bytes:
    """Return the frame with its correct checksum, as an attacker who knows the layout would send
    it.
    """
    crc = zlib.crc32(frame[32 : header_end(frame)], zlib.crc32(frame[:28]))
    return frame[:28] + struct.pack("<I", crc) + frame[32:]


def outcome(frame: bytes) -> Any:
    """Return the decoded value, after touching its arrays, or FrameError. Anything else fails the
    test.
    """
    buffer = np.frombuffer(frame, np.uint8)
    try:
        header, columns = unpack(buffer)
        for column in columns:
            inside(column, buffer)
        return decode(header, columns)
    except FrameError as e:
        return e


def inside(column: np.ndarray, buffer: np.ndarray) -> None:
    start, first = column.__array_interface__["data"][0], buffer.__array_interface__["data"][0]
    assert column.nbytes == 0 or first <= start <= start + column.nbytes <= first + buffer.nbytes
    assert not column.flags.writeable
    assert column.flags.c_contiguous
    column.tobytes()


def parts_of(tree: Any) -> list[Any]:
    return list(tree.values()) if isinstance(tree, dict) else tree


def fits(value: Any, annotation: Any) -> bool:
    """Return whether a value matches an annotation: slow, and independent of the codec."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, a) for a in args)
    if origin is tuple:
        each = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        return type(value) is tuple and len(value) == len(each) and all(map(fits, value, each))
    if origin is list:
        return type(value) is list and all(fits(v, args[0]) for v in value)
    if origin in (Mapping, dict):
        return isinstance(value, dict) and all(
            fits(k, args[0]) and fits(v, args[1]) for k, v in value.items()
        )
    if annotation in NUMBERS:
        return isinstance(value, NUMBERS[annotation]) and (
            annotation is bool or not isinstance(value, bool)
        )
    if not isinstance(value, annotation):
        return False
    hints = (
        get_type_hints(annotation, localns={n: k.cls for n, k in KINDS.items()})
        if annotation.__name__ in KINDS
        else {}
    )
    return all(fits(getattr(value, n), hints[n]) for n in hints)


def is_known(value: Any) -> bool:
    """Return whether a value is of the closed list, at every level."""
    if isinstance(value, dict):
        return type(value) in (dict, Columns) and all(
            type(k) in (str, int) and is_known(v) for k, v in value.items()
        )
    if type(value) in (list, tuple):
        return all(map(is_known, value))
    if type(value).__name__ in KINDS:
        return type(value) is KINDS[type(value).__name__].cls
    if isinstance(value, Exception):
        return type(value).__module__ in ("builtins", "overlord.errors")
    return (
        value is None
        or type(value) in (bool, int, float, str, bytes, np.ndarray, Ragged)
        or isinstance(value, np.generic)
    )


# round trips


@given(values)
def test_a_tree_of_values_comes_back_equal_and_of_the_same_types(value: Any):
    header, columns = encode(value)
    frame = joined(header, columns)
    assert len(frame) == size_of(header, columns) == frame_bytes(frame[:PREFIX_BYTES])
    assert same(decode(*unpack(frame)), value)


@pytest.mark.parametrize("name", sorted(KINDS))
@examples(15)
@given(st.data())
def test_every_kind_of_record_comes_back_equal(name: str, data: st.DataObject):
    record = data.draw(record_of(KINDS[name].cls))
    assert same(decode(*unpack(joined(*encode(record)))), record)


@given(values, st.integers(0, 63))
def test_columns_are_aligned_views_wherever_the_frame_lies(value: Any, shift: int):
    frame = joined(*encode(value))
    room = np.zeros(len(frame) + shift, np.uint8)
    room[shift:] = np.frombuffer(frame, np.uint8)
    found = unpack(room[shift:])
    first = room[shift:].__array_interface__["data"][0]
    assert all(
        (c.__array_interface__["data"][0] - first) % 64 == 0 for c in found.columns if c.nbytes
    )
    assert same(decode(*found), value)


# damage


@given(values, st.data())
def test_one_flipped_bit_is_noticed_unless_it_is_in_a_column(value: Any, data: st.DataObject):
    frame = joined(*encode(value))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    broken = bytearray(frame)
    broken[bit // 8] ^= 1 << bit % 8
    found = outcome(bytes(broken))
    if bit // 8 < header_end(frame):
        assert isinstance(found, FrameError)
    else:
        assert [(c.dtype, c.shape) for c in unpack(broken).columns] == [
            (c.dtype, c.shape) for c in unpack(frame).columns
        ]


@given(values, st.data())
def test_a_frame_that_is_cut_or_has_more_behind_it_is_refused(value: Any, data: st.DataObject):
    frame = joined(*encode(value))
    assert isinstance(outcome(frame[: data.draw(st.integers(0, len(frame) - 1))]), FrameError)
    assert isinstance(outcome(frame + data.draw(st.binary(min_size=1, max_size=70))), FrameError)


@given(st.binary(max_size=300), st.booleans())
def test_bytes_that_are_no_frame_are_refused(data: bytes, starts_well: bool):
    assert isinstance(outcome(b"OVFR\1\0\0\0" + data if starts_well else data), FrameError)


EDGES = [
    0,
    1,
    63,
    64,
    65,
    128,
    2**31,
    2**32,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 64,
    2**64 - 8,
    2**64 - 1,
]
hostile = st.sampled_from(EDGES) | st.integers(0, 600)


@examples(300)
@given(st.lists(arrays, min_size=1, max_size=3), st.data())
def test_a_table_with_any_numbers_gives_no_view_outside_the_frame(
    columns: list[np.ndarray], data: st.DataObject
):
    header, kept = encode(
        [*columns, np.arange(64)]
    )  # small arrays stand in the header and not in the table
    frame = joined(header, kept)
    at = PREFIX_BYTES + ENTRY.size * data.draw(st.integers(0, len(kept) - 1))
    entry = list(ENTRY.unpack_from(frame, at))
    for place in data.draw(st.lists(st.integers(0, len(entry) - 1), min_size=1, max_size=4)):
        bound = 255 if place < 2 else 2**64
        entry[place] = (
            data.draw(st.binary(min_size=6, max_size=6))
            if place == 2
            else data.draw(hostile) % bound
        )
    lie = with_crc(frame[:at] + ENTRY.pack(*entry) + frame[at + ENTRY.size :])
    found = outcome(lie)
    assert isinstance(found, FrameError) or is_known(found)


@given(
    values,
    st.sampled_from([(8, "<I"), (12, "<I"), (16, "<Q"), (4, "<H"), (6, "<H"), (24, "<I")]),
    hostile,
)
def test_a_start_with_any_numbers_is_refused_or_the_truth(
    value: Any, place: tuple[int, str], number: int
):
    at, form = place
    frame = joined(*encode(value))
    lie = bytearray(frame)
    struct.pack_into(form, lie, at, number % 2 ** (8 * struct.calcsize(form)))
    if header_end(bytes(lie)) <= len(lie):
        lie = bytearray(with_crc(bytes(lie)))
    found = outcome(bytes(lie))
    assert isinstance(found, FrameError) or same(found, value)


# forged headers with a correct checksum

small = st.integers(-2, 11)
names = st.sampled_from(
    [
        *sorted(KINDS),
        *sorted(vars(errors)),
        "ValueError",
        "OSError",
        "ExceptionGroup",
        "KeyboardInterrupt",
        "eval",
        "",
    ]
)
layouts = st.sampled_from([kind.layout for kind in KINDS.values()])
trees = st.recursive(
    st.one_of(
        plain.filter(lambda v: type(v) is not int or -(2**63) <= v < 2**64),
        small,
        small,
        names,
        layouts,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.builds(lambda tag, rest: [tag, *rest], st.integers(0, 9), st.lists(inner, max_size=5)),
        st.builds(
            lambda n, rest: [8, n, KINDS[n].layout, *rest],
            st.sampled_from(sorted(KINDS)),
            st.lists(inner, max_size=4),
        ),
        st.builds(
            lambda n, args, notes: [9, n, [1, *args], notes],
            names,
            st.lists(inner, max_size=5),
            st.lists(texts, max_size=2),
        ),
        st.dictionaries(texts | small, inner, max_size=4),
    ),
    max_leaves=25,
)
COLUMNS = [
    np.arange(4),
    np.array([0, 2, 4]),
    np.zeros(3, np.uint8),
    np.array(1.5),
    np.array([0, 9, -1]),
    np.zeros((2, 0)),
]


@examples(500)
@given(trees)
@example([8, "Mesh", KINDS["Mesh"].layout, 1, 1, 1, 0, [1]])
@example([9, "DataStall", [1, [0], [0]], []])
@example([7, 2**63, {"a": [2, 0]}])
def test_any_tree_in_the_header_gives_a_known_value_or_is_refused(tree: Any):
    found = outcome(joined(msgspec.msgpack.encode(tree), COLUMNS))
    assert is_known(found)


@pytest.mark.parametrize("name", sorted(KINDS))
@examples(15)
@given(st.data())
def test_a_record_with_any_part_exchanged_is_refused_or_has_fields_of_the_right_types(
    name: str, data: st.DataObject
):
    header, columns = encode(data.draw(record_of(KINDS[name].cls)))
    tree = msgspec.msgpack.decode(header)
    spot = tree
    while data.draw(st.booleans()) and (
        inner := [p for p in parts_of(spot) if type(p) in (list, dict) and p]
    ):
        spot = data.draw(st.sampled_from(inner))
    place = data.draw(st.sampled_from(list(spot) if isinstance(spot, dict) else range(len(spot))))
    spot[place] = data.draw(trees)
    found = outcome(joined(msgspec.msgpack.encode(tree), columns))
    assert is_known(found)
    if type(found) is KINDS[name].cls:
        assert fits(found, type(found))


@examples(300)
@given(
    st.one_of(
        *(
            record_of(KINDS[n].cls)
            for n in ("Announce", "PlannedStep", "StreamState", "Skip", "Batch")
        )
    ),
    st.data(),
)
def test_headers_with_any_bytes_changed_give_a_known_value_or_are_refused(
    record: Any, data: st.DataObject
):
    header, columns = encode(record)
    broken = bytearray(header)
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(broken), len(broken) - 1, len(broken) // 2]))
    assert is_known(outcome(joined(bytes(broken[:cut]), columns)))


LENGTHS = [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]  # 32-bit length prefixes


@given(
    st.lists(
        st.tuples(st.sampled_from(LENGTHS), st.integers(2**16, 2**32 - 1)), min_size=1, max_size=40
    ),
    st.binary(max_size=200),
)
def test_no_length_is_believed_before_the_bytes_are_there(
    lengths: list[tuple[bytes, int]], rest: bytes
):
    header = b"".join(kind + struct.pack(">I", n) for kind, n in lengths) + rest
    frame = joined(header, [])
    tracemalloc.start()
    found = outcome(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, FrameError)
    assert peak < 50_000 + 100 * len(frame)


PIECES = [
    b"\x90",
    b"\x80",
    b"\xc0",
    b"\x91\x00",
    b"\x92\x02\x00",
    b"\x93\x03\x00\x01",
    b"\xa0",
    b"\xc4\x00",
]


@examples(20)
@given(st.sampled_from(PIECES), st.integers(1, 20_000))
def test_many_small_values_take_no_more_than_a_hundred_times_their_bytes(piece: bytes, count: int):
    header = b"\xdd" + struct.pack(">I", count + 1) + b"\x00" + piece * count
    frame = joined(header, COLUMNS)
    tracemalloc.start()
    found = outcome(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert is_known(found)
    assert peak < 100_000 + 150 * len(header)
