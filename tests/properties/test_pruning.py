"""A journal is pruned while jobs restart, go back and gain sources: whatever the order of that, it says where the stream stands."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import JournalError
from overlord.journal.log import read_all
from overlord.messages import AddSource, StreamState
from overlord.planner.events import widened
from overlord.recovery.checkpoint import Entry, Interval, plan, snapshot
from overlord.recovery.replay import Recovered
from overlord.runtime import journalling
from overlord.runtime.journalling import Journal, entries
from tests.journals import Memory
from tests.laws import examples

OFTEN = Interval(ratio=2, most_plans=3)
SEGMENT_BYTES = 400


def start(n: int) -> StreamState:
    return StreamState(step=0, cursors=np.zeros((n, 6), np.int64), owed=(0,) * n, active=(True,) * n)


def digest(step: int) -> str:
    return f"{step:032x}"


class Writing:
    """A job that plans and takes steps; what its journal must say is kept beside it."""

    def __init__(self, whole: bool):
        self.place, self.names, self.taken = Memory(whole), ["s0", "s1"], -1
        self.states = {-1: start(2)}  # behind each step
        self.journal = Journal(self.place, "demo", None, OFTEN)
        self.journal.begin(self.states[-1], self.blueprint)

    @property
    def blueprint(self) -> Any:
        return SimpleNamespace(job=SimpleNamespace(names=tuple(self.names), place="tree"), fingerprint={"draw": "exact-1"})

    def plan(self, n: int) -> None:
        for _ in range(n):
            step = max(self.states) + 1
            before = widened(self.states[step - 1], len(self.names))
            after = replace(before, step=step + 1, cursors=before.cursors + step % 3)
            self.states[step] = after
            made: Any = SimpleNamespace(plan=SimpleNamespace(step=step), after=after, digest=digest(step), skipped=False)
            self.journal.planned([made], self.taken)

    def take(self, n: int) -> None:
        """So many steps more, of those that were planned; another plan says so."""
        self.taken = min(self.taken + n, max(self.states))
        self.plan(1)

    def restart(self, n: int) -> None:
        """Another process opens it. What was planned and not taken comes again, as it was."""
        self.journal.close(self.taken)
        self.journal, found = Journal.resumed(self.place, "demo")
        self.journal._interval = OFTEN
        assert found.acked == self.taken
        self.journal.begin(found.state(found.acked), self.blueprint)

    def rewind(self, n: int) -> None:
        """To a state that was saved, however old."""
        step = max(-1, self.taken - 3 * n)
        self.states = {behind: state for behind, state in self.states.items() if behind <= step}
        self.taken, self.names = step, self.names[: len(self.states[step].active)]
        self.journal.rewound(self.states[step], self.blueprint)

    def join(self, n: int) -> None:
        self.names.append(name := f"s{len(self.names)}")
        self.journal.joined(AddSource(max(self.states) + 1, name, f"fingerprint of {name}"), self.blueprint)

    def check(self) -> None:
        found = Recovered.of(entries(read_all(self.place.copy())), checking=True)
        assert found.names == tuple(self.names)
        assert found.next_step == max(self.states) + 1
        oldest = min(found.snapshots) - 1
        assert oldest <= self.taken
        for step in (step for step in self.states if step >= oldest):
            assert np.array_equal(found.bare(step).cursors, self.states[step].cursors)


ACTIONS = st.tuples(st.sampled_from(("plan", "take", "take", "take", "restart", "rewind", "join")), st.integers(1, 8))


@given(st.lists(ACTIONS, max_size=25), st.booleans())
@examples(150)
def test_whatever_was_pruned_the_rest_says_where_the_stream_stands(script: list[tuple[str, int]], whole: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journalling, "SEGMENT_BYTES", SEGMENT_BYTES)
        job = Writing(whole)
        for action, n in script:
            getattr(job, action)(n)
            job.check()


def test_a_source_that_joins_a_job_that_was_restarted_leaves_a_journal_that_can_be_read() -> None:
    """The next snapshot began no segment, though the one it stood in had none: what it was a change of had been pruned."""
    job = Writing(whole=False)
    job.take(5)
    job.restart(1)
    job.join(1)
    for _ in range(8):
        job.take(3)
        job.check()


@pytest.mark.parametrize("whole", [False, True])
def test_a_job_that_went_back_and_then_on_leaves_a_journal_that_can_be_read(whole: bool) -> None:
    """Of what was planned before it went back, steps of higher numbers outlived the snapshot they were changes of."""
    job = Writing(whole)
    for _ in range(6):
        job.take(5)
        job.restart(1)
    job.rewind(4)
    for _ in range(20):
        job.take(3)
        job.check()


def test_plans_of_which_no_snapshot_is_left_at_all_are_no_journal() -> None:
    first = start(1)
    made: Any = SimpleNamespace(plan=SimpleNamespace(step=0), after=replace(first, step=1), digest=digest(0), skipped=False)
    found: Entry = plan(made, first, -1)
    with pytest.raises(JournalError, match="wanted a snapshot before the plan of step 0, or behind it, found none"):
        Recovered.of([found])
    assert not Recovered.of([found, snapshot(made.after, 0)]).empty
