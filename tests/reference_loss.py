"""Labels and loss weights of a job's samples: docs/loss-weights.md as a plain, slow program.

The rows of the job's sources hold different ids, so an id identifies a token of a sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum
from typing import Any, NamedTuple

import numpy as np

from overlord.job.job import Job
from tests.reference import Sample, longest


class Target(NamedTuple):
    """What a place of a microbatch predicts; the label of a place without a loss is -100."""

    label: int
    weight: float


def weights_of(job: Job, sample: Sample) -> list[float]:
    """Return the weights of the tokens of a sample, as float32 holds them."""
    (name, _, _, row, part), tokens = sample
    source = next(s for s in job.sources if s.name == name)
    loss = next((t.loss for t in source.transforms if getattr(t, "loss", None)), None)
    if loss is None:
        return [1.0] * len(tokens)
    given = source.uri[row][loss][part * longest(job) :][: len(tokens)]
    return [float(np.float32(w)) for w in given]


def targets(job: Job, samples: Iterable[Sample]) -> dict[int, Target]:
    """Return the target of each token of some samples, by id."""
    found = {}
    for sample in samples:
        tokens, weights = sample[1], weights_of(job, sample)
        for i, token in enumerate(tokens):
            j = i + 1 if job.batch.labels == "shifted" else i
            labelled = 0 < j < len(tokens) and weights[j] > 0
            found[token] = Target(tokens[j], weights[j]) if labelled else Target(-100, 0.0)
    return found


def valid_tokens(job: Job, samples: Iterable[Sample]) -> float:
    """Return the sum of the weights of all labels of some samples."""
    return fsum(w for sample in samples for w in weights_of(job, sample)[1:])


def targets_of(microbatch: Any, pad_id: int) -> dict[int, Target]:
    """Return the targets in a microbatch, by id; padding must have none."""
    keys = ("tokens", "labels", "loss_mask")
    found = {}
    columns = [microbatch[key].reshape(-1).tolist() for key in keys]
    for token, label, weight in zip(*columns, strict=True):
        if token == pad_id:
            assert (label, weight) == (-100, 0.0), "padding has a loss"
        else:
            assert token not in found, "delivered twice"
            found[token] = Target(label, weight)
    return found
