"""Hosting: which loaders live in which process. Laws over random loads, and what people are
promised about defaults.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.scaling.loader_placement import LoaderPlacement, SourceLoad, plan_hosts
from overlord.scaling.partition import HOST_BYTES, Resources, partition
from overlord.setup.partition import loads_of
from overlord.setup.prepared_job import Options, PreparedJob
from overlord.setup.source_loads import load_of
from tests.corpus import write_rows
from tests.laws import examples


def load(name: str, cost: float = 1.0, memory: int = 3, max_loaders: int = 8) -> SourceLoad:
    return SourceLoad(name=name, share=cost, cost=cost, memory=memory, max_loaders=max_loaders)


def equal(n: int, cost: float = 1.0) -> list[SourceLoad]:
    return [load(f"s{i}", cost) for i in range(n)]


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[SourceLoad], dict[str, object]]:
    costs = st.one_of(st.sampled_from((0.0, 1.0, 1.0, 5.0, 100.0)), st.floats(0, 1000))
    loads = [
        load(f"s{i}", draw(costs), draw(st.integers(0, 50)), draw(st.integers(1, 9)))
        for i in range(draw(st.integers(1, 60)))
    ]
    named = {s.name: draw(st.integers(1, 6)) for s in loads if draw(st.integers(0, 9)) == 0}
    options = {
        "sources_per_host": draw(st.sampled_from((None, None, 1, 2, 7))),
        "loaders": draw(st.sampled_from((None, named))),
        "together": draw(st.booleans()),
        "memory_bytes": draw(st.sampled_from((None, None, 30, 100))),
    }
    return loads, options


def by_host(loads: list[SourceLoad], hosting: LoaderPlacement) -> dict[int, list[int]]:
    """Sources of the loaders of every host, one entry a loader."""
    source_of = [i for i, n in enumerate(hosting.loaders) for _ in range(n)]
    found = defaultdict(list)
    for loader, host in enumerate(hosting.host_of):
        found[host].append(source_of[loader])
    return found


@given(questions(), st.integers(1, 20))
@examples(100)
def test_every_loader_has_one_host_and_limits_are_kept(
    question: tuple[list[SourceLoad], dict], cores: int
) -> None:
    loads, options = question
    made = plan_hosts(loads, cores=cores, **options)
    hosts = by_host(loads, made)
    assert len(made.host_of) == sum(made.loaders)
    assert set(hosts) == set(range(made.n_hosts)) == set(range(len(made.reasons)))
    named = options["loaders"] or {}
    for s, n in zip(loads, made.loaders, strict=True):
        assert n == named[s.name] if s.name in named else 1 <= n <= min(cores, s.max_loaders)
    most = max(len(set(sources)) for sources in hosts.values())
    assert most <= (options["sources_per_host"] or max(25, -(-sum(made.loaders) // made.n_hosts)))
    if options["sources_per_host"] is None and options["memory_bytes"] is None:
        assert made.n_hosts <= cores
    if options["together"]:
        assert all(
            len({h for h, sources in hosts.items() if i in sources}) == 1 for i in range(len(loads))
        )


@given(questions(), st.integers(1, 20))
@examples(80)
def test_what_is_predicted_is_what_the_loaders_of_a_host_add_up_to(
    question: tuple[list[SourceLoad], dict], cores: int
) -> None:
    loads, options = question
    made, total = plan_hosts(loads, cores=cores, **options), sum(s.cost for s in loads) or 1.0
    for h, sources in by_host(loads, made).items():
        assert made.costs[h] == pytest.approx(
            sum(loads[i].cost / made.loaders[i] for i in sources) / total, abs=1e-9
        )
        memory = sum(loads[i].memory / made.loaders[i] for i in sources)
        assert made.memory[h] == pytest.approx(memory, abs=1)
        if options["memory_bytes"] is not None and memory > options["memory_bytes"] + 1e-6:
            assert len(set(sources)) == 1, (
                "only a source that does not fit alone may be above the limit"
            )


@given(questions(), st.integers(1, 20))
@examples(80)
def test_more_cores_never_make_the_slowest_host_slower(
    question: tuple[list[SourceLoad], dict], cores: int
) -> None:
    loads, options = question
    assert (
        plan_hosts(loads, cores=cores + 1, **options).slowest
        <= plan_hosts(loads, cores=cores, **options).slowest + 1e-9
    )


@given(questions(), st.integers(1, 20), st.integers(0, 2**20))
@examples(80)
def test_the_order_of_sources_does_not_matter_for_balance(
    question: tuple[list[SourceLoad], dict], cores: int, salt: int
) -> None:
    loads, options = question
    shuffled = random.Random(salt).sample(loads, len(loads))
    one, other = (
        plan_hosts(loads, cores=cores, **options),
        plan_hosts(shuffled, cores=cores, **options),
    )
    assert sorted(one.costs) == pytest.approx(sorted(other.costs), abs=1e-9)
    assert one.n_hosts == other.n_hosts
    assert plan_hosts(loads, cores=cores, **options) == one


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=200), st.integers(1, 16))
@examples(80)
def test_light_sources_are_spread_to_within_one_of_them(costs: list[float], cores: int) -> None:
    """Without limits in the way, the heaviest first is never further from even than one source's
    work.
    """
    loads = [load(f"s{i}", c, max_loaders=1) for i, c in enumerate(costs)]
    made = plan_hosts(loads, cores=cores)
    if max(map(len, by_host(loads, made).values())) < 25:  # no host was full
        assert max(made.costs) - min(made.costs) <= max(costs) / sum(costs) + 1e-9


@pytest.mark.parametrize(
    ("n", "cores", "hosts"),
    [(1, 1, 1), (25, 1, 1), (300, 16, 12), (300, 4, 4), (300, 64, 12), (26, 8, 2)],
)
def test_light_sources_share_hosts_25_each_and_no_more_hosts_than_cores(
    n: int, cores: int, hosts: int
) -> None:
    made = plan_hosts(equal(n), cores=cores)
    assert made.n_hosts == hosts
    assert set(made.loaders) == {1}
    assert (
        max(map(len, by_host(equal(n), made).values()))
        - min(map(len, by_host(equal(n), made).values()))
        <= 1
    )


def test_a_heavy_source_gets_loaders_by_its_share_each_on_a_host_of_its_own() -> None:
    loads = [*equal(100), load("web", 100.0)]  # half of the work
    made = plan_hosts(loads, cores=8)
    web = made.host_of[100:]
    assert made.loaders[100] == 4
    assert len(set(web)) == 4
    assert made.n_hosts == 8
    assert made.slowest == pytest.approx(1 / 8)
    assert sum("web" in reason and "50% of the work" in reason for reason in made.reasons) == 4


def test_chunks_and_the_user_bound_the_loaders_of_a_heavy_source() -> None:
    loads = [*equal(10), load("web", 100.0, max_loaders=3), load("code", 100.0)]
    assert plan_hosts(loads, cores=8, loaders={"code": 2}).loaders[10:] == (3, 2)


def test_a_lone_source_uses_the_cores_there_are() -> None:
    made = plan_hosts([load("web", max_loaders=4)], cores=16)
    assert (made.loaders, made.n_hosts, made.host_of) == ((4,), 4, (0, 1, 2, 3))
    together = plan_hosts([load("web", max_loaders=4)], cores=16, together=True)
    assert (together.loaders, together.n_hosts, set(together.host_of)) == ((4,), 1, {0})


def test_one_source_per_host_is_one_host_per_source_whatever_cores_there_are() -> None:
    made = plan_hosts([*equal(40), load("web", 1000.0)], cores=4, sources_per_host=1)
    assert made.n_hosts == 41
    assert sorted(made.host_of) == list(range(41))


def test_memory_asks_for_more_hosts_than_cores_and_says_so_where_one_loader_needs_too_much() -> (
    None
):
    made = plan_hosts(
        [load(f"s{i}", memory=10, max_loaders=1) for i in range(10)], cores=1, memory_bytes=25
    )
    assert made.n_hosts == 5
    assert max(made.memory) == 20
    alone = plan_hosts(
        [load("big", memory=100, max_loaders=1), load("small", memory=1)], cores=1, memory_bytes=25
    )
    assert alone.n_hosts == 2
    assert sum("above 25 bytes" in reason for reason in alone.reasons) == 1


def test_a_table_tells_people_what_runs_where() -> None:
    table = plan_hosts([*equal(30), load("web", 30.0)], cores=4).to_table()
    assert table.splitlines()[0] == "32 loaders of 31 sources in 4 workers, the busiest does 25%"
    assert len(table.splitlines()) == 5
    assert "worker 0" in table
    assert "and 11 more" in table
    assert "web (1 of its 2 loaders; 50% of the work)" in table


def held(name: str, cost: float = 1.0, **changes: object) -> SourceLoad:
    """All of its code is assumed to hold the interpreter lock."""
    return replace(load(name, cost), free_s=0.0, **changes)


def test_light_sources_that_hold_the_interpreter_lock_get_a_process_for_every_core_that_they_take() -> (
    None
):
    assert plan_hosts([held(f"s{i}") for i in range(8)], cores=3).n_hosts == 3
    assert plan_hosts(equal(8), cores=3).n_hosts == 1, (
        "threads are enough for those that release it"
    )
    mixed = plan_hosts([*equal(15), *(held(f"h{i}", 0.5) for i in range(6))], cores=6)
    assert mixed.n_hosts == 1, "a sixth of the work is one core's"


def test_a_partition_does_not_count_threads_as_cores_for_code_that_holds_the_interpreter_lock() -> (
    None
):
    loads, room = [load("light", 0.07), held("heavy", 0.93)], Resources(cores=3, memory_bytes=2**40)
    made = partition(loads, room)
    assert (made.hosting.n_hosts, made.hosting.loaders) == (3, (1, 3))
    assert partition([loads[0], load("heavy", 0.93)], room).hosting.n_hosts == 1, (
        "where it releases it, one host is enough"
    )
    tight = partition(
        [held("heavy", memory=2**20)], Resources(cores=4, memory_bytes=HOST_BYTES + 2**21)
    )
    assert tight.hosting.n_hosts == 1
    assert tight.rate == pytest.approx(1.0)
    assert tight.bound.startswith("memory: with ")


def test_code_of_the_user_is_assumed_to_hold_the_interpreter_lock_and_code_of_this_package_to_release_it(
    tmp_path: Path,
) -> None:
    write_rows(
        tmp_path / "rows",
        "parquet",
        [{"tokens": [1, 2], "text": "a few words " * 200} for _ in range(40)],
        row_group_size=10,
    )
    uri, tokenizer = str(tmp_path / "rows"), _tokenizer(tmp_path)
    code, ids, encode = ov.Map(_same), ov.Tokens("tokens"), ov.Tokenize(tokenizer, text="text")
    job = ov.Job(
        name="locks",
        batch=ov.Batch(samples=8, context=64),
        place=ov.ClientPlaceTree(),
        sources=[
            ov.Source("ids", uri, transforms=[ids]),
            ov.Source("text", uri, transforms=[encode]),
            ov.Source("code", uri, transforms=[code, ids]),
            ov.Source("both", uri, transforms=[code, encode]),
            ov.Source("apart", uri, transforms=[code, ids], workers="processes"),
            ov.Source.from_dataset("rows", [{"tokens": [1]}] * 9, transforms=[ids]),
        ],
    )

    def parts(**options: Any) -> dict[str, float]:
        made = PreparedJob(job, Options(partition="off", **options))
        made.close()
        return {found.name: found.locked for found in loads_of(made)}

    found = parts()
    assert found["ids"] == found["text"] == found["apart"] == 0.0
    assert found["rows"] == 1.0
    assert found["both"] < 0.1 < 0.5 < found["code"] < 1.0
    assert parts(autoscale=True)["apart"] == 1.0, (
        "its loaders share one worker process of a host then"
    )
    loads = {found.name: found for found in loads_of(PreparedJob(job, Options(partition="off")))}
    assert replace(loads["both"], cost=loads["both"].share * 1e-2).locked > 0.8, (
        "what was measured beyond the encoder's part is the code's"
    )


def _same(columns: dict[str, Any]) -> dict[str, Any]:
    return columns


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="cores: expected at least 1, got 0"):
        plan_hosts(equal(2), cores=0)
    with pytest.raises(ValueError, match="web: expected share, cost"):
        load("web", float("nan"))


def test_a_source_that_is_tokenized_weighs_more_than_one_of_token_ids(tmp_path: Path) -> None:
    rows = [{"n": k, "tokens": [1, 2, 3], "text": "a few words of text " * 20} for k in range(200)]
    for name in ("ids", "text"):
        write_rows(tmp_path / name, "parquet", rows, files=2, row_group_size=20, batch_rows=5)
    tokenizer = _tokenizer(tmp_path)
    job = ov.Job(
        name="loads",
        batch=ov.Batch(samples=8, context=64),
        place=ov.ClientPlaceTree(),
        sources=[
            ov.Source("ids", str(tmp_path / "ids"), transforms=[ov.Tokens("tokens")], weight=0.5),
            ov.Source(
                "text",
                str(tmp_path / "text"),
                transforms=[ov.Tokenize(tokenizer, text="text")],
                weight=0.5,
            ),
            ov.Source(
                "once",
                str(tmp_path / "text"),
                transforms=[ov.Tokenize(tokenizer, text="text")],
                weight=0.0,
                shuffle=False,
            ),
        ],
    )
    made = PreparedJob(job, Options())
    ids, text, once = (
        load_of(s, p, i, s.weight)
        for s, p, i in zip(job.sources, made.pipelines, made.indexes, strict=True)
    )
    assert text.cost > 10 * ids.cost > 0 == once.cost
    assert (text.max_loaders, once.max_loaders) == (8, 1)
    assert all(2**20 < s.memory < 2**24 for s in (ids, text, once))


def _tokenizer(tmp_path: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0, "few": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")
