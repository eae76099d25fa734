"""What a journal holds of a run: a snapshot and the plans since give the planner's state behind
every step, bit for bit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.journal.checkpoint import Interval, changed, changes, packed, snapshot, unpacked
from overlord.journal.job_journal import JobJournal, entries
from overlord.journal.log import read_all
from overlord.journal.record import Record
from overlord.journal.replay import Recovered
from overlord.journal.write_ahead import JournalStart
from overlord.messages.control import (
    AddSource,
    Cursor,
    EventId,
    PlannedStep,
    Report,
    SetMixture,
    Skip,
    StreamState,
)
from overlord.planning.mixture import EventLog
from overlord.session.session import Session
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from overlord.setup.state_json import state_to_json
from tests.internals import loop_of, runtime_of
from tests.journals import Memory
from tests.laws import examples
from tests.properties.test_feedback import Chaser, trainer
from tests.properties.test_look_ahead import Taste
from tests.worlds import World, folder, worlds

OFTEN = Interval(ratio=2, most_plans=4)


def text(state: StreamState) -> str:
    names = [f"s{i}" for i in range(len(state.active))]
    return json.dumps(state_to_json(state, "job", names, {}))


# numbers

whole = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200)


@given(
    st.integers(0, 5).flatmap(
        lambda n: st.lists(st.lists(whole, min_size=n, max_size=n), max_size=20)
    ),
    st.integers(0, 3),
)
def test_packed_numbers_come_back(rows: list[list[int]], columns: int) -> None:
    table = np.array(rows, np.int64).reshape(len(rows), len(rows[0]) if rows else columns)
    form, data = packed(table)
    assert np.array_equal(unpacked([form, data], len(table)), table)
    with pytest.raises(ValueError, match="bytes"):
        unpacked([form, data + b"x"], len(table))
    with pytest.raises(ValueError, match="forms"):
        unpacked([form + "z", data], len(table))


# states

cursors = st.lists(st.integers(-1, 2**40), min_size=6, max_size=6)
events = st.one_of(
    st.builds(lambda at, w: SetMixture(at, {"s0": w}), st.integers(0, 50), st.floats(0, 1e300)),
    st.builds(lambda steps: Skip(tuple(steps)), st.lists(st.integers(0, 50), max_size=5)),
)
reports = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 3), st.floats(-1e9, 1e9)), max_size=6
).map(
    lambda found: tuple(
        Report(s, r, {"loss": v}) for (s, r), v in sorted({(s, r): v for s, r, v in found}.items())
    )
)


@st.composite
def states(draw: st.DrawFn, n: int) -> StreamState:
    counts = {
        name: np.array(draw(st.lists(st.integers(0, 2**50), min_size=n, max_size=n)), np.int64)
        for name in ("samples", "tokens")
    }
    return StreamState(
        step=draw(st.integers(0, 2**40)),
        cursors=np.array([draw(cursors) for _ in range(n)], np.int64).reshape(n, 6),
        owed=tuple(
            draw(
                st.lists(
                    st.integers(-(2**70), 2**70) | st.integers(-(2**41), 2**41),
                    min_size=n,
                    max_size=n,
                )
            )
        ),
        active=tuple(draw(st.lists(st.booleans(), min_size=n, max_size=n))),
        events=tuple(draw(st.lists(events, max_size=3))),
        mix_step=draw(st.integers(0, 99)),
        mix_epoch=draw(st.integers(0, 9)),
        counts=draw(st.sampled_from(({}, counts))),
        ahead=tuple(
            np.array(draw(st.lists(st.integers(-1, 9), max_size=5)), np.int32) for _ in range(n)
        )
        if draw(st.booleans())
        else (),
        weights=tuple(draw(st.lists(st.floats(0, 1e300), min_size=n, max_size=n)))
        if draw(st.booleans())
        else (),
        schedule=draw(st.sampled_from((None, {"a": [1.5, 0.1]}, {"b": {"c": 1e-300}}))),
        reports=draw(reports),
    )


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.tuples(states(n), st.integers(0, 2).flatmap(lambda more: states(n + more)))
    )
)
def test_a_change_makes_the_state_behind_of_the_state_before_whatever_the_two_are(
    pair: tuple[StreamState, StreamState],
) -> None:
    before, after = pair
    for first in (before, None):
        made = changed(first, changes(first, after))
        assert text(made) == text(after)
        assert len(made.ahead) == len(after.ahead)
        assert made.cursors.dtype == after.cursors.dtype
        assert all(a.dtype == np.int32 for a in made.ahead)


def test_a_state_of_300_sources_takes_less_than_64_kib() -> None:
    n, rng = 300, np.random.default_rng(1)
    counts = {
        name: rng.integers(0, 2**40, n) for name in ("samples", "tokens", "quarantined", "dropped")
    }
    where = np.array([Cursor(3, 40_000, 200, 90_000, 2**40 + i, 2) for i in range(n)], np.int64)
    state = StreamState(
        step=10**7,
        cursors=where,
        owed=tuple(rng.integers(-(2**40), 2**40, n).tolist()),
        active=(True,) * n,
        counts=counts,
    )
    entry = snapshot(state, 10**7)
    assert len(Record.of(entry.kind, entry.number, entry.body).data) < 20_000


# runs


class Checked(JobJournal):
    """A journal that is read back after every write, and compared with what the planner had."""

    truth: dict[int, StreamState]
    log: EventLog
    wrong: list[str]
    names: tuple[str, ...]

    def start(self, post: Any) -> None:
        """It is read where it is written: in the event loop."""

    def write_start(self, state: StreamState, blueprint: PreparedJob) -> None:
        super().write_start(state, blueprint)
        self._anew(state, blueprint)
        self.wrong = []

    def write_rewind(self, state: StreamState, blueprint: PreparedJob, floor: int = 0) -> None:
        super().write_rewind(state, blueprint, floor)
        self._anew(state, blueprint)
        self.check()

    def _anew(self, state: StreamState, blueprint: PreparedJob) -> None:
        self.truth, self.log, self.names = (
            {state.step - 1: state},
            EventLog(blueprint.job.feedback_lag),
            tuple(blueprint.job.names),
        )

    def write_plans(self, stages: Any, taken: int | None) -> None:
        super().write_plans(stages, taken)
        self.truth |= {stage.plan.step: stage.after for stage in stages}
        self.check()

    def write_event(self, event: Any, event_id: EventId) -> None:
        super().write_event(event, event_id)
        if isinstance(event, (SetMixture, Skip)):
            self.log.add(event, lambda: 0)
            self.check()

    def write_added_source(
        self, event: AddSource, blueprint: PreparedJob, event_id: EventId
    ) -> None:
        super().write_added_source(event, blueprint, event_id)
        self.log.add(event, lambda: 0)
        self.names = tuple(blueprint.job.names)
        self.check()

    def write_report(self, report: Report, event_id: EventId) -> None:
        super().write_report(report, event_id)
        self.log.report(report, 0)

    def check(self) -> None:
        assert isinstance(self._storage, Memory)
        found = Recovered.of(entries(read_all(self._storage.copy())), checking=True)
        oldest = min(found.snapshots) - 1
        if found.next_step - 1 != max(self.truth):
            self.wrong.append(f"planned up to {found.next_step - 1}, expected {max(self.truth)}")
        if oldest > found.acked or len(found.snapshots) > 4:
            self.wrong.append(f"snapshots {found.snapshots} are kept, and {found.acked} was taken")
        for step, state in self.truth.items():
            if step >= oldest and text(found.bare(step)) != text(state):
                self.wrong.append(f"the state behind step {step} is another")
            wanted = self.log.completed(state, self.names, ahead=True)
            if step >= oldest and not self._pending and text(found.state(step)) != text(wanted):
                self.wrong.append(f"what was said since step {step} is other")


class Run:
    """A session on the local runtime with a journal in memory."""

    def __init__(self, job: ov.Job, place: Memory):
        place.hold()
        self.journal = Checked(place, job.name, None, OFTEN)
        self.session = Session(
            job, PreparedJob(job, Options(prefetch=2)), None, "local", JournalStart(self.journal)
        )

    def play(self, script: list[tuple[int, str]], extra: ov.Source, salt: int) -> None:
        """Take steps, and between them do what the script says."""
        say, saved, client = trainer(salt), list[dict[str, Any]](), self.session.client(0)
        for i in range(14):
            for action in [what for at, what in script if at == i]:
                self.act(action, extra, saved)
            try:
                step = next(client)
            except (StopIteration, ov.OverlordError):
                break
            saved.append(client.state_dict())
            if step.step > 0 and (said := say(0, step.step - 1)):
                client.report(step.step - 1, said)

    def act(self, action: str, extra: ov.Source, saved: list[dict[str, Any]]) -> None:
        session = self.session
        first = runtime_of(session).planner.open_step
        try:
            if action == "mix":
                session.set_mixture({"s0": 0.5, session.job.names[-1]: 2.0})
            elif action == "later":
                session.set_mixture({"s0": 3.0}, at=first + 2)
            elif action == "skip":
                session.skip([first + 1, first + 3])
            elif action == "add" and extra.name not in session.job.names:
                session.add_source(extra)
            elif action == "rewind" and saved:
                session.load_state_dict(saved[len(saved) // 2])
        except (ov.PlanError, ov.StateMismatch):  # the job has ended, or cannot have that
            pass


ACTIONS = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from(("mix", "later", "skip", "add", "rewind"))),
    max_size=6,
)
KINDS = st.sampled_from(("plain", "epoch", "ahead", "learns", "defer"))


def made(world: World, directory: str, kind: str) -> tuple[ov.Job, ov.Source]:
    world = replace(world, dp=1, sources=(*world.sources, ("jsonl", 25, 2, 0.75, 2, True, "even")))
    *sources, extra = world.job(directory).sources
    changes: dict[str, Any] = {"sources": sources}
    names = tuple(s.name for s in sources)
    if kind == "epoch":
        changes["mix_every"] = "epoch"
    elif kind == "ahead":
        changes |= {"look_ahead": 3, "mixture": Taste({s.name: s.weight for s in sources}, "whim")}
    elif kind == "learns":
        changes |= {"mixture": Chaser(names), "feedback_lag": 4}
    elif kind == "defer":
        changes["overflow"] = "defer"
    return world.job(directory, **changes), extra


@given(worlds(batches="samples"), KINDS, ACTIONS, st.integers(0, 2**20), st.booleans())
@examples(40)
def test_at_every_moment_the_records_give_the_states_that_the_planner_had(
    world: World, kind: str, script: list[tuple[int, str]], salt: int, whole: bool
) -> None:
    with folder() as directory:
        job, extra = made(world, directory, kind)
        run = Run(job, Memory(whole))
        with run.session:
            run.play(script, extra, salt)
        assert loop_of(run.session).broken is None
        assert run.journal.wrong == []
        assert len(run.journal.truth) > 1


@given(worlds(batches="samples"), KINDS)
@examples(10)
def test_nobody_acts_on_a_plan_that_is_not_written(world: World, kind: str) -> None:
    with folder() as directory:
        job, _ = made(world, directory, kind)
        place = Memory()
        session = Session(
            job,
            PreparedJob(job, Options(prefetch=2)),
            None,
            "local",
            JournalStart(JobJournal.fresh(place, job.name)),
        )
        early = []

        def look(stage: PlannedStep) -> None:
            if (
                Recovered.of(entries(read_all(place.copy()))).planned.get(stage.plan.step)
                != stage.digest
            ):
                early.append(stage.plan.step)

        runtime_of(session).on_stage.append(look)
        with session:
            steps = list(zip(range(8), session.client(0), strict=False))
            assert early == []
            assert len(runtime_of(session).plans) >= len(steps)
