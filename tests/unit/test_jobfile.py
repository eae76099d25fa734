"""Jobs as YAML: the same job back, and every problem of a file at once, each under its key."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import overlord as ov
from overlord.errors import JobError
from overlord.job.job import DRAWS, MIX_EVERY, ON_LONG, SYNCS, WORKERS, Job, Source
from overlord.jobfile.functions import register_function
from overlord.jobfile.yaml_file import read_job, write_job
from overlord.mesh import CP_SPLITS, LABELS, LAYOUTS, Batch, ClientPlaceTree
from overlord.planning.strategies import STRATEGIES
from overlord.transforms.base import Filter, Map, Meta, Select, Tokens
from overlord.transforms.document_groups import Group, Pair
from overlord.transforms.images import Images
from overlord.transforms.tokenize import Tokenize
from tests.internals import JOB_FILE_FUNCTIONS

EXAMPLE = """
name: demo
sources:
  - {name: web, uri: "web/*.parquet", weight: 0.7,
     transforms: [{tokenize: {tokenizer: tokenizer.json, text: text}}]}
  - name: code
    uri: [/data/a.jsonl, "s3://bucket/code"]
    weight: 3e-1
    epochs: null
    transforms: [{filter: {fn: clean}}, {meta: {name: stars, column: stars}}, tokens]
place: {dp: 4}
batch: {samples: 256, microbatches: 4, context: 8192}
"""


def clean(columns: dict[str, Any]) -> Any:
    return columns["n"] > 0


def random_row(row: dict[str, Any], rng: Any) -> dict[str, Any]:
    return row


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    JOB_FILE_FUNCTIONS.replace(monkeypatch, {})
    register_function("clean", clean)
    register_function("random row", random_row)


def read(text: str, folder: Path) -> Job:
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    return read_job(folder / "job.yaml")


def problems(text: str, folder: Path) -> list[str]:
    with pytest.raises(JobError) as caught:
        read(text, folder)
    assert caught.value.where == str(folder / "job.yaml")
    return caught.value.problems


def test_a_file_says_what_python_says(tmp_path: Path):
    web = Source(
        "web",
        str(tmp_path / "web/*.parquet"),
        weight=0.7,
        transforms=[Tokenize(tmp_path / "tokenizer.json")],
    )
    code = Source(
        "code",
        ["/data/a.jsonl", "s3://bucket/code"],
        weight=0.3,
        epochs=None,
        transforms=[Filter(clean), Meta("stars", "stars"), Tokens()],
    )
    wanted = Job(
        name="demo",
        sources=[web, code],
        place=ClientPlaceTree(dp=4),
        batch=Batch(samples=256, microbatches=4, context=8192),
    )
    assert read(EXAMPLE, tmp_path) == wanted
    assert ov.Job.from_yaml(tmp_path / "job.yaml") == wanted


def test_sources_may_be_a_mapping(tmp_path: Path):
    job = read(
        "{name: x, batch: {tokens: 9, context: 9}, sources: {b: {uri: /b}, a: {uri: /a, "
        "weight: 2}}}",
        tmp_path,
    )
    assert job.sources == (Source("b", "/b"), Source("a", "/a", weight=2))


def test_paths_are_relative_to_the_file_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    job = read_job("jobs/job.yaml")
    assert job.sources[0].uri == str(tmp_path / "jobs" / "web/*.parquet")
    assert job.sources[0].transforms[0].tokenizer == str(tmp_path / "jobs" / "tokenizer.json")


def test_only_what_differs_from_the_defaults_is_written(tmp_path: Path):
    job = Job(
        name="demo",
        sources=[Source("web", "/web/*.parquet", transforms=[Tokens()])],
        batch=Batch(samples=8, context=16),
    )
    assert write_job(job) == (
        "name: demo\nsources:\n- name: web\n  uri: /web/*.parquet\n  transforms:\n  - "
        "tokens: {}\nbatch:\n  samples: 8\n  context: 16\n"
    )
    assert job.to_yaml() == write_job(job)


def test_relative_paths_are_written_so_that_they_mean_the_same_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    job = Job(
        name="x",
        sources=[Source("a", ["b/*.arrow", "gs://c/d"])],
        batch=Batch(samples=1, context=1),
    )
    (tmp_path / "elsewhere").mkdir()
    assert read(write_job(job), tmp_path / "elsewhere").sources[0].uri == (
        str(tmp_path / "b/*.arrow"),
        "gs://c/d",
    )


def test_every_problem_of_a_file_comes_at_once_under_its_key(tmp_path: Path):
    found = problems(
        """
