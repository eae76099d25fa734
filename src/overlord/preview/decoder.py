"""Token ids as runs of text: a run has one loss weight; special tokens are runs of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

import numpy as np

from overlord.transforms.tokenizer_engines import Engine

TEXT, SPECIAL, UNKNOWN, IDS = "text", "special", "unknown", "ids"
# Tokens before a run that are decoded with it: decoders may drop a space at the start of a text,
# and a character may have its bytes in several tokens.
CONTEXT = 8
REPEATED = 4  # equal special tokens in a row from which they are shown as one with a count


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens: its text, its loss weight, and its kind.

    ``kind`` is "text", "special" (a special token, ``count`` times), "unknown" (an id that the
    vocabulary lacks) or "ids" (numbers, without a tokenizer).
    """

    text: str
    loss: float
    kind: str
    ids: tuple[int, ...]
    count: int = 1


def segments_of(ids: np.ndarray, loss: np.ndarray, engine: Engine | None) -> list[Segment]:
    """Return the runs of a document's tokens; ``loss``: the weight of each as a label."""
    tokens, weights = ids.tolist(), loss.tolist()
    if engine is None:
        return [
            Segment(
                text=" ".join(map(str, tokens[a:b])),
                loss=weights[a],
                kind=IDS,
                ids=tuple(tokens[a:b]),
            )
            for a, b in _equal_runs(weights)
        ]
    found = []
    kinds = [_kind(engine, token) for token in tokens]
    start = 0  # the first token of the stretch of text, which special tokens end
    for a, b in _equal_runs(list(zip(kinds, weights, strict=True))):
        if kinds[a] == TEXT:
            text = _text(engine, tokens, start, a, b)
            found.append(Segment(text=text, loss=weights[a], kind=TEXT, ids=tuple(tokens[a:b])))
        else:
            found += _special(engine, tokens[a:b], weights[a], kinds[a])
            start = b
    return found


def _kind(engine: Engine, token: int) -> str:
    if engine.special_token(token) is not None:
        return SPECIAL
    return TEXT if engine.has_id(token) else UNKNOWN


def _equal_runs(values: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the longest runs of equal values."""
    start = 0
    for _, run in groupby(values):
        stop = start + sum(1 for _ in run)
        yield start, stop
        start = stop


def _text(engine: Engine, tokens: list[int], start: int, a: int, b: int) -> str:
    """Return the text of tokens a to b as it is after the tokens before them."""
    first = max(start, a - CONTEXT)
    before, whole = engine.decode(tokens[first:a]), engine.decode(tokens[first:b])
    same = (x == y for x, y in zip(before, whole, strict=False))
    return whole[sum(1 for _ in takewhile(bool, same)) :]


def _special(engine: Engine, tokens: list[int], loss: float, kind: str) -> Iterator[Segment]:
    for a, b in _equal_runs(tokens):
        text = engine.special_token(tokens[a]) or f"id {tokens[a]}"
        ids = tuple(tokens[a:b])
        if b - a >= REPEATED:
            yield Segment(text=text, loss=loss, kind=kind, ids=ids, count=b - a)
            continue
        for token in ids:
            yield Segment(text=text, loss=loss, kind=kind, ids=(token,))
