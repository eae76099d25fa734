"""Decisions to read a source in more loader workers (hosts), or in fewer: the Overlord paper (arXiv
2504.09844), section 5.2. Pure.

Trainers would take some number of steps per second if they never waited. The need of a source is
that number, times its samples in a step, times the measured cost of a sample. The result is seconds
of work per second, which is cores. It is compared with the cores that its workers can use
(``scaling/core_demand.py``). Scaling changes neither the draw nor the stream.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from overlord.scaling.core_demand import Demand, Need, cores_used, needs_of
from overlord.scaling.loader_placement import locked_part, measured_part

# a slow read belongs to a long tail if it takes this many times the usual time
LEAST_TAIL = 4.0
# share of their time that trainers wait before a source is reported, if nothing can be moved
WAITED = 0.02
# greatest number of steps for which samples of one source are held; bytes have their own bound
MOST_AHEAD = 32
LOCKED = 0.5  # locked part of a source above which threads do not help
# share of a core that may be missing for one more worker: light sources that share a worker with a
# heavy one take a few percent
SPARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resources and delays of scaling."""

    cores: int  # that loader workers may use; never more workers than that
    # cores that a worker's threads can use, if their code releases the interpreter lock
    lanes: float = 1.0
    # of all loader workers; a new one is assumed to hold as much as one does now
    memory_bytes: int | None = None
    interval_s: float = 1.0  # between two observations
    window: int = 4  # observations that are averaged
    # consecutive observations that must agree before a source gets more; 1 would follow every
    # hiccup
    patience: int = 2
    # the same before it gets less: a missing worker costs more than an idle one
    idle_patience: int = 6
    # time after a change before the same source is examined again: its figures are from before
    cool_down_s: float = 5.0
    # time to look ahead in a schedule: about the time until a new worker has taken over
    foresight_s: float = 10.0
    target: float = 0.7  # target utilization of its workers; the rest is for slow moments
    high: float = 0.85  # utilization above which a source gets more
    # it gets less if its utilization with one worker less is below this: far enough below `target`
    # that noise does not undo it
    low: float = 0.55

    def __post_init__(self) -> None:
        whole = {
            "cores": self.cores,
            "window": self.window,
            "patience": self.patience,
            "idle_patience": self.idle_patience,
        }
        wrong = [
            f"{name}: expected at least 1, got {value!r}"
            for name, value in whole.items()
            if not isinstance(value, int) or value < 1
        ]
        times = {
            "interval_s": self.interval_s,
            "cool_down_s": self.cool_down_s,
            "foresight_s": self.foresight_s,
            "lanes": self.lanes,
        }
        wrong += [
            f"{name}: expected a number above 0, got {value!r}"
            for name, value in times.items()
            if not 0 < value < math.inf
        ]
        if not 0 < self.low < self.target < self.high <= 1:
            wrong.append(
                f"expected 0 < low < target < high <= 1, got {self.low}, {self.target}, {self.high}"
            )
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSample:
    """One source in one interval."""

    name: str
    share: float  # of the mixture, now
    # the largest known share within the foresight; the current one if nothing is known
    ahead: float
    drawn: float  # samples in planned steps
    read: float  # samples that its loaders read
    busy_s: float  # core seconds for it, over all cores
    took_s: float = 0.0  # wall-clock seconds for it, with waiting for storage or other threads
    waited_for: bool = False  # the next step waits for it
    hosts: tuple[int, ...]  # that read it
    most: int = 1  # workers that could
    able: tuple[int, ...] = ()  # existing workers that do not read it and could
    # seconds of a core per sample that are known to release the interpreter lock; the rest is
    # assumed to hold it
    free_s: float = math.inf
    processes: int = 0  # that run its code; 0: one for each of ``hosts``
    read_s: float = 0.0  # duration of a usual read
    slow_read_s: float = 0.0  # duration of one of the slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The input of scaling for one interval."""

    seconds: float
    planned: float  # steps
    taken: float  # steps that every trainer took
    waited_s: float  # time that trainers waited for them, on average
    hosts: int  # number of loader workers
    sources: tuple[SourceSample, ...]
    host_bytes: int = 0  # memory of one loader worker
    changing: bool = False  # a change is under way


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Read a source in another number of loader workers."""

    source: str
    hosts: int  # from here on
    had: int
    reason: str
    # of these, workers that read other sources already; missing ones are started
    on: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.source}: {self.had} -> {self.hosts} loader workers: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotKeepUp:
    """A source that trainers wait for, or will wait for, and that gets no more workers; with the
    number it would need.
    """

    source: str
    hosts: int
    wanted: int
    reason: str
    what: str = "loader workers"

    def __str__(self) -> str:
        return (
            f"{self.source} cannot keep up: it would take {self.wanted} {self.what} and has "
            f"{self.hosts}: {self.reason}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """Hold samples of a source ready for ``steps`` steps."""

    source: str
    steps: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.steps} steps are read ahead: {self.reason}"


Decision = Scale | CannotKeepUp | ReadAhead


@dataclass(slots=True, eq=False)
class _SourceEstimate:
    """The estimates for a source."""

    looks: deque[tuple[SourceSample, Observation]]  # as many as the pace is computed from
    share: float = 0.0  # moving average
    cost_s: float = 0.0  # of a sample; 0: none was ever read
    took_s: float = 0.0  # of a sample, with waiting
    locked: float | None = None  # its locked part as measured; None: it could not be measured yet
    waited_for: int = 0  # consecutive observations in which the next step waited for it
    above: int = 0  # consecutive observations with too few workers
    below: int = 0
    changed: float = -math.inf
    ahead: int = 0  # steps read ahead, if it was changed
    short: int = 0  # workers that it was reported to lack
    fine: int = 0  # consecutive observations with enough workers


class Scaler:
    """``handle(observed, now) -> decisions``: at most one ``Scale`` at a time, the most urgent.

    ``fixed``: nothing can be moved, and a source has loaders, each on a core of its own. Then the
    scaler only sets read-ahead, and reports sources that cannot keep up.
    """

    def __init__(self, limits: Limits, read_ahead: int = 2, *, fixed: bool = False):
        self.limits, self._read_ahead, self.fixed = limits, read_ahead, fixed
        # cores that all sources need together, and that their workers can use
        self._all = self._used = 0.0
        self._known: dict[str, _SourceEstimate] = {}
        # waits are reported when they end, and may be long
        self._paces: deque[Observation] = deque(maxlen=4 * limits.window)
        # steps per second that trainers would take if they never waited; 0: not known yet
        self.pace = 0.0
        self.waited = 0.0  # share of their time that trainers wait
        self.rate = 0.0  # steps per second that trainers take

    def handle(self, observed: Observation, now: float) -> list[Decision]:
        self._paces.append(observed)
        for seen in observed.sources:
            self._learn(seen, observed)
        self._see_pace()
        if not self.pace:
            return []  # no trainer has taken a step recently
        demands = self._demands(observed)
        self._used, needs = (
            cores_used(demands, self.limits.lanes, observed.hosts),
            needs_of(demands, self.limits.lanes),
        )
        decisions: list[Decision] = [*self._read_aheads(observed)]
        self._count(observed, needs)
        if observed.changing:
            return decisions
        ups, short = self._ups(observed, needs, now)
        if self.fixed:
            return [*decisions, *short]
        return [
            *decisions,
            *short,
            *(ups[:1] or self._downs(observed, needs, now, pressed=self._is_pressed())[:1]),
        ]

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the estimates for every source, for status."""
        return {
            name: {
                "share": k.share,
                "seconds_per_sample": k.cost_s,
                "locked": self._locked(k.looks[-1][0]),
            }
            for name, k in self._known.items()
        }

    # estimates

    def _learn(self, seen: SourceSample, observed: Observation) -> None:
        known = self._known.get(seen.name)
        if known is None:
            known = self._known[seen.name] = _SourceEstimate(
                deque(maxlen=self._paces.maxlen), seen.share
            )
        known.looks.append((seen, observed))
        known.share += (seen.share - known.share) * 2 / (1 + self.limits.window)
        if read := math.fsum(s.read for s, _ in known.looks):
            known.cost_s = math.fsum(s.busy_s for s, _ in known.looks) / read
            known.took_s = math.fsum(s.took_s for s, _ in known.looks) / read
        known.locked = self._measured(known) if self._measured(known) is not None else known.locked
        known.waited_for = known.waited_for + 1 if seen.waited_for else 0

    def _measured(self, known: _SourceEstimate) -> float | None:
        """Return the locked part of the last observations; None if they do not show it."""
        seconds = math.fsum(o.seconds * (s.processes or len(s.hosts)) for s, o in known.looks)
        if not seconds:
            return None
        return measured_part(
            math.fsum(s.took_s for s, _ in known.looks) / seconds,
            math.fsum(s.busy_s for s, _ in known.looks) / seconds,
        )

    def _locked(self, seen: SourceSample) -> float:
        """Return the locked part of a source: measured, else assumed from its code."""
        known = self._known[seen.name]
        return known.locked if known.locked is not None else locked_part(known.cost_s, seen.free_s)

    def _see_pace(self) -> None:
        seconds, taken = (
            math.fsum(o.seconds for o in self._paces),
            math.fsum(o.taken for o in self._paces),
        )
        waited = min(seconds, math.fsum(o.waited_s for o in self._paces))
        self.waited = waited / seconds if seconds else 0.0
        # A trainer that only ever waits would take any number of steps. It is assumed to compute
        # for a twentieth of its time.
        self.pace = taken / max(seconds - waited, seconds / 20) if taken else 0.0
        self.rate = taken / seconds if seconds else 0.0

    # needs

    def _demands(self, observed: Observation) -> list[Demand]:
        planned = math.fsum(o.planned for o in self._paces)
        drawn = math.fsum(s.drawn for o in self._paces for s in o.sources)
        per_step, found = drawn / planned if planned else 0.0, []
        for s in observed.sources:
            known = self._known[s.name]
            # A need of a moment ago may return in a moment: the weights of mixtures that learn go
            # up and down.
            shares = max(s.share, known.share), s.ahead
            now, later = (
                self.pace * self._samples(s, share, per_step) * known.cost_s for share in shares
            )
            found.append(
                Demand(
                    s.name,
                    now,
                    later,
                    self._locked(s),
                    s.hosts,
                    s.processes or len(s.hosts),
                    s.able,
                )
            )
        self._all = math.fsum(d.now for d in found)
        return found

    def _samples(self, seen: SourceSample, share: float, per_step: float) -> float:
        """Return the samples of a source in a step. Weights of batches in tokens are shares of
        tokens; there the drawn samples determine the number.
        """
        looks = self._known[seen.name].looks
        drawn, meant = (
            math.fsum(s.drawn for s, _ in looks),
            math.fsum(s.share * o.planned for s, o in looks),
        )
        return drawn * share / meant if drawn and meant else per_step * share

    def _count(self, observed: Observation, needs: dict[str, Need]) -> None:
        for s in observed.sources:
            known, need = self._known[s.name], needs[s.name]
            up = need.most > self.limits.high * need.room and self._is_missed(s, need, observed)
            down = need.fewest(self.limits.low) < len(s.hosts)
            known.above, known.below = known.above + 1 if up else 0, known.below + 1 if down else 0
            known.fine = 0 if up or self._waits_for_storage(s, need) else known.fine + 1
            known.short = known.short if known.fine < self.limits.idle_patience else 0

    def _is_missed(self, seen: SourceSample, need: Need, observed: Observation) -> bool:
        if self.fixed:
            return self.waited > WAITED
        return need.later > need.now or self.waited > 0.01 or self._is_busy(seen, need, observed)

    def _is_busy(self, seen: SourceSample, need: Need, observed: Observation) -> bool:
        """Return whether the loaders of a source are busy. Measurement overrides prediction: a
        source whose loaders are idle needs no more of them.
        """
        return seen.busy_s > 0.5 * observed.seconds * len(seen.hosts) * need.per_host

    # decisions

    def _ups(
        self, observed: Observation, needs: dict[str, Need], now: float
    ) -> tuple[list[Scale], list[CannotKeepUp]]:
        ups, short, crowded = list[Scale](), list[CannotKeepUp](), set[int]()
        ready = [
            s
            for s in observed.sources
            if self._known[s.name].above >= self.limits.patience and self._cool(s, now)
        ]
        # The heaviest first: on a worker that several sources share, it alone moves, and the others
        # have room then.
        for s in sorted(ready, key=lambda s: (-needs[s.name].most, s.name)):
            if crowded & set(s.hosts):
                continue
            crowded |= set(s.hosts)
            need, had = needs[s.name], len(s.hosts)
            grant = need.grant(self.limits.target, self._free(observed), s.most - had)
            hosts = had + grant.new + len(grant.on)
            if hosts > had:
                ups.append(
                    self._changed(
                        Scale(
                            source=s.name,
                            hosts=hosts,
                            had=had,
                            reason=self._why(s, need),
                            on=grant.on,
                        ),
                        now,
                    )
                )
            if grant.short and self._is_news(s.name, hosts + grant.short):
                short.append(self._short(s, need, hosts, hosts + grant.short))
            if ups:
                break
        return ups, short + [
            self._slow_storage(s, needs[s.name])
            for s in observed.sources
            if self._is_slow(s, needs[s.name])
        ]

    def _short(self, seen: SourceSample, need: Need, hosts: int, wanted: int) -> CannotKeepUp:
        if not self.fixed:
            return CannotKeepUp(
                source=seen.name,
                hosts=hosts,
                wanted=wanted,
                reason=self._why_not(seen, need, hosts),
            )
        why = f"{self._rates(seen, need.most)}, trainers wait {self.waited:.0%} of their time; "
        if self._locked(seen) > LOCKED:
            why += (
                "its code holds the interpreter lock: workers='processes', or "
                "runtime='process' with autoscale=True, give it more"
            )
        else:
            why += "loaders= and autoscale=True give it more"
        if self._all > self.limits.cores:
            why += (
                f"; all sources together take {self._all:.2g} cores of {self.limits.cores}, "
                "so that alone is not enough"
            )
        return CannotKeepUp(
            source=seen.name, hosts=hosts, wanted=wanted, reason=why, what="loaders"
        )

    def _is_news(self, source: str, wanted: int) -> bool:
        """Return whether a shortage is new: it is reported once, and again if it changes by a
        factor of two.
        """
        known = self._known[source]
        if known.short and known.short / 2 < wanted < known.short * 2:
            return False
        known.short = wanted
        return True

    def _waits_for_storage(self, seen: SourceSample, need: Need) -> bool:
        """Return whether trainers wait for a source although its workers have room: then it waits
        for something other than a core.
        """
        known = self._known[seen.name]
        return (
            self.waited > 0.1
            and known.waited_for > 0
            and need.most < need.room
            and known.took_s > 2 * known.cost_s
        )

    def _is_slow(self, seen: SourceSample, need: Need) -> bool:
        known = self._known[seen.name]
        if (
            known.waited_for < self.limits.idle_patience
            or not self._waits_for_storage(seen, need)
            or not known.cost_s
        ):
            return False
        wanted = math.ceil(need.most / known.cost_s * known.took_s)
        return wanted > seen.most and self._is_news(seen.name, wanted)

    def _slow_storage(self, seen: SourceSample, need: Need) -> CannotKeepUp:
        known = self._known[seen.name]
        why = (
            f"a sample takes {known.took_s * 1e3:.3g} ms, of a core {known.cost_s * 1e3:.3g} "
            "ms: it waits for storage, for services that its transforms call, or for the "
            "interpreter lock (workers='processes'); this many loaders= would wait concurrently"
        )
        return CannotKeepUp(
            source=seen.name, hosts=seen.most, wanted=known.short, what="loaders", reason=why
        )

    def _free(self, observed: Observation) -> int:
        free = min(
            self.limits.cores - observed.hosts, math.floor(self.limits.cores - self._used + SPARE)
        )
        # before the memory of a worker is known, there is no room for one
        if self.limits.memory_bytes is not None:
            free = min(
                free,
                self.limits.memory_bytes // observed.host_bytes - observed.hosts
                if observed.host_bytes
                else 0,
            )
        return max(0, free)

    def _downs(
        self, observed: Observation, needs: dict[str, Need], now: float, pressed: bool
    ) -> list[Scale]:
        """Return decisions to use fewer workers. ``pressed``: another source needs workers and
        there are none, so unneeded ones are released soon.
        """
        patience = self.limits.patience if pressed else self.limits.idle_patience
        downs = []
        for s in sorted(
            observed.sources, key=lambda s: (needs[s.name].most - needs[s.name].room, s.name)
        ):
            if self._known[s.name].below < patience or not self._cool(s, now):
                continue
            need, had = needs[s.name], len(s.hosts)
            hosts = need.fewest(self.limits.low)
            if hosts < had:
                reason = f"they are {need.most / need.room:.0%} busy at {self._rates(s, need.most)}"
                downs.append(Scale(source=s.name, hosts=hosts, had=had, reason=reason))
                break
        return [self._changed(down, now) for down in downs]

    def _is_pressed(self) -> bool:
        return any(known.short for known in self._known.values())

    def _cool(self, seen: SourceSample, now: float) -> bool:
        return now - self._known[seen.name].changed >= self.limits.cool_down_s

    def _changed(self, scale: Scale, now: float) -> Scale:
        known = self._known[scale.source]
        known.above, known.below, known.changed = 0, 0, now
        return scale

    # texts

    def _rates(self, seen: SourceSample, need: float) -> str:
        cost = self._known[seen.name].cost_s
        return f"{need / cost if cost else 0.0:.3g} samples a second of {cost * 1e3:.3g} ms"

    def _why(self, seen: SourceSample, need: Need) -> str:
        room = f"its workers have room for {need.room:.2g}"
        if need.later > need.now:
            return (
                f"the mixture will give it {seen.ahead:.1%} in place of {seen.share:.1%}: "
                f"{self._rates(seen, need.later)}; {room}"
            )
        waits = f", trainers wait {self.waited:.0%} of their time" if self.waited > 0.01 else ""
        return f"{self._rates(seen, need.now)} take {need.now:.2g} workers, {room}{waits}"

    def _why_not(self, seen: SourceSample, need: Need, hosts: int) -> str:
        if hosts >= seen.most:
            why = (
                f"it has {seen.most} loader{'s' * (seen.most > 1)}: more chunks open together "
                "(shuffle_chunks) or loaders= allow more"
            )
        else:
            why = (
                f"all {self.limits.cores} loader workers that cores and memory allow are in use "
                "(hosts=)"
            )
        return f"{self._rates(seen, need.most)}; {why}"

    # read-ahead

    def _read_aheads(self, observed: Observation) -> list[ReadAhead]:
        """Return read-ahead changes: a source whose reads have a long tail holds as many steps more
        as trainers take during a slow one.
        """
        decisions = []
        for s in observed.sources:
            known, steps = self._known[s.name], self._read_ahead
            if s.slow_read_s > LEAST_TAIL * s.read_s > 0:
                steps = min(max(MOST_AHEAD, steps), steps + math.ceil(s.slow_read_s * self.rate))
            was = known.ahead or self._read_ahead
            if steps >= 2 * was or 2 * steps < was:
                known.ahead = steps
                reason = f"its slow reads take {s.slow_read_s:.3g} s, usual ones {s.read_s:.3g} s"
                decisions.append(ReadAhead(source=s.name, steps=steps, reason=reason))
        return decisions


def in_force(decisions: Sequence[Decision]) -> list[CannotKeepUp]:
    """Return the last decisions on sources that cannot keep up and have got nothing since."""
    last: dict[str, Decision] = {}
    for decision in decisions:
        if not isinstance(decision, ReadAhead):
            last[decision.source] = decision
    return [decision for decision in last.values() if isinstance(decision, CannotKeepUp)]
