"""Images from file to rank: the same pixels and routes on every runtime, each image encoded once,
and those that are broken named.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import overlord as ov
from overlord.plan.plan import LoadingPlan
from overlord.transforms.image_header import header
from overlord.transforms.image_items import fill, item_grid, item_shape
from tests.images import IMAGES, PLACEHOLDER, job, picture, sources, text, tokens
from tests.processes import WORKER_RUNTIME, launch, play, run, until, written
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)

APART = {"sources_per_host": 1, "hosts": 3, "constructor_hosts": 2}
GROUPS = ov.ClientPlaceTree(dp=2, tp=2)


def by_hand(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> LoadingPlan:
    """Every image is encoded as far from its sample as can be."""
    drawn = ov.DGraph.from_buffer(buffer, place).mix()
    images = drawn.select("image_patches").distribute("WORLD").balance("none")
    return drawn.select("tokens").distribute("DP").balance("none").plan(encoder=images)


STORIES: dict[str, dict[str, Any]] = {
    "hybrid balance, one exchange a step": {},
    "no balance, an exchange for every microbatch": {
        "strategy": "vanilla",
        "place": ov.ClientPlaceTree(dp=4),
    },
    "tensor parallelism, images on all ranks": {
        "strategy": ov.strategy.vlm(per="microbatch"),
        "place": GROUPS,
    },
    "images far from their samples, padded": {
        "strategy": by_hand,
        "place": ov.ClientPlaceTree(dp=3),
        "batch": ov.Batch(samples=9, context=64, layout="padded"),
    },
    "look-ahead": {"look_ahead": 4, "max_age": 3, "strategy": "look_ahead_balance"},
    "documents padded, steps skipped over": {
        "batch": ov.Batch(samples=10, context=64, pad_multiple=8),
        "strategy": "encoder_balance",
    },
}


def in_simulation(made: ov.Job, seed: int, **settings: Any) -> dict[int, list[tuple[Any, ...]]]:
    found = ov.simulate(made, seed=seed, check=True, **settings)
    assert found.error is None
    return {rank: [written(step) for step in steps] for rank, steps in found.steps.items()}


@pytest.mark.parametrize("name", STORIES)
def test_a_job_with_images_is_the_same_on_every_runtime(name: str, tmp_path: Path) -> None:
    made = job(tmp_path, **STORIES[name])
    alone = run(made, "local")
    assert alone.error == ""
    assert len(alone.states) == 6
    assert (
        sum(
            shape[0]
            for step in alone.steps[0]
            for exchange in step[5]
            for key, _, shape, _ in exchange
            if key == "pixel_values"
        )
        > 100
    )
    assert in_simulation(made, 3) == alone.steps
    assert in_simulation(made, 4, loaders={"photos": 2}) == alone.steps
    apart = run(made, WORKER_RUNTIME, **APART)
    assert apart.steps == alone.steps
    assert apart.states == alone.states


# pixels and routes, from the files and the plan alone


class Files:
    """The images of samples as they stand in the files."""

    def __init__(self, made: ov.Job):
        self._photos = [
            pq.read_table(path)["images"].to_pylist()
            for path in sorted(Path(str(made.sources[0].uri)).parent.glob("*.parquet"))
        ]
        self._tars = [
            path.read_bytes()
            for path in sorted(Path(str(made.sources[1].uri)).parent.glob("*.tar"))
        ]

    def of(self, sample: ov.SampleId) -> list[bytes]:
        if sample.source == "photos":
            return self._photos[sample.file][sample.row]
        if sample.source == "text":
            return []
        size = int(self._tars[sample.file][sample.row + 124 : sample.row + 135], 8)
        return [self._tars[sample.file][sample.row + 512 : sample.row + 512 + size]]


def pixels_of(file: bytes) -> tuple[np.ndarray, tuple[int, int, int]]:
    spec = ov.Images("images", **IMAGES)
    prefix = spec.plan(header(np.frombuffer(file, np.uint8), spec.limits))
    item = np.frombuffer(prefix.pack() + file, np.uint8)
    patches, dim, dtype = item_shape(item)
    out = np.empty((patches, dim), dtype)
    fill(item, out)
    return out, item_grid(item)


def expected(
    plan: LoadingPlan, rank: int, slot: int, files: Files
) -> tuple[np.ndarray, list[list[int]]]:
    encoder = plan.module("encoder")
    route = plan.routes().for_rank(rank, slot)
    made = [np.zeros((0, 192), np.float32)]
    grids = []
    for item in route.items.tolist():
        sample = int(encoder.sample[item])
        found, grid = pixels_of(
            files.of(plan.sample_id(sample))[int((encoder.sample[:item] == sample).sum())]
        )
        made.append(found)
        grids.append(list(grid))
    return np.concatenate(made), grids


@pytest.mark.parametrize(
    "name", ["hybrid balance, one exchange a step", "tensor parallelism, images on all ranks"]
)
def test_pixels_are_those_of_the_files_in_the_order_of_the_plan(name: str, tmp_path: Path) -> None:
    made = job(tmp_path, **STORIES[name])
    files = Files(made)
    with launch(made, "local") as session:
        clients = [session.client(rank) for rank in range(made.place.world_size)]
        for steps in zip(*clients, strict=True):
            plan = session.plan(steps[0].step)
            encoded: Counter[int] = Counter()
            for rank, step in enumerate(steps):
                for slot, exchange in enumerate(step.encoder):
                    pixels, grids = expected(plan, rank, slot, files)
                    assert np.array_equal(exchange["pixel_values"], pixels)
                    assert exchange["grid_thw"].tolist() == grids
                    assert exchange["image_cu_seqlens"].tolist() == [
                        0,
                        *np.cumsum(np.prod(grids, axis=1, dtype=int) if grids else []),
                    ]
                    encoded.update(exchange["item_ids"].tolist())
            wanted = [len(files.of(plan.sample_id(i))) for i in range(len(plan))]
            assert encoded == Counter(range(sum(wanted)))  # every image of the step, once


def exchanged(steps: tuple[ov.Step, ...], slot: int) -> list[np.ndarray]:
    """What each rank receives when every rank sends its items' rows, each named by its item and
    number.
    """
    sent = []
    for step in steps:
        e = step.encoder[slot]
        rows = [
            [item, k]
            for item, n in zip(e["item_ids"].tolist(), e["send_lens"].tolist(), strict=True)
            for k in range(n)
        ]
        rows = [rows[k] for k in e["send_rows"].tolist()]
        cuts = np.cumsum(e["send_splits"])
        assert cuts[-1] == len(rows)
        sent.append(np.split(np.array(rows, int).reshape(-1, 2), cuts[:-1]))
    return [np.concatenate([parts[rank] for parts in sent]) for rank in range(len(steps))]


@pytest.mark.parametrize("name", [name for name in STORIES if name != "look-ahead"])
def test_rows_of_images_come_to_their_placeholders(name: str, tmp_path: Path) -> None:
    made = job(tmp_path, **STORIES[name])
    with launch(made, "local") as session:
        clients = [session.client(rank) for rank in range(made.place.world_size)]
        for steps in zip(*clients, strict=True):
            encoder = session.plan(steps[0].step).module("encoder")
            assert encoder.out is not None
            for slot in range(len(steps[0].encoder)):
                for step, got in zip(steps, exchanged(steps, slot), strict=True):
                    e = step.encoder[slot]
                    assert len(got) == e["recv_splits"].sum() == len(e["recv_rows"])
                    wanted = got[e["recv_rows"]]
                    assert len(e["out_lens"]) == len(e["recv_perm"]) == len(e["image_microbatch"])
                    assert wanted[:, 1].tolist() == [
                        k for n in e["out_lens"].tolist() for k in range(n)
                    ]
                    whose = np.repeat(e["image_microbatch"], e["out_lens"])
                    for m in np.unique(whose).tolist():
                        index, tokens = (
                            e["image_token_index"][whose == m],
                            step[m]["tokens"].reshape(-1),
                        )
                        assert np.array_equal(
                            index,
                            np.flatnonzero(tokens == PLACEHOLDER)[
                                np.isin(np.flatnonzero(tokens == PLACEHOLDER), index)
                            ],
                        )
                        if len(steps[0].encoder) == len(step):
                            assert len(index) == (tokens == PLACEHOLDER).sum()


def pictured(at: str) -> ov.Source:
    """Rows of none to three images; with markers between some tokens, at the beginning and at the
    end among them.
    """
    rows = []
    for i in range(48):
        marks = (
            np.array([[], [0], [0, 1], [1, 2, 4]][i % 4], int)
            if at == "marker"
            else np.zeros(0, int)
        )
        rows.append(
            {
                "tokens": np.insert(tokens(i, 4), marks, 99).tolist(),
                "images": [picture(10 * i + k) for k in range(i % 4)],
            }
        )
    how = {**IMAGES, "at": at, "marker": 99 if at == "marker" else None}
    return ov.Source("pictured", Rows(rows), transforms=[ov.Tokens(), ov.Images("images", **how)])


@pytest.mark.parametrize("at", ["start", "end", "marker"])
@pytest.mark.parametrize(
    ("layout", "labels"),
    [
        ("packed", "shifted"),
        ("packed", "unshifted"),
        ("padded", "shifted"),
        ("padded", "unshifted"),
    ],
)
def test_no_placeholder_is_predicted_and_all_other_tokens_are(
    layout: str, labels: str, at: str, tmp_path: Path
) -> None:
    """Of documents that are cut too, and on the last of two stages, whose tokens are on the
    first.
    """
    batch = ov.Batch(
        samples=12, context=24, microbatches=2, layout=layout, labels=labels, pad_multiple=4
    )
    made = job(tmp_path, batch=batch, place=ov.ClientPlaceTree(pp=2, dp=2))
    made = replace(made, sources=[pictured(at), made.sources[2]])
    seen = 0
    with launch(made, "local") as session:
        clients = [session.client(rank) for rank in range(4)]
        for steps in zip(*clients, strict=True):
            valid = 0
            for first, last in ((steps[0], steps[2]), (steps[1], steps[3])):
                for stage, mb in zip(first, last, strict=True):
                    ids, found = stage["tokens"].reshape(-1), mb["labels"].reshape(-1)
                    wanted = np.full(len(ids), -100)
                    for piece in mb.samples:
                        start = piece.offset * (batch.context if layout == "padded" else 1)
                        for i in range(start + 1, start + piece.length):
                            if ids[i] != PLACEHOLDER:
                                wanted[i - (labels == "shifted")] = ids[i]
                        seen += int((ids[start : start + piece.length] == PLACEHOLDER).sum())
                    assert found.tolist() == wanted.tolist()
                    assert (mb["loss_mask"].reshape(-1) == (wanted != -100)).all()
                    valid += int((wanted != -100).sum())
            assert {step.global_valid_tokens for step in steps} == {valid}
    assert seen > 200


def test_keys_of_a_microbatch_are_those_of_its_exchange_where_it_has_one(tmp_path: Path) -> None:
    with launch(job(tmp_path, strategy="vanilla"), "local") as session:
        step = next(session.client(1))
        assert len(step.encoder) == len(step)
        for mb, exchange in zip(step, step.encoder, strict=True):
            assert all(mb[key] is exchange[key] for key in exchange)
    with launch(job(tmp_path), "local") as session:
        step = next(session.client(0))
        assert len(step.encoder) == 1
        assert "pixel_values" not in step[0]
    plain = job(
        tmp_path,
        strategy="vanilla",
        sources=[ov.Source("text", text(tmp_path / "text", 64), transforms=[ov.Tokens()])],
    )
    with launch(plain, "local") as session:
        assert next(session.client(0)).encoder == ()


def test_a_rank_that_is_served_by_a_broadcast_encodes_its_own_images(tmp_path: Path) -> None:
    with launch(job(tmp_path, strategy="vanilla", place=GROUPS), "local") as session:
        steps = [next(client) for client in [session.client(rank) for rank in range(4)]]
    assert all(sum(len(e["item_ids"]) for e in step.encoder) for step in steps)
    assert [sum(len(e["recv_rows"]) for e in step.encoder) > 0 for step in steps] == [
        True,
        False,
        True,
        False,
    ]
    with pytest.raises(KeyError, match="rank 0 fetches"):
        steps[1][0]["tokens"]


def test_a_step_of_text_has_the_same_keys_with_nothing_in_them(tmp_path: Path) -> None:
    made = job(tmp_path, mixture={"photos": 0.0, "drawings": 0.0, "text": 1.0}, until=2)
    full = job(tmp_path, until=2)
    for runtime in ("local", WORKER_RUNTIME):
        shapes = [
            [
                {k: (d, s[1:]) for k, d, s, _ in e}
                for step in run(j, runtime).steps[1]
                for e in step[5]
            ]
            for j in (made, full)
        ]
        assert shapes[0] == shapes[1]
        assert shapes[0][0]["pixel_values"] == ("float32", (192,))
    empty = run(made, "local").steps[0][0][5][0]
    assert {
        k: s[0]
        for k, _, s, _ in empty
        if k not in ("send_splits", "recv_splits", "image_cu_seqlens")
    } == {
        k: 0 for k, _, _, _ in empty if k not in ("send_splits", "recv_splits", "image_cu_seqlens")
    }


@pytest.mark.parametrize("runtime", ["local", WORKER_RUNTIME])
def test_a_run_with_images_goes_on_from_a_state_in_the_middle_of_an_epoch(
    runtime: str, tmp_path: Path
) -> None:
    made = job(
        tmp_path,
        look_ahead=3,
        strategy=ov.strategy.vlm(per="microbatch"),
        place=ov.ClientPlaceTree(dp=2),
    )
    whole = run(made, "local")
    assert run(made, runtime, resume=whole.states[2]).steps == whole.behind(2)


@pytest.mark.parametrize("runtime", ["local", WORKER_RUNTIME])
def test_clients_that_connect_get_the_same_images(runtime: str, tmp_path: Path) -> None:
    made = job(tmp_path)
    with launch(made, runtime) as session:
        served = session.serve()
        clients = [ov.connect(served.address, rank, served.token) for rank in range(2)]
        got = [[written(step) for step in steps] for steps in zip(*clients, strict=True)]
        for client in clients:
            client.close()
    assert dict(enumerate(map(list, zip(*got, strict=True)))) == run(made, "local").steps


@pytest.mark.parametrize("place", ["loader", "constructor"])
def test_images_that_find_no_room_in_shared_memory_go_another_way(
    place: str, tmp_path: Path
) -> None:
    large = {"min_pixels": 150 * 150, "max_pixels": 200 * 200, "place": place}
    made = job(tmp_path, images=large, batch=ov.Batch(samples=12, context=1024), until=4)
    assert run(made, WORKER_RUNTIME, ring_bytes=2**16, **APART).steps == run(made, "local").steps


def marked(samples: ov.Popped) -> ov.Ragged:
    """A loader hook: other ids, but for the places of images."""
    values = samples.tokens.values.astype(np.int64)
    return ov.Ragged(
        np.where(values == PLACEHOLDER, values, values + samples.step), samples.tokens.offsets
    )


def counted(assembly: ov.Assembly) -> list[dict[str, np.ndarray]]:
    return [
        mb | {"whole": np.array([len(assembly.plan), assembly.bucket])} for mb in assembly.default()
    ]


def test_hooks_and_processes_of_transforms_leave_images_where_they_belong(tmp_path: Path) -> None:
    hooks = [ov.loader_do_plan(marked), ov.constructor_do_plan(counted)]
    apart = [
        ov.Source(s.name, s.uri, transforms=s.transforms, epochs=None, workers="processes")
        for s in sources(tmp_path)
    ]
    made, other = (
        job(tmp_path, hooks=hooks, broken=BROKEN),
        job(tmp_path, sources=apart, hooks=hooks, broken=BROKEN),
    )
    alone = run(made, "local")
    assert alone.error == ""
    assert run(made, WORKER_RUNTIME, **APART).steps == alone.steps
    assert run(other, "local").steps == alone.steps


# images that cannot be decoded

BROKEN = (1, 2, 3, 5, 9, 25, 27, 31, 45)


def broken_rows(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(q["source"], q["epoch"], q["file"], q["row"], q["part"]) for q in found]


@pytest.mark.parametrize("strategy", ["vanilla", "encoder_balance"])
def test_a_broken_image_has_zeros_for_pixels_and_is_named(strategy: str, tmp_path: Path) -> None:
    whole = run(job(tmp_path / "whole", strategy=strategy, until=8), "local")
    made = job(tmp_path / "cut", strategy=strategy, until=8, broken=BROKEN)
    with launch(made, "local") as session:
        clients = [session.client(rank) for rank in range(2)]
        got = [[next(client) for client in clients] for _ in range(8)]
        found = session.quarantine()
        plans = [session.plan(step) for step in range(8)]
        words = [session.explain(ov.SampleId(*row)).words for row in broken_rows(found)]
    assert all(q["reason"] in said for q, said in zip(found, words, strict=True))
    photos = [(p, i) for p in plans for i in range(len(p)) if p.names[p.source[i]] == "photos"]
    seen = [(p, i) for p, i in photos if 24 * p.file[i] + p.row[i] in BROKEN]
    assert len(seen) >= 3
    assert sorted(broken_rows(found)) == sorted(tuple(p.sample_id(i)) for p, i in seen)
    assert all(
        "image 0: " in q["reason"] and "JPEG" in q["reason"] and q["path"].endswith(".parquet")
        for q in found
    )
    for rank in range(2):
        for before, after in zip(
            whole.steps[rank], [written(steps[rank]) for steps in got], strict=True
        ):
            shapes = [
                [[(k, d, s) for k, d, s, _ in part] for part in step[i]]
                for step in (before, after)
                for i in (3, 5)
            ]
            assert shapes[:2] == shapes[2:]  # whatever is missing, nothing moves
            assert before[:3] == after[:3]
    for p, i in seen:
        check_one(p, i, got[p.step], found)


def check_one(plan: LoadingPlan, i: int, steps: list[ov.Step], found: list[dict[str, Any]]) -> None:
    encoder, main = plan.module("encoder"), plan.main
    item = int(np.flatnonzero(encoder.sample == i)[0])
    rank, slot = int(encoder.bucket[item]), int(encoder.microbatch[item])
    exchange = steps[rank].encoder[slot]
    at = exchange["item_ids"].tolist().index(item)
    a, b = exchange["image_cu_seqlens"][at : at + 2].tolist()
    assert b > a
    assert not exchange["pixel_values"][a:b].any()
    assert (
        exchange["pixel_values"][np.r_[0:a, b : len(exchange["pixel_values"])]].any()
        or len(exchange["item_ids"]) == 1
    )
    node = int(np.flatnonzero(main.sample == i)[0])
    home = int(main.bucket[node])
    mb, doc = steps[home][int(main.microbatch[node])], int(main.slot[node])
    first, end = mb["cu_seqlens_padded"][doc : doc + 2].tolist()
    assert mb.samples[doc].sample == plan.sample_id(i)
    masked = not mb["loss_mask"][first:end].any() and (mb["labels"][first:end] == -100).all()
    assert masked == (home == rank)
    told = next(q["reason"] for q in found if (q["file"], q["row"]) == (plan.file[i], plan.row[i]))
    assert ("excluded from the loss" in told) == masked


def test_what_is_masked_and_told_is_the_same_on_every_runtime(tmp_path: Path) -> None:
    made = job(tmp_path, strategy="vlm_hybrid", place=GROUPS, broken=tuple(range(0, 48, 5)))
    alone = run(made, "local")
    assert len(alone.quarantine) > 3
    assert in_simulation(made, 8) == alone.steps
    assert [q.reason for q in ov.simulate(made, seed=9).quarantine] == [
        q["reason"] for q in alone.quarantine
    ]
    with launch(made, **APART) as session:
        apart = play(session)
        assert apart.steps == alone.steps
        assert apart.states == alone.states  # what was heard late is in no state
        assert (
            until(
                lambda: (
                    session.quarantine()
                    if len(session.quarantine()) == len(alone.quarantine)
                    else None
                )
            )
            == alone.quarantine
        )


def test_who_looks_on_does_not_change_what_is_masked(tmp_path: Path) -> None:
    made = job(tmp_path, strategy="vanilla", place=GROUPS, broken=tuple(range(48)))
    everyone = run(made, "local")
    with launch(made, "local") as session:
        assert play(session, ranks=[0]).steps[0] == everyone.steps[0]


def test_broken_images_do_not_count_as_bad_rows(tmp_path: Path) -> None:
    made = job(tmp_path, broken=tuple(range(48)))
    few = [
        ov.Source(s.name, s.uri, transforms=s.transforms, epochs=None, max_bad=1)
        for s in made.sources
    ]
    found = run(job(tmp_path, broken=tuple(range(48)), sources=few), "local")
    assert found.error == ""
    assert len(found.quarantine) > 1
    assert all(sum(state["counts"]["quarantined"].values()) == 0 for state in found.states)


# what cannot be


def test_a_job_is_told_what_goes_with_images_and_what_does_not(tmp_path: Path) -> None:
    photos, drawings, _ = sources(tmp_path)
    other = ov.Source(
        "drawings",
        drawings.uri,
        transforms=[*drawings.transforms[:-1], ov.Images("png", **IMAGES | {"patch": 16})],
    )
    with pytest.raises(
        ov.JobError, match=r"the same patch .*, got 8 in 'photos', 16 in 'drawings'"
    ):
        job(tmp_path, sources=[photos, other])
    plain = job(
        tmp_path,
        sources=[
            ov.Source("text", text(tmp_path / "text", 64), transforms=[ov.Tokens()], epochs=None)
        ],
    )
    with launch(plain, "local") as session, pytest.raises(ov.JobError, match="started without"):
        session.add_source(photos)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (
            lambda b, p: (
                ov.DGraph.from_buffer(b, p)
                .mix()
                .select("tokens")
                .distribute("DP")
                .balance("none")
                .plan()
            ),
            "module 'encoder'",
        ),
        (
            lambda b, p: (
                (g := ov.DGraph.from_buffer(b, p).mix())
                .select("tokens")
                .distribute("DP")
                .balance("none")
                .plan(
                    encoder=g.select("image_patches", sources="photos")
                    .distribute("WORLD")
                    .balance("none")
                )
            ),
            "module 'encoder': expected the 1 images of sample",
        ),
    ],
)
def test_a_strategy_that_leaves_images_to_nobody_is_refused(
    strategy: Any, words: str, tmp_path: Path
) -> None:
    found = run(job(tmp_path, strategy=strategy), "local")
    assert words in found.error


def test_rows_go_to_one_rank_where_the_trainer_broadcasts_along_cp_and_else_to_slices(
    tmp_path: Path,
) -> None:
    place = ov.ClientPlaceTree(dp=2, cp=2)

    def fetched(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> LoadingPlan:
        drawn = ov.DGraph.from_buffer(buffer, place).mix()
        images = drawn.select("image_patches").distribute("WORLD").balance("none")
        return (
            drawn.select("tokens")
            .distribute("DP")
            .balance("none")
            .broadcast_at("CP")
            .plan(encoder=images)
        )

    for broadcast in (True, False):
        made = job(tmp_path, strategy=fetched, place=place)
        with launch(made, "local", broadcast=broadcast) as session:
            steps = [next(client) for client in [session.client(rank) for rank in range(4)]]
        held = [step for step in steps if "tokens" in step[0]]
        assert len(held) == (2 if broadcast else 4)
        for step in held:
            tokens = np.concatenate([mb["tokens"] for mb in step])
            rows = sum(len(e["image_token_index"]) for e in step.encoder)
            assert (tokens == PLACEHOLDER).sum() == rows > 0
