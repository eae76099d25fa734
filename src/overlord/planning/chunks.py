"""Planning of a step with packing="concat": its chunks, and the rest of samples that it cut. Pure.

The draw gives each source an exact number of tokens. A source takes them from the front of its
stream, so its last sample may be cut, and the rest of that sample comes first in a later step. The
strategy places whole chunks (``cut_pieces.py``), one in a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlord.errors import PlanError
from overlord.messages.control import StreamState
from overlord.plan.plan import LoadingPlan
from overlord.planning.cut_pieces import cut_pieces, piece_buffer
from overlord.planning.draw import Drawn, LoaderRequests
from overlord.planning.look_ahead import LookAheadPool
from overlord.planning.step import (
    PieceColumns,
    PlacedStep,
    StepContext,
    check_plan,
    check_samples,
    gather,
    valid_tokens,
)
from overlord.planning.stream import SourceStream
from overlord.sample import LOSS_WEIGHTS, Buffer


class TokenFront:
    """The tokens of a source that no step has received, as input of the draw."""

    def __init__(self, stream: SourceStream, lengths: np.ndarray, cut: int):
        """``lengths``: those of the samples before the stream; ``cut``: taken of the first one."""
        self._stream = stream
        self._ends = np.cumsum(np.append(0, lengths))
        self._ends[1:] -= cut

    @property
    def ready(self) -> int:
        return len(self._ends) - 1 + self._stream.ready

    @property
    def ended(self) -> bool:
        return self._stream.ended

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        """Return how many samples reach ``tokens``, and their tokens; ``start`` must be 0."""
        assert start == 0, "chunks are drawn from the front alone"
        held = int(self._ends[-1])
        if tokens <= held:
            count = int(np.searchsorted(self._ends, tokens, side="left"))
            return count, int(self._ends[count])
        count, more = self._stream.samples_for(0, tokens - held)
        return len(self._ends) - 1 + count, held + more

    def samples_within(self, tokens: int) -> tuple[int, int]:
        """Return the most samples with at most ``tokens`` in all, and their tokens."""
        count = int(np.searchsorted(self._ends, tokens, side="right")) - 1
        held = int(self._ends[count])
        if count < len(self._ends) - 1:
            return count, held
        more, rest = self._stream.samples_within(tokens - held)
        return count + more, held + rest


def token_fronts(
    pool: LookAheadPool, streams: Sequence[SourceStream], state: StreamState, names: Sequence[str]
) -> list[TokenFront]:
    """Return the fronts of the sources: the samples of the pool first, of which some are cut.

    Raise ``PlanError`` if a cut sample has no rest: its source was changed.
    """
    fronts, cut = [], [*state.cut] or [0] * len(streams)
    for i, stream in enumerate(streams):
        tokens = pool.open_tokens(i)
        if len(tokens) and cut[i] >= tokens[0]:
            raise PlanError(
                f"source {names[i]!r}: expected a sample of more than {cut[i]} tokens, of which "
                f"steps have received {cut[i]}, got one of {tokens[0]}",
                state.step,
                "resume with the files and transforms of the saved run",
            )
        fronts.append(TokenFront(stream, tokens, cut[i]))
    return fronts


def place_chunks(
    context: StepContext,
    drawn: Drawn,
    counts: Sequence[int],
    pool: LookAheadPool,
    demand: LoaderRequests,
) -> PlacedStep:
    """Cut the drawn tokens into chunks, and place these by the strategy.

    ``counts``: the samples of each source that have these tokens.

    Raise ``PlanError`` for an invalid plan.
    """
    spec, state = context.spec, context.state
    pops = pool.number(demand.n_loaders)
    candidates = pool.candidates(counts)
    columns = PieceColumns(candidates.pieces)
    samples = gather(columns, candidates.rows, None, context)
    tokens = samples.meta["tokens"]
    assert isinstance(tokens, np.ndarray)
    cut = [*state.cut] or [0] * len(spec.sources)
    pieces = cut_pieces(samples.source, tokens, cut, drawn.tokens, samples.batch.context)
    buffer = piece_buffer(samples, pieces)
    plan = spec.strategy(buffer, spec.place)
    check_plan(plan, buffer, spec.place)
    check_samples(plan, buffer)
    check_chunks(plan, buffer)
    plan.validate()
    taken, cursors = pieces.end == tokens, state.cursors.copy()
    for i in np.unique(samples.source).tolist():
        cut[i] = 0
    for row in np.flatnonzero(~taken).tolist():  # at most one of each source
        cut[int(samples.source[row])] = int(pieces.end[row])
    kept = pool.close_step(candidates, taken, cursors)
    loader = columns.holders(demand.first)[candidates.rows]
    return PlacedStep(
        plan,
        pops,
        candidates.number[pieces.sample],
        loader[pieces.sample],
        cursors,
        drawn.owed,
        drawn.active,
        kept,
        tuple(cut),
        valid_tokens(plan, buffer.meta.get(LOSS_WEIGHTS), False, spec.batch.labels),
    )


def check_chunks(plan: LoadingPlan, buffer: Buffer) -> None:
    """Raise ``PlanError`` unless each chunk of the buffer fills one microbatch of the plan."""
    main, chunk = plan.main, buffer.chunk
    assert chunk is not None
    if plan.tasks is not None:
        raise PlanError(
            'strategy: expected whole chunks with packing="concat", got samples on rings of ranks',
            buffer.step,
            "use a strategy without .split()",
        )
    bins = np.empty(len(plan), np.int64)
    bins[main.sample] = main.bins()
    first = np.flatnonzero(np.diff(chunk, prepend=-1))
    of_chunk = bins[first]
    if (bins != of_chunk[chunk]).any() or len(np.unique(of_chunk)) < len(of_chunk):
        raise PlanError(
            "strategy: expected every chunk in a microbatch of its own, got a chunk on two "
            "microbatches, or two chunks on one",
            buffer.step,
            "call .balance(), which places whole chunks; plan_raw has the column chunk",
        )
    slot = np.empty(len(plan), np.int64)
    slot[main.sample] = main.slot
    if (slot != np.arange(len(plan)) - first[chunk]).any():
        raise PlanError(
            "strategy: expected the pieces of a chunk in the order of the stream, got another",
            buffer.step,
            "leave out the column slot",
        )
