"""Ranks, places and buckets."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import overlord as ov
from overlord.errors import JobError
from overlord.mesh import Mesh

ORDERS = list(itertools.permutations(("pp", "dp", "cp", "tp")))


def test_ranks_run_fastest_over_tensor_parallelism() -> None:
    tree = Mesh(pp=2, dp=3, cp=1, tp=2)
    assert tree.world_size == 12
    assert tree.coords(1) == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert tree.coords(2) == {"pp": 0, "dp": 1, "cp": 0, "tp": 0}
    assert tree.rank(pp=1) == 6


@pytest.mark.parametrize("order", ORDERS)
def test_rank_undoes_coords(order: tuple[str, ...]) -> None:
    tree = Mesh(pp=2, dp=3, cp=2, tp=2, order=order)
    assert [tree.rank(**tree.coords(r)) for r in range(tree.world_size)] == list(
        range(tree.world_size)
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("axis", "within"), [("DP", "dp"), ("CP", "dp cp"), ("PP", "pp"), ("TP", "tp")]
)
def test_a_bucket_is_the_ranks_that_stand_alike_on_its_axes(
    order: tuple[str, ...], axis: str, within: str
) -> None:
    tree = Mesh(pp=2, dp=3, cp=2, tp=2, order=order)
    buckets = tree.buckets(axis)
    assert len(buckets) == tree.n_buckets(axis)
    assert sorted(r for bucket in buckets for r in bucket) == list(range(tree.world_size))
    places = [
        {tuple(tree.coords(r)[a] for a in within.split()) for r in bucket} for bucket in buckets
    ]
    assert all(len(p) == 1 for p in places)
    assert [next(iter(p)) for p in places] == sorted(next(iter(p)) for p in places)


@pytest.mark.parametrize("order", ORDERS)
def test_world_buckets_are_the_ranks_in_order(order: tuple[str, ...]) -> None:
    tree = Mesh(pp=2, dp=3, cp=2, tp=2, order=order)
    assert tree.buckets("WORLD") == [[rank] for rank in range(24)]
    assert tree.n_buckets("WORLD") == 24


def test_what_is_outside_the_mesh_is_refused() -> None:
    tree = Mesh(dp=2)
    with pytest.raises(JobError, match=r"expected a rank from 0 to 1"):
        tree.coords(2)
    with pytest.raises(JobError, match="got dp=2"):
        tree.rank(dp=2)
    with pytest.raises(JobError, match="expected an axis of DP, CP, WORLD"):
        tree.buckets("EP")
    with pytest.raises(JobError, match="2 problems"):
        Mesh(dp=0, tp=1.5)
    with pytest.raises(JobError, match="each of pp, dp, cp, tp once"):
        Mesh(order=("dp", "tp"))
    with pytest.raises(
        JobError, match="expected one of pp, dp, cp, tp, order, first_rank, vpp, got 'ep'"
    ):
        tree.replace(ep=2)
    with pytest.raises(JobError, match="expected broadcast axes of TP, CP, PP, DP, got 'tp'"):
        tree.fetchers("tp")


def test_the_default_order_is_megatrons() -> None:
    """Megatron-LM's RankGenerator with order tp-cp-ep-dp-pp, its default: groups of 16 ranks with
    tp 2, cp 2, dp 2, pp 2.
    """
    tree = Mesh(pp=2, dp=2, cp=2, tp=2)
    assert tree.buckets("TP") == [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]]
    assert [tree.coords(r)["cp"] for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert tree.buckets("DP") == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert tree.buckets("PP") == [list(range(8)), list(range(8, 16))]


def test_one_rank_of_each_group_fetches() -> None:
    tree = Mesh(pp=2, dp=2, tp=2)
    assert tree.fetchers() == list(range(8))
    assert tree.fetchers("TP") == [0, 2, 4, 6]
    assert tree.fetchers(("TP", "PP")) == [0, 2]
    assert tree.fetchers(("PP", "DP", "TP")) == [0]
    assert tree.served_by(("TP", "PP")).tolist() == [0, 0, 2, 2, 0, 0, 2, 2]


def test_replicas_come_and_go_but_for_the_last() -> None:
    tree = Mesh(dp=2, tp=4)
    assert tree.add_replicas(3).dp == 5
    assert tree.remove_replicas(1).dp == 1
    assert tree.dp == 2
    with pytest.raises(JobError, match="expected at most 1 of the 2 replicas"):
        tree.remove_replicas(2)
    with pytest.raises(JobError, match="at least 0, got -1"):
        tree.add_replicas(-1)


def mesh(names: tuple[str, ...] | None, ranks: object) -> SimpleNamespace:
    return SimpleNamespace(mesh_dim_names=names, mesh=ranks)


def test_a_tree_comes_from_a_real_device_mesh() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=16
    )  # one process that believes to be of sixteen
    try:
        made = init_device_mesh(
            "cpu", (2, 2, 2, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp")
        )
        assert isinstance(made.mesh, torch.Tensor)
        assert Mesh.from_device_mesh(made) == Mesh(pp=2, dp=4, tp=2)
        with pytest.raises(
            JobError,
            match="expected mesh dimensions of pp, dp, cp, tp, dp_replicate, dp_shard, "
            "ddp, fsdp, batch, got 'ep'",
        ):
            Mesh.from_device_mesh(init_device_mesh("cpu", (8, 2), mesh_dim_names=("dp", "ep")))
        with pytest.raises(
            JobError, match="expected a mesh with names of its dimensions, got none"
        ):
            Mesh.from_device_mesh(init_device_mesh("cpu", (16,)))
    finally:
        destroy_process_group()


def test_a_meshs_own_numbering_decides_the_order() -> None:
    ranks = np.arange(8).reshape(2, 4)
    assert Mesh.from_device_mesh(mesh(("dp", "tp"), ranks)) == Mesh(dp=2, tp=4)
    swapped = Mesh.from_device_mesh(mesh(("dp", "tp"), ranks.reshape(4, 2).T))
    assert (swapped.dp, swapped.tp, swapped.rank(dp=1), swapped.rank(tp=1)) == (2, 4, 1, 2)
    with pytest.raises(JobError, match="the whole job, ranks 0 to 7, got ranks 8-15"):
        Mesh.from_device_mesh(mesh(("tp",), np.arange(8, 16)))
    with pytest.raises(JobError, match="expected one name per dimension"):
        Mesh.from_device_mesh(mesh(("dp", "tp"), np.arange(8)))
    with pytest.raises(JobError, match="in an order of pp, dp, cp, tp, got another order"):
        Mesh.from_device_mesh(mesh(("dp", "tp"), np.array([[0, 1, 2, 4], [3, 5, 6, 7]])))
    with pytest.raises(
        JobError, match="in an order of pp, dp, cp, tp, got another order"
    ):  # tp between the two halves of dp
        Mesh.from_device_mesh(
            mesh(("dp_replicate", "tp", "dp_shard"), np.arange(8).reshape(2, 2, 2))
        )


def test_without_ranks_the_shape_decides() -> None:
    by_shape = SimpleNamespace(mesh_dim_names=("tp", "fsdp"), shape=(4, 2))
    by_size = SimpleNamespace(mesh_dim_names=("tp", "fsdp"), size=lambda i: (4, 2)[i])
    for found in map(Mesh.from_device_mesh, (by_shape, by_size)):
        assert (found.tp, found.dp, found.rank(dp=1), found.rank(tp=1)) == (4, 2, 1, 2)


def test_a_tree_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mesh.from_env
    assert read({"WORLD_SIZE": "16", "OVERLORD_TP": "2", "OVERLORD_PP": "4"}) == Mesh(
        pp=4, dp=2, tp=2
    )
    assert read({"WORLD_SIZE": "8"}) == Mesh(dp=8)
    assert read({"OVERLORD_DP": "2", "OVERLORD_CP": "2"}) == Mesh(dp=2, cp=2)
    assert read({}) == Mesh()
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("OVERLORD_TP", "3")
    assert read() == Mesh(dp=2, tp=3)


def test_a_caller_says_the_world_size_that_the_environment_has_not() -> None:
    """As where processes are spawned and have a process group alone."""
    read = Mesh.from_env
    assert read({"OVERLORD_TP": "2"}, world_size=8) == Mesh(dp=4, tp=2)
    assert read({"WORLD_SIZE": "8"}, world_size=8) == Mesh(dp=8)
    with pytest.raises(
        JobError,
        match="world_size: expected WORLD_SIZE=4 of the environment, got 8; omit world_size",
    ):
        read({"WORLD_SIZE": "4"}, world_size=8)
    with pytest.raises(JobError, match="expected a whole number of at least 1, got '0'"):
        read({}, world_size=0)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"WORLD_SIZE": "10", "OVERLORD_TP": "4"},
            "WORLD_SIZE: expected a multiple of OVERLORD_TP=4, got 10",
        ),
        (
            {"WORLD_SIZE": "16", "OVERLORD_TP": "4", "OVERLORD_DP": "2"},
            "WORLD_SIZE: expected OVERLORD_DP=2 x OVERLORD_TP=4, got 16",
        ),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE: expected a whole number of at least 1, got 'many'"),
        ({"OVERLORD_CP": "0"}, "OVERLORD_CP: expected a whole number"),
        ({"OVERLORD_CP": "-2", "OVERLORD_PP": "1.5"}, "2 problems"),
        ({"OVERLORD_ORDER": "tp-dp"}, "each of pp, dp, cp, tp once"),
    ],
)
def test_an_environment_that_makes_no_tree_is_refused(env: dict[str, str], said: str) -> None:
    with pytest.raises(JobError, match=said):
        Mesh.from_env(env)


def test_a_tree_prints_in_one_line_and_as_a_tree() -> None:
    assert f"{Mesh(pp=2, dp=6, tp=2)}" == "pp2xdp6xcp1xtp2"
    assert str(Mesh(pp=2, dp=6, tp=2)).splitlines() == [
        "pp2xdp6xcp1xtp2: 24 ranks",
        "├─ pp 0",
        "│  ├─ dp 0, tp 0-1: ranks 0-1",
        "│  ├─ dp 1, tp 0-1: ranks 2-3",
        "│  ├─ dp 2, tp 0-1: ranks 4-5",
        "│  ├─ dp 3, tp 0-1: ranks 6-7",
        "│  └─ ... 2 more dp, ranks 8-11",
        "└─ pp 1",
        "   ├─ dp 0, tp 0-1: ranks 12-13",
        "   ├─ dp 1, tp 0-1: ranks 14-15",
        "   ├─ dp 2, tp 0-1: ranks 16-17",
        "   ├─ dp 3, tp 0-1: ranks 18-19",
        "   └─ ... 2 more dp, ranks 20-23",
    ]
    assert len(Mesh(pp=16, dp=64, cp=8, tp=8).to_text().splitlines()) < 110


def test_mesh_and_the_name_of_the_paper_are_one_class() -> None:
    assert ov.Mesh is ov.ClientPlaceTree is Mesh
    assert {"Mesh", "ClientPlaceTree"} <= set(ov.__all__)


def test_the_text_of_a_mesh_that_journals_compare_is_the_same_as_ever() -> None:
    assert repr(Mesh(dp=2)) == (
        "ClientPlaceTree(pp=1, dp=2, cp=1, tp=1, order=('pp', 'dp', 'cp', 'tp'))"
    )
