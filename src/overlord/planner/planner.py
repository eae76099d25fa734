"""The Planner core: announcements and demand in, plans out. Pure: no clock, file, thread or runtime.

A step is planned when the prefetch window is open and the draw's samples are known; it waits for what the draw needs
and for nothing else. Every input that changes the stream is an event with its first step, kept in the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from overlord.errors import PlanError
from overlord.job import Batch, mixture_problems
from overlord.loader.loader import GROUPS_AHEAD
from overlord.messages import Announce, Attach, Consumed, Cursor, Detach, Finish, Refill, SetMixture, Skip, Stage, StreamState
from overlord.placetree import ClientPlaceTree
from overlord.plan import LoadingPlan
from overlord.planner.draw import Drawer, Drawn, Short, step_order
from overlord.planner.events import latest, still_in_force
from overlord.planner.stream import BadRow, Piece, SourceStream
from overlord.sample import Buffer

Schedule = Callable[[int, Mapping[str, float]], Sequence[float]]
Command = Refill | Stage | Finish


KEPT_BAD = 200_000  # quarantined rows that are listed, the latest; all are counted. About 60 MB.


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """What the planner must know of a source."""

    name: str
    n_groups: int
    epochs: int | None
    max_bad: int
    loaders: int = 1
    files: tuple[str, ...] = ()  # paths, for errors


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSpec:
    """The job as the planner sees it."""

    sources: tuple[SourceSpec, ...]
    batch: Batch
    place: ClientPlaceTree
    strategy: Callable[[Buffer, ClientPlaceTree], LoadingPlan]
    schedule: Schedule
    seed: int = 0
    until: str | int = "all"
    draw: str = "exact"
    mix_every: str = "step"
    prefetch: int = 4
    read_ahead: int = 2  # steps' worth of samples that loaders hold ready beyond the step being drawn

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.sources)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A row that never reached a plan, and why."""

    source: int
    epoch: int
    file: int
    row: int
    reason: str


@dataclass(slots=True)
class Totals:
    """Running counts per source, part of the state so that they survive a restart."""

    samples: np.ndarray
    tokens: np.ndarray
    quarantined: np.ndarray
    dropped: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


def initial_state(spec: PlannerSpec) -> StreamState:
    n = len(spec.sources)
    return StreamState(step=0, cursors=np.array([Cursor()] * n, np.int64), owed=(0,) * n, active=(True,) * n)


