"""Forecast of a job's end from the sizes of its sources, by the rules of the draw. Pure.

No sample is known here, only the number of samples of each source and their mean length. Where
no source ends soon, many steps are drawn at once. Weights that follow from the step are held
meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlord.batch_by_step import size_of
from overlord.mesh import Batch
from overlord.messages.control import Skip, StreamState
from overlord.planning.draw import Drawer, MissingSamples
from overlord.planning.mixture import Mixture
from overlord.planning.schedule.base import follows_from_step
from overlord.planning.spec import DrawerByStep, PlannerSpec

ENDLESS = 2**60  # samples of a source that repeats forever
AT_ONCE = 2**20  # most random picks of one draw
MARGIN = 3  # steps before the end of a source that are drawn one by one
HELD = 500  # the weights of a schedule are held for this fraction of the steps so far


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSize:
    """The samples of one epoch of a source, and their mean tokens."""

    samples: float
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEnd:
    """What a source gives to a job, from its first step to the end.

    ``last_step``: the last step with a sample of it; None if it gives none. ``ends``: whether it
    leaves before the job ends, since it has no samples left.
    """

    name: str
    last_step: int | None
    ends: bool
    samples: int
    tokens: int
    share: float  # of all tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The end of a job: its number of steps, its tokens, and the end of each source."""

    steps: int
    tokens: int
    sources: tuple[SourceEnd, ...]


class _MeanFront:
    """The front of a source of which only the number of samples and their mean are known."""

    ended = True

    def __init__(self, left: int, mean: float, whole: bool):
        """``left``: samples; with ``whole`` false, tokens, for which samples are cut."""
        self.ready, self._mean, self._whole = left, mean, whole

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        """Return how many samples from number ``start`` on reach ``tokens``, and their tokens."""
        if not self._whole:
            held = min(tokens, self.ready)
            return math.ceil(held / self._mean), held
        count = min(math.ceil(tokens / self._mean), self.ready - start)
        return count, round(count * self._mean)


def forecast(
    spec: PlannerSpec,
    state: StreamState,
    sizes: Sequence[SourceSize],
    epochs: Sequence[float | None],
    progress: Callable[[int], None] = lambda step: None,
) -> Forecast:
    """Return the end of a job that continues from ``state``, whose sources have these ``sizes``.

    ``epochs``: passes over each source, as in ``Source``. A schedule is evaluated without reports.
    ``progress`` receives the number of the next step.
    """
    return _Forecaster(spec, state, sizes, epochs).run(progress)


