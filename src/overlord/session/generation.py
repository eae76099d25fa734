"""A generation of a session: everything that a rewind or a reshard replaces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from overlord.client.client import State, StepQueue
from overlord.errors import ActorLost, JournalError
from overlord.hashing import digest
from overlord.messages.control import SourceLost, StreamState
from overlord.planning.mixture import EventLog, lost_sources
from overlord.session.runtime import Runtime
from overlord.setup.prepared_job import PreparedJob
from overlord.transport.codec import decode_state


@dataclass(slots=True, eq=False)
class Generation:
    """A runtime at a start state, and the progress of every rank since then.

    A session swaps generations as one reference, under its lock. Rank-wise fields are guarded by
    the same lock. An added source replaces ``prepared``.
    """

    number: int
    prepared: PreparedJob
    runtime: Runtime
    start: StreamState
    mark: str  # digest of the state that began this generation; empty for the first one
    events: EventLog  # events that the state of some client may not hold yet
    lost_sources: dict[str, SourceLost]
    queues: dict[int, StepQueue] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)  # ranks whose clients loaded ``start``
    acked: dict[int, int] = field(default_factory=dict)  # rank -> last step it took
    acked_by_all: int = -1  # last step that all ranks took, as sent to the runtime
    last_state: State | None = None  # position of the client that closed last; None: one is open

    @classmethod
    def of(
        cls, number: int, prepared: PreparedJob, runtime: Runtime, start: StreamState, mark: str
    ) -> Generation:
        events = EventLog(prepared.given.feedback_lag)
        lost = {event.name: event for event in lost_sources(start.events)}
        return cls(number, prepared, runtime, start, mark, events, lost)

    def add_queue(self, rank: int, queue: StepQueue, *, joined: bool = True) -> None:
        self.queues[rank] = queue
        if joined:
            self.joined.add(rank)

    def remove(self, rank: int) -> None:
        """Remove the queue and the progress of a rank whose client is closed."""
        self.queues.pop(rank, None)
        self.joined.discard(rank)
        self.acked.pop(rank, None)

    @property
    def failed_for_good(self) -> bool:
        """Whether the job ended with the loss of a process or of the journal."""
        end = self.runtime.planner.finished
        return end is not None and isinstance(end.error, (ActorLost, JournalError))


def decoded(state: State) -> StreamState:
    return state if isinstance(state, StreamState) else decode_state(state)


def mark_of(prepared: PreparedJob, state: StreamState) -> str:
    """Return a digest of a state; equal states have equal digests, whatever their encoding.

    Reports are left out: the states of some ranks get the reports of a step before others do.
    """
    return digest(json.dumps(prepared.export(replace(state, reports=())), sort_keys=True))


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the values of the fields in which two exported states differ, as text.

    Reports are not compared. If the steps differ, only these are returned.
    """
    names = [n for n in sorted({*one, *other} - {"reports"}) if one.get(n) != other.get(n)]
    return {
        n: (f"{one.get(n)!s:.80}", f"{other.get(n)!s:.80}")
        for n in (["step"] if "step" in names else names)
    }
