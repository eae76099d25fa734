"""Ranks, places and buckets."""

from __future__ import annotations

import itertools

import pytest

from overlord.errors import JobError
from overlord.placetree import ClientPlaceTree

ORDERS = list(itertools.permutations(("pp", "dp", "cp", "tp")))


def test_ranks_run_fastest_over_tensor_parallelism() -> None:
    tree = ClientPlaceTree(pp=2, dp=3, cp=1, tp=2)
    assert tree.world == 12
    assert tree.coordinate(1) == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert tree.coordinate(2) == {"pp": 0, "dp": 1, "cp": 0, "tp": 0}
    assert tree.rank(pp=1) == 6


@pytest.mark.parametrize("order", ORDERS)
def test_rank_undoes_coordinate(order: tuple[str, ...]) -> None:
    tree = ClientPlaceTree(pp=2, dp=3, cp=2, tp=2, order=order)
    assert [tree.rank(**tree.coordinate(r)) for r in range(tree.world)] == list(range(tree.world))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("axis", "within"), [("DP", "dp"), ("CP", "dp cp"), ("PP", "pp"), ("TP", "tp")])
def test_a_bucket_is_the_ranks_that_stand_alike_on_its_axes(order: tuple[str, ...], axis: str, within: str) -> None:
    tree = ClientPlaceTree(pp=2, dp=3, cp=2, tp=2, order=order)
    buckets = tree.buckets(axis)
    assert len(buckets) == tree.n_buckets(axis)
    assert sorted(r for bucket in buckets for r in bucket) == list(range(tree.world))
    places = [{tuple(tree.coordinate(r)[a] for a in within.split()) for r in bucket} for bucket in buckets]
    assert all(len(p) == 1 for p in places)
    assert [next(iter(p)) for p in places] == sorted(next(iter(p)) for p in places)


@pytest.mark.parametrize("order", ORDERS)
def test_world_buckets_are_the_ranks_in_order(order: tuple[str, ...]) -> None:
    tree = ClientPlaceTree(pp=2, dp=3, cp=2, tp=2, order=order)
    assert tree.buckets("WORLD") == [[rank] for rank in range(24)]
    assert tree.n_buckets("WORLD") == 24


def test_what_is_outside_the_mesh_is_refused() -> None:
    tree = ClientPlaceTree(dp=2)
    with pytest.raises(JobError, match=r"outside 0\.\.1"):
        tree.coordinate(2)
    with pytest.raises(JobError, match="dp=2 is outside"):
        tree.rank(dp=2)
    with pytest.raises(JobError, match="known: DP, CP, WORLD"):
        tree.buckets("EP")
    with pytest.raises(JobError, match="2 problems"):
        ClientPlaceTree(dp=0, tp=1.5)
    with pytest.raises(JobError, match="each of pp, dp, cp, tp once"):
        ClientPlaceTree(order=("dp", "tp"))
