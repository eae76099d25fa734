"""Hosts go beside the trainers first, to machines without ranks when that runs out, and never nowhere."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from overlord.runtime.placing import Layout, Node, Spot, again, choose, cores_for_loading, unknown

TRAINERS = [Node(id="t0", name="gpu-0", address="10.0.0.1", idle_cores=8), Node(id="t1", name="gpu-1", address="10.0.0.2", idle_cores=8)]
CPUS = [Node(id="c0", name="cpu-0", address="10.0.1.1", idle_cores=4)]
BESIDE = Layout(rank_nodes=("gpu-0", "gpu-0", "10.0.0.2", "10.0.0.2"), ranks_of=((0, 1), (2, 3)), share=0.5)


def all_placed(names: list[str], nodes: list[Node], layout: Layout) -> dict[str, str]:
    return {name: spot.node for name, spot in all_spots(names, nodes, layout).items()}


def all_spots(names: list[str], nodes: list[Node], layout: Layout, memory: int = 0) -> dict[str, Spot]:
    placed: dict[str, Spot] = {}
    for name in names:
        placed[name] = choose(name, nodes, layout, placed, memory)
    return placed


def test_a_node_that_is_not_there_is_told_once_with_those_that_are() -> None:
    assert unknown([*CPUS, *TRAINERS], BESIDE) == []
    [said] = unknown(CPUS, Layout(rank_nodes=("10.0.1.1", "gpu-7", "gpu-7")))
    assert said == "rank_nodes: no node of the cluster is called 'gpu-7'; there are cpu-0"


def test_constructors_go_where_the_ranks_of_their_groups_are() -> None:
    assert all_placed(["constructor-host/0", "constructor-host/1"], [*CPUS, *TRAINERS], BESIDE) == {
        "constructor-host/0": "t0",
        "constructor-host/1": "t1",
    }


def test_loaders_take_their_share_of_trainers_machines_then_others_then_whoever_is_least_crowded() -> None:
    names = [f"loader-host/{i}" for i in range(12 + 8)]
    placed = list(all_placed(names, [*CPUS, *TRAINERS], BESIDE).values())
    assert Counter(placed[:8]) == {"t0": 4, "t1": 4}, "half of eight idle cores each"
    assert Counter(placed[8:12]) == {"c0": 4}
    assert Counter(placed[12:]) == {"t0": 4, "t1": 4}, "until all are crowded alike"
    assert cores_for_loading([*CPUS, *TRAINERS], BESIDE) == 12


def test_constructors_count_against_the_share_of_their_machine() -> None:
    placed = all_placed(["constructor-host/0", *(f"loader-host/{i}" for i in range(7))], TRAINERS, BESIDE)
    assert Counter(placed.values()) == {"t0": 4, "t1": 4}


def test_without_word_of_the_ranks_hosts_are_spread() -> None:
    placed = all_placed([f"loader-host/{i}" for i in range(6)], [Node(id=f"n{i}", idle_cores=2) for i in range(3)], Layout())
    assert Counter(placed.values()) == {"n0": 2, "n1": 2, "n2": 2}


def test_one_that_is_started_again_goes_elsewhere_when_its_node_is_gone() -> None:
    before = all_spots(["constructor-host/0", "constructor-host/1", "loader-host/0"], TRAINERS, BESIDE)
    assert again(before["constructor-host/1"], TRAINERS) == before["constructor-host/1"]
    assert again(before["constructor-host/1"], TRAINERS[:1]) is None
    assert choose("constructor-host/1", TRAINERS[:1], BESIDE, before).node == "t0"


def test_one_that_is_started_again_asks_for_nothing_where_others_have_what_it_had() -> None:
    spot = Spot(node="n", cores=1.0, memory=100)
    assert again(spot, [Node(id="n", idle_cores=0.5)]) == Spot(node="n")
    assert again(spot, [Node(id="n", idle_cores=4, idle_memory=99)]) == Spot(node="n")


def test_a_core_and_memory_are_asked_for_where_there_is_room_and_nothing_where_there_is_none() -> None:
    node = Node(id="n", idle_cores=3, idle_memory=250)
    asked = [(s.cores, s.memory) for s in all_spots([f"loader-host/{i}" for i in range(4)], [node], Layout(), 100).values()]
    assert asked == [(1.0, 100), (1.0, 100), (0.0, 0), (0.0, 0)], "two fit into the memory, three to the cores"
    beside = all_spots(["constructor-host/0"], [Node(id="t0", name="gpu-0", idle_cores=0.0)], BESIDE, 100)
    assert beside == {"constructor-host/0": Spot(node="t0")}, "it goes there whatever there is"


def test_whoever_finds_no_room_is_left_to_the_cluster_if_that_was_asked_for() -> None:
    node = Node(id="n", idle_cores=1)
    spots = all_spots(["loader-host/0", "loader-host/1"], [node], Layout(reserve=True), 100)
    assert spots["loader-host/0"] == Spot(node="n", cores=1.0, memory=100)
    assert spots["loader-host/1"] == Spot(node="", cores=1.0, memory=100), "its demand is seen by who adds machines"


@given(st.lists(st.floats(0, 64), min_size=1, max_size=6), st.integers(0, 40), st.floats(0, 1))
def test_every_host_has_a_node_and_a_share_is_kept_while_there_is_room(cores: list[float], n: int, share: float) -> None:
    nodes = [Node(id=f"n{i}", idle_cores=c) for i, c in enumerate(cores)]
    layout = Layout(rank_nodes=("n0",), share=share)
    placed = all_placed([f"loader-host/{i}" for i in range(n)], nodes, layout)
    room = [int(c * (share if i == 0 else 1.0)) for i, c in enumerate(cores)]
    assert set(placed.values()) <= {node.id for node in nodes}
    if n <= sum(room):
        load = Counter(placed.values())
        assert all(load[f"n{i}"] <= most for i, most in enumerate(room))
