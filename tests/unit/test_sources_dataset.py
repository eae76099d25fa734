import pickle

import numpy as np
import pytest

import overlord as ov
from overlord.errors import JobError, SourceError
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from overlord.sources.index import build_index
from overlord.sources.python_objects import Factory
from tests.source_reads import read_all


class Squares:
    def __init__(self, n, fail=()):
        self.n, self.fail = n, fail

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i in self.fail:
            raise KeyError(f"no {i}")
        return {"x": i, "sq": np.arange(i % 3)} if i % 10 != 9 else [i]


def test_a_dataset_is_cut_into_chunks_of_sixteen_slices(tmp_path):
    everything = read_all(Squares(100, fail={3}), slice_rows=2, columns=("x",))
    assert everything.index.chunks.start.tolist() == [0, 32, 64, 96]
    assert everything.ids == [(0, i) for i in range(100)]
    assert everything.index.rows == 100
    assert [r["x"] for r in everything.rows] == [i for i in range(100) if i % 10 != 9 and i != 3]
    reasons = dict(everything.reasons)
    assert reasons[3].startswith(f"the dataset raised KeyError: 'no 3' (at {__file__}:")
    assert reasons[9] == "expected a dict, got list"


def test_a_list_of_dicts_and_arrays_as_values_will_do():
    rows = [{"x": np.array([1, 2])}, {"x": np.array([], np.int64)}, {"x": np.array([3])}]
    assert [r["x"] for r in read_all(rows).rows] == [[1, 2], [], [3]]


def test_an_empty_dataset_is_an_error():
    with pytest.raises(SourceError, match="without any"):
        read_all(Squares(0))


def test_a_dataset_that_changed_is_noticed():
    data = Squares(5)
    index = build_index("d", data)
    assert index.fingerprint != build_index("d", Squares(6)).fingerprint
    assert index.fingerprint == build_index("d", Squares(5)).fingerprint


def rows_of(shard):
    return ({"x": shard * 100 + i} if i != 1 else "text" for i in range(3 * shard))


def test_a_factory_has_a_chunk_per_shard_and_an_empty_shard_is_one_bad_row():
    everything = read_all(Factory(rows_of, shards=3), slice_rows=2)
    assert everything.ids == [(0, 0), (1, 0), (1, 1), (1, 2), *((2, i) for i in range(6))]
    assert [r["x"] for r in everything.rows] == [100, 102, 200, 202, 203, 204, 205]
    assert [reason for _, reason in everything.reasons] == [
        "the shard has no rows",
        "expected a dict, got str",
        "expected a dict, got str",
    ]


def test_a_factory_that_raises_is_an_error_with_its_place():
    def broken(shard):
        yield {"x": 1}
        raise RuntimeError("boom")

    with pytest.raises(SourceError, match="raised at row 1 of shard 0: RuntimeError: boom"):
        read_all(Factory(broken))


def test_a_factory_is_checked_and_pickles():
    with pytest.raises(JobError, match="shards: expected"):
        Factory(rows_of, shards=0)
    with pytest.raises(JobError, match="fn: expected a function"):
        Factory(3)
    assert pickle.loads(pickle.dumps(Factory(rows_of, 2, "v1"))) == Factory(rows_of, 2, "v1")


def test_what_is_neither_files_nor_dataset_is_an_error():
    with pytest.raises(SourceError, match="expected files, a dataset or a factory, got int"):
        build_index("d", 7)


@pytest.mark.parametrize("reads_datasets", [True, False])
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([("a", 1)] * 40, r"expected a dict, got tuple in each of the first 32 rows; yield dicts"),
        ([{"text": "a"}] * 40, r"'tokens'"),
    ],
)
def test_a_list_of_rows_that_are_no_dicts_or_lack_a_column_is_refused_before_workers_start(
    rows, says, reads_datasets
):
    source = ov.Source.from_dataset("web", rows, transforms=[ov.Tokens()])
    job = ov.Job(name="refused", sources=[source], batch=ov.Batch(samples=4, context=8))
    with pytest.raises(SourceError, match=says):
        PreparedJob(job, Options(), reads_datasets=reads_datasets)


def test_a_dataset_that_may_open_files_is_read_only_in_the_process_that_trains():
    source = ov.Source.from_dataset("web", Tuples(), transforms=[ov.Tokens()])
    job = ov.Job(name="later", sources=[source], batch=ov.Batch(samples=4, context=8))
    PreparedJob(job, Options(), reads_datasets=False)
    with pytest.raises(SourceError, match="expected a dict, got tuple"):
        PreparedJob(job, Options(), reads_datasets=True)


def test_one_good_row_among_the_first_is_enough():
    rows = [("a", 1)] * 31 + [{"tokens": [1]}] * 9
    source = ov.Source.from_dataset("web", rows, transforms=[ov.Tokens()])
    job = ov.Job(name="few", sources=[source], batch=ov.Batch(samples=4, context=8))
    PreparedJob(job, Options(), reads_datasets=True)


class Tuples:
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return ("a", i)
