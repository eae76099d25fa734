"""Which worker has the standby of which loader: stories, and the laws of where they are placed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlord.cluster.placement import Placement, StandbyManager

LOADERS = [2, 1, 1]  # of every source: loaders 0 and 1, 2, 3
NODES: dict[int, str] = {}  # not of a cluster


def placed(workers: list[int], loaders: list[int], n_workers: int) -> Placement:
    """Every worker can open every source."""
    placement = Placement(loaders, workers)
    placement.sources_of = dict.fromkeys(range(n_workers), frozenset(range(len(loaders))))
    return placement


def made(workers: list[int], n_workers: int = 3) -> tuple[Placement, StandbyManager]:
    placement = placed(workers, LOADERS, n_workers)
    standby = StandbyManager(placement, dict.fromkeys(range(len(workers)), 1.0))
    standby.fill(range(n_workers), NODES)
    return placement, standby


def test_a_standby_is_on_another_worker_the_one_that_holds_least() -> None:
    placement = placed([0, 0, 1, 2], LOADERS, 3)
    sizes = {0: 5.0, 1: 0.0, 2: 9.0, 3: 2.0}
    standby = StandbyManager(placement, sizes, [0, 2])
    assert standby.fill(range(3), NODES) == [2, 0]
    assert standby.worker_of == {2: 2, 0: 1}, "the largest first; the others see what it holds"
    assert placement.standby_of == standby.worker_of


def test_loaders_of_a_source_on_one_worker_are_followed_on_one_worker() -> None:
    _, standby = made([0, 0, 1, 2])
    assert standby.worker_of[0] == standby.worker_of[1] != 0


def test_a_source_that_no_other_worker_can_open_has_no_standby() -> None:
    placement = placed([0, 0, 1, 2], LOADERS, 3)
    placement.sources_of = dict.fromkeys(range(3), frozenset([0]))
    standby = StandbyManager(placement, dict.fromkeys(range(4), 1.0), [0, 3])
    assert standby.fill(range(3), NODES) == [0]
    assert not standby.covers(2, {0, 1, 2})


def test_with_one_worker_there_is_no_standby() -> None:
    assert made([0, 0, 0, 0], n_workers=1)[1].worker_of == {}


def test_when_a_worker_is_lost_its_loaders_go_to_their_standbys_and_new_ones_are_placed() -> None:
    placement, standby = made([0, 0, 1, 2])
    heir = standby.worker_of[0]
    assert standby.covers(0, {1, 2})
    standby.promote([0], {1, 2})
    assert [placement.worker(loader) for loader in (0, 1)] == [heir, heir]
    assert not standby.covers(heir, {1, 2})
    standby.fill([0, 1, 2], NODES)
    assert standby.worker_of[0] == standby.worker_of[1] == 0, "the restarted one holds least"


def test_a_standby_that_is_lost_too_takes_over_nothing() -> None:
    placement, standby = made([0, 0, 1, 2])
    dead = {0, standby.worker_of[0]}
    living = {0, 1, 2} - dead
    assert not standby.covers(0, living)
    standby.promote(sorted(dead), living)
    assert [placement.worker(loader) for loader in (0, 1)] == [0, 0]
    assert not dead & standby.workers()


def test_a_standby_is_on_another_node_where_there_is_one_whatever_it_holds() -> None:
    nodes = {0: "a", 1: "a", 2: "b"}
    placement = placed([0, 0, 1, 2], LOADERS, 3)
    standby = StandbyManager(placement, {0: 5.0, 1: 0.0, 2: 0.0, 3: 100.0}, [0, 3])
    standby.fill(range(3), nodes)
    assert standby.worker_of == {3: 1, 0: 2}
    alone = StandbyManager(placed([0], [1], 2), {0: 1.0})
    alone.fill(range(2), nodes)
    assert alone.worker_of == {0: 1}, "one on the same node is better than none"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sets(st.integers(0, 3)),
)
def test_no_loader_is_followed_where_it_is_read_and_all_that_can_be_are_followed(
    loaders: list[tuple[int, float]], n_workers: int, lost: set[int]
) -> None:
    workers = [h % n_workers for h, _ in loaders]
    sources = [3] * (len(workers) // 3) + [len(workers) % 3] * bool(len(workers) % 3)
    placement = placed(workers, sources, n_workers)
    standby = StandbyManager(placement, {k: size for k, (_, size) in enumerate(loaders)})
    living = [h for h in range(n_workers) if h not in lost]
    standby.fill(living, NODES)
    for loader, home in enumerate(workers):
        others = [h for h in living if h != home]
        assert (loader in standby.worker_of) == bool(others)
        assert not others or standby.worker_of[loader] in others


@given(st.integers(2, 6), st.integers(1, 4), st.lists(st.integers(0, 5), max_size=20))
def test_however_often_workers_are_lost_each_holds_as_much_as_before(
    n_workers: int, each: int, deaths: list[int]
) -> None:
    """A restarted worker follows what it had and what it followed: no worker fills up."""
    workers = [k % n_workers for k in range(n_workers * each)]
    placement = placed(workers, [1] * len(workers), n_workers)
    standby = StandbyManager(placement, dict.fromkeys(range(len(workers)), 1.0))

    def held(h: int) -> int:
        return len(placement.loaders_on(h)) + list(standby.worker_of.values()).count(h)

    standby.fill(range(n_workers), NODES)
    before = [held(h) for h in range(n_workers)]
    for lost in (h for h in deaths if h < n_workers):
        living = set(range(n_workers)) - {lost}
        standby.promote([lost], living)
        standby.fill([lost], NODES)
        assert [held(h) for h in range(n_workers)] == before
