"""What can be asked of ``launch`` and of sources: options that are refused in words, worker
processes, rows from objects.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.cli.common import read_options
from overlord.errors import JobError, StateMismatch
from overlord.setup.options import GROUPED, Options
from tests.internals import SESSION_STARTS
from tests.processes import WAIT_S, left_after
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)


def source(name: str = "web", n: int = 40, **fields: Any) -> ov.Source:
    rows = Rows([{"tokens": [1 + k] * (1 + k % 5)} for k in range(n)])
    return ov.Source(name, rows, **{"transforms": [ov.Tokens()], "epochs": 1, **fields})


def job(*sources: ov.Source, **fields: Any) -> ov.Job:
    fields = {
        "name": "asked",
        "sources": sources or (source(),),
        "batch": ov.Batch(samples=8, context=64),
        "slice_rows": 8,
        **fields,
    }
    return ov.Job(**fields)


def problems(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(JobError) as caught:
        call()
    return caught.value.problems


def stream(made: ov.Job, **options: Any) -> list[tuple[str, list[dict[str, bytes]]]]:
    with ov.launch(made, check=True, stall_limit_s=20, **options) as session:
        return [
            (step.plan_digest, [{k: v.tobytes() for k, v in mb.items()} for mb in step])
            for step in session.client(0)
        ]


# Options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"partition": "atuo"},
            "partition: expected 'auto' or 'off', got 'atuo'; did you mean 'auto'?",
        ),
        ({"partition": 3}, "partition: expected 'auto' or 'off', got 3; there are auto, off"),
        ({"autoscale": 2}, "autoscale: expected True, False, or limits by name, got 2"),
        (
            {"autoscale": {"patient": 1}},
            "autoscale: unknown limit 'patient'; did you mean 'patience'",
        ),
        (
            {"autoscale": {"low": 0.9}},
            "autoscale: low, target, high: expected 0 < low < target < high <= 1, got 0.9, 0.7, 0.85",
        ),
        (
            {"shadows": "heavy"},
            "shadows: 'heavy' is for runtime='process'; all loaders of one process are lost",
        ),
        (
            {"shadows": "hevy"},
            "shadows: expected 'none', 'heavy' or 'all', got 'hevy'; did you mean 'heavy'",
        ),
        ({"shadows": 3}, "got 3; there are none, heavy, all"),
        (
            {"shadows": "all", "failover": False},
            "shadows: expected 'none' without failover, got 'all'; leave it out",
        ),
        ({"failover": "yes"}, "failover: expected True or False, got 'yes'"),
        ({"lost_after_s": 0}, "lost_after_s: expected a number of seconds above 0, got 0"),
        ({"max_restarts": -1}, "max_restarts: expected a whole number of at least 0, got -1"),
        (
            {"constructors": True},
            "constructors: this option was removed, constructors always run; leave it out",
        ),
        ({"broadcast": 1}, "broadcast: expected True or False, got 1"),
        ({"sources_per_host": 0}, "sources_per_host: expected a whole number of at least 1, got 0"),
        ({"ring_bytes": 1.5}, "ring_bytes: expected a whole number of at least 1, got 1.5"),
        (
            {"runtime": "cloud"},
            "runtime: expected 'local' (in this process) or 'process' (in processes of "
            "this machine) or 'ray' (on a Ray",
        ),
        ({"address": "head:6379"}, "address: 'head:6379' is for runtime='ray'; leave it out"),
        (
            {"runtime": "ray", "address": "head"},
            "address: expected host:port of a Ray cluster's head, as in '10.0.0.1:6379', "
            "got 'head'",
        ),
        (
            {"runtime": "ray", "address": "auto"},
            "address: expected host:port of a Ray cluster's head",
        ),
        (
            {"runtime": "process", "constructors": False},
            "constructors: this option was removed, constructors always run; leave it out",
        ),
        (
            {"ports": "7000-7099"},
            "ports: expected None with runtime='local', got '7000-7099'; leave it out: only "
            "session.serve listens, which has its own port=",
        ),
        (
            {"runtime": "process", "ports": "7099-7000"},
            "ports: expected a first and a last port, as in '7000-7099', got '7099-7000'",
        ),
        (
            {"runtime": "process", "ports": 7000},
            "ports: expected a first and a last port, as in '7000-7099', got 7000",
        ),
        ({"reserve": True}, "reserve: True is for runtime='ray' with the address of a cluster"),
        (
            {"runtime": "ray", "rank_nodes": 5},
            "rank_nodes: expected names of nodes by rank, as in ['gpu-0', 'gpu-0', 'gpu-1'], got 5",
        ),
        (
            {"rank_nodes": ["a"]},
            "rank_nodes: expected None, got ['a']; runtime='local' has one machine: leave it out",
        ),
        (
            {"runtime": "process", "node_labels": {"a": "b"}},
            "node_labels: expected None, got {'a': 'b'}; runtime='process' has one machine",
        ),
        (
            {"runtime": "ray", "node_labels": {"pool": 3}},
            "node_labels: expected labels with their values, as in {'pool': 'cpu'}, got "
            "{'pool': 3}",
        ),
        (
            {"runtime": "ray", "node_resources": {"disk": -1}},
            "node_resources: expected amounts of the cluster's custom resources, as in {'scratch'",
        ),
        (
            {"runtime": "ray", "node_resources": {"CPU": 2}},
            "node_resources: expected custom resources, got 'CPU'; leave it out",
        ),
        ({"runtime": "ray", "reserve": "all"}, "reserve: expected True or False, got 'all'"),
        ({"resume": "auto"}, "resume: 'auto' continues from the job's journal, and it has none"),
        (
            {"resume": "st.json"},
            "read the file first: resume=json.loads(Path('st.json').read_text())",
        ),
        ({"resume": Path("st.json")}, "resume: expected a state, got 'st.json'"),
        (
            {"resume": "Auto"},
            "resume: expected a state, or 'auto' (from the job's journal), got 'Auto'; "
            "did you mean 'auto'?",
        ),
        (
            {"resume": "last"},
            "resume: expected a state, or 'auto' (from the job's journal), got 'last'; known: auto",
        ),
        ({"resume": [1]}, "resume: expected a result of state_dict(), got list"),
        (
            {"allow": "seed"},
            "allow: expected a tuple of parts of the fingerprint, as in ('seed',), got 'seed'",
        ),
        ({"allow": 3}, "allow: expected a tuple"),
        (
            {"loaders": 3},
            "loaders: expected a number for each source by name, as in {'web': 3}, got 3",
        ),
        (
            {"loaders": {"web": "3"}},
            "loaders: expected a whole number of at least 1 for 'web', got '3'",
        ),
        (
            {"loaders": {"web": True}},
            "loaders: expected a whole number of at least 1 for 'web', got True",
        ),
        ({"loaders": {"wep": 3}}, "loaders: unknown source 'wep'; did you mean 'web'?"),
        ({"prefetch": True}, "prefetch: expected a whole number of at least 1, got True"),
        ({"workers": "2"}, "workers: expected a whole number of at least 1, got '2'"),
        ({"cache_dir": 5}, "cache_dir: expected a directory, got 5"),
        ({"progress": 5}, "progress: expected a function"),
        ({"prefech": 3}, "unknown option 'prefech'; did you mean 'prefetch'?"),
    ],
)
def test_what_launch_cannot_do_is_refused_in_words(options: dict[str, Any], says: str) -> None:
    (found,) = problems(lambda: ov.launch(job(), **options))
    assert says in found


def test_all_options_that_cannot_be_are_told_at_once() -> None:
    assert (
        len(
            problems(lambda: ov.launch(job(), shadows="some", autoscale=1.5, loaders=3, prefetch=0))
        )
        == 4
    )


def test_options_may_say_what_is_done_anyway() -> None:
    said = {"partition": "auto", "autoscale": False, "shadows": "none", "sources_per_host": None}
    assert stream(job(), **said) == stream(job())


def test_what_comes_behind_resume_has_a_name() -> None:
    kinds = {name: p.kind for name, p in inspect.signature(ov.launch).parameters.items()}
    assert list(kinds)[:3] == ["job", "runtime", "resume"]
    assert kinds["allow"] is inspect.Parameter.KEYWORD_ONLY


def test_every_parameter_of_launch_is_explained() -> None:
    text = inspect.getdoc(ov.launch) or ""
    parameters = inspect.signature(ov.launch).parameters
    assert [name for name in parameters if f"\n{name}: " not in text] == []
    annotated = inspect.get_annotations(ov.launch)
    assert [name for name in parameters if name not in annotated] == []
    for group in (ov.RayPlacement, ov.MemoryLimits):
        source = inspect.getsource(group)
        assert source.count('"""') == 2 * (1 + len(fields(group))), "each field has a docstring"


