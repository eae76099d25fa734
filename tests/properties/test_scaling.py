"""Laws of scaling: shares are conserved, cores are never exceeded, a mixture that stays leads to no
change after the first ones.
"""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.scaling.core_demand import (
    Demand,
    cores_of_threads,
    cores_used,
    measured_part,
    needs_of,
    usable_cores,
)
from overlord.scaling.decisions import Scale
from overlord.scaling.loader_placement import assign_shards, with_shards, workers_to_keep
from overlord.scaling.scaler import Observation, Scaler, ScalingLimits, SourceSample
from tests.laws import examples

HOSTS = st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), HOSTS)
@examples(200)
def test_every_share_has_one_of_the_workers_and_none_has_two_more_than_another(
    where: list[int], hosts: list[int]
) -> None:
    to = assign_shards(where, hosts)
    counts = Counter(dict.fromkeys(hosts, 0) | Counter(to))
    assert len(to) == len(where)
    assert set(counts) == set(hosts)
    assert max(counts.values()) - min(counts.values()) <= 1


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), HOSTS)
@examples(200)
def test_no_share_moves_without_need(where: list[int], hosts: list[int]) -> None:
    """As many stay as there is an even spread that leaves them."""
    to = assign_shards(where, hosts)
    held = sorted((Counter(h for h in where if h in hosts)[h] for h in hosts), reverse=True)
    least, more = divmod(len(where), len(hosts))
    best = sum(min(n, least + (k < more)) for k, n in enumerate(held))
    assert sum(a == b for a, b in zip(where, to, strict=True)) == best
    assert assign_shards(to, hosts) == to


@given(HOSTS, st.integers(1, 8), st.dictionaries(st.integers(0, 12), st.integers(0, 3)))
@examples(100)
def test_workers_that_are_needed_anyway_are_kept_first(
    hosts: list[int], n: int, others: dict[int, int]
) -> None:
    n = min(n, len(hosts))
    stay = workers_to_keep(hosts, n, others, lambda h: h < 6)
    assert len(stay) == n
    assert set(stay) <= set(hosts)
    busy = {h for h in hosts if others.get(h)}
    assert busy <= set(stay) or set(stay) <= busy


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=1, max_size=6), st.data())
@examples(100)
def test_a_source_that_is_cut_into_more_shares_stays_on_its_workers(
    sources: list[tuple[int, int]], data: Any
) -> None:
    loaders = [n for n, _ in sources]
    host_of = [data.draw(st.integers(0, 5)) for _ in range(sum(loaders))]
    counts, where = with_shards(loaders, host_of, [s for _, s in sources])
    assert counts == tuple(max(n, s) for n, s in sources)
    assert len(where) == sum(counts)
    for i, (n, many) in enumerate(zip(loaders, counts, strict=True)):
        before, after = host_of[sum(loaders[:i]) :][:n], where[sum(counts[:i]) :][:many]
        assert set(after) == set(before)
        assert list(after[:n]) == before


@given(st.lists(st.integers(0, 6), min_size=8, max_size=16), HOSTS, st.sets(st.integers(0, 12)))
@examples(100)
def test_a_worker_that_reads_other_sources_too_has_no_more_than_one_that_does_not(
    where: list[int], hosts: list[int], crowded: set[int]
) -> None:
    counts = Counter(assign_shards(where, hosts, crowded))
    free = [counts[h] for h in hosts if h not in crowded]
    assert min(counts[h] for h in hosts) >= 1
    assert sum(counts.values()) == len(where)
    assert not free or max((counts[h] for h in hosts if h in crowded), default=0) <= min(free)


def test_a_crowded_worker_has_half_as_many_shares_as_the_others() -> None:
    assert Counter(assign_shards([0] * 6, [0, 1], crowded={0})) == {0: 2, 1: 4}
    assert Counter(assign_shards([0] * 6, [0, 1])) == {0: 3, 1: 3}


def test_shares_need_a_worker() -> None:
    with pytest.raises(
        ValueError, match="assign_shards: expected at least one worker for the shards, got none"
    ):
        assign_shards([0, 1], [])


def test_workers_that_were_there_first_stay_before_those_that_were_added() -> None:
    assert workers_to_keep([2, 5, 7], 1, {}, lambda h: h == 5) == [5]
    assert workers_to_keep([2, 5, 7], 2, {7: 3}, lambda h: h == 5) == [5, 7], (
        "but those that read other sources stay anyway"
    )


def test_shares_are_cut_over_all_workers_that_a_source_has() -> None:
    assert with_shards([2, 1], [3, 4, 9], [5, 2]) == ((5, 2), (3, 4, 3, 4, 3, 9, 9))


