"""Workers go to nodes of trainers first, then to nodes without ranks, and always to some node."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from overlord.ray.node_choice import (
    Layout,
    Node,
    Spot,
    at_most,
    choose,
    constructors_by_node,
    cores_for_loading,
    has_label,
    labels_wanted,
    moves,
    node_without_ranks,
    problems,
    spot_for_restart,
    surplus,
    unique_names,
    without_job,
)
from overlord.ray.placement import RayPlace, room_text

TRAINERS = [
    Node(id="t0", name="gpu-0", address="10.0.0.1", idle_cores=8),
    Node(id="t1", name="gpu-1", address="10.0.0.2", idle_cores=8),
]
CPUS = [Node(id="c0", name="cpu-0", address="10.0.1.1", idle_cores=4)]
BESIDE = Layout(
    rank_nodes=("gpu-0", "gpu-0", "10.0.0.2", "10.0.0.2"), ranks_of=((0, 1), (2, 3)), share=0.5
)


def all_placed(names: list[str], nodes: list[Node], layout: Layout) -> dict[str, str]:
    return {name: spot.node for name, spot in all_spots(names, nodes, layout).items()}


def all_spots(
    names: list[str], nodes: list[Node], layout: Layout, memory: int = 0
) -> dict[str, Spot]:
    placed: dict[str, Spot] = {}
    for name in names:
        placed[name] = choose(name, nodes, layout, placed, memory)
    return placed


def test_a_node_that_is_not_there_is_told_once_with_those_that_are() -> None:
    assert problems([*CPUS, *TRAINERS], BESIDE, 4) == []
    [said] = problems(CPUS, Layout(rank_nodes=("10.0.1.1", "gpu-7", "gpu-7")), 3)
    assert said == "rank_nodes: no node of the cluster is called 'gpu-7'; its nodes: cpu-0"
    [said] = problems([*CPUS, *TRAINERS], BESIDE, 8)
    assert (
        said == "rank_nodes: expected a node for each of 8 ranks, got 4: name them by rank, from "
        "rank 0 on"
    )


def test_constructors_go_where_the_ranks_of_their_groups_are() -> None:
    assert all_placed(
        ["constructor-worker/0", "constructor-worker/1"], [*CPUS, *TRAINERS], BESIDE
    ) == {"constructor-worker/0": "t0", "constructor-worker/1": "t1"}


def test_loaders_take_their_share_of_trainer_nodes_then_others_then_the_least_crowded() -> None:
    names = [f"loader-worker/{i}" for i in range(12 + 8)]
    placed = list(all_placed(names, [*CPUS, *TRAINERS], BESIDE).values())
    assert Counter(placed[:8]) == {"t0": 4, "t1": 4}, "half of eight idle cores each"
    assert Counter(placed[8:12]) == {"c0": 4}
    assert Counter(placed[12:]) == {"t0": 4, "t1": 4}, "until all are crowded alike"
    assert cores_for_loading([*CPUS, *TRAINERS], BESIDE) == 12


def test_constructors_count_against_the_share_of_their_machine() -> None:
    placed = all_placed(
        ["constructor-worker/0", *(f"loader-worker/{i}" for i in range(7))], TRAINERS, BESIDE
    )
    assert Counter(placed.values()) == {"t0": 4, "t1": 4}


def test_without_word_of_the_ranks_workers_are_spread() -> None:
    placed = all_placed(
        [f"loader-worker/{i}" for i in range(6)],
        [Node(id=f"n{i}", idle_cores=2) for i in range(3)],
        Layout(),
    )
    assert Counter(placed.values()) == {"n0": 2, "n1": 2, "n2": 2}


def test_one_that_is_started_again_goes_elsewhere_when_its_node_is_gone() -> None:
    before = all_spots(
        ["constructor-worker/0", "constructor-worker/1", "loader-worker/0"], TRAINERS, BESIDE
    )
    assert (
        spot_for_restart(before["constructor-worker/1"], TRAINERS) == before["constructor-worker/1"]
    )
    assert spot_for_restart(before["constructor-worker/1"], TRAINERS[:1]) is None
    assert choose("constructor-worker/1", TRAINERS[:1], BESIDE, before).node == "t0"


def test_one_that_is_started_again_asks_for_nothing_where_others_have_what_it_had() -> None:
    spot = Spot(node="n", cores=1.0, memory=100)
    assert spot_for_restart(spot, [Node(id="n", idle_cores=0.5)]) == Spot(node="n")
    assert spot_for_restart(spot, [Node(id="n", idle_cores=4, idle_memory=99)]) == Spot(node="n")


def test_a_core_and_memory_are_asked_for_where_there_is_room_and_nothing_where_there_is_none() -> (
    None
):
    node = Node(id="n", idle_cores=3, idle_memory=250)
    asked = [
        (s.cores, s.memory)
        for s in all_spots([f"loader-worker/{i}" for i in range(4)], [node], Layout(), 100).values()
    ]
    assert asked == [(1.0, 100), (1.0, 100), (0.0, 0), (0.0, 0)], (
        "two fit into the memory, three to the cores"
    )
    beside = all_spots(
        ["constructor-worker/0"], [Node(id="t0", name="gpu-0", idle_cores=0.0)], BESIDE, 100
    )
    assert beside == {"constructor-worker/0": Spot(node="t0")}, "it goes there whatever there is"


def test_whoever_finds_no_room_is_left_to_the_cluster_if_that_was_asked_for() -> None:
    node = Node(id="n", idle_cores=1)
    spots = all_spots(["loader-worker/0", "loader-worker/1"], [node], Layout(reserve=True), 100)
    assert spots["loader-worker/0"] == Spot(node="n", cores=1.0, memory=100)
    assert spots["loader-worker/1"] == Spot(node="", cores=1.0, memory=100), (
        "its demand is seen by who adds machines"
    )


@given(st.lists(st.floats(0, 64), min_size=1, max_size=6), st.integers(0, 40), st.floats(0, 1))
def test_every_worker_has_a_node_and_a_share_is_kept_while_there_is_room(
    cores: list[float], n: int, share: float
) -> None:
    nodes = [Node(id=f"n{i}", idle_cores=c) for i, c in enumerate(cores)]
    layout = Layout(rank_nodes=("n0",), share=share)
    placed = all_placed([f"loader-worker/{i}" for i in range(n)], nodes, layout)
    room = [int(c * (share if i == 0 else 1.0)) for i, c in enumerate(cores)]
    assert set(placed.values()) <= {node.id for node in nodes}
    if n <= sum(room):
        load = Counter(placed.values())
        assert all(load[f"n{i}"] <= most for i, most in enumerate(room))


def test_loaders_have_what_constructors_leave_of_the_share() -> None:
    """Otherwise a trainer would keep less of its machine than promised."""
    names = ["constructor-worker/0", *(f"loader-worker/{i}" for i in range(4))]
    assert list(all_placed(names, [TRAINERS[0], *CPUS], BESIDE).values()) == [
        "t0",
        "t0",
        "t0",
        "t0",
        "c0",
    ], "half of eight, and then others"


def test_whoever_waits_is_told_of_what_was_asked_for_by_name() -> None:
    nodes = [
        Node(
            id="a", name="data-0", idle_cores=4, idle_memory=2**30, idle_resources={"scratch": 0.5}
        ),
        Node(id="b", name="gpu-0"),
    ]
    said = room_text(RayPlace(num_cpus=1, memory=2**20, resources=(("scratch", 1.0),)), nodes)
    assert said.startswith(
        "a node with 1 core and 1 MB and scratch=1 idle (nodes have data-0 4 cores and "
        "1024 MB and scratch=0.5, gpu-0 0"
    )
    assert "scratch" not in room_text(RayPlace(num_cpus=9), nodes)


# constructors and their groups


def test_the_groups_of_a_node_share_its_constructor_workers() -> None:
    two, four = [["a"], ["a"], ["b"], ["b"]], [["a"], ["b"], ["a"], ["b"]]
    assert constructors_by_node(two, 2) == [0, 0, 1, 1]
    assert constructors_by_node(four, 2) == [0, 1, 0, 1]
    assert constructors_by_node([["a"], ["a"], ["a"], ["b"]], 3) == [0, 1, 0, 2], (
        "the second goes where there are more groups"
    )
    assert constructors_by_node([["a", "b", "b"], ["a"], []], 3) == [0, 1, 2], (
        "where most ranks of a group are; of one nobody knows"
    )
    assert constructors_by_node(two, 1) == [0, 0, 0, 0]
    assert constructors_by_node([[], [], []], 2) == [0, 1, 0], "in turn, where nobody said"


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24), st.integers(1, 30))
def test_no_constructor_worker_serves_two_nodes_while_there_are_enough_and_none_is_idle(
    at: list[str], hosts: int
) -> None:
    found = constructors_by_node([[node] for node in at], hosts)
    serves = {
        host: {node for node, h in zip(at, found, strict=True) if h == host} for host in found
    }
    assert sorted(serves) == list(range(min(hosts, len(at)) if hosts >= len(set(at)) else hosts)), (
        "numbered through"
    )
    if hosts >= len(set(at)):
        assert all(len(nodes) == 1 for nodes in serves.values())
    else:
        assert all(
            len({h for node, h in zip(at, found, strict=True) if node == one}) == 1
            for one in set(at)
        ), "of a node all are together"


def test_two_names_of_one_node_are_one() -> None:
    assert unique_names(TRAINERS, ["gpu-0", "t0", "10.0.0.1", "10.0.0.2"]) == (
        "gpu-0",
        "gpu-0",
        "gpu-0",
        "gpu-1",
    )
    twins = [Node(id="x", name="same"), Node(id="y", name="same")]
    assert unique_names(twins, ["y", "x"]) == ("y", "x"), "a name that two have is none"


# cores that other jobs have taken since


def test_a_node_filled_by_other_jobs_has_no_room_and_requests_of_the_job_count_as_idle() -> None:
    first = Node(
        id="n", idle_cores=8, idle_memory=1000, resources={"disk": 2}, idle_resources={"disk": 2}
    )
    ours = [Spot(node="n", cores=1, memory=100, resources={"disk": 1})] * 2
    filled = Node(id="n", idle_cores=0, idle_memory=0, resources={"disk": 2})
    found = at_most(without_job(filled, ours), first)
    assert (found.idle_cores, found.idle_memory, found.idle_resources) == (2, 200, {"disk": 2})
    placed = {"loader-worker/0": ours[0], "loader-worker/1": ours[1]}
    assert choose("loader-worker/2", [found], Layout(), placed, 100) == Spot(node="n"), (
        "it asks for nothing"
    )
    told_late = Node(
        id="n", idle_cores=8, idle_memory=1000, resources={"disk": 2}, idle_resources={"disk": 2}
    )
    assert at_most(without_job(told_late, ours), first) == first, (
        "what was asked for a moment ago is not seen yet"
    )


# nodes that are lost or added

TRAINER = Node(id="t", name="gpu-0", idle_cores=4)
OTHER = Node(id="c", name="cpu-0", idle_cores=8)
ONE_TRAINER = Layout(rank_nodes=("gpu-0",), ranks_of=((0,),), share=0.5)
SEVEN = ["constructor-worker/0", *(f"loader-worker/{i}" for i in range(7))]


def after_loss(
    names: list[str], nodes: list[Node], left: list[Node], layout: Layout
) -> dict[str, Spot]:
    """Return the spots after nodes were lost and their workers restarted on the others."""
    placed = all_spots(names, nodes, layout)
    for name in names:
        placed[name] = spot_for_restart(placed[name], left) or choose(name, left, layout, placed)
    return placed


def test_a_share_that_is_exceeded_after_a_loss_is_found_and_workers_go_to_the_node_that_joins() -> (
    None
):
    placed = after_loss(SEVEN, [TRAINER, OTHER], [TRAINER], ONE_TRAINER)
    assert {spot.node for spot in placed.values()} == {"t"}, "a job does not die for a share"
    [found] = surplus([TRAINER], ONE_TRAINER, placed, {})
    assert (found.node.name, found.workers, found.allowed, len(found.leaving)) == ("gpu-0", 8, 2, 6)
    assert moves([TRAINER], ONE_TRAINER, placed, {}) == {}, "nothing else has room"
    joined = Node(id="n", name="cpu-1", idle_cores=8)
    wanted = moves([TRAINER, joined], ONE_TRAINER, placed, {})
    assert wanted == {f"loader-worker/{i}": Spot(node="n", cores=1.0) for i in range(1, 7)}, (
        "all but the share, with cores of their own"
    )
    assert surplus([TRAINER, joined], ONE_TRAINER, placed | wanted, {}) == []


def test_as_many_workers_move_as_the_node_that_joins_has_room_for() -> None:
    placed = after_loss(SEVEN, [TRAINER, OTHER], [TRAINER], ONE_TRAINER)
    nodes = [TRAINER, Node(id="n", name="cpu-1", idle_cores=2, idle_memory=250)]
    assert list(moves(nodes, ONE_TRAINER, placed, {})) == ["loader-worker/6", "loader-worker/5"]
    assert list(moves(nodes, ONE_TRAINER, placed, dict.fromkeys(SEVEN, 200))) == [
        "loader-worker/6"
    ], "its memory counts too"


def test_workers_leave_a_node_whose_memory_they_exceed() -> None:
    placed = {f"loader-worker/{i}": Spot(node="n") for i in range(3)}
    full = Node(id="n", idle_cores=8, idle_memory=250)
    [found] = surplus([full], Layout(), placed, dict.fromkeys(placed, 100))
    assert found.leaving == ("loader-worker/2",)
    assert list(moves([full, OTHER], Layout(), placed, dict.fromkeys(placed, 100))) == [
        "loader-worker/2"
    ]


def test_workers_that_were_given_cores_stay_though_trainers_took_the_rest_since() -> None:
    placed = {f"loader-worker/{i}": Spot(node="t", cores=1.0) for i in range(2)}
    assert surplus([Node(id="t", name="gpu-0", idle_cores=2)], ONE_TRAINER, placed, {}) == []


def test_a_worker_that_got_no_core_when_it_was_started_again_stays_where_there_is_room_for_it() -> (
    None
):
    assert (
        surplus(
            [TRAINER],
            ONE_TRAINER,
            {"constructor-worker/0": Spot(node="t", cores=1.0), "loader-worker/0": Spot(node="t")},
            {},
        )
        == []
    )


def test_constructors_alone_never_exceed_a_share() -> None:
    small = Node(id="t", name="gpu-0", idle_cores=1)
    assert surplus([small], ONE_TRAINER, {"constructor-worker/0": Spot(node="t")}, {}) == []
    [found] = surplus(
        [small],
        ONE_TRAINER,
        {"constructor-worker/0": Spot(node="t"), "loader-worker/0": Spot(node="t")},
        {},
    )
    assert found.leaving == ("loader-worker/0",)


def test_workers_that_crowd_nodes_without_ranks_go_to_one_that_joins_and_labels_hold_there_too() -> (
    None
):
    old, new = (
        Node(id="a", idle_cores=2, labels={"pool": "data"}),
        Node(id="b", idle_cores=8, labels={"pool": "data"}),
    )
    layout = Layout(labels={"pool": "data"})
    placed = all_spots([f"loader-worker/{i}" for i in range(4)], [old], layout)
    assert set(moves([old, new], layout, placed, {})) == {"loader-worker/2", "loader-worker/3"}
    assert moves([old, OTHER], layout, placed, {}) == {}, "it has another label"
    reserved = Layout(labels={"pool": "data"}, reserve=True)
    assert moves([old], reserved, placed, {}) == {}, (
        "a node that is not there yet is no reason to move"
    )


@given(
    st.lists(st.tuples(st.integers(0, 16), st.booleans()), min_size=1, max_size=5),
    st.integers(1, 24),
    st.floats(0, 1),
    st.integers(0, 16),
)
def test_workers_move_once_and_no_node_is_exceeded_while_there_is_room(
    cores: list[tuple[int, bool]], n: int, share: float, joins: int
) -> None:
    nodes = [Node(id=f"n{i}", idle_cores=c) for i, (c, _) in enumerate(cores)]
    layout = Layout(
        rank_nodes=tuple(f"n{i}" for i, (_, ranks) in enumerate(cores) if ranks), share=share
    )
    placed = all_spots([f"loader-worker/{i}" for i in range(n)], nodes, layout)
    nodes.append(Node(id="new", idle_cores=joins))
    wanted = moves(nodes, layout, placed, {})
    assert all(placed[host].node != spot.node and spot.cores for host, spot in wanted.items())
    after = placed | wanted
    assert moves(nodes, layout, after, {}) == {}, "nothing moves twice"
    if surplus(nodes, layout, after, {}):
        assert sum(spot.node == "new" for spot in after.values()) == joins, "the new one is full"


def test_the_planner_goes_to_a_node_without_ranks() -> None:
    assert node_without_ranks([TRAINER, OTHER, Node(id="h", name="head")], ONE_TRAINER) == OTHER
    assert node_without_ranks([TRAINER], ONE_TRAINER) is None, "then any will do"


# labels and resources


def test_labels_are_matched_as_ray_writes_them() -> None:
    labels = {"pool": "cpu"}
    for wanted, has in (
        ("cpu", True),
        ("gpu", False),
        ("!gpu", True),
        ("!cpu", False),
        ("in(a, cpu)", True),
        ("!in(a,cpu)", False),
    ):
        assert has_label(labels, "pool", wanted) is has, wanted
    assert has_label(labels, "zone", "!a")
    assert not has_label(labels, "zone", "a")


def test_workers_go_to_nodes_with_the_labels_but_constructors_to_their_ranks() -> None:
    pool = Node(id="p", name="pool-0", idle_cores=2, labels={"pool": "data"})
    layout = Layout(rank_nodes=BESIDE.rank_nodes, ranks_of=BESIDE.ranks_of, labels={"pool": "data"})
    placed = all_placed(
        ["constructor-worker/0", *(f"loader-worker/{i}" for i in range(4))],
        [*CPUS, *TRAINERS, pool],
        layout,
    )
    assert placed == {
        "constructor-worker/0": "t0",
        **{f"loader-worker/{i}": "p" for i in range(4)},
    }, "also when it is crowded"
    assert cores_for_loading([*CPUS, *TRAINERS, pool], layout) == 2
    assert choose("loader-worker/0", [*CPUS, *TRAINERS], layout, {}, 5) == Spot(
        node="", cores=1.0, memory=5
    ), "no other in its place"


def test_workers_ask_for_resources_of_the_cluster_where_there_are_some() -> None:
    fast = Node(id="f", idle_cores=8, resources={"scratch": 2.0}, idle_resources={"scratch": 2.0})
    layout = Layout(resources={"scratch": 1.0})
    spots = list(
        all_spots([f"loader-worker/{i}" for i in range(3)], [*CPUS, fast], layout, 10).values()
    )
    assert spots[:2] == [Spot(node="f", cores=1.0, memory=10, resources={"scratch": 1.0})] * 2
    assert spots[2] == Spot(node="f"), "there is none left, so it asks for nothing"
    assert spot_for_restart(
        spots[0], [Node(id="f", idle_cores=8, resources={"scratch": 2.0})]
    ) == Spot(node="f")


def test_labels_and_resources_that_no_node_has_are_told_with_those_there_are() -> None:
    there = [
        Node(
            id="a",
            name="gpu-0",
            labels={"pool": "gpu", "ray.io/node-id": "a"},
            resources={"disk": 2.0},
        ),
        Node(id="b", address="10.0.0.9"),
    ]
    assert problems(there, Layout(labels={"pool": "cpu"}), 1) == [
        "node_labels: no node of the cluster has pool=cpu; its nodes: gpu-0 with pool=gpu "
        "and disk=2.0; 10.0.0.9 with none"
    ]
    [said] = problems(there, Layout(resources={"disk": 3}), 1)
    assert said.startswith(
        "node_resources: no node of the cluster has disk=3; its nodes: gpu-0 with"
    )
    assert problems(there, Layout(resources={"disk": 3}, reserve=True), 1) == [], (
        "one that has it may come"
    )


def test_a_machine_that_the_cluster_is_to_find_is_none_with_ranks() -> None:
    """Their share is used up. Ray has no notion of shares: it would take the rest, and
    add no node.
    """
    layout = Layout(
        rank_nodes=BESIDE.rank_nodes,
        ranks_of=BESIDE.ranks_of,
        reserve=True,
        labels={"pool": "data"},
    )
    assert labels_wanted([*CPUS, *TRAINERS], layout) == {
        "pool": "data",
        "ray.io/node-id": "!in(t0,t1)",
    }
    assert labels_wanted(CPUS, Layout()) == {}
