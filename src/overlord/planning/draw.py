"""The draw: the number of samples of each source in a step, in exact integers.

The section "The draw" of ``docs/stream.md`` specifies it. Weights are integers that sum to 2^40,
and accounts count in the same unit, so every machine draws the same step. The work is proportional
to the number of sources, not of samples. ``RankProgress`` maps ranks to the steps they took, and
``LoaderRequests`` returns the Refills of loaders.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from overlord.hashing import key64, keyed_hash
from overlord.job.job import UNIT
from overlord.messages.control import GROUPS_AHEAD, Refill

# deadlines are rationals with denominators up to 2^40: scaled by 2^80, unequal ones differ by at
# least 1
SHIFT = 80


class Front(Protocol):
    """The front of a source's stream, as far as it is known."""

    @property
    def ready(self) -> int: ...  # samples known
    @property
    def ended(self) -> bool: ...  # no more samples follow
    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        """Return how many samples from number ``start`` on reach ``tokens``, and their tokens.

        If the known samples do not reach ``tokens``, return the number and tokens of all of them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """The draw of one step: samples per sub-draw and source, and the accounts after it."""

    counts: tuple[tuple[int, ...], ...]  # [sub-draw][source]
    # account of each source: samples (or tokens) that it is behind its weight, times UNIT
    owed: tuple[int, ...]
    active: tuple[bool, ...]  # False: the source is exhausted or lost
    short: bool  # some source had too few samples
    # chunks: exact tokens of each source, of which the last sample may have more
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MissingSamples:
    """The result of a draw that lacks samples: repeat it once ``need[i]`` of source i are ready.

    It may also be repeated once the stream of source i has ended with fewer.
    """

    need: dict[int, int]


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return weights as integers that sum to 2^40, by largest remainder over exact rationals.

    Weights that are all zero stay all zero.
    """
    exact = [Fraction(w) for w in weights]
    total = sum(exact)
    if total == 0:
        return [0] * len(exact)
    scaled = [w / total * UNIT for w in exact]
    floors = [int(s) for s in scaled]
    order = sorted(range(len(exact)), key=lambda i: (floors[i] - scaled[i], i))
    for i in order[: UNIT - sum(floors)]:
        floors[i] += 1
    return floors


def owed_after(
    owed: Sequence[int], left: Sequence[int], weights: Sequence[float], active: Sequence[bool]
) -> tuple[int, ...]:
    """Return the accounts after ``left[i]`` drawn samples of source i were left for later steps.

    The step is smaller by ``sum(left)`` samples, and so are the targets. Otherwise a job that
    overflows at every step would owe ever more, and the debt would outweigh any later mixture.
    """
    whole = whole_weights([w if a else 0.0 for w, a in zip(weights, active, strict=True)])
    return tuple(o + n * UNIT - sum(left) * w for o, n, w in zip(owed, left, whole, strict=True))


