"""Autoscaling: the number of loader workers (hosts) that read each source.

The module is pure. The method is that of the Overlord paper (arXiv 2504.09844), section 5.2.
Trainers would take some number of steps per second if they never waited. The need of a source is
that number, times its samples in a step, times the measured cost of a sample. The result is CPU
seconds per second, which is cores. It is compared with the cores that its workers can use
(``scaling/core_demand.py``). Scaling changes neither the draw nor the stream.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from overlord.scaling.core_demand import (
    Demand,
    Need,
    cores_used,
    locked_part,
    measured_part,
    needs_of,
)
from overlord.scaling.decisions import CannotKeepUp, Decision, ReadAhead, Scale

# slow reads are a long tail if they take more than this many times the usual time
LEAST_TAIL = 4.0
# with ``fixed``: share of time that trainers wait above which a source is reported
WAITED = 0.02
# greatest number of steps that one source is read ahead, unless the job reads further ahead; the
# buffer budget bounds bytes
MOST_AHEAD = 32
LOCKED = 0.5  # locked part of a source above which more threads do not help
# part of a core that may be missing when one more worker is started
SPARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """Resources, thresholds and delays of scaling; all times are in seconds."""

    cores: int  # CPU cores of all loader workers; also the greatest number of workers
    # cores that the threads of one worker can use if their code releases the interpreter lock
    lanes: float = 1.0
    # memory of all loader workers; a new worker is assumed to hold as much as one does now; None:
    # no bound
    memory_bytes: int | None = None
    interval_s: float = 1.0  # between two observations
    window: int = 4  # observations that are averaged
    # consecutive observations that must agree before a source gets more workers
    patience: int = 2
    # consecutive observations that must agree before a source gets fewer workers; more, since a
    # missing worker costs more than an idle one
    idle_patience: int = 6
    # time after a change before the same source is changed again, since its averages are outdated
    cool_down_s: float = 5.0
    # time to look ahead in the schedule: about the time until a new worker has taken over
    foresight_s: float = 10.0
    target: float = 0.7  # target utilization of the workers of a source
    high: float = 0.85  # utilization above which a source gets more workers
    # a source gets fewer workers if their utilization then stays below this; the distance to
    # `target` prevents oscillation
    low: float = 0.55

    def __post_init__(self) -> None:
        whole = {
            "cores": self.cores,
            "window": self.window,
            "patience": self.patience,
            "idle_patience": self.idle_patience,
        }
        wrong = [
            f"{name}: expected a whole number of at least 1, got {value!r}"
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
            f"{name}: expected a finite number above 0, got {value!r}"
            for name, value in times.items()
            if not 0 < value < math.inf
        ]
        if not 0 < self.low < self.target < self.high <= 1:
            wrong.append(
                "low, target, high: expected 0 < low < target < high <= 1, got "
                f"{self.low}, {self.target}, {self.high}"
            )
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSample:
    """Measurements of one source in one interval."""

    name: str
    share: float  # current share of the mixture
    # the largest scheduled share within ``foresight_s``; the current one if none is known
    ahead: float
    drawn: float  # samples in planned steps
    read: float  # samples that its loaders read
    busy_s: float  # CPU seconds of its loaders, over all cores
    took_s: float = 0.0  # wall-clock seconds of its loaders, waiting for storage included
    waited_for: bool = False  # the next step waits for its samples
    hosts: tuple[int, ...]  # workers that read it
    most: int = 1  # greatest number of workers that can read it
    able: tuple[int, ...] = ()  # existing workers that do not read it and could
    # CPU seconds per sample in code that is known to release the interpreter lock; the rest is
    # assumed to hold it
    free_s: float = math.inf
    processes: int = 0  # processes that run its code; 0: one for each of ``hosts``
    read_s: float = 0.0  # seconds of a usual read
    slow_read_s: float = 0.0  # seconds of a slow read


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measurements of a job in one interval: the input of scaling."""

    seconds: float
    planned: float  # steps that were planned
    taken: float  # steps that every trainer took
    waited_s: float  # mean seconds that trainers waited for these steps
    hosts: int  # number of loader workers
    sources: tuple[SourceSample, ...]
    host_bytes: int = 0  # memory of one loader worker
    changing: bool = False  # a migration of loaders is in progress


@dataclass(slots=True, eq=False)
class _SourceEstimate:
    """Estimates of a source from its last samples, and counts for decisions on it."""

    samples: deque[tuple[SourceSample, Observation]]  # those from which the pace is computed
    share: float = 0.0  # moving average of its share of the mixture
    cost_s: float = 0.0  # CPU seconds of a sample; 0: none was read yet
    took_s: float = 0.0  # wall-clock seconds of a sample, with waiting
    locked: float | None = None  # measured locked part; None: it could not be measured yet
    waited_for: int = 0  # consecutive observations in which the next step waited for it
    above: int = 0  # consecutive observations with too few workers
    below: int = 0  # consecutive observations with too many workers
    changed: float = -math.inf  # time of the last change of its workers
    ahead: int = 0  # steps read ahead; 0: the default of the job
    short: int = 0  # workers that it would need, as last reported; 0: it was not reported
    fine: int = 0  # consecutive observations with enough workers


