"""Law of rows: what a row becomes depends on that row alone, never on the rows of its slice, its
window or its file.
"""

from __future__ import annotations

import datetime
import decimal
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import overlord as ov
from overlord.messages.data import Evaluate, Read
from overlord.session.local_runtime import LocalRuntime
from overlord.setup.prepared_job import Options, PreparedJob
from overlord.sources.python_objects import Factory
from tests.corpus import SUFFIX, pack
from tests.source_reads import read_all

LAW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

WHOLE = st.integers(-3, 300) | st.sampled_from(
    [2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**70]
)
NUMBER = (
    WHOLE
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.sampled_from([1.0, 2.0, 0.1, float(2**53)])
)
TEXT = st.text("ab é\n", max_size=4) | st.sampled_from(["2020-01-01T00:00:00Z", "1", "1.5", "null"])
SCALAR = st.none() | st.booleans() | NUMBER | TEXT
JSON = st.recursive(
    SCALAR,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    ),
    max_leaves=5,
)
IDS = (
    st.lists(st.integers(0, 9), max_size=4)
    | st.lists(st.sampled_from([1, 2.0, 1.5, True, None, "x", -1]), max_size=3)
    | JSON
)
LISTED = st.lists(st.fixed_dictionaries({"tokens": IDS, "n": JSON}), min_size=1, max_size=6)


class Strict:
    """Compares values with their types: 1, 1.0 and True differ."""

    def __init__(self, value: Any) -> None:
        self.text = repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strict) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text


def write_lines(folder: Path, kind: str, files: Sequence[Sequence[dict[str, Any]]]) -> str:
    for k, rows in enumerate(files):
        (folder / f"{k:03d}{SUFFIX[kind]}").write_bytes(
            pack("".join(json.dumps(row) + "\n" for row in rows).encode(), kind)
        )
    return str(folder / f"*{SUFFIX[kind]}")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
@LAW
@given(values=st.lists(JSON, min_size=1, max_size=8), step=st.integers(1, 8))
@example(values=[1, 2.5, "x"], step=8)
@example(values=[[1], [1.5, 2.75], ["x"]], step=8)
@example(values=[{"a": 1}, {"b": 2}], step=2)
@example(values=[True, 1.5], step=2)
@example(values=[2**53 + 1, 0.5], step=2)
def test_a_line_is_read_as_it_is_written_whatever_lines_stand_beside_it(
    kind: str, values: list[Any], step: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = read_all(
            write_lines(Path(folder), kind, [[{"v": v} for v in values]]), slice_rows=step
        )
    assert [Strict(row["v"]) for row in found.rows] == [Strict(v) for v in values if not _beyond(v)]
    assert len(found.reasons) == sum(map(_beyond, values)), (
        "only whole numbers beyond 64 bits cannot be held"
    )


def _beyond(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_beyond, value.values() if isinstance(value, dict) else value))
    return type(value) is int and not -(2**63) <= value < 2**64


def as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    return row


def all_as_they_are(columns: dict[str, Any]) -> dict[str, Any]:
    return columns


SEEN: list[Strict] = []


def note(row: dict[str, Any]) -> dict[str, Any]:
    SEEN.append(Strict(row["n"]))
    return {"tokens": row["tokens"], "n": 1}


TRANSFORMS: dict[str, list[Any]] = {
    "tokens": [ov.Tokens("tokens")],
    "numbers": [ov.Tokens("tokens"), ov.Meta("n", "n")],
    "rows through a function": [ov.Map(as_it_is, rows=True), ov.Meta("n", "n")],
    "columns through a function": [ov.Map(all_as_they_are), ov.Meta("n", "n")],
    "numbers by a function": [ov.Meta("n", lambda row: row["n"], rows=True)],
}


def outcomes(uri: Any, transforms: list[Any], step: int) -> dict[tuple[int, int], Any]:
    """What each row became, by file and number: its samples with their metadata, or
    "quarantine".
    """
    source = ov.Source("s", uri, transforms=transforms, epochs=1)
    job = ov.Job(
        name="t",
        sources=[source],
        batch=ov.Batch(samples=4, context=64),
        slice_rows=step,
        on_long="split",
    )
    host = LocalRuntime(PreparedJob(job, Options()), None)
    reader = host.loading.slots[0].reader
    chunks = tuple(range(len(reader.chunks.index.chunks)))
    found: dict[tuple[int, int], Any] = {}
    window = 0
    while chunks:
        read = reader.read(Read(0, 0, 0, window, chunks))
        if read.rows:
            outcome, content = reader.evaluate(Evaluate(0, read.rows))
            _note(found, outcome.found, content)
        chunks, window = tuple(c for c in chunks if c not in read.over), window + 1
    return found


def _note(found: dict[tuple[int, int], Any], these: Any, content: Any) -> None:
    for i, (file, row) in enumerate(zip(these.file.tolist(), these.row.tolist(), strict=True)):
        meta = {name: np.atleast_1d(column[i]).tolist() for name, column in these.meta.items()}
        found.setdefault((file, row), []).append((content.tokens[i].tolist(), meta))
    for file, row in zip(these.bad_file.tolist(), these.bad_row.tolist(), strict=True):
        found[file, row] = "quarantine"


