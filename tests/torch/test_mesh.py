"""Place trees of real device meshes: of torch's fake process group, as large as wanted, in one
process.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import overlord as ov

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


MESHES = [
    (8, (8,), ("dp",), {"dp": 8}),
    (8, (2, 4), ("dp_replicate", "dp_shard"), {"dp": 8}),
    (16, (2, 2, 2, 2), ("pp", "dp", "cp", "tp"), {"pp": 2, "dp": 2, "cp": 2, "tp": 2}),
    (16, (2, 2, 4), ("pp", "fsdp", "tp"), {"pp": 2, "dp": 2, "tp": 4}),
    (24, (3, 2, 2, 2), ("dp_replicate", "dp_shard", "cp", "tp"), {"dp": 6, "cp": 2, "tp": 2}),
    (
        16,
        (2, 2, 2, 2),
        ("pp", "batch", "cp", "tp"),
        {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
    ),  # torchtitan's for data
    (8, (2, 4), ("ddp", "fsdp"), {"dp": 8}),
    (8, (2, 4), ("tp", "dp"), {"tp": 2, "dp": 4}),  # tp outermost: another order
    (1, (1,), ("dp",), {}),
]


@pytest.mark.parametrize(("world", "shape", "names", "degrees"), MESHES, indirect=["world"])
def test_the_tree_of_a_device_mesh_has_its_degrees_and_its_ranks(
    world: int, shape: tuple[int, ...], names: tuple[str, ...], degrees: dict[str, int]
):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    tree = ov.ClientPlaceTree.from_device_mesh(mesh)
    assert tree.world_size == world
    assert {axis: getattr(tree, axis) for axis in ("pp", "dp", "cp", "tp")} == {
        "pp": 1,
        "dp": 1,
        "cp": 1,
        "tp": 1,
        **degrees,
    }
    for rank in range(world):
        at = dict(zip(names, (int(i[0]) for i in np.where(mesh.mesh.numpy() == rank)), strict=True))
        dp = 0
        for name, n in zip(names, shape, strict=True):
            if name not in ("pp", "cp", "tp"):
                dp = dp * n + at[name]
        assert tree.coords(rank) == {
            "pp": at.get("pp", 0),
            "dp": dp,
            "cp": at.get("cp", 0),
            "tp": at.get("tp", 0),
        }


@pytest.mark.parametrize("world", [8], indirect=True)
def test_ranks_of_a_dimension_of_the_mesh_are_a_bucket_of_the_tree(world: int):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    tree = ov.ClientPlaceTree.from_device_mesh(mesh)
    assert tree.buckets("DP")[0] == mesh.mesh[0].flatten().tolist()
    assert sorted(np.flatnonzero(tree.served_by("TP") == 0).tolist()) == mesh["tp"].mesh.tolist()


@pytest.mark.parametrize("world", [8], indirect=True)
def test_a_part_of_a_mesh_and_names_nobody_knows_are_refused(world: int):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    assert ov.ClientPlaceTree.from_device_mesh(mesh).dp == 4
    other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("stage", "dp"))
    with pytest.raises(ov.JobError, match=r"expected mesh dimensions of .*, got 'stage'"):
        ov.ClientPlaceTree.from_device_mesh(other)
    with pytest.raises(ov.JobError, match="expected a mesh with names"):
        ov.ClientPlaceTree.from_device_mesh(init_device_mesh("cpu", (8,)))


@pytest.mark.parametrize("world", [8], indirect=True)
def test_the_environment_of_torchrun_gives_the_same_tree_as_its_mesh(
    world: int, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {"WORLD_SIZE": "8", "OVERLORD_TP": "2", "OVERLORD_CP": "2"}.items():
        monkeypatch.setenv(name, value)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    assert ov.ClientPlaceTree.from_env() == ov.ClientPlaceTree.from_device_mesh(mesh)
