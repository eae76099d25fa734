"""The reader of windows: what it holds, and what it does with slices that disagree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import overlord as ov
from overlord.content import Content
from overlord.loader.reader import SourceReader
from overlord.messages.data import (
    BlockReady,
    Evaluate,
    GroupShare,
    Read,
    ReadAhead,
    WindowReady,
    WindowsReady,
)
from overlord.sample import Ragged
from overlord.session.local_runtime import LocalRuntime
from overlord.setup.prepared_job import Options, PreparedJob
from overlord.sources.tables import take_table
from overlord.transforms.base import Block, merge_blocks
from tests.corpus import write_rows
from tests.internals import open_window


def readers(path: str, transform: object, **fields: object) -> PreparedJob:
    job = ov.Job(
        name="t",
        sources=[ov.Source("s", path, transforms=[transform], shuffle=False, epochs=1)],
        batch=ov.Batch(samples=4, context=64),
        **fields,
    )  # type: ignore[arg-type]
    return PreparedJob(job, Options())


class Nowhere:
    def submit(self, *args: object, **kw: object) -> None:
        raise AssertionError("nothing is submitted here")


def test_a_window_does_not_hold_the_row_group_it_was_cut_from(tmp_path: Path) -> None:
    glob = write_rows(
        tmp_path, "parquet", [{"tokens": list(range(500))} for _ in range(1000)], files=1
    )
    reader = (
        LocalRuntime(readers(glob, ov.Tokens("tokens"), slice_rows=10), Nowhere())
        .loading.slots[0]
        .reader
    )
    reader.read(Read(0, 0, 0, 0, (0,)))
    assert open_window(reader) is not None
    assert (
        sum(t.get_total_buffer_size() for t in open_window(reader).tables) < 100_000
    )  # the row group has four megabytes


def test_slices_that_disagree_on_a_type_spoil_only_their_own_rows(
    tmp_path: Path, tokenizer: str
) -> None:
    """Each file is one slice; in the second every text is a number, which is no text, and the
    others do not suffer.
    """
    for name, texts in (("a", ["one", "two"]), ("b", [1, 2]), ("c", ["three"])):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": t}) + "\n" for t in texts)
        )
    job = ov.Job(
        name="t",
        sources=[
            ov.Source(
                "s",
                str(tmp_path / "*.jsonl"),
                transforms=[ov.Tokenize(tokenizer, text="text")],
                epochs=1,
            )
        ],
        batch=ov.Batch(samples=3, context=64),
        seed=1,
    )
    for loaders in (1, 2, 3):
        run = ov.simulate(job, loaders={"s": loaders})
        assert run.error is None
        assert sorted(
            (i.file, i.row) for s in run.steps[0] for mb in s for i, _, _ in mb.samples
        ) == [(0, 0), (0, 16), (2, 0)]
        assert [(q.file, q.row) for q in sorted(run.quarantine, key=lambda q: (q.file, q.row))] == [
            (1, 0),
            (1, 12),
        ]


def test_rows_are_evaluated_only_as_far_as_asked(tmp_path: Path) -> None:
    glob = write_rows(tmp_path, "parquet", [{"tokens": [i]} for i in range(100)], files=1)
    reader = LocalRuntime(readers(glob, ov.Tokens("tokens")), Nowhere()).loading.slots[0].reader
    assert reader.read(Read(0, 0, 0, 0, (0,))).rows == 100
    outcome, content = reader.evaluate(Evaluate(0, 3))
    assert (len(outcome.found), content.tokens.values.tolist()) == (3, [0, 1, 2])
    assert reader.stats.samples == 3


def test_samples_of_separate_tables_are_merged_in_the_order_of_their_rows() -> None:
    def block(*ids: int) -> Block:
        lengths = np.ones(len(ids), np.int64)
        return Block(
            index=np.arange(len(ids)),
            part=np.zeros(len(ids), np.int32),
            tokens=Ragged(np.array(ids), np.arange(len(ids) + 1)),
            meta={"tokens": lengths, "bytes": lengths},
        )

    merged = merge_blocks([(np.array([1, 3]), block(11, 13)), (np.array([0, 2]), block(10, 12))])
    assert merged.index.tolist() == [0, 1, 2, 3]
    assert merged.tokens.values.tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("list_of", [pa.list_, pa.large_list])
def test_long_lists_are_taken_as_arrow_takes_them(list_of: Callable[[pa.DataType], pa.DataType]):
    rng = np.random.default_rng(3)
    for mean in (5, 400):
        lists = [rng.integers(0, 99, rng.integers(0, 2 * mean)).tolist() for _ in range(40)]
        whole = pa.table(
            {
                "tokens": pa.array(lists, list_of(pa.uint16())),
                "n": pa.array(range(40)),
                "text": pa.array([str(k) for k in range(40)]),
            }
        )
        for table in (whole, whole.slice(7, 20)):
            rows = rng.permutation(table.num_rows)[:15]
            taken = take_table(table, rows)
            taken.validate(full=True)
            assert taken.equals(table.take(pa.array(rows)))
            assert taken.schema == table.schema


# Several windows of one command


def reader_of(path: str, *transforms: object, **fields: object) -> SourceReader:
    source = ov.Source("s", path, transforms=list(transforms), shuffle=False, epochs=1)
    job = ov.Job(name="t", sources=[source], batch=ov.Batch(samples=4, context=64), **fields)  # type: ignore[arg-type]
    slots = LocalRuntime(PreparedJob(job, Options()), Nowhere()).loading.slots
    return slots[0].reader


def described(window: WindowReady, block: BlockReady) -> tuple[object, ...]:
    found = block.found
    columns = (found.key, found.file, found.row, found.part, found.meta["tokens"])
    long = [] if found.long is None else list(zip(found.long.row, found.long.lost, strict=True))
    return (
        (window.rows, window.over, block.rows, block.nbytes),
        *(column.tolist() for column in columns),
        [(int(row), int(lost)) for row, lost in long],
    )


def one_by_one(reader: SourceReader, reads: list[Read]) -> tuple[list[object], list[list[int]]]:
    windows, ids = list[object](), list[list[int]]()
    for read in reads:
        window = reader.read(read)
        block, content = reader.evaluate(Evaluate(0, window.rows))
        windows.append(described(window, block))
        ids += rows_of(content)
    return windows, ids


def rows_of(content: Content) -> list[list[int]]:
    return [content.tokens[i].tolist() for i in range(len(content))]


@pytest.mark.parametrize("on_long", ["truncate", "split", "drop"])
def test_windows_that_are_read_on_equal_windows_that_are_read_one_by_one(
    tmp_path: Path, on_long: str
) -> None:
    rows = [{"tokens": [i] * (1 + i * 7 % 90)} for i in range(60)]  # some exceed the context of 64
    glob = write_rows(tmp_path, "parquet", rows, files=2)
    fields = {"slice_rows": 8, "on_long": on_long}
    ahead = ReadAhead(1000, 2**20, (GroupShare(0, 1, (1,)),))
    outcome = reader_of(glob, ov.Tokens("tokens"), **fields).read_on(
        Read(0, 0, 0, 0, (0,), ahead=ahead)
    )
    assert isinstance(outcome, tuple)
    ready, contents = outcome
    reads = [Read(0, 0, g, t, (g,)) for g in (0, 1) for t in range(4)]
    windows, ids = one_by_one(reader_of(glob, ov.Tokens("tokens"), **fields), reads)
    assert [described(*pair) for pair in ready.windows] == windows
    assert [row for content in contents for row in rows_of(content)] == ids
    assert len(windows) == 8


@pytest.mark.parametrize(
    ("samples", "nbytes", "windows"), [(1, 2**20, 1), (17, 2**20, 4), (60, 1, 1)]
)
def test_a_read_goes_on_no_further_than_the_loader_has_a_use_for(
    tmp_path: Path, samples: int, nbytes: int, windows: int
) -> None:
    """24 rows leave 6 of the group: these are read with them."""
    glob = write_rows(tmp_path, "parquet", [{"tokens": [i] * 9} for i in range(60)], files=2)
    reader = reader_of(glob, ov.Tokens("tokens"), slice_rows=8)
    ahead = ReadAhead(samples, nbytes, (GroupShare(0, 1, (1,)),))
    outcome = reader.read_on(Read(0, 0, 0, 0, (0,), ahead=ahead))
    assert isinstance(outcome, tuple)
    assert len(outcome[0].windows) == windows


def test_a_read_of_several_windows_goes_on_behind_them_if_samples_still_lack(
    tmp_path: Path,
) -> None:
    rows = [{"tokens": [i] * (80 if i % 2 else 9)} for i in range(100)]  # every other is dropped
    glob = write_rows(tmp_path, "parquet", rows, files=1)
    reader = reader_of(glob, ov.Tokens("tokens"), slice_rows=8, on_long="drop")
    ready, contents = reader.read_on(Read(0, 0, 0, 0, (0,), ahead=ReadAhead(16, 2**20)))
    assert isinstance(ready, WindowsReady)
    found = [row for _, block in ready.windows for row in block.found.row.tolist()]
    assert found == list(range(0, 2 * len(found), 2))
    assert len(found) == sum(map(len, contents)) >= 16


def test_a_row_without_ids_ends_what_is_read_on_before_its_window(tmp_path: Path) -> None:
    rows = [{"tokens": [] if i == 20 else [i]} for i in range(30)]
    glob = write_rows(tmp_path, "parquet", rows, files=1)
    reader, ahead = reader_of(glob, ov.Tokens("tokens"), slice_rows=8), ReadAhead(30, 2**20)
    window = reader.read_on(Read(0, 0, 0, 0, (0,), ahead=ahead))
    assert window == WindowReady(8, (), window.nbytes)  # rows of the other windows are left
    block, content = reader.evaluate(Evaluate(0, 8))
    assert rows_of(content) == [[i] for i in range(8)]
    ready, _ = reader.read_on(Read(0, 0, 0, 1, (0,), ahead=ahead))
    assert isinstance(ready, WindowsReady)
    assert [w.rows for w, _ in ready.windows] == [8]
    assert reader.read_on(Read(0, 0, 0, 2, (0,), ahead=ahead)).rows == 8
    block, _ = reader.evaluate(Evaluate(0, 8))
    assert block.found.bad_row.tolist() == [20]


def test_user_code_gets_one_slice_at_a_time_however_much_is_lacking(tmp_path: Path) -> None:
    glob = write_rows(tmp_path, "parquet", [{"tokens": [i]} for i in range(30)], files=1)
    sizes = list[int]()

    def seen(columns: dict[str, list[object]]) -> np.ndarray:
        sizes.append(len(columns["tokens"]))
        return np.ones(sizes[-1], bool)

    reader = reader_of(glob, ov.Filter(seen), ov.Tokens("tokens"), slice_rows=8)
    reader.read_on(Read(0, 0, 0, 0, (0,), ahead=ReadAhead(30, 2**20)))
    assert sizes == [8]


def test_rows_of_equal_keys_are_ordered_by_file_and_row(tmp_path: Path) -> None:
    glob = write_rows(tmp_path, "parquet", [{"tokens": [i]} for i in range(30)], files=3)
    reader = reader_of(glob, ov.Tokens("tokens"))  # unshuffled: the key of a row is its number
    reader.read(Read(0, 0, 0, 0, (2, 0, 1)))
    block, _ = reader.evaluate(Evaluate(0, 30))
    order = list(zip(block.found.row.tolist(), block.found.file.tolist(), strict=True))
    assert order == sorted(order)