name: ""
sources:
  - {name: a, uri: x, weigth: 2, transforms: [{tokenise: {}}, {tokenize: {text: 5}}, {select: []}]}
  - {name: b, weight: -1, uri: 7}
  - {name: c, uri: x, weight: .nan, epochs: 0, transforms: tokens}
  - 12
  - {name: b, uri: y}
batch: {samples: 0, contxt: 9}
place: {dp: 0, order: [dp]}
mixture: {a: 1, q: 2}
on_long: cut
speed: 9
seed: 1.5
""",
        tmp_path,
    )
    assert sorted(found) == sorted(
        [
            "name: expected a name, got ''",
            "sources[0].weigth: expected a known field, got 'weigth'; did you mean 'weight'?",
            "sources[0].transforms[0].tokenise: expected a known transform, got 'tokenise'; did you mean 'tokenize'?",
            "sources[0].transforms[1].tokenize.tokenizer: expected a value, got none",
            "sources[0].transforms[1].tokenize.text: expected a name, got 5",
            "sources[0].transforms[2].select.columns: expected at least one name, got none",
            "sources[1].uri: expected a path or a list of paths, got 7",
            "sources[1].weight: expected a finite number of at least 0, got -1",
            "sources[2].transforms: expected a list, got 'tokens'",
            "sources[2].weight: expected a finite number of at least 0, got nan",
            "sources[2].epochs: expected a number above 0, or None for no limit, got 0",
            "sources[3]: expected a mapping, got 12",
            "sources: expected different names, got 'b' twice",
            "batch.contxt: expected a known field, got 'contxt'; did you mean 'context'?",
            "batch.samples: expected a whole number of at least 1, got 0",
            "batch.context: expected a whole number of at least 1, got 0",
            "place.dp: expected a whole number of at least 1, got 0",
            "place.order: expected each of pp, dp, cp, tp once, got ['dp']",
            "mixture: expected a source of the job, got 'q'; known: a, b, c, sources[3]",
            "on_long: expected one of split, truncate, quarantine, drop, got 'cut'",
            "speed: expected a known field, got 'speed'; did you mean 'seed'?",
            "seed: expected a whole number of at least 0, got 1.5",
        ]
    )


def test_what_must_be_there_is_named(tmp_path: Path):
    assert problems("seed: 3", tmp_path) == [
        "name: expected a value, got none",
        "sources: expected a value, got none",
        "batch: expected a value, got none",
    ]
    assert problems(
        "{name: x, batch: {samples: 1, context: 1}, sources: {a: {weight: 1}}}", tmp_path
    ) == ["sources.a.uri: expected a value, got none"]


def test_the_files_of_a_source_stand_under_uri(tmp_path: Path):
    head = "{name: x, batch: {samples: 1, context: 1}, sources: {a: {%s}}}"
    assert problems(head % "path: /x", tmp_path) == ["sources.a.path: expected 'uri', got 'path'"]
    assert problems(head % "path: 7, weigth: 1", tmp_path) == [
        "sources.a.path: expected 'uri', got 'path'",
        "sources.a.uri: expected a path or a list of paths, got 7",
        "sources.a.weigth: expected a known field, got 'weigth'; did you mean 'weight'?",
    ]
    assert problems(head % "path: /x, uri: /y", tmp_path) == [
        "sources.a.path: expected 'uri', got 'path'"
    ]


def test_a_file_may_say_where_transforms_run_and_that_pixels_are_made_late(tmp_path: Path):
    head = "{name: x, batch: {samples: 1, context: 1}, sources: {a: {uri: /x, %s}}}"
    job = read(head % "workers: processes, deferred: []", tmp_path)
    assert job.sources == (Source("a", "/x", workers="processes"),)
    assert read(write_job(job), tmp_path) == job
    late = read(
        head % "transforms: [tokens], deferred: [{images: {placeholder: 7, size: [28, 56]}}]",
        tmp_path,
    )
    assert late.sources[0].transforms == (
        Tokens(),
        Images(placeholder=7, size=(28, 56), place="constructor"),
    )
    assert read(write_job(late), tmp_path) == late
    (deferred,) = problems(head % "deferred: [tokens]", tmp_path)
    assert deferred.startswith(
        "sources.a.deferred[0]: expected ov.Images(...), got Tokens('tokens')"
    )
    assert problems(head % "deferred: 3", tmp_path) == [
        "sources.a.deferred: expected a list, got 3"
    ]
    assert problems(head % "transforms: [{images: {patch: 0}}]", tmp_path) == [
        "sources.a.transforms[0].images.placeholder: expected a value, got none",
        "sources.a.transforms[0].images.patch: expected a whole number from 1 to 512, got 0",
    ]
    assert problems(head % "workers: 4", tmp_path) == [
        "sources.a.workers: expected one of threads, processes, got 4"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a mapping with name, sources and batch, got nothing"),
        ("- 1", "expected a mapping"),
        ("a: [", "expected YAML, got a syntax error"),
        (
            "a: !!python/object/apply:os.getcwd []",
            "expected YAML, got a syntax error: could not determine a constructor",
        ),
        ("[" * 1500, "expected YAML, got a syntax error"),
        ("a: &x [*x]", "a: expected a known field, got 'a'"),
    ],
)
def test_a_file_that_is_no_job_is_named(text: str, problem: str, tmp_path: Path):
    assert problem in problems(text, tmp_path)[0]


def test_a_key_twice_is_a_problem_of_its_own(tmp_path: Path):
    found = problems(EXAMPLE + "seed: 1\nplace: {dp: 2, dp: 3}\nseed: 2\n", tmp_path)
    assert found == [
        "place: expected it once, got it twice, the second time in line 14",
        "seed: expected it once, got it twice, the second time in line 15",
        "dp: expected it once, got it twice, the second time in line 14",
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(JobError, match="No such file"):
        read_job(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(JobError, match="is not UTF-8"):
        read_job(tmp_path / "latin.yaml")


def test_words_are_words_and_numbers_numbers(tmp_path: Path):
    job = read(
        "{name: no, batch: {samples: 1, context: 1}, sources: [{name: 2024-01-01, uri: "
        "/x, weight: 1e-3}, {name: on, uri: /x}]}",
        tmp_path,
    )
    assert (job.name, job.names, job.sources[0].weight) == ("no", ("2024-01-01", "on"), 0.001)


def test_functions_come_from_the_registry_only(tmp_path: Path):
    head = "{name: x, batch: {samples: 1, context: 1}, sources: {a: {uri: /x, transforms: [%s]}}}"
    assert problems(head % "{map: {fn: os.getcwd}}", tmp_path) == [
        "sources.a.transforms[0].map.fn: expected a registered function "
        "(known: clean, random row), got 'os.getcwd'; "
        "call ov.register_function before the file is read; on the command line, in a "
        "module named by --import"
    ]
    assert problems(head % "{meta: {name: m, fn: clean, column: c}}", tmp_path) == [
        "sources.a.transforms[0].meta: expected column or fn, got both"
    ]
    assert problems(head % "{map: {fn: clean, rng: true}}", tmp_path) == [
        "sources.a.transforms[0].map.rng: expected rows=True, got False; a random Map runs row by row"
    ]
    assert read(head % "{meta: {name: m, fn: clean}}", tmp_path).sources[0].transforms == (
        Meta("m", clean),
    )


def test_a_registered_name_keeps_its_function():
    assert register_function("clean", clean) is clean
    with pytest.raises(JobError, match=r"expected an unused name, got .*clean; choose another"):
        register_function("clean", random_row)
    with pytest.raises(JobError, match="expected a name and a function"):
        register_function("", clean)


def by_rank(buffer: Any, place: Any) -> Any:
    """Stand for a strategy of the user."""


def test_a_file_names_a_registered_function_as_strategy(tmp_path: Path):
    register_function("by rank", by_rank)
    job = read(EXAMPLE + "strategy: by rank\n", tmp_path)
    assert job.strategy is by_rank
    assert read(write_job(job), tmp_path) == job
    (unknown,) = problems(EXAMPLE + "strategy: by ranks\n", tmp_path)
    assert unknown == (
        "strategy: expected a known strategy, got 'by ranks'; did you mean 'by rank'?; for a "
        "strategy of your own, call ov.register_function before the file is read; on the command "
        "line, in a module named by --import"
    )
    (plain,) = problems(EXAMPLE + "strategy: {fn: by rank}\n", tmp_path)
    assert plain == "strategy: expected the name of a strategy, got {'fn': 'by rank'}"


def test_a_strategy_that_two_functions_have_as_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    JOB_FILE_FUNCTIONS.replace(monkeypatch, dict(JOB_FILE_FUNCTIONS.real))
    register_function("packed", by_rank)
    (problem,) = problems(EXAMPLE + "strategy: packed\n", tmp_path)
    assert problem.startswith("strategy: expected one strategy of the name 'packed', got ")
    assert problem.endswith("register yours under another name")


def two(first: Any, second: Any) -> Any:
    """Of as many arguments as strategies and schedules have."""


def test_what_is_code_cannot_be_written():
    sources = [
        Source("a", "/x", transforms=[Map(lambda c: c), Filter(clean)]),
        Source("b", [1, 2][:0] or "/y", transforms=[Meta("m", len)]),
    ]
    job = Job(
        name="x", sources=sources, batch=Batch(samples=1, context=1), strategy=two, mixture=two
    )
    with pytest.raises(JobError) as caught:
        write_job(job)
    assert [p.split(":")[0] for p in caught.value.problems] == [
        "sources[0].transforms[0]",
        "sources[1].transforms[0]",
        "mixture",
        "strategy",
    ]


# Laws

names = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/\x85"),
    min_size=1,
    max_size=8,
) | st.sampled_from(
    [
        "no",
        "1e-3",
        "~",
        "0x1",
        "007",
        "<<",
        "=",
        "null",
        "-",
        "1:30",
        "!a",
        "&a",
        "a: b",
        "#",
        ".nan",
    ]
)
some_paths = st.builds(
    lambda n: "/data/" + n, names.filter(lambda n: n not in (".", ".."))
) | st.just("s3://bucket/x*.parquet")
weights = st.floats(1e-300, 1e300) | st.integers(1, 2**70)
tokens = st.none() | names | st.integers(0, 2**31 - 1)
values = st.none() | st.dictionaries(
    st.sampled_from(["rewards", "margin"]), names | st.tuples(names, names), min_size=1
)
transforms = st.one_of(
    st.builds(
        Pair,
        names.map(lambda n: "c" + n),
        names.map(lambda n: "r" + n),
        prompt=st.none() | names,
        values=values,
    ),
    st.builds(
        Group,
        names,
        prompt=st.none() | names,
        size=st.none() | st.integers(1, 64),
        values=st.none() | st.lists(st.sampled_from(["rewards", "margin"]), min_size=1),
    ),
    st.builds(Tokens, names, loss=names.map(lambda n: "w" + n)),
    st.builds(
        Tokenize, some_paths, names, add_special_tokens=st.booleans(), bos=tokens, eos=tokens
    ),
    st.builds(Tokens, names),
    st.builds(Map, st.just(clean), rows=st.just(True), rng=st.booleans(), holds_lock=st.booleans()),
    st.builds(Filter, st.sampled_from([clean, random_row]), rows=st.booleans()),
    st.lists(names, min_size=1, max_size=3, unique=True).map(lambda c: Select(*c)),
    st.builds(Meta, names.map(lambda n: "m" + n), names | st.just(clean)),
)
sources = st.builds(
    Source,
    names,
    some_paths | st.lists(some_paths, min_size=1, max_size=3, unique=True),
    transforms=st.lists(transforms, max_size=3),
    weight=weights,
    format=st.none() | names,
    epochs=st.none() | st.integers(1, 9),
    shuffle=st.booleans(),
    max_bad=st.integers(1, 999),
    workers=st.sampled_from(WORKERS),
)
shape = {
    "microbatches": st.integers(1, 9),
    "context": st.integers(1, 9999),
    "layout": st.sampled_from(LAYOUTS),
    "labels": st.sampled_from(LABELS),
    "pad_id": st.integers(0, 9),
    "cp_split": st.sampled_from(CP_SPLITS),
    "sequence_parallel": st.booleans(),
}
batches = st.builds(Batch, samples=st.integers(1, 10**6), **shape)
places = st.builds(
    ClientPlaceTree, dp=st.integers(1, 64), order=st.permutations(("pp", "dp", "cp", "tp"))
)
jobs = st.builds(
    Job,
    name=names,
    sources=st.lists(sources, min_size=1, max_size=4, unique_by=lambda s: s.name),
    batch=batches,
    place=places,
    # others have demands on a batch
    strategy=st.sampled_from(sorted({*STRATEGIES} - {"hdp_balance", "even"})),
    seed=st.integers(0, 2**70),
    until=st.sampled_from(["all", "first"]) | st.integers(1, 99),
    draw=st.sampled_from(DRAWS),
    mix_every=st.sampled_from(MIX_EVERY),
    sync=st.sampled_from(SYNCS),
    on_long=st.sampled_from(ON_LONG),
    slice_rows=st.integers(1, 999),
)
law = settings(
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@law
@given(jobs, st.data())
def test_a_job_that_is_written_and_read_is_the_same_job(
    tmp_path: Path, job: Job, data: st.DataObject
):
    mixture = data.draw(
        st.none() | st.dictionaries(st.sampled_from(job.names), weights, min_size=1)
    )
    job = replace(job, mixture=mixture)
    assert read(write_job(job), tmp_path) == job


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=4,
)


WHOLE = """
{name: x, place: {dp: 1, order: [pp, dp, cp, tp]}, batch: {samples: 1, context: 1},
 mixture: {a: 1}, seed: 0, strategy: packed, sources: [
  {name: a, uri: /x, weight: 1, format: null, transforms: [
    {tokenize: {tokenizer: t, bos: 1}}, {map: {fn: clean}}, {meta: {name: n, column: m}},
    {select: [a]}, {tokens: {column: c}}]}]}
