"""Jobs that cannot run are refused when they are made, with every problem named."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from overlord.checks import did_you_mean
from overlord.errors import JobError
from overlord.job.job import HYBRID, STRATEGIES, Job, Source
from overlord.job.mixture_weights import mixture_problems
from overlord.mesh import Batch, ClientPlaceTree
from overlord.planning import strategies
from overlord.transforms.base import Tokens

BATCH = Batch(samples=8, context=16)


def job(**fields: Any) -> Job:
    return Job(
        **({"name": "demo", "sources": [Source("web", "web/*.parquet")], "batch": BATCH} | fields)
    )


def problems(make: Any) -> list[str]:
    with pytest.raises(JobError) as caught:
        make()
    return caught.value.problems


class Rows:
    def __len__(self) -> int:
        return 0

    def __getitem__(self, i: int) -> Any:
        raise IndexError(i)


class Shards:
    shards = 2

    def fn(self, shard: int) -> Any:
        return iter(())


@pytest.mark.parametrize(
    "path", ["a.parquet", Path("a"), ["a", Path("b")], ("a",), "s3://bucket/a", Rows(), Shards()]
)
def test_a_source_is_files_a_dataset_or_a_factory(path: Any):
    assert Source("web", path).name == "web"


def test_a_source_is_the_same_however_its_paths_were_given():
    assert Source("web", Path("a")) == Source("web", "a")
    assert Source("web", [Path("a"), "b"]) == Source("web", ("a", "b"))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": ""}, "expected a name without '/', got ''"),
        ({"name": "a/b"}, "expected a name without '/'"),
        ({"name": 3}, "expected a name without '/', got 3"),
        ({"uri": ""}, "uri: expected files, a dataset or a factory"),
        ({"uri": None}, "uri: expected files, a dataset or a factory"),
        ({"uri": 5}, "uri: expected files, a dataset or a factory, got 5"),
        ({"uri": {"a": 1}}, "uri: expected files, a dataset or a factory"),
        ({"uri": Rows}, "uri: expected files, a dataset or a factory"),
        ({"uri": []}, "expected at least one file, got an empty list"),
        ({"uri": ["a", "b", "a"]}, "expected every file once, got a twice"),
        ({"uri": ["a", Path("a")]}, "expected every file once, got a twice"),
        ({"uri": [{"text": "x"}]}, "expected a list of paths"),
        ({"weight": float("nan")}, "weight: expected a finite number of at least 0, got nan"),
        ({"weight": float("inf")}, "weight: expected a finite number of at least 0, got inf"),
        ({"weight": -0.5}, "weight: expected a finite number of at least 0, got -0.5"),
        ({"weight": "1"}, "weight: expected a finite number of at least 0, got '1'"),
        ({"weight": True}, "weight: expected a finite number"),
        ({"epochs": 0}, "epochs: expected a number above 0, or None"),
        ({"epochs": "2"}, "epochs: expected a number above 0, or None"),
        ({"max_tokens": 1.5}, "max_tokens: expected a whole number of at least 1, or None"),
        ({"shuffle": 1}, "shuffle: expected true or false"),
        ({"max_bad": 0}, "max_bad: expected a whole number of at least 1"),
        ({"max_sample_bytes": -1}, "max_sample_bytes: expected a whole number of at least 1"),
        ({"format": 7}, "format: expected the name of a format, got 7"),
        ({"transforms": "tokens"}, "transforms: expected a list, got str"),
        ({"transforms": [len]}, "transforms[0]: expected a transform, got <built-in function len>"),
        ({"transforms": [Tokens(), Tokens]}, "transforms[1]: expected a transform, got <class"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(fields: dict[str, Any], problem: str):
    name, path, rest = (
        fields.get("name", "web"),
        fields.get("uri", "a"),
        {k: v for k, v in fields.items() if k not in ("name", "uri")},
    )
    (found,) = problems(lambda: Source(name, path, **rest))
    assert problem in found
    assert f"source {name!r}" in found


def test_many_files_are_checked_in_no_time():
    assert (
        len(Source("web", [f"{i}.parquet" for i in range(200_000)]).uri) == 200_000
    )  # once quadratic: hours


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "expected exactly one of samples= and tokens="),
        ({"samples": 1, "tokens": 1}, "expected exactly one of samples= and tokens="),
        ({"samples": 0}, "batch.samples: expected a whole number of at least 1, got 0"),
        ({"tokens": 1.5}, "batch.tokens: expected a whole number"),
        ({"samples": 1, "context": 0}, "batch.context: expected a whole number of at least 1"),
        (
            {"samples": 1, "microbatches": True},
            "batch.microbatches: expected a whole number of at least 1, got True",
        ),
        ({"samples": 1, "pad_id": -1}, "batch.pad_id: expected a whole number of at least 0"),
        (
            {"samples": 1, "layout": "square"},
            "batch.layout: expected one of packed, padded, got 'square'",
        ),
        (
            {"samples": 1, "cp_split": "ring"},
            "batch.cp_split: expected one of zigzag, zigzag_whole, contiguous, none, got 'ring'",
        ),
        (
            {"samples": 1, "sequence_parallel": 2},
            "batch.sequence_parallel: expected true or false, got 2",
        ),
        (
            {"samples": 1, "labels": None},
            "batch.labels: expected one of shifted, unshifted, got None",
        ),
        (
            {"samples": 1, "context": 10, "pad_multiple": 4},
            "batch.context: expected a multiple of pad_multiple=4, got 10",
        ),
    ],
)
def test_a_batch_that_cannot_be_made_is_refused(fields: dict[str, Any], problem: str):
    (found,) = problems(lambda: Batch(**({"context": 8} | fields)))
    assert problem in found


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"dp": 0}, "place.dp: expected a whole number of at least 1, got 0"),
        ({"tp": 2.0}, "place.tp"),
        ({"order": ("dp", "tp")}, "place.order: expected each of pp, dp, cp, tp once"),
        ({"order": 5}, "place.order"),
        ({"order": [1, "dp", None, "tp"]}, "place.order"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(fields: dict[str, Any], problem: str):
    (found,) = problems(lambda: ClientPlaceTree(**fields))
    assert problem in found


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": ""}, "name: expected a name"),
        ({"sources": []}, "sources: expected at least one Source"),
        ({"sources": None}, "sources: expected at least one Source"),
        ({"sources": ["web"]}, "sources[0]: expected a Source, got 'web'"),
        (
            {"sources": [Source("a", "x"), Source("b", "y"), Source("a", "z")]},
            "sources: expected different names, got 'a' twice",
        ),
        (
            {"sources": [Source("a", "x", weight=0), Source("b", "y", weight=0.0)]},
            "sources: expected a weight above 0",
        ),
        ({"batch": None}, "batch: expected a Batch"),
        ({"place": {"dp": 2}}, "place: expected an ov.Mesh"),
        (
            {"mixture": {"wbe": 1}},
            "mixture: expected a source of the job, got 'wbe'; did you mean 'web'?",
        ),
        (
            {"mixture": {"web": float("nan")}},
            "mixture: the weight of 'web': expected a finite number",
        ),
        ({"mixture": {"web": 0}}, "mixture: expected a weight above 0"),
        ({"mixture": 0.7}, "mixture: expected a mapping of weights or a schedule"),
        ({"strategy": 3}, "strategy: expected a name or a function, got 3"),
        (
            {"strategy": "llm_balanc"},
            "strategy: expected a known strategy, got 'llm_balanc'; did you mean 'llm_balance'?",
        ),
        ({"seed": -1}, "seed: expected a whole number of at least 0"),
        ({"seed": 1.0}, "seed: expected a whole number of at least 0"),
        ({"slice_rows": 0}, "slice_rows: expected a whole number of at least 1"),
        ({"chunk_bytes": "8M"}, "chunk_bytes: expected a whole number of at least 1"),
        ({"until": "last"}, 'until: expected "all", "first" or a number of steps'),
        ({"until": 0}, "until: expected"),
        ({"until": True}, "until: expected"),
        ({"draw": "fair"}, "draw: expected one of exact, random, got 'fair'"),
        (
            {"draw": "random", "batch": Batch(tokens=8, context=8)},
            'draw: expected "exact" for a batch in tokens',
        ),
        ({"mix_every": "hour"}, "mix_every: expected one of step, microbatch, epoch"),
        ({"sync": "iteration"}, "sync: expected one of microbatch, step, got 'iteration'"),
        (
            {"on_long": "dropp"},
            "on_long: expected one of split, truncate, quarantine, drop, got 'dropp'",
        ),
        ({"look_ahead": 0}, "look_ahead: expected a whole number of at least 1"),
        (
            {"look_ahead": 2, "batch": Batch(tokens=8, context=8)},
            "look_ahead: expected 1 for a batch in tokens, got 2",
        ),
        ({"overflow": "drop"}, "overflow: expected one of grow, defer, got 'drop'"),
        (
            {"overflow": "defer", "batch": Batch(tokens=8, context=8)},
            'overflow: expected "grow" for a batch in tokens',
        ),
        (
            {"overflow": "defer", "look_ahead": 2},
            'overflow: expected "grow" with look_ahead above 1',
        ),
        ({"journal": ""}, "journal: expected a directory or a store's URI, got ''"),
        ({"journal": "s3://key:secret@bucket/runs"}, "journal: expected a URI without credentials"),
    ],
)
def test_a_job_that_cannot_run_is_refused(fields: dict[str, Any], problem: str):
    (found,) = problems(lambda: job(**fields))
    assert problem in found


def test_the_context_is_a_multiple_of_what_context_parallelism_cuts():
    found = problems(lambda: job(place=ClientPlaceTree(cp=3), batch=Batch(samples=1, context=16)))
    assert found == ["batch.context: expected a multiple of 6 (pad_multiple, cp), got 16"]
    found = problems(
        lambda: job(
            place=ClientPlaceTree(cp=2, tp=3),
            batch=Batch(samples=1, context=16, sequence_parallel=True),
        )
    )
    assert found == [
        "batch.context: expected a multiple of 12 (pad_multiple, cp, tp for "
        "sequence_parallel), got 16"
    ]


@pytest.mark.parametrize(
    ("split", "cp", "multiple"),
    [
        ("zigzag", 4, 3 * 8),
        ("zigzag_whole", 4, 3 * 8),
        ("contiguous", 4, 3 * 4),
        ("none", 4, 3),
        ("zigzag", 1, 3),
        ("contiguous", 1, 3),
    ],
)
def test_documents_are_padded_to_what_the_cut_needs(split: str, cp: int, multiple: int):
    place = ClientPlaceTree(cp=cp, tp=5, pp=2)
    assert (
        job(
            place=place, batch=Batch(samples=1, context=120, pad_multiple=3, cp_split=split)
        ).document_multiple
        == multiple
    )
    both = Batch(samples=1, context=120, pad_multiple=3, cp_split=split, sequence_parallel=True)
    assert job(place=place, batch=both).document_multiple == 5 * multiple


def test_all_problems_of_a_job_come_together():
    found = problems(
        lambda: job(name="", seed=-1, until="never", on_long="x", mixture={"a": 1, "web": -1})
    )
    assert [p.split(":")[0] for p in found] == [
        "name",
        "mixture",
        "mixture",
        "seed",
        "on_long",
        "until",
    ]
    text = str(JobError(found, "job 'demo'"))
    assert text.startswith("job 'demo': 6 problems\n")
    assert all(f"  - {p}" in text for p in found)
    again = pickle.loads(pickle.dumps(JobError(found, "job 'demo'")))
    assert (again.problems, str(again)) == (found, text)


def test_all_problems_of_a_source_come_together():
    assert (
        len(problems(lambda: Source("a/b", [], weight=-1, epochs=0, shuffle=None, transforms=3)))
        == 6
    )


def test_a_good_job_reads_well_and_keeps_lists_as_tuples():
    made = job(
        sources=[Source("web", "a", transforms=[Tokens()]), Source("code", "b", weight=0)],
        place=ClientPlaceTree(dp=4),
    )
    assert made.names == ("web", "code")
    assert made.sources[0].transforms == (Tokens(),)
    assert (
        repr(made) == "Job('demo', 2 sources, 8 samples a step, pp1xdp4xcp1xtp1, llm_balance, sync "
        "microbatch, seed 0)"
    )
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_mixture_may_leave_sources_out():
    assert mixture_problems({"a": 1}, ["a", "b"]) == []


def test_a_name_that_is_close_is_suggested_and_else_the_known_ones_are_listed():
    assert did_you_mean("weigth", ["weight", "epochs"]) == "; did you mean 'weight'?"
    assert did_you_mean("zzz", ["weight", "epochs"]) == "; known: epochs, weight"


def test_a_job_knows_the_names_of_all_strategies_and_which_of_them_split_samples() -> None:
    assert set(STRATEGIES) == set(strategies.STRATEGIES)
    split = {n for n, fn in strategies.STRATEGIES.items() if getattr(fn, "hybrid", False)}
    assert set(HYBRID) == split
