"""Bugs planted in the simulated world: each a small change to one method, and each must be found by
the history alone.

``python -m tests.simulation.mutants`` looks for the first seed that finds each, and prints the
table of ``docs/simulation.md``.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from overlord.client.remote_queue import RemoteStepQueue
from overlord.cluster import recovery, takeover
from overlord.cluster.constructor_worker import ConstructorWorker
from overlord.cluster.coordinator import Coordinator
from overlord.cluster.launcher import Launcher
from overlord.cluster.loader_worker import LoaderWorker
from overlord.cluster.placement import AttachedRanks
from overlord.cluster.plan_router import PlanHistory
from overlord.constructor.payload_gather import PayloadGatherer
from overlord.errors import ActorLost
from overlord.journal.applied_ids import AppliedIds
from overlord.journal.job_journal import JobJournal
from overlord.journal.replay import Recovered
from overlord.journal.write_ahead import AppendThread
from overlord.loader.loader import Loader
from overlord.messages.control import STRIDE, Cursor, Rollback
from overlord.messages.data import Announce, StepMessage, StepPayload
from overlord.planning.mixture import Mixture
from overlord.planning.planner import Planner
from overlord.serving.step_publisher import PublishedQueue
from overlord.session import resume
from overlord.session.events import UserEvents
from overlord.setup.prepared_job import PreparedJob
from tests.simulation.world.scenario import Scenario, draw
from tests.simulation.world.seed_run import Verdict, run_seed

Patch = tuple[
    Any, str, Callable[[Any], Any]
]  # (owner, name, what takes the place of what is there)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug. ``found_at``: the first seed, from 0 on, that found it when this was
    written.
    """

    name: str
    what: str
    patches: tuple[Patch, ...]
    found_at: int
    wants: Callable[[Scenario], bool] = lambda scenario: (
        True
    )  # seeds that can find it at all: others are not tried

    @contextmanager
    def planted(self) -> Iterator[None]:
        before = [(owner, name, owner.__dict__[name]) for owner, name, _ in self.patches]
        for owner, name, make in self.patches:
            setattr(owner, name, make(owner.__dict__[name]))
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    def run(self, seed: int) -> Verdict:
        with self.planted():
            return run_seed(seed)


def _journal(scenario: Scenario) -> bool:
    return scenario.journal


def _learns(scenario: Scenario) -> bool:
    return scenario.learns


def _drop_acks(real: Any) -> Any:
    def heard(self: ConstructorWorker, rank: int, step: int) -> None:
        if step % 5 != 3:
            real(self, rank, step)

    return heard


def _skip_write(real: Any) -> Any:
    def write(self: AppendThread, orders: Any) -> None:
        if self.appends % 4 == 2 and not any(order.rolls for order in orders):
            orders = [replace(order, records=()) for order in orders]
        real(self, orders)

    return write


def _send_again(real: Any) -> Any:
    def send_from(self: PublishedQueue, next_step: int) -> None:
        real(self, next_step - 1)

    return send_from


def _deliver_twice(real: Any) -> Any:
    def take_in(self: RemoteStepQueue, value: Any) -> None:
        if not isinstance(value, StepMessage) or value.info.step >= self._wanted:
            return real(self, value)
        kept, after, self._steps, self._next = self._steps, self._next, deque(), value.info.step
        real(self, value)
        self._steps, self._next = deque([*kept, *self._steps]), after
        return None

    return take_in


def _next_row(cursor: Cursor) -> Cursor:
    return cursor if cursor.row < 0 else cursor._replace(row=cursor.row + 1)


def _cursor_off_by_one(real: Any) -> Any:
    def loader_starts(self: PreparedJob, i: int, cursor: Cursor) -> Any:
        return real(self, i, _next_row(cursor) if i == 0 else cursor)

    return loader_starts


def _hear_the_past(real: Any) -> Any:
    def handle(self: Planner, event: Any) -> Any:
        if isinstance(event, Announce):
            event = replace(
                event, generation=self._generations[self._demand.source_of[event.loader]]
            )
        return real(self, event)

    return handle


