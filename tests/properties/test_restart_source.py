"""A source that is read anew from where the draw stands, as when its loaders move to another
worker: nobody may notice.

Sources are reopened at random moments, several times, in jobs with look-ahead, deferring, epochs,
several loaders, filters, bad rows, batches in tokens, sources that join, and data that breaks the
job. Steps, quarantine, counts and every state must be those of the run that nobody disturbed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import overlord as ov
from overlord.dryrun.virtual_run import Moved, Run
from overlord.loader.service import LoaderService
from overlord.mesh import Batch, ClientPlaceTree
from overlord.messages.control import (
    Attach,
    Consumed,
    Cursor,
    DropHeldSamples,
    PlannedStep,
    Refill,
    RestartLoader,
    RestartSource,
)
from overlord.messages.data import Announce, SampleBlock
from overlord.planning.planner import Planner
from overlord.planning.spec import PlannerSpec, SourceSpec
from overlord.planning.strategies import resolve
from overlord.setup.prepared_job import Options, PreparedJob
from tests.internals import loop_of, runtime_of
from tests.laws import examples
from tests.properties.test_combined import LAG, Scene, plain, scenes
from tests.properties.test_feedback import trainer
from tests.properties.test_stream import fingerprint
from tests.worlds import World, folder, worlds

Move = tuple[int, bool, int]  # source, whether in the middle of a plan, when

MOVES = st.lists(
    st.tuples(st.integers(0, 7), st.booleans(), st.integers(0, 60)), min_size=1, max_size=6
)


def moved(names: Any, moves: list[Move], pace: int) -> list[Moved]:
    """Moments spread over a run of about ``pace`` pieces of work."""
    return [
        Moved(names[i % len(names)], step=when // 6)
        if planned
        else Moved(names[i % len(names)], after=when * pace // 60)
        for i, planned, when in moves
    ]


def outcome(run: Run) -> tuple[Any, ...]:
    """All that a run gives and lists."""
    return (
        fingerprint(run.steps),
        repr(run.error),
        run.quarantine,
        {k: plain(s) for k, s in run.states.items()},
    )


def assert_unnoticed(
    job: ov.Job, moves: list[Move], seed: int, said: tuple[Any, ...] = (), **options: Any
) -> None:
    whole = ov.simulate(job, seed=seed, events=said, save=True, check=True, **options)
    names = [*job.names, *(e.source.name for e in said if hasattr(e, "source"))]
    pace = 12 * len(names) + 10 * len(whole.steps[0])
    again = ov.simulate(
        job, seed=seed, events=[*said, *moved(names, moves, pace)], save=True, check=True, **options
    )
    assert outcome(again) == outcome(whole)
    event(f"ended by {type(whole.error).__name__}")


@given(worlds(), MOVES, st.integers(0, 2**20), st.integers(1, 4))
@examples(30)
def test_a_source_may_be_read_anew_at_any_moment(
    world: World, moves: list[Move], seed: int, loaders: int
) -> None:
    with folder() as directory:
        job = world.job(directory)
        assert_unnoticed(
            job,
            moves,
            seed,
            loaders=dict.fromkeys(job.names, loaders),
            prefetch=1 + seed % 4,
            read_ahead=1 + seed % 3,
        )


@given(scenes(), MOVES)
@examples(25)
def test_also_in_a_job_that_uses_everything(scene: Scene, moves: list[Move]) -> None:
    with folder() as directory:
        job, _, said = scene.job(directory)
        options = {
            "prefetch": 1 + scene.salt % (LAG - 2),
            "loaders": dict.fromkeys(job.names, 1 + scene.salt % 3),
        }
        assert_unnoticed(job, moves, scene.salt, tuple(said), report=trainer(scene.salt), **options)


@given(scenes(), MOVES, st.integers(0, 100))
@examples(10)
def test_also_after_a_restart(scene: Scene, moves: list[Move], k: int) -> None:
    """What a restored state pulls again may be given back before, while and after it is pulled."""
    with folder() as directory:
        job, wider, said = scene.job(directory)
        say = trainer(scene.salt)
        whole = ov.simulate(
            job, seed=scene.salt, report=say, events=said, prefetch=LAG - 2, save=True
        )
        if not whole.states:
            return
        state = json.loads(json.dumps(list(whole.states.values())[k % len(whole.states)]))
        assert_unnoticed(wider, moves, scene.salt, resume=state, report=say, prefetch=LAG - 2)


# what breaks a job


class Breaking:
    """A factory's function: one shard ends in an error."""

    def __init__(self, rows: list[dict[str, Any]], shards: int):
        self.rows, self.shards = rows, shards

    def __call__(self, shard: int) -> Iterator[dict[str, Any]]:
        yield from self.rows[shard :: self.shards]
        if shard == self.shards - 1:
            raise OSError("the disk is on fire")


