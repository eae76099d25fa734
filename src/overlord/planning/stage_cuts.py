"""Cut the samples of a step that are longer than the context of their stage. Pure.

A job has one longest sample, so the samples of a source do not depend on stages. A stage with a
smaller context cuts longer samples when they are planned: all pieces of a sample are in one step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from overlord.planning.cut_pieces import Pieces, piece_buffer
from overlord.sample import Buffer


class CutSamples(NamedTuple):
    """The buffer of a step with cut samples, one row for each piece."""

    buffer: Buffer
    sample: np.ndarray  # int64: row of the sample in the buffer without pieces
    truncated: np.ndarray  # int64, by source: truncated samples
    lost: np.ndarray  # int64, by source: tokens that were truncated


def cut_samples(samples: Buffer, how: str) -> CutSamples | None:
    """Return the samples with those longer than the context cut; None if there are none.

    ``how``: "split" makes pieces of at most ``context`` tokens, which stay adjacent, in order;
    "truncate" keeps the first piece.
    """
    tokens, context = samples.meta["tokens"], samples.batch.context
    assert isinstance(tokens, np.ndarray)
    wide = tokens.astype(np.int64)
    if not (wide > context).any():
        return None
    n = np.maximum(1, -(-wide // context)) if how == "split" else np.ones(len(wide), np.int64)
    sample = np.repeat(np.arange(len(wide)), n)
    offset = (np.arange(len(sample)) - np.repeat(np.cumsum(n) - n, n)) * context
    # the rest of a truncated sample does not exist for the stage, so no label continues into it
    whole = wide if how == "split" else np.minimum(wide, context)
    length = np.minimum(whole[sample] - offset, context)
    buffer = piece_buffer(samples, Pieces(sample, offset, length, None, whole))
    cut, sources = wide > context, len(samples.names)
    if how == "split":
        cut = np.zeros(len(wide), bool)
    return CutSamples(
        buffer,
        sample,
        np.bincount(samples.source[cut], minlength=sources),
        np.bincount(samples.source[cut], weights=(wide - context)[cut], minlength=sources).astype(
            np.int64
        ),
    )
