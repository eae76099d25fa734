"""Images of documents that ranks share, from file to rank: the same bytes on every runtime, after
kills, and the same samples of a step on every mesh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.planning.strategies import hdp
from tests.images import PLACEHOLDER, job
from tests.processes import WORKER_RUNTIME, launch, play, run, until
from tests.reference_images import Place, places_on_ring, places_on_slice
from tests.scenarios.test_failover import killing, recovered
from tests.scenarios.test_images import (
    APART,
    Files,
    broken_rows,
    exchanged,
    in_simulation,
    pixels_of,
)
from tests.sizes import ALL

pytestmark = pytest.mark.timeout(200)

SMALL = ov.Batch(samples=12, context=24)
STORIES: dict[str, dict[str, Any]] = {
    "slices, one exchange a step": {"place": ov.Mesh(dp=2, cp=2)},
    "slices of whole microbatches, an exchange for each": {
        "place": ov.Mesh(dp=1, cp=3),
        "strategy": "vanilla",
        "batch": ov.Batch(samples=12, context=66, microbatches=2, cp_split="contiguous"),
    },
    "slices of rows on stages": {
        "place": ov.Mesh(pp=2, cp=2, tp=2),
        "batch": ov.Batch(samples=12, context=64, layout="padded", labels="unshifted"),
    },
    "rings, free counts": {
        "place": ov.Mesh(dp=2, cp=2),
        "strategy": "hdp_balance",
        "batch": SMALL,
        "sync": "step",
    },
    "padded rings of powers of two": {
        "place": ov.Mesh(dp=4, tp=2),
        "strategy": hdp(groups="power_of_two"),
        "batch": SMALL,
    },
}
BROKEN = (1, 5, 9, 14, 22, 30)


def places_of(found: ov.Job, plan: ov.LoadingPlan, rank: int) -> list[list[Place]]:
    """Return the sample and token at every place of the rank's microbatches."""
    mesh, batch, lengths = found.place, found.batch, plan.tokens.tolist()
    bucket = int(mesh.bucket_of(plan.main.axis)[rank])
    if plan.tasks is not None:
        return places_on_ring(plan, lengths, bucket)
    cp_rank, multiple = mesh.coords(rank)["cp"], batch.document_multiple(mesh)
    return places_on_slice(plan, lengths, bucket, batch, mesh.cp, cp_rank, multiple)


def made(folder: Path, name: str, **fields: Any) -> ov.Job:
    return job(folder, broken=BROKEN, **(STORIES[name] | fields))


@pytest.mark.parametrize("name", STORIES)
def test_shared_images_are_the_same_on_every_runtime(name: str, tmp_path: Path) -> None:
    found = made(tmp_path, name)
    alone = run(found, "local")
    assert alone.error == ""
    assert len(alone.states) == 6
    assert in_simulation(found, 3) == alone.steps
    apart = run(found, WORKER_RUNTIME, **APART)
    assert apart.steps == alone.steps
    assert apart.states == alone.states


@pytest.mark.parametrize("name", STORIES)
def test_rows_of_the_files_come_to_the_placeholders_of_each_rank(name: str, tmp_path: Path) -> None:
    """A placeholder and its row are matched by the sample, its token and the image's file.

    Where the tokens of a rank belong is found by ``reference_images``, from whole documents.
    """
    found = job(tmp_path, **STORIES[name])
    files, cut, placed, wanted = Files(found), 0, 0, 0
    with launch(found, "local") as session:
        clients = [session.client(rank) for rank in range(found.place.world_size)]
        for steps in zip(*clients, strict=True):
            plan = session.plan(steps[0].step)
            encoder = plan.module("encoder")
            assert encoder.offset is not None
            places = [places_of(found, plan, rank) for rank in range(len(steps))]
            for slot in range(len(steps[0].encoder)):
                owners: dict[int, set[int]] = {}
                for rank, (step, got) in enumerate(zip(steps, exchanged(steps, slot), strict=True)):
                    e = step.encoder[slot]
                    rows = got[e["recv_rows"]]
                    of = np.repeat(e["image_microbatch"], e["out_lens"])
                    for m, at, (item, k) in zip(
                        of.tolist(), e["image_token_index"].tolist(), rows.tolist(), strict=True
                    ):
                        assert step[m]["tokens"].reshape(-1)[at] == PLACEHOLDER
                        place = int(encoder.sample[item]), int(encoder.offset[item]) + k
                        assert places[rank][m][at] == place
                        owners.setdefault(item, set()).add(rank)
                    placed += len(rows)
                    for i, item in enumerate(e["item_ids"].tolist()):
                        sample = int(encoder.sample[item])
                        number = int((encoder.sample[:item] == sample).sum())
                        file = files.of(plan.sample_id(sample))[number]
                        begin, end = e["image_cu_seqlens"][i : i + 2]
                        assert np.array_equal(e["pixel_values"][begin:end], pixels_of(file)[0])
                cut += sum(len(ranks) > 1 for ranks in owners.values())
            assert encoder.out is not None
            wanted += int(encoder.out.sum())
    assert placed == wanted > 100
    assert cut > 1, "images whose rows go to several ranks"


def test_no_slice_keeps_a_label_of_a_sample_that_is_left_out_for_a_broken_image(
    tmp_path: Path,
) -> None:
    found, kept = made(tmp_path, "slices, one exchange a step"), set()
    with launch(found, "local") as session:
        for steps in zip(*[session.client(rank) for rank in range(4)], strict=True):
            for mb in (mb for step in steps for mb in step):
                ends = mb["cu_seqlens_padded"] // 2
                for k, piece in enumerate(mb.samples):
                    if (mb["labels"][ends[k] : ends[k + 1]] != -100).any():
                        kept.add(str(piece.sample))
        found_bad = [q for q in session.quarantine() if "excluded from the loss" in q["reason"]]
        excluded = {str(ov.SampleId(*row)) for row in broken_rows(found_bad)}
    assert len(excluded) > 1
    assert not kept & excluded


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("slices, one exchange a step", {"place": ov.Mesh(dp=1, cp=4)}),
        ("slices, one exchange a step", {"place": ov.Mesh(dp=4)}),
        ("rings, free counts", {"place": ov.Mesh(dp=5, cp=1)}),
    ],
)
def test_a_run_with_shared_images_goes_on_under_another_mesh_with_the_same_samples(
    name: str, other: dict[str, Any], tmp_path: Path
) -> None:
    before = job(tmp_path, **STORIES[name])
    whole, after = run(before, "local"), job(tmp_path, **(STORIES[name] | other))

    def samples(made: ov.Job, resume: Any = None) -> list[list[str]]:
        listed = []
        with launch(made, "local", resume=resume) as session:
            for step in session.client(0):
                plan = session.plan(step.step)
                listed.append(sorted(str(plan.sample_id(i)) for i in range(len(plan))))
        return listed

    assert samples(after, whole.states[2]) == samples(before)[3:]


@pytest.mark.parametrize(
    "name", ["rings, free counts", *(["slices, one exchange a step"] if ALL else [])]
)
def test_killed_workers_change_no_byte_of_shared_images(name: str, tmp_path: Path) -> None:
    found = made(tmp_path, name, until=14)
    alone = run(found, "local")
    names = ("loader-worker/1", "constructor-worker/1")
    with launch(found, WORKER_RUNTIME, **APART) as session:
        got = play(session, act={4: killing(*names)})
        until(lambda: set(recovered(session)) >= set(names))
    assert got == alone