def draw_counts(n: int, weights: Sequence[int], owed: list[int]) -> list[int]:
    """Return how many of n samples each source gives, and update the accounts ``owed`` in place.

    ``weights`` are integers from ``whole_weights``. The n samples with the earliest deadlines are
    drawn.
    """
    for i, w in enumerate(weights):
        owed[i] = owed[i] + n * w if w else 0
    counts = [max(0, o // UNIT) if w else 0 for o, w in zip(owed, weights, strict=True)]
    missing = n - sum(counts)
    if missing < 0:  # only after weights changed: samples with the latest deadlines wait
        counts = _earliest_due(n, counts, weights, owed)
    while missing > 0:
        # One more for each source whose target is above its count. Without that rule a heavy source
        # would run ahead. The key is the deadline as an exact integer: unequal rationals differ by
        # at least 2^-80.
        weighted = [i for i, w in enumerate(weights) if w]
        may = [i for i in weighted if owed[i] > UNIT * counts[i]] or weighted
        keys = sorted((((UNIT * (counts[i] + 1) - owed[i]) << SHIFT) // weights[i], i) for i in may)
        for _, i in keys[:missing]:
            counts[i] += 1
        missing = n - sum(counts)
    for i, c in enumerate(counts):
        owed[i] -= c * UNIT
    return counts


def _earliest_due(
    n: int, musts: list[int], weights: Sequence[int], owed: Sequence[int]
) -> list[int]:
    """Return the number of samples of each source among the n earliest due; at most ``musts[i]``.

    Sample k (from 1) of source i is due at ``(k * UNIT - owed[i]) / weights[i]``.
    """
    if (over := sum(musts) - n) < n:
        return _without_latest(over, musts, weights, owed)
    counts = [0] * len(musts)
    heap = [(((UNIT - owed[i]) << SHIFT) // weights[i], i) for i, m in enumerate(musts) if m]
    heapq.heapify(heap)
    for _ in range(n):
        _, i = heap[0]
        counts[i] += 1
        if counts[i] < musts[i]:
            heapq.heapreplace(
                heap, (((UNIT * (counts[i] + 1) - owed[i]) << SHIFT) // weights[i], i)
            )
        else:
            heapq.heappop(heap)
    return counts


def _without_latest(
    n: int, musts: list[int], weights: Sequence[int], owed: Sequence[int]
) -> list[int]:
    """Return ``musts`` without the n latest due; in a draw of tokens these are far fewer."""
    counts = list(musts)
    heap = [
        (-(((UNIT * m - owed[i]) << SHIFT) // weights[i]), -i) for i, m in enumerate(musts) if m
    ]
    heapq.heapify(heap)
    for _ in range(n):
        i = -heap[0][1]
        counts[i] -= 1
        if counts[i]:
            due = ((UNIT * counts[i] - owed[i]) << SHIFT) // weights[i]
            heapq.heapreplace(heap, (-due, -i))
        else:
            heapq.heappop(heap)
    return counts


def random_counts(n: int, weights: Sequence[int], seed: int, step: int, first: int) -> list[int]:
    """Return the number of samples of each source among n random picks.

    Pick j of the step is a function of (seed, step, j); ``first`` is the number of the first pick.
    """
    h = keyed_hash(key64("draw", seed), np.full(n, step, np.int64), np.arange(first, first + n))
    picks = h >> np.uint64(24)  # (h * 2^40) >> 64
    source = np.searchsorted(np.cumsum(np.array(weights, np.uint64)), picks, side="right")
    return np.bincount(source, minlength=len(weights)).tolist()


def step_order(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (source, k) of every sample of a draw, in the order of the draw.

    Sample k of n (from 0) has the position (k + 1/2)/n; ties are broken by source.

    float64 division is correctly rounded. So equal rationals give equal keys and, below 2^25
    samples, unequal ones differ.
    """
    n = np.asarray(counts, np.int64)
    order = _order_of_draw(n)
    source = np.arange(len(n), dtype=np.int32).repeat(n)[order]
    return source, order - (np.cumsum(n) - n)[source]


def _order_of_draw(n: np.ndarray) -> np.ndarray:
    """Return the rows of a draw in its order; rows are numbered source by source."""
    first = np.cumsum(n) - n
    twice = np.arange(1, 2 * int(n.sum()), 2) - (2 * first).repeat(n)  # 2k + 1
    return (twice / (2 * n).repeat(n)).argsort(kind="stable")


def step_positions(counts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the order of a step: row numbers of its samples, which are listed source by source.

    ``counts[draw][source]`` is the number of samples. Also return the sub-draw of each sample in
    that order, or None if there is only one sub-draw.
    """
    if len(counts) == 1:
        return _order_of_draw(np.asarray(counts[0], np.int64)), None
    totals = np.sum(counts, axis=0)
    first = np.cumsum(totals) - totals
    orders = []
    for draw in counts:
        source, k = step_order(draw)
        orders.append(first[source] + k)
        first = first + np.array(draw)
    return np.concatenate(orders), np.repeat(
        np.arange(len(orders), dtype=np.int32), [len(o) for o in orders]
    )


class Drawer:
    """The rules of a job's draw. Accounts are arguments and results of ``draw``, not kept here."""

    def __init__(
        self,
        *,
        samples: int | None,
        tokens: int | None,
        draws: int,
        random: bool,
        seed: int,
        fill: bool,
        exact_tokens: bool = False,
    ):
        """Draw ``samples`` samples or ``tokens`` tokens a step, in ``draws`` sub-draws.

        ``exact_tokens``: exactly that number of tokens, for which samples are cut.
        """
        self._amount, self._in_tokens, self._draws = (
            samples or tokens or 0,
            tokens is not None,
            draws,
        )
        self._exact_tokens = exact_tokens
        self._random, self._seed, self._fill = random, seed, fill
        # arguments and result of the last exact draw: a blocked draw is repeated
        self._drawn: tuple[tuple[Any, ...], tuple[list[int], list[int]]] | None = None
        self._whole: tuple[tuple[float, ...], tuple[bool, ...], list[int]] | None = None

    def draw(
        self,
        step: int,
        weights: Sequence[float],
        owed: Sequence[int],
        active: Sequence[bool],
        fronts: Sequence[Front],
    ) -> Drawn | MissingSamples:
        """Return the draw of a step, or the samples that it lacks. The arguments do not change."""
        run = _DrawAccounts(step, tuple(weights), list(owed), list(active), fronts)
        if self._exact_tokens:
            return self._chunks(run)
        counts = []
        base, more = divmod(self._amount, self._draws)
        for k in range(self._draws):
            before = list(run.taken)
            amount = base + (k < more)
            need = (
                self._by_tokens(run, amount) if self._in_tokens else self._by_samples(run, amount)
            )
            if need:
                return MissingSamples(need)
            counts.append(tuple(b - a for a, b in zip(before, run.taken, strict=True)))
        return Drawn(tuple(counts), tuple(run.owed), tuple(run.active), run.short)

    def _weights(self, run: _DrawAccounts) -> list[int]:
        """Return integer weights over the active sources; inactive sources have weight 0.

        They are cached: they change only when a source is exhausted or the mixture changes.
        """
        active = tuple(run.active)
        if self._whole is None or self._whole[:2] != (run.weights, active):
            whole = whole_weights(
                [w if a else 0.0 for w, a in zip(run.weights, active, strict=True)]
            )
            self._whole = (run.weights, active, whole)
        return self._whole[2]

    def _counts(self, n: int, weights: list[int], run: _DrawAccounts) -> list[int]:
        """Return ``draw_counts(n, weights, run.owed)``, and update ``run.owed``."""
        given = (n, weights, list(run.owed))
        if self._drawn is None or self._drawn[0] != given:
            self._drawn = given, (draw_counts(n, weights, run.owed), list(run.owed))
        counts, run.owed[:] = self._drawn[1]
        return counts

    def _by_samples(self, run: _DrawAccounts, missing: int) -> dict[int, int]:
        while missing > 0 and any(weights := self._weights(run)):
            if self._random:
                counts = random_counts(missing, weights, self._seed, run.step, run.picks)
                run.picks += missing
            else:
                counts = self._counts(missing, weights, run)
            missing, need = 0, {}
            for i, count in enumerate(counts):
                if not count:
                    continue
                have = run.fronts[i].ready - run.taken[i]
                if count > have and not run.fronts[i].ended:
                    need[i] = run.taken[i] + count
                    continue
                if count > have:
                    missing += count - have
                    run.deactivate(i)
                run.taken[i] += min(count, have)
            if need:
                return need
            if not self._fill:
                break
        return {}

    def _chunks(self, run: _DrawAccounts) -> Drawn | MissingSamples:
        """Draw exactly the step's tokens, as if every token were a sample."""
        missing, n = self._amount, len(run.taken)
        while missing > 0 and any(weights := self._weights(run)):
            counts = draw_counts(missing, weights, run.owed)
            missing, need = 0, dict[int, int]()
            for i in (i for i, count in enumerate(counts) if count):
                front, wanted = run.fronts[i], run.taken[i] + counts[i]
                count, held = front.samples_for(0, wanted)
                if held < wanted and not front.ended:
                    need[i] = _estimate(front.ready, wanted - held, count, held)
                    continue
                if held < wanted:
                    missing += wanted - held
                    run.deactivate(i)
                run.taken[i] = min(held, wanted)
            if need:
                return MissingSamples(need)
            if not self._fill:
                break
        samples = tuple(run.fronts[i].samples_for(0, run.taken[i])[0] for i in range(n))
        return Drawn(
            (samples,), tuple(run.owed), tuple(run.active), run.short, tokens=tuple(run.taken)
        )

    def _by_tokens(self, run: _DrawAccounts, amount: int) -> dict[int, int]:
        while amount > 0 and any(weights := self._weights(run)):
            for i, w in enumerate(weights):
                run.owed[i] = run.owed[i] + amount * w if w else 0
            amount, need = 0, {}
            for i, w in enumerate(weights):
                if not w or run.owed[i] <= 0:
                    continue
                wanted = -(-run.owed[i] // UNIT)
                count, held = run.fronts[i].samples_for(run.taken[i], wanted)
                if held < wanted and not run.fronts[i].ended:
                    need[i] = _estimate(run.fronts[i].ready, wanted - held, count, held)
                    continue
                run.taken[i] += count
                run.owed[i] -= held * UNIT
                if held < wanted:
                    amount += -(-run.owed[i] // UNIT)
                    run.deactivate(i)
            if need:
                return need
            if not self._fill:
                break
        return {}


def _estimate(ready: int, missing: int, count: int, held: int) -> int:
    """Return the samples that must be ready if ``count`` samples have ``held`` tokens so far."""
    return ready + max(1, min(16 + ready, missing * max(1, count) // max(1, held)))


class _DrawAccounts:
    """The accounts while one step is drawn; discarded if the draw lacks samples."""

    def __init__(
        self,
        step: int,
        weights: tuple[float, ...],
        owed: list[int],
        active: list[bool],
        fronts: Sequence[Front],
    ):
        self.step, self.weights, self.owed, self.active, self.fronts = (
            step,
            weights,
            owed,
            active,
            fronts,
        )
        self.taken, self.picks, self.short = [0] * len(weights), 0, False

    def deactivate(self, i: int) -> None:
        """Remove an exhausted source from the draw; what it owes is cancelled."""
        self.owed[i], self.active[i], self.short = 0, False, True


# ----------------------------------------------------------------------------
# The progress of every rank. Up to ten thousand ranks need the slowest one at every step, so it is
# found without a search over ranks.


class RankProgress(dict[int, int]):
    """A mapping of rank to the last step that it took.

    Ranks are at few different steps at a time, so the ranks at each step are counted.
    """

    def __init__(self, taken: Mapping[int, int] | Iterable[tuple[int, int]] = ()):
        super().__init__(taken)
        self._at = Counter(self.values())

    @property
    def slowest(self) -> int:
        """The last step that all ranks have taken. At least one rank must exist."""
        return min(self._at)

    def __setitem__(self, rank: int, step: int) -> None:
        self._discount(rank)
        super().__setitem__(rank, step)
        self._at[step] += 1

    def setdefault(self, rank: int, step: int) -> int:
        if rank not in self:
            self[rank] = step
        return self[rank]

    def pop(self, rank: int, default: int | None = None) -> int | None:  # type: ignore[override]
        self._discount(rank)
        return super().pop(rank, default)

    def _discount(self, rank: int) -> None:
        """Remove a rank from the count of its step."""
        if (step := self.get(rank)) is not None:
            self._at[step] -= 1
            if not self._at[step]:
                del self._at[step]


# ----------------------------------------------------------------------------
# Requests to loaders: samples that a blocked draw lacks, and samples for the next steps.
#
# Loaders of all sources are numbered consecutively; those of source i are ``first[i]`` to
# ``first[i + 1] - 1``.

HORIZON_STRIDE = 4  # groups by which the horizon advances


def lacking(fronts: Sequence[Front], waiting: Mapping[int, int]) -> dict[int, int]:
    """Return the number of samples that each source lacks for a draw that needs ``waiting``."""
    return {
        i: n - fronts[i].ready
        for i, n in sorted(waiting.items())
        if fronts[i].ready < n and not fronts[i].ended
    }


class LoaderRequests:
    """The samples that each loader holds and should hold. Methods return the Refills to send."""

    def __init__(
        self, loaders: Sequence[int], read_ahead: int, of_source: Mapping[int, int] | None = None
    ):
        """Start with no requests.

        ``of_source``: steps to read ahead for sources that differ from ``read_ahead``.
        """
        self._loaders, self._read_ahead, self._of_source = (
            list(loaders),
            read_ahead,
            dict(of_source or {}),
        )
        # samples that each source's loaders were last requested to hold
        self._level = np.zeros(len(self._loaders), np.int64)
        # steps by which each source is read ahead
        self._steps = np.array(
            [self._of_source.get(i, read_ahead) for i in range(len(self._loaders))], np.int64
        )
        # the last group that loaders of each source may open
        self._horizon = [-1] * len(self._loaders)
        self._number()
        # number of samples last requested of each loader
        self._must = np.zeros(self.n_loaders, np.int64)
        # samples of each loader that are announced and not popped
        self._held = np.zeros(self.n_loaders, np.int64)

    def _number(self) -> None:
        self.first = np.concatenate([[0], np.cumsum(self._loaders)]).astype(np.int64)
        self.source_of = np.repeat(np.arange(len(self._loaders)), self._loaders).tolist()

    @property
    def n_sources(self) -> int:
        return len(self._loaders)

    @property
    def n_loaders(self) -> int:
        return int(self.first[-1])

    def grow(self, loaders: int) -> None:
        """Add a source after all others."""
        self._loaders.append(loaders)
        self._level = np.append(self._level, 0)
        number = len(self._steps)
        self._steps = np.append(self._steps, self._of_source.get(number, self._read_ahead))
        self._horizon.append(-1)
        self._number()
        more = np.zeros(loaders, np.int64)
        self._must, self._held = (
            np.concatenate([self._must, more]),
            np.concatenate([self._held, more]),
        )

    def restarted(self, i: int) -> list[Refill]:
        """Reset the records of a source's loaders, which hold nothing; return Refills for them."""
        self._held[self.of(i)] = self._must[self.of(i)] = 0
        self._horizon[i] = -1
        return (
            [Refill(loader, 0, self._share(i)) for loader in self.of(i)] if self._level[i] else []
        )

    def announced(self, loader: int, samples: int) -> None:
        """Add ``samples`` to the samples that a loader holds."""
        self._held[loader] += samples

    def popped(self, pops: np.ndarray) -> None:
        """Subtract the samples of a planned step, by loader, and clear the requests for it."""
        self._held -= pops
        self._must = np.zeros_like(self._must)

    def request_more(self, i: int, lacking: int, behind: Sequence[int]) -> list[Refill]:
        """Return Refills for ``lacking`` more samples of source ``i``.

        ``behind``: numbers, within the source, of the loaders that delay it. A loader that has not
        fulfilled its last request gets no Refill.
        """
        # about equal shares; a loader that still delays the source gets another request later
        commands, lacking = ([], -(-lacking // self._loaders[i]))
        for loader in (int(self.first[i]) + k for k in behind):
            if self._held[loader] >= self._must[loader]:
                self._must[loader] = self._held[loader] + lacking
                commands.append(Refill(loader, int(self._must[loader]), self._share(i)))
        return commands

    def move_horizon(self, i: int, group: int) -> list[Refill]:
        """Return Refills that let loaders of source i open later groups than its ``group``.

        The horizon advances by several groups at once, since each message wakes a process.
        """
        if group + GROUPS_AHEAD <= self._horizon[i]:
            return []
        self._horizon[i] = group + GROUPS_AHEAD + HORIZON_STRIDE
        return [Refill(loader, 0, self._share(i), self._horizon[i]) for loader in self.of(i)]

    def keep_ahead(self, counts: np.ndarray) -> list[Refill]:
        """Return Refills that keep loaders some steps ahead of a draw of ``counts[i]`` samples.

        Loaders refill by themselves, so a Refill is sent only if the level of a source rises, or
        falls below a quarter.
        """
        n = len(counts)
        levels, before = counts * self._steps[:n] + 1, self._level[:n]
        moved = np.flatnonzero((counts > 0) & ((levels > before) | (4 * levels < before)))
        before[moved] = levels[moved]
        return [Refill(loader, 0, self._share(i)) for i in moved.tolist() for loader in self.of(i)]

    def set_read_ahead(self, i: int, steps: int) -> None:
        """Read source i ``steps`` steps ahead, from the next ``keep_ahead`` on."""
        self._steps[i] = self._of_source[i] = steps

    def last_refill(self, loader: int) -> Refill:
        """Return the request that is in force for a loader, for its standby."""
        source = self.source_of[loader]
        return Refill(loader, 0, self._share(source), self._horizon[source])

    def of(self, i: int) -> range:
        """Return the numbers of the loaders of source i."""
        return range(int(self.first[i]), int(self.first[i + 1]))

    def _share(self, i: int) -> int:
        """Return the number of samples that each loader of source i should hold."""
        return -(-int(self._level[i]) // self._loaders[i])
