"""Laws of reading: every row once and in order, however files are cut; and no bytes whatever raise
anything unnamed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlord.errors import SourceError
from tests.corpus import FORMATS, INDEXED_FORMATS, SUFFIX, pack, write_rows
from tests.source_reads import Everything, read_all

LAW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
ROWS = st.lists(
    st.fixed_dictionaries({"id": st.integers(-(2**40), 2**40), "text": TEXT}),
    min_size=1,
    max_size=60,
)
NOISE = [
    {"id": i, "text": f"row {i} " + "é" * (i % 20), "ids": list(range(i % 7))} for i in range(60)
]


def as_read(format: str, row: dict[str, Any]) -> dict[str, Any]:
    if format != "tar":
        return row
    return {k: v.encode() if isinstance(v, str) else json.dumps(v).encode() for k, v in row.items()}


@pytest.mark.parametrize("format", [*FORMATS, *INDEXED_FORMATS])
@LAW
@given(
    rows=ROWS,
    files=st.integers(1, 3),
    step=st.integers(1, 70),
    chunk=st.integers(1, 3000),
    group=st.integers(1, 70),
    part=st.booleans(),
)
def test_all_slices_of_all_chunks_are_the_rows_written(
    format, rows, files, step, chunk, group, part
):
    with tempfile.TemporaryDirectory() as folder:
        glob = write_rows(
            folder,
            format,
            rows,
            files=min(files, len(rows)),
            row_group_size=group,
            batch_rows=group,
        )
        columns = ("text",) if part else ("text", "id")
        everything = read_all(glob, slice_rows=step, chunk_bytes=chunk, columns=columns)
    # Fewer rows than shares leave a file without rows, which is one bad row.
    assert {reason for _, reason in everything.reasons} <= {"the file has no rows"}
    assert everything.rows == [as_read(format, {c: row[c] for c in columns}) for row in rows]
    assert len(set(everything.ids)) == len(everything.ids)
    assert everything.ids == sorted(everything.ids)


LINE = st.one_of(
    TEXT.map(lambda t: json.dumps({"t": t}, ensure_ascii=False).encode()),
    st.sampled_from(
        [b"", b" \t", b"\r", b"{broken", b"[1]", b'{"t": "\xff"}', b'{"t": "' + b"y" * 400 + b'"}']
    ),
)


@LAW
@given(
    lines=st.lists(LINE, max_size=30),
    end=st.sampled_from([b"\n", b"\r\n"]),
    final=st.booleans(),
    chunk=st.integers(1, 200),
)
def test_every_line_belongs_to_exactly_one_chunk(lines, end, final, chunk):
    text = end.join([*lines, b""] if final else lines)
    limit, wanted, at = 300, [], 0
    for line in text.split(b"\n"):
        if line.strip():
            wanted.append(at)
        at += len(line) + 1
    for kind in ("jsonl", "jsonl.gz", "jsonl.zst"):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / f"a.{kind}").write_bytes(pack(text, kind))
            (Path(folder) / f"z.{kind}").write_bytes(pack(b'{"t":"end"}', kind))
            everything = read_all(
                f"{folder}/*", slice_rows=4, chunk_bytes=chunk, max_sample_bytes=limit
            )
        rows = [row for file, row in everything.ids if file == 0]
        assert rows == (wanted if text else [0])
        assert len(everything.rows) + len(everything.reasons) == len(rows) + 1


@pytest.fixture(scope="module")
def samples() -> dict[str, bytes]:
    """One file of each format."""
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for format in FORMATS:
            write_rows(
                Path(folder) / format, format, NOISE, files=1, row_group_size=25, batch_rows=9
            )
            out[format] = (Path(folder) / format / f"part-00000{SUFFIX[format]}").read_bytes()
    return out


def read_bytes(format: str, data: bytes) -> Everything | None:
    """Everything in a file of these bytes, or None for a named error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{SUFFIX[format]}"
        path.write_bytes(data)
        try:
            return read_all(str(path), slice_rows=8, chunk_bytes=500)
        except SourceError:
            return None


@pytest.mark.parametrize("format", FORMATS)
@LAW
@given(where=st.floats(0, 1, exclude_max=True))
def test_a_cut_file_gives_a_named_error_or_the_rows_before_the_cut(samples, format, where):
    data = samples[format]
    cut = int(where * len(data))
    everything = read_bytes(format, data[:cut])
    if everything is None:
        assert format in ("parquet", "arrow", "arrow-stream") or cut == 0
        return
    truth = [as_read(format, row) for row in NOISE]
    kept = [{k: v for k, v in row.items() if k != "__key__"} for row in everything.rows]
    assert kept == truth[: len(kept)]
    # Only a cut between two lines of plain text leaves no trace; in a tar, one behind the end mark.
    assert everything.reasons or format == "jsonl" or len(kept) == len(truth)
    assert len(everything.reasons) <= 1


@pytest.mark.parametrize("format", FORMATS)
@LAW
@given(
    flips=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=8
    )
)
def test_flipped_bits_raise_nothing_unnamed_and_keep_the_count_of_known_rows(
    samples, format, flips
):
    data = bytearray(samples[format])
    for where, bit in flips:
        data[int(where * len(data))] ^= 1 << bit
    everything = read_bytes(format, bytes(data))
    if format == "parquet" and everything is not None:
        assert everything.ids == [(0, i) for i in range(everything.index.rows)]
