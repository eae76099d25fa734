"""What a journal says: where the stream stands, what was planned, and the state behind every step
that anyone may go back to. Pure.
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
    report_of,
    with_report,
)
from overlord.messages.control import StreamState
from overlord.planning.events import Event, EventLog
from overlord.planning.state_json import fingerprint_in

NOT_A_RUN = (
    "it was written by another version of Overlord, or by something else: resume the "
    "trainers' state with a new journal"
)


@dataclass(slots=True)
class Recovered:
    """A journal's records, folded. Steps are meant as "behind step k": ``state(k)`` is where a
    stream goes on with step k + 1.
    """

    names: tuple[str, ...] = ()  # of the sources, those that joined last
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    place: str = ""
    acked: int = -1  # the last step that all ranks took
    next_step: int = 0  # the first that was never planned
    planned: dict[int, str] = field(
        default_factory=dict
    )  # digests, of the steps behind the oldest state that is kept
    empty: bool = True
    checking: bool = False  # every snapshot must be what the plans before it give
    # all states stay, also those before the step that all ranks took: for readers, who never prune
    keeping: bool = False
    _astray: Entry | None = (
        None  # the first that stands before any snapshot: the one it was a change of was pruned
    )
    _front: StreamState | None = None  # where checking stands
    _states: dict[int, StreamState] = field(
        default_factory=dict
    )  # snapshots by the step they are behind
    _entries: list[Entry] = field(
        default_factory=list
    )  # all since the oldest of them, which is the first

    @staticmethod
    def of(entries: Iterable[Entry], *, checking: bool = False, keeping: bool = False) -> Recovered:
        """From records in the order in which they were written; what cannot be is a
        ``JournalError`` that says where it lies.
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
                    f"expected a {entry.kind} of step {entry.number}, got what cannot be one: "
                    f"{type(error).__name__}: {error}"
                )
                raise JournalError(entry.where or "journal", what, NOT_A_RUN) from error
        if found.empty and (astray := found._astray) is not None:
            what = (
                f"expected a snapshot before the {astray.kind} of step {astray.number}, or "
                "behind it, got none"
            )
            raise JournalError(astray.where or "journal", what, NOT_A_RUN)
        return found

    def add(self, entry: Entry) -> None:
        """One record more. What does not fit is a ValueError, a TypeError or a KeyError.

        Pruning ends with the first segment that holds a step of a number that may be wanted. Where
        a job went back, or was restarted, that segment may be older than the snapshot that is
        wanted and newer than the one it follows. What comes before the first snapshot says nothing
        that is not in it, then.
        """
        if entry.kind in (SNAPSHOT, REWIND):
            self._add_snapshot(entry)
        elif self.empty and entry.kind in (PLAN, EVENT, REPORT, ACKED):
            self._astray = self._astray or entry
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
            self._front = self._front and _with(self._front, entry)
        elif entry.kind == ACKED:
            self.acked = max(self.acked, entry.number)
        elif entry.kind != BACK:
            raise ValueError(f"nothing is called {entry.kind!r} here")

    def _add_snapshot(self, entry: Entry) -> None:
        state = changed(None, entry.body)
        if state.step != entry.number:
            raise ValueError(f"the state is that of step {state.step}")
        if entry.kind == REWIND or self.empty:
            self.acked, self.next_step = (
                int(entry.body["acked"]),
                max(state.step, int(entry.body.get("floor", 0))),
            )
            self.planned, self._states, self._entries, self.empty = {}, {}, [], False
        elif state.step != self._planned_to + 1:
            raise ValueError(f"expected the state behind step {self._planned_to}")
        elif self._front is not None:
            _same(self._front, state)
        self._front = state if self.checking else None
        self._states[state.step - 1] = state
        self._entries.append(entry)
        self.acked = max(self.acked, int(entry.body["acked"]))

    def _add_plan(self, entry: Entry) -> None:
        step = entry.number
        if step != self._planned_to + 1 or entry.body["step"] != step + 1:
            raise ValueError(f"expected the plan of step {self._planned_to + 1}")
        if self._front is not None:
            self._front = changed(self._front, entry.body)
        self.planned[step] = str(entry.body["digest"])
        self._entries.append(entry)
        self.acked = max(self.acked, int(entry.body["acked"]))
        self.next_step = max(self.next_step, step + 1)
        self._let_go()

    @property
    def _planned_to(self) -> int:
        """The last step behind which there is a state."""
        return max([*list(self._states)[-1:], *list(self.planned)[-1:]])

    def _let_go(self) -> None:
        """Nothing is wanted of what lies before the newest snapshot that all ranks have passed: all
        that was said by then is in it.
        """
        passed = [] if self.keeping else [step for step in self._states if step <= self.acked]
        if len(passed) > 1:
            oldest = passed[-1]
            self._states = {step: state for step, state in self._states.items() if step >= oldest}
            self.planned = {step: digest for step, digest in self.planned.items() if step > oldest}
            self._entries = self._entries[self._index(oldest) :]

    def _index(self, behind: int) -> int:
        return next(
            k
            for k, e in enumerate(self._entries)
            if e.kind in (SNAPSHOT, REWIND) and e.number == behind + 1
        )

    @property
    def snapshots(self) -> list[int]:
        """Steps of the snapshots that are kept: each the next step of its state."""
        return sorted(behind + 1 for behind in self._states)

    @property
    def open_step(self) -> int:
        """The first step that has no plan since the last rewind: the newest state stands before
        it.
        """
        return self._planned_to + 1

    @property
    def events(self) -> list[Event]:
        """What people said since the oldest snapshot that is kept, also what came to pass and is in
        force no more.
        """
        return [event_of(entry) for entry in self._entries if entry.kind == EVENT]

    # states

    def state(self, step: int) -> StreamState:
        """The stream behind a step, with all that was said since: plans made from it are those that
        were made. Reports of later steps stay, too: what was accepted counts, whether or not
        trainers say it again.
        """
        bare = self.bare(step)
        said = EventLog(int(self.fingerprint.get("feedback_lag", 0)))
        for entry in self._entries:
            if entry.kind == EVENT:
                said.add(event_of(entry), bare.step)
            elif entry.kind == REPORT:
                said.report(report_of(entry), bare.step)
        return said.completed(bare, self.names, ahead=True)

    def bare(self, step: int) -> StreamState:
        """The state as the planner had it when it had planned that step."""
        base = max((behind for behind in self._states if behind <= step), default=None)
        if base is None or step > self._planned_to:
            kept = f"of steps {min(self._states)} to {self._planned_to}" if self._states else "none"
            raise PlanError(
                f"the journal has no state behind step {step}", step, f"those it keeps: {kept}"
            )
        state = self._states[base]
        for entry in self._entries[self._index(base) + 1 :]:
            if state.step > step:
                break
            state = _with(state, entry)
        return state

    def front(self) -> StreamState:
        """The state behind the last planned step, with the reports that came since: what the next
        plan is a change of.
        """
        last = max(self._states)
        state = self._states[last]
        for entry in self._entries[self._index(last) + 1 :]:
            state = _with(state, entry)
        return state

    @property
    def why(self) -> str:
        """Why the stream goes on behind the step it does."""
        if self.empty:
            return "the journal has no step yet"
        planned = f"steps up to {self.next_step - 1} were planned, and come again as they were"
        if self.acked < 0:
            return (
                f"no step was taken by all ranks; {planned}"
                if self.next_step
                else "no step was planned yet"
            )
        if self.acked + 1 == self.next_step:
            return (
                f"step {self.acked} is the last that all ranks took, and nothing was planned "
                "behind it"
            )
        return f"step {self.acked} is the last that all ranks took; {planned}"


def _with(state: StreamState, entry: Entry) -> StreamState:
    if entry.kind == PLAN:
        return changed(state, entry.body)
    return with_report(state, report_of(entry)) if entry.kind == REPORT else state


def _same(folded: StreamState, snapshot: StreamState) -> None:
    """A snapshot is a short cut, and leads where the plans do."""
    if (one := changes(None, folded)) != (other := changes(None, snapshot)):
        parts = [part for part in sorted({*one, *other}) if one.get(part) != other.get(part)]
        raise ValueError(f"it differs from what the plans before it give in {', '.join(parts)}")
