"""The gain of planning, predicted by the strategies themselves on documents of sampled lengths.

Steps are drawn from the lengths, and placed once in stream order and once by a strategy. Ranks wait
for the slowest at every microbatch, so the time of a step follows from the costs of its buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlord.mesh import Batch, Mesh
from overlord.planning.strategies import STRATEGIES
from overlord.sample import Buffer

UNPLANNED, PLANNED = "packed", "llm_balance"
STEPS = 4  # steps of which the mean is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedGain:
    """Times of a step on ``gpus`` data-parallel ranks, over the time of the mean rank."""

    gpus: int
    samples: int  # of a step
    unplanned: float  # stream-order packing
    planned: float

    @property
    def gain(self) -> float:
        """The fraction of the step's time that planning saves."""
        return 1.0 - self.planned / self.unplanned


def predict_gain(
    lengths: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    batch: Batch,
    gpus: Sequence[int],
    seed: int = 0,
) -> list[PredictedGain]:
    """Return the predicted gain for each number of GPUs.

    ``lengths``: tokens of sampled documents, by source; longer ones than the context are split.
    ``weights``: shares in tokens. ``batch``: of one rank, in tokens; it grows with the ranks.
    """
    return [_on(n, lengths, weights, batch, np.random.default_rng([seed, n])) for n in gpus]


def _on(
    gpus: int,
    lengths: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    batch: Batch,
    random: np.random.Generator,
) -> PredictedGain:
    assert batch.tokens is not None
    whole = replace(batch, tokens=batch.tokens * gpus)
    mesh, samples, times = Mesh(dp=gpus), 0, np.zeros((STEPS, 2))
    for k in range(STEPS):
        buffer = drawn_buffer(lengths, weights, whole, random)
        samples += len(buffer)
        for s, name in enumerate((UNPLANNED, PLANNED)):
            times[k, s] = STRATEGIES[name](buffer, mesh).imbalance()["microbatch"]
    unplanned, planned = times.mean(axis=0).tolist()
    return PredictedGain(gpus=gpus, samples=samples // STEPS, unplanned=unplanned, planned=planned)


def drawn_buffer(
    lengths: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    batch: Batch,
    random: np.random.Generator,
) -> Buffer:
    """Return the samples of one step, in random order, as a planner receives them."""
    assert batch.tokens is not None
    total = sum(weights.values())
    names = [name for name in lengths if weights[name] > 0]
    parts = [
        _documents(lengths[name], batch.tokens * weights[name] / total, batch.context, random)
        for name in names
    ]
    columns = {name: {"tokens": part} for name, part in zip(names, parts, strict=True)}
    buffer = Buffer.from_columns(columns, batch=batch)
    return replace(buffer.take(random.permutation(len(buffer))), drawn=True)


def _documents(
    lengths: np.ndarray, tokens: float, context: int, random: np.random.Generator
) -> np.ndarray:
    """Draw documents of about ``tokens`` tokens in all, split at the context."""
    mean = float(lengths.mean())
    found = random.choice(lengths, max(1, round(tokens / mean)))
    pieces = [np.full(n // context, context) for n in found[found > context]]
    rest = np.where(found > context, found % context, found)
    return np.concatenate([rest[rest > 0], *pieces]).astype(np.int64)
