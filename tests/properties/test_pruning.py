"""A journal is pruned while jobs restart, go back and gain sources: whatever the order of that, it
says where the stream stands.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import JournalError
from overlord.journal import job_journal
from overlord.journal.checkpoint import REWIND, SNAPSHOT, Entry, Interval, plan, snapshot
from overlord.journal.job_journal import JobJournal, entries
from overlord.journal.log import read, read_all
from overlord.journal.record import Record
from overlord.journal.replay import Recovered
from overlord.journal.segments import read_segment
from overlord.messages.control import AddSource, EventId, StreamState
from overlord.planning.mixture import with_added_sources
from tests.internals import snapshot_every
from tests.journals import Memory
from tests.laws import examples

OFTEN = Interval(ratio=2, most_plans=3)
SEGMENT_BYTES = 400


def start(n: int) -> StreamState:
    return StreamState(
        step=0, cursors=np.zeros((n, 6), np.int64), owed=(0,) * n, active=(True,) * n
    )


def digest(step: int) -> str:
    return f"{step:032x}"


class Writing:
    """A job that plans and takes steps; what its journal must say is kept beside it."""

    def __init__(self, whole: bool):
        self.place, self.names, self.taken = Memory(whole), ["s0", "s1"], -1
        self.states = {-1: start(2)}  # behind each step
        self.old: set[str] = set()  # segments from before the job last went back
        self.journal = JobJournal(self.place, "demo", None, OFTEN)
        self.journal.write_start(self.states[-1], self.blueprint)

    @property
    def blueprint(self) -> Any:
        return SimpleNamespace(
            job=SimpleNamespace(
                names=tuple(self.names), place="tree", sync="step", model=None, stages=()
            ),
            fingerprint={"draw": "exact-1"},
        )

    def plan(self, n: int) -> None:
        for _ in range(n):
            step = max(self.states) + 1
            before = with_added_sources(self.states[step - 1], len(self.names))
            after = replace(before, step=step + 1, cursors=before.cursors + step % 3)
            self.states[step] = after
            made: Any = SimpleNamespace(
                plan=SimpleNamespace(step=step), after=after, digest=digest(step), skipped=False
            )
            self.journal.write_plans([made], self.taken)

    def take(self, n: int) -> None:
        """So many steps more, of those that were planned; another plan says so."""
        self.taken = min(self.taken + n, max(self.states))
        self.plan(1)

    def restart(self, n: int) -> None:
        """Another process opens it. What was planned and not taken comes again, as it was."""
        self.journal.close(self.taken)
        self.journal, found = JobJournal.resumed(self.place, "demo")
        snapshot_every(self.journal, OFTEN)
        assert found.acked == self.taken
        self.journal.write_start(found.state(found.acked), self.blueprint)

    def rewind(self, n: int) -> None:
        """To a state that was saved, however old."""
        self.old = set(self.place.files)
        step = max(-1, self.taken - 3 * n)
        self.states = {behind: state for behind, state in self.states.items() if behind <= step}
        self.taken, self.names = step, self.names[: len(self.states[step].active)]
        self.journal.write_rewind(self.states[step], self.blueprint)

    def die(self, n: int) -> None:
        """It goes back, and is killed before anything is removed."""
        self.place.remove = lambda names: None  # type: ignore[method-assign]
        self.rewind(n)
        del self.place.remove
        self.restart(n)
        self.old = set()  # they go with the next pruning

    def join(self, n: int) -> None:
        self.names.append(name := f"s{len(self.names)}")
        self.journal.write_added_source(
            AddSource(max(self.states) + 1, name, f"fingerprint of {name}"),
            self.blueprint,
            EventId("", "session", len(self.names)),
        )

    def check(self) -> None:
        found = Recovered.of(entries(read_all(self.place.copy())), checking=True)
        assert found.names == tuple(self.names)
        assert found.next_step == max(self.states) + 1
        oldest = min(found.snapshots) - 1
        assert oldest <= self.taken
        for step in (step for step in self.states if step >= oldest):
            assert np.array_equal(found.bare(step).cursors, self.states[step].cursors)
        self.check_what_is_kept()

    def check_what_is_kept(self) -> None:
        """No more than is needed: nothing from before the job went back, nothing before the newest
        snapshot that all ranks have passed. A store's objects by which writers were shut out stay,
        and say nothing.
        """
        reading = read(self.place.copy())
        assert [
            name
            for name in self.old & set(self.place.files)
            if not (self.place.whole and _opens(name, self.place))
        ] == []
        newest = max(
            part.ordinal for part in reading.parts for p in part.records if self.is_passed(p.record)
        )
        assert [part.name for part in reading.parts if part.ordinal < newest and part.records] == []

    def is_passed(self, record: Record) -> bool:
        return record.kind in (SNAPSHOT, REWIND) and record.number <= self.taken + 1


def _opens(name: str, place: Memory) -> bool:
    return read_segment(name, place.files[name]).opens


class Torn(Writing):
    """The same job in another process, whose next write gets to some byte and no further."""

    def __init__(self, job: Writing, cut: int):
        self.place, self.names, self.taken, self.states, self.old = (
            job.place.copy(),
            list(job.names),
            job.taken,
            dict(job.states),
            set(),
        )
        self.journal, _ = JobJournal.resumed(self.place, "demo")
        self.place.fault, self.place.stays, self._cut, self.size = self._tear, True, cut, 0

    def _tear(self, data: bytes) -> int:
        self.size = len(data)
        return self._cut


ACTIONS = st.tuples(
    st.sampled_from(("plan", "take", "take", "take", "restart", "rewind", "die", "join")),
    st.integers(1, 8),
)


@given(st.lists(ACTIONS, max_size=25), st.booleans())
@examples(150)
def test_whatever_was_pruned_the_rest_says_where_the_stream_stands(
    script: list[tuple[str, int]], whole: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_journal, "SEGMENT_BYTES", SEGMENT_BYTES)
        job = Writing(whole)
        for action, n in script:
            getattr(job, action)(n)
            job.check()


def test_a_source_that_joins_a_job_that_was_restarted_leaves_a_journal_that_can_be_read() -> None:
    """The next snapshot began no segment, though the one it stood in had none: what it was a change
    of had been pruned.
    """
    job = Writing(whole=False)
    job.take(5)
    job.restart(1)
    job.join(1)
    for _ in range(8):
        job.take(3)
        job.check()


@pytest.mark.parametrize("whole", [False, True])
def test_a_job_that_went_back_and_then_on_leaves_a_journal_that_can_be_read(whole: bool) -> None:
    """Of what was planned before it went back, steps of higher numbers outlived the snapshot they
    were changes of.
    """
    job = Writing(whole)
    for _ in range(6):
        job.take(5)
        job.restart(1)
    job.rewind(4)
    for _ in range(20):
        job.take(3)
        job.check()


@pytest.mark.parametrize("whole", [False, True])
def test_a_job_that_goes_far_back_keeps_nothing_of_what_was_before(whole: bool) -> None:
    """Its steps have lower numbers than those before: by numbers alone all would stay until they
    are passed again.
    """
    job = Writing(whole)
    for _ in range(20):
        job.take(5)
    job.rewind(20)
    assert len(job.place.files) == (2 if whole else 1)
    job.check()


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_job_that_went_back_was_killed_over_removing_goes_when_the_next_one_prunes(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_journal, "SEGMENT_BYTES", SEGMENT_BYTES)
    job = Writing(whole)
    for _ in range(20):
        job.take(5)
    before = set(job.place.files)
    job.die(20)
    assert before < set(job.place.files)
    job.check()
    for _ in range(5):
        job.take(3)
    job.old = before
    job.check()


def test_a_job_that_is_killed_while_it_writes_that_it_went_back_has_gone_back_or_not() -> None:
    """At every byte: what was before goes only with what takes its place."""
    job = Writing(whole=False)
    job.plan(20)
    job.take(15)
    cut, size, went = 0, 1, set[bool]()
    while cut <= size:
        torn = Torn(job, cut)
        with pytest.raises(JournalError, match="EIO"):
            torn.rewind(2)
        _, found = JobJournal.resumed(torn.place.copy(), "demo")
        went.add(found.acked == torn.taken)
        assert (found.acked, found.next_step) in (
            (job.taken, max(job.states) + 1),
            (torn.taken, torn.taken + 1),
        )
        cut, size = cut + 1, torn.size
    assert went == {False, True}


def test_plans_of_which_no_snapshot_is_left_at_all_are_no_journal() -> None:
    first = start(1)
    made: Any = SimpleNamespace(
        plan=SimpleNamespace(step=0), after=replace(first, step=1), digest=digest(0), skipped=False
    )
    found: Entry = plan(made, first, -1)
    with pytest.raises(
        JournalError, match="expected a snapshot before the plan of step 0, or after it, got none"
    ):
        Recovered.of([found])
    assert not Recovered.of([found, snapshot(made.after, 0)]).empty
