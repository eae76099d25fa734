"""Tensors and adapters of ranks that hold a part: slices of context parallelism, stages of a
pipeline, ranks served by another, images.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
import overlord.torch as ot
from overlord.constructor.rank_views import join, slice_index
from tests.torch.jobs import text_job

torch = pytest.importorskip("torch")
huggingface, megatron, torchtitan = (
    getattr(ot.adapters, name) for name in ("huggingface", "megatron", "torchtitan")
)


def first_steps(job: ov.Job) -> list[ov.Step]:
    """The first step of every rank."""
    with ov.launch(job) as session:
        return [
            next(client)
            for client in [session.client(rank) for rank in range(job.place.world_size)]
        ]


def placed(
    tmp_path: Path, split: str = "zigzag", labels: str = "shifted", **degrees: int
) -> ov.Job:
    job = text_job(tmp_path, until=1)
    return replace(
        job,
        place=ov.ClientPlaceTree(**degrees),
        batch=replace(job.batch, cp_split=split, labels=labels),
    )


def test_megatron_gets_slices_as_they_are_with_bounds_of_the_whole(tmp_path: Path):
    steps = first_steps(placed(tmp_path, cp=2))
    batches = [megatron.get_batch(iter(step)) for step in steps]
    whole = join([dict(step[0]) for step in steps], "zigzag")
    for r, batch in enumerate(batches):
        index = slice_index(whole["cu_seqlens_padded"], 2, r, "zigzag")
        assert batch.labels[0].tolist() == whole["labels"][index].tolist()
        assert batch.packed_seq_params.cu_seqlens_q.tolist() == whole["cu_seqlens_padded"].tolist()
        assert batch.padding_mask is None
        mask = megatron.padding_mask(steps[r][0], index)
        assert mask[0].tolist() == megatron.padding_mask(whole)[0, torch.tensor(index)].tolist()


def test_megatron_gets_a_padding_mask_on_every_rank_of_every_stage(tmp_path: Path):
    place = ov.ClientPlaceTree(pp=3, cp=2)
    steps = first_steps(replace(placed(tmp_path), place=place))
    for rank, step in enumerate(steps):
        r = place.coords(rank)["cp"]
        index = slice_index(step[0]["cu_seqlens_padded"], 2, r, "zigzag")
        batch = megatron.get_batch(iter(step), cp=(2, r))
        assert batch.padding_mask[0].tolist() == megatron.padding_mask(step[0], index)[0].tolist()
        assert all(
            array.shape == batch.padding_mask.shape
            for array in (batch.tokens, batch.labels)
            if array is not None
        )


def test_a_framework_that_cuts_itself_gets_the_whole_on_every_rank(tmp_path: Path):
    steps = first_steps(placed(tmp_path, "none", cp=2))
    found = [torchtitan.flat(step[0]) for step in steps]
    assert torch.equal(found[0][0]["input"], found[1][0]["input"])
    for step in first_steps(placed(tmp_path, cp=2)):
        for adapter in (huggingface.flattened, torchtitan.flat):
            with pytest.raises(
                ov.JobError, match=r"a slice of \d+ of \d+ tokens.*set Batch\(cp_split='none'\)"
            ):
                adapter(step[0])


def test_labels_of_slices_that_follow_the_other_convention_are_refused(tmp_path: Path):
    for step in first_steps(placed(tmp_path, labels="unshifted", cp=2)):
        with pytest.raises(
            ov.JobError,
            match=r"its unshifted labels cannot become shifted.*Set Batch\(labels='shifted'\)",
        ):
            megatron.packed(step[0])


def test_stages_of_a_pipeline_give_megatron_what_they_have(tmp_path: Path):
    first, middle, last = (
        megatron.get_batch(iter(step)) for step in first_steps(placed(tmp_path, pp=3))
    )
    has = [
        [
            name
            for name in ("tokens", "position_ids", "labels", "loss_mask")
            if getattr(b, name) is not None
        ]
        for b in (first, middle, last)
    ]
    assert has == [["tokens", "position_ids"], [], ["labels", "loss_mask"]]
    assert (
        len({tuple(b.packed_seq_params.cu_seqlens_q.tolist()) for b in (first, middle, last)}) == 1
    )
    with pytest.raises(
        ov.JobError,
        match=r"expected labels, loss_mask in the microbatch.*each pipeline stage has only its "
        r"own keys",
    ):
        torchtitan.flat(first_steps(placed(tmp_path, pp=3))[0][0])


def test_a_rank_that_is_served_by_another_says_so(tmp_path: Path):
    steps = first_steps(placed(tmp_path, tp=2))
    made = ot.TensorStep.of(steps[1])
    assert (made.rank, made.served_by) == (1, 0)
    assert dict(made[0]) == {}
    for mb in (steps[1][0], made[0]):
        with pytest.raises(
            KeyError, match="'labels' is not on this rank: rank 0 fetches this microbatch"
        ):
            mb["labels"]
        with pytest.raises(
            KeyError, match="'tokens' is not on this rank: rank 0 fetches this microbatch"
        ):
            huggingface.flattened(mb)
        with pytest.raises(
            KeyError,
            match=r"'tokens' is not on this rank: rank 0 fetches this microbatch.*overlord.torch.join",
        ):
            ot.tensors(mb)
    assert ot.tensors({}) == {}


def test_figures_of_clients_that_broadcast_nothing_say_who_fetches(tmp_path: Path):
    job = placed(tmp_path, tp=2)
    for broadcast, wanted in (
        (True, [(True, 0, [0, 1], 1), (False, 0, [0, 1], 1)]),
        (False, [(True, 0, [0], 2), (True, 1, [1], 2)]),
    ):
        with ov.launch(job, broadcast=broadcast) as session:
            clients = [session.client(rank) for rank in range(2)]
            steps = [next(client) for client in clients]
            figures = [client.figures() for client in clients]
        assert [
            (f["fetches"], f["fetcher"], f["group"], f["fetching_ranks"]) for f in figures
        ] == wanted
        assert [f["bytes_fetched"] for f in figures] == [
            sum(array.nbytes for mb in step for array in mb.values()) for step in steps
        ]


def test_losses_of_sources_over_slices_are_those_of_the_whole(tmp_path: Path):
    job = placed(tmp_path, cp=2)
    steps = first_steps(job)
    whole = join([dict(step[0]) for step in steps], "zigzag")
    losses = torch.rand(len(whole["tokens"]), dtype=torch.float64)
    places = [slice_index(whole["cu_seqlens_padded"], 2, r, "zigzag") for r in range(2)]
    found = ot.source_losses(
        [losses[torch.tensor(p)] for p in places],
        [step[0] for step in steps],
        job.names,
        positions=places,
    )
    assert found == pytest.approx(ot.source_losses(losses, whole, job.names), abs=1e-12)


# images


@pytest.mark.parametrize("strategy", ["vlm_hybrid", "per microbatch"])
def test_steps_with_images_have_their_exchanges_as_tensors(tmp_path: Path, strategy: str):
    pytest.importorskip("PIL")
    from tests import images

    job = images.job(
        tmp_path,
        strategy=ov.strategy.vlm(per="microbatch") if strategy == "per microbatch" else strategy,
        until=2,
    )
    step = first_steps(job)[1]
    made = ot.TensorStep.of(step)
    assert len(made.encoder) == len(step.encoder) > 0
    for a, b in zip((*made, *made.encoder), (*step, *step.encoder), strict=True):
        assert list(a) == list(b)
        assert all(np.array_equal(a[key].numpy(), b[key]) for key in b)
    moved = made.to("meta")
    assert moved.encoder[0]["pixel_values"].device.type == "meta"
    assert moved.encoder[0]["send_splits"].device.type == "cpu"
    if strategy == "per microbatch":
        assert torch.equal(
            torchtitan.flat(made[0], batched=False)[0]["pixel_values"],
            made.encoder[0]["pixel_values"],
        )
        assert len(torchtitan.flat(made[0])[0]["pixel_values"]) == len(made.encoder[0]["grid_thw"])
        assert huggingface.flattened(made[0])["image_grid_thw"].shape[1] == 3


def test_what_two_places_of_a_step_share_is_sent_to_the_device_once(tmp_path: Path):
    pytest.importorskip("PIL")
    from overlord.torch.pinned_memory import layout
    from tests import images

    step = first_steps(images.job(tmp_path, strategy=ov.strategy.vlm(per="microbatch")))[0]
    arrays: list[Any] = [mb["pixel_values"] for mb in step] + [
        slot["pixel_values"] for slot in step.encoder
    ]
    assert layout(arrays)[1] < sum(a.nbytes for a in arrays) * 0.75


def test_megatron_gets_the_ring_of_each_piece_and_a_mask_of_its_padding(tmp_path: Path):
    """Hybrid context parallelism finds its group by ``local_cp_size``."""
    job = text_job(tmp_path, until=1)
    batch = replace(job.batch, context=32)
    strategy = ov.strategy.hdp(groups="power_of_two")
    steps = first_steps(
        replace(job, place=ov.Mesh(dp=4), batch=batch, strategy=strategy, max_document=64)
    )
    sizes, padding = set(), 0
    for step in steps:
        microbatches = list(step)
        for mb, given in zip(microbatches, iter(microbatches), strict=True):
            found = megatron.get_batch(iter([given]))
            d = int(mb["local_cp_size"])
            sizes.add(d)
            assert found.packed_seq_params.local_cp_size == d
            assert int(megatron.packed(mb)["local_cp_size"]) == d
            assert found.tokens.shape == found.padding_mask.shape == (1, len(mb["tokens"]))
            lengths = np.diff(mb["cu_seqlens"]).repeat(np.diff(mb["cu_seqlens_local"]))
            expected = mb["position_ids"] >= lengths
            assert found.padding_mask[0].tolist() == expected.tolist()
            padding += int(expected.sum())
    assert max(sizes) > 1
    assert padding