def test_launch_has_an_option_or_a_group_for_every_field_of_its_options() -> None:
    named = set(inspect.signature(ov.launch).parameters)
    grouped = {f.name for group in (ov.RayPlacement, ov.MemoryLimits) for f in fields(group)}
    assert {f.name for f in fields(Options)} <= named | grouped


OLD = {
    "address": "10.0.0.1:6379",
    "rank_nodes": ["a"],
    "sidecar": 0.25,
    "node_labels": {"pool": "cpu"},
    "node_resources": {"scratch": 1},
    "reserve": True,
    "buffer_bytes": 2**20,
    "open_bytes": 2**21,
    "open_files": 7,
    "ring_bytes": 2**22,
}


def launched_with(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Options:
    """The options with which a launch would have begun."""
    found: list[Options] = []

    def begin(*args: Any) -> Any:
        found.append(args[-1])

    SESSION_STARTS.replace(monkeypatch, begin)
    ov.launch(job(), **options)
    return found[0]


@pytest.mark.parametrize("name", OLD)
def test_an_old_keyword_still_works_and_its_warning_names_the_new_form(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, ray = OLD[name], name in {f.name for f in fields(ov.RayPlacement)}
    group, made = ("ray", ov.RayPlacement) if ray else ("memory", ov.MemoryLimits)
    new: dict[str, Any] = {group: made(**{name: value})}
    form = re.escape(f"launch({name}=...) is deprecated; use {group}={made.__name__}({name}=...)")
    with pytest.warns(DeprecationWarning, match=form) as warned:
        old = launched_with(monkeypatch, **{name: value})
    assert [w.filename for w in warned] == [__file__]
    assert old == launched_with(monkeypatch, **new)
    assert getattr(old, name) == value
    by_name: dict[str, Any] = {group: {name: value}}  # as the command line gives it
    assert old == launched_with(monkeypatch, **by_name)


@pytest.mark.parametrize("word", ["open_files=7", "memory={open_files: 7}"])
def test_options_of_the_command_line_may_have_either_form(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = launched_with(monkeypatch, **read_options((word,)))
    assert found == replace(Options(), open_files=7)


def test_limits_of_memory_may_be_the_total_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = launched_with(monkeypatch, memory="64GB")
    assert alone.memory == "64GB"
    assert alone == launched_with(monkeypatch, memory=ov.MemoryLimits(total="64GB"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ray": 3}, "ray: expected RayPlacement(...), got 3"),
        ({"ray": {"adress": "a:1"}}, "ray: unknown field 'adress'; did you mean 'address'"),
        ({"memory": {"ring": 1}}, "memory: unknown field 'ring'"),
        (
            {"memory": ov.MemoryLimits(open_files=3), "open_files": 4},
            "open_files: expected one value, got two; remove the keyword, keep memory=",
        ),
        ({"total": 1}, "unknown option 'total'"),
    ],
)
def test_groups_of_options_are_refused_in_words(options: dict[str, Any], says: str) -> None:
    (found,) = problems(lambda: ov.launch(job(), **options))
    assert says in found


def test_an_option_outside_the_signature_and_the_groups_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any other keyword would be dropped without an error."""
    monkeypatch.setattr("overlord.session.launch.GROUPED", ("open_files",))
    (found,) = problems(lambda: ov.launch(job(), sidecar=0.25))
    assert found.startswith("unknown option 'sidecar'")


def test_every_field_of_the_options_is_in_the_signature_or_in_a_group() -> None:
    signature = set(inspect.signature(ov.launch).parameters)
    assert {f.name for f in fields(Options)} <= signature | set(GROUPED)
    assert not signature & set(GROUPED)


@pytest.mark.parametrize(
    "call", [lambda s: s.kill("planner"), lambda s: s.move("web", "loader-worker/1")]
)
def test_what_needs_other_processes_says_which_runtime_has_them(
    call: Callable[[ov.Session], Any],
) -> None:
    with ov.launch(job()) as session:
        with pytest.raises(JobError, match=r"run in this process; .*runtime='process'"):
            call(session)
        assert next(session.client(0)).step == 0


# Worker processes


def mark(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [*row["tokens"], 7]}


def pids(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [os.getpid()]}


def refuse_odd(row: dict[str, Any]) -> dict[str, Any]:
    if len(row["tokens"]) % 2:
        raise ValueError("odd")
    return row


@pytest.mark.parametrize(
    "transforms",
    [[ov.Tokens()], [ov.Map(mark, rows=True)], [ov.Map(refuse_odd, rows=True), ov.Tokens()]],
)
def test_worker_processes_give_the_stream_of_threads_byte_for_byte(transforms: list[Any]) -> None:
    threads, processes = (
        job(source(transforms=transforms, workers=w), source("code", 25))
        for w in ("threads", "processes")
    )
    assert stream(processes, loaders={"web": 2}) == stream(threads)


def test_a_source_says_by_itself_that_its_transforms_run_in_another_process() -> None:
    made = job(
        source(transforms=[ov.Map(pids, rows=True)], workers="processes"),
        source("code", transforms=[ov.Map(pids, rows=True)]),
    )
    ran: dict[str, set[int]] = {"web": set(), "code": set()}
    with ov.launch(made, stall_limit_s=20) as session:
        for step in session.client(0):
            for mb in step:
                for piece in mb.samples:
                    ran[piece.sample.source].add(int(mb["tokens"][piece.offset]))
        actors = session.metrics()["actors"]
    [worker] = [a for a in actors if a["role"] == "worker"]
    assert worker == {
        "name": "worker/web/0",
        "role": "worker",
        "pid": worker["pid"],
        "state": "running",
    }
    assert ran == {"web": {worker["pid"]}, "code": {os.getpid()}}
    assert worker["pid"] != os.getpid()
    assert left_after([worker["pid"]], WAIT_S) == [], "it is gone with the session"


def test_where_transforms_run_is_no_part_of_the_fingerprint() -> None:
    with ov.launch(job(), stall_limit_s=20) as session:
        client = session.client(0)
        next(client)
        state = client.state_dict()
        rest = [step.plan_digest for step in client]
    other = job(source(workers="processes"))
    with ov.launch(other, resume=state, stall_limit_s=20) as session:
        assert session.state_dict()["fingerprint"] == state["fingerprint"]
        assert [step.plan_digest for step in session.client(0)] == rest
    with pytest.raises(StateMismatch, match="reading"):  # unlike how often a source is read
        ov.launch(job(source(epochs=2)), resume=state)


def test_every_actor_is_listed_with_its_name_role_process_and_state() -> None:
    made = job(source(), source("code", workers="processes"), place=ov.ClientPlaceTree(dp=2))
    with ov.launch(made, loaders={"web": 2}, stall_limit_s=20) as session:
        session.client(1)
        actors = session.metrics()["actors"]
    assert {tuple(sorted(a)) for a in actors} == {("name", "pid", "role", "state")}
    assert [(a["name"], a["role"]) for a in actors] == [
        ("planner", "planner"),
        ("loader/web/0", "loader"),
        ("loader/web/1", "loader"),
        ("loader/code/2", "loader"),
        ("constructor/0", "constructor"),
        ("constructor/1", "constructor"),
        ("client/1", "client"),
        ("worker/code/2", "worker"),
    ]
    assert {a["pid"] for a in actors if a["role"] != "worker"} == {os.getpid()}
    assert json.dumps(actors)


# Sources


def test_a_source_has_the_fields_and_defaults_of_the_interface() -> None:
    parameters = inspect.signature(ov.Source).parameters
    defaults = {
        name: p.default
        for name, p in parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert [n for n in parameters if n not in defaults] == ["name", "uri"]
    assert defaults == {
        "format": None,
        "transforms": (),
        "deferred": (),
        "weight": 1.0,
        "shuffle": True,
        "epochs": None,
        "max_tokens": None,
        "max_bad": 100,
        "workers": "threads",
        "max_sample_bytes": 2**26,
        "on_lost": "fail",
    }


def test_a_source_repeats_for_ever_unless_it_is_told_otherwise() -> None:
    endless = replace(source(n=10), epochs=ov.Source("x", "x").epochs)
    with ov.launch(job(endless), stall_limit_s=20) as session:
        client = session.client(0)
        steps = [next(client) for _ in range(10)]
    assert {piece.sample.epoch for step in steps for mb in step for piece in mb.samples} == set(
        range(8)
    )


@pytest.mark.parametrize("deferred", [[ov.Tokens()], "decode", None])
def test_nothing_but_images_can_be_deferred(deferred: Any) -> None:
    assert ov.Source("web", "x", deferred=[]).deferred == ()
    (found,) = problems(lambda: ov.Source("web", "x", deferred=deferred))
    assert found.startswith(
        (
            "source 'web'.deferred[0]: expected ov.Images(...), got Tokens",
            "source 'web'.deferred: expected a list, got ",
        )
    )


def test_workers_are_threads_or_processes() -> None:
    assert problems(lambda: ov.Source("web", "x", workers=4)) == [
        "source 'web'.workers: expected one of threads, processes, got 4"
    ]


DATA = [{"tokens": [1 + k] * (1 + k % 5)} for k in range(40)]


@pytest.mark.parametrize(
    "dataset", [DATA, tuple(DATA), Rows(DATA)], ids=["list", "tuple", "object"]
)
def test_a_source_from_a_dataset_gives_its_rows(dataset: Any) -> None:
    made = ov.Source.from_dataset("web", dataset, transforms=[ov.Tokens()], epochs=1, weight=2)
    assert (made.name, made.weight) == ("web", 2)
    assert stream(job(made)) == stream(job(source()))


@pytest.mark.parametrize("dataset", ["web/*.parquet", {"a": 1}, iter(DATA), Rows, None])
def test_what_is_no_dataset_is_told_where_it_goes_in(dataset: Any) -> None:
    (found,) = problems(lambda: ov.Source.from_dataset("web", dataset))
    assert "from_dataset: expected an object with __len__ and __getitem__" in found
    assert "Source.from_factory" in found


def test_a_list_of_rows_is_no_list_of_files_and_is_told_so() -> None:
    (found,) = problems(lambda: ov.Source("web", DATA))
    assert found.endswith("use Source.from_dataset for a list of rows")


def one(shard: int) -> Iterator[dict[str, Any]]:
    return iter(DATA)


def whole() -> Iterator[dict[str, Any]]:
    return iter(DATA)


@pytest.mark.parametrize("fn", [one, whole, lambda *shards: iter(DATA)])
def test_a_source_from_a_factory_gives_its_rows_in_every_epoch(fn: Callable[..., Any]) -> None:
    made = ov.Source.from_factory(
        "web", fn, fingerprint="1", transforms=[ov.Tokens()], epochs=2, shuffle=False
    )
    assert (made.uri.shards, made.uri.fingerprint) == (1, "1")
    assert stream(job(made)) == stream(job(source(epochs=2, shuffle=False)))


def test_a_factory_of_several_shards_needs_to_know_which() -> None:
    assert ov.Source.from_factory("web", one, shards=3).uri == ov.Factory(one, shards=3)
    (found,) = problems(lambda: ov.Source.from_factory("web", whole, shards=3))
    assert "expected a function of a shard's number for 3 shards" in found


def test_a_job_names_its_fields_in_the_order_of_the_interface() -> None:
    assert list(inspect.signature(ov.Job).parameters) == [
        "name",
        "sources",
        "place",
        "batch",
        "mixture",
        "strategy",
        "sync",
        "model",
        "seed",
        "journal",
        "until",
        "draw",
        "mix_every",
        "look_ahead",
        "max_age",
        "overflow",
        "shuffle_chunks",
        "slice_rows",
        "chunk_bytes",
        "feedback_lag",
        "on_long",
        "max_document",
        "evaluation",
        "stages",
        "hooks",
    ]
