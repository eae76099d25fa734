"""Meshes on every runtime: which part of a step each rank is handed, and that all parts together
are the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.constructor.rank_views import join
from overlord.errors import PlanError
from tests.scenarios.test_runtime import RUNTIMES, Held, Outcome, all_clean, job, run, wanted
from tests.sizes import on_runtimes

pytestmark = pytest.mark.timeout(200)
runtimes = pytest.mark.parametrize("runtime", RUNTIMES)


def places(axis: str, *broadcast: str) -> Any:
    """A strategy that distributes along an axis and broadcasts along others."""

    def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        graph = ov.DGraph.from_buffer(buffer, place, meta="tokens").mix().distribute(axis)
        return (
            graph.cost(lambda columns: columns["tokens"].astype(float))
            .balance()
            .broadcast_at(*broadcast)
            .plan()
        )

    return strategy


@dataclass(frozen=True)
class Mesh:
    place: ov.ClientPlaceTree
    axis: str = "DP"
    broadcast: tuple[str, ...] = ()
    batch: Mapping[str, Any] = field(default_factory=dict)
    arrays: int = 0  # ranks that are handed any

    def job(self, **changes: Any) -> ov.Job:
        batch = ov.Batch(**{"samples": 16, "context": 48, "microbatches": 2, **self.batch})
        return job(
            place=self.place,
            batch=batch,
            strategy=places(self.axis, *self.broadcast),
            **{"until": 4, **changes},
        )


ALL = ov.ClientPlaceTree(pp=2, dp=2, cp=2, tp=2)
MESHES = {
    "cp": Mesh(ov.ClientPlaceTree(dp=2, cp=3), arrays=6),
    "cp, padded rows": Mesh(ov.ClientPlaceTree(dp=2, cp=2), batch={"layout": "padded"}, arrays=4),
    "cp in runs": Mesh(
        ov.ClientPlaceTree(cp=3, tp=2),
        batch={"cp_split": "contiguous", "sequence_parallel": True},
        arrays=6,
    ),
    "cp over the whole": Mesh(
        ov.ClientPlaceTree(cp=2, dp=2),
        batch={"cp_split": "zigzag_whole", "labels": "unshifted"},
        arrays=4,
    ),
    "cp by the trainer": Mesh(ov.ClientPlaceTree(cp=2, pp=2), batch={"cp_split": "none"}, arrays=4),
    "all axes": Mesh(ALL, arrays=16),
    "all axes, in another order": Mesh(
        ALL.replace(order=("tp", "dp", "pp", "cp")), "DP", ("TP",), arrays=8
    ),
    "broadcast along cp": Mesh(ALL, "DP", ("TP", "CP"), arrays=4),
    "broadcast along pp": Mesh(ALL, "DP", ("TP", "PP"), arrays=4),
    "broadcast along dp": Mesh(ov.ClientPlaceTree(dp=2, tp=2), "DP", ("TP", "DP"), arrays=2),
    "whole microbatches for cp ranks": Mesh(ALL, "CP", ("TP",), arrays=8),
    "every rank its own": Mesh(ov.ClientPlaceTree(pp=2, cp=2, tp=2), "WORLD", ("TP",), arrays=8),
    "buckets of stages": Mesh(ov.ClientPlaceTree(pp=2, dp=2, cp=2), "PP", arrays=8),
    "buckets of tensor positions": Mesh(ov.ClientPlaceTree(pp=2, dp=2, tp=2), "TP", arrays=8),
}


def rejoined(mesh: Mesh, out: Outcome) -> dict[int, list[Any]]:
    """All samples of each step, from the whole microbatches that are put together from the parts of
    ranks.
    """
    tree, found, split = mesh.place, dict[int, list[Any]](), mesh.job().batch.cp_split
    for ranks in tree.buckets(mesh.axis):
        first = {
            tree.coords(r)["cp"]: r
            for r in reversed(ranks)
            if "tokens" in next(iter(out.microbatches[r].values()))[0].arrays
        }
        for step, held in out.microbatches[first[min(first)]].items():
            for m, mb in enumerate(held):
                parts = [out.microbatches[first[c]][step][m].arrays for c in sorted(first)]
                whole = Held(mb.arrays if mb.whole else join(parts, split), mb.samples, 0)
                assert whole.whole
                found[step] = sorted(found.get(step, []) + whole.texts())
    return found


@pytest.mark.parametrize(
    ("runtime", "mesh"),
    on_runtimes(MESHES, RUNTIMES, ("all axes", "cp, padded rows", "broadcast along pp")),
)
def test_the_parts_that_ranks_of_a_mesh_get_make_up_the_stream(runtime: str, mesh: Mesh) -> None:
    out = run(runtime, mesh.job())
    all_clean(out)
    assert rejoined(mesh, out) == wanted(mesh.job())
    assert sum(bool(steps[0][0].arrays) for steps in out.microbatches.values()) == mesh.arrays
    assert (
        out.digests() == run("simulated" if runtime == "local" else "local", mesh.job()).digests()
    ), "to the byte"
    for step, plan in out.plans.items():
        found = {
            rank: sum(a.nbytes for mb in steps[step] for a in mb.arrays.values())
            for rank, steps in out.microbatches.items()
        }
        said = plan.delivery(mesh.job().batch)
        assert said["bytes_by_client"] == {rank: n for rank, n in found.items() if n}, (
            "a plan says who fetches how many bytes"
        )
        assert (said["clients"], said["served"], said["bytes"]) == (
            mesh.arrays,
            len(found) - mesh.arrays,
            sum(found.values()),
        )
        assert plan.delivery(mesh.job().batch, broadcast=False)["clients"] == mesh.place.world_size


def shouted(assembly: ov.Assembly) -> list[Any]:
    """A hook that adds arrays: one with a number for each token, one with a number for each
    document, and one of its own.
    """
    made = []
    for mb in assembly.default():
        lengths = np.diff(mb["cu_seqlens_padded"])
        own = {
            "document": np.repeat(np.arange(len(lengths)), lengths).reshape(mb["tokens"].shape),
            "lengths": lengths,
            "seven": np.full(3, 7),
        }
        made.append({**mb, "tokens": mb["tokens"] + 1, **own})
    return made


HOOKED = ("all axes", "cp, padded rows", "cp in runs", "broadcast along cp", "buckets of stages")


@pytest.mark.parametrize(
    ("runtime", "name"),
    on_runtimes(dict(zip(HOOKED, HOOKED, strict=True)), RUNTIMES, ("all axes",)),
)
def test_what_a_hook_builds_is_cut_as_what_the_package_builds(runtime: str, name: str) -> None:
    mesh = MESHES[name]
    out, plain = (
        run(runtime, mesh.job(hooks=[ov.constructor_do_plan(shouted)])),
        run(runtime, mesh.job()),
    )
    cut = 1 if "CP" in mesh.broadcast else mesh.place.cp
    for rank, steps in plain.microbatches.items():
        for step, held in steps.items():
            for mb, hooked in zip(held, out.microbatches[rank][step], strict=True):
                own = {
                    key: hooked.arrays.pop(key)
                    for key in ("document", "lengths", "seven")
                    if key in hooked.arrays
                }
                if "tokens" in mb.arrays:
                    mb.arrays["tokens"] = mb.arrays["tokens"] + 1
                    assert own["document"].shape == mb.arrays["tokens"].shape
                assert mb.digest() == hooked.digest()
                if mb.arrays:
                    assert own["document"].size * cut == mb.arrays["cu_seqlens_padded"][-1]
                    assert (len(own["lengths"]), own["seven"].tolist()) == (
                        len(mb.arrays["cu_seqlens"]) - 1,
                        [7, 7, 7],
                    )


def odd(assembly: ov.Assembly) -> list[Any]:
    """A hook that leaves out the padding that context parallelism needs."""
    made = assembly.default()
    ends = {key: np.array([0, 5], np.int32) for key in ("cu_seqlens", "cu_seqlens_padded")}
    per_token = {key: made[0][key][:5] for key in ("tokens", "position_ids", "labels", "loss_mask")}
    return [{**mb, **per_token, **ends, "source_ids": np.zeros(1, np.int32)} for mb in made]


@runtimes
def test_a_hook_whose_documents_cannot_be_cut_is_named(runtime: str) -> None:
    out = run(runtime, MESHES["cp"].job(hooks=[ov.constructor_do_plan(odd)]))
    assert {type(e) for e in out.error.values()} == {PlanError}
    assert all(
        "constructor_do_plan(odd): expected microbatches that can be sliced along cp" in str(e)
        and "got 5" in str(e)
        for e in out.error.values()
    )


@runtimes
def test_without_broadcasts_every_rank_gets_its_own_part(runtime: str) -> None:
    mesh = MESHES["broadcast along cp"]
    out, plain = run(runtime, mesh.job(), broadcast=False), run(runtime, MESHES["all axes"].job())
    assert out.digests() == plain.digests()
    assert {
        held[0].served_by == rank
        for rank, steps in out.microbatches.items()
        for held in steps.values()
    } == {True}


@runtimes
def test_a_rank_that_is_served_by_a_broadcast_says_by_whom(runtime: str) -> None:
    out = run(runtime, MESHES["broadcast along pp"].job())
    tree = MESHES["broadcast along pp"].place
    for rank, steps in out.microbatches.items():
        at = tree.coords(rank)
        assert {mb.served_by for held in steps.values() for mb in held} == {
            tree.rank(dp=at["dp"], cp=at["cp"])
        }


OTHERS = ("all axes", "cp", "cp in runs", "broadcast along pp", "whole microbatches for cp ranks")


@pytest.mark.parametrize(
    ("runtime", "other"), on_runtimes(dict(zip(OTHERS, OTHERS, strict=True)), RUNTIMES, ("cp",))
)
def test_a_run_goes_on_under_another_mesh_with_the_same_samples(runtime: str, other: str) -> None:
    mesh = MESHES[other]
    made = job(
        batch=ov.Batch(samples=10, context=48), strategy=places(mesh.axis, *mesh.broadcast), until=6
    )
    state = ov.simulate(made, steps=3, save=True).states[2]
    out = run(
        runtime,
        replace(made, place=mesh.place, batch=replace(made.batch, **mesh.batch)),
        resume=state,
    )
    assert rejoined(mesh, out) == {
        step: samples for step, samples in wanted(made).items() if step >= 3
    }