def _lose_reports(real: Any) -> Any:
    def rollback(self: PlanHistory, names: Any) -> Any:
        return replace(real(self, names), reports=self._states[self.acked].reports)

    return rollback


def _lose_written(real: Any) -> Any:
    def state(self: Recovered, step: int) -> Any:
        return replace(real(self, step), reports=())

    return state


def _ignore_floor(real: Any) -> Any:
    def report(self: Mixture, report: Any) -> None:
        self.feedback.add(report, self._called)

    return report


def _skip_a_step(real: Any) -> Any:
    def begin(blueprint: Any, journal: Any, found: Recovered, allow: Any) -> Any:
        if not found.empty and found.acked + 1 < found.next_step - 1:
            found.acked += 1
        return real(blueprint, journal, found, allow)

    return begin


def _wrong_owner(real: Any) -> Any:
    def back(self: LoaderWorker, back: Rollback) -> Any:
        moved = tuple(replace(o, share=min(o.share + 1, o.shares - 1)) for o in back.openings)
        return real(self, replace(back, openings=moved, afresh=True))

    return back


def _no_way_back(real: Any) -> Any:
    """Loaders stay where they stand: what they sent and nobody has is not sent again."""

    def rollback(self: Loader, cursor: Cursor, generation: int) -> Any:
        told = real(self, cursor, generation)
        return told if told is None else told[len(told) // 2 :]

    return rollback


def _trust_the_front(real: Any) -> Any:
    def behind(found: Recovered, taken: Any) -> int:
        return max(found.acked, found.next_step - 1)

    return behind


def _want_one_more(real: Any) -> Any:
    def connect(self: RemoteStepQueue, timeout_s: float) -> None:
        if self._lost_at is not None and self._steps == type(self._steps)():
            self._next += 1
        real(self, timeout_s)

    return connect


def _half_a_step(real: Any) -> Any:
    """A constructor takes a step for complete when one of its loader workers has sent."""

    def plan(self: PayloadGatherer, placed: Any) -> Any:
        return real(
            self,
            replace(
                placed, origins=placed.origins[: max(1, len(placed.origins) - (self._recovery > 0))]
            ),
        )

    return plan


def _other_seed(real: Any) -> Any:
    """The planner that comes after one that was lost has forgotten what the sources owe each
    other.
    """

    def planner(self: Any, state: Any) -> Any:
        return real(self, replace(state, owed=tuple(reversed(state.owed))))

    return planner


def _forget_members(real: Any) -> Any:
    """A constructor that is started again is not told who takes part."""

    def served_by(self: Any, c: int) -> list[int]:
        return [rank for rank in real(self, c) if rank % 2 == 0]

    return served_by


def _hear_old_payload(real: Any) -> Any:
    def payload(self: PayloadGatherer, payload: StepPayload) -> Any:
        return real(
            self, replace(payload, generation=max(payload.generation, self._recovery * STRIDE))
        )

    return payload


def _placed_and_forgetful(real: Any) -> Any:
    def placed(self: PreparedJob, place: Any) -> PreparedJob:
        other = real(self, place)
        other.was_placed = True
        return other  # type: ignore[no-any-return]

    return placed


def _owes_nothing(real: Any) -> Any:
    """Under a new mesh the sources owe each other nothing."""

    def planner(self: PreparedJob, state: Any = None) -> Planner:
        if getattr(self, "was_placed", False) and state is not None:
            state = replace(state, owed=tuple(0 for _ in state.owed))
        return real(self, state)  # type: ignore[no-any-return]

    return planner


def _not_anew(real: Any) -> Any:
    def rewound(self: JobJournal, state: Any, blueprint: Any, floor: int = 0) -> None:
        self.write_start(state, blueprint)

    return rewound


def _unsaid(real: Any) -> Any:
    def said(self: Any, *given: Any) -> None:
        return None

    return said


def _lose_said(real: Any) -> Any:
    def state(self: Recovered, step: int) -> Any:
        return replace(real(self, step), events=self.bare(step).events)

    return state


def _reports_later(real: Any) -> Any:
    held: dict[int, Any] = {}

    def report_acks(self: ConstructorWorker, reports: Any = ()) -> None:
        before, held[id(self)] = held.get(id(self), ()), reports
        real(self, before)

    return report_acks


def _lose_with_ack(real: Any) -> Any:
    def send_ack(self: RemoteStepQueue, step: int) -> None:
        real(self, step)
        if self.connection_problem == "":
            self._sender.clear()

    return send_ack


def _take_for_heard(real: Any) -> Any:
    def ask(self: Launcher, method: str, *args: Any, **more: Any) -> Any:
        if method != "event":
            return real(self, method, *args, **more)
        coordinator = self._wait_for_coordinator(self._platform.now() + self._ask_s, self._ask_s)
        try:
            return self.control.get(self.control.call(coordinator, method, *args), self._ask_s)
        except ActorLost:
            return None

    return ask


def _always(real: Any) -> Any:
    def is_new(self: AppliedIds, event_id: Any) -> bool:
        return True

    return is_new


def _says(scenario: Scenario) -> bool:
    return bool(scenario.sayings)


def _says_to_planner(scenario: Scenario) -> bool:
    return bool(scenario.sayings) and scenario.journal


def _reshards(scenario: Scenario) -> bool:
    return any(fault.kind == "reshard" for fault in scenario.faults)


MUTANTS = (
    Mutant(
        "drop an ack",
        "a constructor host overhears every fifth step that a rank took",
        ((ConstructorWorker, "_acked", _drop_acks),),
        4,
    ),
    Mutant(
        "skip a journal write",
        "every fourth append is said to be durable and is not written",
        ((AppendThread, "_write", _skip_write),),
        1,
        _journal,
    ),
    Mutant(
        "promote without replay",
        "a new planner goes on behind the last planned step, not the last taken one",
        ((takeover, "last_acked", _trust_the_front),),
        21,
        _journal,
    ),
    Mutant(
        "reuse a generation",
        "going back raises no generation",
        ((recovery, "STRIDE", lambda real: 0),),
        4,
    ),
    Mutant(
        "deliver twice",
        "a client that comes again is sent the last step it has, and keeps it",
        (
            (PublishedQueue, "send_from", _send_again),
            (RemoteStepQueue, "_handle_message", _deliver_twice),
        ),
        10,
    ),
    Mutant(
        "cursor off by one",
        "a source is opened one row too far",
        ((PreparedJob, "loader_starts", _cursor_off_by_one),),
        1,
    ),
    Mutant(
        "hear what is over",
        "announcements of a generation that is over are taken for those of now",
        ((Planner, "handle", _hear_the_past),),
        12,
    ),
    Mutant(
        "lose an event on the way back",
        "reports that came since the state are not planned with again",
        ((PlanHistory, "rollback", _lose_reports),),
        3,
        _learns,
    ),
    Mutant(
        "lose an event on replay",
        "reports in the journal are not read",
        ((Recovered, "state", _lose_written),),
        50,
        lambda s: s.learns and s.journal,
    ),
    Mutant(
        "count a late report",
        "a report that comes too late is used when its step is planned again",
        ((Mixture, "report", _ignore_floor),),
        3,
        _learns,
    ),
    Mutant(
        "count a step before its reports",
        "a constructor host sends reports one message later than the steps that were taken after them",
        ((ConstructorWorker, "_report_acks", _reports_later),),
        104,
        _learns,
    ),
    Mutant(
        "restart one step too late",
        "a restarted job goes on behind the step after the last one that all took",
        ((resume, "_by_journal", _skip_a_step),),
        19,
        _journal,
    ),
    Mutant(
        "wrong owner after failover",
        "loaders that come back read their neighbour's share of the chunks",
        ((LoaderWorker, "_roll_back", _wrong_owner),),
        1,
    ),
    Mutant(
        "announce half of it again",
        "a loader that goes back says only the second half of what it had said",
        ((Loader, "rollback", _no_way_back),),
        1,
    ),
    Mutant(
        "ask one step too far",
        "a client that comes again asks for the step after the one it wants",
        ((RemoteStepQueue, "_connect", _want_one_more),),
        1,
    ),
    Mutant(
        "half a step is enough",
        "after a recovery a constructor builds without the payload of the last loader host",
        ((PayloadGatherer, "plan", _half_a_step),),
        1,
    ),
    Mutant(
        "forget what is owed",
        "planning again begins with the accounts of the sources mixed up",
        ((Coordinator, "_planner_at", _other_seed),),
        1,
    ),
    Mutant(
        "forget who takes part",
        "a constructor that was started again serves every other rank",
        ((AttachedRanks, "served_by", _forget_members),),
        6,
    ),
    Mutant(
        "hear old payload",
        "payload of a generation that is over is taken for that of now",
        ((PayloadGatherer, "payload", _hear_old_payload),),
        114,
        lambda s: s.options["shadows"] != "none",
    ),
    Mutant(
        "draw anew under another mesh",
        "behind a change of the mesh what sources owe each other is forgotten",
        ((PreparedJob, "placed", _placed_and_forgetful), (PreparedJob, "planner", _owes_nothing)),
        4,
        _reshards,
    ),
    Mutant(
        "keep the old mesh's journal",
        "a rewind or a change of the mesh is not written: whoever comes back reads the "
        "plans before it",
        ((JobJournal, "write_rewind", _not_anew),),
        4,
        lambda s: s.journal and any(fault.kind in ("reshard", "rewind") for fault in s.faults),
    ),
    Mutant(
        "save a state without what was said",
        "a change that people made is not in the states of steps that were planned before it",
        ((UserEvents, "note", _unsaid),),
        67,
        lambda s: (
            bool(s.sayings) and any(fault.kind in ("reshard", "rewind") for fault in s.faults)
        ),
    ),
    Mutant(
        "forget what was said on the way back",
        "when a part is lost, steps are planned again without what people changed since "
        "they were planned",
        ((PlanHistory, "applied", _unsaid),),
        29,
        _says,
    ),
    Mutant(
        "do what was said before it is written",
        "a change that people made takes effect, and is lost with the planner",
        ((JobJournal, "write_event", _unsaid),),
        323,
        _says_to_planner,
    ),
    Mutant(
        "forget what was said on replay",
        "changes that people made are not read from the journal",
        ((Recovered, "state", _lose_said),),
        323,
        _says_to_planner,
    ),
    Mutant(
        "take for heard what was only said",
        "a planner dies while it is told of a change, and the next one is not told of it",
        ((Launcher, "ask", _take_for_heard),),
        166,
        _says_to_planner,
    ),
    Mutant(
        "apply an event twice",
        "a coordinator does not look at the ids of events and reports that are sent again",
        ((AppliedIds, "is_new", _always),),
        3,
        lambda s: s.learns or _says_to_planner(s),
    ),
    Mutant(
        "lose a report with its ack",
        "a client forgets a report once it is sent, though its constructor host may die with it",
        ((RemoteStepQueue, "_send_ack", _lose_with_ack),),
        105,
        _learns,
    ),
)


def first_found(mutant: Mutant, seeds: Iterable[int]) -> tuple[int, int, str] | None:
    """The first seed that finds it, how many were tried, and what was said."""
    tried = 0
    for seed in seeds:
        if not mutant.wants(draw(seed)):
            continue
        tried += 1
        if found := mutant.run(seed).violations:
            return seed, tried, found[0]
    return None


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    chosen = [m for m in MUTANTS if not sys.argv[2:] or m.name in sys.argv[2:]]
    for mutant in chosen:
        print(f"{mutant.name}: {first_found(mutant, range(int(sys.argv[1])))}", flush=True)
