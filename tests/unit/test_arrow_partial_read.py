"""Rows of Arrow's record batches by plain reads: the rows that were written, whatever their types,
and nothing mapped.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.errors import SourceError
from overlord.sources import arrow_partial_read
from overlord.sources.base import ReadOptions
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.index import build_index
from tests.corpus import write_rows
from tests.source_reads import read_all

LAW = settings(max_examples=60, deadline=None)
KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int8(), st.integers(-128, 127)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.null(), st.none()),
    (pa.string(), st.text(max_size=5)),
    (pa.large_binary(), st.binary(max_size=5)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.decimal128(9, 2), st.integers(-999, 999).map(lambda k: Decimal(k) / 100)),
    (pa.list_(pa.int32()), st.lists(st.integers(0, 9), max_size=3)),
    (pa.large_list(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
    (pa.list_(pa.list_(pa.bool_())), st.lists(st.lists(st.booleans(), max_size=3), max_size=3)),
    (
        pa.list_(pa.struct([("bytes", pa.binary()), ("n", pa.int16())])),
        st.lists(
            st.fixed_dictionaries(
                {"bytes": st.binary(max_size=4), "n": st.none() | st.integers(0, 9)}
            ),
            max_size=3,
        ),
    ),
    (
        pa.struct([("a", pa.list_(pa.int8())), ("b", pa.bool_())]),
        st.fixed_dictionaries({"a": st.lists(st.just(7)), "b": st.booleans()}),
    ),
    (
        pa.list_(pa.int8(), 2),
        st.lists(st.integers(0, 9), min_size=2, max_size=2),
    ),  # from here on read whole
    (
        pa.map_(pa.string(), pa.int8()),
        st.lists(st.tuples(st.text(max_size=3), st.integers(0, 9)), max_size=2),
    ),
    (pa.string_view(), st.text(max_size=20)),
    (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["x", "y", "long enough"])),
]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    n, kinds = (
        draw(st.integers(1, 40)),
        draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)),
    )
    columns = [
        pa.array(draw(st.lists(st.none() | values, min_size=n, max_size=n)), type=kind)
        for kind, values in kinds
    ]
    return pa.table(columns, names=[f"c{k}" for k in range(len(columns))])


def write(
    path: Path, table: pa.Table, *, file: bool = True, rows: int = 10**9, packed: str | None = None
) -> Path:
    make = pa.ipc.new_file if file else pa.ipc.new_stream
    with make(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=packed)) as out:
        out.write_table(table, max_chunksize=rows)
    return path


@LAW
@given(
    table=tables(),
    small=st.sampled_from([0, 64, 10**9]),
    file=st.booleans(),
    step=st.integers(1, 50),
    rows=st.integers(1, 50),
    packed=st.sampled_from([None, None, "lz4", "zstd"]),
    wanted=st.data(),
)
def test_all_rows_come_as_they_were_written_whether_batches_are_read_whole_or_in_part(
    table, small, file, step, rows, packed, wanted
):
    columns = wanted.draw(
        st.none()
        | st.permutations(table.column_names).map(
            lambda names: tuple(names[: max(1, len(names) // 2)])
        )
    )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_partial_read, "SMALL", small)
        found = read_all(
            str(write(Path(folder) / "a.arrow", table, file=file, rows=rows, packed=packed)),
            slice_rows=step,
            columns=columns,
        )
    assert found.reasons == []
    assert found.rows == table.select(list(columns or table.column_names)).to_pylist()


@pytest.mark.parametrize("small", [0, 10**9])
@pytest.mark.parametrize("file", [True, False])
def test_batches_without_rows_and_wide_schemas_are_passed_over(tmp_path, monkeypatch, small, file):
    monkeypatch.setattr(arrow_partial_read, "SMALL", small)
    table = pa.table(
        {f"column {k} with a name": ["x", "y"] for k in range(100)}
    )  # metadata of more than one read
    make = pa.ipc.new_file if file else pa.ipc.new_stream
    with make(str(tmp_path / "a.arrow"), table.schema) as out:
        for k in (0, 2, 0, 0, 2, 0):
            out.write_batch(table.to_batches()[0].slice(0, k))
    assert read_all(str(tmp_path / "a.arrow")).rows == table.to_pylist() * 2


def opened(path: Path, **options: Any) -> ChunkReader:
    wanted = ReadOptions(**options)
    return ChunkReader(build_index("web", str(path), None, wanted), wanted, OpenChunkCache())


@pytest.mark.parametrize("kind", ["text", "lists"])
def test_memory_follows_the_slice_and_not_the_batch(tmp_path, kind):
    value = "word " * 4000 if kind == "text" else list(range(5000))
    path = write(
        tmp_path / "a.arrow", pa.table({"a": [value] * 500, "b": ["unwanted" * 2000] * 500})
    )  # 18 MB
    reader, t, last = opened(path, slice_rows=32, columns=("a",)), 0, False
    tracemalloc.start()
    before = peak = pa.total_allocated_bytes()
    while not last:
        last, t = reader.slice(0, t).last, t + 1
        peak = max(peak, pa.total_allocated_bytes())
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert t == 16
    assert taken + peak - before < 4_000_000  # a slice has 0.64 MB


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
@pytest.mark.parametrize("packed", [None, "lz4"])
@pytest.mark.parametrize("file", [True, False])
def test_no_file_is_mapped(tmp_path, file, packed):
    table = pa.table({"a": ["word " * 100] * 3000, "d": pa.array(["x"] * 3000).dictionary_encode()})
    for columns in (["a"], ["a", "d"]):
        path = write(
            tmp_path / f"{len(columns)}.arrow", table.select(columns), file=file, packed=packed
        )
        reader = opened(path, slice_rows=100)
        held = reader.slice(0, 0)
        assert str(path) not in Path("/proc/self/maps").read_text()
        assert held.table.num_rows == 100
        reader.close()


@pytest.mark.parametrize("file", [True, False])
def test_what_is_broken_is_the_same_whether_batches_are_read_whole_or_in_part(
    tmp_path, monkeypatch, file
):
    """Offsets, one by one, of text and of text in lists: in the middle a few rows, at the end all
    that follows.
    """
    table = pa.table(
        {"t": [f"text {k}" for k in range(40)], "l": [[f"{k}", "more"] for k in range(40)]}
    )
    good = write(tmp_path / "a.arrow", table, file=file, rows=20).read_bytes()
    lists = table["l"].chunk(0)
    lost = dict[tuple[str, int, int], int]()
    for name, offsets in (("text", table["t"].chunk(0)), ("lists", lists), ("items", lists.values)):
        at = good.index(offsets.buffers()[1].to_pybytes()[:80])
        for k, wrong in itertools.product((0, 3, 8, 20), (2**30, -8)):
            data = bytearray(good)
            data[at + 4 * k : at + 4 * k + 4] = wrong.to_bytes(4, "little", signed=True)
            (tmp_path / "b.arrow").write_bytes(data)
            seen = []
            for small in (0, 10**9):
                monkeypatch.setattr(arrow_partial_read, "SMALL", small)
                found = read_all(str(tmp_path / "b.arrow"), slice_rows=8)
                seen.append((found.rows, found.ids, found.reasons))
            assert seen[0] == seen[1]
            assert seen[0][2]
            lost[name, k, wrong] = len(found.reasons)
    assert {lost["text", 3, 2**30], lost["text", 8, 2**30], lost["text", 8, -8]} == {2}


MIXED = pa.table(
    {
        "t": [f"text {k}" for k in range(40)],
        "l": [[str(k)] * (k % 3) for k in range(40)],
        "s": [[{"n": k}] for k in range(40)],
    }
)


@LAW
@given(
    file=st.booleans(),
    flips=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4
    ),
)
def test_flipped_bits_never_end_the_process_and_cost_the_same_rows_either_way(file, flips):
    seen = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = write(Path(folder) / "a.arrow", MIXED, file=file, rows=20)
        data = bytearray(path.read_bytes())
        for where, bit in flips:
            data[int(where * len(data))] ^= 1 << bit
        path.write_bytes(data)
        for small in (0, 10**9):
            patch.setattr(arrow_partial_read, "SMALL", small)
            try:
                found = read_all(str(path), slice_rows=8, columns=("t", "l"))
                seen.append((found.rows, found.ids, [row for row, _ in found.reasons]))
            except SourceError as error:
                seen.append(str(error))
    assert seen[0] == seen[1]


def test_an_end_mark_in_the_middle_of_a_file_is_no_end(tmp_path):
    path = write(tmp_path / "a.arrow", pa.table({"n": range(30)}), rows=10)
    data = path.read_bytes()
    starts = [
        m.start() for m in re.finditer(rb"\xff\xff\xff\xff", data)
    ]  # the schema, three batches, the end mark
    path.write_bytes(data[: starts[3] + 4] + bytes(4) + data[starts[3] + 8 :])
    found = read_all(str(path))
    assert [row["n"] for row in found.rows] == list(range(20))
    assert found.reasons == [(20, "expected valid Arrow data, got: expected 3 batches, got 2")]


# cut short while it is read: a process that really reads, since what must not happen ends it

READS = """
import os, sys
from overlord.errors import StorageError
from tests.unit.test_arrow_partial_read import opened