class _Forecaster:
    """The accounts of a job while its steps are drawn."""

    def __init__(
        self,
        spec: PlannerSpec,
        state: StreamState,
        sizes: Sequence[SourceSize],
        epochs: Sequence[float | None],
    ):
        n = len(spec.sources)
        self._spec, self._state, self._sizes = spec, state, sizes
        self._whole = not spec.batch.in_chunks
        self._mixture = Mixture(
            spec.schedule,
            every=spec.mix_every,
            lag=spec.feedback_lag,
            takes_feedback=False,
            state=state,
            starts=spec.mixture_starts,
        )
        counts = (state.counts.get(name, np.zeros(n, np.int64)) for name in ("samples", "tokens"))
        self._samples, self._tokens = (c.astype(np.float64) for c in counts)
        self._limit = [  # samples, or tokens of chunks
            _limit(size, e, s.max_tokens, self._whole)
            for size, e, s in zip(sizes, epochs, spec.sources, strict=True)
        ]
        self._last = [state.step - 1 if n else None for n in self._samples.tolist()]
        self._drawers = DrawerByStep(spec)

    def run(self, progress: Callable[[int], None]) -> Forecast:
        while not self._over():
            weights = self._weights()
            steps = self._steps_at_once(weights)
            if not self._draw(steps, weights):
                break
            progress(self._state.step)
        total = float(self._tokens.sum()) or 1.0
        return Forecast(
            steps=self._state.step,
            tokens=round(float(self._tokens.sum())),
            sources=tuple(
                SourceEnd(
                    name=source.name,
                    last_step=self._last[i],
                    ends=self._left(i) < 1,
                    samples=round(self._samples[i]),
                    tokens=round(self._tokens[i]),
                    share=self._tokens[i] / total,
                )
                for i, source in enumerate(self._spec.sources)
            ),
        )

    def _over(self) -> bool:
        first = self._spec.until == "first" and not all(self._state.active)
        return first or self._spec.ends_at(self._state.step)

    def _left(self, i: int) -> int:
        """Return the samples, or tokens of chunks, that a source still has."""
        drawn = self._samples[i] if self._whole else self._tokens[i]
        return max(0, self._limit[i] - round(float(drawn)))

    def _weights(self) -> list[float]:
        cursors = self._state.cursors.copy()
        for i, size in enumerate(self._sizes):
            cursors[i, 0] = int(self._samples[i] // max(1.0, size.samples))
        self._state = self._mixture.update(
            replace(self._state, cursors=cursors), {s.name: s.weight for s in self._spec.sources}
        )
        return self._mixture.weights

    def _steps_at_once(self, weights: Sequence[float]) -> int:
        """Return how many steps can be drawn in one: no source may end in them."""
        state, spec = self._state, self._spec
        held = ENDLESS
        if not isinstance(spec.schedule, Mapping):
            if not follows_from_step(spec.schedule):
                return 1
            held = 1 + state.step // HELD
        stops = [e.at for e in state.events if not isinstance(e, Skip) and e.at > state.step]
        stops += [stop for stop in spec.stage_starts if stop > state.step]
        stops += [spec.until] if isinstance(spec.until, int) else []
        stops += [stop for stop in spec.stage_starts if stop > state.step]
        most = min(held, *(stop - state.step for stop in stops)) if stops else held
        drawn = [w if a else 0.0 for w, a in zip(weights, state.active, strict=True)]
        total, amount = sum(drawn), self._amount
        for i, w in enumerate(drawn):
            each = amount * w / (total or 1.0)
            if self._whole and self._batch.tokens is not None:
                each /= self._sizes[i].tokens
            if each and self._limit[i] < ENDLESS:
                most = min(most, int(self._left(i) / each) - MARGIN)
        if spec.draw == "random":
            most = min(most, AT_ONCE // amount)
        most = min(most, ENDLESS // 2**10 // amount)
        while most > 1 and spec.batch_at(state.step + most - 1) != self._batch:  # a ramp
            most //= 2
        return max(1, most)

    @property
    def _batch(self) -> Batch:
        """The batch of the next step."""
        return self._spec.batch_at(self._state.step)

    @property
    def _amount(self) -> int:
        return size_of(self._batch)[0]

    def _drawer(self, steps: int) -> Drawer:
        if steps == 1:
            return self._drawers.at(self._state.step)
        batch = self._batch
        if batch.samples is not None:
            batch = replace(batch, samples=batch.samples * steps)
        else:
            batch = replace(batch, tokens=(batch.tokens or 0) * steps)
        return self._spec.drawer(batch)

    def _draw(self, steps: int, weights: Sequence[float]) -> bool:
        """Draw so many steps; return whether the job continues after them."""
        state = self._state
        fronts = [
            _MeanFront(self._left(i), s.tokens, self._whole) for i, s in enumerate(self._sizes)
        ]
        drawn = self._drawer(steps).draw(state.step, weights, state.owed, state.active, fronts)
        assert not isinstance(drawn, MissingSamples)
        counts = np.sum(drawn.counts, axis=0)
        tokens = [n * s.tokens for n, s in zip(counts.tolist(), self._sizes, strict=True)]
        if drawn.tokens:
            tokens = [float(n) for n in drawn.tokens]
            counts = np.array([t / s.tokens for t, s in zip(tokens, self._sizes, strict=True)])
        self._samples += counts
        self._tokens += tokens
        gave = bool(counts.any())
        for i in np.flatnonzero(counts).tolist():
            self._last[i] = state.step + steps - 1
        self._state = replace(
            state, step=state.step + (steps if gave else 0), owed=drawn.owed, active=drawn.active
        )
        return gave or any(w for w, a in zip(weights, drawn.active, strict=True) if a)


def _limit(size: SourceSize, epochs: float | None, max_tokens: int | None, whole: bool) -> int:
    """Return the samples that a source has in all; with ``whole`` false, its tokens."""
    samples = ENDLESS if epochs is None else math.floor(size.samples * epochs + 0.5)
    unit = 1.0 if whole else size.tokens
    limit = samples if samples == ENDLESS else math.floor(samples * unit + 0.5)
    if max_tokens is not None:
        limit = min(limit, math.floor(max_tokens / size.tokens) if whole else max_tokens)
    return limit
