"""Messages name the line of a bad row, where the file numbers its rows by byte offsets."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from pathlib import Path

import pytest

import overlord as ov
from overlord.line_numbers import MAX_BYTES, add_line_number, line_numbers, rows_around

LINES = [json.dumps({"tokens": [1] * (1 + k % 5)}) for k in range(60)]
LINES[3], LINES[7], LINES[40] = "{broken", "", json.dumps({"other": 1})
TEXT = "\n".join(LINES).encode()
OFFSETS = {k + 1: TEXT.index(LINES[k].encode()) for k in (3, 40)}  # by line


def written(path: Path) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:]))
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        pack = zstandard.ZstdCompressor().compress
        path.write_bytes(pack(TEXT[:100]) + pack(TEXT[100:]))
    else:
        path.write_bytes(TEXT)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_offsets_become_lines(name: str, tmp_path: Path):
    path = str(written(tmp_path / name))
    places = [(path, offset) for offset in OFFSETS.values()]
    assert line_numbers(places) == dict(zip(places, OFFSETS, strict=True))


def test_places_without_lines_are_left_out(tmp_path: Path):
    path = str(written(tmp_path / "a.jsonl"))
    places = [
        (path, len(TEXT) + 1),
        (path, -1),
        (path, MAX_BYTES + 1),
        (str(tmp_path / "none.jsonl"), 3),
        (str(tmp_path / "a.tar"), 0),
        ("s3://bucket/a.jsonl", 3),
    ]
    assert line_numbers([*places, (path, 0)]) == {(path, 0): 1}


def job(path: Path, **source: object) -> ov.Job:
    return ov.Job(
        name="lines",
        sources=[ov.Source("web", str(path), epochs=1, shuffle=False, **source)],
        batch=ov.Batch(samples=8, context=64),
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_quarantine_has_the_line_of_each_row(name: str, tmp_path: Path):
    with ov.launch(job(written(tmp_path / name))) as session:
        assert sum(1 for _ in session.client(0)) > 0
        found = {q["line"]: q for q in session.quarantine()}
    assert {line: q["row"] for line, q in found.items()} == OFFSETS
    assert {q["row_unit"] for q in found.values()} == {"byte"}


def test_rows_with_numbers_have_no_line():
    rows = [{"tokens": [1]}, {"tokens": []}, {"tokens": [2]}]
    source = ov.Source.from_dataset("own", rows, epochs=1)
    made = ov.Job(name="rows", sources=[source], batch=ov.Batch(samples=2, context=8))
    with ov.launch(made) as session:
        list(session.client(0))
        (entry,) = session.quarantine()
    assert (entry["row"], entry["row_unit"], entry["line"]) == (1, "row", None)


@pytest.mark.parametrize("runtime", ["local", "process"])
def test_the_error_of_too_many_bad_rows_names_byte_and_line(runtime: str, tmp_path: Path):
    path = written(tmp_path / "a.jsonl")
    with (
        ov.launch(job(path, max_bad=1), runtime=runtime) as session,
        pytest.raises(ov.SourceError) as caught,
    ):
        list(session.client(0))
    error = caught.value
    assert error.byte == OFFSETS[4]
    assert f"the last: byte {OFFSETS[4]}: expected valid JSON" in str(error)
    assert error.__notes__ == [f"byte {OFFSETS[4]} of {path} is in line 4"]
    add_line_number(error)
    assert len(error.__notes__) == 1
    assert pickle.loads(pickle.dumps(error)).byte == error.byte


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_the_line_around_a_byte_and_the_line_of_that_number_are_found(
    suffix: str, tmp_path: Path
) -> None:
    text = b"".join(b"x" * (k * 7919 % 3000) + b"\n" for k in range(1500))
    path = tmp_path / f"lines.{suffix}"
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    begins = [0, *(m.end() for m in re.finditer(b"\n", text))][:1500]
    for offset in (0, 1, 2919, 2920, 2921, 1499, 1500, 1501, len(text) // 2, len(text) - 1):
        around = max(begin for begin in begins if begin <= offset)
        counted = begins[offset] if offset < len(begins) else None
        found = rows_around(str(path), offset)
        assert found == (around, counted)
    assert rows_around(str(path), len(text)) is None
    assert rows_around(str(tmp_path / "none.jsonl"), 3) is None
    assert rows_around("s3://bucket/lines.jsonl", 3) is None


def test_blank_lines_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "blank.jsonl"
    path.write_bytes(b"\n\n\nabc\n")
    assert [rows_around(str(path), k) for k in range(5)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (3, None),
    ]
