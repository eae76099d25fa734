"""The Planner core: announcements and demand in, plans out. Pure: no clock, file, thread or
runtime.

A step is planned when the prefetch window is open and the draw's samples are known; it waits for
what the draw needs and for nothing else. Every input that changes the stream is an event with its
first step, kept in the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.errors import OverlordError, PlanError
from overlord.job.job import mixture_problems
from overlord.messages.constructor import DecodeFailures
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
from overlord.messages.loader import Announce
from overlord.plan.plan import LoadingPlan
from overlord.planning.buffer import Joined, check_plan, check_samples
from overlord.planning.demand import Demand
from overlord.planning.draw import Drawer, Drawn, Short, owed_behind, step_positions
from overlord.planning.events import joined, said_of_all, skipped, still_in_force, widened
from overlord.planning.images.encoding import check_images, valid_tokens
from overlord.planning.look_ahead import LookAheadPool
from overlord.planning.lost_sources import Leaving
from overlord.planning.mixture import Mixture, nothing_to_draw
from overlord.planning.rank_progress import RankProgress
from overlord.planning.selection import check_choice, checked_scores, counts_of, rows_of
from overlord.planning.spec import Ledger, NewSource, PlannerSpec, SourceSpec, initial_state
from overlord.planning.stream import Piece, SourceStream
from overlord.user_code import told, where_raised

Command = Refill | PlannedStep | EndOfJob | DropHeldSamples | RestartLoader | SourceLost


class Planner(Leaving):
    """``handle(event) -> commands``. One per job."""

    def __init__(
        self,
        spec: PlannerSpec,
        state: StreamState | None = None,
        *,
        generation: int = 0,
        floor: int = 0,
    ):
        """``generation``: of all loaders at first. ``floor``: the first step that was never
        planned; those before it are planned again, and closed to all that is said now, or they
        would not come out the same.
        """
        self.spec, self.generation, self.floor = spec, generation, floor
        state = state or initial_state(spec)
        self._state = state
        self._streams = [
            _stream(s, Cursor(*c))
            for s, c in zip(spec.sources, state.cursors.tolist(), strict=True)
        ]
        self._demand = Demand([s.loaders for s in spec.sources], spec.read_ahead, spec.ahead_of)
        # of each source's loaders: one more whenever it is opened again
        self._generations = [generation] * len(spec.sources)
        draws = spec.batch.microbatches if spec.mix_every == "microbatch" else 1
        self._drawer = Drawer(
            samples=spec.batch.samples,
            tokens=spec.batch.tokens,
            draws=draws,
            random=spec.draw == "random",
            seed=spec.seed,
            fill=spec.until != "first",
        )
        self._consumed = RankProgress()  # rank -> last step it was handed
        # planned steps to be delivered that some rank has not taken
        self._outstanding: list[int] = []
        self._waiting: dict[int, int] = {}  # source -> samples the blocked draw needs
        self._reserve = (
            LookAheadPool(len(spec.sources))
            if spec.leaves_holes or any(map(len, state.ahead))
            else None
        )
        # pulled before the state was saved
        self._replay = {i: ages for i, ages in enumerate(state.ahead) if len(ages)}
        self._finished: EndOfJob | None = None
        self._stop: EndOfJob | None = None  # of one who cannot go on behind it
        # found by the planner before this one, which nothing that is said since may move
        self._ended: EndOfJob | None = None
        self._unbegun = None
        # a step whose weights were charged to the accounts already: a draw gave nothing, the next
        # one waits
        self._begun = -1
        self._mixture = Mixture(
            spec.schedule,
            every=spec.mix_every,
            lag=spec.feedback_lag,
            takes_feedback=spec.takes_feedback,
            state=state,
            floor=floor,
        )
        self._weights: list[float] = self._mixture.weights
        self.ledger = Ledger(state, len(spec.sources))

    def adopt(self, before: Planner) -> list[Command]:
        """Take the place of a planner that was further on, from a state it passed: who takes part
        and how far they are, what is listed and counted, and where it ended. ``handle`` then gives
        what it gave, step by step; what it listed since is listed again.
        """
        self._stop, self._ended = before._stop, before._finished or before._ended
        self.ledger.adopt(before.ledger)
        self._mixture.feedback.adopt(before._mixture.feedback)
        self._consumed = RankProgress(
            (rank, max(step, self._state.step - 1)) for rank, step in before._consumed.items()
        )
        return self._plan_ahead()

    # events

    def handle(self, event: Any, now: float = 0.0) -> list[Command]:
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
                    return commands  # nothing waits for it
                if not self._satisfied():
                    return commands + self._nudge(source)
                return commands + self._plan_ahead()
            case Consumed(rank=rank, step=step):
                self._consumed[rank] = max(step, self._consumed.get(rank, -1))
            case Attach(rank=rank):
                self._consumed.setdefault(rank, self._state.step - 1)
            case Detach(rank=rank):
                self._consumed.pop(rank, None)
            # a constructor cannot build this step: no later one is planned
            case EndOfJob(step=step):
                if self._finished is not None and self._finished.step <= step:
                    return []
                return self._end_here(event)
            case SetMixture() | Skip():
                self._add_event(event)
            case NewSource():
                self._add_source(event)
            case SourceLost():
                self._lose(event)
            case RestartSource(source=source):
                return self._reopen(source)
            case SetReadAhead(source=source, steps=steps):
                self.spec = replace(self.spec, ahead_of={**self.spec.ahead_of, source: steps})
                self._demand.hold(source, steps)
                return []
            case Report():
                self._mixture.report(event)
                return []
            case DecodeFailures():
                self.ledger.spoil(event)
                return []
            case _:
                raise TypeError(f"the planner does not know {type(event).__name__}")
        return self._plan_ahead()

    def _add_event(self, event: SetMixture | Skip) -> None:
        self.refuse_planned(
            event.at if isinstance(event, SetMixture) else min(event.steps, default=self.open_step)
        )
        if isinstance(event, SetMixture):
            if problems := mixture_problems(event.weights, self.spec.names):
                raise PlanError("; ".join(problems))
            if names := nothing_to_draw(event.weights, self._state.events, event.at):
                raise PlanError(
                    f"all that the mixture weighs, {', '.join(names)}, joins later",
                    event.at,
                    "name a later step",
                )
            event = said_of_all(event, self.spec.names)
        if self._ended is None:
            self._state = replace(self._state, events=(*self._state.events, event))

    def _add_source(self, new: NewSource) -> None:
        """One more source, behind all others: their numbers, cursors and accounts stay as they
        are.
        """
        at, state = new.event.at, self._state
        if ended := self.ended:
            raise PlanError(
                f"the job ends before step {ended.step}",
                remedy="there is no step left for a source to join",
            )
        self.refuse_planned(at)
        if new.source.name in self.spec.names:
            raise PlanError(f"there is a source {new.source.name!r} already")
        self.spec = replace(self.spec, sources=(*self.spec.sources, new.source))
        n = len(self.spec.sources)
        others = (e for e in state.events if not isinstance(e, AddSource))
        self._state = widened(replace(state, events=(*joined(state.events), new.event, *others)), n)
        self._streams.append(_stream(new.source, Cursor()))
        self._demand.grow(new.source.loaders)
        self._generations.append(0)  # its loaders were opened before anyone knew when it joins
        if self._reserve is not None:
            self._reserve.grow()
        self._mixture.widen(n)
        self._weights = self._mixture.weights
        self.ledger.widen()

    def _reopen(self, i: int) -> list[Command]:
        """A source as a restart would find it: a fresh stream at the cursor, and what was pulled
        beyond is pulled again. Nothing is drawn, listed or counted by that, so it does not show in
        the stream.
        """
        if self._finished:
            return []  # nothing is read any more
        cursor, commands = Cursor(*self._state.cursors[i].tolist()), list[Command]()
        self.ledger.counted_before(i, self._streams[i].passed, -1)
        self._streams[i] = _stream(self.spec.sources[i], cursor)
        self._generations[i] += 1
        if self._reserve is not None:
            ages, held = self._reserve.give_back(i)
            if len(ages):
                self._replay[i] = ages
            if held:
                commands.append(DropHeldSamples(tuple(self._demand.of(i))))
        commands += [
            RestartLoader(loader, cursor, self._generations[i], self._state.step - 1)
            for loader in self._demand.of(i)
        ]
        ahead = self._demand.reopened(i)
        self._waiting = {}  # a draw that waits asks anew
        return [*commands, *(ahead if self._state.active[i] else ()), *self._plan_ahead()]

    # planning

    def _plan_ahead(self) -> list[Command]:
        commands: list[Command] = []
        while self._window_is_open():
            try:
                planned = self._plan_step()
            except (
                StopIteration,
                SystemExit,
                GeneratorExit,
            ) as error:  # in a trainer's loop they would look like the end of the data
                what = f"the strategy or the schedule raised {told(error)}"
                planned = self._finish(
                    PlanError(what, self._state.step, "it must end neither the program nor a loop")
                )
            # a strategy is the user's code: whatever it raises ends the job at this step, as it is
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
        if self._finished or not self._consumed or (self._waiting and not self._satisfied()):
            return False
        self._outstanding = [s for s in self._outstanding if s > self._consumed.slowest]
        return len(self._outstanding) < self.spec.prefetch

    def _plan_step(self) -> list[Command]:
        if forget := self._leave_lost():
            return [*forget]
        state, spec = self._state, self.spec
        if self._stop is not None and state.step >= self._stop.step:
            return self._end_here(self._stop)
        if spec.ends_at(state.step) or (spec.until == "first" and not all(state.active)):
            return self._finish(None)
        if self._replay and (need := self._pull_again()):
            return self._wait(need)
        self._mix()
        state = self._state
        while True:
            drawn = self._drawer.draw(
                state.step, self._weights, state.owed, state.active, self._fronts()
            )
            if isinstance(drawn, Short):
                return self._wait({i: n - self._open(i) for i, n in drawn.need.items()})
            if any(map(sum, drawn.counts)):
                break
            # Nothing drawn: the end, or a step of few tokens while long samples taken before are
            # still being paid for.
            self._see_off(drawn.active)
            self._unbegun = state if self._begun != state.step else self._unbegun
            self._state = state = replace(self._state, owed=drawn.owed, active=drawn.active)
            self._begun = state.step
            if (spec.until == "first" and not all(drawn.active)) or not any(
                w for w, a in zip(self._weights, drawn.active, strict=True) if a
            ):
                return self._finish(self._nothing_left())
        if self._reserve is not None and (need := self._pull(self._reserve, drawn)):
            return self._wait(need)
        self._waiting = {}
        stage = (
            self._stage(drawn)
            if self._reserve is None
            else self._stage_chosen(self._reserve, drawn)
        )
        if not stage.skipped:
            self._outstanding.append(stage.plan.step)
        return [stage, *self._demand.keep_ahead(np.sum(drawn.counts, axis=0))]

    # look-ahead: samples pulled from the streams and not drawn yet

    def _pull_again(self) -> dict[int, int]:
        """After a restart: bring back what had been pulled; or say what is missing for it."""
        assert self._reserve is not None
        if need := {
            i: len(a)
            for i, a in self._replay.items()
            if self._streams[i].ready < len(a) and not self._streams[i].ended
        }:
            return need
        for i, ages in self._replay.items():
            # the failures on the way are listed already
            pieces, _ = self._streams[i].take(min(len(ages), self._streams[i].ready))
            self._reserve.pull(
                i, pieces, Joined([(i, p) for p in pieces]).holders(self._demand.first), ages
            )
            self.ledger.counted_before(i, self._streams[i].passed)
        self._replay = {}
        return {}

    def _pull(self, reserve: LookAheadPool, drawn: Drawn) -> dict[int, int]:
        """Bring the candidates of a draw into the reserve; or say what is missing for it."""
        wanted = {
            i: n - reserve.open(i)
            for i, n in enumerate(counts_of(drawn.counts, self.spec.look_ahead))
            if n > reserve.open(i)
        }
        if need := {
            i: n
            for i, n in wanted.items()
            if self._streams[i].ready < n and not self._streams[i].ended
        }:
            return need
        for i, n in wanted.items():
            pieces, bad = self._streams[i].take(min(n, self._streams[i].ready))
            self.ledger.list_bad(i, bad)
            reserve.pull(i, pieces, Joined([(i, p) for p in pieces]).holders(self._demand.first))
        return {}

    def _stage_chosen(self, reserve: LookAheadPool, drawn: Drawn) -> PlannedStep:
        """A step whose strategy chooses among candidates, or leaves what does not fit."""
        state, spec = self._state, self.spec
        pops = reserve.number(self._demand.n_loaders)
        candidates = reserve.candidates(counts_of(drawn.counts, spec.look_ahead))
        order, substep = step_positions(drawn.counts)
        shown = np.arange(len(candidates.rows)) if spec.look_ahead > 1 else order
        pieces = Joined(candidates.pieces)
        buffer = self._gather(
            pieces, candidates.rows[shown], substep if spec.look_ahead == 1 else None
        )
        loader = pieces.holders(self._demand.first)[candidates.rows[shown]]
        buffer = replace(
            buffer, age=candidates.age[shown], max_age=spec.max_age, overflow=spec.overflow
        )
        if spec.look_ahead > 1:
            buffer = replace(buffer, drawn=False, wanted=drawn.counts)
            if spec.prefer is not None:
                buffer = replace(
                    buffer, scores=checked_scores(spec.prefer(state.step, buffer), buffer)
                )
        plan = spec.strategy(buffer, spec.place)
        check_plan(plan, buffer, spec.place)
        rows = rows_of(plan, buffer)
        check_choice(rows, buffer, left_allowed=spec.overflow == "defer")
        if spec.images:
            check_images(plan, buffer.take(rows))
        plan.validate()
        taken = np.zeros(len(candidates.rows), bool)
        taken[shown[rows]] = True
        doc, cursors = candidates.number[shown[rows]], state.cursors.copy()
        kept = reserve.settle(candidates, taken, cursors, left=spec.look_ahead == 1)
        left = (
            np.sum(drawn.counts, axis=0) - np.bincount(plan.source, minlength=len(spec.sources))
        ).tolist()
        active = tuple(a or n > 0 for a, n in zip(drawn.active, left, strict=True))
        owed = owed_behind(drawn.owed, left, self._weights, active) if any(left) else drawn.owed
        return self._staged(
            plan, pops, doc, loader[rows], cursors, replace(drawn, owed=owed, active=active), kept
        )

    def _wait(self, need: dict[int, int]) -> list[Command]:
        """Ask for what the draw lacks. A stream that broke before it is where the job ends; of
        several that did, the first source's is named, so the others are waited for: who was read
        first must not be seen.
        """
        self._waiting = need
        if self._satisfied():
            if leave := self._asks_to_leave(need):
                return [*leave]
            return self._finish(
                next(error for i in sorted(need) if (error := self._streams[i].error) is not None)
            )
        return [command for i in sorted(need) for command in self._nudge(i)]

    def _nudge(self, i: int) -> list[Command]:
        stream = self._streams[i]
        lacking = self._waiting[i] - stream.ready
        return (
            []
            if lacking <= 0 or stream.ended or stream.error
            else [*self._demand.nudge(i, lacking, stream.behind())]
        )

    def _end_here(self, finish: EndOfJob) -> list[Command]:
        self._finished = self._stop = finish
        self._waiting = {}
        return [finish]

    def _finish(self, error: Exception | None) -> list[Command]:
        self._finished = EndOfJob(self._state.step, error)
        self._waiting = {}
        for i, stream in enumerate(self._streams):
            if error is not None and stream.error is error:
                self.ledger.list_bad(i, stream.rest())
        return [self._finished]

    def _see_off(self, active: Sequence[bool]) -> None:
        """Sources that leave: the failures behind their last samples are listed now, since nothing
        of them is read again, here or after a restart.
        """
        for i, (was, stays) in enumerate(zip(self._state.active, active, strict=True)):
            if was and not stays:
                self.ledger.list_bad(i, self._streams[i].rest())

    def _mix(self) -> None:
        """Bring the weights in force up to date."""
        self._state = self._mixture.at(self._state, {s.name: s.weight for s in self.spec.sources})
        self._weights = self._mixture.weights

    def _stage(self, drawn: Drawn) -> PlannedStep:
        spec = self.spec
        pieces: list[tuple[int, Piece]] = []
        for i, n in enumerate(np.sum(drawn.counts, axis=0).tolist()):
            if n:
                taken, bad = self._streams[i].take(n)
                pieces += [(i, piece) for piece in taken]
                if bad:
                    self.ledger.list_bad(i, bad)
        order, substep = step_positions(drawn.counts)
        joint = Joined(pieces)
        buffer, loader = (
            self._gather(joint, order, substep),
            joint.holders(self._demand.first)[order],
        )
        plan = spec.strategy(buffer, spec.place)
        check_plan(plan, buffer, spec.place)
        check_samples(plan, buffer)
        if spec.images:
            check_images(plan, buffer)
        plan.validate()
        # A loader's samples leave it in its own order: within a loader, that is their order in the
        # source's stream.
        pops = np.bincount(loader, minlength=self._demand.n_loaders)
        by_stream = np.lexsort((order, loader))
        doc = np.empty(len(loader), np.int64)
        doc[by_stream] = np.arange(len(loader))
        return self._staged(
            plan, pops, doc, loader, joint.cursors_behind(self._state.cursors), drawn
        )

    def _staged(
        self,
        plan: LoadingPlan,
        pops: np.ndarray,
        doc: np.ndarray,
        loader: np.ndarray,
        cursors: np.ndarray,
        drawn: Drawn,
        kept: np.ndarray | None = None,
    ) -> PlannedStep:
        """Close the step: accounts, counts and the state behind it."""
        state = self._state
        self._demand.popped(pops)
        self.ledger.count(plan, self._weights, state.active)
        self._see_off(drawn.active)
        self.ledger.see_passed([s.passed for s in self._streams])
        self._state = replace(
            state,
            step=state.step + 1,
            cursors=cursors,
            owed=drawn.owed,
            active=drawn.active,
            counts=self.ledger.counts(),
            events=still_in_force(state.events, state.step, state.mix_step, self._mixture.lag),
            ahead=() if self._reserve is None else self._reserve.ages(),
            **self._mixture.saved(),
        )
        unseen = skipped(state.events, state.step, state.step + 1)
        valid = valid_tokens(plan, self.spec.images)
        digest = plan.digest()
        if plan.place is None:  # made by hand: who gets what of it is still told by the mesh
            plan = replace(plan, place=self.spec.place)
        return PlannedStep(
            plan, pops, doc, digest, self._state, unseen, kept, loader.astype(np.int32), valid
        )


def _stream(s: SourceSpec, cursor: Cursor) -> SourceStream:
    return SourceStream(
        s.name,
        loaders=s.loaders,
        n_groups=s.n_groups,
        epochs=s.epochs,
        max_bad=s.max_bad,
        cursor=cursor,
        files=s.files,
    )
