"""Which host stands by for which loader: stories, and the laws of where they are put."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlord.cluster.standby_plan import StandbyPlan

SOURCE = [0, 0, 1, 2]  # of loaders 0 to 3
NODES: dict[int, str] = {}  # not of a cluster


def anywhere(host: int, source: int) -> bool:
    return True


def made(hosts: list[int], n_hosts: int = 3, size: float = 1.0) -> StandbyPlan:
    shadows = StandbyPlan(dict.fromkeys(range(len(hosts)), size), lambda loader: SOURCE[loader])
    shadows.fill(hosts.__getitem__, dict.fromkeys(range(n_hosts), 0.0), anywhere, NODES)
    return shadows


def test_a_stand_by_is_on_another_host_the_one_that_holds_least() -> None:
    shadows = StandbyPlan({0: 10.0, 2: 1.0}, lambda loader: SOURCE[loader])
    assert shadows.fill([0, 0, 1, 2].__getitem__, {0: 5.0, 1: 9.0, 2: 2.0}, anywhere, NODES) == [
        0,
        2,
    ]
    assert shadows.where == {0: 2, 2: 0}, "the largest first; the others see what it holds"


def test_loaders_of_a_source_on_one_host_are_followed_on_one_host() -> None:
    shadows = made([0, 0, 1, 2])
    assert shadows.where[0] == shadows.where[1] != 0


def test_where_a_source_cannot_be_opened_nobody_follows_it() -> None:
    shadows = StandbyPlan({0: 1.0, 3: 1.0}, lambda loader: SOURCE[loader])
    assert shadows.fill(
        [0, 0, 1, 2].__getitem__, {0: 0.0, 1: 0.0, 2: 0.0}, lambda host, source: source == 0, NODES
    ) == [0]
    assert not shadows.covers([3], {0, 1, 2})


def test_with_one_host_there_is_no_stand_by() -> None:
    assert made([0, 0, 0, 0], n_hosts=1).where == {}


def test_when_a_host_is_lost_its_loaders_go_to_their_stand_bys_and_new_ones_are_found() -> None:
    hosts = [0, 0, 1, 2]
    shadows = made(hosts)
    heir = shadows.where[0]
    assert shadows.covers([0, 1], {1, 2})
    assert shadows.promote([0, 1], {1, 2}) == {0: heir, 1: heir}
    shadows.forget({1, 2})
    hosts[0] = hosts[1] = heir
    assert not shadows.covers([0], {1, 2})
    shadows.fill(hosts.__getitem__, {0: 0.0, 1: 2.0, 2: 2.0}, anywhere, NODES)
    assert shadows.where[0] == shadows.where[1] == 0, "the one that was started again holds least"


def test_a_stand_by_that_is_lost_too_takes_over_nothing() -> None:
    shadows = made([0, 0, 1, 2])
    dead = {0, shadows.where[0]}
    assert not shadows.covers([0, 1], {0, 1, 2} - dead)
    assert shadows.promote([0, 1], {0, 1, 2} - dead) == {}
    shadows.forget({0, 1, 2} - dead)
    assert not dead & set(shadows.where.values())


def test_a_stand_by_is_on_another_node_where_there_is_one_whatever_it_holds() -> None:
    shadows, nodes = (
        StandbyPlan({0: 1.0, 3: 1.0}, lambda loader: SOURCE[loader]),
        {0: "a", 1: "a", 2: "b"},
    )
    shadows.fill([0, 0, 1, 2].__getitem__, {0: 5.0, 1: 0.0, 2: 100.0}, anywhere, nodes)
    assert shadows.where == {0: 2, 3: 1}
    alone = StandbyPlan({0: 1.0}, lambda loader: SOURCE[loader])
    alone.fill([0].__getitem__, {0: 5.0, 1: 0.0}, anywhere, nodes)
    assert alone.where == {0: 1}, "one on the same node is better than none"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sets(st.integers(0, 3)),
)
def test_nobody_follows_itself_and_all_that_can_be_followed_are(
    loaders: list[tuple[int, float]], n_hosts: int, lost: set[int]
) -> None:
    hosts = [h % n_hosts for h, _ in loaders]
    shadows = StandbyPlan(
        {k: size for k, (_, size) in enumerate(loaders)}, lambda loader: loader // 3
    )
    living = [h for h in range(n_hosts) if h not in lost]
    shadows.fill(hosts.__getitem__, dict.fromkeys(living, 0.0), anywhere, NODES)
    for loader, home in enumerate(hosts):
        others = [h for h in living if h != home]
        assert (loader in shadows.where) == bool(others)
        assert not others or shadows.where[loader] in others


@given(st.integers(2, 6), st.integers(1, 4), st.lists(st.integers(0, 5), max_size=20))
def test_however_often_hosts_are_lost_each_holds_as_much_as_before(
    n_hosts: int, each: int, deaths: list[int]
) -> None:
    """One that comes back follows what it had, and those it followed: nothing piles up on a
    host.
    """
    hosts = [k % n_hosts for k in range(n_hosts * each)]
    shadows = StandbyPlan(dict.fromkeys(range(len(hosts)), 1.0), lambda loader: loader)

    def held(h: int) -> int:
        return hosts.count(h) + list(shadows.where.values()).count(h)

    shadows.fill(hosts.__getitem__, dict.fromkeys(range(n_hosts), float(each)), anywhere, NODES)
    before = [held(h) for h in range(n_hosts)]
    for lost in (h for h in deaths if h < n_hosts):
        living = set(range(n_hosts)) - {lost}
        for loader, heir in shadows.promote(
            [k for k, h in enumerate(hosts) if h == lost], living
        ).items():
            hosts[loader] = heir
        shadows.forget(living)
        shadows.fill(hosts.__getitem__, {lost: 0.0}, anywhere, NODES)
        assert [held(h) for h in range(n_hosts)] == before
