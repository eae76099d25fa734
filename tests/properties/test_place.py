"""Laws of the place tree, for every order of the axes: coordinates name ranks, buckets and fetchers
share all ranks out.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.mesh import AXES, BROADCASTS, BUCKET_AXES, Batch, ClientPlaceTree
from overlord.planning.strategies import resolve
from overlord.sample import Buffer

ORDERS = list(itertools.permutations(AXES))
degree = st.integers(1, 4)
trees = st.builds(
    ClientPlaceTree, pp=degree, dp=degree, cp=degree, tp=degree, order=st.sampled_from(ORDERS)
)
broadcasts = st.lists(st.sampled_from(BROADCASTS), max_size=5)
axes = st.sampled_from(sorted(BUCKET_AXES))


@given(trees)
def test_coordinates_and_ranks_are_inverse(tree: ClientPlaceTree) -> None:
    seen = [tuple(tree.coords(r)[a] for a in AXES) for r in range(tree.world_size)]
    assert len(set(seen)) == tree.world_size == tree.pp * tree.dp * tree.cp * tree.tp
    assert [tree.rank(**tree.coords(r)) for r in range(tree.world_size)] == list(
        range(tree.world_size)
    )


@given(trees)
def test_the_innermost_axis_runs_fastest(tree: ClientPlaceTree) -> None:
    """Megatron's formula: a rank is the sum of its coordinates, each times the degrees of the axes
    inside it.
    """
    for rank in range(tree.world_size):
        at, stride, found = tree.coords(rank), 1, 0
        for axis in reversed(tree.order):
            found, stride = found + at[axis] * stride, stride * getattr(tree, axis)
        assert found == rank


@given(trees, axes)
def test_buckets_share_the_ranks_out_and_stand_alike_on_their_axes(
    tree: ClientPlaceTree, axis: str
) -> None:
    buckets = tree.buckets(axis)
    assert len(buckets) == tree.n_buckets(axis)
    assert sorted(rank for bucket in buckets for rank in bucket) == list(range(tree.world_size))
    assert len({len(bucket) for bucket in buckets}) == 1
    assert all(bucket == sorted(bucket) for bucket in buckets), (
        "its first rank is at 0 along the other axes"
    )
    for bucket in buckets:
        assert len({tuple(tree.coords(r)[a] for a in BUCKET_AXES[axis]) for r in bucket}) == 1
    of = tree.bucket_of(axis)
    assert [sorted(np.flatnonzero(of == b).tolist()) for b in range(len(buckets))] == [
        sorted(bucket) for bucket in buckets
    ]


@given(trees, broadcasts)
def test_every_rank_has_one_fetcher_that_differs_from_it_only_along_the_broadcasts(
    tree: ClientPlaceTree, dims: list[str]
) -> None:
    served, fetchers = tree.served_by(dims), tree.fetchers(dims)
    assert sorted(set(served.tolist())) == fetchers
    for rank, fetcher in enumerate(served.tolist()):
        mine, its = tree.coords(rank), tree.coords(fetcher)
        assert all(its[a] == (0 if a.upper() in dims else mine[a]) for a in AXES)
    group = int(np.prod([getattr(tree, d.lower()) for d in set(dims)], dtype=int))
    assert [int((served == f).sum()) for f in fetchers] == [group] * len(fetchers), (
        "groups share all ranks out"
    )


@given(trees, broadcasts, st.randoms(use_true_random=False))
def test_broadcasts_may_be_named_in_any_order_and_nested(
    tree: ClientPlaceTree, dims: list[str], chance
) -> None:
    shuffled = dims * 2
    chance.shuffle(shuffled)
    assert tree.served_by(shuffled).tolist() == tree.served_by(dims).tolist()
    inner, outer = dims[: len(dims) // 2], dims[len(dims) // 2 :]
    assert tree.served_by(outer)[tree.served_by(inner)].tolist() == tree.served_by(dims).tolist(), (
        "one after the other is both"
    )


@given(trees, st.integers(0, 5), st.integers(0, 5))
def test_edits_give_a_new_tree(tree: ClientPlaceTree, more: int, dp: int) -> None:
    grown = tree.add_replicas(more)
    assert (grown.dp, grown.order, grown.tp) == (tree.dp + more, tree.order, tree.tp)
    assert grown.remove_replicas(more) == tree
    assert tree.replace(dp=dp + 1, order=AXES) == ClientPlaceTree(
        pp=tree.pp, dp=dp + 1, cp=tree.cp, tp=tree.tp
    )


class Mesh:
    """What ``from_device_mesh`` reads of a torch DeviceMesh."""

    def __init__(self, names: tuple[str, ...], ranks: np.ndarray):
        self.mesh_dim_names, self.mesh, self.shape = names, ranks, ranks.shape


@given(trees, st.randoms(use_true_random=False))
def test_a_mesh_gives_its_tree_whatever_the_order_of_its_dimensions(
    tree: ClientPlaceTree, chance
) -> None:
    names = list(AXES)
    chance.shuffle(names)
    ranks = np.empty([getattr(tree, n) for n in names], np.int64)
    for rank in range(tree.world_size):
        ranks[tuple(tree.coords(rank)[n] for n in names)] = rank
    found = ClientPlaceTree.from_device_mesh(Mesh(tuple(names), ranks))
    assert [found.coords(r) for r in range(tree.world_size)] == [
        tree.coords(r) for r in range(tree.world_size)
    ]


@given(trees)
def test_the_environment_gives_the_tree_back(tree: ClientPlaceTree) -> None:
    env = {f"OVERLORD_{a.upper()}": str(getattr(tree, a)) for a in AXES if a != "dp"}
    env |= {"WORLD_SIZE": str(tree.world_size), "OVERLORD_ORDER": "-".join(tree.order)}
    assert ClientPlaceTree.from_env(env) == tree
    assert ClientPlaceTree.from_env({**env, "OVERLORD_DP": str(tree.dp)}) == tree


@given(trees)
def test_a_printed_tree_names_every_rank_or_says_that_there_are_more(tree: ClientPlaceTree) -> None:
    lines = tree.to_text().splitlines()
    assert lines[0].startswith(f"{tree}: {tree.world_size} rank")
    named: set[int] = set()
    for line in lines[1:]:
        for word in line.rpartition("rank")[2].removeprefix("s").split():
            first, _, last = word.partition("-")
            if first.isdigit():
                named |= set(range(int(first), int(last or first) + 1))
    assert "\n" not in f"{tree}"
    assert named == set(range(tree.world_size)), "no degree here is above what is shown"


@given(
    st.builds(
        ClientPlaceTree,
        pp=degree,
        dp=degree,
        cp=st.sampled_from([1, 2]),
        tp=degree,
        order=st.sampled_from(ORDERS),
    ),
    st.sampled_from(["DP", "CP", "WORLD"]),
    broadcasts,
)
def test_every_bucket_of_a_plan_is_fetched_by_ranks_that_reach_each_of_its_ranks(
    tree, axis: str, dims: list[str]
) -> None:
    from overlord.planning.graph.dgraph import DGraph

    buffer = Buffer.from_columns(
        {"web": {"tokens": [5, 9, 3, 8]}}, batch=Batch(samples=4, context=64)
    )
    plan = (
        DGraph.from_buffer(buffer, tree)
        .mix([1.0])
        .distribute(axis)
        .balance("none")
        .broadcast_at(*dims)
        .plan()
    )
    served, of = plan.served_by(), tree.bucket_of(axis)
    fetched = {rank: plan.fetches(rank) for rank in range(tree.world_size)}
    assert sorted(rank for rank, buckets in fetched.items() if buckets) == plan.fetchers()
    for rank in range(tree.world_size):
        assert int(of[rank]) in fetched[int(served[rank])], f"rank {rank} is served its bucket"


@pytest.mark.parametrize("dims", [(), ("TP",), ("TP", "CP"), ("DP",)])
def test_the_digest_tells_who_fetches_but_not_a_broadcast_that_changes_nothing(
    dims: tuple[str, ...],
) -> None:
    from overlord.planning.graph.dgraph import DGraph

    buffer = Buffer.from_columns(
        {"web": {"tokens": [5, 9, 3, 8]}}, batch=Batch(samples=4, context=64)
    )

    def planned(tree: ClientPlaceTree, *along: str):
        return (
            DGraph.from_buffer(buffer, tree)
            .mix([1.0])
            .distribute("DP")
            .balance("none")
            .broadcast_at(*along)
            .plan()
            .digest()
        )

    wide, flat = ClientPlaceTree(dp=2, cp=2, tp=2), ClientPlaceTree(dp=2)
    assert (planned(wide, *dims) == planned(wide)) == (dims == ())
    assert (planned(flat, *dims) == planned(flat)) == ("DP" not in dims)
    assert planned(wide) != planned(wide.replace(order=("tp", "dp", "cp", "pp")))
    assert (
        planned(flat)
        == resolve("vanilla")(DGraph.from_buffer(buffer, flat).mix([1.0]).buffer, flat).digest()
    )
