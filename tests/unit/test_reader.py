"""The reader of windows: what it holds, and what it does with slices that disagree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import overlord as ov
from overlord.messages.data import Evaluate, Read
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
