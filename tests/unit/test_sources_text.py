"""Tables and plain text: units, offsets, encodings, and reasons of unreadable rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlord.cli.inspect_data import inspect_data
from overlord.errors import SourceError
from tests.corpus import pack
from tests.source_reads import read_all


def put(folder: Path, name: str, text: bytes) -> str:
    path = folder / name
    path.write_bytes(pack(text, name))
    return str(path)


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_units_of_plain_text_are_named_by_their_byte_offset(tmp_path: Path, packed: str):
    text = "\ufeffé one\r\n\n  \ntwo\nthree\n\n\nfour".encode()
    path = put(tmp_path, "a.txt" + packed, text)
    lines = read_all(path)
    assert [row["text"] for row in lines.rows] == ["é one", "two", "three", "four"]
    assert [text[row:][:5] for _, row in lines.ids[1:]] == [b"two\nt", b"three", b"four"]
    paragraphs = read_all(path, "paragraphs")
    assert [row["text"] for row in paragraphs.rows] == ["é one", "two\nthree", "four"]
    assert paragraphs.ids[1] == lines.ids[1]
    whole = read_all(path, "text")
    assert [row["text"] for row in whole.rows] == [text.decode().removeprefix("\ufeff")]
    assert whole.ids == [(0, 0)]


@pytest.mark.parametrize("format", ["lines", "paragraphs"])
def test_an_unreadable_unit_is_one_bad_row_that_says_why(tmp_path: Path, format: str):
    path = put(tmp_path, "a.txt", b"one\n\nt\xffo\n\n" + b"x" * 200 + b"\n\nfour")
    everything = read_all(path, format, max_sample_bytes=100)
    assert [row["text"] for row in everything.rows] == ["one", "four"]
    (first, utf8), (second, long) = everything.reasons
    assert (first, second) == (5, 10)
    assert "expected UTF-8, got 0xff at byte 1 of the" in utf8
    assert "max_sample_bytes=100 bytes, got a longer one" in long


def test_a_file_beyond_the_limit_is_one_bad_row(tmp_path: Path):
    everything = read_all(put(tmp_path, "a.txt", b"x" * 200), "text", max_sample_bytes=100)
    assert everything.reasons == [
        (0, "expected a file of at most max_sample_bytes=100 bytes, got a longer one")
    ]


@pytest.mark.parametrize(
    ("name", "format"),
    [("a.csv", "csv"), ("a.tsv.gz", "tsv"), ("a.txt", "lines"), ("a.txt", "text")],
)
def test_another_encoding_is_refused_with_its_remedy(tmp_path: Path, name: str, format: str):
    path = put(tmp_path, name, "a\tb\n".encode("utf-16"))
    with pytest.raises(
        SourceError, match=r"got the byte order mark of UTF-16; convert the file: iconv"
    ):
        read_all(path, format)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"1", "expected 2 fields as in the first row, got 1"),
        (b"1,2,3", "expected 2 fields as in the first row, got 3"),
        (b'"a"b,2', "expected a valid row, got: "),
        (b"\xff,2", "expected UTF-8, got 0xff at byte 0 of the line"),
        (b'"\xff\n",2', "expected UTF-8, got 0xff at byte 1 of the line"),
        (b"x" * 200 + b",2", "max_sample_bytes=100 bytes, got a longer one"),
        (b'"' + b"x\n" * 70 + b'",2', "row of at most max_sample_bytes=100 bytes"),
    ],
)
def test_a_broken_row_of_a_table_is_named_by_its_offset(tmp_path: Path, line: bytes, says: str):
    path = put(tmp_path, "a.csv", b"a,b\n0,zero\n" + line + b"\n9,nine\n")
    everything = read_all(path, max_sample_bytes=100)
    assert everything.rows[0] == {"a": "0", "b": "zero"}
    assert everything.rows[-1] == {"a": "9", "b": "nine"}
    assert everything.reasons[0][0] == 11
    assert says in everything.reasons[0][1]


def test_values_of_tables_are_text_whatever_their_neighbours(tmp_path: Path):
    path = put(tmp_path, "a.csv", b'a,b\n1,\n2.5,"x"\n007,"a ""b"" \r\nc"\n')
    assert read_all(path).rows == [
        {"a": "1", "b": ""},
        {"a": "2.5", "b": "x"},
        {"a": "007", "b": 'a "b" \r\nc'},
    ]


def test_tables_without_a_header_number_their_columns(tmp_path: Path):
    path = put(tmp_path, "a.tsv", b'"a"b\tc\nx\ty\n')
    everything = read_all(path, "tsv-no-header", columns=("f1",))
    assert everything.rows == [{"f1": "y"}]
    assert [row for row, _ in everything.reasons] == [0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a,b\n1,2\n", "expected the column 'text', got a, b"),
        (b"a,a\n1,2\n", "expected different names in the header, got 'a'"),
        (b'"a"b\n1\n', "expected a header in the first row, got a broken row"),
    ],
)
def test_a_header_that_cannot_be_used_is_an_error_of_the_file(
    tmp_path: Path, text: bytes, says: str
):
    with pytest.raises(SourceError, match=says):
        read_all(put(tmp_path, "a.csv", text), columns=("text",))


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", b"a,b\n"), ("a.txt.gz", b"\n\n"), ("a.tsv.zst", b"")]
)
def test_a_file_without_rows_is_one_bad_row(tmp_path: Path, name: str, text: bytes):
    assert [reason for _, reason in read_all(put(tmp_path, name, text)).reasons] == [
        "the file has no rows"
    ]


def test_tables_and_texts_next_to_data_in_a_directory_are_left_out(tmp_path: Path):
    put(tmp_path, "README.txt", b"about")
    put(tmp_path, "metadata.csv", b"a\n1\n")
    put(tmp_path, "a.jsonl", b'{"a": 1}\n')
    assert read_all(str(tmp_path)).rows == [{"a": 1}]
    assert read_all(str(tmp_path), "csv").rows == [{"a": "1"}]
    assert read_all(str(tmp_path), "text").rows == [{"text": "about"}]


def test_inspect_shows_tables_and_texts(tmp_path: Path):
    report = inspect_data(put(tmp_path, "a.csv", b"a,text\n1,one\n"))
    assert (report.format, report.first) == ("csv", {"a": "1", "text": "one"})
    report = inspect_data(put(tmp_path, "a.txt", b"one\n"))
    assert (report.format, report.schema, report.first) == (
        "lines",
        {"text": "string"},
        {"text": "one"},
    )
