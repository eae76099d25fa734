"""The planner of a job, a pure state machine: it turns events into plans and loader requests.

A step is planned when the prefetch window is open and the samples of its draw are known. No other
condition delays a plan. Every input that changes the stream is an event with its first step, kept
in the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.checks import describe_error, did_you_mean, where_raised
from overlord.errors import OverlordError, PlanError
from overlord.messages.control import (
    AddSource,
    Attach,
    Consumed,
    Cursor,
    Detach,
    DropHeldSamples,
    EndOfJob,
    PlannedStep,
    Refill,
    Report,
    RestartLoader,
    RestartSource,
    SetMixture,
    SetReadAhead,
    Skip,
    SourceLost,
    StreamState,
)
from overlord.messages.data import Announce, DecodeFailures
from overlord.planning.budgets import check_begun, fronts_of, is_reached, limited
from overlord.planning.chunks import place_chunks
from overlord.planning.draw import Front, LoaderRequests, MissingSamples, RankProgress, lacking
from overlord.planning.look_ahead import LookAheadPool, place_chosen
from overlord.planning.mixture import (
    Mixture,
    added_sources,
    checked_change,
    lost_sources,
    skipped,
    with_added_sources,
)
from overlord.planning.selection import counts_of
from overlord.planning.spec import (
    DrawerByStep,
    Handover,
    Ledger,
    LostSources,
    NewSource,
    PlannerSpec,
    all_lost,
    initial_state,
    without_lost,
)
from overlord.planning.status import PlannerStatus, check_accounts, ready_buffer
from overlord.planning.step import PlacedStep, StepContext, place_drawn
from overlord.sample import Buffer

Command = Refill | PlannedStep | EndOfJob | DropHeldSamples | RestartLoader | SourceLost


class Planner:
    """The planner of a job: it plans steps from events and returns commands for loaders."""

    def __init__(
        self,
        spec: PlannerSpec,
        state: StreamState | None = None,
        *,
        generation: int = 0,
        floor: int = 0,
    ):
        """Start from ``state``; None: the state before step 0.

        ``generation``: the first generation of all loaders. ``floor``: the first step that was
        never planned. Steps before it are planned again, identically: no new event changes them.
        """
        self.spec, self.generation, self.floor = spec, generation, floor
        state = state or initial_state(spec)
        self._state = state
        self._streams = [
            s.stream(Cursor(*c)) for s, c in zip(spec.sources, state.cursors.tolist(), strict=True)
        ]
        self._demand = LoaderRequests(
            [s.loaders for s in spec.sources], spec.read_ahead, spec.ahead_of
        )
        # generation of the loaders of each source; restarting a source adds one
        self._generations = [generation] * len(spec.sources)
        self._drawers = DrawerByStep(spec)
        self._consumed = RankProgress()  # rank -> last step it took
        self._outstanding: list[int] = []  # planned steps that some rank has not taken
        self._waiting: dict[int, int] = {}  # source -> samples the blocked draw needs
        self._unmet: set[int] = set()  # those of them that can give more, but have fewer samples
        self._pool = (
            LookAheadPool(len(spec.sources), state.ahead)
            if spec.leaves_holes or any(map(len, state.ahead))
            else None
        )
        self._lost = LostSources(floor)
        self._finished: EndOfJob | None = None
        self._stop: EndOfJob | None = None  # end reported by a constructor that cannot build a step
        # end that the previous planner found; later events cannot move it
        self._ended: EndOfJob | None = None
        self._mixture = Mixture(
            spec.schedule,
            every=spec.mix_every,
            lag=spec.feedback_lag,
            takes_feedback=spec.takes_feedback,
            state=state,
            floor=floor,
            starts=spec.mixture_starts,
        )
        self._weights: list[float] = self._mixture.weights
        self.ledger = Ledger(state, len(spec.sources))

    def adopt(self, before: Planner) -> list[Command]:
        """Take over the progress of ``before``, which had planned beyond this planner's state.

        Taken over are the steps that ranks took, the ledger's lists, the counts of reports and the
        end of the job. Return the commands of the steps that are planned again.
        """
        other = before.handover()
        self._stop, self._ended = other.stop, other.ended
        self.ledger.adopt(other.ledger)
        self._mixture.feedback.adopt(other.feedback)
        self._consumed = RankProgress(
            (rank, max(step, self._state.step - 1)) for rank, step in other.taken.items()
        )
        return self._plan_ahead()

    def handover(self) -> Handover:
        """Return the state that a replacement of this planner takes over."""
        return Handover(
            self._stop, self.ended, self.ledger, self._mixture.feedback, dict(self._consumed)
        )

    # Queries: they change no plan.

    def state(self) -> StreamState:
        """Return the state after the last planned step."""
        return self._state

    @property
    def next_step(self) -> int:
        """The next step to plan."""
        return self._state.step

    @property
    def open_step(self) -> int:
        """The first step that an event can still change."""
        return max(self._state.step + self._lost.has_begun(self._state.step), self.floor)

    @property
    def finished(self) -> EndOfJob | None:
        """The end of the job; None until all steps before it are planned."""
        return self._finished

    @property
    def ended(self) -> EndOfJob | None:
        """The end of the job, even while steps before it are planned again; None if unknown."""
        return self._finished or self._ended

    @property
    def holds_over(self) -> bool:
        """Whether loaders may hold payload from one step to the next."""
        return self._pool is not None

    @property
    def taken(self) -> int | None:
        """The last step that every attached rank has taken; None if no rank is attached."""
        return self._consumed.slowest if self._consumed else None

    @property
    def weights(self) -> list[float]:
        """The weights of the latest draw, in source order; may be empty before the first draw."""
        return list(self._weights)

    @property
    def active(self) -> tuple[bool, ...]:
        """Whether each source still takes part, in source order; not if it ended or was lost."""
        return self._state.active

    @property
    def feedback(self) -> dict[str, int]:
        """Counts of received, used, late and pending reports."""
        return self._mixture.feedback.counts()

    @property
    def totals(self) -> Ledger:
        """The ledger, with the dropped rows and long documents that the draw has passed so far."""
        self.ledger.update_passed([s.passed for s in self._streams])
        return self.ledger

    def loader_position(self, loader: int) -> tuple[Cursor, int, Refill]:
        """Return the cursor, generation and last Refill of a loader, to start its standby."""
        source = self._demand.source_of[loader]
        cursor = Cursor(*self._state.cursors[source].tolist())
        return cursor, self._generations[source], self._demand.last_refill(loader)

    def loaders_of(self, source: int) -> range:
        """Return the numbers of a source's loaders."""
        return self._demand.of(source)

    def last_taken(self, rank: int) -> int:
        """Return the last step that a rank has taken; -1 if it is not attached.

        A rank that attaches counts as having taken every step planned before.
        """
        return self._consumed.get(rank, -1)

    def in_time(self, report: Report) -> bool:
        """Return whether a later plan will use the report; if not, it is late and dropped."""
        return self._mixture.in_time(report)

    def refuse_planned(self, step: int) -> None:
        """Raise ``PlanError`` unless an event can still change ``step``."""
        if step < self.open_step:
            raise PlanError(
                f"expected step {self.open_step} or a later one for an event, got step {step}, "
                "which is planned already",
                remedy="name a later step",
            )

    def shares(self, step: int | None = None) -> np.ndarray:
        """Return the share of every source in the latest draw, in source order; 0 if inactive.

        ``step``: return the shares of that later step, if the schedule and the events determine
        them already.
        """
        own = {s.name: s.weight for s in self.spec.sources}
        later = None if step is None else self._mixture.foreseen(self._state, step, own)
        weights = later or self._weights or [0.0] * len(own)
        wanted = np.where(self._state.active, weights, 0.0)
        return wanted / (wanted.sum() or 1.0)

    def summary_buffer(self) -> Buffer:
        """Return a buffer of all ready samples that no step has drawn, for experiments."""
        return ready_buffer(self._streams, self._pool, self._context())

    def lacking_sources(self) -> dict[str, int]:
        """Return the number of samples that the next step waits for, by source."""
        found = lacking(self._streams, self._waiting)
        return {self._streams[i].name: n for i, n in found.items()}

    def waiting_for(self) -> str:
        """Describe what blocks the next plan."""
        return self.status().waiting_for()

    def status(self) -> PlannerStatus:
        """Return the progress of planning, with the cause that blocks the next plan."""
        full = len(self._outstanding) >= self.spec.prefetch
        slow = min(self._consumed.items(), key=lambda r: r[1]) if self._consumed else None
        return PlannerStatus(
            step=self._state.step,
            finished=self._finished,
            lacking=self.lacking_sources(),
            slowest=slow if full else None,
            prefetch=self.spec.prefetch,
        )

    def check(self) -> None:
        """Assert the invariants of the planner, for tests."""
        for stream in self._streams:
            stream.check()
        check_accounts(self.spec, self._state)

    # events

    def handle(self, event: Any) -> list[Command]:
        """Apply an event and return the resulting commands, to be executed in order.

        Raise ``PlanError`` for an event of the user that cannot be applied; nothing has changed.
        """
        match event:
            case Announce():
                source = self._demand.source_of[event.loader]
                if event.generation != self._generations[source]:
                    return []
                self._demand.announced(
                    event.loader, len(event.found) if event.found is not None else 0
                )
                stream, group = self._streams[source], self._streams[source].group
                stream.add(event, event.loader - int(self._demand.first[source]))
                commands: list[Command] = (
                    [*self._demand.move_horizon(source, stream.group)]
                    if stream.group > group
                    else []
                )
                if source not in self._waiting:
                    return commands  # no blocked draw needs samples of this source
                if self._is_met(source):
                    self._unmet.discard(source)
                if self._unmet:
                    return commands + self._request_more(source)
                return commands + self._plan_ahead()
            case Consumed(rank=rank, step=step):
                self._consumed[rank] = max(step, self._consumed.get(rank, -1))
            case Attach(rank=rank):
                self._consumed.setdefault(rank, self._state.step - 1)
            case Detach(rank=rank):
                self._consumed.pop(rank, None)
            case EndOfJob(step=step):  # a constructor cannot build this step
                if self._finished is not None and self._finished.step <= step:
                    return []
                return self._end_here(event)
            case SetMixture() | Skip():
                self._add_event(event)
            case NewSource():
                self._add_source(event)
            case SourceLost():
                self._apply_loss(event)
            case RestartSource(source=source):
                return self._restart(source)
            case SetReadAhead(source=source, steps=steps):
                self.spec = replace(self.spec, ahead_of={**self.spec.ahead_of, source: steps})
                self._demand.set_read_ahead(source, steps)
                return []
            case Report():
                self._mixture.report(event)
                return []
            case DecodeFailures():
                self.ledger.add_decode_failures(event)
                return []
            case _:
                raise TypeError(f"planner: expected an event, got {type(event).__name__}")
        return self._plan_ahead()

    def _add_event(self, event: SetMixture | Skip) -> None:
        """Add an event of the user to the log, or raise ``PlanError``."""
        self.refuse_planned(
            event.at if isinstance(event, SetMixture) else min(event.steps, default=self.open_step)
        )
        if isinstance(event, SetMixture):
            event = checked_change(event, self.spec.names, self._state.events)
        if self._ended is None:
            self._state = replace(self._state, events=(*self._state.events, event))

    def _add_source(self, new: NewSource) -> None:
        """Append a source; the numbers, cursors and accounts of the other sources do not change."""
        at, state = new.event.at, self._state
        if ended := self.ended:
            raise PlanError(
                f"add_source: the job ends before step {ended.step}, so no step draws the source",
                remedy="call add_source earlier in the run",
            )
        self.refuse_planned(at)
        if new.source.name in self.spec.names:
            raise PlanError(
                f"add_source: expected a new name, got {new.source.name!r} of an existing source",
                remedy="choose another name",
            )
        self.spec = replace(self.spec, sources=(*self.spec.sources, new.source))
        n = len(self.spec.sources)
        others = (e for e in state.events if not isinstance(e, AddSource))
        self._state = with_added_sources(
            replace(state, events=(*added_sources(state.events), new.event, *others)), n
        )
        self._streams.append(new.source.stream(Cursor()))
        self._demand.grow(new.source.loaders)
        self._generations.append(0)  # its loaders started before the step of the event was known
        if self._pool is not None:
            self._pool.grow()
        self._mixture.grow(n)
        self._weights = self._mixture.weights
        self.ledger.grow()

    def _apply_loss(self, event: SourceLost) -> None:
        """Apply a SourceLost event of the log, which this planner or its predecessor requested."""
        if event.name not in self.spec.names:
            raise PlanError(
                f"unknown source {event.name!r}{did_you_mean(event.name, self.spec.names)}"
            )
        if any(e.name == event.name for e in lost_sources(self._state.events)):
            return  # applied already: it was requested twice
        if event.at != self._state.step or event.at < self.floor:
            self.refuse_planned(event.at)
        if self.ended is None:
            self._state = self._lost.apply(event, self._state)
            self._waiting = {}

    def _restart(self, i: int) -> list[Command]:
        """Restart the loaders of a source at its cursor, and read the samples after it again.

        Nothing is drawn, listed or counted again, so the stream of steps does not change.
        """
        if self._finished:
            return []  # the job has ended: loaders read nothing more
        cursor, commands = Cursor(*self._state.cursors[i].tolist()), list[Command]()
        self.ledger.exclude_counts(i, self._streams[i].passed, -1)
        self._streams[i] = self.spec.sources[i].stream(cursor)
        self._generations[i] += 1
        if self._pool is not None and self._pool.restart(i):
            commands.append(DropHeldSamples(tuple(self._demand.of(i))))
        commands += [
            RestartLoader(loader, cursor, self._generations[i], self._state.step - 1)
            for loader in self._demand.of(i)
        ]
        ahead = self._demand.restarted(i)
        self._waiting = {}  # the next draw requests them again
        return [*commands, *(ahead if self._state.active[i] else ()), *self._plan_ahead()]

    # planning

    def _plan_ahead(self) -> list[Command]:
        """Plan steps until the prefetch window is full, a draw blocks or the job ends."""
        commands: list[Command] = []
        while self._window_is_open():
            try:
                planned = self._plan_step()
            # a trainer's loop would treat these exceptions as the end of the data
            except (StopIteration, SystemExit, GeneratorExit) as error:
                what = f"the strategy or the schedule raised {describe_error(error)}"
                planned = self._finish(
                    PlanError(what, self._state.step, "raise another exception there")
                )
            # any error of user code ends the job at this step, unchanged except for a note
            except Exception as error:
                if (where := where_raised(error)) or not isinstance(error, OverlordError):
                    error.add_note(
                        "raised by the strategy or the schedule while step "
                        f"{self._state.step} was planned{where}"
                    )
                planned = self._finish(error)
            commands += planned
            if self._waiting or self._finished:
                break
        return commands

    def _window_is_open(self) -> bool:
        """Return whether the next step can be planned now."""
        if self._finished or not self._consumed or (self._waiting and self._unmet):
            return False
        self._outstanding = [s for s in self._outstanding if s > self._consumed.slowest]
        return len(self._outstanding) < self.spec.prefetch

    def _is_met(self, i: int) -> bool:
        """Return whether a stream has what the blocked draw needs, or can give no more."""
        stream = self._streams[i]
        return stream.ready >= self._waiting[i] or stream.ended or stream.error is not None

    def _plan_step(self) -> list[Command]:
        if dropped := self._remove_lost():
            return dropped
        state, spec = self._state, self.spec
        if self._stop is not None and state.step >= self._stop.step:
            return self._end_here(self._stop)
        if spec.ends_at(state.step) or (spec.until == "first" and not all(state.active)):
            return self._finish(None)
        first = self._demand.first
        if self._pool and (need := self._pool.restore(self._streams, first, self.ledger)):
            return self._wait(need)
        self._mix()
        state, drawn_tokens = self._state, self.ledger.tokens.tolist()
        while True:
            fronts: Sequence[Front] = self._streams
            if spec.budgeted or self._pool:
                fronts = fronts_of(spec, state, self._streams, self._pool, drawn_tokens)
            drawer, accounts = self._drawers.at(state.step), (state.owed, state.active)
            drawn = drawer.draw(state.step, self._weights, *accounts, fronts)
            if isinstance(drawn, MissingSamples):
                pulled = self._pool.open if self._pool else lambda i: 0
                return self._wait({i: n - pulled(i) for i, n in drawn.need.items()})
            if spec.budgeted:
                check_begun(spec, state.active, drawn, drawn_tokens, self._streams)
            if any(map(sum, drawn.counts)):
                break
            # Nothing was drawn: the job ends, or earlier long samples have used up the tokens.
            self._list_last_failures(drawn.active)
            self._lost.begin(state)
            self._state = state = replace(self._state, owed=drawn.owed, active=drawn.active)
            if (spec.until == "first" and not all(drawn.active)) or not any(
                w for w, a in zip(self._weights, drawn.active, strict=True) if a
            ):
                return self._finish(all_lost(state, self._weights, spec.sources))
        if self._pool:
            counts = limited(counts_of(drawn.counts, spec.look_ahead), fronts)
            if need := self._pool.pull(counts, self._streams, first, self.ledger):
                return self._wait(need)
        self._waiting = {}
        if self._pool:
            place = place_chunks if drawn.tokens else place_chosen
            placed = place(self._context(), drawn, counts, self._pool, self._demand)
        else:
            placed = place_drawn(self._context(), drawn, self._streams, self._demand, self.ledger)
        planned = self._close_step(placed)
        if not planned.skipped:
            self._outstanding.append(planned.plan.step)
        return [planned, *self._demand.keep_ahead(np.sum(drawn.counts, axis=0))]

    def _remove_lost(self) -> list[Command]:
        """Stop drawing from lost sources; return commands that free their held samples."""
        self._state, leaving = without_lost(self._state, self.spec.sources)
        held = [i for i in leaving if self._pool is not None and self._pool.drop(i)]
        return [DropHeldSamples(tuple(self._demand.of(i))) for i in held]

    def _wait(self, need: dict[int, int]) -> list[Command]:
        """Request the samples that the draw lacks; if a stream failed, end the job.

        Sources that may leave the job are requested as lost instead. The job ends only after every
        lacking stream has its samples or failed, with the error of the first failed source. So the
        result does not depend on the order in which loaders read.
        """
        self._waiting = need
        self._unmet = {i for i in need if not self._is_met(i)}
        if not self._unmet:
            errors = ((i, self._streams[i].error) for i in sorted(need))
            broken = {i: error for i, error in errors if error is not None}
            sources = self.spec.sources
            if requests := self._lost.requests(self._state, broken, self._weights, sources):
                return [*requests]
            return self._finish(next(iter(broken.values())))
        return [command for i in sorted(need) for command in self._request_more(i)]

    def _request_more(self, i: int) -> list[Command]:
        """Return requests to the loaders of a source for the samples that the draw lacks."""
        stream = self._streams[i]
        missing = self._waiting[i] - stream.ready
        if missing <= 0 or stream.ended or stream.error:
            return []
        return [*self._demand.request_more(i, missing, stream.delaying_loaders())]

    def _end_here(self, finish: EndOfJob) -> list[Command]:
        self._finished = self._stop = finish
        self._waiting = {}
        return [finish]

    def _finish(self, error: Exception | None) -> list[Command]:
        self._finished = EndOfJob(self._state.step, error)
        self._waiting = {}
        for i, stream in enumerate(self._streams):
            if error is not None and stream.error is error:
                self.ledger.list_bad(i, stream.last_failures())
        return [self._finished]

    def _list_last_failures(self, active: Sequence[bool]) -> None:
        """Quarantine the failed rows after the last samples of sources that become inactive.

        ``active`` is the new value of each source. Inactive sources are never read again, not even
        after a restart. The rows after a token budget are no part of the job.
        """
        for i, (was, stays) in enumerate(zip(self._state.active, active, strict=True)):
            if not was or stays:
                continue
            drawn, ready = int(self.ledger.tokens[i]), self._streams[i].ready
            ready += self._pool.open(i) if self._pool else 0
            if not is_reached(self.spec.sources[i], drawn, ready):
                self.ledger.list_bad(i, self._streams[i].last_failures())

    def _mix(self) -> None:
        """Update the weights in force for the next step."""
        self._state = self._mixture.update(
            self._state, {s.name: s.weight for s in self.spec.sources}
        )
        self._weights = self._mixture.weights

    def _context(self) -> StepContext:
        return StepContext(self.spec, self._state, self._weights)

    def _close_step(self, step: PlacedStep) -> PlannedStep:
        """Update accounts, counts and the planner's state; return the message of the step."""
        state, plan = self._state, step.plan
        self._demand.popped(step.pops)
        self.ledger.count(plan, self._weights, state.active)
        self._list_last_failures(step.active)
        self.ledger.update_passed([s.passed for s in self._streams])
        self._state = replace(
            state,
            step=state.step + 1,
            cursors=step.cursors,
            owed=step.owed,
            active=step.active,
            counts=self.ledger.counts(),
            events=self._mixture.still_in_force(state),
            ahead=() if self._pool is None else self._pool.ages(),
            cut=step.cut,
            **self._mixture.saved(),
        )
        digest = plan.digest()
        if plan.place is None:  # made by hand: the mesh decides which rank gets which samples
            plan = replace(plan, place=self.spec.place)
        return PlannedStep(
            plan,
            step.pops,
            step.doc,
            digest,
            self._state,
            skipped(state.events, state.step, state.step + 1),
            step.kept,
            step.loader.astype(np.int32),
            step.valid_tokens,
            samples=len(plan),
        )