"""


@law
@given(st.data())
def test_whatever_stands_in_a_file_is_a_job_or_a_job_error(tmp_path: Path, data: st.DataObject):
    plain = yaml.safe_load(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = plain
        while isinstance(at, (dict, list)) and at:
            key = data.draw(
                st.sampled_from(sorted(at, key=str))
                if isinstance(at, dict)
                else st.integers(0, len(at) - 1)
            )
            if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
                at[key] = data.draw(anything)
                break
            at = at[key]
    try:
        job = read(yaml.safe_dump(plain), tmp_path)
    except JobError as refused:
        found = refused.problems
    else:
        found = ["none"]
        assert read(write_job(job), tmp_path) == job
    assert found, "a refusal says why"


def test_a_hybrid_job_is_read_and_written(tmp_path: Path) -> None:
    text = """
    name: long
    sources: [{name: web, uri: "*.parquet", epochs: 1}]
    place: {dp: 2, cp: 2}
    batch: {samples: 8, context: 256}
    strategy: hdp_balance
    max_document: 512
    sync: step
    """
    job = read(textwrap.dedent(text), tmp_path)
    assert (job.strategy, job.max_document, job.document_limit) == ("hdp_balance", 512, 512)
    assert replace(job, max_document=None).document_limit == 1024
    assert read(write_job(job), tmp_path) == job
    with pytest.raises(JobError, match="max_document: expected at most 1024, the context of 4"):
        read(textwrap.dedent(text).replace("512", "2048"), tmp_path)