for path in sys.argv[1:]:
    reader, t, last = opened(path, slice_rows=16, columns=("text",)), 0, False
    print("open", flush=True)
    input()  # from here on it may be cut at any moment
    try:
        while not last:
            raw = reader.slice(0, t)
            texts = [f"{k:04d}" * 100 for k in raw.row]
            assert raw.bad == [] and raw.table["text"].to_pylist() == texts, t
            last, t = raw.last, t + 1
        print("all", flush=True)
    except StorageError as error:
        assert error.path == path, error
        print("lost", error, flush=True)
"""


@pytest.mark.parametrize("format", ["arrow", "arrow-stream"])
def test_a_file_cut_short_while_it_is_read_is_an_error_that_names_it_and_not_the_end_of_the_process(
    tmp_path, format
):
    rows = [{"text": f"{k:04d}" * 100, "more": "x" * 400} for k in range(4000)]
    write_rows(tmp_path, format, rows, files=1, batch_rows=1000)
    first = tmp_path / "part-00000.arrow"
    paths = [tmp_path / f"{k}.arrow" for k in range(12)]
    for path in paths:
        path.write_bytes(first.read_bytes())
    env = os.environ | {
        "OVERLORD_STORE_DEADLINE_S": "0.05",
        "OVERLORD_CACHE": str(tmp_path / "cache"),
    }
    with subprocess.Popen(
        [sys.executable, "-c", READS, *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        said = []
        for k, path in enumerate(paths):
            assert child.stdout.readline() == "open\n"
            child.stdin.write("\n")
            child.stdin.flush()
            for left in range(11, -1, -1):  # in steps, so that some of them come while it reads
                os.truncate(path, path.stat().st_size * left // (k + 12))
            said.append(child.stdout.readline())
    assert child.returncode == 0
    assert any("the file changed since the source was indexed" in line for line in said), said


def test_blank_memory_is_blank_again_after_an_error() -> None:
    """A later batch is decoded over the same memory."""
    data = b"\1" * 2**18
    feed = arrow_partial_read.Feed(pa.BufferReader(data), 0, len(data))
    blank = feed.read(2**18)
    assert blank.to_pybytes() == bytes(2**18)
    with feed.filled([(0, 8), (64, 8)]):
        assert blank.to_pybytes()[:72].count(1) == 16
    with pytest.raises(ValueError, match="not valid"), feed.filled([(0, 8), (64, 8)]):
        raise ValueError("not valid")
    assert blank.to_pybytes() == bytes(2**18)
    ranges: list[Any] = [(0, 8), (64, "8")]
    with pytest.raises(TypeError), feed.filled(ranges):
        pass
    assert blank.to_pybytes() == bytes(2**18), "a copy that failed"
