"""Laws of hostile MDS datasets: changed shards and indexes give a named error, quarantine entries
or the values written, and nothing unnamed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SourceError
from overlord.sources.mds_columns import table_of
from overlord.sources.mds_index import Columns, parse_encoding
from tests.corpus import INDEXED_FORMATS, SUFFIX, write_rows
from tests.data.write_formats import ENCODINGS
from tests.laws import examples
from tests.source_reads import Everything, read_all

ROWS = [
    {"a": [k] * (k % 4), "n": k, "text": f"row {k}", "tokens": list(range(k % 6))}
    for k in range(20)
]


def files_of(format: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory() as folder:
        write_rows(folder, format, ROWS, files=1)
        path = Path(folder)
        return (path / f"part-00000{SUFFIX[format]}").read_bytes(), (
            path / "index.json"
        ).read_text()


FILES = {format: files_of(format) for format in INDEXED_FORMATS}


def read(format: str, data: bytes, index: str) -> Everything | None:
    """Everything in a dataset of one shard, or None for a named error."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"part-00000{SUFFIX[format]}").write_bytes(data)
        (Path(folder) / "index.json").write_text(index)
        try:
            return read_all(folder, slice_rows=3)
        except SourceError:
            return None


CHANGES = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=5
)


@pytest.mark.parametrize("format", INDEXED_FORMATS)
@given(CHANGES)
@examples(80)
def test_a_shard_with_other_bytes_keeps_the_number_of_samples(format, changes):
    data, index = bytearray(FILES[format][0]), FILES[format][1]
    for where, value in changes:
        data[int(where * len(data))] = value
    everything = read(format, bytes(data), index)
    assert everything is not None
    assert everything.ids == [(0, k) for k in range(len(ROWS))]
    assert len(everything.rows) + len(everything.reasons) == len(ROWS)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2**32 - 1)), min_size=1, max_size=4))
@examples(80)
def test_hostile_offsets_never_give_a_sample_twice_or_shifted(changes):
    """Samples that are read are those written: values of another place do not fill their bytes."""
    data, index = bytearray(FILES["mds"][0]), FILES["mds"][1]
    for which, value in changes:
        at = 4 + 4 * which
        data[at : at + 4] = value.to_bytes(4, "little")
    everything = read("mds", bytes(data), index)
    assert everything is not None
    bad = {row for row, _ in everything.reasons}
    assert everything.rows == [row for k, row in enumerate(ROWS) if k not in bad]


@pytest.mark.parametrize("format", INDEXED_FORMATS)
@given(st.floats(0, 1, exclude_max=True))
@examples(30)
def test_a_cut_shard_is_a_named_error(format, where):
    data, index = FILES[format]
    assert read(format, data[: int(where * len(data))], index) is None


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 30),
    st.text(max_size=9),
    st.sampled_from(["../x", "/etc/passwd", "part-00000.mds", "", ".", "a/../b", "pkl", "str"]),
    st.lists(st.integers(-1, 9), max_size=4),
)


@pytest.mark.parametrize("format", INDEXED_FORMATS)
@given(st.data())
@examples(120)
def test_a_hostile_index_gives_a_named_error_or_every_sample_once(format, data):
    """Any value of the index becomes any other, entries are repeated, keys vanish."""
    shard, text = FILES[format]
    index = json.loads(text)
    for _ in range(data.draw(st.integers(1, 2))):
        place: Any = index
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            deeper = isinstance(place[key], (dict, list)) and bool(place[key])
            if not deeper or data.draw(st.integers(0, 4)) == 0:
                break
            place = place[key]
        match data.draw(st.integers(0, 5)):
            case 0 if isinstance(place, dict):
                del place[key]
            case 1 if isinstance(place, list):
                place.append(place[key])
            case _:
                place[key] = data.draw(SCALARS)
        if not index:
            break
    everything = read(format, shard, json.dumps(index))
    if everything is not None:
        assert len(everything.rows) + len(everything.reasons) == len(everything.ids)
        assert len(set(everything.ids)) == len(everything.ids)


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin1")))
@examples(40)
def test_any_text_as_an_index_gives_a_named_error(text):
    assert read("mds", FILES["mds"][0], text.encode(errors="replace").decode()) is None


@pytest.mark.parametrize("encoding", sorted({*ENCODINGS.values(), "ndarray:int64:2"}))
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6))
@examples(40)
def test_any_bytes_are_a_value_or_a_reason(encoding, values):
    """A value does not depend on its neighbours, and no bytes raise anything."""
    size = parse_encoding(encoding).size
    columns = Columns(("x",), (encoding,), (size,))
    heads = [b"" if size else len(v).to_bytes(4, "little") for v in values]
    samples = [h + v for h, v in zip(heads, values, strict=True)]

    def table(chosen: list[bytes]) -> tuple[pa.Table, list[tuple[int, str]]]:
        edges = np.cumsum([0, *map(len, chosen)])
        return table_of(np.frombuffer(b"".join(chosen), np.uint8), edges, columns, ("x",))

    together, bad = table(samples)
    assert together.num_rows + len(bad) == len(values)
    alone = [table([sample]) for sample in samples]
    assert [reason for _, reason in bad] == [b[0][1] for _, b in alone if b]
    if encoding == "str":  # text that is not UTF-8 is found by the caller
        return
    one_by_one = [value for t, _ in alone for value in t.column("x").to_pylist()]
    assert repr(together.column("x").to_pylist()) == repr(one_by_one)
