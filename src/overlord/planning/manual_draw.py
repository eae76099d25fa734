"""Draw one step from the candidates of a buffer that was made by hand, without a job."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from overlord.checks import signature_problem
from overlord.errors import PlanError
from overlord.planning.cut_pieces import cut_pieces, piece_buffer
from overlord.planning.draw import Drawer, Drawn
from overlord.planning.schedule import Schedule, Weights, by_source
from overlord.planning.selection import checked_scores
from overlord.sample import Buffer


class _Candidates:
    """The candidates of one source as a stream's front (``draw.Front``): no sample follows them."""

    ended = True

    def __init__(self, tokens: np.ndarray):
        self.ready = len(tokens)
        self._ends = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        stop = min(int(np.searchsorted(self._ends, self._ends[start] + tokens)), self.ready)
        return stop - start, int(self._ends[stop] - self._ends[start])


def draw_by_hand(
    buffer: Buffer, schedule: Schedule | Weights, draw: str, seed: int, look_ahead: int
) -> Buffer:
    """Return the look-ahead candidates of step ``buffer.step``, from a draw with empty accounts.

    The page 'The stream, exactly' of the documentation specifies the draw. Raise ``PlanError`` or
    ``JobError`` for a bad argument.
    """
    if (
        not isinstance(look_ahead, int)
        or look_ahead < 1
        or (look_ahead > 1 and buffer.batch.samples is None)
    ):
        raise PlanError(
            "look_ahead: expected a whole number of at least 1 (above 1 with a batch in "
            f"samples), got {look_ahead!r}",
            buffer.step,
        )
    if callable(schedule) and (problem := signature_problem(schedule, ("step", "feedback"))):
        raise PlanError(f"mix: {problem}", buffer.step)
    scheduled = schedule(buffer.step, {}) if callable(schedule) else schedule
    weights = by_source(scheduled, buffer.names)
    if draw == "random" and buffer.batch.tokens is not None:
        raise PlanError(
            'draw="random": expected a batch in samples, got one in tokens', buffer.step
        )
    tokens = buffer.column("tokens")
    assert isinstance(tokens, np.ndarray)
    rows = [np.flatnonzero(buffer.source == i) for i in range(len(buffer.names))]
    chunks = buffer.batch.in_chunks
    if chunks and (draw == "random" or look_ahead > 1):
        raise PlanError(
            'mix: expected draw="exact" and look_ahead=1 with packing="concat", got '
            f"draw={draw!r} and look_ahead={look_ahead}",
            buffer.step,
        )
    drawer = Drawer(
        samples=None if chunks else buffer.batch.samples,
        tokens=buffer.batch.tokens_of_chunks if chunks else buffer.batch.tokens,
        draws=1,
        random=draw == "random",
        seed=seed,
        fill=True,
        exact_tokens=chunks,
    )
    n = len(rows)
    drawn = drawer.draw(
        buffer.step, weights, [0] * n, [True] * n, [_Candidates(tokens[r]) for r in rows]
    )
    assert isinstance(drawn, Drawn), "every front has ended, so nothing can be missing"
    shown = (
        np.concatenate([r[: look_ahead * k] for r, k in zip(rows, drawn.counts[0], strict=True)])
        if rows
        else np.zeros(0, np.int64)
    )
    by_name = dict(zip(buffer.names, weights, strict=True))
    if chunks:
        samples = replace(buffer.take(shown), weights=by_name, drawn=True)
        pieces = cut_pieces(
            samples.source, tokens[shown], [0] * n, drawn.tokens, buffer.batch.context
        )
        return piece_buffer(samples, pieces)
    found = replace(buffer.take(shown), wanted=drawn.counts, weights=by_name)
    if look_ahead == 1 or not hasattr(schedule, "prefer"):
        return found
    return replace(found, scores=checked_scores(schedule.prefer(buffer.step, found), found))