class Scaler:
    """State machine that decides on the workers and the read-ahead of sources.

    Its events are observations. ``fixed``: loaders cannot be moved, and each has a core of its own.
    Then the scaler only sets read-ahead, and reports sources that cannot keep up.
    """

    def __init__(self, limits: ScalingLimits, read_ahead: int = 2, *, fixed: bool = False):
        self.limits, self._read_ahead, self.fixed = limits, read_ahead, fixed
        # cores that all sources need together, and cores that their workers keep busy
        self._all = self._used = 0.0
        self._known: dict[str, _SourceEstimate] = {}
        # last observations; the window is long, since a wait is reported only when it ends
        self._paces: deque[Observation] = deque(maxlen=4 * limits.window)
        # steps per second that trainers would take if they never waited; 0: not known yet
        self.pace = 0.0
        self.waited = 0.0  # share of their time that trainers wait
        self.rate = 0.0  # steps per second that trainers take

    def handle(self, observed: Observation, now: float) -> list[Decision]:
        """Return the decisions after one observation at ``now`` (seconds of a monotonic clock).

        There is at most one ``Scale``, the most urgent.
        """
        self._paces.append(observed)
        for seen in observed.sources:
            self._learn(seen, observed)
        self._update_pace()
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

    def estimates(self) -> dict[str, dict[str, float]]:
        """Return share, CPU seconds per sample and locked part of every source, for status."""
        return {
            name: {
                "share": k.share,
                "seconds_per_sample": k.cost_s,
                "locked": self._locked(k.samples[-1][0]),
            }
            for name, k in self._known.items()
        }

    # estimates

    def _learn(self, seen: SourceSample, observed: Observation) -> None:
        """Update the estimates of one source by its sample of an observation."""
        known = self._known.get(seen.name)
        if known is None:
            known = self._known[seen.name] = _SourceEstimate(
                deque(maxlen=self._paces.maxlen), seen.share
            )
        known.samples.append((seen, observed))
        known.share += (seen.share - known.share) * 2 / (1 + self.limits.window)
        if read := math.fsum(s.read for s, _ in known.samples):
            known.cost_s = math.fsum(s.busy_s for s, _ in known.samples) / read
            known.took_s = math.fsum(s.took_s for s, _ in known.samples) / read
        measured = self._measured(known)
        known.locked = known.locked if measured is None else measured
        known.waited_for = known.waited_for + 1 if seen.waited_for else 0

    def _measured(self, known: _SourceEstimate) -> float | None:
        """Return the locked part in the last observations; None if it cannot be measured."""
        seconds = math.fsum(o.seconds * (s.processes or len(s.hosts)) for s, o in known.samples)
        if not seconds:
            return None
        return measured_part(
            math.fsum(s.took_s for s, _ in known.samples) / seconds,
            math.fsum(s.busy_s for s, _ in known.samples) / seconds,
        )

    def _locked(self, seen: SourceSample) -> float:
        """Return the locked part of a source: measured, else assumed from its code."""
        known = self._known[seen.name]
        return known.locked if known.locked is not None else locked_part(known.cost_s, seen.free_s)

    def _update_pace(self) -> None:
        """Estimate the pace of trainers from the last observations."""
        seconds, taken = (
            math.fsum(o.seconds for o in self._paces),
            math.fsum(o.taken for o in self._paces),
        )
        waited = min(seconds, math.fsum(o.waited_s for o in self._paces))
        self.waited = waited / seconds if seconds else 0.0
        # A trainer that only waits would have an infinite pace, so it is assumed to compute for a
        # twentieth of its time.
        self.pace = taken / max(seconds - waited, seconds / 20) if taken else 0.0
        self.rate = taken / seconds if seconds else 0.0

    # needs

    def _demands(self, observed: Observation) -> list[Demand]:
        """Return the cores that every source needs now and soon; sum up those needed now."""
        planned = math.fsum(o.planned for o in self._paces)
        drawn = math.fsum(s.drawn for o in self._paces for s in o.sources)
        per_step, found = drawn / planned if planned else 0.0, []
        for s in observed.sources:
            known = self._known[s.name]
            # The average share counts, too, since the weights of an adaptive mixture fluctuate.
            shares = max(s.share, known.share), s.ahead
            now, later = (
                self.pace * self._samples_per_step(s, share, per_step) * known.cost_s
                for share in shares
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

    def _samples_per_step(self, seen: SourceSample, share: float, per_step: float) -> float:
        """Return the samples of a source in a step, at a share of the mixture.

        The estimate uses recently drawn samples, since with batches in tokens a share counts
        tokens. ``per_step``: samples of all sources in a step, used if none of this source were
        drawn.
        """
        samples = self._known[seen.name].samples
        drawn, meant = (
            math.fsum(s.drawn for s, _ in samples),
            math.fsum(s.share * o.planned for s, o in samples),
        )
        return drawn * share / meant if drawn and meant else per_step * share

    def _count(self, observed: Observation, needs: dict[str, Need]) -> None:
        """Count consecutive observations with too few, too many or enough workers."""
        for s in observed.sources:
            known, need = self._known[s.name], needs[s.name]
            up = need.most > self.limits.high * need.room and self._is_late(s, need, observed)
            down = need.fewest(self.limits.low) < len(s.hosts)
            known.above, known.below = known.above + 1 if up else 0, known.below + 1 if down else 0
            known.fine = 0 if up or self._waits_for_storage(s, need) else known.fine + 1
            known.short = known.short if known.fine < self.limits.idle_patience else 0

    def _is_late(self, seen: SourceSample, need: Need, observed: Observation) -> bool:
        """Return whether trainers wait or would soon wait for a source."""
        if self.fixed:
            return self.waited > WAITED
        return need.later > need.now or self.waited > 0.01 or self._is_busy(seen, need, observed)

    def _is_busy(self, seen: SourceSample, need: Need, observed: Observation) -> bool:
        """Return whether the workers of a source are more than half busy.

        Measurement overrides prediction: a source with idle workers needs no more of them.
        """
        return seen.busy_s > 0.5 * observed.seconds * len(seen.hosts) * need.per_host

    # decisions

    def _ups(
        self, observed: Observation, needs: dict[str, Need], now: float
    ) -> tuple[list[Scale], list[CannotKeepUp]]:
        """Return at most one decision to use more workers, and the sources that cannot keep up."""
        ups, short, crowded = list[Scale](), list[CannotKeepUp](), set[int]()
        ready = [
            s
            for s in observed.sources
            if self._known[s.name].above >= self.limits.patience and self._has_cooled_down(s, now)
        ]
        # The heaviest source comes first. Of sources that share a worker only the heaviest gets
        # other workers; the others then have room.
        for s in sorted(ready, key=lambda s: (-needs[s.name].most, s.name)):
            if crowded & set(s.hosts):
                continue
            crowded |= set(s.hosts)
            need, had = needs[s.name], len(s.hosts)
            grant = need.grant(self.limits.target, self._free_workers(observed), s.most - had)
            hosts = had + grant.new + len(grant.on)
            if hosts > had:
                ups.append(
                    self._noted(
                        Scale(
                            source=s.name,
                            hosts=hosts,
                            had=had,
                            reason=self._reason_for_more(s, need),
                            on=grant.on,
                        ),
                        now,
                    )
                )
            if grant.short and self._is_new_shortage(s.name, hosts + grant.short):
                short.append(self._shortage(s, need, hosts, hosts + grant.short))
            if ups:
                break
        return ups, short + [
            self._slow_storage(s, needs[s.name])
            for s in observed.sources
            if self._storage_is_slow(s, needs[s.name])
        ]

    def _shortage(self, seen: SourceSample, need: Need, hosts: int, wanted: int) -> CannotKeepUp:
        """Return the report of a source that lacks workers, with the remedy."""
        if not self.fixed:
            return CannotKeepUp(
                source=seen.name,
                hosts=hosts,
                wanted=wanted,
                reason=self._reason_for_no_more(seen, need, hosts),
            )
        why = f"{self._rate(seen, need.most)}, trainers wait {self.waited:.0%} of their time; "
        if self._locked(seen) > LOCKED:
            why += (
                "its code holds the interpreter lock: workers='processes', or "
                "runtime='process' with autoscale=True, give it more cores"
            )
        else:
            why += "loaders= and autoscale=True give it more loaders"
        if self._all > self.limits.cores:
            why += (
                f"; all sources together need {self._all:.2g} cores of {self.limits.cores}, "
                "so that alone is not enough"
            )
        return CannotKeepUp(
            source=seen.name, hosts=hosts, wanted=wanted, reason=why, what="loaders"
        )

    def _is_new_shortage(self, source: str, wanted: int) -> bool:
        """Return whether to report that a source needs ``wanted`` workers, and record the report.

        A shortage is reported once, and again when it changes by a factor of two or more.
        """
        known = self._known[source]
        if known.short and known.short / 2 < wanted < known.short * 2:
            return False
        known.short = wanted
        return True

    def _waits_for_storage(self, seen: SourceSample, need: Need) -> bool:
        """Return whether trainers wait for a source although its workers have free cores.

        The loaders of the source then wait for something other than a core.
        """
        known = self._known[seen.name]
        return (
            self.waited > 0.1
            and known.waited_for > 0
            and need.most < need.room
            and known.took_s > 2 * known.cost_s
        )

    def _storage_is_slow(self, seen: SourceSample, need: Need) -> bool:
        """Return whether to report that a source waits for storage and has too few loaders.

        The report is recorded.
        """
        known = self._known[seen.name]
        if (
            known.waited_for < self.limits.idle_patience
            or not self._waits_for_storage(seen, need)
            or not known.cost_s
        ):
            return False
        wanted = math.ceil(need.most / known.cost_s * known.took_s)
        return wanted > seen.most and self._is_new_shortage(seen.name, wanted)

    def _slow_storage(self, seen: SourceSample, need: Need) -> CannotKeepUp:
        known = self._known[seen.name]
        why = (
            f"a sample takes {known.took_s * 1e3:.3g} ms, of which {known.cost_s * 1e3:.3g} ms "
            "are CPU time: it waits for storage, for services that its transforms call, or for the "
            "interpreter lock (workers='processes'); this many loaders= would wait concurrently"
        )
        return CannotKeepUp(
            source=seen.name, hosts=seen.most, wanted=known.short, what="loaders", reason=why
        )

    def _free_workers(self, observed: Observation) -> int:
        """Return the number of workers that can still be started."""
        free = min(
            self.limits.cores - observed.hosts, math.floor(self.limits.cores - self._used + SPARE)
        )
        # no worker is started before the memory of one was measured
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
        """Return at most one decision to use fewer workers for a source.

        ``pressed``: another source lacks workers, so unneeded workers are released sooner.
        """
        patience = self.limits.patience if pressed else self.limits.idle_patience
        downs = []
        for s in sorted(
            observed.sources, key=lambda s: (needs[s.name].most - needs[s.name].room, s.name)
        ):
            if self._known[s.name].below < patience or not self._has_cooled_down(s, now):
                continue
            need, had = needs[s.name], len(s.hosts)
            hosts = need.fewest(self.limits.low)
            if hosts < had:
                busy = f"{need.most / need.room:.0%}"
                reason = f"its workers are {busy} busy at {self._rate(s, need.most)}"
                downs.append(Scale(source=s.name, hosts=hosts, had=had, reason=reason))
                break
        return [self._noted(down, now) for down in downs]

    def _is_pressed(self) -> bool:
        """Return whether some source lacks workers."""
        return any(known.short for known in self._known.values())

    def _has_cooled_down(self, seen: SourceSample, now: float) -> bool:
        """Return whether the last change of a source was at least ``cool_down_s`` ago."""
        return now - self._known[seen.name].changed >= self.limits.cool_down_s

    def _noted(self, scale: Scale, now: float) -> Scale:
        """Record that a decision was made at ``now``, and return the decision."""
        known = self._known[scale.source]
        known.above, known.below, known.changed = 0, 0, now
        return scale

    # texts

    def _rate(self, seen: SourceSample, need: float) -> str:
        """Describe a need in cores as samples per second and CPU time of each."""
        cost = self._known[seen.name].cost_s
        return f"{need / cost if cost else 0.0:.3g} samples per second of {cost * 1e3:.3g} ms each"

    def _reason_for_more(self, seen: SourceSample, need: Need) -> str:
        """Describe why a source gets more workers."""
        room = f"its workers have room for {need.room:.2g} cores"
        if need.later > need.now:
            return (
                f"the mixture will give it {seen.ahead:.1%} in place of {seen.share:.1%}: "
                f"{self._rate(seen, need.later)}; {room}"
            )
        waits = f", trainers wait {self.waited:.0%} of their time" if self.waited > 0.01 else ""
        return f"{self._rate(seen, need.now)} take {need.now:.2g} cores, {room}{waits}"

    def _reason_for_no_more(self, seen: SourceSample, need: Need, hosts: int) -> str:
        """Describe why a source gets no more workers."""
        if hosts >= seen.most:
            why = (
                f"it has {seen.most} loader{'s' * (seen.most > 1)}: more chunks open together "
                "(shuffle_chunks) or loaders= allow more"
            )
        else:
            why = (
                f"the {self.limits.cores} cores for loading and the memory allow no more loader "
                "workers (hosts=)"
            )
        return f"{self._rate(seen, need.most)}; {why}"

    # read-ahead

    def _read_aheads(self, observed: Observation) -> list[ReadAhead]:
        """Return the decisions to change the read-ahead of sources.

        A source with a long tail of slow reads is read further ahead, by the steps that trainers
        take during one slow read.
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
