"""Parquet and Arrow IPC: what they share and what can be wrong with them."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from overlord.errors import SourceError
from overlord.sources import tables
from overlord.sources.base import ReadOptions, StorageUnreachable
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.formats import FORMATS
from overlord.sources.index import build_index
from tests.corpus import write_rows
from tests.source_reads import read_all

ROWS = [{"id": i, "text": f"row {i}"} for i in range(100)]


def test_a_parquet_chunk_is_a_row_group_and_rows_count_through_the_file(tmp_path):
    write_rows(tmp_path, "parquet", ROWS, files=2, row_group_size=20)
    everything = read_all(f"{tmp_path}/*.parquet", slice_rows=7, columns=("text",))
    chunks = everything.index.chunks
    assert chunks.file.tolist() == [0, 0, 0, 1, 1, 1]
    assert chunks.rows.tolist() == [20, 20, 10] * 2
    assert everything.ids == [(f, r) for f in range(2) for r in range(50)]
    assert everything.index.rows == 100
    assert everything.index.schema == {"id": "int64", "text": "string"}


def test_a_column_that_one_file_lacks_is_named_with_the_columns_it_has(tmp_path):
    for format in ("parquet", "arrow"):
        folder = tmp_path / format
        write_rows(folder, format, ROWS, files=2)
        write_rows(folder / "late", format, [{"id": 1, "body": "x"}], files=1)
        with pytest.raises(
            SourceError, match=r"expected the column 'text', got id, body"
        ) as caught:
            read_all(str(folder), columns=("id", "text"))
        assert "late/part-00000" in caught.value.path


def test_of_several_files_each_has_a_line_and_what_to_do_one_behind_them(tmp_path):
    write_rows(tmp_path, "parquet", ROWS, files=2)
    with pytest.raises(SourceError) as caught:
        read_all(str(tmp_path), columns=("body",))
    assert str(caught.value).splitlines() == [
        "source 'src': 2 of its 2 files cannot be used",
        f"  - {tmp_path}/part-00000.parquet: expected the column 'body', got id, text",
        f"  - {tmp_path}/part-00001.parquet: expected the column 'body', got id, text",
        "  to do: name a column that every file has, or rewrite the file",
    ]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: d[: len(d) // 2], "PAR1 at the end"),
        (lambda d: b"", "got 0 bytes"),
        (lambda d: b"not a parquet file at all", "PAR1 at the end"),
        (
            lambda d: (
                d[: -8 - int.from_bytes(d[-8:-4], "little")]
                + b"\xff" * int.from_bytes(d[-8:-4], "little")
                + d[-8:]
            ),
            "expected a valid footer",
        ),
    ],
)
def test_a_parquet_file_without_a_footer_is_an_error_and_all_bad_files_are_in_it(
    tmp_path, damage, says
):
    write_rows(tmp_path, "parquet", ROWS, files=4)
    for k in (1, 3):
        path = tmp_path / f"part-{k:05d}.parquet"
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=says) as caught:
        read_all(f"{tmp_path}/*.parquet")
    text = str(caught.value)
    assert "2 of its 4 files" in text
    assert "part-00001" in text
    assert "part-00003" in text
    assert "part-00002" not in text
    assert "rewrite the file" in text


def test_a_corrupt_page_loses_its_rows_by_number_and_no_others(tmp_path):
    rows = [{"text": f"{i:06d}" * 30} for i in range(3000)]
    write_rows(tmp_path, "parquet", rows, files=1, row_group_size=1000)
    path = tmp_path / "part-00000.parquet"
    column = pq.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    at = column.dictionary_page_offset + column.total_compressed_size // 2
    data[at : at + 200] = bytes(b ^ 0x55 for b in data[at : at + 200])
    path.write_bytes(data)
    everything = read_all(str(path), slice_rows=64)
    assert [r for _, r in everything.ids] == list(range(3000))
    lost = [row for row, _ in everything.reasons]
    assert lost
    assert set(lost) <= set(range(1000, 2000))
    assert all(
        "row group 1: expected valid data, got: " in reason for _, reason in everything.reasons
    )
    good = np.delete(np.arange(3000), lost)
    assert everything.rows == [rows[i] for i in good]


def test_page_checksums_are_checked_where_the_file_has_them(tmp_path):
    path = tmp_path / "a.parquet"
    values = np.arange(5000, dtype=np.int64)
    pq.write_table(
        pa.table({"a": values}),
        path,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    data = bytearray(path.read_bytes())
    data[20_000] ^= 1  # plain integers: nothing but the checksum could notice
    path.write_bytes(data)
    everything = read_all(str(path))
    assert len(everything.ids) == 5000
    assert everything.reasons
    assert "CRC" in everything.reasons[0][1]


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_a_parquet_file_without_rows_is_one_bad_row(tmp_path, groups):
    schema = pa.schema([("a", pa.int64())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as out:
        for _ in range(groups):
            out.write_table(schema.empty_table())
    pq.write_table(pa.table({"a": [1]}), tmp_path / "b.parquet")
    everything = read_all(f"{tmp_path}/*.parquet")
    assert everything.ids == [(0, 0), (1, 0)]
    assert everything.reasons == [(0, "the file has no rows")]


@pytest.mark.parametrize("format", ["parquet", "arrow", "arrow-stream"])
def test_text_that_is_no_utf8_is_a_bad_row(tmp_path, format):
    raw = pa.array([b"good", b"\xff\xfe", b"\xc3\xa9", None], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    table = pa.table({"t": text, "l": pa.array([["x"]] * 4)})
    path = tmp_path / f"a.{format.split('-')[0]}"
    if format == "parquet":
        pq.write_table(table, path)
    else:
        with (pa.ipc.new_file if format == "arrow" else pa.ipc.new_stream)(
            str(path), table.schema
        ) as out:
            out.write_table(table)
    everything = read_all(str(path))
    assert [r["t"] for r in everything.rows] == ["good", "é", None]
    assert everything.reasons == [(1, "column 't': expected UTF-8, got other bytes")]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_row_over_the_limit_is_a_bad_row(tmp_path, format):
    glob = write_rows(tmp_path, format, [{"a": "x" * n} for n in (10, 5000, 20)], files=1)
    everything = read_all(glob, max_sample_bytes=1000)
    assert [len(r["a"]) for r in everything.rows] == [10, 20]
    ((row, reason),) = everything.reasons
    assert row == 1
    assert "max_sample_bytes=1000" in reason


def test_small_and_large_row_groups_give_the_same_slices(tmp_path, monkeypatch):
    glob = write_rows(tmp_path, "parquet", ROWS, files=2, row_group_size=30)
    small = read_all(glob, slice_rows=8)
    monkeypatch.setattr("overlord.sources.parquet.SMALL_ROW_GROUP", 0)
    large = read_all(glob, slice_rows=8)
    assert (small.rows, small.ids) == (large.rows, large.ids)
    assert small.rows == ROWS


def test_memory_follows_the_slice_and_not_the_row_group(tmp_path):
    rng = np.random.default_rng(0)
    blobs = [rng.bytes(20_000) for _ in range(2000)]
    path = tmp_path / "a.parquet"
    # write_batch_size: else the writer looks at the size of a page only every 1024 rows, and a page
    # is what must be held
    pq.write_table(
        pa.table({"a": blobs}),
        path,
        row_group_size=2000,
        compression="none",
        use_dictionary=False,
        write_batch_size=16,
    )
    options = ReadOptions(slice_rows=32)
    reader = ChunkReader(build_index("src", str(path), None, options), options, OpenChunkCache())
    del blobs
    before = peak = pa.total_allocated_bytes()
    last, t = False, 0
    while not last:
        raw = reader.slice(0, t)
        peak = max(peak, pa.total_allocated_bytes())
        last, t = raw.last, t + 1
    assert peak - before < 6_000_000  # the row group has 40 MB, a slice 0.64 MB, a page 1 MB


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"x" * 1000] * 1000),
        pa.array(range(1000)),
        pa.array([[1, 2, 3]] * 1000),
        pa.array([{"a": "y" * 50, "b": 1.5}] * 1000),
        pa.array([True, None] * 500),
    ],
    ids=lambda column: str(column.type),
)
def test_copied_rows_do_not_hold_the_memory_of_their_row_group(column: pa.Array, rows: int):
    table = pa.table({"a": column})
    for first in (0, 500):
        copied = tables.compact(table.slice(first, rows))
        assert copied == table.slice(first, rows)
        [mine] = copied["a"].chunks
        held = {buffer.address for buffer in column.buffers() if buffer is not None}
        assert not held & {buffer.address for buffer in mine.buffers() if buffer is not None}


@pytest.mark.parametrize("format", ["arrow", "arrow-stream"])
def test_a_cut_arrow_file_keeps_its_whole_batches_and_names_the_cut(tmp_path, format):
    write_rows(tmp_path, format, ROWS, files=1, batch_rows=10)
    path = tmp_path / "part-00000.arrow"
    data = path.read_bytes()
    kept = set()
    for cut in range(1000, len(data), 211):
        path.unlink()
        path.write_bytes(data[:cut])
        everything = read_all(str(path), slice_rows=7)
        assert everything.rows == ROWS[: len(everything.rows)]
        assert len(everything.rows) % 10 == 0
        ((row, reason),) = everything.reasons or [(100, "")]
        assert row == len(everything.rows)
        assert reason.startswith(("expected valid Arrow data", "expected the end-of-stream marker"))
        kept.add(row)
    assert {20, 50, 90} <= kept


@pytest.mark.parametrize("data", [b"", b"PAR1 or something else", b"ARROW1\0\0", b"\xff" * 100])
def test_what_is_no_arrow_file_is_an_error(tmp_path, data):
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(SourceError, match=r"expected .*Arrow IPC"):
        read_all(f"{tmp_path}/*.arrow")


def test_an_arrow_file_without_rows_is_one_bad_row(tmp_path):
    for k, rows in enumerate(([], [{"a": 1}])):
        table = pa.Table.from_pylist(rows, schema=pa.schema([("a", pa.int64())]))
        with pa.ipc.new_stream(str(tmp_path / f"{k}.arrow"), table.schema) as out:
            out.write_table(table)
    everything = read_all(f"{tmp_path}/*.arrow")
    assert everything.reasons == [(0, "the file has no rows")]
    assert everything.rows == [{"a": 1}]


def test_offsets_that_point_outside_an_arrow_buffer_are_bad_rows_and_never_a_crash(tmp_path):
    table = pa.table({"a": [f"text {i}" for i in range(20)]})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table)
    data = bytearray(path.read_bytes())
    offsets = table["a"].chunk(0).buffers()[1].to_pybytes()
    at = bytes(data).index(offsets)
    data[at + 4 * 5 : at + 4 * 6] = (2**30).to_bytes(4, "little")
    path.write_bytes(data)
    everything = read_all(str(path))
    assert [row for row, _ in everything.reasons] == [4, 5]
    assert len(everything.rows) == 18


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_column_name_that_is_no_utf8_is_an_error(tmp_path, format):
    write_rows(tmp_path, format, [{"namename": 1}], files=1)
    path = tmp_path / f"part-00000.{format}"
    path.write_bytes(path.read_bytes().replace(b"namename", b"name\xff\xff\xff\xff"))
    with pytest.raises(SourceError, match="part-00000"):
        read_all(str(path))


@pytest.mark.parametrize("format", ["arrow", "arrow-stream"])
def test_an_arrow_file_cut_short_under_its_reader_is_an_error_and_no_bad_row(tmp_path, format):
    rows = [{"text": f"{k:04d}" * 200} for k in range(400)]
    index = build_index(
        "web",
        write_rows(tmp_path, format, rows, files=1, batch_rows=100),
        None,
        ReadOptions(slice_rows=10),
    )
    slices = FORMATS["arrow"].read(
        index.access, index.files[0], index.chunks, 0, ReadOptions(slice_rows=10)
    )
    assert next(slices).table.num_rows == 10
    os.truncate(index.files[0].path, 5000)
    with pytest.raises(StorageUnreachable, match=r"expected \d+ more bytes of the file"):
        list(slices)
