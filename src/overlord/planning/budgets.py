"""Token budgets (``Source(max_tokens=)``): where they end the streams of their sources. Pure.

A budget shortens a stream to its longest prefix with at most ``max_tokens`` tokens, counted over
the whole job. The draw then treats the source as any other whose stream has ended. The tokens that
steps have drawn so far are in the state, so a budget needs no state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from overlord.errors import SourceError
from overlord.messages.control import StreamState
from overlord.planning.chunks import TokenFront, token_fronts
from overlord.planning.draw import Drawn, Front
from overlord.planning.look_ahead import LookAheadPool
from overlord.planning.spec import PlannerSpec, SourceSpec
from overlord.planning.stream import SourceStream

ALL = 2**62  # more tokens than a stream has


class CountedFront(Front, Protocol):
    """A front that counts the samples within a number of tokens."""

    def samples_within(self, tokens: int) -> tuple[int, int]:
        """Return the most samples known with at most ``tokens`` in all, and their tokens."""
        ...


class BudgetFront:
    """The front of a source whose whole samples have at most ``left`` tokens in all."""

    def __init__(self, front: CountedFront, left: int):
        """``left``: tokens of the budget that no step has drawn, at least 0."""
        self._front = front
        self.ready, self._held = front.samples_within(left)
        self._reached = self.ready < front.ready or self._held == left

    @property
    def ended(self) -> bool:
        return self._reached or self._front.ended

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        """Return how many samples from number ``start`` on reach ``tokens``, and their tokens."""
        count, held = self._front.samples_for(start, tokens)
        if start + count <= self.ready:
            return count, held
        before = self._front.samples_for(0, ALL)[1] - self._front.samples_for(start, ALL)[1]
        return self.ready - start, self._held - before


class TokenBudgetFront:
    """The front of a source that gives at most ``left`` tokens, for which its last one is cut."""

    def __init__(self, front: Front, left: int):
        """``left``: tokens of the budget that no step has drawn, at least 0."""
        self._front, self._left = front, left

    @property
    def ready(self) -> int:
        return self._front.ready

    @property
    def ended(self) -> bool:
        return self._front.ended or self._front.samples_for(0, self._left)[1] >= self._left

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        """Return how many samples reach ``tokens``, and their tokens within the budget."""
        count, held = self._front.samples_for(start, min(tokens, self._left))
        return count, min(held, self._left)


def fronts_of(
    spec: PlannerSpec,
    state: StreamState,
    streams: Sequence[SourceStream],
    pool: LookAheadPool | None,
    drawn: Sequence[int],
) -> list[Front]:
    """Return the samples that the next draw can take, by source.

    ``drawn``: tokens of each source in all steps so far.
    """
    chunks = spec.batch.in_chunks
    fronts: list[Front] = [*streams]
    if pool is not None:
        fronts = [
            *(token_fronts(pool, streams, state, spec.names) if chunks else pool.fronts(streams))
        ]
    for i, source in enumerate(spec.sources):
        if source.max_tokens is None:
            continue
        left = max(0, source.max_tokens - drawn[i])
        if chunks:
            fronts[i] = TokenBudgetFront(fronts[i], left)
        elif pool is None:
            fronts[i] = BudgetFront(streams[i], left)
        else:
            fronts[i] = BudgetFront(TokenFront(streams[i], pool.open_tokens(i), 0), left)
    return fronts


def limited(candidates: Sequence[int], fronts: Sequence[Front]) -> list[int]:
    """Return the numbers of candidates by source, at most as many as a budget leaves."""
    return [
        min(n, front.ready) if isinstance(front, BudgetFront) and front.ended else n
        for n, front in zip(candidates, fronts, strict=True)
    ]


def is_reached(source: SourceSpec, drawn: int, ready: int) -> bool:
    """Return whether a source leaves the job because its budget is reached.

    ``drawn``: its tokens in all steps. ``ready``: samples that are known and follow these. What is
    known of the rows after the budget depends on timing.
    """
    return source.max_tokens is not None and (drawn >= source.max_tokens or ready > 0)


def check_begun(
    spec: PlannerSpec,
    active: Sequence[bool],
    drawn: Drawn,
    before: Sequence[int],
    streams: Sequence[SourceStream],
) -> None:
    """Raise ``SourceError`` for a source that leaves without a sample, as its first is too long.

    ``active``: the value of each source before the draw. ``before``: its tokens in earlier steps.
    """
    for i, source in enumerate(spec.sources):
        left = active[i] and not drawn.active[i] and not any(counts[i] for counts in drawn.counts)
        if source.max_tokens is None or not left or before[i] or not streams[i].ready:
            continue
        raise SourceError(
            source.name,
            f"expected max_tokens of at least {streams[i].samples_for(0, 1)[1]:,}, the tokens of "
            f"its first sample, got {source.max_tokens:,}",
            remedy="raise max_tokens, or leave the source out",
        )
