"""Sources whose storage is given up and that leave: when that happens depends on the disk, what
follows from it on the log alone.

In random jobs a source cannot be read any more from some read on. The run is then repeated with
nothing broken and the event said, which the first one logged, under other timing, loaders and
prefetch: every step, state and quarantined row must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

import overlord as ov
from overlord.dryrun.virtual_run import Run
from overlord.errors import PlanError, StorageError
from overlord.messages.control import SourceLost
from overlord.planning.state_json import event_in, event_out
from overlord.setup import prepared_job
from overlord.sources.base import RawSlice
from overlord.sources.chunk_reader import ChunkReader
from tests.laws import examples
from tests.properties.test_combined import LAG, Scene, plain, scenes
from tests.properties.test_feedback import trainer
from tests.properties.test_stream import fingerprint
from tests.worlds import Rows, World, folder, worlds


@contextmanager
def failing(after: dict[str, int]) -> Iterator[None]:
    """Storage that gives so many slices of a source and then no more."""

    class Failing(ChunkReader):
        def slices(self, chunk: int, t: int, n: int) -> RawSlice:
            name = self.index.source
            if name in after:
                after[name] -= 1
                if after[name] < 0:
                    raise StorageError(name, "the disk is gone", "a file")
            return super().slices(chunk, t, n)

    with patch.object(prepared_job, "ChunkReader", Failing):
        yield


def leaving(job: ov.Job) -> ov.Job:
    until = "all" if job.until == "first" else job.until
    return replace(job, until=until, sources=[replace(s, on_lost="leave") for s in job.sources])


def log_of(run: Run) -> list[SourceLost]:
    return [e for e in map(event_in, run.end_state.get("events", ())) if isinstance(e, SourceLost)]


def outcome(run: Run) -> tuple[Any, ...]:
    return fingerprint(run.steps), repr(run.error), run.quarantine, plain(run.end_state)


def assert_function_of_the_log(
    job: ov.Job,
    after: dict[str, int],
    salt: int,
    said: tuple[Any, ...] = (),
    wider: ov.Job | None = None,
    **options: Any,
) -> None:
    with failing(after):
        live = ov.simulate(
            job,
            seed=salt,
            events=said,
            check=True,
            save=True,
            loaders=dict.fromkeys(job.names, 1 + salt % 3),
            **options,
        )
    log = log_of(live)
    assume(live.steps[0])
    assume(not isinstance(live.error, StorageError))  # the last one is not let go
    event(f"{len(log)} sources left")
    ways = {
        "loaders": dict.fromkeys(job.names, 1 + salt % 2),
        "read_ahead": 1 + salt % 3,
        **options,
    }
    replayed = ov.simulate(job, seed=salt + 1, events=[*said, *log], check=True, **ways)
    assert outcome(replayed) == outcome(live)
    for lost in log:
        taken = [
            p.sample.source
            for step in live.steps[0]
            if step.step >= lost.at
            for mb in step
            for p in mb.samples
        ]
        assert lost.name not in taken
    told = [
        k
        for k, state in live.states.items()
        if log and all(event_out(e) in state["events"] for e in log)
    ]
    for k in (
        told[:1] + told[1:][-2:-1]
    ):  # a state that was saved before is of a run in which nothing was lost yet
        with failing(
            {lost.name: 0 for lost in log if lost.at <= k + 1}
        ):  # nothing of them is read any more
            rest = ov.simulate(wider or job, seed=salt + 2, resume=live.states[k], **ways)
        assert fingerprint(rest.steps) == fingerprint(
            {rank: [s for s in steps if s.step > k] for rank, steps in live.steps.items()}
        )


@given(
    worlds(),
    st.dictionaries(st.integers(0, 3), st.integers(0, 20), min_size=1, max_size=2),
    st.integers(0, 2**20),
)
@examples(30)
def test_the_stream_is_a_function_of_the_log_and_not_of_when_storage_failed(
    world: World, after: dict[int, int], salt: int
) -> None:
    with folder() as directory:
        job = leaving(world.job(directory))
        failures = {job.names[i % len(job.names)]: n for i, n in after.items()}
        assert_function_of_the_log(job, failures, salt, prefetch=1 + salt % 4)


@given(scenes(), st.dictionaries(st.integers(0, 3), st.integers(0, 20), min_size=1, max_size=2))
@examples(20)
def test_also_in_a_job_that_uses_everything(scene: Scene, after: dict[int, int]) -> None:
    with folder() as directory:
        job, wider, said = scene.job(directory)
        job, wider = (
            leaving(job),
            replace(
                leaving(wider), sources=[*leaving(job).sources, *wider.sources[len(job.sources) :]]
            ),
        )
        failures = {job.names[i % len(job.names)]: n for i, n in after.items()}
        assert_function_of_the_log(
            job,
            failures,
            scene.salt,
            tuple(said),
            wider,
            report=trainer(scene.salt),
            prefetch=1 + scene.salt % (LAG - 2),
        )


# stories


def two(**changes: Any) -> ov.Job:
    sources = [
        ov.Source(
            name,
            Rows([{"tokens": [100 * k + j for j in range(5)]} for k in range(40)]),
            transforms=[ov.Tokens("tokens")],
            epochs=1,
            shuffle=False,
            on_lost="leave",
        )
        for name in ("a", "b")
    ]
    settings = {
        "name": "two",
        "sources": sources,
        "batch": ov.Batch(samples=4, context=64, microbatches=1),
        "slice_rows": 4,
    }
    return ov.Job(**{**settings, **changes})


def counts(run: Run) -> list[int]:
    return [sum(p.sample.source == "a" for mb in step for p in mb.samples) for step in run.steps[0]]


def test_a_source_that_leaves_gives_its_share_to_the_others() -> None:
    run = ov.simulate(two(), events=[SourceLost(3, "a", "the disk is gone")])
    assert run.error is None
    assert counts(run) == [2, 2, 2, *[0] * 9]  # b gives 40 samples: 6, and 4 a step
    assert run.end_state["active"] == {"a": False, "b": False}


@pytest.mark.parametrize("after", range(1, 6))
def test_a_step_that_was_begun_is_begun_anew_without_it(after: int) -> None:
    """Long samples in steps of few tokens: most draws give nothing at first, and charge the
    accounts all the same.
    """
    rows = [{"tokens": list(range(30 + k % 7))} for k in range(12)]
    every = {"transforms": [ov.Tokens("tokens")], "epochs": 1, "on_lost": "leave"}
    sources = [ov.Source(name, Rows(rows), weight=1.0 + k, **every) for k, name in enumerate("abc")]
    made = two(
        sources=sources,
        batch=ov.Batch(tokens=5, context=64, microbatches=1),
        slice_rows=1,
        shuffle_chunks=1,
    )
    with failing({"a": after}):
        live = ov.simulate(made, seed=after, read_ahead=1)
    [lost] = log_of(live)
    assert outcome(ov.simulate(made, events=[lost])) == outcome(live)


def test_steps_before_a_source_left_need_it_also_when_the_log_says_that_it_will() -> None:
    with failing({"a": 0}):
        run = ov.simulate(two(), events=[SourceLost(3, "a", "the disk is gone")])
    assert isinstance(run.error, StorageError)
    assert run.steps[0] == []


def test_what_look_ahead_had_passed_over_goes_with_its_source() -> None:
    """Else a run that is resumed would have to read it again."""
    rows = [{"tokens": list(range(1 + 7 * k % 50))} for k in range(60)]
    sources = [
        ov.Source(n, Rows(rows), transforms=[ov.Tokens("tokens")], epochs=1, on_lost="leave")
        for n in "ab"
    ]
    made = two(
        sources=sources,
        look_ahead=4,
        max_age=8,
        strategy="look_ahead_balance",
        batch=ov.Batch(samples=8, context=64, microbatches=1),
    )
    run = ov.simulate(made, events=[SourceLost(3, "a", "the disk is gone")], save=True)
    assert run.states[2]["ahead"].keys() == {"a", "b"}  # some were passed over
    assert "a" not in run.states[4]["ahead"]
    with failing({"a": 0}):
        rest = ov.simulate(made, resume=run.states[4])
    assert rest.error is None
    assert fingerprint(rest.steps) == fingerprint({0: run.steps[0][5:]})


def test_when_the_last_source_is_lost_the_job_ends_with_what_happened_to_it() -> None:
    with failing({"a": 3, "b": 6}):
        run = ov.simulate(two())
    assert isinstance(run.error, StorageError)
    assert run.error.source == "b"
    assert [e.name for e in log_of(run)] == ["a"]


def test_a_mixture_of_nothing_but_lost_sources_ends_the_job_with_what_happened_to_them() -> None:
    def only_a(step: int, feedback: object) -> dict[str, float]:
        return {"a": 1.0, "b": 1.0} if step < 5 else {"a": 1.0}

    run = ov.simulate(two(mixture=only_a), events=[SourceLost(3, "a", "the disk is gone")])
    assert isinstance(run.error, StorageError)
    assert "the disk is gone" in str(run.error)
    assert len(run.steps[0]) == 5


def test_a_source_that_must_not_leave_ends_the_job_also_where_another_could() -> None:
    made = two()
    made = replace(made, sources=[replace(made.sources[0], on_lost="fail"), made.sources[1]])
    with failing({"a": 3, "b": 3}):
        run = ov.simulate(made)
    assert isinstance(run.error, StorageError)
    assert run.error.source == "a"
    assert log_of(run) == []


def test_what_is_wrong_with_the_data_is_no_reason_to_leave() -> None:
    made = two()
    bad = ov.Source(
        "a",
        Rows([{"tokens": [-1]}] * 40),
        transforms=[ov.Tokens("tokens")],
        max_bad=3,
        on_lost="leave",
    )
    run = ov.simulate(replace(made, sources=[bad, made.sources[1]]))
    assert isinstance(run.error, ov.SourceError)
    assert not isinstance(run.error, StorageError)
    assert "consecutive rows could not be used" in str(run.error)


def test_an_event_of_an_unknown_source_or_of_a_planned_step_is_refused() -> None:
    with pytest.raises(PlanError, match="unknown source 'c'"):
        ov.simulate(two(), events=[SourceLost(3, "c", "")])


def test_a_job_that_ends_with_its_first_source_lets_none_leave() -> None:
    with pytest.raises(ov.JobError, match="for 'a', 'b'"):
        two(until="first")
    with pytest.raises(ov.JobError, match="on_lost: expected one of fail, leave, got 'go'"):
        ov.Source("a", "x.parquet", on_lost="go")
