"""Loaders that go back, in memory or by reading again, and standbys that take the place of others:
nobody may notice.

Refills, work, draws, parts that come late, acknowledgements and Backs come in any order; in the end
every sample was drawn once, with its payload, and what was listed and counted is what a run lists
and counts that nobody disturbed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import overlord as ov
from overlord.messages.control import Cursor
from overlord.setup.prepared_job import Options, PreparedJob
from tests.images import IMAGES, parquet
from tests.laws import examples
from tests.rollbacks import Drawing, HostByHand
from tests.worlds import World, folder, only_odd, worlds

MOST = 40  # samples that a source without end gives behind the last deed
ONE = ("go on", "go on", "refill", "work", "work", "hear", "draw", "arrive", "ack", "back", "again")
TWO = (*ONE, "kill", "kill")


def deeds(kinds: tuple[str, ...]) -> st.SearchStrategy[list[tuple[str, int]]]:
    """From a seed: drawn one by one, most of them would be like each other."""

    def made(seed: int, n: int) -> list[tuple[str, int]]:
        rng = random.Random(seed)
        return [(rng.choice(kinds), rng.randrange(2**16)) for _ in range(n)]

    return st.builds(made, st.integers(0, 2**32), st.integers(4, 50))


def act(run: Drawing, deed: str, k: int) -> None:
    match deed:
        case "go on":
            run.go_on(k % 9 + 1)
        case "refill":
            run.refill(k % 9, k % 23)
        case "work":
            run.work(k % 2, k // 2)
        case "hear":
            run.hear(k % 4 + 1)
        case "draw":
            run.draw(k % 11 + 1)
        case "arrive":
            run.arrive(k % 3 + 1)
        case "ack":
            run.ack(run.last - k % 4)
        case "back":
            run.back(run.last - k % 5, afresh=run_afresh(deed, k))
        case "again":
            run.say_again()
        case "kill":
            promote(run, k % 2, run.last - k % 5)


def run_afresh(deed: str, k: int) -> bool:
    return deed == "back" and k % 31 == 30


def promote(run: Drawing, dead: int, step: int) -> None:
    """A worker is gone: those that follow its loaders take their place, and a new one follows."""
    run.hosts[dead] = HostByHand(run.blueprint)
    run.home = dict.fromkeys(run.home, 1 - dead)
    run.back(step)


def assert_unnoticed(
    job: ov.Job, loaders: int, done: list[tuple[str, int]], *, hosts: int = 1
) -> None:
    blueprint, source = PreparedJob(job, Options()), len(done) % len(job.sources)
    endless = job.sources[source].epochs is None
    run = Drawing(blueprint, source, loaders, hosts=hosts)
    for o in run.openings(Cursor()) if hosts > 1 else ():
        run.hosts[1 - run.home[o.loader]].follow(o)
    for deed, k in done:
        act(run, deed, k)
    run.to_the_end(MOST if endless else 10**9)
    ids, bad, dropped, error = run.outcome()
    whole = Drawing(blueprint, source, 1, keeps=False)
    whole.to_the_end(len(ids) if endless else 10**9)
    wanted = whole.outcome()
    assert (ids, bad, error) == (wanted[0], wanted[1], wanted[3])
    assert dropped == wanted[2] or endless  # those of the last window depend on how far it was read
    for name, rows in run.payload.items():
        assert set(rows) <= set(whole.payload.get(name, rows)), name
    opened = sum(len(host.opened) for host in run.hosts)
    event(f"read again: {bool(opened)}")
    assert not opened or hosts > 1 or any(run_afresh(*deed) for deed in done), (
        "memory reaches to the last acknowledged step"
    )


@given(worlds(), deeds(ONE), st.integers(1, 4))
@examples(50)
def test_a_loader_that_rolls_back_says_and_gives_what_one_opened_there_would(
    world: World, done: list[Any], loaders: int
) -> None:
    with folder() as directory:
        assert_unnoticed(world.job(directory), loaders, done)


@given(worlds(), deeds(TWO), st.integers(1, 3))
@examples(40)
def test_a_standby_takes_the_place_of_the_one_it_follows(
    world: World, done: list[Any], loaders: int
) -> None:
    with folder() as directory:
        assert_unnoticed(world.job(directory), loaders, done, hosts=2)


def picky(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] % 5 == 2:
        raise ValueError(f"row {row['n']} is not to my liking")
    return row


@given(
    deeds(TWO),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 2),
    st.integers(20, 80),
    st.integers(1, 3),
)
@examples(40)
def test_failures_and_dropped_rows_of_a_window_of_many_blocks_are_told_once(
    done: list[Any], loaders: int, shuffle: bool, epochs: int, slice_rows: int, chunks: int
) -> None:
    rows = [{"n": k, "tokens": [k, k]} for k in range(200)]
    source = ov.Source.from_dataset(
        "a",
        rows,
        transforms=[ov.Filter(only_odd, rows=True), ov.Map(picky, rows=True), ov.Tokens()],
        shuffle=shuffle,
        epochs=epochs,
    )
    job = ov.Job(
        name="wide",
        sources=[source],
        batch=ov.Batch(samples=4, context=8),
        place=ov.ClientPlaceTree(),
        slice_rows=slice_rows,
        shuffle_chunks=chunks,
        chunk_bytes=2000,
    )
    assert_unnoticed(job, loaders, done, hosts=2)


# images


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> ov.Job:
    files = parquet(Path(tmp_path_factory.mktemp("photos")), 40)
    source = ov.Source("photos", files, transforms=[ov.Tokens(), ov.Images("images", **IMAGES)])
    return ov.Job(
        name="photos",
        sources=[source],
        batch=ov.Batch(samples=4, context=256),
        place=ov.ClientPlaceTree(),
        slice_rows=5,
    )


@given(deeds(TWO), st.integers(1, 3))
@examples(10)
def test_images_roll_back_with_their_documents(
    pictures: ov.Job, done: list[Any], loaders: int
) -> None:
    assert_unnoticed(pictures, loaders, done, hosts=2)


# what breaks


class Breaking:
    """A factory's function: one shard ends in an error."""

    def __init__(self, rows: int, shards: int):
        self.rows, self.shards = rows, shards

    def __call__(self, shard: int) -> Iterator[dict[str, Any]]:
        yield from ({"tokens": [shard, k]} for k in range(self.rows))
        if shard == self.shards - 1:
            raise OSError("the disk is on fire")


@given(deeds(TWO), st.integers(1, 3), st.integers(0, 30), st.booleans(), st.integers(1, 2))
@examples(30)
def test_a_failure_is_announced_again(
    done: list[Any], loaders: int, rows: int, shuffle: bool, hosts: int
) -> None:
    source = ov.Source(
        "bad",
        ov.Factory(Breaking(rows, 3), shards=3, fingerprint=f"{rows}"),
        transforms=[ov.Tokens()],
        shuffle=shuffle,
    )
    job = ov.Job(
        name="breaks",
        sources=[source],
        batch=ov.Batch(samples=4, context=8),
        place=ov.ClientPlaceTree(),
        slice_rows=4,
        shuffle_chunks=2,
    )
    assert_unnoticed(job, loaders, [d for d in done if hosts > 1 or d[0] != "kill"], hosts=hosts)