class Planner:
    """``handle(event) -> commands``. One per job."""

    def __init__(self, spec: PlannerSpec, state: StreamState | None = None):
        self.spec = spec
        state = state or initial_state(spec)
        self._state = state
        self._streams = [
            SourceStream(
                s.name, loaders=s.loaders, n_groups=s.n_groups, epochs=s.epochs, max_bad=s.max_bad, cursor=Cursor(*c), files=s.files
            )
            for s, c in zip(spec.sources, state.cursors.tolist(), strict=True)
        ]
        self._first_loader = np.concatenate([[0], np.cumsum([s.loaders for s in spec.sources])]).astype(np.int64)
        self._loader_source = np.repeat(np.arange(len(spec.sources)), [s.loaders for s in spec.sources]).tolist()
        draws = spec.batch.microbatches if spec.mix_every == "microbatch" else 1
        self._drawer = Drawer(
            samples=spec.batch.samples, tokens=spec.batch.tokens, draws=draws, random=spec.draw == "random",
            seed=spec.seed, fill=spec.until != "first",
        )  # fmt: skip
        self._consumed: dict[int, int] = {}  # rank -> last step it was handed
        self._outstanding: list[int] = []  # planned steps to be delivered that some rank has not taken
        self._waiting: dict[int, int] = {}  # source -> samples the blocked draw needs
        self._level = [0] * len(spec.sources)  # samples each source's loaders were last asked to hold
        self._must = np.zeros(int(self._first_loader[-1]), np.int64)  # what each loader was last told to reach
        self._held = np.zeros(int(self._first_loader[-1]), np.int64)  # announced and not yet popped, by loader
        self._finished: Finish | None = None
        self._weights: list[float] = []
        self.quarantine: deque[Quarantined] = deque(maxlen=KEPT_BAD)
        self.totals = Totals(*(_restored(state, name, len(spec.sources)) for name in ("samples", "tokens", "quarantined", "dropped")))
        self._dropped_before = self.totals.dropped.copy()

    # events

    def handle(self, event: Any, now: float = 0.0) -> list[Command]:
        match event:
            case Announce():
                source = self._loader_source[event.loader]
                self._held[event.loader] += len(event.found) if event.found is not None else 0
                group = self._streams[source].group
                self._streams[source].add(event, event.loader - int(self._first_loader[source]))
                commands = self._move_horizon(source) if self._streams[source].group > group else []
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
            case Finish():  # a constructor cannot build this step: no later one is planned
                self._finished = event
                self._waiting = {}
                return [event]
            case SetMixture() | Skip():
                self._add_event(event)
            case _:
                raise TypeError(f"the planner does not know {type(event).__name__}")
        return self._plan_ahead()

    def _add_event(self, event: SetMixture | Skip) -> None:
        steps = event.steps if isinstance(event, Skip) else (event.at,)
        if steps and min(steps) < self._state.step:
            raise PlanError(
                f"step {min(steps)} is planned already", remedy=f"the first step that can still change is {self._state.step}"
            )  # fmt: skip
        if isinstance(event, SetMixture) and (problems := mixture_problems(event.weights, self.spec.names)):
            raise PlanError("; ".join(problems))
        self._state = replace(self._state, events=(*self._state.events, event))

    # planning

    def _satisfied(self) -> bool:
        return all(self._streams[i].ready >= n or self._streams[i].ended or self._streams[i].error for i, n in self._waiting.items())

    def _plan_ahead(self) -> list[Command]:
        commands: list[Command] = []
        while self._window_is_open():
            try:
                planned = self._plan_step()
            except Exception as error:  # a strategy is the user's code: whatever it raises ends the job at this step, by name
                planned = self._finish(error)
            except (SystemExit, GeneratorExit) as error:
                what = f"the strategy or the schedule raised {type(error).__name__}: {error}"
                planned = self._finish(PlanError(what, self._state.step, "it must not end the program"))
            commands += planned
            if self._waiting or self._finished:
                break
        return commands

    def _window_is_open(self) -> bool:
        if self._finished or not self._consumed:
            return False
        if self._waiting and not self._satisfied():
            return False
        self._outstanding = [s for s in self._outstanding if s > min(self._consumed.values())]
        return len(self._outstanding) < self.spec.prefetch

    def _plan_step(self) -> list[Command]:
        state, spec = self._state, self.spec
        if state.step == spec.until or (spec.until == "first" and not all(state.active)):
            return self._finish(None)
        self._mix()
        while True:
            drawn = self._drawer.draw(state.step, self._weights, state.owed, state.active, self._streams)
            if isinstance(drawn, Short):
                return self._wait(drawn.need)
            if any(map(sum, drawn.counts)):
                break
            # Nothing drawn: the end, or a step of few tokens while long samples taken before are still being paid for.
            self._state = state = replace(self._state, owed=drawn.owed, active=drawn.active)
            if (spec.until == "first" and not all(drawn.active)) or not any(
                w for w, a in zip(self._weights, drawn.active, strict=True) if a
            ):
                return self._finish(None)
        self._waiting = {}
        stage = self._stage(drawn)
        if not stage.skipped:
            self._outstanding.append(stage.plan.step)
        return [stage, *self._refills(drawn)]

    def _wait(self, need: dict[int, int]) -> list[Command]:
        """Ask for what the draw lacks. A stream that broke before it is where the job ends."""
        for i in sorted(need):
            if (error := self._streams[i].error) is not None:
                return self._finish(error)
        self._waiting = need
        return [command for i in sorted(need) for command in self._nudge(i)]

    def _nudge(self, i: int) -> list[Command]:
        """Ask the loaders that hold the source up, if they have done what they were asked before."""
        stream, first = self._streams[i], int(self._first_loader[i])
        lacking = self._waiting[i] - stream.ready
        if lacking <= 0 or stream.ended or stream.error:
            return []
        commands: list[Command] = []
        for loader in (first + k for k in stream.behind()):
            if self._held[loader] >= self._must[loader]:
                self._must[loader] = self._held[loader] + lacking
                commands.append(Refill(loader, int(self._must[loader]), self._share(i)))
        return commands

    def _move_horizon(self, i: int) -> list[Command]:
        """The stream has come to another group: its loaders may open groups further on."""
        first, horizon = int(self._first_loader[i]), self._streams[i].group + GROUPS_AHEAD
        return [Refill(first + k, 0, self._share(i), horizon) for k in range(self.spec.sources[i].loaders)]

    def _refills(self, drawn: Drawn) -> list[Command]:
        """Keep loaders a few steps ahead. They refill by themselves; they hear only of a level that changed."""
        commands: list[Command] = []
        counts = np.sum(drawn.counts, axis=0)
        for i in np.flatnonzero(counts).tolist():
            level = int(counts[i]) * self.spec.read_ahead + 1
            if level > self._level[i] or 4 * level < self._level[i]:
                self._level[i] = level
                first = int(self._first_loader[i])
                commands += [Refill(first + k, 0, self._share(i)) for k in range(self.spec.sources[i].loaders)]
        return commands

    def _share(self, i: int) -> int:
        return -(-self._level[i] // self.spec.sources[i].loaders)

    def _finish(self, error: Exception | None) -> list[Command]:
        self._finished = Finish(self._state.step, error)
        self._waiting = {}
        for i, stream in enumerate(self._streams):
            if not self._state.active[i] or (error is not None and stream.error is error):
                self._list_bad(i, stream.rest())
        return [self._finished]

    def _mix(self) -> None:
        """Bring the weights in force up to date."""
        state = self._state
        if self.spec.mix_every != "epoch":
            self._state = replace(state, mix_step=state.step)
            self._weights = self._weights_at(state.step)
            return
        if not self._weights:  # a planner that starts at a state: first what was in force there
            self._weights = self._weights_at(state.mix_step)
        epoch = min((e for e, w in zip(state.cursors[:, 0].tolist(), self._weights, strict=True) if w), default=0)
        if epoch > state.mix_epoch:
            self._state = replace(state, mix_step=state.step, mix_epoch=epoch)
            self._weights = self._weights_at(state.step)

    def _weights_at(self, step: int) -> list[float]:
        for change in latest(self._state.events, -1, step):
            return [float(change.weights.get(name, 0.0)) for name in self.spec.names]
        return [float(w) for w in self.spec.schedule(step, {})]

    def _stage(self, drawn: Drawn) -> Stage:
        state, spec = self._state, self.spec
        pieces: list[tuple[int, Piece]] = []
        for i, n in enumerate(np.sum(drawn.counts, axis=0).tolist()):
            if n:
                taken, bad = self._streams[i].take(n)
                pieces += [(i, piece) for piece in taken]
                if bad:
                    self._list_bad(i, bad)
        order, substep = _step_positions(drawn)
        buffer, loader, cursors = self._buffer(pieces, order, substep)
        plan = spec.strategy(buffer, spec.place)
        _check_strategy(plan, buffer, spec.place)
        plan.validate()
        # A loader's samples leave it in its own order: within a loader, that is their order in the source's stream.
        pops = np.bincount(loader, minlength=int(self._first_loader[-1]))
        by_stream = np.lexsort((order, loader))
        doc = np.empty(len(loader), np.int64)
        doc[by_stream] = np.arange(len(loader))
        self._held -= pops
        self._must = np.zeros_like(self._must)
        self._count(buffer)
        events = still_in_force(state.events, state.step, state.mix_step)
        self._state = replace(
            state, step=state.step + 1, cursors=cursors, owed=drawn.owed, active=drawn.active, events=events, counts=self._counts()
        )
        skipped = any(state.step in e.steps for e in state.events if isinstance(e, Skip))
        return Stage(plan, pops, doc, plan.digest(), self._state, skipped)

    def _buffer(
        self, pieces: Sequence[tuple[int, Piece]], order: np.ndarray, substep: np.ndarray | None
    ) -> tuple[Buffer, np.ndarray, np.ndarray]:
        """The drawn samples in the order of the step, the loader that holds each, and the cursors behind them."""
        parts = [p for _, p in pieces]
        where = np.array([i for i, _ in pieces], np.int64)
        n = np.array([p.stop - p.start for p in parts])
        at = np.array([p.at for p in parts], np.int64)  # [pieces, 6]
        file = np.concatenate([p.found.file[p.start : p.stop] for p in parts])
        row = np.concatenate([p.found.row[p.start : p.stop] for p in parts])
        part = np.concatenate([p.found.part[p.start : p.stop] for p in parts])
        cursors = self._state.cursors.copy()
        last, end = np.append(where[1:] != where[:-1], True), np.cumsum(n) - 1  # a source's last piece ends at its cursor
        cursors[where[last], :3] = at[last, :3]
        cursors[where[last], 3:] = np.stack([file[end[last]], row[end[last]], part[end[last]]], axis=1)
        meta = {}
        for name in parts[0].found.meta:
            # A column that only some sources have cannot be balanced on; it is left out rather than invented.
            if all(name in p.found.meta for p in parts):
                meta[name] = np.concatenate([p.found.meta[name][p.start : p.stop] for p in parts])[order]
        weights = dict(zip(self.spec.names, self._weights, strict=True))
        buffer = Buffer(
            names=self.spec.names, source=np.repeat(where, n)[order].astype(np.int32), epoch=np.repeat(at[:, 0], n)[order].astype(np.int32),
            file=file[order].astype(np.int32), row=row[order].astype(np.int64), part=part[order].astype(np.int32), meta=meta,
            batch=self.spec.batch, step=self._state.step, drawn=True, substep=substep, weights=weights,
        )  # fmt: skip
        for column in (buffer.source, buffer.epoch, buffer.file, buffer.row, buffer.part, *meta.values()):
            column.flags.writeable = False  # what was drawn is drawn: the plan is compared with these very arrays
        return buffer, self._holders(parts, where, n)[order], cursors

    def _holders(self, parts: Sequence[Piece], where: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Loader of every sample, source by source."""
        first = np.repeat(self._first_loader[where], n)
        if len(self._loader_source) == len(self.spec.sources):
            return first
        return first + np.concatenate(
            [np.full(k, p.loader) if isinstance(p.loader, int) else p.loader[p.start : p.stop] for k, p in zip(n, parts, strict=True)]
        )

    def _count(self, buffer: Buffer) -> None:
        n = len(self.spec.sources)
        tokens = buffer.meta["tokens"]
        assert isinstance(tokens, np.ndarray)
        self.totals.samples += np.bincount(buffer.source, minlength=n)
        self.totals.tokens += np.bincount(buffer.source, weights=tokens, minlength=n).astype(np.int64)

    def _list_bad(self, i: int, rows: list[BadRow]) -> None:
        self.quarantine += [Quarantined(i, *row) for row in rows]
        self.totals.quarantined[i] += len(rows)

    def _counts(self) -> dict[str, np.ndarray]:
        t = self.totals
        self.totals.dropped[:] = self._dropped_before + [s.dropped for s in self._streams]
        return {n: getattr(t, n).copy() for n in ("samples", "tokens", "quarantined", "dropped")}

    # what others may ask

    def state(self) -> StreamState:
        return self._state

    @property
    def next_step(self) -> int:
        return self._state.step

    @property
    def weights(self) -> list[float]:
        return list(self._weights)

    @property
    def dropped(self) -> list[int]:
        """Rows that filters dropped, in windows behind the samples drawn so far."""
        return (self._dropped_before + [s.dropped for s in self._streams]).tolist()

    def waiting_for(self) -> str:
        """What the next plan waits for, in words."""
        if self._finished:
            return f"nothing: the job ends before step {self._finished.step}"
        if self._waiting:
            rows = [
                f"{n - self._streams[i].ready} more of source {self.spec.sources[i].name!r}"
                for i, n in sorted(self._waiting.items())
                if self._streams[i].ready < n and not self._streams[i].ended
            ]
            return f"samples that step {self._state.step} draws: " + ", ".join(rows[:5]) + (", ..." if len(rows) > 5 else "")
        slow = min(self._consumed, key=lambda r: self._consumed[r]) if self._consumed else -1
        if slow >= 0 and len(self._outstanding) >= self.spec.prefetch:
            return f"rank {slow}, which holds {self.spec.prefetch} steps it has not taken (it took step {self._consumed[slow]} last)"
        return f"the plan of step {self._state.step}"

    def check(self) -> None:
        """Invariants, for tests."""
        for stream in self._streams:
            stream.check()
        if self.spec.batch.samples and self.spec.draw == "exact" and not self._state.events and all(self._state.active):
            assert all(abs(o) < 2**40 for o in self._state.owed), "an account is a whole sample off"


def _step_positions(drawn: Drawn) -> tuple[np.ndarray, np.ndarray | None]:
    """Order of the step over samples listed source by source, and the sub-draw of each."""
    totals = np.sum(drawn.counts, axis=0)
    first = np.cumsum(totals) - totals
    orders = []
    for counts in drawn.counts:
        source, k = step_order(counts)
        orders.append(first[source] + k)
        first = first + np.array(counts)
    if len(orders) == 1:
        return orders[0], None
    return np.concatenate(orders), np.repeat(np.arange(len(orders), dtype=np.int32), [len(o) for o in orders])


def _check_strategy(plan: Any, buffer: Buffer, place: ClientPlaceTree) -> None:
    if not isinstance(plan, LoadingPlan):
        raise PlanError(f"the strategy returned {type(plan).__name__}", buffer.step, "end it with .plan()")
    same = plan.step == buffer.step and plan.names == buffer.names and len(plan) == len(buffer)
    columns = ((getattr(plan, n), getattr(buffer, n)) for n in ("source", "epoch", "file", "row", "part"))
    if not same or not all(a is b or np.array_equal(a, b) for a, b in (*columns, (plan.tokens, buffer.meta["tokens"]))):
        raise PlanError(
            "the strategy changed the drawn samples", buffer.step, "a strategy places samples; it neither adds, drops nor reorders them"
        )
    wanted = place.n_buckets("DP")
    if "backbone" in plan.modules and plan.main.n_buckets != wanted:  # more would never be delivered
        raise PlanError(f"the plan has {plan.main.n_buckets} buckets, {place} has {wanted}", buffer.step, 'call .distribute("DP")')


def _restored(state: StreamState, name: str, n: int) -> np.ndarray:
    return np.array(state.counts.get(name, np.zeros(n)), np.int64)
