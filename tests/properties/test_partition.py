"""Partitions: laws over random sources, resources and limits; and what people are promised about
the levels.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.scaling.loader_placement import place_loaders
from overlord.scaling.partition import (
    HOST_BYTES,
    Partition,
    PartitionLimits,
    Resources,
    clusters_of,
    partition,
)
from overlord.scaling.profile import SourceLoad
from tests.laws import examples

MB = 2**20


def load(
    name: str, cost: float = 1.0, memory: int = 3 * MB, max_loaders: int = 8, state: int = 0
) -> SourceLoad:
    return SourceLoad(
        name=name, share=1.0, cost=cost, memory=memory, max_loaders=max_loaders, state=state
    )


Question = tuple[list[SourceLoad], Resources, PartitionLimits]


@st.composite
def questions(draw: st.DrawFn) -> Question:
    costs = st.one_of(st.sampled_from((0.0, 1.0, 1.0, 4.0, 75.0, 300.0)), st.floats(1e-6, 1000))
    n = draw(st.integers(1, 40))
    loads = [
        load(
            f"s{i}",
            draw(costs),
            draw(st.integers(0, 50 * MB)),
            draw(st.integers(1, 12)),
            draw(st.sampled_from((0, 2 * MB))),
        )
        for i in range(n)
    ]
    some = st.sampled_from((None, None, 1, 2, 5))
    named = {s.name: draw(st.integers(1, 6)) for s in loads if draw(st.integers(0, 9)) == 0}
    limits = PartitionLimits(
        batch=draw(st.sampled_from((None, 1, 3, 512))),
        per_source=draw(some),
        per_actor=draw(some),
        loaders=draw(st.sampled_from(({}, named))),
        sources_per_host=draw(st.sampled_from((None, None, 1, 7))),
        together=draw(st.booleans()),
        cluster=draw(st.sampled_from((1, 4, 4))),
    )
    memory = draw(st.sampled_from((None, None, 40 * MB, 200 * MB, 2000 * MB)))
    beside = draw(st.sampled_from((0.0, 0.1, 50.0)))
    return (
        loads,
        Resources(cores=draw(st.integers(1, 80)), memory_bytes=memory, beside_s=beside),
        limits,
    )


def on_hosts(made: Partition) -> list[Counter[int]]:
    """Of every source: its loaders by host."""
    hosts = iter(made.hosting.host_of)
    return [Counter(next(hosts) for _ in range(n)) for n in made.hosting.loaders]


def by_name(loads: list[SourceLoad], made: Partition) -> dict[str, Any]:
    return {
        s.name: (share, on) for s, share, on in zip(loads, made.shares, on_hosts(made), strict=True)
    }


@given(questions())
@examples(150)
def test_every_limit_is_kept(question: Question) -> None:
    loads, resources, limits = question
    made = partition(loads, resources, limits)
    assert len(made.hosting.host_of) == sum(made.hosting.loaders)
    assert set(made.hosting.host_of) == set(range(made.hosting.n_hosts))
    if limits.sources_per_host is None:
        assert made.hosting.n_hosts <= made.loading_cores <= resources.cores
    for s, n, on, share in zip(
        loads, made.hosting.loaders, on_hosts(made), made.shares, strict=True
    ):
        assert (share.source, share.loaders, share.actors) == (s.name, n, len(on))
        if s.name in limits.loaders:
            assert n == limits.loaders[s.name]
            continue
        assert (
            1
            <= n
            <= min(x for x in (s.max_loaders, limits.batch, limits.per_source) if x is not None)
        )
        assert limits.per_actor is None or max(on.values()) <= limits.per_actor
        assert not limits.together or len(on) == 1
    if made.fits:
        assert resources.memory_bytes is None or made.memory <= resources.memory_bytes
    else:
        assert made.rate == 0
        assert made.shortfall(1e-9).startswith("memory: ")


@given(questions())
@examples(150)
def test_the_predicted_rate_is_what_its_parts_allow(question: Question) -> None:
    """Nothing does more than a core by loader, the threads of a host, and all cores together."""
    loads, resources, limits = question
    made = partition(loads, resources, limits)
    rate = made.rate
    if not math.isfinite(rate):
        assert sum(s.cost for s in loads) + resources.beside_s == 0
        return
    work = sum(s.cost for s in loads)
    assert rate * (work + resources.beside_s) <= resources.cores * (1 + 1e-6)
    hosts: Counter[int] = Counter()
    for s, n, on in zip(loads, made.hosting.loaders, on_hosts(made), strict=True):
        assert rate * s.cost / n <= 1 + 1e-6
        for host, k in on.items():
            hosts[host] += s.cost * k / n
    assert all(rate * busy <= made.hosting.threads * (1 + 1e-6) for busy in hosts.values())
    # A host holds its own file state of every source it has a loader of.
    again = sum(s.state * (len(on) - 1) for s, on in zip(loads, on_hosts(made), strict=True))
    assert made.memory == made.hosting.n_hosts * HOST_BYTES + sum(s.memory for s in loads) + again


@given(questions(), st.sampled_from(("cores", "memory", "both")), st.integers(1, 60))
@examples(200)
def test_more_resources_never_give_a_worse_predicted_rate(
    question: Question, what: str, more: int
) -> None:
    loads, little, limits = question
    much = replace(little, cores=little.cores + more) if what != "memory" else little
    if what != "cores" and little.memory_bytes is not None:
        much = replace(much, memory_bytes=little.memory_bytes + more * 10 * MB)
    before, after = partition(loads, little, limits), partition(loads, much, limits)
    assert after.fits >= before.fits
    assert after.rate >= before.rate * (1 - 1e-6)


@given(
    st.integers(2, 40), st.integers(0, 12), st.integers(1, 12), st.integers(1, 6), st.integers(1, 4)
)
@examples(80)
def test_loaders_of_a_source_share_hosts_where_memory_is_short_and_never_more_than_per_actor_allows(
    cores: int, hosts: int, others: int, per_actor: int, more: int
) -> None:
    """One heavy source, light ones beside it, and memory for so many hosts."""
    loads = [
        load("heavy", 100.0, 10 * MB, 64, state=MB),
        *(load(f"l{i}", 0.01, MB) for i in range(others)),
    ]
    room = Resources(cores=cores, memory_bytes=(10 + others) * MB + (hosts + 1) * (HOST_BYTES + MB))
    rates = []
    for most in (per_actor, per_actor + more, None):
        made = partition(loads, room, PartitionLimits(per_actor=most))
        heavy = on_hosts(made)[0]
        assert made.fits
        assert made.hosting.n_hosts <= hosts + 1
        assert most is None or max(heavy.values()) <= most
        rates.append(made.rate)
    assert rates == sorted(rates), "a looser limit is never worse"
    if hosts + 1 < cores and per_actor + more > 1:
        assert rates[1] >= partition(loads, room, PartitionLimits(per_actor=1)).rate * (1 - 1e-9)


@given(questions(), st.integers(1, 3))
@examples(80)
def test_a_looser_limit_on_actors_is_never_worse(question: Question, most: int) -> None:
    loads, resources, limits = question
    if limits.together:
        return  # there it bounds the loaders of a source, and other numbers are tried
    tight, loose = (
        partition(loads, resources, replace(limits, per_actor=n)) for n in (most, most + 1)
    )
    assert loose.fits >= tight.fits
    assert loose.rate >= tight.rate * (1 - 1e-6)


@given(questions(), st.integers(0, 2**20))
@examples(100)
def test_the_order_of_sources_does_not_matter(question: Question, salt: int) -> None:
    loads, resources, limits = question
    shuffled = random.Random(salt).sample(loads, len(loads))
    one, other = partition(loads, resources, limits), partition(shuffled, resources, limits)
    assert by_name(loads, one) == by_name(shuffled, other)
    assert (one.rate, one.memory, one.bound, one.hosting.costs, one.hosting.reasons) == (
        other.rate,
        other.memory,
        other.bound,
        other.hosting.costs,
        other.hosting.reasons,
    )


@given(questions())
@examples(100)
def test_it_is_never_worse_than_every_source_by_its_own_share(question: Question) -> None:
    loads, resources, limits = question
    limits, resources = (
        PartitionLimits(batch=None, loaders=limits.loaders),
        replace(resources, memory_bytes=None),
    )
    made = partition(loads, resources, limits)
    work = sum(s.cost for s in loads)
    if not work:
        return
    by_name = sorted(loads, key=lambda s: s.name)
    slowest = min(
        place_loaders(by_name, _own_shares(by_name, limits, cores), cores=cores).slowest
        for cores in range(1, made.loading_cores + 1)
    )
    # One thread a host.
    assert (
        made.rate * max(slowest * work, (work + resources.beside_s) / resources.cores) >= 1 - 1e-6
    )


def _own_shares(loads: list[SourceLoad], limits: PartitionLimits, cores: int) -> list[int]:
    """Enough loaders that none has more than the work of a core, if all cores have the same."""
    fair = sum(s.cost for s in loads) / cores
    return [
        limits.loaders.get(
            s.name, min(s.max_loaders, cores, max(1, math.ceil(s.cost / fair - 1e-9)))
        )
        for s in loads
    ]


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e6)), min_size=1, max_size=60),
    st.integers(1, 6),
)
@examples(100)
def test_clusters_are_runs_of_sources_that_cost_about_the_same(
    costs: list[float], size: int
) -> None:
    made = clusters_of(costs, [f"s{i}" for i in range(len(costs))], size)
    order = [i for c in made for i in c.sources]
    assert sorted(order) == list(range(len(costs)))
    assert [costs[i] for i in order] == sorted(costs, reverse=True)
    for c in made:
        assert 1 <= len(c.sources) <= size
        assert max(costs[i] for i in c.sources) <= 2 * min(costs[i] for i in c.sources)
    assert [c.level for c in made] == sorted((c.level for c in made), reverse=True)


# what people are promised


def test_levels_are_the_ratio_of_mean_costs_to_the_cheapest_cluster() -> None:
    costs = [300.0, 1.0, 1.0, 75.0, 4.0, 4.0, 1.0, 1.0]
    made = clusters_of(costs, [f"s{i}" for i in range(8)])
    assert [c.sources for c in made] == [(0,), (3,), (4, 5), (1, 2, 6, 7)]
    assert [c.level for c in made] == [300.0, 75.0, 4.0, 1.0]


def test_blocks_are_what_constructors_and_planner_leave_divided_by_all_workers() -> None:
    loads = [load("image", 30.0, max_loaders=64), load("code", 4.0), load("a"), load("b")]
    made = partition(
        loads, Resources(cores=24, beside_s=12.0), PartitionLimits(batch=512)
    )  # a quarter of all work is theirs
    assert made.loading_cores == 18
    assert made.block == 0.5
    image, code = made.shares[:2]
    assert (image.level, image.cores, image.loaders, image.actors) == (30.0, 15.0, 15, 15)
    assert (code.level, code.cores, code.loaders) == (4.0, 2.0, 2)
    assert image.reason == "83% of the work is worth 15.0 cores; 15 loaders, its share of the cores"
    assert {s.reason for s in made.shares[2:]} == {"light: shares a worker"}
    assert made.rate == pytest.approx(24 / 48)


def test_a_light_source_beside_a_heavy_one_in_the_listing_is_not_levelled_with_it() -> None:
    made = partition(
        [load("heavy", 300.0, max_loaders=64), *(load(f"l{i}") for i in range(3))],
        Resources(cores=32),
        PartitionLimits(batch=512),
    )
    assert [s.loaders for s in made.shares] == [31, 1, 1, 1]  # and one host for the three


@pytest.mark.parametrize(
    ("limits", "most", "words"),
    [
        (
            PartitionLimits(batch=512),
            8,
            "8 loaders, as many as its open chunks allow (shuffle_chunks)",
        ),
        (PartitionLimits(batch=3), 3, "3 loaders, as many as a batch has samples"),
        (PartitionLimits(batch=512, per_source=2), 2, "2 loaders, as many as per_source allows"),
        (PartitionLimits(batch=512, loaders={"web": 5}), 5, "5, as loaders= sets"),
        (
            PartitionLimits(batch=512, sources_per_host=1),
            1,
            "1 loader, as many as sources_per_host=1 allows",
        ),
    ],
)
def test_what_holds_a_job_back_is_named(limits: PartitionLimits, most: int, words: str) -> None:
    made = partition([load("web", 1e-3)], Resources(cores=64), limits)
    assert made.hosting.loaders == (most,)
    assert made.bound == f"source 'web', which has {words}"
    assert made.rate == pytest.approx(most * 1000)


def test_a_demand_is_met_or_it_is_said_by_how_much_it_is_not() -> None:
    made = partition(
        [load("web", 1e-3, max_loaders=64)], Resources(cores=4), PartitionLimits(batch=512)
    )
    assert made.rate == pytest.approx(4000)
    assert made.shortfall(4000) == ""
    said = made.shortfall(16_000)
    assert said.startswith(
        "75.0% of the demand is not met; it takes 16 cores in all; the bottleneck is "
    )
    chunks = partition(
        [load("web", 1e-3, max_loaders=2)], Resources(cores=4), PartitionLimits(batch=512)
    )
    assert (
        "more cores would not help; the bottleneck is source 'web', which has 2 "
        "loaders, as many as its open" in chunks.shortfall(3000)
    )


def test_a_demand_that_no_number_of_cores_meets_is_said_to_be_one_with_the_loaders_it_would_take() -> (
    None
):
    loads = [load("web", 1e-3, max_loaders=2), load("code", 1e-3, max_loaders=64)]
    made = partition(loads, Resources(cores=2), PartitionLimits(batch=512))
    assert "on any number" not in made.shortfall(2000), "four cores would do"
    assert made.shortfall(16_000).endswith(
        "; on any number of cores source 'web' would take 16 loaders and can have 2 "
        "loaders, as many as its open chunks allow "
        "(shuffle_chunks)"
    )
    assert partition(loads, Resources(cores=4), PartitionLimits(batch=512)).shortfall(2000) == ""
    many = partition(
        [load(f"s{k}", 1e-3, max_loaders=1) for k in range(5)],
        Resources(cores=2),
        PartitionLimits(batch=512),
    ).shortfall(3000)
    assert many.endswith("; 2 more sources lack loaders, too")


def test_where_memory_is_short_loaders_of_a_source_share_hosts_as_many_as_per_actor_allows() -> (
    None
):
    """Worker parallelism: a host holds the files of the source once, whoever reads them there."""
    heavy, memory = (
        [load("heavy", 1.0, max_loaders=8, state=20 * MB)],
        3 * MB + 4 * (HOST_BYTES + 20 * MB),
    )
    plenty = partition(heavy, Resources(cores=8), PartitionLimits())
    assert (plenty.hosting.loaders, plenty.hosting.n_hosts, plenty.rate) == (
        (8,),
        8,
        pytest.approx(8.0),
    )
    little = partition(heavy, Resources(cores=8, memory_bytes=memory), PartitionLimits())
    assert [sorted(on.values()) for on in on_hosts(little)] == [[2, 2, 2, 2]]
    assert little.rate == pytest.approx(4 * 1.9), (
        "a second thread is worth a bit less than a process"
    )
    assert little.bound == "memory: with 367 MB it would be 5% faster"
    alone = partition(heavy, Resources(cores=8, memory_bytes=memory), PartitionLimits(per_actor=1))
    assert (alone.hosting.loaders, alone.hosting.n_hosts, alone.rate) == (
        (4,),
        4,
        pytest.approx(4.0),
    )
    named = partition(
        heavy,
        Resources(cores=8, memory_bytes=memory),
        PartitionLimits(per_actor=1, loaders={"heavy": 8}),
    )
    assert [sorted(on.values()) for on in on_hosts(named)] == [[2, 2, 2, 2]], (
        "what the user said is kept as it is"
    )


def test_loaders_that_only_wait_for_a_slower_source_are_taken_away() -> None:
    made = partition(
        [load("slow", 1.0, max_loaders=1), load("quick", 1.0)],
        Resources(cores=3),
        PartitionLimits(),
    )
    assert made.hosting.loaders == (1, 1), "a second one of 'quick' would be there for nothing"
    assert made.rate == pytest.approx(1.0)
    assert made.shares[1].reason == "1 loader, as many as keep up with the slowest source"
    said = partition(
        [load("slow", 1.0, max_loaders=1), load("quick", 1.0)],
        Resources(cores=3),
        PartitionLimits(loaders={"quick": 2}),
    )
    assert said.hosting.loaders == (1, 2), "not those that the user asked for"


def test_but_not_where_the_job_would_be_slower_without_them() -> None:
    """Halves of the light ones fit beside the heavy one; whole ones do not."""
    loads = [load("a", 1.0), load("b", 1.0), load("c", 2.0)]
    made = partition(loads, Resources(cores=4), PartitionLimits())
    assert (made.hosting.loaders, made.rate) == ((2, 2, 2), pytest.approx(1.0))


def test_nor_where_those_that_are_left_would_stand_closer_than_per_actor_allows() -> None:
    costs = {
        "s0": (1.0, 49, 2),
        "s1": (4.0, 44, 1),
        "s2": (4.0, 10, 3),
        "s3": (0.0, 6, 2),
        "s4": (30.0, 27, 12),
        "s5": (4.0, 34, 64),
    }
    loads = [
        load(n, c, m * MB, most, 40 * MB if n == "s2" else 2 * MB * (n in ("s0", "s3", "s5")))
        for n, (c, m, most) in costs.items()
    ]
    loads.append(load("s6", 1.0, 15 * MB, 12))
    limits = PartitionLimits(per_source=5, per_actor=1, sources_per_host=3, loaders={"s3": 1})
    made = partition(loads, Resources(cores=17, memory_bytes=400 * MB), limits)
    assert max(max(on.values()) for on in on_hosts(made)) == 1
    assert made.rate == pytest.approx(1 / 6)


def test_a_source_that_its_cluster_hides_gets_loaders_by_its_own_share() -> None:
    made = partition([load("a", 2.0), load("b", 1.0)], Resources(cores=5), PartitionLimits())
    assert (made.hosting.loaders, made.rate) == ((3, 2), pytest.approx(1.5)), (
        "by the mean of both it would be (2, 1), and 1.0"
    )


def test_sources_of_a_cluster_get_the_same_number_where_that_is_better() -> None:
    made = partition(
        [load("a", 2.0), load("b", 7.0), load("c", 4.0)], Resources(cores=4), PartitionLimits()
    )
    assert (made.hosting.loaders, made.rate) == ((1, 2, 2), pytest.approx(2 / 7)), (
        "by shares alone (1, 2, 1), and 1/4"
    )


def test_a_hundred_threads_of_one_host_are_worth_no_more_than_eight() -> None:
    made = partition(
        [load(f"s{i}", 1.0) for i in range(20)],
        Resources(cores=100),
        PartitionLimits(together=True, sources_per_host=20, per_actor=1),
    )
    assert made.hosting.n_hosts == 20
    one = partition(
        [load("a", 1.0, max_loaders=64)], Resources(cores=100), PartitionLimits(together=True)
    )
    assert (one.hosting.n_hosts, one.rate) == (1, pytest.approx(1 + 0.9 * 7))


def test_with_all_loaders_of_a_source_on_one_host_per_actor_bounds_them() -> None:
    made = partition(
        [load("a", 1.0)], Resources(cores=8), PartitionLimits(together=True, per_actor=3)
    )
    assert (made.hosting.loaders, made.hosting.n_hosts) == ((3,), 1)


def test_what_costs_next_to_nothing_is_no_unit_to_measure_others_by() -> None:
    made = clusters_of([1.0, 1.0, 1e-6], ["a", "b", "c"])
    assert [c.level for c in made] == [1.0, pytest.approx(1e-6)]


def test_equal_sources_are_clustered_by_name() -> None:
    made = clusters_of([1.0] * 5, ["e", "d", "c", "b", "a"])
    assert [c.sources for c in made] == [(4, 3, 2, 1), (0,)]


def test_clusters_name_sources_in_the_order_they_were_given() -> None:
    made = partition([load("z", 9.0), load("a", 1.0)], Resources(cores=2), PartitionLimits())
    assert [c.sources for c in made.clusters] == [(0,), (1,)]


def test_memory_takes_hosts_away_and_where_that_is_not_enough_it_is_said() -> None:
    loads = [load(f"s{i}", 1.0, memory=10 * MB, max_loaders=1) for i in range(100)]
    plenty = partition(loads, Resources(cores=4), PartitionLimits())
    assert plenty.hosting.n_hosts == 4
    little = partition(
        loads, Resources(cores=4, memory_bytes=1000 * MB + 60 * MB), PartitionLimits()
    )
    assert little.fits
    assert little.hosting.n_hosts == 2
    assert 0 < little.rate < plenty.rate
    none = partition(loads, Resources(cores=4, memory_bytes=500 * MB), PartitionLimits())
    assert not none.fits
    assert none.shortfall(1.0) == "memory: at least 1,028 MB are needed, 528 MB more than available"


def test_a_source_that_is_not_worth_it_is_not_split() -> None:
    assert partition(
        [load("web", 1e-6)], Resources(cores=4), PartitionLimits(batch=100, worth_s=1e-3)
    ).hosting.loaders == (1,)
    assert partition(
        [load("web", 1e-4)], Resources(cores=4), PartitionLimits(batch=100, worth_s=1e-3)
    ).hosting.loaders == (4,)


@pytest.mark.parametrize(
    "wrong", [{"cores": 0}, {"cores": 1, "memory_bytes": 0}, {"cores": 1, "beside_s": math.nan}]
)
def test_wrong_resources_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected cores and memory_bytes of at least 1"):
        Resources(**wrong)


def test_wrong_limits_and_no_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="per_actor: expected at least 1, got 0"):
        PartitionLimits(per_actor=0)
    with pytest.raises(ValueError, match="partition: expected at least 1 source"):
        partition([], Resources(cores=1))
