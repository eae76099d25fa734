"""Laws of modules on their own meshes, for any two meshes inside a job's ranks."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ov
from overlord.errors import JobError, PlanError
from overlord.mesh import AXES
from overlord.plan.module_ranks import (
    OUTSIDE,
    bucket_by_rank,
    fetcher_by_rank,
    first_ranks,
    view_by_rank,
)
from overlord.plan.view import views_of

WORLD = 12


@st.composite
def meshes(draw: Any, cp: bool = True) -> ov.Mesh:
    sizes = st.integers(1, 3)
    degrees = {axis: draw(sizes) for axis in AXES if cp or axis != "cp"}
    while np.prod(list(degrees.values())) > WORLD:
        degrees[max(degrees, key=lambda axis: degrees[axis])] = 1
    size = int(np.prod(list(degrees.values())))
    order = tuple(draw(st.permutations(AXES)))
    return ov.Mesh(**degrees, order=order, first_rank=draw(st.integers(0, WORLD - size)))


@given(meshes(), st.sampled_from(["DP", "CP", "WORLD", "PP", "TP"]))
def test_a_mesh_from_another_rank_is_the_same_mesh_moved(mesh: ov.Mesh, axis: str) -> None:
    still, by = mesh.replace(first_rank=0), mesh.first_rank
    assert mesh.buckets(axis) == [[rank + by for rank in ranks] for ranks in still.buckets(axis)]
    assert mesh.bucket_of(axis).tolist() == still.bucket_of(axis).tolist()
    assert mesh.fetchers(("TP", "CP")) == [rank + by for rank in still.fetchers(("TP", "CP"))]
    assert (mesh.seats(axis, ("TP",)) - by).tolist() == still.seats(axis, ("TP",)).tolist()
    assert views_of(mesh, axis, ("TP",), "zigzag") == views_of(still, axis, ("TP",), "zigzag")
    for rank in range(by, by + mesh.world_size):
        assert mesh.coords(rank) == still.coords(rank - by)
        assert mesh.rank(**mesh.coords(rank)) == rank
    for rank in (by - 1, by + mesh.world_size):
        with pytest.raises(JobError, match=f"expected a rank from {by} to"):
            mesh.coords(rank)


@given(meshes(), st.sampled_from(["DP", "CP", "WORLD"]))
def test_ranks_outside_of_a_modules_mesh_have_nothing(mesh: ov.Mesh, axis: str) -> None:
    place = ov.Mesh(dp=WORLD)
    bucket, fetcher = bucket_by_rank(place, mesh, axis), fetcher_by_rank(place, mesh, ("TP",))
    views = view_by_rank(place, mesh, axis, ("TP",), "zigzag")
    assert len(bucket) == len(fetcher) == len(views) == WORLD
    for rank in range(WORLD):
        inside = mesh.first_rank <= rank < mesh.first_rank + mesh.world_size
        assert (bucket[rank] != OUTSIDE) == (fetcher[rank] != OUTSIDE) == inside
        assert inside or views[rank].nothing
    for b, ranks in enumerate(mesh.buckets(axis)):
        assert np.flatnonzero(bucket == b).tolist() == sorted(ranks)
        assert first_ranks(mesh, axis)[b] == min(ranks)


def planned(
    encoder: ov.Mesh, backbone: ov.Mesh, images: list[list[int]], per: str, axis: str
) -> ov.LoadingPlan:
    columns = {"tokens": [sum(n) // 4 + 8 for n in images], "image_patches": images}
    batch = ov.Batch(samples=len(images), microbatches=2, context=96)
    buffer = replace(ov.Buffer.from_columns({"seen": columns}, batch=batch), drawn=True)
    drawn = ov.DGraph.from_buffer(buffer, ov.Mesh(dp=WORLD)).mix()
    samples = drawn.select("tokens").distribute("DP", on=backbone).balance("greedy")
    items = drawn.select("image_patches", merge=2).distribute(axis, on=encoder)
    items = items.balance("greedy") if per == "iteration" else items.follow(samples)
    return samples.broadcast_at("TP").plan(encoder=items)


@given(
    meshes(),
    meshes(cp=False),
    st.lists(st.lists(st.integers(4, 40), max_size=4), min_size=1, max_size=20),
    st.sampled_from(["iteration", "microbatch"]),
    st.sampled_from(["WORLD", "DP"]),
)
@settings(max_examples=60)
def test_every_row_goes_from_a_rank_of_the_encoder_to_one_of_the_backbone(
    encoder: ov.Mesh, backbone: ov.Mesh, images: list[list[int]], per: str, axis: str
) -> None:
    plan = planned(encoder, backbone, images, per, axis)
    routes = plan.routes().validate()
    n_items = sum(map(len, images))
    assert routes.world_size == WORLD
    assert len(routes) == n_items
    for ranks, mesh in ((routes.encoder, encoder), (routes.parts.owner, backbone)):
        assert all(mesh.first_rank <= r < mesh.first_rank + mesh.world_size for r in ranks.tolist())
    for slot in range(routes.n_slots):
        every = [routes.for_rank(rank, slot) for rank in range(WORLD)]
        sends = np.array([r.send_splits for r in every])
        gets = np.array([r.recv_splits for r in every])
        assert (sends == gets.T).all()
        outside = [r for r in range(WORLD) if bucket_by_rank(plan.tree, encoder, axis)[r] < 0]
        assert sends[outside].sum() == 0
    again = ov.LoadingPlan.from_bytes(plan.to_bytes())
    assert again.digest() == plan.digest()
    assert again.module("encoder").on == plan.module("encoder").on
    assert again.main.on == plan.main.on


@given(meshes(cp=False), meshes(cp=False))
def test_plans_on_different_meshes_have_different_digests(a: ov.Mesh, b: ov.Mesh) -> None:
    images = [[8, 12], [], [16]]
    one = planned(a, ov.Mesh(dp=2), images, "iteration", "WORLD")
    other = planned(b, ov.Mesh(dp=2), images, "iteration", "WORLD")
    assert (one.digest() == other.digest()) == (a == b)


def test_the_jobs_mesh_given_as_a_modules_mesh_changes_nothing() -> None:
    place = ov.Mesh(dp=WORLD)
    plan = planned(place, place, [[8], [12, 4]], "iteration", "WORLD")
    assert plan.main.on is None
    assert plan.module("encoder").on is None


def graph() -> ov.DGraph:
    columns = {"tokens": [20, 9], "image_patches": [[4, 8], [4]]}
    batch = ov.Batch(samples=2, context=64)
    buffer = replace(ov.Buffer.from_columns({"seen": columns}, batch=batch, step=7), drawn=True)
    return ov.DGraph.from_buffer(buffer, ov.Mesh(dp=4)).mix()


PART = ov.Mesh(dp=2, first_rank=2)


def mismatched() -> None:
    g = graph()
    samples = g.select("tokens").distribute("DP", on=PART).balance()
    g.select("image_patches").distribute("WORLD").follow(samples, stay=True)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (
            lambda: graph().distribute("DP", on="dp2"),
            r"expected an ov.Mesh, got str; give the mesh",
        ),
        (
            lambda: graph().distribute("DP", on=ov.Mesh(dp=2, first_rank=3)),
            r"distribute\(on=\): expected ranks 0 to 3 of the job's mesh pp1xdp4xcp1xtp1, got "
            r"pp1xdp2xcp1xtp1 from rank 3, which has ranks 3 to 4; give the mesh",
        ),
        (
            lambda: graph().distribute("DP", on=ov.Mesh(cp=2)).balance().plan(),
            r"a multiple of 1 tokens, as on pp1xdp4xcp1xtp1, got a multiple of 4 on "
            r"pp1xdp1xcp2xtp1; give Job.place the cp and tp of the backbone: cp=2, tp=1",
        ),
        (mismatched, r"follow\(stay=True\): expected items on the mesh of their samples, .* from"),
        (
            lambda: replace(
                graph().distribute("DP", on=PART).balance().plan(), place=ov.Mesh(dp=3)
            ).validate(),
            r"module 'backbone': on: expected ranks 0 to 2",
        ),
    ],
)
def test_a_mesh_that_cannot_hold_a_module_is_refused(ask: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text) as e:
        ask()
    assert e.value.step == 7


def test_meshes_that_are_not_declared_stay_refused() -> None:
    other = replace(graph(), tree=PART)
    samples = graph().select("tokens").distribute("DP").balance()
    images = other.select("image_patches").distribute("WORLD").balance()
    with pytest.raises(PlanError, match=r"expected a graph on .* got one on .* from rank 2"):
        samples.plan(encoder=images)


def test_a_jobs_mesh_starts_at_rank_0() -> None:
    source = ov.Source("a", ["nowhere.jsonl"])
    with pytest.raises(
        JobError, match=r"place.first_rank: expected 0, .* got 2; give other meshes"
    ):
        ov.Job(
            name="a",
            sources=[source],
            place=ov.Mesh(dp=2, first_rank=2),
            batch=ov.Batch(samples=2, context=8),
        )
    with pytest.raises(JobError, match=r"place.first_rank: expected a whole number of at least 0"):
        ov.Mesh(first_rank=-1)


@pytest.mark.parametrize("head", ['{"dp": 2, "first_rank": "x"}', '{"dp": 5}', '{"dx": 2}', "3"])
def test_damaged_meshes_of_modules_are_plan_errors(head: str) -> None:
    data = graph().distribute("DP", on=PART).balance().plan().to_bytes()
    size = struct.unpack_from("<Q", data, 5)[0]
    fields = json.loads(data[13 : 13 + size])
    fields["modules"]["backbone"]["on"] = json.loads(head)
    text = json.dumps(fields).encode()
    with pytest.raises(PlanError):
        ov.LoadingPlan.from_bytes(
            data[:5] + struct.pack("<Q", len(text)) + text + data[13 + size :]
        )