# a world: loaders that do what is asked of them as far as they can, trainers that take what there
# is


class World:
    """Sources of some cost, trainers with a step time, workers as the scaler says."""

    def __init__(
        self,
        costs: list[float],
        weights: list[float],
        step_s: float,
        limits: ScalingLimits,
        most: int,
        noise: float = 0.0,
        seed: int = 0,
        first: int = 1,
    ):
        """``first``: workers of the launch, which can read every source."""
        self.costs, self.weights, self.step_s, self.limits, self.most, self.first = (
            costs,
            weights,
            step_s,
            limits,
            most,
            first,
        )
        self.hosts = {i: {i % first} for i in range(len(costs))}
        self.next, self.now, self.noise, self.random = first, 0.0, noise, Random(seed)
        self.scaler, self.told = Scaler(limits), list[Scale]()
        self.ahead: list[float] | None = None

    @property
    def n_hosts(self) -> int:
        return len(set.union(*self.hosts.values()))

    def shares(self, weights: list[float]) -> list[float]:
        return [w / sum(weights) for w in weights]

    def look(self) -> list[Any]:
        samples, seconds = 64.0, self.limits.interval_s
        shares = self.shares(self.weights)
        work = [samples * s * c for s, c in zip(shares, self.costs, strict=True)]  # seconds a step
        load: dict[int, float] = {}
        for i, hosts in self.hosts.items():
            for h in hosts:
                load[h] = load.get(h, 0.0) + work[i] / len(hosts) / self.limits.lanes
        pace = 1 / max(self.step_s, *load.values())
        steps = seconds * pace
        later = self.shares(self.ahead or self.weights)

        def about(x: float) -> float:
            return x * (1 + self.noise * (2 * self.random.random() - 1))

        seen = tuple(
            SourceSample(
                name=f"s{i}",
                share=shares[i],
                ahead=max(shares[i], later[i]),
                drawn=steps * samples * shares[i],
                read=about(steps * samples * shares[i]),
                busy_s=about(steps * work[i]),
                hosts=tuple(sorted(self.hosts[i])),
                most=self.most,
                able=tuple(
                    h
                    for h in range(self.first)
                    if h not in self.hosts[i] and any(h in hosts for hosts in self.hosts.values())
                ),
            )
            for i in range(len(work))
        )
        waited = max(0.0, seconds - steps * self.step_s)
        self.now += seconds
        found = self.scaler.handle(
            Observation(
                seconds=seconds,
                planned=steps,
                taken=steps,
                waited_s=waited,
                hosts=self.n_hosts,
                sources=seen,
            ),
            self.now,
        )
        for decision in found:
            if isinstance(decision, Scale):
                self.apply(decision)
        return found

    def apply(self, scale: Scale) -> None:
        i = int(scale.source[1:])
        assert scale.had == len(self.hosts[i])
        assert 1 <= scale.hosts <= self.most
        self.told.append(scale)
        if scale.hosts < scale.had:
            others = Counter(h for j, hosts in self.hosts.items() if j != i for h in hosts)
            self.hosts[i] = set(
                workers_to_keep(sorted(self.hosts[i]), scale.hosts, others, lambda h: h == 0)
            )
        else:
            new = scale.hosts - scale.had - len(scale.on)
            self.hosts[i] |= {*scale.on, *range(self.next, self.next + new)}
            self.next += new


COSTS = st.lists(st.floats(1e-5, 5e-2), min_size=1, max_size=5)
WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5)


@given(
    COSTS,
    WEIGHTS,
    st.floats(0.05, 2.0),
    st.integers(1, 32),
    st.integers(1, 8),
    st.integers(0, 99),
    st.integers(1, 3),
)
@examples(60)
def test_a_mixture_that_stays_does_not_flap(
    costs: list[float],
    weights: list[float],
    step_s: float,
    cores: int,
    most: int,
    seed: int,
    first: int,
) -> None:
    """Sources settle within a minute, and then nothing changes any more, though measurements differ
    by some percent.
    """
    world = World(
        costs,
        weights[: len(costs)],
        step_s,
        ScalingLimits(cores=max(cores, first)),
        most,
        noise=0.05,
        seed=seed,
        first=first,
    )
    for _ in range(30 + 20 * len(costs)):
        world.look()
    settled, n = dict(world.hosts), len(world.told)
    for _ in range(40):
        world.look()
    assert world.hosts == settled, world.told[n:]
    assert n <= 4 * len(costs), world.told


