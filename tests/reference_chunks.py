"""The reference stream of packing="concat": docs/stream.md, "Chunks", as a plain, slow program.

Every token is one object here, so that nothing is ever cut. It shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, groupby, islice
from typing import Any, NamedTuple

from overlord.job.job import Job
from tests.reference import Id, Mixer, Sample


class Token(NamedTuple):
    sample: Id
    place: int  # in its sample
    token: int
    next: int | None  # the next token of the sample


class Piece(NamedTuple):
    sample: Id
    start: int
    tokens: list[int]
    next: int | None


def reference_chunks(
    job: Job,
    quarantine: list[tuple[str, int, int, int]] | None = None,
    joins: dict[str, int] | None = None,
) -> Iterator[list[list[Piece]]]:
    """Return the chunks of each step, each as its pieces; arguments as in ``reference_stream``."""
    mixer = Mixer(job, [] if quarantine is None else quarantine, {}, joins or {}, {})
    streams: Any = [
        islice(tokens_of(stream), source.max_tokens)
        for stream, source in zip(mixer.streams, job.sources, strict=True)
    ]
    mixer.streams = streams
    for step in count():
        if mixer.enter(step) or mixer.stop:
            return
        batch = mixer.job.batch
        context = batch.context
        size = batch.samples * context if batch.samples else batch.tokens
        taken: list[list[Any]] = [[] for _ in streams]
        missing = size
        while missing and not mixer.stop and any(weights := mixer.weights(step)):
            missing = mixer.take_samples(weights, step, missing, taken)
        if not any(taken):
            return
        stream = in_order(taken)
        yield [pieces_of(stream[at : at + context]) for at in range(0, len(stream), context)]


def tokens_of(stream: Iterator[Sample]) -> Iterator[Token]:
    for sample, tokens in stream:
        for k, (token, after) in enumerate(zip(tokens, [*tokens[1:], None], strict=True)):
            yield Token(sample, k, token, after)


def in_order(taken: list[list[Token]]) -> list[Token]:
    """Return the tokens of a step: parts of samples by the middle of their share of the source."""
    parts = []
    for i, tokens in enumerate(taken):
        at = 0
        for _, part in groupby(tokens, key=lambda token: token.sample):
            run = list(part)
            parts.append(((at + at + len(run)) / (2 * len(tokens)), i, at, run))
            at += len(run)
    return [token for *_, run in sorted(parts, key=lambda p: p[:3]) for token in run]


def pieces_of(chunk: list[Token]) -> list[Piece]:
    found = []
    for sample, part in groupby(chunk, key=lambda token: token.sample):
        run = list(part)
        found.append(Piece(sample, run[0].place, [t.token for t in run], run[-1].next))
    return found