@pytest.mark.parametrize("name", list(TRANSFORMS))
@settings(LAW, max_examples=30)
@given(files=st.lists(LISTED, min_size=1, max_size=3), step=st.integers(1, 6))
@example(
    files=[[{"tokens": [1.5, 2.75], "n": 1}, {"tokens": [1], "n": 0.9}, {"tokens": "x", "n": "y"}]],
    step=6,
)
@example(files=[[{"tokens": [2**53 + 1], "n": 2**53 + 1}, {"tokens": [1.0], "n": 0.5}]], step=6)
@example(files=[[{"tokens": [1], "n": []}, {"tokens": [1], "n": [False]}]], step=6)
@example(files=[[{"tokens": [1], "n": []}, {"tokens": [True], "n": [False]}]], step=6)
@example(files=[[{"tokens": [1], "n": 2**53 + 1}], [{"tokens": [1.0], "n": 0.5}]], step=6)
@example(
    files=[
        [
            {"tokens": [True], "n": True},
            {"tokens": [1], "n": 1},
            {"tokens": [2.0, True], "n": [1, 2]},
        ]
    ],
    step=6,
)
def test_a_line_becomes_the_same_sample_alone_and_beside_any_others(
    name: str, files: list[list[dict[str, Any]]], step: int
) -> None:
    transforms = TRANSFORMS[name]
    with tempfile.TemporaryDirectory() as folder:
        together = outcomes(write_lines(Path(folder), "jsonl", files), transforms, step)
    with tempfile.TemporaryDirectory() as folder:
        alone = outcomes(
            write_lines(Path(folder), "jsonl", [[row] for rows in files for row in rows]),
            transforms,
            1,
        )
    assert [together[key] for key in sorted(together)] == [alone[key] for key in sorted(alone)]


ZONE = datetime.UTC
OBJECTS = JSON | st.sampled_from(
    [
        np.int16(3),
        np.uint64(2**63),
        np.float32(0.1),
        np.True_,
        np.array([1, 2]),
        np.array([1.5, 2.5], np.float32),
        np.array([True]),
        np.array([2**60], np.uint64),
        b"ab",
        (1, 2),
        datetime.date(2020, 1, 2),
        datetime.datetime(2020, 1, 2, 3),
        datetime.timedelta(hours=1),
        datetime.datetime(2020, 1, 2, 3, tzinfo=ZONE),
        datetime.time(4),
        decimal.Decimal("1.50"),
        decimal.Decimal("2.125"),
        [np.True_, 1],
    ]
)


@LAW
@given(values=st.lists(OBJECTS, min_size=1, max_size=6), step=st.integers(1, 6))
@example(values=[datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3)], step=2)
@example(values=[[np.True_], [1]], step=2)
def test_a_row_of_a_dataset_is_read_the_same_alone_and_beside_any_others(
    values: list[Any], step: int
) -> None:
    def read(rows: list[Any], slice_rows: int) -> list[Any]:
        found = read_all(
            ov.Source.from_dataset("s", [{"v": v} for v in rows]).uri,
            "dataset",
            slice_rows=slice_rows,
        )
        return [Strict(row["v"]) for row in found.rows] + ["quarantine"] * len(found.reasons)

    assert sorted(map(repr, read(values, step))) == sorted(
        repr(one) for v in values for one in read([v], 1)
    )


@LAW
@given(rows=LISTED, step=st.integers(1, 6))
def test_a_row_of_a_factory_becomes_the_same_sample_alone_and_beside_any_others(
    rows: list[dict[str, Any]], step: int
) -> None:
    transforms = TRANSFORMS["numbers"]
    together = outcomes(Factory(lambda: iter(rows)), transforms, step)
    alone = outcomes(Factory(lambda shard: iter([rows[shard]]), shards=len(rows)), transforms, 1)
    assert [together[key] for key in sorted(together)] == [alone[key] for key in sorted(alone)]


@LAW
@given(values=st.lists(JSON, min_size=1, max_size=6), step=st.integers(1, 6))
def test_a_function_gets_the_values_that_the_line_has(values: list[Any], step: int) -> None:
    values = [v for v in values if not _beyond(v)] or [0]
    SEEN.clear()
    with tempfile.TemporaryDirectory() as folder:
        path = write_lines(Path(folder), "jsonl", [[{"tokens": [1], "n": v} for v in values]])
        outcomes(path, [ov.Map(note, rows=True)], step)
    assert sorted(map(repr, SEEN)) == sorted(repr(Strict(v)) for v in values)


@LAW
@given(
    rows=st.lists(
        st.lists(st.none() | st.floats(0, 20) | st.integers(0, 20), max_size=4),
        min_size=1,
        max_size=8,
    ),
    kind=st.sampled_from([pa.int64(), pa.float64(), pa.float32()]),
    step=st.integers(1, 8),
    cut=st.integers(0, 8),
)
def test_a_row_of_typed_files_becomes_the_same_sample_in_any_window(
    rows: list[Any], kind: pa.DataType, step: int, cut: int
) -> None:
    import pyarrow.parquet as pq

    whole = [[None if v is None else int(v) for v in row] for row in rows]
    files = [
        (rows[:cut], pa.float64()),
        (whole[cut:], kind),
    ]  # files of one source may differ in the types of their columns

    def write(folder: str, parts: list[tuple[list[Any], pa.DataType]]) -> str:
        for k, (held, inner) in enumerate(parts):
            pq.write_table(
                pa.table({"tokens": pa.array(held, pa.list_(inner))}), f"{folder}/{k:03d}.parquet"
            )
        return f"{folder}/*.parquet"

    with tempfile.TemporaryDirectory() as folder:
        together = outcomes(write(folder, [f for f in files if f[0]]), TRANSFORMS["tokens"], step)
    with tempfile.TemporaryDirectory() as folder:
        alone = outcomes(
            write(folder, [([row], inner) for held, inner in files for row in held]),
            TRANSFORMS["tokens"],
            1,
        )
    assert [together[key] for key in sorted(together)] == [alone[key] for key in sorted(alone)]
