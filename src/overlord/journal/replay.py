"""Replay of a journal, from its records to the states of the stream. Pure.

The result is the position of the stream, the planned steps, and the state after every step that a
rollback may return to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from overlord.errors import JournalError, PlanError
from overlord.journal.checkpoint import (
    ACKED,
    BACK,
    EVENT,
    JOB,
    PLAN,
    REPORT,
    REWIND,
    SNAPSHOT,
    Entry,
    changed,
    changes,
    event_of,
    ids_of,
    report_of,
    with_report,
)
from overlord.messages.control import EventId, StreamState
from overlord.planning.mixture import Event, EventLog
from overlord.planning.state_json import fingerprint_in

NOT_A_RUN = (
    "it was written by another version of Overlord, or by another program: resume the "
    "trainers' state with a new journal"
)


@dataclass(slots=True)
class Recovered:
    """The result of replaying a journal.

    ``state(k)`` is the state after step k: a stream continues from it with step k + 1.
    """

    names: tuple[str, ...] = ()  # of the sources; those added in mid-run are last
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    place: str = ""
    acked: int = -1  # the last step that all ranks acknowledged
    next_step: int = 0  # the first step that was never planned
    # Digests of the steps after the oldest state that is kept.
    planned: dict[int, str] = field(default_factory=dict)
    # the last applied event of each launch and origin since the last rewind
    applied: dict[tuple[str, str], EventId] = field(default_factory=dict)
    empty: bool = True
    checking: bool = False  # compare every snapshot with the state after the preceding plans
    # keep states before the last acknowledged step too, for readers of the journal
    keeping: bool = False
    # the first entry before any snapshot, if any: the snapshot that it followed was pruned
    orphan: Entry | None = None
    _front: StreamState | None = None  # the state that ``checking`` has reached
    _states: dict[int, StreamState] = field(default_factory=dict)  # snapshots by the step before
    _entries: list[Entry] = field(default_factory=list)  # the oldest snapshot and all later entries

    @staticmethod
    def of(entries: Iterable[Entry], *, checking: bool = False, keeping: bool = False) -> Recovered:
        """Replay entries in the order in which they were written.

        Raise ``JournalError`` with the position of an entry that does not fit.
        """
        found = Recovered(checking=checking, keeping=keeping)
        for entry in entries:
            try:
                found.add(entry)
            except (
                KeyError,
                TypeError,
                ValueError,
                AttributeError,
                IndexError,
                OverflowError,
            ) as error:
                what = (
                    f"expected a {entry.kind} of step {entry.number}, got another record: "
                    f"{type(error).__name__}: {error}"
                )
                raise JournalError(entry.where or "journal", what, NOT_A_RUN) from error
        if found.empty and (orphan := found.orphan) is not None:
            what = (
                f"expected a snapshot before the {orphan.kind} of step {orphan.number}, or "
                "after it, got none"
            )
            raise JournalError(orphan.where or "journal", what, NOT_A_RUN)
        return found

    def add(self, entry: Entry) -> None:
        """Replay one more entry; raise ValueError or another built-in error if it does not fit.

        Pruning stops at the first segment with a step number that may still be needed. After a
        rollback or a restart, that segment may begin before the oldest kept snapshot. Entries
        before the first snapshot are skipped, because the snapshot contains their effect.
        """
        if entry.kind in (SNAPSHOT, REWIND):
            self._add_snapshot(entry)
        elif self.empty and entry.kind in (PLAN, EVENT, REPORT, ACKED):
            self.orphan = self.orphan or entry
        elif entry.kind == PLAN:
            self._add_plan(entry)
        elif entry.kind == JOB:
            self.names, self.place = tuple(map(str, entry.body["names"])), str(entry.body["place"])
            self.fingerprint = fingerprint_in(
                {str(part): str(value) for part, value in entry.body["fingerprint"].items()},
                self.names,
            )
        elif entry.kind in (EVENT, REPORT):
            _ = event_of(entry) if entry.kind == EVENT else report_of(entry)
            self._entries.append(entry)
            self._add_ids(entry)
            self._front = self._front and _with(self._front, entry)
        elif entry.kind == ACKED:
            self.acked = max(self.acked, entry.number)
        elif entry.kind != BACK:
            raise ValueError(f"expected a known kind of record, got {entry.kind!r}")

    def _add_ids(self, entry: Entry) -> None:
        self.applied |= {(one.launch, one.origin): one for one in ids_of(entry)}

    def _add_snapshot(self, entry: Entry) -> None:
        state = changed(None, entry.body)
        if state.step != entry.number:
            raise ValueError(f"expected the state before step {entry.number}, got {state.step}")
        if entry.kind == REWIND or self.empty:
            self.acked, self.next_step = (
                int(entry.body["acked"]),
                max(state.step, int(entry.body.get("floor", 0))),
            )
            self.planned, self._states, self._entries, self.empty = {}, {}, [], False
            self.applied = {}
        elif state.step != self._planned_to + 1:
            raise ValueError(
                f"expected the state after step {self._planned_to}, got that of step "
                f"{state.step - 1}"
            )
        elif self._front is not None:
            _check_equal(self._front, state)
        self._front = state if self.checking else None
        self._states[state.step - 1] = state
        self._entries.append(entry)
        self._add_ids(entry)
        self.acked = max(self.acked, int(entry.body["acked"]))

    def _add_plan(self, entry: Entry) -> None:
        step = entry.number
        if step != self._planned_to + 1 or entry.body["step"] != step + 1:
            raise ValueError(f"expected the plan of step {self._planned_to + 1}, got step {step}")
        if self._front is not None:
            self._front = changed(self._front, entry.body)
        self.planned[step] = str(entry.body["digest"])
        self._entries.append(entry)
        self.acked = max(self.acked, int(entry.body["acked"]))
        self.next_step = max(self.next_step, step + 1)
        self._drop_passed()

    @property
    def _planned_to(self) -> int:
        """The last step after which the state can be restored."""
        return max([*list(self._states)[-1:], *list(self.planned)[-1:]])

    def _drop_passed(self) -> None:
        """Drop all entries before the newest snapshot that all ranks have passed.

        The snapshot contains their effect.
        """
        passed = [] if self.keeping else [step for step in self._states if step <= self.acked]
        if len(passed) > 1:
            oldest = passed[-1]
            self._states = {step: state for step, state in self._states.items() if step >= oldest}
            self.planned = {step: digest for step, digest in self.planned.items() if step > oldest}
            self._entries = self._entries[self._index(oldest) :]

    def _index(self, step: int) -> int:
        """Return the index of the snapshot after a step."""
        return next(
            k
            for k, e in enumerate(self._entries)
            if e.kind in (SNAPSHOT, REWIND) and e.number == step + 1
        )

    @property
    def snapshots(self) -> list[int]:
        """The step numbers of the kept snapshots: each is the next step of its state."""
        return sorted(step + 1 for step in self._states)

    @property
    def open_step(self) -> int:
        """The first step without a plan since the last rewind: the step of the newest state."""
        return self._planned_to + 1

    @property
    def events(self) -> list[Event]:
        """All events since the oldest kept snapshot, including those no longer in force."""
        return [event_of(entry) for entry in self._entries if entry.kind == EVENT]

    # states

    def state(self, step: int) -> StreamState:
        """Return the state after a step, with all later events, for planning the same plans again.

        It also has reports of later steps: an accepted report counts even if trainers do not send
        it again. Raise ``PlanError`` if the journal does not keep the state.
        """
        bare = self.bare(step)
        events = EventLog(int(self.fingerprint.get("feedback_lag", 0)))
        for entry in self._entries:
            if entry.kind == EVENT:
                events.add(event_of(entry), lambda: bare.step)
            elif entry.kind == REPORT:
                events.report(report_of(entry), bare.step)
        return events.completed(bare, self.names, ahead=True)

    def bare(self, step: int) -> StreamState:
        """Return the state after a step as the planner had it, without later events.

        Raise ``PlanError`` if the journal does not keep it.
        """
        base = max((after for after in self._states if after <= step), default=None)
        if base is None or step > self._planned_to:
            kept = f"of steps {min(self._states)} to {self._planned_to}" if self._states else "none"
            raise PlanError(
                f"expected a step whose state the journal keeps, got step {step}",
                step,
                f"choose one of the kept states: {kept}",
            )
        state = self._states[base]
        for entry in self._entries[self._index(base) + 1 :]:
            if state.step > step:
                break
            state = _with(state, entry)
        return state

    def front(self) -> StreamState:
        """Return the state after the last planned step, with later reports.

        The next plan is written as a change of this state.
        """
        last = max(self._states)
        state = self._states[last]
        for entry in self._entries[self._index(last) + 1 :]:
            state = _with(state, entry)
        return state

    @property
    def why(self) -> str:
        """The reason for the step at which the stream continues, as text for people."""
        if self.empty:
            return "the journal has no step yet"
        planned = f"steps up to {self.next_step - 1} were planned, and are replanned unchanged"
        if self.acked < 0:
            return (
                f"no step was taken by all ranks; {planned}"
                if self.next_step
                else "no step was planned yet"
            )
        if self.acked + 1 == self.next_step:
            return (
                f"step {self.acked} is the last that all ranks took, and no later step was planned"
            )
        return f"step {self.acked} is the last that all ranks took; {planned}"


def _with(state: StreamState, entry: Entry) -> StreamState:
    if entry.kind == PLAN:
        return changed(state, entry.body)
    return with_report(state, report_of(entry)) if entry.kind == REPORT else state


def _check_equal(folded: StreamState, snapshot: StreamState) -> None:
    """Raise ValueError unless a snapshot equals the state after the preceding plans."""
    if (one := changes(None, folded)) != (other := changes(None, snapshot)):
        differ = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
        raise ValueError(
            "expected a snapshot equal to the state after the preceding plans, got one that "
            f"differs in {', '.join(differ)}"
        )
