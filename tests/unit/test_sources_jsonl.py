import gzip
import json

import pytest
import zstandard

from overlord.errors import SourceError
from tests.corpus import pack
from tests.source_reads import read_all


def put(tmp_path, text: bytes, name: str = "a.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(pack(text, name[2:]))
    return str(path)


def test_rows_are_named_by_the_byte_offset_of_their_line(tmp_path):
    text = '{"a":1}\r\n\n   \n{"a":"é"}\n{"a":null}'.encode()
    everything = read_all(put(tmp_path, text), slice_rows=2)
    assert everything.ids == [(0, 0), (0, 14), (0, 25)]
    for _, row in everything.ids:
        json.loads(text[row:].split(b"\n")[0])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"a": 1', "expected valid JSON"),
        (b'{"a": 1} x', "expected valid JSON, got: trailing"),
        (b'{"a": NaN}', "expected valid JSON"),
        (b"[1, 2]", "expected a JSON object on the line, got `array`"),
        (b'"text"', "expected a JSON object on the line, got `str`"),
        (b'{"a": "\xff"}', "expected UTF-8, got 0xff at byte 7"),
        (b'{"b": "\xff"}', "expected UTF-8, got 0xff"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": "' + b"x" * 300_000 + b'"}', "max_sample_bytes=250000 bytes, got a longer one"),
    ],
)
def test_an_unreadable_line_is_one_bad_row_that_says_why(tmp_path, name, line, says):
    path = put(tmp_path, b'{"a":1}\n' + line + b'\n{"a":2}\n', name)
    for columns in (None, ("a",)):
        everything = read_all(path, columns=columns, max_sample_bytes=250_000)
        assert everything.rows == [{"a": 1}, {"a": 2}]
        ((row, reason),) = everything.reasons
        assert row == 8
        assert says in reason


@pytest.mark.parametrize("chunk_bytes", [100_000, 2**20, 2**30])
def test_a_line_of_ten_megabytes_is_read_where_the_limit_allows(tmp_path, chunk_bytes):
    long = "x" * 10_000_000
    path = put(tmp_path, json.dumps({"a": long}).encode() + b'\n{"a":"y"}\n')
    everything = read_all(path, chunk_bytes=chunk_bytes)
    assert [len(r["a"]) for r in everything.rows] == [len(long), 1]


def test_a_mark_of_byte_order_at_the_start_is_no_part_of_the_first_line(tmp_path):
    assert read_all(put(tmp_path, b'\xef\xbb\xbf{"a":1}\n')).rows == [{"a": 1}]


def test_only_needed_columns_are_kept_and_missing_ones_are_null(tmp_path):
    path = put(tmp_path, b'{"a":1,"b":2}\n{"b":3}\n')
    assert read_all(path, columns=("a",)).rows == [{"a": 1}, {"a": None}]
    assert read_all(path).rows == [{"a": 1, "b": 2}, {"a": None, "b": 3}]


def test_a_column_of_mixed_types_keeps_every_value_as_it_is_written(tmp_path):
    values = [5, "x", 2.5, None, ["z"], [1, "a"], True, {"a": 1}, {"b": 2**63}]
    everything = read_all(
        put(tmp_path, b"".join(json.dumps({"a": v}).encode() + b"\n" for v in values))
    )
    assert repr([r["a"] for r in everything.rows]) == repr(values)
    assert everything.reasons == []


def test_numbers_beyond_64_bits_and_values_nested_too_deeply_are_bad_rows(tmp_path):
    deep = json.loads("[" * 102 + "]" * 102)
    values = [[1, 2], [3], ["x"], [4], [2**70], deep, deep[0]]
    everything = read_all(
        put(tmp_path, b"".join(json.dumps({"a": v}).encode() + b"\n" for v in values))
    )
    assert [r["a"] for r in everything.rows] == [[1, 2], [3], ["x"], [4], deep[0]]
    assert [reason for _, reason in everything.reasons] == [
        "column 'a': [1180591620717411303424]: expected a whole number from -2**63 to 2**64 - 1, got one outside",
        f"column 'a': {'[' * 57}...: expected at most 100 levels of nesting, got more",
    ]


def test_whole_and_broken_numbers_mix(tmp_path):
    found = [r["a"] for r in read_all(put(tmp_path, b'{"a":1}\n{"a":2.5}\n')).rows]
    assert found == [1, 2.5]
    assert list(map(type, found)) == [int, float]


def test_an_empty_file_among_others_is_one_bad_row(tmp_path):
    put(tmp_path, b"", "a.jsonl")
    put(tmp_path, b'{"a":1}\n', "b.jsonl")
    everything = read_all(f"{tmp_path}/*.jsonl")
    assert everything.ids == [(0, 0), (1, 0)]
    assert everything.reasons == [(0, "the file has no rows")]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_compressed_file_of_nothing_is_one_bad_row(tmp_path, name):
    assert read_all(put(tmp_path, b"", name)).reasons == [(0, "the file has no rows")]


def test_a_source_of_empty_files_is_an_error(tmp_path):
    put(tmp_path, b"")
    with pytest.raises(SourceError, match="expected files with rows, got 1 files without any"):
        read_all(f"{tmp_path}/*.jsonl")


@pytest.mark.parametrize(
    ("name", "packer"),
    [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.ZstdCompressor().compress)],
)
def test_members_one_after_another_are_one_text(tmp_path, name, packer):
    path = tmp_path / name
    path.write_bytes(packer(b'{"a":1}\n{"a"') + packer(b":2}\n") + packer(b'{"a":3}'))
    assert [r["a"] for r in read_all(str(path)).rows] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst"])
def test_a_cut_compressed_file_keeps_its_rows_and_names_the_cut(tmp_path, kind):
    import random

    rng = random.Random(0)
    text = b"".join(
        b'{"a":"%d"}\n' % rng.getrandbits(400) for _ in range(5000)
    )  # several zstd blocks
    path = tmp_path / f"a.{kind}"
    path.write_bytes(pack(text, kind)[:-20])
    everything = read_all(str(path))
    ((row, reason),) = everything.reasons
    assert "truncated" in reason
    assert len(everything.rows) > 1000
    assert text[:row].count(b"\n") == len(everything.rows)


def test_rows_before_a_broken_byte_of_a_gzip_file_survive(tmp_path):
    text = b"".join(b'{"a":%d}\n' % (k * 7919 % 10007) for k in range(50_000))
    data = bytearray(gzip.compress(text, mtime=0))
    at = len(data) // 2
    data[at : at + 64] = bytes(64)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data)
    everything = read_all(str(path))
    assert "expected valid gzip data" in everything.reasons[-1][1]
    assert [r["a"] for r in everything.rows[:20_000]] == [k * 7919 % 10007 for k in range(20_000)]


def test_a_bomb_is_unpacked_in_pieces(tmp_path):
    import tracemalloc

    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a":"' + b"x" * 50_000_000 + b'"}\n{"a":"y"}\n'))
    tracemalloc.start()
    everything = read_all(str(path), max_sample_bytes=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert everything.rows == [{"a": "y"}]
    assert "max_sample_bytes=1000000" in everything.reasons[0][1]
    assert peak < 8_000_000