@given(
    COSTS,
    st.lists(WEIGHTS, min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(1, 8),
    st.floats(1.0, 4.0),
)
@examples(40)
def test_cores_are_never_exceeded(
    costs: list[float], mixtures: list[list[float]], cores: int, most: int, lanes: float
) -> None:
    world = World(
        costs,
        mixtures[0][: len(costs)],
        0.1,
        ScalingLimits(cores=cores, lanes=lanes),
        most,
        noise=0.2,
    )
    for weights in mixtures:
        world.weights = weights[: len(costs)]
        for _ in range(25):
            world.look()
            assert world.n_hosts <= max(1, cores)


@given(st.floats(1e-3, 2e-2), st.integers(2, 8))
@examples(40)
def test_in_the_end_trainers_do_not_wait_or_it_is_said_why(cost: float, most: int) -> None:
    """A source that gets what it needs keeps up; one that does not is named with what it would
    take.
    """
    world = World([cost, 1e-5], [0.5, 0.5], 0.1, ScalingLimits(cores=6), most)
    short = [d for _ in range(60) for d in world.look() if not isinstance(d, Scale)]
    needed = 32 * cost / 0.1
    if needed < 0.85 * min(6, most) - 1e-9:
        assert world.scaler.waited < 0.02
        assert len(world.hosts[0]) <= math.ceil(needed / 0.55) + 1
    elif needed > min(6, most):
        assert [d.source for d in short] == ["s0"]
        assert short[0].wanted >= math.floor(needed)


# threads and the interpreter lock

WORKER_RUNTIME = st.floats(0.0, 1.0)


@given(st.floats(1.0, 64.0), WORKER_RUNTIME, WORKER_RUNTIME)
@examples(100)
def test_a_process_uses_between_one_core_and_all_its_lanes_and_less_the_more_of_its_code_is_locked(
    lanes: float, a: float, b: float
) -> None:
    assert (
        1 - 1e-9
        <= usable_cores(lanes, max(a, b))
        <= usable_cores(lanes, min(a, b)) + 1e-9
        <= lanes + 1e-6
    )
    assert usable_cores(lanes, 1.0) == pytest.approx(1.0)
    assert usable_cores(lanes, 0.0) == lanes


@given(st.floats(2.0, 16.0), st.floats(0.01, 1.0))
@examples(100)
def test_the_part_that_is_measured_is_the_one_that_amdahl_was_told(
    lanes: float, locked: float
) -> None:
    assert measured_part(lanes, usable_cores(lanes, locked)) == pytest.approx(locked)
    assert measured_part(lanes, 2 * lanes) == 0.0, "work in other processes beside it"
    assert measured_part(lanes, 0.5) is measured_part(1.2, 1.0) is None


@given(st.integers(1, 64))
@examples(40)
def test_more_threads_are_never_worth_less_and_one_is_worth_a_core(threads: int) -> None:
    assert (
        cores_of_threads(1)
        == 1.0
        <= cores_of_threads(threads)
        <= cores_of_threads(threads + 1)
        <= threads + 1
    )


DEMANDS = st.lists(
    st.tuples(
        st.floats(0.0, 5.0),
        WORKER_RUNTIME,
        st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    ),
    max_size=5,
)


@given(DEMANDS, st.floats(1.0, 8.0))
@examples(200)
def test_no_worker_has_more_room_than_its_threads_and_its_lock(
    asked: list[tuple[float, float, list[int]]], lanes: float
) -> None:
    demands = [
        Demand(f"s{i}", now, now, part, tuple(hosts), len(hosts))
        for i, (now, part, hosts) in enumerate(asked)
    ]
    for d in demands:
        need = needs_of(demands, lanes)[d.name]
        assert len(need.rooms) == len(d.hosts)
        assert all(0 < room <= usable_cores(lanes, d.locked) + 1e-9 for room in need.rooms)
    hosts = len({h for d in demands for h in d.hosts})
    assert hosts <= cores_used(demands, lanes, hosts) + 1e-9 <= hosts * lanes + 1e-6


@given(DEMANDS)
@examples(100)
def test_with_one_thread_a_lock_changes_nothing(
    asked: list[tuple[float, float, list[int]]],
) -> None:
    locked = [
        Demand(f"s{i}", now, now, part, tuple(hosts), len(hosts))
        for i, (now, part, hosts) in enumerate(asked)
    ]
    free = [Demand(d.name, d.now, d.later, 0.0, d.hosts, d.processes) for d in locked]
    for name, need in needs_of(locked, 1.0).items():
        assert need.rooms == pytest.approx(needs_of(free, 1.0)[name].rooms)
