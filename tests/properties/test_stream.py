"""The one stream: what is delivered equals the reference, on every runtime, whatever the options,
timing and restarts.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.hashing import digest
from overlord.messages.data import StepInfo
from tests.laws import examples
from tests.reference import reference_stream
from tests.worlds import World, folder, some_steps, worlds

Sample = tuple[tuple[str, int, int, int, int], list[int]]


def in_order(plan: ov.LoadingPlan | StepInfo) -> list[tuple[str, int, int, int, int]]:
    return [tuple(plan.sample_id(i)) for i in range(len(plan))]  # type: ignore[misc]


def delivered(steps: dict[int, list[ov.Step]], n: int) -> list[list[Sample]]:
    """Samples of every step as they lie in the microbatches of all ranks, brought back to the order
    of the draw.
    """
    out = []
    for k in range(n):
        found = {}
        for rank in steps:
            for mb in steps[rank][k]:
                for piece in mb.samples:
                    tokens = mb["tokens"][piece.offset : piece.offset + piece.length].tolist()
                    assert tuple(piece.sample) not in found, "delivered twice"
                    found[tuple(piece.sample)] = tokens
        plan = steps[0][k].info
        assert set(found) == set(in_order(plan))
        out.append([(key, found[key]) for key in in_order(plan)])
    return out


def run(
    job: ov.Job, seed: int | None = None, steps: int | None = None, **options: Any
) -> tuple[dict[int, list[ov.Step]], Exception | None, list[Any], dict]:
    """A whole run: on the virtual clock with a seed, else on the local runtime."""
    if seed is not None:
        done = ov.simulate(job, seed=seed, steps=steps, check=True, **options)
        return (
            done.steps,
            done.error,
            [(job.names[q.source], q.epoch, q.file, q.row) for q in done.quarantine],
            done.end_state,
        )
    with ov.launch(job, check=True, stall_limit_s=60, **options) as session:
        clients = [session.client(r) for r in range(job.place.world_size)]
        got: dict[int, list[ov.Step]] = {r: [] for r in range(job.place.world_size)}
        error = None
        try:
            while steps is None or len(got[0]) < steps:
                for rank, client in enumerate(clients):
                    got[rank].append(next(client))
        except StopIteration:
            pass
        except ov.OverlordError as caught:
            error = caught
        bad = [(q["source"], q["epoch"], q["file"], q["row"]) for q in session.quarantine()]
        return got, error, bad, clients[0].state_dict()


def wanted(job: ov.Job) -> tuple[list[list[Sample]], bool, list[Any]]:
    steps: list[list[Sample]] = []
    bad: list[Any] = []
    try:
        for step in reference_stream(job, bad):
            steps.append(step)
    except ValueError:
        return steps, True, bad
    return steps, False, bad


def fingerprint(steps: dict[int, list[ov.Step]]) -> str:
    """Every byte of every array of every rank."""
    return digest(
        *(
            a
            for r in sorted(steps)
            for s in steps[r]
            for mb in s
            for k in sorted(mb)
            for a in (k, mb[k])
        )
    )


@given(worlds(), st.integers(0, 2**20))
@examples(150)
def test_the_simulated_stream_equals_the_reference(world: World, seed: int) -> None:
    with folder() as directory:
        job = world.job(directory)
        steps, broken, bad = wanted(job)
        got, error, quarantine, _ = run(job, seed)
        assert (error is not None) == broken, error
        assert delivered(got, len(got[0])) == steps
        if not broken:
            assert set(quarantine) <= set(bad)


@given(worlds(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))
@examples(25)
def test_the_local_stream_equals_the_reference(
    world: World, loaders: int, prefetch: int, workers: int
) -> None:
    with folder() as directory:
        job = world.job(directory)
        steps, broken, _ = wanted(job)
        got, error, _, _ = run(job, loaders={"s0": loaders}, prefetch=prefetch, workers=workers)
        assert (error is not None) == broken, error
        assert delivered(got, len(got[0])) == steps


@given(
    worlds(),
    st.lists(
        st.tuples(st.integers(0, 2**20), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4)),
        min_size=2,
        max_size=3,
    ),
)
@examples(45)
def test_no_option_and_no_timing_changes_a_byte(
    world: World, ways: list[tuple[int, int, int, int]]
) -> None:
    with folder() as directory:
        job = world.job(directory)
        prints = set()
        for seed, loaders, prefetch, read_ahead in ways:
            options = {
                "loaders": dict.fromkeys(job.names, loaders),
                "prefetch": prefetch,
                "read_ahead": read_ahead,
                "buffer_bytes": 1 + seed,
            }
            got, error, _, _ = run(job, seed, **options)
            prints.add((fingerprint(got), type(error)))
        assert len(prints) == 1


@given(worlds(), st.integers(0, 2**20), st.integers(1, 4))
@examples(40)
def test_restored_at_every_step_the_rest_is_identical_to_the_byte(
    world: World, seed: int, loaders: int
) -> None:
    with folder() as directory:
        job = world.job(directory)
        whole, error, _, _ = run(job, seed)
        for k in some_steps(len(whole[0]), seed):
            state = json.loads(json.dumps(state_after(job, whole[0][k])))
            rest, again, _, _ = run(job, seed + k, resume=state, loaders={"s0": loaders})
            assert fingerprint(rest) == fingerprint({r: s[k + 1 :] for r, s in whole.items()}), (
                f"restored after step {k}"
            )
            assert type(again) is type(error)


@given(worlds(), st.integers(0, 2**20), st.integers(1, 5))
@examples(40)
def test_another_mesh_gets_the_same_samples_in_every_step_also_after_a_restore(
    world: World, seed: int, dp: int
) -> None:
    with folder() as directory:
        job = world.job(directory)
        other = world.job(directory, place=ov.ClientPlaceTree(dp=dp))
        a, _, _, _ = run(job, seed)
        b, _, _, _ = run(other, seed + 1)
        assert delivered(a, len(a[0])) == delivered(b, len(b[0]))
        if len(a[0]) > 1:
            rest, _, _, _ = run(other, seed, resume=state_after(job, a[0][0]))
            assert delivered(rest, len(rest[0])) == delivered(a, len(a[0]))[1:]


@given(worlds(endless=False, batches="samples"), st.integers(0, 2**20))
@examples(50)
def test_within_an_epoch_every_row_lands_once_or_in_quarantine(world: World, seed: int) -> None:
    with folder() as directory:
        job = world.job(directory, until="all")
        got, error, quarantine, _ = run(job, seed)
        if error is not None:
            return
        seen: dict[tuple, int] = {}
        for step in delivered(got, len(got[0])):
            for key, _ in step:
                seen[key] = seen.get(key, 0) + 1
        assert set(seen.values()) <= {1}
        rows = {key[:4] for key in seen}
        assert not rows & set(quarantine)
        long: dict[str, list[int]] = {}
        list(reference_stream(job, long=long) if job.on_long == "drop" else ())
        for i, (format, n, files, _, epochs, _, extra) in enumerate(world.sources):
            share = -(-n // files)
            empty = (
                0 if format in ("dataset", "factory") else sum(k * share >= n for k in range(files))
            )  # each is one entry of the quarantine
            mine = [k for k in rows | set(quarantine) if k[0] == f"s{i}"]
            assert all(k[1] < (epochs or 0) for k in mine)
            if extra not in ("even", "odd"):
                dropped = len(long.get(f"s{i}", ())) if job.on_long == "drop" else 0
                assert len(mine) + dropped == (n + empty) * (epochs or 0)


def state_after(job: ov.Job, step: ov.Step) -> dict[str, Any]:
    from overlord.setup.prepared_job import Options, PreparedJob

    return PreparedJob(job, Options()).export(step.info.after)


def test_the_stream_does_not_depend_on_the_number_of_microbatches_a_rank_asked_for() -> None:
    """Place never changes the draw: strategies share the samples of every step."""
    world = World(
        5,
        (("parquet", 40, 2, 1.0, 1, True, ""),),
        (("until", "all"),),
        (("samples", 8), ("microbatches", 1), ("context", 64)),
        2,
    )
    with folder() as directory:
        sets = []
        for strategy in ("vanilla", "packed", "llm_balance"):
            got, _, _, _ = run(world.job(directory, strategy=strategy), 1)
            sets.append([sorted(k for k, _ in s) for s in delivered(got, len(got[0]))])
        assert sets[0] == sets[1] == sets[2]
        assert np.sum([len(s) for s in sets[0]]) == 40