@given(
    worlds(),
    MOVES,
    st.integers(0, 2**20),
    st.integers(1, 3),
    st.integers(5, 60),
    st.booleans(),
    st.sampled_from(((), (("look_ahead", 3),), (("overflow", "defer"),))),
)
@examples(18)
def test_what_breaks_a_source_breaks_it_at_the_same_place(
    world: World,
    moves: list[Move],
    seed: int,
    loaders: int,
    rows: int,
    disk: bool,
    ahead: tuple[tuple[str, Any], ...],
) -> None:
    with folder() as directory:
        job = world.job(directory)
        made = [
            {"n": k, "tokens": [k, k] if disk or k < rows - 4 or k % 2 else []} for k in range(rows)
        ]
        broken: Any = (
            ov.Factory(Breaking(made, 3), shards=3, fingerprint="breaks") if disk else made
        )
        transforms = [ov.Tokens("tokens")]
        source = (
            ov.Source("bad", broken, transforms=transforms)
            if disk
            else ov.Source.from_dataset(
                "bad", broken, transforms=transforms, max_bad=2, shuffle=bool(seed % 2)
            )
        )
        fields = dict(ahead) if job.batch.samples else {}
        job = replace(
            job,
            sources=(*job.sources, source),
            until=job.until if job.until != "first" else "all",
            **fields,
        )
        if any(s.epochs is None for s in job.sources) and not isinstance(job.until, int):
            job = replace(job, until=40)
        assert_unnoticed(job, moves, seed, loaders=dict.fromkeys(job.names, loaders))


def test_an_epoch_without_samples_is_still_told_of_after_it_is_read_anew() -> None:
    rows = [{"n": 1, "tokens": [1, 2]} for _ in range(30)]
    sources = [
        ov.Source.from_dataset("none", rows, transforms=[ov.Filter(_none), ov.Tokens("tokens")]),
        ov.Source.from_dataset("some", rows, transforms=[ov.Tokens("tokens")]),
    ]
    job = ov.Job(
        name="empty",
        sources=sources,
        batch=ov.Batch(samples=4, context=8),
        place=ov.ClientPlaceTree(),
        slice_rows=5,
    )
    whole = ov.simulate(job, seed=1)
    assert "gave no sample" in str(whole.error)
    for after in range(12):
        assert outcome(ov.simulate(job, seed=1, events=[Moved("none", after)])) == outcome(whole)


def test_an_epoch_of_bad_rows_is_reported_with_the_last_reason_also_after_it_is_read_anew() -> None:
    good, bad = [{"tokens": [1, 2]}] * 30, [{"tokens": None}] * 30
    sources = [
        ov.Source.from_dataset(name, rows, transforms=[ov.Tokens()])
        for name, rows in (("none", bad), ("some", good))
    ]
    job = ov.Job(
        name="bad",
        sources=sources,
        batch=ov.Batch(samples=4, context=8),
        place=ov.ClientPlaceTree(),
        slice_rows=5,
    )
    whole = ov.simulate(job, seed=1)
    assert "dropped by a filter; the last: row" in str(whole.error)
    assert "tokens is null or missing" in str(whole.error)
    for after in range(12):
        assert outcome(ov.simulate(job, seed=1, events=[Moved("none", after)])) == outcome(whole)


def _none(columns: dict[str, Any]) -> list[bool]:
    return [False] * len(columns["n"])


# the planner alone


@dataclass
class Announcing:
    """A planner of one source with one chunk of samples 0, 1, 2 ..., and what was said to it."""

    planner: Planner
    generation: int = 0

    @staticmethod
    def of(**fields: Any) -> Announcing:
        source = SourceSpec(name="a", n_groups=1, epochs=1, max_bad=9)
        spec = PlannerSpec(
            sources=(source,),
            batch=Batch(samples=2, context=8),
            place=ClientPlaceTree(),
            strategy=resolve("vanilla"),
            schedule={"a": 1.0},
            prefetch=9,
            **fields,
        )
        made = Announcing(Planner(spec))
        made.planner.handle(Attach(0))
        return made

    def announce(self, first: int, stop: int, generation: int | None = None) -> list[Any]:
        n = stop - first
        rows, none = np.arange(first, stop), np.zeros(0, np.int64)
        found = SampleBlock(
            rows.astype(np.uint64),
            np.zeros(n, np.int64),
            rows,
            np.zeros(n, np.int32),
            {"tokens": np.ones(n, np.int64), "bytes": np.ones(n, np.int64)},
            none.astype(np.uint64),
            none,
            none,
            (),
        )
        mine = self.generation if generation is None else generation
        return self.planner.handle(Announce(0, 0, 0, 0, found, generation=mine))

    def reopen(self) -> list[Any]:
        self.generation += 1
        return self.planner.handle(RestartSource(0))


def test_a_draw_that_waits_asks_the_loader_that_begins_again() -> None:
    made = Announcing.of()
    made.announce(0, 1)
    opened, refill = made.reopen()
    assert opened == RestartLoader(0, Cursor(), 1, -1)
    assert refill == Refill(0, 2, 0), "as much as the draw lacks, though one sample had come"
    stages = [c for c in made.announce(0, 2) if isinstance(c, PlannedStep)]
    assert [s.plan.row.tolist() for s in stages] == [[0, 1]]


