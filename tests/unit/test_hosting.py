"""Placement: which loaders live in which process. Laws over random loads, and what people are
promised about defaults.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.scaling.loader_placement import LoaderPlacement, place_loaders
from overlord.scaling.partition import HOST_BYTES, PartitionLimits, Resources, partition
from overlord.scaling.profile import SourceLoad
from overlord.setup.partition import load_of, loads_of
from overlord.setup.prepared_job import Options, PreparedJob
from tests.corpus import write_rows
from tests.laws import examples


def load(name: str, cost: float = 1.0, memory: int = 3, max_loaders: int = 8) -> SourceLoad:
    return SourceLoad(name=name, share=cost, cost=cost, memory=memory, max_loaders=max_loaders)


def equal(n: int, cost: float = 1.0) -> list[SourceLoad]:
    return [load(f"s{i}", cost) for i in range(n)]


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[SourceLoad], list[int], dict[str, Any]]:
    costs = st.one_of(st.sampled_from((0.0, 1.0, 1.0, 5.0, 100.0)), st.floats(0, 1000))
    loads = [
        load(f"s{i}", draw(costs), draw(st.integers(0, 50)))
        for i in range(draw(st.integers(1, 60)))
    ]
    counts = [draw(st.sampled_from((1, 1, 1, 2, 3, 9))) for _ in loads]
    options = {
        "cores": draw(st.integers(1, 20)),
        "sources_per_host": draw(st.sampled_from((None, None, 1, 2, 7))),
        "together": draw(st.booleans()),
    }
    return loads, counts, options


def by_host(loads: list[SourceLoad], hosting: LoaderPlacement) -> dict[int, list[int]]:
    """Sources of the loaders of every host, one entry a loader."""
    source_of = [i for i, n in enumerate(hosting.loaders) for _ in range(n)]
    found = defaultdict(list)
    for loader, host in enumerate(hosting.host_of):
        found[host].append(source_of[loader])
    return found


@given(questions())
@examples(100)
def test_every_loader_has_one_host_and_limits_are_kept(
    question: tuple[list[SourceLoad], list[int], dict[str, Any]],
) -> None:
    loads, counts, options = question
    made = place_loaders(loads, counts, **options)
    hosts = by_host(loads, made)
    assert made.loaders == tuple(counts)
    assert len(made.host_of) == sum(made.loaders)
    assert set(hosts) == set(range(made.n_hosts)) == set(range(len(made.reasons)))
    most = max(len(set(sources)) for sources in hosts.values())
    assert most <= (options["sources_per_host"] or max(25, -(-sum(made.loaders) // made.n_hosts)))
    if options["sources_per_host"] is None:
        assert made.n_hosts <= options["cores"]
    if options["together"]:
        assert all(
            len({h for h, sources in hosts.items() if i in sources}) == 1 for i in range(len(loads))
        )


@given(questions())
@examples(80)
def test_what_is_predicted_is_what_the_loaders_of_a_host_add_up_to(
    question: tuple[list[SourceLoad], list[int], dict[str, Any]],
) -> None:
    loads, counts, options = question
    made, total = place_loaders(loads, counts, **options), sum(s.cost for s in loads) or 1.0
    for h, sources in by_host(loads, made).items():
        assert made.costs[h] == pytest.approx(
            sum(loads[i].cost / made.loaders[i] for i in sources) / total, abs=1e-9
        )
        memory = sum(loads[i].memory / made.loaders[i] for i in sources)
        assert made.memory[h] == pytest.approx(memory, abs=1)


@given(questions())
@examples(80)
def test_loaders_of_a_source_share_a_host_only_where_every_other_has_one_or_is_full(
    question: tuple[list[SourceLoad], list[int], dict[str, Any]],
) -> None:
    loads, counts, options = question
    made = place_loaders(loads, counts, **options | {"together": False})
    hosts, limit = by_host(loads, made), options["sources_per_host"] or 25
    for i in range(len(loads)):
        if max(sources.count(i) for sources in hosts.values()) > 1:
            assert all(i in sources or len(set(sources)) >= limit for sources in hosts.values())


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=200), st.integers(1, 16))
@examples(80)
def test_light_sources_are_spread_to_within_one_of_them(costs: list[float], cores: int) -> None:
    """Without limits in the way, the heaviest first is never further from even than one source's
    work.
    """
    loads = [load(f"s{i}", c, max_loaders=1) for i, c in enumerate(costs)]
    made = place_loaders(loads, [1] * len(loads), cores=cores)
    if max(map(len, by_host(loads, made).values())) < 25:  # no host was full
        assert max(made.costs) - min(made.costs) <= max(costs) / sum(costs) + 1e-9


@pytest.mark.parametrize(
    ("n", "cores", "hosts"),
    [(1, 1, 1), (25, 1, 1), (300, 16, 12), (300, 4, 4), (300, 64, 12), (26, 8, 2)],
)
def test_light_sources_share_hosts_25_each_and_no_more_hosts_than_cores(
    n: int, cores: int, hosts: int
) -> None:
    made = partition(equal(n), Resources(cores=cores)).hosting
    assert made.n_hosts == hosts
    assert set(made.loaders) == {1}
    assert (
        max(map(len, by_host(equal(n), made).values()))
        - min(map(len, by_host(equal(n), made).values()))
        <= 1
    )


def test_a_heavy_source_gets_loaders_by_its_share_each_on_a_host_of_its_own() -> None:
    loads = [*equal(100), load("web", 100.0)]  # half of the work
    made = partition(loads, Resources(cores=8)).hosting
    web = made.host_of[100:]
    assert made.loaders[100] == 4
    assert len(set(web)) == 4
    assert made.n_hosts == 8
    assert made.slowest == pytest.approx(1 / 8)
    assert sum("web" in reason and "50% of the work" in reason for reason in made.reasons) == 4


def test_chunks_and_the_user_bound_the_loaders_of_a_heavy_source() -> None:
    loads = [*equal(10), load("web", 100.0, max_loaders=3), load("code", 100.0)]
    made = partition(loads, Resources(cores=8), PartitionLimits(loaders={"code": 4}))
    assert made.hosting.loaders[10:] == (3, 4)


def test_a_lone_source_uses_the_cores_there_are() -> None:
    loads, cores = [load("web", max_loaders=4)], Resources(cores=16)
    made = partition(loads, cores).hosting
    assert (made.loaders, made.n_hosts, made.host_of) == ((4,), 4, (0, 1, 2, 3))
    together = partition(loads, cores, PartitionLimits(together=True)).hosting
    assert (together.loaders, together.n_hosts, set(together.host_of)) == ((4,), 1, {0})


def test_one_source_per_host_is_one_host_per_source_whatever_cores_there_are() -> None:
    loads = [*equal(40), load("web", 1000.0)]
    made = partition(loads, Resources(cores=4), PartitionLimits(sources_per_host=1)).hosting
    assert made.n_hosts == 41
    assert sorted(made.host_of) == list(range(41))


def test_the_reason_of_a_host_names_its_heavy_sources_and_why_they_are_split() -> None:
    loads = [*equal(30), load("web", 30.0)]
    made = place_loaders(loads, [1] * 30 + [2], cores=4)
    assert (made.n_hosts, made.slowest) == (4, pytest.approx(0.25))
    split = [why for why in made.reasons if "web (1 of its 2 loaders; 50% of the work)" in why]
    assert len(split) == 2
    assert any(why.endswith(" and 11 more") for why in made.reasons)
    together = place_loaders(loads, [1] * 30 + [2], cores=4, named={"web"}, together=True)
    assert sum("web (2 of its 2 loaders; as loaders= sets)" in why for why in together.reasons) == 1


def held(name: str, cost: float = 1.0, **changes: object) -> SourceLoad:
    """All of its code is assumed to hold the interpreter lock."""
    return replace(load(name, cost), free_s=0.0, **changes)


def test_light_sources_that_hold_the_interpreter_lock_get_a_process_for_every_core_that_they_take() -> (
    None
):
    cores = Resources(cores=3)
    assert partition([held(f"s{i}") for i in range(8)], cores).hosting.n_hosts == 3
    assert partition(equal(8), cores).hosting.n_hosts == 1, (
        "threads are enough for those that release it"
    )
    loads = [*equal(15), *(held(f"h{i}", 0.5) for i in range(6))]
    mixed = partition(loads, Resources(cores=6)).hosting
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
    with pytest.raises(ValueError, match="expected cores of at least 1, got 0"):
        place_loaders(equal(2), [1, 1], cores=0)
    with pytest.raises(ValueError, match="load of source 'web': expected finite share and cost"):
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