def test_a_loader_begins_again_behind_what_was_drawn_and_is_told_how_far_to_read_ahead() -> None:
    made = Announcing.of()
    made.announce(0, 3)
    assert made.reopen() == [
        RestartLoader(0, Cursor(0, 0, 0, 0, 1, 0), 1, 0),
        Refill(0, 0, 5),
        Refill(0, 2, 5),
    ]


def test_what_a_loader_of_before_says_is_not_heard() -> None:
    made = Announcing.of()
    made.announce(0, 2)
    made.reopen()
    made.reopen()
    assert made.announce(2, 8, generation=0) == made.announce(2, 8, generation=1) == []
    assert [c.plan.row.tolist() for c in made.announce(2, 4) if isinstance(c, PlannedStep)] == [
        [2, 3]
    ]


def test_held_payload_is_forgotten_and_only_where_there_is_some() -> None:
    made = Announcing.of(look_ahead=2)
    made.announce(0, 3)  # a step would look at four
    assert [type(c) for c in made.reopen()] == [RestartLoader, Refill]
    [stage, *_] = made.announce(0, 4)
    assert len(stage.kept) == 2
    forget, opened, *_ = made.reopen()
    assert (forget, opened) == (
        DropHeldSamples((0,)),
        RestartLoader(0, Cursor(0, 0, 0, 0, 1, 0), 2, 0),
    )
    again = [c for c in made.announce(2, 8) if isinstance(c, PlannedStep)]
    assert again[0].pops.tolist() == [4], "what was held is popped once more"
    assert again[0].doc.tolist() == [0, 1], "and numbered from the start, since nothing is held"


def test_a_job_that_has_ended_reads_nothing_anew() -> None:
    made = Announcing.of(until=1)
    made.announce(0, 2)
    assert made.planner.handle(Consumed(0, 0)) == []
    assert made.reopen() == []


# the loader side alone


class ByHand:
    """An executor whose work is done when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def submit(
        self,
        name: str,
        work: Any,
        done: Any,
        *,
        size: int = 1,
        urgent: bool = False,
        waits: bool = False,
    ) -> None:
        self.begun.append((work, done))

    def end(self) -> None:
        work, done = self.begun.pop(0)
        done(work(), None)


def test_a_reader_does_one_thing_at_a_time_though_its_loader_begins_again_and_what_was_under_way_leads_to_nothing() -> (
    None
):
    rows = [{"tokens": [k]} for k in range(20)]
    source = ov.Source.from_dataset("a", rows, transforms=[ov.Tokens("tokens")], shuffle=False)
    job = ov.Job(
        name="one",
        sources=[source],
        batch=ov.Batch(samples=4, context=8),
        place=ov.ClientPlaceTree(),
    )
    executor, said = ByHand(), list[Any]()
    loading = LoaderService(executor, said.extend)
    loading.open(*PreparedJob(job, Options()).loaders_for(0, Cursor())[0])

    def refill() -> list[Any]:
        return [loading.execute(read) for read in loading.execute(Refill(0, 2, 2))]

    refill()
    assert len(executor.begun) == 1
    for generation in (1, 2):
        loading.reopen(RestartLoader(0, Cursor(0, 0, 0, 0, 3 + generation, 0), generation))
        refill()
        assert len(executor.begun) == 1, "the first read is still under way"
    loading.reopen(RestartLoader(0, Cursor(0, 0, 0, 0, 6, 0), 3))
    executor.end()
    assert said == executor.begun == [], (
        "nothing is left of the loaders of before, nor of what they expected"
    )
    refill()
    executor.end()
    [evaluate] = said
    loading.execute(evaluate)
    executor.end()
    assert (said[1].generation, said[1].found.row.tolist()) == (3, [7]), "behind the last cursor"


# real threads and processes


def slowly(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.001)
    return row


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_on_the_local_runtime_work_under_way_does_not_disturb_what_begins_again(
    workers: str,
) -> None:
    """Slices that take a while are under way most of the time; two at once would meet in one
    reader, or in one pipe.
    """
    rows = [{"n": k, "tokens": [k % 97] * (k % 5 + 1)} for k in range(400)]
    sources = [
        ov.Source.from_dataset(
            f"s{i}",
            rows,
            transforms=[ov.Map(slowly, rows=True), ov.Tokens("tokens")],
            epochs=1,
            workers=workers,
        )
        for i in range(2)
    ]
    job = ov.Job(
        name="moves",
        sources=sources,
        batch=ov.Batch(samples=16, context=32),
        place=ov.ClientPlaceTree(),
        slice_rows=16,
        shuffle_chunks=2,
        look_ahead=2,
    )

    def digest(moving: bool) -> list[str]:
        with ov.launch(job, check=True, stall_limit_s=60) as session:
            found = []
            for step in session.client(0):
                found.append(step.plan_digest + fingerprint({0: [step]}))
                for k in range(step.step % 3 if moving else 0):
                    loop_of(session).call(
                        lambda k=k: runtime_of(session).event(RestartSource(k)), "the planner"
                    )  # type: ignore[misc]
            return found

    assert digest(True) == digest(False)
